"""Computes where a usage window begins and how usage decays with its half-life.

Usage v at age a counts v * 2^(-a / half_life). With a half-life of a day, for example, usage of yesterday counts half.

For an interval over which v is spread evenly, the integral has a closed form. It is computed relative to the end of the
interval's quarter-hour, or to the interval's own end if the half-life is shorter than a quarter-hour (`reference_ms`),
rounded there to an integer, and added up with other intervals. Then these sums are weighted by their age and summed by
`math.fsum`, oldest first. The result is therefore bit-equal for any order of arrival, and an interval has the same
terms in every window with that half-life.

Instants are UTC milliseconds. Formula: 0.5^(age / half-life) summed over samples, as a scheduler's usage query
has it, in the limit of continuous sampling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
from croniter import croniter

from accountant.wire.policy_models import WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_SECOND

LN2 = 0.6931471805599453
SLURM_LN2 = 0.693
"""ln 2 as Slurm rounds it."""
SERIES_BELOW = 0.25
SERIES_TERMS = 12
"""(1 - e^-x) / x = 1 - x/2 (1 - x/3 (1 - ...)): below SERIES_BELOW the first omitted term is < 1e-17."""


def bounds(spec: WindowSpec, at_ms: int, zone: ZoneInfo) -> tuple[int, int]:
    """The window's [start_ms, end_ms); the end is `at_ms`.

    A window with fixed boundaries begins at the last boundary strictly before `at_ms`, so at a boundary it is the
    window that just ended. Months and cron expressions use `zone`."""
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
            # A cron expression matches whole minutes: this is the last one strictly before the next whole second.
            following = (at_ms - 1) // MS_PER_SECOND * MS_PER_SECOND + MS_PER_SECOND
            return _instant_ms(croniter(spec.cron or "", _local(following, zone)).get_prev(datetime)), at_ms


def _local(instant_ms: int, zone: ZoneInfo) -> datetime:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=instant_ms)).astimezone(zone)


def _instant_ms(instant: datetime) -> int:
    return round(instant.timestamp() * MS_PER_SECOND)


Instants = TypeVar("Instants", int, npt.NDArray[np.int64])
"""An instant, or several."""


def reference_ms(start_ms: Instants, end_ms: Instants, half_life_s: int | None) -> Instants:
    """The instant to which usage inside [start_ms, end_ms), a part of one quarter-hour, is decayed: the quarter-hour's
    end.

    If the half-life is shorter than a quarter-hour, it is `end_ms`. Otherwise usage early in the quarter-hour could
    decay to less than half a unit and be rounded to 0, although a window that ends at `end_ms` counts it in full."""
    if half_life_s is not None and half_life_s * MS_PER_SECOND < BUCKET_MS:
        return end_ms
    return start_ms - start_ms % BUCKET_MS + BUCKET_MS


def factor(start_ms: int, end_ms: int, reference_ms: int, half_life_s: int | None) -> float:
    """Mean weight, in (0, 1], of [start_ms, end_ms) as seen from `reference_ms`, which is not before its end.

    2^-a * (1 - e^-x) / x, where a is the age of the end in half-lives and x the length in half-lives times ln 2. For
    small x, the usual case, the second factor is a power series, which avoids cancellation. Without a half-life, the
    weight is 1."""
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
    """value * weight, rounded to the nearest integer, halves up. Usage is rounded only here.

    Exact for weight 1 as long as value < 2^52."""
    return math.floor(value * weight + 0.5)


def age_weights(references_ms: Iterable[int], at_ms: int, half_life_s: int | None) -> Sequence[float] | None:
    """The weights with which `combine` decays usage from each reference instant to `at_ms`; None without a
    half-life."""
    if half_life_s is None:
        return None
    return [age_weight(reference, at_ms, half_life_s) for reference in references_ms]


def combine(values: Sequence[int], weights: Sequence[float] | None) -> int:
    """The sum of the values of spans, oldest first, each multiplied by the span's weight, rounded once to an integer.

    If `weights` is None it is the plain sum, in integers of any size."""
    if weights is None:
        return sum(values)
    return round(math.fsum([value * weight for value, weight in zip(values, weights, strict=True)]))


def weights_by_period(starts_ms: Iterable[int], at_ms: int, half_life_s: int | None) -> Sequence[float] | None:
    """The weight of each slice as Slurm decays it: (1 - 0.693 / half-life) ^ seconds since its beginning. None without
    a half-life.

    Slurm decays the usage of a period by the whole length of the period, and linearises ln 2, so it counts slightly
    less than the integral. Such windows can be compared with Slurm's own figures. Slices begin at a multiple of
    PriorityCalcPeriod, or inside one. Source: Slurm's priority/multifactor plugin, _decay_thread."""
    if half_life_s is None:
        return None
    kept_a_second = 1.0 - SLURM_LN2 / half_life_s
    return [math.pow(kept_a_second, (at_ms - start) / MS_PER_SECOND) for start in starts_ms]


def age_weight(reference_ms: int, at_ms: int, half_life_s: int) -> float:
    """2^(-(at - reference) / half_life)."""
    return math.pow(2.0, (reference_ms - at_ms) / (half_life_s * MS_PER_SECOND))
