"""Batches are decoded, and all waiting batches are committed together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest
from msgspec import structs

from accountant.core.errors import BadBatch, LedgerFailed, LedgerUnavailable, SequenceGap
from accountant.core.gpu_time_accounts import split
from accountant.ledger.protocols import Receipt
from accountant.runtime.ingest import MOST_RECORDS, Ingest, decode
from agent.wire import Ack, Batch, Gap, Skipped
from gputally.base.clock import VirtualClock
from tests.moments import acks


class Gate:
    """A ledger that blocks until it is released, and records the size of each group."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.groups: list[int] = []
        self.failure: Exception | None = None
        self.poison = ""

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        self.entered.release()
        self.open.acquire()
        self.groups.append(len(batches))
        if self.failure is not None:
            raise self.failure
        if any(batch.epoch == self.poison for batch in batches):
            raise OverflowError("a defect of ours")
        return [Receipt(Ack(epoch=b.epoch, durable_seq=now_ms, checkpointed_seq=0), 1, 0, 0) for b in batches]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def ingest_at(gate: Gate, clock: VirtualClock) -> Iterator[Callable[..., Ingest]]:
    """Starts an ingest on the gate with the given options. All are closed after the test."""
    with ExitStack() as closed_after:
        yield lambda **options: closed_after.enter_context(closing(Ingest(gate, clock, **options)))  # type: ignore[arg-type]


def body(hand: Any, **changes: Any) -> bytes:
    return msgspec.json.encode(hand.batch(hand.row(1), **changes))


def test_a_body_becomes_a_receipt_after_the_commit(ledger, clock, hand):
    ingest = Ingest(ledger, clock)
    receipt = ingest.submit(body(hand)).result(30)
    assert receipt.stored == 1
    assert receipt.ack.clock_ms == hand.now_ms
    assert acks(ledger, "n1", "prod")["0192-a"] == structs.replace(receipt.ack, clock_ms=None)
    gap = ingest.submit(msgspec.json.encode(hand.batch(hand.row(7, 7, 8)))).exception(30)
    assert isinstance(gap, SequenceGap)
    ingest.close()
    ingest.close()
    assert isinstance(ingest.submit(body(hand)).exception(30), LedgerUnavailable)


@pytest.mark.parametrize(
    ("raw", "type_"),
    [
        pytest.param(b"", "malformed-batch", id="nothing"),
        pytest.param(b'{"schema":1,', "malformed-batch", id="cut"),
        pytest.param(b"\xff\xfe", "malformed-batch", id="no text"),
        pytest.param(b'{"x":' + b"[" * 100_000, "malformed-batch", id="deep"),
        pytest.param(b'{"schema":99,"anything":[]}', "unknown-schema", id="newer"),
        pytest.param(b'{"schema":1}', "invalid-batch", id="fields missing"),
        pytest.param(b"[]", "invalid-batch", id="no object"),
    ],
)
def test_what_is_no_batch_is_refused_at_once(raw, type_):
    with pytest.raises(BadBatch) as refused:
        decode(raw)
    assert refused.value.type == type_
    assert refused.value.detail


def test_a_fault_inside_a_batch_names_its_place(hand):
    with pytest.raises(BadBatch, match=r"\$\.intervals\[0\]\.busy_us"):
        decode(body(hand).replace(b'"busy_us":', b'"busy_us":"x","y":'))


def test_a_field_of_a_newer_agent_is_ignored(hand):
    assert decode(body(hand).replace(b'"boot_id"', b'"invented_later":[1],"boot_id"')) == hand.batch(hand.row(1))


def test_too_many_records_have_to_be_split(hand):
    skips = [Skipped(seq=seq, reason="x") for seq in range(1, MOST_RECORDS + 2)]
    with pytest.raises(BadBatch) as refused:
        decode(msgspec.json.encode(hand.batch(*skips)))
    assert refused.value.type == "too-large"


