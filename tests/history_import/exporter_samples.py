"""Samples of dcgm-exporter and kube-state-metrics for a simulated cluster, as OpenMetrics for back-filling.

Two generations of labels. `old` is scraped without `honorLabels`: the workload is in `exported_…` labels and the
exporter in `pod`, kube-state-metrics has no uid with requests, and a time-sliced GPU has no pod. `new` honours labels:
an unheld GPU has the exporter's own name, and a time-sliced GPU the pod that came last. In both the exporter's labels
are one scrape old, and a completed pod is listed for a while with its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from agent.wire import PodFacts
from fairshare.simulator.simulation_model import (
    WHOLE,
    Event,
    GpuSpec,
    OutageBegan,
    OutageEnded,
    SimulatedNodeSpec,
    Started,
    Stopped,
)
from gputally.base.units import MS_PER_MINUTE
from gputally.demo.cluster_and_workload import REPLICAS, SHARED
from gputally.demo.simulated_machines import pods_of

Generation = Literal["old", "new"]
_LINGER_MS = 10 * MS_PER_MINUTE
_SLOW = 5
"""Scrapes between two samples of a pod's unchanging series, which keeps the history small."""


@dataclass
class _Pod:
    facts: PodFacts
    slots: list[tuple[str, int]]
    resource: str
    permille: int
    ended_ms: int | None = None
    told: str = ""
    """The pod's phase in its last sample."""


