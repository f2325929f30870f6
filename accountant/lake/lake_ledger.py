"""Answers the queries of one ledger from the lake, and lists the lake's ledgers.

The query engine only sums integers grouped by name. All further computing uses the same code as the DuckDB ledger. The
lake holds whole local hours, split at price changes. A query that begins or ends inside such a piece is refused. What
is not published is refused by name: quarantine, missing numbers, lent time, holds, owners of GPUs."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError
from sqlglot import exp

from accountant.billing.queue_waits import existed, pods_by_job
from accountant.billing.statements import Statement, from_canonical
from accountant.core.claim_overlap import Span
from accountant.core.errors import LakeUnavailable, LedgerUnavailable, UnreadableLedger, UnsupportedQuestion
from accountant.core.periods import Month, local_date, local_hours, utc, zone
from accountant.core.window_decay import bounds, factor, term
from accountant.inventory.pod_facts import ObservedPod
from accountant.lake.engines.protocol import Engine
from accountant.lake.iceberg_catalog import PREFIX, described, namespace_of
from accountant.lake.tables import (
    ACCOUNT_COLUMNS,
    ACTS,
    EPOCHS,
    LABELS,
    LEDGERS,
    MEASURE_COLUMNS,
    NODES,
    PODS,
    POLICIES,
    LakeTable,
    column_of,
)
from accountant.ledger.journal import Act, ActKind, NewAct
from accountant.ledger.protocols import (
    AgentFacts,
    EpochReport,
    GpuOwnership,
    Holds,
    Hole,
    Imbalance,
    JobKey,
    JobPods,
    MisdatedRecords,
    Moment,
    NodeFacts,
    Quarantined,
    QueuedPod,
    SavedView,
    Status,
    exported_in,
    unexported,
)
from accountant.ledger.team_assignment import Assignment, in_force, policies_between, rolled_up
from accountant.ledger.usage import (
    ACCOUNTS,
    LENT,
    MEASURES,
    START_UP,
    UJ_PER_J,
    Int64Array,
    Usage,
    UsageMeasure,
    Where,
    names_of,
)
from accountant.prices.price_book import PriceBook
from accountant.wire.dimensions import DECLARED, OF_TIME, sources, value_of
from accountant.wire.policy_models import IDLE, Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, LabelDimension, is_label, label_of
from gputally.base.measures import REPORTED
from gputally.base.units import MS_PER_HOUR, US_PER_MS
from gputally.base.version import __version__
from gputally.server.config_loading import fault_text

_FIGURES: Final = dict(zip((*ACCOUNTS, *START_UP, *MEASURES), (*ACCOUNT_COLUMNS, *MEASURE_COLUMNS), strict=True))
"""The column of each figure of usage."""
_WIDE: Final = frozenset({"energy_uj"})
"""Figures whose sum may need more than 64 bits."""
_HELD: Final = "busy_us + allocated_idle_us + allocated_unknown_us"
_TIMES: Final = {"held": _HELD, "in service": f"{_HELD} + unallocated_us"}
_WITHOUT_FIGURE: Final[Mapping[str, str]] = {
    name: sql for each in REPORTED for name, sql in ((each.field, "0"), (each.unknown_field, _TIMES[each.known]))
}
"""What is known of a row that an earlier version published without this column: nothing, for the whole of its time."""
_UNREADABLE: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, msgspec.MsgspecError)
"""What decoders raise for content that they do not know; pydantic's ValidationError is a ValueError."""
_MOST_REASON: Final = 300
_OF_LABELS: Final = ("queue", LABELS)
"""The columns that tell a row's exported labels."""
_Numbered = tuple[list[str], npt.NDArray[np.integer[Any]]]
"""Values, and for each row the index of its value."""
_PODS = msgspec.json.Decoder(ObservedPod)
_NODES = msgspec.json.Decoder(NodeFacts)


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """The row of a ledger's table `ledgers`; the columns are explained in accountant.lake.tables.LEDGERS.

    namespace: the namespace of the ledger's tables.
    clusters: the end of the newest record of each cluster, in UTC milliseconds.
    version: the version of gputally that published.
    renamed_to: the name under which the ledger is published since; "" if it is this one, or the note was not made.
    fault: why the ledger's figures cannot be used: its tables cannot be opened, or this version cannot read the row,
        and fields without which it can be named are empty; or a copy of the ledger is published beside it. "" if they
        can."""

    namespace: str
    ledger: str
    id: str
    timezone: str
    grace_days: int
    first_ms: int
    newest_ms: int
    until_ms: int
    clusters: Mapping[str, int]
    teams: frozenset[str]
    version: str
    fault: str = ""
    exported_labels: tuple[str, ...] = ()
    renamed_to: str = ""


