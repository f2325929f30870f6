"""What a month will come to, judged by its days so far: a run-rate with an interval around it.

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

MIN_DAYS = 3
_Z80 = 1.2815515655446004
"""Upper 10 % of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """In the unit of the days; low and high bound the middle 80 %, and never undo what is spent."""

    expected: float
    low: float
    high: float


def run_rate(days: Sequence[float], spent: float, left_days: float) -> Forecast | None:
    """days: amounts of whole days so far; spent: all so far, today's part included; left_days: until the end."""
    if len(days) < MIN_DAYS:
        return None
    count = len(days)
    mean = math.fsum(days) / count
    variance = math.fsum((day - mean) ** 2 for day in days) / (count - 1)
    expected = spent + mean * left_days
    margin = _Z80 * math.sqrt(variance * (left_days + left_days * left_days / count))
    return Forecast(expected, max(spent, expected - margin), expected + margin)
