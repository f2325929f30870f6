"""Reads one node: joins GPU readings with holders, and counts busy time per holder from per-process readings.

The devices come from `driver_lifecycle`, and the holders from a `PodsFile`. Without this file the holders come from the
processes themselves, and a pod among them gets its name from the kubelet's log folders. If one part fails, the
snapshot's `sources` names it, and the others continue. Per-holder busy time is read only on shared devices. A sole
holder gets all of the device's busy time.

Busy time per process comes from accounting mode, which misses nothing, otherwise from per-process samples, an estimate
that is good over minutes. Without both, only the allocation is known. Counters count up from zero for as long as a
holder is on a device. `busy_time_attribution` scales them to the device's own busy time.

If the driver refuses to list processes, or their busy time, no coarser method replaces it. The time of the holders
there is then unknown, except for a holder that has all of the device and had it alone before. If the time of one
process is unknown, so is its holder's. A process without a known holder makes the time of every holder of that GPU
unknown. A counter never decreases.

The result is deterministic. There is one instance per node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agent.core.readings import (
    KAI,
    SOLE,
    Allocation,
    DeviceReading,
    Gpu,
    HolderReading,
    ProcessReading,
    Reading,
    Snapshot,
    Unavailable,
)
from agent.devices.driver_lifecycle import DriverReading, Gpus
from agent.holders.device_allocations import Seen, settle
from agent.holders.pod_and_job_files import Pods
from agent.holders.process_cgroups import PodLogs, PodName, ProcessTable
from agent.metering.reading_deltas import NO_HOLDER_READING
from agent.wire import Holder, Method, PodFacts
from gputally.base.clock import Clock
from gputally.base.pod_queue_labels import RESERVATION_NAMESPACES
from gputally.base.units import apportion

STRANGER = Unavailable("unknown process on the gpu")


@dataclass(frozen=True, slots=True)
class Owned:
    """A process with its holder; None if it is in no table that the agent can read."""

    process: ProcessReading
    holder: Holder | None


class HolderCounters:
    """The busy counters of every holder on every device of a node."""

    def __init__(self) -> None:
        self._busy: dict[str, dict[tuple[str, Holder], int]] = {}
        self._sole: dict[str, set[tuple[str, Holder]]] = {}
        self._strangers: dict[str, set[str]] = {}
        """For each GPU, the places where processes of other pods than the holders ran at the last listing."""

    def read(
        self,
        device: DeviceReading,
        owned: Sequence[Owned],
        claims: Sequence[Allocation],
        *,
        visible: bool = False,
        uncertain: bool = False,
    ) -> DeviceReading:
        """Return the device with its holders' readings and their method.

        visible: whether this agent can see the host's processes.
        uncertain: `claims` are the last known allocations, not the current ones.

        claims: the allocations of this device. A holder that has all of a device to itself, now and at the last
        reading, gets no reading of its own: it has the device's busy time less that of other pods' processes."""
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
        if not readings:  # with visible processes and several holders, it is known that none of them did anything
            shared = any(claim.sharing for claim in claims) or len({claim.holder for claim in claims}) > 1
            return (
                msgspec.structs.replace(device, method="process")
                if shared and visible and not device.gpu.mig_enabled and not unlisted
                else device
            )
        method = device.method if not ways else "process" if "process" in ways else "accounting"
        return msgspec.structs.replace(device, holders=tuple(readings), method=method)

    def forget(self, present: Collection[str]) -> None:
        """Remove the counters of devices that are no longer listed."""
        for uuid in self._busy.keys() - set(present):
            del self._busy[uuid]
            self._sole.pop(uuid, None)
            self._strangers.pop(uuid, None)


def nameless(pid: int) -> Holder:
    """Return the holder that represents a process whose owner cannot be seen from here."""
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
    """Return each holder's busy time of this step, with the time of an MPS server divided among its clients.

    The driver's samples name the server (measured on an H200 with driver 580), which is listed beside its clients. A
    process counts as the server if it is neither a graphics process nor a client, does not hold the device, and the
    clients there did nothing. Its time goes to the clients in equal parts."""
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


_Place = tuple[str, str]
"""(gpu uuid, MIG uuid or "")."""

CHECK_EVERY = 10
"""How often a process number is checked. A process that holds a GPU from reading to reading keeps its number, so this
is rare."""


class Claims(Protocol):
    """A source of device allocations."""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:
        """Return the holders at `at_ms`."""
        ...


class NodeSource:
    """An `agent.main_loop.Source` over the real machine.

    pods=None: the running processes are the holders (standalone).
    processes=None: the host's processes cannot be seen, so process numbers would match other processes.
    node: the node's name, for the facts of pods that are known only from their log folders.
    clock: dates the driver's samples.
    systems: the sharing systems of this node."""

    def __init__(
        self,
        gpus: Gpus,
        processes: ProcessTable | None,
        pods: Claims | None = None,
        logs: PodLogs | None = None,
        node: str = "",
        clock: Clock | None = None,
        systems: frozenset[str] = frozenset({KAI}),
    ) -> None:
        self._systems = systems
        self._gpus = gpus
        self._processes = processes
        self._pods = pods
        self._logs = logs
        self._node = node
        self._clock = clock
        self._counters = HolderCounters()
        self._seen: dict[str, list[Seen]] = {}
        """The processes on each GPU at the last listing."""
        self._running: frozenset[int] = frozenset()
        self._readings = 0

    def snapshot(self, at_ms: int) -> Snapshot:
        """Read the node. Raises agent.core.errors.DriverReplaced if only a new process can continue."""
        began_ms = self._now_ms()
        scan = self._gpus.read(at_ms)
        took_ms = [("nvml", self._now_ms() - began_ms)] if self._clock is not None else []
        pods = self._pods.read(at_ms, [d.gpu for d in scan.devices]) if self._pods is not None else Pods((), ())
        if pods.unresolved:
            self._gpus.look_again()
        names = self._logs.names(at_ms) if self._logs is not None else {}
        began_ms = self._now_ms()
        owned = self._owned(scan.devices, pods, names)
        if self._clock is not None and self._processes is not None:
            took_ms.append(("processes", self._now_ms() - began_ms))
        seen = self._last_seen(scan.devices, owned)
        allocations: tuple[Allocation, ...] | Unavailable
        if isinstance(pods.allocations, Unavailable):
            allocations = pods.allocations
        elif self._pods is not None:
            requests = {facts.uid: facts.requests for facts in pods.facts}
            gpus = {d.gpu.uuid: d.gpu for d in scan.devices}
            allocations = settle(pods.allocations, seen, requests, gpus, self._systems)
        elif scan.failure:
            allocations = Unavailable(scan.failure)
        else:
            allocations = _by_process(seen)
        known = () if isinstance(allocations, Unavailable) else allocations
        unknown = self._unknown_holders(scan.devices, pods, known)
        claims: dict[str, list[Allocation]] = {}
        for allocation in known:
            claims.setdefault(allocation.gpu_uuid, []).append(allocation)
        visible = self._processes is not None
        devices = tuple(
            self._counters.read(
                d,
                owned.get(d.gpu.uuid, ()),
                claims.get(d.gpu.uuid, ()),
                visible=visible,
                uncertain=d.gpu.uuid in unknown,
            )
            for d in scan.devices
        )
        self._counters.forget([d.gpu.uuid for d in scan.devices])
        facts = pods.facts if self._pods is not None else self._named_facts(seen, at_ms)
        sources = self._sources(scan, pods)
        return Snapshot(
            at_ms, devices, allocations, facts, sources, (*took_ms, *pods.took_ms), tuple(sorted(unknown.items()))
        )

    def _last_seen(self, devices: Sequence[DeviceReading], owned: Mapping[str, Sequence[Owned]]) -> list[Seen]:
        """Return the processes of each device; if they could not be listed, those of the last listing."""
        before, self._seen = self._seen, {}
        for device in devices:
            uuid, unlisted = device.gpu.uuid, dict(device.unlisted)
            now = [
                (uuid, one.process.mig_uuid, one.holder or nameless(one.process.pid))
                for one in owned.get(uuid, ())
                if one.process.running and not self._only_serves(one.process)
            ]
            self._seen[uuid] = now + [one for one in before.get(uuid, ()) if one[1] in unlisted]
        return [one for ones in self._seen.values() for one in ones]

    def _only_serves(self, process: ProcessReading) -> bool:
        """Return whether the process computes only for its clients, which hold the GPU."""
        return self._processes is not None and self._pods is None and self._processes.is_mps_server(process.pid)

    def _unknown_holders(
        self, devices: Sequence[DeviceReading], pods: Pods, allocations: Sequence[Allocation]
    ) -> dict[str, str]:
        """Return for each GPU why its holders or their parts are unknown: the source of allocations reports it, the
        holders can only be found by processes that could not be listed, or a declared part depends on a memory size
        that could not be read."""
        stand_ins: set[str] = set()
        fractional: set[str] = set()
        if self._pods is not None:
            fractional = {a.gpu_uuid for a in allocations if a.sharing == "fraction" and a.fraction_ppm is None}
            claims = () if isinstance(pods.allocations, Unavailable) or KAI not in self._systems else pods.allocations
            stand_ins = {a.gpu_uuid for a in claims if a.holder.namespace in RESERVATION_NAMESPACES}
        unlisted = {
            d.gpu.uuid: d.unlisted[0][1]
            for d in devices
            if d.unlisted and (self._pods is None or d.gpu.uuid in stand_ins)
        }
        unsized = {
            d.gpu.uuid: "the size of the memory, of which pods declare their parts, is not known"
            + (f": {d.memory_used_mib.reason}" if isinstance(d.memory_used_mib, Unavailable) else "")
            for d in devices
            if d.gpu.memory_mib is None and d.gpu.uuid in fractional
        }
        return {**unsized, **unlisted, **pods.unknown}

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms() if self._clock is not None else 0

    def release(self, why: str) -> None:
        """See agent.devices.driver_lifecycle.Gpus.release."""
        self._gpus.release(why)

    def reacquire(self, why: str) -> None:
        """See agent.devices.driver_lifecycle.Gpus.reacquire."""
        self._gpus.reacquire(why)

    def close(self) -> None:
        """Close the driver."""
        self._gpus.close()

    def _sources(self, scan: DriverReading, pods: Pods) -> tuple[tuple[str, str], ...]:
        found = [("nvml", scan.failure)]
        if scan.events_failure:
            found.append(("events", scan.events_failure))
        if self._pods is None:
            return tuple(found)
        return (*found, *(pods.sources or (("pods", pods.fault),)))

    def _named_facts(self, seen: Sequence[Seen], at_ms: int) -> tuple[PodFacts, ...]:
        """Return the facts of pods that are known without an API server: their names, but not their workloads."""
        pods = {holder.uid: holder for _, _, holder in seen if holder.kind == "pod" and holder.name}
        return tuple(
            PodFacts(seq=0, uid=uid, namespace=h.namespace, name=h.name, node=self._node, observed_ms=at_ms)
            for uid, h in sorted(pods.items())
        )

    def _owned(
        self, devices: Sequence[DeviceReading], pods: Pods, names: Mapping[str, PodName]
    ) -> dict[str, list[Owned]]:
        """Return the processes of each GPU with their holders. A pod in the file has the file's name."""
        if self._processes is None:
            return {}
        claims = () if isinstance(pods.allocations, Unavailable) else pods.allocations
        named = {(a.holder.uid, a.gpu_uuid, a.mig_uuid): a.holder for a in claims}
        exact = {(a.holder, a.gpu_uuid, a.mig_uuid) for a in claims}
        known = {uid for uid, _, _ in named} | names.keys() | pods.known.keys()
        self._readings += 1
        in_sight = self._running if self._readings % CHECK_EVERY else frozenset()
        self._running = frozenset(p.pid for d in devices for p in d.processes if p.running)
        owned: dict[str, list[Owned]] = {}
        for gpu_uuid, process in ((d.gpu.uuid, p) for d in devices for p in d.processes):
            holder = self._processes.holder(process.pid, known, same=process.pid in in_sight)
            if holder is not None:
                if holder.kind == "pod" and holder.uid in pods.known:
                    holder = pods.known[holder.uid].called(holder)
                elif holder.kind == "pod" and holder.uid in names:
                    namespace, name = names[holder.uid]
                    holder = msgspec.structs.replace(holder, namespace=namespace, name=name)
                if (holder, gpu_uuid, process.mig_uuid) not in exact:
                    holder = named.get((holder.uid, gpu_uuid, process.mig_uuid), holder)
            owned.setdefault(gpu_uuid, []).append(Owned(process, holder))
        return owned


def _by_process(seen: Sequence[Seen]) -> tuple[Allocation, ...]:
    """Return allocations by process: every holder of a running process holds its GPU; several share it equally."""
    holders: dict[_Place, dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in seen:
        holders.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    return tuple(
        Allocation(gpu_uuid, holder, mig_uuid, sharing="processes" if len(present) > 1 else None)
        for (gpu_uuid, mig_uuid), present in holders.items()
        for holder in present
    )