@contextmanager
def readable(ledger: str, version: str) -> Iterator[None]:
    """Raises UnreadableLedger for content that this version of gputally cannot read. version: the one that published
    it."""
    try:
        yield
    except _UNREADABLE as error:
        raise UnreadableLedger(
            f"{ledger}: this version ({__version__}) cannot read what version {version or 'unknown'} published "
            f"({_reason(error)}): upgrade this program to the version of the accountant, or ask the accountant itself"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        return f"{error.title}: {'.'.join(map(str, fault['loc']))}: {fault_text(fault)}"[:_MOST_REASON]
    return f"{type(error).__name__}: {described(error)}"[:_MOST_REASON]


def ledgers(engine: Engine, known_ids: Mapping[str, str] = {}) -> dict[str, LedgerStatus]:
    """Every ledger of the lake by name, ascending. A ledger that was renamed has an id that several namespaces know. It
    counts once, under its last name. If several of them are no former name, an accountant publishes a copy of the
    ledger; then these have a fault, and so has a ledger whose tables cannot be opened. Raises LakeUnavailable if none
    can.

    known_ids: by namespace, the id of the ledger when its tables could be opened; for those that cannot now."""
    namespaces, found, failures = engine.namespaces(), list[LedgerStatus](), dict[str, LakeUnavailable]()
    for namespace in namespaces:
        try:
            found += [_status(row, namespace) for row in engine.query(every_column(LEDGERS), namespace).to_pylist()]
        except LakeUnavailable as error:
            failures[namespace] = error
    if failures and len(failures) == len(namespaces):
        raise failures[namespaces[0]]
    renamed = {namespace_of(one.renamed_to): one.id for one in found if one.renamed_to}
    for namespace, failure in failures.items():
        name = _name_in(namespace)
        ledger_id = known_ids.get(namespace) or _id_in_journal(engine, namespace) or renamed.get(namespace, "")
        fault = f"{name}: its tables in the lake cannot be opened: {failure}"
        if not ledger_id:
            fault += (
                f". Its id is unknown here, so if another ledger was renamed to {name}, that counts under its "
                "former name, with the figures until then"
            )
        found.append(_faulty(namespace, name, ledger_id or namespace, fault))
    by_id: dict[str, list[LedgerStatus]] = {}
    for one in found:
        by_id.setdefault(one.id, []).append(one)
    counted = [one for several in by_id.values() for one in _counted(several)]
    return {one.ledger: one for one in sorted(counted, key=attrgetter("ledger"))}


def _name_in(namespace: str) -> str:
    """The name in a namespace, which is the ledger's own unless it has special characters."""
    return namespace.removeprefix(PREFIX).replace("_", "-")


def _id_in_journal(engine: Engine, namespace: str) -> str:
    """The id that the ledger recorded when it was published first; "" if its journal cannot be read."""
    query = exp.select("number", "content").from_("acts").where(_among("kind", {"lake"}))
    try:
        rows = engine.query(query, namespace).to_pylist()
        return str(json.loads(min(rows, key=lambda row: row["number"])["content"])["id"])
    except (LakeUnavailable, *_UNREADABLE):
        return ""


def _faulty(
    namespace: str, name: str, ledger_id: str, fault: str, *, until_ms: int = 0, version: str = ""
) -> LedgerStatus:
    """The status of a ledger of which nothing else can be read."""
    return LedgerStatus(namespace, name, ledger_id, "UTC", 0, 0, 0, until_ms, {}, frozenset(), version, fault)


def _counted(several: Sequence[LedgerStatus]) -> Sequence[LedgerStatus]:
    """Of the namespaces with one id, the one that is no former name; or with a fault those that are not, if there are
    several.

    A former name is known by the note in its own tables, which its next publication removes. So nobody who may not
    write there, and no clock, makes one of it. What cannot be opened stays beside the others with its own fault."""
    places = {one.namespace for one in several}
    present = [one for one in several if not one.renamed_to or namespace_of(one.renamed_to) not in places]
    opened = [one for one in present or several if one.until_ms]
    if len(opened) <= 1:
        return present or several
    names = sorted(one.ledger for one in opened)
    fault = (
        f"{', '.join(names)}: these names publish one ledger side by side (id {opened[0].id}), so all but one are "
        "published from a copy of it, or it was renamed and could leave no note at its former name: stop the "
        "accountant with the copy, and remove its tables or those of the former name with `gputally fleet retire NAME`"
    )
    return [
        replace(one, fault=f"{one.fault}; {fault}" if one.fault else fault) if one in opened else one
        for one in present or several
    ]


def _status(row: Mapping[str, Any], namespace: str) -> LedgerStatus:
    """The status in a row of the table `ledgers`; one with a fault if the row cannot be read."""
    name, version, until_ms = str(row["ledger"]), str(row.get("version") or ""), row.get("until_ms")
    ledger_id = str(row.get("id") or namespace)
    if namespace_of(name) != namespace:  # whoever writes there may speak of no other ledger
        name = _name_in(namespace)
        return _faulty(
            namespace, name, namespace, f"{name}: its tables are those of another ledger's name: remove them"
        )
    try:
        with readable(name, version):
            clusters = {str(cluster): int(at_ms) for cluster, at_ms in json.loads(row["clusters"]).items()}
            return LedgerStatus(
                namespace, name, ledger_id, zone(row["timezone"]).key, int(row["grace_days"]),
                int(row["first_ms"]), int(row["newest_ms"]), int(row["until_ms"]), clusters,
                frozenset(json.loads(row["teams"])), version,
                exported_labels=tuple(map(str, json.loads(row["exported_labels"] or "[]"))),
                renamed_to=str(row["renamed_to"] or ""),
            )  # fmt: skip
    except UnreadableLedger as error:
        published_ms = until_ms if isinstance(until_ms, int) else 0
        found = _faulty(namespace, name, ledger_id, str(error), until_ms=published_ms, version=version)
        return replace(found, renamed_to=str(row.get("renamed_to") or ""))


@dataclass(frozen=True, slots=True)
class LakeStatus(Status):
    """accountant.ledger.protocols.Status of a ledger as published. Some of it is read from the lake when it is asked
    for."""

    _ledger: LakeLedger

    @property
    def _row(self) -> LedgerStatus:
        return self._ledger.row

    @property
    def extent(self) -> Span:
        return self._row.first_ms, self._row.newest_ms

    @property
    def newest_by_cluster(self) -> Mapping[str, int]:
        return self._row.clusters

    @property
    def newest_by_node(self) -> Mapping[tuple[str, str], int]:
        """Without those that an earlier version published."""
        return {(node.cluster, node.name): at_ms for node, at_ms in self._ledger._nodes if at_ms is not None}

    @property
    def agents(self) -> Mapping[tuple[str, str], AgentFacts]:
        return {(node.cluster, node.name): node.agent for node, _ in self._ledger._nodes if node.agent is not None}

    @property
    def clusters(self) -> frozenset[str]:
        return frozenset(self._row.clusters)

    @property
    def teams(self) -> frozenset[str]:
        return self._row.teams

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        return tuple(node for node, _ in self._ledger._nodes if node.listed)

    @property
    def last_act(self) -> int:
        return max((act.number for act in self._ledger.acts()), default=0)

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        return policies_between(self._ledger._versions, start_ms, end_ms)

    def watermark(
        self,
        at_ms: int,
        min_coverage: float,  # noqa: ARG002 - of which nodes is not published
        shard: str | None = None,  # noqa: ARG002
        cluster: str | None = None,
    ) -> int | None:
        """The end of the newest record, at most `at_ms`; None if there are no records."""
        newest = self._row.newest_ms if cluster is None else self._row.clusters.get(cluster, 0)
        return min(newest, at_ms) or None

    def window(self, *_: object, **of: object) -> None:
        """Always None, because the lake is read for each window."""

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        ledger = self._ledger
        counted = exp.func("count", exp.Distinct(expressions=[exp.column("gpu")])).as_("gpus")
        query = exp.select("cluster", "node", counted).from_("usage_hourly").where(*ledger._span(start_ms, end_ms))
        rows = ledger._list(query.group_by("cluster", "node"), start_ms, end_ms)
        return {(row["cluster"], row["node"]): row["gpus"] for row in rows}

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:  # noqa: ARG002 - an upper bound
        """The GPU-hours of all clusters in the published days that overlap the span: an upper bound of those in the
        span."""
        days = self._ledger._published_days
        gpu_us = sum(gpu_us for first, last, gpu_us in days if last > start_ms and first < end_ms)
        return gpu_us // (MS_PER_HOUR * US_PER_MS)

    def recent_span(self, until_ms: int, length_ms: int) -> Span:
        """The last whole hours that together have at least this length."""
        hours = local_hours(until_ms - length_ms - 3 * MS_PER_HOUR, until_ms + MS_PER_HOUR, zone(self._row.timezone))
        whole = [hour for hour in hours[1:] if hour.end_ms <= until_ms]
        end_ms = whole[-1].end_ms
        return max(hour.start_ms for hour in whole if hour.start_ms <= end_ms - length_ms), end_ms

    def mark(self, start_ms: int, end_ms: int) -> int:  # noqa: ARG002 - of all spans
        """A value that changes with every publication: the instant of the newest one. A republished day need not have
        newer records. It is the same for all spans."""
        return self._row.until_ms


class LakeLedger:
    """The reading part of accountant.ledger.protocols.Ledger and accountant.ledger.journal.Journal.

    row: the row of the queried ledger. Make a new LakeLedger after another publication.
    engine: runs the queries."""

    def __init__(self, engine: Engine, row: LedgerStatus) -> None:
        self._engine = engine
        self.row = row
        self._zone = zone(row.timezone)

    def status(self) -> LakeStatus:
        return LakeStatus(self)

    def with_labels(self, names: Collection[str]) -> LakeLedger:
        """This ledger, in which labels of these names that it does not export are unknown."""
        if set(names) <= set(self.row.exported_labels):
            return self
        found = copy(self)
        exported = tuple(sorted({*self.row.exported_labels, *names}))
        found.row = replace(self.row, exported_labels=exported)
        return found

    # --- usage --------------------------------------------------------------------------------

    def usage(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Where | None = None,
        timezone: str = "UTC",
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        """See accountant.ledger.protocols.Moment. Raises UnsupportedQuestion for spans that the lake's hours do not
        divide into, for LENT, because the lake has no figures per quarter-hour, and for labels that the ledger does not
        export."""
        if set(LENT) & set(measures):
            raise UnsupportedQuestion(
                f"{self.row.ledger}: its price book bills shared GPUs by busy time (billing.shared_gpus: busy), "
                "which cannot be computed from the lake's hours: query the accountant itself, or read the table "
                "statement_lines"
            )
        lacking = set(exported_in((*by, *(where or {})))) - set(self.row.exported_labels)
        if lacking:
            raise UnsupportedQuestion(unexported(min(lacking), self.row.exported_labels))
        by, names = tuple(dict.fromkeys(by)), names_of(measures)
        # These filters are applied here, others by the engine.
        filters = {name: frozenset(values) for name, values in (where or {}).items() if not _is_column(name)}
        wanted = tuple(dict.fromkeys((*by, *filters)))
        columns = [_FIGURES[name] for name in names if name in _FIGURES]
        table = self._sums(edges, wanted, where or {}, columns) if edges[0] < edges[-1] else None
        if table is None or not len(table) or table["begins"].null_count:
            return Usage.of_rows(by, (), measures)
        begins, ends = (table[name].to_numpy() for name in ("begins", "ends"))
        span = self._placed(np.array(edges, dtype=np.int64), begins, ends)
        keys = {name: _numbered(_known(table[column_of(name)])) for name in wanted if _is_column(name)}
        keys |= self._labels(table, [name for name in wanted if is_label(name)])
        if OF_TIME & set(wanted):
            whole_days = "hour" not in sources(wanted)
            keys |= self._local_times(edges[0], edges[-1], begins, ends, timezone, whole_days=whole_days)
        chosen = np.ones(len(table), dtype=bool)
        for name, values in filters.items():
            known, number = keys[name]
            chosen &= np.array([value in values for value in known], dtype=bool)[number]
        at = np.array([keys[name][1] for name in by], dtype=np.int32).reshape(len(by), len(table)).T
        figures = _figures(table, columns, wide="energy_uj" in names)
        return Usage.summed(by, [keys[name][0] for name in by], span[chosen], at[chosen], names, figures[chosen])

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,  # noqa: ARG002 - the watermark is that of the newest records
        *,
        book: PriceBook | None = None,  # noqa: ARG002 - costs are refused
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow:
        """A usage window of whole hours; see accountant.ledger.protocols.Moment.window.

        Without a half-life the usage equals the ledger's own answer, to the microsecond. With one, usage counts as
        spread evenly over each hour. watermark_ms: the instant up to which every cluster has records. Raises
        UnsupportedQuestion."""
        if measure not in ("allocated", "busy") or shard is not None or spec.gpu_weights or spec.by_period:
            raise UnsupportedQuestion(
                "the lake has only windows of allocated or busy time, without shards, weights and a decay by period: "
                f"query the accountant of {self.row.ledger}"
            )
        newest = [at for name, at in self.row.clusters.items() if cluster in (None, name)]
        watermark_ms = min(*newest, self.row.until_ms) if newest else None
        return window_of_hours(self, spec, at_ms, measure, self._zone, cluster, watermark_ms)

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, tuple[int, int]]:
        """From when until when each of these jobs held GPUs, rounded outwards to the hour. Jobs that never held a GPU
        are left out."""
        if not keys:
            return {}
        held = exp.func("min", exp.column("start_ms")).as_("first"), exp.func("max", exp.column("end_ms")).as_("last")
        query = (
            exp.select("cluster", "namespace", "job", *held)
            .from_("usage_hourly")
            .where(self._own(), *_of_jobs(keys), "busy_us + allocated_idle_us + allocated_unknown_us > 0")
        )
        rows = self._list(query.group_by("cluster", "namespace", "job"))
        found = {JobKey(row["cluster"], row["namespace"], row["job"]): (row["first"], row["last"]) for row in rows}
        return {key: found[key] for key in keys if key in found}

    # --- statements ---------------------------------------------------------------------------

    def statement(self, month: Month) -> Statement | None:
        """The month's statement as last published; None if there is none."""
        query = exp.select("canonical").from_("statements").where(self._own(), _among("month", {str(month)}))
        rows = self._list(query)
        with self._readable():
            return from_canonical(rows[0]["canonical"].encode()) if rows else None

    # --- registers ----------------------------------------------------------------------------

    @functools.cached_property
    def _versions(self) -> Sequence[PolicyVersion]:
        """Every policy that was ever in force, oldest first."""
        rows = self._rows(POLICIES, "effective_ms")
        with self._readable():
            return [
                PolicyVersion(
                    version=row["version"],
                    effective_ms=row["effective_ms"],
                    policy=Policy.model_validate_json(row["policy"]),
                )
                for row in rows
            ]

    def pods(
        self,
        start_ms: int,
        end_ms: int,
        *,
        of: Collection[JobKey] | None = None,
        waiting: bool = False,
        placed: bool = False,
        ordered: bool = True,  # noqa: ARG002 - they always are
        named: str = "",
    ) -> Iterator[QueuedPod]:
        """The pods that existed in the span, by cluster and uid; see
        accountant.storage.read_snapshot.Snapshot.pods."""
        query = every_column(PODS).where(self._own())
        if of is not None:
            query = query.where(_among("job", {key.job for key in of}))
        rows = self._list(query)
        with self._readable():
            pods = [QueuedPod(row["cluster"], row["team"], row["queue"], _PODS.decode(row["facts"])) for row in rows]
        found = [pod for pod in pods if existed(pod.facts, start_ms, end_ms, waiting=waiting, placed=placed)]
        chosen = found if of is None else [pod for pod in found if pod.key in frozenset(of)]
        chosen = [pod for pod in chosen if pod.is_named(named)] if named else chosen
        return iter(sorted(chosen, key=lambda pod: (pod.cluster, pod.facts.uid)))

    def pods_by_job(self, start_ms: int, end_ms: int) -> Mapping[JobKey, JobPods]:
        """The numbers of pods that existed in the span, by job."""
        return pods_by_job(self.pods(start_ms, end_ms))

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        """The jobs (`Kind/name`) of a namespace's pods."""
        query = (
            exp.select("job")
            .distinct()
            .from_("pods")
            .where(self._own(), _among("cluster", {cluster}), _among("namespace", {namespace}))
        )
        return frozenset(row["job"] for row in self._list(query))

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        """The job of a pod; None for an unknown pod."""
        query = every_column(PODS).where(self._own(), _among("cluster", {cluster}), _among("uid", {uid}))
        with self._readable():
            return next((QueuedPod(cluster, "", "", _PODS.decode(row["facts"])).key for row in self._list(query)), None)

    def holds(
        self,
        spans: Sequence[Span],  # noqa: ARG002
        *,
        of: Collection[JobKey] | None = None,  # noqa: ARG002
        gpus: Collection[tuple[str, str]] | None = None,  # noqa: ARG002
    ) -> Holds:
        """Always raises UnsupportedQuestion, because an hour does not tell when in it a pod began to hold a GPU."""
        raise self._not_published("the instants from which and to which GPUs are held")

    def epochs(self, span: Span | None = None, *, of: Collection[JobKey] | None = None) -> list[EpochReport]:
        if of is not None and not of:
            return []
        query = every_column(EPOCHS).where(self._own(), *(() if span is None else _between("at_ms", *span)))
        query = query.where(*(() if of is None else _of_jobs(of)))
        found = [
            EpochReport(JobKey(row["cluster"], row["namespace"], row["job"]), row["epoch"], row["at_ms"], row["who"])
            for row in self._list(query)
        ]
        chosen = found if of is None else [one for one in found if one.key in frozenset(of)]
        return sorted(chosen, key=attrgetter("key", "at_ms", "epoch"))

    def epoch_counts(self, keys: Collection[JobKey]) -> Mapping[JobKey, int]:
        if not keys:
            return {}
        query = exp.select("cluster", "namespace", "job", exp.func("count", exp.Star()).as_("epochs")).from_("epochs")
        rows = self._list(query.where(self._own(), *_of_jobs(keys)).group_by("cluster", "namespace", "job"))
        found = {JobKey(row["cluster"], row["namespace"], row["job"]): row["epochs"] for row in rows}
        return {key: found[key] for key in keys if key in found}

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
        """Decisions, newest first; see accountant.ledger.protocols.Moment.decisions."""
        query = (
            exp.select("decision", "at_ms", "id")
            .from_("decisions")
            .where(self._own(), *_between("at_ms", start_ms, end_ms), *self._days_of(start_ms, end_ms))
        )
        for name, value in (("kind", kind), ("subject", subject)):
            if value is not None:
                query = query.where(_among(name, {value}))
        if cluster is not None:
            query = query.where(_among("cluster", {cluster, ""}))
        rows = self._list(query, start_ms, end_ms)
        with self._readable():
            found = [Decision.model_validate_json(row["decision"]) for row in rows]
        if gang is not None:
            named = tuple(gang)  # after the kind of the subject, as in the ledger's query
            found = [one for one in found if one.subject.partition("/")[2].startswith(named)]
        if before is not None:
            found = [one for one in found if one.at_ms < end_ms - 1 or one.key < before]
        return sorted(found, key=attrgetter("at_ms", "key"), reverse=True)[:limit]

    @functools.cached_property
    def _published_days(self) -> list[tuple[int, int, int]]:
        """Start, end and GPU-µs of each published day. Read once: each question asks for its price."""
        total = _sum(" + ".join(ACCOUNT_COLUMNS[:6])).as_("gpu_us")
        query = exp.select("start_ms", "end_ms", total).from_("days").where(self._own()).group_by("start_ms", "end_ms")
        return [(row["start_ms"], row["end_ms"], int(row["gpu_us"] or 0)) for row in self._list(query)]

    # --- journal ------------------------------------------------------------------------------

    def acts(self, *kinds: ActKind, subject: str | None = None, after: int = 0, limit: int | None = None) -> list[Act]:
        return [
            act for act in self._journal
            if act.number > after and (not kinds or act.kind in kinds) and (subject is None or act.subject == subject)
        ][:limit]  # fmt: skip

    def record(self, acts: Sequence[NewAct], seen: int) -> list[Act]:  # noqa: ARG002 - nothing is ever recorded here
        """Always raises LedgerUnavailable, because only accountants write to the lake."""
        raise LedgerUnavailable(f"the lake is read-only: send this to the accountant of {self.row.ledger}")

    # --- a ledger for pages -------------------------------------------------------------------

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[LakeLedger]:  # noqa: ARG002 - always the same
        """Yields this ledger itself: no snapshot is needed, because rows change only with a new publication."""
        yield self

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because the quarantine is not published."""
        raise self._not_published("the records in quarantine")

    def holes(self, limit: int = 1000) -> list[Hole]:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because the numbers of records are not published."""
        raise self._not_published("the numbers of missing records")

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        """Always raises UnsupportedQuestion, because the owners of GPUs are not published."""
        raise self._not_published("the owners of GPUs")

    def imbalance(self, start_ms: int, end_ms: int) -> Imbalance:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because what is published has no rows to compare its sums with."""
        raise self._not_published("rows")

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because the instants of writing are not published."""
        raise self._not_published("what is dated in the future")

    def views(self, owner: str) -> tuple[SavedView, ...]:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because saved views are not published."""
        raise self._not_published("saved views")

    def save_view(self, owner: str, view: SavedView, now_ms: int) -> None:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because a lake is only read."""
        raise self._not_published("saved views")

    def remove_view(self, owner: str, name: str) -> None:  # noqa: ARG002
        """Always raises UnsupportedQuestion, because a lake is only read."""
        raise self._not_published("saved views")

    # --- internal -----------------------------------------------------------------------------

    def _readable(self) -> AbstractContextManager[None]:
        return readable(self.row.ledger, self.row.version)

    def _not_published(self, what: str) -> UnsupportedQuestion:
        return UnsupportedQuestion(f"{what} are not published in the lake: query the accountant of {self.row.ledger}")

    def _sums(
        self, edges: Sequence[int], wanted: Sequence[Dimension], where: Where, figures: Sequence[str]
    ) -> pa.Table:
        """The sums that the query engine returns, by these dimensions, and also by the span of the rows if there are
        several spans or dimensions of time. Figures that an earlier version did not publish count as unknown. Raises
        UnreadableLedger for those of which nothing says for how long they are unknown."""
        found = self._sums_of(edges, wanted, where, [(name, _sum(name)) for name in figures], " + ".join(figures))
        if found["rows"].equals(found["whole_rows"]):
            return found
        known = [
            (name, _sum(name, _WITHOUT_FIGURE[name]) if name in _WITHOUT_FIGURE else _sum_if_whole(name))
            for name in figures
        ]
        found = self._sums_of(edges, wanted, where, known, " + ".join(figures))
        lacking = [name for name in figures if found[name].null_count]
        if lacking:
            raise UnreadableLedger(
                f"{self.row.ledger}: {lacking[0]} is unknown in days that an earlier version published: upgrade its "
                "accountant, which writes them again, or ask the accountant itself"
            )
        return found

    def _sums_of(
        self,
        edges: Sequence[int],
        wanted: Sequence[Dimension],
        where: Where,
        figures: Sequence[tuple[str, exp.Expression]],
        all_figures: str,
    ) -> pa.Table:
        """Sums, with the number of rows of each group, and of those whose figures are all known."""
        start_ms, end_ms = edges[0], edges[-1]
        named = {column_of(name): None for name in wanted if _is_column(name)}
        named |= dict.fromkeys(_OF_LABELS) if any(map(is_label, wanted)) else {}
        columns = [exp.column(name) for name in named]
        bounds: list[Any] = [exp.column("start_ms"), exp.column("end_ms")]
        if len(edges) > len(("begin", "end")) or set(wanted) & OF_TIME:
            groups = [*columns, *bounds]
        else:
            groups, bounds = columns, [exp.func("min", bounds[0]), exp.func("max", bounds[1])]
        sums = [figure.as_(name) for name, figure in figures]
        counts = exp.func("count", exp.Star()).as_("rows"), exp.func("count", exp.maybe_parse(all_figures))
        query = exp.select(*columns, *sums, counts[0], counts[1].as_("whole_rows"))
        query = query.select(bounds[0].as_("begins"), bounds[1].as_("ends"))
        query = query.from_("usage_hourly").where(*self._span(start_ms, end_ms))
        query = query.where(*(_among(column_of(name), values) for name, values in where.items() if _is_column(name)))
        return self._table(query.group_by(*groups) if groups else query, start_ms, end_ms)

    def _labels(self, table: pa.Table, wanted: Sequence[LabelDimension]) -> dict[Dimension, _Numbered]:
        """The values of exported labels in each row: IDLE where nothing holds the GPU, "" where one is not known."""
        if not wanted:
            return {}
        # Where nothing holds the GPU, no label is published.
        queues, queue = _numbered(table["queue"])
        is_held = np.array([name != IDLE for name in queues], dtype=bool)[queue]
        texts, at = _numbered(_known(table[LABELS]))
        with self._readable():
            known = [json.loads(text) if text else {} for text in texts]
            found: dict[Dimension, _Numbered] = {}
            for name in wanted:
                values = [IDLE, *(str(labels.get(label_of(name), "")) for labels in known)]
                distinct, number = np.unique(values, return_inverse=True)
                found[name] = distinct.tolist(), number.reshape(-1)[np.where(is_held, at + 1, 0)]
        return found

    def _local_times(
        self, start_ms: int, end_ms: int, begins: Int64Array, ends: Int64Array, timezone: str, *, whole_days: bool
    ) -> dict[Dimension, _Numbered]:
        """The local month, day and hour of each row. whole_days: rows may reach over hours of a day, whose hour is then
        meaningless."""
        hours = local_hours(start_ms, end_ms, ZoneInfo(timezone))
        if whole_days:
            hours = tuple(hour for at, hour in enumerate(hours) if not at or hours[at - 1].day != hour.day)
        at = self._placed(np.array([*(hour.start_ms for hour in hours), end_ms], dtype=np.int64), begins, ends)
        of_source = {
            "month": [hour.day[: len("2026-10")] for hour in hours],
            "day": [hour.day for hour in hours],
            "hour": [hour.hour for hour in hours],
        }
        names = {name: [value_of(name, text) for text in of_source[DECLARED[name].source]] for name in OF_TIME}
        distinct = {name: np.unique(several, return_inverse=True) for name, several in names.items()}
        return {name: (values.tolist(), number.reshape(-1)[at]) for name, (values, number) in distinct.items()}

    def _placed(self, edges: Int64Array, begins: Int64Array, ends: Int64Array) -> Int64Array:
        """For each [begin, end), the index of the span between edges that contains it. Raises UnsupportedQuestion."""
        at = np.searchsorted(edges, begins, side="right") - 1
        inside = (at >= 0) & (at < len(edges) - 1)
        inside &= ends <= edges[np.clip(at + 1, 0, len(edges) - 1)]
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
            raise UnsupportedQuestion(
                f"the lake has whole hours of {self.row.timezone} for {self.row.ledger}, and the query begins or "
                f"ends inside an hour between {utc(int(begins[first]))} and {utc(int(ends[first]))}: query whole "
                f"hours, or the accountant of {self.row.ledger}"
            )
        return at

    def _span(self, start_ms: int, end_ms: int) -> list[exp.Expression]:
        return [
            self._own(), *self._days_of(start_ms, end_ms),
            exp.column("end_ms") > exp.Literal.number(int(start_ms)),
            exp.column("start_ms") < exp.Literal.number(int(end_ms)),
        ]  # fmt: skip

    def _own(self) -> exp.Expression:
        return exp.column("ledger").eq(exp.Literal.string(self.row.ledger))

    def _days(self, start_ms: int, end_ms: int) -> tuple[date, date]:
        first, last = (local_date(at, self._zone) for at in (max(start_ms, 0), min(end_ms, self.row.until_ms)))
        return first, max(first, last)

    def _days_of(self, start_ms: int, end_ms: int) -> list[exp.Expression]:
        first, last = self._days(start_ms, end_ms)
        day = exp.column("day")
        return [
            day >= exp.cast(exp.Literal.string(first.isoformat()), "DATE"),
            day <= exp.cast(exp.Literal.string(last.isoformat()), "DATE"),
        ]  # fmt: skip

    def _table(self, query: exp.Select, start_ms: int | None = None, end_ms: int | None = None) -> pa.Table:
        days = None if start_ms is None or end_ms is None else self._days(start_ms, end_ms)
        return self._engine.query(query, self.row.namespace, days)

    def _list(self, query: exp.Select, start_ms: int | None = None, end_ms: int | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._table(query, start_ms, end_ms).to_pylist()
        return rows

    def _rows(self, table: LakeTable, *order: str) -> list[dict[str, Any]]:
        rows = self._list(every_column(table).where(self._own()))
        return sorted(rows, key=lambda row: tuple(row[name] for name in order))

    @functools.cached_property
    def _nodes(self) -> Sequence[tuple[NodeFacts, int | None]]:
        """The nodes, each with the end of its newest record; None if that is not published."""
        rows = self._rows(NODES, "cluster", "node")
        with self._readable():
            return [(_NODES.decode(row["facts"]), row["newest_ms"]) for row in rows]

    @functools.cached_property
    def _journal(self) -> list[Act]:
        return [
            Act(
                row["at_ms"], row["kind"], row["subject"], row["who"], row["reason"], row["content"],
                number=row["number"], digest=row["digest"],
            )
            for row in self._rows(ACTS, "number")
        ]  # fmt: skip


def window_of_hours(
    moment: Moment,
    spec: WindowSpec,
    at_ms: int,
    measure: Measure,
    tz: ZoneInfo,
    cluster: str | None,
    watermark_ms: int | None,
) -> UsageWindow:
    """A usage window of allocated or busy time, from the sums of whole local hours. That of quarter-hours, with prices
    and weights, is accountant.storage.query.window_query."""
    start_ms, end_ms = bounds(spec, at_ms, tz)
    decayed = spec.half_life is not None
    inner = [hour.start_ms for hour in local_hours(start_ms, end_ms, tz)[1:]] if decayed else []
    edges = (start_ms, *inner, end_ms)
    where: Where = {} if cluster is None else {"cluster": (cluster,)}
    leaves: dict[str, int] = {}
    capacity = working = metered = 0
    found = moment.usage(edges, ("queue",), where)
    for span, (begin, end) in enumerate(pairwise(edges)):
        weight = factor(begin, end, end_ms, spec.half_life) if decayed else None
        for line in found.lines(span):
            accounts, queue = line.accounts_gpu_us, line.key["queue"]
            there = accounts.total - accounts.down
            working += there
            metered += there - accounts.unmetered - (accounts.allocated_unknown if measure == "busy" else 0)
            capacity += there if weight is None else term(there, weight)
            used = getattr(accounts, measure)
            if used and queue != IDLE:
                leaves[queue] = leaves.get(queue, 0) + (used if weight is None else term(used, weight))
    known = [Assignment(version) for version in moment.status().policies(start_ms, end_ms)]
    policies = [rules for _, _, rules in in_force(known, start_ms, end_ms)]
    usage, unassigned = rolled_up(leaves, policies)
    version = policies[-1].version if policies else None
    return UsageWindow(
        kind=spec.kind,
        start_ms=start_ms,
        end_ms=end_ms,
        half_life_s=spec.half_life,
        measure=measure,
        unit="gpu_us",
        by="queue",
        usage=usage,
        unassigned=unassigned,
        capacity=capacity,
        watermark_ms=watermark_ms,
        coverage=metered / working if working else 1.0,
        policy_version=version.version if version is not None else None,
        cluster=cluster,
        policy_counting=policies[-1].counting if policies and cluster is not None else None,
        since_ms=min(end_ms, max(start_ms, moment.status().extent[0] or end_ms)),
    )


def every_column(table: LakeTable) -> exp.Select:
    """The query for all rows of a table."""
    return exp.select(*(exp.column(column.name) for column in table.columns)).from_(table.name)


def _is_column(dimension: Dimension) -> bool:
    """Whether a dimension is a column of `usage_hourly`."""
    return dimension not in OF_TIME and not is_label(dimension)


def _known(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts, with "" for what is unknown. Of nulls alone, some engines do not tell the type."""
    return column.cast(pa.string()).fill_null("")


def _numbered(column: pa.ChunkedArray) -> _Numbered:
    encoded = pa.concat_arrays(column.chunks).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _figures(table: pa.Table, columns: Sequence[str], *, wide: bool) -> Int64Array:
    """Sums as columns of integers. wide: with whole joules as the last column, and only the rest of `energy_uj`."""
    figures = np.empty((len(table), len(columns) + wide), dtype=np.int64)
    for number, name in enumerate(columns):
        if name in _WIDE:
            energy_uj = np.array([int(value) for value in table[name].to_pylist()], dtype=object)
            figures[:, -1], figures[:, number] = energy_uj // UJ_PER_J, energy_uj % UJ_PER_J
        else:
            figures[:, number] = table[name].cast(pa.int64()).to_numpy()
    return figures


def _sum(name: str, otherwise: str = "") -> exp.Expression:
    """The sum of a figure or an expression of figures, as decimal(38, 0), which all engines return alike. otherwise:
    an expression that counts in rows in which the figure is null."""
    column: exp.Expression = exp.maybe_parse(name)
    if otherwise:
        column = exp.Coalesce(this=column, expressions=[exp.maybe_parse(otherwise)])
    if name in _WIDE:
        column = exp.cast(column, "DECIMAL(38, 0)")
    return exp.cast(exp.func("sum", column), "DECIMAL(38, 0)")


def _sum_if_whole(name: str) -> exp.Expression:
    """The sum of a figure; null if it is null in any row."""
    is_whole = exp.func("count", exp.column(name)).eq(exp.func("count", exp.Star()))
    return exp.Case().when(is_whole, _sum(name))


def _among(column: str, values: Collection[str]) -> exp.Expression:
    listed = [exp.Literal.string(one) for one in sorted(values)]
    if not listed:
        return exp.false()
    if "" in values:  # what an earlier version did not publish is null, which is unknown
        return exp.func("coalesce", exp.column(column), exp.Literal.string("")).isin(*listed)
    return exp.column(column).isin(*listed)


def _of_jobs(keys: Collection[JobKey]) -> list[exp.Expression]:
    """Conditions that the rows of these jobs meet, and some others."""
    return [_among("job", {key.job for key in keys}), _among("namespace", {key.namespace for key in keys})]


def _between(column: str, start: int, end: int) -> list[exp.Expression]:
    return [
        exp.column(column) >= exp.Literal.number(int(start)), exp.column(column) < exp.Literal.number(int(end)),
    ]  # fmt: skip
