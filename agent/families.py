"""The agent's Prometheus families: what each is called, what it means, and how it is drawn from totals.

Base units, counters first, a help text that ends in a full stop. Device and pod series have different
names, so that no query adds them up by mistake; a pod's uid is on its `_info` series only. How busy time
was come by (`method`) is a label of the pod counters: it is the method of the newest row, and a series
whose method changes goes on under the new label, so that a sum over them never counts twice.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agent.model import Allocation, DeviceReading, HolderReading, Reading, Snapshot, Unavailable
from agent.wire import Holder, Method, PodFacts, UsageInterval

PREFIX = "gputally_"
_MIB = 1_048_576
_MICRO = 1_000_000
_MEGAHERTZ = 1_000_000
_GPU = ("gpu_uuid",)
_POD = ("gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing", "method")
PodKey = tuple[str, str, str, str, str, str]
"""(gpu uuid, MIG uuid, namespace, pod, container, sharing): one holder on one device."""


@dataclass(frozen=True, slots=True)
class Operations:
    """The state of the agent itself, handed over by its loop after every turn.

    nvml_up None: there is no NVML here (a simulated or imported source). collectors: per source its
    success and how long its last reading took, in seconds."""

    nvml_up: bool | None = None
    outbox_rows: int = 0
    outbox_bytes: int = 0
    outbox_oldest_age_s: float = 0.0
    uploads: Mapping[str, int] = field(default_factory=dict)
    parked: Mapping[str, int] = field(default_factory=dict)
    collectors: Mapping[str, tuple[bool, float]] = field(default_factory=dict)
    intervals_closed: int = 0


class Total:
    """Accumulated figures of one device or of one holder on it, in wire units; None: never known."""

    __slots__ = (
        "allocated_us", "busy_us", "energy_uj", "memory_mib_s", "method", "sm_active_us", "tensor_active_us",
        "unattributed_us", "unheld_uj", "unheld_us",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocated_us = 0
        self.unheld_us = 0
        self.unattributed_us = 0
        self.unheld_uj = 0
        self.busy_us: int | None = None
        self.sm_active_us: int | None = None
        self.tensor_active_us: int | None = None
        self.memory_mib_s: int | None = None
        self.energy_uj: int | None = None
        self.method: Method = "allocation"

    def add(self, row: UsageInterval) -> None:
        """One row of the holder."""
        self.allocated_us += row.allocated_us
        self.busy_us = _sum(self.busy_us, row.busy_us)
        self.sm_active_us = _sum(self.sm_active_us, row.sm_active_us)
        self.tensor_active_us = _sum(self.tensor_active_us, row.tensor_active_us)
        self.memory_mib_s = _sum(self.memory_mib_s, row.memory_mib_s)
        self.energy_uj = _sum(self.energy_uj, row.energy_uj)
        if row.busy_us is not None or self.busy_us is None:
            self.method = row.method

    def add_device(self, row: UsageInterval) -> None:
        """One row of the device, whoever's."""
        self.add(row)
        if row.holder is None:
            self.unheld_us += row.capacity_us
        elif row.holder.kind == "unattributed":
            self.unattributed_us += row.busy_us or 0
        if row.holder is None or row.holder.kind == "unattributed":
            self.unheld_uj += row.energy_uj or 0


def names(holder: Holder) -> tuple[str, str, str]:
    """(namespace, pod, container) labels of a holder; one without a name goes by its uid."""
    return holder.namespace, holder.name or holder.uid, holder.container


def of_devices(snapshot: Snapshot, totals: Mapping[str, Total], node: str) -> Iterator[Metric]:
    """Families of the physical GPUs, one series each (per error code and the like)."""
    readings = snapshot.devices
    info = _gauge(
        "gpu_info",
        "A GPU of this node; always 1.",
        ("gpu_uuid", "gpu_index", "gpu_model", "pci_bus_id", "driver_version", "node"),
    )
    slices = _gauge(
        "gpu_mig_info", "A MIG instance of a GPU; always 1.", ("gpu_uuid", "mig_uuid", "profile", "gi", "ci")
    )
    for device in readings:
        gpu = device.gpu
        info.add_metric([gpu.uuid, str(gpu.index), gpu.model, gpu.pci_bus_id, gpu.driver_version, node], 1)
        for instance in gpu.mig:
            labels = [gpu.uuid, instance.uuid, instance.profile, str(instance.gi), str(instance.ci)]
            slices.add_metric(labels, 1)
    yield from (info, slices)
    yield from _device_counters(totals)
    gaps = _counter("gpu_sample_gaps", "Stretches the driver's sample buffer had lost before it was read.", _GPU)
    for device in readings:
        gaps.add_metric([device.gpu.uuid], device.sample_gaps)
    yield gaps
    yield from _device_gauges(readings)
    yield _disagreements(snapshot)


