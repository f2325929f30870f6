"""Jobs that a part of a GPU would do for: which MIG profile, or how many could take turns on one. Pure.

Who is a candidate the report says (accountant.reports.hints, kind `slice`): one GPU, never more than half of it busy in
any hour. Memory is the mean over the time held: its peak the ledger does not know, so that whoever follows an advice
looks at it first.

Source of models and profiles: NVIDIA Multi-Instance GPU User Guide, "Supported GPUs" and "Supported MIG Profiles".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor
from typing import Any, Literal

from accountant.prices.gpu_models import parse_gpu_model
from accountant.progress import JobKey
from gputally.advise.spot import job_of

_MIG_FAMILIES = {
    "A30": 4, "A100": 7, "H100": 7, "H800": 7, "H20": 7, "H200": 7, "GH200": 7, "B200": 7, "GB200": 7, "B300": 7,
    "GB300": 7,
}  # fmt: skip
"""Compute slices by family."""
_PROFILES: Mapping[tuple[int, int | None], tuple[tuple[int, int, int], ...]] = {
    (4, None): ((1, 2, 6), (2, 4, 12)),
    (7, 40): ((1, 1, 5), (1, 2, 10), (2, 2, 10), (3, 4, 20), (4, 4, 20)),
    (7, 80): ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    (7, 141): ((1, 1, 18), (1, 2, 35), (2, 2, 35), (3, 4, 71), (4, 4, 71)),
}
"""By compute slices and GB of the GPU: (compute slices, eighths of the memory, GB of an instance), smallest first."""
_OTHER = ((1, 1, 0), (1, 2, 0), (2, 2, 0), (3, 4, 0), (4, 4, 0))
_EIGHTHS = 8
_MIB_PER_GB = 954
"""A vendor's GB is 10^9 bytes."""
_MOST_REPLICAS = 4
"""Of time-slicing: beyond it waits for the turn grow faster than what is saved."""
Way = Literal["mig", "time-slicing", "none"]


@dataclass(frozen=True, slots=True)
class Use:
    """What a job did on one model. memory_mib: mean while it held it, None where it is not known."""

    gpu_model: str
    memory_mib: float | None


@dataclass(frozen=True, slots=True)
class SharingAdvice:
    """way: how. profile: of MIG (`1g.10gb`, or `1g` where the model's memory is not known). replicas: of time-slicing.
    peak: busy part of the GPU in the busiest hour. saving: at most, None without a price. reason: why not, or what to
    look at."""

    team: str
    cluster: str
    namespace: str
    job: str
    gpu_model: str
    way: Way
    profile: str
    replicas: int
    peak: float
    memory_mib: float | None
    saving: Decimal | None
    reason: str


def advised(rows: Iterable[Mapping[str, Any]], uses: Mapping[JobKey, Use]) -> tuple[SharingAdvice, ...]:
    """rows: the report's table `hints`. The largest saving first."""
    found = [_one(row, uses.get(job_of(row))) for row in rows if row["kind"] == "slice"]
    return tuple(sorted(found, key=lambda one: (-(one.saving or 0), one.team, one.cluster, one.namespace, one.job)))


def _one(row: Mapping[str, Any], use: Use | None) -> SharingAdvice:
    peak = float(row["peak_busy_gpus"])
    saving = None if row.get("saving_at_most") is None else Decimal(str(row["saving_at_most"]))
    model, memory = (use.gpu_model, use.memory_mib) if use is not None else ("", None)
    way, profile, replicas, reason = _way(model, memory, peak)
    return SharingAdvice(
        row["team"], *job_of(row), model, way, profile, replicas, peak, memory,
        saving if way != "none" else None, reason,
    )  # fmt: skip


def _way(model: str, memory: float | None, peak: float) -> tuple[Way, str, int, str]:
    gpu = parse_gpu_model(model)
    slices = _MIG_FAMILIES.get(gpu.family)
    if not model:
        return "none", "", 0, "it ran on several models, or on none that is known"
    whole_mib = gpu.memory_gb * _MIB_PER_GB if gpu.memory_gb else None
    if slices is not None:
        sizes = _PROFILES.get((slices, gpu.memory_gb)) or _PROFILES.get((slices, None)) or _OTHER
        for compute, eighths, gigabytes in sizes:
            room = None if whole_mib is None else whole_mib * eighths / _EIGHTHS
            if compute >= ceil(round(peak * slices, 6)) and (memory is None or room is None or memory <= room):
                name = f"{compute}g.{gigabytes}gb" if gigabytes else f"{compute}g"
                return "mig", name, 0, _look(memory)
        return "none", "", 0, "its memory needs the whole GPU"
    by_time = floor(1 / peak) if peak > 0 else _MOST_REPLICAS
    by_memory = floor(whole_mib / memory) if whole_mib and memory else by_time
    replicas = min(by_time, by_memory, _MOST_REPLICAS)
    if replicas < 2:
        return "none", "", 0, "its memory needs the whole GPU"
    return "time-slicing", "", replicas, f"{_look(memory)}; time-slicing isolates neither memory nor faults"


def _look(memory: float | None) -> str:
    return "memory is not known: look before" if memory is None else "memory is a mean: look at its peak before"
