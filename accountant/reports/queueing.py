"""How long pods waited in the queues of a span, as far as it was known by its end.

What happened after the end of the span is left out: a pod that was placed later still waited at the end, so a
month looks the same whenever it is looked at. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from accountant.waits import KnownPod, Spread, Waited, spread, waited
from agent.wire import PodFacts


@dataclass(frozen=True, slots=True)
class WaitRow:
    """pods: those that waited in the span. waiting: still, at its end; their wait so far is among `queued`."""

    queue: str
    team: str
    pods: int
    waiting: int
    queued: Spread
    starting: Spread


def queue_waits(pods: Iterable[KnownPod], start_ms: int, end_ms: int, team: str | None) -> tuple[WaitRow, ...]:
    """By queue, the longest 95th percentile first; pods that were placed before the span are not counted."""
    groups: dict[tuple[str, str], list[Waited]] = defaultdict(list)
    for pod in pods:
        facts = as_of(pod.facts, end_ms)
        placed = next((at for at in (facts.scheduled_ms, facts.started_ms, facts.ended_ms) if at is not None), end_ms)
        created = facts.created_ms
        if team in (None, pod.team) and created is not None and created < end_ms and placed >= start_ms:
            groups[pod.queue, pod.team].append(waited(facts, end_ms))
    rows = [
        WaitRow(
            queue,
            owner,
            len(group),
            sum(one.waiting for one in group),
            spread(one.queued_ms for one in group),
            spread(one.starting_ms for one in group),
        )
        for (queue, owner), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.queued.p95_ms, row.queue, row.team)))


def as_of(facts: PodFacts, at_ms: int) -> PodFacts:
    """What was known of the pod by that instant."""
    instants = {name: getattr(facts, name) for name in ("scheduled_ms", "started_ms", "ended_ms")}
    return structs.replace(
        facts, **{name: at if at is not None and at < at_ms else None for name, at in instants.items()}
    )