def _device_counters(totals: Mapping[str, Total]) -> Iterator[Metric]:
    ordered = [([uuid], total) for uuid, total in sorted(totals.items())]
    for name, text, attribute, per in (
        ("gpu_busy_seconds", "Time the GPU was busy, whoever used it.", "busy_us", _MICRO),
        ("gpu_sm_active_seconds", "Time the GPU's multiprocessors were active, averaged over them.", "sm_active_us",
         _MICRO),
        ("gpu_tensor_active_seconds", "Time the GPU's tensor cores were active.", "tensor_active_us", _MICRO),
        ("gpu_energy_joules", "Energy the GPU used.", "energy_uj", _MICRO),
        ("gpu_unattributed_busy_seconds", "Busy time that belongs to no known holder.", "unattributed_us", _MICRO),
        ("gpu_unallocated_seconds", "GPU time that nobody held.", "unheld_us", _MICRO),
        ("gpu_unallocated_energy_joules", "Energy that was put on no holder.", "unheld_uj", _MICRO),
    ):  # fmt: skip
        yield _totals(_counter(name, text, _GPU), ordered, attribute, per)


def _device_gauges(readings: Sequence[DeviceReading]) -> Iterator[Metric]:
    used = _gauge("gpu_memory_used_bytes", "Device memory in use.", _GPU)
    size = _gauge("gpu_memory_total_bytes", "Device memory installed.", _GPU)
    power = _gauge("gpu_power_watts", "Power drawn.", _GPU)
    lost = _gauge("gpu_lost", "1 while the GPU is listed but cannot be used.", _GPU)
    for device in readings:
        labels = [device.gpu.uuid]
        _put(used, labels, device.memory_used_mib, _MIB)
        size.add_metric(labels, device.gpu.memory_mib * _MIB)
        _put(power, labels, device.power_mw, 1, 1_000)
        lost.add_metric(labels, device.health == "lost")
    yield from (used, size, power, lost)


def _disagreements(snapshot: Snapshot) -> Metric:
    family = _gauge(
        "attribution_disagreements",
        "Pods that run on the GPU without holding it: where control groups and the kubelet disagree.",
        _GPU,
    )
    if not isinstance(snapshot.allocations, Unavailable):
        for device in snapshot.devices:
            family.add_metric([device.gpu.uuid], len(strangers(device, snapshot.allocations)))
    return family


def strangers(device: DeviceReading, allocations: Iterable[Allocation]) -> tuple[Holder, ...]:
    """Pods whose processes were found on the device (or instance) although nobody gave it to them."""
    held = {(a.holder.uid, a.mig_uuid) for a in allocations if a.gpu_uuid == device.gpu.uuid}
    found = {
        r.holder.uid: r.holder
        for r in device.holders
        if r.holder.kind == "pod" and (r.holder.uid, r.mig_uuid) not in held
    }
    return tuple(found.values())


