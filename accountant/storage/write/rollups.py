"""Rolls rows up into quarter-hour, hour and day sums.

A commit writes only rows, because updating sums would cost more than the rows themselves. An hour with new or changed
rows is *unfolded* and summed from its rows. Once the hour is over, a checkpoint folds it into hourly and quarter-hourly
sums, and the hours of a finished day into the day's sum. Commits only append rows of marks (the last number stored of
each outbox) and of tenures (which node had a GPU when). A checkpoint merges them into one row per key.

With day sums, a query over a month reads days instead of hours. A day has sums for all of its hours or none. If one of
its hours unfolds, they are deleted in the same transaction and computed again later. Each day's sum is stored with its
span, so the sum of a day in another time zone stays usable until a day of this zone replaces it. A few days are
computed per checkpoint, newest first, because the writer waits. A ledger without day sums gets them with its first
checkpoints."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from zoneinfo import ZoneInfo

from accountant.core.claim_overlap import Span
from accountant.core.periods import day_span, local_date
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.write import record_columns
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

MOST_AT_ONCE = 7
"""Largest number of days per checkpoint. At 10,000 GPUs, a day takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class DailySums:
    """The days that have sums (`kept`), ascending and without overlap, and the starts of folded hours that are not
    entirely inside such a day (`loose`). These hours can be without rows."""

    kept: tuple[Span, ...] = ()
    loose: frozenset[int] = field(default=frozenset())

    def touching(self, hours: Iterable[int]) -> list[Span]:
        """Return the days with sums that overlap these hours."""
        ends = [end for _, end in self.kept]
        days = set()
        for hour in hours:
            for day in self.kept[bisect_left(ends, hour + 1) :]:
                if day[0] >= hour + MS_PER_HOUR:
                    break
                days.add(day)
        return sorted(days)

    def without(self, hours: Collection[int]) -> DailySums:
        """Return the state after these hours were unfolded."""
        if not hours:
            return self
        dropped = self.touching(hours)
        if not dropped:
            return DailySums(self.kept, self.loose.difference(hours)) if not self.loose.isdisjoint(hours) else self
        left = tuple(day for day in self.kept if day not in set(dropped))
        freed = (hour for start, end in dropped for hour in _hours(start, end))
        return DailySums(left, self.loose.union(freed).difference(hours))

    def seen_from(self, zone: ZoneInfo) -> DailySums:
        """Return the state for a time zone: the hours of days that are not days of this zone count as loose too, so
        that days of this zone are computed."""
        foreign = (day for day in self.kept if local_day(day[0], zone) != day)
        hours = {hour for start, end in foreign for hour in _hours(start, end)}
        return DailySums(self.kept, self.loose | hours) if hours else self


def local_day(at_ms: int, zone: ZoneInfo) -> Span:
    """Return the local day of an instant."""
    return day_span(local_date(at_ms, zone), zone)


def load(cursor: Cursor) -> DailySums:
    """Read the state from the tables."""
    kept = tuple(sorted((start, end) for start, end in cursor.run("FROM kept_day")))
    hours = [hour for (hour,) in cursor.run("SELECT DISTINCT at_ms FROM hour_of_all ORDER BY 1")]
    ends = [end for _, end in kept]
    return DailySums(kept, frozenset(hour for hour in hours if not _covered(hour, kept, ends)))


def drop(cursor: Cursor, days: Iterable[Span]) -> None:
    """Delete the sums of these days in the current transaction."""
    starts = [(start,) for start, _ in days]
    if starts:
        cursor.rows("drop_days", incoming=record_columns.column_table(record_columns.HOUR, starts))


def keep(cursor: Cursor, days: DailySums, unfolded: Collection[int], newest_ms: int, zone: ZoneInfo) -> DailySums:
    """Compute the sums of days that ended by `newest_ms` and are entirely folded, in the current transaction."""
    if not days.loose:
        return days
    ready, foreign = _ready(days, frozenset(unfolded), newest_ms, zone)
    drop(cursor, foreign)
    for start, end in ready:
        source = "quarter" if start % MS_PER_HOUR or end % MS_PER_HOUR else "hour"
        cursor.run(statement("keep_day", source=source), {"start": start, "end": end})
        cursor.run("INSERT INTO kept_day VALUES (?, ?)", [start, end])
    if not ready:
        return days
    kept = tuple(sorted({*days.kept, *ready}.difference(foreign)))
    ends = [end for _, end in kept]
    freed = (hour for start, end in foreign for hour in _hours(start, end))
    left = frozenset(hour for hour in days.loose.union(freed) if not _covered(hour, kept, ends))
    return DailySums(kept, left).seen_from(zone)


