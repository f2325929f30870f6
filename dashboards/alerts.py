"""Alerts: what a person has to know without looking. Each has a section of its own in docs/runbooks.md.

An alert waits (`for`) long enough that a roll-out, a restart or one lost scrape is none. Values and labels in texts are
Prometheus' own templates.
"""

from __future__ import annotations

from dashboards.records import DEVICES
from dashboards.rulefile import Alert, Group

METERING = Group(
    "gputally.metering",
    (
        Alert(
            "GputallyAgentDown",
            "max by (node) (gputally_unmetered_gpus) > 0",
            "15m",
            "warning",
            "Nothing is heard of GPUs on {{ $labels.node }}",
            "{{ $value | humanize }} GPUs are unmetered there: no agent runs, or it cannot deliver. "
            "What an agent has spooled is booked once it arrives; time that none has seen is lost to the books.",
        ),
        Alert(
            "GputallyDriverSilent",
            "max by (instance) (gputally_nvml_up) == 0",
            "10m",
            "warning",
            "The NVIDIA driver does not answer the agent at {{ $labels.instance }}",
            "The agent runs and has no GPUs to read. Who holds those it knows goes on holding them, "
            "their use unknown; the others are unmetered until the driver answers.",
        ),
        Alert(
            "GputallyCoverageLow",
            "min(gputally_ledger_coverage_ratio) < 0.98 and on () sum(gputally_unmetered_gpus) > 0",
            "30m",
            "warning",
            "Only {{ $value | humanizePercentage }} of the month's GPU time is metered, and more goes missing",
            "The month's report says how much is not known; weights are held where their window knows as little.",
        ),
        Alert(
            "GputallySpoolAgeing",
            "max by (instance) (gputally_agent_outbox_oldest_age_seconds) > 3600",
            "15m",
            "warning",
            "The agent at {{ $labels.instance }} has not delivered for {{ $value | humanizeDuration }}",
            "Its spool keeps what it measures, for days by default; then the time is lost.",
        ),
        Alert(
            "GputallySpoolLosing",
            "sum by (instance) (increase(gputally_agent_unspooled_lost_rows_total[15m])) > 0",
            "0m",
            "critical",
            "The agent at {{ $labels.instance }} loses measurements",
            "Its spool cannot be written, and its memory is full: {{ $value | humanize }} rows are gone.",
        ),
        Alert(
            "GputallyGpuLost",
            f"max by (gpu_uuid) (gputally_gpu_lost) * on (gpu_uuid) group_left (node, gpu_model) {DEVICES} == 1",
            "2m",
            "warning",
            "GPU {{ $labels.gpu_uuid }} of {{ $labels.node }} is lost",
            "The driver lists the GPU ({{ $labels.gpu_model }}) and cannot use it. Its time is booked as down: whoever "
            "holds it is not billed.",
        ),
        Alert(
            "GputallyGpuSilent",
            "max by (gpu_uuid) (gputally_gpu_silent unless on (instance) gputally_nvml_up == 0)"
            f" * on (gpu_uuid) group_left (node, gpu_model) {DEVICES} == 1",
            "5m",
            "warning",
            "GPU {{ $labels.gpu_uuid }} of {{ $labels.node }} does not answer",
            "The driver answers for the others of the node. What the GPU ({{ $labels.gpu_model }}) does is not known: "
            "whoever holds it is billed for holding it.",
        ),
        Alert(
            "GputallyXid",
            "time() - max by (gpu_uuid, xid) (gputally_gpu_xid_last_timestamp_seconds) < 900",
            "0m",
            "warning",
            "XID {{ $labels.xid }} on GPU {{ $labels.gpu_uuid }}",
            "The driver reported the error within the last 15 minutes.",
        ),
    ),
)

LEDGER = Group(
    "gputally.ledger",
    (
        Alert(
            "GputallyLedgerDown",
            "max(gputally_ledger_up) == 0 or absent(gputally_ledger_up)",
            "10m",
            "critical",
            "The ledger cannot be read",
            "The accountant does not run, is not scraped, or cannot read its file. Agents spool; weights stay.",
        ),
        Alert(
            "GputallyImbalance",
            "max(abs(gputally_ledger_imbalance_microseconds)) > 0",
            "5m",
            "critical",
            "The books do not balance",
            "{{ $value | humanize }} GPU-µs of the last settled hour stand in no account or in two: a defect.",
        ),
        Alert(
            "GputallyLedgerDiskFull",
            "min(gputally_ledger_room_bytes) < 1073741824",
            "5m",
            "critical",
            "The ledger's volume has {{ $value | humanize1024 }}B left",
            "At 0 batches are refused with 503, and agents spool. Nothing breaks, and nothing is billed.",
        ),
        Alert(
            "GputallyLedgerDiskFilling",
            "min(predict_linear(gputally_ledger_room_bytes[6h], 259200)) < 0",
            "1h",
            "warning",
            "The ledger's volume is full within three days",
            "At the rate of the last six hours there is no room left in three days.",
        ),
        Alert(
            "GputallyQuarantine",
            "max(delta(gputally_ledger_quarantined_rows[1h])) > 0",
            "0m",
            "warning",
            "{{ $value | humanize }} records were not booked within the last hour",
            "They contradict what is known, or come from the future. Their time is unmetered.",
        ),
        Alert(
            "GputallyGpusUnpriced",
            "sum by (gpu_model, pool) (gputally_unpriced_gpus) > 0.5",
            "1h",
            "warning",
            "{{ $value | humanize }} GPUs of model {{ $labels.gpu_model }} have no price",
            "No row of the price book prices them in pool {{ $labels.pool }}. Their time is unpriced, not free, and "
            "the cost of every team that holds them is unknown.",
        ),
        Alert(
            "GputallyBudgetNearlySpent",
            "max by (budget, team) (gputally_budget_spent_ratio) >= 0.8 < 1",
            "0m",
            "info",
            "Budget {{ $labels.budget }} is {{ $value | humanizePercentage }} used",
            "Of team {{ $labels.team }}, this month.",
        ),
        Alert(
            "GputallyBudgetSpent",
            "max by (budget, team) (gputally_budget_spent_ratio) >= 1",
            "0m",
            "warning",
            "Budget {{ $labels.budget }} is used up ({{ $value | humanizePercentage }})",
            "Of team {{ $labels.team }}, this month. What then happens is the policy's business (`exhausted`).",
        ),
        Alert(
            "GputallyBudgetForecast",
            "max by (budget, team) (gputally_budget_forecast_ratio) > 1",
            "6h",
            "info",
            "Budget {{ $labels.budget }} comes to {{ $value | humanizePercentage }} by the month's end",
            "At the rate of the month's days so far, team {{ $labels.team }} overspends.",
        ),
    ),
)

