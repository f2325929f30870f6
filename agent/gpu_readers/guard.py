"""Lets a reader of another package stop nothing: its calls are guarded, and what it returns is checked.

If it raises, hangs or returns something else, its failure is named, and the devices that it listed stay listed without
values, so that their use is unknown and not zero."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from agent.core.guarded_calls import MOST_READING_S, MOST_TEXT, GuardedCalls
from agent.core.readings import DeviceReading, Unavailable
from agent.core.settings import SettingsError
from agent.gpu_readers.protocol import SEAM, GpuReader, GpuReaderPlugin, GpuReadings, Surroundings
from gputally.base.errors import AgentError
from gputally.base.plugins import BrokenPlugin, NoPlugin, named
from gputally.base.untrusted_text import UNDECODABLE, escaped

log = logging.getLogger("agent.gpu_readers.guard")

MOST_DEVICES, MOST_PARTS, MOST_ITEMS = 256, 64, 16_384
_MOST = 2**63 - 1


class WrongReading(AgentError):
    """A reader returned something that is no reading."""


def guarded(name: str, place: str, surroundings: Surroundings) -> GuardedReader:
    """Load and open a reader of another package. If that fails, its readings say why.

    Raises SettingsError if no reader has this name, or if its place is wrong."""
    try:
        plugin = named(SEAM, GpuReaderPlugin, name)
    except BrokenPlugin as error:
        return GuardedReader(name, _raises(error), fills=False)
    except NoPlugin as error:
        raise SettingsError(f"gpu_readers: {error}") from error
    guard = GuardedReader(name, lambda: plugin.opened(place, surroundings), fills=plugin.fills)
    guard.open()
    return guard


def _raises(error: Exception) -> Callable[[], GpuReader]:
    def fail() -> GpuReader:
        raise error

    return fail


class GuardedReader:
    """A `GpuReader` around one of another package. open_reader: opens it; it is tried again if it fails."""

    def __init__(
        self, name: str, open_reader: Callable[[], GpuReader], *, fills: bool, most_s: float = MOST_READING_S
    ) -> None:
        self._calls = GuardedCalls(name, open_reader, log, most_s)
        self.fills = fills
        self._devices: tuple[DeviceReading, ...] = ()
        """What it listed last."""

    def open(self) -> None:
        """Open the reader. Raises SettingsError alone; another failure is told by the next readings."""
        self._calls.open()

    def read(self, at_ms: int, before: Sequence[DeviceReading] = ()) -> GpuReadings:
        """Return what the reader returns, or its devices without values and why."""
        found = self._calls.ask(at_ms, lambda reader: checked(reader.read(at_ms, before)))
        if found is None:
            return self._unread()
        self._calls.tell(found.failure)
        devices = found.devices
        if found.failure and not self.fills:
            listed = {device.gpu.uuid for device in devices}
            devices += tuple(unread(one, found.failure) for one in self._devices if one.gpu.uuid not in listed)
        self._devices = devices
        return GpuReadings(devices, found.failure)

    def close(self) -> None:
        """Close the reader, if it answers."""
        self._calls.close()

    def _unread(self) -> GpuReadings:
        failure = self._calls.failure
        if self.fills:
            return GpuReadings((), failure)
        return GpuReadings(tuple(unread(device, failure) for device in self._devices), failure)


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
        raise WrongReading(f"read returned the type {type(found).__name__}, not GpuReadings")
    if len(found.devices) > MOST_DEVICES:
        raise WrongReading(f"more than {MOST_DEVICES} devices")
    devices = tuple(_device(device) for device in found.devices)
    if len({device.gpu.uuid for device in devices}) < len(devices):
        raise WrongReading("a device is listed twice")
    return GpuReadings(devices, escaped(str(found.failure))[:MOST_TEXT])


def _device(found: object) -> DeviceReading:
    try:
        plain = msgspec.to_builtins(found)
        device = msgspec.convert(plain, DeviceReading)
    except UNDECODABLE as error:
        raise WrongReading(f"the type {type(found).__name__} is no DeviceReading: {error}") from error
    gpu = device.gpu
    where = f"device {escaped(gpu.uuid[:MOST_TEXT])}"
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
        elif isinstance(value, str) and not (len(value) <= MOST_TEXT and value.isprintable()):
            raise WrongReading(f"{where}: a text is one line of at most {MOST_TEXT} characters")
