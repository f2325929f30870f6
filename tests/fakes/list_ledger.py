"""A small ledger of plain rows that scans all of them, for tests of bills and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from accountant.billing.queue_waits import pods_by_job
from accountant.core.periods import hour_name
from accountant.ledger.protocols import EpochReport, JobKey, JobPods, Quarantined, QueuedPod
from accountant.ledger.usage import ACCOUNTS, MEASURES, Usage, UsageMeasure, Where, names_of
from accountant.wire.policy_models import IDLE, Decision, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from gputally.base.apportionment import prorate
from tests.fakes.fixed_status import FixedStatus
from tests.fakes.memory_journal import MemoryJournal

TIMES = ("month", "day", "hour")


@cache
def _local(dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
    name = hour_name(at_ms, tz)
    return {"hour": name, "day": name[:10], "month": name[:7]}[dimension]


@dataclass(frozen=True)
class Row:
    """Usage of one holder, or of unheld GPUs, over a span, already split into accounts."""

    start_ms: int
    end_ms: int
    accounts: Accounts
    names: Mapping[str, str] = field(default_factory=dict)
    energy_uj: int = 0
    starting: int = 0
    gang_waiting: int = 0

    def value(self, dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
        if dimension in TIMES:
            return _local(dimension, at_ms, tz)
        default = IDLE if dimension in ("team", "queue") else ""
        return self.names.get(dimension, default)

    def pieces(self, start_ms: int, end_ms: int, step_ms: int | None) -> Iterable[tuple[int, int]]:
        start, end = max(start_ms, self.start_ms), min(end_ms, self.end_ms)
        while start < end:
            stop = end if step_ms is None else min(end, (start // step_ms + 1) * step_ms)
            yield start, stop
            start = stop


class ListLedger(MemoryJournal):
    """Implements the protocol as far as bills need it. Rows are added to `rows`."""

    def __init__(self, rows: Iterable[Row] = (), refused: Iterable[Quarantined] = ()) -> None:
        super().__init__()
        self.rows = list(rows)
        self.refused = list(refused)
        self.known_pods: list[QueuedPod] = []
        self.reported: list[EpochReport] = []
        self._versions: list[PolicyVersion] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

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
        if {*TIMES} & {*by, *where}:
            offset = datetime.fromtimestamp(start_ms / 1000, tz).utcoffset()
            step = 900_000 if offset is not None and offset.total_seconds() % 3600 else 3_600_000
        timed = {name: values for name, values in where.items() if name in TIMES}
        named = {name: values for name, values in where.items() if name not in TIMES}
        for row in self.rows:
            if any(row.value(name, start_ms, tz) not in values for name, values in named.items()):
                continue
            span = row.end_ms - row.start_ms
            amounts = {name: getattr(row.accounts, name) for name in ACCOUNTS}
            amounts |= {"energy_uj": row.energy_uj, "starting": row.starting, "gang_waiting": row.gang_waiting}
            told = [None if name in TIMES else row.value(name, start_ms, tz) for name in by]
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
        for row in self.rows:
            cluster = row.names.get("cluster", "")
            newest[cluster] = max(newest.get(cluster, 0), row.end_ms)
        begun = min((row.start_ms for row in self.rows), default=0)
        extent = begun, max(newest.values(), default=0)
        content = self.rows, self.known_pods, self.reported, self._versions
        return FixedStatus(len(self._acts), extent, newest, versions=self._versions, content=content)

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        return self.refused[:limit]

    def put_policy(self, policy: Policy, now_ms: int) -> PolicyVersion:
        self._versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self._versions[-1]

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[ListLedger]:
        yield self

    def decisions(self, start_ms: int, end_ms: int, limit: int = 1000) -> list[Decision]:
        return []

    def pods(self, start_ms: int, end_ms: int, **_: Any) -> Iterator[QueuedPod]:
        return iter(self.known_pods)

    def pods_by_job(self, start_ms: int, end_ms: int) -> dict[JobKey, JobPods]:
        return pods_by_job(self.pods(start_ms, end_ms))

    def epochs(self, span: tuple[int, int]) -> list[EpochReport]:
        return [one for one in self.reported if span[0] <= one.at_ms < span[1]]
