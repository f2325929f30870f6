"""How far and how fast a published weight may move: multipliers, step bound, deadband, hold-down.

The law says where a weight should be; this says how far it goes now, from the weight in force. Without
it a scheduler that preempts at every change would thrash. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from operator import le
from typing import NamedTuple, Protocol

from accountant.wire import Bounds

DIGITS = 6
"""Significant digits of a published weight."""
_FORM = f"%.{DIGITS}g"


class Move(NamedTuple):
    """stepped: as far as one cycle may go. value: what to publish. notes: what held it back."""

    stepped: float
    value: float
    notes: tuple[str, ...] = ()


class Paced(Protocol):
    """Of a `Standing`: the weight in force, None where unset; when it was last changed by us, and which way."""

    @property
    def weight(self) -> float | None: ...

    @property
    def changed_ms(self) -> int | None: ...

    @property
    def direction(self) -> int: ...


def tidy(value: float) -> float:
    """Six significant digits: what people can read, and enough that rounding never decides a share."""
    return float(_FORM % value)


def pace(target: float, standing: Paced, bounds: Bounds, now_ms: int) -> Move:
    """One cycle's move towards `target` (> 0). An unset or zero weight is no place to step from: it jumps."""
    held = standing.weight
    if held is None or held <= 0:
        return Move(target, target)
    step = bounds.max_step
    least, most = held * max(0.0, 1 - step), held * (1 + step)
    notes: tuple[str, ...] = ()
    if least <= target <= most:
        stepped = target
    else:
        stepped = tidy(min(max(target, least), most))
        notes = (f"on the way to {target:g}, at most {step:.0%} a cycle",)
    if stepped == held:
        return Move(stepped, held, notes)
    if abs(stepped - held) <= bounds.deadband * held:
        return Move(stepped, held, (*notes, f"a change below the deadband of {bounds.deadband:.1%}"))
    turns_round = standing.direction == (-1 if stepped > held else 1)
    if turns_round and standing.changed_ms is not None:
        left_ms = standing.changed_ms + bounds.hold_down * 1000 - now_ms
        if left_ms > 0:
            return Move(stepped, held, (*notes, f"held down for {-(-left_ms // 1000)} s before turning round"))
    return Move(stepped, stepped, notes)


def rescale(configured: Sequence[float], wanted: Sequence[float], bounds: Bounds) -> list[float]:
    """clamp(c · wanted, lower, upper) per queue, with the one c that makes the sum the configured total.

    Monotone: who is wanted to have less never gets more. All wanted zero: the configured weights."""
    asked = fsum(wanted)
    if asked == 0:
        return list(configured)
    least, most = bounds.min_multiplier, bounds.max_multiplier
    lows, highs = [weight * least for weight in configured], [weight * most for weight in configured]
    total = fsum(configured)
    free = total / asked
    scaled = [free * part for part in wanted]
    if all(map(le, lows, scaled)) and all(map(le, scaled, highs)):
        return scaled
    rows = list(zip(wanted, lows, highs, strict=True))

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


def settled(value: float, configured: float) -> float:
    """Tidy, and exactly the configured weight where only rounding sets them apart."""
    return configured if abs(value - configured) <= 1e-9 * configured else tidy(value)
