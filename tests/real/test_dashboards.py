"""Every query of every dashboard on a real Prometheus 3 with the metrics of a demo's programs, and the ten most
important panels against the ledger itself."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any

import pytest

# Brought by the group `real`; this module is collected by `make test` too, where it is deselected.
pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

from accountant.api.ledger_metrics import SETTLE_MS
from accountant.billing import usage_pricing
from accountant.ledger.usage import coverage
from accountant.prices.price_book import PriceBook, load
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from dashboards import lint
from dashboards.__main__ import DASHBOARDS
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, US_PER_MS
from gputally.demo.accountant_process import PRICE_BOOK
from gputally.demo.pipeline import Pipeline
from gputally.server import logs_and_metrics
from tests.browser.demo_pages import chromium
from tests.moments import present
from tests.real import prometheus_history
from tests.real.dashboard_preview import RATE_HOURS, WIDTH, answers, drawn, sent
from tests.real.prometheus import Prometheus, backfill, prometheus
from tests.restored_logging import restored_logging

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

DAYS = 1
US_PER_HOUR = MS_PER_HOUR * US_PER_MS


@dataclass(frozen=True)
class Filled:
    """A Prometheus with the demo's history, and the demo with its ledger."""

    server: Prometheus
    demo: Pipeline

    @property
    def end_s(self) -> float:
        return self.demo.scenario.end_ms / 1000

    def now(self, panel: str, query: int = 0, **chosen: str) -> list[dict[str, Any]]:
        """Return the series of a panel's query at the end, with these variables and otherwise the demo's cluster."""
        expr = PANELS[panel]["targets"][query]["expr"]
        return self.server.instant(sent(expr, DAYS, cluster="demo", **chosen), self.end_s)

    def figure(self, panel: str, query: int = 0, **chosen: str) -> float:
        """Return the only value of a panel."""
        (series,) = self.now(panel, query, **chosen)
        return float(series["value"][1])

    def by(self, label: str, panel: str, query: int = 0, **chosen: str) -> dict[str, float]:
        """Return the values by a label."""
        return {each["metric"][label]: float(each["value"][1]) for each in self.now(panel, query, **chosen)}


