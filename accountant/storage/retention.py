"""Removes archived rows older than the retention period from the ledger file, and brings them back for late records.
The sums stay in the file.

The rows of an hour are either all in the file or, if the hour is *frozen*, only in the archive. The archive stores rows
as they were received. Only an hour in which no row was shortened or dropped because it overlaps another one is
therefore frozen. A query that needs rows of a frozen hour reads them from the archive (`show`). Before a late record
for such an hour is booked, the rows of the hour are brought back (`thaw`).

The archive may be far away, and everybody who writes waits for the writer. `thaw` therefore cannot read the archive: a
write that needs something from it raises `NotFetched`, and is begun again after `fetch` read that into a local file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from accountant.core.errors import LedgerDamaged, LedgerUnavailable
from accountant.core.periods import utc
from accountant.core.record_faults import MAX_INTERVAL_MS
from accountant.storage.duckdb_engine import Cursor, Row
from accountant.storage.record_archive import Archive, mark_of, rows_of, write_parquet
from accountant.storage.write.record_columns import PIECE, Incoming, Stream
from gputally.base.units import MS_PER_HOUR

_COLUMNS = ", ".join(field.name for field in PIECE)
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


@dataclass(frozen=True, slots=True)
class Needs:
    """What a write needs from the archive: the rows of frozen hours, and by outbox the digests of records."""

    hours: frozenset[int] = frozenset()
    records: Mapping[Stream, frozenset[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.hours or self.records)


class NotFetched(Exception):
    """A write has to be begun again with what it needs from the archive."""

    def __init__(self, needs: Needs) -> None:
        super().__init__("rows are only in the archive")
        self.needs = needs


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was read from the archive for a write.

    parts: the number of parts that the archive had then; a later part can have rows of the same hours. None: nothing
        was read.
    rows: a local file with the rows of the hours, in the columns of `received`.
    digests: by outbox and number; a number that the archive lacks is left out."""

    needs: Needs = field(default_factory=Needs)
    parts: int | None = None
    rows: Path | None = None
    digests: Mapping[tuple[Stream, int], frozenset[int]] = field(default_factory=dict)

    def require(self, needs: Needs, parts: int) -> None:
        """Raise NotFetched if this is not all that a write needs. parts: the present number of parts."""
        known = self.needs
        if needs and not (
            self.parts == parts
            and needs.hours <= known.hours
            and all(seqs <= known.records.get(stream, frozenset()) for stream, seqs in needs.records.items())
        ):
            raise NotFetched(needs)


def fetch(cursor: Cursor, archive: Archive, needs: Needs, parts: int, folder: Path) -> Fetched:
    """Read from the archive what a write needs, in the snapshot of `cursor`. parts: the number of parts in it. No
    writer should wait for it.

    folder: an empty local folder for the rows, which must stay until the write has ended."""
    rows = None
    if hours := needs.hours:
        rows = folder / "rows.parquet"
        source = _archived(cursor, archive, hours)
        write_parquet(cursor, f"FROM ({source}) WHERE {_inside(hours)}", rows)
    digests: dict[tuple[Stream, int], frozenset[int]] = {}
    for stream, seqs in needs.records.items():
        for seq, digest in _archived_digests(cursor, archive, stream, seqs):
            digests[stream, seq] = digests.get((stream, seq), frozenset()) | {digest}
    return Fetched(needs, parts, rows, digests)


def thaw(cursor: Cursor, fetched: Fetched, hours: Collection[int]) -> None:
    """Bring the rows of frozen hours, which were fetched, back into the file."""
    if not hours:
        return
    ordered = sorted(hours)
    cursor.run(f"INSERT INTO received FROM read_parquet(?) WHERE {_inside(ordered)}", [str(fetched.rows)])
    cursor.run("DELETE FROM frozen WHERE at_ms IN (SELECT unnest(?))", [ordered])


def show(cursor: Cursor, archive: Archive | None, hours: Collection[int]) -> None:
    """Replace the view `entry` of this cursor by one that includes the rows of the frozen hours."""
    ordered = sorted(hours)
    source = _archived(cursor, archive_of(archive), ordered)
    cursor.run(
        f"CREATE OR REPLACE TEMP VIEW entry AS FROM present UNION ALL SELECT {_COLUMNS} FROM ({source}) "  # noqa: S608
        f"WHERE {_inside(ordered)}"
    )


def _archived_digests(cursor: Cursor, archive: Archive, stream: Stream, seqs: Collection[int]) -> list[Row]:
    """Return (number, digest) for each of these record numbers of an outbox that a part of the archive has."""
    files = archive.files(_parts_with(cursor, archive, stream, min(seqs), max(seqs)))
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
