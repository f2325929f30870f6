"""Who really holds a GPU where the kubelet names only a stand-in.

Fraction schedulers (KAI, Run:ai) let a reservation pod hold the GPU and put the workloads beside it, without a
device of their own; what runs there says who they are. HAMi gives every pod a replica and writes the
fraction in its requests. The kubelet's word comes second: it stays where nothing runs.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from agent.model import Allocation, Gpu
from agent.queues import RESERVATION_NAMESPACES
from agent.wire import Holder

_PPM = 1_000_000
_CORES, _MEMORY = "nvidia.com/gpucores", "nvidia.com/gpumem"  # Source: Project-HAMi, resource names
_FRACTION, _FRACTION_MEMORY = "gpu-fraction", "gpu-memory"  # Source: KAI Scheduler, pod annotations
_DECLARED = frozenset({_FRACTION, _CORES, _FRACTION_MEMORY, _MEMORY})

Seen = tuple[str, str, Holder]
"""(gpu uuid, MIG uuid or "", holder) of a running process."""


def settle(
    allocations: Iterable[Allocation],
    seen: Iterable[Seen],
    requests: Mapping[str, Mapping[str, str]],
    gpus: Mapping[str, Gpu],
) -> tuple[Allocation, ...]:
    """The allocations with stand-ins replaced by the pods that run in their place.

    requests: of each pod by uid, its resource requests with the scheduler's annotations under their names.
    A reservation nobody uses yet stays with its reservation pod."""
    tenants: dict[tuple[str, str], dict[Holder, None]] = {}
    for gpu_uuid, mig_uuid, holder in seen:
        if holder.kind == "pod" and holder.namespace not in RESERVATION_NAMESPACES:
            tenants.setdefault((gpu_uuid, mig_uuid), {})[holder] = None
    settled: list[Allocation] = []
    taken: set[tuple[str, str]] = set()
    ordered = list(allocations)
    named = {(a.gpu_uuid, a.mig_uuid, a.holder.uid) for a in ordered}
    for allocation in ordered:
        place = allocation.gpu_uuid, allocation.mig_uuid
        present = tenants.get(place, {})
        if allocation.holder.namespace in RESERVATION_NAMESPACES and present:
            if place not in taken:
                taken.add(place)
                settled += [
                    Allocation(
                        place[0], holder, place[1], "fraction", fraction_ppm=_share(holder, requests, gpus, place)
                    )
                    for holder in present
                    if (*place, holder.uid) not in named
                ]
            continue
        declared = _share(allocation.holder, requests, gpus, place)
        if declared is None or allocation.fraction_ppm is not None:
            settled.append(allocation)
        else:
            settled.append(replace(allocation, sharing="fraction", sharing_replicas=0, fraction_ppm=declared))
    return tuple(settled)


def _share(
    holder: Holder, requests: Mapping[str, Mapping[str, str]], gpus: Mapping[str, Gpu], place: tuple[str, str]
) -> int | None:
    """The part of one GPU a pod declared, in millionths; None where it declared none that can be read.

    Compute decides before memory; a share of 0 or beyond the whole is no declaration."""
    wanted = requests.get(holder.uid)
    if not wanted or _DECLARED.isdisjoint(wanted):
        return None
    gpu = gpus.get(place[0])
    memory_mib = gpu.memory_mib if gpu is not None else 0
    for name, whole in ((_FRACTION, 1), (_CORES, 100), (_FRACTION_MEMORY, memory_mib), (_MEMORY, memory_mib)):
        try:
            share = round(float(wanted[name]) * _PPM / whole)
        except (KeyError, ValueError, OverflowError, ZeroDivisionError):
            continue
        if 0 < share <= _PPM:
            return share
    return None