def of_pods(snapshot: Snapshot, totals: Mapping[PodKey, Total], facts: Iterable[PodFacts]) -> Iterator[Metric]:
    """Families of the holders, one series per holder and device, and who the pods are."""
    ordered = [([*key, total.method], total) for key, total in sorted(totals.items())]
    for name, text, attribute, per in (
        ("pod_gpu_allocated_seconds", "GPU time given to the holder.", "allocated_us", _MICRO),
        ("pod_gpu_busy_seconds", "Physical-GPU time the holder was busy.", "busy_us", _MICRO),
        ("pod_gpu_sm_active_seconds", "Multiprocessor activity put on the holder; on a shared GPU by busy time.",
         "sm_active_us", _MICRO),
        ("pod_gpu_tensor_active_seconds", "Tensor core activity put on the holder; on a shared GPU by busy time.",
         "tensor_active_us", _MICRO),
        ("pod_gpu_energy_joules", "Energy put on the holder: active energy by busy time, idle by allocation.",
         "energy_uj", _MICRO),
    ):  # fmt: skip
        yield _totals(_counter(name, text, _POD), ordered, attribute, per)
    byte_seconds = _counter("pod_gpu_memory_byte_seconds", "Device memory the holder used, over time.", _POD)
    for labels, total in ordered:
        if total.memory_mib_s is not None:
            byte_seconds.add_metric(labels, total.memory_mib_s * _MIB)
    yield byte_seconds
    memory = _gauge("pod_gpu_memory_used_bytes", "Device memory the holder uses.", _POD)
    current = {_place(d, r): r.memory_mib for d in snapshot.devices for r in d.holders}
    for labels, _ in ordered:
        _put(memory, labels, current.get(tuple(labels[:5]), Unavailable("not read")), _MIB)
    yield memory
    info = _gauge(
        "pod_info",
        "A pod that holds a GPU here, and who it works for; always 1.",
        ("namespace", "pod", "uid", "node", "workload", "queue"),
    )
    for fact in sorted(facts, key=lambda fact: fact.uid):
        info.add_metric([fact.namespace, fact.name, fact.uid, fact.node, fact.workload, fact.queue_ref], 1)
    yield info


def _place(device: DeviceReading, reading: HolderReading) -> tuple[str, ...]:
    return device.gpu.uuid, reading.mig_uuid, *names(reading.holder)


def of_the_agent(ops: Operations, version: str) -> Iterator[Metric]:
    """Families of the agent itself and of its sources."""
    yield _single(_counter("agent_intervals_closed", "Usage rows closed by the meter."), ops.intervals_closed)
    uploads = _counter("agent_uploads", "Uploads by result.", ("result",))
    parked = _counter("agent_rows_parked", "Records the accountant cannot take, by reason.", ("reason",))
    for family, values in ((uploads, ops.uploads), (parked, ops.parked)):
        for name, value in sorted(values.items()):
            family.add_metric([name], value)
        yield family
    if ops.nvml_up is not None:
        yield _single(_gauge("nvml_up", "1 while the NVIDIA driver answers."), ops.nvml_up)
    yield _single(_gauge("agent_outbox_rows", "Records that wait for the accountant."), ops.outbox_rows)
    yield _single(_gauge("agent_outbox_bytes", "Size of the outbox."), ops.outbox_bytes)
    yield _single(
        _gauge("agent_outbox_oldest_age_seconds", "Age of the oldest record that waits."), ops.outbox_oldest_age_s
    )
    success = _gauge("collector_success", "1 where the source answered last time.", ("collector",))
    duration = _gauge("collector_duration_seconds", "How long its last reading took.", ("collector",))
    for name, (succeeded, seconds) in sorted(ops.collectors.items()):
        success.add_metric([name], succeeded)
        duration.add_metric([name], seconds)
    yield from (success, duration)
    build = _gauge("agent_build_info", "The running agent; always 1.", ("version",))
    build.add_metric([version], 1)
    yield build


def _gauge(name: str, text: str, labels: Sequence[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, labels: Sequence[str] = ()) -> CounterMetricFamily:
    """`name` without the `_total` that the exposition adds."""
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _single(family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family


def _totals(
    family: CounterMetricFamily, totals: Iterable[tuple[list[str], Total]], attribute: str, per: int
) -> CounterMetricFamily:
    for labels, total in totals:
        value = getattr(total, attribute)
        if value is not None:
            family.add_metric(labels, value / per)
    return family


def _put(
    family: GaugeMetricFamily | CounterMetricFamily, labels: Sequence[str], value: Reading, times: int = 1, per: int = 1
) -> None:
    """Unknown is no series, and never 0."""
    if not isinstance(value, Unavailable):
        family.add_metric(labels, value * times / per if per != 1 else value * times)


def _sum(total: int | None, value: int | None) -> int | None:
    return total if value is None else (total or 0) + value
