"""Reads one node: joins GPU readings with holders, and counts busy time per holder from per-process readings.

The GPUs come from `agent.gpu_readers`, the holders from a `HolderSource`. Without one, every running process is a
holder, and the pods among them get their names from the kubelet's log folders. If one source fails, the snapshot's
`sources` names it, and the others continue. Busy time per holder is read only on shared devices. A sole holder gets all
of the device's busy time.

Busy time per process comes from accounting mode, which misses nothing, otherwise from per-process samples, an estimate
that is good over minutes. Without both, only the allocation is known. Counters count up from zero for as long as a
holder is on a device, and never decrease. `usage_attribution` scales them to the device's own busy time.

If the driver refuses to list the processes of a device, or to report their busy time, no coarser method replaces the
reading. The busy time of the device's holders is then unknown. One holder is an exception: a holder that has the whole
device, had it at the last reading too, and shared it with no other process at the last listing. If the time of one
process is unknown, so is its holder's. A process without a known holder makes the time of every holder of that GPU
unknown.

The result is deterministic. Each node has one `NodeSource`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from agent.core.readings import (
    SOLE,
    Allocation,
    DeviceReading,
    HolderReading,
    NodeSnapshot,
    ProcessReading,
    Reading,
    Unavailable,
    sum_readings,
)
from agent.gpu_readers.chosen import GpuReaders
from agent.holders.process_cgroups import PodLogs, PodName, ProcessTable
from agent.holders.protocol import HolderSource, Holdings
from agent.holders.reserved_gpus import RunningHolder, replace_reservations
from agent.metering.reading_deltas import NO_HOLDER_READING
from agent.wire import Holder, Method, PodFacts
from gputally.base.apportionment import apportion
from gputally.base.clock import Clock
from gputally.kubernetes.pod_queue_labels import reserved_by

UNKNOWN_PROCESS = Unavailable("unknown process on the gpu")


class OwnedProcess(msgspec.Struct, frozen=True, gc=False):
    """A process with its holder. holder: None if the process is not in the agent's process table."""

    process: ProcessReading
    holder: Holder | None


DeviceHolder = tuple[str, Holder]
"""(MIG uuid or "", holder): a holder on one device of a GPU."""


