"""Holds usage as integer columns.

`UsageColumns` holds accounts by group key and by `Place`, the values on which a price may depend (GPU model, pool,
region, capacity type). `Hours` holds held time by local hour, team and queue. `Peak` is the most that a job held and
used in one hour.

The caller cuts the queried span at given instants (edges); the time between two neighbouring edges is a stretch. A row
holds the accounts of one key and place in one stretch. Python objects are created only for the rows that are
displayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, overload

from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine, known_memory
from gputally.base import called_off

if TYPE_CHECKING:  # a command that prints report rows does not load numpy
    import numpy as np
    import numpy.typing as npt

Int64Array: TypeAlias = "npt.NDArray[np.int64]"
JobName: TypeAlias = tuple[str, str, str, str]
"""Team, namespace, job, cluster."""
PRICED_BY: Final[tuple[Dimension, ...]] = ("gpu_model", "pool", "region", "capacity_type")
"""The dimensions that a price may depend on."""


class Place(NamedTuple):
    """The values on which a GPU's price may depend (PRICED_BY); "" if unknown."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str


COLUMNS: Final = (
    "busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down", "starting", "gang_waiting",
)  # fmt: skip
"""The accounts in their order, followed by the start-up parts of `allocated_idle`."""
MEMOS: Final = (
    "node_down", "borrowed_busy", "unattributed_busy", "memory_mib_s", "memory_unknown", "energy_uj", "energy_unknown",
)  # fmt: skip
"""Further values of a `UsageLine` besides the accounts, and the capacity whose energy is unknown."""


UJ_PER_J: Final = 1_000_000
_ROWS: Final = 1_000
"""This many rows become integers of Python at a time."""


def usage_line(key: dict[str, str], figures: Mapping[str, int]) -> UsageLine:
    """The line of a group. figures: by the names in COLUMNS and MEMOS, and perhaps `energy_j`, whole joules besides
    `energy_uj`; others are ignored."""
    accounts = Accounts(**{name: figures[name] for name in Accounts.model_fields})
    return UsageLine(
        key=key,
        accounts_gpu_us=accounts,
        node_down_us=figures["node_down"],
        borrowed_busy_us=figures["borrowed_busy"],
        unattributed_busy_us=figures["unattributed_busy"],
        memory_mib_s=known_memory(figures["memory_mib_s"], figures["memory_unknown"], accounts.allocated),
        memory_unknown_us=figures["memory_unknown"],
        energy_uj=figures["energy_uj"] + figures.get("energy_j", 0) * UJ_PER_J,
    )


class UsageLines(Sequence[UsageLine]):
    """The lines of `Questions.usage`, each made when it is read: a line takes ten times the memory of its row.

    by: the dimensions of the keys.
    keys, key: the values of the dimensions, and for each row the index of its key.
    names, figures: the names of the figures, as in COLUMNS and MEMOS, and a row of them for each line."""

    def __init__(
        self,
        by: Sequence[Dimension],
        keys: Sequence[tuple[str, ...]],
        key: Int64Array,
        names: Sequence[str],
        figures: Int64Array,
    ) -> None:
        self._by, self._keys, self._key = tuple(by), keys, key
        self._names, self._figures = tuple(names), figures

    def __len__(self) -> int:
        return len(self._key)

    @overload
    def __getitem__(self, at: int) -> UsageLine: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[UsageLine]: ...
    def __getitem__(self, at: int | slice) -> UsageLine | Sequence[UsageLine]:
        if isinstance(at, slice):
            return UsageLines(self._by, self._keys, self._key[at], self._names, self._figures[at])
        return self._line(int(self._key[at]), self._figures[at].tolist())

    def __iter__(self) -> Iterator[UsageLine]:
        for begin in range(0, len(self), _ROWS):
            called_off.check()
            end = begin + _ROWS
            for key, row in zip(self._key[begin:end].tolist(), self._figures[begin:end].tolist(), strict=True):
                yield self._line(key, row)

    def sum_of_accounts(self) -> Accounts:
        """The accounts of all lines together, without making a line."""
        columns = {name: self._figures[:, self._names.index(name)].tolist() for name in Accounts.model_fields}
        return Accounts(**{name: sum(column) for name, column in columns.items()})

    def _line(self, key: int, row: Sequence[int]) -> UsageLine:
        return usage_line(dict(zip(self._by, self._keys[key], strict=True)), dict(zip(self._names, row, strict=True)))


def coverage(lines: Sequence[UsageLine]) -> float | None:
    """Metered share of the capacity without `down`, for the complete lines of a span; None if there is no capacity."""
    each = (lines.sum_of_accounts(),) if isinstance(lines, UsageLines) else [line.accounts_gpu_us for line in lines]
    total = sum(accounts.total - accounts.down for accounts in each)
    unmetered = sum(accounts.unmetered for accounts in each)
    return (total - unmetered) / total if total else None


def sum_of_usage_lines(key: dict[str, str], lines: Sequence[UsageLine]) -> UsageLine:
    """The sum of one or more lines as one line with this key. A single line keeps its values, also unknown ones."""
    if len(lines) == 1:
        return lines[0].model_copy(update={"key": key})
    accounts = {name: sum(getattr(line.accounts_gpu_us, name) for line in lines) for name in Accounts.model_fields}
    memos = {
        "node_down": sum(line.node_down_us or 0 for line in lines),
        "borrowed_busy": sum(line.borrowed_busy_us for line in lines),
        "unattributed_busy": sum(line.unattributed_busy_us for line in lines),
        "memory_mib_s": sum(line.memory_mib_s or 0 for line in lines),
        "memory_unknown": sum(line.memory_unknown_us for line in lines),
        "energy_uj": sum(line.energy_uj for line in lines),
    }
    return usage_line(key, accounts | memos)


@dataclass(frozen=True, slots=True)
class UsageColumns:
    """All accounts by key, place and stretch of the queried span.

    keys, places: sorted, unique values; the arrays `key` and `place` hold indices into them.
    stretch, key, place: int64, shape (rows,). Stretch n lies between the edges n and n + 1.
    gpu_us: GPU-microseconds, int64, shape (rows, len(COLUMNS)). No two rows have the same stretch, key and place.
    memos: int64, shape (rows, len(MEMOS)), in the units of `UsageLine`; None if not requested."""

    keys: Sequence[tuple[str, ...]]
    places: Sequence[Place]
    stretch: Int64Array
    key: Int64Array
    place: Int64Array
    gpu_us: Int64Array
    memos: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a job held, and the most that it used, in one local hour, in GPU-µs."""

    held_us: int = 0
    busy_us: int = 0


@dataclass(frozen=True, slots=True)
class Hours:
    """Held time by local hour, team and queue.

    hours: names of the hours, such as 2026-10-01T13, ascending.
    capacity_us: capacity of each hour without down time.
    owners: (team, queue) pairs; the columns `owner` and `hour` of the rows are indices into `owners` and `hours`."""

    hours: Sequence[str]
    capacity_us: Sequence[int]
    owners: Sequence[tuple[str, str]]
    owner: Int64Array
    hour: Int64Array
    busy_us: Int64Array
    idle_us: Int64Array
    unknown_us: Int64Array
