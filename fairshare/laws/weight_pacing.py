"""Bounds how far and how fast a published weight moves: step, deadband, hold-down.

The law says where a weight should be; this says how far it goes now, from the weight in force. Without
it a scheduler that preempts at every change would thrash. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple, Protocol

from accountant.wire.policy_models import Bounds

DIGITS = 6
"""Significant digits of a published weight."""
_FORM = f".{DIGITS}g"


class PacedWeight(NamedTuple):
    """stepped: as far as one cycle may go. value: what to publish. notes: what held it back."""

    stepped: float
    value: float
    notes: tuple[str, ...] = ()


class WeightInForce(Protocol):
    """Of a `Standing`: the weight in force, None where unset; when it was last changed by us, and which way."""

    @property
    def weight(self) -> float | None: ...

    @property
    def changed_ms(self) -> int | None: ...

    @property
    def direction(self) -> int: ...


def rounded_weight(value: float) -> float:
    """Six significant digits: what people can read, and enough that rounding never decides a share."""
    return float(format(value, _FORM))


def pace(target: float, standing: WeightInForce, bounds: Bounds, now_ms: int) -> PacedWeight:
    """One cycle's move towards `target` (> 0). An unset or zero weight is no place to step from: it jumps."""
    held = standing.weight
    stepped, value, left_ms = strides(target, held, standing.changed_ms, standing.direction, bounds, now_ms)
    notes: tuple[str, ...] = ()
    if stepped != target:
        notes = (f"on the way to {target:g}, at most {bounds.max_step:.0%} a cycle",)
    if left_ms > 0:
        notes = (*notes, f"held down for {-(-left_ms // 1000)} s before turning round")
    elif value != stepped:
        notes = (*notes, f"a change below the deadband of {bounds.deadband:.1%}")
    return PacedWeight(stepped, value, notes)


def unpaced(bounds: Bounds) -> bool:
    """Whether every weight within the multipliers is one cycle away from any other, so that `strides` moves nothing."""
    return (
        not bounds.deadband
        and not bounds.hold_down
        and bounds.max_multiplier / bounds.min_multiplier <= bounds.max_step
    )


def strides(
    target: float, held: float | None, changed_ms: int | None, direction: int, bounds: Bounds, now_ms: int
) -> tuple[float, float, int]:
    """`pace` in numbers alone: as far as one cycle may go, what to publish, and for how many ms more the weight is held
    down before it may turn round. held, changed_ms, direction: of a `Paced`."""
    if held is None or held <= 0:
        return target, target, 0
    step = bounds.max_step
    least, most = held * (1 - step) if step < 1 else 0.0, held * (1 + step)
    stepped = target if least <= target <= most else rounded_weight(min(max(target, least), most))
    change = stepped - held
    if not change or abs(change) <= bounds.deadband * held:
        return stepped, held, 0
    if changed_ms is not None and direction == (-1 if change > 0 else 1):
        left_ms = changed_ms + bounds.hold_down * 1000 - now_ms
        if left_ms > 0:
            return stepped, held, left_ms
    return stepped, stepped, 0


def rescale(configured: Sequence[float], wanted: Sequence[float], bounds: Bounds) -> list[float]:
    """clamp(c · wanted, lower, upper) per queue, with the one c that makes the sum the configured total.

    Monotone: who is wanted to have less never gets more. All wanted zero: the configured weights."""
    asked = fsum(wanted)
    if asked == 0:
        return list(configured)
    least, most = bounds.min_multiplier, bounds.max_multiplier
    total = fsum(configured)
    free = total / asked
    scaled = [free * part for part in wanted]
    for weight, value in zip(configured, scaled, strict=True):
        if not weight * least <= value <= weight * most:
            break
    else:
        return scaled
    rows = [(part, weight * least, weight * most) for part, weight in zip(wanted, configured, strict=True)]

    def summed(c: float) -> float:
        return fsum([min(max(c * part, low), high) for part, low, high in rows])

    # The sum grows with c, in straight pieces between the points where a queue meets a bound.
    corners = sorted({bound / part for part, *both in rows if part > 0 for bound in both} | {0.0})
    first, last = 0, len(corners) - 1
    while first < last:
        middle = (first + last) // 2
        if summed(corners[middle]) >= total:
            last = middle
        else:
            first = middle + 1
    c = corners[first]
    if first > 0 and summed(c) > total:
        start = corners[first - 1]
        rise, run = summed(c) - summed(start), c - start
        c = start + (total - summed(start)) * run / rise
    return [min(max(c * part, low), high) for part, low, high in rows]


def rounded_to_configured(value: float, configured: float) -> float:
    """Tidy, and exactly the configured weight where only rounding sets them apart."""
    return configured if abs(value - configured) <= 1e-9 * configured else rounded_weight(value)
