"""The accountant's metrics: names, the last settled quarter-hour, the month, and the costs of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from accountant.api import ledger_metrics
from accountant.api.ledger_metrics import CACHE_MS
from accountant.composition import Service
from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import JobMetrics
from accountant.ledger.protocols import NodeFacts
from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, US_PER_MS
from tests.http.conftest import H100, HOUR_US, MINUTE_MS, NOW_MS, encoded, pod_minutes, usage_line
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

GOLDEN = {
    "gputally_budget_exhausted_timestamp_seconds": ("gauge", set()),
    "gputally_budget_forecast_ratio": ("gauge", set()),
    "gputally_budget_spent_ratio": ("gauge", set()),
    "gputally_budget_limit": ("gauge", set()),
    "gputally_node_info": ("gauge", set()),
    "gputally_queue_info": ("gauge", set()),
    "gputally_month_namespace_gpu_seconds": ("gauge", {"team", "namespace"}),
    "gputally_ingest_rows": ("counter", {"result"}),
    "gputally_ingest_over_quota_records": ("counter", {"quota"}),
    "gputally_ingest_batches": ("counter", {"code"}),
    "gputally_ingest_commit_seconds": ("histogram", {"le"}),
    "gputally_ledger_up": ("gauge", set()),
    "gputally_ledger_coverage_ratio": ("gauge", set()),
    "gputally_ledger_watermark_timestamp_seconds": ("gauge", set()),
    "gputally_ledger_imbalance_seconds": ("gauge", set()),
    "gputally_ledger_quarantined_rows": ("gauge", set()),
    "gputally_ledger_wal_bytes": ("gauge", set()),
    "gputally_ledger_room_bytes": ("gauge", set()),
    "gputally_capacity_gpus": ("gauge", {"gpu_model", "pool"}),
    "gputally_unpriced_gpus": ("gauge", {"gpu_model", "pool"}),
    "gputally_burn_rate_per_hour": ("gauge", {"team", "currency"}),
    "gputally_unmetered_gpus": ("gauge", {"node"}),
    "gputally_account_gpus": ("gauge", {"account", "gpu_model"}),
    "gputally_team_gpus": ("gauge", {"team", "account"}),
    "gputally_month_account_gpu_seconds": ("gauge", {"account", "gpu_model"}),
    "gputally_month_team_gpu_seconds": ("gauge", {"team", "account"}),
    "gputally_month_team_cost": ("gauge", {"team", "currency"}),
    "gputally_accountant_build_info": ("gauge", {"version"}),
}


@pytest.fixture
def scrape():
    def families(running):
        text = running.client.get("/metrics").text
        return {
            family.name: family
            for family in text_string_to_metric_families(text)
            if not family.name.endswith("_created")
        }

    return families


def value(family, **labels):
    found = [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]
    assert len(found) == 1, family.samples
    return found[0]


def test_the_names_are_those_that_dashboards_and_alerts_were_written_for(accountant, scrape):
    running = accountant()
    running.ledger.span = (BEGIN, NOW_MS)
    running.client.post("/v1/usage", content=encoded(pod_minutes()))
    seen = {
        name: (family.type, set().union(*(sample.labels for sample in family.samples)))
        for name, family in scrape(running).items()
    }
    assert seen == GOLDEN
    assert running.client.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_naming_rules_of_prometheus_are_kept(accountant, scrape):
    """Source: prometheus.io/docs/practices/naming, as `promtool check metrics` applies them."""
    for name, family in scrape(accountant()).items():
        assert re.fullmatch(r"gputally_[a-z]+(_[a-z]+)*", name), name
        assert family.documentation.endswith("."), name
        assert not re.search(r"_(ms|us|millis|kb|mb|percent|count|sum|bucket)$", name), name
        assert family.type == "counter" or not name.endswith("_total"), name
        for sample in family.samples:
            assert (
                sample.name.removesuffix("_created") == name
                or family.type != "counter"
                or sample.name == name + "_total"
            )
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels), sample


def test_the_figures_are_the_ledgers(accountant, scrape):
    families = scrape(accountant())
    busy = families["gputally_month_account_gpu_seconds"]
    assert value(busy, account="busy", gpu_model=H100) == 4 * 3600
    assert value(busy, account="down", gpu_model=H100) == 0
    assert value(families["gputally_month_team_gpu_seconds"], team="speech", account="allocated_idle") == 3600
    assert value(families["gputally_month_team_cost"], team="vision", currency="EUR") == 7.5
    assert value(families["gputally_ledger_up"]) == 1
    assert value(families["gputally_ledger_quarantined_rows"]) == 1
    assert value(families["gputally_ledger_wal_bytes"]) == 4096
    assert value(families["gputally_ledger_room_bytes"]) == 2**30


def test_unpriced_teams_have_no_cost_rather_than_none_of_it(accountant, scrape):
    assert scrape(accountant(prices=None))["gputally_month_team_cost"].samples == []


def test_a_scrape_reads_the_ledger_at_most_once_in_a_while(accountant, ledger, scrape):
    running = accountant()
    first = value(scrape(running)["gputally_month_team_cost"], team="speech")
    ledger.lines.append(usage_line("speech", busy=HOUR_US))
    assert value(scrape(running)["gputally_month_team_cost"], team="speech") == first
    running.clock.advance(CACHE_MS)
    assert value(scrape(running)["gputally_month_team_cost"], team="speech") == first + 2.5


def test_the_month_is_what_the_ledger_says_of_it_now(accountant, ledger, scrape):
    """Late rows reduce `unmetered`. A counter would stay high until a restart and then fall, which Prometheus would
    count as a second month."""
    running = accountant()
    name = "gputally_month_account_gpu_seconds"
    assert value(scrape(running)[name], account="unmetered", gpu_model=H100) == 3600
    ledger.lines[0] = UsageLine(key=ledger.lines[0].key, accounts_gpu_us=Accounts(unallocated=5 * HOUR_US))
    running.clock.advance(CACHE_MS)
    after = scrape(running)[name]
    assert value(after, account="unmetered", gpu_model=H100) == 0
    assert value(after, account="unallocated", gpu_model=H100) == 5 * 3600
    assert sum(sample.value for sample in after.samples) == sum(
        line.accounts_gpu_us.total / 1_000_000 for line in ledger.lines
    )


def test_what_a_month_has_cost_may_fall(accountant, ledger, scrape):
    running = accountant()
    before = value(scrape(running)["gputally_month_team_cost"], team="speech")
    ledger.lines[:] = [line for line in ledger.lines if line.key["team"] != "speech"]
    ledger.lines.append(usage_line("speech", busy=1))
    running.clock.advance(CACHE_MS)
    assert value(scrape(running)["gputally_month_team_cost"], team="speech") < before


def test_an_unreadable_ledger_is_said_and_leaves_the_process_its_own_figures(accountant, scrape):
    running = accountant()
    running.ledger.trouble = LedgerUnavailable("closing")
    families = scrape(running)
    assert value(families["gputally_ledger_up"]) == 0
    assert "gputally_month_team_cost" not in families
    assert "gputally_ingest_rows" in families


GPU_US = BUCKET_MS * US_PER_MS
"""One GPU over the quarter."""
QUARTER_END_MS = 1_794_000_000_000


def on_node(team: str, model: str, node: str = "n1", **accounts: int) -> UsageLine:
    key = {"team": team, "gpu_model": model, "pool": "train", "node": node}
    return UsageLine(key=key, accounts_gpu_us=Accounts(**{name: gpus * GPU_US for name, gpus in accounts.items()}))


def shown(families: Iterable[object]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("gputally_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples  # type: ignore[attr-defined]
    }


@pytest.fixture
def quarter(ledger):
    ledger.span = (QUARTER_END_MS - BUCKET_MS, QUARTER_END_MS)
    ledger.lines[:] = [
        on_node("vision", H100, busy=3, allocated_idle=1),
        on_node("__idle__", H100, unallocated=2, down=1),
        on_node("vision", "Tesla T4", busy=5),
    ]
    return ledger


@pytest.fixture
def seen(quarter, book):
    return shown(ledger_metrics.families(quarter, book, QUARTER_END_MS, "UTC"))


def test_capacity_counts_every_account(seen):
    assert seen["capacity_gpus", H100, "train"] == 7
    assert seen["capacity_gpus", "Tesla T4", "train"] == 5


def test_the_accounts_of_the_quarter_add_up_to_the_capacity(seen):
    accounts = {key[1:]: gpus for key, gpus in seen.items() if key[0] == "account_gpus"}
    assert accounts["busy", "Tesla T4"] == 5
    assert accounts["down", H100] == 1
    for model in (H100, "Tesla T4"):
        assert sum(gpus for (_, of), gpus in accounts.items() if of == model) == seen["capacity_gpus", model, "train"]
    assert seen["team_gpus", "vision", "busy"] == 8
    assert seen["team_gpus", "vision", "allocated_idle"] == 1
    assert ("team_gpus", "vision", "unallocated") not in seen


def test_the_burn_rate_is_price_times_gpus_and_idle_capacity_has_its_own(seen):
    assert seen["burn_rate_per_hour", "vision", "EUR"] == 4 * 2.5
    assert seen["burn_rate_per_hour", "__idle__", "EUR"] == 2 * 2.5


def test_gpus_without_a_price_are_counted_and_priced_ones_are_zero(quarter, seen):
    assert seen["unpriced_gpus", "Tesla T4", "train"] == 5
    assert seen["unpriced_gpus", H100, "train"] == 0
    without = shown(ledger_metrics.families(quarter, None, QUARTER_END_MS, "UTC"))
    assert without["unpriced_gpus", H100, "train"] == 6
    assert not [key for key in without if key[0] == "burn_rate_per_hour"]


def test_the_nodes_that_lack_most_are_named_and_no_more(quarter):
    quarter.lines[:] = [on_node("__idle__", "T4", f"n{i:03}", unmetered=1 + (i == 150)) for i in range(200)]
    seen = shown(ledger_metrics.families(quarter, None, QUARTER_END_MS, "UTC"))
    nodes = {key[1]: value for key, value in seen.items() if key[0] == "unmetered_gpus"}
    assert len(nodes) == ledger_metrics.MOST_NODES
    assert nodes["n150"] == 2


def test_nodes_queues_and_namespaces_are_told_for_joins():
    nodes = [
        NodeFacts("c", "n1", pool="train", region="eu", capacity_type="spot"),
        NodeFacts("c", "gone", pool="train", deleted_ms=QUARTER_END_MS),
    ]
    assert shown([ledger_metrics.of_nodes(nodes, QUARTER_END_MS)]) == {("node_info", "n1", "train", "eu", "spot"): 1}
    policy = Policy.model_validate(
        {"queues": [{"name": "all", "team": "hall"}, {"name": "nlp", "parent": "all"}, {"name": "own", "team": "me"}]}
    )
    assert shown([ledger_metrics.of_queues(policy)]) == {
        ("queue_info", "all", "", "hall"): 1,
        ("queue_info", "nlp", "all", "hall"): 1,
        ("queue_info", "own", "", "me"): 1,
    }
    assert shown([ledger_metrics.of_queues(None)]) == {}


def test_of_namespaces_those_that_held_most_are_told():
    def held(team: str, namespace: str, gpus: int) -> UsageLine:
        return UsageLine(key={"team": team, "namespace": namespace}, accounts_gpu_us=Accounts(allocated_idle=gpus))

    lines = [held("t", f"n{i:03}", i) for i in range(ledger_metrics.MOST_NAMESPACES + 10)] + [held("__idle__", "", 999)]
    told = dict(ledger_metrics.of_namespaces(lines))
    assert len(told) == ledger_metrics.MOST_NAMESPACES
    assert ("t", "n009") not in told
    assert told["t", "n010"] == 10
    assert ("__idle__", "") not in told


def test_a_budget_is_told_with_the_team_that_pays(accountant, ledger):
    budgets = [
        {"name": "nlp-money", "queue": "nlp", "limit": 10, "currency": "EUR"},
        {"name": "x", "team": "speech", "limit": 4},
    ]
    policy = Policy.model_validate({"queues": [{"name": "nlp", "team": "hall"}], "budgets": budgets})
    ledger.put_policy(policy, 0)
    text = accountant().client.get("/metrics").text
    assert 'gputally_budget_limit{budget="nlp-money",queue="nlp",team="hall",unit="EUR"} 10.0' in text
    assert 'gputally_budget_limit{budget="x",queue="",team="speech",unit="GPU-hours"} 4.0' in text
    assert 'gputally_budget_spent_ratio{budget="x",queue="",team="speech"}' in text


BEGIN = NOW_MS - 60 * MINUTE_MS
Series = dict[str, dict[tuple[str, ...], float]]
"""By name; the values of a series' labels in the order of the labels' names."""
Open = Callable[..., Callable[[], Series]]


@pytest.fixture
def scraped(start_service: Callable[..., tuple[Service, TestClient]]) -> Open:
    """Three jobs of an hour on one, two and three GPUs; the first ended half an hour ago."""

    def build(currency: str = "USD", **metrics: object) -> Callable[[], Series]:
        service, client = start_service(
            prices=price_book_text(H100=6, currency=currency), job_metrics=JobMetrics.model_validate(metrics)
        )
        facts, rows = [], []
        for job in range(1, 4):
            ended = BEGIN + 30 * MINUTE_MS if job == 1 else None
            times = {"created_ms": BEGIN, "scheduled_ms": BEGIN, "started_ms": BEGIN, "ended_ms": ended}
            facts.append(pod_facts(f"p{job}", NOW_MS, namespace="vision", workload=f"Job/train-{job}", **times))
            until = NOW_MS if ended is None else ended
            for gpu in range(job):
                holder = pod_holder(f"p{job}", "vision")
                rows += [
                    interval(at, f"g{job}{gpu}", holder, span_ms=MINUTE_MS, gpu_model="H100")
                    for at in range(BEGIN, until, MINUTE_MS)
                ]
        one = batch(rows, facts, cluster="prod")
        service.ingest.submit(msgspec.json.encode(one)).result()

        def scrape() -> Series:
            text = client.get("/metrics").text
            found: Series = {}
            for family in text_string_to_metric_families(text):
                if "job" in family.name:
                    found[family.name] = {tuple(s.labels[k] for k in sorted(s.labels)): s.value for s in family.samples}
            return found

        return scrape

    return build


def test_running_and_just_ended_jobs_with_the_cost_of_their_lives(scraped: Open) -> None:
    found = scraped()()
    assert found == {
        "gputally_job_cost": {
            ("prod", "USD", "vision", "__unassigned__", "Job/train-1"): 3.0,
            ("prod", "USD", "vision", "__unassigned__", "Job/train-2"): 12.0,
            ("prod", "USD", "vision", "__unassigned__", "Job/train-3"): 18.0,
        },
        "gputally_job_series_omitted": {(): 0.0},
    }


def test_a_job_leaves_some_time_after_its_end(scraped: Open, clock: VirtualClock) -> None:
    scrape = scraped(keep="40m")
    assert len(scrape()["gputally_job_cost"]) == 3
    clock.advance(11 * MINUTE_MS)
    assert [labels[4] for labels in scrape()["gputally_job_cost"]] == ["Job/train-2", "Job/train-3"]


def test_the_number_of_series_is_bounded_and_says_so(scraped: Open) -> None:
    found = scraped(most=1)()
    assert [labels[4] for labels in found["gputally_job_cost"]] == ["Job/train-3"], "what burns most stays"
    assert found["gputally_job_series_omitted"] == {(): 2.0}


def test_none_at_all(scraped: Open) -> None:
    assert scraped(most=0)() == {}


def test_the_name_others_use_is_opt_in_and_for_dollars(scraped: Open) -> None:
    found = scraped(training_job_cost_usd=True)()
    assert found["training_job_cost_usd"][("H100", "train-3", "vision", "__unassigned__")] == 18.0
    assert len(found["training_job_cost_usd"]) == 3


def test_a_euro_is_no_dollar(scraped: Open) -> None:
    found = scraped("EUR", training_job_cost_usd=True)()
    assert "training_job_cost_usd" not in found
    assert len(found["gputally_job_cost"]) == 3
