"""Decides which records of a batch are new, replayed, missing or invalid.

The records of an outbox are numbered. Its mark is the highest number up to which all records are stored. `admit`
compares a batch with the mark:

- A batch that starts at or below the next number is accepted. Records that are already stored are dropped, and
  those that differ from the stored ones are quarantined.
- A batch that starts above it is refused, because records in between are missing and may still arrive.
- If the agent says that it has no older records, the batch is accepted and the numbers in between are recorded as
  lost.

`GroupCommit` collects batches that are committed together. After the last batch, `sort_out` checks the rows of all
batches, and `interval_writer` writes them. Until the commit, marks advance only in the group, so a failed transaction
leaves nothing behind.

A set is the rows of one GPU with equal span. It is accepted or rejected as a whole, because a partial set would leave a
GPU with missing or double time. Nearly all sets are valid, and `beyond_doubt` confirms this for a whole group at once.
`record_fault` (accountant.core.record_faults) checks the others individually and finds the fault."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, itemgetter

import msgspec
import numpy as np
from msgspec import structs

from accountant.core.errors import BadBatch, SequenceGap
from accountant.core.import_epochs import is_import
from accountant.core.record_faults import (
    EPOCH_2020_MS,
    FIGURES,
    LARGEST,
    MAX_INTERVAL_MS,
    SKEW_MS,
    Rejection,
    are_names,
    fact_fault,
    is_unattributed,
    named_slice,
    names_of,
    record_fault,
    small_sharing,
    small_slice,
)
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.write import record_columns
from accountant.storage.write.gpu_and_pod_ownership import GpuClaims, PodClaims
from accountant.storage.write.name_ids import PodKey
from accountant.storage.write.record_columns import (
    DistinctColumn,
    Incoming,
    K,
    Section,
    Stream,
    Truth,
    content,
    digest,
)
from accountant.storage.write.sender_quotas import (
    GAP_BYTES,
    HOLE_BYTES,
    OVER_QUOTA,
    ROW_BYTES,
    QuotaClaims,
    sender_of,
)
from agent.wire import Ack, Batch, Holder, PodFacts, Skipped, UsageInterval
from gputally.base.units import US_PER_MS
from gputally.base.untrusted_text import LONGEST_EPOCH, LONGEST_NAME, is_epoch, is_name

LARGEST_SEQ = 2**53


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """The records of a batch, compared with the mark of its outbox.

    fresh_intervals, fresh_facts, fresh_skipped: records above the mark.
    replayed: records at or below the mark.
    lost: the first and last number of records that will never arrive.
    durable_seq: the mark after this batch."""

    fresh_intervals: tuple[UsageInterval, ...]
    fresh_facts: tuple[PodFacts, ...]
    fresh_skipped: tuple[Skipped, ...]
    replayed: tuple[UsageInterval | PodFacts, ...]
    lost: tuple[int, int] | None
    durable_seq: int


def admit(batch: Batch, durable_seq: int) -> BatchRecords | None:
    """Compare a batch with its outbox's mark, `durable_seq`. Returns None if records between the mark and the batch are
    missing and may still arrive. Raises BadBatch if a name is invalid, or the records are not numbered from first_seq
    on without a gap."""
    count = _numbering(batch)
    lost = None
    if batch.first_seq > durable_seq + 1:
        if batch.first_seq != batch.oldest_seq:
            return None
        lost = (durable_seq + 1, batch.first_seq - 1)
        durable_seq = batch.first_seq - 1
    last = batch.first_seq + count - 1
    return BatchRecords(
        fresh_intervals=tuple([row for row in batch.intervals if row.seq > durable_seq]),
        fresh_facts=tuple([fact for fact in batch.facts if fact.seq > durable_seq]),
        fresh_skipped=tuple([skip for skip in batch.skipped if skip.seq > durable_seq]),
        replayed=(
            *[row for row in batch.intervals if row.seq <= durable_seq],
            *[fact for fact in batch.facts if fact.seq <= durable_seq],
        ),
        lost=lost,
        durable_seq=max(last, durable_seq),
    )


def _numbering(batch: Batch) -> int:
    """Return the number of records in the batch. Raises BadBatch for an invalid name or numbering."""
    for name, text in (("cluster", batch.cluster), ("node", batch.node)):
        if not text or not is_name(text):
            raise BadBatch(
                "invalid-batch", f"{name} needs 1 to {LONGEST_NAME} characters on one line, without control characters"
            )
    if not is_epoch(batch.epoch):
        raise BadBatch(
            "invalid-batch", f"epoch needs 1 to {LONGEST_EPOCH} letters, digits, '.', '_', ':' and '-', as a UUID has"
        )
    numbers = sorted(
        [row.seq for row in batch.intervals] + [fact.seq for fact in batch.facts] + [skip.seq for skip in batch.skipped]
    )
    if not 1 <= batch.first_seq <= LARGEST_SEQ or batch.oldest_seq > batch.first_seq:
        raise BadBatch(
            "invalid-batch",
            f"first_seq is {batch.first_seq} and oldest_seq {batch.oldest_seq}: first_seq must be from 1 to 2^53, and "
            "oldest_seq not above it",
        )
    if len(set(numbers)) != len(numbers):
        raise BadBatch("invalid-batch", "a record number occurs twice in the batch")
    if numbers and (numbers[0] != batch.first_seq or numbers[-1] - numbers[0] + 1 != len(numbers)):
        raise BadBatch(
            "invalid-batch", f"the records must be numbered from first_seq {batch.first_seq} on without a gap"
        )
    return len(numbers)


def stored_digests(cursor: Cursor, stream: Stream, seqs: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """Return the digests of everything stored or quarantined under each number. Numbers without any are left out."""
    ids = cursor.run("SELECT id FROM stream WHERE cluster = ? AND node = ? AND epoch = ?", stream)
    if not ids:
        return {}
    found: dict[int, set[int]] = defaultdict(set)
    incoming = record_columns.column_table(record_columns.NUMBER, [(ids[0][0], seq) for seq in seqs])
    for seq, mark in cursor.rows("stored_digests", {"low": min(seqs), "high": max(seqs)}, incoming=incoming):
        found[seq].add(mark)
    return {seq: frozenset(digests) for seq, digests in found.items()}


SET_ASIDE: frozenset[int] = frozenset({-1})
"""Stands for the digests of a record of which nothing was kept, because its sender had used up its bytes."""


def over_quota_numbers(cursor: Cursor, stream: Stream, seqs: Collection[int]) -> set[int]:
    """Return those numbers of which nothing was kept because of the quota of bytes."""
    if not seqs:
        return set()
    holes = cursor.run(
        "SELECT h.first_seq, h.last_seq FROM hole h JOIN stream s ON s.id = h.stream "
        "WHERE s.cluster = ? AND s.node = ? AND s.epoch = ? AND h.reason = ? AND h.last_seq >= ? AND h.first_seq <= ? "
        "ORDER BY h.first_seq",
        [*stream, OVER_QUOTA, min(seqs), max(seqs)],
    )
    return {seq for seq in seqs if _is_inside(seq, holes)}


def _is_inside(seq: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether the number is in one of the spans, which ascend and do not overlap. A sender can leave many."""
    at = bisect_right(spans, seq, key=itemgetter(0)) - 1
    return at >= 0 and seq <= spans[at][1]


