"""Removes archived rows older than the retention period from the ledger file, and brings them back for late records.
The sums stay in the file.

The rows of an hour are either all in the file or, if the hour is *frozen*, only in the archive. The archive stores rows
as they were received. Only an hour in which no row was shortened or dropped because it overlaps another one is
therefore frozen. A query that needs rows of a frozen hour reads them from the archive (`show`). Before a late record
for such an hour is booked, the rows of the hour are brought back (`thaw`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.core.periods import utc
from accountant.storage.duckdb_engine import Cursor, Row
from accountant.storage.record_archive import Archive, mark_of, rows_of
from accountant.storage.write.batch_admission import MAX_INTERVAL_MS
from accountant.storage.write.record_columns import Incoming, Stream
from gputally.base.units import MS_PER_HOUR

_CELLS = (
    "stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, busy_us, idle_us, unknown_us, unheld_us, down_us, "
    "borrowed_us, unattributed_us, memory_mib_s, energy_uj, energy_blind_us, "
    "memory_blind_us"
)
HOURS_AT_ONCE = 4
"""Largest number of hours of one transaction, because the writer waits while they are compared with the archive."""


def archived_hours(cursor: Cursor, archive: Archive, before_ms: int) -> tuple[list[int], list[Row]]:
    """Return at most HOURS_AT_ONCE hours before an instant whose rows can be removed from the file, oldest first, and
    the fingerprint of their rows in the archive. It reads the archive, so no writer should wait for it."""
    hours = _freezable(cursor, before_ms)[:HOURS_AT_ONCE]
    return hours, cursor.run(_fingerprint(f"({_archived(cursor, archive, hours)})", hours)) if hours else []


def freeze_hours(
    cursor: Cursor, archive: Archive, before_ms: int, hours: Sequence[int], fingerprint: Sequence[Row]
) -> frozenset[int]:
    """Remove the rows of `archived_hours` from the file, and return the hours; none if rows arrived for them meanwhile.

    Raises LedgerDamaged, and removes nothing, if the archive's rows differ from the file's."""
    if not set(hours) <= set(_freezable(cursor, before_ms)):
        return frozenset()
    if cursor.run(_fingerprint("received", hours)) != fingerprint:
        raise LedgerDamaged(
            f"archive {archive.store}: its rows from {utc(hours[0])} on differ from the ledger's, so the ledger keeps "
            "them: restore the archive's files"
        )
    cursor.run(f"DELETE FROM received WHERE {_inside(hours)}")  # noqa: S608
    cursor.run("INSERT INTO frozen SELECT unnest(?)", [list(hours)])
    return frozenset(hours)


def _freezable(cursor: Cursor, before_ms: int) -> list[int]:
    return [row[0] for row in cursor.rows("freezable", {"before": before_ms})]


def touched_hours(incoming: Incoming | None, frozen: Collection[int]) -> frozenset[int]:
    """Return the frozen hours whose rows may overlap these rows; none if there are no rows."""
    if incoming is None or not frozen:
        return frozenset()
    reach = 2 * MAX_INTERVAL_MS
    spans = set(zip(incoming.start_ms.tolist(), incoming.end_ms.tolist(), strict=True))
    return frozenset(
        hour
        for hour in frozen
        if any(start - reach < hour + MS_PER_HOUR and end + reach > hour for start, end in spans)
    )


def thaw(cursor: Cursor, archive: Archive | None, hours: Collection[int]) -> None:
    """Bring the rows of frozen hours back into the file."""
    ordered = sorted(hours)
    source = _archived(cursor, archive_of(archive), ordered)
    cursor.run(f"INSERT INTO received FROM ({source}) WHERE {_inside(ordered)}")
    cursor.run("DELETE FROM frozen WHERE at_ms IN (SELECT unnest(?))", [ordered])


def show(cursor: Cursor, archive: Archive | None, hours: Collection[int]) -> None:
    """Replace the view `entry` of this cursor by one that includes the rows of the frozen hours."""
    ordered = sorted(hours)
    source = _archived(cursor, archive_of(archive), ordered)
    cursor.run(
        f"CREATE TEMP VIEW entry AS FROM present UNION ALL SELECT {_CELLS} FROM ({source}) "  # noqa: S608
        f"WHERE {_inside(ordered)}"
    )


def frozen_digests(cursor: Cursor, archive: Archive | None, stream: Stream, seqs: Collection[int]) -> list[Row]:
    """Return (number, digest) for each of these record numbers of an outbox that a part of the archive has."""
    files = archive_of(archive).files(_parts_with(cursor, archive_of(archive), stream, min(seqs), max(seqs)))
    found = cursor.run("SELECT id FROM stream WHERE cluster = ? AND node = ? AND epoch = ?", stream)
    return cursor.run(
        f"SELECT seq, digest FROM ({rows_of(cursor, files)}) WHERE stream = ? AND seq IN (SELECT unnest(?))",  # noqa: S608
        [found[0][0], sorted(seqs)],
    )


def archive_of(archive: Archive | None) -> Archive:
    """Return the archive. Raises LedgerUnavailable if it is None."""
    if archive is None:
        raise LedgerUnavailable(
            "the rows of some hours are only in the archive, and no archive is configured: set archive.to"
        )
    return archive


def _archived(cursor: Cursor, archive: Archive, hours: Collection[int]) -> str:
    """Return a query for the rows of the parts that have rows in one of the hours."""
    sql = (
        "SELECT number FROM archive_part WHERE rows > 0 AND EXISTS "
        "(SELECT 1 FROM (SELECT unnest(?) AS at_ms) h WHERE low_ms < h.at_ms + ? AND high_ms > h.at_ms) ORDER BY number"
    )
    return rows_of(cursor, archive.files([row[0] for row in cursor.run(sql, [sorted(hours), MS_PER_HOUR])]))


def _parts_with(cursor: Cursor, archive: Archive, stream: Stream, low_seq: int, high_seq: int) -> list[int]:
    """Return the numbers of the parts with these records of an outbox. Each part has the records between the outbox's
    marks of the part before and its own, so only the marks of a few parts are read."""
    numbers = [row[0] for row in cursor.run("SELECT number FROM archive_part ORDER BY number")]

    @cache
    def mark(number: int) -> int:
        return mark_of(cursor, archive, number, stream)

    first, last = (bisect_left(numbers, seq, key=mark) for seq in (low_seq, high_seq))
    return numbers[first : last + 1]


def _inside(hours: Collection[int]) -> str:
    """Return an SQL condition for rows that begin in one of the hours. It consists of ranges, so that the engine can
    skip blocks by their Parquet statistics."""
    ordered = sorted(hours)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b - a != MS_PER_HOUR)]
    ends = [*(a for a, b in pairwise(ordered) if b - a != MS_PER_HOUR), ordered[-1]]
    ranges = [f"start_ms >= {low} AND start_ms < {high + MS_PER_HOUR}" for low, high in zip(starts, ends, strict=True)]
    return "(" + " OR ".join(f"({span})" for span in ranges) + ")"


def _fingerprint(source: str, hours: Collection[int]) -> str:
    return f"SELECT count(*), sum(hash(r)::HUGEINT) FROM {source} r WHERE {_inside(hours)}"  # noqa: S608
