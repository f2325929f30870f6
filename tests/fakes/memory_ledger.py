"""A ledger of a few lists that implements the whole protocol, for tests of its callers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from accountant.core.errors import SequenceGap
from accountant.core.import_epochs import is_import
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import (
    EpochReport,
    Facts,
    Imports,
    ImportSpan,
    MisdatedRecords,
    Quarantined,
    Receipt,
    SavedView,
)
from accountant.ledger.usage import MEASURES, Usage, UsageMeasure, Where
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from agent.wire import Ack, Batch
from gputally.base.units import MS_PER_HOUR
from tests.fakes.fixed_status import FixedStatus
from tests.fakes.list_ledger import ListLedger, Row

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
MINUTE_MS = 60_000


class MemoryLedger(ListLedger):
    """accountant.ledger.protocols.Ledger on a few lists: numbers are contiguous, repeated records are ignored, nothing
    is quarantined.

    lines: usage of `span`.
    trouble: what every write and every question of usage raises."""

    def __init__(self, lines: Sequence[UsageLine]) -> None:
        super().__init__()
        self.lines = list(lines)
        self.span: tuple[int, int] = (NOW_MS - 2 * MS_PER_HOUR, NOW_MS - MS_PER_HOUR)
        self.booked: dict[tuple[str, str, str], list[Batch]] = {}
        self.trouble: Exception | None = None
        self.gpus = 1
        self.refused = [Quarantined("prod", "node-1", "0192-epoch", 9, NOW_MS, "future-dated", "ends tomorrow", "{}")]

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        return [self._one(one) for one in batches]

    def _one(self, one: Batch) -> Receipt | Exception:
        if self.trouble is not None:
            return self.trouble
        stored = self.booked.setdefault((one.cluster, one.node, one.epoch), [])
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
        for of, node, epoch in self.booked:
            if of == cluster and is_import(epoch):
                marks.setdefault(node, {})[epoch] = self.booked[of, node, epoch][-1].intervals[-1].seq
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
        return super().usage(edges, by, where, timezone, measures)

    def every_row(self) -> list[Row]:
        return [Row(*self.span, line.accounts_gpu_us, line.key) for line in self.lines]

    def status(self) -> FixedStatus:
        clusters = {line.key["cluster"]: NOW_MS for line in self.lines if "cluster" in line.key}
        return FixedStatus(
            len(self._acts), (0, NOW_MS) if self.lines else (0, 0), clusters, clusters=frozenset({"prod"}),
            teams=frozenset(line.key["team"] for line in self.lines if "team" in line.key), versions=self.versions,
            gpus=self.gpus, content=(self.lines, self.versions, self.known_pods),
        )  # fmt: skip

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        known = {(one.key, one.epoch): one for one in self.reported}
        new = [one for one in reports if one.at_ms < getattr(known.get((one.key, one.epoch)), "at_ms", now_ms + 1)]
        self.reported = [*(known | {(one.key, one.epoch): one for one in new}).values()]
        return len(new)

    def views(self, owner: str) -> tuple[SavedView, ...]:
        return ()

    def save_view(self, owner: str, view: SavedView, now_ms: int) -> None:
        raise NotImplementedError

    def remove_view(self, owner: str, name: str) -> None:
        raise NotImplementedError

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        posted = {f"{decision.at_ms}/{decision.key}": decision for decision in decisions}
        new = {key: decision for key, decision in posted.items() if key not in self.decided}
        self.decided.update(new)
        return len(new)

    def wal_bytes(self) -> int:
        return 4096

    def room_bytes(self) -> int:
        return 2**30

    def copy_to(self, path: Path) -> int:
        path.write_bytes(b"a copy")
        return 1

    def withdraw_import(self, span: ImportSpan, now_ms: int, who: str, reason: str) -> int:
        raise NotImplementedError

    def redate(self, now_ms: int, who: str, reason: str) -> tuple[MisdatedRecords, ...]:
        return ()

    def checkpoint(self) -> None:
        return None

    def close(self) -> None:
        return None
