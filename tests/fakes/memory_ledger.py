"""A ledger of a few lists that implements the whole protocol, for tests of its callers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accountant.billing.queue_waits import pods_by_job
from accountant.core.errors import SequenceGap, UnsupportedQuestion
from accountant.history_import.import_run import is_import
from accountant.ledger.journal import Act, NewAct
from accountant.ledger.protocols import (
    EpochReport,
    Facts,
    GpuOwnership,
    Holds,
    Hole,
    Imbalance,
    Imports,
    ImportSpan,
    JobKey,
    JobPods,
    MisdatedRecords,
    Quarantined,
    QueuedPod,
    Receipt,
    SavedView,
)
from accountant.ledger.usage import MEASURES, Usage, UsageMeasure, Where, names_of
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from agent.wire import Ack, Batch
from gputally.testing.fake_accountant import usage_window
from tests.fakes.fixed_status import FixedStatus
from tests.fakes.memory_journal import MemoryJournal

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
MINUTE_MS = 60_000


@dataclass
class MemoryLedger(MemoryJournal):
    """accountant.ledger.protocols.Ledger on a few lists: numbers are contiguous, repeated records are ignored, nothing
    is quarantined."""

    rows: dict[tuple[str, str, str], list[Batch]] = field(default_factory=dict)
    lines: list[UsageLine] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    decided: dict[str, Decision] = field(default_factory=dict)
    trouble: Exception | None = None
    unsupported: str = ""
    gpus: int = 1
    missing: list[Hole] = field(default_factory=list)
    known: list[QueuedPod] = field(default_factory=list)
    _acts: list[Act] = field(default_factory=list)
    refused: list[Quarantined] = field(
        default_factory=lambda: [
            Quarantined("prod", "node-1", "0192-epoch", 9, NOW_MS, "future-dated", "ends tomorrow", "{}")
        ]
    )

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        return [self._one(one) for one in batches]

    def _one(self, one: Batch) -> Receipt | Exception:
        if self.trouble is not None:
            return self.trouble
        stored = self.rows.setdefault((one.cluster, one.node, one.epoch), [])
        durable = max((b.intervals[-1].seq for b in stored if b.intervals), default=0)
        if one.first_seq > durable + 1 and one.first_seq != one.oldest_seq:
            return SequenceGap(Ack(epoch=one.epoch, durable_seq=durable, checkpointed_seq=0))
        new = [row for row in one.intervals if row.seq > durable]
        if new:
            stored.append(one)
            durable = new[-1].seq
        ack = Ack(epoch=one.epoch, durable_seq=durable, checkpointed_seq=0)
        return Receipt(ack, len(new), len(one.intervals) - len(new), 0)

    def imports(self, cluster: str) -> Imports:
        marks: dict[str, dict[str, int]] = {}
        for of, node, epoch in self.rows:
            if of == cluster and is_import(epoch):
                marks.setdefault(node, {})[epoch] = self.rows[of, node, epoch][-1].intervals[-1].seq
        return Imports(marks, {"node-1": (NOW_MS - 1, NOW_MS)})

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0, act: NewAct | None = None) -> None:
        if act is not None:
            self.record([act], len(self._acts))

    def usage(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Where | None = None,
        timezone: str = "UTC",
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        if self.trouble is not None:
            raise self.trouble
        by, names = tuple(dict.fromkeys(by)), [name for name in names_of(measures) if name != "energy_j"]

        def rows() -> Iterator[tuple[int, tuple[str, ...], list[int]]]:
            for span, start_ms in enumerate(edges[:-1]):
                at = {"hour": f"{datetime.fromtimestamp(start_ms / 1000, UTC):%Y-%m-%dT%H}"}
                for line in self.lines:
                    if all(line.key.get(name, "") in allowed for name, allowed in (where or {}).items()):
                        key = tuple(line.key.get(dimension, at.get(dimension, "")) for dimension in by)
                        yield span, key, [getattr(line.accounts_gpu_us, name, 0) for name in names]

        return Usage.of_rows(by, rows(), measures)

    def status(self) -> FixedStatus:
        clusters = {line.key["cluster"]: NOW_MS for line in self.lines if "cluster" in line.key}
        return FixedStatus(
            len(self._acts), (0, NOW_MS) if self.lines else (0, 0), clusters, clusters=frozenset({"prod"}),
            teams=frozenset(line.key["team"] for line in self.lines if "team" in line.key), versions=self.versions,
            gpus=self.gpus, content=(self.lines, self.versions, self.known),
        )  # fmt: skip

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
        if self.unsupported:
            raise UnsupportedQuestion(self.unsupported)
        return usage_window(
            {"vision": 7}, 10, end_ms=at_ms, kind=spec.kind, start_ms=at_ms - spec.size * 1000,
            half_life_s=spec.half_life, measure=measure, watermark_ms=at_ms - MINUTE_MS, shard=shard, cluster=cluster,
            gpu_weights=spec.gpu_weights,
        )  # fmt: skip

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[MemoryLedger]:
        yield self

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, tuple[int, int]]:
        return {}

    def holds(self, spans: Sequence[tuple[int, int]], **_: Any) -> Holds:
        raise UnsupportedQuestion("this ledger has sums only")

    def epochs(self, span: tuple[int, int] | None = None, **_: Any) -> list[EpochReport]:
        return []

    def epoch_counts(self, keys: Collection[JobKey]) -> Mapping[JobKey, int]:
        return {}

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        return 0

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        return None

    def pods(self, start_ms: int, end_ms: int, **_: Any) -> Iterator[QueuedPod]:
        return iter(self.known)

    def pods_by_job(self, start_ms: int, end_ms: int) -> dict[JobKey, JobPods]:
        return pods_by_job(self.pods(start_ms, end_ms))

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        return frozenset()

    def views(self, owner: str) -> tuple[SavedView, ...]:
        return ()

    def save_view(self, owner: str, view: SavedView, now_ms: int) -> None:
        raise NotImplementedError

    def remove_view(self, owner: str, name: str) -> None:
        raise NotImplementedError

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        return ()

    def put_policy(self, policy: Policy, now_ms: int, who: str = "") -> PolicyVersion:
        if not self.versions or self.versions[-1].version != policy.version():
            self.versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self.versions[-1]

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        posted = {f"{decision.at_ms}/{decision.key}": decision for decision in decisions}
        new = {key: decision for key, decision in posted.items() if key not in self.decided}
        self.decided.update(new)
        return len(new)

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
            and (gang is None or ("/" in d.subject and d.subject.partition("/")[2].startswith(gang)))
            and (before is None or d.at_ms < end_ms - 1 or d.key < before)
        ]
        return sorted(found, key=lambda d: (d.at_ms, d.key), reverse=True)[:limit]

    def imbalance(self, start_ms: int, end_ms: int) -> Imbalance:
        return Imbalance(0, ())

    def quarantined_rows(self, most: int) -> int:
        return len(self.refused[:most])

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        return self.refused[:limit]

    def holes(self, limit: int = 1000) -> list[Hole]:
        return self.missing[:limit]

    def wal_bytes(self) -> int:
        return 4096

    def room_bytes(self) -> int:
        return 2**30

    def copy_to(self, path: Path) -> int:
        path.write_bytes(b"a copy")
        return 1

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:
        return ()

    def withdraw_import(self, span: ImportSpan, now_ms: int, who: str, reason: str) -> int:
        raise NotImplementedError

    def redate(self, now_ms: int, who: str, reason: str) -> tuple[MisdatedRecords, ...]:
        return ()

    def checkpoint(self) -> None:
        return None

    def close(self) -> None:
        return None
