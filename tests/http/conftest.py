"""A small ledger in memory, an ingest without a thread, and the app over them on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from fastapi import FastAPI
from starlette.testclient import TestClient

from accountant.api.app import create_app
from accountant.api.deps import Deps
from accountant.bookkeeping import Bookkeeper
from accountant.books.held import Held, Hours, JobName, Peak
from accountant.books.tabled import Tabled
from accountant.callers.auth import Authenticator, Everybody, TokenFile, sha256
from accountant.counters import Metrics
from accountant.errors import LedgerFailed, SequenceGap, UnsupportedQuestion
from accountant.importing.protocol import is_import
from accountant.ingest import decode
from accountant.journal import Act, NewAct
from accountant.ledger import Facts, IdlePhases, Imports, Lent, NodeFacts, Receipt
from accountant.metrics.ledger import LedgerCollector
from accountant.prices import book as prices
from accountant.prices.book import PriceBook
from accountant.progress import EpochReport, JobKey
from accountant.settings import Settings
from accountant.store.checks import Hole, Imbalance, Quarantined
from accountant.wire import (
    IDLE,
    Accounts,
    Decision,
    Dimension,
    Measure,
    Policy,
    PolicyVersion,
    UsageLine,
    UsageWindow,
    WindowSpec,
)
from accountant.work.waits import KnownPod
from agent.clock import VirtualClock
from agent.wire import Ack, Batch, Holder, UsageInterval
from tests.fakes.holdings import hours_of_lines, of_lines, peaks_of_lines, tabled_of_lines
from tests.fakes.journal import MemoryJournal

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
MINUTE_MS = 60_000
HOUR_US = 3_600_000_000

TOKENS = {scope: f"token-of-{scope}" for scope in ("ingest", "import", "read", "progress", "policy", "admin")}
"""One token per scope, and nothing else."""


def batch(first: int = 1, rows: int = 1, *, node: str = "node-1", **changes: Any) -> Batch:
    """One GPU's minutes, held by one pod, ending an hour before now."""
    begin = NOW_MS - 60 * MINUTE_MS
    intervals = tuple(
        UsageInterval(
            seq=first + i,
            start_ms=begin + (first + i - 1) * MINUTE_MS,
            end_ms=begin + (first + i) * MINUTE_MS,
            gpu_uuid=f"GPU-{node}",
            gpu_model="NVIDIA H100 80GB HBM3",
            holder=Holder(kind="pod", uid="pod-1", namespace="vision", name="train-0", container="main"),
            capacity_us=MINUTE_MS * 1000,
            allocated_us=MINUTE_MS * 1000,
            busy_us=MINUTE_MS * 500,
            energy_uj=42_000_000,
            method="simulated",
        )
        for i in range(rows)
    )
    plain: dict[str, Any] = {
        "cluster": "prod", "node": node, "boot_id": "boot-1", "epoch": "0192-epoch", "first_seq": first,
        "oldest_seq": 1, "intervals": intervals,
    }  # fmt: skip
    return Batch(**(plain | changes))


def encoded(one: Batch) -> bytes:
    return msgspec.json.encode(one)


