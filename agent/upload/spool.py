"""Stores unsent intervals and pod facts on disk until the accountant has stored them safely.

`Outbox` is the queue of unsent records, on top of `Spool`, one sqlite file in write-ahead mode with synchronous=FULL.
`append` is one transaction, and a row is sent only after `append` has returned. Invariants:

- Sequence numbers run from 1 without a hole within an epoch and are never used twice. The epoch is a UUIDv7 made with
  the file: if the file is lost or damaged, a new epoch begins.
- Rows are sent from `durable_seq` + 1 on. They are deleted once the accountant has archived them (acknowledged as
  `archived_seq`), or, if it has no archive, once a checkpoint contains them (`checkpointed_seq`). If the outbox is
  full, checkpointed rows are deleted before they are archived. Rows are sent again if the accountant has fewer than
  before (its ledger was restored from a backup).
- A set (the rows of one GPU over one span) is one unit: it is stored, sent, parked and refused as a whole.
- Size and age are limited. The outbox keeps the oldest rows and refuses new ones that do not fit. For each
  uninterrupted period of refusals it uses one sequence number, which it sends as "skipped", so the accountant sees the
  loss.
- A lock file beside the sqlite file admits one process at a time. A mutex lets the sampling and the uploading thread of
  this process use the outbox in turn.
- The newest number, the accountant's acknowledged numbers and the totals (`SpoolMarks`) are stored in the file. They
  change in the same transaction as the records that they describe.

A file that sqlite reports as damaged is never deleted: it is renamed, and a new file takes its place. The lock is a
separate file, which keeps its name. The module neither uses the network nor checks rows."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire import Ack, PodFacts, Skipped, UsageInterval
from gputally.base.clock import Clock
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_DAY

log = logging.getLogger("agent.upload.spool")

LOG_PAGES = 16
"""Number of 4 KiB pages at which sqlite merges the write-ahead log into the file."""
_LAYOUT = 1
_MODE = 0o640
"""Permissions of the files, which contain names of pods and users that other users of the node must not read."""
_NO_WRITES = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
_NO_SQLITE_WRITES = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY})
_BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE record (
    seq INTEGER PRIMARY KEY,
    unit INTEGER NOT NULL,          -- first seq of the set; facts and losses are units of their own
    kind INTEGER NOT NULL,          -- 0 interval, 1 facts, 2 loss
    payload BLOB NOT NULL,          -- the wire form with seq 0; empty for a loss
    appended_ms INTEGER NOT NULL,
    parked TEXT                     -- why it is declared as skipped instead of sent
);
CREATE INDEX parked ON record (parked) WHERE parked IS NOT NULL;
CREATE TABLE loss (
    seq INTEGER PRIMARY KEY, first_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL,
    sets INTEGER NOT NULL, facts INTEGER NOT NULL
);
"""


class OutboxLocked(AgentError):
    """Another agent uses this outbox."""


class OutboxUnavailable(AgentError):
    """The outbox cannot be opened, read or written, for example because the disk is full or a permission is missing."""


class SpoolNotWritable(OutboxUnavailable):
    """The disk cannot be written now, because it is full, read-only or failing. Writing may succeed later."""


_RANDOM = random.SystemRandom()


def uuid7(wall_ms: int, randbits: Callable[[int], int] = _RANDOM.getrandbits) -> str:
    """Return a UUID version 7: 48 bits of Unix milliseconds, then 74 random bits. Source: RFC 9562, 5.7."""
    milliseconds = wall_ms & ((1 << 48) - 1)
    value = milliseconds << 80 | 0x7 << 76 | randbits(12) << 64 | 0b10 << 62 | randbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def uuid7_ms(uuid: str) -> int:
    """Return the Unix milliseconds in a UUID version 7."""
    return int(uuid.replace("-", "")[:12], 16)


def lock(path: Path) -> int:
    """Lock the outbox at `path` until the returned file descriptor is closed. Creates the folder.

    Raises OutboxLocked if another process, or an earlier call in this process, has the lock; OutboxUnavailable if the
    folder cannot be created or written (SpoolNotWritable if writing may succeed later)."""
    name = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    except OSError as error:
        kind = SpoolNotWritable if error.errno in _NO_WRITES else OutboxUnavailable
        raise kind(f"spool folder {path.parent} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise OutboxLocked(
                f"outbox {path} is in use by another agent: stop that agent, or give this one another --spool folder"
            ) from error
        raise OutboxUnavailable(f"outbox {path} cannot be locked: {error.strerror}") from error
    return descriptor


