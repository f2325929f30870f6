"""What the controller needs of the world: a Kubernetes API and the accountant, as two protocols.

Implemented by `fairshare.cluster.KubernetesCluster` and `fairshare.memory.MemoryCluster`, and by
`fairshare.client.AccountantClient`; whoever composes hands them to the Controller. Objects are plain
JSON-like dictionaries. There is deliberately no way to force a write here: a field that somebody else
owns stays his (law "own only your fields").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from accountant.wire import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from fairshare.kinds import CONFIG_MAP, NODE, POD, Kind, Object

__all__ = ["CONFIG_MAP", "NODE", "POD", "AccountantPort", "Cluster", "Event", "Kind", "Object"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person looking at the object should read. namespace "": a cluster-scoped object.

    Repeating the same (object, reason, message) is one event, not two."""

    kind: Kind
    name: str
    namespace: str
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    at_ms: int


class Cluster(Protocol):
    """A Kubernetes API server. Every method raises NotFound, Refused or Unavailable of fairshare.errors."""

    def list(self, kind: Kind) -> Sequence[Object]:
        """All objects of the kind, in every namespace, sorted by (namespace, name).

        NotFound when the kind itself (its CRD) is not there."""
        ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """One object."""
        ...

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        """Server-side apply of the fields in `obj`; returns the object as it then stands (or would stand).

        Fields the manager applied before and now leaves out are removed. A `metadata.resourceVersion`
        makes it conditional. Raises Conflict naming the owners of contested fields; nothing is written."""
        ...

    def event(self, event: Event) -> None:
        """Record an event."""
        ...


class AccountantPort(Protocol):
    """The accountant's HTTP interface. Every method raises AccountantUnavailable."""

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        """Usage per queue over the window that ends (or is current) at `at_ms`."""
        ...

    def put_policy(self, policy: Policy) -> PolicyVersion:
        """Make the policy known; the same content again changes nothing."""
        ...

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        """Keep what was decided. Idempotent by `Decision.id`."""
        ...
