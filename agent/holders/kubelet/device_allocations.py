"""Joins the kubelet's device list with the pods and resource claims, to find which pod holds which device.

Only the kubelet decides which devices a pod has. A device counts once per pod, however many of its containers name it.
A pod that ended holds nothing. A device name that matches nothing on this node is reported, never guessed.

With schedulers of fractions a reservation pod holds the GPU, and the workloads beside it have no device of their own.
The workloads hold the GPU, not the reservation pod; the scheduler's groups of GPUs or the running processes identify
them. Systems of virtual devices give every pod one, and the limits of its containers state the part.

The part of a shared device is read from the pod only for the sharing systems in the node's settings. It comes from data
that the owner of the pod cannot change any more: the limits of its containers, or the part that it declared when it was
bound (`BoundPods`).

| Form of a device's name | Written by |
|---|---|
| `GPU-<uuid>`, `MIG-<uuid>` | NVIDIA's device plugin |
| `<either>::<k>` | the same, time-slicing or MPS: replica k |
| `MIG-GPU-<uuid>/<gi>/<ci>` | drivers before 470 |
| `nvidia<N>`, `nvidia<N>/gi<M>`, `<either>/vgpu<K>` | GKE's device plugin; N is the device's minor number |
| `<either>-<k>` | systems of virtual devices, with the separator of their manifest: virtual device k |
| `gpu-<N>`, `gpu-<N>-mig-<profile>-<id>-<start>` | NVIDIA's DRA driver; N is the minor number, id the profile's |
| `gpu-<N>-mig-<id>-<start>-<size>` | its earlier releases |

`DeviceNames` looks a name up among the existing devices. A name that matches none may mean some of the GPUs, whose
holders are then unknown. Sources: NVIDIA/k8s-device-plugin internal/rm,
GoogleCloudPlatform/container-engine-accelerators pkg/gpu/nvidia, kubernetes-sigs/dra-driver-nvidia-gpu.

DRA (dynamic resource allocation): the kubelet lists the devices of a claim with admin access like any other, so a
monitoring pod would count as a second holder of every GPU that it monitors. Only the ResourceClaim states admin access,
and how much of a device's capacity the claim consumes. `ResourceClaims` reads each named claim on a thread of its own,
once and then periodically. Until then the holders of its devices are unknown. A claim that cannot be read counts as an
ordinary claim. A claim names a device of a pool; the device's uuid and its capacity are in the ResourceSlice that its
driver publishes. The API has three versions with the same content. Source: kubernetes.io API reference, ResourceClaim
and ResourceSlice v1, v1beta2, v1beta1; KEP-5075, consumable capacity."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import NamedTuple

from agent.core.readings import Allocation, Gpu
from agent.holders.installed import device_resources, virtual_devices
from agent.holders.kubelet import kubernetes_api_objects
from agent.holders.kubelet.kubelet_pod_resources import ClaimedDevice, ContainerDevices, PodResources
from agent.holders.kubelet.kubernetes_api_objects import PodView
from agent.holders.kubelet.lean_list_watch import FORBIDDEN, NOT_FOUND, ApiUnavailable, ListWatchApi
from agent.holders.reserved_gpus import declared_ppm
from agent.holders.virtual_parts import limited_ppm, virtual_device
from agent.wire import Holder, SharingMode
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.quantities import MIB, parse_quantity
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.kubernetes.pod_queue_labels import reserved_by

NVIDIA_DRA = "gpu.nvidia.com"
"""Name of NVIDIA's DRA driver for GPUs."""
_REPLICA = re.compile(r"(.+)::(\d{1,6})")
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9A-Za-z-]+)/(\d{1,4})/(\d{1,4})")
_GKE = re.compile(r"nvidia(\d{1,4})(?:/gi(\d{1,4}))?(?:/vgpu(\d{1,6}))?")
_DRA_GPU = re.compile(r"gpu-(\d{1,4})")
_DRA_MIG = re.compile(r"gpu-(\d{1,4})-mig-(?:((?=[0-9.+-]*[a-z])[0-9a-z.+-]+)-)?(\d{1,4})-(\d{1,4})")
_EARLIER_DRA_MIG = re.compile(r"(gpu-\d{1,4}-mig-\d{1,4}-\d{1,4})-\d{1,4}")
_GPU_RESOURCE = re.compile(r"nvidia\.com/(?:gpu(?:\..*)?|mig-.*)")
_GPU_UUID = re.compile(r"GPU-[0-9A-Za-z-]+(?:::\d{1,6})?")
_NUMBERED = re.compile(r"(?:nvidia|gpu-)(\d{1,4})(?![0-9])")
_PASSED_THROUGH = "gpu-vfio-"
"""Prefix of GPUs that virtual machines have; the driver of this node does not see them."""
_LIKE_A_GPU = re.compile(r"(?:MIG-)?GPU-|MIG-|nvidia\d")


