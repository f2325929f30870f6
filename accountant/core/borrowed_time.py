"""Divides the borrowed time of a shared GPU among those that lent it.

A busy holder of a shared GPU may use more than its allocation. With `shared_gpus: busy` in the price book this excess
is billed to it. The time is taken first from the GPU's unallocated time, then from the idle time of the other holders,
in proportion, by largest remainder. An excess beyond both is not billed, so the bill of a GPU never exceeds the
GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gputally.base.apportionment import apportion


@dataclass(frozen=True, slots=True)
class HolderTime:
    """One holder's part of a GPU during a span."""

    idle_us: int
    borrowed_us: int


def lend(unallocated_us: int, shares: Sequence[HolderTime]) -> tuple[list[int], list[list[int]]]:
    """Divides the borrowed time of one GPU among its unallocated time and its holders' idle time.

    Returns (free, lent): free[b] is the unallocated time that borrower b gets, lent[b][l] the idle time that b gets
    from holder l. No holder lends more than its idle time, or to itself. Borrowers are served in the given order."""
    borrowed = [share.borrowed_us for share in shares]
    free = apportion(min(unallocated_us, sum(borrowed)), borrowed) if shares else []
    idle = [share.idle_us for share in shares]
    lent = [[0] * len(shares) for _ in shares]
    for borrower, borrowed_us in enumerate(borrowed):
        lenders = [0 if lender == borrower else idle_us for lender, idle_us in enumerate(idle)]
        lent_us = min(borrowed_us - free[borrower], sum(lenders))
        if lent_us:
            lent[borrower] = apportion(lent_us, lenders)
            idle = [idle_us - part for idle_us, part in zip(idle, lent[borrower], strict=True)]
    return free, lent
