"""Formats percentages, numbers of GPUs and hours for people, and an unknown figure as a dash.

The rounding is only for display."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from gputally.base.money import gpu_hours

NOTHING = "–"
"""Stands for an unknown figure, which is not 0."""
MINUS = "\u2212"


def percent(ratio: float | None, places: int = 1) -> str:
    """Format a ratio as `12.3 %`. A value above 0 that would round to `0.0 %` is shown as `<0.1 %`, and a value below
    100 % is never rounded up to 100 %."""
    if ratio is None:
        return NOTHING
    unit = 10.0**-places
    if 0 < ratio * 100 < unit / 2:
        return f"<{unit:.{places}f} %"
    shown = ratio * 100
    if ratio < 1 and shown > 100 - unit / 2:
        shown = 100 - unit
    return f"{signed(f'{shown:.{places}f}')} %"


def gpus(count: float | Decimal) -> str:
    """Format a number of GPUs: `8` or `2.4`."""
    return number(Decimal(str(round(float(count), 1))), 1).removesuffix(".0")


def hours(gpu_us: int, places: int = 1) -> str:
    """Format GPU-µs as GPU-hours: `12,345.6`."""
    return number(gpu_hours(gpu_us), places)


def number(value: Decimal, places: int) -> str:
    """Format a number with `places` decimals: `12,345.6`."""
    return signed(f"{value.quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN):,f}")


def signed(text: str) -> str:
    """Replace every hyphen of a formatted number by the minus sign (U+2212), which is as wide as the plus sign."""
    return text.replace("-", MINUS)
