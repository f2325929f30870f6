"""Turns HAMi, KAI and Run:ai pod annotations into fractional allocations, and replaces reservation pods by the pods
that run in their place.

Fraction schedulers (KAI, Run:ai) let a reservation pod hold the GPU and put the workloads beside it, without a
device of their own; what runs there says who they are. HAMi gives every pod a virtual device and writes the part in
the limits of its containers. The kubelet's word comes second: it stays where nothing runs.

The owner of a pod can write its annotations, so a part that a pod declares counts only beside a reservation pod, and
as it was when the pod was bound (`agent.holders.bound_pods`). A pod that the kubelet gave a device holds what it was
given. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation

from agent.core.readings import KAI, Allocation, Gpu
from agent.wire import Holder
from gputally.base.pod_queue_labels import RESERVATION_NAMESPACES

_PPM = 1_000_000
_PERCENT = 100
_MAX_EXPONENT = 15  # of a figure that means something here; others overflow further on
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
    """The allocations with stand-ins replaced by the pods that run in their place.

    requests: of each pod by uid, its resource requests with the scheduler's annotations under their names.
    A reservation that is not used yet stays with its reservation pod, and all of them where `systems` lacks KAI."""
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
    """The part of one GPU a KAI pod declared, in millionths; None where it declared none that can be read."""
    part, size = number(fraction), number(memory)
    if part is not None and 0 < part <= 1:
        return int(part * _PPM) or None
    if size is not None and size > 0 and memory_mib:
        return int(min(size / memory_mib, Decimal(1)) * _PPM) or None
    return None


def limited_ppm(limits: Mapping[str, str], memory_mib: int | None) -> int | None:
    """The part of one GPU that limits leave to a container of HAMi's, in millionths: of cores and memory the greater,
    since no other pod can have it. Memory without a limit is all of it, as HAMi has it by default. None: the
    limit is a size, and how much memory the GPU has is not known."""
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
    """A figure from an annotation; None where it is none, or beyond all measure."""
    try:
        value = Decimal(text[:32])
    except InvalidOperation:
        return None
    return value if value.is_finite() and -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT else None
