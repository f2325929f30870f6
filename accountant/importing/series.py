"""What a Prometheus answered about a chunk, and how its labels are read, whatever generation they are of. Pure.

A scraped label that meets one of the target's own is renamed `exported_…`, unless the scrape honours labels. So the
`exported_` name counts where there is one. On a series of dcgm-exporter that nobody holds there is none even then, and
`pod` is the exporter itself: who really asked for a GPU is told by kube-state-metrics, and where that is missing the
exporter is known by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from accountant.importing.cells import Grid
from accountant.inventory.workloads import MARKS
from agent.queues import QUEUE_KEYS

Labels = Mapping[str, str]
PodName = tuple[str, str]
"""(namespace, name)."""
_EXPORTER = re.compile(r"dcgm-exporter")
_OLD_NAMES: Final = {"pod": ("pod_name",), "namespace": ("pod_namespace",), "container": ("container_name",)}
_RESOURCE = re.compile(r"nvidia[._]com[/_](.+)")
_MIG = re.compile(r"mig[-_]((?:\d+c[._])?\d+g[._]\d+gb)(?:([._+])(\w+(?:[._]\w+)*))?")
_KEPT = QUEUE_KEYS | {mark.label for mark in MARKS} | {
    "pod-template-hash", "workloadKind", "workloadName", "ray.io/originated-from-crd", "ray.io/originated-from-cr-name",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """times: epoch ms, ascending; values: as many."""

    labels: Labels
    times: Sequence[int]
    values: Sequence[float]

    def cells(self, grid: Grid) -> dict[int, float]:
        """Finite values by cell of the grid."""
        start, step, count = grid.start_ms, grid.step_ms, grid.count  # a million of these in a chunk
        return {
            (at - start) // step - 1: value
            for at, value in zip(self.times, self.values, strict=True)
            if value - value == 0 and not (at - start) % step and start < at <= start + count * step
        }


@dataclass(frozen=True)
class Observed:
    """One chunk's answers. Series over the grid: `requests` (value: count), `over` (pods that have ended), `nodes`
    (listed), `unready`, `busy` (0 to 1), `memory` (MiB), `power` (W). The rest is one value per series: `devices` seen
    lately, `allocatable`, `starts`, `ends` (epoch s), and names.

    window_ms: samples of so long before an instant count for it. scrape_ms: between two samples of
    kube-state-metrics."""

    grid: Grid
    window_ms: int
    scrape_ms: int
    requests: tuple[Series, ...] = ()
    over: tuple[Series, ...] = ()
    nodes: tuple[Series, ...] = ()
    unready: tuple[Series, ...] = ()
    busy: tuple[Series, ...] = ()
    memory: tuple[Series, ...] = ()
    power: tuple[Series, ...] = ()
    devices: tuple[Labels, ...] = ()
    allocatable: tuple[tuple[Labels, float], ...] = ()
    starts: tuple[tuple[Labels, float], ...] = ()
    ends: tuple[tuple[Labels, float], ...] = ()
    pods: tuple[Labels, ...] = ()
    owners: tuple[Labels, ...] = ()
    upper_owners: tuple[Labels, ...] = ()
    schedulers: tuple[Labels, ...] = ()
    pod_labels: tuple[Labels, ...] = ()
    node_labels: tuple[Labels, ...] = field(default=())


def of(labels: Labels, name: str) -> str:
    """A label under its own name, an older one, or behind `exported_`."""
    for known in (name, *_OLD_NAMES.get(name, ())):
        if value := labels.get(f"exported_{known}") or labels.get(known):
            return value
    return ""


def pod_of(labels: Labels) -> PodName:
    return of(labels, "namespace"), of(labels, "pod")


def device_of(labels: Labels) -> tuple[str, int | None] | None:
    """(GPU uuid, GPU instance or None) of a series of dcgm-exporter; None where it names no GPU."""
    uuid = labels.get("UUID") or labels.get("uuid") or ""
    instance = labels.get("GPU_I_ID", "")
    if not uuid:
        return None
    return uuid, int(instance) if instance.isascii() and instance.isdigit() and len(instance) <= 4 else None


def labelled_pod(labels: Labels) -> PodName | None:
    """The pod that a series of dcgm-exporter names, None for none and for the exporter itself."""
    name = pod_of(labels)
    renamed = "exported_pod" in labels or "exported_pod_name" in labels
    if not name[1] or (not renamed and (_EXPORTER.search(name[1]) or _EXPORTER.search(labels.get("container", "")))):
        return None
    return name


def resource(text: str) -> str:
    """`nvidia_com_mig_1g_10gb` as Kubernetes writes it, `nvidia.com/mig-1g.10gb`; "" for what is no GPU."""
    match = _RESOURCE.fullmatch(text)
    if match is None:
        return ""
    mig = _MIG.fullmatch(match[1])
    if mig is None:
        return f"nvidia.com/{match[1].replace('_', '.')}"
    tail = "" if mig[3] is None else f".{mig[3].replace('_', '.')}"
    return f"nvidia.com/mig-{mig[1].replace('_', '.')}{tail}"


def pod_label_names(extra: Iterable[str] = ()) -> dict[str, str]:
    """By the name that kube-state-metrics gives a label, the label: of those that may say whose a pod is."""
    return {f"label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": key for key in sorted({*_KEPT, *extra})}
