"""The sizes of MIG instances: what a profile's name says, and into how many compute slices a GPU is divided.

An agent takes both from the driver. An import, a price book and advice know a GPU only by its name, and take the number
of slices from the table here: `compute_slices("NVIDIA RTX PRO 6000 Blackwell Server Edition")` is 4. A profile's name
is the size of the GPU instance, with a suffix that does not change it: `1g.24gb`, `1g.24gb+gfx`, `1g.24gb+me.all` and
`1g.24gb-me` are equally large. Kubernetes writes the suffix with a dot, and Prometheus every separator as `_`.

Source: NVIDIA MIG user guide, pages "Supported GPUs" and "Supported MIG Profiles" (release 610)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

COMPUTE_SLICES: Final = 7
"""Compute slices of a GPU of which nothing is known."""
_GPUS: Final[Mapping[tuple[str, ...], tuple[int, int | None]]] = {
    ("A30",): (4, 24), ("A30X",): (4, 24),
    ("A100",): (7, None), ("A100X",): (7, 80), ("A800",): (7, None),
    ("H100",): (7, None), ("H800",): (7, None), ("H20",): (7, None), ("H200",): (7, 141), ("GH200",): (7, None),
    ("B200",): (7, 180), ("GB200",): (7, 186), ("B300",): (7, 269), ("GB300",): (7, None),
    ("RTX", "PRO", "6000"): (4, 96), ("RTX", "PRO", "5000"): (2, 48), ("RTX", "PRO", "4500"): (2, 32),
    ("THOR",): (2, None),
}  # fmt: skip
"""By the words of a GPU's name: its compute slices, and its memory in GB if there is only one size of it."""
_EIGHTHS: Final = 8
_SIZES: Final[Mapping[tuple[int, int | None], tuple[tuple[int, int, int], ...]]] = {
    (7, 40): ((1, 1, 5), (1, 2, 10), (2, 2, 10), (3, 4, 20), (4, 4, 20)),
    (7, 80): ((1, 1, 10), (1, 2, 20), (2, 2, 20), (3, 4, 40), (4, 4, 40)),
    (7, 94): ((1, 1, 12), (1, 2, 24), (2, 2, 24), (3, 4, 47), (4, 4, 47)),
    (7, 96): ((1, 1, 12), (1, 2, 24), (2, 2, 24), (3, 4, 48), (4, 4, 48)),
    (7, 141): ((1, 1, 18), (1, 2, 35), (2, 2, 35), (3, 4, 71), (4, 4, 71)),
    (7, 180): ((1, 1, 23), (1, 2, 45), (2, 2, 45), (3, 4, 90), (4, 4, 90)),
    (7, 186): ((1, 1, 23), (1, 2, 47), (2, 2, 47), (3, 4, 93), (4, 4, 93)),
    (7, 269): ((1, 1, 34), (1, 2, 67), (2, 2, 67), (3, 4, 135), (4, 4, 135)),
    (7, None): ((1, 1, 0), (1, 2, 0), (2, 2, 0), (3, 4, 0), (4, 4, 0)),
    (4, 24): ((1, 2, 6), (2, 4, 12)),
    (4, 96): ((1, 2, 24), (2, 4, 48)),
    (4, None): ((1, 2, 0), (2, 4, 0)),
    (2, 48): ((1, 4, 24),),
    (2, 32): ((1, 4, 16),),
    (2, None): ((1, 4, 0),),
}
"""Instances smaller than the GPU, by its compute slices and GB, smallest first: (compute slices, eighths of the memory,
GB in the name)."""
_SLICES_BY_PROFILE: Final = {
    "1g.6gb": 4, "2g.12gb": 4, "4g.24gb": 4,
    "1g.24gb": 4, "2g.48gb": 4, "4g.96gb": 4,
    "1g.16gb": 2, "2g.32gb": 2,
}  # fmt: skip
"""For profiles that only (or, as `1g.24gb`, almost only) GPUs with fewer slices have."""
_SPLIT = re.compile(r"[^A-Z0-9]+")
_PROFILE = re.compile(r"(?:(\d)c[._])?(\d)g[._](\d{1,4})gb(?:[-+._](\w[\w.+]*))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MigProfile:
    """The parts of a profile's name.

    gpu_instance: compute slices of the GPU instance.
    compute_instance: compute slices of the compute instance; equal to gpu_instance unless the name states it.
    memory_gb: memory of the GPU instance.
    suffix: `me`, `gfx`, `me.all`; "" if there is none."""

    gpu_instance: int
    compute_instance: int
    memory_gb: int
    suffix: str = ""

    @property
    def slices(self) -> tuple[int, int]:
        """The compute slices of the GPU instance and of the compute instance."""
        return self.gpu_instance, self.compute_instance

    @property
    def size(self) -> str:
        """The name without the suffix and without the compute instance: `3g.40gb`."""
        return f"{self.gpu_instance}g.{self.memory_gb}gb"

    @property
    def resource(self) -> str:
        """The name in a Kubernetes resource, with a dot before the suffix: `1g.24gb.me.all`."""
        compute = f"{self.compute_instance}c." if self.compute_instance != self.gpu_instance else ""
        return f"{compute}{self.size}{'.' if self.suffix else ''}{self.suffix}"


def parse_mig_profile(name: str) -> MigProfile | None:
    """`1g.10gb` -> 1, 1, 10; `1c.3g.40gb+me` -> 3, 1, 40, me. None for any other form, and for zero slices."""
    match = _PROFILE.fullmatch(name)
    if match is None or "0" in (match[1], match[2]):
        return None
    suffix = (match[4] or "").lower().replace("_", ".").replace("+", ".")
    return MigProfile(int(match[2]), int(match[1] or match[2]), int(match[3]), suffix)


@lru_cache(maxsize=1024)
def _known(product: str) -> tuple[int, int | None] | None:
    words = tuple(_SPLIT.split(product.upper()))
    for name, known in _GPUS.items():
        if any(words[at : at + len(name)] == name for at in range(len(words))):
            return known
    return None


def compute_slices(product: str = "", profile: str = "") -> int:
    """The compute slices of a GPU of this name (in any spelling), or else of one that has this MIG profile, or else
    seven.

    An instance of more slices than that shows that the table does not fit, and gives seven too."""
    mig = parse_mig_profile(profile) if profile else None
    known = _known(product)
    slices = known[0] if known is not None else COMPUTE_SLICES
    if known is None and mig is not None:
        slices = _SLICES_BY_PROFILE.get(mig.size, COMPUTE_SLICES)
    return slices if mig is None or mig.gpu_instance <= slices else COMPUTE_SLICES


@dataclass(frozen=True, slots=True)
class MigSize:
    """An instance that is smaller than the GPU.

    compute, compute_of: compute slices of the instance and of the GPU.
    memory: its part of the GPU's memory.
    name: its profile (`1g.10gb`), or `1g` if the memory of the GPU is not known."""

    compute: int
    compute_of: int
    memory: Fraction
    name: str


def mig_sizes(product: str, memory_gb: int | None) -> tuple[MigSize, ...]:
    """The instances into which a GPU of this name can be divided, smallest first; none if MIG is not known for it.

    memory_gb: the GPU's memory; None if unknown."""
    known = _known(product)
    if known is None:
        return ()
    slices, usual_gb = known
    sizes = _SIZES.get((slices, memory_gb or usual_gb)) or _SIZES[slices, None]
    return tuple(
        MigSize(compute, slices, Fraction(eighths, _EIGHTHS), f"{compute}g.{gb}gb" if gb else f"{compute}g")
        for compute, eighths, gb in sizes
    )


def usual_memory_gb(product: str) -> int | None:
    """The memory of a GPU of which there is only one size; None for any other."""
    known = _known(product)
    return known[1] if known is not None else None


def instances_of(product: str, profile: str) -> int:
    """How many instances of one profile fit on a GPU of this name; 1 for a profile that is none."""
    mig = parse_mig_profile(profile)
    if mig is None:
        return 1
    known = [slices for key, sizes in _SIZES.items() for slices in sizes if key[0] == compute_slices(product, profile)]
    eighths = min((e for compute, e, gb in known if (compute, gb) == (mig.gpu_instance, mig.memory_gb)), default=1)
    return max(1, min(compute_slices(product, profile) // mig.gpu_instance, _EIGHTHS // eighths))
