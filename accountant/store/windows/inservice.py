"""When GPUs were capacity, and when they were down, inside pieces of time. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from accountant.overlap import Span
from accountant.store.fleet import Fleet
from accountant.store.spans import TaggedSpan
from accountant.store.windows.muster import Muster


@dataclass(frozen=True, slots=True)
class InService:
    """GPUs that were capacity, by piece. whole: all of it. parts: how many over which part of a piece."""

    whole: Sequence[int]
    parts: Mapping[int, Mapping[Span, int]]


def in_service(lives: Mapping[Span, int], pieces: Sequence[Span]) -> InService:
    """Of each piece; pieces ascend, follow each other without a hole and are not empty. lives: how many GPUs."""
    parts: dict[int, dict[Span, int]] = {}
    starts = [start for start, _ in pieces]
    changes = [0] * (len(pieces) + 1)
    for (start, end), count in lives.items():
        first, last = bisect_left(starts, start), bisect_right(starts, end) - 1
        if last >= 0 and pieces[last][1] <= end:
            last += 1
        if first < last:
            changes[first] += count
            changes[last] -= count
        for tag in {first - 1, last} if first <= last else {first - 1}:
            if 0 <= tag < len(pieces) and not first <= tag < last:
                low, high = max(start, pieces[tag][0]), min(end, pieces[tag][1])
                if low < high:
                    of_piece = parts.setdefault(tag, {})
                    of_piece[low, high] = of_piece.get((low, high), 0) + count
    return InService(list(accumulate(changes[:-1])), parts)


def lives_in(fleet: Fleet, pieces: Sequence[Span], gpus: Iterable[int]) -> list[dict[Span, int]]:
    """Per piece, how many of these GPUs were capacity over which part of it. Pieces ascend and do not overlap."""
    found: list[dict[Span, int]] = [{} for _ in pieces]
    alike = Counter((life.start_ms, life.end_ms) for life in map(fleet.life, gpus))
    starts = [start for start, _ in pieces]
    for span, count in alike.items():
        for tag, low, high in _inside(span, pieces, starts):
            found[tag][low, high] = found[tag].get((low, high), 0) + count
    return found


def gpus_at(fleet: Fleet, start_ms: int, end_ms: int) -> dict[tuple[str, str], int]:
    """By cluster and node, how many GPUs stood there as capacity for a part of [start_ms, end_ms)."""
    found: Counter[tuple[str, str]] = Counter()
    for gpu in fleet.tenures:
        life = fleet.life(gpu)
        ends = [since for since, _ in life.nodes[1:]] + [life.end_ms]
        there = {
            node
            for (since, node), until in zip(life.nodes, ends, strict=True)
            if max(since, start_ms) < min(until, end_ms)
        }
        found.update((fleet.gpus[gpu].cluster, node) for node in there)
    return dict(found)


def down_in(muster: Muster, pieces: Sequence[Span]) -> list[TaggedSpan]:
    """The down time of each GPU in each piece, tagged with the piece. Pieces ascend and do not overlap."""
    starts = [start for start, _ in pieces]
    return [
        TaggedSpan(tag, low, high, gpu)
        for gpu, span in muster.down()
        for tag, low, high in _inside(span, pieces, starts)
    ]


def _inside(span: Span, pieces: Sequence[Span], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(tag, start_ms, end_ms) of what each piece has of the span."""
    start, end = span
    for tag in range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end)):
        low, high = max(start, pieces[tag][0]), min(end, pieces[tag][1])
        if low < high:
            yield tag, low, high
