"""Defines recording rules and alerts, and writes them as a Prometheus rule file.

An alert waits (`for`) long enough to ignore a roll-out, a restart or one lost scrape. Every expression keeps the label
`cluster`, so that Prometheus evaluates each cluster separately. Series without this label count as one cluster. A
component that died has no series, so some alerts look for series that existed within the last day and do not exist now.

Names of recording rules are level:metric:operation (prometheus.io/docs/practices/rules)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import yaml

from gputally.base.docs_address import docs_page

Severity = Literal["critical", "warning", "info"]
"""Severity of an alert. critical: bills or measurements are being lost. warning: they will be lost, or a queue waits.
info: money can be saved."""

RUNBOOKS = docs_page("runbooks")
INTERVAL = "1m"


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A recording rule: a series that Prometheus computes once for all queries."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule. Its summary and description are Prometheus templates with the labels and the value of the
    alert.

    wait: the time for which the expression must be true (`for`)."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules that Prometheus evaluates together, in their order."""

    name: str
    rules: tuple[RecordingRule | Alert, ...]


def render_groups(groups: Iterable[RuleGroup]) -> str:
    """Return the rule file as YAML. Equal arguments give equal bytes."""
    plain = [
        {"name": group.name, "interval": INTERVAL, "rules": [_plain(rule) for rule in group.rules]} for group in groups
    ]
    head = "# Written by `gputally dashboards build` from dashboards/prometheus_rules.py; do not edit.\n"
    return head + yaml.safe_dump({"groups": plain}, sort_keys=False, width=4096, allow_unicode=True)


def _plain(rule: RecordingRule | Alert) -> dict[str, object]:
    if isinstance(rule, RecordingRule):
        return {"record": rule.name, "expr": rule.expr}
    return {
        "alert": rule.name,
        "expr": rule.expr,
        "for": rule.wait,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook},
    }


WINDOW = "30m"
DEVICES = "max by (cluster, gpu_uuid, gpu_model, node) (gputally_gpu_info)"


def _of_device(series: str) -> str:
    return f"rate({series}[{WINDOW}]) * on (cluster, gpu_uuid) group_left (gpu_model, node) {DEVICES}"


def _by_model(series: str) -> str:
    """Return a counter's rate by model, per metered second, because a counter moves by a whole interval at once (see
    dashboards.promql)."""
    held, free = (
        _of_device("gputally_gpu_allocated_seconds_total"),
        _of_device("gputally_gpu_unallocated_seconds_total"),
    )
    whole = f"(sum by (cluster, gpu_model) ({held}) + sum by (cluster, gpu_model) ({free}))"
    return f"sum by (cluster, gpu_model) ({_of_device(series)}) / {whole}"


def _by_pod(what: str) -> str:
    return f"sum by (cluster, namespace, pod) (rate(gputally_pod_gpu_{what}_seconds_total[{WINDOW}]))"


RECORD_GROUP = RuleGroup(
    "gputally.records",
    (
        RecordingRule("cluster:gputally_gpus:count", f"count by (cluster) ({DEVICES})"),
        RecordingRule("cluster_node:gputally_gpus:count", f"count by (cluster, node) ({DEVICES})"),
        RecordingRule(
            "cluster_node:gputally_gpu_allocated_seconds:rate30m",
            f"sum by (cluster, node) ({_of_device('gputally_gpu_allocated_seconds_total')})",
        ),
        RecordingRule("cluster_model:gputally_gpu_busy:ratio_rate30m", _by_model("gputally_gpu_busy_seconds_total")),
        RecordingRule(
            "cluster_model:gputally_gpu_allocated:ratio_rate30m", _by_model("gputally_gpu_allocated_seconds_total")
        ),
        RecordingRule("cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m", _by_pod("allocated")),
        RecordingRule("cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m", _by_pod("busy")),
        RecordingRule(
            "cluster_namespace:gputally_pod_gpu_allocated_seconds:rate30m",
            "sum by (cluster, namespace) (cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m)",
        ),
        RecordingRule(
            "cluster_namespace:gputally_pod_gpu_busy_seconds:rate30m",
            "sum by (cluster, namespace) (cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m)",
        ),
    ),
)

AGENT = "max by (cluster, instance, node) (gputally_agent_build_info)"