class HolderCounters:
    """The busy counters of all holders on a node's devices."""

    def __init__(self) -> None:
        self._busy: dict[str, dict[DeviceHolder, int]] = {}
        self._sole: dict[str, set[DeviceHolder]] = {}
        """The holders that had a device alone at the last reading, by GPU uuid."""
        self._others: dict[str, set[str]] = {}
        """The devices on which processes without an allocation ran at the last listing, by GPU uuid."""

    def read(
        self,
        device: DeviceReading,
        processes: Sequence[OwnedProcess],
        allocations: Sequence[Allocation],
        *,
        visible: bool = False,
        uncertain: bool = False,
    ) -> DeviceReading:
        """Return the reading of a GPU with the readings of its holders and their method.

        processes: the processes on this GPU.
        allocations: the allocations of this GPU.
        visible: True if this agent sees the host's processes.
        uncertain: True if `allocations` are the last known ones and may have changed.

        The busy time of a holder that has a device alone, now and at the last reading, is not read (`SOLE`): it is the
        device's, less the busy time of other processes."""
        uuid = device.gpu.uuid
        sole_now = _sole_holders(allocations)
        sole = sole_now & self._sole.get(uuid, sole_now)
        self._sole[uuid] = sole_now
        allocated = {(allocation.mig_uuid, allocation.holder) for allocation in allocations}
        groups: defaultdict[DeviceHolder, list[ProcessReading]] = defaultdict(list)
        for owned in processes:
            holder = owned.holder or process_holder(owned.process.pid)
            groups[owned.process.mig_uuid, holder].append(owned.process)
        unlisted = dict(device.unlisted)
        others = self._others.get(uuid, set()) & unlisted.keys()
        self._others[uuid] = others | {mig_uuid for mig_uuid, _ in groups.keys() - allocated}
        unknown_process = any(owned.holder is None for owned in processes)
        readings, methods = self._readings(uuid, groups, allocated, sole, unlisted, unknown_process)
        for key in sorted(allocated, key=_order) if unlisted else ():
            mig_uuid, holder = key
            if (reason := unlisted.get(mig_uuid)) is not None:
                alone = key in sole and mig_uuid not in others and not uncertain
                busy = SOLE if alone else Unavailable(f"{NO_HOLDER_READING}: {reason}", refused=True)
                readings.append(HolderReading(holder, mig_uuid, busy, Unavailable(reason, refused=True)))
        if readings:
            method = device.method if not methods else "process" if "process" in methods else "accounting"
            return msgspec.structs.replace(device, holders=tuple(readings), method=method)
        shared = any(a.sharing for a in allocations) or len({a.holder for a in allocations}) > 1
        if shared and visible and not device.gpu.mig_enabled and not unlisted:
            # No process runs: it is known that none of the holders did anything.
            return msgspec.structs.replace(device, method="process")
        return device

    def _readings(
        self,
        uuid: str,
        groups: Mapping[DeviceHolder, list[ProcessReading]],
        allocated: Collection[DeviceHolder],
        sole: Collection[DeviceHolder],
        unlisted: Collection[str],
        unknown_process: bool,
    ) -> tuple[list[HolderReading], set[Method]]:
        """Return the readings of the holders that have processes, and the methods of the busy times that are known."""
        counters = self._busy.setdefault(uuid, {})
        for ended in counters.keys() - groups.keys():
            if ended[0] not in unlisted:
                del counters[ended]
        steps = _busy_steps(groups, allocated)
        refused = {key[0]: step for key, (step, _) in steps.items() if key not in allocated and _is_refused(step)}
        readings: list[HolderReading] = []
        methods: set[Method] = set()
        for key, processes in groups.items():
            step, method = steps[key]
            busy: Reading = step
            if not isinstance(step, Unavailable):
                busy = counters[key] = counters.get(key, 0) + step
            if unknown_process:
                busy = UNKNOWN_PROCESS
            elif key in sole:
                busy = refused.get(key[0], SOLE)
            elif not isinstance(busy, Unavailable):
                methods.add(method)
            readings.append(HolderReading(key[1], key[0], busy, sum_readings([p.memory_mib for p in processes])))
        return readings, methods

    def forget(self, present: Collection[str]) -> None:
        """Remove the counters of all other GPUs."""
        for uuid in self._busy.keys() - set(present):
            del self._busy[uuid]
            self._sole.pop(uuid, None)
            self._others.pop(uuid, None)


def process_holder(pid: int) -> Holder:
    """Return a holder that represents a process which is not in the agent's process table."""
    return Holder(kind="process", uid=f"{pid}:", name=f"pid {pid}")


def _is_refused(reading: Reading) -> bool:
    return isinstance(reading, Unavailable) and reading.refused


def _order(key: DeviceHolder) -> tuple[str, str, str]:
    return key[0], key[1].uid, key[1].container


def _sole_holders(allocations: Sequence[Allocation]) -> set[DeviceHolder]:
    """Return the holders that have a device alone."""
    holders: defaultdict[str, set[Holder]] = defaultdict(set)
    for allocation in allocations:
        holders[allocation.mig_uuid].add(allocation.holder)
    shared = {allocation.mig_uuid for allocation in allocations if allocation.sharing}
    sole = {mig_uuid: own for mig_uuid, own in holders.items() if len(own) == 1 and mig_uuid not in shared}
    return {(mig_uuid, holder) for mig_uuid, own in sole.items() for holder in own}


