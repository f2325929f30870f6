"""Derives a node's facts from its labels, and its down times from conditions, taints and the maintenance calendar.

`described` reads labels, and `seen` continues a node's history with one more observation. A down time begins at the
time that the cluster reports (a condition's transition, a taint's time), otherwise when it was first seen. The same
rule applies to its end.

Repeated maintenance follows a cron expression in its own time zone, so `0 6 * * sun` is at six in the morning on both
sides of a clock change. Only maintenance that has begun is returned, because planned maintenance may be cancelled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Literal
from zoneinfo import ZoneInfo

from croniter import croniter

from accountant.core.periods import zone
from accountant.ledger.protocols import Down, NodeFacts
from accountant.wire.dimensions import DECLARED, OF_LABELS
from gputally.base.gpu_model_names import gpu_model_of_node
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.pod_queue_labels import shard_labels

CapacityType = Literal["on-demand", "spot", "reserved", "on-prem", ""]

_CAPACITY: tuple[tuple[str, Mapping[str, CapacityType]], ...] = (
    (
        "gputally.dev/capacity-type",
        {"on-demand": "on-demand", "spot": "spot", "reserved": "reserved", "on-prem": "on-prem"},
    ),
    ("karpenter.sh/capacity-type", {"on-demand": "on-demand", "spot": "spot", "reserved": "reserved"}),
    ("eks.amazonaws.com/capacityType", {"on_demand": "on-demand", "spot": "spot", "capacity_block": "reserved"}),
    ("cloud.google.com/gke-spot", {"true": "spot"}),
    ("cloud.google.com/gke-preemptible", {"true": "spot"}),
    (
        "cloud.google.com/gke-provisioning",
        {"standard": "on-demand", "spot": "spot", "preemptible": "spot", "reservation": "reserved"},
    ),
    ("kubernetes.azure.com/scalesetpriority", {"spot": "spot", "regular": "on-demand"}),
)
_ONLY_SPOT_LABELLED = ("cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool")
"""Labels of clouds that label the capacity type only of nodes that are *not* on demand."""

NOT_READY = "NotReady"
CORDONED = "cordoned"


@dataclass(frozen=True, slots=True)
class NodeObservation:
    """One observation of a node.

    ready_since_ms: last change of its condition, None if unknown.
    cordoned_ms: when it was cordoned, None if unknown.
    uid, provider_id, boot_id: identify the Node object, the machine and its boot; "" if unknown.
    created_ms: when the Node object was created, None if unknown."""

    cluster: str
    name: str
    labels: Mapping[str, str]
    ready: bool = True
    ready_since_ms: int | None = None
    cordoned: bool = False
    cordoned_ms: int | None = None
    provider_id: str = ""
    uid: str = ""
    boot_id: str = ""
    created_ms: int | None = None


def described(cluster: str, name: str, labels: Mapping[str, str]) -> NodeFacts:
    """The pool, location, capacity type and hardware that a node's labels state; "" for what no label states."""
    told = {dimension: _first(labels, DECLARED[dimension].labels) for dimension in OF_LABELS}
    told["pool"] = told["pool"] or _first(labels, shard_labels())
    told["capacity_type"] = capacity_type(labels)
    node = NodeFacts(cluster, name, shard=_first(labels, shard_labels()), gpu_model=gpu_model_of_node(labels))
    return node.with_values(told)


def capacity_type(labels: Mapping[str, str]) -> CapacityType:
    """How the node is paid for; "" if no label states or implies it."""
    for key, meaning in _CAPACITY:
        found = meaning.get(labels.get(key, "").lower())
        if found:
            return found
    return "on-demand" if any(labels.get(key) for key in _ONLY_SPOT_LABELLED) else ""


def seen(before: NodeFacts | None, sight: NodeObservation, now_ms: int) -> NodeFacts:
    """The node after one more observation; its history continues."""
    down: Sequence[Down] = before.down if before is not None else ()
    began = sight.ready_since_ms if sight.ready_since_ms is not None else now_ms
    down = _continued(down, NOT_READY, not sight.ready, began, began, now_ms)
    cordoned_ms = sight.cordoned_ms if sight.cordoned_ms is not None else now_ms
    down = _continued(down, CORDONED, sight.cordoned, cordoned_ms, now_ms, now_ms)
    node = described(sight.cluster, sight.name, sight.labels)
    return replace(
        node,
        down=tuple(down),
        provider_id=sight.provider_id,
        uid=sight.uid or (before.uid if before is not None else ""),
        boot_id=sight.boot_id or (before.boot_id if before is not None else ""),
        renewed_ms=_renewed(before, sight, now_ms) if before is not None else (),
    )


