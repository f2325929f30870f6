"""Computes where a usage window begins and how usage decays with its half-life.

Usage v at age a counts v * 2^(-a / half_life). Of an interval over which v spreads evenly the integral
has a closed form; it is taken relative to the end of the quarter-hour the interval lies in (`reference_ms`),
rounded there to a whole unit, and added up as integers. Only then are the quarter-hours weighted by their age and
combined, oldest first, by `math.fsum`. So a window is bit-equal whatever the order in which intervals arrived, and
the terms of an interval are the same in every window of that half-life.

Pure: instants are arguments, UTC milliseconds. Formula: KAI-Scheduler's usage query, 0.5^(age / half-life)
summed over samples, in the limit of continuous sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from croniter import croniter

from accountant.wire.policy_models import WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_SECOND

LN2 = 0.6931471805599453
SLURM_LN2 = 0.693
"""ln 2 as Slurm writes it."""
SERIES_BELOW = 0.25
SERIES_TERMS = 12
"""(1 - e^-x) / x = 1 - x/2 (1 - x/3 (1 - ...)): below SERIES_BELOW the first term left out is < 1e-17."""


def bounds(spec: WindowSpec, at_ms: int, zone: ZoneInfo) -> tuple[int, int]:
    """The window's [start_ms, end_ms) as seen at `at_ms`, which is its end.

    Windows with boundaries begin at the last one strictly before `at_ms`: at a boundary the window that has
    just ended. Months and cron expressions go by `zone`."""
    size = spec.size * MS_PER_SECOND
    match spec.kind:
        case "sliding":
            return at_ms - size, at_ms
        case "tumbling":
            origin = 0 if spec.start is None else _instant_ms(spec.start)
            return at_ms - 1 - (at_ms - 1 - origin) % size, at_ms
        case "calendar":
            local = _local(at_ms - 1, zone)
            return _instant_ms(datetime(local.year, local.month, 1, tzinfo=zone)), at_ms
        case "cron":
            # It fires at whole minutes: the last one strictly before the second after the last whole one that counts.
            following = (at_ms - 1) // MS_PER_SECOND * MS_PER_SECOND + MS_PER_SECOND
            return _instant_ms(croniter(spec.cron or "", _local(following, zone)).get_prev(datetime)), at_ms


def _local(instant_ms: int, zone: ZoneInfo) -> datetime:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=instant_ms)).astimezone(zone)


def _instant_ms(instant: datetime) -> int:
    return round(instant.timestamp() * MS_PER_SECOND)


def reference_ms(start_ms: int, end_ms: int, half_life_s: int | None) -> int:
    """The instant to which usage inside [start_ms, end_ms), a stretch of one quarter-hour, is decayed: its end.

    Of the stretch itself where the half-life is shorter than a quarter-hour: usage of its beginning would be rounded
    away before a window that ends there counts it in full."""
    if half_life_s is not None and half_life_s * MS_PER_SECOND < BUCKET_MS:
        return end_ms
    return start_ms - start_ms % BUCKET_MS + BUCKET_MS


def factor(start_ms: int, end_ms: int, reference_ms: int, half_life_s: int | None) -> float:
    """Mean weight of [start_ms, end_ms) seen from `reference_ms`, which is not before its end: in (0, 1].

    2^-a * (1 - e^-x) / x, with a the age of its end in half-lives and x its length in half-lives times
    ln 2; where x is small, as it mostly is, the second part by its power series, which cancels nothing.
    Written in plain operations in a fixed order, because the ledger's engine evaluates the same expression
    (window_rows.sql) and has to agree to the last bit. 1 without a half-life."""
    if half_life_s is None:
        return 1.0
    half_life = float(half_life_s * MS_PER_SECOND)
    age = (reference_ms - end_ms) / half_life
    x = (end_ms - start_ms) / half_life * LN2
    if x >= SERIES_BELOW:
        return math.pow(2.0, -age) * ((1.0 - math.exp(-x)) / x)
    mean = 1.0
    for n in range(SERIES_TERMS, 1, -1):
        mean = 1.0 - mean * x / n
    return math.pow(2.0, -age) * mean


def term(value: int, weight: float) -> int:
    """value * weight to the nearest whole unit, halves up: the one place where usage is rounded.

    Exact for weight 1 as long as value < 2^52."""
    return math.floor(value * weight + 0.5)


def total(terms: Iterable[tuple[int, int]], at_ms: int, half_life_s: int | None) -> int:
    """Sum of (reference_ms, whole units) seen from `at_ms`, rounded once to a whole unit.

    Without a half-life the plain sum, in integers of any size."""
    references, values = zip(*found, strict=True) if (found := list(terms)) else ((), ())
    return combine(enumerate(values), age_weights(references, at_ms, half_life_s))


def age_weights(references_ms: Iterable[int], at_ms: int, half_life_s: int | None) -> Sequence[float] | None:
    """The weight of each stretch by its end, for `combine`; None where nothing decays."""
    if half_life_s is None:
        return None
    scale_ms = half_life_s * MS_PER_SECOND  # age_weight of each
    return [math.pow(2.0, (reference - at_ms) / scale_ms) for reference in references_ms]


def combine(terms: Iterable[tuple[int, int]], weights: Sequence[float] | None) -> int:
    """`total` of (number of the stretch, whole units), oldest first, with the weights worked out once for all."""
    if weights is None:
        return sum(value for _, value in terms)
    return round(math.fsum([value * weights[number] for number, value in terms]))


def slurm_weights(starts_ms: Iterable[int], at_ms: int, half_life_s: int | None) -> Sequence[float] | None:
    """The weight of each slice as Slurm decays it: (1 - 0.693 / half-life) ^ seconds since its beginning.

    Slurm decays what came in a period by the whole length of the period, and linearises ln 2, so it counts a
    little less than the integral does. For comparing with Slurm's own figures. Slices begin at a multiple of
    PriorityCalcPeriod, or inside one. Source: Slurm's priority/multifactor plugin, _decay_thread."""
    if half_life_s is None:
        return None
    kept = 1.0 - SLURM_LN2 / half_life_s
    return [math.pow(kept, (at_ms - start) / MS_PER_SECOND) for start in starts_ms]


def age_weight(reference_ms: int, at_ms: int, half_life_s: int) -> float:
    """2^(-(at - reference) / half_life)."""
    return math.pow(2.0, (reference_ms - at_ms) / (half_life_s * MS_PER_SECOND))
