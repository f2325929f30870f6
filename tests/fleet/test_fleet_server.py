"""`gputally fleet serve`: every ledger's pages and API as its own accountant serves them, and those of the whole
fleet."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote, urljoin

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

import gputally
from accountant.api.dependencies import Deps
from accountant.cli.job_tables import print_job
from accountant.compat.opencost_api import AllocationsOfLedgers
from accountant.composition import create_app
from accountant.core.periods import utc, zone
from accountant.core.settings import Settings
from accountant.exports.protocol import exports
from accountant.exports.zip_archive import unpack
from accountant.fleet import fleet_routes
from accountant.fleet.fleet_ledgers import Fleet, Rates
from accountant.fleet.fleet_server import FleetService
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.runtime.ingest import Ingest
from accountant.runtime.job_and_task_metrics import AccountantMetrics
from accountant.web import page_queries
from accountant.wire.usage_cost_and_job_models import JobAnswer
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.docs_address import DOCS
from gputally.base.number_format import NOTHING, hours
from gputally.base.units import US_PER_HOUR
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import AllowAll, sha256
from tests.deadlines import patience_s, until
from tests.fleet.conftest import TwoLedgers
from tests.lake.comparison_queries import HOUR, JOB, ROWS, SPAN, PublishedLedger, published
from tests.ledger.busy_ledger import HAND
from tests.ledger.conftest import MINUTE, START_MS
from tests.plugin_cases import needs, registered

HERE = "http://127.0.0.1"
WITHIN = "start=2026-10-01T00:00:00Z&end=2026-10-01T05:00:00Z"
QUESTIONS = (
    "/v1/statement?month=2026-10", "/v1/report?month=2026-10",
    *(f"/v1/report?month=2026-10&format={name}" for name, one in exports().items() if one.readable),
    f"/v1/usage?by=team,hour&{WITHIN}",
    f"/v1/cost?by=gpu_model,team&{WITHIN}", f"/v1/cost?by=label:project,team&{WITHIN}", "/v1/prices",
    "/v1/policy", "/v1/audit", "/v1/decisions", "/month/2026-10/lines", "/month/2026-10/lines.csv", "/prices",
    "/decisions",
)  # fmt: skip
"""Addresses that the ledger's accountant and the fleet answer identically, except for the navigation."""
ENTRANCES = ("", "month/2026-10", "jobs", "nodes", "decisions", "prices", "coverage", "invoice/2026-10", "proposals")


def _service(two: TwoLedgers, **settings: Any) -> FleetService:
    return FleetService(Settings(**({"auth": "off"} | settings)), two.fleet, VirtualClock(SPAN[1] + 60_000))


@pytest.fixture
def client(two: TwoLedgers) -> TestClient:
    return TestClient(_service(two).app, base_url=HERE)


class Counted:
    """An engine that counts its queries."""

    name = "duckdb"

    def __init__(self, engine: DuckDbEngine) -> None:
        self._engine = engine
        self.queries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def query(self, *asked: Any) -> pa.Table:
        self.queries += 1
        return self._engine.query(*asked)


@pytest.mark.parametrize("page", ["/fleet/jobs", "/fleet/jobs?page=2", "/fleet/nodes", "/fleet/nodes?start=30d"])
def test_lists_of_jobs_and_nodes_are_there_before_they_are_asked_for(two: TwoLedgers, page: str) -> None:
    engine = Counted(two.engine)
    service = FleetService(Settings(auth="off"), Fleet(cast(Any, engine)), VirtualClock(SPAN[1] + 60_000))
    service.prepare()
    prepared = engine.queries
    assert TestClient(service.app, base_url=HERE).get(page).status_code == 200
    assert engine.queries == prepared > 0


def test_an_answer_about_a_ledger_is_computed_once_for_a_publication(two: TwoLedgers) -> None:
    engine = Counted(two.engine)
    service = FleetService(Settings(auth="off"), Fleet(cast(Any, engine)), VirtualClock(SPAN[1] + 60_000))
    client = TestClient(service.app, base_url=HERE)
    first = client.get("/clusters/north/nodes?start=3d")
    asked = engine.queries
    assert client.get("/clusters/north/nodes?start=3d").text == first.text
    assert engine.queries == asked > 0


def _accountant(one: PublishedLedger) -> TestClient:
    deps = Deps(
        one.settings, one.clock, one.ledger, cast(Ingest, None), AllowAll(), AccountantMetrics(), one.books, _fails
    )
    return TestClient(create_app(deps), base_url=HERE)


def _fails(failure: Exception) -> None:
    raise failure


def _content(text: str) -> str:
    """Return a page without its navigation, with links as the ledger's own accountant writes them."""
    text = re.sub(r'="/clusters/(north|south)/', '="/', text)
    return re.sub(r'<nav class="site".*?</nav>', "", text, flags=re.DOTALL)


