"""Keeps weights within multiples of the configured ones and their sum as configured, and rounds them."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from accountant.wire.policy_models import Bounds

DIGITS = 6
"""Significant digits of a published weight."""
_FORM = f".{DIGITS}g"


def rounded_weight(value: float) -> float:
    """Round to six significant digits. People can read them, and further digits never decide a share."""
    return float(format(value, _FORM))


def rescale(configured: Sequence[float], wanted: Sequence[float], bounds: Bounds) -> list[float]:
    """Return clamp(c · wanted, lower, upper) per queue, with the factor c for which the sum is the configured total.

    A queue for which the law wants less never gets more. If all wanted weights are zero, the result is the configured
    weights."""
    wanted_total = fsum(wanted)
    if wanted_total == 0:
        return list(configured)
    least, most = bounds.min_multiplier, bounds.max_multiplier
    total = fsum(configured)
    unbounded = total / wanted_total
    scaled = [unbounded * part for part in wanted]
    for weight, value in zip(configured, scaled, strict=True):
        if not weight * least <= value <= weight * most:
            break
    else:
        return scaled
    rows = [(part, weight * least, weight * most) for part, weight in zip(wanted, configured, strict=True)]

    def clamped(c: float) -> list[float]:
        return [low if (value := c * part) < low else min(value, high) for part, low, high in rows]

    # The sum grows with c, linearly between the points where a queue reaches a bound.
    corners = sorted({bound / part for part, *both in rows if part > 0 for bound in both} | {0.0})
    first, last = 0, len(corners) - 1
    while first < last:
        middle = (first + last) // 2
        if fsum(clamped(corners[middle])) >= total:
            last = middle
        else:
            first = middle + 1
    c = corners[first]
    if first > 0 and (above := fsum(clamped(c))) > total:
        start = corners[first - 1]
        below = fsum(clamped(start))
        c = start + (total - below) * (c - start) / (above - below)
    return clamped(c)


def rounded_to_configured(value: float, configured: float) -> float:
    """Round the weight, and return exactly the configured weight if only rounding separates them."""
    return configured if abs(value - configured) <= 1e-9 * configured else rounded_weight(value)
