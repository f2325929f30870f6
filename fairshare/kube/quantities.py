"""Kubernetes quantities, and GPUs in lists of resources. Pure.

Source of the notation: Kubernetes, apimachinery/pkg/api/resource, "Quantity".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from math import fsum, isfinite

GPU = "nvidia.com/gpu"
SLICES = 7
"""Compute slices of a GPU that MIG divides; true of every model that has MIG and more than 4 of them."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|u|n|[kMGTPE]i?|Ki|[eE][+-]?\d+)?")
_SUFFIX = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_MIG = re.compile(r"nvidia\.com/mig-(?:\d+c\.)?(\d+)g\..+")


def quantity(value: object) -> float | None:
    """A Kubernetes quantity as a number >= 0: 4, "4", "500m". None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if isfinite(value) and value >= 0 else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix is None or suffix in _SUFFIX:
        amount = float(number) * _SUFFIX.get(suffix or "", 1.0)
    else:
        amount = float(number + suffix)
    return amount if amount >= 0 and isfinite(amount) else None


def gpus(resources: object) -> float:
    """GPUs in a list of resources: whole ones, and MIG instances by their compute slices of seven.

    What is no quantity counts as nothing: it is somebody else's object."""
    if not isinstance(resources, Mapping):
        return 0.0
    amounts = []
    for name, text in resources.items():
        instance = _MIG.fullmatch(str(name))
        if name == GPU or instance:
            part = int(instance.group(1)) / SLICES if instance else 1.0
            amounts.append((quantity(text) or 0.0) * part)
    return fsum(amounts)


def fixed(value: float, digits: int = 6) -> str:
    """Fixed-point text without trailing zeros, as a quantity: 0.75 is "0.75", 2.0 is "2"."""
    text = str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN).normalize())
    return f"{Decimal(text):f}"
