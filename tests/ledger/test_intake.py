"""The ledger books, drops, refuses or quarantines records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accountant.core.errors import BadBatch, LedgerUnavailable, SequenceGap
from accountant.ledger.protocols import Receipt
from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import UNATTRIBUTED, Ack, Gap, Sharing, Skipped, Slice
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

MINUTE_US = 60_000_000


def test_a_batch_is_stored_once_and_acknowledged(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    sent = hand.batch(hand.row(1, 0, 1), hand.row(2, 1, 2), hand.fact(3))
    for stored, duplicates in ((2, 0), (0, 2)):
        assert ledger.append([sent], hand.now_ms) == [
            Receipt(Ack(epoch="0192-a", durable_seq=3, checkpointed_seq=0, clock_ms=hand.now_ms), stored, duplicates, 0)
        ]
    assert accounts(0, 2) == {"busy": MINUTE_US, "allocated_idle": MINUTE_US}
    ledger.checkpoint()
    assert ledger.acks("n1", "prod") == {"0192-a": Ack(epoch="0192-a", durable_seq=3, checkpointed_seq=3)}
    assert ledger.acks("n1", "elsewhere") == {}


def test_the_same_batch_twice_in_one_group_counts_once(ledger: DuckLedger, hand: Any) -> None:
    sent = hand.batch(hand.row(1))
    first, second = ledger.append([sent, sent], hand.now_ms)
    assert isinstance(first, Receipt)
    assert isinstance(second, Receipt)
    assert (first.stored, second.duplicates) == (1, 1)


def test_a_hole_is_refused_with_the_place_to_rewind_to(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1))], hand.now_ms)
    (refusal,) = ledger.append([hand.batch(hand.row(5, 5, 6))], hand.now_ms)
    assert isinstance(refusal, SequenceGap)
    assert refusal.ack.durable_seq == 1


def test_numbers_that_nobody_has_any_more_are_lost_and_stay_unmetered(
    ledger: DuckLedger, hand: Any, accounts: Any
) -> None:
    ledger.append([hand.batch(hand.row(1))], hand.now_ms)
    (receipt,) = ledger.append([hand.batch(hand.row(5, 5, 6), oldest_seq=5)], hand.now_ms)
    assert isinstance(receipt, Receipt)
    assert receipt.ack.durable_seq == 5
    assert accounts(0, 6)["unmetered"] == 4 * MINUTE_US
    # A lost number that turns up after all is set aside, not booked behind everybody's back.
    (late,) = ledger.append([hand.batch(hand.row(3, 2, 3))], hand.now_ms)
    assert isinstance(late, Receipt)
    assert (late.stored, late.quarantined) == (0, 1)
    assert ledger.quarantined()[0].detail == "number 3 was declared lost"


def test_a_skipped_number_advances_the_mark(ledger: DuckLedger, hand: Any) -> None:
    sent = hand.batch(hand.row(1), Skipped(seq=2, reason="undecodable"), hand.row(3, 2, 3))
    (receipt,) = ledger.append([sent], hand.now_ms)
    assert isinstance(receipt, Receipt)
    assert (receipt.ack.durable_seq, receipt.stored) == (3, 2)


def test_batches_of_one_node_in_one_group_follow_each_other(ledger: DuckLedger, hand: Any) -> None:
    group = [hand.batch(hand.row(1)), hand.batch(hand.row(2, 1, 2)), hand.batch(hand.row(9, 2, 3))]
    first, second, third = ledger.append(group, hand.now_ms)
    assert isinstance(first, Receipt)
    assert isinstance(second, Receipt)
    assert isinstance(third, SequenceGap)
    assert third.ack.durable_seq == 2


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda h: h.batch(h.row(1), h.row(3, 1, 2)), id="a hole"),
        pytest.param(lambda h: h.batch(h.row(1), h.row(1, 1, 2)), id="a number twice"),
        pytest.param(lambda h: h.batch(h.row(1), h.row(1, 1, 2), h.row(3, 2, 3)), id="a number twice and a hole"),
        pytest.param(lambda h: h.batch(h.row(2), first_seq=1), id="not from first_seq on"),
        pytest.param(lambda h: h.batch(h.row(0)), id="number 0"),
        pytest.param(lambda h: h.batch(h.row(1), oldest_seq=2), id="oldest above first"),
        pytest.param(lambda h: h.batch(h.row(1), node=""), id="no node"),
        pytest.param(lambda h: h.batch(h.row(1), epoch="x" * 2000), id="endless epoch"),
    ],
)
def test_a_batch_that_is_not_one_is_refused_and_the_others_go_on(
    ledger: DuckLedger, hand: Any, wrong: Callable[[Any], Any]
) -> None:
    bad, good = ledger.append([wrong(hand), hand.batch(hand.row(1, 3, 4), epoch="0192-b")], hand.now_ms)
    assert isinstance(bad, BadBatch)
    assert bad.type == "invalid-batch"
    assert isinstance(good, Receipt)


def _slice(**changes: int) -> Slice:
    given = {"gi": 1, "ci": 0, "compute": 3, "compute_of": 7, "memory_mib": 40_000, "memory_of_mib": 80_000}
    return Slice(profile="3g.40gb", **{**given, **changes})


@pytest.mark.parametrize(
    ("reason", "rows"),
    [
        pytest.param("future-dated", lambda h: [h.row(1, 64, 66)], id="future-dated 1"),
        pytest.param("impossible-span", lambda h: [h.row(1, 1, 1)], id="impossible-span 2"),
        pytest.param(
            "impossible-span", lambda h: [h.row(1, 2, 1, capacity_us=1, allocated_us=1)], id="impossible-span 3"
        ),
        pytest.param("too-long", lambda h: [h.row(1, -61, 0)], id="too-long 4"),
        pytest.param(
            "before-2020", lambda h: [h.row(1, -h.start_ms / 60_000, -h.start_ms / 60_000 + 1)], id="before-2020 5"
        ),
        pytest.param("negative", lambda h: [h.row(1, busy_us=-1)], id="negative 6"),
        pytest.param("negative", lambda h: [h.row(1, energy_uj=-5)], id="negative 7"),
        pytest.param("out-of-range", lambda h: [h.row(1, memory_mib_s=10**30)], id="out-of-range 8"),
        pytest.param(
            "out-of-range", lambda h: [h.row(1, sharing=Sharing(mode="mps", replicas=2**40))], id="out-of-range 9"
        ),
        pytest.param("out-of-range", lambda h: [h.row(1, slice=_slice(gi=2**31))], id="out-of-range 10"),
        pytest.param("over-allocated", lambda h: [h.row(1, allocated_us=MINUTE_US + 1)], id="over-allocated 11"),
        pytest.param("no-holder", lambda h: [h.row(1, holder=None, allocated_us=5)], id="no-holder 12"),
        pytest.param("unattributed-capacity", lambda h: [h.row(1, holder=UNATTRIBUTED)], id="unattributed-capacity 13"),
        pytest.param("over-capacity", lambda h: [h.row(1), h.row(2)], id="over-capacity 14"),
        pytest.param("incomplete-set", lambda h: [h.row(1, capacity_us=7, allocated_us=7)], id="incomplete-set 15"),
        pytest.param("bad-name", lambda h: [h.row(1, gpu="")], id="bad-name 16"),
        pytest.param("bad-name", lambda h: [h.row(1, gpu_model="x" * 2000)], id="bad-name 17"),
    ],
)
def test_what_cannot_be_true_is_quarantined_and_the_rest_booked(
    ledger: DuckLedger, hand: Any, accounts: Any, reason: str, rows: Callable[[Any], Any]
) -> None:
    bad = rows(hand)
    good = hand.row(len(bad) + 1, 10, 11, gpu="gpu-2")
    (receipt,) = ledger.append([hand.batch(*bad, good)], hand.now_ms)
    assert isinstance(receipt, Receipt)
    assert (receipt.stored, receipt.quarantined, receipt.ack.durable_seq) == (1, len(bad), len(bad) + 1)
    assert {item.reason for item in ledger.quarantined()} == {reason}
    assert accounts(-120, 60, gpu="gpu-1") == {}
    assert accounts(10, 11, gpu="gpu-2") == {"busy": MINUTE_US // 2, "allocated_idle": MINUTE_US // 2}
    # Sent again, it is known already.
    (again,) = ledger.append([hand.batch(*bad, good)], hand.now_ms)
    assert isinstance(again, Receipt)
    assert (again.duplicates, again.quarantined) == (len(bad) + 1, 0)


def test_a_carried_set_may_be_short_and_the_rest_is_unmetered(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    row = hand.row(1, 0, 1, method="carried", capacity_us=20_000_000, allocated_us=20_000_000, busy_us=None)
    ledger.append([hand.batch(row)], hand.now_ms)
    assert accounts(0, 1) == {"allocated_unknown": 20_000_000, "unmetered": 40_000_000}
    assert accounts(0, 0.5) == {"allocated_unknown": 10_000_000, "unmetered": 20_000_000}


def test_other_content_under_a_known_number_is_set_aside(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.fact(2))], hand.now_ms)
    before = accounts(0, 1)
    changed = hand.batch(hand.row(1, busy_us=7), hand.fact(2, queue_ref="kai:mine"))
    for duplicates, quarantined in ((0, 1), (1, 0)):
        (receipt,) = ledger.append([changed], hand.now_ms)
        assert isinstance(receipt, Receipt)
        assert (receipt.stored, receipt.duplicates, receipt.quarantined) == (0, duplicates, quarantined)
    assert accounts(0, 1) == before
    found = ledger.quarantined()
    assert [(item.seq, item.reason) for item in found] == [(2, "contradicts"), (1, "contradicts")]
    assert '"busy_us":7' in found[1].content


def test_a_node_whose_clock_ran_ahead_recovers_by_itself(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    ahead = MS_PER_DAY // 60_000
    (skewed,) = ledger.append(
        [hand.batch(hand.row(1, ahead, ahead + 1), hand.fact(2, observed_ms=10**15))], hand.now_ms
    )
    assert isinstance(skewed, Receipt)
    assert (skewed.quarantined, skewed.ack.durable_seq) == (1, 2)
    (healed,) = ledger.append([hand.batch(hand.row(3, 59, 60))], hand.now_ms)
    assert isinstance(healed, Receipt)
    assert healed.stored == 1
    assert accounts(0, ahead + 1, gpu="gpu-1")["busy"] == MINUTE_US // 2


def test_a_clock_a_little_ahead_does_not_stop_the_others(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 62, 64))], hand.now_ms)
    (receipt,) = ledger.append([hand.batch(hand.row(1, 58, 60, gpu="gpu-2"), epoch="0192-b")], hand.now_ms)
    assert isinstance(receipt, Receipt)
    assert receipt.stored == 1


def test_while_the_own_clock_is_behind_nothing_is_taken(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 59, 60))], hand.now_ms)
    with pytest.raises(LedgerUnavailable, match="clock is 3300000 ms behind"):
        ledger.append([hand.batch(hand.row(2, 0, 1))], hand.now_ms - MS_PER_HOUR)
    assert ledger.acks("n1", "prod")["0192-a"].durable_seq == 1


def test_gaps_are_unknown_not_idle_and_busy_beyond_the_slice_is_a_memo(ledger: DuckLedger, hand: Any) -> None:
    begin = hand.start_ms
    rows = (
        hand.row(1, capacity_us=20_000_000, allocated_us=20_000_000, busy_us=30_000_000, slice=_slice()),
        hand.row(
            2, capacity_us=40_000_000, allocated_us=40_000_000, busy_us=35_000_000, slice=_slice(gi=2),
            gaps=(Gap(begin, begin + 12_000, "timeout"), Gap(begin + 6_000, begin + 15_000, "timeout")),
        ),
        hand.row(3, capacity_us=0, allocated_us=0, busy_us=9, holder=UNATTRIBUTED),
    )  # fmt: skip
    ledger.append([hand.batch(*rows)], hand.now_ms)
    (line,) = ledger.usage(begin, begin + 60_000, (), {"pod": {"train-0"}})
    assert line.accounts_gpu_us.allocated_unknown == 10_000_000
    assert line.accounts_gpu_us.busy == 20_000_000 + 30_000_000
    assert line.borrowed_busy_us == 10_000_000 + 5_000_000
    assert sum(found.unattributed_busy_us for found in ledger.usage(begin, begin + 60_000, ())) == 9


def test_it_refuses_when_the_disk_is_nearly_full_and_answers_questions(path: Any, clock: Any, hand: Any) -> None:
    free = [2**40]
    ledger = DuckLedger(path, clock, free_bytes=lambda: free[0])
    try:
        ledger.append([hand.batch(hand.row(1))], hand.now_ms)
        free[0] = 2**20
        with pytest.raises(LedgerUnavailable, match="only 1 MiB of disk are free"):
            ledger.append([hand.batch(hand.row(2, 1, 2))], hand.now_ms)
        assert ledger.usage(hand.start_ms, hand.now_ms, ("pod",))
        free[0] = 2**40
        (receipt,) = ledger.append([hand.batch(hand.row(2, 1, 2))], hand.now_ms)
        assert isinstance(receipt, Receipt)
    finally:
        ledger.close()
