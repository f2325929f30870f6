"""One measured figure beside its baseline, and the way times are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`value` and `baseline` in `unit`. The ratio is value / baseline; whether more is better, the name says."""

    name: str
    value: float
    unit: str
    baseline_name: str = ""
    baseline: float | None = None

    def cells(self) -> tuple[str, str, str]:
        beside = "" if self.baseline is None else f"{_short(self.baseline)} {self.unit}"
        ratio = "" if not self.baseline else f"× {self.value / self.baseline:.2f}"
        return f"{_short(self.value)} {self.unit}", beside, ratio


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def timed(action: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def median_seconds(action: Callable[[], object], runs: int = 15, warmup: int = 2) -> float:
    """Median wall seconds of `runs` calls after a warm-up."""
    for _ in range(warmup):
        action()
    return statistics.median(timed(action) for _ in range(runs))


def median_cpu_seconds(action: Callable[[], object], runs: int = 31, warmup: int = 3) -> float:
    """Median seconds of CPU (user and system) of `runs` calls: what a busy machine does not lengthen much."""
    spent = []
    for run in range(warmup + runs):
        begin = time.process_time()
        action()
        if run >= warmup:
            spent.append(time.process_time() - begin)
    return statistics.median(spent)


def quantile(values: list[float], q: float) -> float:
    """The q-quantile by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
