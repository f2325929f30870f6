"""Counts the GPUs in service in each quarter-hour of a window.

Of ten thousand GPUs nearly all are alike: they came with their rack, and their newest record ends at the last minute.
So a question costs what different GPUs there are, not how many; a commit carries the count forward by what it changed.
GPUs whose nodes were ever down, or that may be gone unseen, are few and kept one by one. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from accountant.core.claim_overlap import Span
from gputally.base.units import MS_PER_DAY

FOREVER = 2**62
UNLISTED_MS = MS_PER_DAY
"""A GPU without a record for so long, on a node that reports others, is gone."""


class Life(NamedTuple):
    """One GPU's time as capacity. end_ms is FOREVER while it is. home: the node of its newest record.
    nodes: where it stood, ascending and without holes from start_ms on. down: spans of its nodes being
    unusable, inside its life."""

    start_ms: int
    end_ms: int
    last_ms: int
    home: str
    nodes: tuple[tuple[int, str], ...]
    down: tuple[Span, ...]

    def node_at(self, at_ms: int) -> str:
        """The node at an instant; before its first record, the first one."""
        name = self.nodes[0][1]
        for since, node in self.nodes:
            if since <= at_ms:
                name = node
        return name


Alike = tuple[int, int, int]
"""(start_ms, end_ms, last_ms) of GPUs that were never down."""
LifeOf = Callable[[int], Life]


@dataclass(frozen=True, slots=True)
class GpuCensus:
    """alike: how many GPUs. apart: those told one by one, by id. until_ms: as long as no record ends here or later,
    none of `alike` can have gone unseen."""

    alike: Mapping[Alike, int]
    apart: Mapping[int, Life]
    until_ms: int

    @classmethod
    def of(cls, gpus: Iterable[int], life: LifeOf, newest_ms: int) -> GpuCensus:
        """newest_ms: end of the newest record of the fleet."""
        alike: Counter[Alike] = Counter()
        apart: dict[int, Life] = {}
        for gpu in gpus:
            mine = life(gpu)
            if _stands_apart(mine, newest_ms):
                apart[gpu] = mine
            else:
                alike[mine.start_ms, mine.end_ms, mine.last_ms] += 1
        return cls(alike, apart, _until(alike))

    def changed(
        self, gpus: Iterable[int], before_of: Mapping[int, Life], life: LifeOf, newest_ms: int
    ) -> GpuCensus | None:
        """After a commit that brought records of these GPUs. before_of: lives as they were. None where all have to be
        counted anew."""
        if newest_ms >= self.until_ms:
            return None
        alike, apart = dict(self.alike), dict(self.apart)
        unseen = [gpu for gpu, mine in apart.items() if _may_be_gone(mine, newest_ms)]
        for gpu in {*gpus, *unseen}:
            now, before = life(gpu), before_of.get(gpu)
            if apart.pop(gpu, None) is None and before is not None:
                key = before.start_ms, before.end_ms, before.last_ms
                left = alike[key] - 1
                if left:
                    alike[key] = left
                else:
                    del alike[key]
            if _stands_apart(now, newest_ms):
                apart[gpu] = now
            else:
                key = now.start_ms, now.end_ms, now.last_ms
                alike[key] = alike.get(key, 0) + 1
        return GpuCensus(alike, apart, _until(alike))

    def lives(self) -> Mapping[Span, int]:
        """How many GPUs were capacity from when to when."""
        found: Counter[Span] = Counter()
        for (start, end, _), count in self.alike.items():
            found[start, end] += count
        found.update((life.start_ms, life.end_ms) for life in self.apart.values())
        return found

    def down(self) -> Iterator[tuple[int, Span]]:
        """(id, span) of every GPU's down time, by id."""
        for gpu in sorted(self.apart):
            for span in self.apart[gpu].down:
                yield gpu, span

    def watermark(self, end_ms: int, min_coverage: float) -> int | None:
        """The latest instant, at most end_ms, up to which the records of at least `min_coverage` of the GPUs
        in service at end_ms reach; None where nothing is in service.

        Holes further back do not move it (they lower `coverage`): it says how old the news are."""
        reached: Counter[int] = Counter()
        for (start, end, last), count in self.alike.items():
            if start < end_ms <= end:
                reached[min(last, end_ms)] += count
        for life in self.apart.values():
            if life.start_ms < end_ms <= life.end_ms and not any(s < end_ms <= e for s, e in life.down):
                reached[min(life.last_ms, end_ms)] += 1
        needed = max(1, math.ceil(min_coverage * reached.total()))
        for last in sorted(reached, reverse=True):
            needed -= reached[last]
            if needed <= 0:
                return last
        return None


def _stands_apart(life: Life, newest_ms: int) -> bool:
    return bool(life.down) or _may_be_gone(life, newest_ms)


def _may_be_gone(life: Life, newest_ms: int) -> bool:
    """Whether records of others may show that it is unlisted."""
    return life.last_ms + UNLISTED_MS <= newest_ms and life.last_ms + UNLISTED_MS < life.end_ms


def _until(alike: Iterable[Alike]) -> int:
    return min((last + UNLISTED_MS for _, end, last in alike if last + UNLISTED_MS < end), default=FOREVER)
