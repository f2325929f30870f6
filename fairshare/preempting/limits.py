"""How much preemption is too much: what was stopped before, and what may be stopped still. Pure.

Three limits hold at once: workloads of one team in an hour, workloads of the cluster in an hour, and
GPU-hours of work lost in a day. Beside them a workload that has been preempted is left alone for a while.
What was only tried (dry-run) counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from accountant.preempting import PreemptionPolicy
from agent.units import MS_PER_SECOND

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


Limit = Literal["cool-down", "per-team", "per-cluster", "lost-hours"]
"""What kept somebody from being stopped."""


@dataclass(frozen=True, slots=True)
class Denial:
    """reason: in words."""

    limit: Limit
    reason: str


@dataclass(frozen=True, slots=True)
class Past:
    """One workload (or a part of it) that gave way. team: who pays for it, its queue where none is named.
    decision: by whose id it was made."""

    at_ms: int
    key: str
    queue: str
    team: str
    gpus: float
    lost_gpu_hours: float
    decision: str = ""


def kept(past: Sequence[Past], now_ms: int, cool_down_s: int) -> tuple[Past, ...]:
    """What any limit still asks for, oldest first."""
    since = now_ms - max(DAY_MS, cool_down_s * MS_PER_SECOND)
    return tuple(sorted((each for each in past if each.at_ms > since), key=lambda each: (each.at_ms, each.key)))


class Budget:
    """What may still be stopped now. Grows smaller with every `spend`; a copy goes its own way."""

    def __init__(self, rules: PreemptionPolicy, past: Sequence[Past], now_ms: int) -> None:
        self._rules = rules
        self.now_ms = now_ms
        self._past = list(kept(past, now_ms, rules.cool_down))

    def copy(self) -> Budget:
        return Budget(self._rules, self._past, self.now_ms)

    def spend(self, past: Past) -> None:
        self._past.append(past)

    def refusal(self, key: str, team: str, lost_gpu_hours: float) -> Denial | None:
        """Why this one may not be stopped now; None: it may.

        More parts of a workload that is being stopped in the same moment are no new workload."""
        rules = self._rules
        before = [each for each in self._past if each.key == key and each.at_ms < self.now_ms]
        last = max((each.at_ms for each in before), default=None)
        if last is not None and self.now_ms - last < rules.cool_down * MS_PER_SECOND:
            ago = (self.now_ms - last) // (60 * MS_PER_SECOND)
            text = f"it was preempted {ago} min ago, and is left alone for {rules.cool_down // 60} min"
            return Denial("cool-down", text)
        hour = [each for each in self._past if each.at_ms > self.now_ms - HOUR_MS]
        if not any(each.key == key and each.at_ms == self.now_ms for each in hour):
            theirs = len({(each.key, each.at_ms) for each in hour if each.team == team})
            if theirs >= rules.per_team:
                text = f"{theirs} workloads of team {team} were stopped within the hour, and no more may be"
                return Denial("per-team", text)
            everyone = len({(each.key, each.at_ms) for each in hour})
            if everyone >= rules.per_cluster:
                text = f"{everyone} workloads of the cluster were stopped within the hour, and no more may be"
                return Denial("per-cluster", text)
        lost = fsum(each.lost_gpu_hours for each in self._past if each.at_ms > self.now_ms - DAY_MS)
        if lost + lost_gpu_hours > rules.lost_gpu_hours:
            return Denial(
                "lost-hours",
                f"{lost:.1f} GPU-hours of work were lost within the day, and with its {lost_gpu_hours:.1f} that would"
                f" be more than the {rules.lost_gpu_hours:g} allowed",
            )
        return None
