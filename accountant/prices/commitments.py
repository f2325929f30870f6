"""What was paid for in advance, and how much of it was used.

A commitment is so many GPUs in every hour, use it or lose it: usage counts against it at the committed rate, what
goes beyond is billed as it comes, and what is left of an hour is unused and was paid all the same. Within an hour
it covers everybody's usage in the same proportion, so that nobody gains by being counted first. An hour that was
not used up makes up for no other. Pure; accountant.books.costs and accountant.books.bills apply it.

Source: FOCUS, commitment discount examples (an hour's Used and Unused EffectiveCost add up to the commitment;
unused has no ConsumedQuantity). FOCUS takes usage in the order of arrival; its totals are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Generic, TypeVar

from pydantic import Field

from accountant.wire import IDLE, Model
from agent.units import apportion

N = TypeVar("N", int, Decimal)


class Commitment(Model):
    """`gpus` GPUs in every hour, at the price of the rows that name it, while one of those is valid.

    owner: the team that pays for what is not used; the cluster (`__idle__`) where none is named."""

    id: str = Field(min_length=1, max_length=200)
    gpus: int = Field(gt=0, le=10_000_000)
    owner: str = Field(default=IDLE, min_length=1, max_length=253)


@dataclass(frozen=True, slots=True)
class Settled(Generic[N]):
    """One hour: used + unused is the commitment, used + beyond the usage."""

    used: N
    beyond: N
    unused: N


def settle(commitment: N, usage: N) -> Settled[N]:
    """An hour's usage (GPU time, or money at committed rates) against it. Raises ValueError for a negative one."""
    if commitment < 0 or usage < 0:
        raise ValueError("commitments and usage are not negative")
    used = min(commitment, usage)
    return Settled(used, usage - used, commitment - used)


def cover(commitment: int, usages: Sequence[tuple[Hashable, int]]) -> list[int]:
    """How much of each usage (group, GPU-µs) an hour's commitment covers: in proportion, adding up exactly.

    First between groups and then within each, so a group's part does not depend on how finely it is told apart."""
    groups: dict[Hashable, list[int]] = {}
    for place, (group, _) in enumerate(usages):
        groups.setdefault(group, []).append(place)
    sums = [sum(usages[place][1] for place in places) for places in groups.values()]
    covered = [0] * len(usages)
    used = settle(commitment, sum(sums)).used
    if not used:
        return covered
    for places, part in zip(groups.values(), apportion(used, sums), strict=True):
        if part:
            for place, gpu_us in zip(places, apportion(part, [usages[place][1] for place in places]), strict=True):
                covered[place] = gpu_us
    return covered
