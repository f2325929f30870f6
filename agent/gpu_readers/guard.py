"""Runs a reader of another package so that it can stop nothing.

It opens and reads on a thread of its own, with a time limit. While a call has not ended, no further one begins. What it
returns is checked: types, signs, sizes. If it raises, hangs or returns something else, its failure is named, and the
devices that it listed stay listed without values, so that their use is unknown and not zero."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from agent.core.readings import DeviceReading, Unavailable
from agent.core.settings import SettingsError
from agent.gpu_readers.chosen import ChosenReader, opened
from agent.gpu_readers.protocol import SEAM, GpuReader, GpuReaderPlugin, GpuReadings, Surroundings
from gputally.base.errors import AgentError
from gputally.base.plugins import BrokenPlugin, NoPlugin, TakesTooLong, named, within
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE, escaped

log = logging.getLogger("agent.gpu_readers.guard")

MOST_LOADING_S, MOST_READING_S = 20.0, 2.0
RETRY_MS = 30 * MS_PER_SECOND
MOST_DEVICES, MOST_PARTS, MOST_ITEMS = 256, 64, 16_384
_MOST_TEXT, _MOST = 253, 2**63 - 1


class WrongReading(AgentError):
    """A reader returned something that is no reading."""


def guarded(name: str, place: str, surroundings: Surroundings) -> ChosenReader:
    """Load and open a reader of another package. If that fails, its readings say why.

    Raises SettingsError if no reader has this name, or if its place is wrong."""
    try:
        plugin = named(SEAM, GpuReaderPlugin, name)
    except BrokenPlugin as error:
        return ChosenReader(name, Guard(name, _raises(error), fills=False))
    except NoPlugin as error:
        raise SettingsError(f"gpu_readers: {error}") from error
    guard = Guard(name, lambda: opened(plugin, place, surroundings), fills=plugin.fills)
    guard.open()
    return ChosenReader(name, guard, plugin.fills)


def _raises(error: Exception) -> Callable[[], GpuReader]:
    def fail() -> GpuReader:
        raise error

    return fail


class Guard:
    """A `GpuReader` around one of another package. open_reader: opens it; it is tried again if it fails."""

    def __init__(
        self, name: str, open_reader: Callable[[], GpuReader], *, fills: bool, most_s: float = MOST_READING_S
    ) -> None:
        self._name = name
        self._open_reader = open_reader
        self._fills = fills
        self._most_s = most_s
        self._reader: GpuReader | None = None
        self._running: threading.Event | None = None
        """Set when the last call has ended; None if it ended in its time."""
        self._next_try_ms: int | None = None
        self._failure = ""
        self._devices: tuple[DeviceReading, ...] = ()
        """What it listed last."""

    def open(self) -> None:
        """Open the reader. Raises SettingsError alone; another failure is told by the next readings."""
        try:
            self._reader = within(MOST_LOADING_S, self._open_reader)
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        """Return what the reader returns, or its devices without values and why."""
        if self._running is not None and not self._running.is_set():
            return self._unread()
        try:
            found = within(self._most_s, lambda: self._call(at_ms, before))
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)
            return self._unread()
        self._running = None
        self._tell(found.failure)
        devices = found.devices
        if found.failure and not self._fills:
            listed = {device.gpu.uuid for device in devices}
            devices += tuple(unread(one, found.failure) for one in self._devices if one.gpu.uuid not in listed)
        self._devices = devices
        return GpuReadings(devices, found.failure)

    def close(self) -> None:
        """Close the reader, if it answers."""
        reader = self._reader
        if reader is None or (self._running is not None and not self._running.is_set()):
            return
        try:
            within(self._most_s, reader.close)
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail(error)

    def _call(self, at_ms: int, before: Sequence[DeviceReading]) -> GpuReadings:
        if self._reader is None:
            if self._next_try_ms is not None and at_ms < self._next_try_ms:
                raise WrongReading(self._failure)
            self._next_try_ms = at_ms + RETRY_MS
            self._reader = self._open_reader()
        return checked(self._reader.read(at_ms, before))

    def _fail(self, error: Exception) -> None:
        if isinstance(error, TakesTooLong):
            self._running = error.done
        words = (AgentError, NoPlugin, TakesTooLong)
        self._tell(escaped(str(error) if isinstance(error, words) else f"{type(error).__name__}: {error}")[:_MOST_TEXT])

    def _tell(self, failure: str) -> None:
        """Log a failure that is new, and that there is none any more."""
        if failure and failure != self._failure:
            log.warning("a reader of GPUs fails", extra={"reader": self._name, "reason": failure})
        elif self._failure and not failure:
            log.info("a reader of GPUs answers again", extra={"reader": self._name})
        self._failure = failure

    def _unread(self) -> GpuReadings:
        if self._fills:
            return GpuReadings((), self._failure)
        return GpuReadings(tuple(unread(device, self._failure) for device in self._devices), self._failure)


def unread(device: DeviceReading, reason: str) -> DeviceReading:
    """Return a device without values."""
    why = Unavailable(reason)
    return DeviceReading(
        device.gpu, "ok", device.counter_epoch, busy_us=why, energy_uj=why, memory_used_mib=why, power_mw=why,
        sm_active_us=why, tensor_active_us=why,
    )  # fmt: skip


def checked(found: Any) -> GpuReadings:
    """Return a reading, as far as its reader may speak of it: who holds a device is not its to say.

    Raises WrongReading for whatever is no reading."""
    if not isinstance(found, GpuReadings):
        raise WrongReading(f"read returned a {type(found).__name__}, not GpuReadings")
    if len(found.devices) > MOST_DEVICES:
        raise WrongReading(f"more than {MOST_DEVICES} devices")
    devices = tuple(_device(device) for device in found.devices)
    if len({device.gpu.uuid for device in devices}) < len(devices):
        raise WrongReading("a device is listed twice")
    return GpuReadings(devices, escaped(str(found.failure))[:_MOST_TEXT])


def _device(found: object) -> DeviceReading:
    try:
        plain = msgspec.to_builtins(found)
        device = msgspec.convert(plain, DeviceReading)
    except UNDECODABLE as error:
        raise WrongReading(f"a {type(found).__name__} is no DeviceReading: {error}") from error
    gpu = device.gpu
    where = f"device {escaped(gpu.uuid[:_MOST_TEXT])}"
    _check_bounds(plain, where)
    parts = {part.uuid for part in gpu.mig}
    if not all([gpu.uuid, gpu.model, *parts]):
        raise WrongReading(f"{where}: uuid and model have a text")
    if gpu.memory_mib == 0 or not all(part.memory_mib and part.compute for part in gpu.mig):
        raise WrongReading(f"{where}: a size is 0; memory_mib of a device is None if it is not known")
    if len(parts) > MOST_PARTS or sum(part.compute for part in gpu.mig) > gpu.compute_slices:
        raise WrongReading(f"{where}: its parts are more than the device")
    if not {part.mig_uuid for part in device.instances} <= parts or len(device.instances) > len(parts):
        raise WrongReading(f"{where}: instances has a part that is not in gpu.mig, or one twice")
    return msgspec.structs.replace(device, holders=())


def _check_bounds(plain: Any, where: str) -> None:
    """Check every number and text of a reading."""
    left = [plain]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            if len(value) > MOST_ITEMS:
                raise WrongReading(f"{where}: more than {MOST_ITEMS} items")
            left += value
        elif isinstance(value, int) and not 0 <= value <= _MOST:
            raise WrongReading(f"{where}: {value} is negative or too large")
        elif isinstance(value, str) and not (len(value) <= _MOST_TEXT and value.isprintable()):
            raise WrongReading(f"{where}: a text is one line of at most {_MOST_TEXT} characters")
