"""GPU-hours by OpenCost's published rule: its two Prometheus queries and its arithmetic on the answers.

OpenCost itself does not run here. Queries and rule follow its source (opencost/opencost, 2026: `QueryPods`,
`QueryGPUsRequested` and `durationStringFor` in modules/prometheus-source/pkg/prom, and `calculateStartAndEnd` and
`applyGPUsAllocated` in pkg/costmodel). A pod runs from the first to the last sample with a running container; samples
are one resolution apart. A single sample counts as one resolution around it. Time outside the window does not count. A
pod's GPUs are its average request of `nvidia.com/gpu`, the figure that its exporter publishes as
`container_gpu_allocation`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Pod = tuple[str, str, str]
"""Namespace, name, uid."""


@dataclass(frozen=True)
class Asked:
    """A window and the resolution of the queries, in seconds. OpenCost's default resolution is 300."""

    start_s: int
    end_s: int
    resolution_s: int = 300

    def running(self, cluster: str) -> str:
        """The query of running containers, sample by sample. It starts one resolution early, because Prometheus 3
        excludes the left edge."""
        window = (self.end_s - self.start_s + self.resolution_s) // 60
        return (
            f'avg(kube_pod_container_status_running{{cluster="{cluster}"}} != 0) by (pod, namespace, uid, cluster)'
            f"[{window}m:{self.resolution_s // 60}m]"
        )

    def requested(self, cluster: str) -> str:
        """The query of the average GPU request of each container."""
        only = f'resource="nvidia_com_gpu", container!="", container!="POD", node!="", cluster="{cluster}"'
        window = (self.end_s - self.start_s) // 60
        return (
            f"avg(avg_over_time(kube_pod_container_resource_requests{{{only}}}[{window}m])) "
            "by (container, pod, namespace, node, uid, cluster)"
        )

    def seconds(self, looks: Iterable[tuple[float, str]]) -> float:
        """Return the running time that the rule derives from a pod's samples."""
        times = sorted(at for at, _ in looks)
        first, last = times[0], times[-1]
        if first == last:
            first, last = first - self.resolution_s / 2, last + self.resolution_s / 2
        return min(last, float(self.end_s)) - max(first, float(self.start_s))

    def gpu_hours(
        self, running: Iterable[Mapping[str, Any]], requested: Iterable[Mapping[str, Any]]
    ) -> dict[Pod, float]:
        """Return the GPU-hours of each pod from the answers to both queries; pods that requested no whole GPU are left
        out."""
        lasted = {_pod(row["metric"]): self.seconds(row["values"]) for row in running}
        hours: dict[Pod, float] = defaultdict(float)
        for row in requested:
            pod = _pod(row["metric"])
            if pod in lasted:
                hours[pod] += float(row["value"][1]) * lasted[pod] / 3_600
        return dict(hours)


def by_namespace(hours: Mapping[Pod, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (namespace, _, _), each in hours.items():
        found[namespace] += each
    return dict(found)


def _pod(labels: Mapping[str, str]) -> Pod:
    return labels["namespace"], labels["pod"], labels["uid"]
