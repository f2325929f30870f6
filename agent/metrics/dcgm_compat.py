"""Exports a subset of dcgm-exporter's metric names for existing dashboards.

The export is off by default. The figures are those of the last closed interval and the last snapshot, so the figures
of pods that share a device add up to the device's. Figures of the whole device (temperature, clocks, errors) have one
series, with the labels of the pod that has the device alone, or without a pod. gputally never reads these metrics.

Source of names, units and labels: dcgm-exporter, etc/default-counters.csv and its metric rendering."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.core.readings import DeviceReading, Gpu, NodeSnapshot, Unavailable
from agent.metering.meter import ClosedSet
from agent.metrics.metric_families import Family, names, plus, put
from agent.wire import UsageInterval
from gputally.base.units import US_PER_MS

_LABELS = (
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname",
    "namespace", "pod", "container",
)  # fmt: skip
_UJ_PER_MJ = 1_000
_PERCENT = 100
Labels = tuple[str, ...]


@dataclass(slots=True)
class _Share:
    """The figures of one series in the last interval; None if unknown.

    span_us: length of the interval.
    whole_us: GPU time of the whole device or MIG instance in the interval.
    in_instance: True for a MIG instance.
    total_uj: the energy since the agent started."""

    span_us: int
    whole_us: int
    in_instance: bool
    total_uj: int
    busy_us: int | None = None
    sm_active_us: int | None = None
    tensor_active_us: int | None = None
    energy_uj: int | None = None

    def add(self, row: UsageInterval) -> None:
        self.busy_us = plus(self.busy_us, row.busy_us)
        self.sm_active_us = plus(self.sm_active_us, row.sm_active_us)
        self.tensor_active_us = plus(self.tensor_active_us, row.tensor_active_us)
        self.energy_uj = plus(self.energy_uj, row.energy_uj)
        self.total_uj += row.energy_uj or 0


class DcgmOutput:
    """Exports the series with dcgm-exporter's names. One thread may update it while others scrape it."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._snapshot = NodeSnapshot(0, (), ())
        self._shares: dict[str, dict[Labels, _Share]] = {}

    def observe(self, snapshot: NodeSnapshot, sets: Sequence[ClosedSet]) -> None:
        """Update from a snapshot and the sets that closed with it."""
        with self._lock:
            self._snapshot = snapshot
            gpus = {device.gpu.uuid: device.gpu for device in snapshot.devices}
            for closed in sets:
                uuid = closed.rows[0].gpu_uuid
                if uuid in gpus:
                    self._shares[uuid] = self._read(gpus[uuid], closed.rows, self._shares.get(uuid, {}))
            for gone in self._shares.keys() - gpus.keys():
                del self._shares[gone]

    def _read(self, gpu: Gpu, rows: Sequence[UsageInterval], before: Mapping[Labels, _Share]) -> dict[Labels, _Share]:
        """Add up the rows of one set by series. The energy continues from `before`. Unheld and unattributed rows belong
        to the same series."""
        shares: dict[Labels, _Share] = {}
        for row in rows:
            labels = _row_labels(gpu, row, self._node)
            earlier = before.get(labels)
            span_us = (row.end_ms - row.start_ms) * US_PER_MS
            whole_us = span_us * row.slice.compute // row.slice.compute_of if row.slice else span_us
            total_uj = earlier.total_uj if earlier else 0
            shares.setdefault(labels, _Share(span_us, whole_us, row.slice is not None, total_uj)).add(row)
        return shares

    def collect(self) -> Iterable[Family]:
        """Return the families of one scrape."""
        with self._lock:
            return list(self._families())

    def _families(self) -> Iterator[Family]:
        util = _gauge("DEV_GPU_UTIL", "GPU utilization (in %); for a pod that shares the GPU, its part of it.")
        engine = _gauge("PROF_GR_ENGINE_ACTIVE", "Ratio of time the device or instance was active.")
        active = _gauge("PROF_SM_ACTIVE", "Ratio of multiprocessors active.")
        tensor = _gauge("PROF_PIPE_TENSOR_ACTIVE", "Ratio of time the tensor cores were active.")
        power = _gauge("DEV_POWER_USAGE", "Power draw (in W); for a pod that shares the GPU, its part of it.")
        for device in self._snapshot.devices:
            for labels, share in self._shares.get(device.gpu.uuid, {}).items():
                if not share.in_instance:
                    _ratio(util, labels, share.busy_us, share.span_us, _PERCENT)
                _ratio(engine, labels, share.busy_us, share.whole_us)
                _ratio(active, labels, share.sm_active_us, share.whole_us)
                _ratio(tensor, labels, share.tensor_active_us, share.whole_us)
                _ratio(power, labels, share.energy_uj, share.span_us)  # microjoules over microseconds are watts
        energy = Family(
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy (in mJ) since the agent started.", "untyped", _LABELS
        )
        for shares in self._shares.values():
            for labels, share in shares.items():
                energy.add(labels, share.total_uj / _UJ_PER_MJ)
        yield from (util, engine, active, tensor, power, energy)
        yield from self._memory()
        yield from self._condition()

    def _memory(self) -> Iterator[Family]:
        """Yield the memory that each holder uses, with a separate series for memory without a holder, and the free
        memory."""
        used, free = _gauge("DEV_FB_USED", "Memory used (in MiB)."), _gauge("DEV_FB_FREE", "Memory free (in MiB).")
        for device in self._snapshot.devices:
            total, gpu = device.memory_used_mib, device.gpu
            if isinstance(total, Unavailable):
                continue
            if gpu.memory_mib is not None:
                free.add(_labels(gpu, self._node), max(gpu.memory_mib - total, 0))
            for reading in device.holders:
                if not isinstance(reading.memory_mib, Unavailable):
                    mig = next((m for m in gpu.mig if m.uuid == reading.mig_uuid), None)
                    place = (mig.profile, str(mig.gi)) if mig else ("", "")
                    used.add(_labels(gpu, self._node, *place, *names(reading.holder)), reading.memory_mib)
                    total -= reading.memory_mib
            used.add(_labels(gpu, self._node), max(total, 0))
        yield from (used, free)

    def _condition(self) -> Iterator[Family]:
        temperature = _gauge("DEV_GPU_TEMP", "GPU temperature (in C).")
        sm_clock = _gauge("DEV_SM_CLOCK", "SM clock frequency (in MHz).")
        memory_clock = _gauge("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).")
        xid = _gauge("DEV_XID_ERRORS", "Number of the last XID error; 0 if there was none.")
        for device in self._snapshot.devices:
            labels, condition = self._whole(device), device.condition
            put(temperature, labels, condition.temperature_c)
            put(sm_clock, labels, condition.sm_clock_mhz)
            put(memory_clock, labels, condition.memory_clock_mhz)
            last = max(condition.xids, key=lambda error: error.last_ms, default=None)
            xid.add(labels, last.xid if last else 0)
        yield from (temperature, sm_clock, memory_clock, xid)

    def _whole(self, device: DeviceReading) -> Labels:
        shares = self._shares.get(device.gpu.uuid, {})
        return next(iter(shares)) if len(shares) == 1 else _labels(device.gpu, self._node)


def _row_labels(gpu: Gpu, row: UsageInterval, node: str) -> Labels:
    place = (row.slice.profile, str(row.slice.gi)) if row.slice else ("", "")
    holder = row.holder
    if holder is None or holder.kind == "unattributed":
        return _labels(gpu, node, *place)
    return _labels(gpu, node, *place, *names(holder))


def _labels(
    gpu: Gpu, node: str, profile: str = "", gi: str = "", namespace: str = "", pod: str = "", container: str = ""
) -> Labels:
    index = str(gpu.index)
    return (
        index, gpu.uuid, gpu.pci_bus_id, f"nvidia{index}", gpu.model, profile, gi, node, namespace, pod, container,
    )  # fmt: skip


def _gauge(name: str, text: str) -> Family:
    return Family(f"DCGM_FI_{name}", text, "gauge", _LABELS)


def _ratio(family: Family, labels: Labels, value: int | None, whole: int, times: int = 1) -> None:
    if value is not None and whole:
        family.add(labels, value * times / whole)
