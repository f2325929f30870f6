"""Which queue a pod counts for: the one that it had when it was placed. Pure.

A scheduler reads a pod's queue once, as it places the pod; the pod's owner can write another into its labels at any
time. So the earliest observation of a placed pod settles the queue, and nothing that is booked is paid by another
queue because somebody changed a label. Before, the newest word counts. What an administrator changes still counts: the
ClusterQueue and the cohorts behind a Kueue queue.
"""

from __future__ import annotations

from msgspec import structs

from agent.units import MS_PER_HOUR
from agent.wire import PodFacts

LATE_MS = MS_PER_HOUR
"""So long after its start a pod's queue may still be found out through its owners, where it has none itself."""


class ObservedPod(PodFacts, frozen=True, kw_only=True):
    """What one observer knows of a pod. queue_ms: since when `queue_ref` is settled; None: not yet."""

    queue_ms: int | None = None


def observed(fact: PodFacts, *, through_owners: bool) -> ObservedPod:
    """One observation. through_owners: by who also reads the pod's owners, which can take a while."""
    begun = next((at for at in (fact.scheduled_ms, fact.started_ms) if at is not None), None)
    open_ = through_owners and not fact.queue_ref and begun is not None and fact.observed_ms <= begun + LATE_MS
    known = getattr(fact, "queue_ms", None)
    if known is None and begun is not None and not open_:
        known = fact.observed_ms
    values = {name: getattr(fact, name) for name in PodFacts.__struct_fields__}
    return ObservedPod(**values, queue_ms=known)


def merged(one: ObservedPod, other: ObservedPod) -> ObservedPod:
    """Two observations of one observer: the newer, with the queue that was settled first."""
    newer, older = sorted((one, other), key=_order, reverse=True)
    told = [fact for fact in (newer, older) if fact.queue_ms is not None]
    if not told:
        return newer
    first = min(told, key=lambda fact: (fact.queue_ms, _base(fact.queue_ref), -fact.observed_ms))
    same = [fact for fact in (newer, older) if _base(fact.queue_ref) == _base(first.queue_ref)]
    return structs.replace(newer, queue_ref=same[0].queue_ref, queue_ms=first.queue_ms)


def queue_of(node: PodFacts | None, cluster: PodFacts | None) -> str:
    """Of a pod, by what its node and the API server say; `store/sql/holder_origins.sql` says the same."""
    if cluster is None or not cluster.queue_ref:
        return node.queue_ref if node is not None else ""
    if node is None or node.queue_ref in ("", cluster.queue_ref) or cluster.queue_ref.startswith(f"{node.queue_ref}@"):
        return cluster.queue_ref
    return cluster.queue_ref if _rank(cluster) <= _rank(node) else node.queue_ref


def _rank(fact: PodFacts) -> int:
    """The earlier settled first; behind them all the newest word."""
    settled = getattr(fact, "queue_ms", None)
    return settled if settled is not None else UNSETTLED - fact.observed_ms


UNSETTLED = 9_000_000_000_000_000
"""Behind every instant."""


def _base(queue_ref: str) -> str:
    """Without what an administrator decides."""
    return queue_ref.partition("@")[0]


def _order(fact: ObservedPod) -> tuple[object, ...]:
    """Between equally new observations any, but always the same one."""
    return fact.observed_ms, repr(structs.replace(fact, queue_ref="", queue_ms=None)), fact.queue_ref
