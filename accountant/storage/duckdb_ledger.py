"""Implements the ledger's protocols on DuckDB: writes, queries, copies, the archive and the correction of future dates.

`accountant.storage.transactions` runs transactions. The class `Offsite` below makes copies and writes the archive. Both
tasks read from a snapshot while the writer continues. They take the writer's lock only to change the ledger's tables,
and to replay archive parts that the ledger lacks.

Records with a date in the future come from a clock that was ahead. `redate` quarantines them with that reason, so that
their time is unmetered. It gives policies, observations, decisions and the ends of facts about nodes, namespaces and
retired GPUs a date that is not in the future. It does not change acts (the entries of the journal), because their
digests form a chain. The act that records the correction names them.

Archive parts are never rewritten. A ledger that is rebuilt from them therefore repeats each correction that an act
records (`redatings_in`), before it replays later records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from accountant.core.errors import (
    BadBatch,
    CannotRedate,
    LedgerDamaged,
    LedgerUnavailable,
    OverQuota,
    SequenceGap,
    TooManyViews,
)
from accountant.core.import_epochs import is_import
from accountant.core.periods import utc
from accountant.core.record_faults import SKEW_MS
from accountant.core.settings import Quotas
from accountant.inventory.agent_reports import reported
from accountant.inventory.node_facts_and_downtime import booted
from accountant.ledger.journal import Act, NewAct
from accountant.ledger.protocols import (
    MOST_VIEWS,
    MOST_VIEWS_OF_ALL,
    EpochReport,
    Facts,
    GpuMove,
    GpuOwnership,
    Imports,
    ImportSpan,
    MisdatedRecords,
    NodeFacts,
    Receipt,
    RetiredDevice,
    Retirement,
    SavedView,
)
from accountant.ledger.team_assignment import Assignment
from accountant.storage import gpu_lifetimes as owners
from accountant.storage import retention
from accountant.storage.commit_status import CommitStatus
from accountant.storage.duckdb_engine import Cursor, Database, fingerprints, statement
from accountant.storage.folder_or_object_store import FileStore
from accountant.storage.gpu_lifetimes import retired_devices, retirement_act, retirement_ends
from accountant.storage.ledger_state import State
from accountant.storage.read_snapshot import Snapshot, misdated_items
from accountant.storage.record_archive import (
    Archive,
    ArchivePart,
    groups,
    last_view_change,
    marks_of,
    take_newer_views,
    take_rest,
    take_whole,
)
from accountant.storage.retention import Fetched, Needs
from accountant.storage.transactions import WAL_BYTES, Transactions
from accountant.storage.write import inventory_and_journal_tables, record_columns
from accountant.storage.write.batch_admission import GroupCommit, IntervalCounts
from accountant.storage.write.gpu_and_pod_ownership import MOVE_AFTER_MS, PodClaims
from accountant.storage.write.import_withdrawal import Withdrawn, resum, withdraw, withdrawal_act
from accountant.storage.write.interval_writer import BookedChanges, first_instants
from accountant.storage.write.inventory_and_journal_tables import write_acts, write_epochs
from accountant.storage.write.record_columns import Stream, add
from accountant.storage.write.rollups import DailySums
from accountant.wire.policy_models import Decision, Policy, PolicyVersion
from agent.wire import Batch
from gputally.base.clock import Clock


def redate_records(cursor: Cursor, now_ms: int, days: DailySums) -> None:
    """Correct misdated items in the current transaction. days: the days that have sums. Raises CannotRedate if misdated
    records are only in the archive."""
    limit = {"limit": now_ms + SKEW_MS}
    frozen = cursor.run("SELECT count(*) FROM frozen WHERE at_ms >= $limit", limit)[0][0]
    if frozen:
        raise CannotRedate(
            f"the records of {frozen} hours after now are only in the archive, which cannot be corrected: restore a "
            "backup that was made before they arrived"
        )
    _quarantine(cursor, now_ms, days)
    _redate_policies(cursor, now_ms)
    for name in ("redate_pods", "redate_decisions", "redate_registers"):
        for part in statement(name).split(";"):
            cursor.run(part, {"now": now_ms, **limit})


def corrections_in(cursor: Cursor, acts_file: str) -> list[tuple[int, str, int, str]]:
    """Return (number, kind, at_ms, content) of the acts in an archive part, but not in this ledger, that change
    records, in order."""
    return cursor.run(
        "SELECT p.number, p.kind, p.at_ms, p.content FROM read_parquet(?) p WHERE p.kind IN ('redated', 'withdrawn') "
        "AND NOT EXISTS (SELECT 1 FROM act t WHERE t.number = p.number) ORDER BY p.number",
        [acts_file],
    )


def misdating_act(misdated: Sequence[MisdatedRecords], now_ms: int, who: str, reason: str) -> NewAct:
    """Return the act that records a correction."""
    content = json.dumps([one.model_dump() for one in misdated], sort_keys=True)
    counts = ", ".join(f"{one.count} {one.kind}" for one in misdated)
    return NewAct(now_ms, "redated", utc(now_ms), who, f"{reason} ({counts})", content)


def _quarantine(cursor: Cursor, now_ms: int, days: DailySums) -> None:
    limit = {"limit": now_ms + SKEW_MS}
    hours = {hour for (hour,) in cursor.run(statement("misdated_hours"), limit)}
    if not hours:
        return
    for part in statement("quarantine_misdated").split(";"):
        cursor.run(part, {"now": now_ms, **limit} if "$now" in part else limit)
    resum(cursor, hours, days)  # the rest of these hours, with records up to now


def _redate_policies(cursor: Cursor, now_ms: int) -> None:
    """Correct the policies in their order. Each is in force from the time of its act, or from now if that is in the
    future."""
    acts = "SELECT subject, max(at_ms) FROM act WHERE kind = 'policy' AND at_ms <= $now GROUP BY subject"
    act_time: dict[str, int] = dict(cursor.run(acts, {"now": now_ms}))
    before = 0
    for version, effective in cursor.run("SELECT version, effective_ms FROM policy ORDER BY effective_ms"):
        since = effective
        if effective > now_ms + SKEW_MS:
            since = max(before + 1, act_time.get(version, now_ms))
            cursor.run(
                "UPDATE policy SET effective_ms = $since WHERE version = $version AND effective_ms = $effective",
                {"since": since, "version": version, "effective": effective},
            )
        before = since


class Offsite(Transactions):
    """Copies the ledger, writes its archive, and replays archive parts that the ledger lacks."""

    def copy_to(self, path: Path) -> int:
        """Write a consistent copy of the ledger to a new file, compare it with the ledger, and return its number of
        rows. Raises LedgerUnavailable, or LedgerDamaged if the copy differs."""
        with self._copying:
            with self._database.duplicating(path), self._snapshot() as (cursor, _):
                original = self._database.duplicate(cursor)
            copy = Database(path)
            try:
                with copy.cursor() as cursor:
                    copied = fingerprints(cursor)
            finally:
                copy.close()
            path.with_name(path.name + ".lock").unlink(missing_ok=True)
            if original != copied:
                names = original.keys() | copied.keys()
                differing = sorted(name for name in names if original.get(name) != copied.get(name))
                raise LedgerDamaged(
                    f"{path}: the copy differs from the ledger in {', '.join(differing)}: copy it again"
                )
            return sum(count for count, _ in original.values())

    def archive(self, now_ms: int) -> ArchivePart | None:
        """Write the records since the last part into a new part. Returns None if there are no new records or there is
        no archive.

        Raises LedgerUnavailable. If the part was written before the failure, the next call records it in the ledger.
        Raises LedgerDamaged if the archive has parts that this ledger lacks, and one of them is missing or damaged."""
        if self._archive is None:
            return None
        with self._copying:
            self._require_space()  # otherwise the part could not be recorded in the ledger
            if not self._news:
                return None
            self.adopt(now_ms)  # a part that was written but not recorded in the ledger
            with self._swap:
                self._news, (pods, self._pods) = False, (self._pods, set())
            try:
                with self._snapshot() as (cursor, state):
                    part = self._archive.write(cursor, state.parts + 1, now_ms, pods, state.archived_registers)
                with self._writing, self._transaction() as cursor:
                    self._enter(cursor, part, {**state.archived, **state.marks})
            except BaseException:
                with self._swap:
                    self._news, self._pods = True, None
                raise
            return part

    @contextmanager
    def _acting(self, now_ms: int) -> Iterator[None]:
        """Lock the writer while the block writes an act. If acts must be archived at once, archive the act afterwards.

        Raises LedgerUnavailable or LedgerDamaged, as `archive` does, if the act is recorded in the ledger but could not
        be archived."""
        with self._writing:
            yield
        if self._acts_at_once:
            try:
                self.archive(now_ms)
            except (LedgerUnavailable, LedgerDamaged) as error:
                raise type(error)(f"the act is recorded in the ledger but not yet in the archive: {error}") from error

    def adopt(self, now_ms: int) -> int:
        """Replay the archive parts that this ledger lacks, and return their number. Raises LedgerDamaged."""
        if self._archive is None:
            return 0
        # The archive may be far away, so it is listed, and each part is copied, before the writer is locked. Only
        # `archive` writes parts, which calls this method first, and one call at a time.
        parts = self._archive.parts(self._state.parts)
        for position, part in enumerate(parts):
            # A ledger that lacks the preceding part is older than this part, even if the part has no rows.
            with self._scratch() as folder:
                local = self._archive.copy(part, folder)
                self._with_archived(partial(self._replay, local, part, now_ms, position > 0))
        if parts:
            self.checkpoint()
        return len(parts)

    def _replay(self, archive: Archive, part: ArchivePart, now_ms: int, behind: bool, fetched: Fetched) -> None:
        """Replay a part and record it in the ledger. If that needs frozen hours, NotFetched is raised; the replay is
        then begun again, and skips what it has booked. behind: the ledger is older than the part for certain."""
        with self._writing:
            self._heal(archive, part, fetched)
            self._take_whole(archive, part, behind)
            with self._database.cursor() as reading:
                last = {**self._state.archived, **marks_of(reading, archive, part)}
                for group in groups(reading, archive, part, self._state.marks, now_ms):
                    needs = Needs(retention.touched_hours(group.incoming, self._state.frozen))
                    fetched.require(needs, self._state.parts)
                    self._book(group, fetched)
            with self._transaction() as cursor:
                take_rest(cursor, archive, part)
                self._enter(cursor, part, last)
            self._reread()

    def _take_whole(self, archive: Archive, part: ArchivePart, behind: bool) -> None:
        """Take the registers that a newer part replaces. This comes before the rows and acts that show that the part is
        newer, so that a replay that goes on after a kill takes them too."""
        with self._transaction() as cursor:
            known = self._state
            behind |= part.registers.get("act", 0) > known.acts
            behind |= any(seq > known.marks.get(stream, 0) for stream, seq in marks_of(cursor, archive, part).items())
            if behind:
                take_whole(cursor, archive, part)
                self._commit(cursor, known)
            elif take_newer_views(cursor, archive, part):
                self._commit(cursor, known, beside=True)
        self._reread()

    def _heal(self, archive: Archive, part: ArchivePart, fetched: Fetched) -> None:
        """Repeat the corrections of misdated records and the withdrawals of imports that the part's acts record, before
        the part is replayed. Each correction is committed with its act, so that a replay that is continued does not
        repeat it on rows of the part; the last one with the registers that the part replaces, because nothing else may
        show that the part is newer."""
        (acts,) = archive.files([part.number], "act")
        with self._database.cursor() as reading:
            corrections = corrections_in(reading, acts)
        for number, kind, at_ms, content in corrections:
            span = ImportSpan.model_validate_json(content) if kind == "withdrawn" else None
            if span is not None:
                fetched.require(self._frozen_in(span), self._state.parts)
            with self._transaction() as cursor:
                cursor.run("INSERT INTO act FROM read_parquet(?) WHERE number = ?", [acts, number])
                after = self._state
                if span is not None:
                    after, _ = self._withdraw(cursor, span, fetched)
                else:
                    redate_records(cursor, at_ms, self._state.days)
                if number == corrections[-1][0]:
                    take_whole(cursor, archive, part)
                self._commit(cursor, after)
            self._reread()

    def _frozen_in(self, span: ImportSpan) -> Needs:
        """Return the frozen hours that a withdrawal changes."""
        return Needs(frozenset(hour for hour in self._state.frozen if span.start_ms <= hour < span.end_ms))

    def _withdraw(self, cursor: Cursor, span: ImportSpan, fetched: Fetched) -> tuple[State, Withdrawn]:
        """Withdraw an import in the current transaction, and return the state after it. fetched: has the rows of the
        frozen hours in the span."""
        state = self._state
        hours = self._frozen_in(span).hours
        retention.thaw(cursor, fetched, hours)
        frozen = state.frozen - hours
        return replace(state, frozen=frozen), withdraw(cursor, span, state.days, frozen)

    def _enter(self, cursor: Cursor, part: ArchivePart, marks: dict[Stream, int]) -> None:
        """Record the part in the ledger. `marks` are the numbers up to which each outbox is archived."""
        ids = self._names.stream.resolve(cursor, marks)
        cursor.run(
            "INSERT INTO archive_part VALUES (?, ?, ?, ?, ?)",
            [part.number, part.at_ms, part.low_ms, part.high_ms, part.rows],
        )
        cursor.run("DELETE FROM archive_mark")
        rows = [(ids[stream], seq) for stream, seq in marks.items()]
        cursor.insert("archive_mark", record_columns.column_table(record_columns.NUMBER, rows))
        registers = {**self._state.archived_registers, **part.registers}
        cursor.run("DELETE FROM archive_register")
        cursor.run(
            "INSERT INTO archive_register SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[])",
            [list(registers), list(registers.values())],
        )
        after = replace(self._state, archived=marks, parts=part.number, archived_registers=registers)
        self._commit(cursor, after, news=False)

    def freeze(self, before_ms: int) -> int:
        """Remove the rows of hours before an instant from the file if the archive has them. Returns the number of
        hours."""
        if self._archive is None:
            return 0
        total = 0
        while True:
            with self._snapshot() as (cursor, _):
                hours, fingerprint = retention.archived_hours(cursor, self._archive, before_ms)
            if not hours:
                return total
            with self._writing, self._transaction() as cursor:
                frozen = retention.freeze_hours(cursor, self._archive, before_ms, hours, fingerprint)
                self._commit(cursor, replace(self._state, frozen=self._state.frozen | frozen), news=False)
            total += len(frozen)


class DuckLedger(Offsite):
    """accountant.ledger.protocols.Ledger on one DuckDB file. Thread-safe."""

    # --- writing ------------------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        """Book batches in one transaction. A Receipt counts intervals, not facts."""
        return self._with_archived(lambda fetched: self._append(batches, now_ms, fetched))

    def _append(self, batches: Sequence[Batch], now_ms: int, fetched: Fetched) -> list[Receipt | Exception]:
        with self._writing:
            before = self._state
            self.require_present(now_ms)
            self._require_space()
            quotas = self._use.claims(now_ms, self._parts_of)
            claims = self._owners.claims(now_ms, quotas), PodClaims(self._pod_nodes)
            needed: dict[Stream, frozenset[int]] = {}
            stored = partial(self._stored, fetched=fetched, needed=needed)
            group = GroupCommit(before.marks, stored, now_ms, *claims, quotas, self._new_names)
            tallies = [_take(group, batch) for batch in batches]
            group.sort_out()
            fetched.require(Needs(retention.touched_hours(group.incoming, before.frozen), needed), before.parts)
            if group.changes:
                self._book(group, fetched)
            taken = [batch for batch, tally in zip(batches, tallies, strict=True) if not isinstance(tally, Exception)]
            self._learn_boots(taken, now_ms)
            self._learn_agents(taken, now_ms)
            if self._database.wal_bytes() >= WAL_BYTES:
                with suppress(LedgerUnavailable):  # the commit is done; the next append tries the checkpoint again
                    self.checkpoint()
            return [self._result(batch, tally, now_ms) for batch, tally in zip(batches, tallies, strict=True)]

    def _learn_boots(self, batches: Sequence[Batch], now_ms: int) -> None:
        """Store the boots that agents report and that differ from the known ones. If that fails, the agents' next
        batches try it again."""
        nodes = self._told(batches, lambda node, batch: booted(node, batch.cluster, batch.node, batch.boot_id, now_ms))
        if nodes:
            with suppress(LedgerUnavailable):
                self._observe(Facts(nodes=tuple(nodes.values())), now_ms, 0, None)

    def _learn_agents(self, batches: Sequence[Batch], now_ms: int) -> None:
        """Store what agents say of themselves and what differs from what they said before, as `_learn_boots` does."""

        def after(node: NodeFacts | None, batch: Batch) -> NodeFacts | None:
            key = batch.cluster, batch.node
            return reported(node, *key, batch.agent, now_ms, partial(self._belongs, key))

        nodes = self._told(batches, after)
        if nodes:
            with suppress(LedgerUnavailable), self._transaction() as cursor:
                fleet = inventory_and_journal_tables.write_agents(cursor, self._state.fleet, nodes)
                self._commit(cursor, replace(self._state, fleet=fleet), beside=True)

    def _told(
        self, batches: Sequence[Batch], after: Callable[[NodeFacts | None, Batch], NodeFacts | None]
    ) -> dict[tuple[str, str], NodeFacts]:
        """Return the nodes of which agents' batches tell something else than is known. after: the node after a batch;
        None if it does not change."""
        known = self._state.fleet.nodes
        nodes: dict[tuple[str, str], NodeFacts] = {}
        for batch in batches:
            key = batch.cluster, batch.node
            if not is_import(batch.epoch) and (node := after(nodes.get(key, known.get(key)), batch)):
                nodes[key] = node
        return nodes

    def _belongs(self, node: tuple[str, str], gpu: str) -> bool:
        """Return whether a GPU belongs to a node now."""
        owned = self._owners.known.get((node[0], gpu))
        return owned is not None and owned.owner.node == node[1]

    def _result(self, batch: Batch, tally: IntervalCounts | Exception, now_ms: int) -> Receipt | Exception:
        ack = structs.replace(self._ack((batch.cluster, batch.node, batch.epoch)), clock_ms=now_ms)
        if isinstance(tally, SequenceGap):
            return SequenceGap(ack)
        if isinstance(tally, Exception):
            return tally
        return Receipt(ack, tally.stored, tally.duplicates, tally.quarantined, tally.over_quota)

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0, act: NewAct | None = None) -> None:
        with self._acting(now_ms) if act is not None else self._writing:
            self._require_clock()
            if act is not None or inventory_and_journal_tables.has_changes(self._state.fleet, facts):
                self._observe(facts, now_ms, closed_ms, act)

    def _observe(self, facts: Facts, now_ms: int, closed_ms: int, act: NewAct | None) -> None:
        with self._transaction() as cursor:
            acts = self._state.acts
            if act is not None:
                acts = write_acts(cursor, [act], acts)[-1].number
            origins = self._names.origins
            requeued, new_pods = origins.requeued(cursor, facts.pods), origins.new_pods(cursor, facts.pods)
            fleet, instants = inventory_and_journal_tables.write_facts(
                cursor, self._state.fleet, facts, now_ms, closed_ms, self._names.labels, new_pods
            )
            origins.learn(cursor, facts.pods)
            told = first_instants(facts.pods)
            instants += origins.since(cursor, told, new_pods - requeued, self._state.unfolded)
            since_ms = min(instants, default=None)
            booked = BookedChanges({}, frozenset(), pods=facts.pods, requeued=bool(requeued), since_ms=since_ms)
            self._commit(cursor, replace(self._state, fleet=fleet, acts=acts), booked)
            self._pod_nodes.observe(facts.pods)

    def put_policy(self, policy: Policy, now_ms: int, who: str = "", reason: str = "") -> PolicyVersion:
        with self._acting(now_ms):
            known = [rules.version for rules in self._state.policies if rules.version is not None]
            if known and known[-1].version == policy.version():
                return known[-1]
            self._require_clock()
            # Dated after the preceding policy even if the clock was set back.
            effective = max(now_ms, known[-1].effective_ms + 1) if known else now_ms
            version = PolicyVersion(version=policy.version(), effective_ms=effective, policy=policy)
            with self._transaction() as cursor:
                inventory_and_journal_tables.write_policy(cursor, version)
                detail = f"{reason}; " if reason else ""
                detail += f"in force from {utc(effective)}" + (f", instead of {known[-1].version}" if known else "")
                acts = self._state.acts
                if who:
                    act = NewAct(at_ms=now_ms, kind="policy", subject=version.version, who=who, reason=detail)
                    acts = write_acts(cursor, [act], acts)[-1].number
                policies = (*self._state.policies, Assignment(version))
                # The first policy also applies before its date.
                booked = BookedChanges({}, frozenset(), since_ms=effective if known else 0)
                self._commit(cursor, replace(self._state, policies=policies, acts=acts), booked)
            return version

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        with self._writing:
            self._require_clock()
            with self._transaction() as cursor:
                new = write_epochs(cursor, reports, now_ms)
                since_ms = min(min(report.at_ms, now_ms) for report in reports) if new else None
                self._commit(cursor, self._state, BookedChanges({}, frozenset(), since_ms=since_ms))
            return new

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        with self._writing:
            self._require_clock()
            with self._transaction() as cursor:
                last = self._state.decisions
                new = inventory_and_journal_tables.write_decisions(cursor, decisions, now_ms, last)
                self._commit(cursor, replace(self._state, decisions=last + new), beside=True)
            return new

    def remove_decisions(self, before_ms: int) -> int:
        """Remove decisions dated before an instant, and return their number. With an archive, only archived decisions
        are removed."""
        total = 0
        while True:
            with self._writing, self._transaction() as cursor:
                archived = self._state.archived_registers.get("decision", 0) if self._archive is not None else None
                removed = inventory_and_journal_tables.remove_decisions(cursor, before_ms, archived)
                self._commit(cursor, self._state, news=False)
            total += removed
            if removed < inventory_and_journal_tables.REMOVED_AT_ONCE:
                return total

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:
        """See accountant.ledger.journal.Journal."""
        with self._acting(acts[-1].at_ms if acts else 0):
            self._require_clock()
            with self._transaction() as cursor:
                recorded = write_acts(cursor, acts, seen)
                last = recorded[-1].number if recorded else seen
                self._commit(cursor, replace(self._state, acts=last), beside=True)
            return recorded

    def retire(
        self, retirement: Retirement, at_ms: int, now_ms: int, who: str, reason: str, closed_ms: int = 0
    ) -> tuple[RetiredDevice, ...]:
        with self._acting(now_ms):
            self._require_clock()
            fleet = self._state.fleet
            ends = retirement_ends(fleet, retirement, at_ms, now_ms, closed_ms)
            devices = retired_devices(fleet, ends)
            with self._transaction() as cursor:
                acts = write_acts(cursor, [retirement_act(devices, now_ms, who, reason)], self._state.acts)[-1].number
                inventory_and_journal_tables.write_retired(cursor, ends)
                after = replace(fleet, retired={**fleet.retired, **ends})
                self._commit(cursor, replace(self._state, fleet=after, acts=acts))
            return devices

    def views(self, owner: str) -> tuple[SavedView, ...]:
        """Return the views that the owner saved, by name."""
        with self._snapshot() as (cursor, _):
            query = "SELECT name, address FROM saved_view WHERE owner = ? AND address <> '' ORDER BY name"
            rows = cursor.run(query, [owner])
            return tuple(SavedView(*row) for row in rows)

    def save_view(self, owner: str, view: SavedView, now_ms: int) -> None:
        """Store a view, instead of the owner's view of that name if there is one. Raises TooManyViews."""
        with self._writing:
            self._require_clock()
            with self._transaction() as cursor:
                at_ms = max(now_ms, last_view_change(cursor) + 1)
                cursor.run("DELETE FROM saved_view WHERE owner = ? AND name = ?", [owner, view.name])
                count = "SELECT count(*) FILTER (owner = ?), count(*) FROM saved_view WHERE address <> ''"
                ((own, whole),) = cursor.run(count, [owner])
                if own >= MOST_VIEWS or whole >= MOST_VIEWS_OF_ALL:
                    raise TooManyViews(
                        f"{own} views of yours and {whole} of all are saved, of at most {MOST_VIEWS} and "
                        f"{MOST_VIEWS_OF_ALL}: remove one that is not needed"
                    )
                cursor.run("INSERT INTO saved_view VALUES (?, ?, ?, ?)", [owner, view.name, view.address, at_ms])
                self._commit(cursor, self._state, beside=True)

    def remove_view(self, owner: str, name: str) -> None:
        """Remove a view; nothing happens if the owner has none of that name."""
        with self._writing, self._transaction() as cursor:
            last = last_view_change(cursor)
            if cursor.run("DELETE FROM saved_view WHERE owner = ? AND name = ? RETURNING name", [owner, name]):
                cursor.run("DELETE FROM saved_view WHERE address = ''")
                cursor.run("INSERT INTO saved_view VALUES ('', '', '', ?)", [last + 1])
                self._commit(cursor, self._state, beside=True)

    def move_gpus(self, move: GpuMove, now_ms: int, who: str, reason: str) -> tuple[GpuOwnership, ...]:
        with self._acting(now_ms):
            self._require_clock()
            state, known = self._state, self._owners.known
            nodes = {stream[:2] for stream in state.marks} | set(state.fleet.nodes)
            chosen = owners.movable_gpus(known, nodes, move, now_ms)
            before = {gpu: known[gpu] for gpu in chosen}
            claims = self._owners.claims(now_ms, self._use.claims(now_ms, self._parts_of))
            after = {gpu: claims.move(gpu, move.node, who, move.from_ms or 0) for gpu in chosen}
            with self._transaction() as cursor:
                act = owners.owner_act(before, after, now_ms, who, reason)
                acts = write_acts(cursor, [act], state.acts)[-1].number
                add(cursor, "gpu_owner", record_columns.GPU_OWNER, claims.rows)
                self._commit(cursor, replace(state, acts=acts), beside=True)
                claims.commit()
            return owners.shown(after, {}, state.fleet)

    def withdraw_import(self, span: ImportSpan, now_ms: int, who: str, reason: str) -> int:
        return self._with_archived(lambda fetched: self._withdraw_import(span, now_ms, who, reason, fetched))

    def _withdraw_import(self, span: ImportSpan, now_ms: int, who: str, reason: str, fetched: Fetched) -> int:
        with self._acting(now_ms):
            self._require_clock()
            fetched.require(self._frozen_in(span), self._state.parts)
            with self._transaction() as cursor:
                state, found = self._withdraw(cursor, span, fetched)
                act = withdrawal_act(span, found, now_ms, who, reason)
                acts = write_acts(cursor, [act], state.acts)[-1].number
                self._commit(cursor, replace(state, acts=acts))
            self._reread()
            return found.rows

    def require_present(self, now_ms: int) -> None:
        """Raise LedgerUnavailable if this may not be the present time: the clock is doubted, or behind the records."""
        self._require_clock()
        behind = self._state.fleet.newest_end_ms - now_ms
        if behind > SKEW_MS:
            raise LedgerUnavailable(
                f"the accountant's clock is {behind} ms behind the newest record: correct the clock, or, if it is "
                "right, list the records with a wrong date with: gputally accountant clock show"
            )

    def redate(self, now_ms: int, who: str, reason: str) -> tuple[MisdatedRecords, ...]:
        """Correct the `misdated` items, record the correction as an act, and return the items. Raises CannotRedate, and
        the errors of `_acting`."""
        with self._acting(now_ms):
            self._require_clock()
            with self._transaction() as cursor:
                found = misdated_items(cursor, now_ms)
                if found:
                    redate_records(cursor, now_ms, self._state.days)
                    write_acts(cursor, [misdating_act(found, now_ms, who, reason)], self._state.acts)
                    self._commit(cursor, self._state)
            if found:
                self._reread()
            return found

    # --- reading ------------------------------------------------------------------------------

    def outboxes(self) -> Mapping[Stream, int]:
        """Return how far every outbox's records are committed, by (cluster, node, epoch). No number ever falls."""
        return self._state.marks

    def imports(self, cluster: str) -> Imports:
        """Return the marks of the imports of a cluster, and the spans that agents metered."""
        state = self._state
        marks: dict[str, dict[str, int]] = {}
        for of_cluster, node, epoch in sorted(state.marks):
            if of_cluster == cluster and is_import(epoch):
                marks.setdefault(node, {})[epoch] = state.marks[of_cluster, node, epoch]
        metered = {node: (one.first_ms, one.last_ms) for node, one in state.fleet.metered(cluster).items()}
        return Imports(marks, metered)

    def status(self) -> CommitStatus:
        """Return the status of the newest commit."""
        return CommitStatus(self._state, self._windows)

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[Snapshot]:
        """Open a snapshot, whose answers all come from the same commit.

        Rows in [start_ms, end_ms) can be read, even if they are only in the archive. A query that begins or ends inside
        an hour needs them; a window reads what it needs by itself."""
        with self._snapshot(start_ms, end_ms) as (cursor, state):

            def show(low_ms: int, high_ms: int) -> None:
                self._show(
                    cursor, state, *((min(low_ms, start_ms), max(high_ms, end_ms)) if end_ms else (low_ms, high_ms))
                )

            yield Snapshot(cursor, state, self._windows, show)

    def cut_labels(self) -> Mapping[str, int]:
        """Return the number of values of exported labels that were not kept, by reason, since the start."""
        return {str(reason): count for reason, count in self._names.labels.cut.items()}


