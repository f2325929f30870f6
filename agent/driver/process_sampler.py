"""The processes on one GPU: which run, how much memory they have, how busy each of them was.

Busy time comes from two places: the per-process sampler, whose ring is shared by all and forgets, and accounting
mode, which is exact where it is on. Both are given; whoever divides the device chooses. A process is
listed once more after its end. Processes that compute and those that draw are two lists, and a process may be in both.
A list that is refused says nothing: the processes of that place are unknown until it is given again. Only "not found"
means that no process was busy. It must not know whom a process belongs to.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agent.driver.accounting import Accounting
from agent.driver.mig import MigLayout
from agent.model import ProcessReading, Reading, Unavailable
from agent.nvml import Driver, Refused
from agent.units import MS_PER_SECOND, US_PER_MS

log = logging.getLogger("agent.driver.process_sampler")

_MIB = 1024 * 1024
_PERCENT = 100
_SAMPLERS = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")
"""The second is newer, and on some drivers the only one that answers."""
_SILENT_READINGS = 5
"""So often may a busy device with processes show none of them at work before the other sampler is asked."""
RING_MS = 15 * MS_PER_SECOND
"""How long the driver keeps samples at most. Source: NVML_GPU_UTILIZATION_SAMPLES, 72 or 100 of them in some 10 s."""
_COMPUTE, _MPS = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
_ASK_EVERY = 5
"""A list of graphics processes or MPS clients that was empty is read again when a compute process comes or goes, and
otherwise with every fifth reading."""
_NO_MIG_RATE = Unavailable("MIG: no per-process utilisation")
_CLOCK_SET_BACK = Unavailable("the system clock was set back", refused=True)
_ENDED = Unavailable("ended")
_NOT_REPORTED = Unavailable("not reported")


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of one GPU. unlisted: see agent.model.DeviceReading."""

    readings: tuple[ProcessReading, ...] = ()
    unlisted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Running:
    """A running process. place: the MIG instance's uuid or ""."""

    place: str
    memory: Reading
    mps_client: bool
    graphics: bool


