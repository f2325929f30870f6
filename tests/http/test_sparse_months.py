"""Every page, format, message and listing command for months with hardly anything in them: nothing, a credit alone, a
correction alone, one team, no team, unpriced time. Each says the same amount due as the statement, or none. So do the
answers in OpenCost's form and the controller's pages, which know the month's own time only."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.testclient import TestClient

from accountant.__main__ import COMMANDS
from accountant.channels.protocol import SEAM, ChannelPlugin
from accountant.compat import opencost_api
from accountant.compat.opencost_api import AllocationSource
from accountant.composition import Service
from accountant.core.periods import Month
from accountant.core.settings import Lake
from accountant.exports.protocol import exports
from accountant.exports.rendering_process import written
from accountant.fleet import fleet_routes
from accountant.fleet.fleet_ledgers import Fleet
from accountant.fleet.fleet_server import FleetService
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.ledger.protocols import Retirement
from accountant.reports import report_builder
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.policy_models import Policy
from agent.wire import Batch
from fairshare.controller.control_loop import ALONE, Controller
from fairshare.controller.policy_file import PolicyLocation
from fairshare.explain.queue_and_pod_explanation import budget_words
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web import policy_pages
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import Previews
from gputally.base.clock import VirtualClock
from gputally.base.money import exact_sum
from gputally.base.plugins import usable
from gputally.base.units import MS_PER_DAY
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.server.https_server import serve
from tests.exports.format_cases import TEXT, cases_of
from tests.fairshare import samples
from tests.fairshare.scheduler_kinds import KINDS
from tests.fairshare.web.controller_pages import quick
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.http.addresses import FIGURES, NO_FIGURES, address
from tests.http.conftest import (
    NOW_MS,
    CommandLine,
    client_of,
    encoded,
    moved,
    pod_minutes,
    settings_in,
)
from tests.plugin_cases import plugin_cases
from tests.plugins.installed import fake_channels

pytestmark = pytest.mark.usefixtures("fake_scheduler")

PRICES = (
    "schema: 1\ncurrency: EUR\nrows:\n  - {id: h100, model: H100, price: 2.40, per: gpu-hour,"
    " valid_from: 2026-01-01, source: contract, as_of: 2026-01-01, basis: gpu-only}\n"
)
ONLY_NOVEMBER = PRICES.replace("valid_from: 2026-01-01,", "valid_from: 2026-01-01, valid_to: 2026-12-01,")
SPACES = "schema: 1\ncluster: prod\nnamespaces:\n  - {name: vision, team: vision}\n  - {name: speech, team: speech}\n"
DECEMBER_MS, JANUARY_MS = 40 * MS_PER_DAY, 70 * MS_PER_DAY
"""From the tests' records of 1 November to a day of December, and from then to one of January, after the grace
period."""
MONTH, BEFORE = "2026-12", "2026-11"
POLICY = Policy.model_validate(
    {
        "queues": [{"name": team, "team": team, "refs": [f"fake:{team}"]} for team in ("vision", "speech")],
        "budgets": [{"name": "vision's", "team": "vision", "limit": "100.00", "currency": "EUR"}],
        "targets": {"fake": {"mode": "weight"}},
    }
)


@dataclass(frozen=True)
class SparseMonth:
    """What a December has in it, and the amounts due that it must lead to.

    before, within: what is reported for November, and for December.
    credited: a credit of 5.00 for the team vision.
    late: what arrives for November after it was closed.
    due: by team, without those that owe nothing.
    not_billed: what no team is billed for.
    spent: of the budget of the team vision; None: not known."""

    due: Mapping[str, str]
    spent: str | None = "0.00"
    before: tuple[Batch, ...] = ()
    within: tuple[Batch, ...] = ()
    credited: bool = False
    late: tuple[Batch, ...] = ()
    prices: str = PRICES
    not_billed: str = "0"


HELD, SPOKEN = pod_minutes(rows=30), pod_minutes(rows=30, namespace="speech")
UNHELD, LATE = pod_minutes(rows=30, namespace=None), pod_minutes(rows=30, node="node-2")
MONTHS: Final[Mapping[str, SparseMonth]] = {
    "nothing": SparseMonth({}, None),
    "a credit only": SparseMonth({"vision": "-5.00"}, None, credited=True),
    "a correction only": SparseMonth({"vision": "1.20"}, None, before=(UNHELD,), late=(LATE,)),
    "one team only": SparseMonth({"vision": "1.20"}, "1.20", within=(HELD,)),
    "no team": SparseMonth({}, within=(UNHELD,), not_billed="1.20"),
    "unpriced time only": SparseMonth({}, None, within=(HELD,), prices=ONLY_NOVEMBER),
    "a credit beside another team's time": SparseMonth(
        {"speech": "1.20", "vision": "-5.00"}, within=(SPOKEN,), credited=True
    ),
}


@dataclass(frozen=True, eq=False)
class Running:
    """An accountant with one of the months."""

    month: SparseMonth
    service: Service
    client: TestClient
    clock: VirtualClock
    controllers: dict[str, str] = field(default_factory=dict)
    """The controller's pages in the month, by route, and what it explains of budgets."""

    @lru_cache  # noqa: B019 - it lives as long as the module's fixture
    def report(self, team: str | None) -> Report:
        month, settings = Month.parse(MONTH), self.service.settings
        return report_builder.report(
            self.service.ledger, self.service.books, *month.span(settings.zone), settings.timezone, month=month,
            team=team, listing=ChargeListing(settings.issuer, settings.exported_labels),
        )  # fmt: skip

    def due(self, team: str | None = None) -> dict[str, Decimal]:
        return {name: Decimal(due) for name, due in self.month.due.items() if team in (None, name)}

    def deliver(self, *batches: Batch) -> None:
        for batch in batches:
            self.client.post("/v1/usage", content=encoded(batch)).raise_for_status()

    def post(self, path: str, **content: Any) -> None:
        self.client.post(path, json={"reason": "a test", **content}).raise_for_status()


