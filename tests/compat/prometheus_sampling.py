"""Prometheus' average of a step function, for comparison with the exact integral.

`sum_over_time((METRIC)[window:resolution])` evaluates the metric at the absolute multiples of the resolution inside the
window, each as an instant lookup of the last sample of the past five minutes. Prometheus 2 includes the left edge of
the window, Prometheus 3 does not. Source: Prometheus' documentation of subqueries, and its migration guide to version
3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOKBACK_S = 300

Segment = tuple[float, float, float]
"""[start_s, end_s) and the value between; outside of all segments there are no samples."""


@dataclass(frozen=True)
class Sampling:
    """The parameters of a subquery, in seconds. left_closed: include the left edge, as Prometheus 2 does."""

    window: int
    resolution: int
    scrape_interval: int
    half_life: int | None
    left_closed: bool

    def sum(self, segments: Sequence[Segment], now: int) -> float:
        """Return the query's value at `now`."""
        start = now - self.window
        first = -(-start // self.resolution) * self.resolution
        if first == start and not self.left_closed:
            first += self.resolution
        return sum(
            self._looked_up(segments, step) * (0.5 ** ((now - step) / self.half_life) if self.half_life else 1.0)
            for step in range(first, now + 1, self.resolution)
        )

    def _looked_up(self, segments: Sequence[Segment], at: int) -> float:
        scrape = at - at % self.scrape_interval
        while scrape > at - LOOKBACK_S and scrape >= 0:
            for start, end, value in segments:
                if start <= scrape < end:
                    return value
            scrape -= self.scrape_interval
        return 0.0


def integral(segments: Sequence[Segment], start: float, end: float, half_life: int | None) -> float:
    """Return the exact GPU-seconds in [start, end); with a half-life, decayed to `end`."""
    total = 0.0
    for begin, stop, value in segments:
        left, right = max(begin, start), min(stop, end)
        if right <= left:
            continue
        if half_life is None:
            total += value * (right - left)
        else:
            rate = 0.6931471805599453 / half_life
            total += value / rate * (2 ** ((right - end) / half_life) - 2 ** ((left - end) / half_life))
    return total