def _busy_steps(
    groups: Mapping[DeviceHolder, list[ProcessReading]], allocated: Collection[DeviceHolder]
) -> dict[DeviceHolder, tuple[Reading, Method]]:
    """Return each holder's busy time since the last reading, with its method. The time of an MPS server goes to its
    clients in equal parts.

    The driver reports the busy time of the clients as that of the server (measured on an H200 with driver 580). A
    process counts as the server if it is neither a client nor a graphics process, its holder has no allocation of the
    device, and the clients on this device have no busy time."""
    steps = {key: _step(processes) for key, processes in groups.items()}
    with_clients = {key for key, processes in groups.items() for p in processes if p.mps_client}
    for device in {mig_uuid for mig_uuid, _ in with_clients}:
        clients = [key for key in groups if key[0] == device and key in with_clients]
        drawing = {key for key, processes in groups.items() for p in processes if p.graphics}
        no_server = {*allocated, *with_clients, *drawing}
        if any(isinstance(steps[key][0], Unavailable) or steps[key][0] for key in clients):
            continue
        for server in [key for key in groups if key[0] == device and key not in no_server]:
            spent, method = steps[server]
            if isinstance(spent, Unavailable) or spent == 0:
                continue
            weights = [sum(p.mps_client for p in groups[key]) for key in clients]
            for client, part in zip(clients, apportion(spent, weights), strict=True):
                earlier = steps[client][0]
                steps[client] = (part if isinstance(earlier, Unavailable) else earlier + part, method)
            steps[server] = (0, method)
    return steps


def _step(processes: Sequence[ProcessReading]) -> tuple[Reading, Method]:
    """Return the busy time of one holder's processes since the last reading, and its method. If the time of one process
    is unknown, so is the holder's."""
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


CHECK_EVERY = 10
"""Number of readings after which the holder of a process is read again. In between, a process that uses a GPU at every
reading has kept its number, so its holder is known."""


