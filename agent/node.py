"""One node as the meter sees it: what the GPUs show, joined with whoever knows the holders.

The devices come from `agent.driver.gpus`; the holders from a `PodsFile`, or, without one, from the processes
themselves (a pod among them is called what the kubelet's log folders call it). Each part is guarded:
what fails is named in the snapshot's `sources` and the rest goes on. Per-holder busy time is given
where a device is shared; a sole holder has all of the device's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from agent.clock import Clock
from agent.driver.gpus import Gpus, Scan
from agent.kube.podlogs import PodLogs, PodName
from agent.ladder import HolderCounters, Owned, nameless
from agent.model import Allocation, DeviceReading, Gpu, Snapshot, Unavailable
from agent.ownership import KAI, Seen, settle
from agent.pods import Pods
from agent.processes import ProcessTable
from agent.queues import RESERVATION_NAMESPACES
from agent.wire import Holder, PodFacts

_Place = tuple[str, str]
"""(gpu uuid, MIG uuid or "")."""

CHECK_EVERY = 10
"""A process that holds a GPU from reading to reading keeps its number: so rarely is it checked all the same."""


class Claims(Protocol):
    """Whoever says who was given which devices."""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:
        """What holds at `at_ms`."""
        ...


class NodeSource:
    """`agent.loop.Source` over the real machine. pods=None: holders are what runs (standalone).
    processes=None: the host's cannot be seen, so their numbers would be taken for somebody else's.
    node: its name, for the facts of pods that only their log folders name. clock: to time the driver with.
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
        """Who ran on each GPU, as far as that was listed last."""
        self._running: frozenset[int] = frozenset()
        self._readings = 0

    def snapshot(self, at_ms: int) -> Snapshot:
        """Raises agent.errors.DriverReplaced when only a new process can go on."""
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
        """Who runs where; where processes could not be listed, who did when they were listed last."""
        before, self._seen = self._seen, {}
        for device in devices:
            uuid, unlisted = device.gpu.uuid, dict(device.unlisted)
            now = [
                (uuid, one.process.mig_uuid, one.holder or nameless(one.process.pid))
                for one in owned.get(uuid, ())
                if one.process.running
            ]
            self._seen[uuid] = now + [one for one in before.get(uuid, ()) if one[1] in unlisted]
        return [one for ones in self._seen.values() for one in ones]

    def _unknown_holders(
        self, devices: Sequence[DeviceReading], pods: Pods, allocations: Sequence[Allocation]
    ) -> dict[str, str]:
        """Why it is not known who holds a GPU, or how much of it: the claims say so, its processes would tell and
        cannot be listed, or a part is declared of a size that was not read."""
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
        """See agent.driver.gpus.Gpus.release."""
        self._gpus.release(why)

    def reacquire(self, why: str) -> None:
        """See agent.driver.gpus.Gpus.reacquire."""
        self._gpus.reacquire(why)

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()

    def _sources(self, scan: Scan, pods: Pods) -> tuple[tuple[str, str], ...]:
        found = [("nvml", scan.failure)]
        if scan.events_failure:
            found.append(("events", scan.events_failure))
        if self._pods is None:
            return tuple(found)
        return (*found, *(pods.sources or (("pods", pods.fault),)))

    def _named_facts(self, seen: Sequence[Seen], at_ms: int) -> tuple[PodFacts, ...]:
        """The little that is known of a pod without an API server: who it is, not for whom it works."""
        pods = {holder.uid: holder for _, _, holder in seen if holder.kind == "pod" and holder.name}
        return tuple(
            PodFacts(seq=0, uid=uid, namespace=h.namespace, name=h.name, node=self._node, observed_ms=at_ms)
            for uid, h in sorted(pods.items())
        )

    def _owned(
        self, devices: Sequence[DeviceReading], pods: Pods, names: Mapping[str, PodName]
    ) -> dict[str, list[Owned]]:
        """The processes of each GPU with their holders. A pod the file knows is called what the file calls it."""
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
    """Every holder of a running process holds its GPU; several share it equally."""
    holders: dict[_Place, dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in seen:
        holders.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    return tuple(
        Allocation(gpu_uuid, holder, mig_uuid, sharing="processes" if len(present) > 1 else None)
        for (gpu_uuid, mig_uuid), present in holders.items()
        for holder in present
    )
