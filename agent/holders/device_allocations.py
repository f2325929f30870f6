"""Joins the kubelet's device list with the pods and resource claims, to find which pod holds which device.

A device id counts once per pod, however many of its containers name it. A pod that ended holds nothing. The pods on a
shared GPU hold it, not the pod that only reserves it. A device id that matches nothing on this node is reported, never
guessed. Only the kubelet decides which devices a pod has.

The part of a shared device is read from the pod only for the sharing systems in the node's settings. It comes from data
that its owner cannot change any more: the limits of its containers (HAMi), or the part that it declared when it was
bound (KAI, `BoundPods`). This module does not use processes. The snapshot keeps both sources, so that their
disagreements can be counted. Sources: kai-scheduler docs/gpu-sharing; Project-HAMi protocol of task dispatch.

With fraction schedulers (KAI, Run:ai) a reservation pod holds the GPU, and the workloads beside it have no device of
their own. The running processes identify them. HAMi gives every pod a virtual device, and the limits of its containers
state the part. If no process runs, the kubelet's allocation is used.

| Form of a device's name | Written by |
|---|---|
| `GPU-<uuid>`, `MIG-<uuid>` | NVIDIA's device plugin |
| `<either>::<k>` | the same, time-slicing or MPS: replica k |
| `MIG-GPU-<uuid>/<gi>/<ci>` | drivers before 470 |
| `nvidia<N>`, `nvidia<N>/gi<M>`, `<either>/vgpu<K>` | GKE's device plugin; N is the device's minor number |
| `<either>-<k>` | HAMi's device plugin: virtual device k |
| `gpu-<N>`, `gpu-<N>-mig-<profile>-<id>-<start>` | NVIDIA's DRA driver; N is the minor number |

A name is looked up among the existing devices. An unknown name gives None. Sources: NVIDIA/k8s-device-plugin
internal/rm, GoogleCloudPlatform/container-engine-accelerators pkg/gpu/nvidia, Project-HAMi/HAMi pkg/device-plugin,
kubernetes-sigs/dra-driver-nvidia-gpu.

DRA (dynamic resource allocation): the kubelet lists the devices of a claim with admin access like any other. A
monitoring pod would therefore count as a second holder of every GPU that it monitors. Only the ResourceClaim states
admin access. A separate thread reads each named claim, once and then periodically, so readers never wait. A claim that
cannot be read counts as an ordinary claim. A claim names a device of a pool. Its uuid is an attribute in the
ResourceSlice that its driver publishes, which also identifies a statically partitioned MIG device. Source:
kubernetes.io API reference, ResourceClaim v1, ResourceSlice v1.

The owner of a pod can write its annotations, so a declared part counts only beside a reservation pod, and as it was
when the pod was bound (`BoundPods`). A pod to which the kubelet allocated a device holds that device."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from agent.core.readings import HAMI, KAI, Allocation, Gpu
from agent.holders import kubernetes_api_objects
from agent.holders.kubelet_pod_resources import ClaimedDevice, ContainerResources, Devices, PodResources
from agent.holders.kubernetes_api_objects import PodView
from agent.holders.lean_list_watch import FORBIDDEN, NOT_FOUND, Api, ApiUnavailable
from agent.wire import Holder, SharingMode
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.pod_queue_labels import RESERVATION_NAMESPACES
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

NVIDIA_DRA = "gpu.nvidia.com"
"""Name of NVIDIA's DRA driver for GPUs."""
_REPLICA = re.compile(r"(.+)::(\d{1,6})")
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9A-Za-z-]+)/(\d{1,4})/(\d{1,4})")
_GKE = re.compile(r"nvidia(\d{1,4})(?:/gi(\d{1,4}))?(?:/vgpu(\d{1,6}))?")
_HAMI = re.compile(r"(.+)-(\d{1,6})")
_DRA = re.compile(r"gpu-(\d{1,4})(?:-mig-([0-9a-z.+]+)-(\d{1,4})-(\d{1,4}))?")
_LIKE_A_GPU = re.compile(r"(?:MIG-)?GPU-|MIG-|nvidia\d")


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, or one of its MIG instances.

    replica: which of its equal parts; "" for the whole.
    virtual: the part is one of HAMi's virtual devices, which are not equal."""

    gpu_uuid: str
    mig_uuid: str = ""
    replica: str = ""
    virtual: bool = False


