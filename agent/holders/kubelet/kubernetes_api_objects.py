"""Decodes the few fields of API objects that the agent needs, and reduces a pod to its facts.

It skips all other fields, so the agent can read objects of newer servers; invalid data raises `UnreadableObject`. Names
are Kubernetes' own, in snake case. Source: kubernetes.io, API reference v1.36, Pod and Node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

import msgspec

from agent.holders.installed import virtual_devices
from agent.wire import Owner, PodFacts
from gputally.base.quantities import container_memory_mib, parse_number
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.pod_queue_labels import (
    all_shared_gpu_keys,
    declared_part,
    declaring_keys,
    placed_by,
    queue_ref,
    shared_gpu_keys,
)
from gputally.kubernetes.pod_stops import EndedContainer, PodEnd, StopCondition, stop_of


class UnreadableObject(ValueError):
    """The data is not JSON, or not the expected object."""


class _OwnerReference(msgspec.Struct, rename="camel"):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, rename="camel"):
    uid: str
    namespace: str
    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_OwnerReference] | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None


class _Resources(msgspec.Struct, rename="camel"):
    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: _Resources | None = None
    restart_policy: str | None = None


class Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Instant(msgspec.Struct, rename="camel"):
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int = 0
    reason: str | None = None


class _ContainerState(msgspec.Struct, rename="camel"):
    running: Instant | None = None
    terminated: Instant | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    container_id: str | None = msgspec.field(default=None, name="containerID")
    state: _ContainerState | None = None
    last_state: _ContainerState | None = None


class _PodCondition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None
    last_transition_time: datetime | None = None


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    conditions: list[_PodCondition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct, rename="camel"):
    metadata: Meta
    spec: Spec
    status: _PodStatus | None = None


class NodeMeta(msgspec.Struct):
    """The metadata of an object without a namespace."""

    name: str
    labels: dict[str, str] | None = None


class Node(msgspec.Struct):
    metadata: NodeMeta


class Attribute(msgspec.Struct):
    """An attribute of a device. Only text values are read."""

    string: str | None = None


class Capacity(msgspec.Struct):
    value: str | int = ""


class BasicDevice(msgspec.Struct):
    attributes: dict[str, Attribute] | None = None
    capacity: dict[str, Capacity] | None = None


class SliceDevice(msgspec.Struct):
    """A device. basic: its attributes and capacity in v1beta1; later versions have them in the device itself."""

    name: str
    attributes: dict[str, Attribute] | None = None
    capacity: dict[str, Capacity] | None = None
    basic: BasicDevice | None = None


class ResourcePool(msgspec.Struct):
    name: str = ""


class SliceSpec(msgspec.Struct):
    driver: str
    pool: ResourcePool
    devices: list[SliceDevice] | None = None


class ResourceSlice(msgspec.Struct):
    metadata: NodeMeta
    spec: SliceSpec


class ClaimResult(msgspec.Struct, rename="camel"):
    """A device that is allocated to a claim. consumed_capacity: how much of each capacity, if other claims may have the
    rest."""

    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    share: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, str | int] | None = None


class ClaimDevices(msgspec.Struct):
    results: list[ClaimResult] | None = None


class ClaimAllocation(msgspec.Struct):
    devices: ClaimDevices | None = None


class ClaimStatus(msgspec.Struct):
    allocation: ClaimAllocation | None = None


class ResourceClaim(msgspec.Struct):
    """A claim, with the devices that are allocated to it."""

    status: ClaimStatus | None = None


class WatchEvent(msgspec.Struct):
    """One line of a watch. object: an object of the watched kind, or an ApiStatus if the type is ERROR."""

    type: str
    object: msgspec.Raw


class ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    # The token of the next page; `continue` is a keyword of Python.
    more: str = msgspec.field(default="", name="continue")


class Listing(msgspec.Struct):
    """One page of a list. The items are decoded later."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class ApiStatus(msgspec.Struct):
    """The API server's reason for a refused request."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Versioned(msgspec.Struct):
    metadata: ListMeta


_T = TypeVar("_T")


_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (_Pod, Node, Listing, WatchEvent, ApiStatus, ResourceSlice, ResourceClaim, _Versioned)
}


def decode(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    """Decode an object. Raises UnreadableObject."""
    try:
        value: _T = _DECODERS[kind].decode(data)
        return value
    except UNDECODABLE as error:
        raise UnreadableObject(f"not a {kind.__name__}: {error}") from error


def resource_version(data: bytes | msgspec.Raw) -> str:
    """Return the resource version of an object of any kind. Raises UnreadableObject."""
    return decode(data, _Versioned).metadata.resource_version


MAX_LABELS = 64
MAX_LABEL_CHARS = 256
CONFIG_HASH = "kubernetes.io/config.hash"
_GPU_RESOURCES = ("nvidia.com/", "gpu.nvidia.com/")


@cache
def _resources() -> tuple[str, ...]:
    """Return the beginnings of the names of GPU resources."""
    named = {name for parts in virtual_devices().values() for name in parts.resources}
    return (*_GPU_RESOURCES, *sorted(name for name in named if not name.startswith(_GPU_RESOURCES)))


_TEMPLATE_HASH = "pod-template-hash"
_OVER = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod reduced to the data that the agent needs.

    facts: the facts that the agent sends to the accountant.
    over: True if the pod has ended and holds nothing.
    containers: names of the containers, in the order of the spec.
    container_ids: names of the containers that ran, by the container runtime's ids.
    config_hash: the id in a static pod's control group; "" for other pods.
    fraction, memory_mib: the part of a GPU that the pod declares to its scheduler, as a fraction or in MiB, for itself
        or for a container; "" if it declares none.
    groups: the scheduler's groups of the shared GPUs that the pod uses.
    limits: the limits of GPU resources, by container and resource.
    shares_by: the scheduler that places the pod, if its pods can share GPUs; otherwise "".
    bound: True if the pod is bound to a node.
    wants_gpu: True if the pod requests a GPU, so that its facts are sent."""

    facts: PodFacts
    over: bool
    running: bool
    containers: tuple[str, ...]
    container_ids: Mapping[str, str] = field(default_factory=dict)
    config_hash: str = ""
    fraction: str = ""
    memory_mib: str = ""
    groups: tuple[str, ...] = ()
    limits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shares_by: str = ""
    bound: bool = False
    wants_gpu: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)."""
        return self.facts.namespace, self.facts.name


def read(pod: bytes, node: str, allowed_labels: Sequence[str]) -> PodView:
    """Decode a Pod and reduce it to its view. Raises UnreadableObject.

    node: the name of this node.
    allowed_labels: keys of labels, or patterns with `*`, that the agent sends."""
    decoded = decode(pod, _Pod)
    meta, spec, status = decoded.metadata, decoded.spec, decoded.status or _PodStatus()
    labels, annotations = meta.labels or {}, meta.annotations or {}
    phase = status.phase or ""
    requests = _requests(spec, annotations)
    containers = tuple(container.name for container in spec.containers or ())
    groups = _groups(labels)
    fraction, memory_mib = declared_part(requests)
    placer = placed_by(spec.scheduler_name)
    over = phase in _OVER
    facts = PodFacts(
        seq=0,
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        node=node,
        labels=_allowed(labels, allowed_labels),
        owners=_owners(meta.owner_references or ()),
        workload=_workload(meta.owner_references or (), labels),
        queue_ref=queue_ref(meta.namespace, spec.scheduler_name, labels, annotations),
        priority=spec.priority,
        requests=requests,
        created_ms=_ms(meta.creation_timestamp),
        scheduled_ms=_scheduled_ms(status),
        started_ms=_first_start_ms(status),
        ended_ms=_last_end_ms(status) if over else None,
        observed_ms=0,
        stop=stop_of(_end(decoded)),
    )
    return PodView(
        facts=facts,
        over=over,
        running=phase == "Running" and meta.deletion_timestamp is None,
        containers=containers,
        container_ids=_container_ids(status),
        config_hash=annotations.get(CONFIG_HASH, ""),
        fraction=fraction,
        memory_mib=memory_mib,
        groups=groups,
        limits=_limits(spec),
        shares_by=placer if shared_gpu_keys(placer) is not None else "",
        bound=bool(spec.node_name),
        wants_gpu=bool(requests or groups or spec.resource_claims),
    )


def _allowed(labels: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    keys = sorted(key for key in labels if any(fnmatchcase(key, pattern) for pattern in allowed))
    return {key: labels[key][:MAX_LABEL_CHARS] for key in keys[:MAX_LABELS]}


def _owners(references: Sequence[_OwnerReference]) -> tuple[Owner, ...]:
    """Return the pod's owner: the controller, or else the first reference. Empty if the pod has none."""
    ordered = sorted(references, key=lambda owner: not owner.controller)
    return tuple(Owner(kind=o.kind, name=o.name, uid=o.uid) for o in ordered[:1])


