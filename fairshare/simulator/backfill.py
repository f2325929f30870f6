"""EASY backfilling: the first in line has a reservation, and who comes after may start where that does not move it.

Source: Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995; Mu'alem and Feitelson, "Utilization, predictability,
workloads, and user runtime estimates", IEEE TPDS 12(6), 2001. Run times are taken as known, which flatters it:
people's estimates are several times too long. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Reservation:
    """at_s: when the first in line can start. spare: GPUs left over then. Changed as others start."""

    at_s: int
    spare: int

    def admits(self, gang: int, end_s: int) -> bool:
        """Whether a gang that would hold its GPUs until `end_s` leaves the reservation where it is; it then counts
        as started."""
        if end_s <= self.at_s:
            return True
        if gang > self.spare:
            return False
        self.spare -= gang
        return True


def reserve(gang: int, free: int, ends: Iterable[tuple[int, int]], gpus: Sequence[int]) -> Reservation:
    """For a gang that does not fit `free` GPUs. ends: (end, job) of all that runs, the next to end first; all of it
    together with `free` is no less than the gang."""
    at_s, coming = 0, iter(ends)
    while free < gang:
        at_s, job = next(coming)
        free += gpus[job]
    return Reservation(at_s, free - gang)