def _by_minor(gpus: Sequence[Gpu]) -> dict[int, Gpu]:
    """Return the GPUs by minor number. If the number of one GPU was not read, it can be derived only if a single GPU is
    left, because its index may be another GPU's minor number."""
    known = {gpu.minor: gpu for gpu in gpus if gpu.minor is not None}
    unread = [gpu for gpu in gpus if gpu.minor is None]
    left = set(range(len(gpus))) - known.keys()
    if len(unread) == 1 and len(left) == 1:
        known[left.pop()] = unread[0]
    return known


class DeviceNames:
    """Finds devices by name among `gpus`. claimable: the uuids of devices of NVIDIA's DRA driver, by pool and name."""

    def __init__(self, gpus: Sequence[Gpu], claimable: Mapping[tuple[str, str], str] | None = None) -> None:
        self._claimable = claimable or {}
        self._places: dict[str, Place] = {}
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._minors = _by_minor(gpus)
        for gpu in gpus:
            self._places[gpu.uuid] = Place(gpu.uuid)
            for instance in gpu.mig:
                self._places[instance.uuid] = Place(gpu.uuid, instance.uuid)

    def place(self, name: str) -> Place | None:
        """Return the device that a device plugin's id names."""
        found = self._places.get(name)
        if found is not None:
            return found
        if replica := _REPLICA.fullmatch(name):
            whole = self.place(replica.group(1))
            return None if whole is None else Place(whole.gpu_uuid, whole.mig_uuid, replica.group(2))
        if gke := _GKE.fullmatch(name):
            return self._numbered(int(gke.group(1)), gke.group(2), gke.group(3) or "")
        if old := _OLD_MIG.fullmatch(name):
            return self._instance(self._gpus.get(old.group(1)), int(old.group(2)), int(old.group(3)))
        if hami := _HAMI.fullmatch(name):
            whole = self._places.get(hami.group(1))
            return None if whole is None else Place(whole.gpu_uuid, whole.mig_uuid, hami.group(2), virtual=True)
        return None

    def claimed(self, pool: str, device: str) -> Place | None:
        """Return the device of a name of NVIDIA's DRA driver: by its published uuid, otherwise by its name. The name of
        a MIG device made on demand states its profile, not the instance; it is found only if the GPU has one instance
        of that profile."""
        published = self._places.get(self._claimable.get((pool, device), ""))
        if published is not None:
            return published
        match = _DRA.fullmatch(device)
        gpu = self._minors.get(int(match.group(1))) if match else None
        if match is None or gpu is None:
            return None
        if match.group(2) is None:
            return Place(gpu.uuid)
        profile = _plain(match.group(2))
        made = [instance for instance in gpu.mig if _plain(instance.profile) == profile]
        return Place(gpu.uuid, made[0].uuid) if len(made) == 1 else None

    def _numbered(self, minor: int, gi: str | None, replica: str) -> Place | None:
        gpu = self._minors.get(minor)
        if gpu is None:
            return None
        if gi is None:
            return Place(gpu.uuid, replica=replica)
        found = self._instance(gpu, int(gi), None)
        return None if found is None else Place(found.gpu_uuid, found.mig_uuid, replica)

    def _instance(self, gpu: Gpu | None, gi: int, ci: int | None) -> Place | None:
        if gpu is None:
            return None
        return next((Place(gpu.uuid, m.uuid) for m in gpu.mig if m.gi == gi and ci in (None, m.ci)), None)


def like_a_gpu(name: str) -> bool:
    """Return whether an id that names no device here was meant for a GPU, not for a network card, for example."""
    return _LIKE_A_GPU.match(name) is not None


def _plain(profile: str) -> str:
    """Convert the profile in a DRA device name, `1g10gb`, to `1g.10gb`."""
    return profile.replace(".", "").replace("+", "")


log = logging.getLogger("agent.holders.resource_claims")

CLAIMS_PATH = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}"
HOLDS_MS = 10 * MS_PER_MINUTE
"""How long an answer is used. An allocation never changes, but a claim may be recreated under its name."""
RETRY_MS = 10 * MS_PER_SECOND
Claim = tuple[str, str]
"""(namespace, name)."""
Watched = frozenset[tuple[str, str, str, str]]
"""Devices by namespace and name of the claim, pool and device."""


