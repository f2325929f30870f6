"""GPU-hours as OpenCost makes them of what a Prometheus recorded: its two questions, and its arithmetic on the answers.

The program itself does not run here. Its questions and its rule are stated as its source has them (opencost/opencost,
2026: `QueryPods`, `QueryGPUsRequested` and `durationStringFor` in modules/prometheus-source/pkg/prom, and
`calculateStartAndEnd` and `applyGPUsAllocated` in pkg/costmodel): a pod lasts from the first to the last look at which
a container of it ran, looks being a resolution apart; one look alone stands for one resolution around it; nothing
reaches over the window. Its GPUs are the average of what it requested of `nvidia.com/gpu`, which is also what its
exporter calls `container_gpu_allocation`. Pure: rows of answers in, hours out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Pod = tuple[str, str, str]
"""Namespace, name, uid."""


@dataclass(frozen=True)
class Asked:
    """A window and how far apart the looks are, seconds. resolution_s: 300 unless it is configured."""

    start_s: int
    end_s: int
    resolution_s: int = 300

    def running(self, cluster: str) -> str:
        """Who ran, look by look. Prometheus 3 leaves out the left edge, so one resolution more is asked for."""
        window = (self.end_s - self.start_s + self.resolution_s) // 60
        return (
            f'avg(kube_pod_container_status_running{{cluster="{cluster}"}} != 0) by (pod, namespace, uid, cluster)'
            f"[{window}m:{self.resolution_s // 60}m]"
        )

    def requested(self, cluster: str) -> str:
        """GPUs of each container, on average."""
        only = f'resource="nvidia_com_gpu", container!="", container!="POD", node!="", cluster="{cluster}"'
        window = (self.end_s - self.start_s) // 60
        return (
            f"avg(avg_over_time(kube_pod_container_resource_requests{{{only}}}[{window}m])) "
            "by (container, pod, namespace, node, uid, cluster)"
        )

    def seconds(self, looks: Iterable[tuple[float, str]]) -> float:
        """What the rule makes of the looks at which a pod ran."""
        times = sorted(at for at, _ in looks)
        first, last = times[0], times[-1]
        if first == last:
            first, last = first - self.resolution_s / 2, last + self.resolution_s / 2
        return min(last, float(self.end_s)) - max(first, float(self.start_s))

    def gpu_hours(
        self, running: Iterable[Mapping[str, Any]], requested: Iterable[Mapping[str, Any]]
    ) -> dict[Pod, float]:
        """By pod, from the answers to both questions; a pod that requested no whole GPUs has none."""
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
