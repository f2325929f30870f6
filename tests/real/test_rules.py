"""Every alert on the real rule engine: it fires where it should, and stays quiet where it should not.

A case is a list of series with one sample a minute, in promtool's notation ("0+60x30": from 0, thirty steps of 60).
After `at` the alert fires with these labels; with `quiet` in place of the cause, it does not. A story is hours of
several clusters, sampled every 30 s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import prometheus_rules
from dashboards.prometheus_rules import RuleGroup
from tests.real.prometheus import promtool

pytestmark = pytest.mark.real

Scenario = dict[str, Any]

AGENT = 'gputally_agent_build_info{instance="a",node="n1"}'
INFO = 'gputally_gpu_info{gpu_uuid="G",gpu_model="H100",node="n1"}'
HELD = 'gputally_pod_gpu_allocated_seconds_total{gpu_uuid="G",namespace="nlp",pod="p"}'
USED = 'gputally_pod_gpu_busy_seconds_total{gpu_uuid="G",namespace="nlp",pod="p"}'
GIVEN = 'gputally_gpu_allocated_seconds_total{gpu_uuid="G"}'
EVERY = "gputally_fairshare_cycle_interval_seconds"
LOST_ROWS = 'gputally_agent_unspooled_lost_rows_total{instance="a"}'
WAITING = 'gputally_queue_waiting_gpus{queue="nlp"}'
SPOOL_FULL = 'gputally_agent_rows_parked_total{instance="a",reason="outbox-full"}'
QUARANTINED = 'gputally_ingest_rows_total{result="quarantined"}'
PUBLISHED = 'gputally_fleet_published_timestamp_seconds{ledger="prod-eu"}'
UNPRICED = 'gputally_unpriced_gpus{gpu_model="T4",pool="old"}'
BURN_RATE = 'gputally_burn_rate_per_hour{team="nlp",currency="EUR"}'
BACKUP = "gputally_backup_last_timestamp_seconds"
LAST_CYCLE, LEADER = "gputally_fairshare_last_cycle_timestamp_seconds", "gputally_fairshare_leader"
BUDGET = 'gputally_budget_spent_ratio{budget="b",team="nlp",queue=""}'
HOURS = "x600"
"""Ten hours in promtool's notation for steps."""


@dataclass(frozen=True)
class Case:
    """series: common to both. fires, quiet: the differing series. labels: of the alert, besides its severity."""

    at: str
    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    series: dict[str, str] = field(default_factory=dict)


def level(
    name: str, high: object, low: object, at: str = "2h", *, series: Mapping[str, str] | None = None, **labels: str
) -> Case:
    """An alert on one series that steps from `high` to `low`, or stays at `high`."""
    return Case(at, {name: f"{high}{HOURS}"}, {name: f"{low}{HOURS}"}, labels, dict(series or {}))


def of_agent(name: str, high: object, low: object, **labels: str) -> Case:
    """The same for an agent's series, with its node."""
    return level(name, high, low, series={AGENT: f"1{HOURS}"}, instance="a", node="n1", **labels)


def of_gpu(name: str, high: object, low: object, **labels: str) -> Case:
    """The same for a GPU's series, with its model and node."""
    shown = {"gpu_uuid": "G", "gpu_model": "H100", "node": "n1", **labels}
    return level(name, high, low, "1h", series={INFO: f"1{HOURS}"}, **shown)


QUEUE = {name: f'gputally_queue_{name}_gpus{{queue="nlp",target="kai"}}' for name in ("allocated", "guaranteed")}

