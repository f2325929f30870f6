"""The list against which queries are checked is what the three programs expose."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from accountant.api.ledger_metrics import LedgerCollector
from accountant.core.settings import Settings
from accountant.runtime.job_and_task_metrics import AccountantMetrics as AccountantMetrics
from accountant.runtime.job_and_task_metrics import FunctionCollector, proposal_metrics
from accountant.storage.duckdb_ledger import open_ledger
from agent.metrics.exporter import AgentMetrics
from fairshare.controller.controller_metrics import ControllerMetrics as FairshareMetrics
from fairshare.controller.cycle_report import CycleReport
from fairshare.preemption.service_latency_objectives import Alarms
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.testing.fake_accountant import usage_window
from scripts import reference_pages
from tests.dashboards.conftest import PUBLISHED

NOW_MS = 1_790_000_000_000


def names(families: Iterable[Metric]) -> dict[str, set[str]]:
    """Return the label names of each series as scraped, without the prefix; also for families without samples."""
    suffixes = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}
    found = {}
    for family in families:
        labels = set(getattr(family, "_labelnames", ()))
        for sample in family.samples:
            labels |= set(sample.labels) - {"le"}
        for suffix in suffixes.get(family.type, ("",)):
            le = {"le"} if suffix == "_bucket" else set()
            found[family.name.removeprefix("gputally_") + suffix] = labels | le
    return found


def of(program: str) -> set[str]:
    """Return the reference's entries of one program, without the prefix."""
    found = set()
    for family in reference_pages.families_by_program()[program]:
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {family.series.removeprefix("gputally_") + suffix for suffix in suffixes}
    return found


def agree(exposed: dict[str, set[str]]) -> bool:
    """Compare the lists. A family without samples may lack its labels."""
    return all(name in PUBLISHED and labels <= PUBLISHED[name] for name, labels in exposed.items())


def test_the_agent_exposes_what_is_listed() -> None:
    exposed = {}
    for family in AgentMetrics("node", "1").collect():
        name = family.name.removeprefix("gputally_").removesuffix("_total")
        exposed[name + ("_total" if family.kind == "counter" else "")] = set(family.labels)
    assert {n: PUBLISHED[n] for n in exposed} == exposed


def test_the_accountant_exposes_what_is_listed(tmp_path: Path) -> None:
    clock = VirtualClock(NOW_MS)
    metrics = AccountantMetrics()
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    settings = Settings(data=tmp_path, auth="off", listen="127.0.0.1:0")
    metrics.watch(FunctionCollector(lambda: proposal_metrics(lambda: ())))
    metrics.watch(LedgerCollector(ledger, lambda: None, settings, clock))
    exposed = names(metrics.registry.collect())
    ledger.close()
    assert agree(exposed)
    asked_for = (
        "backup",
        "deliveries",
        "exported_label_",
        "inventory_",
        "job_",
        "kai_usage_",
        "lake_",
        "task_",
        "training_job_",
        "upkeep_",
    )  # where somebody has set them up
    assert {n for n in of("Accountant") - set(exposed) if not n.startswith(asked_for)} == set()


def test_fairshare_exposes_what_is_listed() -> None:
    clock = VirtualClock(NOW_MS)
    metrics = FairshareMetrics(clock, tasks=BackgroundTasks(clock))
    window = usage_window({}, 0, end_ms=NOW_MS)
    metrics.watch(Alarms(lambda _query, _at: 0.0))
    metrics.observe(CycleReport(NOW_MS, 1, "v", window, None, ()))
    seen = {
        line.split()[2].removeprefix("gputally_") for line in metrics.render().decode().splitlines() if "# TYPE" in line
    }
    listed = {family.series for family in reference_pages.families_by_program()["Fairshare"]}
    assert {name for name in seen if not name.endswith("_created")} == {n.removeprefix("gputally_") for n in listed}
    assert agree(names(metrics.collect()))
