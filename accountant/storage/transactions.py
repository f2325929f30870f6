"""Runs transactions of one writer beside many readers.

The writer holds the lock `_writing` for a whole transaction, and the lock `_swap` only while it commits and publishes
the new `State`. A reader holds `_swap` only while it opens its snapshot and takes the state that belongs to it. A
reader therefore never sees the rows of one commit with the GPUs of another.

What is written often is never written with UPDATE: the engine refuses a checkpoint while a snapshot is open that is
older than an UPDATE, so with long queries there would be no checkpoint, and the log would grow. Rows are deleted and
inserted again instead. Corrections of an administrator update rows; the checkpoint after them waits for older
readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TypeVar
from zoneinfo import ZoneInfo

from accountant.core.errors import ArchiveUnavailable, LedgerDamaged, LedgerUnavailable
from accountant.core.settings import Quotas
from accountant.storage import retention
from accountant.storage.duckdb_engine import Cursor, Database
from accountant.storage.folder_or_object_store import FileStore
from accountant.storage.gpu_lifetimes import read_owners
from accountant.storage.ledger_state import Changes, State, load
from accountant.storage.query.window_query import Windows
from accountant.storage.record_archive import Archive
from accountant.storage.retention import Fetched, Needs, NotFetched
from accountant.storage.write.batch_admission import SET_ASIDE, GroupCommit, over_quota_numbers, stored_digests
from accountant.storage.write.gpu_and_pod_ownership import MOVE_AFTER_MS, GpuRegister, PodNodes
from accountant.storage.write.interval_writer import BookedChanges, book
from accountant.storage.write.name_ids import Dictionaries, PodKey, new_names
from accountant.storage.write.pod_labels import PodLabels
from accountant.storage.write.record_columns import GpuName, Incoming, Stream, Truth
from accountant.storage.write.rollups import compact
from accountant.storage.write.sender_quotas import SenderUse
from agent.wire import Ack
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR

T = TypeVar("T")
WAL_BYTES = 64 * 2**20
"""Size of the write-ahead log at which the writer runs a checkpoint."""
FLOOR_BYTES = 64 * 2**20
"""Free space, beyond the size of the write-ahead log, below which ingestion stops, because a checkpoint that runs out
of space ends the process."""


class Transactions:
    """Owns the database file, and publishes a state per commit. Thread-safe.

    doubt: returns why the clock is not trusted, so that nothing gets a timestamp; "" if it is trusted
        (accountant.runtime.clock_step_guard).
    fence: returns why nothing may be committed; "" if this process is the leader (accountant.runtime.leadership).
    acts_at_once: acknowledge an act only when it is archived.
    gpu_move_after_ms: silence about a GPU after which another node may report it.
    quotas: what one sender may leave in the ledger; None: the default quotas.
    exported_labels: the labels of pods that are dimensions."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        month_zone: str = "UTC",
        free_bytes: Callable[[], int] | None = None,
        archive: FileStore | None = None,
        doubt: Callable[[], str] = lambda: "",
        fence: Callable[[], str] = lambda: "",
        acts_at_once: bool = False,
        gpu_move_after_ms: int = MOVE_AFTER_MS,
        quotas: Quotas | None = None,
        exported_labels: Sequence[str] = (),
    ) -> None:
        self._clock = clock
        self._doubt = doubt
        self._fence = fence
        self._acts_at_once = acts_at_once
        self._archive = None if archive is None else Archive(archive)
        self._database = Database(path)
        self._fetching_prefix = f".{path.name}.fetched-"
        for left in path.parent.glob(f"{self._fetching_prefix}*"):  # of a process that was killed
            rmtree(left, ignore_errors=True)
        if archive is not None:
            self._database.reach(archive.engine_files())
        self._free_bytes = free_bytes or self._database.free_bytes
        quotas = quotas or Quotas()
        self._names = Dictionaries(PodLabels(exported_labels, quotas.label_values))
        self._month_zone = ZoneInfo(month_zone)
        self._windows = Windows(self._month_zone)
        self._writing = threading.RLock()
        self._swap = threading.Lock()
        self._owners = GpuRegister(gpu_move_after_ms)
        try:
            with self._database.cursor() as cursor:
                self._state = load(cursor, self._month_zone, self._names.labels.names)
                self._owners.load(read_owners(cursor, self._state.fleet))
                self._names.open(cursor)
        except BaseException as error:
            self._database.close()
            if isinstance(error, LedgerUnavailable):
                raise LedgerUnavailable(f"{path}: cannot be read: {error}") from error
            raise
        self._pod_nodes = PodNodes(self._database.cursor, self._names.origins.lacks)
        self._use = SenderUse(quotas)
        # Opening writes the log into the file, so everything durable is checkpointed.
        self._checkpointed: Mapping[Stream, int] = dict(self._state.marks)
        self._in_doubt = False
        """Whether a commit may be durable that is not in `_state`."""
        self._copying = threading.Lock()
        """Allows one copy or archive part at a time: all copies have the same name in the engine, and parts are
        numbered."""
        self._news = True
        """Whether something may have been committed since the last archive part."""
        self._pods: set[PodKey] | None = None
        """Pods with new facts since the last archive part; None: unknown."""

    def checkpoint(self) -> None:
        """Roll up finished hours, write the log into the file, and update the marks `_checkpointed`."""
        with self._writing:
            if self._database.wal_bytes() == 0:
                self._checkpointed = dict(self._state.marks)  # the engine may have checkpointed by itself
                return
            with self._transaction() as cursor:
                before = self._state
                unfolded, days = compact(
                    cursor, before.unfolded, before.days, before.fleet.newest_end_ms, self._month_zone
                )
                self._commit(cursor, replace(before, unfolded=unfolded, days=days), news=False)
                self._database.checkpoint(cursor)
            self._checkpointed = dict(self._state.marks)

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log."""
        return self._database.wal_bytes()

    def room_bytes(self) -> int:
        """Return the free disk space above the limit at which ingestion stops; negative if ingestion is stopped."""
        return self._free_bytes() - self._database.wal_bytes() - FLOOR_BYTES

    def close(self) -> None:
        """Write the log into the file and close the file. Idempotent."""
        with self._writing, self._swap:
            self._database.close()

    @contextmanager
    def _snapshot(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[tuple[Cursor, State]]:
        """Open a cursor on the newest commit, and return it with the state of that commit. Rows in [start_ms, end_ms)
        can be read, even if they are only in the archive."""
        with self._database.cursor() as cursor:
            with self._swap:
                cursor.run("BEGIN")
                cursor.fix("mark")
                state = self._state
            try:
                self._show(cursor, state, start_ms, end_ms)
                yield cursor, state
            finally:
                cursor.rollback()

    def _show(self, cursor: Cursor, state: State, start_ms: int, end_ms: int) -> None:
        """Make the rows in [start_ms, end_ms) readable that are only in the archive."""
        frozen = {hour for hour in state.frozen if start_ms < hour + MS_PER_HOUR and hour < end_ms}
        if frozen:
            retention.show(cursor, self._archive, frozen)

    @contextmanager
    def _transaction(self) -> Iterator[Cursor]:
        """Begin a transaction, which the block commits. If it fails before its commit, it has changed nothing. If the
        commit itself fails, the state is read again from the tables, which takes long. If that fails too, the next
        transaction does it, and is refused: its caller has prepared it for the state before.

        Raises LedgerUnavailable if the disk has too little free space."""
        self._require_space()
        self._require_certainty()
        with self._database.cursor() as cursor:
            try:
                cursor.run("BEGIN")
                yield cursor
            except BaseException:
                cursor.rollback()
                self._names.undo()
                if self._in_doubt:
                    self._reread()
                raise

    def _with_archived(self, write: Callable[[Fetched], T]) -> T:
        """Write what needs the archive only now and then, for example late records of hours whose rows left the file.

        `write` locks the writer, and raises NotFetched before it changes anything, or anything that it would change
        again. What it lacks is then read while the writer is free, and it is called again."""
        with ExitStack() as files:
            fetched = Fetched()
            while True:
                try:
                    return write(fetched)
                except NotFetched as lacking:
                    fetched = files.enter_context(self._fetching(lacking.needs))

    @contextmanager
    def _fetching(self, needs: Needs) -> Iterator[Fetched]:
        """Read from the archive what a write needs. Raises ArchiveUnavailable."""
        if not needs:
            yield Fetched()
            return
        with ExitStack() as files:
            try:
                archive = retention.archive_of(self._archive)
                self._require_space()
                folder = files.enter_context(self._scratch())
                with self._snapshot() as (cursor, state):
                    fetched = retention.fetch(cursor, archive, needs, state.parts, folder)
            except (LedgerUnavailable, LedgerDamaged, OSError) as error:
                raise ArchiveUnavailable(f"rows that are only in the archive cannot be read: {error}") from error
            yield fetched

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Make a folder on the ledger's volume for files of the archive, and remove it after the block."""
        with TemporaryDirectory(prefix=self._fetching_prefix, dir=self._database.path.parent) as folder:
            yield Path(folder)

    def _book(self, group: GroupCommit, fetched: Fetched) -> None:
        """Write a group in a transaction of its own. fetched: has the rows of the frozen hours that the group
        touches."""
        with self._transaction() as cursor:
            before = self._state
            thawed = retention.touched_hours(group.incoming, before.frozen)
            retention.thaw(cursor, fetched, thawed)
            booked = book(cursor, self._names, group, before.fleet, before.unfolded, before.days)
            after = replace(
                before,
                marks={**before.marks, **group.advanced},
                fleet=before.fleet.booked(booked.fleet, booked.own),
                unfolded=before.unfolded | booked.unfolded,
                days=before.days.without(booked.unfolded),
                frozen=before.frozen - thawed,
            )
            self._commit(cursor, after, booked)
            if group.gpus is not None:
                group.gpus.commit()
            if group.pods is not None:
                group.pods.commit()
            if group.quotas is not None:
                group.quotas.commit()

    def _commit(
        self,
        cursor: Cursor,
        after: State,
        booked: BookedChanges | None = None,
        *,
        news: bool = True,
        beside: bool = False,
    ) -> None:
        """Commit and publish the new state.

        booked: what the commit changed in rows and pods; None: not known, so every answer may have changed.
        news: whether the commit has something that the archive now lacks.
        beside: whether the commit changed no answer about usage."""
        if why := self._fence():
            raise LedgerUnavailable(why)
        additions = {} if booked is None else self._windows.sums.additions(booked)
        with self._swap:
            self._in_doubt = True
            cursor.plainly("COMMIT")
            self._news |= news
            self._names.commit()
            version = self._state.version + 1
            changes = after.changes if beside or not news else _changes(after.changes, booked, version)
            published = replace(after, version=version, changes=changes)
            if booked is not None:
                # Update the cache before publishing. A reader of the previous state then reads the tables, because the
                # cache returns nothing that a later version changed.
                self._windows.sums.apply_commit(booked, additions, version)
                if self._pods is not None:
                    self._pods.update((cluster, fact.uid) for cluster, fact in booked.pods)
            self._state, self._in_doubt = published, False

    def _reread(self) -> None:
        """Read the state again, because a commit can be durable although the call failed."""
        self._in_doubt = True  # until all of it has been read
        with self._database.cursor() as cursor:
            with self._swap:
                version = self._state.version + 1
                self._state = replace(
                    load(cursor, self._month_zone, self._names.labels.names),
                    version=version,
                    changes=self._state.changes.since(0, version),
                )
                self._owners.load(read_owners(cursor, self._state.fleet))
                self._pod_nodes.forget()
                self._windows.sums.clear(self._state.version)
                self._news, self._pods = True, None
            self._names.forget()
            self._names.open(cursor)
            self._in_doubt = False

    def _require_certainty(self) -> None:
        if self._in_doubt:
            self._reread()
            raise LedgerUnavailable("a commit ended without an answer, and the ledger has been read again: try again")

    def _stored(
        self, stream: Stream, seqs: Sequence[int], fetched: Fetched, needed: dict[Stream, frozenset[int]]
    ) -> Mapping[int, frozenset[int]]:
        """Return the digests stored under these numbers, in the file or fetched from the archive. Add the numbers that
        only the archive can have to `needed`."""
        with self._database.cursor() as cursor:
            found = dict(stored_digests(cursor, stream, seqs))
            found |= dict.fromkeys(over_quota_numbers(cursor, stream, set(seqs) - found.keys()), SET_ASIDE)
            archived = self._state.archived.get(stream, 0)
            missing = {seq for seq in seqs if seq not in found and seq <= archived} if self._state.frozen else set()
            if missing:
                needed[stream] = needed.get(stream, frozenset()) | missing
                found |= {seq: fetched.digests[stream, seq] for seq in missing if (stream, seq) in fetched.digests}
            return found

    def _new_names(self, incoming: Incoming) -> tuple[Truth, Truth]:
        """Return which of the distinct devices and which of the distinct holders of the rows the ledger does not know
        yet. For the writer."""
        return new_names(self._database.cursor, self._names, incoming)

    def _parts_of(self, gpu: GpuName) -> int:
        """Return the number of parts that a GPU has had."""
        if not self._names.gpu.known(self._database.cursor, [gpu]):
            return 0
        sql = "SELECT count(*) FROM device d JOIN gpu g ON g.id = d.gpu WHERE g.cluster = ? AND g.gpu_uuid = ?"
        with self._database.cursor() as cursor:
            count: int = cursor.run(sql, gpu)[0][0]
            return count

    def _ack(self, stream: Stream) -> Ack:
        return Ack(
            epoch=stream[2],
            durable_seq=self._state.marks.get(stream, 0),
            checkpointed_seq=self._checkpointed.get(stream, 0),
            archived_seq=None if self._archive is None else self._state.archived.get(stream, 0),
        )

    def _require_clock(self) -> None:
        """Raise LedgerUnavailable if the clock is not trusted, because nothing may get a timestamp then."""
        if why := self._doubt():
            raise LedgerUnavailable(why)

    def _require_space(self) -> None:
        if self.room_bytes() < 0:
            free = self._free_bytes()
            raise LedgerUnavailable(
                f"{self._database.path.parent}: only {free // 2**20} MiB of disk are free: enlarge the volume"
            )


def _changes(before: Changes, booked: BookedChanges | None, version: int) -> Changes:
    """Return the spans that a commit changed: the days of its rows, and all time since the earliest instant to which
    its facts apply; everything if that is not known."""
    if booked is None:
        return before.since(0, version)
    after = before.with_rows(booked.touched, version)
    return after if booked.since_ms is None else after.since(booked.since_ms, version)
