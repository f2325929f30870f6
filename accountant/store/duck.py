"""The ledger on DuckDB: one writer, any number of readers, one immutable state per commit.

The writer holds `_writing` for a whole transaction and `_swap` only while it commits and publishes
the new `State`; a reader takes `_swap` only to pin its snapshot together with the state that belongs
to it. So a reader never sees rows of one commit with the GPUs of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from zoneinfo import ZoneInfo

from accountant.errors import BadBatch, LedgerUnavailable, SequenceGap
from accountant.journal import Act, ActKind, NewAct
from accountant.ledger import Facts, IdlePhases, Lent, NodeFacts, Receipt
from accountant.store import registers
from accountant.store.assignment import Assignment
from accountant.store.booking import Booked, Dictionaries, book
from accountant.store.checks import Hole, Imbalance, Quarantined, coverage, holes, imbalance, quarantine
from accountant.store.compaction import compact
from accountant.store.database import Cursor, Database
from accountant.store.intake import Group, Stream, Tally
from accountant.store.journal import last_act, read_acts, read_trail, write_acts
from accountant.store.lending import lent
from accountant.store.phasing import idle_phases
from accountant.store.pods import KnownPod, pods
from accountant.store.replays import stored_digests
from accountant.store.state import State, load
from accountant.store.usage import usage
from accountant.store.validation import SKEW_MS
from accountant.store.windowing import WindowCache
from accountant.wire import Decision, Dimension, Measure, Policy, PolicyVersion, UsageLine, UsageWindow, WindowSpec
from agent.clock import Clock
from agent.wire import Ack, Batch

WAL_BYTES = 64 * 2**20
"""Size of the write-ahead log at which the writer checkpoints by itself."""
FLOOR_BYTES = 64 * 2**20
"""Free space below which nothing is taken in: a checkpoint that runs out of space ends the process."""


class DuckLedger:
    """accountant.ledger.Ledger on one DuckDB file. Thread-safe."""

    def __init__(
        self, path: Path, clock: Clock, *, month_zone: str = "UTC", free_bytes: Callable[[], int] | None = None
    ) -> None:
        self._clock = clock
        self._database = Database(path)
        self._free_bytes = free_bytes or self._database.free_bytes
        self._names = Dictionaries()
        self._windows = WindowCache(ZoneInfo(month_zone))
        self._writing = threading.RLock()
        self._swap = threading.Lock()
        with self._database.cursor() as cursor:
            self._state = load(cursor)
        # Opening folds the log into the file, so everything durable is checkpointed.
        self._checkpointed: Mapping[Stream, int] = dict(self._state.marks)

    # --- writing ------------------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        """Book batches in one transaction. Counts of a Receipt are intervals; facts are not counted."""
        with self._writing:
            before = self._state
            behind = before.fleet.newest_end_ms - now_ms - SKEW_MS
            if behind > 0:
                raise LedgerUnavailable(f"the accountant's clock is {behind} ms behind what is booked already")
            self._require_space()
            with self._database.cursor() as reading:
                group = Group(before.marks, lambda stream, seqs: stored_digests(reading, stream, seqs), now_ms)
                tallies = [_take(group, batch) for batch in batches]
            if group.changes:
                with self._transaction() as cursor:
                    booked = book(cursor, self._names, group, before.fleet, before.unfolded)
                    after = replace(
                        before,
                        marks={**before.marks, **group.advanced},
                        fleet=before.fleet.booked(booked.fleet),
                        unfolded=before.unfolded | booked.unfolded,
                    )
                    self._commit(cursor, after, booked)
            if self._database.wal_bytes() >= WAL_BYTES:
                with suppress(LedgerUnavailable):  # what is committed is committed; the next one tries again
                    self.checkpoint()
            return [self._result(batch, tally) for batch, tally in zip(batches, tallies, strict=True)]

    def _result(self, batch: Batch, tally: Tally | Exception) -> Receipt | Exception:
        ack = self._ack((batch.cluster, batch.node, batch.epoch))
        if isinstance(tally, SequenceGap):
            return SequenceGap(ack)
        if isinstance(tally, Exception):
            return tally
        return Receipt(ack, tally.stored, tally.duplicates, tally.quarantined)

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0) -> None:
        with self._writing:
            if registers.tells_news(self._state.fleet, facts):
                self._observe(facts, now_ms, closed_ms)

    def _observe(self, facts: Facts, now_ms: int, closed_ms: int) -> None:
        with self._transaction() as cursor:
            fleet = registers.write_facts(cursor, self._state.fleet, facts, now_ms, closed_ms)
            self._names.origins.learn(cursor, facts.pods)
            self._commit(cursor, replace(self._state, fleet=fleet), Booked({}, frozenset(), pods=facts.pods))

    def put_policy(self, policy: Policy, now_ms: int, who: str = "") -> PolicyVersion:
        with self._writing:
            known = [rules.version for rules in self._state.policies if rules.version is not None]
            if known and known[-1].version == policy.version():
                return known[-1]
            # Dated after its predecessor even if the clock stepped back.
            effective = max(now_ms, known[-1].effective_ms + 1) if known else now_ms
            version = PolicyVersion(version=policy.version(), effective_ms=effective, policy=policy)
            with self._transaction() as cursor:
                registers.write_policy(cursor, version)
                detail = f"in force from {effective}" + (f", instead of {known[-1].version}" if known else "")
                if who:
                    act = NewAct(at_ms=now_ms, kind="policy", subject=version.version, who=who, reason=detail)
                    write_acts(cursor, [act], last_act(cursor))
                self._commit(cursor, replace(self._state, policies=(*self._state.policies, Assignment(version))))
            return version

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        with self._writing, self._transaction() as cursor:
            new = registers.write_decisions(cursor, decisions, now_ms)
            self._commit(cursor, self._state)
            return new

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        """See accountant.journal.Journal."""
        with self._writing:
            self._require_space()
            with self._transaction() as cursor:
                recorded = write_acts(cursor, acts, seen)
                self._commit(cursor, self._state)
            return recorded

    def trail(self, after: int, limit: int) -> list[Act]:
        """See accountant.journal.Journal."""
        with self._snapshot() as (cursor, _):
            return read_trail(cursor, after, limit)

    def retire(self, cluster: str, gpu_uuid: str, at_ms: int) -> bool:
        """From `at_ms` on (or its newest record, if later) the GPU is no capacity; False if it is unknown."""
        with self._writing:
            found = [i for i, gpu in self._state.fleet.gpus.items() if (gpu.cluster, gpu.uuid) == (cluster, gpu_uuid)]
            if not found:
                return False
            with self._transaction() as cursor:
                cursor.run("INSERT INTO retired VALUES (?, ?)", [found[0], at_ms])
                fleet = self._state.fleet
                after = replace(fleet, retired={**fleet.retired, found[0]: max(at_ms, fleet.retired.get(found[0], 0))})
                self._commit(cursor, replace(self._state, fleet=after))
            return True

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the file; what was durable is `checkpointed` from now on."""
        with self._writing:
            if self._database.wal_bytes() == 0:
                return
            self._require_space()
            with self._transaction() as cursor:
                unfolded = compact(cursor, self._state.unfolded, self._state.fleet.newest_end_ms)
                self._commit(cursor, replace(self._state, unfolded=unfolded))
                cursor.run("CHECKPOINT")
            self._checkpointed = dict(self._state.marks)

    def copy_to(self, path: Path) -> None:
        """A consistent copy of the whole ledger in a new file. Raises LedgerUnavailable."""
        with self._writing:
            self.checkpoint()
            self._database.copy_to(path)

    def close(self) -> None:
        """Let go of the file; the engine folds its log in. Idempotent."""
        with self._writing, self._swap:
            self._database.close()

    # --- reading ------------------------------------------------------------------------------

    def acks(self, node: str, cluster: str) -> Mapping[str, Ack]:
        """By epoch, every outbox that the node ever had."""
        found = [stream for stream in self._state.marks if stream[:2] == (cluster, node)]
        return {stream[2]: self._ack(stream) for stream in sorted(found)}

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        with self._snapshot() as (cursor, state):
            return usage(cursor, state, start_ms, end_ms, by, where, timezone)

    def nodes(self) -> tuple[NodeFacts, ...]:
        known = self._state.fleet.nodes
        return tuple(known[key] for key in sorted(known))

    def pods(self, start_ms: int, end_ms: int) -> list[KnownPod]:
        """Pods that existed in the span, by cluster and uid."""
        with self._snapshot() as (cursor, state):
            return pods(cursor, state, start_ms, end_ms)

    def teams(self) -> frozenset[str]:
        """Every team that a queue or a namespace names now."""
        queues = self._state.policies[-1].queues.values() if self._state.policies else ()
        spaces = self._state.fleet.namespaces.values()
        named = {q.team for q in queues if q.team} | {s.team for s in spaces} | {t for s in spaces for t in s.teams}
        return frozenset(named - {""})

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        with self._snapshot() as (cursor, state):
            return idle_phases(cursor, state, start_ms, end_ms, by, timezone)

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[Lent]:
        with self._snapshot() as (cursor, state):
            return lent(cursor, state, start_ms, end_ms, by, timezone)

    def window(self, spec: WindowSpec, at_ms: int, measure: Measure, min_coverage: float) -> UsageWindow:
        # Mostly all that is needed is remembered: no transaction then.
        answer = self._windows.window(None, self._state, spec, at_ms, measure, min_coverage)
        if answer is None:
            with self._snapshot() as (cursor, state):
                answer = self._windows.window(cursor, state, spec, at_ms, measure, min_coverage)
        assert answer is not None
        return answer

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        known = [rules.version for rules in self._state.policies if rules.version is not None]
        return registers.policies_between(known, start_ms, end_ms)

    def decisions(self, start_ms: int, end_ms: int, limit: int = 1000) -> list[Decision]:
        """Newest first."""
        with self._snapshot() as (cursor, _):
            return registers.read_decisions(cursor, start_ms, end_ms, limit)

    def acts(self, *kinds: ActKind, subject: str | None = None) -> list[Act]:
        with self._snapshot() as (cursor, _):
            return read_acts(cursor, kinds, subject)

    def last_act(self) -> int:
        with self._snapshot() as (cursor, _):
            return last_act(cursor)

    def coverage(self, start_ms: int, end_ms: int) -> float:
        return coverage(self.usage(start_ms, end_ms, ()))

    def imbalance(self, start_ms: int, end_ms: int) -> int:
        """Microseconds by which the books break the law of conservation; 0 means that they balance."""
        return self.examine(start_ms, end_ms).total_us

    def examine(self, start_ms: int, end_ms: int) -> Imbalance:
        """`imbalance`, with every difference in words."""
        with self._snapshot() as (cursor, state):
            return imbalance(cursor, state, start_ms, end_ms)

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        """Newest first."""
        with self._snapshot() as (cursor, _):
            return quarantine(cursor, limit)

    def holes(self, limit: int = 1000) -> list[Hole]:
        """Numbers that will never come, by node, the newest of each first."""
        with self._snapshot() as (cursor, _):
            return holes(cursor, limit)

    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        return self._database.wal_bytes()

    # --- transactions -------------------------------------------------------------------------

    @contextmanager
    def _snapshot(self) -> Iterator[tuple[Cursor, State]]:
        with self._database.cursor() as cursor:
            with self._swap:
                cursor.run("BEGIN")
                cursor.run("FROM mark LIMIT 1")  # the engine pins the snapshot at the first read
                state = self._state
            try:
                yield cursor, state
            finally:
                cursor.rollback()

    @contextmanager
    def _transaction(self) -> Iterator[Cursor]:
        """Begins one; the caller commits. After any failure the tables are believed, not memory."""
        with self._database.cursor() as cursor:
            try:
                cursor.run("BEGIN")
                yield cursor
            except BaseException:
                cursor.rollback()
                self._names.forget()
                self._reread()
                raise

    def _commit(self, cursor: Cursor, after: State, booked: Booked | None = None) -> None:
        with self._swap:
            cursor.run("COMMIT")
            self._names.commit()
            self._state = replace(after, version=self._state.version + 1)
            if booked is not None:
                self._windows.take(booked, self._state.version)

    def _reread(self) -> None:
        """A commit may be durable although the call failed."""
        with self._swap, self._database.cursor() as cursor:
            self._state = replace(load(cursor), version=self._state.version + 1)
            self._windows.forget_all(self._state.version)

    def _ack(self, stream: Stream) -> Ack:
        durable = self._state.marks.get(stream, 0)
        return Ack(epoch=stream[2], durable_seq=durable, checkpointed_seq=self._checkpointed.get(stream, 0))

    def _require_space(self) -> None:
        free = self._free_bytes()
        if free < FLOOR_BYTES:
            raise LedgerUnavailable(f"{self._database.path.parent}: only {free // 2**20} MiB of disk are free")


def _take(group: Group, batch: Batch) -> Tally | Exception:
    try:
        return group.take(batch)
    except (SequenceGap, BadBatch) as refusal:
        return refusal


def open_ledger(path: Path, clock: Clock, *, month_zone: str = "UTC") -> DuckLedger:
    """Open or create the ledger. month_zone: of calendar windows.

    Raises LedgerLocked, LedgerUnavailable or LedgerDamaged, each with the place and the reason."""
    return DuckLedger(path, clock, month_zone=month_zone)