def _ready(days: DailySums, unfolded: frozenset[int], newest_ms: int, zone: ZoneInfo) -> tuple[list[Span], set[Span]]:
    """Return the days to compute, and the days of another zone that overlap them and are replaced."""
    known = frozenset(days.kept)
    ready: list[Span] = []
    for day in reversed(_days_of_hours(sorted(days.loose), zone)):
        start, end = day
        if len(ready) == MOST_AT_ONCE:
            break
        # A day that begins or ends inside a quarter-hour, in zones with historic odd offsets, cannot be summed.
        whole = not start % BUCKET_MS and not end % BUCKET_MS and start < end <= newest_ms
        if whole and day not in known and unfolded.isdisjoint(_hours(start, end)):
            ready.append(day)
    return ready, {old for old in days.kept if any(old[0] < end and start < old[1] for start, end in ready)}


def _days_of_hours(hours: list[int], zone: ZoneInfo) -> list[Span]:
    """Return the local days that contain these hours, which ascend."""
    days: list[Span] = []
    for hour in hours:
        for at in (hour, hour + MS_PER_HOUR - 1):
            if not days or not days[-1][0] <= at < days[-1][1]:
                days.append(local_day(at, zone))
    return sorted(set(days))


def _hours(start_ms: int, end_ms: int) -> range:
    """Return the starts of the hours that overlap a span."""
    return range(start_ms - start_ms % MS_PER_HOUR, end_ms, MS_PER_HOUR)


def _covered(hour: int, kept: tuple[Span, ...], ends: list[int]) -> bool:
    """Return whether days with sums cover all of an hour. `ends` are the ends of `kept`."""
    until = hour + MS_PER_HOUR
    at = hour
    for start, end in kept[bisect_left(ends, hour + 1) :]:
        if start > at:
            return False
        at = end
        if at >= until:
            return True
    return False


def hours_of(quarters: Iterable[int]) -> frozenset[int]:
    """Return the starts of the hours that contain these quarter-hours."""
    return frozenset(at - at % MS_PER_HOUR for at in quarters)


def row_range(hours: Collection[int]) -> dict[str, int]:
    """Return the range of start_ms of the rows of these hours as SQL parameters; an empty range if there are none."""
    return {"low": min(hours, default=0), "high": max(hours, default=-MS_PER_HOUR) + MS_PER_HOUR}


def unfold_hours(cursor: Cursor, hours: Collection[int], newest_ms: int, days: DailySums) -> None:
    """Mark hours as unfolded, and delete their sums and those of their days. The hours are new, or were folded before.

    newest_ms: the end of the newest row booked before. Hours that begin after it cannot have sums.
    days: the days that have sums."""
    late = [(hour,) for hour in hours if hour < newest_ms]
    if late:
        cursor.rows("drop_sums", incoming=record_columns.column_table(record_columns.HOUR, late))
        drop(cursor, days.touching(hours))
    cursor.plainly("INSERT INTO unfolded SELECT unnest(?)", [sorted(hours)])


def compact(
    cursor: Cursor, unfolded: frozenset[int], days: DailySums, newest_ms: int, zone: ZoneInfo
) -> tuple[frozenset[int], DailySums]:
    """Fold the hours that ended by `newest_ms`, and merge tenures and marks, in the current transaction. Returns the
    hours that remain unfolded, and the days of `zone` that have sums."""
    cursor.rows("compact_tenures", row_range(unfolded))
    cursor.rows("compact_progress")
    over = frozenset(hour for hour in unfolded if hour + MS_PER_HOUR <= newest_ms)
    if over:
        hours = record_columns.column_table(record_columns.HOUR, [(hour,) for hour in sorted(over)])
        cursor.rows("fold", row_range(over), incoming=hours)
        cursor.rows("keep_folded", incoming=hours)
    left = unfolded - over
    return left, keep(cursor, replace(days, loose=days.loose | over), left, newest_ms, zone)