PooledDevice = tuple[str, str]
"""(pool, device)."""


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """A device in a ResourceSlice. uuid: "" for a MIG device that the driver creates on demand."""

    uuid: str
    capacity: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceRef:
    """The device that a name refers to: a GPU, a MIG instance, or a part of either.

    mig_uuid: "" for the GPU.
    replica: the name of the part; "" for the whole device.
    virtual: the separator in the name of a virtual device, which have different sizes; "" for other parts, which are
        equal."""

    gpu_uuid: str
    mig_uuid: str = ""
    replica: str = ""
    virtual: str = ""


def _by_minor(gpus: Sequence[Gpu]) -> dict[int, Gpu]:
    """Return the GPUs by minor number.

    If the driver does not report the minor number of one GPU, this GPU gets the only free number. If it does not report
    the numbers of several GPUs, these GPUs are left out, because their indexes may be other GPUs' minor numbers."""
    numbered = {gpu.minor: gpu for gpu in gpus if gpu.minor is not None}
    unnumbered = [gpu for gpu in gpus if gpu.minor is None]
    free = set(range(len(gpus))) - numbered.keys()
    if len(unnumbered) == 1 and len(free) == 1:
        numbered[free.pop()] = unnumbered[0]
    return numbered


class DeviceNames:
    """Finds devices by name among `gpus`.

    claimable: the devices that NVIDIA's DRA driver publishes, by (pool, name of the device)."""

    def __init__(self, gpus: Sequence[Gpu], claimable: Mapping[PooledDevice, PublishedDevice] | None = None) -> None:
        self._claimable = claimable or {}
        self._devices: dict[str, DeviceRef] = {}
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._minors = _by_minor(gpus)
        for gpu in gpus:
            self._devices[gpu.uuid] = DeviceRef(gpu.uuid)
            for instance in gpu.mig:
                self._devices[instance.uuid] = DeviceRef(gpu.uuid, instance.uuid)

    def find(self, name: str) -> DeviceRef | None:
        """Return the device to which a device plugin gives this name; None if there is none."""
        whole = self._devices.get(name)
        if whole is not None:
            return whole
        if replica := _REPLICA.fullmatch(name):
            whole = self.find(replica.group(1))
            return None if whole is None else DeviceRef(whole.gpu_uuid, whole.mig_uuid, replica.group(2))
        if gke := _GKE.fullmatch(name):
            return self._numbered(int(gke.group(1)), gke.group(2), gke.group(3) or "")
        if old := _OLD_MIG.fullmatch(name):
            return self._instance(self._gpus.get(old.group(1)), int(old.group(2)), int(old.group(3)))
        if virtual := virtual_device(name, self._devices):
            whole = self._devices[virtual.uuid]
            return DeviceRef(whole.gpu_uuid, whole.mig_uuid, virtual.number, virtual.separator)
        return None

    def find_claimed(self, pool: str, device: str) -> DeviceRef | None:
        """Return the device to which NVIDIA's DRA driver gives this name; None if there is none. The published uuid
        identifies the device, or else the name.

        The name of a MIG device contains the profile and the start of the placement instead of the instance. If the
        driver does not give the placement of instances, an instance is found only if it is the GPU's only one with this
        profile."""
        published = self._claimable.get((pool, device))
        if published is not None and published.uuid:
            return self._devices.get(published.uuid)
        if whole := _DRA_GPU.fullmatch(device):
            gpu = self._minors.get(int(whole.group(1)))
            return None if gpu is None else DeviceRef(gpu.uuid)
        earlier = _EARLIER_DRA_MIG.fullmatch(device)
        match = _DRA_MIG.fullmatch(earlier.group(1) if earlier else device)
        gpu = self._minors.get(int(match.group(1))) if match else None
        if match is None or gpu is None:
            return None
        placement = int(match.group(3)), int(match.group(4))
        found = [instance for instance in gpu.mig if (instance.profile_id, instance.start) == placement]
        if not found and match.group(2):
            profile = _plain(match.group(2))
            found = [i for i in gpu.mig if i.start is None and _plain(i.profile) == profile]
        return DeviceRef(gpu.uuid, found[0].uuid) if len(found) == 1 else None

    def possible(self, name: str, pool: str = "") -> frozenset[str]:
        """Return the uuids of the GPUs that a name may mean which matches no device.

        pool: the pool of a claimed device.

        A uuid or a minor number in the name identifies the GPU, which may be one that the driver does not list. A name
        without them may mean every GPU."""
        published = self._claimable.get((pool, name))
        for text in (published.uuid if published is not None else "", name):
            named = {uuid for uuid in self._gpus if re.search(rf"(?<!\w){re.escape(uuid)}(?!\w)", text)}
            if named:
                return frozenset(named)
            if _GPU_UUID.fullmatch(text) or text.startswith(_PASSED_THROUGH):
                return frozenset()
        if number := _NUMBERED.match(name):
            gpu = self._minors.get(int(number.group(1)))
            unnumbered = self._gpus.keys() - {one.uuid for one in self._minors.values()}
            return frozenset({gpu.uuid}) if gpu is not None else frozenset(unnumbered)
        divided = {gpu.uuid for gpu in self._gpus.values() if gpu.mig_enabled} if name.startswith("MIG-") else set()
        return frozenset(divided or self._gpus)

    def _numbered(self, minor: int, gi: str | None, replica: str) -> DeviceRef | None:
        gpu = self._minors.get(minor)
        if gpu is None:
            return None
        if gi is None:
            return DeviceRef(gpu.uuid, replica=replica)
        whole = self._instance(gpu, int(gi), None)
        return None if whole is None else DeviceRef(whole.gpu_uuid, whole.mig_uuid, replica)

    def _instance(self, gpu: Gpu | None, gi: int, ci: int | None) -> DeviceRef | None:
        if gpu is None:
            return None
        return next((DeviceRef(gpu.uuid, m.uuid) for m in gpu.mig if m.gi == gi and ci in (None, m.ci)), None)