def _of_agent(by_instance: str) -> str:
    """Add the label `node` to a figure by cluster and instance, because the instance is only an address."""
    return f"{by_instance} * on (cluster, instance) group_left (node) {AGENT}"


def _of_gpu(by_gpu: str) -> str:
    """Add the labels `node` and `gpu_model` to a figure by cluster and GPU."""
    return f"{by_gpu} * on (cluster, gpu_uuid) group_left (node, gpu_model) {DEVICES}"


def _missed(series: str) -> str:
    """Return the clusters that had `series` within the last day and have none now, or one series if no cluster had
    it."""
    lately = f"last_over_time({series}[1d])"
    return f"group by (cluster) ({lately}) unless on (cluster) {series} or absent({lately})"


METERING = RuleGroup(
    "gputally.metering",
    (
        Alert(
            "GputallyAgentDown",
            "max by (cluster, node) (gputally_unmetered_gpus) > 0",
            "20m",
            "warning",
            "The accountant gets no records of GPUs on {{ $labels.node }}",
            "{{ $value | humanize }} GPUs are unmetered there: no agent runs, or it cannot deliver. "
            "The records in an agent's spool are booked once they arrive; time without an agent stays unmetered.",
        ),
        Alert(
            "GputallyDriverSilent",
            _of_agent("max by (cluster, instance) (gputally_nvml_up)") + " == 0",
            "10m",
            "warning",
            "The NVIDIA driver does not answer the agent on {{ $labels.node }}",
            "The agent runs and cannot read its GPUs. The time of known holders is booked with unknown use; "
            "the time of other GPUs is unmetered until the driver answers.",
        ),
        Alert(
            "GputallyCoverageLow",
            "min by (cluster) (gputally_ledger_coverage_ratio) < 0.98"
            " and on (cluster) sum by (cluster) (gputally_unmetered_gpus) > 0",
            "30m",
            "warning",
            "Only {{ $value | humanizePercentage }} of the month's GPU time is metered, and some is missing now",
            "The month's report states the coverage. The controller holds weights whose window has too little "
            "coverage.",
        ),
        Alert(
            "GputallySpoolAgeing",
            _of_agent("max by (cluster, instance) (gputally_agent_outbox_oldest_age_seconds)") + " > 3600",
            "15m",
            "warning",
            "The agent on {{ $labels.node }} has not delivered for {{ $value | humanizeDuration }}",
            "Its spool keeps the records for days by default; later records are lost.",
        ),
        Alert(
            "GputallySpoolLosing",
            _of_agent(
                "(sum by (cluster, instance) (increase(gputally_agent_unspooled_lost_rows_total[15m])) + "
                "sum by (cluster, instance) ("
                'increase(gputally_agent_rows_parked_total{reason=~"outbox-full|spool-unwritable|spool-damaged"}[15m])))'
            )
            + " > 0",
            "0m",
            "critical",
            "The agent on {{ $labels.node }} loses measurements",
            "Its spool is full, cannot be written, or is damaged: {{ $value | humanize }} rows are lost.",
        ),
        Alert(
            "GputallySourceSilent",
            _of_agent('max by (cluster, instance, collector) (gputally_collector_success{collector!="nvml"})')
            + " == 0",
            "15m",
            "warning",
            "The agent on {{ $labels.node }} cannot read its {{ $labels.collector }}",
            "GPU time is still metered; its holder, its team or its use may be unknown or out of date.",
        ),
        Alert(
            "GputallyGpuLost",
            _of_gpu("max by (cluster, gpu_uuid) (gputally_gpu_lost)") + " == 1",
            "2m",
            "warning",
            "GPU {{ $labels.gpu_uuid }} of {{ $labels.node }} is lost",
            "The driver lists the GPU ({{ $labels.gpu_model }}) and cannot use it. Its time is booked as down: its "
            "holder is not billed.",
        ),
        Alert(
            "GputallyGpuSilent",
            _of_gpu(
                "max by (cluster, gpu_uuid) (gputally_gpu_silent unless on (cluster, instance) gputally_nvml_up == 0)"
            )
            + " == 1",
            "5m",
            "warning",
            "GPU {{ $labels.gpu_uuid }} of {{ $labels.node }} does not answer",
            "The driver answers for the node's other GPUs. The use of the GPU ({{ $labels.gpu_model }}) is unknown, "
            "and its holder is billed for holding it.",
        ),
        Alert(
            "GputallyXid",
            _of_gpu(
                "(time() - max by (cluster, gpu_uuid, xid) "
                '(gputally_gpu_xid_last_timestamp_seconds{xid!~"13|31|43|45"}))'
            )
            + " < 900",
            "0m",
            "warning",
            "XID {{ $labels.xid }} on GPU {{ $labels.gpu_uuid }}",
            "The driver of {{ $labels.node }} reported the error within the last 15 minutes. Those that programs cause "
            "(13, 31, 43, 45) are not alerted on.",
        ),
    ),
)

