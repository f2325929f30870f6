"""An in-memory cluster whose named operations fail."""

from __future__ import annotations

from gputally.base.errors import Refused, Unavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Event, Kind, Object


class Failing(MemoryCluster):
    """Fails at what it is told to: a verb, or a verb of a kind (`get ConfigMap`)."""

    failing: frozenset[str] = frozenset()
    error: Exception = Unavailable("GET: 503: the server is currently unable to handle the request")

    def _fail(self, *what: str) -> None:
        if self.failing & set(what):
            raise self.error

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        self._fail("get", f"get {kind.kind}")
        return super().get(kind, name, namespace)

    listed: tuple[Kind, ...] = ()

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        self.listed += (kind,)
        self._fail("list", f"list {kind.kind}")
        return super().list(kind, fields=fields)

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        self._fail("patch", f"patch {kind.kind}")
        return super().patch(kind, name, namespace, change, field_manager=field_manager, dry_run=dry_run)

    admit_config_maps = True

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        if obj["kind"] == "ConfigMap" and not self.admit_config_maps:
            raise Refused("PATCH: 403: exceeded quota: objects")
        self._fail(f"apply {obj['kind']}")
        return super().apply(obj, field_manager=field_manager, dry_run=dry_run, subresource=subresource)

    def event(self, event: Event) -> None:
        self._fail("event", f"event {event.kind.kind}")
        super().event(event)