def like_a_gpu(name: str) -> bool:
    """Return True if a name has the form of a GPU's name. The kubelet also lists other devices, such as network
    cards."""
    return _LIKE_A_GPU.match(name) is not None


def _plain(profile: str) -> str:
    """Return a profile without its punctuation, as in DRA device names: `1g10gb` for `1g.10gb`."""
    return re.sub(r"[.+-]", "", profile)


log = logging.getLogger("agent.holders.kubelet.device_allocations")

API_VERSIONS = "v1", "v1beta2", "v1beta1"
"""The versions of resource.k8s.io that are read, the preferred one first."""
CLAIMS_PATH = "/apis/resource.k8s.io/{}/namespaces/{}/resourceclaims/{}"
HOLDS_MS = 10 * MS_PER_MINUTE
"""How long an answer is valid. The allocation of a claim never changes, but a later claim can have the same name."""
RETRY_MS = 10 * MS_PER_SECOND
ClaimKey = tuple[str, str]
"""(namespace, name) of a ResourceClaim."""
Claims = Mapping[ClaimKey, Sequence[kubernetes_api_objects.ClaimResult]]
"""The devices allocated to each claim. A claim that has not been read is missing; one that cannot be read has none."""


class ResourceClaims:
    """Reads the claims of this node's pods.

    failure: why a claim could not be read at the last step; "" if all could."""

    def __init__(self, api: ListWatchApi, clock: Clock) -> None:
        self.failure = ""
        self._api = api
        self._clock = clock
        self._api_version = API_VERSIONS[0]
        self._named: frozenset[ClaimKey] = frozenset()
        self._valid_ms: dict[ClaimKey, int] = {}
        """Monotonic time until which the answer about each claim is valid."""
        self._claims: Claims = {}
        self._wake = threading.Event()

    def read(self, pods: Collection[PodResources]) -> Claims:
        """Return the claims of these pods, as far as they have been read. Never waits."""
        named = frozenset(
            (device.claim_namespace, device.claim)
            for pod in pods
            for container in pod.containers
            for device in container.claimed
        )
        if named != self._named:
            self._named = named
            self._wake.set()
        return self._claims

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Read claims until `stop` is set. `close` wakes this loop."""
        while not stop.is_set():
            self._wake.clear()
            task.begin()
            self.step()
            task.succeed()
            self._clock.wait(RETRY_MS / MS_PER_SECOND, self._wake)

    def close(self) -> None:
        """Wake `run`, so that it checks whether `stop` is set."""
        self._wake.set()

    def step(self) -> None:
        """Read each claim that has no valid answer."""
        now_ms, named = self._clock.monotonic_ms(), self._named
        claims = {claim: results for claim, results in self._claims.items() if claim in named}
        failure = ""
        for claim in sorted(named):
            if claim in claims and now_ms < self._valid_ms[claim]:
                continue
            self._valid_ms[claim] = now_ms + HOLDS_MS
            try:
                claims[claim] = self._read(*claim)
            except (ApiUnavailable, kubernetes_api_objects.UnreadableObject) as error:
                failure = str(error)
                if isinstance(error, ApiUnavailable) and error.status in (FORBIDDEN, NOT_FOUND):
                    claims[claim] = ()
                else:
                    claims.setdefault(claim, ())
                    self._valid_ms[claim] = now_ms
        if failure and not self.failure:
            log.warning("a ResourceClaim cannot be read: its devices count as allocated", extra={"reason": failure})
        self.failure = failure
        self._valid_ms = {claim: until_ms for claim, until_ms in self._valid_ms.items() if claim in claims}
        self._claims = claims

    def _read(self, namespace: str, name: str) -> Sequence[kubernetes_api_objects.ClaimResult]:
        preferred = sorted(API_VERSIONS, key=lambda version: version != self._api_version)
        for version in preferred:
            try:
                page = self._api.page(CLAIMS_PATH.format(version, namespace, name), {})
            except ApiUnavailable as error:
                if error.status == NOT_FOUND and version != preferred[-1]:
                    continue  # the claim or the API's version
                raise
            self._api_version = version
            break
        claim = kubernetes_api_objects.decode(page, kubernetes_api_objects.ResourceClaim)
        allocation = claim.status.allocation if claim.status else None
        return tuple(allocation.devices.results or ()) if allocation and allocation.devices else ()


def claim_results(claims: Claims, device: ClaimedDevice) -> list[kubernetes_api_objects.ClaimResult]:
    """Return what a claim has of a device: one result, or one for each share if the kubelet does not name the share."""
    results = claims.get((device.claim_namespace, device.claim), ())
    return [
        result
        for result in results
        if (result.pool, result.device) == (device.pool, device.device) and device.share in ("", result.share or "")
    ]


def consumed_ppm(
    results: Iterable[kubernetes_api_objects.ClaimResult], capacity: Mapping[str, str], memory_mib: int | None
) -> int | None:
    """Return the part of a device that a claim consumes, in millionths; None if it declares none.

    capacity: the device's published capacity.
    memory_mib: the device's memory, in place of a capacity that is not published.

    The part is the largest of the parts of all capacities, because no other claim can use it."""
    consumed: dict[str, Decimal] = {}
    for result in results:
        for name, amount in (result.consumed_capacity or {}).items():
            consumed[name] = consumed.get(name, Decimal(0)) + (parse_quantity(str(amount)) or 0)
    parts = []
    for name, used in consumed.items():
        whole = parse_quantity(capacity.get(name, ""))
        if not whole and name == "memory" and memory_mib:
            whole = Decimal(memory_mib * MIB)
        if whole and used > 0:
            parts.append(min(used / whole, Decimal(1)))
    return max(1, int(max(parts) * _PPM)) if parts else None


SLICES_PATHS = tuple(f"/apis/resource.k8s.io/{version}/resourceslices" for version in API_VERSIONS)
MAX_SLICES = 256


class SliceStore:
    """The `agent.holders.kubelet.lean_list_watch.Store` of one node's ResourceSlices."""

    def __init__(self) -> None:
        self._slices: dict[str, dict[PooledDevice, PublishedDevice]] = {}
        self._devices: Mapping[PooledDevice, PublishedDevice] = {}

    def devices(self) -> Mapping[PooledDevice, PublishedDevice]:
        """Return the devices of NVIDIA's driver. Do not modify the mapping."""
        return self._devices

    def replace(self, items: Sequence[bytes]) -> None:
        """Replace all slices, of which at most `MAX_SLICES` are kept."""
        self._slices = {}
        for item in items[:MAX_SLICES]:
            self._apply("ADDED", item)
        self._index()

    def apply(self, change: str, item: bytes) -> None:
        """Apply a change of a slice: ADDED, MODIFIED or DELETED."""
        self._apply(change, item)
        self._index()

    def _apply(self, change: str, item: bytes) -> None:
        try:
            resource_slice = kubernetes_api_objects.decode(item, kubernetes_api_objects.ResourceSlice)
        except kubernetes_api_objects.UnreadableObject as error:
            log.warning("a ResourceSlice cannot be decoded", extra={"reason": str(error)[:200]})
            return
        name, spec = resource_slice.metadata.name, resource_slice.spec
        if change == "DELETED" or spec.driver != NVIDIA_DRA:
            self._slices.pop(name, None)
        elif name in self._slices or len(self._slices) < MAX_SLICES:
            self._slices[name] = {(spec.pool.name, device.name): _published(device) for device in spec.devices or ()}

    def _index(self) -> None:
        self._devices = {key: device for devices in self._slices.values() for key, device in devices.items()}


