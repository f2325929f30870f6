"""Who lends what a holder used beyond its share of a GPU.

On a shared GPU a busy holder may use more than it was allocated. Under `shared_gpus: busy` that time is billed to
it, and taken from somebody: first from that GPU's unallocated time, then from what its co-holders left idle, in
proportion. What neither has is not billed, so the bill of a GPU never exceeds the GPU. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.units import apportion


@dataclass(frozen=True, slots=True)
class Share:
    """One holder's part of a GPU over a stretch."""

    idle_us: int
    borrowed_us: int


def lend(unallocated_us: int, shares: Sequence[Share]) -> tuple[list[int], list[list[int]]]:
    """(what each takes of the unallocated time, what each takes of each other's idle time: [borrower][lender]).

    Nobody lends more than it has, or to itself. Borrowers come in their order: the caller sorts."""
    wanted = [share.borrowed_us for share in shares]
    free = apportion(min(unallocated_us, sum(wanted)), wanted) if shares else []
    idle = [share.idle_us for share in shares]
    lent = [[0] * len(shares) for _ in shares]
    for borrower, want in enumerate(wanted):
        lenders = [0 if lender == borrower else idle_us for lender, idle_us in enumerate(idle)]
        taken = min(want - free[borrower], sum(lenders))
        if taken:
            lent[borrower] = apportion(taken, lenders)
            idle = [have - part for have, part in zip(idle, lent[borrower], strict=True)]
    return free, lent