@pytest.mark.parametrize("asked", QUESTIONS)
def test_each_ledger_answers_as_its_own_accountant(two: TwoLedgers, client: TestClient, asked: str) -> None:
    for name, one in (("north", two.north), ("south", two.south)):
        own = _accountant(one).get(asked)
        found = client.get(f"/clusters/{name}{asked}")
        assert (found.status_code, found.headers["content-type"]) == (200, own.headers["content-type"])
        assert _content(found.text) == _content(own.text)
        assert int(found.headers["content-length"]) == len(found.content)


def test_every_link_of_every_page_leads_somewhere(client: TestClient) -> None:
    """Links on the pages of a ledger lead to pages of the same ledger."""
    seen, waiting = set[str](), ["/fleet", *(f"/clusters/south/{entrance}" for entrance in ENTRANCES)]
    while waiting:
        page = waiting.pop()
        if page in seen or len(seen) > 150:
            continue
        seen.add(page)
        answer = client.get(page)
        assert answer.status_code == 200, (page, answer.text[:300])
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        for link in re.findall(r'(?:href|src)="([^"#]+)', answer.text):
            target = urljoin(HERE + page, link.replace("&amp;", "&")).removeprefix(HERE)
            if target.startswith(DOCS):
                continue
            if page.startswith("/clusters/south/") and "format=pdf" not in target:
                assert target.startswith(("/clusters/", "/static/", "/fleet")), (page, link)
            if "format=" not in target and "/clusters/north" not in target:
                waiting.append(target)
    assert len(seen) > 40


def test_a_ledger_whose_name_has_characters_of_addresses_and_of_html_has_its_pages() -> None:
    with published(name='org/β "><x9>\\1', rows=ROWS[:4]) as known:
        engine = DuckDbEngine(known.connect())
        service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(SPAN[1] + 60_000))
        client = TestClient(service.app, base_url=HERE)
        (listed,) = client.get("/v1/ledgers").json()
        assert listed["fault"] is None
        place = listed["pages"]
        assert client.get(place.rstrip("/")).status_code == 200
        for page in (
            "/fleet",
            "/fleet/jobs?start=2026-10-01&end=2026-11-01",
            "/fleet/nodes",
            f"{place}jobs",
            f"{place}explore",
        ):
            answer = client.get(page, headers={"Accept": "text/html"})
            assert answer.status_code == 200, page
            assert "<x9>" not in answer.text
            assert "Saved views" not in answer.text, "a lake keeps none"
            links = re.findall(r'href="(/clusters/[^"#]+)', answer.text)
            assert links
            for link in links:
                assert link.startswith(place), (page, link)
        found = client.get(f"{place}v1/usage?by=team&{WITHIN}").json()["lines"]
        assert found == client.get(f"/v1/usage?by=team&{WITHIN}").json()["lines"]
        service.close()
        engine.close()


def test_the_picker_leads_to_the_same_page_of_another_cluster(client: TestClient) -> None:
    page = client.get("/clusters/north/jobs").text
    assert '<a href="/clusters/south/jobs">south</a>' in page
    assert '<a href="/clusters/north/jobs" aria-current="true">north</a>' in page
    assert '<a href="/fleet">All clusters</a>' in page


def test_the_overview_adds_up_what_the_ledgers_state(two: TwoLedgers, client: TestClient) -> None:
    found = client.get("/v1/report?month=2026-10").json()
    assert [one["ledger"] for one in found["ledgers"]] == ["north", "south"]
    own = [_accountant(one).get("/v1/statement?month=2026-10").json() for one in two.both]
    assert [one["due"] for one in found["ledgers"]] == [one["due_total"] for one in own]
    held = sum(sum(one["accounts_gpu_us"].values()) for one in found["ledgers"])
    assert held == sum(int(line["gpu_us"]) for one in own for line in one["lines"])
    page = client.get("/fleet?month=2026-10").text
    for team in {row["team"] for row in found["teams"]} - {"__idle__", "__unassigned__"}:
        assert f'href="/fleet/team/{team}?month=2026-10"' in page
        assert client.get(f"/fleet/team/{team}?month=2026-10").status_code == 200
    assert client.get("/fleet?month=2026-10&ledger=south").text.count("/clusters/south/month/") == 1
    assert client.get("/v1/report?month=2026-10&ledger=east").json()["errors"][0]["at"] == "ledger"


@needs("exports.csv")
def test_the_lines_of_all_statements_add_up_to_the_overview(client: TestClient) -> None:
    rows = csv.DictReader(io.StringIO(client.get("/v1/report?month=2026-10&format=csv").text))
    found = client.get("/v1/report?month=2026-10").json()["ledgers"]
    assert sum(int(row["gpu_us"]) for row in rows) == sum(sum(one["accounts_gpu_us"].values()) for one in found)


def test_the_overview_offers_the_installed_formats_and_another_is_refused_with_their_names(client: TestClient) -> None:
    page = client.get("/fleet?month=2026-10").text
    offered = set(re.findall(r"/v1/report\?month=2026-10&amp;format=([a-z0-9.-]+)", page))
    assert offered == exports().keys() - {"json"}, "each once; the page itself is the summary"
    for form in sorted({"csv", "html", "json", "pdf", "unknown"} - exports().keys()):
        answer = client.get(f"/v1/report?month=2026-10&format={form}")
        (fault,) = answer.json()["errors"]
        assert (answer.status_code, fault["at"]) == (422, "format")
        assert all(name in fault["reason"] for name in exports()), fault


