"""An accountant on a virtual clock, over a ledger in memory and with an ingest without a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from httpx2 import Response
from msgspec.structs import replace
from starlette.testclient import TestClient

from accountant.__main__ import main
from accountant.api.dependencies import Deps
from accountant.api.ledger_metrics import LedgerCollector
from accountant.api.problems import PROBLEMS
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.composition import Service, create_app
from accountant.core.errors import LedgerFailed
from accountant.core.settings import ArchiveSettings, Backups, Settings
from accountant.ledger.protocols import Receipt
from accountant.prices import price_book as prices
from accountant.prices.price_book import PriceBook
from accountant.runtime.ingest import decode
from accountant.runtime.job_and_task_metrics import AccountantMetrics
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from agent.wire import PROBLEM, Batch
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import AllowAll, Authenticator, TokenFile, sha256
from tests import empty_ledger
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS, MemoryLedger
from tests.plugins.installed import fake_channels
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_holder

HOUR_US = 3_600_000_000
H100 = "NVIDIA H100 80GB HBM3"

INVENTORY = """\
schema: 1
cluster: prod
namespaces:
  - {name: nlp, team: nlp}
  - {name: vision, team: vision}
"""
"""Two namespaces, each of a team of its own."""
TOKENS = {scope: f"token-of-{scope}" for scope in ("ingest", "import", "read", "progress", "policy", "admin")}
"""One token per scope, and nothing else."""
BOUND = {"ingest": ", cluster: prod, node: node-1", "import": ", cluster: prod"}
"""The only node and cluster that a token of the scope may report for."""


def pod_minutes(
    first: int = 1, rows: int = 1, *, node: str = "node-1", namespace: str | None = "vision", **changes: Any
) -> Batch:
    """Build intervals of one minute of one GPU with one pod, starting an hour before now. namespace: None for a GPU
    that nobody holds."""
    begin = NOW_MS - 60 * MINUTE_MS
    holder = pod_holder("train-0", namespace, "pod-1", "main") if namespace else None
    fields = {"span_ms": MINUTE_MS, "busy_us": MINUTE_MS * 500 if holder else 0, "energy_uj": 42_000_000}
    minutes = [
        interval(begin + at * MINUTE_MS, f"GPU-{node}", holder, **fields) for at in range(first - 1, first - 1 + rows)
    ]
    return replace(batch(minutes, cluster="prod", node=node, epoch="0192-epoch", first_seq=first), **changes)


def moved(one: Batch, by_ms: int) -> Batch:
    """Return the batch with its intervals later by that time."""
    rows = tuple(replace(row, start_ms=row.start_ms + by_ms, end_ms=row.end_ms + by_ms) for row in one.intervals)
    return replace(one, intervals=rows)


def encoded(one: Batch) -> bytes:
    return msgspec.json.encode(one)


def usage_line(team: str, model: str = "H100", **accounts: int) -> UsageLine:
    return UsageLine(key={"team": team, "gpu_model": model}, accounts_gpu_us=Accounts(**accounts))


def decision(**changes: Any) -> dict[str, Any]:
    """Build a decision as the controller posts it."""
    plain = {
        "id": "d", "at_ms": NOW_MS - 1, "kind": "weight", "target": "kai", "subject": "vision", "mode": "dry-run",
        "reason": "r", "policy_version": "v",
    }  # fmt: skip
    return plain | changes


def refused(answer: Response, slug: str) -> Any:
    """Return the answer's problem, after checking the fields that all problems have."""
    assert answer.headers.get("content-type") == "application/problem+json", (answer.status_code, answer.text[:500])
    problem = answer.json()
    assert problem["type"] == PROBLEM + slug, answer.text
    assert problem["status"] == answer.status_code == PROBLEMS[slug].status
    assert problem["title"] == PROBLEMS[slug].title
    assert problem["detail"]
    return problem


@dataclass
class DirectIngest:
    """Decodes and books a batch at once, with the contract of accountant.runtime.ingest.Ingest."""

    ledger: MemoryLedger
    clock: VirtualClock

    def submit(self, raw: bytes, *, votes: bool = False) -> Future[Receipt]:  # the protocol's
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
    """Log nothing to the terminal."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(
        lines=[
            usage_line(IDLE, H100, unallocated=4 * HOUR_US, unmetered=HOUR_US),
            usage_line("speech", H100, busy=3 * HOUR_US, allocated_idle=HOUR_US),
            usage_line("vision", "NVIDIA A100-SXM4-80GB", busy=2 * HOUR_US),
            usage_line("vision", H100, busy=HOUR_US, allocated_unknown=HOUR_US),
        ]
    )


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    path = tmp_path / "prices.yaml"
    path.write_text(price_book_text(H100=2.5, A100=1.25))
    return prices.load(path)


def token_entry(name: str, scopes: str, more: str = "") -> str:
    """Build the entry of a token file. The token equals its name."""
    return f"  - {{name: {name}, token_sha256: {sha256(name)}, scopes: [{scopes}]{more}}}\n"


def token_list(entries: str = "") -> str:
    """Build a token file with one token for each scope, and more entries."""
    listed = "".join(
        f"  - {{name: {scope}, token_sha256: {sha256(token)}, scopes: [{scope}]{BOUND.get(scope, '')}}}\n"
        for scope, token in TOKENS.items()
    )
    return f"tokens:\n{listed}{entries}"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def scoped(scope: str) -> dict[str, str]:
    """Return the header with the token that has only this scope."""
    return bearer(TOKENS[scope])


HERE = "http://127.0.0.1"


def settings_in(folder: Path, **given: Any) -> Settings:
    """Build settings of an accountant with its data in `folder`. Without tokens every caller on this machine is
    allowed. Files that settings name (`prices`, `policy`, …) are given as their text."""
    for name in given.keys() & {"prices", "policy", "inventory", "tokens", "deliveries"}:
        file = folder / f"{name}.yaml"
        file.write_text(given[name])
        given[name] = file
    opened = {} if "tokens" in given else {"auth": "off"}
    return Settings(**({"data": empty_ledger.data(folder / "data"), "linger_ms": 0} | opened | given))


@pytest.fixture
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the channels of gputally.testing installed."""
    with fake_channels(tmp_path_factory.mktemp("channels")):
        yield


