"""The dashboards as data, and the metrics that the three programs publish."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest

from dashboards.build import DASHBOARDS

POD = {"gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing", "method"}

PUBLISHED: dict[str, set[str]] = {
    # agent
    "gpu_info": {"gpu_uuid", "gpu_index", "gpu_model", "pci_bus_id", "driver_version", "node"},
    "gpu_busy_seconds_total": {"gpu_uuid"},
    "gpu_energy_joules_total": {"gpu_uuid"},
    "gpu_memory_used_bytes": {"gpu_uuid"},
    "gpu_memory_total_bytes": {"gpu_uuid"},
    "gpu_power_watts": {"gpu_uuid"},
    "gpu_lost": {"gpu_uuid"},
    "gpu_sample_gaps_total": {"gpu_uuid"},
    "gpu_unattributed_busy_seconds_total": {"gpu_uuid"},
    "pod_gpu_allocated_seconds_total": POD,
    "pod_gpu_busy_seconds_total": POD,
    "pod_gpu_memory_used_bytes": POD,
    "pod_gpu_energy_joules_total": POD,
    "pod_info": {"namespace", "pod", "uid", "node", "workload", "queue"},
    "gpu_mig_info": {"gpu_uuid", "mig_uuid", "profile", "gi", "ci"},
    "gpu_sm_active_seconds_total": {"gpu_uuid"},
    "gpu_tensor_active_seconds_total": {"gpu_uuid"},
    "gpu_unallocated_seconds_total": {"gpu_uuid"},
    "gpu_unallocated_energy_joules_total": {"gpu_uuid"},
    "gpu_xid_errors_total": {"gpu_uuid", "xid"},
    "gpu_xid_last_timestamp_seconds": {"gpu_uuid", "xid"},
    "gpu_ecc_errors_total": {"gpu_uuid", "kind"},
    "gpu_temperature_celsius": {"gpu_uuid"},
    "gpu_sm_clock_hertz": {"gpu_uuid"},
    "gpu_memory_clock_hertz": {"gpu_uuid"},
    "gpu_throttle_reason": {"gpu_uuid", "reason"},
    "attribution_disagreements": {"gpu_uuid"},
    "pod_gpu_sm_active_seconds_total": POD,
    "pod_gpu_tensor_active_seconds_total": POD,
    "pod_gpu_memory_byte_seconds_total": POD,
    "pod_gpu_share_ratio": POD,
    "nvml_up": set(),
    "agent_outbox_rows": set(),
    "agent_outbox_bytes": set(),
    "agent_outbox_oldest_age_seconds": set(),
    "agent_unspooled_rows": set(),
    "agent_unspooled_lost_rows_total": set(),
    "agent_sample_duration_seconds": set(),
    "agent_intervals_closed_total": set(),
    "agent_uploads_total": {"result"},
    "agent_rows_parked_total": {"reason"},
    "collector_success": {"collector"},
    "collector_duration_seconds": {"collector"},
    "agent_build_info": {"version"},
    # accountant
    "ingest_rows_total": {"result"},
    "ingest_batches_total": {"code"},
    "ingest_commit_seconds": set(),
    "ledger_up": set(),
    "ledger_coverage_ratio": set(),
    "ledger_watermark_timestamp_seconds": set(),
    "ledger_imbalance_microseconds": set(),
    "ledger_quarantined_rows": set(),
    "ledger_wal_bytes": set(),
    "capacity_gpus": {"gpu_model", "pool"},
    "account_gpu_seconds_total": {"account", "gpu_model"},
    "team_gpu_seconds_total": {"team", "account"},
    "team_cost_total": {"team", "currency"},
    "budget_spent_ratio": {"budget"},
    "budget_forecast_ratio": {"budget"},
    "accountant_build_info": {"version"},
    # fairshare
    "queue_entitled_gpus": {"queue", "target"},
    "queue_usage_ratio": {"queue", "target"},
    "queue_weight": {"queue", "target"},
    "queue_weight_base": {"queue"},
    "queue_waiting_gpus": {"queue"},
    "weights_held": {"reason"},
    "fairshare_leader": set(),
    "fairshare_writes": {"target", "result"},
    "fairshare_cycle_seconds": set(),
    "fairshare_usage_age_seconds": set(),
    "fairshare_target_degraded": {"target", "reason"},
    "fairshare_build_info": {"version"},
}
"""Name without the prefix `gputally_` -> the labels that the program itself sets."""


@pytest.fixture(scope="session")
def published() -> dict[str, set[str]]:
    return PUBLISHED


@pytest.fixture(scope="session", params=sorted(DASHBOARDS))
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARDS[request.param]())
    return loaded


def _parse(expression: str) -> Any:
    """The syntax tree of an expression as Grafana would send it."""
    substituted = expression.replace("$__rate_interval", "4m").replace("$__range", "24h").replace("$", "")
    return promql_parser.parse(substituted)


@pytest.fixture(scope="session")
def parse() -> Any:
    return _parse
