"""Where the controller's pages find ended sessions: in a ConfigMap that all its replicas read, or at the accountant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fairshare.usage.accountant_client import AccountantApi
from gputally.base.errors import AccountantUnavailable, ClusterError, NotFound
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Object
from gputally.server.tokens_and_grants import AuthorityUnavailable

_FIELD_MANAGER = "gputally-fairshare-pages"


@dataclass(frozen=True, slots=True)
class AccountantSessions:
    """Implements `gputally.server.ended_sessions.SessionStore` for pages at the accountant's address, where people sign
    out at the accountant alone."""

    client: AccountantApi

    def load(self) -> Mapping[str, int]:
        try:
            return self.client.ended_sessions()
        except AccountantUnavailable as error:
            raise AuthorityUnavailable(f"ended sessions cannot be read: {error}") from error

    def change(self, added: Mapping[str, int], removed: frozenset[str]) -> None:  # noqa: ARG002  # the protocol's
        if added:
            raise AuthorityUnavailable("sessions end at the accountant's pages")


@dataclass(frozen=True, slots=True)
class SessionConfigMap:
    """Implements `gputally.server.ended_sessions.SessionStore`. Replicas change single keys, so none loses what another
    one wrote."""

    cluster: Cluster
    namespace: str
    name: str

    def load(self) -> Mapping[str, int]:
        try:
            data: Mapping[str, str] = self.cluster.get(CONFIG_MAP, self.name, self.namespace).get("data") or {}
        except NotFound:
            return {}
        except ClusterError as error:
            raise AuthorityUnavailable(f"ended sessions cannot be read: {error}") from error
        return {
            session: int(until)
            for session, until in data.items()
            if until.isascii() and until.isdigit() and len(until) < 16
        }

    def change(self, added: Mapping[str, int], removed: frozenset[str]) -> None:
        new = {session: str(until_ms) for session, until_ms in added.items()}
        try:
            try:
                self._patch({"data": new | dict.fromkeys(removed - added.keys())})
            except NotFound:
                metadata = {"name": self.name, "namespace": self.namespace}
                obj = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.kind, "metadata": metadata, "data": new}
                self.cluster.create(obj, field_manager=_FIELD_MANAGER)
        except ClusterError as error:
            raise AuthorityUnavailable(f"ended sessions cannot be stored: {error}") from error

    def _patch(self, change: Object) -> None:
        self.cluster.patch(CONFIG_MAP, self.name, self.namespace, change, field_manager=_FIELD_MANAGER)
