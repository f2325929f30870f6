"""Joins the kubelet's device list with the pods: which pod was given which device.

Invariants: a device id counts once per pod, however many of its containers name it; a pod that ended holds
nothing; the pods on a shared GPU hold it, not the pod that only reserves it; a device that names nothing on
this node is reported, never guessed; which devices a pod has, the kubelet alone says. How much of a shared one is
read from the pod only for the sharing systems that the node's settings name, and then from what its owner cannot change
any more: the limits of its containers (HAMi), what it declared when it was bound (KAI, `agent.holders.bound_pods`).
What processes show is another opinion and no business of this module: both are kept in the snapshot, so that
their disagreement can be counted. Pure: no clock, no I/O.
Sources: kai-scheduler docs/gpu-sharing; Project-HAMi protocol of task dispatch.

Fraction schedulers (KAI, Run:ai) let a reservation pod hold the GPU and put the workloads beside it, without a
device of their own; what runs there says who they are. HAMi gives every pod a virtual device and writes the part in
the limits of its containers. The kubelet's word comes second: it stays where nothing runs.

The owner of a pod can write its annotations, so a part that a pod declares counts only beside a reservation pod, and
as it was when the pod was bound (`agent.holders.bound_pods`). A pod that the kubelet gave a device holds what it was
given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from agent.core.readings import HAMI, KAI, Allocation, Gpu
from agent.holders.api_objects import PodView
from agent.holders.device_ids import NVIDIA_DRA, DeviceNames, Place, like_a_gpu
from agent.holders.kubelet_pod_resources import ContainerResources, Devices, PodResources
from agent.holders.resource_claims import Watched, is_watched
from agent.wire import Holder, SharingMode
from gputally.base.pod_queue_labels import RESERVATION_NAMESPACES

_PPM = 1_000_000
_PERCENT = 100
_MAX_EXPONENT = 15  # of a figure that means something here; others overflow further on
# Sources: Project-HAMi, resource names; KAI Scheduler, pod annotations.
_CORES, _MEMORY, _MEMORY_PERCENT = "nvidia.com/gpucores", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"
_FRACTION, _FRACTION_MEMORY = "gpu-fraction", "gpu-memory"

Seen = tuple[str, str, Holder]
"""(gpu uuid, MIG uuid or "", holder) of a running process."""


def settle(
    allocations: Iterable[Allocation],
    seen: Iterable[Seen],
    requests: Mapping[str, Mapping[str, str]],
    gpus: Mapping[str, Gpu],
    systems: frozenset[str] = frozenset({KAI}),
) -> tuple[Allocation, ...]:
    """The allocations with stand-ins replaced by the pods that run in their place.

    requests: of each pod by uid, its resource requests with the scheduler's annotations under their names.
    A reservation that is not used yet stays with its reservation pod, and all of them where `systems` lacks KAI."""
    ordered = list(allocations)
    if KAI not in systems:
        return tuple(ordered)
    tenants: dict[tuple[str, str], dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in seen:
        if holder.kind == "pod" and holder.namespace not in RESERVATION_NAMESPACES:
            tenants.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    settled: list[Allocation] = []
    taken: set[tuple[str, str]] = set()
    named = {(a.gpu_uuid, a.mig_uuid, a.holder.uid) for a in ordered}
    for allocation in ordered:
        place = allocation.gpu_uuid, allocation.mig_uuid
        present = tenants.get(place, {})
        if allocation.holder.namespace not in RESERVATION_NAMESPACES or not present:
            settled.append(allocation)
        elif place not in taken:
            taken.add(place)
            gpu = gpus.get(place[0])
            memory_mib = gpu.memory_mib if gpu is not None else None
            for holder in present:
                if (*place, holder.uid) not in named:
                    wanted = requests.get(holder.uid, {})
                    part = declared_ppm(wanted.get(_FRACTION, ""), wanted.get(_FRACTION_MEMORY, ""), memory_mib)
                    settled.append(Allocation(place[0], holder, place[1], "fraction", fraction_ppm=part))
    return tuple(settled)


def declared_ppm(fraction: str, memory: str, memory_mib: int | None) -> int | None:
    """The part of one GPU a KAI pod declared, in millionths; None where it declared none that can be read."""
    part, size = number(fraction), number(memory)
    if part is not None and 0 < part <= 1:
        return int(part * _PPM) or None
    if size is not None and size > 0 and memory_mib:
        return int(min(size / memory_mib, Decimal(1)) * _PPM) or None
    return None


def limited_ppm(limits: Mapping[str, str], memory_mib: int | None) -> int | None:
    """The part of one GPU that limits leave to a container of HAMi's, in millionths: of cores and memory the greater,
    since no other pod can have it. Memory without a limit is all of it, as HAMi has it by default. None: the
    limit is a size, and how much memory the GPU has is not known."""
    cores, size, percent = (number(limits.get(name, "")) for name in (_CORES, _MEMORY, _MEMORY_PERCENT))
    memory = Decimal(1)
    if size is not None and size > 0:
        if not memory_mib:
            return None
        memory = size / memory_mib
    elif percent is not None and percent > 0:
        memory = percent / _PERCENT
    whole = max(memory, cores / _PERCENT if cores is not None else Decimal(0))
    return max(1, int(min(whole, Decimal(1)) * _PPM))


def number(text: str) -> Decimal | None:
    """A figure from an annotation; None where it is none, or beyond all measure."""
    try:
        value = Decimal(text[:32])
    except InvalidOperation:
        return None
    return value if value.is_finite() and -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT else None


Key = tuple[str, str]
"""(namespace, name) of a pod."""


@dataclass(frozen=True, slots=True)
class NodeAllocations:
    """unresolved: ids that were meant for a GPU and name none of this node, each once. unnamed: sharing systems at
    work here that the settings do not name."""

    allocations: tuple[Allocation, ...]
    unresolved: tuple[str, ...] = ()
    unnamed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Node:
    """What the join needs beside the pods. offered: the devices the kubelet can give. replica_mode: how
    replicas are shared on this node. uids: of pods that only their log folders name. claimable: the uuids of
    devices that claims name, by pool and device. watched: devices that claims only look at. systems: the sharing
    systems of this node."""

    gpus: Sequence[Gpu]
    offered: Sequence[Devices] = ()
    replica_mode: SharingMode = "time-slicing"
    uids: Mapping[Key, str] | None = None
    claimable: Mapping[tuple[str, str], str] | None = None
    watched: Watched = frozenset()
    systems: frozenset[str] = frozenset({KAI})


def find_holders(given: Iterable[PodResources], views: Mapping[Key, PodView], node: Node) -> NodeAllocations:
    """views: the pods the API server described; empty where it is not asked."""
    names = DeviceNames(node.gpus, node.claimable)
    parts = _parts(names, node.offered)
    found: list[Allocation] = []
    reserved: dict[str, list[Place]] = {}
    reserving: list[Allocation] = []
    present: set[str] = set()
    unresolved: set[str] = set()
    for pod in given:
        key = pod.namespace, pod.name
        view = views.get(key)
        if view is not None and view.over:
            continue
        claims = _claims(pod, names, unresolved, node.watched)
        uid = view.facts.uid if view else (node.uids or {}).get(key, f"{pod.namespace}/{pod.name}")
        if pod.namespace in RESERVATION_NAMESPACES and claims:
            present.add(KAI)
        if any(place.virtual for _, place, _ in claims):
            present.add(HAMI)
        if view is not None and view.reserves and view.groups and KAI in node.systems:
            reserved.setdefault(view.groups[0], []).extend(place for _, place, _ in claims)
            reserving += _pod_allocations(pod, uid, claims, parts, node.replica_mode)
        else:
            held = _pod_allocations(pod, uid, claims, parts, node.replica_mode)
            found += _limited(held, view, node.gpus) if view is not None and HAMI in node.systems else held
    sharing = _sharing(views.values(), reserved, node.gpus)
    found += sharing
    used = {(a.gpu_uuid, a.mig_uuid) for a in sharing}
    # A reservation whose pods are not known yet still keeps everybody else out.
    found += [a for a in reserving if (a.gpu_uuid, a.mig_uuid) not in used]
    return NodeAllocations(_marked(found), tuple(sorted(unresolved)), frozenset(present) - node.systems)


def still_cut(before: Sequence[Devices], offered: Sequence[Devices], gpus: Sequence[Gpu]) -> tuple[Devices, ...]:
    """`offered`, with what was offered before of devices that are not in it.

    The kubelet offers healthy devices only, none while their plugin restarts: those that were given stay given."""
    names = DeviceNames(gpus)
    present = {_whole(place) for devices in offered for name in devices.ids if (place := names.place(name))}
    kept = [
        Devices(devices.resource, ids)
        for devices in before
        if (ids := tuple(n for n in devices.ids if (p := names.place(n)) and _whole(p) not in present))
    ]
    return (*offered, *kept)


def _whole(place: Place) -> tuple[str, str]:
    return place.gpu_uuid, place.mig_uuid


_Claim = tuple[str, Place, bool]
"""(container, place, whether through a ResourceClaim)."""


def _claims(pod: PodResources, names: DeviceNames, unresolved: set[str], watched: Watched) -> list[_Claim]:
    """Every device of a pod once. An init container leaves its devices to the others, which name them again."""
    claims: list[_Claim] = []
    seen: set[str] = set()
    for container in pod.containers:
        for name, place, by_claim in _named(container, names, watched):
            if name in seen:
                continue
            seen.add(name)
            if place is not None:
                claims.append((container.name, place, by_claim))
            elif like_a_gpu(name) or by_claim:
                unresolved.add(name[:128])
    return claims


def _named(
    container: ContainerResources, names: DeviceNames, watched: Watched
) -> Iterable[tuple[str, Place | None, bool]]:
    for devices in container.devices:
        for name in devices.ids:
            yield name, names.place(name), False
    for claimed in container.claimed:
        if claimed.driver == NVIDIA_DRA and not is_watched(claimed, watched):
            yield claimed.device, names.claimed(claimed.pool, claimed.device), True


def _parts(names: DeviceNames, offered: Sequence[Devices]) -> Counter[tuple[str, str]]:
    """How many equal parts each device is cut into, from what the kubelet offers."""
    places = {place for devices in offered for name in devices.ids if (place := names.place(name)) and place.replica}
    return Counter((place.gpu_uuid, place.mig_uuid) for place in places)


def _pod_allocations(
    pod: PodResources, uid: str, claims: Sequence[_Claim], parts: Mapping[tuple[str, str], int], mode: SharingMode
) -> list[Allocation]:
    """One allocation per container and device; replicas of one device are added up."""
    found: dict[tuple[str, str, str], Allocation] = {}
    for container, place, by_claim in claims:
        key = container, place.gpu_uuid, place.mig_uuid
        if key in found:
            if place.replica:
                found[key] = replace(found[key], replicas=found[key].replicas + 1)
            continue
        holder = Holder(kind="pod", uid=uid, namespace=pod.namespace, name=pod.name, container=container)
        sharing: SharingMode | None = mode if place.replica else "dra" if by_claim else None
        count = parts.get((place.gpu_uuid, place.mig_uuid), 0) if place.replica else 0
        found[key] = Allocation(
            place.gpu_uuid, holder, place.mig_uuid, sharing=sharing, sharing_replicas=count, virtual=place.virtual
        )
    return list(found.values())


def _limited(held: Sequence[Allocation], view: PodView, gpus: Sequence[Gpu]) -> list[Allocation]:
    """HAMi's virtual devices, each with the part that the limits of its container leave it. Others stay as they are."""
    memory: dict[tuple[str, str], int | None] = {(gpu.uuid, ""): gpu.memory_mib for gpu in gpus}
    memory |= {(gpu.uuid, instance.uuid): instance.memory_mib for gpu in gpus for instance in gpu.mig}

    def limited(a: Allocation) -> Allocation:
        part = limited_ppm(view.limits.get(a.holder.container, {}), memory[a.gpu_uuid, a.mig_uuid])
        part = None if part is None else min(part * a.replicas, _PPM)
        return replace(a, sharing="fraction", sharing_replicas=0, replicas=1, fraction_ppm=part)

    return [limited(a) if a.virtual else a for a in held]


