"""Recording rules: what many ask for is computed once. Windows are 15 minutes, so that any metering interval fits."""

from __future__ import annotations

from dashboards.rulefile import Group, Record

WINDOW = "15m"
DEVICES = "max by (gpu_uuid, gpu_model, node) (gputally_gpu_info)"


def _of_device(series: str) -> str:
    return f"rate({series}[{WINDOW}]) * on (gpu_uuid) group_left (gpu_model, node) {DEVICES}"


RECORDS = Group(
    "gputally.records",
    (
        Record("cluster:gputally_gpus:count", f"count({DEVICES})"),
        Record("node:gputally_gpus:count", f"count by (node) ({DEVICES})"),
        Record(
            "node:gputally_gpu_unallocated_seconds:rate15m",
            f"sum by (node) ({_of_device('gputally_gpu_unallocated_seconds_total')})",
        ),
        Record(
            "model:gputally_gpu_busy:ratio_rate15m",
            f"sum by (gpu_model) ({_of_device('gputally_gpu_busy_seconds_total')}) / count by (gpu_model) ({DEVICES})",
        ),
        Record(
            "model:gputally_gpu_allocated:ratio_rate15m",
            f"sum by (gpu_model) ({_of_device('gputally_gpu_allocated_seconds_total')})"
            f" / count by (gpu_model) ({DEVICES})",
        ),
        Record(
            "namespace_pod:gputally_pod_gpu_allocated_seconds:rate15m",
            f"sum by (namespace, pod) (rate(gputally_pod_gpu_allocated_seconds_total[{WINDOW}]))",
        ),
        Record(
            "namespace_pod:gputally_pod_gpu_busy_seconds:rate15m",
            f"sum by (namespace, pod) (rate(gputally_pod_gpu_busy_seconds_total[{WINDOW}]))",
        ),
        Record(
            "namespace:gputally_pod_gpu_allocated_seconds:rate15m",
            "sum by (namespace) (namespace_pod:gputally_pod_gpu_allocated_seconds:rate15m)",
        ),
        Record(
            "namespace:gputally_pod_gpu_busy_seconds:rate15m",
            "sum by (namespace) (namespace_pod:gputally_pod_gpu_busy_seconds:rate15m)",
        ),
    ),
)