FAIRSHARE = Group(
    "gputally.fairshare",
    (
        Alert(
            "GputallyControllerStopped",
            "time() - max(gputally_fairshare_last_cycle_timestamp_seconds) > 600"
            " or sum(gputally_fairshare_leader) == 0 or absent(gputally_fairshare_last_cycle_timestamp_seconds)",
            "5m",
            "warning",
            "The fairshare controller does not act",
            "None runs or is scraped, no replica leads, or none has made a pass for ten minutes. "
            "Weights stay as they are.",
        ),
        Alert(
            "GputallyControllerDegraded",
            "max by (reason) (gputally_fairshare_controller_degraded) == 1",
            "15m",
            "warning",
            "The fairshare controller is not whole: {{ $labels.reason }}",
            "It acts by the last good policy. A new one is refused, or what it decides and remembers cannot be kept.",
        ),
        Alert(
            "GputallyUsageStale",
            "min(gputally_fairshare_usage_age_seconds) > 900",
            "15m",
            "warning",
            "Usage is {{ $value | humanizeDuration }} old",
            "Weights follow usage no older than the policy's `max_staleness` (15 minutes unless it says otherwise); "
            "beyond it they are held.",
        ),
        Alert(
            "GputallyWeightsHeld",
            'max by (reason) (gputally_weights_held{reason!="NothingInService"}) == 1',
            "30m",
            "warning",
            "Queue weights are held: {{ $labels.reason }}",
            "The last good weights stay in force; history does not move them.",
        ),
        Alert(
            "GputallyTargetDegraded",
            "max by (target, reason) (gputally_fairshare_target_degraded) == 1",
            "15m",
            "warning",
            "The controller cannot serve {{ $labels.target }}: {{ $labels.reason }}",
            "Its objects are missing or contested, or writes are refused. Other schedulers are served.",
        ),
        Alert(
            "GputallySloUnreadable",
            "max by (slo) (gputally_slo_unreadable) == 1",
            "15m",
            "warning",
            "The latency of {{ $labels.slo }} cannot be read",
            "Its Prometheus does not answer, or the query has no number. However slow it gets, no room is made for it.",
        ),
        Alert(
            "GputallyQueueStarving",
            "max by (queue) (gputally_queue_waiting_gpus) > 0 and on (queue) "
            "max by (queue) (gputally_queue_allocated_gpus) < max by (queue) (gputally_queue_guaranteed_gpus)",
            "1h",
            "warning",
            "Queue {{ $labels.queue }} waits below its guarantee",
            "{{ $value | humanize }} GPUs are waited for while the queue holds less than its deserved quota.",
        ),
    ),
)

SAVING = Group(
    "gputally.saving",
    (
        Alert(
            "GputallyIdleHolder",
            "namespace_pod:gputally_pod_gpu_allocated_seconds:rate15m > 0 and "
            "namespace_pod:gputally_pod_gpu_busy_seconds:rate15m"
            " < 0.01 * namespace_pod:gputally_pod_gpu_allocated_seconds:rate15m",
            "4h",
            "info",
            "{{ $labels.namespace }}/{{ $labels.pod }} holds {{ $value | humanize }} GPUs and uses none",
            "It has been below 1 % for hours. It is billed like work.",
        ),
        Alert(
            "GputallyIdleNode",
            "(node:gputally_gpu_unallocated_seconds:rate15m >= 0.99 * node:gputally_gpus:count)"
            " unless on () (sum(gputally_queue_waiting_gpus) > 0)",
            "6h",
            "info",
            "Nobody has held a GPU of {{ $labels.node }} for hours",
            "All {{ $value | humanize }} GPUs are free, and nobody waits: a node worth scaling down.",
        ),
        Alert(
            "GputallyStranded",
            "max(gputally_fairshare_stranded_gpus) > 0",
            "1h",
            "info",
            "{{ $value | humanize }} GPUs are free and fit nobody who waits",
            "The room is in pieces: waiting gangs need more on one node than any node has left.",
        ),
    ),
)
