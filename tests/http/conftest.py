"""A ledger in memory, an ingest without a thread, and the app over them on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from accountant.__main__ import main
from accountant.api.dependencies import Deps
from accountant.api.ledger_metrics import LedgerCollector
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.composition import create_app
from accountant.core.errors import LedgerFailed
from accountant.core.settings import Settings
from accountant.ledger.protocols import Receipt
from accountant.prices import price_book as prices
from accountant.prices.price_book import PriceBook
from accountant.runtime.ingest import decode
from accountant.runtime.job_and_task_metrics import Metrics
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from agent.wire import Batch, Holder, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import AllowAll, Authenticator, TokenFile, sha256
from tests.fakes.ledger import MINUTE_MS, NOW_MS, MemoryLedger
from tests.price_books import price_book_text

HOUR_US = 3_600_000_000

TOKENS = {scope: f"token-of-{scope}" for scope in ("ingest", "import", "read", "progress", "policy", "admin")}
"""One token per scope, and nothing else."""
BOUND = {"ingest": ", cluster: prod, node: node-1", "import": ", cluster: prod"}
"""The only node and cluster that a token of the scope may report for."""


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
class DirectIngest:
    """Decodes and books at once; the same contract as accountant.runtime.ingest.Ingest."""

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
def _quiet(logs: list[Any]) -> None:
    """Nothing is logged to the terminal."""


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
    path.write_text(price_book_text(H100=2.5, A100=1.25))
    return prices.load(path)


def token_file(path: Path, entries: str = "") -> Path:
    """A token file with one token per scope, and more entries."""
    listed = "".join(
        f"  - {{name: {scope}, token_sha256: {sha256(token)}, scopes: [{scope}]{BOUND.get(scope, '')}}}\n"
        for scope, token in TOKENS.items()
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
        authenticator: Authenticator = AllowAll()
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


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `gputally accountant`; gives (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
