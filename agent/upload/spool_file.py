"""Keeps the spool's sqlite file: opens and locks it, runs transactions, and finds and repairs damage.

The file has two tables: `meta` with a few named values, and `record` with numbered records. Each value and each record
is stored with a checksum, because sqlite checks only the structure of its file, not the content. Every reader checks
what it reads. When the file is opened, everything is checked:

- A damaged value is removed, so that it counts as absent.
- The numbers of the records run without a hole (`SpoolMarks`). A record that is damaged or missing, and the other
  records of its unit, are replaced by records of the kind LOSS. Their numbers are sent as skipped, so the accountant
  knows that something is unmetered, and all other records are sent.
- If the structure or the marks are damaged, all intact units are copied to a new file, which takes the place of the
  damaged one. The damaged file is kept beside it (`.damaged-<ms>`), the newest one only, where the volume has room for
  both.

Each damage is logged with what it costs. If damage is found later, the file is opened again, as after a restart.

sqlite uses a rollback journal with synchronous=FULL. A write-ahead log would hold committed records for a while, and
sqlite drops without an error everything that follows a damaged byte of a log. The lock is a separate file, which keeps
its name and admits one process at a time. A mutex lets the threads of the process use the file in turn.

The module knows neither the content of the records nor the accountant."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote
from zlib import crc32

import msgspec

from gputally.base.atomic_file import sync
from gputally.base.clock import Clock
from gputally.base.errors import AgentError

log = logging.getLogger("agent.upload.spool_file")

SYSTEM_RANDOM: Final = random.SystemRandom()
INTERVAL, FACTS, LOSS = 0, 1, 2
"""Kinds of a record: a usage row, facts of a pod, a number without a record."""
SPOOL_DAMAGED: Final = "spool-damaged"
"""Reason of the skipped number for a record that was damaged on the disk."""
RESERVE_BYTES: Final = 128 * 1024
"""Bytes that stay free on the volume, because removing sent records needs space for the transaction's journal."""
ROW_OVERHEAD: Final = 64
"""Bytes of a record's other columns and its share of a page, in addition to its payload."""
METER_STATE, CLOCK_ORIGINS = "meter_state", "clock_origins"
"""Keys of stored values."""
_MARKS = "marks"
_PAGE = 4096
_MAGIC = b"SQLite format 3\0"
_LAYOUT = 1
_REPEATED = 0x01010101
"""The layout's number is stored once in each byte of sqlite's `user_version`, so that damage is no other layout."""
_MODE = 0o640
"""Permissions of the files, which contain names of pods and users that other users of the node must not read."""
_MOST_UNREADABLE = 10_000
"""Number of consecutive unreadable numbers after which the rest of a damaged file counts as lost."""
_MOST_IN_MEMORY = 64 * 2**20
"""Greatest size of a damaged file that is repaired in memory, where the volume has no room for a second file."""
_AT_ONCE = 1_000
"""Number of records in memory while many are read or written."""
_NO_WRITES = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
_NO_SQLITE_WRITES = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY})
_NO_DAMAGE = _NO_SQLITE_WRITES | {
    0, sqlite3.SQLITE_PERM, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_MISUSE,
}  # fmt: skip
"""sqlite's errors that say nothing about the content of the file. Of a file that this module wrote, every other error
is a damage: a table that is missing, a file format that is unknown, a number that exists already."""
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;  -- value: checksum and content
CREATE TABLE record (
    seq INTEGER PRIMARY KEY,
    unit INTEGER NOT NULL,          -- first seq of the set; facts and losses are units of their own
    size INTEGER NOT NULL,          -- number of records of the unit
    kind INTEGER NOT NULL,          -- 0 interval, 1 facts, 2 loss
    origin INTEGER NOT NULL,        -- id of the clock origin that dated it; 0 if none is known
    appended_ms INTEGER NOT NULL,
    parked TEXT,                    -- why it is declared as skipped instead of sent
    payload BLOB NOT NULL,          -- the wire form with seq 0; empty for a loss
    checksum INTEGER NOT NULL
);
"""


class OutboxLocked(AgentError):
    """Another agent uses this outbox."""


class OutboxUnavailable(AgentError):
    """The outbox cannot be opened, read or written, for example because the disk is full or a permission is missing."""


class SpoolNotWritable(OutboxUnavailable):
    """The disk cannot be written now, because it is full, read-only or failing. Writing may succeed later."""


_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What sqlite raises. It cannot decode a message of its own that contains a damaged name of a table."""


