"""All GPUs of this machine, through whatever happens to the driver.

A machine without a driver is a fact, not an error: it is asked again every 30 s to 5 min. One lost GPU
leaves the others alone; a library that lost its footing is started again; while the release file
exists the driver is let go, because MIG cannot be reconfigured while anybody holds it. GPUs once seen
stay listed, unread, until they answer again: that time is known to be unknown.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.device import Device
from agent.errors import DriverReplaced
from agent.model import DeviceReading, Gpu
from agent.nvml import Driver, Fault, Lost, Refused
from agent.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.gpus")

RETRY_MIN_MS = 30 * MS_PER_SECOND
RETRY_MAX_MS = 5 * MS_PER_MINUTE
REVIVE_MS = MS_PER_MINUTE
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Scan:
    """One reading of the machine. failure: why nothing could be read ("" = the driver answered)."""

    devices: tuple[DeviceReading, ...]
    failure: str


class Gpus:
    """See the module's text. One thread only."""

    def __init__(self, driver: Driver, release_file: Path | None = None) -> None:
        self._driver = driver
        self._release_file = release_file
        self._up = False
        self._was_up = False
        self._failure = ""
        self._retry_ms = RETRY_MIN_MS
        self._next_try_ms = 0
        self._revive_at_ms = 0
        self._devices: dict[str, Device] = {}
        self._origin = ""
        self._released: set[str] = set()

    def release(self, why: str) -> None:
        """Let go of the driver with the next reading and leave it alone until `reacquire(why)`.

        Whoever asks is told apart by `why`, which is shown as the reason: the driver is taken again when
        all of them have withdrawn. May be called from any thread."""
        self._released.add(why)

    def reacquire(self, why: str) -> None:
        """Withdraw a release. May be called from any thread."""
        self._released.discard(why)

    @property
    def idle(self) -> bool:
        """Whether no driver is held at the moment."""
        return not self._up

    def read(self, at_ms: int) -> Scan:
        """Everything now. Raises agent.errors.DriverReplaced when only a new process can go on."""
        self._origin = self._origin or str(at_ms)
        released = self._release_reason()
        if released:
            self._stop(forget=True)
            self._failure, self._next_try_ms = released, at_ms
            return self._blind()
        if not self._up and (at_ms < self._next_try_ms or not self._start(at_ms)):
            return self._blind()
        try:
            return self._scan(at_ms)
        except Fault as fault:
            log.warning("NVML is started again", extra={"reason": str(fault)})
            self._failure, self._next_try_ms = str(fault), at_ms
            self._stop(forget=True)
            return self._blind()

    def close(self) -> None:
        """Let go of the driver."""
        self._stop(forget=True)

    def _release_reason(self) -> str:
        reasons = sorted(self._released)  # a copy: others add to it meanwhile
        if reasons:
            return f"released: {reasons[0]}"
        wanted = self._release_file is not None and self._release_file.exists()
        return "released on request" if wanted else ""

    def _start(self, at_ms: int) -> bool:
        try:
            self._driver.call("nvmlInit")
            self._up = True
            self._enumerate()
        except (Fault, DriverReplaced) as fault:
            if isinstance(fault, DriverReplaced) and self._was_up:
                raise  # a fresh process would only find the same library: there it is one more way of no driver
            if self._failure != str(fault):
                log.warning("no NVIDIA driver answers; asking again later", extra={"reason": str(fault)})
            self._failure = str(fault)
            self._stop(forget=True)
            self._next_try_ms = at_ms + self._retry_ms
            self._retry_ms = min(self._retry_ms * 2, RETRY_MAX_MS)
            return False
        log.info("NVML answers", extra={"gpus": len(self._devices)})
        self._failure, self._retry_ms, self._was_up = "", RETRY_MIN_MS, True
        self._revive_at_ms = at_ms + REVIVE_MS
        return True

    def _stop(self, *, forget: bool) -> None:
        if self._up:
            try:
                self._driver.call("nvmlShutdown")
            except (Fault, DriverReplaced) as fault:
                log.info("NVML did not shut down", extra={"reason": str(fault)})
        self._up = False
        for device in self._devices.values():
            device.close(forget=forget)

    def _enumerate(self) -> None:
        version = str(self._driver.call("nvmlSystemGetDriverVersion"))
        for index in range(self._driver.call("nvmlDeviceGetCount")):
            try:
                handle = self._driver.call("nvmlDeviceGetHandleByIndex", index)
                gpu = Gpu(
                    uuid=str(self._driver.call("nvmlDeviceGetUUID", handle)),
                    index=index,
                    model=str(self._driver.call("nvmlDeviceGetName", handle)),
                    memory_mib=int(self._driver.call("nvmlDeviceGetMemoryInfo", handle).total) // _MIB,
                    pci_bus_id=self._pci_bus_id(handle),
                    driver_version=version,
                )
            except Lost as fault:  # if it was seen before it stays listed, without a handle
                log.warning("a GPU is lost", extra={"index": index, "reason": str(fault)})
                continue
            device = self._devices.setdefault(gpu.uuid, Device(self._driver, gpu, self._origin))
            device.open(handle, gpu)

    def _pci_bus_id(self, handle: Any) -> str:
        try:
            bus_id = self._driver.call("nvmlDeviceGetPciInfo", handle).busId
        except Refused:
            return ""
        return bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)

    def _scan(self, at_ms: int) -> Scan:
        readings: list[DeviceReading] = []
        lost = False
        for device in self._ordered():
            try:
                readings.append(device.read(at_ms))
            except Lost as fault:
                lost = True
                readings.append(device.unread(str(fault), lost=True))
        if lost and at_ms >= self._revive_at_ms:
            self._stop(forget=False)  # a GPU that was reset answers only after a new start
            self._start(at_ms)
        return Scan(tuple(readings), "")

    def _blind(self) -> Scan:
        return Scan(tuple(device.unread(self._failure) for device in self._ordered()), self._failure)

    def _ordered(self) -> list[Device]:
        return sorted(self._devices.values(), key=lambda device: (device.gpu.index, device.gpu.uuid))