class NodeSource:
    """An `agent.core.readings.Source` that reads the real machine.

    processes: None if the agent cannot see the host's processes; their numbers could be those of other processes in the
        agent's own process table.
    pods: the source of the allocations; None if the running processes are the holders (standalone).
    logs: the names of pods by uid.
    node: the node's name, for the facts of pods that are known only from their log folders.
    clock: measures how long the readings take; None measures nothing.
    systems: the sharing systems of this node.
    name: the name of the source of the allocations."""

    def __init__(
        self,
        gpus: GpuReaders,
        processes: ProcessTable | None,
        pods: HolderSource | None = None,
        logs: PodLogs | None = None,
        node: str = "",
        clock: Clock | None = None,
        systems: frozenset[str] = frozenset(),
        name: str = "pods",
    ) -> None:
        self._name = name
        self._systems = systems
        self._gpus = gpus
        self._processes = processes
        self._pods = pods
        self._logs = logs
        self._node = node
        self._clock = clock
        self._counters = HolderCounters()
        self._running: dict[str, list[RunningHolder]] = {}
        """The holders of the processes that ran at the last listing, by GPU uuid."""
        self._owners: dict[int, Holder | None] = {}
        """The holders of the processes that ran at the last reading, by process number."""
        self._readings = 0

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        """Read the node. Raises agent.core.readings.DriverReplaced if only a new process can continue."""
        scan = self._gpus.read(at_ms)
        took_ms = list(scan.took_ms)
        pods = self._pods.read(at_ms, [d.gpu for d in scan.devices]) if self._pods is not None else Holdings((), ())
        if pods.unresolved:
            self._gpus.look_again()
        names = self._logs.names(at_ms) if self._logs is not None else {}
        began_ms = self._now_ms()
        owned = self._owned(scan.devices, pods, names)
        if self._clock is not None and self._processes is not None:
            took_ms.append(("processes", self._now_ms() - began_ms))
        running = self._running_holders(scan.devices, owned)
        allocations: tuple[Allocation, ...] | Unavailable
        if isinstance(pods.allocations, Unavailable):
            allocations = pods.allocations
        elif self._pods is not None:
            requests = {facts.uid: facts.requests for facts in pods.facts}
            gpus = {d.gpu.uuid: d.gpu for d in scan.devices}
            allocations = replace_reservations(pods.allocations, running, requests, gpus, self._systems)
        elif scan.failure:
            allocations = Unavailable(scan.failure)
        else:
            allocations = _by_process(running)
        known = () if isinstance(allocations, Unavailable) else allocations
        unknown = self._unknown_holders(scan.devices, pods, known)
        by_gpu: dict[str, list[Allocation]] = {}
        for allocation in known:
            by_gpu.setdefault(allocation.gpu_uuid, []).append(allocation)
        visible = self._processes is not None
        devices = tuple(
            self._counters.read(
                d,
                owned.get(d.gpu.uuid, ()),
                by_gpu.get(d.gpu.uuid, ()),
                visible=visible,
                uncertain=d.gpu.uuid in unknown,
            )
            for d in scan.devices
        )
        self._counters.forget([d.gpu.uuid for d in scan.devices])
        facts = pods.facts if self._pods is not None else self._named_facts(running, at_ms)
        of_pods = (pods.sources or ((self._name, pods.fault),)) if self._pods is not None else ()
        sources = (*scan.sources, *of_pods)
        return NodeSnapshot(
            at_ms, devices, allocations, facts, sources, (*took_ms, *pods.took_ms), tuple(sorted(unknown.items()))
        )

    def _running_holders(
        self, devices: Sequence[DeviceReading], owned: Mapping[str, Sequence[OwnedProcess]]
    ) -> list[RunningHolder]:
        """Return the holders of running processes. If the processes of a device could not be listed, return those of
        the last listing."""
        before, self._running = self._running, {}
        for device in devices:
            uuid, unlisted = device.gpu.uuid, dict(device.unlisted)
            now = [
                (uuid, one.process.mig_uuid, one.holder or process_holder(one.process.pid))
                for one in owned.get(uuid, ())
                if one.process.running and not self._is_mps_server(one.process)
            ]
            self._running[uuid] = now + [earlier for earlier in before.get(uuid, ()) if earlier[1] in unlisted]
        return [holder for holders in self._running.values() for holder in holders]

    def _is_mps_server(self, process: ProcessReading) -> bool:
        """Return True for an MPS server if the running processes are the holders. It computes only for its clients,
        which are the holders."""
        return self._processes is not None and self._pods is None and self._processes.is_mps_server(process.pid)

    def _unknown_holders(
        self, devices: Sequence[DeviceReading], pods: Holdings, allocations: Sequence[Allocation]
    ) -> dict[str, str]:
        """Return the reason for each GPU whose holders or their parts are unknown, by the GPU's uuid.

        There are four reasons: the source of allocations reports it; only processes show the holders, and the processes
        could not be listed; a declared part depends on a memory size that could not be read; or one holder has the
        device alone and another has a part of it."""
        listed = () if isinstance(pods.allocations, Unavailable) else pods.allocations
        unlisted = {
            d.gpu.uuid: d.unlisted[0][1]
            for d in devices
            if d.unlisted
            and (
                self._pods is None
                or any(a.gpu_uuid == d.gpu.uuid and reserved_by(a.holder.namespace) in self._systems for a in listed)
            )
        }
        unsized = {
            d.gpu.uuid: "pods declare parts of the memory, and its size is unknown"
            + (f": {d.memory_used_mib.reason}" if isinstance(d.memory_used_mib, Unavailable) else "")
            for d in devices
            if d.gpu.memory_mib is None
            and any(a.gpu_uuid == d.gpu.uuid and (a.sharing, a.fraction_ppm) == ("fraction", None) for a in allocations)
        }
        return {**_contradictions(allocations), **unsized, **unlisted, **pods.unknown}

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms() if self._clock is not None else 0

    def close(self) -> None:
        """Close the source of allocations, then the readers of the GPUs."""
        if self._pods is not None:
            self._pods.close()
        self._gpus.close()

    def _named_facts(self, running: Sequence[RunningHolder], at_ms: int) -> tuple[PodFacts, ...]:
        """Return the facts of pods that are known only from their log folders, which contain only their names."""
        pods = {holder.uid: holder for _, _, holder in running if holder.kind == "pod" and holder.name}
        return tuple(
            PodFacts(seq=0, uid=uid, namespace=h.namespace, name=h.name, node=self._node, observed_ms=at_ms)
            for uid, h in sorted(pods.items())
        )

    def _owned(
        self, devices: Sequence[DeviceReading], pods: Holdings, names: Mapping[str, PodName]
    ) -> dict[str, list[OwnedProcess]]:
        """Return the processes of each GPU with their holders, by the GPU's uuid. If the holder has an allocation of
        the device, it is the allocation's holder."""
        if self._processes is None:
            return {}
        allocations = () if isinstance(pods.allocations, Unavailable) else pods.allocations
        allocated = {(a.holder.uid, a.gpu_uuid, a.mig_uuid): a.holder for a in allocations}
        exact = {(a.holder, a.gpu_uuid, a.mig_uuid) for a in allocations}
        known = {uid for uid, _, _ in allocated} | names.keys() | pods.known.keys()
        self._readings += 1
        before, owners = self._owners, dict[int, Holder | None]()
        same = before.keys() if self._readings % CHECK_EVERY else frozenset()
        owned: dict[str, list[OwnedProcess]] = {}
        for gpu_uuid, process in ((d.gpu.uuid, p) for d in devices for p in d.processes):
            if not process.running and process.pid in before:  # its pod may be gone already
                owned.setdefault(gpu_uuid, []).append(OwnedProcess(process, before[process.pid]))
                continue
            holder = self._processes.holder(process.pid, known, same=process.pid in same)
            if holder is not None:
                if holder.kind == "pod" and holder.uid in pods.known:
                    holder = pods.known[holder.uid].named_holder(holder)
                elif holder.kind == "pod" and holder.uid in names:
                    namespace, name = names[holder.uid]
                    holder = msgspec.structs.replace(holder, namespace=namespace, name=name)
                if (holder, gpu_uuid, process.mig_uuid) not in exact:
                    holder = allocated.get((holder.uid, gpu_uuid, process.mig_uuid), holder)
            if process.running:
                owners[process.pid] = holder
            owned.setdefault(gpu_uuid, []).append(OwnedProcess(process, holder))
        self._owners = owners
        return owned


