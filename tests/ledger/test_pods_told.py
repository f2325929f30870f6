"""A pod is one row however often, by whomever and in whatever order it is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accountant.errors import LedgerUnavailable
from accountant.ledger import Facts
from accountant.store import DuckLedger, open_ledger
from accountant.store.database import Database
from accountant.store.writing import columns
from accountant.store.writing.adding import MOST_AS_LISTS, add


def _told(ledger: DuckLedger, hand: Any) -> list[tuple[str, str]]:
    return [(pod.facts.uid, pod.facts.queue_ref) for pod in ledger.pods(hand.start_ms, hand.now_ms)]


def _fact(hand: Any, seq: int, queue: str, after_ms: int, uid: str = "pod-1") -> Any:
    at = hand.start_ms
    return hand.fact(seq, uid, queue_ref=queue, created_ms=at, observed_ms=at + after_ms)


def test_the_newest_word_counts_whatever_the_order(ledger: DuckLedger, hand: Any) -> None:
    for seq, (queue, after_ms) in enumerate([("kai:a", 10), ("kai:c", 30), ("kai:b", 20)], start=1):
        ledger.append([hand.batch(_fact(hand, seq, queue, after_ms))], hand.now_ms)
    assert _told(ledger, hand) == [("pod-1", "kai:c")]


def test_two_nodes_of_one_group_may_tell_of_the_same_pod(ledger: DuckLedger, hand: Any) -> None:
    one = hand.batch(_fact(hand, 1, "kai:b", 20), _fact(hand, 2, "kai:x", 5, "pod-2"))
    other = hand.batch(_fact(hand, 1, "kai:a", 10), node="n2", epoch="0192-b")
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
        add(cursor, "pod_fact", columns.FACT, [])
        add(cursor, "pod_fact", columns.FACT, rows)
        assert cursor.run("FROM pod_fact ORDER BY seq") == rows
    database.close()