CONTROLLER: Final[Mapping[str, str]] = {
    "/shares": "", "/shares/shares.csv": "", "/shares/queue/": "vision", "/shares/decisions": "",
    "/shares/decision": "?id=none&at=1", "/shares/policy": "", "/shares/preview/": "none",
}  # fmt: skip
"""The rest of the addresses of the controller's pages."""


def controllers_pages(service: Service, clock: VirtualClock, folder: Path) -> dict[str, str]:
    """Return the pages of a controller that asks this accountant, by route, and what it explains of budgets."""
    scene, policy = ReportCache(), folder / "policy-of-controller.yaml"
    policy.write_text(POLICY.model_dump_json())
    cluster = MemoryCluster(KINDS, samples.cluster_objects())
    with serve(service.app, "127.0.0.1", 0) as url, AccountantApi(url) as api:
        controller = Controller(
            POLICY, api, cluster, clock, observe=lambda report: scene.observe(report, POLICY), term=lambda: ALONE
        )
        controller.cycle()
        history, place = QueueHistory(api, clock), PolicyLocation(policy)
        context = PageContext(scene, history, Previews(quick), place, clock, 600.0, lambda *said: None, url)
        client = TestClient(PagesApp(context, PageAuthentication(None, None), policy_pages.ROUTES).observed())
        answers = {route: client.get(route + rest, headers={"host": "localhost"}) for route, rest in CONTROLLER.items()}
        budgets = " ".join(budget_words(api.budgets()))
    assert {route: answer.text for route, answer in answers.items() if answer.status_code not in (200, 404)} == {}
    return {route: answer.text for route, answer in answers.items()} | {"budgets": budgets}


