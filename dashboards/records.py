"""Recording rules: what many ask for is computed once, for each cluster whose series a Prometheus has (without a label
`cluster` that is one). Windows are 30 minutes: intervals, which are a quarter of an hour at most, end in each of them.
"""

from __future__ import annotations

from dashboards.rulefile import Group, Record

WINDOW = "30m"
DEVICES = "max by (cluster, gpu_uuid, gpu_model, node) (gputally_gpu_info)"


def _of_device(series: str) -> str:
    return f"rate({series}[{WINDOW}]) * on (cluster, gpu_uuid) group_left (gpu_model, node) {DEVICES}"


def _by_model(series: str) -> str:
    """Over the time that was metered: a counter moves by a whole interval at once (see dashboards.promql)."""
    held, free = (
        _of_device("gputally_gpu_allocated_seconds_total"),
        _of_device("gputally_gpu_unallocated_seconds_total"),
    )
    whole = f"(sum by (cluster, gpu_model) ({held}) + sum by (cluster, gpu_model) ({free}))"
    return f"sum by (cluster, gpu_model) ({_of_device(series)}) / {whole}"


def _by_pod(what: str) -> str:
    return f"sum by (cluster, namespace, pod) (rate(gputally_pod_gpu_{what}_seconds_total[{WINDOW}]))"


RECORDS = Group(
    "gputally.records",
    (
        Record("cluster:gputally_gpus:count", f"count by (cluster) ({DEVICES})"),
        Record("cluster_node:gputally_gpus:count", f"count by (cluster, node) ({DEVICES})"),
        Record(
            "cluster_node:gputally_gpu_allocated_seconds:rate30m",
            f"sum by (cluster, node) ({_of_device('gputally_gpu_allocated_seconds_total')})",
        ),
        Record("cluster_model:gputally_gpu_busy:ratio_rate30m", _by_model("gputally_gpu_busy_seconds_total")),
        Record("cluster_model:gputally_gpu_allocated:ratio_rate30m", _by_model("gputally_gpu_allocated_seconds_total")),
        Record("cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m", _by_pod("allocated")),
        Record("cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m", _by_pod("busy")),
        Record(
            "cluster_namespace:gputally_pod_gpu_allocated_seconds:rate30m",
            "sum by (cluster, namespace) (cluster_namespace_pod:gputally_pod_gpu_allocated_seconds:rate30m)",
        ),
        Record(
            "cluster_namespace:gputally_pod_gpu_busy_seconds:rate30m",
            "sum by (cluster, namespace) (cluster_namespace_pod:gputally_pod_gpu_busy_seconds:rate30m)",
        ),
    ),
)
