"""Records which spans of time each commit changed, so that cached results of other spans stay valid.

A cached answer is stored with its mark, and compared with the current mark: an equal mark says that nothing was
committed that could change it. A span that is over keeps its mark however much comes in after it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from accountant.storage.query.window_gpu_census import GpuCensus
from gputally.base.units import MS_PER_DAY

Mark = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """days: the commit that last changed rows of a day (of UTC, by number). onward: the commit that last told
    something about all time from a day on."""

    days: Mapping[int, int] = field(default_factory=dict)
    onward: Mapping[int, int] = field(default_factory=dict)

    def with_rows(self, instants: Iterable[int], version: int) -> Changes:
        """Rows of these instants changed."""
        touched = {at // MS_PER_DAY for at in instants}
        return Changes({**self.days, **dict.fromkeys(touched, version)}, self.onward) if touched else self

    def since(self, at_ms: int, version: int) -> Changes:
        """Something is told about all time from this instant on; 0: about everything."""
        day = at_ms // MS_PER_DAY
        later = {other: known for other, known in self.onward.items() if other < day}
        return Changes(self.days, {**later, day: version})

    def mark(self, start_ms: int, end_ms: int, census: GpuCensus) -> Mark:
        """Of [start_ms, end_ms). census: how long each GPU was capacity, which records of others may tell."""
        first, last = start_ms // MS_PER_DAY, max(start_ms, end_ms - 1) // MS_PER_DAY
        rows = max((version for day, version in self.days.items() if first <= day <= last), default=0)
        told = max((version for day, version in self.onward.items() if day <= last), default=0)

        def inside(span: tuple[int, int]) -> tuple[int, int]:
            return max(start_ms, span[0]), min(end_ms, span[1])

        alike: dict[tuple[int, int], int] = {}
        for (start, end, _), count in census.alike.items():
            alike[inside((start, end))] = alike.get(inside((start, end)), 0) + count
        apart = sorted((gpu, *inside((life.start_ms, life.end_ms))) for gpu, life in census.apart.items())
        return rows, told, tuple(sorted(alike.items())), tuple(apart)
