"""What a month will come to, and when a limit is reached, judged by its days so far: a run-rate with an interval.

The days that are over are taken as draws of one daily amount. Their mean, times the days that are left, is added
to what is spent; the interval covers 80 % if days are alike and independent, and is wide while days are few. With
less than MIN_DAYS whole days there is no forecast. Sums are taken in a fixed order (math.fsum), so equal days give
equal forecasts. Pure. Source: prediction interval of a sum of n further draws, normal approximation:
mean·n ± z·s·sqrt(n + n²/k) after k days.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent.units import MS_PER_DAY

MIN_DAYS = 3
_Z80 = 1.2815515655446004
"""Upper 10 % of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """In the unit of the days; low and high bound the middle 80 %, and never undo what is spent."""

    expected: float
    low: float
    high: float


def of_a_day(amount: float, start_ms: int, end_ms: int) -> float:
    """What a local day [start_ms, end_ms) came to, as of one of 24 hours: the days that are left are counted in those,
    and one in which the clocks change says no less, or more, of them."""
    return amount * (MS_PER_DAY / (end_ms - start_ms))


def run_rate(days: Sequence[float], spent: float, left_days: float) -> Forecast | None:
    """days: amounts of whole days so far (`of_a_day`); spent: all so far, today's part included; left_days: until the
    end."""
    if len(days) < MIN_DAYS:
        return None
    count = len(days)
    mean = math.fsum(days) / count
    variance = math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    expected = spent + mean * left_days
    margin = _Z80 * math.sqrt(variance * (left_days + left_days * left_days / count))
    return Forecast(expected, max(spent, expected - margin), expected + margin)


@dataclass(frozen=True, slots=True)
class Reach:
    """In how many days from now a limit is reached: expected, and the bounds of the middle 80 %. latest None: it
    may never be, at these rates."""

    expected: float
    earliest: float
    latest: float | None


def reach(days: Sequence[float], spent: float, limit: float) -> Reach | None:
    """When `limit` is spent, at the rate of `days`; None while days are few, or nothing is spent in them.

    The bounds are where run_rate's own bounds meet the limit: the roots of (m² − z²s²/k)·n² − (2·m·r + z²s²)·n + r²
    for what is left, r. Of a limit that is reached already: now."""
    if len(days) < MIN_DAYS:
        return None
    left = max(0.0, limit - spent)
    count = len(days)
    mean = math.fsum(days) / count
    if mean <= 0:
        return None
    doubt = _Z80 * _Z80 * math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    square, linear = mean * mean - doubt / count, 2 * mean * left + doubt
    root = math.sqrt(max(0.0, linear * linear - 4 * square * left * left))
    expected = left / mean
    # 2r²/(b + root), not (b − root)/2a: nothing is lost by subtraction, and a may be 0.
    earliest = 2 * left * left / (linear + root) if left else 0.0
    latest = (linear + root) / (2 * square) if square > 0 else None
    return Reach(expected, min(earliest, expected), None if latest is None else max(latest, expected))
