"""How long pods waited in the queues of a span, as far as it was known by its end.

What happened after the end of the span is left out: a pod that was placed later still waited at the end, so a
month looks the same whenever it is looked at. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from accountant.work.waits import KnownPod, Spread, Waited, spread, waited_between


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
        facts = pod.facts
        created = facts.created_ms
        if team not in (None, pod.team) or created is None or created >= end_ms:
            continue
        scheduled, started, ended = (
            at if at is not None and at < end_ms else None
            for at in (facts.scheduled_ms, facts.started_ms, facts.ended_ms)
        )
        placed = next((at for at in (scheduled, started, ended) if at is not None), end_ms)
        if placed >= start_ms:
            groups[pod.queue, pod.team].append(waited_between(created, scheduled, started, ended, end_ms))
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