@dataclass
class Scraped:
    """Receives the simulation's events in order and writes a sample of everything at each scrape."""

    nodes: tuple[SimulatedNodeSpec, ...]
    cluster: str
    generation: Generation
    scrape_ms: int
    lines: dict[str, list[str]] = field(default_factory=dict)
    _pods: dict[tuple[str, int, str], _Pod] = field(default_factory=dict)
    _labels: dict[tuple[str, int], PodFacts] = field(default_factory=dict)
    _down: set[str] = field(default_factory=set)

    def run(self, events: list[Event], start_ms: int, end_ms: int) -> None:
        waiting = iter([*events, None])
        event = next(waiting)
        for number, at_ms in enumerate(range(start_ms + self.scrape_ms // 2, end_ms, self.scrape_ms)):
            while event is not None and event.at_ms <= at_ms:
                self._see(event)
                event = next(waiting)
            self._scrape(at_ms, names=number % _SLOW == 0)

    def _see(self, event: Event) -> None:
        if isinstance(event, Started):
            for pod in pods_of(event, {}, frozenset(), {node.name for node in self.nodes}):
                slots = [(slot.gpu, slot.index) for slot in event.slots if slot.node == pod.node]
                (resource,) = pod.facts.requests
                self._pods[event.job.id, event.attempt, pod.node] = _Pod(
                    pod.facts, slots, resource, event.job.utilisation_permille
                )
        elif isinstance(event, Stopped):
            for key in [key for key in self._pods if key[:2] == (event.job.id, event.attempt)]:
                if event.reason == "finished":
                    self._pods[key].ended_ms = event.at_ms
                else:
                    del self._pods[key]
        elif isinstance(event, OutageBegan):
            self._down.add(event.outage.name)
        elif isinstance(event, OutageEnded):
            self._down.discard(event.outage.name)

    def _scrape(self, at_ms: int, *, names: bool) -> None:
        self._pods = {
            key: pod for key, pod in self._pods.items() if pod.ended_ms is None or at_ms < pod.ended_ms + _LINGER_MS
        }
        held: dict[tuple[str, int], _Pod] = {
            slot: pod for pod in self._pods.values() if pod.ended_ms is None for slot in pod.slots
        }
        for node in self.nodes:
            self._node(node, at_ms)
            if node.name not in self._down:
                for index, gpu in enumerate(node.gpus):
                    if gpu.uuid not in self._down:
                        for name, value, labels in self._gpu(node, index, gpu, held):
                            self._write(name, at_ms, value, **labels)
        self._labels = {slot: pod.facts for slot, pod in held.items()}
        for pod in self._pods.values():
            self._pod(pod, at_ms, names=names)

    def _gpu(
        self, node: SimulatedNodeSpec, index: int, gpu: GpuSpec, held: dict[tuple[str, int], _Pod]
    ) -> Iterator[tuple[str, float, dict[str, str]]]:
        base = {"gpu": str(index), "UUID": gpu.uuid, "modelName": gpu.model, "device": f"nvidia{index}"}
        base |= {"Hostname" if self.generation == "old" else "hostname": node.name}
        if gpu.shapes == (WHOLE,):
            permille = held[gpu.uuid, 0].permille if (gpu.uuid, 0) in held else 0
            labels = base | self._of_pod(node.name, self._labels.get((gpu.uuid, 0)))
            yield "DCGM_FI_DEV_GPU_UTIL", permille / 10, labels
            yield "DCGM_FI_DEV_POWER_USAGE", 100 + permille / 4, labels
        elif SHARED in gpu.shapes:
            who = [held[gpu.uuid, n] for n in range(REPLICAS) if (gpu.uuid, n) in held]
            seen = [self._labels[gpu.uuid, n] for n in range(REPLICAS) if (gpu.uuid, n) in self._labels]
            last = seen[-1] if seen and self.generation == "new" else None
            yield (
                "DCGM_FI_DEV_GPU_UTIL",
                sum(p.permille for p in who) / 10 / REPLICAS,
                base | self._of_pod(node.name, last),
            )
        else:
            for number, shape in enumerate(gpu.shapes):
                permille = held[gpu.uuid, number].permille if (gpu.uuid, number) in held else 0
                of = {"GPU_I_ID": str(number + 1), "GPU_I_PROFILE": shape}
                labels = base | of | self._of_pod(node.name, self._labels.get((gpu.uuid, number)))
                yield "DCGM_FI_PROF_GR_ENGINE_ACTIVE", permille / 1000, labels

    def _of_pod(self, node: str, pod: PodFacts | None) -> dict[str, str]:
        exporter = {"pod": f"nvidia-dcgm-exporter-{node}", "namespace": "gpu-operator", "container": "dcgm-exporter"}
        if pod is None:
            return exporter
        named = {"pod": pod.name, "namespace": pod.namespace, "container": "main"}
        return (
            exporter | {f"exported_{key}": value for key, value in named.items()} if self.generation == "old" else named
        )

    def _node(self, node: SimulatedNodeSpec, at_ms: int) -> None:
        self._write("kube_node_info", at_ms, 1, node=node.name)
        ready = float(node.name not in self._down)
        self._write("kube_node_status_condition", at_ms, ready, node=node.name, condition="Ready", status="true")
        offered: dict[str, int] = {}
        for gpu in node.gpus:
            for shape in gpu.shapes:
                resource = {WHOLE: "nvidia_com_gpu", SHARED: "nvidia_com_gpu_shared"}.get(
                    shape, f"nvidia_com_mig_{shape.replace('.', '_')}"
                )
                offered[resource] = offered.get(resource, 0) + 1
        for resource, count in offered.items():
            self._write("kube_node_status_allocatable", at_ms, count, node=node.name, resource=resource, unit="integer")

    def _pod(self, pod: _Pod, at_ms: int, *, names: bool) -> None:
        facts = pod.facts
        mine = {"namespace": facts.namespace, "pod": facts.name}
        uid = {"uid": facts.uid}
        kind = pod.resource.replace(".", "_").replace("/", "_").replace("-", "_")
        request = {"container": "main", "node": facts.node, "resource": kind, "unit": "integer"}
        told = uid if self.generation == "new" else {}
        self._write("kube_pod_container_resource_requests", at_ms, len(pod.slots), **self._ksm(mine | told), **request)
        over = float(pod.ended_ms is not None)
        for name, value in (("Running", 1 - over), ("Succeeded", over)):
            self._write("kube_pod_status_phase", at_ms, value, phase=name, **self._ksm(mine | told))
        phase = "over" if over else "on"
        if names or pod.told != phase:
            pod.told = phase
            about = self._ksm(mine | uid)
            owner = facts.owners[0]
            self._write("kube_pod_info", at_ms, 1, node=facts.node, **about)
            self._write("kube_pod_owner", at_ms, 1, owner_kind=owner.kind, owner_name=owner.name,
                        owner_is_controller="true", **about)  # fmt: skip
            self._write("kube_pod_labels", at_ms, 1, label_kai_scheduler_queue=facts.namespace, **about)
            self._write("kube_pod_start_time", at_ms, (facts.started_ms or 0) // 1000, **about)
            if pod.ended_ms is not None:
                self._write("kube_pod_completion_time", at_ms, pod.ended_ms // 1000, **about)

    def _ksm(self, labels: dict[str, str]) -> dict[str, str]:
        if self.generation == "new":
            return labels
        own = {"pod": "kube-state-metrics-0", "namespace": "monitoring"}
        return own | {f"exported_{key}" if key in own else key: value for key, value in labels.items()}

    def _write(self, name: str, at_ms: int, value: float, **labels: str) -> None:
        inside = ",".join(f'{key}="{text}"' for key, text in sorted({**labels, "cluster": self.cluster}.items()))
        self.lines.setdefault(name, []).append(f"{name}{{{inside}}} {value!r} {at_ms / 1000:.3f}")


def openmetrics(*scraped: Scraped) -> str:
    """Return several clusters' samples: families together, samples of a series in order of time."""
    found: list[str] = []
    for name in sorted({name for one in scraped for name in one.lines}):
        found.append(f"# TYPE {name} gauge")
        for one in scraped:
            found += one.lines.get(name, [])
    return "\n".join([*found, "# EOF", ""])
