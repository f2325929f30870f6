"""Formats numbers for people: percent, GPUs, hours, and one sign for "not known".

Rounding here is for the eye alone. Pure; published to the other stages.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from gputally.base.money import gpu_hours

NOTHING = "–"
"""Stands where there is no figure: not 0."""
MINUS = "\u2212"


def percent(ratio: float | None, places: int = 1) -> str:
    """`12.3 %`; anything under the last shown digit but not nothing is `<0.1 %`, and never rounded up to 100 %."""
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
    """A number of GPUs: `8` or `2.4`."""
    return number(Decimal(str(round(float(count), 1))), 1).removesuffix(".0")


def hours(gpu_us: int, places: int = 1) -> str:
    """GPU-hours: `12,345.6`."""
    return number(gpu_hours(gpu_us), places)


def number(value: Decimal, places: int) -> str:
    """With `places` decimals: `12,345.6`."""
    return signed(f"{value.quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN):,f}")


def signed(text: str) -> str:
    """A figure with a minus that is as wide as a plus."""
    return text.replace("-", MINUS)
