"""Reads numbers and quantities of Kubernetes that users write into fields that no schema checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

_MAX_EXPONENT = 15
"""Largest power of ten that a number may have. Larger numbers are no sizes, and would overflow later."""


def parse_number(text: str) -> Decimal | None:
    """Parse a number in an annotation or a limit. Return None if it is not a number, or out of range."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() and -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT else None


_QUANTITY = re.compile(r"([0-9.]{1,32}(?:[eE][+-]?\d{1,2})?)([numkMGTPE]|[KMGTPE]i)?")
_DECIMAL = {
    suffix: Decimal(1000) ** power for power, suffix in zip(range(-3, 7), ("n", "u", "m", "", *"kMGTPE"), strict=True)
}
_BINARY = {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
MIB = 1024 * 1024


def parse_quantity(text: str) -> Decimal | None:
    """Parse a quantity of Kubernetes, such as `10Gi`. Return None if it is none, or out of range."""
    match = _QUANTITY.fullmatch(text)
    number = parse_number(match.group(1)) if match else None
    if match is None or number is None:
        return None
    suffix = match.group(2) or ""
    return number * (_BINARY[suffix] if suffix in _BINARY else _DECIMAL[suffix])


_CONTAINER, _REQUEST, _LIMIT = "nvidia.com/container.", ".gpu-memory.request", ".gpu-memory.limit"


def container_memory_mib(annotations: Mapping[str, str]) -> int:
    """Return the memory of each of its GPUs, in whole MiB, that a pod requests for one of its containers by annotation
    (`nvidia.com/container.NAME.gpu-memory.request`); 0 if it requests none.

    A limit without a request counts as the request. Of several containers the largest counts: KAI admits only one.

    Source: KAI Scheduler 0.17.2 and later, pkg/common/resources, gpu_sharing.go."""
    sizes: dict[str, Decimal] = {}
    for suffix in (_LIMIT, _REQUEST):
        for key, text in annotations.items():
            if key.startswith(_CONTAINER) and key.endswith(suffix) and isinstance(text, str):
                sizes[key.removesuffix(suffix)] = parse_quantity(text) or Decimal(0)
    return int(max(sizes.values(), default=Decimal(0)) // MIB)
