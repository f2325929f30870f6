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
    """What may still be stopped now. Grows smaller with every `spend`; a copy goes its own way.

    It is asked for every workload that comes into question, thousands of times a cycle: everything a limit compares
    is kept added up, the lost work as exactly as `math.fsum` of all its parts."""

    def __init__(self, rules: PreemptionPolicy, past: Sequence[Past], now_ms: int) -> None:
        self._rules = rules
        self.now_ms = now_ms
        self._last_ms: dict[str, int] = {}
        self._going: set[str] = set()
        self._hour: set[tuple[str, int]] = set()
        self._by_team: dict[str, set[tuple[str, int]]] = {}
        self._lost: list[float] = []
        for each in kept(past, now_ms, rules.cool_down):
            self.spend(each)

    def copy(self) -> Budget:
        other = Budget(self._rules, (), self.now_ms)
        other._last_ms, other._going, other._hour = dict(self._last_ms), set(self._going), set(self._hour)
        other._by_team = {team: set(stopped) for team, stopped in self._by_team.items()}
        other._lost = list(self._lost)
        return other

    def spend(self, past: Past) -> None:
        act = (past.key, past.at_ms)
        if past.at_ms < self.now_ms:
            self._last_ms[past.key] = max(past.at_ms, self._last_ms.get(past.key, past.at_ms))
        elif past.at_ms == self.now_ms:
            self._going.add(past.key)
        if past.at_ms > self.now_ms - HOUR_MS:
            self._hour.add(act)
            self._by_team.setdefault(past.team, set()).add(act)
        if past.at_ms > self.now_ms - DAY_MS:
            _add(self._lost, past.lost_gpu_hours)

    def refusal(self, key: str, team: str, lost_gpu_hours: float) -> Denial | None:
        """Why this one may not be stopped now; None: it may.

        More parts of a workload that is being stopped in the same moment are no new workload."""
        rules = self._rules
        last = self._last_ms.get(key)
        if last is not None and self.now_ms - last < rules.cool_down * MS_PER_SECOND:
            ago = (self.now_ms - last) // (60 * MS_PER_SECOND)
            text = f"it was preempted {ago} min ago, and is left alone for {rules.cool_down / 60:g} min"
            return Denial("cool-down", text)
        if key not in self._going:
            theirs = len(self._by_team.get(team, ()))
            if theirs >= rules.per_team:
                text = f"{theirs} workloads of team {team} were stopped within the hour, and no more may be"
                return Denial("per-team", text)
            everyone = len(self._hour)
            if everyone >= rules.per_cluster:
                text = f"{everyone} workloads of the cluster were stopped within the hour, and no more may be"
                return Denial("per-cluster", text)
        lost = fsum(self._lost)
        if lost + lost_gpu_hours > rules.lost_gpu_hours:
            return Denial(
                "lost-hours",
                f"{lost:.1f} GPU-hours of work were lost within the day, and with its {lost_gpu_hours:.1f} that would"
                f" be more than the {rules.lost_gpu_hours:g} allowed",
            )
        return None


def _add(parts: list[float], value: float) -> None:
    """Add to a sum that is kept as a few numbers that do not overlap, so that nothing of it is rounded away
    (Shewchuk 1997, "Adaptive precision floating-point arithmetic")."""
    kept_parts = 0
    for part in parts:
        large, small = (value, part) if abs(value) >= abs(part) else (part, value)
        value = large + small
        rest = small - (value - large)
        if rest:
            parts[kept_parts] = rest
            kept_parts += 1
    parts[kept_parts:] = [value]
