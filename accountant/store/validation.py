"""Whether a set of rows can be true. What cannot is quarantined with the reason, never repaired.

A set stands or falls whole: half a set would leave a GPU with holes or time twice. Pure; `now_ms`
is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from accountant.accounts import full_us
from agent.units import MS_PER_HOUR, MS_PER_MINUTE
from agent.wire import PodFacts, UsageInterval

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
LONGEST_NAME = 1024

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
    if not (
        0 <= row.capacity_us <= LARGEST
        and 0 <= row.allocated_us <= LARGEST
        and 0 <= (row.busy_us or 0) <= LARGEST
        and 0 <= (row.sm_active_us or 0) <= LARGEST
        and 0 <= (row.tensor_active_us or 0) <= LARGEST
        and 0 <= (row.memory_mib_s or 0) <= LARGEST
        and 0 <= (row.energy_uj or 0) <= LARGEST
    ):
        return _figure_fault(row)
    holder = row.holder
    if row.allocated_us > row.capacity_us:
        return Fault("over-allocated", f"row {row.seq}: {row.allocated_us} µs allocated of {row.capacity_us} µs")
    if holder is None and row.allocated_us > 0:
        return Fault("nobody-holds", f"row {row.seq}: {row.allocated_us} µs allocated to nobody")
    if holder is not None and holder.kind == "unattributed" and row.capacity_us > 0:
        return Fault("unattributed-capacity", f"row {row.seq}: unattributed busy time has no capacity of its own")
    named = 0 < len(row.gpu_uuid) <= LONGEST_NAME and len(row.gpu_model) <= LONGEST_NAME
    if holder is not None:
        names = holder.uid, holder.namespace, holder.name, holder.container
        # Names that are short together are short each.
        named = named and (len("".join(names)) <= LONGEST_NAME or max(map(len, names)) <= LONGEST_NAME)
    if not named:
        return Fault("bad-name", f"row {row.seq}: a name is missing or longer than {LONGEST_NAME} characters")
    if row.slice is None and row.sharing is None:
        return None
    small = [row.sharing.replicas] if row.sharing is not None else []
    if row.slice is not None:
        part = row.slice
        small += [part.gi, part.ci, part.compute, part.compute_of, part.memory_mib, part.memory_of_mib]
    if not all(0 <= number <= LARGEST_SMALL for number in small):
        return Fault("out-of-range", f"row {row.seq}: its slice or its sharing has an impossible size")
    return None


def _figure_fault(row: UsageInterval) -> Fault:
    """What is wrong with a row that has a figure below 0 or above LARGEST."""
    figures = (
        row.capacity_us, row.allocated_us, row.busy_us, row.sm_active_us, row.tensor_active_us,
        row.memory_mib_s, row.energy_uj,
    )  # fmt: skip
    figure = next(figure for figure in figures if figure is not None and not 0 <= figure <= LARGEST)
    return Fault("negative" if figure < 0 else "out-of-range", f"row {row.seq} has the figure {figure}")


def fact_fault(fact: PodFacts, now_ms: int) -> Fault | None:
    """A fact from the future would win over every later one."""
    if not 0 <= fact.observed_ms <= now_ms + SKEW_MS:
        return Fault("future-dated", f"observed {fact.observed_ms - now_ms} ms after the accountant's clock")
    if max(map(len, (fact.uid, fact.namespace, fact.name, fact.workload, fact.queue_ref))) > LONGEST_NAME:
        return Fault("bad-name", f"fact {fact.seq}: a name is longer than {LONGEST_NAME} characters")
    if not in_range(fact):
        return Fault("out-of-range", f"fact {fact.seq}: a time or its priority is no number that can be true")
    return None


def in_range(fact: PodFacts) -> bool:
    """Whether all of a fact's numbers fit where they are compared with those of others."""
    told = (fact.observed_ms, fact.created_ms, fact.scheduled_ms, fact.started_ms, fact.ended_ms, fact.priority)
    return all(number is None or abs(number) <= LARGEST for number in told)
