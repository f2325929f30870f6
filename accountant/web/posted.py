"""Reading what somebody posted as JSON: what is missing, or no figure that can be shown, is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from accountant.figures import NOTHING, gpus, hours

_MOST: Final = 10**20
"""No figure of a decision is as large; not-a-number is not smaller."""


def amount(value: float | None, unit: str) -> str:
    """A measure of a window in its unit."""
    if value is None or value < 0:
        return NOTHING
    return f"{hours(round(value))} GPU-h" if unit == "gpu_us" else f"{value:,.0f} {unit}".rstrip()


def limit(value: Any) -> str:
    """GPUs, of which -1 are without end."""
    found = number(value)
    return "unlimited" if found == -1 else of_gpus(value)


def of_gpus(value: Any) -> str:
    """A number of GPUs."""
    found = number(value)
    return NOTHING if found is None else gpus(found)


def tenths(value: Any) -> str:
    """With one decimal."""
    found = number(value)
    return NOTHING if found is None else f"{Decimal(str(found)):,.1f}"


def four(value: float) -> str:
    """Four significant digits: a weight, a share of the law's own."""
    return f"{value:.4g}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) or not text else ".")


def text_of(value: Any) -> str:
    """As it is; the sign for nothing where there is none."""
    return NOTHING if value is None or value == "" else f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: Any) -> float | None:
    """A figure that can be shown, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        return None
    return float(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """Empty where it is none."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    """Empty where it is none."""
    return value if isinstance(value, list | tuple) else ()
