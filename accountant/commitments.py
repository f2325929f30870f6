"""What was paid for in advance, and how much of it was used.

A commitment is an amount of money per hour (use it or lose it), or over the length of a contract. Usage counts
against it in the order given; beyond it, usage is billed as it comes; what is left is `Unused` and was paid all
the same. Pure. Source: FOCUS, commitment discount and spend agreement examples (BilledCost of covered usage is
0, its EffectiveCost is the part of the commitment it used up; unused has no ConsumedQuantity).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from accountant.money import exact_sum


@dataclass(frozen=True, slots=True)
class Charge:
    """status None: beyond the commitment. usage: its place among the usages, None for the unused rest."""

    status: Literal["Used", "Unused"] | None
    billed: Decimal
    effective: Decimal
    usage: int | None


def settle(commitment: Decimal, usages: Sequence[Decimal]) -> list[Charge]:
    """One hour of a commitment. The effective costs of Used and Unused add up to the commitment.

    A usage that the rest of the commitment covers only in part stands twice. Raises ValueError for a negative one."""
    if commitment < 0 or any(usage < 0 for usage in usages):
        raise ValueError("commitments and usage are not negative")
    left = commitment
    found: list[Charge] = []
    for place, usage in enumerate(usages):
        covered = min(left, usage)
        left -= covered
        if covered:
            found.append(Charge("Used", Decimal(0), covered, place))
        if beyond := usage - covered:
            found.append(Charge(None, beyond, beyond, place))
    if left:
        found.append(Charge("Unused", Decimal(0), left, None))
    return found


def fee_unused(commitment: Decimal, spent: Iterable[Decimal]) -> Decimal:
    """What a contract's end still costs: the commitment that was not spent, at least 0."""
    return max(Decimal(0), commitment - exact_sum(spent))
