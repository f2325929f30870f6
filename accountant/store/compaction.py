"""Keeps the tables that only grow small: one row per key where a commit just adds another,
and hourly sums made of the quarter-hourly ones.

Adding a row costs a commit less than finding the one to change; the sums, marks and tenures mean the
same before and after. Done before a checkpoint, for hours that are over.
"""

from __future__ import annotations

from collections.abc import Iterable

from accountant.store import columns
from accountant.store.database import Cursor
from agent.units import MS_PER_HOUR


class Compaction:
    """Hours touched since they were last folded. The writer owns it."""

    def __init__(self, cursor: Cursor) -> None:
        self._hours = {row[0] for row in cursor.rows("unfolded_hours")}

    def touched(self, quarters: Iterable[int]) -> None:
        """A commit changed these quarter-hours."""
        self._hours |= {at - at % MS_PER_HOUR for at in quarters}

    def run(self, cursor: Cursor, before_ms: int) -> None:
        """In the caller's transaction: all touched hours that end by `before_ms`."""
        over = sorted(hour for hour in self._hours if hour + MS_PER_HOUR <= before_ms)
        cursor.rows("compact_progress")
        if over:
            cursor.rows("fold", incoming=columns.table(columns.BUCKET, [(0, 0, hour) for hour in over]))
        self._hours.difference_update(over)
