"""One node as the meter sees it: what the GPUs show, joined with whoever knows the holders.

The devices come from `agent.gpus`; the holders from a `PodsFile`, or, without one, from the processes
themselves (a pod among them is called what the kubelet's log folders call it). Each part is guarded:
what fails is named in the snapshot's `sources` and the rest goes on. Per-holder busy time is given
where a device is shared; a sole holder has all of the device's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from agent.gpus import Gpus, Scan
from agent.model import Allocation, DeviceReading, HolderReading, ProcessReading, Reading, Snapshot, Unavailable
from agent.podlogs import PodLogs, PodName
from agent.pods import Pods, PodsFile
from agent.processes import ProcessTable
from agent.wire import Holder, PodFacts

_SOLE = Unavailable("sole holder")
_STRANGER = Unavailable("unknown process on the gpu")
_Place = tuple[str, str]
"""(gpu uuid, MIG uuid or "")."""
_Key = tuple[str, str, Holder]
_Owned = tuple[str, ProcessReading, Holder]
"""A process on the GPU of that uuid, and whose it is."""


class NodeSource:
    """`agent.loop.Source` over the real machine. pods=None: holders are what runs (standalone).
    node: its name, for the facts of pods that only their log folders name."""

    def __init__(
        self,
        gpus: Gpus,
        processes: ProcessTable,
        pods: PodsFile | None = None,
        logs: PodLogs | None = None,
        node: str = "",
    ) -> None:
        self._gpus = gpus
        self._processes = processes
        self._pods = pods
        self._logs = logs
        self._node = node
        self._busy: Counter[_Key] = Counter()
        self._shared: set[_Place] = set()
        self._unknown: set[str] = set()

    def snapshot(self, at_ms: int) -> Snapshot:
        """Raises agent.errors.DriverReplaced when only a new process can go on."""
        scan = self._gpus.read(at_ms)
        pods = self._pods.read(at_ms, [d.gpu for d in scan.devices]) if self._pods is not None else Pods((), ())
        names = self._logs.names(at_ms) if self._logs is not None else {}
        owned = self._owned(scan.devices, pods, names)
        allocations: tuple[Allocation, ...] | Unavailable
        if self._pods is not None:
            allocations = pods.allocations
        elif scan.failure:
            allocations = Unavailable(scan.failure)
        else:
            allocations = _by_process(owned)
        shared = _shared_places(allocations)
        devices = tuple(self._with_holders(d, owned, shared | self._shared) for d in scan.devices)
        self._shared = shared
        facts = pods.facts if self._pods is not None else self._named_facts(owned, at_ms)
        return Snapshot(at_ms, devices, allocations, facts, self._sources(scan, pods))

    def release(self, why: str) -> None:
        """See agent.gpus.Gpus.release."""
        self._gpus.release(why)

    def reacquire(self, why: str) -> None:
        """See agent.gpus.Gpus.reacquire."""
        self._gpus.reacquire(why)

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()

    def _sources(self, scan: Scan, pods: Pods) -> tuple[tuple[str, str], ...]:
        if self._pods is None:
            return (("nvml", scan.failure),)
        return (("nvml", scan.failure), ("pods", pods.fault))

    def _named_facts(self, owned: Sequence[_Owned], at_ms: int) -> tuple[PodFacts, ...]:
        """The little that is known of a pod without an API server: who it is, not for whom it works."""
        pods = {holder.uid: holder for _, _, holder in owned if holder.kind == "pod" and holder.name}
        return tuple(
            PodFacts(seq=0, uid=uid, namespace=h.namespace, name=h.name, node=self._node, observed_ms=at_ms)
            for uid, h in sorted(pods.items())
        )

    def _owned(self, devices: Sequence[DeviceReading], pods: Pods, names: Mapping[str, PodName]) -> list[_Owned]:
        """Each process with its holder. A pod the file knows is called what the file calls it.

        A number outside our process table (the agent does not share the host's) holds the GPU as just
        that number; and since it may be anybody, nobody's busy time is known on that GPU."""
        named = {(a.holder.uid, a.gpu_uuid, a.mig_uuid): a.holder for a in pods.allocations}
        known = {uid for uid, _, _ in named} | names.keys()
        self._unknown = set()
        owned = []
        for gpu_uuid, process in ((d.gpu.uuid, p) for d in devices for p in d.processes):
            holder = self._processes.holder(process.pid, known)
            if holder is None:
                self._unknown.add(gpu_uuid)
                holder = Holder(kind="process", uid=f"{process.pid}:", name=f"pid {process.pid}")
            if holder.kind == "pod" and holder.uid in names:
                namespace, name = names[holder.uid]
                holder = msgspec.structs.replace(holder, namespace=namespace, name=name)
            holder = named.get((holder.uid, gpu_uuid, process.mig_uuid), holder)
            owned.append((gpu_uuid, process, holder))
            if not isinstance(process.busy_us, Unavailable):
                self._busy[gpu_uuid, process.mig_uuid, holder] += process.busy_us
        return owned

    def _with_holders(self, device: DeviceReading, owned: Sequence[_Owned], shared: set[_Place]) -> DeviceReading:
        uuid = device.gpu.uuid
        mine: dict[_Key, list[ProcessReading]] = {}
        for gpu_uuid, process, holder in owned:
            if gpu_uuid == uuid:
                mine.setdefault((uuid, process.mig_uuid, holder), []).append(process)
        for key in [k for k in self._busy if k[0] == uuid and k not in mine]:
            del self._busy[key]
        readings = []
        for key, processes in mine.items():
            _, mig_uuid, holder = key
            busy: Reading = _STRANGER if uuid in self._unknown else _SOLE
            if (uuid, mig_uuid) in shared and uuid not in self._unknown:
                first = processes[0].busy_us
                busy = first if isinstance(first, Unavailable) else self._busy[key]
            readings.append(HolderReading(holder, mig_uuid, busy, _total([p.memory_mib for p in processes])))
        if not readings:
            return device
        by_process = any(not isinstance(r.busy_us, Unavailable) for r in readings)
        return replace(device, holders=tuple(readings), method="process" if by_process else device.method)


def _by_process(owned: Sequence[_Owned]) -> tuple[Allocation, ...]:
    """Every holder of a running process holds its GPU; several share it equally."""
    holders: dict[_Place, dict[Holder, None]] = {}
    for gpu_uuid, process, holder in owned:
        if process.running:
            holders.setdefault((gpu_uuid, process.mig_uuid), {})[holder] = None
    return tuple(
        Allocation(gpu_uuid, holder, mig_uuid, sharing="processes" if len(present) > 1 else None)
        for (gpu_uuid, mig_uuid), present in holders.items()
        for holder in present
    )


def _shared_places(allocations: tuple[Allocation, ...] | Unavailable) -> set[_Place]:
    if isinstance(allocations, Unavailable):
        return set()
    counts = Counter((a.gpu_uuid, a.mig_uuid) for a in allocations)
    return {(a.gpu_uuid, a.mig_uuid) for a in allocations if a.sharing or counts[a.gpu_uuid, a.mig_uuid] > 1}


def _total(readings: Sequence[Reading]) -> Reading:
    total = 0
    for reading in readings:
        if isinstance(reading, Unavailable):
            return reading
        total += reading
    return total