def _published(device: kubernetes_api_objects.SliceDevice) -> PublishedDevice:
    stated: kubernetes_api_objects.SliceDevice | kubernetes_api_objects.BasicDevice = device.basic or device
    uuid = (stated.attributes or {}).get("uuid")
    capacity = {name: str(amount.value) for name, amount in (stated.capacity or {}).items()}
    return PublishedDevice((uuid.string or "") if uuid is not None else "", capacity)


_PPM = 1_000_000


Key = tuple[str, str]
"""(namespace, name) of a pod."""


@dataclass(frozen=True, slots=True)
class NodeAllocations:
    """The allocations of a node.

    unresolved: names of allocated GPUs that no device of this node has, each once.
    unknown: why the holders of a GPU are unknown, by its uuid.
    unnamed: sharing systems in use on this node that the settings do not name."""

    allocations: tuple[Allocation, ...]
    unresolved: tuple[str, ...] = ()
    unnamed: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The data of a node that `find_holders` joins with its pods.

    offered: the devices that the kubelet can allocate.
    replica_mode: how replicas of a device share it.
    uids: uids of pods from their log folders, by (namespace, name).
    claimable: the devices that NVIDIA's DRA driver publishes, by (pool, name of the device).
    claims: the pods' claims; None if claims are not read, so that all are ordinary ones.
    systems: the sharing systems of this node."""

    gpus: Sequence[Gpu]
    offered: Sequence[ContainerDevices] = ()
    replica_mode: SharingMode = "time-slicing"
    uids: Mapping[Key, str] | None = None
    claimable: Mapping[PooledDevice, PublishedDevice] | None = None
    claims: Claims | None = None
    systems: frozenset[str] = frozenset()


def find_holders(pods: Iterable[PodResources], views: Mapping[Key, PodView], node: NodeDevices) -> NodeAllocations:
    """Return the allocations of a node.

    pods: the pods that the kubelet lists.
    views: the pods that the API server lists; empty if it is not used."""
    names = DeviceNames(node.gpus, node.claimable)
    replicas = _replica_counts(names, node.offered)
    allocations: list[Allocation] = []
    reserved: dict[str, list[DeviceRef]] = {}
    reservations: list[Allocation] = []
    systems: set[str] = set()
    unresolved: set[str] = set()
    unknown: dict[str, str] = {}
    holding = [pod for pod in pods if (view := views.get((pod.namespace, pod.name))) is None or not view.over]
    consumers = _consumers(holding)
    for pod in holding:
        key = pod.namespace, pod.name
        view = views.get(key)
        devices = _container_devices(pod, names, node, consumers, unresolved, unknown)
        uid = view.facts.uid if view else (node.uids or {}).get(key, f"{pod.namespace}/{pod.name}")
        reserving = reserved_by(pod.namespace)
        if reserving and devices:
            systems.add(reserving)
        systems |= _systems_in_use(devices, node.systems)
        own = _pod_allocations(pod, uid, devices, replicas, node.replica_mode)
        if view is not None and view.groups and reserving in node.systems:
            reserved.setdefault(view.groups[0], []).extend(device.ref for device in devices)
            reservations += own
        else:
            allocations += own if view is None else _with_limited_parts(own, view, node)
    tenants = _reservation_tenants(views.values(), reserved, node)
    allocations += tenants
    shared = {(a.gpu_uuid, a.mig_uuid) for a in tenants}
    # While the pods of a reservation are unknown, no other pod can use the GPU.
    allocations += [a for a in reservations if (a.gpu_uuid, a.mig_uuid) not in shared]
    return NodeAllocations(
        _without_sole_dra_sharing(allocations), tuple(sorted(unresolved)), frozenset(systems) - node.systems, unknown
    )


def merge_offered(
    before: Sequence[ContainerDevices], offered: Sequence[ContainerDevices], gpus: Sequence[Gpu]
) -> tuple[ContainerDevices, ...]:
    """Return the devices in `offered`, and those in `before` that are missing in it and still exist.

    The kubelet offers only healthy devices, and none while their plugin restarts. Meanwhile the devices stay allocated,
    and their number of replicas is still needed."""
    names = DeviceNames(gpus)
    present = {_device_key(ref) for devices in offered for name in devices.ids if (ref := names.find(name))}
    missing = [
        ContainerDevices(devices.resource, ids)
        for devices in before
        if (ids := tuple(n for n in devices.ids if (ref := names.find(n)) and _device_key(ref) not in present))
    ]
    return (*offered, *missing)


def _device_key(ref: DeviceRef) -> tuple[str, str]:
    return ref.gpu_uuid, ref.mig_uuid


_Share = tuple[str, str, str, str, str]
"""(namespace, name, pool, device, share) of a claim's part of a device."""


