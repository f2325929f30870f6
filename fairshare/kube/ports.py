"""What the controller needs of the world: a Kubernetes API and the accountant, as two protocols.

Implemented by `fairshare.cluster.KubernetesCluster` and `fairshare.kube.memory.MemoryCluster`, and by
`fairshare.client.AccountantClient`; whoever composes hands them to the Controller. Objects are plain
JSON-like dictionaries. There is deliberately no way to force another value on a field that somebody else
owns (law "own only your fields"); `transfer` takes one over as it stands, when a person asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from accountant.wire import Accounts, BudgetState, Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from fairshare.kube.kinds import CONFIG_MAP, NODE, POD, Kind, Object

__all__ = [
    "CONFIG_MAP",
    "NODE",
    "POD",
    "AccountantPort",
    "Change",
    "Cluster",
    "Event",
    "Kind",
    "Object",
    "Objects",
    "Readable",
]


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


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a watch. BOOKMARK: nothing changed, `obj` only says how far the server has come."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    obj: Object


class Readable(Protocol):
    """Objects that are read. Every method raises NotFound, Refused or Unavailable of fairshare.errors."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        """All objects of the kind, in every namespace, sorted by (namespace, name). fields: only those that a field
        selector takes, such as `reason=Evict`.

        NotFound when the kind itself (its CRD) is not there."""
        ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """One object."""
        ...


class Objects(Readable, Protocol):
    """Where a target's weights stand, as objects: a Kubernetes API server, or what is made to look like one
    (`fairshare.runai`). Every method raises NotFound, Refused or Unavailable of fairshare.errors."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Server-side apply of the fields in `obj`; returns the object as it then stands (or would stand).

        Fields the manager applied before and now leaves out are removed. A `metadata.resourceVersion`
        makes it conditional. Raises Conflict naming the owners of contested fields; nothing is written."""
        ...

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Take the fields in `obj` over from their managers, at the values that stand: the one way to own what
        somebody else owned, for a person who asks for it. `obj` names its resourceVersion. Raises Conflict
        where a value is another by now; nothing is written."""
        ...


class Cluster(Objects, Protocol):
    """A Kubernetes API server."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        """As above, or of a subresource such as `status`."""
        ...

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str:
        """Hand every object of the kind to `take`, page by page, keeping none; returns the version to watch from."""
        ...

    def watch(self, kind: Kind, version: str, timeout_s: float, /) -> Iterator[Change]:
        """What changed after `version`, as it happens; ends after `timeout_s`. Raises Gone for a version too old."""
        ...

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        """Merge `change` into one object, for fields that many write in turn (a Workload's `spec.active`).

        A `metadata.uid` or `metadata.resourceVersion` in it makes it conditional: Conflict where it is another."""
        ...

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Make an object, named by the server where it has `metadata.generateName`. Conflict where it exists."""
        ...

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        """Evict a pod through its disruption budgets; one already on its way out is a success.

        Raises NotFound where it is gone, Blocked where a budget says not now, Conflict where the uid is
        another pod's (which has cost the budget one disruption: compare the uid before), Refused where more
        than one budget claims it."""
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

    def budgets(self) -> Sequence[BudgetState]:
        """Budgets of the policy in force, and what this month has used of them."""
        ...

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> Mapping[tuple[str, str], Accounts]:
        """GPU time by (namespace, name) over the span, of these pods (none: of all). A name that several clusters
        have at the time is left out."""
        ...

    def lost_gpus(self, start_ms: int, end_ms: int) -> Mapping[str, int]:
        """GPUs that were lost for the whole of the span on a node in service, by node. A name that several clusters
        have at the time is left out."""
        ...

    def metered_nodes(self, start_ms: int, end_ms: int) -> Collection[str]:
        """Nodes whose GPUs the ledger knows of over the span, by name; where no cluster is named, of whatever one."""
        ...

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        """Keep what was decided. Idempotent by `Decision.id`."""
        ...