SetKey = tuple[str, int, int]
"""gpu_uuid, start_ms, end_ms."""


def sets(rows: Iterable[UsageInterval]) -> list[tuple[UsageInterval, ...]]:
    """Group rows of one GPU with equal span, in the order of their lowest number."""
    grouped: dict[SetKey, list[UsageInterval]] = {}
    for row in sorted(rows, key=attrgetter("seq")):
        grouped.setdefault((row.gpu_uuid, row.start_ms, row.end_ms), []).append(row)
    return [tuple(group) for group in grouped.values()]


def beyond_doubt(incoming: Incoming, now_ms: int) -> Truth:
    """Return for each set whether it is certainly valid. `record_fault` must check the other sets; it may find no fault
    in them."""
    sets = incoming.sets
    span = sets.end_ms - sets.start_ms
    fine = (sets.start_ms >= EPOCH_2020_MS) & (sets.end_ms <= now_ms + SKEW_MS) & (span > 0) & (span <= MAX_INTERVAL_MS)
    figures = [incoming.numbers(name).value for name in FIGURES]
    capacity, allocated = figures[:2]
    fine_rows = _each(incoming.gpu, lambda gpu: gpu[1] != "" and is_name(gpu[1]))
    fine_rows &= _each(incoming.names("gpu_model"), is_name)
    fine_rows &= _each(incoming.device, lambda device: small_slice(device[1][1]) and named_slice(device[1][1]))
    fine_rows &= _each(incoming.sharing, small_sharing)
    fine_rows &= _each(incoming.holder, lambda held: held[1] is None or are_names(names_of(held[1]), LONGEST_NAME))
    fine_rows &= np.minimum.reduce(figures) >= 0
    fine_rows &= np.maximum.reduce(figures) <= LARGEST
    fine_rows &= (allocated <= capacity) & ((allocated == 0) | _each(incoming.holder, lambda held: held[1] is not None))
    fine_rows &= (capacity == 0) | ~_each(incoming.holder, lambda held: is_unattributed(held[1]))
    # Only valid figures are summed, so that no sum exceeds 64 bits.
    in_order = fine_rows[sets.places]
    whole = np.add.reduceat(np.where(in_order, capacity[sets.places], 0), sets.first) == span * US_PER_MS
    found: Truth = fine & whole & np.logical_and.reduceat(in_order, sets.first)
    return found


