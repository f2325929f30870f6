"""Decodes the kubelet's PodResources messages.

It decodes only the fields that the agent needs and skips all others by their wire type, so the agent can read messages
of newer kubelets. Any input gives a value or raises `Malformed`. Source of the field numbers: k8s.io/kubelet,
pkg/apis/podresources/v1/api.proto; of the encoding: protobuf.dev, "Encoding"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SERVICE = "/v1.PodResourcesLister/"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class Malformed(ValueError):
    """Bytes that are not a message of this kind."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one resource name, with the device plugin's ids."""

    resource: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device allocated through a ResourceClaim (DRA)."""

    claim_namespace: str
    claim: str
    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class ContainerResources:
    name: str
    devices: tuple[Devices, ...] = ()
    claimed: tuple[ClaimedDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PodResources:
    """The devices of one pod; the message states neither its uid nor whether it still runs."""

    namespace: str
    name: str
    containers: tuple[ContainerResources, ...] = ()


def decode_list(message: bytes) -> tuple[PodResources, ...]:
    """Decode a ListPodResourcesResponse. Raises Malformed."""
    return tuple(_pod(_part(part)) for number, part in _fields(message) if number == 1)


def decode_allocatable(message: bytes) -> tuple[Devices, ...]:
    """Decode the devices of an AllocatableResourcesResponse. Raises Malformed."""
    return tuple(_devices(_part(part)) for number, part in _fields(message) if number == 1)


def _pod(message: bytes) -> PodResources:
    name = namespace = ""
    containers = []
    for number, value in _fields(message):
        if number == 1:
            name = _text(value)
        elif number == 2:
            namespace = _text(value)
        elif number == 3:
            containers.append(_container(_part(value)))
    return PodResources(namespace, name, tuple(containers))


def _container(message: bytes) -> ContainerResources:
    name = ""
    devices: list[Devices] = []
    claimed: list[ClaimedDevice] = []
    for number, value in _fields(message):
        if number == 1:
            name = _text(value)
        elif number == 2:
            devices.append(_devices(_part(value)))
        elif number == 5:
            claimed += _claim(_part(value))
    return ContainerResources(name, tuple(devices), tuple(claimed))


def _devices(message: bytes) -> Devices:
    resource = ""
    ids = []
    for number, value in _fields(message):
        if number == 1:
            resource = _text(value)
        elif number == 2:
            ids.append(_text(value))
    return Devices(resource, tuple(ids))


def _claim(message: bytes) -> list[ClaimedDevice]:
    name = namespace = ""
    resources = []
    for number, value in _fields(message):
        if number == 2:
            name = _text(value)
        elif number == 3:
            namespace = _text(value)
        elif number == 4:
            resources.append(_part(value))
    return [_claimed(part, namespace, name) for part in resources]


def _claimed(message: bytes, claim_namespace: str, claim: str) -> ClaimedDevice:
    texts = {2: "", 3: "", 4: ""}
    for number, value in _fields(message):
        if number in texts:
            texts[number] = _text(value)
    return ClaimedDevice(claim_namespace, claim, texts[2], texts[3], texts[4])


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield (field number, value) in order; a fixed-size value as its bytes."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _BYTES:
            size, at = _varint(message, at)
            value: bytes | int = message[at : at + size]
            at += size
        elif wire_type == _VARINT:
            value, at = _varint(message, at)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
            value = message[at : at + size]
            at += size
        else:
            raise Malformed(f"unknown wire type {wire_type}")
        if at > end or number == 0:
            raise Malformed("the message ends inside a field" if number else "field number 0")
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for position in range(_MAX_VARINT_BYTES):
        if at + position >= len(message):
            raise Malformed("the message ends inside a number")
        byte = message[at + position]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, at + position + 1
    raise Malformed(f"a number longer than {_MAX_VARINT_BYTES} bytes")


def _part(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise Malformed("a number instead of a message or a text")
    return value


def _text(value: bytes | int) -> str:
    try:
        return _part(value).decode()
    except UnicodeDecodeError as error:
        raise Malformed("a text that is not UTF-8") from error