class _ContainerDevice(NamedTuple):
    """A device of a container.

    by_claim: True if it was allocated through a ResourceClaim.
    part_ppm: the part of the device that the claim consumes, in millionths; None if it declares none."""

    container: str
    ref: DeviceRef
    by_claim: bool = False
    part_ppm: int | None = None


def _share(claimed: ClaimedDevice) -> _Share:
    return claimed.claim_namespace, claimed.claim, claimed.pool, claimed.device, claimed.share


def _consumers(pods: Iterable[PodResources]) -> Counter[_Share]:
    """Count the pods that have each claim's part of a device."""
    return Counter(
        share for pod in pods for share in {_share(one) for container in pod.containers for one in container.claimed}
    )


def _container_devices(
    pod: PodResources,
    names: DeviceNames,
    node: NodeDevices,
    consumers: Mapping[_Share, int],
    unresolved: set[str],
    unknown: dict[str, str],
) -> list[_ContainerDevice]:
    """Return every device of a pod once.

    consumers: the number of pods that have each claim's part of a device.
    unresolved, unknown: as in `NodeAllocations`; the function adds to them.

    The first container that lists a device counts: an init container passes its devices on to the other containers,
    which list them again."""
    devices: list[_ContainerDevice] = []
    listed: set[str | _Share] = set()

    def lost(name: str, pool: str = "") -> None:
        unresolved.add(name[:128])
        for uuid in names.possible(name, pool):
            unknown.setdefault(
                uuid, f"{name[:128]} is allocated and is no known device: it may be this GPU or part of it"
            )

    for container in pod.containers:
        for resource, name in ((each.resource, name) for each in container.devices for name in each.ids):
            if name in listed:
                continue
            listed.add(name)
            if (ref := names.find(name)) is not None:
                devices.append(_ContainerDevice(container.name, ref))
            elif like_a_gpu(name) or _GPU_RESOURCE.fullmatch(resource) or resource in device_resources():
                lost(name)
        for claimed in container.claimed:
            results = claim_results(node.claims or {}, claimed)
            if claimed.driver != NVIDIA_DRA or any(result.admin_access for result in results):
                continue
            ref = names.find_claimed(claimed.pool, claimed.device)
            part = _part_ppm(node, ref, claimed, results, consumers) if ref is not None else None
            listing: str | _Share = claimed.device if part is None else _share(claimed)
            if listing in listed:
                continue
            listed.add(listing)
            if ref is None:
                lost(claimed.device, claimed.pool)
                continue
            devices.append(_ContainerDevice(container.name, ref, True, part))
            if node.claims is not None and (claimed.claim_namespace, claimed.claim) not in node.claims:
                unknown.setdefault(ref.gpu_uuid, f"the ResourceClaim {claimed.claim[:128]} has not been read yet")
    return devices


