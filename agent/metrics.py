"""What the agent shows to Prometheus: a second view of the same closed intervals that are billed.

Counters are sums of closed rows, so pods plus unattributed add up to the device here as they do in the
ledger; gauges are the last snapshot. A scrape reads and computes nothing. Device and pod series have
different names, so no query adds them up by mistake. The series of a holder that is gone stay for two
scrapes after its last value, then leave.
Totals start at zero with the process, as Prometheus expects of counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.meter import ClosedSet
from agent.model import Snapshot, Unavailable
from agent.wire import Holder, PodFacts, UsageInterval

SCRAPES_AFTER_END = 2
"""How often the series of a holder that is gone are still shown: the last value must be seen once even
if one scrape fails."""

_MIB = 1_048_576
_PREFIX = "gputally_"
_POD_LABELS = ("gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing", "method")
_PodKey = tuple[str, str, str, str, str, str, str]


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


class _Total:
    """Accumulated figures of one device or one holder on it, in wire units."""

    __slots__ = ("allocated_us", "busy_us", "energy_uj", "scrapes_left", "unattributed_us")

    def __init__(self) -> None:
        self.allocated_us = 0
        self.busy_us: int | None = None
        self.energy_uj: int | None = None
        self.unattributed_us = 0
        self.scrapes_left = SCRAPES_AFTER_END

    def add(self, row: UsageInterval) -> None:
        self.allocated_us += row.allocated_us
        if row.busy_us is not None:
            self.busy_us = (self.busy_us or 0) + row.busy_us
        if row.energy_uj is not None:
            self.energy_uj = (self.energy_uj or 0) + row.energy_uj


class AgentMetrics(Collector):
    """The agent's metrics on a registry of their own. Safe to scrape while it is being fed."""

    def __init__(self, node: str, version: str) -> None:
        self._node = node
        self._version = version
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._operations = Operations()
        self._closed = 0
        self._devices: dict[str, _Total] = {}
        self._pods: dict[_PodKey, _Total] = {}
        self._facts: dict[str, tuple[PodFacts, _Total]] = {}
        self._instances: dict[tuple[str, int, int], str] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def observe(self, snapshot: Snapshot, sets: Sequence[ClosedSet]) -> None:
        """Take over a snapshot and the sets that closed with it."""
        with self._lock:
            for closed in sets:
                self._closed += len(closed.rows)
                for row in closed.rows:
                    self._add(row)
            # The rows of a device that was repartitioned name its former instances: look them up first.
            for device in snapshot.devices:
                for instance in device.gpu.mig:
                    self._instances[device.gpu.uuid, instance.gi, instance.ci] = instance.uuid
            self._snapshot = snapshot
            for facts in snapshot.facts:
                _, life = self._facts.get(facts.uid, (facts, _Total()))
                self._facts[facts.uid] = (facts, life)

    def operate(self, operations: Operations) -> None:
        """Take over the state of the agent itself."""
        with self._lock:
            self._operations = operations

    def exposition(self) -> bytes:
        """One scrape, in the Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """One scrape. Called by the registry."""
        with self._lock:
            families = [*self._device_families(), *self._pod_families(), *self._agent_families()]
            self._retire()
        return families

    def _add(self, row: UsageInterval) -> None:
        device = self._devices.setdefault(row.gpu_uuid, _Total())
        device.scrapes_left = SCRAPES_AFTER_END
        device.add(row)
        if row.holder is None:
            return
        if row.holder.kind == "unattributed":
            device.unattributed_us += row.busy_us or 0
            return
        mig = self._instances.get((row.gpu_uuid, row.slice.gi, row.slice.ci), "") if row.slice else ""
        total = self._pods.setdefault(_pod_key(row, row.holder, mig), _Total())
        total.scrapes_left = SCRAPES_AFTER_END
        total.add(row)

    def _retire(self) -> None:
        """Count a scrape against every holder that is gone, and forget those that were shown enough."""
        if self._snapshot is None or isinstance(self._snapshot.allocations, Unavailable):
            return
        present = {(a.gpu_uuid, a.mig_uuid, *_names(a.holder)) for a in self._snapshot.allocations}
        for key in [key for key in self._pods if key[:5] not in present]:
            total = self._pods[key]
            total.scrapes_left -= 1
            if total.scrapes_left <= 0:
                del self._pods[key]
        alive = {a.holder.uid for a in self._snapshot.allocations}
        for uid in [uid for uid in self._facts if uid not in alive]:
            life = self._facts[uid][1]
            life.scrapes_left -= 1
            if life.scrapes_left <= 0:
                del self._facts[uid]
        listed = {device.gpu.uuid for device in self._snapshot.devices}
        for uuid in [uuid for uuid in self._devices if uuid not in listed]:
            self._devices[uuid].scrapes_left -= 1
            if self._devices[uuid].scrapes_left <= 0:
                del self._devices[uuid]

    def _device_families(self) -> Iterator[Metric]:
        readings = self._snapshot.devices if self._snapshot else ()
        info = _gauge(
            "gpu_info",
            "A GPU of this node; always 1.",
            ("gpu_uuid", "gpu_index", "gpu_model", "pci_bus_id", "driver_version", "node"),
        )
        for device in readings:
            gpu = device.gpu
            info.add_metric([gpu.uuid, str(gpu.index), gpu.model, gpu.pci_bus_id, gpu.driver_version, self._node], 1)
        yield info
        yield from self._device_counters()
        gaps = _counter("gpu_sample_gaps", "Stretches the driver's sample buffer had lost before it was read.", _GPU)
        used = _gauge("gpu_memory_used_bytes", "Device memory in use.", _GPU)
        size = _gauge("gpu_memory_total_bytes", "Device memory installed.", _GPU)
        power = _gauge("gpu_power_watts", "Power drawn.", _GPU)
        lost = _gauge("gpu_lost", "1 while the GPU is listed but cannot be used.", _GPU)
        for device in readings:
            labels = [device.gpu.uuid]
            gaps.add_metric(labels, device.sample_gaps)
            if not isinstance(device.memory_used_mib, Unavailable):
                used.add_metric(labels, device.memory_used_mib * _MIB)
            size.add_metric(labels, device.gpu.memory_mib * _MIB)
            if not isinstance(device.power_mw, Unavailable):
                power.add_metric(labels, device.power_mw / 1_000)
            lost.add_metric(labels, device.health == "lost")
        yield from (gaps, used, size, power, lost)

    def _device_counters(self) -> Iterator[Metric]:
        busy = _counter("gpu_busy_seconds", "Time the GPU was busy, whoever used it.", _GPU)
        energy = _counter("gpu_energy_joules", "Energy the GPU used.", _GPU)
        nobody = _counter("gpu_unattributed_busy_seconds", "Busy time that belongs to no known holder.", _GPU)
        for uuid, total in sorted(self._devices.items()):
            if total.busy_us is not None:
                busy.add_metric([uuid], total.busy_us / 1_000_000)
            if total.energy_uj is not None:
                energy.add_metric([uuid], total.energy_uj / 1_000_000)
            nobody.add_metric([uuid], total.unattributed_us / 1_000_000)
        yield from (busy, energy, nobody)

    def _pod_families(self) -> Iterator[Metric]:
        allocated = _counter("pod_gpu_allocated_seconds", "GPU time given to the holder.", _POD_LABELS)
        busy = _counter("pod_gpu_busy_seconds", "Physical-GPU time the holder was busy.", _POD_LABELS)
        energy = _counter("pod_gpu_energy_joules", "Energy put on the holder.", _POD_LABELS)
        for key, total in sorted(self._pods.items()):
            allocated.add_metric(key, total.allocated_us / 1_000_000)
            if total.busy_us is not None:
                busy.add_metric(key, total.busy_us / 1_000_000)
            if total.energy_uj is not None:
                energy.add_metric(key, total.energy_uj / 1_000_000)
        yield from (allocated, busy, self._pod_memory(), energy, self._pod_info())

    def _pod_memory(self) -> Metric:
        memory = _gauge("pod_gpu_memory_used_bytes", "Device memory the holder uses.", _POD_LABELS)
        current = {
            (device.gpu.uuid, reading.mig_uuid, *_names(reading.holder)): reading.memory_mib
            for device in (self._snapshot.devices if self._snapshot else ())
            for reading in device.holders
        }
        for key in sorted(self._pods):
            used = current.get(key[:5])
            if used is not None and not isinstance(used, Unavailable):
                memory.add_metric(key, used * _MIB)
        return memory

    def _pod_info(self) -> Metric:
        info = _gauge(
            "pod_info",
            "A pod that holds a GPU here, and who it works for; always 1.",
            ("namespace", "pod", "uid", "node", "workload", "queue"),
        )
        for _, (facts, _) in sorted(self._facts.items()):
            info.add_metric([facts.namespace, facts.name, facts.uid, facts.node, facts.workload, facts.queue_ref], 1)
        return info

    def _agent_families(self) -> Iterator[Metric]:
        ops = self._operations
        if ops.nvml_up is not None:
            yield _single(_gauge("nvml_up", "1 while the NVIDIA driver answers."), ops.nvml_up)
        yield _single(_gauge("agent_outbox_rows", "Records that wait for the accountant."), ops.outbox_rows)
        yield _single(_gauge("agent_outbox_bytes", "Size of the outbox."), ops.outbox_bytes)
        yield _single(
            _gauge("agent_outbox_oldest_age_seconds", "Age of the oldest record that waits."), ops.outbox_oldest_age_s
        )
        yield _single(_counter("agent_intervals_closed", "Usage rows closed by the meter."), self._closed)
        uploads = _counter("agent_uploads", "Uploads by result.", ("result",))
        parked = _counter("agent_rows_parked", "Records the accountant cannot take, by reason.", ("reason",))
        for family, values in ((uploads, ops.uploads), (parked, ops.parked)):
            for name, value in sorted(values.items()):
                family.add_metric([name], value)
            yield family
        success = _gauge("collector_success", "1 where the source answered last time.", ("collector",))
        duration = _gauge("collector_duration_seconds", "How long its last reading took.", ("collector",))
        for name, (succeeded, seconds) in sorted(ops.collectors.items()):
            success.add_metric([name], succeeded)
            duration.add_metric([name], seconds)
        yield from (success, duration)
        build = _gauge("agent_build_info", "The running agent; always 1.", ("version",))
        build.add_metric([self._version], 1)
        yield build


_GPU = ("gpu_uuid",)


def _gauge(name: str, text: str, labels: Sequence[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, labels: Sequence[str] = ()) -> CounterMetricFamily:
    """`name` without the `_total` that the exposition adds."""
    return CounterMetricFamily(_PREFIX + name, text, labels=labels)


def _single(family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family


def _names(holder: Holder) -> tuple[str, str, str]:
    return holder.namespace, holder.name or holder.uid, holder.container


def _pod_key(row: UsageInterval, holder: Holder, mig_uuid: str) -> _PodKey:
    namespace, pod, container = _names(holder)
    sharing = row.sharing.mode if row.sharing else ""
    return row.gpu_uuid, mig_uuid, namespace, pod, container, sharing, row.method