LEDGER = RuleGroup(
    "gputally.ledger",
    (
        Alert(
            "GputallyLedgerDown",
            "max by (cluster) (gputally_ledger_up) == 0 or " + _missed("gputally_ledger_up"),
            "10m",
            "critical",
            "The ledger cannot be read",
            "The accountant does not run, is not scraped, or cannot read its file. Agents spool, and weights do not "
            "change.",
        ),
        Alert(
            "GputallyImbalance",
            "max by (cluster) (abs(gputally_ledger_imbalance_seconds)) > 0",
            "5m",
            "critical",
            "The ledger does not balance",
            "{{ $value | humanize }} GPU-seconds of the last settled hour are in no account or in two: a defect.",
        ),
        Alert(
            "GputallyLedgerDiskFull",
            "min by (cluster) (gputally_ledger_room_bytes) < 1073741824",
            "5m",
            "critical",
            "The ledger's volume has {{ $value | humanize1024 }}B left",
            "At 0 the accountant refuses batches with 503, and agents spool. No data is damaged, and no usage is "
            "booked.",
        ),
        Alert(
            "GputallyLedgerDiskFilling",
            "min by (cluster) (predict_linear(gputally_ledger_room_bytes[6h], 259200)) < 0"
            " and min by (cluster) (predict_linear(gputally_ledger_room_bytes[1d], 259200)) < 0",
            "1h",
            "warning",
            "The ledger's volume will be full within three days",
            "At the rate of the last six hours, and of the last day, the volume has no free space in three days.",
        ),
        Alert(
            "GputallyQuarantine",
            'sum by (cluster) (increase(gputally_ingest_rows_total{result="quarantined"}[1h])) > 0',
            "0m",
            "warning",
            "{{ $value | humanize }} records were not booked within the last hour",
            "They contradict other records, or lie in the future. Their time is unmetered.",
        ),
        Alert(
            "GputallyOverQuota",
            "sum by (cluster, quota) (increase(gputally_ingest_over_quota_records_total[1h])) > 0",
            "0m",
            "warning",
            "{{ $value | humanize }} records exceeded the quota {{ $labels.quota }} of a sender in the last hour",
            "A node, or an import, leaves more in the ledger than it may. The surplus is not booked and its time is "
            "unmetered. Either the node is broken or hostile, or it is busier than the quotas allow.",
        ),
        Alert(
            "GputallyGpusUnpriced",
            "sum by (cluster, gpu_model, pool) (gputally_unpriced_gpus) > 0.5"
            " and on (cluster) gputally_burn_rate_per_hour",
            "1h",
            "warning",
            "{{ $value | humanize }} GPUs of model {{ $labels.gpu_model }} have no price",
            "No row of the price book prices them in pool {{ $labels.pool }}. Their time is unpriced, not free, and "
            "the cost of every team that holds them is unknown.",
        ),
        Alert(
            "GputallyBudgetNearlySpent",
            "max by (cluster, budget, team) (gputally_budget_spent_ratio) >= 0.8 < 1",
            "0m",
            "info",
            "Budget {{ $labels.budget }} is {{ $value | humanizePercentage }} used",
            "Of team {{ $labels.team }}, this month.",
        ),
        Alert(
            "GputallyBudgetSpent",
            "max by (cluster, budget, team) (gputally_budget_spent_ratio) >= 1",
            "0m",
            "warning",
            "Budget {{ $labels.budget }} is used up ({{ $value | humanizePercentage }})",
            "Of team {{ $labels.team }}, this month. The policy's key `exhausted` sets the consequence.",
        ),
        Alert(
            "GputallyBudgetForecast",
            "max by (cluster, budget, team) (gputally_budget_forecast_ratio) > 1",
            "6h",
            "info",
            "Budget {{ $labels.budget }} will be {{ $value | humanizePercentage }} used at the month's end",
            "At the rate of the month's days so far, team {{ $labels.team }} overspends.",
        ),
        Alert(
            "GputallyTaskStopped",
            "max by (cluster, instance, task) (gputally_task_stopped) == 1",
            "0m",
            "critical",
            "A background task of {{ $labels.instance }} has stopped: {{ $labels.task }}",
            "It hangs, its thread has ended, or it failed with an unexpected error.",
        ),
        Alert(
            "GputallyUpkeepFailing",
            "max by (cluster, task) (gputally_upkeep_failing) == 1",
            "15m",
            "warning",
            "A periodic task of the accountant fails: {{ $labels.task }}",
            "Its last run failed. If a file is refused, its last good version stays in force.",
        ),
        Alert(
            "GputallyProposalWaits",
            "max by (cluster) (gputally_proposals_waiting) > 0",
            "1h",
            "info",
            "Late records for {{ $value }} closed months wait for an admin's decision",
            "The closed months do not change. Accepted records are due in the first open month, and refused ones "
            "never.",
        ),
        Alert(
            "GputallyBackupOld",
            "time() - max by (cluster) (gputally_backup_last_timestamp_seconds) > 691200"
            " and on (cluster) max by (cluster) (gputally_backups) > 1",
            "1h",
            "warning",
            "The newest backup of the ledger is {{ $value | humanizeDuration }} old",
            "A lost volume can be restored to that time, with the later records that agents and the archive still "
            "have.",
        ),
        Alert(
            "GputallyBackupDamaged",
            "max by (cluster) (gputally_backups_damaged) > 0",
            "5m",
            "warning",
            "{{ $value }} backups of the ledger cannot be used",
            "The .json file beside each of them is damaged. The other backups can be restored.",
        ),
        Alert(
            "GputallyLakeDiffers",
            "max by (cluster) (gputally_lake_differences) > 0",
            "5m",
            "warning",
            "The lake and the ledger differ in {{ $value }} figures",
            "Reports of the fleet and of other engines show the figures of the lake, until they are repaired.",
        ),
        Alert(
            "GputallyLakeRefused",
            "max by (cluster) (gputally_lake_refused) > 0",
            "5m",
            "warning",
            "The accountant publishes nothing to the lake until a person decides",
            "The lake or the ledger is not what it was, or another ledger has its name. What is in the lake stays as "
            "it is.",
        ),
        Alert(
            "GputallyFleetBehind",
            "time() - max by (cluster, ledger) (gputally_fleet_published_timestamp_seconds) > 21600",
            "15m",
            "warning",
            "The figures of {{ $labels.ledger }} in the lake are {{ $value | humanizeDuration }} old",
            "Its accountant does not publish. All earlier figures are there, and none is lost.",
        ),
        Alert(
            "GputallyFleetLedgerUnreadable",
            "min by (cluster, ledger) (gputally_fleet_ledger_readable) == 0",
            "15m",
            "warning",
            "The fleet's pages leave out {{ $labels.ledger }}",
            "Its tables in the lake cannot be opened or understood. The other ledgers are shown as before.",
        ),
        Alert(
            "GputallyInventorySilent",
            "max by (cluster, kind) (gputally_inventory_age_seconds) > 900 or "
            "sum by (cluster, kind) (increase(gputally_inventory_failures_total[15m])) > 0"
            " unless on (cluster, kind) gputally_inventory_age_seconds",
            "15m",
            "warning",
            "The accountant cannot read the cluster's {{ $labels.kind }}",
            "The ledger keeps the last known owners, node states and deletions.",
        ),
        Alert(
            "GputallyDeliveryStuck",
            'sum by (cluster, outcome) (gputally_deliveries{outcome=~"given-up|unsure"}) > 0',
            "0m",
            "warning",
            "{{ $value | humanize }} reports or notices wait for a person",
            "They were refused for days, or it is unknown whether they arrived. The accountant does not send them "
            "again.",
        ),
    ),
)

