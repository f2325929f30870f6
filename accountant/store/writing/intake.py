"""One group of batches on its way into a transaction: what is new, what is a replay, what is bad.

Collects batch by batch, judges the rows of all together once the last has come (`sort_out`);
`accountant.store.writing.booking` writes. Marks advance here only in the group's own overlay, so a transaction that
fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from msgspec import structs

from accountant.errors import SequenceGap
from accountant.importing.protocol import is_import
from accountant.store.writing import validation
from accountant.store.writing.digest import content, digest
from accountant.store.writing.incoming import Incoming, Section, Stream
from accountant.store.writing.ownership import GpuClaims
from accountant.store.writing.pod_ownership import PodClaims
from accountant.store.writing.sequence import Gap, admit
from accountant.store.writing.validation import Fault
from agent.wire import Ack, Batch, Holder, PodFacts, UsageInterval

Stored = Callable[[Stream, list[int]], Mapping[int, frozenset[int]]]
"""The digests under which numbers of an outbox are stored or quarantined."""


@dataclass(frozen=True, slots=True)
class Rejected:
    stream: Stream
    seq: int
    digest: int
    fault: Fault
    content: str


@dataclass(slots=True)
class Tally:
    """What became of the intervals of one batch; final once the group is sorted out."""

    stored: int
    duplicates: int
    quarantined: int


_Numbered = list[tuple[int, Section]]
"""Sections, each with its place among those of the group."""
_FaultySet = tuple[int, Sequence[UsageInterval], Fault]
"""The place of its section, its rows and what is wrong with them."""


@dataclass
class Group:
    """marks: the highest contiguous number per outbox, committed; `take` advances an overlay."""

    marks: Mapping[Stream, int]
    stored: Stored
    now_ms: int
    gpus: GpuClaims | None = None
    pods: PodClaims | None = None
    """What the group's nodes may report; None: of what was taken in before, which is not judged again."""
    sections: list[Section] = field(default_factory=list)
    facts: list[tuple[Stream, PodFacts, int]] = field(default_factory=list)
    incoming: Incoming | None = None
    """What is to be booked of `sections`: once it is sorted out, and where anything is."""
    rejected: list[Rejected] = field(default_factory=list)
    holes: list[tuple[Stream, int, int, str]] = field(default_factory=list)
    advanced: dict[Stream, int] = field(default_factory=dict)
    _tallies: list[Tally] = field(default_factory=list)
    """Of the batches behind `sections`."""
    _digests: dict[tuple[Stream, int], set[int]] = field(default_factory=dict)
    """Of what was looked up, and of the group itself as far as `_indexed`: most groups have no replay."""
    _indexed: tuple[int, int, int] = (0, 0, 0)

    def durable(self, stream: Stream) -> int:
        """The mark as it will stand after this group."""
        return self.advanced.get(stream, self.marks.get(stream, 0))

    @property
    def changes(self) -> bool:
        """Whether there is anything to write: a group of replays has nothing."""
        moved = any(seq != self.marks.get(stream, 0) for stream, seq in self.advanced.items())
        return moved or bool(self.rejected)

    def take(self, batch: Batch) -> Tally:
        """Raises SequenceGap or BadBatch; the group is then as before."""
        stream = (batch.cluster, batch.node, batch.epoch)
        intake = admit(batch, self.durable(stream))
        if isinstance(intake, Gap):
            raise SequenceGap(Ack(epoch=batch.epoch, durable_seq=self.durable(stream), checkpointed_seq=0))
        duplicates, contradicting = self._replays(stream, intake.replayed)
        if intake.lost is not None and not is_import(batch.epoch):  # an import's numbers are times
            self.holes.append((stream, *intake.lost, "lost"))
        self.holes += [(stream, skip.seq, skip.seq, skip.reason) for skip in intake.fresh_skipped]
        for fact in intake.fresh_facts:
            self._take_fact(stream, fact)
        self.advanced[stream] = intake.durable_seq
        tally = Tally(len(intake.fresh_intervals), duplicates, contradicting)
        if intake.fresh_intervals:
            self.sections.append(Section(stream, intake.fresh_intervals))
            self._tallies.append(tally)
        return tally

    def sort_out(self) -> None:
        """Set aside what cannot be true of all that was taken, and then what is not for its node to report."""
        left = list(enumerate(self.sections))
        if left:
            left = self._without(left, self._untrue(Incoming(self.sections)))
        if left and self.gpus is not None:
            left = self._without(left, self._foreign(self.gpus, left))
        if self.pods is not None:
            self._name_pods(self.pods, left)
            left = self._without(left, self._foreign_pods(self.pods, left))
            left = self._renamed(self.pods, left)
            self.facts = list(self._believed(self.pods))
        self.incoming = Incoming([section for _, section in left]) if left else None

    def _without(self, sections: _Numbered, faulty: Iterable[_FaultySet]) -> _Numbered:
        """The sections without the faulty sets, which are set aside."""
        refused: set[tuple[int, int]] = set()
        for number, rows, fault in faulty:
            stream, tally = self.sections[number].stream, self._tallies[number]
            self.rejected += [Rejected(stream, row.seq, digest(row), fault, content(row)) for row in rows]
            tally.stored -= len(rows)
            tally.quarantined += len(rows)
            refused |= {(number, row.seq) for row in rows}
        if not refused:
            return sections
        kept = (
            (number, Section(section.stream, [row for row in section.rows if (number, row.seq) not in refused]))
            for number, section in sections
        )
        return [(number, section) for number, section in kept if section.rows]

    def _untrue(self, incoming: Incoming) -> Iterator[_FaultySet]:
        for number, rows in _doubtful(incoming, self.now_ms):
            fault = validation.fault(rows, self.now_ms)
            if fault is not None:
                yield number, rows, fault

    def _foreign(self, gpus: GpuClaims, sections: _Numbered) -> Iterator[_FaultySet]:
        """Sets of GPUs that belong to another node; of each GPU in the order of time."""
        incoming = Incoming([section for _, section in sections])
        sets, records = incoming.sets, incoming.records
        for place, section in enumerate(sets.section.tolist()):
            number, (stream, *_) = sections[section]
            members = sets.members(place)
            first = records[members[0]]
            fault = gpus.fault((stream[0], first.gpu_uuid), stream, first.start_ms, first.end_ms)
            if fault is not None:
                yield number, [records[member] for member in members], fault

    def _name_pods(self, pods: PodClaims, sections: _Numbered) -> None:
        named = {
            (section.stream, row.holder.uid) for _, section in sections for row in section.rows if _is_named(row.holder)
        }
        pods.fetch(named | {(stream, fact.uid) for stream, fact, _ in self.facts})

    def _foreign_pods(self, pods: PodClaims, sections: _Numbered) -> Iterator[_FaultySet]:
        """Sets that name a pod which the API server has bound to another node."""
        for number, (stream, rows, _) in sections:
            faults: dict[Holder, Fault] = {}
            for holder in dict.fromkeys(row.holder for row in rows):
                if holder is not None and (fault := pods.fault(stream, holder)) is not None:
                    faults[holder] = fault
            if not faults:
                continue
            for members in validation.sets(rows):
                found = next((faults[row.holder] for row in members if row.holder in faults), None)
                if found is not None:
                    yield number, members, found

    def _renamed(self, pods: PodClaims, sections: _Numbered) -> _Numbered:
        """The sections with holders as they are booked: the digests stay those of what was sent."""
        changed = False
        found: _Numbered = []
        for number, (stream, rows, _) in sections:
            holders = {
                one: pods.holder(stream, one) for one in dict.fromkeys(row.holder for row in rows) if _is_named(one)
            }
            booked = rows
            if any(one is not name for one, name in holders.items()):
                changed = True
                booked = [
                    structs.replace(row, holder=holders[row.holder]) if row.holder in holders else row for row in rows
                ]
            found.append((number, Section(stream, booked)))
        if not changed:
            return sections
        return [
            (number, after._replace(digests=[digest(row) for row in before.rows]))
            for (number, before), (_, after) in zip(sections, found, strict=True)
        ]

    def _believed(self, pods: PodClaims) -> Iterator[tuple[Stream, PodFacts, int]]:
        """The facts that the node of their pod told; the others are set aside."""
        for stream, fact, mark in self.facts:
            told = pods.fact(stream, fact)
            if isinstance(told, Fault):
                self.rejected.append(Rejected(stream, fact.seq, mark, told, content(fact)))
            else:
                yield stream, told, mark

    def _take_fact(self, stream: Stream, fact: PodFacts) -> None:
        mark = digest(fact)
        fault = validation.fact_fault(fact, self.now_ms)
        if fault is None:
            self.facts.append((stream, fact, mark))
        else:
            self.rejected.append(Rejected(stream, fact.seq, mark, fault, content(fact)))

    def _replays(self, stream: Stream, records: tuple[UsageInterval | PodFacts, ...]) -> tuple[int, int]:
        """Intervals that are there already, and those that contradict what is there."""
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
            if mark in known:
                duplicates += interval
                continue
            fault = Fault(
                "contradicts", f"number {record.seq} was {'stored with other content' if known else 'declared lost'}"
            )
            known.add(mark)
            self.rejected.append(Rejected(stream, record.seq, mark, fault, content(record)))
            contradicting += interval
        return duplicates, contradicting

    def _index(self) -> None:
        """Digests of what the group took since the last time, for replays inside it."""
        sections, facts, rejected = self._indexed
        for section in self.sections[sections:]:
            for row in section.rows:
                self._digests.setdefault((section.stream, row.seq), set()).add(digest(row))
        for stream, fact, mark in self.facts[facts:]:
            self._digests.setdefault((stream, fact.seq), set()).add(mark)
        for refused in self.rejected[rejected:]:
            self._digests.setdefault((refused.stream, refused.seq), set()).add(refused.digest)
        self._indexed = (len(self.sections), len(self.facts), len(self.rejected))


def _is_named(holder: Holder | None) -> TypeGuard[Holder]:
    return holder is not None and holder.kind != "unattributed"


def _doubtful(incoming: Incoming, now_ms: int) -> Iterator[tuple[int, Sequence[UsageInterval]]]:
    """Section and rows of the sets that have to be looked at one by one."""
    try:
        sure = validation.beyond_doubt(incoming, now_ms)
    except OverflowError:  # a figure that no column holds: look at all
        for number, section in enumerate(incoming.sections):
            for rows in validation.sets(section.rows):
                yield number, rows
        return
    for doubted in np.flatnonzero(~sure).tolist():
        members = [incoming.records[place] for place in incoming.sets.members(doubted)]
        for rows in validation.sets(members):
            yield int(incoming.sets.section[doubted]), rows