def _part_ppm(
    node: NodeDevices,
    ref: DeviceRef,
    claimed: ClaimedDevice,
    results: Sequence[kubernetes_api_objects.ClaimResult],
    consumers: Mapping[_Share, int],
) -> int | None:
    """Return the part of a device that one pod has through a claim, in millionths; None if the claim declares none. The
    pods of one claim have equal parts."""
    gpu = next(gpu for gpu in node.gpus if gpu.uuid == ref.gpu_uuid)
    memory_mib = next((i.memory_mib for i in gpu.mig if i.uuid == ref.mig_uuid), gpu.memory_mib)
    published = (node.claimable or {}).get((claimed.pool, claimed.device))
    part = consumed_ppm(results, published.capacity if published is not None else {}, memory_mib)
    return None if part is None else max(1, part // max(consumers.get(_share(claimed), 1), 1))


def _replica_counts(names: DeviceNames, offered: Sequence[ContainerDevices]) -> Counter[tuple[str, str]]:
    """Count the replicas of each device among the devices that the kubelet offers."""
    replicas = {ref for devices in offered for name in devices.ids if (ref := names.find(name)) and ref.replica}
    return Counter(map(_device_key, replicas))


def _pod_allocations(
    pod: PodResources,
    uid: str,
    devices: Sequence[_ContainerDevice],
    counts: Mapping[tuple[str, str], int],
    mode: SharingMode,
) -> list[Allocation]:
    """Return one allocation per container and device. Several replicas of one device are one allocation.

    counts: the number of replicas of each device.
    mode: how replicas share a device."""
    allocations: dict[tuple[str, str, str], Allocation] = {}
    parts: list[Allocation] = []
    for container, ref, by_claim, part_ppm in devices:
        key = container, ref.gpu_uuid, ref.mig_uuid
        if part_ppm is None and key in allocations:
            if ref.replica:
                allocations[key] = replace(allocations[key], replicas=allocations[key].replicas + 1)
            continue
        holder = Holder(kind="pod", uid=uid, namespace=pod.namespace, name=pod.name, container=container)
        sharing: SharingMode | None = mode if ref.replica else "dra" if by_claim else None
        count = counts.get(_device_key(ref), 0) if ref.replica else 0
        allocation = Allocation(
            ref.gpu_uuid,
            holder,
            ref.mig_uuid,
            sharing=sharing,
            sharing_replicas=count,
            fraction_ppm=part_ppm,
            virtual=ref.virtual,
        )
        if part_ppm is None:
            allocations[key] = allocation
        else:
            parts.append(allocation)
    return [*allocations.values(), *parts]


def _systems_in_use(devices: Sequence[_ContainerDevice], chosen: frozenset[str]) -> frozenset[str]:
    """Return the systems to which the virtual devices of a pod can belong: the chosen ones, or else all."""
    separators = {device.ref.virtual for device in devices if device.ref.virtual}
    named = [frozenset(n for n, parts in virtual_devices().items() if parts.separator == one) for one in separators]
    return frozenset().union(*(one & chosen or one for one in named))


def _with_limited_parts(allocations: Sequence[Allocation], view: PodView, node: NodeDevices) -> list[Allocation]:
    """Return the allocations of a pod. An allocation of a virtual device has the part that the limits of its container
    allow, if the node's settings name its system."""
    chosen = [parts for name, parts in virtual_devices().items() if name in node.systems]
    memory: dict[tuple[str, str], int | None] = {(gpu.uuid, ""): gpu.memory_mib for gpu in node.gpus}
    memory |= {(gpu.uuid, instance.uuid): instance.memory_mib for gpu in node.gpus for instance in gpu.mig}

    def limited(a: Allocation) -> Allocation:
        limits = view.limits.get(a.holder.container, {})
        systems = [parts for parts in chosen if parts.separator == a.virtual]
        if not systems:
            return a
        named = next((parts for parts in systems if any(name in limits for name in parts.resources)), systems[0])
        part = limited_ppm(limits, named, memory[a.gpu_uuid, a.mig_uuid])
        part = None if part is None else min(part * a.replicas, _PPM)
        return replace(a, sharing="fraction", sharing_replicas=0, replicas=1, fraction_ppm=part)

    return [limited(a) if a.virtual else a for a in allocations]


def _reservation_tenants(
    views: Iterable[PodView], reserved: Mapping[str, Sequence[DeviceRef]], node: NodeDevices
) -> list[Allocation]:
    """Return the allocations of the pods that share reserved GPUs, each with the part that the pod declares.

    reserved: the GPUs of each of the scheduler's groups."""
    memory = {gpu.uuid: gpu.memory_mib for gpu in node.gpus}
    tenants = []
    for view in views:
        facts = view.facts
        if view.over or reserved_by(facts.namespace) or view.shares_by not in node.systems:
            continue
        if not facts.scheduled_ms and not view.running:
            continue
        container = view.containers[0] if view.containers else ""
        holder = Holder(kind="pod", uid=facts.uid, namespace=facts.namespace, name=facts.name, container=container)
        for ref in (ref for group in view.groups for ref in reserved.get(group, ())):
            part = declared_ppm(view.fraction, view.memory_mib, memory[ref.gpu_uuid])
            tenants.append(Allocation(ref.gpu_uuid, holder, ref.mig_uuid, "fraction", fraction_ppm=part))
    return tenants


def _without_sole_dra_sharing(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """Return the allocations. A claimed device that only one pod has counts as not shared, unless the claim consumes a
    part of it."""
    pods: dict[tuple[str, str], set[str]] = {}
    for allocation in allocations:
        pods.setdefault((allocation.gpu_uuid, allocation.mig_uuid), set()).add(allocation.holder.uid)
    return tuple(
        replace(a, sharing=None)
        if a.sharing == "dra" and a.fraction_ppm is None and len(pods[a.gpu_uuid, a.mig_uuid]) == 1
        else a
        for a in allocations
    )
