"""Holds usage as columns of whole numbers: all accounts by key and place, held time by job, and held time by hour.

One row is one group over one stretch of the queried span. Objects are made of the few rows that are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from accountant.core.periods import hours, zone
from accountant.wire.usage_models import Dimension
from gputally.base.units import MS_PER_HOUR

if TYPE_CHECKING:  # a command that prints report rows does not load numpy
    import numpy as np
    import numpy.typing as npt

Whole: TypeAlias = "npt.NDArray[np.int64]"
JobName: TypeAlias = tuple[str, str, str, str]
"""Team, namespace, job, cluster."""
PRICED_BY: Final[tuple[Dimension, ...]] = ("gpu_model", "pool", "region", "capacity_type")
"""What a price may depend on."""


class Place(NamedTuple):
    """PRICED_BY's values of one GPU; "" where not known."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str


COLUMNS: Final = (
    "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down", "starting", "gang_waiting",
)  # fmt: skip
"""The accounts in their order, then the parts of `allocated_idle` that were start-up."""
MEMOS: Final = (
    "node_down", "borrowed_busy", "unattributed_busy", "memory_mib_s", "memory_unknown", "energy_uj", "energy_unknown",
)  # fmt: skip
"""What `UsageLine` shows beside the accounts, and the capacity whose energy is unknown."""


@dataclass(frozen=True, slots=True)
class UsageColumns:
    """All accounts by key, place and stretch of a span.

    keys, places: what the numbers of the rows point into; each ascends and holds nothing twice. stretch, key, place:
    int64, shape (rows,). gpu_us: GPU-microseconds, int64, shape (rows, len(COLUMNS)). No two rows have the same
    stretch, key and place. memos: int64, shape (rows, len(MEMOS)), in the units of `UsageLine`; None: not asked for."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    stretch: Whole
    key: Whole
    place: Whole
    gpu_us: Whole
    memos: Whole | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """The most of any one local hour, in GPU-µs; of one that the clocks repeat, the mean (`repeated`)."""

    held_us: int = 0
    busy_us: int = 0


def repeated(start_ms: int, end_ms: int, timezone: str) -> dict[str, int]:
    """Local hours of a span that are longer than one, as the clocks went back in them, with their length in ms: what
    was held in them says how many GPUs only once it is divided by that."""
    found = hours(start_ms, end_ms, zone(timezone)) if start_ms < end_ms else {}
    return {name: length_ms for name, length_ms in found.items() if length_ms > MS_PER_HOUR}


@dataclass(frozen=True, slots=True)
class Hours:
    """What was held by local hour, team and queue. hours: their names, 2026-10-01T13, which ascend; capacity_us: of
    each, without what was down. owners: team and queue; owner, hour: what the rows' numbers point into."""

    hours: Sequence[str]
    capacity_us: Sequence[int]
    owners: Sequence[tuple[str, str]]
    owner: Whole
    hour: Whole
    busy_us: Whole
    idle_us: Whole
    unknown_us: Whole
