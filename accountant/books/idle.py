"""Dividing what nobody, or everybody, holds: whole units in, the same units out.

`spread` gives each pool's idle units to those who used that pool, in proportion; where nobody did they stay
with nobody, because idle capacity that cannot be put on anybody must not vanish. `share_out` divides a common
cost. Every division is by largest remainder with ties to the earlier key, so parts add up exactly. Pure.

Source of the rules: OpenCost's AggregateBy (idle is shared per idle pool and resource by the cost incurred there;
idle first, then shared costs; weights are those before idle).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import TypeVar

from agent.units import apportion

P = TypeVar("P", bound=Hashable)
K = TypeVar("K", bound=Hashable)


def spread(idle: Mapping[P, int], weights: Mapping[P, Mapping[K, int]]) -> tuple[dict[P, dict[K, int]], dict[P, int]]:
    """(shares per pool and key, what stays per pool); over both, the units of every pool are kept."""
    shares: dict[P, dict[K, int]] = {}
    left: dict[P, int] = {}
    for pool, units in idle.items():
        known = {key: weight for key, weight in weights.get(pool, {}).items() if weight}
        if known:
            shares[pool] = dict(zip(known, apportion(units, list(known.values())), strict=True))
        elif units:
            left[pool] = units
    return shares, left


def share_out(units: int, weights: Mapping[K, int], *, even: bool = False) -> dict[K, int]:
    """A common cost over keys, by weight or evenly. Raises ValueError without keys."""
    return dict(zip(weights, apportion(units, [1] * len(weights) if even else list(weights.values())), strict=True))


def whole_weights(amounts: Mapping[K, Decimal | Fraction]) -> dict[K, int]:
    """Integers in the proportion of exact amounts."""
    exact = {key: Fraction(amount) for key, amount in amounts.items()}
    unit = lcm(*(value.denominator for value in exact.values()))
    return {key: int(value * unit) for key, value in exact.items()}