def _sharing(
    views: Iterable[PodView], reserved: Mapping[str, Sequence[Place]], gpus: Sequence[Gpu]
) -> list[Allocation]:
    """The pods that share what reservation pods keep for them, each with the part its annotation declares."""
    memory = {gpu.uuid: gpu.memory_mib for gpu in gpus}
    found = []
    for view in views:
        if view.over or view.reserves or not view.by_kai or (not view.facts.scheduled_ms and not view.running):
            continue
        for group in view.groups:
            for place in reserved.get(group, ()):
                ppm = declared_ppm(view.fraction, view.memory_mib, memory[place.gpu_uuid])
                name = view.containers[0] if view.containers else ""
                holder = _holder(view, name)
                found.append(Allocation(place.gpu_uuid, holder, place.mig_uuid, "fraction", fraction_ppm=ppm))
    return found


def _holder(view: PodView, container: str) -> Holder:
    facts = view.facts
    return Holder(kind="pod", uid=facts.uid, namespace=facts.namespace, name=facts.name, container=container)


def _marked(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """A claimed device is shared only where several pods name it."""
    pods: dict[tuple[str, str], set[str]] = {}
    for allocation in allocations:
        pods.setdefault((allocation.gpu_uuid, allocation.mig_uuid), set()).add(allocation.holder.uid)
    return tuple(
        replace(a, sharing=None) if a.sharing == "dra" and len(pods[a.gpu_uuid, a.mig_uuid]) == 1 else a
        for a in allocations
    )