FAIRSHARE = RuleGroup(
    "gputally.fairshare",
    (
        Alert(
            "GputallyControllerStopped",
            "time() - max by (cluster) (gputally_fairshare_last_cycle_timestamp_seconds"
            " and on (cluster, instance) gputally_fairshare_leader == 1)"
            " > clamp_min(3 * max by (cluster) (gputally_fairshare_cycle_interval_seconds), 600)"
            " or sum by (cluster) (gputally_fairshare_leader) == 0 or " + _missed("gputally_fairshare_leader"),
            "5m",
            "warning",
            "The fairshare controller does not act",
            "No replica runs, is scraped or leads, or the leader completed no cycle for ten minutes or three "
            "intervals. Weights do not change.",
        ),
        Alert(
            "GputallyControllerDegraded",
            "max by (cluster, reason) (gputally_fairshare_controller_degraded) == 1",
            "15m",
            "warning",
            "The fairshare controller is degraded: {{ $labels.reason }}",
            "It uses the last good policy. A new policy is refused, or its decisions and its state cannot be stored.",
        ),
        Alert(
            "GputallyUsageStale",
            "min by (cluster) (gputally_fairshare_usage_age_seconds) > 900",
            "15m",
            "warning",
            "Usage is {{ $value | humanizeDuration }} old",
            "The controller holds the weights if usage is older than the policy's `max_staleness` (15 minutes by "
            "default).",
        ),
        Alert(
            "GputallyWeightsHeld",
            'max by (cluster, reason) (gputally_weights_held{reason!="NothingInService"}) == 1',
            "30m",
            "warning",
            "Queue weights are held: {{ $labels.reason }}",
            "The last good weights stay in force, and usage does not change them.",
        ),
        Alert(
            "GputallyTargetDegraded",
            "max by (cluster, target, reason) (gputally_fairshare_target_degraded) == 1",
            "15m",
            "warning",
            "The controller cannot serve {{ $labels.target }}: {{ $labels.reason }}",
            "Its objects are missing or contested, or writes are refused. Other schedulers get their weights.",
        ),
        Alert(
            "GputallySloUnreadable",
            "max by (cluster, slo) (gputally_slo_unreadable) == 1",
            "15m",
            "warning",
            "The latency of {{ $labels.slo }} cannot be read",
            "Its Prometheus does not answer, or the query has no number. The controller frees no GPUs for the service.",
        ),
        Alert(
            "GputallyQueueStarving",
            "max by (cluster, queue) (gputally_queue_waiting_gpus) > 0 and on (cluster, queue) "
            "max by (cluster, queue, target) (gputally_queue_allocated_gpus)"
            " < max by (cluster, queue, target) (gputally_queue_guaranteed_gpus)",
            "1h",
            "warning",
            "Queue {{ $labels.queue }} waits below its guarantee",
            "Its workloads wait for {{ $value | humanize }} GPUs while it holds less than its deserved quota.",
        ),
    ),
)