class Claims:
    """The claims that pods of this node name. failure: why the latest request had no answer ("" = it had)."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self.failure = ""
        self._api = api
        self._clock = clock
        self._named: frozenset[Claim] = frozenset()
        self._known: dict[Claim, tuple[Watched, int]] = {}
        self._watched: Watched = frozenset()
        self._wake = threading.Event()

    def watched(self, pods: Collection[PodResources]) -> Watched:
        """Return the devices of these pods that they only monitor, as far as known. Never waits."""
        named = frozenset(
            (one.claim_namespace, one.claim) for pod in pods for box in pod.containers for one in box.claimed
        )
        if named != self._named:
            self._named = named
            self._wake.set()
        return self._watched

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Read claims until `stop` is set; `close` wakes it."""
        while not stop.is_set():
            self._wake.clear()
            task.begin()
            self.step()
            task.succeed()
            self._clock.wait(RETRY_MS / MS_PER_SECOND, self._wake)

    def close(self) -> None:
        """Wake `run` to check its `stop`."""
        self._wake.set()

    def step(self) -> None:
        """Read claims that are unknown or were read long ago."""
        now_ms, named = self._clock.monotonic_ms(), self._named
        known = {claim: found for claim, found in self._known.items() if claim in named}
        failure = ""
        for claim in sorted(named):
            if claim in known and now_ms < known[claim][1]:
                continue
            try:
                known[claim] = self._ask(*claim), now_ms + HOLDS_MS
            except (ApiUnavailable, kubernetes_api_objects.Unreadable) as error:
                failure = str(error)
                if isinstance(error, ApiUnavailable) and error.status in (FORBIDDEN, NOT_FOUND):
                    known[claim] = frozenset(), now_ms + HOLDS_MS
        if failure and not self.failure:
            log.warning("a ResourceClaim cannot be read: its devices count as held", extra={"reason": failure})
        self.failure = failure
        self._known = known
        watched: Watched = frozenset(device for devices, _ in known.values() for device in devices)
        if watched != self._watched:
            self._watched = watched

    def _ask(self, namespace: str, name: str) -> Watched:
        found = kubernetes_api_objects.decode(
            self._api.page(CLAIMS_PATH.format(namespace, name), {}), kubernetes_api_objects.ResourceClaim
        )
        allocation = found.status.allocation if found.status else None
        results = allocation.devices.results if allocation and allocation.devices else None
        return frozenset((namespace, name, r.pool, r.device) for r in results or () if r.admin_access)


def is_watched(one: ClaimedDevice, watched: Watched) -> bool:
    """Return whether the claim only monitors this device."""
    return (one.claim_namespace, one.claim, one.pool, one.device) in watched


SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"
MAX_SLICES = 256
Device = tuple[str, str]
"""(pool, device)."""


class SliceStore:
    """The `lean_list_watch.Store` of one node's resource slices."""

    def __init__(self) -> None:
        self._slices: dict[str, dict[Device, str]] = {}
        self._uuids: Mapping[Device, str] = {}

    def uuids(self) -> Mapping[Device, str]:
        """Return the uuid of every device that has one. The mapping must not be modified; a change creates a
        new one."""
        return self._uuids

    def replace(self, items: Sequence[bytes]) -> None:
        """See BoundPods.Store."""
        self._slices = {}
        for item in items[:MAX_SLICES]:
            self._take("ADDED", item)
        self._join()

    def apply(self, change: str, item: bytes) -> None:
        """See BoundPods.Store."""
        self._take(change, item)
        self._join()

    def _take(self, change: str, item: bytes) -> None:
        try:
            found = kubernetes_api_objects.decode(item, kubernetes_api_objects.ResourceSlice)
        except kubernetes_api_objects.Unreadable as error:
            log.warning("a resource slice that cannot be read", extra={"reason": str(error)[:200]})
            return
        name, spec = found.metadata.name, found.spec
        if change == "DELETED" or spec.driver != NVIDIA_DRA:
            self._slices.pop(name, None)
        elif name in self._slices or len(self._slices) < MAX_SLICES:
            self._slices[name] = {
                (spec.pool.name, device.name): uuid.string
                for device in spec.devices or ()
                if (uuid := (device.attributes or {}).get("uuid")) is not None and uuid.string
            }

    def _join(self) -> None:
        self._uuids = {device: uuid for devices in self._slices.values() for device, uuid in devices.items()}


