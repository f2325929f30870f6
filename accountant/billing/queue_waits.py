"""Computes how long pods waited in their queues and until they started.

A pod that was never scheduled has waited until it ended, or until now. If an instant that a wait needs is unknown, the
pod is left out of that figure, because unknown is not zero.

`queue_waits`, which reports use, ignores events after the end of the span: a pod that was placed later still waited at
the end. A past month therefore always has the same result. `pod_wait` uses every instant that it is given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from accountant.ledger.protocols import JobKey, JobPods, QueuedPod
from agent.wire import PodFacts
from gputally.base.pod_stop import FAILED


def existed(facts: PodFacts, start_ms: int, end_ms: int, *, waiting: bool = False, placed: bool = False) -> bool:
    """Whether accountant.ledger.protocols.Moment.pods of a span has the pod. `pods_between.sql` has the same rule."""
    begun, settled = facts.created_ms, (facts.scheduled_ms, facts.started_ms, facts.ended_ms)
    if begun is None and placed:
        begun = min((at for at in settled[:2] if at is not None), default=None)
    if begun is None or begun >= end_ms or (facts.ended_ms is not None and facts.ended_ms <= start_ms):
        return False
    return not waiting or settled == (None, None, None)


def pods_by_job(pods: Iterable[QueuedPod]) -> dict[JobKey, JobPods]:
    """Counts pods by job, without keeping them."""
    found: dict[JobKey, JobPods] = {}
    for pod in pods:
        key, facts = pod.key, pod.facts
        count, ended, placed, *waits, created, failed = found.get(key, JobPods(0, 0, 0, None, None, None, None))
        is_placed = facts.scheduled_ms is not None or facts.started_ms is not None
        since = facts.created_ms if not is_placed and facts.ended_ms is None else None
        queued = pod_wait(facts, 0).queued_ms if since is None else None
        found[key] = JobPods(
            count + 1, ended + (facts.ended_ms is not None), placed + (is_placed and facts.ended_ms is None),
            max((wait for wait in (waits[0], queued) if wait is not None), default=None),
            min((at for at in (waits[1], since) if at is not None), default=None),
            max((at for at in (created, facts.created_ms) if at is not None), default=None),
            max((at for at in (failed, failed_ms(facts)) if at is not None), default=None),
        )  # fmt: skip
    return found


def failed_ms(facts: PodFacts) -> int | None:
    """When the pod ended, if a container of it ended with an error."""
    return facts.ended_ms if facts.stop is not None and facts.stop.how == FAILED else None


@dataclass(frozen=True, slots=True)
class PodWait:
    """The waits of one pod; None if unknown.

    queued_ms: time in its queue, still increasing while `waiting`.
    starting_ms: time from its placement to its first container."""

    queued_ms: int | None
    starting_ms: int | None
    waiting: bool


@dataclass(frozen=True, slots=True)
class WaitStatistics:
    """Statistics of `pods` waits: mean (rounded down), median, 95th percentile (nearest rank) and longest, in
    milliseconds."""

    pods: int
    mean_ms: int
    median_ms: int
    p95_ms: int
    longest_ms: int


def pod_wait(fact: PodFacts, now_ms: int) -> PodWait:
    """Computes the waits of a pod from the instants in its facts.

    The clocks of two machines may differ slightly, so a negative wait becomes 0."""
    created, scheduled, started = fact.created_ms, fact.scheduled_ms, fact.started_ms
    placed = started if scheduled is None else scheduled
    until = placed if placed is not None else now_ms if fact.ended_ms is None else fact.ended_ms
    queued = None if created is None else max(0, until - created)
    starting = None if scheduled is None or started is None else max(0, started - scheduled)
    return PodWait(queued, starting, placed is None and fact.ended_ms is None)


def wait_statistics(waits: Iterable[int | None]) -> WaitStatistics:
    """Statistics of the known waits; zeros if there are none."""
    known = sorted(wait for wait in waits if wait is not None)
    if not known:
        return WaitStatistics(0, 0, 0, 0, 0)
    return WaitStatistics(len(known), sum(known) // len(known), _rank(known, 50), _rank(known, 95), known[-1])


def _rank(ordered: Sequence[int], percent: int) -> int:
    """The nearest rank: the smallest value that is at least as large as that percentage of the values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass(frozen=True, slots=True)
class WaitRow:
    """The waits of one queue.

    pods: number of pods that waited in the span.
    waiting: number of pods still waiting at its end. Their wait so far is part of `queued`. None: unknown, because
        nobody reads pods that are on no node."""

    queue: str
    team: str
    pods: int
    waiting: int | None
    queued: WaitStatistics
    starting: WaitStatistics


def waits_within(pods: Iterable[QueuedPod], start_ms: int, end_ms: int) -> Iterator[tuple[QueuedPod, PodWait]]:
    """The pods that waited in the span, each with its wait as it was known at the span's end: of what happened later
    nothing is counted, and a pod that was placed before the span did not wait in it."""
    for pod in pods:
        created = pod.facts.created_ms
        if created is None or created >= end_ms:
            continue
        instants = {name: getattr(pod.facts, name) for name in ("scheduled_ms", "started_ms", "ended_ms")}
        known = {name: at if at is not None and at < end_ms else None for name, at in instants.items()}
        placed = next((at for at in known.values() if at is not None), end_ms)
        if placed >= start_ms:
            yield pod, pod_wait(structs.replace(pod.facts, **known), end_ms)


def queue_waits(
    pods: Iterable[QueuedPod], start_ms: int, end_ms: int, team: str | None, *, watched: str
) -> tuple[WaitRow, ...]:
    """One row per queue, the one with the longest 95th percentile first. watched: the cluster of which pods are read
    that are on no node (`kubernetes.inventory`), "" for none; agents report only those that are on theirs."""
    groups: dict[tuple[str, str], list[PodWait]] = defaultdict(list)
    clusters: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pod, wait in waits_within(pods, start_ms, end_ms):
        if team in (None, pod.team):
            groups[pod.queue, pod.team].append(wait)
            clusters[pod.queue, pod.team].add(pod.cluster)
    rows = [
        WaitRow(
            queue,
            owner,
            len(group),
            sum(one.waiting for one in group) or (0 if watched and clusters[queue, owner] == {watched} else None),
            wait_statistics(one.queued_ms for one in group),
            wait_statistics(one.starting_ms for one in group),
        )
        for (queue, owner), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.queued.p95_ms, row.queue, row.team)))
