"""Splits a span into whole days, hours and quarter-hours and the shorter parts at its ends.

Queries read whole days, hours and quarter-hours from the sums of that size if they exist, and the rest from the rows.
This module computes the parts and reads nothing. Spans are [start_ms, end_ms)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from accountant.core.periods import next_quarter
from gputally.base.units import BUCKET_MS, MS_PER_HOUR

EVERY_GPU = 0
"""Value of a TaggedSpan's gpu that means all GPUs; ids start at 1."""


@dataclass(frozen=True, slots=True)
class TaggedSpan:
    """A queried span of one GPU or of all; its tag is returned with the result."""

    tag: int
    start_ms: int
    end_ms: int
    gpu: int = EVERY_GPU


Bucket = tuple[int, int, int]
"""(tag, gpu, start_ms) of a whole day, hour or quarter-hour."""
_NO_DAY = (2**62, 2**62)


@dataclass(slots=True)
class SpanPlan:
    """The parts of a query's spans by the way in which they are read.

    days: days with sums.
    hours, quarters: whole hours and quarter-hours with sums.
    raw_hours, raw_quarters: whole hours and quarter-hours of hours without sums.
    edges: spans inside one quarter-hour."""

    days: list[Bucket] = field(default_factory=list)
    hours: list[Bucket] = field(default_factory=list)
    quarters: list[Bucket] = field(default_factory=list)
    raw_hours: list[Bucket] = field(default_factory=list)
    raw_quarters: list[Bucket] = field(default_factory=list)
    edges: list[TaggedSpan] = field(default_factory=list)


def plan_spans(
    spans: Iterable[TaggedSpan], unfolded: Collection[int], kept: Sequence[tuple[int, int]] = ()
) -> SpanPlan:
    """Split each span into days with sums, whole hours, whole quarter-hours, and shorter parts at both ends.

    unfolded: starts of hours without sums.
    kept: days with sums, ascending."""
    plan = SpanPlan()
    starts = [start for start, _ in kept]
    for span in spans:
        at = span.start_ms
        following = bisect_left(starts, at)
        while at < span.end_ms:
            while following < len(starts) and starts[following] < at:
                following += 1
            day = kept[following] if following < len(starts) else _NO_DAY
            if day[0] == at and day[1] <= span.end_ms:
                plan.days.append((span.tag, span.gpu, at))
                at = day[1]
            # A day may begin inside an hour.
            elif at % MS_PER_HOUR == 0 and at + MS_PER_HOUR <= span.end_ms and not at < day[0] < at + MS_PER_HOUR:
                (plan.raw_hours if at in unfolded else plan.hours).append((span.tag, span.gpu, at))
                at += MS_PER_HOUR
            elif at % BUCKET_MS == 0 and at + BUCKET_MS <= span.end_ms:
                raw = at - at % MS_PER_HOUR in unfolded
                (plan.raw_quarters if raw else plan.quarters).append((span.tag, span.gpu, at))
                at += BUCKET_MS
            else:
                end = min(span.end_ms, next_quarter(at))
                plan.edges.append(TaggedSpan(span.tag, at, end, span.gpu))
                at = end
    return plan


S = TypeVar("S", bound=TaggedSpan)


def near(spans: Iterable[S], most: int = 4) -> list[list[S]]:
    """Group spans that are close together, so that each group covers a short range of time. Returns one group if there
    would be more than `most`."""
    ordered = sorted(spans, key=lambda span: span.start_ms)
    groups: list[list[S]] = []
    for span in ordered:
        if groups and span.start_ms - groups[-1][-1].start_ms <= MS_PER_HOUR:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups if len(groups) <= most else [ordered]
