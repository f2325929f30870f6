"""A GPU belongs to the node that first reported it: another node's sets are set aside and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accountant.store import DuckLedger, open_ledger
from agent.clock import VirtualClock

MINUTE = 60_000
OLDEST = "00000000-0000-7000-8000-000000000000"
"""Sorts before every honest epoch."""


def _reasons(ledger: DuckLedger) -> set[tuple[str, str]]:
    return {(one.node, one.reason) for one in ledger.quarantined()}


def test_an_epoch_that_sorts_first_displaces_no_other_nodes_rows(ledger: Any, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.row(2, 1, 2))], hand.now_ms)
    before = accounts(0, 2, node="n1")
    (receipt,) = ledger.append(
        [hand.batch(hand.row(1, holder=None), hand.row(2, 1, 2, holder=None), node="n2", epoch=OLDEST)], hand.now_ms
    )
    assert (receipt.stored, receipt.quarantined, receipt.ack.durable_seq) == (0, 2, 2)
    assert accounts(0, 2, node="n1") == before
    assert accounts(0, 2, node="n2") == {}
    refused = ledger.quarantined()[0]
    assert refused.reason == "foreign-gpu"
    assert all(name in refused.detail for name in ("'n1'", "'n2'", "gpu-1"))


def test_the_past_before_the_owners_first_record_and_after_its_last_is_no_other_nodes(
    ledger: Any, hand: Any, accounts: Any
) -> None:
    ledger.append([hand.batch(hand.row(1, 30, 31))], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, 0, 1), hand.row(2, 40, 41), node="n2", epoch=OLDEST)], hand.now_ms)
    assert accounts(0, 60, node="n2") == {}
    assert _reasons(ledger) == {("n2", "foreign-gpu")}


def test_of_two_claims_in_one_commit_the_first_counts(ledger: Any, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), node="n2", epoch=OLDEST)], hand.now_ms)
    assert _reasons(ledger) == {("n2", "foreign-gpu")}
    assert accounts(0, 1, node="n1")


def test_the_same_uuid_in_another_cluster_is_another_gpu(ledger: Any, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1)), hand.batch(hand.row(1), cluster="other", node="n2")], hand.now_ms)
    assert not ledger.quarantined()


@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "restarted"])
def test_a_card_that_moved_is_taken_over_after_an_hour_of_silence(
    path: Path, clock: VirtualClock, hand: Any, reopened: bool
) -> None:
    ledger = open_ledger(path, clock)
    ledger.append([hand.batch(hand.row(1, 58, 59))], hand.now_ms)
    if reopened:
        ledger.close()
        ledger = open_ledger(path, clock)
        ledger.append([hand.batch(hand.row(1, gpu="gpu-9"), node="n9")], hand.now_ms)

    def claim(seq: int, start: int) -> Any:
        now = hand.start_ms + (start + 1) * MINUTE
        return ledger.append([hand.batch(hand.row(seq, start, start + 1), node="n2")], now)[0]

    assert claim(1, 118).quarantined == 1  # silent for 59 minutes
    assert claim(2, 121).stored == 1
    # What the first node still has of its own time is booked, what it claims of the new owner's is not.
    late = hand.batch(hand.row(2, 100, 101), hand.row(3, 122, 123))
    (receipt,) = ledger.append([late], hand.start_ms + 124 * MINUTE)
    assert (receipt.stored, receipt.quarantined) == (1, 1)
    assert _reasons(ledger) == {("n1", "foreign-gpu"), ("n2", "foreign-gpu")}
    ledger.close()


def test_an_owner_is_not_silent_while_the_accountant_could_not_hear_it(
    path: Path, clock: VirtualClock, hand: Any
) -> None:
    with_rows = open_ledger(path, clock)
    with_rows.append([hand.batch(hand.row(1, 0, 1))], hand.now_ms)
    with_rows.close()
    ledger = open_ledger(path, clock)
    later = hand.start_ms + 5 * 60 * MINUTE
    (receipt,) = ledger.append([hand.batch(hand.row(1, 298, 299), node="n2")], later)
    assert receipt.quarantined == 1
    (receipt,) = ledger.append([hand.batch(hand.row(2, 1, 2), hand.row(3, 298, 299))], later)
    assert receipt.stored == 2
    ledger.close()


def test_an_owner_that_reports_other_gpus_alone_is_without_this_one(ledger: Any, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1), hand.row(2, gpu="gpu-2"))], hand.start_ms + MINUTE)
    for number in range(1, 62):
        now = hand.start_ms + (number + 1) * MINUTE
        ledger.append([hand.batch(hand.row(number + 2, number, number + 1, gpu="gpu-2"))], now)
    (receipt,) = ledger.append([hand.batch(hand.row(1, 62, 63), node="n2")], hand.start_ms + 63 * MINUTE)
    assert receipt.stored == 1


def test_an_import_displaces_no_node_and_no_node_displaces_an_import(
    ledger: Any, hand: Any, accounts: Callable[..., Any]
) -> None:
    imported: dict[str, Any] = {"epoch": "import:slurm:00000000000000"}
    ledger.append([hand.batch(hand.row(1, 0, 1, method="imported"), node="n2", **imported)], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, 0, 1), hand.row(2, 10, 11))], hand.now_ms)
    assert _reasons(ledger) == {("n1", "foreign-gpu")}
    assert accounts(0, 1, node="n2")
    # n1 has it from minute 10 on: an import of n2 has no part in that, nor in what lies behind it.
    more = hand.batch(
        hand.row(2, 10, 11, method="imported"), hand.row(3, 12, 13, method="imported"), node="n2", **imported
    )
    (receipt,) = ledger.append([more], hand.now_ms)
    assert receipt.quarantined == 2
