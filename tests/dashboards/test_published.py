"""The list that the queries are checked against is what the three programs really expose."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from accountant.metrics import Metrics as AccountantMetrics
from accountant.metrics_ledger import LedgerCollector
from accountant.settings import Settings
from accountant.store import open_ledger
from accountant.wire import UsageWindow
from agent.clock import VirtualClock
from agent.metrics import AgentMetrics
from fairshare.metrics import Metrics as FairshareMetrics
from fairshare.report import CycleReport

NOW_MS = 1_790_000_000_000


def names(families: Iterable[Metric]) -> dict[str, set[str]]:
    """Name as scraped, without the prefix -> label names, which a family without samples knows too."""
    suffixes = {"counter": "_total", "info": "_info"}
    found = {}
    for family in families:
        labels = set(getattr(family, "_labelnames", ()))
        for sample in family.samples:
            labels |= set(sample.labels) - {"le"}
        found[family.name.removeprefix("gputally_") + suffixes.get(family.type, "")] = labels
    return found


def test_the_agent_exposes_what_is_listed(published: dict[str, set[str]]) -> None:
    exposed = {f.name.removeprefix("gputally_"): set(f.labels) for f in AgentMetrics("node", "1").collect()}
    assert {n: labels for n, labels in exposed.items() if n in published} == {
        n: labels for n, labels in published.items() if n in exposed
    }
    missing = {n for n in published if n.startswith(("gpu_", "pod_", "agent_", "collector_"))} - set(exposed)
    assert missing == set()


def test_the_accountant_exposes_what_is_listed(published: dict[str, set[str]], tmp_path: Path) -> None:
    clock = VirtualClock(NOW_MS)
    metrics = AccountantMetrics()
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    settings = Settings(data=tmp_path, auth="off", listen="127.0.0.1:0")
    metrics.watch(LedgerCollector(ledger, lambda: None, settings, clock))
    exposed = names(metrics.registry.collect())
    ledger.close()
    assert {n: labels for n, labels in exposed.items() if n in published} == {
        n: labels for n, labels in published.items() if n in exposed
    }
    prefixes = ("ingest_", "ledger_", "capacity_", "account_", "team_", "accountant_")
    assert {n for n in published if n.startswith(prefixes)} - set(exposed) == set()


def test_fairshare_exposes_what_is_listed(published: dict[str, set[str]]) -> None:
    metrics = FairshareMetrics(VirtualClock(NOW_MS))
    window = UsageWindow(
        kind="sliding",
        start_ms=NOW_MS - 3_600_000,
        end_ms=NOW_MS,
        half_life_s=None,
        measure="allocated",
        unit="gpu_us",
        by="queue",
        usage={},
        unassigned=0,
        capacity=0,
        watermark_ms=NOW_MS,
        coverage=1.0,
        policy_version=None,
    )
    metrics.observe(CycleReport(NOW_MS, 1, "v", window, None, ()))
    exposed = names(metrics.collect())
    assert {n: labels for n, labels in exposed.items() if n in published} == {
        n: labels for n, labels in published.items() if n in exposed
    }
    prefixes = ("queue_", "weights_", "fairshare_")
    missing = {n for n in published if n.startswith(prefixes)} - set(exposed)
    assert missing == {"fairshare_cycle_seconds"}
    assert b"gputally_fairshare_cycle_seconds_bucket" in metrics.render()
