"""The means of weekdays and of weekends, of days that are over and metered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Final
from zoneinfo import ZoneInfo

from accountant.core.periods import day_span
from gputally.base.money import sum_if_known

LEAST_METERED: Final = 0.98
"""A day that is metered less is in no mean: what is not known of it is not zero."""


def is_weekend(day: date) -> bool:
    return day.weekday() >= 5


def is_counted(day: date, known: tuple[int, int], unknown: float, tz: ZoneInfo) -> bool:
    """Whether a local day is in the means.

    known: [start_ms, end_ms) of what is shown, from the first record on, of which the day must be a whole part.
    unknown: the unmetered part of its time."""
    start_ms, end_ms = day_span(day, tz)
    return known[0] <= start_ms and end_ms <= known[1] and unknown <= 1 - LEAST_METERED


@dataclass(frozen=True, slots=True)
class WholeDay:
    """What was held on a day: GPU-µs, of which busy and idle are known, and its cost; None if it is unknown."""

    day: date
    held_us: int
    busy_us: int
    idle_us: int
    cost: Decimal | None


@dataclass(frozen=True, slots=True)
class WeekPart:
    """The mean of so many weekdays or days of weekends. held_us: GPU-µs. cost: None if that of a day is unknown.
    utilisation: the busy part of all their held time of known use."""

    weekend: bool
    days: int
    held_us: int
    cost: Decimal | None
    utilisation: float | None


def week_parts(days: Iterable[WholeDay]) -> tuple[WeekPart, ...]:
    """The means of both kinds of days, of those that there are."""
    every = list(days)
    parts = []
    for weekend in (False, True):
        of_kind = [one for one in every if is_weekend(one.day) == weekend]
        if of_kind:
            busy, idle = (sum(getattr(one, name) for one in of_kind) for name in ("busy_us", "idle_us"))
            cost = sum_if_known(one.cost for one in of_kind)
            parts.append(
                WeekPart(
                    weekend, len(of_kind), round(sum(one.held_us for one in of_kind) / len(of_kind)),
                    None if cost is None else cost / len(of_kind), busy / (busy + idle) if busy + idle else None,
                )
            )  # fmt: skip
    return tuple(parts)
