"""Holds charges and held time as columns.

What `usage` and `idle_phases` say together, however many lines that is: a row is one key in one place over one
stretch of the question, an object of the few rows that are shown. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from accountant.billing.costs import Place
from accountant.billing.held_time_columns import Whole

COLUMNS: Final = (
    "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down", "starting", "gang_waiting",
)  # fmt: skip
"""The accounts in their order, then what of `allocated_idle` was start-up."""


@dataclass(frozen=True, slots=True)
class UsageColumns:
    """keys, places: what the numbers of the rows point into; each ascends and holds nothing twice. stretch: number of
    the stretch. gpu_us: GPU-microseconds by row and COLUMNS. No two rows have the same stretch, key and place."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    stretch: Whole
    key: Whole
    place: Whole
    gpu_us: Whole
