"""Says what no record of an agent may be: future-dated, impossible, out of range, or with a name that is none.

A set of rows is accepted or rejected as a whole, a fact by itself. What depends on other records (who owns a GPU, what
is stored already) is decided where they are stored (accountant.storage.write.batch_admission)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from accountant.core.gpu_time_accounts import full_us
from accountant.core.periods import utc
from agent.wire import Holder, PodFacts, Sharing, Slice, UsageInterval
from gputally.base.measures import REPORTED
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE
from gputally.base.untrusted_text import LONGEST_NAME, LONGEST_REFERENCE, is_name, unprintable

SKEW_MS = 5 * MS_PER_MINUTE
"""How far a node's clock may be ahead of the accountant's."""
MAX_INTERVAL_MS = MS_PER_HOUR
"""The longest span of a row. Agents close rows at least every quarter-hour, imports may use the full length."""
EPOCH_2020_MS = 1_577_836_800_000
"""2020-01-01T00:00:00Z. An earlier time shows that a clock was never set."""
LARGEST = 10**15
"""Largest plausible figure of a row. Sums of such figures stay far below 64 bits."""
LARGEST_SMALL = 2**31 - 1
"""Largest slice number, size in MiB and number of replicas."""

_UNNAMED = f"longer than {LONGEST_NAME} characters, or has control characters"


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason for which a record is rejected, as a stable identifier (`reason`) and as a message (`detail`).

    quota: the quota that the record exceeds; "" if it is rejected for another reason."""

    reason: str
    detail: str
    quota: str = ""


FIGURES = ("capacity_us", "allocated_us", "busy_us", *(measure.field for measure in REPORTED))
_figures_of = attrgetter(*FIGURES)


def is_unattributed(holder: Holder | None) -> bool:
    return holder is not None and holder.kind == "unattributed"


def names_of(holder: Holder) -> tuple[str, ...]:
    return holder.uid, holder.namespace, holder.name, holder.container


def are_names(texts: Sequence[str], longest: int) -> bool:
    """Return whether `is_name` holds for all texts, which are looked at together."""
    joined = "".join(texts)
    return is_name(joined, len(joined)) and max(map(len, texts)) <= longest


def named_slice(part: Slice | None) -> bool:
    return part is None or is_name(part.profile)


def small_sharing(sharing: Sharing | None) -> bool:
    return sharing is None or 0 <= sharing.replicas <= LARGEST_SMALL


def small_slice(part: Slice | None) -> bool:
    if part is None:
        return True
    sizes = (part.gi, part.ci, part.compute, part.compute_of, part.memory_mib, part.memory_of_mib)
    return all(0 <= number <= LARGEST_SMALL for number in sizes)


def record_fault(rows: Sequence[UsageInterval], now_ms: int) -> Rejection | None:
    """Return the first fault of a set, or None."""
    first = rows[0]
    found = _span_fault(first, now_ms)
    if found is not None:
        return found
    for row in rows:
        found = _row_fault(row)
        if found is not None:
            return found
    capacity, whole = sum(row.capacity_us for row in rows), full_us(first.end_ms - first.start_ms)
    if capacity > whole:
        return Rejection("over-capacity", f"the set has {capacity} µs of capacity in a span of {whole} µs")
    if capacity < whole and any(row.method != "carried" for row in rows):
        return Rejection("incomplete-set", f"the set has {capacity} µs of capacity in a span of {whole} µs")
    return None


def _span_fault(row: UsageInterval, now_ms: int) -> Rejection | None:
    if row.start_ms >= row.end_ms:
        return Rejection("impossible-span", f"[{row.start_ms}, {row.end_ms}) is empty or runs backwards")
    if row.end_ms > now_ms + SKEW_MS:
        return Rejection("future-dated", f"ends {row.end_ms - now_ms} ms after the accountant's clock")
    if row.start_ms < EPOCH_2020_MS:
        return Rejection("before-2020", f"starts at {utc(row.start_ms)}: the clock of the node was not set")
    if row.end_ms - row.start_ms > MAX_INTERVAL_MS:
        return Rejection("too-long", f"{row.end_ms - row.start_ms} ms, the longest allowed is {MAX_INTERVAL_MS} ms")
    return None


def _row_fault(row: UsageInterval) -> Rejection | None:
    for figure in _figures_of(row):
        if figure is not None and not 0 <= figure <= LARGEST:
            return Rejection("negative" if figure < 0 else "out-of-range", f"row {row.seq} has the figure {figure}")
    holder = row.holder
    if row.allocated_us > row.capacity_us:
        return Rejection("over-allocated", f"row {row.seq}: {row.allocated_us} µs allocated of {row.capacity_us} µs")
    if holder is None and row.allocated_us > 0:
        return Rejection("no-holder", f"row {row.seq}: {row.allocated_us} µs allocated without a holder")
    if is_unattributed(holder) and row.capacity_us > 0:
        return Rejection("unattributed-capacity", f"row {row.seq}: unattributed busy time has no capacity of its own")
    named = row.gpu_uuid != "" and is_name(row.gpu_uuid) and is_name(row.gpu_model) and named_slice(row.slice)
    if holder is not None:
        named = named and all(map(is_name, names_of(holder)))
    if not named:
        return Rejection("bad-name", f"row {row.seq}: a name is missing, {_UNNAMED}")
    if not (small_slice(row.slice) and small_sharing(row.sharing)):
        return Rejection("out-of-range", f"row {row.seq}: a number of its slice or its sharing is out of range")
    return None


def fact_fault(fact: PodFacts, now_ms: int) -> Rejection | None:
    """Return the fault of a fact, or None. A fact dated in the future is rejected, because it would override every
    later one."""
    if not 0 <= fact.observed_ms <= now_ms + SKEW_MS:
        return Rejection("future-dated", f"observed {fact.observed_ms - now_ms} ms after the accountant's clock")
    names = [fact.uid, fact.namespace, fact.name]
    for owner in fact.owners:
        names += (owner.kind, owner.name, owner.uid)
    references = fact.node, fact.workload, fact.queue_ref  # a job's node is a list of nodes
    if not (are_names(names, LONGEST_NAME) and are_names(references, LONGEST_REFERENCE)) or has_controls(fact):
        return Rejection("bad-name", f"fact {fact.seq}: a name or a label is {_UNNAMED}")
    if not in_range(fact):
        return Rejection("out-of-range", f"fact {fact.seq}: a time or the priority is out of range")
    return None


def has_controls(*facts: PodFacts) -> bool:
    """Return whether a label, a request or the reason of a stop of a fact has a control character other than a line end
    or a tab."""
    texts: list[str] = []
    for fact in facts:
        texts += (*fact.labels, *fact.labels.values(), *fact.requests, *fact.requests.values())
        if fact.stop is not None:
            texts += (fact.stop.how, fact.stop.by, fact.stop.reason, fact.stop.message)
    return bool(unprintable("".join(texts)))


def in_range(fact: PodFacts) -> bool:
    """Return whether all times of a fact, and its priority, fit into the columns in which they are compared."""
    numbers = (fact.observed_ms, fact.created_ms, fact.scheduled_ms, fact.started_ms, fact.ended_ms, fact.priority,
               fact.stop.at_ms if fact.stop is not None else None)  # fmt: skip
    return all(number is None or abs(number) <= LARGEST for number in numbers)
