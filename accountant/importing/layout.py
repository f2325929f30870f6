"""What a GPU is made of and who holds which part of it when: what every import is turned into before it is cut. Pure.

A GPU has parts (itself, or its MIG instances), a part has slots (one, or as many as it is time-sliced into), and a hold
is one holder's time on one slot. The holds of one slot never overlap: `rows` relies on it, `placing` sees to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from accountant.importing.cells import Track
from accountant.overlap import Span
from accountant.prices.gpu_models import parse_gpu_model
from agent.wire import Holder, Slice

_PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.(\d+)gb(?:[+.].*)?", re.IGNORECASE)
_MIB_PER_GIB = 1024
_COMPUTE_SLICES, _COMPUTE_SLICES_OF = 7, {"A30": 4}


@dataclass(frozen=True, slots=True)
class Part:
    """slice: None for the whole GPU. slots: equal parts that it is time-sliced into, else 1. busy: parts per million
    of it; memory: MiB used of it."""

    slice: Slice | None = None
    slots: int = 1
    busy: Track | None = None
    memory: Track | None = None


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """known: when it is known of every slot whether somebody holds it. lost: when its node could not be used.
    power: milliwatts of the whole GPU."""

    uuid: str
    model: str
    parts: tuple[Part, ...]
    known: tuple[Span, ...]
    lost: tuple[Span, ...] = ()
    power: Track | None = None

    @property
    def weights(self) -> list[int]:
        """Of the parts, and of what belongs to none of them (nothing, where the GPU is one part)."""
        slices = [part.slice for part in self.parts if part.slice is not None]
        if not slices:
            return [1, 0]
        compute = [one.compute for one in slices]
        return [*compute, max(0, slices[0].compute_of - sum(compute))]


@dataclass(frozen=True, slots=True)
class Hold:
    """Of one slot: part, slot are positions in the layout of the GPU."""

    gpu: str
    part: int
    slot: int
    holder: Holder
    start_ms: int
    end_ms: int


def mig_slice(profile: str, gi: int, gpu_model: str) -> Slice | None:
    """The instance of a profile as `1g.10gb` or `1c.3g.40gb+me`; None where it cannot be read.

    Source of the geometry: NVIDIA MIG user guide (seven compute slices, four on an A30)."""
    match = _PROFILE.fullmatch(profile)
    if match is None:
        return None
    gpu = parse_gpu_model(gpu_model)
    return Slice(
        profile=profile,
        gi=gi,
        ci=0,
        compute=int(match[1] or match[2]),
        compute_of=_COMPUTE_SLICES_OF.get(gpu.family, _COMPUTE_SLICES),
        memory_mib=int(match[3]) * _MIB_PER_GIB,
        memory_of_mib=int(gpu.memory_gb or 0) * _MIB_PER_GIB,
    )


def by_slot(holds: Sequence[Hold]) -> dict[tuple[int, int], list[Hold]]:
    """Ascending, by (part, slot)."""
    found: dict[tuple[int, int], list[Hold]] = {}
    for hold in sorted(holds, key=lambda one: (one.part, one.slot, one.start_ms)):
        found.setdefault((hold.part, hold.slot), []).append(hold)
    return found
