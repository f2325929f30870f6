"""Answers all queries of one reader from the same commit, checks that the ledger balances, and lists quarantined
records and lost numbers.

A report runs many queries while the writer commits. Results are cached within the snapshot, so that a later query can
reuse them (accountant.storage.query.group_by_dimensions). A snapshot is not thread-safe, because it uses one cursor."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from accountant.core.claim_overlap import Span, union
from accountant.core.gpu_time_accounts import ACCOUNT_CELLS, CELLS, full_us
from accountant.core.periods import utc
from accountant.core.pod_sources import merge_sources
from accountant.core.record_faults import SKEW_MS
from accountant.inventory.pod_facts import ObservedPod
from accountant.ledger import usage as usage_relation
from accountant.ledger.journal import Act, ActKind
from accountant.ledger.protocols import (
    MOST_HOLDS,
    MOST_QUARANTINED,
    EpochReport,
    GpuOwnership,
    Hold,
    Holds,
    Hole,
    Imbalance,
    JobKey,
    JobPods,
    MisdatedKind,
    MisdatedRecords,
    Quarantined,
    QueuedPod,
)
from accountant.ledger.team_assignment import NO_POLICY, labels_count
from accountant.ledger.usage import MEASURES, Usage, UsageMeasure, Where
from accountant.prices.price_book import PriceBook
from accountant.storage.commit_status import CommitStatus
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.gpu_lifetimes import read_claims, read_owners, shown
from accountant.storage.ledger_state import State
from accountant.storage.query.group_by_dimensions import ASSIGNED, ConstantSpan, ResultCache, key_of, pieces_of
from accountant.storage.query.usage_query import usage
from accountant.storage.query.window_query import Windows
from accountant.storage.write import inventory_and_journal_tables, record_columns
from accountant.storage.write.inventory_and_journal_tables import count_epochs, read_epochs
from accountant.storage.write.name_ids import NO_DEVICE, HolderName, holders
from accountant.wire.policy_models import Decision, Measure, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base import called_off
from gputally.base.apportionment import apportion
from gputally.base.pod_stop import FAILED
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

_HOLD_GAP_MS: Final = 60_000
"""Longest break, in which an agent restarts for example, that does not end a hold."""
_ANY_ZONE: Final = ZoneInfo("UTC")
"""For pieces that do not depend on local days."""
_FEW = 500
"""Up to this many jobs are passed to DuckDB by name."""
_MANY: Final = 20_000
"""To read all pods of a span takes less time than to find those of more jobs than this."""
Extent = tuple[int, int]
"""[start_ms, end_ms) of the held time of a job; rounded outwards to the hour for hours that only have sums."""


_POD = "coalesce(p.cluster, s.cluster), p.content, s.content"
_BY_UID = "ORDER BY 1, coalesce(p.uid, s.uid)"
_NEWER = "coalesce(CASE WHEN s.observed_ms > p.observed_ms THEN s.at[{0}] END, p.at[{0}], s.at[{0}])"
"""What the newer one of both sources says that says anything."""
_COUNTED = """coalesce(p.cluster, s.cluster), coalesce(nullif(s.namespace, ''), p.namespace, ''),
    coalesce(nullif(s.workload, ''), nullif(p.workload, ''), 'Pod/' || coalesce(s.name, p.name)),
    count(*), count(coalesce(p.at[4], s.at[4])),
    count(coalesce(p.at[2], s.at[2], p.at[3], s.at[3])) FILTER (coalesce(p.at[4], s.at[4]) IS NULL),
    max(greatest(0, {until} - {created})) FILTER ({until} IS NOT NULL AND {created} IS NOT NULL),
    min({created}) FILTER ({until} IS NULL), max({created}), max({ended}) FILTER ({how} = '{failed}')""".format(
    created="least(p.at[1]::BIGINT, s.at[1]::BIGINT)",
    until="""coalesce(least(p.at[2]::BIGINT, s.at[2]::BIGINT), least(p.at[3]::BIGINT, s.at[3]::BIGINT),
        CASE WHEN s.observed_ms > p.observed_ms THEN s.at[4]::BIGINT END, p.at[4]::BIGINT, s.at[4]::BIGINT)""",
    ended=_NEWER.format(4) + "::BIGINT",
    how=_NEWER.format(5),
    failed=FAILED,
)
"""The columns of `JobPods`, as `accountant.billing.queue_waits` gives them. until: the end of a pod's time in its
queue."""
_decoder = msgspec.json.Decoder(ObservedPod)


def _selected(tables: Mapping[str, str], query: str) -> dict[str, str]:
    """The rows of the tables whose pods a query names."""
    named = statement(query)
    return {name: f"(FROM {table} WHERE (cluster, uid) IN ({named}))" for name, table in tables.items()}


_WAITING = " AND coalesce(s.at[2], p.at[2], s.at[3], p.at[3], s.at[4], p.at[4]) IS NULL"
_PLACED = ", CAST(s.at[2] AS BIGINT), CAST(p.at[2] AS BIGINT), CAST(s.at[3] AS BIGINT), CAST(p.at[3] AS BIGINT)"


class Snapshot:
    """Reads one commit: accountant.ledger.protocols.Moment.

    windows: the ledger's cache of windows.
    show: makes the rows of a span readable, also those that are only in the archive."""

    def __init__(
        self,
        cursor: Cursor,
        state: State,
        windows: Windows | None = None,
        show: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._cursor = cursor
        self._state = state
        self._windows = windows or Windows(_ANY_ZONE)
        self._show = show
        self._cache = ResultCache()

    def status(self) -> CommitStatus:
        return CommitStatus(self._state, self._windows)

    def usage(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Where | None = None,
        timezone: str = "UTC",
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        return usage(self._cursor, self._state, edges, by, where, timezone, measures, self._cache)

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow:
        asked = self._state, spec, at_ms, measure, min_coverage, book, shard, cluster
        answer = self._windows.window(None, *asked)
        if answer is None:
            self._show(*self._windows.bounds(spec, at_ms))
            answer = self._windows.window(self._cursor, *asked)
        assert answer is not None
        return answer

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        """Return quarantined records, newest first."""
        return [Quarantined(*row) for row in self._cursor.rows("quarantined", {"limit": limit})]

    def holes(self, limit: int = 1000) -> list[Hole]:
        """Return the sequence numbers that will never arrive, by outbox, newest first."""
        return [Hole(*row) for row in self._cursor.rows("holes", {"limit": limit})]

    def imbalance(self, start_ms: int, end_ms: int) -> Imbalance:
        """Find what does not add up in the span, and count quarantined records without reading their content. The
        moment must have been opened for the span."""
        return imbalance(self._cursor, self._state, start_ms, end_ms)

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:
        """Return the items dated clearly after `now_ms`, by kind."""
        return misdated_items(self._cursor, now_ms)

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        """Return which nodes each GPU belonged to, sorted by cluster and UUID."""
        fleet = self._state.fleet
        return shown(read_owners(self._cursor, fleet), read_claims(self._cursor), fleet)

    def acts(self, *kinds: ActKind, subject: str | None = None, after: int = 0, limit: int | None = None) -> list[Act]:
        return inventory_and_journal_tables.read_acts(self._cursor, kinds, subject, after, limit)

    def decisions(
        self,
        start_ms: int,
        end_ms: int,
        limit: int = 1000,
        *,
        kind: str | None = None,
        subject: str | None = None,
        gang: Collection[str] | None = None,
        cluster: str | None = None,
        before: str | None = None,
    ) -> list[Decision]:
        return inventory_and_journal_tables.read_decisions(
            self._cursor, start_ms, end_ms, limit, kind, subject, gang, cluster, before
        )

    def pods(
        self,
        start_ms: int,
        end_ms: int,
        *,
        of: Collection[JobKey] | None = None,
        waiting: bool = False,
        placed: bool = False,
        ordered: bool = True,
        named: str = "",
    ) -> Iterator[QueuedPod]:
        parts = {"only": _WAITING * waiting, "placed": _PLACED * placed, "ending": _BY_UID * ordered}
        parameters: dict[str, Any] = {"low": start_ms, "high": end_ms}
        tables = {"pod": "pod", "seen": "pod_seen"}
        if of is not None and len(of) <= _MANY:
            parameters["jobs"] = sorted({key.job for key in of})
            parameters["names"] = sorted({key.job.partition("/")[2] for key in of})
            tables = _selected(tables, "pods_named")
        if named:
            parameters["text"] = named.lower()
            tables = _selected(tables, "pods_with_text")
        wanted = None if of is None else frozenset(of)
        rows = self._cursor.each(statement("pods_between", columns=_POD, **parts, **tables), parameters)
        for cluster, node, seen in called_off.each(rows):
            pod = self._pod(cluster, node, seen, start_ms)
            if (wanted is None or pod.key in wanted) and (not named or pod.is_named(named)):
                yield pod

    def pods_by_job(self, start_ms: int, end_ms: int) -> Mapping[JobKey, JobPods]:
        """Return the numbers and waits of the pods that existed in the span, by job."""
        tables = {"pod": "pod", "seen": "pod_seen", "only": "", "placed": ""}
        sql = statement("pods_between", columns=_COUNTED, ending="GROUP BY ALL", **tables)
        rows = self._cursor.run(sql, {"low": start_ms, "high": end_ms})
        return {JobKey(*row[:3]): JobPods(*row[3:]) for row in called_off.each(rows)}

    def _pod(self, cluster: str, node: str | None, seen: str | None, start_ms: int) -> QueuedPod:
        """Return the merged facts of one pod. `node` and `seen` are its encoded facts from the node and from the API
        server; None if there are none."""
        of_node, of_cluster = (None if facts is None else _decoder.decode(facts) for facts in (node, seen))
        facts = merge_sources(of_node, of_cluster)
        created_ms = facts.created_ms if facts.created_ms is not None else start_ms
        rules = NO_POLICY
        for policy in self._state.policies[:1] + tuple(p for p in self._state.policies[1:] if p.since_ms <= created_ms):
            rules = policy
        queue = rules.queue(facts.queue_ref)
        space = self._state.fleet.namespace_at((cluster, facts.namespace), created_ms)
        chooses = space is not None and space.label and labels_count(facts)
        team = rules.team(queue, space, facts.labels if chooses else {})
        return QueuedPod(cluster, team, queue, facts)

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        rows = self._cursor.rows("jobs_in", {"cluster": cluster, "namespace": namespace})
        return frozenset(job for (job,) in rows)

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        rows = self._cursor.rows("job_of", {"cluster": cluster, "uid": uid})
        if not rows:
            return None
        namespace, name, workload = rows[0]
        return JobKey.of_pod(cluster, namespace, workload, name)

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, Extent]:
        """Return the extents of these jobs over all time, without jobs that never held a GPU."""
        job_of = self._holders_of(keys)
        table = record_columns.column_table(record_columns.ID, [(holder,) for holder in sorted(job_of)])
        low = min(self._state.unfolded, default=0)
        extents: dict[JobKey, Extent] = {}
        for holder, begin, end in self._cursor.rows("held_between", {"low": low}, incoming=table):
            first, last = extents.get(job_of[holder], (begin, end))
            extents[job_of[holder]] = min(first, begin), max(last, end)
        return extents

    def holds(
        self,
        spans: Sequence[tuple[int, int]],
        *,
        of: Collection[JobKey] | None = None,
        gpus: Collection[tuple[str, str]] | None = None,
    ) -> Holds:
        """Return who held which GPUs in these spans, from when to when, the MOST_HOLDS newest, sorted by their start.
        The moment must have been opened for the spans.

        A hold that crosses an edge of a span begins or ends with the row that crosses it, which lies inside one
        quarter-hour.

        of: only holds of these jobs.
        gpus: only holds of these GPUs, as pairs of cluster and UUID."""
        if of is not None:
            only, ids = "payer IN (FROM incoming)", sorted(self._holders_of(of))
        else:
            wanted = frozenset(gpus or ())
            only = "gpu IN (FROM incoming)"
            ids = sorted(id_ for id_, gpu in self._state.fleet.gpus.items() if (gpu.cluster, gpu.uuid) in wanted)
        if not ids or not spans:
            return Holds(())
        parameters = {"gap": _HOLD_GAP_MS, "most": MOST_HOLDS + 1}
        ranges = []
        for number, (low, high) in enumerate(union((low - BUCKET_MS, high) for low, high in spans)):
            parameters |= {f"low{number}": low, f"high{number}": high}
            ranges.append(f"SELECT * FROM entry WHERE start_ms > $low{number} AND start_ms < $high{number}")  # noqa: S608
        sql = statement("holds", only=only, ranges=" UNION ALL ".join(ranges))
        table = record_columns.column_table(record_columns.ID, [(id_,) for id_ in ids])
        rows = list(called_off.each(self._cursor.run(sql, parameters, table)))
        whole_after_ms = rows[MOST_HOLDS][-2] if len(rows) > MOST_HOLDS else None
        rows = rows[:MOST_HOLDS]
        if not rows:
            return Holds((), whole_after_ms)
        names = holders(self._cursor, {payer for payer, *_ in rows}, self._state.fleet.team_labels)
        low, high = min(row[-3] for row in rows), max(row[-2] for row in rows)
        pieces = pieces_of(self._state, low, high, ASSIGNED, _ANY_ZONE)
        found = []
        for payer, uid, node, gpu, profile, device, begin, end, gpu_us in rows:
            if not any(begin < high and end > low for low, high in spans):
                continue
            name = names[payer]
            key = JobKey(name.cluster, name.namespace, name.job)
            booked = self._booked_to(name, begin, end, pieces)
            parts = apportion(gpu_us, [until - since for since, until, *_ in booked])
            for (since, until, team, queue), part_us in zip(booked, parts, strict=True):
                pod = name.name or uid
                found.append(Hold(key, team, queue, pod, uid, node, gpu, profile, device, since, until, part_us))
        order = sorted(found, key=lambda hold: (hold.start_ms, hold.end_ms, hold.node, hold.gpu, hold.device, hold.uid))
        return Holds(tuple(order), whole_after_ms)

    def _booked_to(
        self, name: HolderName, start_ms: int, end_ms: int, pieces: Sequence[ConstantSpan]
    ) -> list[tuple[int, int, str, str]]:
        """Split [start_ms, end_ms) where the holder's team or queue changes, and return (start, end, team, queue) in
        order."""
        found: list[tuple[int, int, str, str]] = []
        first = bisect_right(pieces, start_ms, key=lambda piece: piece.start_ms) - 1
        for piece in pieces[first:]:
            if piece.start_ms >= end_ms:
                break
            team, queue = key_of(("team", "queue"), self._state.fleet, piece, 0, NO_DEVICE, name)
            since = max(start_ms, piece.start_ms)
            if found and found[-1][2:] == (team, queue):
                since = found.pop()[0]
            found.append((since, min(end_ms, piece.end_ms), team, queue))
        return found

    def _holders_of(self, keys: Collection[JobKey]) -> dict[int, JobKey]:
        """Return the ids of the holders of these jobs, with the job of each."""
        wanted = {key: key for key in keys}
        parameters = {"clusters": sorted({key.cluster for key in keys})}
        only = ""
        if len(wanted) <= _FEW:
            few = self._cache.candidates(self._cursor, {key.job for key in wanted}, (), ())
            if few is not None:
                jobs = {holder: JobKey(name.cluster, name.namespace, name.job) for holder, name in few.items()}
                return {holder: key for holder, key in jobs.items() if key in wanted}
            parameters |= {
                "namespaces": sorted({key.namespace for key in keys}),
                "jobs": sorted({key.job for key in keys}),
            }
            only = "WHERE list_contains($namespaces, namespace) AND list_contains($jobs, job)"
        sql = statement("holder_jobs", only=only)
        rows = self._cursor.each(sql, parameters)
        return {holder: wanted[key] for holder, *names in rows if (key := JobKey(*names)) in wanted}

    def epochs(self, span: Span | None = None, *, of: Collection[JobKey] | None = None) -> list[EpochReport]:
        """Return the reported epochs that ended in the span, by job and instant.

        span: None: all time.
        of: only epochs of these jobs; None: all."""
        return read_epochs(self._cursor, span, of=of)

    def epoch_counts(self, keys: Collection[JobKey]) -> Mapping[JobKey, int]:
        """Return the number of epochs of each of these jobs, without jobs that reported none."""
        return count_epochs(self._cursor, keys)


_NAMED = 20
_HEALING: Mapping[MisdatedKind, str] = {
    "records": "are quarantined; their time is unmetered",
    "policies": "are in force from the time of their act, or from now",
    "pods": "get the present time as the time of observation",
    "decisions": "get the present time",
    "registers": "end now",
    "acts": "stay unchanged, and the act of this correction names them; reopen a month that was closed too early",
}


_WHOLE_INSIDE: Final = "at_ms >= $low AND at_ms + $width <= $high"
_COMPARED_SUMS: Final = (
    ("hour", _WHOLE_INSIDE, "rows_by_width", {"width": MS_PER_HOUR}),
    ("quarter", _WHOLE_INSIDE, "rows_by_width", {"width": BUCKET_MS}),
    (
        "day",
        "at_ms IN (SELECT start_ms FROM kept_day WHERE start_ms >= $low AND end_ms <= $high)",
        "quarters_by_day",
        dict[str, int](),
    ),
)
"""The parts `table`, `condition` and `rows` of sql/sums_against_rows.sql, and further parameters, by table of sums."""


def imbalance(cursor: Cursor, state: State, start_ms: int, end_ms: int) -> Imbalance:
    """Find three kinds of differences in the span: accounts that do not add up to the capacity of their GPU, negative
    accounts, and sums of days, hours or quarter-hours that differ from their rows."""
    total = 0
    lines: list[str] = []
    capacity: dict[str, int] = defaultdict(int)
    for gpu in state.fleet.tenures:
        life = state.fleet.life(gpu)
        span = min(end_ms, life.end_ms) - max(start_ms, life.start_ms)
        if span > 0:
            capacity[state.fleet.gpus[gpu].uuid] += full_us(span)
    by_gpu = usage(cursor, state, (start_ms, end_ms), ("gpu",), None, "UTC", (), ResultCache())
    for (uuid,), accounts in zip(by_gpu.row_keys(), by_gpu.columns(usage_relation.ACCOUNTS).tolist(), strict=True):
        difference = sum(accounts) - capacity.pop(uuid, 0)
        negative = sum(-value for value in accounts if value < 0)
        if difference or negative:
            total += abs(difference) + negative
            lines.append(
                f"GPU {uuid}: its accounts differ from its capacity by {difference} µs, and {negative} µs are negative"
            )
    for uuid, missing in capacity.items():
        total += missing
        lines.append(f"GPU {uuid}: {missing} µs of its capacity are in no account")
    for table, condition, rows, width in _COMPARED_SUMS:
        sql = statement("sums_against_rows", table=table, condition=condition, rows=statement(rows))
        for at_ms, *differences in cursor.run(sql, {"low": start_ms, "high": end_ms, **width}):
            for name, value in zip(CELLS[:ACCOUNT_CELLS], differences, strict=True):
                if not value:
                    continue
                total += abs(value)
                lines.append(f"stored sum of the {table} from {utc(at_ms)} on: {name} differs from its rows by {value}")
    (count,) = cursor.run("SELECT count(*) FROM (SELECT seq FROM quarantine LIMIT ?)", [MOST_QUARANTINED])[0]
    return Imbalance(total, tuple(lines), count)


def misdated_items(cursor: Cursor, now_ms: int) -> tuple[MisdatedRecords, ...]:
    """Return the items dated more than SKEW_MS after `now_ms`, by kind, without kinds that have none."""
    rows = {row[0]: row[1:] for row in cursor.rows("misdated", {"limit": now_ms + SKEW_MS})}
    misdated = []
    for kind, healing in _HEALING.items():
        if kind in rows:
            count, first, last, named = rows[kind]
            names = tuple(sorted(named)[:_NAMED])
            misdated.append(
                MisdatedRecords(kind=kind, count=count, first_ms=first, last_ms=last, named=names, healing=healing)
            )
    return tuple(misdated)
