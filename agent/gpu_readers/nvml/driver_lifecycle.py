"""Opens and closes the driver, finds GPUs again after a reset, and releases the driver on request.

A machine without a driver is not an error: the agent tries again every 30 s to 5 min. A lost GPU, or one whose driver
call hangs, does not affect the others. If a call reports that the library must be started again, `Gpus` does so. If the
calls of the same GPU report this again within five minutes while other GPUs answer, only this GPU stays unread. GPUs
that were seen once stay listed without readings until they answer again, so the meter knows that their use is unknown.

`Gpus` closes the driver on request, because neither MIG nor the driver itself can be changed while it is open.

The driver is released while node labels of NVIDIA's operator or MIG manager ask for it
(`agent.holders.kubelet.kubernetes_source`), while the release file exists (the chart puts it in the spool folder), or
after SIGUSR1 (`agent.gpu_readers.release_by_signal`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent.core.readings import DeviceReading, DriverReplaced, Gpu
from agent.gpu_readers.nvml.nvml_device import Access, NvmlDevice, total_mib
from agent.gpu_readers.nvml.nvml_events import Events
from agent.gpu_readers.nvml.nvml_library import (
    NO_GPUS_REMEDY,
    CallHangs,
    CallWatchdog,
    Driver,
    Lost,
    NvmlFault,
    NvmlRefused,
    Restart,
    remedy,
)
from agent.gpu_readers.protocol import GpuReadings
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.gpu_readers.nvml.driver_lifecycle")

RETRY_MIN_MS = 30 * MS_PER_SECOND
RETRY_MAX_MS = 5 * MS_PER_MINUTE
REVIVE_MS = MS_PER_MINUTE
HANG_S = 5.0
"""How long one GPU may take to answer all calls; the slowest known call, a MIG lookup, takes less than a second."""
LIBRARY_HANG_S = 60.0
"""How long the library may take to start; without persistence mode it initialises every GPU."""
SET_BACK_MS = 250
"""A wall clock that lost more than this between two readings was set back; slewing loses less."""
_NO_ANSWER = "the driver does not answer"
_LIBRARY, _EVENTS = "library", "events"


class Gpus:
    """The `DriverReader` of this machine's NVIDIA GPUs. One thread uses it; other threads may call `release` and
    `reacquire`.

    release_file: the driver stays closed while this file exists.
    restarted: True if this process replaced one whose driver was upgraded. If the library still does not fit the
        driver, only a new container or machine image can help.
    hang_s: see HANG_S.
    clock: the system's clock, which also dates the driver's and GPM's samples; None if the clock is never set back."""

    def __init__(
        self,
        driver: Driver,
        release_file: Path | None = None,
        *,
        access: Access | None = None,
        restarted: bool = False,
        hang_s: float = HANG_S,
        clock: Clock | None = None,
    ) -> None:
        self._driver = driver
        self._release_file = release_file
        self._access = access or Access()
        self._events = Events(driver)
        self._watchdog = CallWatchdog()
        self._hang_s = hang_s
        self._clock = clock
        self._origin_ms: int | None = None
        """Wall time at which the monotonic clock was 0, as of the last reading."""
        self._up = False
        self._was_up = restarted
        self._failure = ""
        self._retry_ms = RETRY_MIN_MS
        self._next_try_ms = 0
        self._revive_at_ms = self._search_at_ms = 0
        self._passed_over: list[NvmlFault] = []
        """Why the last start passed over GPUs; another start may find them."""
        self._silent: dict[str, str] = {}
        self._restarted_ms: dict[str, int] = {}
        """When the library was last restarted because of a group of calls."""
        self._devices: dict[str, NvmlDevice] = {}
        self._origin = ""
        self._attempt: object = None
        self._released: set[str] = set()

    def release(self, why: str) -> None:
        """Close the driver at the next reading and keep it closed until `reacquire(why)`. Any thread may call this.

        `why` identifies the request and is the reason in the readings. The driver is opened again when all requests
        are withdrawn."""
        self._released.add(why)

    def reacquire(self, why: str) -> None:
        """Withdraw a release. Any thread may call this."""
        self._released.discard(why)

    def look_again(self) -> None:
        """Look up the MIG instances of all GPUs soon, because a pod holds an unknown device."""
        for device in self._devices.values():
            device.look_again()

    @property
    def idle(self) -> bool:
        """True while the driver is closed."""
        return not self._up

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:  # noqa: ARG002 - NVML adds to nobody
        """Read all GPUs. Raises agent.core.readings.DriverReplaced if only a new process can continue."""
        self._origin = self._origin or str(at_ms)
        if self._was_set_back():
            log.warning("the system clock was set back: earlier samples of the driver are ignored")
            for device in self._devices.values():
                device.clock_set_back()
        released = self._release_reason()
        if released:
            self._stop(forget=True)
            self._failure, self._next_try_ms = released, at_ms
            return self._unread()
        if not self._up and (at_ms < self._next_try_ms or not self._start(at_ms)):
            return self._unread()
        try:
            return self._scan(at_ms)
        except NvmlFault as fault:
            log.warning("NVML is started again", extra={"reason": str(fault)})
            self._failure, self._next_try_ms = str(fault), at_ms
            self._stop(forget=True)
            return self._unread()

    def _was_set_back(self) -> bool:
        if self._clock is None:
            return False
        before_ms = self._origin_ms
        self._origin_ms = self._clock.wall_ms() - self._clock.monotonic_ms()
        return before_ms is not None and self._origin_ms < before_ms - SET_BACK_MS

    def close(self) -> None:
        """Close the driver."""
        self._stop(forget=True)
        self._watchdog.close()

    def _release_reason(self) -> str:
        reasons = sorted(self._released)  # a copy, because other threads add to it
        if reasons:
            return f"released: {reasons[0]}"
        wanted = self._release_file is not None and self._release_file.exists()
        return "released on request" if wanted else ""

    # --- the library -----------------------------------------------------------------------------

    def _start(self, at_ms: int) -> bool:
        try:
            self._attempt = attempt = object()
            found = self._watchdog.call(_LIBRARY, self._library_s, partial(self._bring_up, attempt))
            self._up = True
            for handle, gpu in found:
                device = self._devices.get(gpu.uuid)
                if device is None:
                    device = NvmlDevice(self._driver, self._events, gpu, self._origin, self._access, self._clock)
                    self._devices[gpu.uuid] = device
                self._watchdog.call(gpu.uuid, self._hang_s, partial(device.open, handle, gpu))
            opened = {gpu.uuid for _, gpu in found}
            for uuid in self._devices.keys() - opened:
                self._devices[uuid].miss(self._passed_over)
        except (NvmlFault, DriverReplaced, CallHangs) as fault:
            if isinstance(fault, DriverReplaced) and self._was_up:
                raise  # a process that never had a driver gains nothing from a restart
            self._attempt = None
            reason = _NO_ANSWER if isinstance(fault, CallHangs) else str(fault)
            if self._failure != reason:
                what_to_do = {"remedy": remedy(reason)} if remedy(reason) else {}
                log.warning("no NVIDIA driver answers: trying again later", extra={"reason": reason, **what_to_do})
            self._failure = reason
            self._stop(forget=True)
            self._next_try_ms = at_ms + self._retry_ms
            self._retry_ms = min(self._retry_ms * 2, RETRY_MAX_MS)
            return False
        if self._devices:
            log.info("NVML answers", extra={"gpus": len(self._devices)})
        else:
            log.warning("the NVIDIA driver answers and shows no GPU", extra={"remedy": NO_GPUS_REMEDY})
        self._failure, self._retry_ms, self._was_up = "", RETRY_MIN_MS, True
        self._revive_at_ms, self._search_at_ms = at_ms + REVIVE_MS, at_ms + RETRY_MAX_MS
        return True

    def _bring_up(self, attempt: object) -> list[tuple[Any, Gpu]]:
        """Start the library and list the GPUs. If the caller has given up this attempt meanwhile, shut the library down
        again."""
        self._driver.call("nvmlInit")
        if self._attempt is not attempt:
            self._driver.call("nvmlShutdown")
            return []
        try:
            return self._enumerate()
        except (NvmlFault, DriverReplaced):
            self._driver.call("nvmlShutdown")
            raise

    def _stop(self, *, forget: bool) -> None:
        """Shut the library down. While a call hangs, do nothing, because shutting down would hang too; a later call
        tries again."""
        if not self._up:
            return
        if self._watchdog.stuck:
            log.warning("NVML cannot be closed: a call hangs in the driver")
            return
        try:
            self._watchdog.call(_LIBRARY, self._library_s, partial(self._shut_down, forget=forget))
        except (NvmlFault, DriverReplaced, CallHangs) as fault:
            log.info("NVML did not shut down", extra={"reason": str(fault)})
        self._up = False

    def _shut_down(self, *, forget: bool) -> None:
        for device in self._devices.values():
            device.close(forget=forget)
        self._events.close()
        self._driver.call("nvmlShutdown")

    @property
    def _library_s(self) -> float:
        return LIBRARY_HANG_S / HANG_S * self._hang_s

    def _enumerate(self) -> list[tuple[Any, Gpu]]:
        """Return every GPU that can be opened and has a name, with its handle. A GPU that cannot be opened does not
        affect the others. Raises NvmlFault, DriverReplaced."""
        version = self._text("nvmlSystemGetDriverVersion")
        found: list[tuple[Any, Gpu]] = []
        self._passed_over = []
        for index in range(self._driver.call("nvmlDeviceGetCount")):
            try:
                handle = self._driver.call("nvmlDeviceGetHandleByIndex", index)
                found.append((handle, self._describe(handle, index, version)))
            except NvmlFault as fault:
                log.warning("a GPU cannot be read", extra={"index": index, "reason": str(fault)})
                self._passed_over.append(fault)
        if not found and self._passed_over and not isinstance(self._passed_over[-1], Lost):
            raise self._passed_over[-1]
        return found

    def _describe(self, handle: Any, index: int, version: str) -> Gpu:
        """Return a GPU's description. Fields that the driver refuses keep their former values. Raises NvmlFault, for
        example if the GPU has no name."""
        uuid = str(self._driver.call("nvmlDeviceGetUUID", handle))
        known = self._devices[uuid].gpu if uuid in self._devices else None
        model = self._text("nvmlDeviceGetName", handle) or (known.model if known else "")
        if not model:
            model = str(self._driver.call("nvmlDeviceGetName", handle))
        size = total_mib(self._driver, handle)
        minor = self._driver.figure("nvmlDeviceGetMinorNumber", handle)
        return Gpu(
            uuid=uuid,
            index=index,
            model=model,
            memory_mib=size if isinstance(size, int) else known.memory_mib if known else None,
            pci_bus_id=self._pci_bus_id(handle) or (known.pci_bus_id if known else ""),
            driver_version=version or (known.driver_version if known else ""),
            minor=minor if isinstance(minor, int) else known.minor if known else None,
        )

    def _text(self, name: str, *arguments: Any) -> str:
        """Return a text from the driver; "" if the driver refuses it."""
        try:
            return str(self._driver.call(name, *arguments))
        except NvmlRefused:
            return ""

    def _pci_bus_id(self, handle: Any) -> str:
        try:
            bus_id = self._driver.call("nvmlDeviceGetPciInfo", handle).busId
        except NvmlRefused:
            return ""
        return bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)

    # --- the devices -----------------------------------------------------------------------------

    def _scan(self, at_ms: int) -> GpuReadings:
        devices = self._ordered()
        calls: list[tuple[str, Callable[[], DeviceReading | None]]] = [(_EVENTS, partial(self._events.poll, at_ms))]
        calls += [(device.gpu.uuid, partial(device.read, at_ms)) for device in devices]
        heard, *outcomes = self._watchdog.run(calls, self._hang_s)
        answered = any(not isinstance(outcome, Exception) for outcome in outcomes)
        for (group, _), outcome in zip(calls, (heard, *outcomes), strict=True):
            if not isinstance(outcome, Exception) or isinstance(outcome, (Lost, CallHangs)):
                continue
            if not (answered and self._was_just_restarted(group, outcome, at_ms)):
                raise outcome
        readings: list[DeviceReading] = []
        lost = False
        for device, outcome in zip(devices, outcomes, strict=True):
            reason = (
                _NO_ANSWER if isinstance(outcome, CallHangs) else str(outcome) if isinstance(outcome, Exception) else ""
            )
            self._log_answering(device.gpu, reason)
            lost = lost or isinstance(outcome, Lost)
            if isinstance(outcome, Exception) or outcome is None:
                readings.append(device.unread(reason or _NO_ANSWER, lost=isinstance(outcome, Lost)))
            else:
                readings.append(outcome)
        revive = at_ms >= (self._revive_at_ms if lost else self._search_at_ms)
        if (lost or self._passed_over) and revive and not self._watchdog.stuck:
            self._stop(forget=False)  # a GPU that was reset answers only after a new start
            self._start(at_ms)
        return GpuReadings(
            tuple(r for d, r in zip(devices, readings, strict=True) if d.known),
            parts=(("events", self._events.failure),) if self._events.failure else (),
        )

    def _log_answering(self, gpu: Gpu, reason: str) -> None:
        """Log that a GPU does not answer, once for each new reason, and once that it answers again.

        reason: why the GPU does not answer; "" if it answers."""
        if reason == self._silent.get(gpu.uuid, ""):
            return
        self._silent[gpu.uuid] = reason
        if reason:
            log.warning("a GPU does not answer", extra={"uuid": gpu.uuid, "index": gpu.index, "reason": reason})
        else:
            log.info("a GPU answers again", extra={"uuid": gpu.uuid, "index": gpu.index})

    def _was_just_restarted(self, group: str, fault: Exception, at_ms: int) -> bool:
        """Return True if the library was restarted for this group of calls recently, so that another restart would not
        help. If not, remember the restart that follows."""
        if not isinstance(fault, Restart):
            return False
        if at_ms - self._restarted_ms.get(group, at_ms - RETRY_MAX_MS) < RETRY_MAX_MS:
            return True
        self._restarted_ms[group] = at_ms
        return False

    def _unread(self) -> GpuReadings:
        """Return all known GPUs without readings."""
        return GpuReadings(
            tuple(device.unread(self._failure) for device in self._ordered() if device.known), self._failure
        )

    def _ordered(self) -> list[NvmlDevice]:
        return sorted(self._devices.values(), key=lambda device: (device.gpu.index, device.gpu.uuid))