class _Damage(sqlite3.DatabaseError):
    """The file has a fault that sqlite does not see."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class SpoolRecord(NamedTuple):
    """A stored record.

    seq: its sequence number.
    unit, size: the number of the first record of its unit (a set, or one record alone), and the number of its records.
    kind: INTERVAL, FACTS or LOSS.
    origin: the id of the clock origin that dated it; 0 if none is known.
    parked: the reason why its number is declared as skipped; None if the record is sent.
    payload: the record in its wire form with the number 0; empty for a LOSS."""

    seq: int
    unit: int
    size: int
    kind: int
    origin: int
    appended_ms: int
    parked: str | None
    payload: bytes
    checksum: int = 0

    @property
    def intact(self) -> bool:
        return self.checksum == self._sum()

    def sealed(self) -> SpoolRecord:
        """Return the record with its checksum."""
        return self._replace(checksum=self._sum())

    def _sum(self) -> int:
        *columns, payload = self[:8]
        content: object = payload  # damage can turn bytes into a text or a number
        return crc32(content if isinstance(content, bytes) else b"", crc32(repr(columns).encode()))


class SpoolMarks(msgspec.Struct, frozen=True):
    """Sequence numbers and sums that describe the stored records, whose numbers are (last_seq - rows, last_seq].

    last_seq: the newest assigned number.
    durable_seq, checkpointed_seq: the accountant's marks (`agent.wire.Ack`).
    rows, bytes, parked: number and size of the stored records, and number of those that are declared as skipped.
    lost_sets, unspooled_sets, released_early: as in `agent.upload.spool.Stats`."""

    epoch: str
    last_seq: int = 0
    durable_seq: int = 0
    checkpointed_seq: int = 0
    rows: int = 0
    bytes: int = 0
    parked: int = 0
    lost_sets: int = 0
    unspooled_sets: int = 0
    released_early: int = 0

    @property
    def oldest_seq(self) -> int:
        """The oldest stored number; the next number if none is stored."""
        return self.last_seq - self.rows + 1


_stored_marks = msgspec.json.Decoder(SpoolMarks)


def uuid7(wall_ms: int, randbits: Callable[[int], int] = SYSTEM_RANDOM.getrandbits) -> str:
    """Return a UUID version 7: 48 bits of Unix milliseconds, then 74 random bits. Source: RFC 9562, 5.7."""
    milliseconds = wall_ms & ((1 << 48) - 1)
    value = milliseconds << 80 | 0x7 << 76 | randbits(12) << 64 | 0b10 << 62 | randbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def uuid7_ms(uuid: str) -> int:
    """Return the Unix milliseconds in a UUID version 7."""
    return int(uuid.replace("-", "")[:12], 16)


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def lock(path: Path) -> int:
    """Lock the outbox at `path` until the returned file descriptor is closed. Creates the folder.

    Raises OutboxLocked if another process, or an earlier call in this process, has the lock; OutboxUnavailable if the
    folder cannot be created or written (SpoolNotWritable if writing may succeed later)."""
    name = lock_path(path)
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


# --- the whole file -------------------------------------------------------------------------------------------------


def _open_file(
    path: Path, now_ms: int, *, fsync: bool, randbits: Callable[[int], int], free_bytes: Callable[[], int]
) -> tuple[sqlite3.Connection, SpoolMarks]:
    """Open or create the file, check all of it, and repair what is damaged. Return the marks too. Raises
    sqlite3.Error, OSError, and OutboxUnavailable for a newer layout."""
    _refuse_newer_layout(path)
    try:
        return _checked(path, now_ms, fsync, randbits)
    except _ERRORS as error:
        if not _is_damage(error):
            raise
        log.critical("the outbox is damaged", extra={"path": str(path), "reason": str(error)})
    _salvage(path, now_ms, fsync, randbits, free_bytes)
    return _checked(path, now_ms, fsync, randbits)


def _checked(
    path: Path, now_ms: int, fsync: bool, randbits: Callable[[int], int]
) -> tuple[sqlite3.Connection, SpoolMarks]:
    db = _connect(path, now_ms, fsync, randbits)
    try:
        if _constant(_first_page_of(path)) != _constant(_first_page()):
            raise _Damage("the first page is damaged")
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _Damage(verdict)
        db.execute("BEGIN IMMEDIATE")
        marks = _repair(db, now_ms)
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.close()
        raise
    return db, marks


def _connect(path: Path, now_ms: int, fsync: bool, randbits: Callable[[int], int]) -> sqlite3.Connection:
    """Open the file. Create its tables and marks if it is empty."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        db.text_factory = _text
        db.execute(f"PRAGMA page_size={_PAGE}")
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute(f"PRAGMA journal_mode={'TRUNCATE' if fsync else 'MEMORY'}")
        db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
        db.execute("SELECT count(*) FROM sqlite_master")  # undoes a transaction that was not completed
        if path.stat().st_size == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_LAYOUT * _REPEATED};")
            _put(db, _MARKS, msgspec.json.encode(SpoolMarks(uuid7(now_ms, randbits))))
            db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.close()
        raise
    return db


