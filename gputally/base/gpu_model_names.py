"""Normalises the names of GPU models.

NVML, GPU Feature Discovery and people write the same device in many ways: `NVIDIA A100-SXM4-80GB`,
`NVIDIA-A100-SXM4-80GB-MIG-1g.10gb`, `A100 80GB`. A price must match its GPU for each of these forms. Memory or form
that the name does not state is None, not guessed. Only the number of compute slices comes from a table
(`gputally.base.mig_profiles`).

Source: NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery (`nvidia.com/gpu.product` has the suffix -SHARED with
time-slicing and -MIG-<profile> with MIG strategy single)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from gputally.base.mig_profiles import compute_slices

MODEL_LABELS = (
    "nvidia.com/gpu.product", "amd.com/gpu.product-name", "gpu.nvidia.com/model", "gpu.nvidia.com/class",
    "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name", "eks.amazonaws.com/instance-gpu-name",
    "kubernetes.azure.com/accelerator",
)  # fmt: skip
"""In order of precedence. Sources: NVIDIA gpu-feature-discovery, and the label lists in the clouds' documentation."""
_SHARING = re.compile(r"(?:-MIG-[0-9a-z.+-]+)?(?:-SHARED)?$")
"""Suffixes that feature discovery adds to the product with time-slicing and with MIG's `single` strategy."""
_SINGLE = re.compile(r"-MIG-(\d+g\.\d+gb[0-9a-z.+-]*)(?:-SHARED)?$")
_SPLIT = re.compile(r"[\s_\-/]+")
_MIG_TAIL = re.compile(r"[\s_\-]+MIG[\s_\-]+\d+g\.\d+gb\S*$", re.IGNORECASE)
_MEMORY = re.compile(r"(\d{1,4})(?:GB|GIB|G)")
_FORM = re.compile(r"(SXM|PCIE|NVL|OAM)\d*")
_NOISE = re.compile(
    r"NVIDIA|AMD|INSTINCT|TESLA|QUADRO|GEFORCE|SHARED|GENERATION|EDITION|BLACKWELL|HBM\d?E?|GDDR\dX?|TENSOR|CORE|GPU"
)
"""Words that distinguish no GPUs of one family."""
_VARIANT = re.compile(r"AC|LC|LS|DGXS|FHHL|H|MEGA|SERVER|WORKSTATION|MAX|Q")
"""Words behind the family that name a variant of it: its cooling, board, power limit or machine type."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """The parts of a GPU model's name.

    family: upper case, single spaces (`H100`, `RTX 6000 ADA`).
    memory_gb, form and variant: None if the name does not state them."""

    family: str
    memory_gb: int | None = None
    form: str | None = None
    variant: str | None = None

    def covers(self, other: GpuModel) -> bool:
        """Whether `other` is a GPU of this model: it has the same family, and the memory, form and variant that
        this name states."""
        return (
            self.family == other.family
            and (self.memory_gb is None or self.memory_gb == other.memory_gb)
            and (self.form is None or self.form == other.form)
            and (self.variant is None or self.variant == other.variant)
        )

    @property
    def precision(self) -> int:
        """How many of memory, form and variant the name states."""
        return sum(part is not None for part in (self.memory_gb, self.form, self.variant))

    @property
    def compute_slices(self) -> int:
        """The number of compute slices into which MIG divides such a GPU."""
        return compute_slices(self.family)

    def __str__(self) -> str:
        memory = f"{self.memory_gb} GB" if self.memory_gb is not None else None
        return " ".join(part for part in (self.family, self.variant, self.form, memory) if part)


@lru_cache(maxsize=1024)
def parse_gpu_model(name: str) -> GpuModel:
    """`NVIDIA-A100-SXM4-80GB-MIG-1g.10gb` -> A100, 80, SXM. The family may be empty."""
    family: list[str] = []
    memory: int | None = None
    form: str | None = None
    variant: list[str] = []
    for token in _SPLIT.split(_MIG_TAIL.sub("", name.strip()).upper()):
        if match := _MEMORY.fullmatch(token):
            memory = int(match[1])
        elif match := _FORM.fullmatch(token):
            form = match[1]
        elif family and _VARIANT.fullmatch(token):
            variant.append(token)
        elif token and not _NOISE.fullmatch(token):
            family.append(token)
    return GpuModel(" ".join(family), memory, form, " ".join(variant) or None)


def gpu_model_of_node(labels: Mapping[str, str]) -> str:
    """Return the name of the GPU model that a node's labels state; "" if none does."""
    return _SHARING.sub("", next((labels[key] for key in MODEL_LABELS if labels.get(key)), ""))


def most_precise(name: str, models: Iterable[str]) -> str | None:
    """Return that of `models` which covers the model of this name and states most about it; None if none covers it.

    models: names of models as price books write them."""
    model = parse_gpu_model(name)
    covering = [each for each in models if parse_gpu_model(each).covers(model)]
    return max(covering, key=lambda each: (parse_gpu_model(each).precision, each), default=None)


def profile_of_product(product: str) -> str:
    """The MIG profile that feature discovery adds to the product of a node with MIG's `single` strategy, whose
    `nvidia.com/gpu` are instances: `NVIDIA-A100-SXM4-80GB-MIG-1g.10gb` -> `1g.10gb`; "" for any other."""
    match = _SINGLE.search(product)
    return match[1] if match is not None else ""
