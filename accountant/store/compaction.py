"""Makes the sums, and keeps the tables that only grow small. Done before a checkpoint, never in a commit.

A commit writes rows and nothing that can be told from them: sums cost it more than the rows themselves.
An hour whose rows came or changed is *unfolded* and summed from its rows; once it is over it is folded into
hourly and quarter-hourly sums, and the hours of a day that is over into the day's (`accountant.store.days`). Marks and
tenures are only added to, and made one row per key here. What the tables mean is the same before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from zoneinfo import ZoneInfo

from accountant.store import days as daily
from accountant.store.database import Cursor
from accountant.store.days import Days
from accountant.store.writing import columns
from agent.units import MS_PER_HOUR


def hours_of(quarters: Iterable[int]) -> frozenset[int]:
    """The hours that quarter-hours lie in, by their starts."""
    return frozenset(at - at % MS_PER_HOUR for at in quarters)


def around(hours: Collection[int]) -> dict[str, int]:
    """The range of start_ms of rows of these hours; empty where there is none."""
    return {"low": min(hours, default=0), "high": max(hours, default=-MS_PER_HOUR) + MS_PER_HOUR}


def unfold(cursor: Cursor, hours: Collection[int], newest_ms: int, days: Days) -> None:
    """From now on these hours, all of which were folded or new, are summed from their rows.

    newest_ms: end of the newest row booked before; hours from there on cannot have been folded. days: as they were."""
    late = [(hour,) for hour in hours if hour < newest_ms]
    if late:
        cursor.rows("drop_sums", incoming=columns.table(columns.HOUR, late))
        daily.drop(cursor, days.touching(hours))
    cursor.plainly("INSERT INTO unfolded SELECT unnest(?)", [sorted(hours)])


def compact(
    cursor: Cursor, unfolded: frozenset[int], days: Days, newest_ms: int, zone: ZoneInfo
) -> tuple[frozenset[int], Days]:
    """In the caller's transaction: fold the hours that are over by `newest_ms`; those that remain unfolded, and the
    days that have sums then. zone: of days."""
    cursor.rows("compact_tenures", around(unfolded))
    cursor.rows("compact_progress")
    over = frozenset(hour for hour in unfolded if hour + MS_PER_HOUR <= newest_ms)
    if over:
        hours = columns.table(columns.HOUR, [(hour,) for hour in sorted(over)])
        cursor.rows("fold", around(over), incoming=hours)
        cursor.rows("keep_folded", incoming=hours)
    left = unfolded - over
    return left, daily.keep(cursor, replace(days, loose=days.loose | over), left, newest_ms, zone)