def _text(raw: bytes) -> str:
    """Decode any text, because a damaged byte may not be UTF-8. The checksum shows the damage."""
    return raw.decode("utf-8", "replace")


def _first_page_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_PAGE)


@functools.cache
def _first_page() -> bytes:
    """Return the first page of a new file: sqlite's header and the two tables. It never changes, except for some
    numbers of the header."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"PRAGMA page_size={_PAGE}")
        db.executescript(f"{_SCHEMA} PRAGMA user_version={_LAYOUT * _REPEATED};")
        return db.serialize()[:_PAGE]


def _constant(page: bytes) -> bytes:
    """Return what never changes in the first page. Source: sqlite.org/fileformat.html, 1.3: the numbers at 24 to 44 and
    at 92 to 100 count changes and pages, and name the version of sqlite."""
    return page[:24] + page[44:92] + page[100:]


def _refuse_newer_layout(path: Path) -> None:
    with suppress(FileNotFoundError):
        page = _first_page_of(path)
        layout = set(page[60:64])
        if page.startswith(_MAGIC) and len(layout) == 1 and (newer := layout.pop()) > _LAYOUT:
            raise OutboxUnavailable(
                f"outbox {path} was written by a newer agent (layout {newer}; known: {_LAYOUT}): update this agent"
            )


def _is_damage(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Return True if the error comes from the content of the file."""
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF not in _NO_DAMAGE


# --- repair ---------------------------------------------------------------------------------------------------------


def intact_units(records: Iterable[SpoolRecord]) -> Iterator[list[SpoolRecord]]:
    """Yield the units whose records are all there and intact. records: in the order of their numbers."""
    unit: list[SpoolRecord] = []
    for record in records:
        if unit and (record.unit, record.seq) != (unit[0].seq, unit[-1].seq + 1):
            unit = []
        if record.intact and (unit or record.seq == record.unit):
            unit.append(record)
        if unit and len(unit) == unit[0].size:
            yield unit
            unit = []


