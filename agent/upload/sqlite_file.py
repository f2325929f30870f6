"""Locks, opens and creates the SQLite file of the spool, and sets a damaged file aside.

Knows sqlite and its layout, not what the numbers mean. A file that sqlite calls damaged is never
deleted: it is renamed beside the new one. The lock is a file of its own, so that it survives that.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agent.core.errors import OutboxLocked, OutboxUnavailable, SpoolNotWritable

log = logging.getLogger("agent.outbox")

LOG_PAGES = 16
"""Of 4 KiB: size of the write-ahead log from which on it is folded into the file."""
_LAYOUT = 1
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


def uuid7(wall_ms: int, randbits: Callable[[int], int] = secrets.randbits) -> str:
    """A UUID version 7: 48 bits of Unix milliseconds, then 74 random bits. Source: RFC 9562, 5.7."""
    milliseconds = wall_ms & ((1 << 48) - 1)
    value = milliseconds << 80 | 0x7 << 76 | randbits(12) << 64 | 0b10 << 62 | randbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def created_ms(uuid: str) -> int:
    """The milliseconds in a UUID version 7."""
    return int(uuid.replace("-", "")[:12], 16)


def lock(path: Path) -> int:
    """Lock `path` for this process until the returned descriptor is closed; creates the folder.

    Raises OutboxLocked when another process (or this one) has it, OutboxUnavailable when the folder
    cannot be made or written (SpoolNotWritable: for now)."""
    name = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        kind = SpoolNotWritable if error.errno in _NO_WRITES else OutboxUnavailable
        raise kind(f"spool folder {path.parent} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise OutboxLocked(f"outbox {path} is in use by another agent; one outbox, one agent") from error
        raise OutboxUnavailable(f"outbox {path} cannot be locked: {error.strerror}") from error
    return descriptor


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of the same name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, and will be for the next call too."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


def write_anew(db: sqlite3.Connection, path: Path, now_ms: int) -> None:
    """Write all that `db` shows to a new file at `path`, of which its own is gone. What lies there is moved aside.

    Close `db` before the new one is opened: it takes the log of that name along.
    Raises sqlite3.Error, OutboxUnavailable."""
    fresh = path.with_name(f"{path.name}.fresh")
    try:
        fresh.unlink(missing_ok=True)
        with closing(sqlite3.connect(fresh)) as copy:
            db.backup(copy)
        kept = _move_aside(path, now_ms) if path.exists() else None
        fresh.replace(path)
    except OSError as error:
        raise OutboxUnavailable(f"outbox {path} was removed and cannot be written anew: {error.strerror}") from error
    log.critical("outbox was removed: written anew", extra={"path": str(path), "found_instead": str(kept or "nothing")})


def connect(path: Path, now_ms: int, *, fsync: bool) -> sqlite3.Connection:
    """Open or create. A damaged file is moved aside (`.damaged-<now_ms>`) and a new one begun, said loudly.

    Raises OutboxUnavailable for everything else: permission, a newer layout; SpoolNotWritable for want of space
    and what else may pass."""
    try:
        try:
            return _connect(path, fsync)
        except sqlite3.OperationalError:
            raise  # no space, no permission, a failing disk: the file itself may be fine
        except sqlite3.DatabaseError as error:
            kept = _move_aside(path, now_ms)
            log.critical(
                "outbox damaged: kept aside, a new epoch begins", extra={"kept": str(kept), "reason": str(error)}
            )
            return _connect(path, fsync)
    except sqlite3.Error as error:
        # The low byte is the kind of error, the others say more of it.
        passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_SQLITE_WRITES
        kind = SpoolNotWritable if passing else OutboxUnavailable
        raise kind(f"outbox {path} cannot be opened: {error}") from error


def _connect(path: Path, fsync: bool) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        # One process has the file, by the lock beside it. The log's index is in this process's memory then, and not in
        # a mapped file (-shm), which another program could shorten: that would end the process (SIGBUS).
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        # The log is folded in early, and given back: on a small volume it would leave no room for records, nor for the
        # transaction that removes those that were sent.
        db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        db.execute(f"PRAGMA journal_size_limit={LOG_PAGES * 4096}")
        db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        layout = db.execute("PRAGMA user_version").fetchone()[0]
        if layout > _LAYOUT:
            raise OutboxUnavailable(f"outbox {path} was written by a newer agent (layout {layout}, known: {_LAYOUT})")
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