def _device_and_inode(path: Path) -> tuple[int, int] | None:
    """Return what identifies the file at this path; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _error_kind(error: sqlite3.Error) -> int:
    """Return sqlite's primary error code, which is the low byte of the whole code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def write_anew(db: sqlite3.Connection, path: Path, now_ms: int) -> None:
    """Write the contents of `db`, whose file was removed, to a new file at `path`. If there is another file, rename it.

    Close `db` before you open the new file, because closing removes the write-ahead log at this path. Raises
    sqlite3.Error, OutboxUnavailable."""
    fresh = path.with_name(f"{path.name}.fresh")
    try:
        fresh.unlink(missing_ok=True)
        _create(fresh)
        with closing(sqlite3.connect(fresh)) as copy:
            db.backup(copy)
        replaced = _move_aside(path, now_ms) if path.exists() else None
        fresh.replace(path)
    except OSError as error:
        raise OutboxUnavailable(f"outbox {path} was removed and cannot be rewritten: {error.strerror}") from error
    log.critical(
        "the outbox file was removed: it is written again",
        extra={"path": str(path), "file_in_its_place": str(replaced or "none")},
    )


def connect(path: Path, now_ms: int, *, fsync: bool) -> sqlite3.Connection:
    """Open or create the file. If it is damaged, rename it (`.damaged-<now_ms>`), log that, and create a new one.

    fsync: False trades durability for speed.

    Raises OutboxUnavailable for every other fault, such as a missing permission or a newer layout; SpoolNotWritable if
    writing may succeed later, for example once the disk has space."""
    try:
        _create(path)
        try:
            return _connect(path, fsync)
        except sqlite3.OperationalError:
            raise  # no space, no permission, a failing disk: the file itself may be fine
        except sqlite3.DatabaseError as error:
            renamed = _move_aside(path, now_ms)
            log.critical(
                "the outbox is damaged: the file is renamed and a new epoch begins",
                extra={"renamed_to": str(renamed), "reason": str(error)},
            )
            _create(path)
            return _connect(path, fsync)
    except OSError as error:
        kind = SpoolNotWritable if error.errno in _NO_WRITES else OutboxUnavailable
        raise kind(f"outbox {path} cannot be created: {error.strerror}") from error
    except sqlite3.Error as error:
        kind = SpoolNotWritable if _error_kind(error) in _NO_SQLITE_WRITES else OutboxUnavailable
        raise kind(f"outbox {path} cannot be opened: {error}") from error


