"""Reads one physical GPU: counters, gauges, MIG instances, processes and the recovery actions that its faults require.

Handles exist while the library is open (`open`, `close`). The facts about the GPU stay while the library is closed, and
so do the counters unless the driver may have been restarted. A failed reading is Unavailable with its reason, and does
not affect the other readings. This module does not know the holder of a process.

The error code of one reading may mean that the GPU is lost, that the library must be restarted or that the driver was
replaced. `NvmlDevice.read` then confirms this by two calls: it counts the GPUs and opens this one again. It raises the
error that one of these calls gives, and nothing if both succeed. If no reading of the GPU succeeded, it raises Lost or
DriverReplaced even then."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from agent.core.readings import (
    DeviceCondition,
    DeviceReading,
    Gpu,
    InstanceReading,
    Reading,
    Recovery,
    RecoveryAction,
    Unavailable,
)
from agent.gpu_readers.nvml.gpm_mig_activity import Gpm
from agent.gpu_readers.nvml.mig_layout import MigDevice, MigLayout
from agent.gpu_readers.nvml.nvml_events import RECOVERY, Events
from agent.gpu_readers.nvml.nvml_library import Driver, Lost, NvmlFault, NvmlRefused, Restart
from agent.gpu_readers.nvml.utilization import BusyCounter, EnergyCounter, Processes, ProcessSampler
from agent.wire import Health
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

log = logging.getLogger("agent.gpu_readers.nvml.nvml_device")

CONDITION_EVERY_MS = 10 * MS_PER_SECOND
"""Time between two readings of clocks, temperature and similar values, which people do not need more often."""
_MIB = 1024 * 1024
_PERCENT = 100
_GPU_IS_LOST = 15
_OPEN = "nvmlDeviceGetHandleByIndex"
_RECOVERY_ACTIONS: dict[int, RecoveryAction] = {
    1: "reset_gpu", 2: "drain_node", 4: "reset_gpu", 6: "reset_gpu", 7: "drain_node",
}  # fmt: skip
"""nvmlDeviceGpuRecoveryAction_t: 1 reset, 2 reboot of the node, 4 drain and reset, 6 reset of the bus, 7 reboot of the
system. 3 (stop peer-to-peer) and 5 (IMEX domain) leave the GPU itself working."""
_SAMPLE = ("timeStamp", "sampleValue")
_NO_MIG_RATE = Unavailable("MIG: no utilisation")
_SHARED_GI = Unavailable("GPM: shares its GPU instance")


_GRACE = re.compile(r"\bG[BH](\d{2,3})\b")
"""GH200, GB200, GB300, GB10: a GPU beside a Grace CPU."""


def total_mib(driver: Driver, handle: Any) -> Reading:
    """Return the size of a GPU's memory in MiB. A driver that refuses the older version of the call may support the
    newer one."""
    name = "nvmlDeviceGetMemoryInfo"
    size = driver.figure(name, handle, read=lambda info: int(info.total) // _MIB)
    if isinstance(size, Unavailable):
        size = driver.figure(name, handle, driver.constant("nvmlMemory_v2"), read=lambda info: int(info.total) // _MIB)
    return size or Unavailable(f"{name}: no size")


def _health(recoveries: Sequence[Recovery]) -> Health:
    return "lost" if any(recovery.unusable for recovery in recoveries) else "ok"


class Access(msgspec.Struct, frozen=True):
    """What the agent may read and change.

    processes: True if the agent sees the host's processes, to which the driver's process numbers refer.
    enable_accounting: True to switch accounting mode on, for the whole host."""

    processes: bool = True
    enable_accounting: bool = False


class NvmlDevice:
    """One GPU.

    origin: distinguishes the counters of this process from those of an earlier process.
    clock: dates the GPM samples (agent.gpu_readers.nvml.gpm_mig_activity)."""

    def __init__(
        self, driver: Driver, events: Events, gpu: Gpu, origin: str, access: Access, clock: Clock | None = None
    ) -> None:
        self.gpu = gpu
        self._driver = driver.another()
        self._events = events
        self._origin = origin
        self._access = access
        self._epoch = 0
        self._handle: Any = None
        self._missing = ""
        """Why there is no handle although the GPU may not be lost; "" otherwise."""
        self._energy = EnergyCounter()
        self._busy = BusyCounter()
        self._has_ring = self._ringless = False
        self._coherent: bool | None = None
        """True if the GPU shares its memory with the system; None if unknown."""
        self._facts_ms: int | None = None
        self._mig = MigLayout(self._driver)
        self._gpm = Gpm(self._driver, clock)
        self._sampler = ProcessSampler(self._driver, gpu.uuid, enable_accounting=access.enable_accounting)
        self._clock_set_back = self._sampler_behind = False
        """True until the sample ring, or the process sampler, has handled a clock that was set back."""
        self._condition = DeviceCondition()
        self._condition_ms: int | None = None
        self._row_remap_pending: bool | None = None
        self._remap_recovery: Recovery | None = None
        self._driver_recovery: Recovery | None = None
        self._recoveries: tuple[Recovery, ...] = ()
        self._was_lost = False
        """True from a reading in which the GPU was lost until it answers again."""
        self._victims: set[int] | None = None
        """Processes that ran when a contained memory error was reported and still run; None if unknown."""

    @property
    def known(self) -> bool:
        """True once the MIG layout is known. Before that, it is unknown which part of the GPU a holder has."""
        return self._mig.known

    def open(self, handle: Any, gpu: Gpu) -> None:
        """Use a new handle and description of the same GPU."""
        self._handle = handle
        self.gpu = replace(
            gpu, mig=self.gpu.mig, mig_enabled=self.gpu.mig_enabled, compute_slices=self.gpu.compute_slices
        )
        self._events.listen(gpu.uuid, handle)

    def miss(self, faults: Sequence[NvmlFault]) -> None:
        """Record that the library started without this GPU.

        faults: why GPUs could not be opened. The library does not say which GPUs these are, so this GPU counts as lost
            only if every fault means a lost GPU."""
        readable = [fault for fault in faults if not isinstance(fault, Lost)]
        self._missing = str(readable[0]) if readable else ""

    def close(self, *, forget: bool) -> None:
        """Drop the handles, while the library is still loaded.

        forget: True if the driver may be restarted while the library is closed, so that its counters start again."""
        self._handle = None
        self._mig.void()
        self._gpm.close(forget=forget)
        self._condition_ms = None
        if forget:
            self._events.mend(self.gpu.uuid)  # the GPU may be reset; if not, the driver reports it again
            self._victims = None
            self._epoch += 1
            self._energy = EnergyCounter()
            self._busy = BusyCounter(gaps=self._busy.gaps)
            self._has_ring = self._ringless = False
            self._sampler.forget()

    def clock_set_back(self) -> None:
        """Record that the system clock, by which the driver dates its samples, was set back."""
        self._clock_set_back = self._sampler_behind = True

    def look_again(self) -> None:
        """Look up the MIG layout soon, because a pod holds an unknown instance and the driver may have reported no
        change."""
        self._mig.missed = True

    def read(self, at_ms: int) -> DeviceReading:
        """Read the GPU. Raises Lost, Restart, DriverReplaced."""
        if self._handle is None:
            if self._missing:
                return self.unread(self._missing)
            raise Lost(_GPU_IS_LOST, _OPEN)
        self._driver.doubts.clear()
        reading = self._read(at_ms)
        if self._driver.doubts:
            self._confirm(reading.unanswered)
        return self._returned(reading) if self._was_lost and not reading.unanswered else reading

    def _returned(self, reading: DeviceReading) -> DeviceReading:
        """Return the first reading of a GPU that was lost and answers again. It was reset, which is the action that its
        earlier faults required; a fault that remains is reported again."""
        self._was_lost = False
        self._events.mend(self.gpu.uuid)
        recoveries = self._recover(reading.condition, None)
        condition = msgspec.structs.replace(reading.condition, recoveries=recoveries)
        return msgspec.structs.replace(reading, condition=condition, health=_health(recoveries))

    def _confirm(self, unanswered: bool) -> None:
        """Check whether the error codes of this reading mean that the GPU is lost, that the library must be restarted,
        or that the driver was replaced. Raises Lost, Restart or DriverReplaced if they do.

        unanswered: True if no reading of the GPU succeeded. Then Lost and DriverReplaced need no confirmation."""
        doubts = list(self._driver.doubts.values())
        self._driver.call("nvmlDeviceGetCount")
        with suppress(NvmlRefused):
            self._driver.call(_OPEN, self.gpu.index)
        for doubt in doubts:
            if unanswered and not isinstance(doubt, Restart):
                raise doubt

    def _read(self, at_ms: int) -> DeviceReading:
        memory = self._memory(self._handle)
        self._refresh_facts(at_ms)
        self._refresh_mig(at_ms)
        energy = self._energy_uj(at_ms)
        before_us = self._busy.value_us
        since_us = 0 if self._clock_set_back else self._busy.last_seen_us
        busy = self._busy_us(at_ms)
        if self._sampler_behind:
            self._sampler.clock_set_back(self._handle, at_ms)
            self._sampler_behind = False
        activity = self._activity(at_ms)
        instances = tuple(self._instance(instance, at_ms) for instance in self._mig.instances)
        processes = Processes()
        if self._access.processes:
            processes = self._sampler.read(
                self._handle,
                self._mig,
                at_ms,
                period_us=self._busy.period_us,
                since_us=since_us,
                device_busy_us=busy - before_us if isinstance(busy, int) else 0,
            )
        if self._is_coherent():
            memory = self._process_memory(processes)
            instances = tuple(
                msgspec.structs.replace(i, memory_mib=self._process_memory(processes, i.mig_uuid)) for i in instances
            )
        condition = self._refresh_condition(at_ms)
        condition = msgspec.structs.replace(condition, recoveries=self._recover(condition, processes))
        return DeviceReading(
            gpu=self.gpu,
            health=_health(condition.recoveries),
            counter_epoch=f"{self._origin}.{self._epoch}",
            busy_us=busy,
            energy_uj=energy,
            memory_used_mib=memory,
            power_mw=self._driver.figure("nvmlDeviceGetPowerUsage", self._handle),
            sm_active_us=activity if isinstance(activity, Unavailable) else activity[0],
            tensor_active_us=activity if isinstance(activity, Unavailable) else activity[1],
            sample_gaps=self._busy.gaps,
            instances=instances,
            method="allocation" if self.gpu.mig_enabled else "device",
            processes=processes.readings,
            unlisted=processes.unlisted,
            condition=condition,
        )

    def unread(self, reason: str, *, lost: bool = False) -> DeviceReading:
        """Return a reading without figures, for a GPU that cannot be read. reason: why it cannot."""
        self._was_lost = self._was_lost or lost
        why = Unavailable(reason)
        condition = DeviceCondition(why, why, why, why, why, why, self._events.xids(self.gpu.uuid), reason)
        recoveries = self._recover(self._condition, None)
        return DeviceReading(
            gpu=self.gpu,
            health="lost" if lost else _health(recoveries),
            counter_epoch=f"{self._origin}.{self._epoch}",
            busy_us=why,
            energy_uj=why,
            memory_used_mib=why,
            power_mw=why,
            sm_active_us=why,
            tensor_active_us=why,
            sample_gaps=self._busy.gaps,
            condition=msgspec.structs.replace(condition, recoveries=recoveries),
        )

    def _memory(self, handle: Any) -> Reading:
        """Return the used memory in MiB. Version 2 of the call excludes what the driver reserves for itself; older
        drivers lack it."""
        name, version = "nvmlDeviceGetMemoryInfo", self._driver.constant("nvmlMemory_v2")
        used = self._driver.figure(name, handle, version, read=lambda info: int(info.used) // _MIB)
        if isinstance(used, Unavailable):
            used = self._driver.figure(name, handle, read=lambda info: int(info.used) // _MIB)
        return used

    def _refresh_facts(self, at_ms: int) -> None:
        """Read the facts that the driver did not give when the GPU was opened."""
        if None not in (self.gpu.memory_mib, self.gpu.minor):
            return
        if self._facts_ms is not None and at_ms - self._facts_ms < CONDITION_EVERY_MS:
            return
        self._facts_ms = at_ms
        if self.gpu.memory_mib is None and isinstance(size := total_mib(self._driver, self._handle), int):
            self.gpu = replace(self.gpu, memory_mib=size)
        if self.gpu.minor is None:
            minor = self._driver.figure("nvmlDeviceGetMinorNumber", self._handle)
            if isinstance(minor, int):
                self.gpu = replace(self.gpu, minor=minor)

    def _is_coherent(self) -> bool:
        """Return True if CPU and GPU share one address space in hardware. If the driver does not report it, the model
        decides."""
        if self._coherent is None:
            mode = self._driver.figure("nvmlDeviceGetAddressingMode", self._handle)
            if isinstance(mode, int):
                self._coherent = mode == self._driver.constant("NVML_DEVICE_ADDRESSING_MODE_ATS")
            else:
                self._coherent = _GRACE.search(self.gpu.model) is not None
        return self._coherent

    def _process_memory(self, processes: Processes, mig_uuid: str | None = None) -> Reading:
        """Return the MiB that processes use of memory that GPU and system share.

        The driver's own figure for such memory includes all memory that the system uses, such as the file cache.

        mig_uuid: the instance; None for the whole GPU."""
        if not self._access.processes:
            return Unavailable("coherent memory: the agent cannot see processes")
        for device, reason in processes.unlisted:
            if mig_uuid in (None, device):
                return Unavailable(f"coherent memory: {reason}")
        total = 0
        for process in processes.readings:
            if not process.running or mig_uuid not in (None, process.mig_uuid):
                continue
            if isinstance(process.memory_mib, Unavailable):
                return Unavailable(f"coherent memory of a process: {process.memory_mib.reason}")
            total += process.memory_mib
        return total

    def _energy_uj(self, at_ms: int) -> Reading:
        energy = self._driver.figure("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        if isinstance(energy, Unavailable):
            return energy
        if not self._energy.take(at_ms, energy):
            self._epoch += 1
        return self._energy.value_uj

    def _busy_us(self, at_ms: int) -> Reading:
        """Return the busy time, integrated from the driver's sample ring.

        An empty ring means an idle GPU only if the utilisation rate can be read. The rate replaces samples only on a
        GPU that never had a ring. With MIG, drivers give neither."""
        if self.gpu.mig_enabled:
            self._busy.lose(at_ms)
            return _NO_MIG_RATE
        try:
            rate = int(self._driver.call("nvmlDeviceGetUtilizationRates", self._handle).gpu)
        except NvmlRefused as fault:
            self._busy.lose(at_ms)
            return Unavailable(str(fault), refused=not fault.unsupported)
        kind = self._driver.constant("NVML_GPU_UTILIZATION_SAMPLES")
        samples: list[tuple[int, int]] | None
        since_us = 0 if self._clock_set_back else self._busy.last_seen_us
        try:
            _, ring = self._driver.call("nvmlDeviceGetSamples", self._handle, kind, since_us)
            samples = [(at_us, value.uiVal) for at_us, value in self._driver.fields(ring, *_SAMPLE)]
        except NvmlRefused as fault:
            if fault.empty:
                samples = []
            elif fault.unsupported and not self._has_ring:
                samples = None
                self._log_no_ring(str(fault))
            else:
                self._busy.lose(at_ms)
                return Unavailable(str(fault), refused=True)
        self._has_ring = samples is not None
        if self._clock_set_back:
            self._clock_set_back = False
            self._busy.start_over(at_ms, [dated_us for dated_us, _ in samples or ()])
            return self._busy.value_us
        return self._busy.take(at_ms, samples, min(rate, _PERCENT))

    def _log_no_ring(self, reason: str) -> None:
        if not self._ringless:
            log.warning("the driver has no busy-time samples of a GPU: the utilisation rate replaces them",
                        extra={"uuid": self.gpu.uuid, "reason": reason})  # fmt: skip
        self._ringless = True

    def _activity(self, at_ms: int) -> tuple[int, int] | Unavailable:
        if self.gpu.mig_enabled:
            return Unavailable("MIG: each instance has its own")
        found = self._gpm.read(self._handle, at_ms)
        return found if isinstance(found, Unavailable) else (found.sm_active_us, found.tensor_active_us)

    def _instance(self, instance: MigDevice, at_ms: int) -> InstanceReading:
        memory, uuid = self._memory(instance.handle), instance.facts.uuid
        found = self._gpm.read(self._handle, at_ms, uuid, instance.facts.gi) if instance.alone else _SHARED_GI
        if isinstance(found, Unavailable):
            return InstanceReading(uuid, found, memory, found, found, method="allocation")
        part = found.of_gpu(instance.gi_slices, self._mig.slices)
        return InstanceReading(uuid, part.busy_us, memory, part.sm_active_us, part.tensor_active_us, method="gpm")

    def _refresh_mig(self, at_ms: int) -> None:
        changed = self._events.mig_changed(self.gpu.uuid)
        if self._mig.refresh(self._handle, at_ms, changed=changed):
            facts = self._mig.facts
            self.gpu = replace(self.gpu, mig=facts, mig_enabled=self._mig.enabled, compute_slices=self._mig.slices)
            self._gpm.keep({m.uuid for m in facts} if self._mig.enabled else {""})

    def _refresh_condition(self, at_ms: int) -> DeviceCondition:
        xids = self._events.xids(self.gpu.uuid)
        if self._condition_ms is not None and at_ms - self._condition_ms < CONDITION_EVERY_MS:
            if xids != self._condition.xids:
                self._condition = msgspec.structs.replace(self._condition, xids=xids)
            return self._condition
        self._condition_ms = at_ms
        figure, constant, handle = self._driver.figure, self._driver.constant, self._handle
        since_load = constant("NVML_VOLATILE_ECC")
        ecc = "nvmlDeviceGetTotalEccErrors"
        self._condition = DeviceCondition(
            temperature_c=figure("nvmlDeviceGetTemperature", handle, constant("NVML_TEMPERATURE_GPU")),
            sm_clock_mhz=figure("nvmlDeviceGetClockInfo", handle, constant("NVML_CLOCK_SM")),
            memory_clock_mhz=figure("nvmlDeviceGetClockInfo", handle, constant("NVML_CLOCK_MEM")),
            throttle_reasons=figure("nvmlDeviceGetCurrentClocksEventReasons", handle),
            ecc_corrected=figure(ecc, handle, constant("NVML_MEMORY_ERROR_TYPE_CORRECTED"), since_load),
            ecc_uncorrected=figure(ecc, handle, constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"), since_load),
            xids=xids,
            xids_unread=self._events.unread(self.gpu.uuid),
            recoveries=self._driver_recoveries(),
            row_remap_pending=self._row_remap_pending,
        )
        return self._condition

    def _driver_recoveries(self) -> tuple[Recovery, ...]:
        """Return the actions that the driver itself requires. It reports them also after a restart of the agent.

        If the driver refuses a call for the moment, its last answer stays valid, because the fault still exists."""
        try:
            _, _, pending, failed = self._driver.call("nvmlDeviceGetRemappedRows", self._handle)
            self._row_remap_pending = bool(pending)
            self._remap_recovery = Recovery("reset_gpu", "row remapping failed") if failed else None
        except NvmlRefused as refused:
            if refused.unsupported:
                self._row_remap_pending = self._remap_recovery = None
        try:
            field = self._driver.constant("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
            (value,) = self._driver.call("nvmlDeviceGetFieldValues", self._handle, [field])
            if value.nvmlReturn == 0:
                action = _RECOVERY_ACTIONS.get(int(value.value.uiVal))
                self._driver_recovery = None if action is None else Recovery(action, "driver")
        except NvmlRefused as refused:
            if refused.unsupported:
                self._driver_recovery = None
        return tuple(one for one in (self._remap_recovery, self._driver_recovery) if one is not None)

    def _recover(self, condition: DeviceCondition, processes: Processes | None) -> tuple[Recovery, ...]:
        """Return the actions that the GPU requires, and log a change. The action `restart_app` is done once all
        processes that ran at the error have ended.

        condition: its `recoveries` are the actions that the driver requires.
        processes: None if they are unknown."""
        xids = self._events.unmended(self.gpu.uuid)
        contained = [xid for xid in xids if RECOVERY[xid] == "restart_app"]
        if not contained:
            self._victims = None
        elif processes is not None and self._access.processes and not processes.unlisted:
            running = {process.pid for process in processes.readings if process.running}
            self._victims = running if self._victims is None else self._victims & running
            if not self._victims:
                self._events.mend(self.gpu.uuid, *contained)
                self._victims, xids = None, self._events.unmended(self.gpu.uuid)
        found = (
            *(r for r in condition.recoveries if not r.cause.startswith("xid ")),
            *(Recovery(RECOVERY[xid], f"xid {xid}") for xid in xids),
        )
        if found != self._recoveries:
            log.warning("the recovery actions of a GPU changed", extra={"uuid": self.gpu.uuid,
                        "actions": ", ".join(f"{r.action} ({r.cause})" for r in found) or "nothing"})  # fmt: skip
            self._recoveries = found
        return found
