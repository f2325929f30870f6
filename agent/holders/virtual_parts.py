"""Reads the names of virtual devices and the part of a GPU that the limits of a container leave it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from decimal import Decimal
from typing import NamedTuple

from agent.holders.installed import virtual_devices
from agent.holders.protocol import VirtualDevices
from gputally.base.quantities import parse_quantity

_PPM = 1_000_000
_PERCENT = 100
_MOST_DIGITS = 6


class VirtualDevice(NamedTuple):
    """A virtual device. uuid: of its GPU or MIG instance. separator: stands between uuid and number."""

    uuid: str
    number: str
    separator: str


def virtual_device(name: str, uuids: Container[str]) -> VirtualDevice | None:
    """Return the virtual device that the kubelet calls `name`; None if it is none of these GPUs and instances."""
    for separator in dict.fromkeys(parts.separator for parts in virtual_devices().values()):
        uuid, _, number = name.rpartition(separator)
        if uuid in uuids and number.isdecimal() and number.isascii() and len(number) <= _MOST_DIGITS:
            return VirtualDevice(uuid, number, separator)
    return None


def limited_ppm(limits: Mapping[str, str], parts: VirtualDevices, memory_mib: int | None) -> int | None:
    """Return the part of one GPU that the limits of a container with virtual devices allow, in millionths; None if a
    limit is a size and the GPU's memory is unknown.

    The part is the larger of the parts of cores and memory, because no other pod can use it. A container without a
    memory limit has all memory. Limits are quantities: an API server writes 8000 as `8k`."""
    cores, size, percent = (
        parse_quantity(limits.get(name, "")) for name in (parts.cores, parts.memory, parts.memory_percent)
    )
    memory = Decimal(1)
    if size is not None and size > 0:
        if not memory_mib:
            return None
        memory = size / memory_mib
    elif percent is not None and percent > 0:
        memory = percent / _PERCENT
    part = max(memory, cores / _PERCENT if cores is not None else Decimal(0))
    return max(1, int(min(part, Decimal(1)) * _PPM))
