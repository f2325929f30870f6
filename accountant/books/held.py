"""Time that was held, as columns of whole numbers: what a report ranks ten thousands of jobs by.

One row is what one job of one team, run by one user, held in one place over one stretch of the question. Objects are
made of the few rows that are shown. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from accountant.books.costs import Place
from accountant.periods import hours, zone
from agent.units import MS_PER_HOUR

if TYPE_CHECKING:  # whoever only reads a report's rows need not load it
    import numpy as np
    import numpy.typing as npt

Whole: TypeAlias = "npt.NDArray[np.int64]"
JobName: TypeAlias = tuple[str, str, str, str]
"""Team, namespace, job, cluster."""


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
class Held:
    """teams, jobs (namespace and name), clusters, users, places: what the columns of their names point into; each
    ascends. stretch: number of the stretch. busy_us, idle_us, unknown_us: GPU-microseconds. The order of the rows
    means nothing."""

    teams: Sequence[str]
    jobs: Sequence[tuple[str, str]]
    clusters: Sequence[str]
    users: Sequence[str]
    places: Sequence[Place]
    stretch: Whole
    team: Whole
    job: Whole
    cluster: Whole
    user: Whole
    place: Whole
    busy_us: Whole
    idle_us: Whole
    unknown_us: Whole


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