@dataclass
class MemoryLedger(MemoryJournal):
    """accountant.ledger.Ledger in a few lists: contiguous numbers, idempotent, nothing quarantined."""

    rows: dict[tuple[str, str, str], list[Batch]] = field(default_factory=dict)
    lines: list[UsageLine] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    decided: dict[str, Decision] = field(default_factory=dict)
    trouble: Exception | None = None
    unsupported: str = ""
    missing: list[Hole] = field(default_factory=list)
    known: list[KnownPod] = field(default_factory=list)
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

    def acks(self, node: str, cluster: str) -> Mapping[str, Ack]:
        return {}

    def imports(self, cluster: str) -> Imports:
        marks: dict[str, dict[str, int]] = {}
        for of, node, epoch in self.rows:
            if of == cluster and is_import(epoch):
                marks.setdefault(node, {})[epoch] = self.rows[of, node, epoch][-1].intervals[-1].seq
        return Imports(marks, {"node-1": (NOW_MS - 1, NOW_MS)})

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0, act: NewAct | None = None) -> None:
        if act is not None:
            self.record([act], self.last_act())

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        if self.trouble is not None:
            raise self.trouble
        kept = [line for line in self.lines if all(line.key.get(d, "") in v for d, v in (where or {}).items())]
        groups: dict[tuple[str, ...], Accounts] = {}
        for line in kept:
            at = {"hour": f"{datetime.fromtimestamp(start_ms / 1000, UTC):%Y-%m-%dT%H}"}
            key = tuple(line.key.get(dimension, at.get(dimension, "")) for dimension in by)
            before = groups.get(key, Accounts())
            sums = {name: getattr(before, name) + getattr(line.accounts_gpu_us, name) for name in Accounts.model_fields}
            groups[key] = Accounts(**sums)
        return [
            UsageLine(key=dict(zip(by, key, strict=True)), accounts_gpu_us=accounts)
            for key, accounts in sorted(groups.items())
        ]

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        return []

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[Lent]:
        return []

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
        return UsageWindow(
            kind=spec.kind, start_ms=at_ms - spec.size * 1000, end_ms=at_ms, half_life_s=spec.half_life,
            measure=measure, unit="gpu_us", by="queue", usage={"vision": 7}, unassigned=0, capacity=10,
            watermark_ms=at_ms - MINUTE_MS, coverage=1.0, policy_version=None, shard=shard, cluster=cluster,
            gpu_weights=spec.gpu_weights,
        )  # fmt: skip

    def watermark(
        self, at_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        return at_ms - MINUTE_MS

    def clusters(self) -> frozenset[str]:
        return frozenset({"prod"})

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[MemoryLedger]:
        yield self

    def mark(self, start_ms: int, end_ms: int) -> Hashable:
        return repr((self.lines, self.versions, self.known))

    @property
    def newest_ms(self) -> int:
        return NOW_MS

    def usage_between(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[list[UsageLine]]:
        return [self.usage(start, end, by, where, timezone) for start, end in pairwise(edges)]

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, tuple[int, int]]:
        return {}

    def epochs(self, keys: Collection[JobKey]) -> list[EpochReport]:
        return []

    def epochs_between(self, start_ms: int, end_ms: int) -> list[EpochReport]:
        return []

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        return 0

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        return None

    def pods(self, start_ms: int, end_ms: int, **_: Any) -> list[KnownPod]:
        return self.known

    def held(self, edges: Sequence[int], timezone: str = "UTC") -> Held:
        return of_lines(self.usage, edges, timezone)

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        return hours_of_lines(self.usage, start_ms, end_ms, timezone)

    def peaks(
        self, start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str = "UTC"
    ) -> dict[JobName, Peak]:
        return peaks_of_lines(self.usage, start_ms, end_ms, jobs, timezone)

    def tabled(self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC") -> list[Tabled]:
        return tabled_of_lines(self.usage, self.idle_phases, edges, cuts, timezone)

    def gpus_at(self, start_ms: int, end_ms: int) -> dict[tuple[str, str], int]:
        return {}

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        return frozenset()

    def nodes(self) -> tuple[NodeFacts, ...]:
        return ()

    def put_policy(self, policy: Policy, now_ms: int, who: str = "") -> PolicyVersion:
        if not self.versions or self.versions[-1].version != policy.version():
            self.versions.append(PolicyVersion(version=policy.version(), effective_ms=now_ms, policy=policy))
        return self.versions[-1]

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        if self.trouble is not None:
            raise self.trouble
        return [version for version in self.versions if version.effective_ms < end_ms]

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        new = {decision.id: decision for decision in decisions if decision.id not in self.decided}
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
    ) -> list[Decision]:
        found = [
            d
            for d in self.decided.values()
            if start_ms <= d.at_ms < end_ms
            and kind in (None, d.kind)
            and subject in (None, d.subject)
            and (cluster is None or d.cluster in ("", cluster))
            and (gang is None or ("/" in d.subject and d.subject.partition("/")[2].startswith(gang)))
        ]
        return sorted(found, key=lambda d: (-d.at_ms, d.id))[:limit]

    def examine(self, start_ms: int, end_ms: int) -> Imbalance:
        return Imbalance(0, ())

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

    def coverage(self, start_ms: int, end_ms: int) -> float:
        return 1.0

    def extent(self) -> tuple[int, int]:
        return 0, NOW_MS

    def checkpoint(self) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass
class DirectIngest:
    """Decodes and books at once; the same contract as accountant.ingest.Ingest."""

    ledger: MemoryLedger
    clock: VirtualClock

    def submit(self, raw: bytes) -> Future[Receipt]:
        return self.submit_batch(decode(raw))

    def submit_batch(self, one: Batch) -> Future[Receipt]:
        future: Future[Receipt] = Future()
        (result,) = self.ledger.append([one], self.clock.wall_ms())
        if isinstance(result, Receipt):
            future.set_result(result)
        else:
            future.set_exception(result)
        return future


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """Everything that is logged, kept from the terminal; a program run by another test may have set a level."""
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def ledger() -> MemoryLedger:
    def line(team: str, model: str, **accounts: int) -> UsageLine:
        return UsageLine(key={"team": team, "gpu_model": model}, accounts_gpu_us=Accounts(**accounts))

    return MemoryLedger(
        lines=[
            line(IDLE, "NVIDIA H100 80GB HBM3", unallocated=4 * HOUR_US, unmetered=HOUR_US),
            line("speech", "NVIDIA H100 80GB HBM3", busy=3 * HOUR_US, allocated_idle=HOUR_US),
            line("vision", "NVIDIA A100-SXM4-80GB", busy=2 * HOUR_US),
            line("vision", "NVIDIA H100 80GB HBM3", busy=HOUR_US, allocated_unknown=HOUR_US),
        ]
    )


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "schema: 1\ncurrency: EUR\nrows:\n"
        "  - {id: h100, model: H100, price: 2.5, per: gpu-hour, valid_from: 2026-01-01, source: contract,"
        " as_of: 2026-01-01, basis: gpu-only}\n"
        "  - {id: a100, model: A100, price: 1.25, per: gpu-hour, valid_from: 2026-01-01, source: contract,"
        " as_of: 2026-01-01, basis: gpu-only}\n"
    )
    return prices.load(path)


