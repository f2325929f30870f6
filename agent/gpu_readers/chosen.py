"""The readers that the settings choose, as one: `nvml`, or `nvml, NAME=PLACE`.

They read one after another. The first one that lists a device owns it. A later one can only give values that the owner
lacks: a value that the owner has given once, or that its driver refuses at the moment, never comes from another reader,
because two counters have different origins.

gputally's own readers are the modules of this package, so that an agent without others does not look for plug-ins.
Readers of other packages run behind `guard`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from agent.core.readings import DeviceCondition, DeviceReading, InstanceReading, Unavailable
from agent.core.settings import SettingsError, comma_separated
from agent.gpu_readers.protocol import SEAM, DriverReader, GpuReader, GpuReaderPlugin, Surroundings
from gputally.base.clock import Clock

_OF_DEVICE = ("busy_us", "energy_uj", "memory_used_mib", "power_mw", "sm_active_us", "tensor_active_us")
_OF_INSTANCE = ("busy_us", "memory_mib", "sm_active_us", "tensor_active_us")
_OF_CONDITION = ("throttle_reasons", "ecc_corrected", "ecc_uncorrected")
_CONDITION, _XIDS = "condition", "xids"


_Values = DeviceReading | InstanceReading | DeviceCondition


class ChosenReader(msgspec.Struct, frozen=True):
    """A reader with its name and whether it only fills."""

    name: str
    reader: GpuReader
    fills: bool = False


class MachineReading(msgspec.Struct, frozen=True):
    """One reading of all readers.

    failure: why nothing is known about the devices: the failure of the first reader, if every reader that lists devices
        failed; otherwise "".
    sources: each reader and each part of one, with its failure.
    took_ms: how long each reader took."""

    devices: tuple[DeviceReading, ...]
    failure: str
    sources: tuple[tuple[str, str], ...]
    took_ms: tuple[tuple[str, int], ...]


class GpuReaders:
    """The chosen readers. One thread uses it; other threads may call `release` and `reacquire`.

    clock: measures how long the readings take; None measures nothing."""

    def __init__(self, readers: Sequence[ChosenReader], clock: Clock | None = None) -> None:
        self._readers = readers
        self._drivers = [one.reader for one in readers if isinstance(one.reader, DriverReader)]
        self._clock = clock
        self._given: set[tuple[str, str, str]] = set()
        """(GPU uuid, MIG uuid or "", name) of the values that the owner of a device has given at least once."""

    def read(self, at_ms: int) -> MachineReading:
        """Read all devices. Raises DriverReplaced."""
        devices: dict[str, DeviceReading] = {}
        failed: list[tuple[str, list[str]]] = []
        """The failure of each reader that lists devices, with the devices that it owns."""
        sources: list[tuple[str, str]] = []
        took_ms: list[tuple[str, int]] = []
        for one in self._readers:
            began_ms = self._now_ms()
            found = one.reader.read(at_ms, tuple(devices.values()))
            if self._clock is not None:
                took_ms.append((one.name, self._now_ms() - began_ms if found.took_ms is None else found.took_ms))
            sources += [(one.name, found.failure), *found.parts]
            owns = []
            for device in found.devices:
                uuid = device.gpu.uuid
                owned = devices.get(uuid)
                if owned is not None:
                    devices[uuid] = self._filled(owned, device)
                elif not one.fills:
                    devices[uuid] = device
                    owns.append(uuid)
                    self._note(device)
            if not one.fills:
                failed.append((found.failure, owns))
        failure = failed[0][0] if failed and all(reason for reason, _ in failed) else ""
        if not failure:
            for reason, owns in failed:
                if reason:
                    devices |= {uuid: _without_processes(devices[uuid], reason) for uuid in owns}
        return MachineReading(tuple(devices.values()), failure, tuple(sources), tuple(took_ms))

    def look_again(self) -> None:
        """Look up the parts of the GPUs soon, because a pod holds one that is not known."""
        for driver in self._drivers:
            driver.look_again()

    def release(self, why: str) -> None:
        """Close the drivers at the next reading, until `reacquire(why)`. Any thread may call this."""
        for driver in self._drivers:
            driver.release(why)

    def reacquire(self, why: str) -> None:
        """Withdraw a release. Any thread may call this."""
        for driver in self._drivers:
            driver.reacquire(why)

    def close(self) -> None:
        """Close all readers, the last one first."""
        for one in reversed(self._readers):
            one.reader.close()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms() if self._clock is not None else 0

    def _note(self, device: DeviceReading) -> None:
        """Remember which values the owner of a device gives."""
        if len(self._readers) == 1:
            return
        parts: list[tuple[str, _Values, Iterable[str]]] = [
            ("", device, _OF_DEVICE), (_CONDITION, device.condition, _OF_CONDITION),
        ]  # fmt: skip
        parts += [(part.mig_uuid, part, _OF_INSTANCE) for part in device.instances]
        for mig_uuid, part, names in parts:
            given = [name for name in names if not isinstance(getattr(part, name), Unavailable)]
            self._given.update((device.gpu.uuid, mig_uuid, name) for name in given)
        if not device.condition.xids_unread:
            self._given.add((device.gpu.uuid, _CONDITION, _XIDS))

    def _filled(self, owned: DeviceReading, other: DeviceReading) -> DeviceReading:
        """Return a device with the values of another reader that its owner lacks. A lost device gets only errors."""
        uuid = owned.gpu.uuid
        owned = msgspec.structs.replace(owned, condition=self._with_errors(uuid, owned.condition, other.condition))
        if owned.health != "ok":
            return owned
        found = self._lacking((uuid, ""), owned, other, _OF_DEVICE)
        if "busy_us" in found and owned.method == "device":
            found["method"] = other.method
        others = {part.mig_uuid: part for part in other.instances}
        instances = tuple(
            self._filled_part(uuid, part, others[part.mig_uuid]) if part.mig_uuid in others else part
            for part in owned.instances
        )
        if other.counter_epoch and (found or instances != owned.instances):
            found["counter_epoch"] = f"{owned.counter_epoch}/{other.counter_epoch}"
        return msgspec.structs.replace(owned, **found, instances=instances)

    def _with_errors(self, uuid: str, owned: DeviceCondition, other: DeviceCondition) -> DeviceCondition:
        """Return a condition with the errors of another reader that its owner does not read."""
        found = self._lacking((uuid, _CONDITION), owned, other, _OF_CONDITION)
        lacks = owned.xids_unread and not owned.xids and (uuid, _CONDITION, _XIDS) not in self._given
        if lacks and (other.xids or not other.xids_unread):
            found |= {"xids": other.xids, "xids_unread": other.xids_unread}
        return msgspec.structs.replace(owned, **found)

    def _filled_part(self, uuid: str, owned: InstanceReading, other: InstanceReading) -> InstanceReading:
        found = self._lacking((uuid, owned.mig_uuid), owned, other, _OF_INSTANCE)
        if "busy_us" in found:
            found["method"] = other.method
        return msgspec.structs.replace(owned, **found)

    def _lacking(
        self,
        device: tuple[str, str],
        owned: _Values,
        other: _Values,
        names: Iterable[str],
    ) -> dict[str, object]:
        """Return the values that the owner has never given, does not refuse, and the other reader has."""
        found: dict[str, object] = {}
        for name in names:
            known, value = getattr(owned, name), getattr(other, name)
            lacks = isinstance(known, Unavailable) and not known.refused and (*device, name) not in self._given
            if lacks and not isinstance(value, Unavailable):
                found[name] = value
        return found


def _without_processes(device: DeviceReading, reason: str) -> DeviceReading:
    """Return a device whose processes are unknown for this reason."""
    known = dict(device.unlisted)
    places = [place for place in ("", *(part.uuid for part in device.gpu.mig)) if place not in known]
    return msgspec.structs.replace(device, unlisted=(*device.unlisted, *((place, reason) for place in places)))


def open_readers(text: str, surroundings: Surroundings) -> GpuReaders:
    """Open the readers that the setting `gpu_readers` names.

    Raises SettingsError if it names an unknown reader, one twice or none, or if a place is wrong."""
    chosen: dict[str, ChosenReader] = {}
    for name, place in _names_and_places(text):
        if name in chosen:
            raise SettingsError(f"gpu_readers: {name} is named twice")
        plugin = own(name)
        if plugin is None:
            from agent.gpu_readers.guard import guarded

            reader = guarded(name, place, surroundings)
            chosen[name] = ChosenReader(name, reader, reader.fills)
        else:
            chosen[name] = ChosenReader(name, plugin.opened(place, surroundings), plugin.fills)
    if not any(not one.fills for one in chosen.values()):
        from gputally.base.plugins import usable

        listing = sorted(name for name, one in usable(SEAM, GpuReaderPlugin).items() if not one.fills)
        raise SettingsError(f"gpu_readers: name a reader that lists GPUs; installed: {', '.join(listing) or 'none'}")
    return GpuReaders(tuple(chosen.values()), surroundings.clock)


def own(name: str) -> GpuReaderPlugin | None:
    """Return the manifest of one of gputally's own readers, which are modules of this package."""
    if not name.isidentifier():
        return None
    path = f"{__package__}.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    found = getattr(module, "READER", None)
    return found if isinstance(found, GpuReaderPlugin) else None


def _names_and_places(text: str) -> Iterator[tuple[str, str]]:
    for part in comma_separated(text):
        name, _, place = part.partition("=")
        yield name.strip(), place.strip()