def _each(column: DistinctColumn[K], holds: Callable[[K], bool]) -> Truth:
    """Return for each row whether the condition holds for its value."""
    found: Truth = np.fromiter(map(holds, column.values), np.bool_, len(column.values))[column.of_row]
    return found


Stored = Callable[[Stream, list[int]], Mapping[int, frozenset[int]]]
"""Returns the digests stored or quarantined under numbers of an outbox."""


@dataclass(frozen=True, slots=True)
class Rejected:
    stream: Stream
    seq: int
    digest: int
    fault: Rejection
    content: str


@dataclass(slots=True)
class IntervalCounts:
    """The numbers of intervals of one batch by outcome, and of its records beyond each quota. They are final after
    `sort_out`."""

    stored: int
    duplicates: int
    quarantined: int
    over_quota: dict[str, int] = field(default_factory=dict)

    def beyond(self, quota: str, records: int = 1) -> None:
        self.over_quota[quota] = self.over_quota.get(quota, 0) + records


_Numbered = list[tuple[int, Section]]
"""Sections, each with its index in the group."""


@dataclass(frozen=True)
class _Left:
    """The sections that are not rejected so far, and their rows as columns."""

    sections: _Numbered

    @cached_property
    def incoming(self) -> Incoming:
        return Incoming([section for _, section in self.sections])

    @cached_property
    def holders(self) -> list[tuple[int, Stream, list[Holder]]]:
        """The number and the outbox of each section, and the distinct holders of its rows."""
        return [
            (number, section.stream, [one for one in dict.fromkeys(map(_HOLDER, section.rows)) if one is not None])
            for number, section in self.sections
        ]


_FaultySet = tuple[int, Sequence[UsageInterval], Rejection]
"""The index of its section, its rows and their fault."""


