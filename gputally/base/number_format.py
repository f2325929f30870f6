"""Formats percentages, numbers of GPUs and hours for people, and an unknown figure as a dash.

The rounding is only for display. What is not 0 is never shown as 0, but as `<0.1`, and what is not whole never as
100 %."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from gputally.base.money import HOUR_PLACES, gpu_hours

NOTHING = "–"
"""Stands for an unknown figure, which is not 0."""
MINUS = "\u2212"


def percent(ratio: float | None, places: int = 1) -> str:
    """Format a ratio as `12.3 %`. A value above 0 that would round to `0.0 %` is shown as `<0.1 %`, and a value below
    100 % is never rounded up to 100 %."""
    if ratio is None:
        return NOTHING
    unit = Decimal(1).scaleb(-places)
    shown = Decimal(repr(float(ratio))) * 100
    if ratio < 1:
        shown = min(shown, 100 - unit)
    return f"{number(shown, places)} %"


def gpus(count: float | Decimal) -> str:
    """Format a number of GPUs: `8` or `2.4`."""
    return number(count if isinstance(count, Decimal) else Decimal(repr(float(count))), 1).removesuffix(".0")


def hours(gpu_us: int, places: int = 1) -> str:
    """Format GPU-µs as GPU-hours: `12,345.6`."""
    exact = gpu_hours(abs(gpu_us)) or Decimal(gpu_us != 0).scaleb(-HOUR_PLACES)
    return number(exact.copy_sign(gpu_us), places)


def number(value: Decimal, places: int) -> str:
    """Format a number with `places` decimals: `12,345.6`; `<0.1` for what is above 0 and rounds to it, and `>−0.1` for
    what is below."""
    unit = Decimal(1).scaleb(-places)
    rounded = value.quantize(unit, ROUND_HALF_EVEN)
    if value and not rounded:
        return f"<{unit:f}" if value > 0 else f">{MINUS}{unit:f}"
    return signed(f"{rounded:,f}")


def signed(text: str) -> str:
    """Replace every hyphen of a formatted number by the minus sign (U+2212), which is as wide as the plus sign."""
    return text.replace("-", MINUS)