@pytest.mark.parametrize("form", sorted(exports().keys() - {"pdf", "csv", "json"}))
def test_an_archive_has_every_ledgers_own_report(two: TwoLedgers, client: TestClient, form: str) -> None:
    asked = f"/v1/report?month=2026-10&format={form}"
    answer = client.get(asked)
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-disposition"] == f'attachment; filename="gputally-2026-10-fleet-{form}.zip"'
    files = unpack(answer.content)
    own = [_accountant(one).get(asked).content for one in two.both]
    assert list(files.values()) == own
    assert [name.split(".")[0] for name in files] == ["gputally-2026-10-north", "gputally-2026-10-south"]
    assert list(unpack(client.get(f"{asked}&ledger=south").content).values()) == own[1:]


def _table(page: str) -> list[list[str]]:
    """Return the cells of a page's table, without head and foot."""
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("<tr>")[1:]]
    return [[" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in row] for row in cells]


def test_the_jobs_of_all_clusters_are_those_of_each_in_its_own_month(two: TwoLedgers, client: TestClient) -> None:
    held = ("busy", "allocated_idle", "allocated_unknown")
    page = client.get("/fleet/jobs?start=2026-10-01&end=2026-11-01").text
    rows = _table(page)
    jobs = {
        (name, job["id"]): sum(job["accounts_gpu_us"][account] for account in held)
        for name, begin in (("north", "2026-10-01T00:00:00Z"), ("south", "2026-10-01T04:00:00Z"))
        for job in client.get(f"/clusters/{name}/v1/jobs?start={begin}&end={utc(SPAN[1])}").json()["jobs"]
    }
    linked = re.findall(r'href="/clusters/(north|south)/job/([^"]*)"', page)
    assert [(name, unquote(id)) for name, id in linked] == sorted(jobs, key=lambda key: (-jobs[key], *key))
    assert {row[1] for row in rows} == {"north", "south"}
    assert f">{hours(sum(jobs.values()))}</td>" in page.partition("<tfoot>")[2]
    assert {row[1] for row in _table(client.get("/fleet/jobs?start=2026-10-01&end=2026-11-01&ledger=south").text)} == {
        "south"
    }
    assert {
        row[2] for row in _table(client.get("/fleet/jobs?start=2026-10-01&end=2026-11-01&where.team=blue").text)
    } == {"blue"}


MONTH = "start=2026-10-01&end=2026-11-01"


def _file(client: TestClient, address: str) -> list[dict[str, str]]:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


@pytest.mark.parametrize("sort", ["", "&sort=name:desc", "&sort=idle:asc", "&sort=state", "&search=j0", "&state=ended"])
def test_a_view_of_the_jobs_of_all_clusters_and_its_files_are_those_of_each(client: TestClient, sort: str) -> None:
    page = client.get(f"/fleet/jobs?{MONTH}{sort}").text
    linked = [(name, unquote(id)) for name, id in re.findall(r'href="/clusters/(north|south)/job/([^"]*)"', page)]
    rows = _file(client, f"/fleet/jobs.csv?{MONTH}{sort}")
    assert [(row["ledger"], row["id"]) for row in rows] == linked
    for name in ("north", "south"):
        own = _file(client, f"/clusters/{name}/jobs.csv?{MONTH}{sort or '&sort=gpu_hours'}")
        assert [{key: row[key] for key in own[0]} for row in rows if row["ledger"] == name] == own
    stored = pq.read_table(io.BytesIO(client.get(f"/fleet/jobs.parquet?{MONTH}{sort}").content))
    assert [str(held) for held in stored["allocated_gpu_hours"].to_pylist()] == [
        str(Decimal(row["allocated_gpu_hours"])) for row in rows
    ]


def test_the_jobs_of_all_clusters_are_compared_with_the_span_before(client: TestClient) -> None:
    begin, middle, end = (utc(SPAN[0] + at * HOUR) for at in (0, 2, 4))
    view = f"start={middle}&end={end}&compare=true"
    rows = _file(client, f"/fleet/jobs.csv?{view}")
    before = {(row["ledger"], row["id"]): row["allocated_gpu_hours"]
              for row in _file(client, f"/fleet/jobs.csv?start={begin}&end={middle}")}  # fmt: skip
    for row in rows:
        assert Decimal(row["allocated_gpu_hours_before"]) == Decimal(before.get((row["ledger"], row["id"]), 0)), row
    assert before.keys() <= {(row["ledger"], row["id"]) for row in rows}
    page = client.get(f"/fleet/jobs?{view}").text
    assert f"before {hours(round(sum(map(Decimal, before.values())) * US_PER_HOUR))}" in page.partition("<tfoot>")[2]
    nodes = {(row["ledger"], row["node"]): row["allocated_gpu_hours_before"]
             for row in _file(client, f"/fleet/nodes.csv?{view}")}  # fmt: skip
    then = _file(client, f"/fleet/nodes.csv?start={begin}&end={middle}")
    assert nodes == {(row["ledger"], row["node"]): row["allocated_gpu_hours"] for row in then}
    assert client.get(f"/fleet/nodes?{view}").status_code == 200


def test_nodes_of_all_clusters_have_the_release_of_their_agent_and_the_errors_of_their_gpus(
    two: TwoLedgers, client: TestClient
) -> None:
    told = ("node", "newest_record", "agent_version", "gpu_errors")
    view = "start=2026-09-30&end=2026-11-01&columns=silent,agent,errors"  # the month begins later in one time zone
    of_fleet = [[row[name] for name in told] for row in _file(client, f"/fleet/nodes.csv?{view}")]
    own = [row for one in two.both for row in _file(_accountant(one), f"/nodes.csv?{view}")]
    assert sorted(of_fleet) == sorted([row[name] for name in told] for row in own)
    assert {tuple(row[2:]) for row in of_fleet} == {("0.1.0", "gpu-0 xid 79: 2")}
    assert all(newest for _, newest, *_ in of_fleet)


def test_the_pages_of_the_jobs_of_all_clusters_are_the_list(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [(row["ledger"], row["id"]) for row in _file(client, f"/fleet/jobs.csv?{MONTH}&sort=name")]
    monkeypatch.setattr(fleet_routes, "JOBS_A_PAGE", 3)
    shown: list[tuple[str, str]] = []
    for number in range(1, -(-len(whole) // 3) + 1):
        page = client.get(f"/fleet/jobs?{MONTH}&sort=name&page={number}").text
        found = re.findall(r'href="/clusters/(north|south)/job/([^"]*)"', page)
        shown += [(name, unquote(id)) for name, id in found]
    assert shown == whole


@pytest.mark.parametrize("ledger", ["", "&ledger=north"])
def test_the_links_between_pages_lead_to_every_job_of_a_ledger_however_many_are_read_at_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, ledger: str
) -> None:
    view = f"{MONTH}&sort=name&timezone=UTC{ledger}"
    monkeypatch.setattr(fleet_routes, "JOBS_A_PAGE", 1)
    monkeypatch.setattr(page_queries, "MOST_JOBS", 2)
    whole = [(row["ledger"], row["id"]) for row in _file(client, f"/fleet/jobs.csv?{view}")]
    assert len(whole) > 2
    address: str | None = f"/fleet/jobs?{view}"
    shown: list[tuple[str, str]] = []
    while address is not None:
        page = client.get(address).text
        found = re.findall(r'href="/clusters/(north|south)/job/([^"]*)"', page)
        shown += [(name, unquote(id)) for name, id in found]
        following = re.search(r'href="(/fleet/jobs[^"]*page=\d+)" rel="next"', page)
        address = None if following is None else following[1].replace("&amp;", "&")
    assert shown == whole


@pytest.mark.parametrize(
    ("path", "parameter"),
    [("/fleet/jobs?sort=x", "sort"), ("/fleet/jobs?columns=x", "columns"), ("/fleet/jobs?ledger=east", "ledger"),
     ("/fleet/jobs?month=2026-10", "month"), ("/fleet/nodes.csv?ledger=east", "ledger")],
)  # fmt: skip
def test_a_view_that_there_is_not_is_refused_by_name(client: TestClient, path: str, parameter: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == parameter


def test_jobs_of_a_ledger_whose_prices_the_lake_does_not_tell_are_named_as_missing(
    billed_by_busy_time: PublishedLedger,
) -> None:
    engine = DuckDbEngine(billed_by_busy_time.connect())
    service = FleetService(Settings(auth="off"), Fleet(engine), billed_by_busy_time.clock)
    page = TestClient(service.app, base_url=HERE).get("/fleet/jobs?start=2026-10-01&end=2026-11-01").text
    assert {row[1] for row in _table(page)} == {"north"}
    assert "Not listed: south: its price book bills shared GPUs by busy time" in page
    engine.close()


def test_what_whole_hours_do_not_tell_of_a_job_and_a_node_is_unknown_and_not_nothing() -> None:
    with published(rows=ROWS[:16]) as known:
        engine = DuckDbEngine(known.connect())
        service = FleetService(Settings(auth="off"), Fleet(engine), known.clock)
        client, own = TestClient(service.app, base_url=f"{HERE}/clusters/prod"), _accountant(known)
        job = f"{JOB.id}?start=2026-10-01"
        there, here = (one.get(f"/v1/jobs/{job}").json() for one in (client, own))
        assert there["job"]["epochs"] == here["job"]["epochs"] == 2
        ends = [(line["epoch"], line["end_ms"]) for line in here["epochs"]]
        assert [(line["epoch"], line["end_ms"]) for line in there["epochs"]] == ends
        assert {(line["gpu_us"], line["cost"], line["unpriced_gpu_us"]) for line in there["epochs"]} == {(None,) * 3}
        assert there["attempts"] is None is not here["attempts"]
        cells = rf">{NOTHING}</td>"
        (row,) = (row for row in client.get(f"/job/{JOB.id}").text.split("<tr>") if ">1</th>" in row)
        assert row.count(cells) == 2
        page = client.get("/node/prod/n1").text
        assert page.count("own accountant") == 2, "from when to when pods held its GPUs, and their owners"
        if registered("exports.html"):
            report = client.get("/v1/report?month=2026-10&format=html").text.partition("Cost of an epoch")[2]
            (row,) = (row for row in report.partition("</table>")[0].split("<tr>") if ">2</td>" in row)
            assert row.count(cells) == 4
        tables = [one.title for one in print_job(JobAnswer.model_validate(there), zone("UTC")).renderables[1:]]
        assert tables == ["Attempts", "By price", "By epoch"], "the commands name what is unknown as well"
        service.close()
        engine.close()


def test_a_jobs_page_shows_the_preemptions_that_the_clusters_own_accountant_shows(
    two: TwoLedgers, client: TestClient
) -> None:
    jobs = [job["id"] for job in client.get(f"/clusters/north/v1/jobs?{WITHIN}").json()["jobs"]]
    shown = {job for job in jobs if "it gave way" in client.get(f"/clusters/north/job/{quote(job)}").text}
    assert shown == {job for job in jobs if "it gave way" in _accountant(two.north).get(f"/job/{quote(job)}").text}
    assert shown == {"prod~ns-0~Job~j0"}


def test_pages_of_the_last_days_and_of_long_jobs_answer_for_whole_hours(tmp_path: Path) -> None:
    """The ledger was published at an odd time: 03:12, 33 days after the first record."""
    with published(str(tmp_path / "lake"), publish=False) as known:
        known.clock.advance(33 * 24 * HOUR - 108 * MINUTE)
        late = known.clock.wall_ms()
        minutes = (late - 32 * MINUTE - START_MS) // MINUTE
        holder = Holder("pod", "p1", "ns-1", "p1")
        later = HAND.row(1, minutes, minutes + 15, "gpu-0", gpu_model="H100", holder=holder)
        known.ledger.append([HAND.batch(later, node="n1", epoch="late")], late)
        known.publisher.publish()
        engine = DuckDbEngine(known.connect())
        client = TestClient(FleetService(Settings(auth="off"), Fleet(engine), known.clock).app, base_url=HERE)
        own = _accountant(known)
        for path in ("/nodes?start=1d", "/nodes?start=31d", "/node/prod/n1?days=7", f"/job/{quote(JOB.id)}"):
            answer = client.get(f"/clusters/prod{path}")
            assert answer.status_code == own.get(path).status_code == 200, (path, answer.text)
        assert client.get("/fleet/nodes?start=31d").status_code == 200
        engine.close()


def test_the_nodes_of_all_clusters_are_those_of_each(two: TwoLedgers, client: TestClient) -> None:
    rows = _table(client.get("/fleet/nodes?start=1d").text)
    for name in ("north", "south"):
        own = _table(client.get(f"/clusters/{name}/nodes?start=1d&timezone=UTC").text)
        assert [[row[0], *row[2:]] for row in rows if row[1] == name] == own
    assert client.get("/fleet/nodes?ledger=east").status_code == 422


def test_nodes_of_a_span_that_is_too_large_are_refused(two: TwoLedgers) -> None:
    client = TestClient(_service(two, limits={"question_gpu_hours": 1}).app, base_url=HERE)
    for page in ("/clusters/north/nodes?start=30d", "/fleet/nodes?start=30d"):
        assert client.get(page).status_code == 422, page


def test_jobs_held_and_cost_the_same(two: TwoLedgers, client: TestClient) -> None:
    """The times of holding, and the last number of GPUs, are known for whole hours only."""
    own = _accountant(two.south).get(f"/v1/jobs?{WITHIN}").json()["jobs"]
    found = client.get(f"/clusters/south/v1/jobs?{WITHIN}").json()["jobs"]
    whole_hours = {"held_from_ms", "held_until_ms", "gpus", "burn_per_hour"}
    assert [{k: v for k, v in one.items() if k not in whole_hours} for one in found] == [
        {k: v for k, v in one.items() if k not in whole_hours} for one in own
    ]


def test_usage_and_cost_of_some_or_all(two: TwoLedgers, client: TestClient) -> None:
    whole = client.get(f"/v1/usage?by=team&{WITHIN}").json()["lines"]
    parts = [client.get(f"/v1/usage?by=team&{WITHIN}&ledger={name}").json()["lines"] for name in ("north", "south")]
    busy = {line["key"]["team"]: line["accounts_gpu_us"]["busy"] for line in whole}
    assert sum(busy.values()) == sum(line["accounts_gpu_us"]["busy"] for part in parts for line in part) > 0
    first = client.get(f"/v1/usage?by=team,gpu&{WITHIN}&limit=2").json()
    second = client.get(f"/v1/usage?by=team,gpu&{WITHIN}&limit=2&page={first['next_page']}").json()
    assert len(first["lines"]) == len(second["lines"]) == 2
    assert client.get(f"/v1/cost?by=team&{WITHIN}").json()["currency"] == "USD"
    assert client.get(f"/v1/usage?by=colour&{WITHIN}").status_code == 422


def test_projects_are_asked_of_all_ledgers_by_address_client_and_page(two: TwoLedgers, client: TestClient) -> None:
    lines = client.get(f"/v1/cost?by=label:project&where.label:project=search&{WITHIN}").json()["lines"]
    assert [line["key"]["label:project"] for line in lines] == ["search"]
    page = client.get(f"/clusters/north/explore?by=label:project,team&{WITHIN}", headers={"Accept": "text/html"})
    assert page.status_code == 200
    assert 'value="label:example.com/cost-center"' in page.text
    assert client.get(f"/v1/cost?by=label:nobody&{WITHIN}").status_code == 422
    assert client.get("/v1/ledgers").json()[1]["exported_labels"] == ["project"]
    service = _service(two)
    with serve(service.app, "127.0.0.1", 0) as url:
        frame = gputally.connect(url).cost(
            by=["label:project"], start="2026-10-01T00:00:00Z", end="2026-10-01T05:00:00Z"
        )
    assert "search" in set(frame["label:project"])


def test_opencost_answers_for_one_ledger(client: TestClient) -> None:
    window = "window=2026-10-01T00:00:00Z,2026-10-01T03:00:00Z"
    found = client.get(f"/clusters/north/opencost/allocation?{window}&aggregate=namespace").json()
    assert found["code"] == 200
    assert found["data"][0].keys() >= {"ns-0", "ns-1"}
    assert client.get(f"/clusters/north/opencost/assets?{window}").json()["code"] == 200


@pytest.mark.parametrize("aggregate", ["cluster", "namespace", "cluster,namespace,pod", "node"])
def test_opencost_answers_for_all_ledgers_with_the_sum_of_theirs(client: TestClient, aggregate: str) -> None:
    asked = "window=2026-10-01T00:00:00Z,2026-10-01T04:00:00Z&step=2h&includeIdle=true&aggregate=" + aggregate
    together = client.get(f"/opencost/allocation?{asked}").json()
    own = [client.get(f"/clusters/{name}/opencost/allocation?{asked}").json() for name in ("north", "south")]
    assert together["code"] == 200
    assert len(together["data"]) == 2
    for at, found in enumerate(together["data"]):
        assert found.keys() == {name for one in own for name in one["data"][at]}
        for name, one in found.items():
            parts = [answer["data"][at][name] for answer in own if name in answer["data"][at]]
            for figure in ("gpuHours", "gpuCost", "totalCost"):
                assert one[figure] == pytest.approx(sum(part[figure] for part in parts), abs=1e-9), (name, figure)
    assert sum(one["totalCost"] for one in together["data"][0].values()) > 0


def test_costs_in_several_currencies_are_no_order_and_have_no_total(two_currencies: PublishedLedger) -> None:
    engine = DuckDbEngine(two_currencies.connect())
    service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(SPAN[1] + 60_000))
    client = TestClient(service.app, base_url=HERE)
    for sort in ("cost", "cost:asc", "burn"):
        refused = client.get(f"/fleet/jobs?{MONTH}&sort={sort}")
        assert (refused.status_code, refused.json()["errors"][0]["at"]) == (422, "sort")
        assert all(currency in refused.json()["errors"][0]["reason"] for currency in ("EUR", "USD"))
    (name, *_) = service.names()
    assert client.get(f"/fleet/jobs?{MONTH}&sort=cost&ledger={name}").status_code == 200
    assert {row["currency"] for row in _file(client, f"/fleet/jobs.csv?{MONTH}")} == {"EUR", "USD"}
    foot = client.get(f"/fleet/jobs?{MONTH}&columns=cost").text.partition("<tfoot>")[2].partition("</tfoot>")[0]
    assert not re.search(r"\d\.\d\d", foot), "amounts of several currencies are not added"
    engine.close()


def test_opencost_lists_the_clusters_and_refuses_to_add_currencies(
    client: TestClient, two_currencies: PublishedLedger
) -> None:
    found = client.get("/opencost/clusterInfo").json()["data"]["name"].split(", ")
    own = [client.get(f"/clusters/{name}/opencost/clusterInfo").json()["data"]["name"] for name in ("north", "south")]
    assert set(found) == {name for one in own for name in one.split(", ")}
    assert client.get("/opencost/getConfigs").json()["data"]["currencyCode"] == "USD"
    engine = DuckDbEngine(two_currencies.connect())
    service = FleetService(Settings(auth="off"), Fleet(engine), two_currencies.clock)
    mixed = TestClient(service.app, base_url="http://127.0.0.1")
    window = "window=2026-10-01T00:00:00Z,2026-10-01T03:00:00Z"
    refused = mixed.get(f"/opencost/allocation?{window}&aggregate=cluster")
    assert refused.status_code == 400
    assert "amounts in EUR, USD cannot be added up" in refused.text
    assert mixed.get(f"/clusters/a/opencost/allocation?{window}").status_code == 200

    def costs(app: TestClient, asked: str) -> dict[str, float]:
        (found,) = app.get(f"{asked}?{window}&aggregate=namespace&includeIdle=true").json()["data"]
        return {name: one["totalCost"] for name, one in found.items()}

    rates = Rates(to="USD", rates={"EUR": Decimal("1.25")})
    converting = FleetService(Settings(auth="off"), Fleet(engine, rates), two_currencies.clock)
    rated = TestClient(converting.app, base_url=HERE)
    assert rated.get("/opencost/getConfigs").json()["data"]["currencyCode"] == "USD"
    dollars, of_euros = (costs(rated, f"/clusters/{name}/opencost/allocation") for name in ("a", "b"))
    assert sum(of_euros.values()) > 0
    assert costs(rated, "/opencost/allocation") == pytest.approx(
        {name: dollars[name] + of_euros[name] * 1.25 for name in dollars}
    )
    source = converting._served["b"].source
    limits = converting.settings.limits
    (own, _), (converted, _) = (
        one.assets(window) for one in (source, AllocationsOfLedgers({"b": source}, two_currencies.clock, limits, rates))
    )
    assert [one["totalCost"] for one in converted.values()] == pytest.approx(
        [one["totalCost"] * 1.25 for one in own.values()]
    )
    tenths = Rates(to="USD", rates={"EUR": Decimal("1.1")})
    exact, _ = AllocationsOfLedgers({"b": source}, two_currencies.clock, limits, tenths).assets(window)
    assert [one["totalCost"] for one in exact.values()] == [
        float(Decimal(str(one["totalCost"])) * Decimal("1.1")) for one in own.values()
    ], "the rate multiplies prices exactly, not floats"
    no_rate = Fleet(engine, Rates(to="CHF", rates={"USD": Decimal("0.9")}))
    refused = TestClient(FleetService(Settings(auth="off"), no_rate, two_currencies.clock).app, base_url=HERE).get(
        f"/opencost/allocation?{window}&aggregate=cluster"
    )
    assert (refused.status_code, "no rate from EUR to CHF" in refused.text) == (400, True)
    engine.close()


def test_nothing_is_written_and_what_is_not_published_is_not_made_up(client: TestClient) -> None:
    for path in ("/v1/backups", "/v1/periods/2026-10/close", "/v1/usage"):
        refused = client.post(f"/clusters/north{path}", json={})
        assert refused.status_code == 405
        assert "send this request to the accountant of north" in refused.json()["detail"]
    for path in ("/v1/quarantine", "/v1/gpus/owners", "/v1/check", "/v1/backups", "/metrics", "/readyz"):
        assert "is not published in a lake" in client.get(f"/clusters/north{path}").json()["detail"]
    assert "The cluster&#39;s own accountant shows" in client.get("/clusters/north/coverage").text.replace("'", "&#39;")
    assert client.get("/clusters/east/").status_code == 404
    assert client.get("/clusters/north", follow_redirects=False).headers["location"] == "/clusters/north/"
    assert (
        client.get("/clusters/north/month", follow_redirects=False).headers["location"].startswith("/clusters/north/")
    )


def test_a_token_is_asked_for_and_a_team_sees_itself(two: TwoLedgers, tmp_path: Path) -> None:
    rows = (("all", ""), ("blue", ", teams: [blue]"))
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "tokens:\n"
        + "".join(f"  - {{name: {name}, token_sha256: {sha256(name)}, scopes: [read]{more}}}\n" for name, more in rows)
    )
    client = TestClient(_service(two, auth="tokens", tokens=tokens).app, base_url=HERE)
    anyone = (
        "/fleet", "/fleet/jobs", "/fleet/nodes", "/fleet/jobs.csv", "/fleet/nodes.csv", "/fleet/jobs.parquet",
        "/fleet/nodes.parquet", "/v1/usage", "/v1/report", "/v1/ledgers", "/clusters/north", "/clusters/north/",
        "/clusters/east/",
        "/clusters/north/opencost/allocation", "/opencost/allocation", "/clusters/north/v1/statement",
        "/clusters/north/v1/check", "/metrics",
    )  # fmt: skip
    for path in anyone:
        assert client.get(path, follow_redirects=False).status_code == 401, path
    mine = {"Authorization": "Bearer blue"}
    for path in (
        "/fleet",
        "/fleet/nodes",
        "/v1/report",
        "/v1/ledgers",
        "/fleet/team/green",
        "/clusters/north/opencost/allocation",
    ):
        assert client.get(path, headers=mine).status_code == 403, path
    assert client.get("/", headers=mine, follow_redirects=False).headers["location"] == "/fleet/team/blue"
    assert client.get("/fleet/team/blue?month=2026-10", headers=mine).status_code == 200
    seen = client.get(f"/v1/usage?by=team&{WITHIN}", headers=mine).json()["lines"]
    assert {line["key"]["team"] for line in seen} == {"blue"}
    assert {row[2] for row in _table(client.get("/fleet/jobs?start=2026-10-01&end=2026-11-01", headers=mine).text)} == {
        "blue"
    }
    assert client.get("/fleet/jobs?start=2026-10-01&end=2026-11-01&where.team=green", headers=mine).status_code == 403
    assert client.get("/fleet?month=2026-10", headers={"Authorization": "Bearer all"}).status_code == 200


def test_metrics_tell_up_to_when_each_ledger_has_published(client: TestClient) -> None:
    lines = client.get("/metrics").text.splitlines()
    told = dict(line.split() for line in lines if line.startswith("gputally_fleet_published_timestamp_seconds{"))
    assert {name: float(seconds) * 1_000 for name, seconds in told.items()} == {
        f'gputally_fleet_published_timestamp_seconds{{ledger="{name}"}}': SPAN[1] for name in ("north", "south")
    }


def test_what_is_published_later_is_served_and_a_lake_that_is_away_is_said(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with published(str(lake), name="north") as north:
        engine = DuckDbEngine(north.connect())
        clock = VirtualClock(SPAN[1])
        service = FleetService(Settings(auth="off"), Fleet(engine), clock)
        client = TestClient(service.app, base_url=HERE, raise_server_exceptions=False)
        assert [one["ledger"] for one in client.get("/v1/ledgers").json()] == ["north"]
        before = service._served["north"]
        with published(str(lake), name="south", rows=[]):
            service.read_lake()
        assert service.names() == ("north", "south")
        assert service._served["north"] is before  # its figures are as they were
        shutil.move(lake, tmp_path / "aside")
        service._clock = _Once(clock, service)
        service.start()
        until(lambda: client.get("/readyz").status_code == 503, "the lake is away, and nothing says so")
        assert "lake: failed" in client.get("/readyz").text
        assert client.get("/clusters/north/v1/usage?by=team&" + WITHIN).status_code == 503
        service.over.set()
        shutil.move(tmp_path / "aside", lake)
        service.read_lake()
        assert client.get("/clusters/north/v1/usage?by=team&" + WITHIN).status_code == 200
        engine.close()


def test_all_answers_that_are_cached_fit_the_limit_together(two: TwoLedgers) -> None:
    most = 4 * 2**20
    service = _service(two, limits={"pages_bytes": most})
    client = TestClient(service.app, base_url=HERE)
    for days in range(1, 7):
        assert client.get(f"/fleet/nodes?start={days}d").status_code == 200
    kept = [one.deps.answers.nbytes for one in service._served.values()]
    assert min(kept) > 0
    assert sum(kept) <= most


def test_nothing_uses_the_lake_after_the_service_is_closed(two: TwoLedgers) -> None:
    before = set(threading.enumerate())
    service = _service(two)
    service.start()
    service.close()
    assert set(threading.enumerate()) <= before


class _Once(VirtualClock):
    """Lets the thread refresh once, then wait until the service ends."""

    def __init__(self, clock: VirtualClock, service: FleetService) -> None:
        super().__init__(clock.wall_ms())
        self._service, self._turns = service, 0

    def wait(self, seconds: float, stop: Any) -> bool:
        self._turns += 1
        return bool(stop.wait()) if self._turns > 1 else False


@needs("engines.duckdb")  # the only one that reads a lake here, without a server
def test_the_command_serves_until_it_is_asked_to_end(two: TwoLedgers, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gputally", "fleet", "serve", "--lake", two.warehouse, "--auth", "off"]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen([*command, "--listen=127.0.0.1:0"], stdout=out, stderr=out) as one:
        try:
            url = until(lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()), lambda: log.read_text()[-2000:])
            with urllib.request.urlopen(f"{url[0]}/v1/ledgers") as answer:
                assert [ledger["ledger"] for ledger in json.load(answer)] == ["north", "south"]
            one.send_signal(signal.SIGTERM)
            assert one.wait(patience_s()) == 0
        finally:
            one.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--auth", "off"), "no lake is given: give --lake"),
        (("--lake", "/x"), "no token file"),
        (("--lake", "/x", "--auth", "off", "--listen", "0.0.0.0:80"), "auth: off needs a loopback address"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gputally.__main__ import main

    assert main(["fleet", "serve", *arguments]) != 0
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_window_of_full_hours_is_the_ledgers_own(two: TwoLedgers, client: TestClient) -> None:
    asked = f"/v1/windows?size=4h&at={utc(SPAN[1])}"
    own = _accountant(two.north).get(asked).json()
    found = client.get(f"/clusters/north{asked}").json()
    for name in ("usage", "unassigned", "capacity", "coverage", "start_ms", "end_ms", "unit", "policy_version"):
        assert found[name] == own[name], name
    refused = client.get("/clusters/north/v1/windows?size=4h&at=2026-10-01T03:07:00Z")
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[1]) == (422, "unsupported-question")
