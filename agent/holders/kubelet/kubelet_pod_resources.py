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


_Fields = dict[int, list[bytes | int]]
"""The values of a message's fields, by field number. A value of fixed size is its bytes."""


class Malformed(ValueError):
    """The bytes are not a message of the expected kind."""


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    """The devices of one resource, such as `nvidia.com/gpu`. ids: their names in the device plugin."""

    resource: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device allocated through a ResourceClaim (DRA). share: identifies the claim's share of a device that several
    claims may have; "" if it has none."""

    claim_namespace: str
    claim: str
    driver: str
    pool: str
    device: str
    share: str = ""


@dataclass(frozen=True, slots=True)
class ContainerResources:
    name: str
    devices: tuple[ContainerDevices, ...] = ()
    claimed: tuple[ClaimedDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PodResources:
    """The devices of one pod. The message contains neither the pod's uid nor whether the pod still runs."""

    namespace: str
    name: str
    containers: tuple[ContainerResources, ...] = ()


def decode_list(message: bytes) -> tuple[PodResources, ...]:
    """Decode a ListPodResourcesResponse. Raises Malformed."""
    return tuple(_pod(_grouped(part)) for part in _parts(_grouped(message), 1))


def decode_allocatable(message: bytes) -> tuple[ContainerDevices, ...]:
    """Decode the devices of an AllocatableResourcesResponse. Raises Malformed."""
    return tuple(_devices(_grouped(part)) for part in _parts(_grouped(message), 1))


def _pod(fields: _Fields) -> PodResources:
    containers = tuple(_container(_grouped(part)) for part in _parts(fields, 3))
    return PodResources(_last_text(fields, 2), _last_text(fields, 1), containers)


def _container(fields: _Fields) -> ContainerResources:
    devices = tuple(_devices(_grouped(part)) for part in _parts(fields, 2))
    claimed = tuple(device for part in _parts(fields, 5) for device in _claimed(_grouped(part)))
    return ContainerResources(_last_text(fields, 1), devices, claimed)


def _devices(fields: _Fields) -> ContainerDevices:
    return ContainerDevices(_last_text(fields, 1), _texts(fields, 2))


def _claimed(fields: _Fields) -> list[ClaimedDevice]:
    """Return the devices of a DynamicResource."""
    claim, namespace = _last_text(fields, 2), _last_text(fields, 3)
    resources = [_grouped(part) for part in _parts(fields, 4)]
    return [ClaimedDevice(namespace, claim, *(_last_text(one, number) for number in (2, 3, 4, 5))) for one in resources]


def _grouped(message: bytes) -> _Fields:
    """Return the values of a message's fields, by field number, in order."""
    fields: _Fields = {}
    for number, value in _fields(message):
        fields.setdefault(number, []).append(value)
    return fields


def _parts(fields: _Fields, number: int) -> list[bytes]:
    """Return the bytes of a repeated field that contains messages or texts. Raises Malformed for a number."""
    values = fields.get(number, [])
    if any(isinstance(value, int) for value in values):
        raise Malformed("a field is a number instead of a message or a text")
    return [value for value in values if isinstance(value, bytes)]


def _texts(fields: _Fields, number: int) -> tuple[str, ...]:
    """Return the texts of a repeated field. Raises Malformed for a value that is not UTF-8."""
    try:
        return tuple(part.decode() for part in _parts(fields, number))
    except UnicodeDecodeError as error:
        raise Malformed("a text is not UTF-8") from error


def _last_text(fields: _Fields, number: int) -> str:
    """Return the text of a field that is not repeated; "" if it is missing. If it occurs several times, the last one
    counts."""
    return ("", *_texts(fields, number))[-1]


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield (field number, value) in order. A value of fixed size is its bytes."""
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
            raise Malformed(f"a field has the unknown wire type {wire_type}")
        if at > end or number == 0:
            raise Malformed("the message ends inside a field" if number else "a field has the number 0")
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
    raise Malformed(f"a number is longer than {_MAX_VARINT_BYTES} bytes")