class ProcessSampler:
    """One GPU's processes. enable_accounting: see agent.driver.accounting."""

    def __init__(self, driver: Driver, uuid: str, *, enable_accounting: bool = False) -> None:
        self._driver = driver
        self._uuid = uuid
        self._accounting = Accounting(driver, enable=enable_accounting)
        self._alive: dict[int, str] = {}
        self._samplers = list(_SAMPLERS)
        self._no_rate = Unavailable("no per-process utilisation")
        self._answered = False
        """Whether the first of the samplers ever answered: then a refusal does not mean that the GPU lacks it."""
        self._seen_us = 0
        self._at_ms: int | None = None
        self._unknown_until_ms = 0
        self._void: frozenset[tuple[int, int]] = frozenset()
        """(pid, timestamp) of what the driver had before the clock was set back."""
        self._silent = 0
        self._readings = -1
        self._filled: set[tuple[str, str]] = set()
        """(list, place) of the lists that are read every time: they had processes, or were refused."""
        self._answering: set[str] = set()
        """Places that told their graphics processes: one that refuses later does not lack them."""
        self._listed: dict[str, list[int]] = {}

    def forget(self) -> None:
        """The driver was let go: what it counted is void."""
        self._accounting.forget()
        self._alive.clear()
        self._filled.clear()
        self._answering.clear()
        self._listed.clear()
        self._readings = -1
        self._samplers, self._answered = list(_SAMPLERS), False
        self._seen_us, self._at_ms, self._silent = 0, None, 0

    def clock_set_back(self, handle: Any, at_ms: int) -> None:
        """The clock that dates the samples was set back: samples of before it stand beside later ones with earlier
        dates, until the driver's ring of them has come round."""
        listed: list[Any] = []
        if self._samplers:
            with suppress(Refused):
                listed = self._driver.call(self._samplers[0], handle, 0)
        self._void = frozenset(self._driver.fields(sample, "pid", "timeStamp") for sample in listed)
        self._seen_us, self._unknown_until_ms = 0, at_ms + RING_MS

    def read(self, handle: Any, mig: MigLayout, at_ms: int, *, period_us: int | None, device_busy: bool) -> Processes:
        """period_us: between two samples of the device; device_busy: whether it did anything since."""
        running: dict[int, _Running] = {}
        unlisted: dict[str, str] = {}
        self._readings += 1
        places = [(i.handle, i.facts.uuid) for i in mig.instances] if mig.enabled else [(handle, "")]
        for place, uuid in places:
            try:
                running.update(self._running(place, uuid))
            except Refused as fault:
                unlisted[uuid] = str(fault)
        rates = _NO_MIG_RATE if mig.enabled else self._rates(handle, at_ms, bool(running) and device_busy)
        if "" in unlisted:  # whose the figures are is not known, and never will be
            self._accounting.skip()
            return Processes((), tuple(unlisted.items()))
        before = {pid: uuid for pid, uuid in self._alive.items() if uuid not in unlisted}
        gone = sorted(before.keys() - running.keys())
        accounted = self._accounting.read(handle, at_ms, sorted(running), gone, period_us)
        readings = []
        for pid in sorted(running):
            one = running[pid]
            busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
            exact = accounted.times.get(pid, accounted.otherwise)
            reading = ProcessReading(
                pid, one.place, one.memory, busy, exact, mps_client=one.mps_client, graphics=one.graphics
            )
            readings.append(reading)
        for pid in gone:
            busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
            exact = accounted.times.get(pid, accounted.otherwise)
            readings.append(ProcessReading(pid, before[pid], 0, busy, exact, running=False))
        for pid, exact in sorted(accounted.ended.items()):
            readings.append(ProcessReading(pid, "", _ENDED, _ENDED, exact, running=False))
        self._alive = {pid: uuid for pid, uuid in self._alive.items() if uuid in unlisted}
        self._alive.update({pid: one.place for pid, one in running.items()})
        return Processes(tuple(readings), tuple(unlisted.items()))

    def _running(self, handle: Any, place: str) -> dict[int, _Running]:
        """The processes of a place by pid. Raises Refused where one of the lists is unknown."""
        listed = self._driver.processes(_COMPUTE, handle)
        pids = [pid for pid, _ in listed]
        due = self._listed.get(place) != pids or self._readings % _ASK_EVERY == 0
        drawing = self._also(_GRAPHICS, handle, place, due, lacks=place not in self._answering)
        clients = self._also(_MPS, handle, place, due, lacks=(_MPS, place) not in self._filled)
        self._listed[place] = pids
        drawers, served = {pid for pid, _ in drawing}, {pid for pid, _ in clients}
        used: dict[int, int | None] = {}
        for pid, memory in (*listed, *drawing, *clients):  # each list tells all of a process's memory
            used[pid] = max((m for m in (used.get(pid), memory) if m is not None), default=None)
        return {
            pid: _Running(place, _NOT_REPORTED if memory is None else memory // _MIB, pid in served, pid in drawers)
            for pid, memory in used.items()
        }

    def _also(self, name: str, handle: Any, place: str, due: bool, *, lacks: bool) -> list[tuple[int, int | None]]:
        """A list that is empty in most places. due: whether one that was empty is read. lacks: whether "not supported"
        means that the place has no such list, and so no such processes. Raises Refused."""
        key = name, place
        if not due and key not in self._filled:
            return []
        try:
            found = self._driver.processes(name, handle)
        except Refused as fault:
            if not (fault.empty or (fault.unsupported and lacks)):
                self._filled.add(key)  # so that it is read every time until it answers
                raise
            found = []
        else:
            if name == _GRAPHICS:
                self._answering.add(place)
        (self._filled.add if found else self._filled.discard)(key)
        return found

    def _rates(self, handle: Any, at_ms: int, expected: bool) -> dict[int, int] | Unavailable:
        """Busy microseconds per process since the previous reading: a sampled percentage of that time.
        Above 100 it is garbage, dropped and not clamped. After a refusal the next answer stands for the time
        since the refusal only."""
        if not self._samplers:
            return self._no_rate
        if at_ms <= self._unknown_until_ms:
            self._at_ms = at_ms
            return _CLOCK_SET_BACK
        elapsed_ms = 0 if self._at_ms is None else at_ms - self._at_ms
        listed = []
        try:
            listed = self._driver.call(self._samplers[0], handle, self._seen_us)
        except Refused as fault:
            if fault.unsupported and not self._answered:
                self._lack(str(fault))
                return self._rates(handle, at_ms, expected)
            if not fault.empty:
                self._at_ms = at_ms
                return Unavailable(str(fault), refused=True)
        self._answered = True
        found = [self._driver.fields(sample, "pid", "timeStamp", "smUtil") for sample in listed]
        if self._void:
            found = [each for each in found if each[:2] not in self._void]
        self._silent = self._silent + 1 if expected and not found else 0
        if self._silent > _SILENT_READINGS and len(self._samplers) > 1:
            self._lack("no process was seen at work")
        self._seen_us = max([self._seen_us, *(at_us for _, at_us, _ in found)])
        self._at_ms = at_ms
        return {pid: busy * elapsed_ms * US_PER_MS // _PERCENT for pid, _, busy in found if busy <= _PERCENT}

    def _lack(self, reason: str) -> None:
        """Go on with the next sampler, until the driver is let go."""
        lacking = self._samplers.pop(0)
        self._answered = False
        self._no_rate = Unavailable(f"no per-process utilisation: {reason}")
        log.warning(
            "a GPU does not tell how busy each process is; the next method is asked",
            extra={"uuid": self._uuid, "function": lacking, "reason": reason, "methods_left": len(self._samplers)},
        )
