"""Divides integers into parts that add up to the whole.

Every function defines where the remainder of a division goes. No function uses floats."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to `weights`, in whole units, by largest remainder.

    The parts add up to `total` exactly. Ties between equal remainders go to the earlier weight, so equal arguments
    always give equal results. All-zero weights divide evenly.

    Raises ValueError for a negative total, a negative weight, or no weights at all.
    Source: Hamilton's method of apportionment."""
    if not weights:
        raise ValueError("apportion needs at least one weight")
    if total < 0 or min(weights) < 0:
        raise ValueError(f"apportion needs non-negative numbers, got {total} by {list(weights)}")
    if len(weights) == 1:  # most GPUs are one part with one holder
        return [total]
    denominator = sum(weights)
    if denominator == 0:
        weights = [1] * len(weights)
        denominator = len(weights)
    parts = [total * w // denominator for w in weights]
    remainders = [total * w % denominator for w in weights]
    missing = total - sum(parts)
    for i in sorted(range(len(weights)), key=lambda i: (-remainders[i], i))[:missing]:
        parts[i] += 1
    return parts


def prorate(value: int, span: int, start: int, end: int) -> int:
    """Return the part of `value` that falls into [start, end) if `value` is spread evenly over [0, span).

    The parts of any partition of [0, span) add up to `value` exactly, because each part is the difference of two values
    of the same cumulative floor. Needs value >= 0. Raises ValueError unless 0 <= start <= end <= span and span > 0."""
    if not 0 <= start <= end <= span or span <= 0:
        raise ValueError(f"prorate needs 0 <= start <= end <= span, got [{start}, {end}) of {span}")
    return value * end // span - value * start // span
