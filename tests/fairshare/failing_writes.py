"""A cluster in memory in which one write fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gputally.base.errors import ClusterRefused, ClusterUnavailable, Conflict
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Event, Object

FAULTS: list[tuple[Exception, bool]] = [
    (ClusterUnavailable("timeout"), True),
    (ClusterUnavailable("503"), False),
    (ClusterRefused("403"), False),
    (Conflict("409"), False),
]
"""What a write can meet, and whether it is carried out all the same."""


class FaultAt(MemoryCluster):
    """A cluster in which one write fails: the first before 0, the second before 1, …, carried out or not. Dry runs do
    not count."""

    error: Exception = ClusterUnavailable("timeout")
    at: int | None = None
    carried_out = False
    writes = 0

    def _write(self, act: Callable[[], Any]) -> Any:
        self.writes += 1
        if self.at != self.writes - 1:
            return act()
        if self.carried_out:
            act()
        raise self.error

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        def act() -> Object:
            return super(FaultAt, self).apply(
                obj, field_manager=field_manager, dry_run=dry_run, subresource=subresource
            )

        return act() if dry_run else self._write(act)  # type: ignore[no-any-return]

    def patch(self, *args: Any, dry_run: bool = False, **named: Any) -> Object:
        def act() -> Object:
            return super(FaultAt, self).patch(*args, dry_run=dry_run, **named)

        return act() if dry_run else self._write(act)  # type: ignore[no-any-return]

    def create(self, *args: Any, **named: Any) -> Object:
        return self._write(lambda: super(FaultAt, self).create(*args, **named))  # type: ignore[no-any-return]

    def evict(self, *args: Any, dry_run: bool = False, **named: Any) -> None:
        def act() -> None:
            super(FaultAt, self).evict(*args, dry_run=dry_run, **named)

        if dry_run:
            act()
        else:
            self._write(act)

    def event(self, event: Event) -> None:
        self._write(lambda: super(FaultAt, self).event(event))