def with_gaps(hand: Any, count: int, reason: str) -> Any:
    """A row with `count` gaps of a millisecond each, with a millisecond between them."""
    starts = range(hand.start_ms + 1, hand.start_ms + 2 * count, 2)
    return hand.row(1, gaps=tuple(Gap(start, start + 1, f"{reason} {start}") for start in starts))


def test_of_a_row_with_many_gaps_little_is_kept_and_nothing_unknown_becomes_known(hand):
    sent = with_gaps(hand, 10_000, "y" * 4_000)
    (row,) = decode(msgspec.json.encode(hand.batch(sent))).intervals
    assert len(msgspec.json.encode(row.gaps)) < 2**14
    assert split(row).unknown_us >= split(sent).unknown_us > 0
    assert structs.replace(row, gaps=sent.gaps) == sent


def test_a_row_with_as_many_gaps_as_an_agent_sends_is_kept_whole(hand):
    sent = hand.batch(with_gaps(hand, 32, "the driver said no (nvmlDeviceGetSamples, 4)"), hand.row(2, 1, 2))
    assert decode(msgspec.json.encode(sent)) == sent


def test_what_comes_during_a_commit_shares_the_next_one(gate, ingest_at, hand):
    ingest = ingest_at()
    futures = [ingest.submit(body(hand))]
    gate.entered.acquire()
    futures += [ingest.submit(body(hand, epoch=f"e{i}")) for i in range(5)]
    assert not any(future.done() for future in futures)
    gate.open.release(2)
    assert [future.result(30).ack.epoch for future in futures] == ["0192-a", "e0", "e1", "e2", "e3", "e4"]
    assert gate.groups == [1, 5]


def test_two_senders_that_missed_each_other_share_the_next_commit(gate, ingest_at, hand):
    ingest = ingest_at(linger_ms=60_000)
    one = ingest.submit(body(hand))
    gate.entered.acquire()
    other = ingest.submit(body(hand, epoch="e1"))
    gate.open.release()
    assert one.result(30)
    again = ingest.submit(body(hand, epoch="e0"))
    gate.open.release()
    assert other.result(30)
    assert again.result(30)
    assert gate.groups == [1, 2]


def test_too_many_waiting_are_refused(gate, ingest_at, hand):
    ingest = ingest_at(most_waiting=1)
    first = ingest.submit(body(hand))
    gate.entered.acquire()
    second, third = ingest.submit(body(hand)), ingest.submit(body(hand))
    assert isinstance(third.exception(30), LedgerUnavailable)
    gate.open.release(2)
    assert first.result(30)
    assert second.result(30)


def test_a_full_disk_is_told_to_all_and_the_next_group_is_tried(gate, ingest_at, hand):
    gate.failure = LedgerUnavailable("no space")
    ingest = ingest_at()
    first = ingest.submit(body(hand))
    gate.open.release()
    assert first.exception(30) is gate.failure
    gate.failure = None
    second = ingest.submit(body(hand))
    gate.open.release()
    assert second.result(30)


def test_a_batch_that_brings_out_a_defect_does_not_stop_the_others(gate, ingest_at, hand):
    gate.poison = "bad"
    ingest = ingest_at()
    first = ingest.submit(body(hand))
    gate.entered.acquire()
    rest = [ingest.submit(body(hand, epoch=epoch)) for epoch in ("good", "bad", "fine")]
    gate.open.release(5)
    assert first.result(30)
    assert [type(future.exception(30)) for future in rest] == [type(None), OverflowError, type(None)]


def test_when_the_engine_is_done_for_everybody_hears_it_once(gate, ingest_at, hand):
    gate.failure = LedgerFailed("the database is no longer usable")
    told: list[LedgerFailed] = []
    ingest = ingest_at(fatal=told.append)
    first = ingest.submit(body(hand))
    gate.open.release()
    assert first.exception(30) is gate.failure
    assert ingest.submit(body(hand)).exception(30) is gate.failure
    ingest.close()
    assert told == [gate.failure]
    assert gate.groups == [1]
