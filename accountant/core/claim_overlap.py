"""Decides which of several overlapping claims to the same GPU keeps which time.

A claim is one set as received. Of overlapping claims the one that comes first by `Claim.rank` keeps the time: what
an agent measured before what it carried over a restart, both before what was imported from elsewhere; then the older
outbox (epoch is a UUIDv7, so its text sorts by creation), then the lower sequence number. The result is a function of
the set of claims alone: the order of arrival cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Span = tuple[int, int]
"""[start_ms, end_ms)."""


@dataclass(frozen=True, slots=True, order=True)
class ClaimRank:
    """Precedence, lowest first. remove: how far from a measurement, 0 measured, 1 carried, 2 imported. node breaks
    ties between outboxes that claim one epoch."""

    remove: int
    epoch: str
    seq: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    rank: ClaimRank
    start_ms: int
    end_ms: int


def settle(claims: Iterable[Claim]) -> Mapping[ClaimRank, tuple[Span, ...]]:
    """The spans each claim keeps, ascending; () where it is displaced whole.

    What a claim keeps depends only on the claims that overlap it, so a caller may settle a
    neighbourhood: every claim of interest together with all that overlap one of them."""
    kept: dict[ClaimRank, tuple[Span, ...]] = {}
    taken: list[Span] = []
    for claim in sorted(claims, key=lambda c: c.rank):
        kept[claim.rank] = tuple(subtract((claim.start_ms, claim.end_ms), taken))
        taken = union([*taken, (claim.start_ms, claim.end_ms)])
    return kept


def subtract(span: Span, taken: Iterable[Span]) -> list[Span]:
    """`span` without the `taken` ones, which are sorted and disjoint."""
    start, end = span
    rest = []
    for begin, stop in taken:
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
    """Sorted, disjoint spans that cover the same time; empty ones vanish."""
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
    """The time both have; each sorted and disjoint."""
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


def cut(span: Span, edges: Iterable[int]) -> list[Span]:
    """`span` in pieces between the `edges` (sorted) that fall inside it."""
    start, end = span
    pieces = []
    for edge in edges:
        if start < edge < end:
            pieces.append((start, edge))
            start = edge
    pieces.append((start, end))
    return pieces
