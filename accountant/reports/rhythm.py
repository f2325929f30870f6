"""When the GPUs are wanted: by hour of the local day, and the busiest single hour of a span. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from accountant.books.held import Hours
from accountant.reports.tables import share
from agent.units import MS_PER_HOUR


@dataclass(frozen=True, slots=True)
class HourRow:
    """GPU-µs. capacity_us: of the cluster without what was down; the rest of the scope. known_us: held time whose
    use is known."""

    hour: int
    capacity_us: int
    allocated_us: int
    busy_us: int
    known_us: int

    @property
    def held(self) -> float | None:
        """Share of the capacity that the scope held."""
        return share(self.allocated_us, self.capacity_us)

    @property
    def utilisation(self) -> float | None:
        return share(self.busy_us, self.known_us)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """hours: 0 to 23, local. busiest: the one local hour of the span, "2026-10-05T14", in which most GPUs were held;
    None where nothing ever was. Its row is of one hour, also where the clocks repeat it: then it is their mean."""

    hours: tuple[HourRow, ...]
    busiest: str | None
    busiest_row: HourRow | None

    @property
    def peak(self) -> HourRow | None:
        """The hour of the day in which most is held."""
        wanted = [row for row in self.hours if row.allocated_us]
        return max(wanted, key=lambda row: (row.held or 0, -row.hour), default=None)

    @property
    def trough(self) -> HourRow | None:
        """The hour of the day in which least is held, where any hour differs."""
        known = [row for row in self.hours if row.capacity_us]
        return min(known, key=lambda row: (row.held or 0, row.hour), default=None)


def rhythm(hourly: Hours, team: str | None, longer_ms: Mapping[str, int]) -> Rhythm:
    """hourly: of the whole cluster. longer_ms: accountant.books.held.repeated of the span."""
    mine = np.array([team in (None, name) for name, _ in hourly.owners], dtype=bool)[hourly.owner]
    busy, idle, unknown = (column[mine] for column in (hourly.busy_us, hourly.idle_us, hourly.unknown_us))
    held = np.zeros((len(hourly.hours), 3), dtype=np.int64)
    np.add.at(held, hourly.hour[mine], np.stack([busy + idle + unknown, busy, busy + idle], axis=1))
    sums = {
        name: [capacity_us, *of_hour]
        for name, capacity_us, of_hour in zip(hourly.hours, hourly.capacity_us, held.tolist(), strict=True)
    }
    of_day = [[0, 0, 0, 0] for _ in range(24)]
    for name, row in sums.items():
        day = of_day[int(name.partition("T")[2])]
        day[:] = [a + b for a, b in zip(day, row, strict=True)]
    for name, length_ms in longer_ms.items():
        if name in sums:
            sums[name] = [gpu_us * MS_PER_HOUR // length_ms for gpu_us in sums[name]]
    wanted = [name for name in sums if sums[name][1]]
    busiest = min(wanted, key=lambda name: (-sums[name][1], name), default=None)
    return Rhythm(
        tuple(HourRow(hour, *row) for hour, row in enumerate(of_day)),
        busiest,
        HourRow(int(busiest.partition("T")[2]), *sums[busiest]) if busiest is not None else None,
    )
