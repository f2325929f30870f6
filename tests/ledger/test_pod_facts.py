"""A pod has one row, for any number, source and order of its facts."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.ledger.protocols import Facts
from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.write import record_columns
from accountant.storage.write.record_columns import MOST_AS_LISTS, add


def _told(ledger: DuckLedger, hand: Any) -> list[tuple[str, str]]:
    return [(pod.facts.uid, pod.facts.queue_ref) for pod in ledger.pods(hand.start_ms, hand.now_ms)]


def _fact(hand: Any, seq: int, queue: str, after_ms: int, uid: str = "pod-1") -> Any:
    at = hand.start_ms
    return hand.fact(seq, uid, queue_ref=queue, created_ms=at, observed_ms=at + after_ms)


def test_the_newest_word_counts_whatever_the_order(ledger: DuckLedger, hand: Any) -> None:
    for seq, (queue, after_ms) in enumerate([("kai:a", 10), ("kai:c", 30), ("kai:b", 20)], start=1):
        ledger.append([hand.batch(_fact(hand, seq, queue, after_ms))], hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:c")]


PLACED = [("kai:vision", 10), ("kai:speech", 30), ("", 40), ("kai:finance", 20)]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_queue_that_is_changed_after_the_pod_was_placed_changes_nothing(
    ledger: DuckLedger, hand: Any, order: tuple[int, ...]
) -> None:
    """The creator of a pod can change its label at any time, but the scheduler reads it once."""
    at = hand.start_ms
    for seq, which in enumerate(order, start=1):
        queue, after_ms = PLACED[which]
        fact = hand.fact(seq, "pod-1", queue_ref=queue, created_ms=at, scheduled_ms=at + 5, observed_ms=at + after_ms)
        ledger.append([hand.batch(fact)], hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:vision")]


def test_what_waits_may_still_choose_and_what_is_placed_without_a_queue_has_none(ledger: DuckLedger, hand: Any) -> None:
    at = hand.start_ms
    told = [
        hand.fact(1, "a", queue_ref="kai:x", created_ms=at, observed_ms=at + 1),
        hand.fact(2, "a", queue_ref="kai:y", created_ms=at, scheduled_ms=at + 2, observed_ms=at + 3),
        hand.fact(3, "a", queue_ref="kai:z", created_ms=at, scheduled_ms=at + 2, observed_ms=at + 4),
        hand.fact(4, "b", queue_ref="", created_ms=at, scheduled_ms=at + 2, observed_ms=at + 3),
        hand.fact(5, "b", queue_ref="kai:z", created_ms=at, scheduled_ms=at + 2, observed_ms=at + 4),
    ]
    ledger.append([hand.batch(*told)], hand.now_ms)
    assert _told(ledger, hand) == [("a", "kai:y"), ("b", "")]


def test_who_saw_the_pod_placed_first_decides_which_queue_it_counts_for(ledger: DuckLedger, hand: Any) -> None:
    """The accountant was down when the pod was placed, and the label changed before the accountant restarted."""
    at = hand.start_ms

    def seen(seq: int, queue: str, after_ms: int) -> Any:
        return hand.fact(seq, "pod-1", queue_ref=queue, created_ms=at, scheduled_ms=at + 5, observed_ms=at + after_ms)

    ledger.append([hand.batch(seen(1, "kai:vision", 10))], hand.now_ms)
    ledger.observe(Facts(pods=(("prod", seen(0, "kai:finance", 30)),)), hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:vision")]


def test_a_cluster_queue_that_an_administrator_changes_counts(ledger: DuckLedger, hand: Any) -> None:
    at = hand.start_ms
    for after_ms, queue in (
        (10, "kueue:ns/q"),
        (20, "kueue:ns/q@one"),
        (30, "kueue:ns/q@two"),
        (40, "kueue:ns/p@three"),
    ):
        fact = hand.fact(0, "pod-1", queue_ref=queue, created_ms=at, scheduled_ms=at + 5, observed_ms=at + after_ms)
        ledger.observe(Facts(pods=(("prod", fact),)), hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kueue:ns/q@two")]


def test_a_queue_that_only_the_owners_name_may_be_found_out_a_little_later(ledger: DuckLedger, hand: Any) -> None:
    at = hand.start_ms
    for after_ms, queue in ((10, ""), (20, "kai:a"), (30, "kai:b")):
        fact = hand.fact(0, "pod-1", queue_ref=queue, created_ms=at, scheduled_ms=at + 5, observed_ms=at + after_ms)
        ledger.observe(Facts(pods=(("prod", fact),)), hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:a")]


def test_two_outboxes_of_one_group_may_tell_of_the_same_pod(ledger: DuckLedger, hand: Any) -> None:
    one = hand.batch(_fact(hand, 1, "kai:b", 20), _fact(hand, 2, "kai:x", 5, "pod-2"))
    other = hand.batch(_fact(hand, 1, "kai:a", 10), epoch="0192-b")
    ledger.append([one, other], hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:b"), ("pod-2", "kai:x")]


def test_a_known_pod_beside_a_new_one(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(_fact(hand, 1, "kai:a", 10))], hand.now_ms)
    again = hand.batch(_fact(hand, 2, "kai:b", 20), _fact(hand, 3, "kai:x", 20, "pod-2"))
    ledger.append([again], hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:b"), ("pod-2", "kai:x")]


def test_what_another_process_was_told_is_known(path: Path, clock: Any, hand: Any) -> None:
    for seq, (queue, after_ms) in enumerate([("kai:b", 20), ("kai:a", 10), ("kai:c", 30)], start=1):
        ledger = open_ledger(path, clock)
        ledger.append([hand.batch(_fact(hand, seq, queue, after_ms))], hand.now_ms)
        found = _told(ledger, hand)
        ledger.close()
    assert found == [("pod-1", "kai:c")]


def test_the_api_server_told_of_it_first(ledger: DuckLedger, hand: Any) -> None:
    ledger.observe(Facts(pods=(("prod", _fact(hand, 0, "kai:a", 10)),)), hand.now_ms)
    for seq, (queue, after_ms) in enumerate([("kai:b", 20), ("kai:c", 30)], start=1):
        ledger.append([hand.batch(_fact(hand, seq, queue, after_ms))], hand.now_ms)
    assert [uid for uid, _ in _told(ledger, hand)] == ["pod-1"]


def test_a_telling_that_was_rolled_back_was_none(
    ledger: DuckLedger, hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [hand.batch(_fact(hand, 1, "kai:a", 10))]
    with monkeypatch.context() as broken:
        broken.setattr(ledger, "_commit", _fails)
        with pytest.raises(LedgerUnavailable):
            ledger.append(sent, hand.now_ms)
    assert _told(ledger, hand) == []
    ledger.append(sent, hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:a")]


def _fails(*_: object, **__: object) -> None:
    raise LedgerUnavailable("the disk is full")


@pytest.mark.parametrize("count", [1, MOST_AS_LISTS, MOST_AS_LISTS + 1])
def test_few_rows_and_many_arrive_alike(tmp_path: Path, count: int) -> None:
    rows = [(1 + i % 3, i, 2**64 - 1 - i) for i in range(count)]
    database = Database(tmp_path / "ledger.duckdb")
    with database.cursor() as cursor:
        add(cursor, "pod_fact", record_columns.FACT, [])
        add(cursor, "pod_fact", record_columns.FACT, rows)
        assert cursor.run("FROM pod_fact ORDER BY seq") == rows
    database.close()