def _repair(db: sqlite3.Connection, now_ms: int) -> SpoolMarks:
    """Remove damaged values, and replace damaged records by losses, in the present transaction. Return the marks."""
    values = {key: _unsealed(key, value) for key, value in db.execute("SELECT key, value FROM meta")}
    marks = _decoded_marks(values.get(_MARKS))
    if marks is None:
        raise _Damage("the marks are damaged or missing")
    if damaged := [key for key, value in values.items() if value is None]:
        db.execute("DELETE FROM meta")
        for key, value in values.items():
            if value is not None:
                _put(db, key, value)
        log.critical(
            "stored values are damaged and removed: the time since the last agent's end may be unmetered, and dates of "
            "a wrong clock may stay uncorrected",
            extra={"values": damaged},
        )
    rows = size = parked = 0
    sound: list[tuple[int, int]] = []
    for unit in intact_units(map(SpoolRecord._make, db.execute("SELECT * FROM record ORDER BY seq"))):
        rows += len(unit)
        size += sum([len(record.payload) + ROW_OVERHEAD for record in unit])
        parked += sum([record.parked is not None for record in unit])
        begin = sound.pop()[0] if sound and sound[-1][1] + 1 == unit[0].seq else unit[0].seq
        sound.append((begin, unit[-1].seq))
    first, last = marks.oldest_seq, marks.last_seq
    if sound:
        first, last = min(first, sound[0][0]), max(last, sound[-1][1])
    lost = 0
    edges = [first - 1, *[edge for low, high in sound for edge in (low - 1, high)], last]
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        if low < high:
            _replace_by_losses(db, low + 1, high, now_ms)
            lost += high - low
    outside = db.execute("DELETE FROM record WHERE seq NOT BETWEEN ? AND ?", (first, last)).rowcount
    if outside:
        log.critical("damaged records without a number are removed", extra={"records": outside})
    true = msgspec.structs.replace(
        marks, last_seq=last, rows=rows + lost, bytes=size + lost * ROW_OVERHEAD, parked=parked + lost
    )
    if true != marks:
        _put(db, _MARKS, msgspec.json.encode(true))
    return true


def _replace_by_losses(db: sqlite3.Connection, first: int, last: int, now_ms: int) -> None:
    around = [
        db.execute("SELECT appended_ms FROM record WHERE seq < ? ORDER BY seq DESC LIMIT 1", (first,)).fetchone(),
        db.execute("SELECT appended_ms FROM record WHERE seq > ? ORDER BY seq LIMIT 1", (last,)).fetchone(),
    ]
    db.execute("DELETE FROM record WHERE seq BETWEEN ? AND ?", (first, last))
    _insert(db, [loss(seq, now_ms, SPOOL_DAMAGED) for seq in range(first, last + 1)])
    after, before = (None if row is None else row[0] for row in around)
    log.critical(
        "records of the outbox are damaged: they are declared as lost, and their time stays unmetered",
        extra={"first_seq": first, "last_seq": last, "stored_after_ms": after, "stored_before_ms": before},
    )


def loss(seq: int, now_ms: int, reason: str) -> SpoolRecord:
    """Return a record that stands for lost ones."""
    return SpoolRecord(seq, seq, 1, LOSS, 0, now_ms, reason, b"").sealed()


def _salvage(
    path: Path, now_ms: int, fsync: bool, randbits: Callable[[int], int], free_bytes: Callable[[], int]
) -> None:
    """Replace a file whose structure or marks are damaged by a new one with everything that can be read and is intact.

    If the marks are lost, a new epoch begins, and the records get new numbers: the accountant drops those that it has
    already."""
    _mend_first_page(path)
    fresh = path.with_name(f"{path.name}.fresh")
    fresh.unlink(missing_ok=True)
    size = path.stat().st_size
    if free_bytes() >= 2 * size + RESERVE_BYTES:
        source = sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)
    elif size > _MOST_IN_MEMORY:
        raise SpoolNotWritable(
            f"outbox {path} is damaged, and its volume has no room for a second file: free {2 * size // 2**20} MiB"
        )
    else:
        source = sqlite3.connect(":memory:")
        source.deserialize(path.read_bytes())
        path.unlink()
    source.text_factory = _text
    with closing(source), closing(_connect(fresh, now_ms, fsync, randbits)) as copy:
        values = {key: _readable_value(source, key) for key in (_MARKS, METER_STATE, CLOCK_ORIGINS)}
        marks = _decoded_marks(values.pop(_MARKS))
        copy.execute("BEGIN IMMEDIATE")
        for key, value in values.items():
            if value is not None:
                _put(copy, key, value)
        kept = 0
        for unit in intact_units(_readable_records(source, marks)):
            moved = unit if marks is not None else [renumbered(record, kept + 1 - unit[0].seq) for record in unit]
            _insert(copy, moved)
            kept += len(unit)
        if marks is None:
            marks = _decoded_marks(_readable_value(copy, _MARKS))
            assert marks is not None, "it was just created"
            kept += 1  # how many records are missing is unknown
            _insert(copy, [loss(kept, now_ms, SPOOL_DAMAGED)])
            marks = msgspec.structs.replace(marks, last_seq=kept, rows=kept)
        _put(copy, _MARKS, msgspec.json.encode(marks))
        copy.execute("COMMIT")
    aside = _put_in_place(fresh, path, now_ms)
    log.critical(
        "the outbox was damaged: its intact records are in a new file",
        extra={"records": kept, "epoch": marks.epoch, "kept_beside": str(aside or "nothing")},
    )


