"""A pod has one row, for any number, source and order of its facts."""

from __future__ import annotations

from contextlib import closing
from itertools import count, permutations
from typing import Any, NamedTuple

import pytest

from accountant.core.errors import LedgerUnavailable
from accountant.ledger.protocols import Facts
from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.write import record_columns
from accountant.storage.write.record_columns import MOST_AS_LISTS, add
from agent.wire import PodFacts
from tests.ledger.conftest import Hand, booked
from tests.moments import present


class Said(NamedTuple):
    """A report of the node or the cluster's inventory about a pod, some milliseconds after its creation."""

    queue: str
    after_ms: int
    placed: bool = False
    by_cluster: bool = False

    def fact(self, hand: Hand, seq: int, uid: str = "pod-1") -> PodFacts:
        at = hand.start_ms
        placed_ms = at + 5 if self.placed else None
        return hand.fact(
            seq, uid, queue_ref=self.queue, created_ms=at, scheduled_ms=placed_ms, observed_ms=at + self.after_ms
        )


def placed(queue: str, after_ms: int) -> Said:
    return Said(queue, after_ms, placed=True)


def inventory(queue: str, after_ms: int) -> Said:
    return Said(queue, after_ms, placed=True, by_cluster=True)


def queues(ledger: DuckLedger, hand: Any) -> list[tuple[str, str]]:
    return [(pod.facts.uid, pod.facts.queue_ref) for pod in present(ledger).pods(hand.start_ms, hand.now_ms)]


CASES: dict[str, tuple[list[Said], str]] = {
    "the newest counts": ([Said("kai:a", 10), Said("kai:c", 30), Said("kai:b", 20)], "kai:c"),
    "it waits, and is placed": ([Said("kai:x", 1), placed("kai:y", 6), placed("kai:z", 7)], "kai:y"),
    "it is placed without a queue": ([placed("", 6), placed("kai:z", 7)], ""),
    "the node saw it placed first": ([placed("kai:vision", 10), inventory("kai:finance", 30)], "kai:vision"),
    "an administrator changes a cluster queue": (
        [
            inventory("kueue:ns/q", 10),
            inventory("kueue:ns/q@one", 20),
            inventory("kueue:ns/q@two", 30),
            inventory("kueue:ns/p@three", 40),
        ],
        "kueue:ns/q@two",
    ),
    "only the owners name it, a little later": (
        [inventory("", 10), inventory("kai:a", 20), inventory("kai:b", 30)],
        "kai:a",
    ),
    "the API server told of it first": (
        [Said("kai:a", 10, by_cluster=True), Said("kai:b", 20), Said("kai:c", 30)],
        "kai:c",
    ),
    # The creator of a pod can change its label at any time, but the scheduler reads it once.
    **{
        f"changed after it was placed, order {number}": (list(order), "kai:vision")
        for number, order in enumerate(
            permutations(
                [placed("kai:vision", 10), placed("kai:speech", 30), placed("", 40), placed("kai:finance", 20)]
            )
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_which_queue_a_pod_counts_for(send, ledger, hand, case):
    said, queue = CASES[case]
    numbers = count(1)
    for one in said:
        if one.by_cluster:
            ledger.observe(Facts(pods=(("prod", one.fact(hand, 0)),)), hand.now_ms)
        else:
            send(one.fact(hand, next(numbers)))
    assert queues(ledger, hand) == [("pod-1", queue)]


def test_two_outboxes_of_one_group_may_tell_of_the_same_pod(ledger, hand):
    one = hand.batch(Said("kai:b", 20).fact(hand, 1), Said("kai:x", 5).fact(hand, 2, "pod-2"))
    other = hand.batch(Said("kai:a", 10).fact(hand, 1), epoch="0192-b")
    ledger.append([one, other], hand.now_ms)
    assert queues(ledger, hand) == [("pod-1", "kai:b"), ("pod-2", "kai:x")]


def test_a_known_pod_beside_a_new_one(send, ledger, hand):
    send(Said("kai:a", 10).fact(hand, 1))
    send(Said("kai:b", 20).fact(hand, 2), Said("kai:x", 20).fact(hand, 3, "pod-2"))
    assert queues(ledger, hand) == [("pod-1", "kai:b"), ("pod-2", "kai:x")]


def test_what_another_process_was_told_is_known(opened, hand):
    for seq, said in enumerate([Said("kai:b", 20), Said("kai:a", 10), Said("kai:c", 30)], start=1):
        with closing(opened()) as ledger:
            booked(ledger, hand.now_ms, hand.batch(said.fact(hand, seq)))
            found = queues(ledger, hand)
    assert found == [("pod-1", "kai:c")]


def test_a_telling_that_was_rolled_back_was_none(ledger, hand, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise LedgerUnavailable("the disk is full")

    sent = hand.batch(Said("kai:a", 10).fact(hand, 1))
    with monkeypatch.context() as broken:
        broken.setattr(ledger, "_commit", fails)
        with pytest.raises(LedgerUnavailable):
            ledger.append([sent], hand.now_ms)
    assert queues(ledger, hand) == []
    booked(ledger, hand.now_ms, sent)
    assert queues(ledger, hand) == [("pod-1", "kai:a")]


@pytest.mark.parametrize("count", [1, MOST_AS_LISTS, MOST_AS_LISTS + 1])
def test_few_rows_and_many_arrive_alike(tmp_path, count):
    rows = [(1 + i % 3, i, 2**64 - 1 - i) for i in range(count)]
    with closing(Database(tmp_path / "ledger.duckdb")) as database, database.cursor() as cursor:
        add(cursor, "pod_fact", record_columns.FACT, [])
        add(cursor, "pod_fact", record_columns.FACT, rows)
        assert cursor.run("FROM pod_fact ORDER BY seq") == rows
