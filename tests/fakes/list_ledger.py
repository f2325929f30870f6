"""A small ledger of plain rows that scans all of them, for tests of bills, reports and routes. It keeps the laws of a
moment (tests/moment): what it does not keep it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import Any, cast
from zoneinfo import ZoneInfo

from accountant.billing.queue_waits import existed, pods_by_job
from accountant.core.errors import UnsupportedQuestion
from accountant.core.periods import hour_name
from accountant.lake.lake_ledger import window_of_hours
from accountant.ledger.protocols import (
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
)
from accountant.ledger.usage import ACCOUNTS, MEASURES, Usage, UsageMeasure, Where, names_of
from accountant.prices.price_book import PriceBook
from accountant.wire.dimensions import DECLARED, OF_LABELS, OF_TIME, value_of
from accountant.wire.policy_models import (
    IDLE,
    UNASSIGNED,
    Decision,
    Measure,
    Policy,
    PolicyVersion,
    UsageWindow,
    WindowSpec,
)
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from gputally.base.apportionment import prorate
from gputally.base.measures import REPORTED
from tests.fakes.fixed_status import FixedStatus
from tests.fakes.memory_journal import MemoryJournal


@cache
def _local(dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
    name = hour_name(at_ms, tz)
    of_source = {"hour": name, "day": name[:10], "month": name[:7]}
    return value_of(dimension, of_source[DECLARED[dimension].source])


@dataclass(frozen=True)
class Row:
    """Usage of one holder, or of unheld GPUs, over a span, already split into accounts."""

    start_ms: int
    end_ms: int
    accounts: Accounts
    names: Mapping[str, str] = field(default_factory=dict)
    energy_uj: int | None = None
    starting: int = 0
    gang_waiting: int = 0

    def value(self, dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
        if dimension in OF_TIME:
            return _local(dimension, at_ms, tz)
        default = IDLE if dimension in ("team", "queue") else ""
        return self.names.get(dimension, default)

    def pieces(self, start_ms: int, end_ms: int, step_ms: int | None) -> Iterable[tuple[int, int]]:
        start, end = max(start_ms, self.start_ms), min(end_ms, self.end_ms)
        while start < end:
            stop = end if step_ms is None else min(end, (start // step_ms + 1) * step_ms)
            yield start, stop
            start = stop


def _measures(row: Row) -> dict[str, int]:
    """The figures beside the accounts; of what the row does not tell nothing is known, for the whole of its time."""
    held = row.accounts.allocated
    times = {"held": held, "in service": held + row.accounts.unallocated}
    unknown = {each.unknown: times[each.known] for each in REPORTED}
    if row.energy_uj is not None:
        unknown["energy_unknown"] = 0
    return {**unknown, "energy_uj": row.energy_uj or 0, "starting": row.starting, "gang_waiting": row.gang_waiting}


class ListLedger(MemoryJournal):
    """accountant.ledger.protocols.Moment. Rows are added to `rows`.

    refused, missing: what was not booked, and numbers that will never arrive."""

    def __init__(self, rows: Iterable[Row] = (), refused: Iterable[Quarantined] = ()) -> None:
        super().__init__()
        self.rows = list(rows)
        self.refused = list(refused)
        self.missing: list[Hole] = []
        self.known_pods: list[QueuedPod] = []
        self.reported: list[EpochReport] = []
        self.decided: dict[str, Decision] = {}
        self.versions: list[PolicyVersion] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def every_row(self) -> Sequence[Row]:
        return self.rows

    def usage(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Where | None = None,
        timezone: str = "UTC",
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        by, tz, names = tuple(dict.fromkeys(by)), ZoneInfo(timezone), names_of(measures)
        figures = [name for name in names if name != "energy_j"]

        def rows() -> Iterator[tuple[int, tuple[str, ...], list[int]]]:
            for span, (start, end) in enumerate(pairwise(edges)):
                for key, amounts in self._parts(start, end, by, where or {}, tz):
                    yield span, key, [amounts.get(name, 0) for name in figures]

        return Usage.of_rows(by, rows(), measures)

    def _parts(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], where: Where, tz: ZoneInfo
    ) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
        """Yield the key and the figures of each part of a row."""
        step = None
        if OF_TIME & {*by, *where}:
            offset = datetime.fromtimestamp(start_ms / 1000, tz).utcoffset()
            step = 900_000 if offset is not None and offset.total_seconds() % 3600 else 3_600_000
        timed = {name: values for name, values in where.items() if name in OF_TIME}
        named = {name: values for name, values in where.items() if name not in OF_TIME}
        for row in self.every_row():
            if any(row.value(name, start_ms, tz) not in values for name, values in named.items()):
                continue
            span = row.end_ms - row.start_ms
            amounts = {name: getattr(row.accounts, name) for name in ACCOUNTS}
            amounts |= _measures(row)
            told = [None if name in OF_TIME else row.value(name, start_ms, tz) for name in by]
            for start, end in row.pieces(start_ms, end_ms, step):
                if any(row.value(name, start, tz) not in values for name, values in timed.items()):
                    continue
                key = tuple(row.value(n, start, tz) if t is None else t for n, t in zip(by, told, strict=True))
                yield (
                    key,
                    {
                        name: prorate(amount, span, start - row.start_ms, end - row.start_ms)
                        for name, amount in amounts.items()
                        if amount
                    },
                )

    def status(self) -> FixedStatus:
        newest: dict[str, int] = {}
        newest_by_node: dict[tuple[str, str], int] = {}
        seen: dict[tuple[str, str, str], tuple[int, int]] = {}
        nodes: dict[tuple[str, str], NodeFacts] = {}
        for row in self.every_row():
            cluster, node, gpu = (row.names.get(name, "") for name in ("cluster", "node", "gpu"))
            newest[cluster] = max(newest.get(cluster, 0), row.end_ms)
            if node:
                nodes[cluster, node] = NodeFacts(cluster, node).with_values(
                    {name: row.names[name] for name in OF_LABELS if name in row.names}
                )
                newest_by_node[cluster, node] = max(newest_by_node.get((cluster, node), 0), row.end_ms)
            if gpu:
                first, last = seen.get((cluster, node, gpu), (row.start_ms, row.end_ms))
                seen[cluster, node, gpu] = min(first, row.start_ms), max(last, row.end_ms)
        begun = min((row.start_ms for row in self.every_row()), default=0)
        teams = {row.names.get("team", "") for row in self.every_row()} - {"", IDLE, UNASSIGNED}
        return FixedStatus(
            last_act=len(self._acts),
            extent=(begun, max(newest.values(), default=0)),
            newest_by_cluster=newest,
            newest_by_node=newest_by_node,
            clusters=frozenset(filter(None, newest)),
            teams=frozenset(teams),
            nodes=tuple(nodes[key] for key in sorted(nodes)),
            versions=self.versions,
            seen=seen,
            content=(self.rows, self.known_pods, self.reported, self.versions),
        )

    def put_policy(self, policy: Policy, now_ms: int, who: str = "", reason: str = "") -> PolicyVersion:
        if not self.versions or self.versions[-1].version != policy.version():
            self.versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self.versions[-1]

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[Any]:
        yield self

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
        if measure not in ("allocated", "busy") or shard is not None or spec.gpu_weights or spec.by_period:
            raise self._refusal("windows of cost and energy, shards and weights")
        status = self.status()
        watermark_ms = status.watermark(at_ms, min_coverage)
        return window_of_hours(cast(Moment, self), spec, at_ms, measure, ZoneInfo("UTC"), cluster, watermark_ms)

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
        found = [
            d
            for d in self.decided.values()
            if start_ms <= d.at_ms < end_ms
            and kind in (None, d.kind)
            and subject in (None, d.subject)
            and (cluster is None or d.cluster in ("", cluster))
            and (gang is None or ("/" in d.subject and d.subject.partition("/")[2].startswith(tuple(gang))))
            and (before is None or d.at_ms < end_ms - 1 or d.key < before)
        ]
        return sorted(found, key=lambda d: (d.at_ms, d.key), reverse=True)[:limit]

    def pods(
        self,
        start_ms: int,
        end_ms: int,
        *,
        of: Collection[JobKey] | None = None,
        ordered: bool = True,
        named: str = "",
        **only: bool,
    ) -> Iterator[QueuedPod]:
        found = [pod for pod in self.known_pods if existed(pod.facts, start_ms, end_ms, **only)]
        chosen = [pod for pod in found if (of is None or pod.key in of) and (not named or pod.is_named(named))]
        return iter(sorted(chosen, key=lambda pod: (pod.cluster, pod.facts.uid)))

    def pods_by_job(self, start_ms: int, end_ms: int) -> dict[JobKey, JobPods]:
        return pods_by_job(self.pods(start_ms, end_ms))

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        keys = [pod.key for pod in self.known_pods]
        return frozenset(key.job for key in keys if (key.cluster, key.namespace) == (cluster, namespace))

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        return next((pod.key for pod in self.known_pods if (pod.cluster, pod.facts.uid) == (cluster, uid)), None)

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, tuple[int, int]]:
        found: dict[JobKey, tuple[int, int]] = {}
        for row in self.every_row():
            key = JobKey(*(row.names.get(name, "") for name in ("cluster", "namespace", "job")))
            if key in keys and row.accounts.allocated:
                first, last = found.get(key, (row.start_ms, row.end_ms))
                found[key] = min(first, row.start_ms), max(last, row.end_ms)
        return found

    def epochs(self, span: tuple[int, int] | None = None, *, of: Collection[JobKey] | None = None) -> list[EpochReport]:
        found = [one for one in self.reported if span is None or span[0] <= one.at_ms < span[1]]
        return sorted((one for one in found if of is None or one.key in of), key=lambda one: (one.key, one.at_ms))

    def epoch_counts(self, keys: Collection[JobKey]) -> Mapping[JobKey, int]:
        return Counter(one.key for one in self.epochs(of=keys))

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        return self.refused[:limit]

    def holes(self, limit: int = 1000) -> list[Hole]:
        return self.missing[:limit]

    def imbalance(self, start_ms: int, end_ms: int) -> Imbalance:
        return Imbalance(0, (), len(self.refused))  # rows are all that it has

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:
        return ()  # it takes what is dated as it is told

    def holds(self, spans: Sequence[tuple[int, int]], **_: Any) -> Holds:
        raise self._refusal("from when to when a GPU is held")

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        raise self._refusal("the owners of GPUs")

    def _refusal(self, what: str) -> UnsupportedQuestion:
        return UnsupportedQuestion(f"a ledger of rows does not keep {what}")