def renumbered(record: SpoolRecord, by: int) -> SpoolRecord:
    """Return the record with another number."""
    return record._replace(seq=record.seq + by, unit=record.unit + by).sealed()


def _readable_value(db: sqlite3.Connection, key: str) -> bytes | None:
    """Return a value; None if it is absent, damaged or unreadable."""
    with suppress(*_ERRORS):
        row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else _unsealed(key, row[0])
    return None


def _readable_records(db: sqlite3.Connection, marks: SpoolMarks | None) -> Iterator[SpoolRecord]:
    """Yield the records that can be read, in the order of their numbers."""
    last = None if marks is None else marks.last_seq
    seq = 0 if marks is None else marks.oldest_seq - 1
    failed = 0
    while failed < _MOST_UNREADABLE and (last is None or seq < last):
        try:
            row = db.execute("SELECT * FROM record WHERE seq > ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
        except _ERRORS:
            failed += 1
            seq += 1
            continue
        if row is None or not isinstance(row[0], int) or row[0] <= seq:
            return
        failed = 0
        seq = row[0]
        yield SpoolRecord._make(row)


def _mend_first_page(path: Path) -> None:
    """Write the first page anew, because without it nothing in the file can be found."""
    with path.open("r+b") as file:
        pages = max(os.fstat(file.fileno()).st_size // _PAGE, 1)
        page = bytearray(_first_page())
        page[24:28] = page[92:96] = (1).to_bytes(4, "big")  # equal, so that the number of pages counts
        page[28:32] = pages.to_bytes(4, "big")
        page[32:40] = bytes(8)  # no page is free
        file.write(page)


def _put_in_place(fresh: Path, path: Path, now_ms: int) -> Path | None:
    """Let the file `fresh` take the place of `path`. Keep the file that was there beside it, the newest such file only,
    and return its path; None if there was none or it could not be kept."""
    aside = path.with_name(f"{path.name}.damaged-{now_ms}")
    for older in path.parent.glob(f"{path.name}.damaged-*"):
        older.unlink(missing_ok=True)
    with suppress(OSError):  # a file system without links keeps none
        os.link(path, aside)
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # sqlite would apply it to the new file
    fresh.replace(path)
    sync(path.parent)
    return aside if aside.exists() else None


def write_copy(db: sqlite3.Connection, path: Path, now_ms: int) -> None:
    """Write the contents of `db`, whose file was removed, to a new file at `path`. If there is another file, keep it
    beside.

    Close `db` before you open the new file. Raises sqlite3.Error, OutboxUnavailable."""
    fresh = path.with_name(f"{path.name}.fresh")
    try:
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
        with closing(sqlite3.connect(fresh)) as copy:
            db.backup(copy)
        replaced = _put_in_place(fresh, path, now_ms)
    except OSError as error:
        raise OutboxUnavailable(f"outbox {path} was removed and cannot be rewritten: {error.strerror}") from error
    log.critical(
        "the outbox file was removed: it is written again",
        extra={"path": str(path), "file_in_its_place": str(replaced or "none")},
    )


# --- values and records ---------------------------------------------------------------------------------------------


def _put(db: sqlite3.Connection, key: str, value: bytes) -> None:
    sealed = crc32(value, crc32(key.encode())).to_bytes(4, "big") + value
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, sealed))