MAX_RENEWED = 2_000


def _renewed(before: NodeFacts, sight: NodeObservation, now_ms: int) -> tuple[int, ...]:
    """The instants at which another machine got the node's name or its machine booted again, including this observation
    if it shows that. Of more than `MAX_RENEWED`, the newest replaces the one before it."""
    replaced = before.deleted_ms is not None or _differ(before.uid, sight.uid)
    if not (replaced or _differ(before.provider_id, sight.provider_id) or _differ(before.boot_id, sight.boot_id)):
        return before.renewed_ms
    newest_ms = before.renewed_ms[-1] if before.renewed_ms else 0
    created_ms = sight.created_ms if replaced and sight.created_ms is not None else now_ms
    at_ms = created_ms if newest_ms < created_ms < now_ms else max(now_ms, newest_ms)
    return (*(instant for instant in before.renewed_ms[: MAX_RENEWED - 1] if instant < at_ms), at_ms)


def booted(before: NodeFacts | None, cluster: str, name: str, boot_id: str, now_ms: int) -> NodeFacts | None:
    """The node after its agent reported under this boot; None if that is not new, or if an inventory reads the node's
    boots itself."""
    if not boot_id or (before is not None and (before.uid or before.boot_id == boot_id)):
        return None
    node = before or NodeFacts(cluster, name, listed=False)
    return replace(node, boot_id=boot_id, renewed_ms=_at_most((*node.renewed_ms, now_ms) if node.boot_id else ()))


def with_reports(node: NodeFacts, before: NodeFacts | None) -> NodeFacts:
    """An inventory's facts of a node, with what its agent said of itself and the boots that were known before."""
    if before is not None and node.agent is None and before.agent is not None:
        node = replace(node, agent=before.agent)
    if before is None or (before.boot_id, before.renewed_ms) == (node.boot_id, node.renewed_ms):
        return node
    boot_id = node.boot_id or before.boot_id
    return replace(node, boot_id=boot_id, renewed_ms=_at_most((*before.renewed_ms, *node.renewed_ms)))


def _at_most(renewed_ms: Iterable[int]) -> tuple[int, ...]:
    """At most `MAX_RENEWED` instants, in order: the first ones and the newest."""
    instants = sorted(set(renewed_ms))
    return (*instants[: MAX_RENEWED - 1], *instants[MAX_RENEWED - 1 :][-1:])


def _differ(known: str, seen_now: str) -> bool:
    return known != "" and seen_now not in ("", known)


def deleted_node(before: NodeFacts, at_ms: int) -> NodeFacts:
    """The node after its deletion, which also ends open down times."""
    if before.deleted_ms is not None:
        return before
    ended = tuple(replace(d, end_ms=max(at_ms, d.start_ms + 1)) if d.end_ms is None else d for d in before.down)
    return replace(before, down=ended, deleted_ms=at_ms)


def merge_nodes(first: NodeFacts, second: NodeFacts) -> NodeFacts:
    """Combines two inventories' facts of one node: `first` takes precedence, and both contribute down times."""
    texts = ("gpu_model", "shard", "provider_id", "uid", "boot_id")
    told = {name: getattr(first, name) or getattr(second, name) for name in texts}
    deleted_ms = first.deleted_ms if first.deleted_ms is not None else second.deleted_ms
    return replace(
        first.with_values({**second.values, **first.values}),
        **told,
        down=_in_order({*first.down, *second.down}),
        deleted_ms=deleted_ms,
        renewed_ms=tuple(sorted({*first.renewed_ms, *second.renewed_ms})),
    )


def _in_order(down: Iterable[Down]) -> tuple[Down, ...]:
    """Down times by start, then by end; one without an end is last."""
    return tuple(sorted(down, key=lambda one: (one.start_ms, one.end_ms or 2**62, one.reason)))


