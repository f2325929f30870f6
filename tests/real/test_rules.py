"""Every alert on the real rule engine: it fires where it should, and keeps quiet where it should not.

A case is the series that there are, one sample a minute, in promtool's notation ("0+60x30": from 0, thirty steps of
60). After `at` the alert fires with these labels; with `quiet` in place of what makes it fire, it does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import prometheus_rules
from tests.real.prometheus import promtool
from tests.real.promrules import proven

pytestmark = pytest.mark.real

AGENT = 'gputally_agent_build_info{instance="a",node="n1"}'
INFO = 'gputally_gpu_info{gpu_uuid="G",gpu_model="H100",node="n1"}'
HELD = 'gputally_pod_gpu_allocated_seconds_total{gpu_uuid="G",namespace="nlp",pod="p"}'
USED = 'gputally_pod_gpu_busy_seconds_total{gpu_uuid="G",namespace="nlp",pod="p"}'
GIVEN = 'gputally_gpu_allocated_seconds_total{gpu_uuid="G"}'
EVERY = "gputally_fairshare_cycle_interval_seconds"
SPOOL_FULL = 'gputally_agent_rows_parked_total{instance="a",reason="outbox-full"}'
QUARANTINED = 'gputally_ingest_rows_total{result="quarantined"}'
PUBLISHED = 'gputally_fleet_published_timestamp_seconds{ledger="prod-eu"}'
UNPRICED = 'gputally_unpriced_gpus{gpu_model="T4",pool="old"}'
BACKUP = "gputally_backup_last_timestamp_seconds"
LAST_CYCLE, LEADER = "gputally_fairshare_last_cycle_timestamp_seconds", "gputally_fairshare_leader"
BUDGET = 'gputally_budget_spent_ratio{budget="b",team="nlp",queue=""}'
HOURS = "x600"
"""As steps: ten hours."""


@dataclass(frozen=True)
class Case:
    """series: there in both. fires, quiet: what makes the difference. labels: of the alert, beside its severity."""

    at: str
    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    series: dict[str, str] = field(default_factory=dict)


def level(name: str, high: float, low: float, at: str = "2h", **labels: str) -> Case:
    """An alert on one gauge."""
    return Case(at, {name: f"{high}{HOURS}"}, {name: f"{low}{HOURS}"}, labels)


def of_agent(name: str, high: float, low: float, **labels: str) -> Case:
    """The same of an agent, whose node is named."""
    alike = level(name, high, low, instance="a", node="n1", **labels)
    return replace(alike, series={AGENT: f"1{HOURS}"})


QUEUE = {name: f'gputally_queue_{name}_gpus{{queue="nlp",target="kai"}}' for name in ("allocated", "guaranteed")}

CASES = {
    "GputallyAgentDown": level('gputally_unmetered_gpus{node="n1"}', 8, 0, node="n1"),
    "GputallyDriverSilent": of_agent('gputally_nvml_up{instance="a"}', 0, 1),
    "GputallyCoverageLow": Case(
        "2h",
        {"gputally_ledger_coverage_ratio": f"0.97{HOURS}"},
        {"gputally_ledger_coverage_ratio": f"0.99{HOURS}"},
        series={'gputally_unmetered_gpus{node="n1"}': f"8{HOURS}"},
    ),
    "GputallySpoolAgeing": of_agent('gputally_agent_outbox_oldest_age_seconds{instance="a"}', 7200, 60),
    "GputallySpoolLosing": Case(
        "1h",
        {'gputally_agent_unspooled_lost_rows_total{instance="a"}': f"0+1{HOURS}"},
        {'gputally_agent_unspooled_lost_rows_total{instance="a"}': f"7{HOURS}"},
        {"instance": "a", "node": "n1"},
        {AGENT: f"1{HOURS}", SPOOL_FULL: f"3{HOURS}"},
    ),
    "GputallySourceSilent": of_agent(
        'gputally_collector_success{instance="a",collector="kubelet"}', 0, 1, collector="kubelet"
    ),
    "GputallyGpuLost": Case(
        "1h",
        {'gputally_gpu_lost{gpu_uuid="G"}': f"1{HOURS}"},
        {'gputally_gpu_lost{gpu_uuid="G"}': f"0{HOURS}"},
        {"gpu_uuid": "G", "gpu_model": "H100", "node": "n1"},
        {INFO: f"1{HOURS}"},
    ),
    "GputallyGpuSilent": Case(
        "1h",
        {'gputally_gpu_silent{gpu_uuid="G",instance="a"}': f"1{HOURS}", 'gputally_nvml_up{instance="a"}': f"1{HOURS}"},
        {'gputally_gpu_silent{gpu_uuid="G",instance="a"}': f"1{HOURS}", 'gputally_nvml_up{instance="a"}': f"0{HOURS}"},
        {"gpu_uuid": "G", "gpu_model": "H100", "node": "n1"},
        {INFO: f"1{HOURS}"},
    ),
    "GputallyXid": Case(
        "1h",
        {'gputally_gpu_xid_last_timestamp_seconds{gpu_uuid="G",xid="79"}': f"3000{HOURS}"},
        {'gputally_gpu_xid_last_timestamp_seconds{gpu_uuid="G",xid="79"}': f"1200{HOURS}"},
        {"gpu_uuid": "G", "xid": "79", "gpu_model": "H100", "node": "n1"},
        {INFO: f"1{HOURS}"},
    ),
    "GputallyLedgerDown": level("gputally_ledger_up", 0, 1),
    "GputallyImbalance": level("gputally_ledger_imbalance_seconds", -3, 0),
    "GputallyLedgerDiskFull": level("gputally_ledger_room_bytes", 5e8, 5e9),
    "GputallyLedgerDiskFilling": Case(
        "9h", {"gputally_ledger_room_bytes": "9e9-2e6x600"}, {"gputally_ledger_room_bytes": "9e9-2e4x600"}
    ),
    "GputallyQuarantine": Case("1h", {QUARANTINED: f"0+1{HOURS}"}, {QUARANTINED: f"9{HOURS}"}),
    "GputallyGpusUnpriced": Case(
        "2h",
        {UNPRICED: f"2{HOURS}"},
        {UNPRICED: f"0{HOURS}"},
        {"gpu_model": "T4", "pool": "old"},
        {'gputally_burn_rate_per_hour{team="nlp",currency="EUR"}': f"0{HOURS}"},
    ),
    "GputallyBudgetNearlySpent": level(BUDGET, 0.85, 0.7, budget="b", team="nlp"),
    "GputallyBudgetSpent": level(BUDGET, 1.01, 0.99, budget="b", team="nlp"),
    "GputallyBudgetForecast": level(
        'gputally_budget_forecast_ratio{budget="b",team="nlp",queue=""}', 1.2, 0.9, "7h", budget="b", team="nlp"
    ),
    "GputallyTaskStopped": level(
        'gputally_task_stopped{instance="10.0.0.7:9401",task="ship"}', 1, 0, instance="10.0.0.7:9401", task="ship"
    ),
    "GputallyUpkeepFailing": level('gputally_upkeep_failing{task="backup"}', 1, 0, task="backup"),
    "GputallyProposalWaits": level("gputally_proposals_waiting", 1, 0),
    "GputallyBackupOld": Case(
        "2h", {BACKUP: f"-700000{HOURS}"}, {BACKUP: f"-600000{HOURS}"}, series={"gputally_backups": f"7{HOURS}"}
    ),
    "GputallyLakeDiffers": level("gputally_lake_differences", 3, 0),
    "GputallyFleetBehind": Case("8h", {PUBLISHED: f"0{HOURS}"}, {PUBLISHED: f"0+60{HOURS}"}, {"ledger": "prod-eu"}),
    "GputallyInventorySilent": level('gputally_inventory_age_seconds{kind="nodes"}', 1800, 20, kind="nodes"),
    "GputallyDeliveryStuck": level('gputally_deliveries{outcome="unsure"}', 1, 0, outcome="unsure"),
    "GputallyControllerStopped": Case(
        "1h",
        {LAST_CYCLE: f"600{HOURS}"},
        {LAST_CYCLE: f"0+60{HOURS}"},
        series={LEADER: f"1{HOURS}", EVERY: f"60{HOURS}"},
    ),
    "GputallyControllerDegraded": level(
        'gputally_fairshare_controller_degraded{reason="PolicyRefused"}', 1, 0, reason="PolicyRefused"
    ),
    "GputallyUsageStale": level("gputally_fairshare_usage_age_seconds", 1200, 90),
    "GputallyWeightsHeld": level('gputally_weights_held{reason="StaleUsage"}', 1, 0, reason="StaleUsage"),
    "GputallyTargetDegraded": level(
        'gputally_fairshare_target_degraded{target="kai",reason="CRDAbsent"}', 1, 0, target="kai", reason="CRDAbsent"
    ),
    "GputallySloUnreadable": level('gputally_slo_unreadable{slo="chat"}', 1, 0, slo="chat"),
    "GputallyQueueStarving": Case(
        "2h",
        {QUEUE["allocated"]: f"2{HOURS}"},
        {QUEUE["allocated"]: f"8{HOURS}"},
        {"queue": "nlp"},
        {'gputally_queue_waiting_gpus{queue="nlp"}': f"4{HOURS}", QUEUE["guaranteed"]: f"8{HOURS}"},
    ),
    "GputallyIdleHolder": Case(
        "5h", {USED: f"0{HOURS}"}, {USED: f"0+30{HOURS}"}, {"namespace": "nlp", "pod": "p"}, {HELD: f"0+60{HOURS}"}
    ),
    "GputallyIdleNode": Case(
        "7h", {GIVEN: f"900{HOURS}"}, {GIVEN: f"0+30{HOURS}"}, {"node": "n1"}, {INFO: f"1{HOURS}"}
    ),
    "GputallyStranded": level("gputally_fairshare_stranded_gpus", 4, 0),
}
ALSO_QUIET = {
    "GputallyIdleNode": {GIVEN: f"0{HOURS}", 'gputally_queue_waiting_gpus{queue="nlp"}': f"4{HOURS}"},
    "GputallyQueueStarving": {QUEUE["allocated"]: f"2{HOURS}", 'gputally_queue_waiting_gpus{queue="nlp"}': f"0{HOURS}"},
    "GputallyBudgetNearlySpent": {BUDGET: f"1.2{HOURS}"},
    "GputallyWeightsHeld": {'gputally_weights_held{reason="NothingInService"}': f"1{HOURS}"},
    "GputallyCoverageLow": {
        "gputally_ledger_coverage_ratio": f"0.97{HOURS}",
        'gputally_unmetered_gpus{node="n1"}': f"0{HOURS}",
    },
    "GputallyBackupOld": {BACKUP: f"-700000{HOURS}", "gputally_backups": f"1{HOURS}"},
    "GputallyXid": {'gputally_gpu_xid_last_timestamp_seconds{gpu_uuid="G",xid="31"}': f"3000{HOURS}"},
}
"""A second reason to keep quiet: somebody waits for the node; nobody waits; a budget that is used up says so itself;
what was not metered early in the month stays so, and nothing more goes missing; a cluster scaled to nothing; a copy
that was made once, by hand; an XID that a program causes."""
ALSO_FIRES = {
    "GputallyLedgerDown": {"gputally_nvml_up": f"1{HOURS}"},
    "GputallyControllerStopped": {LEADER: f"0{HOURS}", LAST_CYCLE: f"0+60{HOURS}"},
    "GputallySpoolLosing": {
        'gputally_agent_unspooled_lost_rows_total{instance="a"}': f"7{HOURS}",
        SPOOL_FULL: f"0+1{HOURS}",
    },
    "GputallyInventorySilent": {'gputally_inventory_failures_total{kind="nodes"}': f"0+2{HOURS}"},
}
"""A second reason to fire: the accountant is not there at all; nobody leads; the spool is full; it never answered."""
GONE = {
    "GputallyControllerStopped": {LAST_CYCLE: "0+60x20 stale", LEADER: "1x20 stale", "gputally_ledger_up": f"1{HOURS}"},
    "GputallyLedgerDown": {"gputally_ledger_up": "1x20 stale"},
}
"""A third: what died is no longer scraped, and has no series any more."""


def scenarios(name: str, case: Case) -> list[dict[str, Any]]:
    severity = next(alert.severity for alert in prometheus_rules.ALERTS if alert.name == name)
    labels = {"alertname": name, "alertstate": "firing", "severity": severity, **case.labels}
    shown = "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
    firing = [case.fires, *(more[name] for more in (ALSO_FIRES, GONE) if name in more)]
    silent = [case.quiet, *([ALSO_QUIET[name]] if name in ALSO_QUIET else [])]
    return [
        {
            "name": f"{name}: {'fires' if fires else 'keeps quiet'}",
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values} for series, values in {**case.series, **given}.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}',
                    "eval_time": case.at,
                    "exp_samples": [{"labels": shown, "value": 1}] if fires else [],
                }
            ],
        }
        for fires, several in ((True, firing), (False, silent))
        for given in several
    ]


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == [alert.name for alert in prometheus_rules.ALERTS]


def test_promtool_takes_the_rules(rules_folder: Path) -> None:
    said = promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yaml", cwd=rules_folder)
    assert f"{len(prometheus_rules.ALERTS) + len(prometheus_rules.RECORDS)} rules found" in said


def test_every_alert_fires_and_keeps_quiet(rules_folder: Path) -> None:
    proven(rules_folder, "cases", [(name, test) for name, case in CASES.items() for test in scenarios(name, case)])


def test_what_is_recorded_is_the_figure(rules_folder: Path) -> None:
    """One of two GPUs held, a quarter of it busy."""
    other = INFO.replace('"G"', '"H"')
    given = {
        INFO: "1x60", other: "1x60", HELD: "0+60x60", USED: "0+15x60",
        'gputally_gpu_allocated_seconds_total{gpu_uuid="G"}': "0+60x60",
        'gputally_gpu_allocated_seconds_total{gpu_uuid="H"}': "0x60",
        'gputally_gpu_busy_seconds_total{gpu_uuid="G"}': "0+15x60",
        'gputally_gpu_unallocated_seconds_total{gpu_uuid="G"}': "0x60",
        'gputally_gpu_unallocated_seconds_total{gpu_uuid="H"}': "0+60x60",
    }  # fmt: skip
    figures = {
        "cluster:gputally_gpus:count": ("", 2.0),
        "cluster_node:gputally_gpus:count": ('node="n1"', 2.0),
        "cluster_node:gputally_gpu_allocated_seconds:rate30m": ('node="n1"', 1.0),
        "cluster_model:gputally_gpu_busy:ratio_rate30m": ('gpu_model="H100"', 0.125),
        "cluster_model:gputally_gpu_allocated:ratio_rate30m": ('gpu_model="H100"', 0.5),
        "cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m": ('namespace="nlp",pod="p"', 1.0),
        "cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m": ('namespace="nlp",pod="p"', 0.25),
        "cluster_namespace:gputally_pod_gpu_allocated_seconds:rate30m": ('namespace="nlp"', 1.0),
        "cluster_namespace:gputally_pod_gpu_busy_seconds:rate30m": ('namespace="nlp"', 0.25),
    }
    assert set(figures) == {record.name for record in prometheus_rules.RECORDS}
    checks = [
        {"expr": name, "eval_time": "50m", "exp_samples": [{"labels": f"{name}{{{labels}}}", "value": value}]}
        for name, (labels, value) in figures.items()
    ]
    series = [{"series": name, "values": values} for name, values in given.items()]
    document = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "fuzzy_compare": True,
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}],
    }
    (rules_folder / "records.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", "records.yaml", cwd=rules_folder)