def _unsealed(key: object, stored: object) -> bytes | None:
    """Return a value without its checksum; None if it or its key is damaged."""
    if not (isinstance(stored, bytes) and isinstance(key, str)):
        return None
    value = stored[4:]
    return value if crc32(value, crc32(key.encode())).to_bytes(4, "big") == stored[:4] else None


def _decoded_marks(value: bytes | None) -> SpoolMarks | None:
    return None if value is None else _stored_marks.decode(value)


def _insert(db: sqlite3.Connection, records: Iterable[SpoolRecord]) -> None:
    db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", records)


class Spool:
    """The sqlite file of the outbox, opened. Raises OutboxLocked, OutboxUnavailable.

    patient: True to open the file later if it cannot be opened now, because the disk cannot be written.
    randbits: returns random bits for the id of the epoch.
    free_bytes: returns the free bytes of the volume.

    db: use it only within `reading` or `transaction`.
    marks: read them at any time; before the file is open, they describe an empty file. Change them with `mark` within
        `transaction`."""

    db: sqlite3.Connection

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        fsync: bool,
        patient: bool,
        randbits: Callable[[int], int],
        free_bytes: Callable[[], int],
    ) -> None:
        self.marks = SpoolMarks("")
        self._path = path
        self._clock = clock
        self._fsync = fsync
        self._randbits = randbits
        self._free_bytes = free_bytes
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
        with self._mutex, self._failures("read"):
            self._ensure_open()
            yield

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction, while other threads wait. Changes of the marks are stored in it. Raises
        OutboxUnavailable."""
        with self._mutex, self._failures("written"):
            self._ensure_open()
            if _device_and_inode(self._path) != self._file:
                self._rewrite_removed_file()
            before = self.marks
            try:
                self.db.execute("BEGIN IMMEDIATE")
                yield
                if self.marks != before:
                    self.put(_MARKS, msgspec.json.encode(self.marks))
                self.db.execute("COMMIT")
            except BaseException:
                self.marks = before
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def unused_bytes(self) -> int:
        """Return the number of bytes in the file that removed records left and later records reuse. Raises
        OutboxUnavailable."""
        with self.reading():
            return int(self.db.execute("PRAGMA freelist_count").fetchone()[0]) * _PAGE

    def mark(self, **changes: int | str) -> None:
        """Change marks within a transaction, which stores them."""
        self.marks = msgspec.structs.replace(self.marks, **changes)

    def new_epoch(self, at_ms: int) -> str:
        """Return the id of a new epoch that begins at `at_ms`."""
        return uuid7(at_ms, self._randbits)

    def get(self, key: str) -> bytes | None:
        """Return a value stored beside the records; None if there is none. Use it within `reading` or `transaction`."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        value = _unsealed(key, row[0])
        if value is None:
            raise _Damage(f"the stored value {key} is damaged")
        return value

    def put(self, key: str, value: bytes) -> None:
        """Store a value beside the records, within a transaction."""
        _put(self.db, key, value)

    def records(self, condition: str, *values: int) -> list[SpoolRecord]:
        """Return the records that a condition in SQL selects. Use it within `reading` or `transaction`."""
        rows = self.db.execute(f"SELECT * FROM record WHERE {condition}", values)  # noqa: S608 - only constants
        records = list(map(SpoolRecord._make, rows))
        if damaged := [record.seq for record in records if not record.intact]:
            raise _Damage(f"record {damaged[0]} is damaged")
        return records

    def insert(self, records: Iterable[SpoolRecord]) -> None:
        """Store new records, with their checksums, within a transaction."""
        _insert(self.db, records)

    def update(self, condition: str, values: Iterable[int], change: Callable[[SpoolRecord], SpoolRecord | None]) -> int:
        """Replace each record that a condition in SQL selects by what `change` returns, within a transaction. None
        leaves a record as it is. The number of a record may only decrease, by the same for all. Return the number of
        changed records."""
        count = 0
        parameters, after = tuple(values), 0
        while batch := self.records(f"({condition}) AND seq > ? ORDER BY seq LIMIT {_AT_ONCE}", *parameters, after):
            after = batch[-1].seq
            pairs = [(record, changed) for record in batch if (changed := change(record)) is not None]
            self.db.executemany("DELETE FROM record WHERE seq = ?", [(record.seq,) for record, _ in pairs])
            self.insert([changed.sealed() for _, changed in pairs])
            count += len(pairs)
            self.mark(
                bytes=self.marks.bytes + sum([len(new.payload) - len(old.payload) for old, new in pairs]),
                parked=self.marks.parked
                + sum([(new.parked is not None) - (old.parked is not None) for old, new in pairs]),
            )
        return count

    def remove(self, upto: int) -> int:
        """Remove the records up to a number, within a transaction. Return their number."""
        rows, size, parked = self.db.execute(
            "SELECT count(*), coalesce(sum(length(payload) + ?), 0), count(parked) FROM record WHERE seq <= ?",
            (ROW_OVERHEAD, upto),
        ).fetchone()
        if rows:
            self.db.execute("DELETE FROM record WHERE seq <= ?", (upto,))
            self.mark(rows=self.marks.rows - rows, bytes=self.marks.bytes - size, parked=self.marks.parked - parked)
        return int(rows)

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        with self._mutex:
            self._closed = True
            self._close_file()

    def _open(self) -> None:
        used = lock_path(self._path).exists()
        self._lock = lock(self._path)
        try:
            if used and not (self._path.exists() and self._path.stat().st_size):
                log.critical(
                    "the outbox file is missing or empty: a new epoch begins, and the records that it had are lost",
                    extra={"path": str(self._path)},
                )
            with self._failures("opened"):
                self.db, self.marks = _open_file(
                    self._path,
                    self._clock.wall_ms(),
                    fsync=self._fsync,
                    randbits=self._randbits,
                    free_bytes=self._free_bytes,
                )
                self._file = _device_and_inode(self._path)
                self._opened = True
        except BaseException:
            self._unlock()
            raise

    def _rewrite_removed_file(self) -> None:
        """Write the file again after another program removed or replaced it. The open file still has all contents."""
        self._unlock()  # the lock file may be gone as well
        try:
            self._lock = lock(self._path)
            write_copy(self.db, self._path, self._clock.wall_ms())
            self._close_file()
            self._open()
        except OutboxLocked as error:
            raise OutboxUnavailable(str(error)) from error

    def _close_file(self) -> None:
        if self._opened:
            with suppress(sqlite3.Error):
                self.db.close()
        self._unlock()
        self._opened = self._damaged = False

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _ensure_open(self) -> None:
        if self._closed:
            raise OutboxUnavailable(f"outbox {self._path} is closed: the agent stops")
        if self._damaged:
            self._close_file()  # it is opened again below, as after a restart
        if not self._opened:
            try:
                self._open()
            except OutboxLocked as error:
                raise OutboxUnavailable(str(error)) from error

    @contextmanager
    def _failures(self, participle: str) -> Iterator[None]:
        """Turn errors of sqlite and of the operating system into OutboxUnavailable, and remember damage."""
        try:
            yield
        except _ERRORS as error:
            self._damaged |= self._opened and _is_damage(error)
            not_writable = getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_SQLITE_WRITES
            kind = SpoolNotWritable if not_writable else OutboxUnavailable
            raise kind(f"outbox {self._path} cannot be {participle}: {error}") from error
        except OSError as error:
            kind = SpoolNotWritable if error.errno in _NO_WRITES else OutboxUnavailable
            raise kind(f"outbox {self._path} cannot be {participle}: {error.strerror}") from error


def _device_and_inode(path: Path) -> tuple[int, int] | None:
    """Return what identifies the file at this path; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