_PPM = 1_000_000
_PERCENT = 100
_MAX_EXPONENT = 15  # larger numbers have no meaning here and would overflow later
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
    """Return the allocations with reservation pods replaced by the pods that share their GPUs.

    requests: for each pod by uid, its resource requests with the scheduler's annotations under their names. An unused
    reservation stays with its reservation pod, and so do all of them if `systems` does not contain KAI."""
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
    """Return the part of one GPU that a KAI pod declared, in millionths; None if it declared none that can be read."""
    part, size = number(fraction), number(memory)
    if part is not None and 0 < part <= 1:
        return int(part * _PPM) or None
    if size is not None and size > 0 and memory_mib:
        return int(min(size / memory_mib, Decimal(1)) * _PPM) or None
    return None


def limited_ppm(limits: Mapping[str, str], memory_mib: int | None) -> int | None:
    """Return the part of one GPU that a HAMi container's limits allow, in millionths: the larger of cores and memory,
    because no other pod can have it. Without a memory limit it is all of the memory, which is HAMi's default. None: the
    limit is a size, and the GPU's memory is unknown."""
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
    """Return the number in an annotation; None if it is not a number or out of range."""
    try:
        value = Decimal(text[:32])
    except InvalidOperation:
        return None
    return value if value.is_finite() and -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT else None


Key = tuple[str, str]
"""(namespace, name) of a pod."""


@dataclass(frozen=True, slots=True)
class NodeAllocations:
    """The allocations of a node.

    unresolved: ids that were meant for a GPU and name none of this node, each once.
    unnamed: sharing systems in use here that the settings do not name."""

    allocations: tuple[Allocation, ...]
    unresolved: tuple[str, ...] = ()
    unnamed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Node:
    """The node's facts for the join.

    offered: the devices the kubelet can allocate.
    replica_mode: how replicas are shared on this node.
    uids: of pods that are known only from their log folders.
    claimable: the uuids of devices in claims, by pool and device.
    watched: devices that claims only monitor.
    systems: the sharing systems of this node."""

    gpus: Sequence[Gpu]
    offered: Sequence[Devices] = ()
    replica_mode: SharingMode = "time-slicing"
    uids: Mapping[Key, str] | None = None
    claimable: Mapping[tuple[str, str], str] | None = None
    watched: Watched = frozenset()
    systems: frozenset[str] = frozenset({KAI})


def find_holders(given: Iterable[PodResources], views: Mapping[Key, PodView], node: Node) -> NodeAllocations:
    """Return the allocations. views: the pods from the API server; empty if it is not used."""
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
    # While the pods of a reservation are unknown, no other pod can use the GPU.
    found += [a for a in reserving if (a.gpu_uuid, a.mig_uuid) not in used]
    return NodeAllocations(_marked(found), tuple(sorted(unresolved)), frozenset(present) - node.systems)


def merge_offered(before: Sequence[Devices], offered: Sequence[Devices], gpus: Sequence[Gpu]) -> tuple[Devices, ...]:
    """Return `offered`, plus devices that were offered before and are missing now.

    The kubelet offers only healthy devices, and none while their plugin restarts; allocated devices stay allocated."""
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
    """Return every device of a pod once. An init container passes its devices on to the others, which list
    them again."""
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
    """Return into how many equal parts each device is divided, from the devices that the kubelet offers."""
    places = {place for devices in offered for name in devices.ids if (place := names.place(name)) and place.replica}
    return Counter((place.gpu_uuid, place.mig_uuid) for place in places)


def _pod_allocations(
    pod: PodResources, uid: str, claims: Sequence[_Claim], parts: Mapping[tuple[str, str], int], mode: SharingMode
) -> list[Allocation]:
    """Return one allocation per container and device; replicas of one device are added up."""
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
    """Return HAMi's virtual devices, each with the part that the limits of its container allow. Other allocations stay
    unchanged."""
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
    """Return the pods that share reserved GPUs, each with the part in its annotation."""
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
    """Mark a claimed device as shared only if several pods name it."""
    pods: dict[tuple[str, str], set[str]] = {}
    for allocation in allocations:
        pods.setdefault((allocation.gpu_uuid, allocation.mig_uuid), set()).add(allocation.holder.uid)
    return tuple(
        replace(a, sharing=None) if a.sharing == "dra" and len(pods[a.gpu_uuid, a.mig_uuid]) == 1 else a
        for a in allocations
    )