@pytest.fixture(scope="module", params=MONTHS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    month, folder, clock = MONTHS[request.param], tmp_path_factory.mktemp("month"), VirtualClock(NOW_MS)
    with ExitStack() as stack:
        (folder / "path").mkdir()
        places: dict[str, object] = {
            one.NAME: stack.enter_context(one.destination(folder))
            for one in plugin_cases("channels", "destination").values()
        }
        assert places.keys() == usable(SEAM, ChannelPlugin).keys(), "a new kind of destination needs a module"
        stack.enter_context(fake_channels(folder / "path"))
        places["shelf"] = {"path": str(folder)}
        order = {"when": "ended", "forms": [TEXT.name], "to": list(places)}
        orders = {
            "destinations": {kind: {kind: place} for kind, place in places.items()},
            "reports": [order, order | {"each_team": True, "to": ["shelf"]}],
        }
        settings = settings_in(
            folder, prices=month.prices, inventory=SPACES, deliveries=json.dumps(orders),
            lake=Lake(warehouse=str(folder)),
            policy=POLICY.model_dump_json(),
        )  # fmt: skip
        with Service(settings, clock) as service, client_of(service) as client:
            found = Running(month, service, client, clock)
            found.deliver(*month.before)
            clock.advance(DECEMBER_MS)
            if month.late:
                service.ledger.retire(Retirement(node="node-1"), NOW_MS, clock.wall_ms(), "ada", "sold")
                found.post(f"/v1/periods/{BEFORE}/close", acknowledge=["coverage", "unpriced"])
                found.deliver(*month.late)
                service.ledger.retire(Retirement(node="node-2"), NOW_MS, clock.wall_ms(), "ada", "sold")
                (late,) = found.client.get("/v1/proposals").json()
                found.post(f"/v1/periods/{BEFORE}/proposals/{late['id']}/take")
            found.deliver(*(moved(batch, DECEMBER_MS) for batch in month.within))
            if month.credited:
                found.post("/v1/adjustments", month=MONTH, team="vision", amount="-5.00", approved_by="cfo")
            found.controllers.update(controllers_pages(service, clock, folder))
            clock.advance(JANUARY_MS - DECEMBER_MS)
            yield found


def test_the_statement_has_the_amounts_due(running: Running) -> None:
    stated = running.client.get(f"/v1/statement?month={MONTH}").json()
    assert {team: Decimal(due) for team, due in stated["due"].items() if Decimal(due)} == running.due()


@pytest.mark.parametrize("route", sorted([*FIGURES, *NO_FIGURES]))
def test_every_address_answers(running: Running, route: str) -> None:
    answer = running.client.get(address(route, MONTH).replace("{at_ms}", "1").replace("{number}", "1"))
    assert answer.status_code in (200, 404) if route in FIGURES else answer.status_code < 500, answer.text[:500]
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert not re.search(r"\b(None|nan|Decimal)\b", answer.text), route


def test_every_page_of_the_controller_has_a_row() -> None:
    assert CONTROLLER.keys() == {page.prefix for page in policy_pages.ROUTES if page.method == "GET"}


def test_the_controller_has_the_amount_spent_of_a_budget(running: Running) -> None:
    texts = running.controllers
    assert not {route for route, text in texts.items() if re.search(r"\b(None|nan|Decimal)\b", text)}
    spent = re.search(r"([\d.]+) of 100\.00 EUR", texts["budgets"])
    assert texts["budgets"]
    assert (None if spent is None else spent[1]) == running.month.spent


OPENCOST: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(("/allocation", "/allocation/compute", "/allocation/summary", "/allocation/compute/summary"),
                    "window=2026-12-01T00:00:00Z,2027-01-01T00:00:00Z&aggregate=namespace&includeIdle=true"),
    "/allocation/autocomplete": "window=30d&field=namespace", "/assets": "window=30d", "/clusterInfo": None,
    "/getConfigs": None, **dict.fromkeys(opencost_api._EMPTY, None), "/healthz": None,
}  # fmt: skip
"""The questions of OpenCost's interface; None: without parameters."""


@pytest.fixture(scope="module")
def opencost(running: Running) -> TestClient:
    service = running.service
    source = AllocationSource(service.ledger, running.clock, service.book, "prod", service.settings.limits)
    return TestClient(opencost_api.create_app(source))


def test_every_question_of_opencosts_interface_has_a_row(running: Running, opencost: TestClient) -> None:
    served = {str(route.path).removeprefix("/model") for route in opencost.app.routes}  # type: ignore[attr-defined]
    assert served - {"/docs", "/redoc", "/docs/oauth2-redirect"} == OPENCOST.keys()


@pytest.mark.parametrize("route", OPENCOST)
def test_opencosts_interface_has_the_costs_of_the_months_own_time(
    running: Running, opencost: TestClient, route: str
) -> None:
    answer = opencost.get(route, params=OPENCOST[route] or "")
    assert answer.status_code == 200, answer.text[:500]
    assert not re.search(r"\b(None|NaN|Infinity)\b", answer.text)
    if route.startswith("/allocation") and OPENCOST[route] and "includeIdle" in OPENCOST[route]:
        sets = answer.json()["data"]
        sets = [one["allocations"] for one in sets["sets"]] if isinstance(sets, dict) else sets
        costs = [Decimal(str(one["gpuCost"])) for one_set in sets for one in (one_set or {}).values()]
        own = [Decimal(due) for due in running.month.due.values() if Decimal(due) > 0] if running.month.within else []
        assert exact_sum(costs) == exact_sum([*own, Decimal(running.month.not_billed)])


def total(amounts: Mapping[str, Any]) -> Decimal:
    return exact_sum(Decimal(str(amount)) for amount in amounts.values())


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


DUE = cases_of("DUE")


def test_every_format_has_a_row() -> None:
    assert DUE.keys() == set(exports())


@pytest.mark.parametrize("team", [None, "vision"])
@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.real if form == "pdf" else ()) for form in DUE])
def test_every_format_states_the_same_amount_due(running: Running, form: str, team: str | None) -> None:
    """A file of all charges has those that no team is billed for too."""
    stated, due = DUE[form](written(form, running.report(team))), total(running.due(team))
    charges = due + Decimal(running.month.not_billed) if team is None else due
    assert stated in (due, charges, None)
    assert stated is not None or form in ("html", "pdf") or not running.due(team)
    assert stated is not None or form == "pdf" or not (running.month.credited or running.month.late)


