"""Makes the sums, and keeps the tables that only grow small. Done before a checkpoint, never in a commit.

A commit writes rows and nothing that can be told from them: sums cost it more than the rows themselves.
An hour whose rows came or changed is *unfolded* and summed from its rows; once it is over it is folded into
hourly and quarter-hourly sums. Marks and tenures are only added to, and made one row per key here. What the
tables mean is the same before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from accountant.store import columns
from accountant.store.database import Cursor
from agent.units import MS_PER_HOUR


def hours_of(quarters: Iterable[int]) -> frozenset[int]:
    """The hours that quarter-hours lie in, by their starts."""
    return frozenset(at - at % MS_PER_HOUR for at in quarters)


def around(hours: Collection[int]) -> dict[str, int]:
    """The range of start_ms of rows of these hours; empty where there is none."""
    return {"low": min(hours, default=0), "high": max(hours, default=-MS_PER_HOUR) + MS_PER_HOUR}


def unfold(cursor: Cursor, hours: Collection[int], newest_ms: int) -> None:
    """From now on these hours, all of which were folded or new, are summed from their rows.

    newest_ms: end of the newest row booked before; hours from there on cannot have been folded."""
    late = [(hour,) for hour in hours if hour < newest_ms]
    if late:
        cursor.rows("drop_sums", incoming=columns.table(columns.HOUR, late))
    cursor.run("INSERT INTO unfolded SELECT unnest(?)", [sorted(hours)])


def compact(cursor: Cursor, unfolded: frozenset[int], newest_ms: int) -> frozenset[int]:
    """In the caller's transaction: fold the hours that are over by `newest_ms`; those that remain unfolded."""
    cursor.rows("compact_tenures", around(unfolded))
    cursor.rows("compact_progress")
    over = frozenset(hour for hour in unfolded if hour + MS_PER_HOUR <= newest_ms)
    if over:
        hours = columns.table(columns.HOUR, [(hour,) for hour in sorted(over)])
        cursor.rows("fold", around(over), incoming=hours)
        cursor.rows("keep_folded", incoming=hours)
    return unfolded - over
