"""Whether a set of rows can be true. What cannot is quarantined with the reason, never repaired.

A set stands or falls whole: half a set would leave a GPU with holes or time twice. Nearly all sets are in order, and
`beyond_doubt` tells so for a whole group at once; `fault` judges the others one by one, and alone says what is wrong.
Pure; `now_ms` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from accountant.accounts import full_us
from accountant.store.writing.incoming import Distinct, Incoming, K, Truth
from agent.identifiers import LONGEST_NAME, is_name, unprintable
from agent.units import MS_PER_HOUR, MS_PER_MINUTE, US_PER_MS
from agent.wire import Holder, PodFacts, Sharing, Slice, UsageInterval

SKEW_MS = 5 * MS_PER_MINUTE
"""How far ahead of the accountant's clock a node's may be."""
MAX_INTERVAL_MS = MS_PER_HOUR
"""Longest span of a row. Agents close at least every quarter-hour; imports may be coarser."""
EPOCH_2020_MS = 1_577_836_800_000
"""2020-01-01T00:00:00Z: a clock before it was never set."""
LARGEST = 10**15
"""No honest figure of one row is above it, and sums of rows stay far inside 64 bits."""
LARGEST_SMALL = 2**31 - 1
"""Of slice numbers, sizes in MiB and replicas."""

_UNNAMED = f"longer than {LONGEST_NAME} characters, or has control characters"

SetKey = tuple[str, int, int]
"""gpu_uuid, start_ms, end_ms."""


@dataclass(frozen=True, slots=True)
class Fault:
    """reason: a stable slug, fit for a label. detail: for people."""

    reason: str
    detail: str


def sets(rows: Iterable[UsageInterval]) -> list[tuple[UsageInterval, ...]]:
    """The rows of one GPU with equal span together, in the order of their lowest number."""
    grouped: dict[SetKey, list[UsageInterval]] = {}
    for row in sorted(rows, key=attrgetter("seq")):
        grouped.setdefault((row.gpu_uuid, row.start_ms, row.end_ms), []).append(row)
    return [tuple(group) for group in grouped.values()]


_FIGURES = (
    "capacity_us", "allocated_us", "busy_us", "sm_active_us", "tensor_active_us", "memory_mib_s", "energy_uj",
)  # fmt: skip
_figures_of = attrgetter(*_FIGURES)


def beyond_doubt(incoming: Incoming, now_ms: int) -> Truth:
    """By set: whether `fault` is None for certain. Errs only to the other side."""
    sets = incoming.sets
    span = sets.end_ms - sets.start_ms
    fine = (sets.start_ms >= EPOCH_2020_MS) & (sets.end_ms <= now_ms + SKEW_MS) & (span > 0) & (span <= MAX_INTERVAL_MS)
    figures = [incoming.numbers(name).value for name in _FIGURES]
    capacity, allocated = figures[:2]
    fine_rows = _each(incoming.gpu, lambda gpu: gpu[1] != "" and is_name(gpu[1]))
    fine_rows &= _each(incoming.names("gpu_model"), is_name)
    fine_rows &= _each(incoming.device, lambda device: _small_slice(device[1][1]) and _named_slice(device[1][1]))
    fine_rows &= _each(incoming.sharing, _small_sharing)
    fine_rows &= _each(incoming.holder, lambda held: held[1] is None or all(map(is_name, _names(held[1]))))
    fine_rows &= np.minimum.reduce(figures) >= 0
    fine_rows &= np.maximum.reduce(figures) <= LARGEST
    fine_rows &= (allocated <= capacity) & ((allocated == 0) | _each(incoming.holder, lambda held: held[1] is not None))
    fine_rows &= (capacity == 0) | ~_each(incoming.holder, lambda held: _is_unattributed(held[1]))
    # Only figures that are fine are added up, so that no sum leaves 64 bits.
    in_order = fine_rows[sets.places]
    whole = np.add.reduceat(np.where(in_order, capacity[sets.places], 0), sets.first) == span * US_PER_MS
    found: Truth = fine & whole & np.logical_and.reduceat(in_order, sets.first)
    return found


def _each(column: Distinct[K], holds: Callable[[K], bool]) -> Truth:
    """By row, whether it holds of its value."""
    found: Truth = np.fromiter(map(holds, column.values), np.bool_, len(column.values))[column.of_row]
    return found


def _is_unattributed(holder: Holder | None) -> bool:
    return holder is not None and holder.kind == "unattributed"


def _names(holder: Holder) -> tuple[str, ...]:
    return holder.uid, holder.namespace, holder.name, holder.container


def _names_in(fact: PodFacts) -> Iterator[str]:
    yield from (fact.uid, fact.namespace, fact.name, fact.node, fact.workload, fact.queue_ref)
    for owner in fact.owners:
        yield from (owner.kind, owner.name, owner.uid)


def _named_slice(part: Slice | None) -> bool:
    return part is None or is_name(part.profile)


def _small_sharing(sharing: Sharing | None) -> bool:
    return sharing is None or 0 <= sharing.replicas <= LARGEST_SMALL


def _small_slice(part: Slice | None) -> bool:
    if part is None:
        return True
    sizes = (part.gi, part.ci, part.compute, part.compute_of, part.memory_mib, part.memory_of_mib)
    return all(0 <= number <= LARGEST_SMALL for number in sizes)


def fault(rows: Sequence[UsageInterval], now_ms: int) -> Fault | None:
    """The first thing wrong with a set, or None."""
    first = rows[0]
    start, end = first.start_ms, first.end_ms
    if not (EPOCH_2020_MS <= start < end <= now_ms + SKEW_MS and end - start <= MAX_INTERVAL_MS):
        return _span_fault(first, now_ms)
    capacity = 0
    for row in rows:
        found = _row_fault(row)
        if found is not None:
            return found
        capacity += row.capacity_us
    whole = full_us(end - start)
    if capacity > whole:
        return Fault("over-capacity", f"the set has {capacity} µs of capacity in a span of {whole} µs")
    if capacity < whole and any(row.method != "carried" for row in rows):
        return Fault("incomplete-set", f"the set has {capacity} µs of capacity in a span of {whole} µs")
    return None


def _span_fault(row: UsageInterval, now_ms: int) -> Fault | None:
    if row.start_ms >= row.end_ms:
        return Fault("impossible-span", f"[{row.start_ms}, {row.end_ms}) is empty or runs backwards")
    if row.end_ms > now_ms + SKEW_MS:
        return Fault("future-dated", f"ends {row.end_ms - now_ms} ms after the accountant's clock")
    if row.start_ms < EPOCH_2020_MS:
        return Fault("before-2020", f"starts at {row.start_ms}: the node's clock was not set")
    if row.end_ms - row.start_ms > MAX_INTERVAL_MS:
        return Fault("too-long", f"{row.end_ms - row.start_ms} ms, longest is {MAX_INTERVAL_MS} ms")
    return None


def _row_fault(row: UsageInterval) -> Fault | None:
    for figure in _figures_of(row):
        if figure is not None and not 0 <= figure <= LARGEST:
            return Fault("negative" if figure < 0 else "out-of-range", f"row {row.seq} has the figure {figure}")
    holder = row.holder
    if row.allocated_us > row.capacity_us:
        return Fault("over-allocated", f"row {row.seq}: {row.allocated_us} µs allocated of {row.capacity_us} µs")
    if holder is None and row.allocated_us > 0:
        return Fault("nobody-holds", f"row {row.seq}: {row.allocated_us} µs allocated to nobody")
    if _is_unattributed(holder) and row.capacity_us > 0:
        return Fault("unattributed-capacity", f"row {row.seq}: unattributed busy time has no capacity of its own")
    named = row.gpu_uuid != "" and is_name(row.gpu_uuid) and is_name(row.gpu_model) and _named_slice(row.slice)
    if holder is not None:
        named = named and all(map(is_name, _names(holder)))
    if not named:
        return Fault("bad-name", f"row {row.seq}: a name is missing, {_UNNAMED}")
    if not (_small_slice(row.slice) and _small_sharing(row.sharing)):
        return Fault("out-of-range", f"row {row.seq}: its slice or its sharing has an impossible size")
    return None


def fact_fault(fact: PodFacts, now_ms: int) -> Fault | None:
    """A fact from the future would win over every later one."""
    if not 0 <= fact.observed_ms <= now_ms + SKEW_MS:
        return Fault("future-dated", f"observed {fact.observed_ms - now_ms} ms after the accountant's clock")
    if not all(map(is_name, _names_in(fact))) or unprintable([fact.labels, fact.requests]):
        return Fault("bad-name", f"fact {fact.seq}: a name is {_UNNAMED}")
    if not in_range(fact):
        return Fault("out-of-range", f"fact {fact.seq}: a time or its priority is no number that can be true")
    return None


def in_range(fact: PodFacts) -> bool:
    """Whether all of a fact's numbers fit where they are compared with those of others."""
    told = (fact.observed_ms, fact.created_ms, fact.scheduled_ms, fact.started_ms, fact.ended_ms, fact.priority)
    return all(number is None or abs(number) <= LARGEST for number in told)
