"""What of a batch is new, given the highest contiguous number already committed.

The protocol of the first arrow, and nothing else: pure, and the same for every engine. A batch that
starts at or below the next number is accepted and what is already there dropped; one that starts
above it is refused, unless the agent says that it has nothing older: then the numbers between are lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from accountant.errors import BadBatch
from agent.identifiers import LONGEST_EPOCH, LONGEST_NAME, is_epoch, is_name
from agent.wire import Batch, PodFacts, Skipped, UsageInterval

LARGEST_SEQ = 2**53


@dataclass(frozen=True, slots=True)
class Gap:
    """Numbers between the mark and the batch are missing and may still come."""


@dataclass(frozen=True, slots=True)
class Intake:
    """fresh_*: above the mark. replayed_*: at or below it. lost: (first, last) that will never come.
    durable_seq: the mark after this batch."""

    fresh_intervals: tuple[UsageInterval, ...]
    fresh_facts: tuple[PodFacts, ...]
    fresh_skipped: tuple[Skipped, ...]
    replayed: tuple[UsageInterval | PodFacts, ...]
    lost: tuple[int, int] | None
    durable_seq: int


def admit(batch: Batch, durable_seq: int) -> Intake | Gap:
    """Raises BadBatch where the batch does not number its records without a hole from first_seq on."""
    count = _numbering(batch)
    lost = None
    if batch.first_seq > durable_seq + 1:
        if batch.first_seq != batch.oldest_seq:
            return Gap()
        lost = (durable_seq + 1, batch.first_seq - 1)
        durable_seq = batch.first_seq - 1
    last = batch.first_seq + count - 1
    if batch.first_seq == durable_seq + 1:
        return Intake(batch.intervals, batch.facts, batch.skipped, (), lost, max(last, durable_seq))
    return Intake(
        fresh_intervals=tuple(row for row in batch.intervals if row.seq > durable_seq),
        fresh_facts=tuple(fact for fact in batch.facts if fact.seq > durable_seq),
        fresh_skipped=tuple(skip for skip in batch.skipped if skip.seq > durable_seq),
        replayed=(
            *(row for row in batch.intervals if row.seq <= durable_seq),
            *(fact for fact in batch.facts if fact.seq <= durable_seq),
        ),
        lost=lost,
        durable_seq=max(last, durable_seq),
    )


def _numbering(batch: Batch) -> int:
    """How many numbers the batch covers."""
    for field, text in (("cluster", batch.cluster), ("node", batch.node)):
        if not text or not is_name(text):
            raise BadBatch(
                "invalid-batch", f"{field} needs 1 to {LONGEST_NAME} characters on one line, without control characters"
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
            f"first_seq {batch.first_seq} must be at least 1 and oldest_seq {batch.oldest_seq} not above it",
        )
    if numbers and (numbers[0] != batch.first_seq or numbers[-1] - numbers[0] + 1 != len(numbers)):
        raise BadBatch(
            "invalid-batch", f"the records do not cover the numbers from {batch.first_seq} on without a hole"
        )
    if len(set(numbers)) != len(numbers):
        raise BadBatch("invalid-batch", "a number stands in the batch twice")
    return len(numbers)
