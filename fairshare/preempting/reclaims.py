"""Who had others stopped for his sake since the last cycle: what the deficit law's price of reclaims is made of.

Counted are workloads, not pods, and only those taken from another queue: acts of the target's scheduler that are
new since the last look (`Observation.evictions`), and our own. The first look counts none: whatever stands there
then is of unknown age. Kept in memory alone; a restart forgets at most one cycle's.

Volcano's scheduler does not say for whom it evicts: there only our own are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from accountant.wire import Policy
from fairshare.kube.mapping import sum_up
from fairshare.model import Eviction, Standing
from fairshare.preempting.effectors import STOPPED
from fairshare.preempting.preempter import PreemptionReport
from fairshare.preempting.victims import key_of

Taken = frozenset[tuple[str, str]]
"""(for which queue, which workload)."""


class Tally:
    """By target. Not made for threads."""

    def __init__(self) -> None:
        self._seen: dict[str, frozenset[str]] = {}
        self._own: dict[str, Taken] = {}

    def note(self, report: PreemptionReport) -> None:
        """What was stopped by us in this cycle, for the next one."""
        queues = {verdict.claimant: verdict.queue for verdict in report.verdicts if verdict.trigger != "idle"}
        self._own[report.target] = frozenset(
            (queues[stop.claimant], key_of(stop.victim.gang))
            for stop in report.stops
            if stop.effect.result in STOPPED
            and queues.get(stop.claimant, stop.victim.gang.queue) != stop.victim.gang.queue
        )

    def count(
        self, policy: Policy, target: str, evictions: Sequence[Eviction], standings: Mapping[str, Standing]
    ) -> dict[str, Standing]:
        """The standings with what is new, descendants' included."""
        before = self._seen.get(target)
        self._seen[target] = frozenset(each.id for each in evictions)
        taken = self._own.pop(target, frozenset())
        if before is not None:
            taken |= {(each.queue, each.victim) for each in evictions if each.id not in before}
        own: dict[str, float] = {}
        for queue, _ in taken:
            own[queue] = own.get(queue, 0.0) + 1.0
        counts = sum_up(policy, own)
        return {queue: replace(each, reclaims=counts.get(queue, 0.0)) for queue, each in standings.items()}