def _create(path: Path) -> None:
    """Create an empty file with `_MODE` if there is none; sqlite's log gets the same permissions. Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))


def _connect(path: Path, fsync: bool) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        # The lock admits one process, so the log's index can be in its memory instead of a mapped file (-shm). If
        # another program shortened such a file, this process would end (SIGBUS).
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        # The log is merged into the file early and shortened. On a small volume it would otherwise leave no room for
        # records, or for the transaction that removes sent records.
        db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        db.execute(f"PRAGMA journal_size_limit={LOG_PAGES * 4096}")
        db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        layout = db.execute("PRAGMA user_version").fetchone()[0]
        if layout > _LAYOUT:
            raise OutboxUnavailable(
                f"outbox {path} was written by a newer agent (layout {layout}; known: {_LAYOUT}): update this agent"
            )
        if layout == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_LAYOUT}; COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def _move_aside(path: Path, now_ms: int) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{now_ms}")
    try:
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise OutboxUnavailable(f"outbox {path} is damaged and cannot be moved aside: {error.strerror}") from error
    return aside


if TYPE_CHECKING:
    from agent.metering.meter import ClosedSet


class SpoolMarks(msgspec.Struct, frozen=True):
    """Sequence numbers and sums that describe the stored records.

    last_seq: the newest assigned number.
    durable_seq, checkpointed_seq: the accountant's marks (`agent.wire.Ack`).
    rows, bytes: number and size of the stored records.
    lost_sets, unspooled_sets, released_early: as in `Stats`."""

    epoch: str
    last_seq: int = 0
    durable_seq: int = 0
    checkpointed_seq: int = 0
    rows: int = 0
    bytes: int = 0
    lost_sets: int = 0
    unspooled_sets: int = 0
    released_early: int = 0


_stored_marks = msgspec.json.Decoder(SpoolMarks)


class Spool:
    """The sqlite file of the outbox. For the arguments see `Outbox`. Raises OutboxLocked, OutboxUnavailable.

    db: use it only within `reading` or `transaction`.
    marks: read them at any time once the file is open. Change them with `mark` within `transaction`."""

    db: sqlite3.Connection
    marks: SpoolMarks

    def __init__(self, path: Path, clock: Clock, *, fsync: bool, patient: bool, randbits: Callable[[int], int]) -> None:
        self._path = path
        self._clock = clock
        self._fsync = fsync
        self._randbits = randbits
        self._mutex = threading.RLock()
        self._lock = -1
        self._file: tuple[int, int] | None = None
        self._opened = self._closed = self._damaged = False
        try:
            self._open()
        except SpoolNotWritable:
            if not patient:
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the block read the file, while other threads wait. Raises OutboxUnavailable."""
        with self._mutex:
            self._ensure_open()
            with self._failures("read"):
                yield

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction, while other threads wait. Changes of the marks are stored in it. Raises
        OutboxUnavailable."""
        with self._mutex:
            self._ensure_open()
            if _device_and_inode(self._path) != self._file:
                self._rewrite_removed_file()
            before = self.marks
            try:
                with self._failures("written"):
                    self.db.execute("BEGIN IMMEDIATE")
                    yield
                    if self.marks != before:
                        self.put("marks", msgspec.json.encode(self.marks))
                    self.db.execute("COMMIT")
            except BaseException:
                self.marks = before
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def fold(self) -> None:
        """Merge the write-ahead log into the file and free its space. Raises OutboxUnavailable."""
        with self.reading():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def unused_bytes(self) -> int:
        """Return the number of bytes in the file that removed records left and later records reuse. Raises
        OutboxUnavailable."""
        with self.reading():
            pages, size = (self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
            return int(pages * size)

    def mark(self, **changes: int | str) -> None:
        """Change marks within a transaction, which stores them."""
        self.marks = msgspec.structs.replace(self.marks, **changes)

    def new_epoch(self, at_ms: int) -> str:
        """Return the id of a new epoch that begins at `at_ms`."""
        return uuid7(at_ms, self._randbits)

    def get(self, key: str) -> bytes | None:
        """Return a value stored beside the records; None if there is none."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: str, value: bytes) -> None:
        """Store a value beside the records, within a transaction."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        with self._mutex:
            self._closed = True
            if self._opened:
                self.db.close()
            self._unlock()

    def _open(self) -> None:
        self._lock = lock(self._path)
        try:
            self.db = connect(self._path, self._clock.wall_ms(), fsync=self._fsync)
            self.marks = self._load()
        except BaseException:
            self._unlock()
            raise
        self._file = _device_and_inode(self._path)
        self._opened = True

    def _rewrite_removed_file(self) -> None:
        """Write the file again after another program removed or replaced it. The open file still has all contents."""
        self._unlock()  # the lock file may be gone as well
        try:
            self._lock = lock(self._path)
            with self._failures("rewritten"):
                write_anew(self.db, self._path, self._clock.wall_ms())
            self._close_file()
            self._open()
        except OutboxLocked as error:
            raise OutboxUnavailable(str(error)) from error

    def _close_file(self) -> None:
        self.db.close()
        self._unlock()
        self._opened = self._damaged = False

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _ensure_open(self) -> None:
        if self._damaged:
            self._close_file()  # it is opened again below, as after a restart
        if not self._opened and not self._closed:
            try:
                self._open()
            except OutboxLocked as error:
                raise OutboxUnavailable(str(error)) from error

    def _load(self) -> SpoolMarks:
        with self._failures("read"):
            stored = self.get("marks")
            if stored is not None:
                return _stored_marks.decode(stored)
            marks = SpoolMarks(epoch=self.new_epoch(self._clock.wall_ms()))
            self.put("marks", msgspec.json.encode(marks))
            return marks

    @contextmanager
    def _failures(self, participle: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._damaged = self._opened and _error_kind(error) in _BROKEN
            raise OutboxUnavailable(f"outbox {self._path} cannot be {participle}: {error}") from error


INTERVAL, FACTS, LOSS = 0, 1, 2
"""Kinds of a record: a usage row, facts of a pod, a number for refused records."""


class Record(NamedTuple):
    """A stored record.

    seq: its sequence number.
    unit: the number of the first record of its unit (a set, or one record alone).
    kind: INTERVAL, FACTS or LOSS.
    payload: the record in its wire form with the number 0; empty for a LOSS.
    parked: the reason why its number is declared as skipped; None if the record is sent."""

    seq: int
    unit: int
    kind: int
    payload: bytes
    parked: str | None


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of one `append`.

    last_seq: the newest assigned number.
    refused_sets, refused_facts: numbers of sets and facts that were lost because the outbox is full."""

    last_seq: int
    refused_sets: int = 0
    refused_facts: int = 0