def _workload(references: Sequence[_OwnerReference], labels: Mapping[str, str]) -> str:
    """Return the pod's workload as `Kind/name`; "" if the pod has no owner.

    The owner of a Deployment's pod is a ReplicaSet. Its name is the Deployment's name and a hash, which the pod has as
    a label."""
    for owner in _owners(references):
        template = labels.get(_TEMPLATE_HASH, "")
        if owner.kind == "ReplicaSet" and template and owner.name.endswith(f"-{template}"):
            return f"Deployment/{owner.name.removesuffix(f'-{template}')}"
        return f"{owner.kind}/{owner.name}"
    return ""


def _requests(spec: Spec, annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the pod's GPU resources as the scheduler counts them, and the part of a GPU that it declares.

    The scheduler counts the larger of two numbers: the sum over the containers that run together, and the largest init
    container. A quantity that is no small whole number is returned as it is.

    Source: kubernetes.io, "Sidecar Containers", resource sharing within containers."""
    running: dict[str, int] = {}
    initial: dict[str, int] = {}
    uncountable: dict[str, str] = {}
    init = [c for c in spec.init_containers or () if c.restart_policy != "Always"]
    sidecars = [c for c in spec.init_containers or () if c.restart_policy == "Always"]
    for container in [*(spec.containers or ()), *sidecars, *init]:
        resources = container.resources or _Resources()
        for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
            text = str(quantity)
            if not name.startswith(_resources()):
                continue
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                uncountable[name] = text[:64]
            elif container in init:
                initial[name] = max(initial.get(name, 0), int(text))
            else:
                running[name] = running.get(name, 0) + int(text)
    counts = {name: str(max(running.get(name, 0), initial.get(name, 0))) for name in running.keys() | initial.keys()}
    declared = {
        key: annotations[key][:64]
        for keys in all_shared_gpu_keys()
        for key in (keys.fraction, keys.memory)
        if annotations.get(key)
    }
    memory_mib = container_memory_mib(annotations)
    key = declaring_keys(placed_by(spec.scheduler_name)).memory
    if key and memory_mib > (parse_number(declared.get(key, "")) or 0):
        declared[key] = str(memory_mib)
    return dict(sorted({**{k: v for k, v in counts.items() if v != "0"}, **uncountable, **declared}.items()))


def _limits(spec: Spec) -> dict[str, dict[str, str]]:
    """Return the limits of GPU resources by container and resource.

    Extended resources are not overcommitted, so a request without a limit counts as the limit."""
    limits: dict[str, dict[str, str]] = {}
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        resources = container.resources or _Resources()
        own = {**(resources.requests or {}), **(resources.limits or {})}
        limits[container.name] = {key: str(value)[:64] for key, value in own.items() if key.startswith(_resources())}
    return limits


def _groups(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the groups of a pod's shared GPUs. A pod on several GPUs has one label for each."""
    for group in (keys.group for keys in all_shared_gpu_keys() if keys.group):
        several = sorted(value for key, value in labels.items() if key.startswith(f"{group}/"))
        if found := tuple(several) or ((labels[group],) if labels.get(group) else ()):
            return found
    return ()


def _container_ids(status: _PodStatus) -> dict[str, str]:
    """Return the names of the containers by their ids, without the runtime's prefix (`containerd://`)."""
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    return {s.container_id.rpartition("//")[2]: s.name for s in statuses if s.container_id}


def _scheduled_ms(status: _PodStatus) -> int | None:
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "True":
            return _ms(condition.last_transition_time)
    return None


def _first_start_ms(status: _PodStatus) -> int | None:
    """Return when the first container started; None if none did. The status of a container contains only its present
    and previous start."""
    states = [state for c in status.container_statuses or () for state in (c.state, c.last_state) if state]
    instants = [instant for state in states for instant in (state.running, state.terminated) if instant]
    return min((ms for instant in instants if (ms := _ms(instant.started_at)) is not None), default=None)


def _last_end_ms(status: _PodStatus) -> int | None:
    ends = [c.state.terminated for c in status.container_statuses or () if c.state and c.state.terminated]
    return max((ms for end in ends if (ms := _ms(end.finished_at)) is not None), default=None)


def _end(pod: _Pod) -> PodEnd:
    status = pod.status or _PodStatus()
    return PodEnd(
        pod.spec.scheduler_name,
        [
            StopCondition(one.type, one.reason or "", one.message or "", _ms(one.last_transition_time))
            for one in status.conditions or ()
            if one.status == "True"
        ],
        status.phase or "",
        status.reason or "",
        status.message or "",
        [
            EndedContainer(one.name, end.exit_code, end.reason or "", _ms(end.finished_at))
            for one in status.container_statuses or ()
            if one.state is not None and (end := one.state.terminated) is not None
        ],
        pod.metadata.deletion_timestamp is not None,
        _ms(pod.metadata.deletion_timestamp),
        pod.metadata.deletion_grace_period_seconds or 0,
    )


def _ms(at: datetime | None) -> int | None:
    """Return a time in UTC milliseconds; None for a missing time, or for the zero time that Go writes for "never"."""
    if at is None or at.tzinfo is None or at.year < 1971:
        return None
    return round(at.timestamp() * 1000)