def _take(group: GroupCommit, batch: Batch) -> IntervalCounts | Exception:
    try:
        return group.take(batch)
    except (SequenceGap, BadBatch, OverQuota) as refusal:
        return refusal


def open_ledger(
    path: Path,
    clock: Clock,
    *,
    month_zone: str = "UTC",
    archive: FileStore | None = None,
    doubt: Callable[[], str] = lambda: "",
    fence: Callable[[], str] = lambda: "",
    acts_at_once: bool = False,
    gpu_move_after_ms: int = MOVE_AFTER_MS,
    quotas: Quotas | None = None,
    exported_labels: Sequence[str] = (),
) -> DuckLedger:
    """Open or create the ledger, and replay the archive parts that it lacks.

    `month_zone` is the time zone of calendar windows. For the other parameters see `Transactions`. Raises LedgerLocked,
    LedgerUnavailable or LedgerDamaged, each with the place and the reason."""
    ledger = DuckLedger(
        path,
        clock,
        month_zone=month_zone,
        archive=archive,
        doubt=doubt,
        fence=fence,
        acts_at_once=acts_at_once,
        gpu_move_after_ms=gpu_move_after_ms,
        quotas=quotas,
        exported_labels=exported_labels,
    )
    try:
        ledger.adopt(clock.wall_ms())
    except BaseException:
        ledger.close()
        raise
    return ledger
