"""Defines held time as columns of whole numbers: what a report ranks jobs by.

One row is what one job of one team, run by one user, held in one place over one stretch of the question. Objects are
made of the few rows that are shown. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from accountant.billing.costs import Account, Charge, Detail, Place
from accountant.core.periods import hours, zone
from gputally.base.units import MS_PER_HOUR

if TYPE_CHECKING:  # a command that prints report rows does not load numpy
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
class HeldTime:
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


LineKey: TypeAlias = tuple[str, Account, Detail, str, str, str | None]
"""What tells one line of a statement from another."""


_KEY_BYTES: Final = 300
"""Of a key and the names in it that no other key has."""


@dataclass(frozen=True, slots=True)
class Groups:
    """GPU-µs by line and key of a cut, as columns. keys: ascending. of: by line the numbers of keys, ascending, and the
    time of each."""

    keys: Sequence[tuple[str, ...]] = ()
    of: Mapping[LineKey, tuple[Whole, Whole]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of memory, about."""
        return _KEY_BYTES * len(self.keys) + sum(key.nbytes + gpu_us.nbytes for key, gpu_us in self.of.values())


def grouped(charges: Iterable[Charge]) -> Groups:
    """charges: the bills of a statement's span, by the dimensions of a cut."""
    import numpy as np

    found: dict[LineKey, dict[tuple[str, ...], int]] = {}
    for charge in charges:
        of_line = found.setdefault(_charged(charge), {})
        of_line[charge.key] = of_line.get(charge.key, 0) + charge.gpu_us
    keys = sorted({key for of_line in found.values() for key in of_line})
    number = {key: place for place, key in enumerate(keys)}
    of = {}
    for line, of_line in found.items():
        table = np.array(sorted((number[key], gpu_us) for key, gpu_us in of_line.items()), dtype=np.int64)
        of[line] = table[:, 0], table[:, 1]
    return Groups(keys, of)


def _charged(charge: Charge) -> LineKey:
    row = charge.row.id if charge.billed and charge.row else None
    return charge.key[0], charge.account, charge.detail, charge.place.gpu_model, charge.place.capacity_type, row
