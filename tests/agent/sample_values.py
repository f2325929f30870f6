"""Instants, sizes, names and devices that the agent's tests share."""

from __future__ import annotations

from agent.core.readings import Gpu, MigInstance
from agent.wire import Holder

T0 = 1_790_812_800_000
"""2026-10-01T00:00:00Z."""
MINUTE = 60_000
MIB = 1 << 20
GIB = 1 << 30
UID = "5f0ce1b2-7a41-4c0e-9d55-0123456789ab"
"""The uid of a pod."""
CID = "9b30000000000000000000000000000000000000000000000000000000000001"
"""A container id."""


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=name, namespace="ns", name=name, container="main")


def uuid(number: int, kind: str = "GPU") -> str:
    """GPU-00000001-0000-... as NVML writes it."""
    return f"{kind}-{number:08x}-0b0d-4a1e-8f00-{number:012x}"


def gpu(number: int, *profiles: str) -> Gpu:
    """Build GPU `number` with one MIG instance for each profile; GPU instance ids start at 1."""
    instances = tuple(
        MigInstance(uuid(number * 16 + i, "MIG"), profile, gi=i, ci=0, compute=int(profile[0]), memory_mib=10_240)
        for i, profile in enumerate(profiles, start=1)
    )
    return Gpu(uuid(number), number, "NVIDIA H200", 143_771, mig=instances, mig_enabled=bool(instances), minor=number)