BOARDS = {name: json.loads(render()) for name, render in DASHBOARDS.items()}
PANELS = {f"{name}/{panel['title']}": panel for name, board in BOARDS.items() for panel in lint.panels(board)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("dashboards")
    (folder / "demo").mkdir()
    recorder = prometheus_history.Recorder()
    with restored_logging(), prometheus_history.pipeline(folder / "demo", DAYS) as demo:
        logs_and_metrics.configure("error")
        prometheus_history.scraped(recorder, demo)
        prometheus_history.staged(recorder, demo.scenario.start_ms, DAYS * 24)
        backfill(recorder.openmetrics(), folder)
        # What was seen last counts until the next scrape.
        with prometheus(
            folder, arguments=[f"--query.lookback-delta={60 * prometheus_history.EVERY_HOURS + 5}m"]
        ) as server:
            yield Filled(server, demo)


@pytest.mark.parametrize("title", sorted(PANELS))
def test_every_panel_shows_something_with_the_labels_that_its_legend_names(filled: Filled, title: str) -> None:
    panel, shown = PANELS[title], set[str]()
    for target in panel["targets"]:
        expr = sent(target["expr"], DAYS)
        if target["instant"]:
            series = filled.server.instant(expr, filled.end_s)
        else:
            series = filled.server.range(
                expr, filled.end_s - DAYS * 86_400, filled.end_s, prometheus_history.EVERY_HOURS * 3600
            )
        assert series, expr
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(wanted <= set(each["metric"]) for each in series), expr
        shown |= {label for each in series for label in each["metric"]}
    assert columns(panel) <= shown


def columns(panel: dict[str, Any]) -> set[str]:
    """Return the labels with columns in a table. An empty label does not exist, so a row may lack it."""
    if panel["type"] != "table":
        return set()
    renamed: dict[str, str] = panel["transformations"][1]["options"]["renameByName"]
    return {label for label in renamed if not label.startswith("Value")}


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_every_choice_offers_something(filled: Filled, name: str) -> None:
    for variable in BOARDS[name]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        query = sent(variable["query"]["query"], DAYS)
        if query.startswith("query_result("):
            assert filled.server.instant(query.removeprefix("query_result(").removesuffix(")"), filled.end_s)
        else:
            selector, label = query.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            found = filled.server.instant(f"group by ({label}) ({selector})", filled.end_s)
            assert {each["metric"].get(label, "") for each in found} - {""}, query


def test_grafanas_own_panels_draw_every_dashboard(filled: Filled, tmp_path: Path) -> None:
    with chromium() as browser:
        for board in BOARDS.values():
            found = answers(filled.server, board, filled.end_s, DAYS)
            page, faults = drawn(browser, board, found, filled.end_s, DAYS, tmp_path)
            assert faults == []
            shown = page.locator("[data-panel]:not([data-panel=row])")
            assert shown.count() == len(lint.panels(board))
            assert page.locator("[data-panel]", has_text="no data").count() == 0
            lines = page.locator("[data-panel=timeseries]")
            assert page.locator("[data-panel=timeseries] canvas").count() == lines.count()
            assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
            page.close()


# --- the ten most important panels: what they show is what the ledger says ----------------------------


@dataclass(frozen=True)
class Truth:
    """Queries a copy of the ledger about the demo's month, up to the time until which figures are settled."""

    demo: Pipeline
    ledger: DuckLedger
    book: PriceBook

    @property
    def settled_ms(self) -> int:
        return self.demo.scenario.end_ms - SETTLE_MS

    def by(self, *dimensions: Dimension, start_ms: int | None = None, end_ms: int | None = None) -> dict[Any, Accounts]:
        """Return the accounts by the values of one dimension, or of several as a tuple."""
        start = self.demo.scenario.start_ms if start_ms is None else start_ms
        lines = present(self.ledger).usage((start, end_ms or self.settled_ms), dimensions).lines()
        keys = [tuple(line.key[name] for name in dimensions) for line in lines]
        return {key[0] if len(key) == 1 else key: line.accounts_gpu_us for key, line in zip(keys, lines, strict=True)}

    def cost(self, start_ms: int) -> dict[str, float]:
        """Return the cost by team."""
        answer = usage_pricing.cost(present(self.ledger), self.book, start_ms, self.settled_ms, ("team",))
        return {line.key["team"]: float(line.cost or 0) for line in answer.lines}


@pytest.fixture(scope="module")
def truth(filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    folder = tmp_path_factory.mktemp("copy")
    filled.demo.write_files(folder)
    filled.demo.files_written()
    clock = VirtualClock(filled.demo.scenario.end_ms)
    with contextlib.closing(open_ledger(folder / "ledger.duckdb", clock)) as ledger, as_file(PRICE_BOOK) as book:
        yield Truth(filled.demo, ledger, load(book))


def held(accounts: Accounts) -> int:
    return accounts.busy + accounts.allocated_idle + accounts.allocated_unknown


def total(accounts: Sequence[Accounts], name: str) -> int:
    return sum(getattr(each, name) for each in accounts)


def test_gpus(filled: Filled, truth: Truth) -> None:
    start = truth.settled_ms - BUCKET_MS
    capacity = sum(each.total for each in truth.by("gpu_model", start_ms=start).values()) / (BUCKET_MS * US_PER_MS)
    assert filled.figure("cluster/GPUs") == pytest.approx(capacity, rel=1e-9)
    assert capacity == 64


def test_gpu_hours_by_account(filled: Filled, truth: Truth) -> None:
    shown = filled.by("account", "cluster/GPU-hours by account, this month")
    accounts = list(truth.by("gpu_model").values())
    for account, hours in shown.items():
        assert hours == pytest.approx(total(accounts, account) / US_PER_HOUR, rel=1e-9)
    assert shown["busy"] > 100


def test_gpus_by_account(filled: Filled, truth: Truth) -> None:
    shown = filled.by("account", "cluster/GPUs by account")
    accounts = list(truth.by("gpu_model", start_ms=truth.settled_ms - BUCKET_MS).values())
    quarter_us = BUCKET_MS * US_PER_MS
    assert shown == pytest.approx({name: total(accounts, name) / quarter_us for name in shown}, rel=1e-9)
    assert sum(shown.values()) == pytest.approx(filled.figure("cluster/GPUs"), rel=1e-9)


def test_cost_by_team(filled: Filled, truth: Truth) -> None:
    shown = filled.by("team", "cluster/Cost by team, this month")
    booked = truth.cost(filled.demo.scenario.start_ms)
    assert shown == pytest.approx({team: cost for team, cost in booked.items() if team in shown}, rel=1e-9)
    assert sum(shown.values()) == pytest.approx(sum(booked.values()), rel=1e-9)
    assert set(shown) >= {queue.name for queue in filled.demo.scenario.policy.queues} | {"__idle__"}


def test_burn_rate(filled: Filled, truth: Truth) -> None:
    quarter = truth.cost(truth.settled_ms - BUCKET_MS)
    assert filled.figure("cluster/Burn rate") == pytest.approx(4 * sum(quarter.values()), rel=1e-6)


def test_coverage(filled: Filled, truth: Truth) -> None:
    booked = coverage(present(truth.ledger).usage((filled.demo.scenario.start_ms, truth.settled_ms), ()))
    assert filled.figure("health/Coverage") == pytest.approx(booked, rel=1e-9)
    assert filled.figure("cluster/Coverage") == pytest.approx(booked, rel=1e-9)


def test_imbalance(filled: Filled, truth: Truth) -> None:
    assert filled.figure("health/Imbalance") == (
        present(truth.ledger).imbalance(filled.demo.scenario.start_ms, truth.settled_ms).total_us / 1e6
    )
    assert filled.figure("health/Imbalance") == 0


@pytest.mark.parametrize(("panel", "account"), [("cluster/Allocated", "held"), ("cluster/Busy", "busy")])
def test_live_shares_follow_the_ledger(filled: Filled, truth: Truth, panel: str, account: str) -> None:
    """Agents count closed intervals: over the same hours they equal the booked time, up to an interval at either
    end."""
    end = filled.demo.scenario.end_ms
    booked = list(truth.by("gpu_model", start_ms=end - RATE_HOURS * MS_PER_HOUR, end_ms=end).values())
    part = sum(held(each) for each in booked) if account == "held" else total(booked, "busy")
    assert filled.figure(panel) == pytest.approx(part / sum(each.total for each in booked), rel=0.02)


def test_gpu_hours_of_a_team(filled: Filled, truth: Truth) -> None:
    for team, accounts in truth.by("team").items():
        if team != "__idle__":
            shown = filled.figure("team/GPU-hours to date", team=team)
            assert shown == pytest.approx(held(accounts) / US_PER_HOUR, rel=1e-9)
            idle = filled.figure("team/Held idle", team=team)
            assert idle == pytest.approx(accounts.allocated_idle / held(accounts), rel=1e-9)


def test_budgets(filled: Filled, truth: Truth) -> None:
    used = filled.by("budget", "team/Budgets", 1)
    hours = held(truth.by("team")["research"]) / US_PER_HOUR
    assert used["research-hours"] == pytest.approx(hours / 2_000, rel=1e-9)
    first = filled.demo.scenario.policy.queues[0].name
    assert used["vision-money"] == pytest.approx(truth.cost(filled.demo.scenario.start_ms)[first] / 50_000, rel=1e-9)


def test_gpu_hours_by_namespace(filled: Filled, truth: Truth) -> None:
    shown = filled.by("namespace", "team/GPU-hours by namespace, this month")
    booked = {key[1]: held(accounts) / US_PER_HOUR for key, accounts in truth.by("team", "namespace").items() if key[1]}
    assert shown == pytest.approx(booked, rel=1e-9)


def test_actual_shares(filled: Filled, truth: Truth) -> None:
    """A queue's usage of the window in the controller's metrics is the ledger's answer."""
    report = filled.demo.controller.last
    assert report is not None
    assert report.window is not None
    policy = filled.demo.scenario.policy
    window = present(truth.ledger).window(policy.window, report.window.end_ms, policy.measure, policy.min_coverage)
    capacity = window.capacity
    shown = filled.by("queue", "fairshare/Queues", 1)
    assert shown == pytest.approx({queue: used / capacity for queue, used in window.usage.items()}, rel=1e-6)
