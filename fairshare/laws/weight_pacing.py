"""Limits the change of a weight in a cycle (step, deadband, hold-down) and its distance from the configured one.

The step is the largest change in one cycle. The deadband suppresses small changes. The hold-down is the time before a
weight may change in the opposite direction. Without them a scheduler that preempts at every change would thrash. The
multipliers limit a weight to a range around the configured weight; `rescale` also keeps the sum of the siblings'
weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from accountant.wire.policy_models import Bounds
from fairshare.core.queues_and_weights import Standing

DIGITS = 6
"""Significant digits of a published weight."""
_FORM = f".{DIGITS}g"


class PacedWeight(NamedTuple):
    """The result of pacing one weight.

    stepped: the weight after the step bound.
    value: the weight to publish.
    notes: the bounds that limited it, in words."""

    stepped: float
    value: float
    notes: tuple[str, ...] = ()


def rounded_weight(value: float) -> float:
    """Round to six significant digits. People can read them, and further digits never decide a share."""
    return float(format(value, _FORM))


def pace(target: float, standing: Standing, bounds: Bounds, now_ms: int) -> PacedWeight:
    """Move the weight in force for one cycle towards `target` (> 0). A weight that is unset or zero moves there at
    once."""
    current = standing.weight
    stepped, value, left_ms = paced_values(target, current, standing.changed_ms, standing.direction, bounds, now_ms)
    notes: tuple[str, ...] = ()
    if stepped != target:
        notes = (f"on the way to {target:g}, at most {bounds.max_step:.0%} a cycle",)
    if left_ms > 0:
        notes = (*notes, f"held down for {-(-left_ms // 1000)} s before turning round")
    elif value != stepped:
        notes = (*notes, f"a change below the deadband of {bounds.deadband:.1%}")
    return PacedWeight(stepped, value, notes)


def unpaced(bounds: Bounds) -> bool:
    """Return whether one cycle can reach every weight within the multipliers, so that `paced_values` has no effect."""
    return (
        not bounds.deadband
        and not bounds.hold_down
        and bounds.max_multiplier / bounds.min_multiplier <= bounds.max_step
    )


def paced_values(
    target: float, current: float | None, changed_ms: int | None, direction: int, bounds: Bounds, now_ms: int
) -> tuple[float, float, int]:
    """Return the weight after the step bound, the weight to publish, and the milliseconds for which the weight may not
    reverse.

    current: the weight in force. For changed_ms and direction see `Standing`."""
    if current is None or current <= 0:
        return target, target, 0
    step = bounds.max_step
    least, most = current * (1 - step) if step < 1 else 0.0, current * (1 + step)
    stepped = target if least <= target <= most else rounded_weight(min(max(target, least), most))
    change = stepped - current
    if not change or abs(change) <= bounds.deadband * current:
        return stepped, current, 0
    if changed_ms is not None and direction == (-1 if change > 0 else 1):
        left_ms = changed_ms + bounds.hold_down * 1000 - now_ms
        if left_ms > 0:
            return stepped, current, left_ms
    return stepped, stepped, 0


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