@dataclass(frozen=True, slots=True)
class LostRecords:
    """Numbers of sets and facts that could not be stored. The rows of the sets are within [first_ms, last_ms)."""

    first_ms: int
    last_ms: int
    sets: int
    facts: int

    def __add__(self, other: LostRecords) -> LostRecords:
        first_ms, last_ms = min(self.first_ms, other.first_ms), max(self.last_ms, other.last_ms)
        return LostRecords(first_ms, last_ms, self.sets + other.sets, self.facts + other.facts)


@dataclass(frozen=True, slots=True)
class Pending:
    """The next records to send: every number from `first_seq` to `last_seq`, in whole units.

    oldest_seq: the oldest stored number.
    units: the number of units."""

    first_seq: int
    last_seq: int
    oldest_seq: int
    units: int
    intervals: tuple[UsageInterval, ...]
    facts: tuple[PodFacts, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures about the outbox. Unless the name gives another unit, they are numbers of records.

    rows, bytes: stored records and their size.
    unsent_rows: records that the accountant has not stored durably.
    oldest_age_ms: age of the oldest of these; 0 if there is none.
    parked: stored records whose numbers are declared as skipped.
    lost_sets: sets that the outbox has refused for lack of space since it was created.
    unspooled_sets: sets that were lost because the spool could not be written, since the outbox was created.
    released_early: records that were deleted before they were archived, for lack of space, since the outbox was
        created."""

    rows: int = 0
    unsent_rows: int = 0
    bytes: int = 0
    oldest_age_ms: int = 0
    parked: int = 0
    lost_sets: int = 0
    unspooled_sets: int = 0
    released_early: int = 0


_interval = msgspec.json.Decoder(UsageInterval)
_facts = msgspec.json.Decoder(PodFacts)


def encode(record: UsageInterval | PodFacts) -> bytes:
    """Encode a record for storage: its wire form with the number 0, because its number is the key in the file."""
    return msgspec.json.encode(record if record.seq == 0 else msgspec.structs.replace(record, seq=0))


def shifted_record(payload: bytes, kind: int, by_ms: int) -> bytes:
    """Return the payload of a stored record with its times shifted by `by_ms`. Of a pod's facts, only the time of
    observation comes from the node's clock."""
    if kind == FACTS:
        facts = _facts.decode(payload)
        return encode(msgspec.structs.replace(facts, observed_ms=facts.observed_ms + by_ms))
    row = _interval.decode(payload)
    gaps = tuple(
        msgspec.structs.replace(gap, start_ms=gap.start_ms + by_ms, end_ms=gap.end_ms + by_ms) for gap in row.gaps
    )
    return encode(msgspec.structs.replace(row, start_ms=row.start_ms + by_ms, end_ms=row.end_ms + by_ms, gaps=gaps))


def within(groups: list[list[Record]], max_bytes: int, max_units: int | None) -> list[list[Record]]:
    """Return the first groups that fit into `max_bytes`: at least one, and at most `max_units` (None: no limit)."""
    fitting: list[list[Record]] = []
    size = 0
    for group in groups[:max_units]:
        size += sum([len(record.payload) for record in group])
        if fitting and size > max_bytes:
            break
        fitting.append(group)
    return fitting


def assemble(groups: list[list[Record]], oldest_seq: int) -> Pending:
    """Return the records of these units as they are sent: with their numbers, and parked ones as skipped numbers."""
    records = [record for group in groups for record in group]
    intervals = [record for record in records if record.kind == INTERVAL and record.parked is None]
    facts = [record for record in records if record.kind == FACTS and record.parked is None]
    return Pending(
        first_seq=records[0].seq,
        last_seq=records[-1].seq,
        oldest_seq=oldest_seq,
        units=len(groups),
        intervals=tuple(msgspec.structs.replace(_interval.decode(r.payload), seq=r.seq) for r in intervals),
        facts=tuple(msgspec.structs.replace(_facts.decode(r.payload), seq=r.seq) for r in facts),
        skipped=tuple(Skipped(record.seq, record.parked) for record in records if record.parked is not None),
    )


DEFAULT_MAX_BYTES = 512 * 1024 * 1024
DEFAULT_MAX_AGE_MS = 7 * MS_PER_DAY
RESERVE_BYTES = 128 * 1024
"""Bytes that the outbox leaves free on the volume, because removing sent records needs space for the transaction's
log."""
DROPPED_AT_ONCE = 100
"""Number of records that one transaction removes when the volume is nearly full."""
OUTBOX_FULL = "outbox-full"
"""Reason of the skipped number for records refused while the outbox was full."""
SPOOL_UNWRITABLE = "spool-unwritable"
"""Reason of the skipped number for records lost in memory because the disk could not be written."""
LOSSES = frozenset({OUTBOX_FULL, SPOOL_UNWRITABLE})

_ROW_OVERHEAD = 64
"""Bytes of a record's key, unit, time and share of a page, in addition to its payload."""


class Outbox:
    """The queue of unsent records. The constructor raises OutboxLocked, OutboxUnavailable; every other method that uses
    the file raises OutboxUnavailable.

    path: the sqlite file; its folder is created.
    max_bytes: limit of payloads and record overhead.
    max_age_ms: age of the oldest unconfirmed record above which the outbox refuses new records.
    fsync: False trades durability for speed, in simulations.
    patient: True to open the file later if the disk cannot be written now. Until then all calls raise
        OutboxUnavailable.
    randbits: returns random bits for the id of the epoch.
    free_bytes: returns the free bytes of the volume; None asks the operating system."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_age_ms: int = DEFAULT_MAX_AGE_MS,
        *,
        fsync: bool = True,
        patient: bool = False,
        randbits: Callable[[int], int] = _RANDOM.getrandbits,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.path = path
        self._free_bytes = free_bytes or self._volume_bytes
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_age_ms = max_age_ms
        self._spool = Spool(path, clock, fsync=fsync, patient=patient, randbits=randbits)
        self.forgotten = 0
        """How often the accountant had lost records that the outbox does not contain any more either."""

    @property
    def epoch(self) -> str:
        return self._spool.marks.epoch

    @property
    def last_seq(self) -> int:
        """The newest assigned number; 0 before the first."""
        return self._spool.marks.last_seq

    @property
    def durable_seq(self) -> int:
        """The newest number that the accountant has stored durably."""
        return self._spool.marks.durable_seq

    # --- writing ---------------------------------------------------------------------------------

    def append(self, sets: Sequence[ClosedSet], facts: Sequence[PodFacts], meter_state: bytes | None) -> Appended:
        """Number and store records in one transaction: first the facts, which name the owners of the rows, then the
        sets. A full outbox stores only their loss.

        meter_state: the meter's state to store; None leaves the stored state unchanged.

        Raises OutboxUnavailable; then nothing was stored and no number was used."""
        units = [(FACTS, [encode(fact)]) for fact in facts]
        units += [(INTERVAL, [encode(row) for row in closed.rows]) for closed in sets if closed.rows]
        size = sum([len(payload) + _ROW_OVERHEAD for _, payloads in units for payload in payloads])
        refused = (0, 0)
        now = self._clock.wall_ms()
        self._keep_reserve(size)
        with self._spool.transaction():
            if units and not self._make_room(now, size):
                refused = (len(units) - len(facts), len(facts))
                self._spool.mark(lost_sets=self._spool.marks.lost_sets + refused[0])
                self._record_loss(lost_records(sets, len(facts), now), OUTBOX_FULL, now)
                units = []
            if units:
                self._insert(units, size, now)
            if meter_state is not None:
                self._spool.put("meter_state", meter_state)
            return Appended(self.last_seq, *refused)

    def declare(self, loss: LostRecords) -> None:
        """Store the loss of records that were never appended, after all earlier records. Raises OutboxUnavailable."""
        with self._spool.transaction():
            self._spool.mark(unspooled_sets=self._spool.marks.unspooled_sets + loss.sets)
            self._record_loss(loss, SPOOL_UNWRITABLE, self._clock.wall_ms())

    def acknowledge(self, ack: Ack) -> None:
        """Apply the accountant's marks: send from `durable_seq` on, and delete the records that the accountant has
        stored safely.

        If the marks decreased, because the accountant's ledger was restored, the stored records are sent again. Marks
        beyond the newest assigned number mean that this file is an old copy of the outbox. Then a new epoch begins, the
        stored records get new numbers, and the accountant resolves the overlap. An answer for another epoch is
        ignored."""
        with self._spool.transaction():
            if ack.epoch != self.epoch:
                log.warning("answer for another epoch ignored", extra={"answered": ack.epoch, "epoch": self.epoch})
                return
            if ack.durable_seq > self.last_seq:
                log.error("the accountant has records of this epoch that the outbox never numbered: a new epoch begins")
                self._renumber()
                return
            if ack.durable_seq < self.durable_seq:
                log.warning("the accountant lost records: they are sent again", extra={"from_seq": ack.durable_seq + 1})
                self.forgotten += self._oldest_seq() > ack.durable_seq + 1
            self._spool.mark(durable_seq=ack.durable_seq, checkpointed_seq=min(ack.checkpointed_seq, ack.durable_seq))
            safe = ack.checkpointed_seq if ack.archived_seq is None else ack.archived_seq
            upto = min(safe, ack.durable_seq)
            nearly_full = self._is_volume_nearly_full()
            if not nearly_full:
                self._drop(upto)
        while nearly_full and (oldest := self._oldest_seq()) <= upto:
            with self._spool.transaction():
                self._drop(min(upto, oldest + DROPPED_AT_ONCE - 1))
            self._spool.fold()

    def park(self, seq: int, reason: str) -> None:
        """Declare the numbers of the unit that contains `seq` as skipped from now on, instead of sending its
        records."""
        self._set_parked(seq, reason)

    def unpark(self, seq: int) -> None:
        """Send the records of the unit that contains `seq` again, because the fault was not in them."""
        self._set_parked(seq, None)

    # --- reading ---------------------------------------------------------------------------------

    def pending(
        self, max_rows: int, max_bytes: int, max_units: int | None = None, upto: int | None = None
    ) -> Pending | None:
        """Return the next records to send, at least one unit; None if the accountant has all records.

        max_rows, max_bytes, max_units: limits; a single unit may exceed `max_rows` and `max_bytes`.
        upto: the newest number to send; None for all."""
        with self._spool.reading():
            oldest = self._oldest_seq()
            first = max(self.durable_seq + 1, oldest)
            last = self.last_seq if upto is None else upto
            records = self._records("seq BETWEEN ? AND ? ORDER BY seq LIMIT ?", first, last, max_rows + 1)
            if not records:
                return None
            groups = [list(group) for _, group in groupby(records, key=attrgetter("unit"))]
            if len(records) > max_rows:
                groups.pop()  # the limit may have cut this group off
            if not groups:
                groups = [self._records("unit = ? ORDER BY seq", records[0].unit)]
        return assemble(within(groups, max_bytes, max_units), oldest)

    def meter_state(self) -> bytes | None:
        """Return the meter's state that `append` stored last; None if there is none."""
        return self.stored_value("meter_state")

    def stored_value(self, key: str) -> bytes | None:
        """Return a value stored beside the records; None if there is none."""
        with self._spool.reading():
            return self._spool.get(key)

    def store_value(self, key: str, value: bytes) -> None:
        """Store a value beside the records."""
        with self._spool.transaction():
            self._spool.put(key, value)

    def shift_times(self, first_seq: int, last_seq: int, by_ms: int) -> int:
        """Shift the times of the unconfirmed records from `first_seq` to `last_seq` by `by_ms`. Return the number of
        shifted records."""
        first = max(first_seq, self.durable_seq + 1)
        with self._spool.transaction():
            records = self._records("seq BETWEEN ? AND ? AND kind != ?", first, last_seq, LOSS)
            shifted = [(shifted_record(record.payload, record.kind, by_ms), record.seq) for record in records]
            self._spool.db.executemany("UPDATE record SET payload = ? WHERE seq = ?", shifted)
        return len(shifted)

    def stats(self) -> Stats:
        """Return the figures for the metrics."""
        with self._spool.reading():
            oldest = self._oldest_unsent_ms()
            parked = self._spool.db.execute("SELECT count(*) FROM record WHERE parked IS NOT NULL").fetchone()[0]
            return Stats(
                rows=self._spool.marks.rows,
                unsent_rows=self.last_seq - max(self.durable_seq, self._oldest_seq() - 1),
                bytes=self._spool.marks.bytes,
                oldest_age_ms=0 if oldest is None else max(0, self._clock.wall_ms() - oldest),
                parked=parked,
                lost_sets=self._spool.marks.lost_sets,
                unspooled_sets=self._spool.marks.unspooled_sets,
                released_early=self._spool.marks.released_early,
            )

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        self._spool.close()

    # --- internal --------------------------------------------------------------------------------

    def _records(self, condition: str, *values: int) -> list[Record]:
        """Return the records that a condition in SQL selects."""
        query = f"SELECT seq, unit, kind, payload, parked FROM record WHERE {condition}"  # noqa: S608 - only constants
        return list(map(Record._make, self._spool.db.execute(query, values)))

    def _insert(self, units: Sequence[tuple[int, Sequence[bytes]]], size: int, now: int, parked: str = "") -> None:
        """Store units at the end of the outbox.

        units: (kind, payloads) of each.
        size: the size of all units in bytes.
        parked: the reason if the numbers are declared as skipped; "" if not."""
        records = []
        seq = self.last_seq
        for kind, payloads in units:
            unit = seq + 1
            for payload in payloads:
                seq += 1
                records.append((seq, unit, kind, payload, now, parked or None))
        self._spool.db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)", records)
        marks = self._spool.marks
        self._spool.mark(last_seq=seq, rows=marks.rows + len(records), bytes=marks.bytes + size)

    def _keep_reserve(self, size: int) -> None:
        """Raise OutboxUnavailable if storing `size` bytes would leave too little space for removing sent records."""
        needed = RESERVE_BYTES + 2 * size
        if self._free_bytes() >= needed:
            return
        self._spool.fold()
        free = self._free_bytes()
        if free + self._spool.unused_bytes() < needed:
            raise OutboxUnavailable(
                f"outbox {self.path} cannot be written: {free // 1024} KiB of its volume are free, and "
                f"{needed // 1024} KiB are needed, including {RESERVE_BYTES // 1024} KiB for removing sent records; "
                "free some space on the volume"
            )

    def _is_volume_nearly_full(self) -> bool:
        """Return True if the volume may lack space for the log of a transaction that removes all records."""
        return self._free_bytes() < RESERVE_BYTES + 2 * self._spool.marks.bytes

    def _volume_bytes(self) -> int:
        """Return the free bytes for this process on the outbox's volume."""
        try:
            volume = os.statvfs(self.path.parent)
        except OSError:
            return 2**62  # for example if the folder is missing: writing creates it or reports the fault
        return volume.f_bavail * volume.f_frsize

    def _make_room(self, now: int, size: int) -> bool:
        """Make room for `size` bytes, if necessary by deleting records that the accountant has checkpointed. Return
        False if there is no room, or if the oldest unsent record is too old."""
        oldest = self._oldest_unsent_ms()
        if oldest is not None and now - oldest > self._max_age_ms:
            return False
        if self._spool.marks.bytes + size > self._max_bytes:
            # Checkpointed records are needed only if the accountant's volume is lost. New records have no other copy.
            before = self._spool.marks.rows
            self._drop(self._spool.marks.checkpointed_seq)
            released = before - self._spool.marks.rows
            if released:
                self._spool.mark(released_early=self._spool.marks.released_early + released)
                log.warning(
                    "the outbox is full: records are deleted before they are archived", extra={"rows": released}
                )
        return self._spool.marks.bytes + size <= self._max_bytes

    def _record_loss(self, loss: LostRecords, reason: str, now: int) -> None:
        """Record a loss. One skipped number stands for an uninterrupted period of losses; later losses in the period
        are added to it."""
        newest = self._spool.db.execute("SELECT kind, parked FROM record WHERE seq = ?", (self.last_seq,)).fetchone()
        if newest != (LOSS, reason):
            self._insert([(LOSS, [b""])], _ROW_OVERHEAD, now, reason)
            log.error("records are lost: their time stays unmetered", extra={"reason": reason})
        self._spool.db.execute(
            "INSERT INTO loss VALUES (?, ?, ?, ?, ?) ON CONFLICT (seq) DO UPDATE SET"
            " first_ms = min(first_ms, excluded.first_ms), last_ms = max(last_ms, excluded.last_ms),"
            " sets = sets + excluded.sets, facts = facts + excluded.facts",
            (self.last_seq, loss.first_ms, loss.last_ms, loss.sets, loss.facts),
        )

    def _drop(self, upto: int) -> None:
        rows, size = self._spool.db.execute(
            "SELECT count(*), coalesce(sum(length(payload) + ?), 0) FROM record WHERE seq <= ?", (_ROW_OVERHEAD, upto)
        ).fetchone()
        if rows:
            self._spool.db.execute("DELETE FROM record WHERE seq <= ?", (upto,))
            self._spool.db.execute("DELETE FROM loss WHERE seq <= ?", (upto,))
            self._spool.mark(rows=self._spool.marks.rows - rows, bytes=self._spool.marks.bytes - size)

    def _renumber(self) -> None:
        shift = self._oldest_seq() - 1
        # Through negative numbers, so that a record never gets a key that another record still has.
        self._spool.db.execute("UPDATE record SET seq = ? - seq, unit = ? - unit", (shift, shift))
        self._spool.db.execute("UPDATE record SET seq = -seq, unit = -unit")
        self._spool.db.execute("UPDATE loss SET seq = ? - seq", (shift,))
        self._spool.db.execute("UPDATE loss SET seq = -seq")
        # The new epoch is later than the old one, even if the clock is wrong: of records sent under both epochs, those
        # of the earlier one count.
        at_ms = max(self._clock.wall_ms(), uuid7_ms(self.epoch) + 1)
        self._spool.mark(
            epoch=self._spool.new_epoch(at_ms),
            last_seq=self.last_seq - shift,
            durable_seq=0,
            checkpointed_seq=0,
        )

    def _set_parked(self, seq: int, reason: str | None) -> None:
        with self._spool.transaction():
            self._spool.db.execute(
                "UPDATE record SET parked = ? WHERE unit = (SELECT unit FROM record WHERE seq = ?) AND kind <> ?",
                (reason, seq, LOSS),
            )

    def _oldest_seq(self) -> int:
        """Return the oldest stored number; the next number if none is stored."""
        row = self._spool.db.execute("SELECT min(seq) FROM record").fetchone()
        return self.last_seq + 1 if row[0] is None else int(row[0])

    def _oldest_unsent_ms(self) -> int | None:
        row = self._spool.db.execute(
            "SELECT appended_ms FROM record WHERE seq > ? ORDER BY seq LIMIT 1", (self.durable_seq,)
        ).fetchone()
        return None if row is None else int(row[0])


def lost_records(sets: Sequence[ClosedSet], facts: int, now_ms: int) -> LostRecords:
    """Return the loss of these sets and of `facts` facts. Without sets, the loss is dated `now_ms`."""
    rows = [row for closed in sets for row in closed.rows]
    first_ms = min((row.start_ms for row in rows), default=now_ms)
    last_ms = max((row.end_ms for row in rows), default=now_ms)
    return LostRecords(first_ms, last_ms, sum(1 for closed in sets if closed.rows), facts)