def _contradictions(allocations: Sequence[Allocation]) -> dict[str, str]:
    """Return the reason for each GPU of whose device one holder has the whole and another a part, by the GPU's uuid.
    Nobody knows which of them is wrong, so that nothing of the device may count as free."""
    whole: dict[tuple[str, str], Holder] = {}
    parts: dict[tuple[str, str], Holder] = {}
    for one in allocations:
        if one.sharing is None:
            whole.setdefault((one.gpu_uuid, one.mig_uuid), one.holder)
        elif one.fraction_ppm is not None or one.sharing_replicas:
            parts.setdefault((one.gpu_uuid, one.mig_uuid), one.holder)
    return {
        device[0]: f"{_title(whole[device])} holds it without `sharing`, and {_title(parts[device])} a part of it"
        for device in sorted(whole.keys() & parts.keys())
    }


def _title(holder: Holder) -> str:
    return f"{holder.namespace}/{holder.name}" if holder.name else holder.uid


def _by_process(running: Sequence[RunningHolder]) -> tuple[Allocation, ...]:
    """Return the allocations without Kubernetes: the holders of the processes on a device share it equally."""
    holders: dict[tuple[str, str], dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in running:
        holders.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    return tuple(
        Allocation(gpu_uuid, holder, mig_uuid, sharing="processes" if len(own) > 1 else None)
        for (gpu_uuid, mig_uuid), own in holders.items()
        for holder in own
    )
