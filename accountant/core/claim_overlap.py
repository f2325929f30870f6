"""Decides which of several overlapping claims to the same GPU keeps which time, and computes with sets of spans.

A claim is one set of rows (one GPU, one span) as received. Of overlapping claims, the one with the lowest
`TimeClaim.rank` keeps the time. The rank compares in this order:

1. Measured claims come before claims that an agent carried over a restart, and both before imported ones.
2. The older outbox comes first. The epoch of an outbox is a UUIDv7, so its text sorts by creation.
3. The lower sequence number comes first.
4. The lower name of the node comes first.

The result depends only on the set of claims, not on the order of arrival."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

Span = tuple[int, int]
"""[start_ms, end_ms)."""


@dataclass(frozen=True, slots=True, order=True)
class ClaimRank:
    """The precedence of a claim. Of overlapping claims, the one with the lowest rank keeps the time.

    origin: 0 measured, 1 carried over a restart, 2 imported.
    node: decides between outboxes with the same epoch."""

    origin: int
    epoch: str
    seq: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class TimeClaim:
    rank: ClaimRank
    start_ms: int
    end_ms: int


def resolve_overlaps(claims: Iterable[TimeClaim]) -> Mapping[ClaimRank, tuple[Span, ...]]:
    """The spans that each claim keeps, by its rank, ascending; () if it keeps nothing.

    The result for a claim depends only on the claims that overlap it. To resolve some claims, it is enough to pass them
    and all claims that overlap one of them."""
    kept: dict[ClaimRank, tuple[Span, ...]] = {}
    taken: list[Span] = []
    for claim in sorted(claims, key=lambda c: c.rank):
        span = (claim.start_ms, claim.end_ms)
        first = bisect_left(taken, claim.start_ms, key=itemgetter(1))
        behind = bisect_right(taken, claim.end_ms, lo=first, key=itemgetter(0))
        met = taken[first:behind]
        kept[claim.rank] = tuple(subtract(span, met))
        taken[first:behind] = union([*met, span])
    return kept


def subtract(span: Span, removed: Iterable[Span]) -> list[Span]:
    """`span` without the `removed` spans, which are sorted and disjoint."""
    start, end = span
    rest = []
    for begin, stop in removed:
        if stop <= start:
            continue
        if begin >= end:
            break
        if begin > start:
            rest.append((start, begin))
        start = max(start, stop)
    if start < end:
        rest.append((start, end))
    return rest


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint spans that cover the same time; empty spans are dropped."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Iterable[Span], right: Iterable[Span]) -> list[Span]:
    """The time in both lists; each is sorted and disjoint."""
    first, second = list(left), list(right)
    both = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return both


def overlaps(spans: Sequence[Span], start_ms: int, end_ms: int) -> bool:
    """Whether [start_ms, end_ms), which is not empty, overlaps one of the spans, which are sorted and disjoint."""
    at = bisect_right(spans, start_ms, key=itemgetter(1))
    return at < len(spans) and spans[at][0] < end_ms


def cut(span: Span, edges: Iterable[int]) -> list[Span]:
    """`span`, split at the `edges` (sorted) that lie inside it."""
    start, end = span
    pieces = []
    for edge in edges:
        if start < edge < end:
            pieces.append((start, edge))
            start = edge
    pieces.append((start, end))
    return pieces
