"""The processes on one GPU: which run, how much memory they have, how busy each of them was.

Busy time comes from two places: the per-process sampler, whose ring is shared by all and forgets, and accounting
mode, which is exact where it is on. Both are given; whoever divides the device chooses. A process is
listed once more after its end. It must not know whom a process belongs to.
Raises what `agent.nvml.Driver.call` raises beyond Refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent.driver.accounting import Accounting
from agent.driver.mig import MigLayout
from agent.model import ProcessReading, Reading, Unavailable
from agent.nvml import Driver, Refused
from agent.units import US_PER_MS

_MIB = 1024 * 1024
_PERCENT = 100
_SAMPLERS = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")
"""The second is newer, and on some drivers the only one that answers."""
_SILENT_READINGS = 5
"""So often may a busy device with processes show none of them at work before the other sampler is asked."""
_COMPUTE, _MPS = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_MPS_EVERY = 5
"""Where nobody was a client of an MPS server and no process came or went, so rarely is it asked for clients."""
_NO_MIG_RATE = Unavailable("MIG: no per-process utilisation")
_NO_RATE = Unavailable("no per-process utilisation")
_ENDED = Unavailable("ended")
_NOT_REPORTED = Unavailable("not reported")


class ProcessSampler:
    """One GPU's processes. enable_accounting: see agent.driver.accounting."""

    def __init__(self, driver: Driver, *, enable_accounting: bool = False) -> None:
        self._driver = driver
        self._accounting = Accounting(driver, enable=enable_accounting)
        self._alive: dict[int, str] = {}
        self._samplers = list(_SAMPLERS)
        self._seen_us = 0
        self._at_ms: int | None = None
        self._silent = 0
        self._readings = -1
        self._served: set[str] = set()
        self._listed: dict[str, list[int]] = {}

    def forget(self) -> None:
        """The driver was let go: what it counted is void."""
        self._accounting.forget()
        self._alive.clear()
        self._served.clear()
        self._listed.clear()
        self._readings = -1
        self._samplers = list(_SAMPLERS)
        self._seen_us, self._at_ms, self._silent = 0, None, 0

    def read(
        self, handle: Any, mig: MigLayout, at_ms: int, *, period_us: int, device_busy: bool
    ) -> Iterator[ProcessReading]:
        """period_us: between two samples of the device; device_busy: whether it did anything since."""
        running: dict[int, tuple[str, Reading, bool]] = {}
        self._readings += 1
        places = [(i.handle, i.facts.uuid) for i in mig.instances] if mig.enabled else [(handle, "")]
        for place, uuid in places:
            for pid, memory, client in self._running(place, uuid):
                running[pid] = uuid, memory, client
        gone = sorted(self._alive.keys() - running.keys())
        rates = _NO_MIG_RATE if mig.enabled else self._rates(handle, at_ms, bool(running) and device_busy)
        accounted = self._accounting.read(handle, at_ms, sorted(running), gone, period_us)
        for pid in sorted(running):
            uuid, memory, client = running[pid]
            busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
            exact = accounted.times.get(pid, accounted.otherwise)
            yield ProcessReading(pid, uuid, memory, busy, exact, mps_client=client)
        for pid in gone:
            busy = rates if isinstance(rates, Unavailable) else rates.get(pid, 0)
            exact = accounted.times.get(pid, accounted.otherwise)
            yield ProcessReading(pid, self._alive[pid], 0, busy, exact, running=False)
        for pid, exact in sorted(accounted.ended.items()):
            yield ProcessReading(pid, "", _ENDED, _ENDED, exact, running=False)
        self._alive = {pid: uuid for pid, (uuid, _, _) in running.items()}

    def _running(self, handle: Any, place: str) -> Iterator[tuple[int, Reading, bool]]:
        changed = False
        for name in (_COMPUTE, _MPS):
            if name == _MPS and not (changed or place in self._served or self._readings % _MPS_EVERY == 0):
                continue
            try:
                listed = self._driver.processes(name, handle)
            except Refused:
                continue
            if name == _MPS:
                (self._served.add if listed else self._served.discard)(place)
            else:
                pids = [pid for pid, _ in listed]
                changed = self._listed.get(place) != pids
                self._listed[place] = pids
            for pid, used in listed:
                yield pid, _NOT_REPORTED if used is None else used // _MIB, name == _MPS

    def _rates(self, handle: Any, at_ms: int, expected: bool) -> dict[int, int] | Unavailable:
        """Busy microseconds per process since the previous reading: a sampled percentage of that time.
        Above 100 it is garbage, dropped and not clamped."""
        if not self._samplers:
            return _NO_RATE
        elapsed_ms = 0 if self._at_ms is None else at_ms - self._at_ms
        try:
            listed = self._driver.call(self._samplers[0], handle, self._seen_us)
        except Refused as fault:
            if fault.unsupported:
                del self._samplers[0]
                return self._rates(handle, at_ms, expected)
            listed = []  # all idle
        found = [self._driver.fields(sample, "pid", "timeStamp", "smUtil") for sample in listed]
        self._silent = self._silent + 1 if expected and not found else 0
        if self._silent > _SILENT_READINGS and len(self._samplers) > 1:
            del self._samplers[0]
        self._seen_us = max([self._seen_us, *(at_us for _, at_us, _ in found)])
        self._at_ms = at_ms
        return {pid: busy * elapsed_ms * US_PER_MS // _PERCENT for pid, _, busy in found if busy <= _PERCENT}