CASES = {
    "GputallyAgentDown": level('gputally_unmetered_gpus{node="n1"}', 8, 0, node="n1"),
    "GputallyDriverSilent": of_agent('gputally_nvml_up{instance="a"}', 0, 1),
    "GputallyCoverageLow": level(
        "gputally_ledger_coverage_ratio", 0.97, 0.99, series={'gputally_unmetered_gpus{node="n1"}': f"8{HOURS}"}
    ),
    "GputallySpoolAgeing": of_agent('gputally_agent_outbox_oldest_age_seconds{instance="a"}', 7200, 60),
    "GputallySpoolLosing": level(
        LOST_ROWS, "0+1", 7, "1h", series={AGENT: f"1{HOURS}", SPOOL_FULL: f"3{HOURS}"}, instance="a", node="n1"
    ),
    "GputallySourceSilent": of_agent(
        'gputally_collector_success{instance="a",collector="kubelet"}', 0, 1, collector="kubelet"
    ),
    "GputallyGpuLost": of_gpu('gputally_gpu_lost{gpu_uuid="G"}', 1, 0),
    "GputallyGpuSilent": Case(
        "1h",
        {'gputally_gpu_silent{gpu_uuid="G",instance="a"}': f"1{HOURS}", 'gputally_nvml_up{instance="a"}': f"1{HOURS}"},
        {'gputally_gpu_silent{gpu_uuid="G",instance="a"}': f"1{HOURS}", 'gputally_nvml_up{instance="a"}': f"0{HOURS}"},
        {"gpu_uuid": "G", "gpu_model": "H100", "node": "n1"},
        {INFO: f"1{HOURS}"},
    ),
    "GputallyXid": of_gpu('gputally_gpu_xid_last_timestamp_seconds{gpu_uuid="G",xid="79"}', 3000, 1200, xid="79"),
    "GputallyLedgerDown": level("gputally_ledger_up", 0, 1),
    "GputallyImbalance": level("gputally_ledger_imbalance_seconds", -3, 0),
    "GputallyLedgerDiskFull": level("gputally_ledger_room_bytes", 5e8, 5e9),
    "GputallyLedgerDiskFilling": level("gputally_ledger_room_bytes", "9e9-2e6", "9e9-2e4", "9h"),
    "GputallyQuarantine": level(QUARANTINED, "0+1", 9, "1h"),
    "GputallyOverQuota": level('gputally_ingest_over_quota_records_total{quota="gpus"}', "0+1", 9, "1h", quota="gpus"),
    "GputallyGpusUnpriced": level(UNPRICED, 2, 0, series={BURN_RATE: f"0{HOURS}"}, gpu_model="T4", pool="old"),
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
    "GputallyBackupOld": level(BACKUP, -700_000, -600_000, series={"gputally_backups": f"7{HOURS}"}),
    "GputallyBackupDamaged": level("gputally_backups_damaged", 1, 0),
    "GputallyLakeDiffers": level("gputally_lake_differences", 3, 0),
    "GputallyLakeRefused": level("gputally_lake_refused", 1, 0),
    "GputallyFleetBehind": level(PUBLISHED, 0, "0+60", "8h", ledger="prod-eu"),
    "GputallyFleetLedgerUnreadable": level('gputally_fleet_ledger_readable{ledger="prod-eu"}', 0, 1, ledger="prod-eu"),
    "GputallyInventorySilent": level('gputally_inventory_age_seconds{kind="nodes"}', 1800, 20, kind="nodes"),
    "GputallyDeliveryStuck": level('gputally_deliveries{outcome="unsure"}', 1, 0, outcome="unsure"),
    "GputallyControllerStopped": level(
        LAST_CYCLE, 600, "0+60", "1h", series={LEADER: f"1{HOURS}", EVERY: f"60{HOURS}"}
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
    "GputallyQueueStarving": level(
        QUEUE["allocated"], 2, 8, series={WAITING: f"4{HOURS}", QUEUE["guaranteed"]: f"8{HOURS}"}, queue="nlp"
    ),
    "GputallyIdleHolder": level(USED, 0, "0+30", "5h", series={HELD: f"0+60{HOURS}"}, namespace="nlp", pod="p"),
    "GputallyIdleNode": level(GIVEN, 900, "0+30", "7h", series={INFO: f"1{HOURS}"}, node="n1"),
    "GputallyStranded": level("gputally_fairshare_stranded_gpus", 4, 0),
}
ALSO_QUIET = {
    "GputallyIdleNode": {GIVEN: f"0{HOURS}", WAITING: f"4{HOURS}"},
    "GputallyQueueStarving": {QUEUE["allocated"]: f"2{HOURS}", WAITING: f"0{HOURS}"},
    "GputallyBudgetNearlySpent": {BUDGET: f"1.2{HOURS}"},
    "GputallyWeightsHeld": {'gputally_weights_held{reason="NothingInService"}': f"1{HOURS}"},
    "GputallyCoverageLow": {
        "gputally_ledger_coverage_ratio": f"0.97{HOURS}",
        'gputally_unmetered_gpus{node="n1"}': f"0{HOURS}",
    },
    "GputallyBackupOld": {BACKUP: f"-700000{HOURS}", "gputally_backups": f"1{HOURS}"},
    "GputallyXid": {'gputally_gpu_xid_last_timestamp_seconds{gpu_uuid="G",xid="31"}': f"3000{HOURS}"},
}
"""A second reason to stay quiet: a pod waits for the node; no pod waits; a spent budget has an alert of its own; time
was unmetered early in the month, and none has been since; a cluster scaled to nothing; a single manual backup; an XID
that a program causes."""
ALSO_FIRES = {
    "GputallyLedgerDown": {"gputally_nvml_up": f"1{HOURS}"},
    "GputallyControllerStopped": {LEADER: f"0{HOURS}", LAST_CYCLE: f"0+60{HOURS}"},
    "GputallySpoolLosing": {LOST_ROWS: f"7{HOURS}", SPOOL_FULL: f"0+1{HOURS}"},
    "GputallyInventorySilent": {'gputally_inventory_failures_total{kind="nodes"}': f"0+2{HOURS}"},
}
"""A second reason to fire: no accountant runs; no controller leads; the spool is full; it never answered."""
GONE = {
    "GputallyControllerStopped": {LAST_CYCLE: "0+60x20 stale", LEADER: "1x20 stale", "gputally_ledger_up": f"1{HOURS}"},
    "GputallyLedgerDown": {"gputally_ledger_up": "1x20 stale"},
}
"""A third: a program that ended is no longer scraped and has no series."""


def scenario(name: str, series: Mapping[str, str], checks: Sequence[Scenario], interval: str = "1m") -> Scenario:
    """Build a promtool test."""
    given = [{"series": each, "values": values} for each, values in series.items()]
    return {"name": name, "interval": interval, "input_series": given, "promql_expr_test": list(checks)}


def check(expr: str, at: str, samples: Mapping[str, float]) -> Scenario:
    """samples: the expression's values at `at`, by labels."""
    found = [{"labels": labels, "value": value} for labels, value in samples.items()]
    return {"expr": expr, "eval_time": at, "exp_samples": found}


def proven(folder: Path, what: str, tests: Sequence[tuple[str, Scenario]]) -> None:
    """Run promtool tests, each on its alert and the recording rules alone: hours of all rules would take minutes."""
    files = []
    for alert in prometheus_rules.ALERTS:
        own = [test for name, test in tests if name == alert.name]
        if own:
            groups = [prometheus_rules.RECORD_GROUP, RuleGroup("gputally.alone", (alert,))]
            rules = f"{alert.name}.rules.yaml"
            (folder / rules).write_text(prometheus_rules.render_groups(groups))
            files.append(f"{alert.name}.{what}.yaml")
            document = {"rule_files": [rules], "evaluation_interval": "1m", "tests": own}
            (folder / files[-1]).write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", *files, cwd=folder)


def scenarios(name: str, case: Case) -> list[Scenario]:
    severity = next(alert.severity for alert in prometheus_rules.ALERTS if alert.name == name)
    labels = {"alertname": name, "alertstate": "firing", "severity": severity, **case.labels}
    shown = "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
    firing = [case.fires, *(more[name] for more in (ALSO_FIRES, GONE) if name in more)]
    silent = [case.quiet, *([ALSO_QUIET[name]] if name in ALSO_QUIET else [])]
    expr = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
    return [
        scenario(f"{name}: {what}", {**case.series, **given}, [check(expr, case.at, samples)])
        for what, samples, several in (("fires", {shown: 1.0}, firing), ("keeps quiet", {}, silent))
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
    checks = [check(name, "50m", {f"{name}{{{labels}}}": value}) for name, (labels, value) in figures.items()]
    tests = [scenario("records", given, checks)]
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "fuzzy_compare": True, "tests": tests}
    (rules_folder / "records.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", "records.yaml", cwd=rules_folder)


# --- stories of several clusters ---

STEPS = " ".join(f"{i * 60} {i * 60}" for i in range(1, 800))
"""A counter in 30-second samples: it grows by a whole interval of 60 s at a time."""


@dataclass(frozen=True)
class Story:
    """Series sampled every 30 s, and the times at which an alert fires for each cluster, or for a cluster's node."""

    alert: str
    series: dict[str, str]
    firing: dict[str, tuple[str, ...]]
    by: str = "cluster"


def up(cluster: str, **programs: str) -> dict[str, str]:
    return {f'{name}{{cluster="{cluster}",instance="{cluster}-{name}"}}': values for name, values in programs.items()}


STORIES = {
    "the accountant of one cluster dies and comes back": Story(
        "GputallyLedgerDown",
        up("a", gputally_ledger_up="1x2000") | up("b", gputally_ledger_up="1x60 _x200 1x1000"),
        {"20m": (), "50m": ("b",), "2h": ("b",), "140m": ()},
    ),
    "the controller of one cluster dies": Story(
        "GputallyControllerStopped",
        up("a", gputally_fairshare_leader="1x2000", gputally_fairshare_last_cycle_timestamp_seconds="0+30x2000")
        | up(
            "b", gputally_fairshare_leader="1x60 stale", gputally_fairshare_last_cycle_timestamp_seconds="0+30x60 stale"
        ),
        {"20m": (), "1h": ("b",), "5h": ("b",)},
    ),
    "the leader hangs while its standby goes on looking": Story(
        "GputallyControllerStopped",
        {
            'gputally_fairshare_leader{cluster="a",instance="1"}': "1x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="1"}': "0+30x60 1800x2000",
            'gputally_fairshare_leader{cluster="a",instance="2"}': "0x2000",
            'gputally_fairshare_cycle_interval_seconds{cluster="a",instance="2"}': "60x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="2"}': "0+30x2000",
        },
        {"30m": (), "1h": ("a",)},
    ),
    "a controller that looks every hour has not stopped": Story(
        "GputallyControllerStopped",
        {
            'gputally_fairshare_leader{cluster="a",instance="1"}': "1x2000",
            'gputally_fairshare_cycle_interval_seconds{cluster="a",instance="1"}': "3600x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="1"}': " ".join(
                f"{hour * 3600}x119" for hour in range(4)
            )
            + " 14400x1000",
        },
        {"50m": (), "110m": (), "5h": (), "440m": ("a",)},
    ),
    "a node reboots: its gap of four minutes is in the mean of a quarter for as long as that takes": Story(
        "GputallyAgentDown",
        {'gputally_unmetered_gpus{cluster="a",node="n1"}': "0x60 2.13x38 0x400"},
        {f"{minute}m": () for minute in range(30, 90, 3)},
        "node",
    ),
    "an agent does not come back": Story(
        "GputallyAgentDown",
        {'gputally_unmetered_gpus{cluster="a",node="n1"}': "0x60 0+0.27x30 8x1000"},
        {"30m": (), "55m": ("n1",), "5h": ("n1",)},
        "node",
    ),
    "another cluster waits, and this one's node is idle; an agent is replaced at one hour": Story(
        "GputallyIdleNode",
        {
            'gputally_gpu_info{cluster="a",gpu_uuid="G",node="n1"}': "1x1600",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",instance="1"}': "600x120 stale",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",instance="2"}': "_x124 0x1500",
            'gputally_queue_waiting_gpus{cluster="b",queue="nlp"}': "4x1600",
        },
        {"5h": (), "7h": ("n1",), "10h": ("n1",)},
        "node",
    ),
    "a held GPU whose counter moves by intervals is no idle node": Story(
        "GputallyIdleNode",
        {
            'gputally_gpu_info{cluster="a",gpu_uuid="G",node="n1"}': "1x1600",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G"}': STEPS,
        },
        {"7h": (), "10h": ()},
        "node",
    ),
    "a pod that idles is named, with intervals of a quarter of an hour too": Story(
        "GputallyIdleHolder",
        {
            'gputally_pod_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",namespace="nlp",pod="p"}': " ".join(
                f"{900 * i}x29" for i in range(60)
            ),
            'gputally_pod_gpu_busy_seconds_total{cluster="a",gpu_uuid="G",namespace="nlp",pod="p"}': "0x1800",
        },
        {"3h": (), "6h": ("p",), "9h": ("p",)},
        "pod",
    ),
    "no price book, no GPU that lacks a price": Story(
        "GputallyGpusUnpriced",
        up("a", gputally_unpriced_gpus="8x1600")
        | up("b", gputally_unpriced_gpus="8x1600", gputally_burn_rate_per_hour="0x1600"),
        {"3h": ("b",)},
    ),
    "a nightly copy on the ledger's own volume: steep for the hours around it, and no trend": Story(
        "GputallyLedgerDiskFilling",
        {'gputally_ledger_room_bytes{cluster="a"}': "20e9x2880 18e9x1200"},
        {f"{hour}h": () for hour in range(25, 32)},
    ),
    "a queue starves in one scheduler, and has its own in another": Story(
        "GputallyQueueStarving",
        {
            'gputally_queue_waiting_gpus{cluster="a",queue="q"}': "2x1600",
            'gputally_queue_allocated_gpus{cluster="a",queue="q",target="kai"}': "8x1600",
            'gputally_queue_guaranteed_gpus{cluster="a",queue="q",target="kai"}': "8x1600",
            'gputally_queue_allocated_gpus{cluster="a",queue="q",target="kueue"}': "1x1600",
            'gputally_queue_guaranteed_gpus{cluster="a",queue="q",target="kueue"}': "4x1600",
        },
        {"30m": (), "2h": ("q",)},
        "queue",
    ),
}


def test_alerts_tell_clusters_apart_and_neither_flap_nor_sleep(rules_folder: Path) -> None:
    tests = []
    for name, story in STORIES.items():
        expr = f'count by ({story.by}) (ALERTS{{alertname="{story.alert}",alertstate="firing"}})'
        checks = [
            check(expr, at, {f'{{{story.by}="{who}"}}': 1.0 for who in firing}) for at, firing in story.firing.items()
        ]
        tests.append((story.alert, scenario(name, story.series, checks, "30s")))
    proven(rules_folder, "stories", tests)
