"""What is read while commits go on is remembered with what they bring, and never otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.query.window_weights import Lens
from accountant.wire.policy_models import Policy, WindowSpec

QUEUES = [{"name": "a", "refs": ["kai:a"]}, {"name": "b", "refs": ["kai:b"]}]


def more(hand: Any) -> Any:
    """Rows that follow, of a pod that is known and of another."""
    return hand.batch(hand.row(3, 10, 12), hand.fact(4, "pod-2", queue_ref="kai:b"), hand.row(5, 12, 14))


def another_queue(hand: Any) -> Any:
    return hand.batch(hand.fact(3, queue_ref="kai:b", observed_ms=hand.start_ms + 1), hand.row(4, 10, 12))


def late(hand: Any) -> Any:
    """A set that displaces what was there, so that the quarter-hour did not only grow."""
    return hand.batch(hand.row(1, 4, 6, holder=None), epoch="0191-a")


@pytest.mark.parametrize("cluster", [None, "prod"])
@pytest.mark.parametrize("half_life", [None, 3600])
@pytest.mark.parametrize("minutes", [15, 12], ids=["whole", "cut"])
@pytest.mark.parametrize(("meanwhile", "kept"), [(more, True), (another_queue, False), (late, False)])
def test_a_commit_in_between(
    ledger: DuckLedger, hand: Any, cluster: str | None, half_life: int | None, minutes: int, meanwhile: Any, kept: bool
) -> None:
    ledger.put_policy(Policy.model_validate({"queues": QUEUES}), hand.start_ms)
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))], hand.now_ms)
    lens = Lens.of(cluster=cluster)
    if cluster is not None:
        ledger.append([hand.batch(hand.row(1, 0, 10), cluster="staging")], hand.now_ms)
    spec, at = WindowSpec(size=3600, half_life=half_life), hand.start_ms + minutes * 60_000
    windows = ledger._windows
    with windows.reading(ledger._state, spec, at, lens) as reading, ledger._snapshot() as (cursor, state):
        ledger.append([meanwhile(hand)], hand.now_ms)
        asked = windows.window(cursor, state, spec, at, "allocated", 0.98, lens, reading)
    assert asked is not None
    assert asked.usage["a"] > 0
    remembered = windows.window(None, ledger._state, spec, at, "allocated", 0.98, lens)
    assert (remembered is not None) == kept
    found = ledger.window(spec, at, "allocated", 0.98, cluster=cluster)
    assert remembered in (None, found)
    windows.forget_all(ledger._state.version)
    assert ledger.window(spec, at, "allocated", 0.98, cluster=cluster) == found, "as the tables tell it"


@pytest.mark.parametrize("half_life", [None, 3600])
def test_another_cluster_that_begins_to_report_in_between(ledger: DuckLedger, hand: Any, half_life: int | None) -> None:
    """From then on the first is told apart: what was read as everybody's is not remembered as its own."""
    ledger.put_policy(Policy.model_validate({"queues": QUEUES}), hand.start_ms)
    ledger.append([hand.batch(hand.fact(1, queue_ref="kai:a"), hand.row(2, 0, 10))], hand.now_ms)
    spec, at, lens = WindowSpec(size=3600, half_life=half_life), hand.start_ms + 12 * 60_000, Lens.of(cluster="prod")
    alone = ledger.window(spec, at, "allocated", 0.98, cluster="prod")
    windows = ledger._windows
    windows.forget_all(ledger._state.version)
    with windows.reading(ledger._state, spec, at, lens) as reading:
        fact = hand.fact(1, queue_ref="kai:a")
        ledger.append([hand.batch(fact, hand.row(2, 0, 12), cluster="staging")], hand.now_ms)
        with ledger._snapshot() as (cursor, state):
            asked = windows.window(cursor, state, spec, at, "allocated", 0.98, lens, reading)
    both = ledger.window(spec, at, "allocated", 0.98)
    assert asked is not None
    assert asked.usage == alone.usage
    assert ledger.window(spec, at, "allocated", 0.98, cluster="prod") == asked == alone
    assert both.usage["a"] > ledger.window(spec, at, "allocated", 0.98, cluster="staging").usage["a"] > 0