LISTED: Final[Mapping[str, tuple[str, ...] | None]] = {
    **dict.fromkeys(
        ("months", "proposals", "corrections", "adjustments", "prices", "gpus", "backups", "deliveries", "check",
         "budgets", "guarantees"), ()
    ),
    **dict.fromkeys(("usage", "cost", "waits", "jobs", "nodes"), ("--start", MONTH, "--end", "2027-01-01")),
    "report": (MONTH, "--format", TEXT.name), "changes": (MONTH,),
    "credit": ("node-1", "--start", MONTH, "--end", "2026-12-02"),
    **dict.fromkeys(
        ("draft", "close", "reopen", "publish", "correct", "adjust", "reprice", "reconcile", "retire", "clock",
         "backup", "restore", "serve", "token", "install", "fleet", "mcp"), None,
    ),
}  # fmt: skip
"""The arguments with which a command lists something of the month; None: it does something else. The imports of
histories, which plug-ins bring, list nothing."""


def test_every_command_has_a_row() -> None:
    assert LISTED.keys() == {name for _, names in COMMANDS for name in names}


@pytest.fixture(scope="module")
def url(running: Running) -> Iterator[str]:
    with serve(running.service.app, "127.0.0.1", 0) as found:
        yield found


@pytest.mark.parametrize("name", [name for name, arguments in LISTED.items() if arguments is not None])
def test_every_command_answers(running: Running, url: str, run_command: CommandLine, name: str) -> None:
    for output in () if name == "report" else ("table", "json", "csv"):
        code, out, err = run_command.at(url)(name, *(LISTED[name] or ()), "--output", output)
        assert (code, err.count("\n")) in ((0, err.count("\n")), (1, 1)), (name, output, err)
        assert code == 1 or output != "json" or json.loads(out) is not None


def test_every_message_arrives(running: Running) -> None:
    assert running.service.deliveries is not None
    running.service.deliveries.run()
    states = {one.key: (one.outcome, one.detail) for one in running.service.deliveries.known()}
    assert {outcome for outcome, _ in states.values()} == {"delivered"}, states
    whole = [key for key in states if "vision" not in key and "speech" not in key]
    destinations = {one.NAME for one in plugin_cases("channels", "destination").values()} | {"shelf"}
    assert sorted(key.split("/")[3] for key in whole) == sorted(destinations)
    assert {team for team in ("vision", "speech") if any(team in key for key in states)} == running.due().keys() | (
        {"vision"} if HELD in running.month.within else set()
    )


FLEET: Final[Mapping[str, str | None]] = {
    "/fleet": "month=MONTH", "/fleet/team/{team:path}": "month=MONTH", **dict.fromkeys(
        ("/fleet/jobs", "/fleet/jobs.csv", "/fleet/jobs.parquet", "/fleet/nodes", "/fleet/nodes.csv",
         "/fleet/nodes.parquet"), "start=MONTH-01"
    ),
    "/v1/ledgers": "", "/v1/usage": "start=2026-12-01", "/v1/cost": "start=2026-12-01", "/v1/report": "month=MONTH",
    **dict.fromkeys(("/", "/livez", "/readyz", "/metrics"), None),
}  # fmt: skip
"""The fleet's addresses with their parameters; None: without figures."""


def test_every_address_of_a_fleet_has_a_row() -> None:
    assert FLEET.keys() == {route.path for route in fleet_routes.ROUTES}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def fleet(running: Running) -> Iterator[TestClient]:
    running.service.publish()
    assert running.service.settings.lake is not None
    engine = DuckDbEngine(Catalogue.connect(running.service.settings.lake))
    served = FleetService(running.service.settings, Fleet(engine), running.clock)
    yield TestClient(served.app, base_url="http://127.0.0.1")
    engine.close()


@pytest.mark.real
def test_every_address_of_a_fleet_answers(running: Running, fleet: TestClient) -> None:
    asked = [
        f"{route.replace('{team:path}', 'vision')}?{query.replace('MONTH', MONTH)}"
        for route, query in FLEET.items() if query is not None
    ]  # fmt: skip
    asked += [f"/v1/report?month={MONTH}&format={form}" for form in DUE if form != "pdf"]
    answers = {path: fleet.get(path) for path in asked}
    assert {path: answer.text for path, answer in answers.items() if answer.status_code not in (200, 404)} == {}
    (row,) = answers[f"/v1/report?month={MONTH}"].json()["ledgers"]
    assert Decimal(row["due"]) == total(running.due())
