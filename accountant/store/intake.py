"""One group of batches on its way into a transaction: what is new, what is a replay, what is bad.

Collects; `accountant.store.booking` writes. Marks advance here only in the group's own overlay, so
a transaction that fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from accountant.errors import SequenceGap
from accountant.importing.protocol import is_import
from accountant.store import validation
from accountant.store.digest import content, digest
from accountant.store.sequence import Gap, admit
from accountant.store.validation import Fault
from agent.wire import Ack, Batch, PodFacts, UsageInterval

Stream = tuple[str, str, str]
"""(cluster, node, epoch)."""
Stored = Callable[[Stream, list[int]], Mapping[int, frozenset[int]]]
"""The digests under which numbers of an outbox are stored or quarantined."""


class IncomingSet(NamedTuple):
    """A valid set of one outbox, with a digest per row."""

    stream: Stream
    rows: tuple[UsageInterval, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    stream: Stream
    seq: int
    digest: int
    fault: Fault
    content: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the intervals of one batch."""

    stored: int
    duplicates: int
    quarantined: int


@dataclass
class Group:
    """marks: the highest contiguous number per outbox, committed; `take` advances an overlay."""

    marks: Mapping[Stream, int]
    stored: Stored
    now_ms: int
    sets: list[IncomingSet] = field(default_factory=list)
    facts: list[tuple[Stream, PodFacts, int]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    holes: list[tuple[Stream, int, int, str]] = field(default_factory=list)
    advanced: dict[Stream, int] = field(default_factory=dict)
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
        stored = quarantined = 0
        for rows in validation.sets(intake.fresh_intervals):
            fault = validation.fault(rows, self.now_ms)
            digests = tuple(map(digest, rows))
            if fault is None:
                self.sets.append(IncomingSet(stream, rows, digests))
                stored += len(rows)
            else:
                for row, mark in zip(rows, digests, strict=True):
                    self.rejected.append(Rejected(stream, row.seq, mark, fault, content(row)))
                quarantined += len(rows)
        for fact in intake.fresh_facts:
            self._take_fact(stream, fact)
        self.advanced[stream] = intake.durable_seq
        return Tally(stored, duplicates, quarantined + contradicting)

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
        sets, facts, rejected = self._indexed
        for item in self.sets[sets:]:
            for row, mark in zip(item.rows, item.digests, strict=True):
                self._digests.setdefault((item.stream, row.seq), set()).add(mark)
        for stream, fact, mark in self.facts[facts:]:
            self._digests.setdefault((stream, fact.seq), set()).add(mark)
        for refused in self.rejected[rejected:]:
            self._digests.setdefault((refused.stream, refused.seq), set()).add(refused.digest)
        self._indexed = (len(self.sets), len(self.facts), len(self.rejected))
