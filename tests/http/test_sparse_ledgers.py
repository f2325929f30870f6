"""Every page, answer, export and command on sparse ledgers: without a record, of one minute, stopped 52 days ago, with
a cluster that vanished, without prices. None shows an unmeasured figure, or an old one as current."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.__main__ import main as accountant
from accountant.composition import Service
from accountant.exports.protocol import exports
from agent.wire import Batch
from gputally import connect
from gputally.advise.__main__ import main as advise
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.doctor.__main__ import main as doctor
from gputally.server.https_server import serve
from tests.exports.format_cases import TEXT, cases_of
from tests.http.addresses import FIGURES, NO_FIGURES, address
from tests.http.conftest import (
    MINUTE_MS,
    NOW_MS,
    CommandLine,
    client_of,
    encoded,
    moved,
    pod_minutes,
    routes,
    settings_in,
)
from tests.plugin_cases import needs

PRICES = (
    "schema: 1\ncurrency: EUR\nrows:\n  - {id: h100, model: H100, price: 2.40, per: gpu-hour,"
    " valid_from: 2026-01-01, valid_to: 2026-12-01, source: contract, as_of: 2026-01-01, basis: gpu-only}\n"
)
POLICY = "schema: 1\nqueues:\n  - {name: llm, team: llm, deserved: 8}\n  - {name: vision, team: vision, deserved: 8}\n"
STOPPED_MS = 52 * MS_PER_DAY


def words(page: str) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())


EMPTY, MINUTE, STOPPED, VANISHED, UNPRICED = LEDGERS = ("empty", "minute", "stopped", "vanished", "unpriced")
UNMETERED = (EMPTY, STOPPED)
"""Ledgers without metered time in the current month."""
QUIET = (STOPPED, VANISHED)

MORE = ("/jobs?state=waiting", "/month/2026-10", "/month/2026-11", "/team/vision?month=2026-11")
"""Further addresses that the test visits."""
NO_MONEY = re.compile(r"EUR 0(\.00)?(?![.\d])")


@dataclass(frozen=True)
class SparseLedger:
    """One of the ledgers, with the current month."""

    name: str
    service: Service
    month: str

    @property
    def client(self) -> TestClient:
        return TestClient(self.service.app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    def get(self, route: str) -> Any:
        return self.client.get(address(route, self.month))


@pytest.fixture(scope="module", params=LEDGERS)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparseLedger]:
    prices = PRICES if request.param == UNPRICED else PRICES.replace(" valid_to: 2026-12-01,", "")
    clock = VirtualClock(NOW_MS)
    settings = settings_in(tmp_path_factory.mktemp(request.param), prices=prices, policy=POLICY)
    with Service(settings, clock) as service:
        found = SparseLedger(request.param, service, "2026-11" if request.param in (EMPTY, MINUTE) else "2026-12")

        def deliver(*batches: Batch) -> None:
            for one in batches:
                assert found.client.post("/v1/usage", content=encoded(one)).status_code == 200

        if found.name == MINUTE:
            deliver(pod_minutes(rows=1))
        elif found.name in QUIET:
            deliver(pod_minutes(rows=30))
            if found.name == VANISHED:
                deliver(pod_minutes(rows=30, cluster="away", node="node-9"))
            clock.advance(STOPPED_MS)
            if found.name == VANISHED:
                deliver(moved(pod_minutes(first=31, rows=1), STOPPED_MS))
        elif found.name == UNPRICED:
            clock.advance(40 * MS_PER_DAY)
            deliver(moved(pod_minutes(rows=1), 40 * MS_PER_DAY))
        yield found


def test_every_address_is_walked(sparse: SparseLedger) -> None:
    if sparse.name == EMPTY:
        served = {path for method, path in routes(sparse.service.app) if method == "GET"}
        assert served == FIGURES.keys() | NO_FIGURES


@pytest.mark.parametrize("route", [*FIGURES, *MORE])
def test_what_an_address_shows(sparse: SparseLedger, route: str) -> None:
    answer = sparse.get(route)
    if answer.status_code == 404:
        assert answer.json()["detail"], "it says what there is not"
        return
    assert answer.status_code == 200, answer.text[:500]
    kind = answer.headers["content-type"].partition(";")[0]
    if kind == "text/html":
        page = words(answer.text)
        if sparse.name in UNMETERED and route in FIGURES:
            assert not NO_MONEY.search(page), (page, "nothing is metered: no cost is known")
        if sparse.name == EMPTY:
            assert not re.search(r"\b0\.00\b|100\.\d+ % (of|metered)|EUR 0", page), page
        if sparse.name == MINUTE:
            assert "does not report" not in page
        if sparse.name == UNPRICED and route in FIGURES and not route.startswith("/team"):  # which held nothing: known
            assert not NO_MONEY.search(page), (page, "no price is known")
            assert route not in ("/", "/month", "/jobs") or "npriced" in page or "no price" in page
        if sparse.name == STOPPED:
            assert "Old records. The newest is 52.0 d old, of 1 Nov 11:30" in page or route.startswith("/v1/"), page
            assert "gputally doctor" in page or route.startswith("/v1/"), "what to do about it"
            assert not re.search(r"(?<!until )\bnow\b", re.sub(r"1 Nov 11:00 now", "", page)), page
        if sparse.name == VANISHED and not route.startswith("/v1/"):
            assert "Cluster away does not report. Its newest record is 52.0 d old, of 1 Nov 11:30" in page, page
            assert "Cluster prod does not report" not in page
            assert "Old records" not in page
    elif kind == "application/json" and "note" in answer.json():
        note = answer.json()["note"]
        expected = {
            EMPTY: "no records yet", MINUTE: "59.0 min old", STOPPED: "52.0 d old", VANISHED: "away",
            UNPRICED: "59.0 min old",
        }  # fmt: skip
        assert expected[sparse.name] in note, (route, note)


@needs("exports.json")
def test_what_was_not_metered_is_no_figure(sparse: SparseLedger) -> None:
    ask = lambda path: sparse.client.get(path).json()  # noqa: E731
    here = f"start={sparse.month}-01"
    usage, cost, jobs = ask(f"/v1/usage?{here}"), ask(f"/v1/cost?{here}"), ask(f"/v1/jobs?{here}")
    summary = ask(f"/v1/report?month={sparse.month}&format=json")["summary"]
    assert usage["coverage"] == {EMPTY: None, STOPPED: 0.0}.get(sparse.name, usage["coverage"])
    known = [cost["total"], jobs["total_cost"], summary["cost"], summary["due"] if sparse.name == EMPTY else None]
    if sparse.name in (*UNMETERED, UNPRICED):
        assert known[:3] == [None, None, None]
    else:
        assert None not in known[:3]
    figures = [summary[name] for name in ("allocated_gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "jobs")]
    assert (set(figures) == {None}) == (sparse.name in UNMETERED)


@needs("exports.csv")
def test_exports_of_what_was_not_metered_have_no_zeros(sparse: SparseLedger) -> None:
    month = f"/v1/report?month={sparse.month}&format="
    rows = list(csv.DictReader(io.StringIO(sparse.client.get(month + "csv").text)))
    (total,) = (row for row in rows if row["record"] == "total")
    metered = sparse.name not in UNMETERED
    assert bool(total["cost"]) == (metered and sparse.name != UNPRICED)
    assert total["reason"] == {
        EMPTY: "nothing of this time is metered", STOPPED: "nothing of this time is metered",
        UNPRICED: "some of the time has no price",
    }.get(sparse.name, "")  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(sparse.client.get(f"/month/{sparse.month}/lines.csv").text)))
    assert (lines[-1]["account"], bool(lines[-1]["cost"])) == ("total", metered and sparse.name != UNPRICED)
    for form, cost in cases_of("COST").items():
        shown = cost(sparse.client.get(month + form).content)
        assert (shown is None) == (not metered or sparse.name == UNPRICED), (form, shown)
    for form in set(exports()) - ({"pdf"} if sparse.name != MINUTE else set()):  # the page again, for seconds
        assert sparse.client.get(month + form).status_code in ((200,) if sparse.name == MINUTE else (200, 501)), form
    with zipfile.ZipFile(io.BytesIO(sparse.client.get(month + "focus").content)) as bundle:
        charges = [name for name in bundle.namelist() if name.endswith(".csv")]
        assert charges
        files = [csv.DictReader(io.TextIOWrapper(bundle.open(name))) for name in charges]
        costs = [row["BilledCost"] for file in files for row in file if "BilledCost" in row]
    assert bool(costs) == (metered and sparse.name != UNPRICED), "a charge is only of what is metered and has a price"


@pytest.fixture(scope="module")
def url(sparse: SparseLedger) -> Iterator[str]:
    with serve(sparse.service.app, "127.0.0.1", 0) as found:
        yield found


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def put(main: Callable[[list[str]], int], *given: str) -> tuple[int, str]:
        code = main([*given, "--url", url])
        caught = capsys.readouterr()
        return code, " ".join((caught.out + caught.err).split())

    return put


COMMANDS = [
    (accountant, ("usage",)), (accountant, ("cost",)), (accountant, ("jobs",)), (accountant, ("check",)),
    (accountant, ("months",)), (accountant, ("gpus",)), (accountant, ("prices",)), (accountant, ("proposals",)),
    (accountant, ("corrections",)), (accountant, ("adjustments",)), (accountant, ("deliveries",)),
    (accountant, ("backups",)), (accountant, ("budgets",)), (accountant, ("report", "MONTH", "--format", TEXT.name)),
    (advise, ("autoscaler",)), (advise, ("spot",)), (advise, ("sharing",)),
    (doctor, ("--only", "accountant,idle,oversized,unowned")),
]  # fmt: skip


@pytest.mark.parametrize(("main", "given"), COMMANDS, ids=[" ".join(given) for _, given in COMMANDS])
def test_what_a_command_prints(
    sparse: SparseLedger, run: Callable[..., tuple[int, str]], main: Callable[[list[str]], int], given: tuple[str, ...]
) -> None:
    code, text = run(main, *(word.replace("MONTH", sparse.month) for word in given))
    assert "Traceback" not in text
    assert text, "it says something"
    if sparse.name in UNMETERED and given[0] in ("cost", "report"):
        assert not re.search(r"total[^a-z]*\b0\.00\b", text), text
    if given[0] in ("usage", "cost", "jobs", "check"):
        assert code == 0
        expected = {EMPTY: "no records yet", STOPPED: "52.0 d old", VANISHED: "'away' has not reported for 52.0 d"}
        assert expected.get(sparse.name, "59.0 min old") in text, text
        assert sparse.name != EMPTY or "100.0 %" not in text


def test_the_pandas_client_has_no_zeros_either(sparse: SparseLedger, url: str) -> None:
    books = connect(url)
    window, cost, usage = books.window(size="7d"), books.cost(), books.usage()
    if sparse.name == EMPTY:
        assert window["share"].isna().all()
        assert (usage.attrs["coverage"], cost.attrs["total"]) == (None, None)
    else:
        assert not window["share"].isna().any()
        assert 0 <= usage.attrs["coverage"] <= 1


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    with Service(settings_in(tmp_path, prices=PRICES, policy=POLICY), clock) as running:
        yield running


@pytest.fixture
def client(service: Service) -> TestClient:
    """A client of a ledger with half an hour of one pod."""
    client = client_of(service)
    assert client.post("/v1/usage", content=encoded(pod_minutes(rows=30))).status_code == 200
    return client


@pytest.fixture
def asked(service: Service, run_command: CommandLine) -> Iterator[CommandLine]:
    with serve(service.app, "127.0.0.1", 0) as url:
        yield run_command.at(url)


def standing(requested: float, allocated: float) -> dict[str, float]:
    return {"requested": requested, "allocated": allocated}


def record(at_ms: int) -> dict[str, Any]:
    """Record a cycle of the controller in which llm requests more than it holds."""
    window = {"start_ms": 0, "end_ms": at_ms, "usage": {"llm": 1, "vision": 1}, "capacity": 2, "unit": "gpu_us"}
    inputs = {"window": window, "standings": {"llm": standing(664, 16), "vision": standing(8, 8)}, "gpus": 24}
    return {
        "id": "v/1/kai", "at_ms": at_ms, "kind": "weight", "target": "kai", "subject": "*", "mode": "dry-run",
        "reason": "the inputs of this cycle", "policy_version": "v", "inputs": inputs,
    }  # fmt: skip


def test_demand_that_nobody_watches_is_unknown_and_not_zero(client: TestClient) -> None:
    page = words(client.get("/").text)
    assert "Nobody waits" not in page
    assert "Not known: this accountant reads no pods" in page
    waiting = words(client.get("/jobs?state=waiting").text)
    assert "0 waiting" not in waiting
    assert "Which jobs wait is not known" in waiting


def test_demand_that_the_controller_recorded_is_shown_with_its_time(client: TestClient) -> None:
    assert client.post("/v1/decisions", json=[record(NOW_MS - MINUTE_MS)]).status_code == 200
    page = words(client.get("/").text)
    assert "Not known" not in page
    assert re.search(r"llm 664 16 648 1 Nov 11:59", page)
    assert re.search(r"vision 8 8 0 1 Nov 11:59", page)


def test_a_cluster_that_stops_reporting_is_named_once_others_have_gone_on(
    client: TestClient, clock: VirtualClock
) -> None:
    client.post("/v1/usage", content=encoded(pod_minutes(rows=30, cluster="away", node="node-9"))).raise_for_status()
    assert "does not report" not in client.get("/").text
    clock.advance(STOPPED_MS)
    later = moved(pod_minutes(first=31, rows=1), STOPPED_MS)
    client.post("/v1/usage", content=encoded(later)).raise_for_status()
    assert "Cluster away does not report. Its newest record is 52.0 d old" in words(client.get("/").text)


def test_nothing_runs_in_a_ledger_that_stopped(client: TestClient, clock: VirtualClock, asked: CommandLine) -> None:
    clock.advance(STOPPED_MS)
    page = words(client.get("/jobs").text)
    assert "Jobs, November 2026" in page
    assert "was running" in page
    assert "Held what at" not in words(client.get("/").text)
    out = asked.shown("jobs")
    assert "2026-12 has no records yet: this is 2026-11, the last month that has any" in " ".join(out.split())
    assert "the newest record is 52.0 d old (2026-11-01T11:30:00Z)" in " ".join(out.split())


@pytest.mark.parametrize("command", [("jobs",), ("usage",), ("cost",), ("check",)])
def test_at_the_first_instant_of_a_month_commands_show_the_last_one(
    client: TestClient, clock: VirtualClock, asked: CommandLine, command: tuple[str, ...]
) -> None:
    clock.advance_to(NOW_MS - 12 * 60 * MINUTE_MS + 30 * MS_PER_DAY)  # 2026-12-01T00:00Z
    out = asked.shown(*command)
    assert "2026-12 has no records yet: this is 2026-11" in " ".join(out.split())


def test_an_end_alone_begins_with_its_own_month(client: TestClient) -> None:
    answer = client.get("/v1/usage?end=2026-10-15").json()
    assert answer["start_ms"] == NOW_MS - 12 * 60 * MINUTE_MS - 31 * MS_PER_DAY


@pytest.mark.parametrize(
    "path",
    [
        "/team/visoin", "/jobs?where.team=visoin", "/v1/report?month=2026-11&team=visoin",
        "/v1/statement?month=2026-11&team=visoin", "/v1/jobs?where.team=visoin", "/v1/usage?where.team=visoin",
        "/v1/cost?where.team=visoin",
    ],
)  # fmt: skip
def test_an_unknown_team_is_refused_with_the_nearest_names(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "no team 'visoin' is known; did you mean 'vision'?" in answer.json()["detail"]
    assert client.get(path.replace("visoin", "llm")).status_code == 200, "known by the policy alone"


def test_an_unknown_job_is_refused_with_the_nearest_names(client: TestClient) -> None:
    for path in ("/job/prod~vision~Pod~train-1", "/v1/jobs/prod~vision~Pod~train-1"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "did you mean 'Pod/train-0'?" in answer.json()["detail"]


@pytest.mark.parametrize(
    "command", [("report", "2026-11", "--team", "visoin"), ("jobs", "--where", "team=visoin"), ("jobs", "train-1"),
                ("usage", "--where", "team=visoin"), ("cost", "--where", "team=visoin")]
)  # fmt: skip
def test_commands_end_with_an_error_for_unknown_names(
    client: TestClient, asked: CommandLine, command: tuple[str, ...]
) -> None:
    assert "did you mean" in asked.refused(*command)


def test_a_month_without_records_has_dashes_and_the_reason(client: TestClient) -> None:
    page = words(client.get("/month/2026-09").text)
    assert "No records of this time" in page
    assert "EUR 0.00" not in page
    assert "EUR 0.00" not in words(client.get("/team/llm?month=2026-09").text)
    recorded = words(client.get("/team/llm?month=2026-11").text)
    assert "No records of this time" not in recorded
    assert "EUR 0.00" in recorded, "it held nothing in a month that is metered: that is known"
