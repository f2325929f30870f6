"""One physical GPU read through NVML: counters, gauges, MIG instances and compute processes.

Remembers what a counter needs between readings, and the MIG list, whose lookup is slow. Handles come
and go with the library (`open`, `close`); what is known of the GPU stays. It must not know who a
process belongs to. Raises what `agent.nvml.Driver.call` raises beyond Refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agent.busy import BusyCounter
from agent.model import DeviceReading, Gpu, InstanceReading, MigInstance, ProcessReading, Reading, Unavailable
from agent.nvml import Driver, Lost, Refused
from agent.units import MS_PER_MINUTE, US_PER_MS

MIG_RESCAN_MS = MS_PER_MINUTE
_MIB = 1024 * 1024
_MICROJOULES_PER_MILLIJOULE = 1_000
_PERCENT = 100
_SUCCESS, _NOT_FOUND, _GPU_IS_LOST = 0, 6, 15
_DEFAULT_SLICES = 7
_NO_MIG_RATE = Unavailable("MIG: no utilisation")
_NO_PROCESS_RATE = Unavailable("no per-process utilisation")


class Device:
    """One GPU. origin: makes this run's counters distinct from those of an earlier run."""

    def __init__(self, driver: Driver, gpu: Gpu, origin: str) -> None:
        self.gpu = gpu
        self._driver = driver
        self._origin = origin
        self._epoch = 0
        self._handle: Any = None
        self._energy_mj = 0
        self._busy = BusyCounter()
        self._instances: tuple[tuple[Any, MigInstance], ...] = ()
        self._mig_scan_ms = 0
        self._rates_known = True
        self._rates_seen_us = 0
        self._rates_at_ms: int | None = None
        self._pids: set[int] = set()

    def open(self, handle: Any, gpu: Gpu) -> None:
        """Use a fresh handle of the same GPU."""
        self._handle = handle
        self.gpu = replace(
            gpu, mig=self.gpu.mig, mig_enabled=self.gpu.mig_enabled, compute_slices=self.gpu.compute_slices
        )

    def close(self, *, forget: bool) -> None:
        """Handles are void from here on. forget: the driver may restart, so its counters begin anew."""
        self._handle = None
        self._instances = ()
        self._mig_scan_ms = 0
        if forget:
            self._epoch += 1
            self._energy_mj = 0
            self._busy = BusyCounter()
            self._rates_known = True
            self._rates_seen_us = 0
            self._rates_at_ms = None

    def read(self, at_ms: int) -> DeviceReading:
        """Everything now. Raises Lost, Restart, DriverReplaced."""
        if self._handle is None:
            raise Lost(_GPU_IS_LOST)
        memory = self._memory(self._handle)
        self._refresh_mig(at_ms)
        energy = self._energy()
        busy = self._busy_us(at_ms)
        return DeviceReading(
            gpu=self.gpu,
            counter_epoch=f"{self._origin}.{self._epoch}",
            busy_us=busy,
            energy_uj=energy,
            memory_used_mib=memory,
            power_mw=self._driver.figure("nvmlDeviceGetPowerUsage", self._handle),
            sample_gaps=self._busy.gaps,
            instances=tuple(InstanceReading(m.uuid, memory_mib=self._memory(handle)) for handle, m in self._instances),
            method="allocation" if self.gpu.mig_enabled else "device",
            processes=tuple(self._processes(at_ms)),
        )

    def unread(self, reason: str, *, lost: bool = False) -> DeviceReading:
        """What is known of the GPU while it cannot be read."""
        why = Unavailable(reason)
        return DeviceReading(
            gpu=self.gpu,
            health="lost" if lost else "ok",
            counter_epoch=f"{self._origin}.{self._epoch}",
            busy_us=why,
            energy_uj=why,
            memory_used_mib=why,
            power_mw=why,
            sample_gaps=self._busy.gaps,
        )

    def _memory(self, handle: Any) -> Reading:
        """Used MiB. Version 2 leaves out what the driver reserves for itself; older drivers lack it."""
        name, version = "nvmlDeviceGetMemoryInfo", self._driver.constant("nvmlMemory_v2")
        used = self._driver.figure(name, handle, version, read=lambda info: int(info.used) // _MIB)
        if isinstance(used, Unavailable):
            used = self._driver.figure(name, handle, read=lambda info: int(info.used) // _MIB)
        return used

    def _energy(self) -> Reading:
        """Microjoules since an arbitrary origin. A decrease is a driver reload or a wrap: a new epoch."""
        energy = self._driver.figure("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        if isinstance(energy, Unavailable):
            return energy
        if energy < self._energy_mj:
            self._epoch += 1
        self._energy_mj = energy
        return energy * _MICROJOULES_PER_MILLIJOULE

    def _busy_us(self, at_ms: int) -> Reading:
        """The driver's sample ring, integrated. No samples means idle only where the rate can be read."""
        rate = self._driver.figure("nvmlDeviceGetUtilizationRates", self._handle, read=lambda rates: int(rates.gpu))
        if isinstance(rate, Unavailable):
            return _NO_MIG_RATE if self.gpu.mig_enabled else rate
        kind = self._driver.constant("NVML_GPU_UTILIZATION_SAMPLES")
        try:
            _, samples = self._driver.call("nvmlDeviceGetSamples", self._handle, kind, self._busy.last_seen_us)
        except Refused:
            samples = []
        return self._busy.take(at_ms, [(s.timeStamp, s.sampleValue.uiVal) for s in samples], min(rate, _PERCENT))

    def _processes(self, at_ms: int) -> Iterator[ProcessReading]:
        places = [(handle, mig.uuid) for handle, mig in self._instances] or [(self._handle, "")]
        rates = _NO_MIG_RATE if self.gpu.mig_enabled else self._process_busy(at_ms)
        alive: set[int] = set()
        for handle, mig_uuid in places:
            memory = self._running(handle)
            alive |= memory.keys()
            for pid in sorted(memory):
                busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
                yield ProcessReading(pid, mig_uuid, memory[pid], busy)
        if not isinstance(rates, Unavailable):
            # Ended since the last reading. A number never seen alive is noise of the driver.
            for pid in sorted((rates.keys() & self._pids) - alive):
                yield ProcessReading(pid, "", 0, rates[pid], running=False)
        self._pids = alive

    def _running(self, handle: Any) -> dict[int, Reading]:
        """Compute processes and MPS clients, with their memory."""
        found: dict[int, Reading] = {}
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            try:
                listed = self._driver.call(name, handle)
            except Refused:
                continue
            for process in listed:
                used = process.usedGpuMemory
                found[process.pid] = Unavailable("not reported") if used is None else int(used) // _MIB
        return found

    def _process_busy(self, at_ms: int) -> dict[int, int] | Unavailable:
        """Busy microseconds per process since the previous reading: a sampled percentage of that time.
        Above 100 it is garbage, dropped and not clamped."""
        if not self._rates_known:
            return _NO_PROCESS_RATE
        elapsed_ms = 0 if self._rates_at_ms is None else at_ms - self._rates_at_ms
        try:
            found = self._driver.call("nvmlDeviceGetProcessUtilization", self._handle, self._rates_seen_us)
        except Refused as fault:
            if fault.code not in (_SUCCESS, _NOT_FOUND):  # both mean: nobody was busy
                self._rates_known = False
                return _NO_PROCESS_RATE
            found = []
        self._rates_at_ms = at_ms
        self._rates_seen_us = max([self._rates_seen_us, *(s.timeStamp for s in found)])
        return {s.pid: s.smUtil * elapsed_ms * US_PER_MS // _PERCENT for s in found if s.smUtil <= _PERCENT}

    def _refresh_mig(self, at_ms: int) -> None:
        """Keep the list of instances. A lookup costs up to 100 ms, holes included: once a minute."""
        try:
            enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._handle)[0])
        except Refused:
            enabled = False
        if enabled == self.gpu.mig_enabled and (not enabled or at_ms < self._mig_scan_ms):
            return
        limit = self._driver.figure("nvmlDeviceGetMaxMigDeviceCount", self._handle) if enabled else 0
        count = 0 if isinstance(limit, Unavailable) else limit
        self._instances = tuple(self._look_up(count))
        self._mig_scan_ms = at_ms + MIG_RESCAN_MS
        mig = tuple(instance for _, instance in self._instances)
        self.gpu = replace(self.gpu, mig=mig, mig_enabled=enabled, compute_slices=count or _DEFAULT_SLICES)

    def _look_up(self, count: int) -> Iterator[tuple[Any, MigInstance]]:
        for index in range(count):
            try:
                handle = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)
                attributes = self._driver.call("nvmlDeviceGetAttributes", handle)
                instance = MigInstance(
                    uuid=str(self._driver.call("nvmlDeviceGetUUID", handle)),
                    profile=_profile(str(self._driver.call("nvmlDeviceGetName", handle)), attributes),
                    gi=self._driver.call("nvmlDeviceGetGpuInstanceId", handle),
                    ci=self._driver.call("nvmlDeviceGetComputeInstanceId", handle),
                    compute=attributes.computeInstanceSliceCount,
                    memory_mib=attributes.memorySizeMB,
                )
            except Refused:  # a hole in the numbering
                continue
            yield handle, instance


def _profile(name: str, attributes: Any) -> str:
    """`1g.10gb` from the instance's name; built from its slices where the driver does not say."""
    named = re.search(r"\bMIG (\S+)$", name)
    if named:
        return named.group(1)
    return f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