def _continued(
    down: Sequence[Down], reason: str, holds: bool, began_ms: int, ended_ms: int, now_ms: int
) -> Sequence[Down]:
    """Begins or ends the open down time of one reason. Reported times are at most now."""
    still = next((d for d in down if d.reason == reason and d.end_ms is None), None)
    if holds and still is None:
        return (*down, Down(min(began_ms, now_ms), None, reason))
    if not holds and still is not None:
        end = min(ended_ms, now_ms)
        # A transition before the down time began belongs to an earlier one; then the time of this observation is used.
        end = end if end > still.start_ms else max(now_ms, still.start_ms + 1)
        return tuple(replace(d, end_ms=end) if d is still else d for d in down)
    return down


def _first(labels: Mapping[str, str], keys: Sequence[str]) -> str:
    return next((labels[key] for key in keys if labels.get(key)), "")


MOST_SPANS = 2_000
"""Maximum number of repetitions of one entry, the newest ones: years of daily maintenance."""


@dataclass(frozen=True, slots=True)
class PlannedMaintenance:
    """One maintenance entry.

    end_ms: None for an unlimited time, or unlimited repetition.
    every, for_s: cron expression and length in seconds of a repetition; both None for maintenance that is once."""

    cluster: str
    nodes: tuple[str, ...]
    pools: tuple[str, ...]
    start_ms: int
    end_ms: int | None
    reason: str = "maintenance"
    every: str | None = None
    for_s: int | None = None
    timezone: str = "UTC"

    def check(self) -> None:
        """Raises ValueError with the reason if the entry is inconsistent."""
        if not self.nodes and not self.pools:
            raise ValueError("the maintenance entry needs nodes or pools")
        if self.end_ms is not None and self.end_ms <= self.start_ms:
            raise ValueError("ends at or before it begins")
        if (self.every is None) != (self.for_s is None):
            raise ValueError("set both every and for, or neither")
        if self.every is not None and not croniter.is_valid(self.every):
            raise ValueError(f"not a cron expression: {self.every!r} (write for example '0 6 * * sun')")
        zone(self.timezone)

    def concerns(self, node: NodeFacts) -> bool:
        return node.cluster == self.cluster and (
            node.pool in self.pools or any(fnmatchcase(node.name, pattern) for pattern in self.nodes)
        )

    def spans(self, now_ms: int) -> tuple[Down, ...]:
        """The maintenance times that have begun by now, ascending."""
        if self.every is None:
            return (Down(self.start_ms, self.end_ms, self.reason),) if self.start_ms <= now_ms else ()
        return tuple(reversed([*self._repeated(now_ms)]))

    def _repeated(self, now_ms: int) -> Iterator[Down]:
        assert self.every is not None
        assert self.for_s is not None
        until = now_ms if self.end_ms is None else min(now_ms, self.end_ms - 1)
        last = datetime.fromtimestamp(until / MS_PER_SECOND, ZoneInfo(self.timezone))
        # croniter excludes an occurrence that is exactly now, but it counts here.
        before = croniter(self.every, last)
        at: datetime = before.get_next(datetime)
        for _ in range(MOST_SPANS + 1):
            start = round(at.timestamp() * MS_PER_SECOND)
            if start < self.start_ms:
                return
            if start <= until:
                end = start + self.for_s * MS_PER_SECOND
                yield Down(start, end if self.end_ms is None else min(end, self.end_ms), self.reason)
            at = before.get_prev(datetime)


@dataclass(frozen=True, slots=True)
class Calendar:
    """All entries of a file."""

    entries: tuple[PlannedMaintenance, ...] = ()

    def applied(self, nodes: Collection[NodeFacts], now_ms: int) -> list[NodeFacts]:
        """The nodes with their planned down times added."""
        if not self.entries:
            return list(nodes)
        spans = [(entry, entry.spans(now_ms)) for entry in self.entries]
        with_planned = []
        for node in nodes:
            planned = {down for entry, downs in spans if entry.concerns(node) for down in downs}
            with_planned.append(replace(node, down=_in_order({*node.down, *planned})) if planned else node)
        return with_planned
