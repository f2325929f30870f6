"""How long pods waited: created → scheduled is the queue, scheduled → started the start. Pure.

A pod that was never scheduled has waited until it ended, or until now. What is not known is not zero: a pod
without the instants of a wait is not counted in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from accountant.inventory.podqueue import queue_of
from accountant.progress import JobKey
from agent.wire import PodFacts


@dataclass(frozen=True, slots=True)
class KnownPod:
    """A pod, with the team and the queue it had when it was made."""

    cluster: str
    team: str
    queue: str
    facts: PodFacts

    @property
    def key(self) -> JobKey:
        """Of the job it belongs to; a pod without a workload is a job of its own."""
        return JobKey(self.cluster, self.facts.namespace, self.facts.workload or f"Pod/{self.facts.name}")


@dataclass(frozen=True, slots=True)
class Waited:
    """One pod. queued_ms: in its queue, still rising while `waiting`. starting_ms: from its node to its first
    container; None where unknown."""

    queued_ms: int | None
    starting_ms: int | None
    waiting: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `pods` waits: median, 95th percentile (nearest rank) and longest, in milliseconds."""

    pods: int
    median_ms: int
    p95_ms: int
    longest_ms: int


def merged(node: PodFacts | None, cluster: PodFacts | None) -> PodFacts:
    """What the pod's node and the API server know of it together: instants of either, the rest of the newer."""
    if node is None or cluster is None:
        one = node or cluster
        assert one is not None
        return one
    newer, older = sorted((node, cluster), key=lambda fact: fact.observed_ms, reverse=True)

    def first(name: str) -> int | None:
        return min((at for at in (getattr(newer, name), getattr(older, name)) if at is not None), default=None)

    return structs.replace(
        newer,
        # The node sees the nearest owner alone, the cluster the whole chain.
        owners=cluster.owners or node.owners,
        workload=cluster.workload or node.workload,
        queue_ref=queue_of(node, cluster),
        labels=newer.labels or older.labels,
        created_ms=first("created_ms"),
        scheduled_ms=first("scheduled_ms"),
        started_ms=first("started_ms"),
        ended_ms=newer.ended_ms if newer.ended_ms is not None else older.ended_ms,
    )


def waited(fact: PodFacts, now_ms: int) -> Waited:
    """Of a pod, by what is known of it."""
    return waited_between(fact.created_ms, fact.scheduled_ms, fact.started_ms, fact.ended_ms, now_ms)


def waited_between(
    created_ms: int | None, scheduled_ms: int | None, started_ms: int | None, ended_ms: int | None, now_ms: int
) -> Waited:
    """Clocks of two machines may differ by a little: a wait is never negative."""
    placed = started_ms if scheduled_ms is None else scheduled_ms
    until = placed if placed is not None else now_ms if ended_ms is None else ended_ms
    queued = None if created_ms is None else max(0, until - created_ms)
    starting = None if scheduled_ms is None or started_ms is None else max(0, started_ms - scheduled_ms)
    return Waited(queued, starting, placed is None and ended_ms is None)


def spread(waits: Iterable[int | None]) -> Spread:
    """Of those that are known; zeros where none is."""
    known = sorted(wait for wait in waits if wait is not None)
    if not known:
        return Spread(0, 0, 0, 0)
    return Spread(len(known), _rank(known, 50), _rank(known, 95), known[-1])


def _rank(ordered: Sequence[int], percent: int) -> int:
    """The nearest rank: the smallest value that at least so many percent do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
