"""Who holds which device according to Kubernetes: the kubelet's list joined with what is known of its pods.

Invariants: a device id counts once per pod, however many of its containers name it; a pod that ended holds
nothing; the pods on a shared GPU hold it, not the pod that only reserves it; a device that names nothing on
this node is reported, never guessed.
What processes show is another opinion and no business of this module: both are kept in the snapshot, so that
their disagreement can be counted. Pure: no clock, no I/O.
Sources: kai-scheduler docs/gpu-sharing; Project-HAMi protocol of task dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from agent.kube.claims import Watched, is_watched
from agent.kube.deviceids import NVIDIA_DRA, DeviceNames, Place, like_a_gpu
from agent.kube.podresources import ContainerResources, Devices, PodResources
from agent.kube.podview import PodView
from agent.model import Allocation, Gpu
from agent.wire import Holder, SharingMode

_PPM = 1_000_000
_PERCENT = 100
_MAX_EXPONENT = 15  # of a figure that means something here; others overflow further on
Key = tuple[str, str]
"""(namespace, name) of a pod."""


@dataclass(frozen=True, slots=True)
class Holding:
    """unresolved: ids that were meant for a GPU and name none of this node, each once."""

    allocations: tuple[Allocation, ...]
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """What the join needs beside the pods. offered: the devices the kubelet can give. replica_mode: how
    replicas are shared on this node. uids: of pods that only their log folders name. claimable: the uuids of
    devices that claims name, by pool and device. watched: devices that claims only look at."""

    gpus: Sequence[Gpu]
    offered: Sequence[Devices] = ()
    replica_mode: SharingMode = "time-slicing"
    uids: Mapping[Key, str] | None = None
    claimable: Mapping[tuple[str, str], str] | None = None
    watched: Watched = frozenset()


def find_holders(given: Iterable[PodResources], views: Mapping[Key, PodView], node: Node) -> Holding:
    """views: the pods the API server described; empty where it is not asked."""
    names = DeviceNames(node.gpus, node.claimable)
    parts = _parts(names, node.offered)
    found: list[Allocation] = []
    reserved: dict[str, list[Place]] = {}
    reserving: list[Allocation] = []
    unresolved: set[str] = set()
    for pod in given:
        key = pod.namespace, pod.name
        view = views.get(key)
        if view is not None and view.over:
            continue
        claims = _claims(pod, names, unresolved, node.watched)
        uid = view.facts.uid if view else (node.uids or {}).get(key, f"{pod.namespace}/{pod.name}")
        if view is not None and view.reserves and view.groups:
            reserved.setdefault(view.groups[0], []).extend(place for _, place, _ in claims)
            reserving += _held(pod, uid, claims, parts, node.replica_mode)
        elif view is not None and view.hami and (own := _by_hami(view, names, node.gpus)):
            found += own
        else:
            found += _held(pod, uid, claims, parts, node.replica_mode)
    sharing = _sharing(views.values(), reserved, node.gpus)
    found += sharing
    used = {(a.gpu_uuid, a.mig_uuid) for a in sharing}
    # A reservation whose pods are not known yet still keeps everybody else out.
    found += [a for a in reserving if (a.gpu_uuid, a.mig_uuid) not in used]
    return Holding(_marked(found), tuple(sorted(unresolved)))


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


def _held(
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
        found[key] = Allocation(place.gpu_uuid, holder, place.mig_uuid, sharing=sharing, sharing_replicas=count)
    return list(found.values())


def _by_hami(view: PodView, names: DeviceNames, gpus: Sequence[Gpu]) -> list[Allocation]:
    """HAMi decides beside the kubelet: `uuid,type,MiB,percent:` per device, `;` behind each container."""
    memory = {gpu.uuid: gpu.memory_mib for gpu in gpus}
    found = []
    for number, container in enumerate(view.hami.split(";")):
        for entry in container.split(":"):
            fields = [field.strip() for field in entry.split(",")]
            place = names.place(fields[0]) if len(fields) >= 4 else None
            if place is None:
                continue
            cores, size = _number(fields[3]), _number(fields[2])
            share = Decimal(0)
            if cores is not None and 0 < cores <= _PERCENT:
                share = cores / _PERCENT
            elif size is not None and memory[place.gpu_uuid]:
                share = min(size / memory[place.gpu_uuid], Decimal(1))
            name = view.containers[number] if number < len(view.containers) else ""
            ppm = int(share * _PPM) or None
            found.append(Allocation(place.gpu_uuid, _holder(view, name), place.mig_uuid, "fraction", fraction_ppm=ppm))
    return found


def _sharing(
    views: Iterable[PodView], reserved: Mapping[str, Sequence[Place]], gpus: Sequence[Gpu]
) -> list[Allocation]:
    """The pods that share what reservation pods keep for them, each with the part its annotation declares."""
    memory = {gpu.uuid: gpu.memory_mib for gpu in gpus}
    found = []
    for view in views:
        if view.over or view.reserves or (not view.facts.scheduled_ms and not view.running):
            continue
        for group in view.groups:
            for place in reserved.get(group, ()):
                ppm = _declared_ppm(view, memory[place.gpu_uuid])
                name = view.containers[0] if view.containers else ""
                holder = _holder(view, name)
                found.append(Allocation(place.gpu_uuid, holder, place.mig_uuid, "fraction", fraction_ppm=ppm))
    return found


def _declared_ppm(view: PodView, memory_mib: int) -> int | None:
    fraction, size = _number(view.fraction), _number(view.memory_mib)
    if fraction is not None and 0 < fraction <= 1:
        return int(fraction * _PPM) or None
    if size is not None and size > 0 and memory_mib:
        return int(min(size / memory_mib, Decimal(1)) * _PPM) or None
    return None


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text[:32])
    except InvalidOperation:
        return None
    return value if value.is_finite() and -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT else None


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
