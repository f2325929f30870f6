"""The few fields of the API server's objects that the agent reads, from their JSON.

Everything else is stepped over, so objects of newer servers are understood; what cannot be read is
`Unreadable`, never a crash. Names are Kubernetes' own, in snake case. Pure.
Source: kubernetes.io, API reference v1.36, Pod and Node.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec


class Unreadable(ValueError):
    """JSON that is not the object it should be."""


class OwnerReference(msgspec.Struct, rename="camel"):
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
    owner_references: list[OwnerReference] | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Resources(msgspec.Struct, rename="camel"):
    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class Container(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Instant(msgspec.Struct, rename="camel"):
    started_at: datetime | None = None
    finished_at: datetime | None = None


class State(msgspec.Struct, rename="camel"):
    running: Instant | None = None
    terminated: Instant | None = None


class ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    container_id: str | None = msgspec.field(default=None, name="containerID")
    state: State | None = None
    last_state: State | None = None


class Condition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    last_transition_time: datetime | None = None


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str | None = None
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class Pod(msgspec.Struct, rename="camel"):
    metadata: Meta
    spec: Spec
    status: PodStatus | None = None


class NodeMeta(msgspec.Struct):
    """Of objects without a namespace."""

    name: str
    labels: dict[str, str] | None = None


class Node(msgspec.Struct):
    metadata: NodeMeta


class Attribute(msgspec.Struct):
    """An attribute of a device; of its kinds only the text is read."""

    string: str | None = None


class SliceDevice(msgspec.Struct):
    name: str
    attributes: dict[str, Attribute] | None = None


class Pool(msgspec.Struct):
    name: str = ""


class SliceSpec(msgspec.Struct):
    driver: str
    pool: Pool
    devices: list[SliceDevice] | None = None


class ResourceSlice(msgspec.Struct):
    metadata: NodeMeta
    spec: SliceSpec


class ClaimResult(msgspec.Struct, rename="camel"):
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None


class ClaimDevices(msgspec.Struct):
    results: list[ClaimResult] | None = None


class ClaimAllocation(msgspec.Struct):
    devices: ClaimDevices | None = None


class ClaimStatus(msgspec.Struct):
    allocation: ClaimAllocation | None = None


class ResourceClaim(msgspec.Struct):
    """Which devices a claim was given, and how."""

    status: ClaimStatus | None = None


class Event(msgspec.Struct):
    """One line of a watch. object: of the watched kind, or a Status where type is ERROR."""

    type: str
    object: msgspec.Raw


class ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    # The way to the next page; "continue" is a word of Python's.
    more: str = msgspec.field(default="", name="continue")


class Listing(msgspec.Struct):
    """One page of a list, its items left for later."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class Status(msgspec.Struct):
    """What the API server says of a request it refuses."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Versioned(msgspec.Struct):
    metadata: ListMeta


_T = TypeVar("_T")


_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (Pod, Node, Listing, Event, Status, ResourceSlice, ResourceClaim, _Versioned)
}


def decode(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    """Raises Unreadable."""
    try:
        value: _T = _DECODERS[kind].decode(data)
        return value
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreadable(f"no {kind.__name__}: {error}") from error


def decode_pod(data: bytes | msgspec.Raw) -> Pod:
    """Raises Unreadable."""
    return decode(data, Pod)


def resource_version(data: bytes | msgspec.Raw) -> str:
    """Of any object. Raises Unreadable."""
    return decode(data, _Versioned).metadata.resource_version