SAVING = RuleGroup(
    "gputally.saving",
    (
        Alert(
            "GputallyIdleHolder",
            "cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m > 0 and "
            "cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m"
            " < 0.01 * cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m",
            "4h",
            "info",
            "{{ $labels.namespace }}/{{ $labels.pod }} holds {{ $value | humanize }} GPUs and uses none",
            "The pod has used less than 1 % of its GPUs for hours. Its idle time is billed like busy time.",
        ),
        Alert(
            "GputallyIdleNode",
            "cluster_node:gputally_gpus:count"
            " and on (cluster, node) cluster_node:gputally_gpu_allocated_seconds:rate30m == 0"
            " unless on (cluster) (sum by (cluster) (gputally_queue_waiting_gpus) > 0)",
            "6h",
            "info",
            "No GPU of {{ $labels.node }} has been held for hours",
            "All {{ $value | humanize }} GPUs are free, and no workload waits: the node can be scaled down.",
        ),
        Alert(
            "GputallyStranded",
            "max by (cluster) (gputally_fairshare_stranded_gpus) > 0",
            "1h",
            "info",
            "{{ $value | humanize }} GPUs are free and fit no waiting workload",
            "The free GPUs are fragmented: waiting gangs need more GPUs on one node than any node has free.",
        ),
    ),
)

GROUPS = (RECORD_GROUP, METERING, LEDGER, FAIRSHARE, SAVING)
ALERTS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert))
RECORDS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, RecordingRule))


def render_rules() -> str:
    """Return the rule file with all groups."""
    return render_groups(GROUPS)