@dataclass
class GroupCommit:
    """Batches that are committed together.

    marks: by outbox, the highest number up to which all records are committed. `take` advances a copy."""

    marks: Mapping[Stream, int]
    stored: Stored
    now_ms: int
    gpus: GpuClaims | None = None
    pods: PodClaims | None = None
    """Checks which GPUs and pods a node may report. None for records that were accepted before and are not checked
    again."""
    quotas: QuotaClaims | None = None
    """Checks how much a sender may leave; None as above."""
    new_names: Callable[[Incoming], tuple[Truth, Truth]] | None = None
    """Returns which distinct devices and holders of rows the ledger does not know yet; None as above."""
    sections: list[Section] = field(default_factory=list)
    facts: list[tuple[Stream, PodFacts, int]] = field(default_factory=list)
    incoming: Incoming | None = None
    """The rows of `sections` to be booked, set by `sort_out`; None if there are none."""
    rejected: list[Rejected] = field(default_factory=list)
    holes: list[tuple[Stream, int, int, str]] = field(default_factory=list)
    advanced: dict[Stream, int] = field(default_factory=dict)
    _tallies: list[IntervalCounts] = field(default_factory=list)
    """Counts of the batches behind `sections`."""
    _fact_tallies: list[IntervalCounts] = field(default_factory=list)
    """Counts of the batches behind `facts`."""
    _digests: dict[tuple[Stream, int], set[int]] = field(default_factory=dict)
    """Digests that were looked up, and those of the group itself up to `_indexed`. They are needed only for replays,
    which most groups do not contain."""
    _aside: dict[Stream, list[tuple[int, int]]] = field(default_factory=dict)
    """The numbers of which this group keeps nothing because of a quota, as (first, last)."""
    _indexed: tuple[int, int, int] = (0, 0, 0)

    def durable(self, stream: Stream) -> int:
        """Return the mark after this group."""
        return self.advanced.get(stream, self.marks.get(stream, 0))

    @property
    def changes(self) -> bool:
        """Return whether there is anything to write. Replays that equal the stored records change nothing."""
        moved = any(seq != self.marks.get(stream, 0) for stream, seq in self.advanced.items())
        return moved or bool(self.rejected)

    def take(self, batch: Batch) -> IntervalCounts:
        """Add a batch. If this raises SequenceGap, BadBatch or OverQuota, the group is unchanged."""
        stream = (batch.cluster, batch.node, batch.epoch)
        records = admit(batch, self.durable(stream))
        if records is None:
            raise SequenceGap(Ack(epoch=batch.epoch, durable_seq=self.durable(stream), checkpointed_seq=0))
        if self.quotas is not None:
            self.quotas.require_bytes(sender_of(stream))
            if stream not in self.marks and stream not in self.advanced:
                self.quotas.open_outbox(stream, self.marks)
        duplicates, contradicting = self._replays(stream, records.replayed)
        tally = IntervalCounts(len(records.fresh_intervals), duplicates, contradicting)
        if records.lost is not None and not is_import(
            batch.epoch
        ):  # numbers of an import are times, so gaps are normal
            self._record_hole(stream, *records.lost, "lost")
        self.advanced[stream] = records.durable_seq
        if not self._has_room(stream, records):
            self._set_aside(stream, records, tally)
            return tally
        self.holes += [(stream, skip.seq, skip.seq, skip.reason) for skip in records.fresh_skipped]
        for fact in records.fresh_facts:
            self._take_fact(stream, fact, tally)
        if records.fresh_intervals:
            self.sections.append(Section(stream, records.fresh_intervals))
            self._tallies.append(tally)
        return tally

    def _has_room(self, stream: Stream, records: BatchRecords) -> bool:
        """Return whether the sender may leave the bytes of the new records, which are then counted."""
        rows, facts, skipped = records.fresh_intervals, records.fresh_facts, records.fresh_skipped
        if self.quotas is None or not (rows or facts or skipped):
            return True
        size = ROW_BYTES * len(rows)
        size += sum(GAP_BYTES + len(gap.reason) for row in rows if row.gaps for gap in row.gaps)
        size += sum(len(msgspec.json.encode(fact)) for fact in facts)
        size += sum(HOLE_BYTES + len(skip.reason) for skip in skipped)
        return self.quotas.take(sender_of(stream), "bytes", size)

    def _set_aside(self, stream: Stream, records: BatchRecords, tally: IntervalCounts) -> None:
        """Record the numbers of the new records as a hole, and keep nothing else of them."""
        fresh: list[UsageInterval | PodFacts | Skipped] = [
            *records.fresh_intervals, *records.fresh_facts, *records.fresh_skipped
        ]  # fmt: skip
        seqs = [record.seq for record in fresh]
        self._record_hole(stream, min(seqs), max(seqs), OVER_QUOTA)
        self._aside.setdefault(stream, []).append((min(seqs), max(seqs)))
        tally.beyond("bytes", len(seqs))
        tally.stored = 0
        tally.quarantined += len(records.fresh_intervals)

    def _record_hole(self, stream: Stream, first: int, last: int, reason: str) -> None:
        self.holes.append((stream, first, last, reason))
        if self.quotas is not None:
            self.quotas.record_hole(sender_of(stream), reason)

    def _reject(self, stream: Stream, record: UsageInterval | PodFacts, mark: int, fault: Rejection) -> None:
        """Quarantine a record. Its text counts as bytes that the sender leaves."""
        text = content(record)
        if self.quotas is not None:
            self.quotas.charge(sender_of(stream), "bytes", len(text))
        self.rejected.append(Rejected(stream, record.seq, mark, fault, text))

    def sort_out(self) -> None:
        """Reject invalid sets, then sets and facts that their node may not report, then those beyond a quota. Sets
        `incoming`."""
        left = _Left(list(enumerate(self.sections)))
        if left.sections:
            left = self._without(left, self._invalid_sets(left.incoming))
        if left.sections and self.gpus is not None:
            left = self._without(left, self._sets_of_foreign_gpus(self.gpus, left))
        if self.pods is not None:
            self._name_pods(self.pods, left)
            left = self._without(left, self._sets_of_foreign_pods(self.pods, left))
            left = self._with_booked_holders(self.pods, left)
        if left.sections and self.quotas is not None and self.new_names is not None:
            kept = self._without(left, self._sets_over_quota(self.quotas, left, self.new_names))
            if kept is not left and self.pods is not None:
                self.pods.keep_only(_named_in(kept.sections))
            left = kept
        self.incoming = left.incoming if left.sections else None
        if self.pods is not None:
            self.facts = list(self._facts_of_own_pods(self.pods))

    def _without(self, left: _Left, faulty: Iterable[_FaultySet]) -> _Left:
        """Return the sections without the faulty sets, which are recorded as rejected."""
        refused: set[tuple[int, int]] = set()
        for number, rows, fault in faulty:
            stream, tally = self.sections[number].stream, self._tallies[number]
            for row in rows:
                self._reject(stream, row, digest(row), fault)
            if fault.quota:
                tally.beyond(fault.quota, len(rows))
            tally.stored -= len(rows)
            tally.quarantined += len(rows)
            refused |= {(number, row.seq) for row in rows}
        if not refused:
            return left
        kept = ((number, _with_rows(section, number, refused)) for number, section in left.sections)
        return _Left([(number, section) for number, section in kept if section.rows])

    def _invalid_sets(self, incoming: Incoming) -> Iterator[_FaultySet]:
        for number, rows in _uncertain_sets(incoming, self.now_ms):
            fault = record_fault(rows, self.now_ms)
            if fault is not None:
                yield number, rows, fault

    def _sets_of_foreign_gpus(self, gpus: GpuClaims, left: _Left) -> Iterator[_FaultySet]:
        """Yield sets of GPUs that belong to another node, each GPU's in order of time."""
        sets, records = left.incoming.sets, left.incoming.records
        new = (np.diff(sets.section, prepend=-1) != 0) | (np.diff(sets.gpu, prepend=-1) != 0)
        begins = np.flatnonzero(new)
        sections, firsts = sets.section[begins].tolist(), sets.places[sets.first[begins]].tolist()
        starts_ms, ends_ms = sets.start_ms[begins].tolist(), np.maximum.reduceat(sets.end_ms, begins).tolist()
        spans = pairwise([*begins.tolist(), len(new)])
        for (begin, end), section, first, start_ms, end_ms in zip(
            spans, sections, firsts, starts_ms, ends_ms, strict=True
        ):
            number, (stream, *_) = left.sections[section]
            gpu = stream[0], records[first].gpu_uuid
            if gpus.fault(gpu, stream, start_ms, end_ms) is None:  # nearly always: the node may report all of this time
                continue
            for place in range(begin, end):
                fault = gpus.fault(gpu, stream, int(sets.start_ms[place]), int(sets.end_ms[place]))
                if fault is not None:
                    yield number, [records[member] for member in sets.members(place)], fault

    def _name_pods(self, pods: PodClaims, left: _Left) -> None:
        named = {(stream, one.uid) for _, stream, holders in left.holders for one in holders if _is_named(one)}
        pods.fetch(named | {(stream, fact.uid) for stream, fact, _ in self.facts})

    def _sets_of_foreign_pods(self, pods: PodClaims, left: _Left) -> Iterator[_FaultySet]:
        """Yield sets that name a pod which the API server has bound to another node."""
        for (number, stream, holders), (_, section) in zip(left.holders, left.sections, strict=True):
            faults = {one: fault for one in holders if (fault := pods.fault(stream, one)) is not None}
            for members in sets(section.rows) if faults else ():
                found = next((faults[row.holder] for row in members if row.holder in faults), None)
                if found is not None:
                    yield number, members, found

    def _with_booked_holders(self, pods: PodClaims, left: _Left) -> _Left:
        """Return the sections with the holders under which they are booked. The digests remain those of the records as
        sent."""
        changed = False
        found: _Numbered = []
        for (number, stream, named), (_, section) in zip(left.holders, left.sections, strict=True):
            holders = {one: name for one in named if _is_named(one) and (name := pods.holder(stream, one)) is not one}
            booked = section.rows
            if holders:
                changed = True
                booked = [
                    structs.replace(row, holder=holders[row.holder]) if row.holder in holders else row for row in booked
                ]
            found.append((number, Section(stream, booked)))
        if not changed:
            return left
        return _Left(
            [
                (number, after._replace(digests=[digest(row) for row in before.rows]))
                for (number, before), (_, after) in zip(left.sections, found, strict=True)
            ]
        )

    def _sets_over_quota(
        self,
        quotas: QuotaClaims,
        left: _Left,
        new_names: Callable[[Incoming], tuple[Truth, Truth]],
    ) -> Iterator[_FaultySet]:
        """Yield sets that name more new holders than their sender may leave, or more parts than a GPU can have. The
        sets are counted in the order of `incoming.sets`."""
        incoming = left.incoming
        new_devices, new_holders = new_names(incoming)
        if not (new_devices.any() or new_holders.any()):
            return
        sets, records = incoming.sets, incoming.records
        devices, holders = incoming.device, incoming.holder
        named = (new_devices[devices.of_row] | new_holders[holders.of_row])[sets.places]
        counted_devices: set[int] = set()
        counted_holders: set[int] = set()
        sent: dict[int, dict[int, UsageInterval]] = {}  # by section; a batch may have twenty thousand such sets
        for place in np.flatnonzero(np.logical_or.reduceat(named, sets.first)).tolist():
            number, (stream, *_) = left.sections[int(sets.section[place])]
            sender, members = sender_of(stream), sets.members(place)
            parts = {int(devices.of_row[member]) for member in members} - counted_devices
            parts = {part for part in parts if new_devices[part]}
            names = {int(holders.of_row[member]) for member in members} - counted_holders
            names = {name for name in names if new_holders[name]}
            gpu = (stream[0], records[members[0]].gpu_uuid)
            if parts and not quotas.take_parts(gpu, len(parts)):
                fault = quotas.fault(sender, "parts", f"{len(parts)} parts of GPU {gpu[1]}")
            elif names and not quotas.take(sender, "holders", len(names)):
                fault = quotas.fault(sender, "holders", f"{len(names)} holders of GPU {gpu[1]}")
            else:
                counted_devices |= parts
                counted_holders |= names
                continue
            if number not in sent:
                sent[number] = {row.seq: row for row in self.sections[number].rows}
            yield number, [sent[number][records[member].seq] for member in members], fault

    def _facts_of_own_pods(self, pods: PodClaims) -> Iterator[tuple[Stream, PodFacts, int]]:
        """Yield the facts from the node of their pod, as far as the node may name new pods. Others are rejected."""
        for (stream, fact, mark), tally in zip(self.facts, self._fact_tallies, strict=True):
            checked = self._beyond_quota(pods, stream, fact) or pods.fact(stream, fact)
            if isinstance(checked, Rejection):
                if checked.quota:
                    tally.beyond(checked.quota)
                self._reject(stream, fact, mark, checked)
            else:
                yield stream, checked, mark

    def _beyond_quota(self, pods: PodClaims, stream: Stream, fact: PodFacts) -> Rejection | None:
        """Return why the sender may name no further pod; None if it may, or if the pod is known."""
        if self.quotas is None or not pods.is_new(stream, fact):
            return None
        sender = sender_of(stream)
        allowed = self.quotas.take(sender, "holders", 1)
        return None if allowed else self.quotas.fault(sender, "holders", f"pod {fact.uid}")

    def _take_fact(self, stream: Stream, fact: PodFacts, tally: IntervalCounts) -> None:
        mark = digest(fact)
        fault = fact_fault(fact, self.now_ms)
        if fault is None:
            self.facts.append((stream, fact, mark))
            self._fact_tallies.append(tally)
        else:
            self._reject(stream, fact, mark, fault)

    def _replays(self, stream: Stream, records: tuple[UsageInterval | PodFacts, ...]) -> tuple[int, int]:
        """Return the number of intervals that are already stored, and the number of those that contradict the stored
        ones. Contradicting records are rejected."""
        if not records:
            return 0, 0
        self._index()
        unseen = [record.seq for record in records if (stream, record.seq) not in self._digests]
        for seq, digests in (self.stored(stream, unseen) if unseen else {}).items():
            self._digests[stream, seq] = set(digests)
        duplicates = contradicting = 0
        for record in records:
            mark = digest(record)
            known = self._digests.setdefault((stream, record.seq), set())
            interval = isinstance(record, UsageInterval)
            if mark in known or known >= SET_ASIDE or self._was_set_aside(stream, record.seq):
                duplicates += interval
                continue
            fault = Rejection(
                "contradicts",
                f"the record with number {record.seq} was {'stored with other content' if known else 'declared lost'} "
                "before",
            )
            known.add(mark)
            contradicting += interval
            if self.quotas is None or self.quotas.left(sender_of(stream), "bytes") > 0:  # else nothing of it is kept
                self._reject(stream, record, mark, fault)
        return duplicates, contradicting

    def _was_set_aside(self, stream: Stream, seq: int) -> bool:
        """Return whether this group has recorded the number as a hole because of a quota."""
        return _is_inside(seq, self._aside.get(stream, ()))

    def _index(self) -> None:
        """Add the digests of newly taken records, to find replays within the group."""
        sections, facts, rejected = self._indexed
        for section in self.sections[sections:]:
            for row in section.rows:
                self._digests.setdefault((section.stream, row.seq), set()).add(digest(row))
        for stream, fact, mark in self.facts[facts:]:
            self._digests.setdefault((stream, fact.seq), set()).add(mark)
        for refused in self.rejected[rejected:]:
            self._digests.setdefault((refused.stream, refused.seq), set()).add(refused.digest)
        self._indexed = (len(self.sections), len(self.facts), len(self.rejected))