def token_file(path: Path, entries: str = "") -> Path:
    """A token file with one token per scope, and more entries."""
    listed = "".join(
        f"  - {{name: {scope}, token_sha256: {sha256(token)}, scopes: [{scope}]}}\n" for scope, token in TOKENS.items()
    )
    path.write_text("tokens:\n" + listed + entries)
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@dataclass
class Door:
    """An app and what it stands on."""

    app: FastAPI
    client: TestClient
    ledger: MemoryLedger
    clock: VirtualClock
    metrics: Metrics
    failures: list[LedgerFailed]


OpenDoor = Callable[..., Door]


@pytest.fixture
def door(clock: VirtualClock, ledger: MemoryLedger, book: PriceBook, tmp_path: Path) -> Iterator[OpenDoor]:
    """Build the app. tokens: a token file; None lets everybody in. spent: what finding an answer takes.
    Further arguments are settings."""
    clients: list[TestClient] = []

    def build(
        tokens: Path | None = None,
        prices: PriceBook | None = book,
        spent: Callable[[], float] = time.thread_time,
        **settings: Any,
    ) -> Door:
        authenticator: Authenticator = Everybody()
        if tokens is not None:
            authenticator = TokenFile(tokens, clock, lambda fault: None)
            settings |= {"auth": "tokens", "tokens": tokens}
        chosen = Settings(**({"auth": "off", "data": tmp_path} | settings))
        metrics = Metrics()
        metrics.watch(LedgerCollector(ledger, lambda: prices, chosen, clock))
        failures: list[LedgerFailed] = []
        ingest = DirectIngest(ledger, clock)
        keeper = Bookkeeper(ledger, clock, chosen.timezone)
        if prices is not None:
            keeper.prices.take(prices, "file", "prices.yaml", "", NOW_MS)
        deps = Deps(chosen, clock, ledger, ingest, authenticator, metrics, keeper, failures.append, spent=spent)
        app = create_app(deps)
        client = TestClient(app, base_url="http://127.0.0.1")
        client.__enter__()
        clients.append(client)
        return Door(app, client, ledger, clock, metrics, failures)

    yield build
    for client in clients:
        client.__exit__(None, None, None)


@dataclass(frozen=True)
class Kit:
    """What the tests share besides the door."""

    tokens: Mapping[str, str]
    batch: Callable[..., Batch]
    encoded: Callable[[Batch], bytes]
    token_file: Callable[..., Path]
    bearer: Callable[[str], dict[str, str]]
    now_ms: int = NOW_MS
    hour_us: int = HOUR_US


@pytest.fixture
def kit() -> Kit:
    return Kit(TOKENS, batch, encoded, token_file, bearer)
