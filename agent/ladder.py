"""Busy time per holder from what the driver says per process: the finest reading that is to be had.

The ladder: accounting mode (misses nothing), per-process samples (statistics, good over minutes), nothing
(the allocation is all that is known). Counters count up from zero for as long as a holder is on a device;
made to fit the device's own busy time they are only in `agent.attribution`.
Where the driver refuses to list processes, or to say how busy they were, nothing coarser stands in for it: the time
of the holders there is unknown, but for one that has all of the device and had it to itself before.
Invariants: a counter never decreases; what one process could not say is unknown for its holder, and a
process nobody can name makes everybody's time on that GPU unknown, since it may be anybody's.
Deterministic: no clock, no I/O; one instance per node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from agent.model import Allocation, DeviceReading, HolderReading, ProcessReading, Reading, Unavailable
from agent.steps import NO_HOLDER_READING
from agent.units import apportion
from agent.wire import Holder, Method

SOLE = Unavailable("sole holder")
STRANGER = Unavailable("unknown process on the gpu")


@dataclass(frozen=True, slots=True)
class Owned:
    """A process with its holder; None: it is in nobody's table that the agent can read."""

    process: ProcessReading
    holder: Holder | None


class HolderCounters:
    """The busy counters of every holder on every device of a node."""

    def __init__(self) -> None:
        self._busy: dict[str, dict[tuple[str, Holder], int]] = {}
        self._sole: dict[str, set[tuple[str, Holder]]] = {}
        self._strangers: dict[str, set[str]] = {}
        """Per GPU the places where processes of others than the holders ran when they were listed last."""

    def read(
        self,
        device: DeviceReading,
        owned: Sequence[Owned],
        claims: Sequence[Allocation],
        *,
        visible: bool = False,
        uncertain: bool = False,
    ) -> DeviceReading:
        """The device with its holders' readings and the method they were come by.

        visible: whether processes could be named, had there been any. uncertain: `claims` are the last known ones.

        claims: who was given what of this device. Who has all of a device to itself, now and at the last
        reading, gets no reading of its own: it has what the device did, less what strangers did there."""
        sole = _sole(claims)
        lone = sole & self._sole.get(device.gpu.uuid, sole)
        self._sole[device.gpu.uuid] = sole
        held = {(claim.mig_uuid, claim.holder) for claim in claims}
        counters = self._busy.setdefault(device.gpu.uuid, {})
        groups: defaultdict[tuple[str, Holder], list[ProcessReading]] = defaultdict(list)
        for one in owned:
            groups[one.process.mig_uuid, one.holder or nameless(one.process.pid)].append(one.process)
        unlisted = dict(device.unlisted)
        for gone in counters.keys() - groups.keys():
            if gone[0] not in unlisted:
                del counters[gone]
        strangers = self._strangers.get(device.gpu.uuid, set()) & unlisted.keys()
        self._strangers[device.gpu.uuid] = strangers | {place for place, _ in groups.keys() - held}
        unnamed = any(one.holder is None for one in owned)
        times = _served(groups, held)
        refused = {key[0]: step for key, (step, _) in times.items() if key not in held and _is_refused(step)}
        readings = []
        ways: set[Method] = set()
        for key, processes in groups.items():
            mig_uuid, holder = key
            step, way = times[key]
            if not isinstance(step, Unavailable):
                counters[key] = counters.get(key, 0) + step
            busy: Reading = step if isinstance(step, Unavailable) else counters[key]
            if unnamed:
                busy = STRANGER
            elif key in lone:
                busy = refused.get(mig_uuid, SOLE)
            elif not isinstance(busy, Unavailable):
                ways.add(way)
            readings.append(HolderReading(holder, mig_uuid, busy, _total([p.memory_mib for p in processes])))
        for key in sorted(held, key=_name) if unlisted else ():
            if (why := unlisted.get(key[0])) is not None:
                alone = key in lone and key[0] not in strangers and not uncertain
                busy = SOLE if alone else Unavailable(f"{NO_HOLDER_READING}: {why}", refused=True)
                readings.append(HolderReading(key[1], key[0], busy, Unavailable(why, refused=True)))
        if not readings:  # where processes can be seen and several hold the device, it is known that none did anything
            shared = any(claim.sharing for claim in claims) or len({claim.holder for claim in claims}) > 1
            return (
                msgspec.structs.replace(device, method="process")
                if shared and visible and not device.gpu.mig_enabled and not unlisted
                else device
            )
        method = device.method if not ways else "process" if "process" in ways else "accounting"
        return msgspec.structs.replace(device, holders=tuple(readings), method=method)

    def forget(self, present: Collection[str]) -> None:
        """Drop the counters of devices that are no longer listed."""
        for uuid in self._busy.keys() - set(present):
            del self._busy[uuid]
            self._sole.pop(uuid, None)
            self._strangers.pop(uuid, None)


def nameless(pid: int) -> Holder:
    """The holder that stands for a process whose owner cannot be seen from here."""
    return Holder(kind="process", uid=f"{pid}:", name=f"pid {pid}")


def _is_refused(reading: Reading) -> bool:
    return isinstance(reading, Unavailable) and reading.refused


def _name(key: tuple[str, Holder]) -> tuple[str, str, str]:
    return key[0], key[1].uid, key[1].container


def _sole(claims: Sequence[Allocation]) -> set[tuple[str, Holder]]:
    places: defaultdict[str, set[Holder]] = defaultdict(set)
    for claim in claims:
        places[claim.mig_uuid].add(claim.holder)
    shared = {claim.mig_uuid for claim in claims if claim.sharing}
    return {(p, h) for p, holders in places.items() if len(holders) == 1 and p not in shared for h in holders}


def _served(
    groups: dict[tuple[str, Holder], list[ProcessReading]], held: Collection[tuple[str, Holder]]
) -> dict[tuple[str, Holder], tuple[Reading, Method]]:
    """Each holder's busy time of this step, with the time of an MPS server handed to its clients.

    Whether the driver's samples name the server or its client is not documented. A process that draws nothing and is no
    client, beside clients that did nothing, on a device it does not hold, is taken for the server; its
    time goes to the clients in equal parts."""
    times = {key: _step(processes) for key, processes in groups.items()}
    led = {key for key, processes in groups.items() for p in processes if p.mps_client}
    for place in {mig_uuid for mig_uuid, _ in led}:
        clients = [k for k in groups if k[0] == place and k in led]
        drawing = {k for k, processes in groups.items() if any(p.graphics for p in processes)}
        servers = [k for k in groups if k[0] == place and k not in held and k not in led and k not in drawing]
        known = [times[k][0] for k in clients]
        if any(isinstance(t, Unavailable) or t for t in known):
            continue
        for server in servers:
            spent, way = times[server]
            if isinstance(spent, Unavailable) or spent == 0:
                continue
            weights = [sum(p.mps_client for p in groups[k]) for k in clients]
            for client, part in zip(clients, apportion(spent, weights), strict=True):
                had = times[client][0]
                times[client] = (part if isinstance(had, Unavailable) else had + part, way)
            times[server] = (0, way)
    return times


def _step(processes: Sequence[ProcessReading]) -> tuple[Reading, Method]:
    total = 0
    method: Method = "accounting"
    for process in processes:
        reading = process.accounted_us
        if isinstance(reading, Unavailable):
            reading, method = process.busy_us, "process"
        if isinstance(reading, Unavailable):
            return reading, "allocation"
        total += reading
    return total, method


def _total(readings: Sequence[Reading]) -> Reading:
    total = 0
    for reading in readings:
        if isinstance(reading, Unavailable):
            return reading
        total += reading
    return total
