"""Finds who shares a GPU that a reservation pod holds for others, and which part each pod declares.

Schedulers of fractions let a pod of their own hold the GPU. Their manifests say in which namespaces these pods are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

from agent.core.readings import Allocation, Gpu
from agent.wire import Holder
from gputally.base.quantities import parse_number
from gputally.kubernetes.pod_queue_labels import declared_part, reserved_by

_PPM = 1_000_000
RunningHolder = tuple[str, str, Holder]
"""(gpu uuid, MIG uuid or "", holder) of a running process."""


def replace_reservations(
    allocations: Iterable[Allocation],
    running: Iterable[RunningHolder],
    requests: Mapping[str, Mapping[str, str]],
    gpus: Mapping[str, Gpu],
    systems: frozenset[str],
) -> tuple[Allocation, ...]:
    """Replace each reservation pod in the allocations by the pods whose processes run on its GPU.

    running: the holders of running processes.
    requests: the resource requests of each pod by uid, with the part that it declares.
    gpus: the GPUs by uuid.
    systems: the sharing systems of this node.

    A reservation pod on whose GPU no pod runs a process stays, and so do the reservation pods of schedulers that
    `systems` does not name."""
    ordered = list(allocations)
    if systems.isdisjoint({reserved_by(namespace) for namespace in {one.holder.namespace for one in ordered}}):
        return tuple(ordered)
    tenants: dict[tuple[str, str], dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in running:
        if holder.kind == "pod" and not reserved_by(holder.namespace):
            tenants.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    replaced: list[Allocation] = []
    shared: set[tuple[str, str]] = set()
    allocated = {(a.gpu_uuid, a.mig_uuid, a.holder.uid) for a in ordered}
    for allocation in ordered:
        device = allocation.gpu_uuid, allocation.mig_uuid
        if reserved_by(allocation.holder.namespace) not in systems or device not in tenants:
            replaced.append(allocation)
        elif device not in shared:
            shared.add(device)
            gpu = gpus.get(allocation.gpu_uuid)
            memory_mib = gpu.memory_mib if gpu is not None else None
            for holder in tenants[device]:
                if (*device, holder.uid) not in allocated:
                    own = requests.get(holder.uid, {})
                    part = declared_ppm(*declared_part(own), memory_mib)
                    replaced.append(Allocation(device[0], holder, device[1], "fraction", fraction_ppm=part))
    return tuple(replaced)


def declared_ppm(fraction: str, memory: str, memory_mib: int | None) -> int | None:
    """Return the part of one GPU that a pod declares, in millionths; None if it declares no valid part.

    fraction: its fraction, from 0 to 1.
    memory: the GPU memory that it requests, in MiB.
    memory_mib: the GPU's memory; None if unknown.

    Of two declarations the larger counts, because it depends on the scheduler's version which of them it reads."""
    part, size = parse_number(fraction), parse_number(memory)
    parts = [part] if part is not None and 0 < part <= 1 else []
    if size is not None and size > 0 and memory_mib:
        parts.append(min(size / memory_mib, Decimal(1)))
    return int(max(parts) * _PPM) or None if parts else None
