"""The outbox's file while it is open: who may write, transactions, and the figures that change with the records.

One process at a time holds it, by a lock beside the file; within the process, one thread at a time. The marks stand in
the file and are changed in the transaction that changes the records they tell of, or not at all. What a record or a
mark means is the outbox's; how the file is laid out is `agent.shipping.spoolfile`'s.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agent.clock import Clock
from agent.errors import OutboxLocked, OutboxUnavailable, SpoolNotWritable
from agent.shipping import spoolfile


class Marks(msgspec.Struct, frozen=True):
    """Everything about the records that must change together with them."""

    epoch: str
    last_seq: int = 0
    durable_seq: int = 0
    checkpointed_seq: int = 0
    rows: int = 0
    bytes: int = 0
    lost_sets: int = 0
    unspooled_sets: int = 0
    released_early: int = 0


_stored_marks = msgspec.json.Decoder(Marks)


class Spool:
    """Raises OutboxLocked, OutboxUnavailable.

    path: the sqlite file; its folder is created. fsync=False trades durability for speed. patient: where the disk takes
    no writes now, it is opened as soon as it does. randbits: where an epoch's randomness comes from.

    db, marks: to be used within `reading` or `transaction`; the marks may be looked at any time once it is open."""

    db: sqlite3.Connection
    marks: Marks

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
        """The file is open and nobody else uses it. Raises OutboxUnavailable."""
        with self._mutex:
            self._be_open()
            with self._failures("read"):
                yield

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One sqlite transaction; the marks change with it or not at all. Raises OutboxUnavailable."""
        with self._mutex:
            self._be_open()
            if spoolfile.identity(self._path) != self._file:
                self._rescue()
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
        """Fold the write-ahead log into the file and give its space back. Raises OutboxUnavailable."""
        with self.reading():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def unused_bytes(self) -> int:
        """Of the file: pages whose records were removed, which the next ones take. Raises OutboxUnavailable."""
        with self.reading():
            pages, size = (self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
            return int(pages * size)

    def mark(self, **changes: int | str) -> None:
        """Within a transaction."""
        self.marks = msgspec.structs.replace(self.marks, **changes)

    def new_epoch(self, at_ms: int) -> str:
        """The name of an epoch that begins then."""
        return spoolfile.uuid7(at_ms, self._randbits)

    def get(self, key: str) -> bytes | None:
        """Something kept beside the records; None where it never was."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: str, value: bytes) -> None:
        """Keep something beside the records, within a transaction."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def close(self) -> None:
        """Close the file and give the lock back. Idempotent."""
        with self._mutex:
            self._closed = True
            if self._opened:
                self.db.close()
            self._unlock()

    def _open(self) -> None:
        self._lock = spoolfile.lock(self._path)
        try:
            self.db = spoolfile.connect(self._path, self._clock.wall_ms(), fsync=self._fsync)
            self.marks = self._load()
        except BaseException:
            self._unlock()
            raise
        self._file = spoolfile.identity(self._path)
        self._opened = True

    def _rescue(self) -> None:
        """Somebody removed the file, or put another in its place: what is open here is still all there."""
        self._unlock()  # that file may be gone as well
        try:
            self._lock = spoolfile.lock(self._path)
            with self._failures("written anew"):
                spoolfile.write_anew(self.db, self._path, self._clock.wall_ms())
            self._let_go()
            self._open()
        except OutboxLocked as error:
            raise OutboxUnavailable(str(error)) from error

    def _let_go(self) -> None:
        self.db.close()
        self._unlock()
        self._opened = self._damaged = False

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _be_open(self) -> None:
        if self._damaged:
            self._let_go()  # to be opened anew, as after a restart
        if not self._opened and not self._closed:
            try:
                self._open()
            except OutboxLocked as error:
                raise OutboxUnavailable(str(error)) from error

    def _load(self) -> Marks:
        with self._failures("read"):
            stored = self.get("marks")
            if stored is not None:
                return _stored_marks.decode(stored)
            marks = Marks(epoch=self.new_epoch(self._clock.wall_ms()))
            self.put("marks", msgspec.json.encode(marks))
            return marks

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._damaged = self._opened and spoolfile.is_damage(error)
            raise OutboxUnavailable(f"outbox {self._path} cannot be {doing}: {error}") from error
