"""Splits each microsecond of a GPU into accounts (busy, idle, unknown, unheld, down), cuts spans out of rows, and adds
rows up.

`split` computes the accounts of one row, and `part` cuts a span out of a set (the rows of one GPU with the same span).
Both conserve time to the microsecond:

- The accounts of a row add up to its capacity.
- The parts of a set over any partition of its span add up to the set.
- If the rows of a set cover the whole GPU, a part of it adds up to the length of the part.

Accounts are integers. Here `down` is only the time of a lost GPU. accountant.storage.gpu_lifetimes adds the time in
which a GPU's node was down."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accountant.core.claim_overlap import intersect, union
from agent.wire import Gap, UsageInterval
from gputally.base.measures import REPORTED
from gputally.base.units import US_PER_MS

_MEMORY, _ENERGY, *_LATER = REPORTED
CELLS: tuple[str, ...] = (
    "busy_us", "idle_us", "unknown_us", "unheld_us", "down_us", "borrowed_us", "unattributed_us",
    _MEMORY.field, _ENERGY.field, _ENERGY.unknown_column, _MEMORY.unknown_column,
    *(column for measure in _LATER for column in (measure.field, measure.unknown_column)),
)  # fmt: skip
"""The names of the figures, in their order in files, rows and sums. Ledgers have the first ones in this order, so new
ones come last."""
ACCOUNT_CELLS = 5
"""How many of CELLS, from the first, are accounts."""


_tuple_of: Any = namedtuple  # mypy knows no fields from a table


class AccountVector(_tuple_of("_Vector", CELLS, defaults=[0] * len(CELLS))):  # type: ignore[misc]
    """The figures of one row, or a sum of rows. The first five are accounts in GPU-microseconds; every microsecond is
    in exactly one of them. The others, and the measures with their unknown time, are not part of that sum.

    unheld_us: time without a holder (`unallocated`, or `down` if its node was down).
    borrowed_us: busy time beyond the row's own allocation.
    unattributed_us: busy time without a known owner."""

    __slots__ = ()


def split(row: UsageInterval) -> AccountVector:
    """The accounts of one valid row.

    The capacity of a lost GPU is `down`. The allocated time of a holder is busy, idle or unknown, and all other
    capacity is unheld. Busy time without a known owner is in no account.

    Unknown is the share of the gaps in the allocated time, or all of it if the busy time is not known. Busy is the
    measured busy time, but at most the allocated time that is not unknown.

    accountant.storage.write.record_columns.cells has the same rule for the columns of many rows;
    tests/properties/test_columns.py holds both equal."""
    memos = {measure.field: getattr(row, measure.field) or 0 for measure in REPORTED}
    if row.health == "lost":
        return AccountVector(down_us=row.capacity_us, **memos)
    unread = [measure for measure in REPORTED if getattr(row, measure.field) is None]
    memos |= {measure.unknown_column: row.capacity_us for measure in unread if measure.known == "in service"}
    busy = row.busy_us or 0
    if row.holder is None:
        return AccountVector(unheld_us=row.capacity_us, **memos)
    if row.holder.kind == "unattributed":
        return AccountVector(unattributed_us=busy, **memos)
    allocated = row.allocated_us
    memos |= {measure.unknown_column: allocated for measure in unread if measure.known == "held"}
    if row.busy_us is None:
        unknown = allocated
    elif row.gaps:
        unknown = allocated * _gap_ms(row.gaps, row.start_ms, row.end_ms) // (row.end_ms - row.start_ms)
    else:
        unknown = 0
    booked = min(busy, allocated - unknown)
    return AccountVector(
        busy_us=booked,
        idle_us=allocated - unknown - booked,
        unknown_us=unknown,
        unheld_us=row.capacity_us - allocated,
        borrowed_us=busy - booked,
        **memos,
    )


def _gap_ms(gaps: Iterable[Gap], start_ms: int, end_ms: int) -> int:
    """Length of the union of the gaps inside [start_ms, end_ms)."""
    inside = intersect(union((gap.start_ms, gap.end_ms) for gap in gaps), [(start_ms, end_ms)])
    return sum(end - start for start, end in inside)


def part(rows: Sequence[AccountVector], span_ms: int, start_ms: int, end_ms: int) -> list[AccountVector]:
    """Cuts [start_ms, end_ms) out of a set whose rows are spread evenly over [0, span_ms).

    Each figure is the difference of a cumulative, non-decreasing integer function of time, so parts are never negative
    and add up over any partition. Up to an instant, the capacity is divided among the accounts one after the other. An
    account with value x gets floor(x*r/R). R is the part of the whole set's capacity that is not divided yet, and r the
    part of the capacity up to the instant that is not divided yet. The accounts of a part therefore add up to the set's
    capacity in it, which for a full set is exactly its length. The other figures are divided independently.

    Largest remainder (`apportionment.apportion`) would give the right sum for one part, but several parts would not
    add up (the Alabama paradox). Requires 0 <= start_ms <= end_ms <= span_ms."""
    if not 0 <= start_ms <= end_ms <= span_ms or span_ms <= 0:
        raise ValueError(f"part needs 0 <= start <= end <= span, got [{start_ms}, {end_ms}) of {span_ms}")
    if start_ms == 0 and end_ms == span_ms:
        return list(rows)
    low = _until(rows, span_ms, start_ms)
    high = _until(rows, span_ms, end_ms)
    return [
        AccountVector(*(b - a for a, b in zip(before, after, strict=True)))
        for before, after in zip(low, high, strict=True)
    ]


def _until(rows: Sequence[AccountVector], span_ms: int, at_ms: int) -> list[list[int]]:
    """The figures of the rows in [0, at_ms)."""
    undivided = sum(sum(row[:ACCOUNT_CELLS]) for row in rows)
    undivided_until = undivided * at_ms // span_ms
    vectors = []
    for row in rows:
        accounts = []
        for value in row[:ACCOUNT_CELLS]:
            until = value * undivided_until // undivided if undivided else 0
            undivided -= value
            undivided_until -= until
            accounts.append(until)
        vectors.append([*accounts, *(value * at_ms // span_ms for value in row[ACCOUNT_CELLS:])])
    return vectors


def add(cells: Iterable[AccountVector]) -> AccountVector:
    """The sum of all vectors; zero if there are none."""
    return AccountVector(*map(sum, zip(*cells, strict=True)))


def full_us(span_ms: int) -> int:
    """Capacity of one GPU over a span of milliseconds."""
    return span_ms * US_PER_MS


Int64Array = npt.NDArray[np.int64]


def sum_by_key(keys: Int64Array, values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Adds up the rows of `values` that have equal rows of `keys`; returns the distinct keys, ascending, and the sums
    of each."""
    if not len(keys):
        return keys, values
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1))))
    sums: Int64Array = np.add.reduceat(values[order], first, axis=0)
    return ordered[first], sums
