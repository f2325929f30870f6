"""What Prometheus sees: names that do not change, rules of naming, bounded cost, no counter that may fall."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accountant.api.ledger_metrics import CACHE_MS
from accountant.core.errors import LedgerUnavailable
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine

GOLDEN = {
    "gputally_budget_exhausted_timestamp_seconds": ("gauge", set()),
    "gputally_budget_forecast_ratio": ("gauge", set()),
    "gputally_budget_spent_ratio": ("gauge", set()),
    "gputally_budget_limit": ("gauge", set()),
    "gputally_node_info": ("gauge", set()),
    "gputally_queue_info": ("gauge", set()),
    "gputally_month_namespace_gpu_seconds": ("gauge", {"team", "namespace"}),
    "gputally_ingest_rows": ("counter", {"result"}),
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
    "gputally_unmetered_gpus": ("gauge", set()),
    "gputally_account_gpus": ("gauge", {"account", "gpu_model"}),
    "gputally_team_gpus": ("gauge", {"team", "account"}),
    "gputally_month_account_gpu_seconds": ("gauge", {"account", "gpu_model"}),
    "gputally_month_team_gpu_seconds": ("gauge", {"team", "account"}),
    "gputally_month_team_cost": ("gauge", {"team", "currency"}),
    "gputally_accountant_build_info": ("gauge", {"version"}),
}


@pytest.fixture
def scrape():
    def families(opened):
        text = opened.client.get("/metrics").text
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


def test_the_names_are_those_that_dashboards_and_alerts_were_written_for(door, kit, scrape):
    opened = door()
    opened.client.post("/v1/usage", content=kit.encoded(kit.batch()))
    seen = {
        name: (family.type, set().union(*(sample.labels for sample in family.samples)))
        for name, family in scrape(opened).items()
    }
    assert seen == GOLDEN
    assert opened.client.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_naming_rules_of_prometheus_are_kept(door, scrape):
    """Source: prometheus.io/docs/practices/naming, as `promtool check metrics` holds them."""
    for name, family in scrape(door()).items():
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


def test_the_figures_are_the_ledgers(door, kit, scrape):
    families = scrape(door())
    busy = families["gputally_month_account_gpu_seconds"]
    assert value(busy, account="busy", gpu_model="NVIDIA H100 80GB HBM3") == 4 * 3600
    assert value(busy, account="down", gpu_model="NVIDIA H100 80GB HBM3") == 0
    assert value(families["gputally_month_team_gpu_seconds"], team="speech", account="allocated_idle") == 3600
    assert value(families["gputally_month_team_cost"], team="vision", currency="EUR") == 7.5
    assert value(families["gputally_ledger_up"]) == 1
    assert value(families["gputally_ledger_quarantined_rows"]) == 1
    assert value(families["gputally_ledger_wal_bytes"]) == 4096
    assert value(families["gputally_ledger_room_bytes"]) == 2**30


def test_unpriced_teams_have_no_cost_rather_than_none_of_it(door, scrape):
    assert scrape(door(prices=None))["gputally_month_team_cost"].samples == []


def test_a_scrape_reads_the_ledger_at_most_once_in_a_while(door, ledger, scrape):
    opened = door()
    first = value(scrape(opened)["gputally_month_team_cost"], team="speech")
    ledger.lines.append(
        UsageLine(key={"team": "speech", "gpu_model": "H100"}, accounts_gpu_us=Accounts(busy=3_600_000_000))
    )
    assert value(scrape(opened)["gputally_month_team_cost"], team="speech") == first
    opened.clock.advance(CACHE_MS)
    assert value(scrape(opened)["gputally_month_team_cost"], team="speech") == first + 2.5


def test_the_month_is_what_the_ledger_says_of_it_now(door, ledger, kit, scrape):
    """Late rows take time out of `unmetered`. As counters these would stay high until a restart, and then fall: to
    Prometheus a second month on top of the first."""
    opened = door()
    name, h100 = "gputally_month_account_gpu_seconds", "NVIDIA H100 80GB HBM3"
    assert value(scrape(opened)[name], account="unmetered", gpu_model=h100) == 3600
    ledger.lines[0] = UsageLine(key=ledger.lines[0].key, accounts_gpu_us=Accounts(unallocated=5 * kit.hour_us))
    opened.clock.advance(CACHE_MS)
    after = scrape(opened)[name]
    assert value(after, account="unmetered", gpu_model=h100) == 0
    assert value(after, account="unallocated", gpu_model=h100) == 5 * 3600
    assert sum(sample.value for sample in after.samples) == sum(
        line.accounts_gpu_us.total / 1_000_000 for line in ledger.lines
    )


def test_what_a_month_has_cost_may_fall(door, ledger, scrape):
    opened = door()
    before = value(scrape(opened)["gputally_month_team_cost"], team="speech")
    ledger.lines[:] = [line for line in ledger.lines if line.key["team"] != "speech"]
    ledger.lines.append(UsageLine(key={"team": "speech", "gpu_model": "H100"}, accounts_gpu_us=Accounts(busy=1)))
    opened.clock.advance(CACHE_MS)
    assert value(scrape(opened)["gputally_month_team_cost"], team="speech") < before


def test_an_unreadable_ledger_is_said_and_leaves_the_process_its_own_figures(door, scrape):
    opened = door()
    opened.ledger.trouble = LedgerUnavailable("closing")
    families = scrape(opened)
    assert value(families["gputally_ledger_up"]) == 0
    assert "gputally_month_team_cost" not in families
    assert "gputally_ingest_rows" in families