def _with_rows(section: Section, number: int, refused: Collection[tuple[int, int]]) -> Section:
    """Return the section with this index without the refused rows, given as (index, sequence number)."""
    places = [place for place, row in enumerate(section.rows) if (number, row.seq) not in refused]
    digests = None if section.digests is None else [section.digests[place] for place in places]
    return Section(section.stream, [section.rows[place] for place in places], digests)


def _named_in(sections: _Numbered) -> set[PodKey]:
    """Return the holders of rows, as (cluster, uid)."""
    return {
        (section.stream[0], row.holder.uid) for _, section in sections for row in section.rows if row.holder is not None
    }


_HOLDER = attrgetter("holder")


def _is_named(holder: Holder) -> bool:
    return holder.kind != "unattributed"


def _uncertain_sets(incoming: Incoming, now_ms: int) -> Iterator[tuple[int, Sequence[UsageInterval]]]:
    """Yield section and rows of the sets that must be checked individually."""
    try:
        sure = beyond_doubt(incoming, now_ms)
    except OverflowError:  # a figure that does not fit its column: check all sets
        for number, section in enumerate(incoming.sections):
            for rows in sets(section.rows):
                yield number, rows
        return
    for doubted in np.flatnonzero(~sure).tolist():
        members = [incoming.records[place] for place in incoming.sets.members(doubted)]
        yield int(incoming.sets.section[doubted]), sorted(members, key=attrgetter("seq"))
