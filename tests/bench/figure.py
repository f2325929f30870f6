"""A measured figure with its baseline and goal, and functions that measure time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """The goal of a figure, in its unit; with `least`, more is better."""

    value: float
    least: bool = False

    def cell(self, measured: float) -> str:
        """Return the goal and whether it is met, in words, because some readers cannot see colours."""
        met = measured >= self.value if self.least else measured <= self.value
        return f"{'≥' if self.least else '≤'} {_short(self.value)} {'met' if met else 'missed'}"


@dataclass(frozen=True)
class Figure:
    """`value` and `baseline` in `unit`. The ratio is value / baseline; the name tells whether more is better.

    goal: of the value. ratio_goal: of baseline / value, the factor by which it is faster than the baseline. memory_mib:
    peak resident memory of the measured process."""

    name: str
    value: float
    unit: str
    baseline_name: str = ""
    baseline: float | None = None
    goal: Goal | None = None
    ratio_goal: Goal | None = None
    memory_mib: float | None = None

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return value, baseline, ratio, goal and memory."""
        beside = "" if self.baseline is None else f"{_short(self.baseline)} {self.unit}"
        ratio = "" if not self.baseline else f"× {_short(self.value / self.baseline)}"
        goal = "" if self.goal is None else self.goal.cell(self.value)
        if self.ratio_goal is not None and self.baseline is not None:
            times = self.baseline / self.value
            ratio = f"1 / {_short(times)}"
            goal = f"1 / {_short(self.ratio_goal.value)} {'met' if times >= self.ratio_goal.value else 'missed'}"
        memory = "" if self.memory_mib is None else f"{_short(self.memory_mib)} MiB"
        return f"{_short(self.value)} {self.unit}", beside, ratio, goal, memory


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def timed(action: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def cpu_seconds(action: Callable[[], object]) -> float:
    """Return the CPU seconds (user and system, all threads) of one call."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def median_cpu_seconds(action: Callable[[], object], runs: int = 31, warmup: int = 3) -> float:
    """Return the median CPU seconds (user and system) of `runs` calls, which other load hardly changes."""
    spent = []
    for run in range(warmup + runs):
        once = cpu_seconds(action)
        if run >= warmup:
            spent.append(once)
    return statistics.median(spent)


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
