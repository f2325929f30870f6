"""A small ledger of plain rows that scans all of them, for tests of bills and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

from accountant.billing.queue_waits import KnownPod
from accountant.core.periods import hour_name
from accountant.ledger.protocols import EpochReport, Quarantined
from accountant.wire.policy_models import IDLE, Decision, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine
from gputally.base.apportionment import prorate
from tests.fakes.answers_from_usage import FromLines
from tests.fakes.memory_journal import MemoryJournal

ACCOUNTS = ("busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down")


TIMES = ("day", "hour")


@cache
def _local(dimension: Dimension, at_ms: int, tz: ZoneInfo) -> str:
    name = hour_name(at_ms, tz)
    return name if dimension == "hour" else name.partition("T")[0]


@dataclass(frozen=True)
class Row:
    """Usage of one holder, or of unheld GPUs, over a span, already split into accounts."""

    start_ms: int
    end_ms: int
    accounts: Accounts
    names: Mapping[str, str] = field(default_factory=dict)
    energy_uj: int = 0

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


class ListLedger(FromLines, MemoryJournal):
    """Implements the protocol as far as bills need it. Rows are added to `rows`."""

    def __init__(self, rows: Iterable[Row] = (), refused: Iterable[Quarantined] = ()) -> None:
        super().__init__()
        self.rows = list(rows)
        self.refused = list(refused)
        self.known_pods: list[KnownPod] = []
        self.reported: list[EpochReport] = []
        self._versions: list[PolicyVersion] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        tz = ZoneInfo(timezone)
        step = None
        if {"day", "hour"} & {*by, *(where or {})}:
            offset = datetime.fromtimestamp(start_ms / 1000, tz).utcoffset()
            step = 900_000 if offset is not None and offset.total_seconds() % 3600 else 3_600_000
        sums: dict[tuple[str, ...], dict[str, int]] = {}
        timed = {name: values for name, values in (where or {}).items() if name in TIMES}
        named = {name: values for name, values in (where or {}).items() if name not in TIMES}
        for row in self.rows:
            if any(row.value(name, start_ms, tz) not in values for name, values in named.items()):
                continue
            span = row.end_ms - row.start_ms
            amounts = {name: amount for name in ACCOUNTS if (amount := getattr(row.accounts, name))}
            amounts["energy_uj"] = row.energy_uj
            told = [None if name in TIMES else row.value(name, start_ms, tz) for name in by]
            for start, end in row.pieces(start_ms, end_ms, step):
                if any(row.value(name, start, tz) not in values for name, values in timed.items()):
                    continue
                key = tuple(row.value(n, start, tz) if t is None else t for n, t in zip(by, told, strict=True))
                group = sums.setdefault(key, dict.fromkeys((*ACCOUNTS, "energy_uj"), 0))
                for name, amount in amounts.items():
                    group[name] += prorate(amount, span, start - row.start_ms, end - row.start_ms)
        return [
            UsageLine(
                key=dict(zip(by, key, strict=True)),
                accounts_gpu_us=Accounts(**{name: sums[key][name] for name in ACCOUNTS}),
                energy_uj=sums[key]["energy_uj"],
            )
            for key in sorted(sums)
        ]

    def coverage(self, start_ms: int, end_ms: int) -> float | None:
        total = Accounts(**self._total(start_ms, end_ms))
        capacity = total.total - total.down
        return None if capacity == 0 else (capacity - total.unmetered) / capacity

    def extent(self) -> tuple[int, int]:
        return (min(row.start_ms for row in self.rows), max(row.end_ms for row in self.rows)) if self.rows else (0, 0)

    def newest_by_cluster(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for row in self.rows:
            cluster = row.names.get("cluster", "")
            newest[cluster] = max(newest.get(cluster, 0), row.end_ms)
        return newest

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        return self.refused[:limit]

    def _total(self, start_ms: int, end_ms: int) -> dict[str, int]:
        lines = self.usage(start_ms, end_ms, ())
        return {name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in ACCOUNTS}

    def put_policy(self, policy: Policy, now_ms: int) -> PolicyVersion:
        self._versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self._versions[-1]

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        before = [version for version in self._versions if version.effective_ms <= start_ms]
        inside = [version for version in self._versions if start_ms < version.effective_ms < end_ms]
        return [*before[-1:], *inside]

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[ListLedger]:
        yield self

    def decisions(self, start_ms: int, end_ms: int, limit: int = 1000) -> list[Decision]:
        return []

    def pods(self, start_ms: int, end_ms: int, **_: Any) -> list[KnownPod]:
        return self.known_pods

    def epochs_between(self, start_ms: int, end_ms: int) -> list[EpochReport]:
        return [one for one in self.reported if start_ms <= one.at_ms < end_ms]
