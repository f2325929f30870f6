"""Every answer, page, export and command on five ledgers that say little: one without a record, one of a minute, one
that stopped 52 days ago, one of whose clusters vanished, and one of a month without prices. None shows a figure that
nobody measured, or a time that is past as now."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from msgspec import structs
from openpyxl import load_workbook
from starlette.testclient import TestClient

from accountant.__main__ import main as accountant
from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.reports.output_formats import Form
from agent.wire import Batch
from gputally import connect
from gputally.advise.__main__ import main as advise
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.doctor.__main__ import main as doctor
from gputally.server.https_server import serve
from tests.http.conftest import NOW_MS, batch, encoded
from tests.http.little_known import POLICY, PRICES, STOPPED_MS, words
from tests.http.opened import routes

EMPTY, MINUTE, STOPPED, VANISHED, UNPRICED = LEDGERS = ("empty", "minute", "stopped", "vanished", "unpriced")
UNMETERED = (EMPTY, STOPPED)
"""Of the current month, nothing is metered."""
QUIET = (STOPPED, VANISHED)

FIGURES = {
    "/v1/usage": "", "/v1/cost": "", "/v1/jobs": "", "/v1/windows": "size=7d", "/v1/statement": "month=MONTH",
    "/v1/report": "month=MONTH", "/v1/periods": "", "/v1/budgets": "", "/v1/check": "", "/v1/waits": "",
    "/v1/gpus/owners": "", "/metrics": "", "/": "", "/month": "", "/month/{month}": "", "/month/{month}/lines": "",
    "/month/{month}/lines.csv": "", "/team/{team:path}": "month=MONTH", "/coverage": "", "/decisions": "",
    "/invoice": "", "/invoice/{month}": "", "/jobs": "", "/nodes": "", "/node/{cluster}/{node}": "", "/prices": "",
    "/proposals": "", "/job/{id:path}": "", "/v1/jobs/{id}": "", "/v1/periods/{month}": "",
    "/invoice/{month}/lines.csv": "",
}  # fmt: skip
"""Addresses that show figures of the books, with what is asked."""
NO_FIGURES = {
    "/v1/adjustments", "/v1/audit", "/v1/backups", "/v1/backups/{name}", "/v1/clock", "/v1/corrections",
    "/v1/decisions", "/v1/deliveries", "/v1/imports", "/v1/policy", "/v1/policy/versions", "/v1/prices",
    "/v1/prices/versions", "/v1/proposals", "/v1/periods/{month}/proposals", "/v1/quarantine", "/act/{number}",
    "/decisions/{at_ms}/{id:path}", "/leading", "/livez", "/readyz", "/openapi.json",
    "/static/style.css", "/favicon.ico", "/sign-in", "/sign-in/done", "/signed-out",
}  # fmt: skip
"""What was put there by people and programs, with its own times."""
NO_MONEY = re.compile(r"EUR 0(\.00)?(?![.\d])")


@dataclass(frozen=True)
class Little:
    """One of the ledgers, with the current month."""

    name: str
    service: Service
    month: str

    @property
    def client(self) -> TestClient:
        return TestClient(self.service.app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    def get(self, route: str) -> Any:
        path = re.sub(r"\{month\}", self.month, route)
        path = re.sub(r"\{team:path\}", "vision", path).replace("{cluster}/{node}", "prod/node-1")
        path = re.sub(r"\{id(:path)?\}", "prod~vision~Pod~train-0", path)
        return self.client.get(f"{path}?{FIGURES[route].replace('MONTH', self.month)}")


def moved(one: Batch, by_ms: int) -> Batch:
    rows = tuple(
        structs.replace(row, start_ms=row.start_ms + by_ms, end_ms=row.end_ms + by_ms) for row in one.intervals
    )
    return structs.replace(one, intervals=rows)


@pytest.fixture(scope="module", params=LEDGERS)
def little(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Little]:
    tmp_path = tmp_path_factory.mktemp(request.param)
    prices = PRICES if request.param == UNPRICED else PRICES.replace(" valid_to: 2026-12-01,", "")
    (tmp_path / "prices.yaml").write_text(prices)
    (tmp_path / "policy.yaml").write_text(POLICY)
    clock = VirtualClock(NOW_MS)
    settings = Settings(
        data=tmp_path / "data", auth="off", linger_ms=0, prices=tmp_path / "prices.yaml",
        policy=tmp_path / "policy.yaml",
    )  # fmt: skip
    with Service(settings, clock) as service:
        found = Little(request.param, service, "2026-11" if request.param in (EMPTY, MINUTE) else "2026-12")

        def deliver(*batches: Batch) -> None:
            for one in batches:
                assert found.client.post("/v1/usage", content=encoded(one)).status_code == 200

        if found.name == MINUTE:
            deliver(batch(rows=1))
        elif found.name in QUIET:
            deliver(batch(rows=30))
            if found.name == VANISHED:
                deliver(batch(rows=30, cluster="away", node="node-9"))
            clock.advance(STOPPED_MS)
            if found.name == VANISHED:
                deliver(moved(batch(first=31, rows=1), STOPPED_MS))
        elif found.name == UNPRICED:
            clock.advance(40 * MS_PER_DAY)
            deliver(moved(batch(rows=1), 40 * MS_PER_DAY))
        yield found


def test_every_address_is_walked(little: Little) -> None:
    if little.name == EMPTY:
        served = {path for method, path in routes(little.service.app) if method == "GET"}
        assert served == FIGURES.keys() | NO_FIGURES


@pytest.mark.parametrize("route", FIGURES)
def test_what_an_address_shows(little: Little, route: str) -> None:
    answer = little.get(route)
    if answer.status_code == 404:
        assert answer.json()["detail"], "it says what there is not"
        return
    assert answer.status_code == 200, answer.text[:500]
    kind = answer.headers["content-type"].partition(";")[0]
    if kind == "text/html":
        page = words(answer.text)
        if little.name in UNMETERED:
            assert not NO_MONEY.search(page), (page, "nothing is metered: no cost is known")
        if little.name == UNPRICED and not route.startswith("/team"):  # which held nothing: that is known
            assert not NO_MONEY.search(page), (page, "no price is known")
        if little.name == STOPPED:
            assert "Old records. The newest is 52.0 d old, of 1 Nov 11:30" in page or route.startswith("/v1/"), page
            assert not re.search(r"(?<!until )\bnow\b", re.sub(r"1 Nov 11:00 now", "", page)), page
        if little.name == VANISHED and not route.startswith("/v1/"):
            assert "Cluster away does not report. Its newest record is 52.0 d old, of 1 Nov 11:30" in page, page
    elif kind == "application/json" and "note" in answer.json():
        note = answer.json()["note"]
        expected = {
            EMPTY: "no records yet", MINUTE: "59.0 min old", STOPPED: "52.0 d old", VANISHED: "away",
            UNPRICED: "59.0 min old",
        }  # fmt: skip
        assert expected[little.name] in note, (route, note)


def test_what_was_not_metered_is_no_figure(little: Little) -> None:
    ask = lambda path: little.client.get(path).json()  # noqa: E731
    here = f"start={little.month}-01"
    usage, cost, jobs = ask(f"/v1/usage?{here}"), ask(f"/v1/cost?{here}"), ask(f"/v1/jobs?{here}")
    summary = ask(f"/v1/report?month={little.month}&format=json")["summary"]
    assert usage["coverage"] == {EMPTY: None, STOPPED: 0.0}.get(little.name, usage["coverage"])
    known = [cost["total"], jobs["total_cost"], summary["cost"], summary["due"] if little.name == EMPTY else None]
    if little.name in (*UNMETERED, UNPRICED):
        assert known[:3] == [None, None, None]
    else:
        assert None not in known[:3]
    figures = [summary[name] for name in ("allocated_gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "jobs")]
    assert (set(figures) == {None}) == (little.name in UNMETERED)


def test_exports_of_what_was_not_metered_have_no_zeros(little: Little) -> None:
    month = f"/v1/report?month={little.month}&format="
    rows = list(csv.DictReader(io.StringIO(little.client.get(month + "csv").text)))
    (total,) = (row for row in rows if row["record"] == "total")
    metered = little.name not in UNMETERED
    assert bool(total["cost"]) == (metered and little.name != UNPRICED)
    assert total["reason"] == {
        EMPTY: "nothing of this time is metered", STOPPED: "nothing of this time is metered",
        UNPRICED: "some of the time has no price",
    }.get(little.name, "")  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(little.client.get(f"/month/{little.month}/lines.csv").text)))
    assert (lines[-1]["account"], bool(lines[-1]["cost"])) == ("total", metered and little.name != UNPRICED)
    book = load_workbook(io.BytesIO(little.client.get(month + "xlsx").content))
    head, *values = book["Summary"].iter_rows(values_only=True)
    shown = dict(zip(head, values[0], strict=True))
    assert (shown["cost EUR"] is None) == (not metered or little.name == UNPRICED), shown
    for form in set(get_args(Form)) - {"pdf"}:  # which is the page, and takes seconds
        assert little.client.get(month + form).status_code in (200, 501), form
    with zipfile.ZipFile(io.BytesIO(little.client.get(month + "focus").content)) as bundle:
        charges = [name for name in bundle.namelist() if name.endswith(".csv")]
        assert charges
        files = [csv.DictReader(io.TextIOWrapper(bundle.open(name))) for name in charges]
        costs = [row["BilledCost"] for file in files for row in file if "BilledCost" in row]
    assert bool(costs) == (metered and little.name != UNPRICED), "a charge is only of what is metered and has a price"


@pytest.fixture(scope="module")
def url(little: Little) -> Iterator[str]:
    with serve(little.service.app, "127.0.0.1", 0) as found:
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
    (accountant, ("backups",)), (accountant, ("report", "MONTH", "--format", "csv")),
    (advise, ("autoscaler",)), (advise, ("spot",)), (advise, ("sharing",)),
    (doctor, ("--only", "accountant,idle,oversized,unowned")),
]  # fmt: skip


@pytest.mark.parametrize(("main", "given"), COMMANDS, ids=[" ".join(given) for _, given in COMMANDS])
def test_what_a_command_prints(
    little: Little, run: Callable[..., tuple[int, str]], main: Callable[[list[str]], int], given: tuple[str, ...]
) -> None:
    code, text = run(main, *(word.replace("MONTH", little.month) for word in given))
    assert "Traceback" not in text
    assert text, "it says something"
    if little.name in UNMETERED and given[0] in ("cost", "report"):
        assert not re.search(r"total[^a-z]*\b0\.00\b", text), text
    if given[0] in ("usage", "cost", "jobs", "check"):
        assert code == 0
        expected = {EMPTY: "no records yet", STOPPED: "52.0 d old", VANISHED: "'away' has not reported for 52.0 d"}
        assert expected.get(little.name, "59.0 min old") in text, text


def test_the_pandas_client_has_no_zeros_either(little: Little, url: str) -> None:
    books = connect(url)
    window, cost, usage = books.window(size="7d"), books.cost(), books.usage()
    if little.name == EMPTY:
        assert window["share"].isna().all()
        assert (usage.attrs["coverage"], cost.attrs["total"]) == (None, None)
    else:
        assert not window["share"].isna().any()
        assert 0 <= usage.attrs["coverage"] <= 1