StartService = Callable[..., tuple[Service, TestClient]]


@contextmanager
def _starting(folder: Path, clock: VirtualClock) -> Iterator[StartService]:
    with ExitStack() as running:

        def start(**given: Any) -> tuple[Service, TestClient]:
            service = running.enter_context(Service(settings_in(folder, **given), clock))
            return service, client_of(service)

        yield start


@pytest.fixture
def start_service(tmp_path: Path, clock: VirtualClock) -> Iterator[StartService]:
    """Return a function that starts an accountant on a real ledger and returns it with a client. It takes the arguments
    of settings_in."""
    with _starting(tmp_path, clock) as start:
        yield start


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartService]:
    """As start_service, for accountants that the tests of a module ask and do not change."""
    with _starting(tmp_path_factory.mktemp("service"), VirtualClock(NOW_MS)) as start:
        yield start


@pytest.fixture
def archiving(tmp_path: Path) -> Settings:
    """Settings of an accountant whose archive and backups are in another folder."""
    return settings_in(
        tmp_path, refresh_seconds=30, correct_seconds=60,
        archive=ArchiveSettings(to=tmp_path / "off" / "archive", every=3600),
        backups=Backups(to=tmp_path / "off" / "backups", every=7200, keep=2),
    )  # fmt: skip


def client_of(service: Service, **options: Any) -> TestClient:
    return TestClient(service.app, base_url=HERE, **options)


@dataclass
class MemoryAccountant:
    """The app over a ledger in memory, with its parts."""

    app: FastAPI
    client: TestClient
    ledger: MemoryLedger
    clock: VirtualClock
    metrics: AccountantMetrics
    failures: list[LedgerFailed]


StartAccountant = Callable[..., MemoryAccountant]


@pytest.fixture
def accountant(clock: VirtualClock, ledger: MemoryLedger, book: PriceBook, tmp_path: Path) -> StartAccountant:
    """Return a function that starts the app. tokens: further entries of the token file; None allows every caller.
    spent: the time that computing an answer takes. Further arguments are settings."""

    def build(
        tokens: str | None = None,
        prices: PriceBook | None = book,
        spent: Callable[[], float] = time.thread_time,
        **settings: Any,
    ) -> MemoryAccountant:
        authenticator: Authenticator = AllowAll()
        if tokens is not None:
            settings["tokens"] = token_list(tokens)
        chosen = settings_in(tmp_path, **settings)
        if chosen.tokens is not None:
            authenticator = TokenFile(chosen.tokens, clock, lambda fault: None)
        metrics = AccountantMetrics()
        metrics.watch(LedgerCollector(ledger, lambda: prices, chosen, clock))
        failures: list[LedgerFailed] = []
        ingest = DirectIngest(ledger, clock)
        keeper = Bookkeeper(ledger, clock, chosen.timezone)
        if prices is not None:
            keeper.prices.take(prices, "file", "prices.yaml", "", NOW_MS)
        deps = Deps(chosen, clock, ledger, ingest, authenticator, metrics, keeper, failures.append, spent=spent)
        app = create_app(deps)
        client = TestClient(app, base_url=HERE)
        return MemoryAccountant(app, client, ledger, clock, metrics, failures)

    return build


@dataclass(frozen=True)
class CommandLine:
    """Runs `gputally accountant` in a wide terminal. last: the last arguments of every call."""

    capsys: pytest.CaptureFixture[str]
    last: tuple[str, ...] = ()

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return the exit code, the standard output and the standard error."""
        code = main([*map(str, arguments), *self.last])
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    def shown(self, *arguments: object) -> str:
        """Return the output of a call that succeeds and reports nothing."""
        code, out, err = self(*arguments)
        assert (code, err) == (0, "")
        return out

    def refused(self, *arguments: object) -> str:
        """Return the only line on standard error of a call that fails and prints nothing."""
        code, out, err = self(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        return err

    def at(self, url: str) -> CommandLine:
        return CommandLine(self.capsys, ("--url", url))


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setenv("COLUMNS", "200")
    return CommandLine(capsys)


PUBLIC_ROUTES = {
    ("GET", "/leading"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/static/style.css"),
    ("GET", "/static/zoom.js"),
    ("GET", "/favicon.ico"),
    ("GET", "/sign-in"),
    ("GET", "/sign-in/done"),
    ("POST", "/sign-out"),
    ("GET", "/signed-out"),
}
"""Routes without a token. They show nothing about teams except what /metrics is configured to show."""


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """Return method and path of everything that the application serves."""
    return {
        (method, route.path)
        for route in iter_route_contexts(app.routes)
        for method in (route.methods or set()) - {"HEAD"}
    }
