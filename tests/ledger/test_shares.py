"""Start-up and borrowed time from the rows of a real ledger."""

from __future__ import annotations

import pytest

from accountant.billing.usage_pricing import charges
from accountant.ledger.protocols import Down, Facts, IdlePhases, LentTime, NodeFacts
from accountant.prices.price_book import PriceBook
from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import Holder
from gputally.base.yaml_file import parse
from gputally.server.config_loading import validate
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS

US = 60_000_000
BY = ("namespace", "pod")


def pod(name):
    return Holder(kind="pod", uid=name, namespace="vision", name=name)


def keys(name):
    return {"namespace": "vision", "pod": name}


def ask(ledger: DuckLedger, start=0.0, end=60.0):
    return ledger.idle_phases(START_MS + round(start * MINUTE), START_MS + round(end * MINUTE), BY)


def test_idle_at_the_beginning_is_start_up(hand, ledger):
    """A pod is bound at minute 0 and runs from 2.5. The other member of its gang runs from 5. Rows are cut there."""
    a = [hand.row(i + 1, i, i + 1, holder=pod("a"), busy_us=0) for i in range(8)]
    b = [hand.row(i + 9, i, i + 1, "gpu-2", holder=pod("b"), busy_us=0) for i in range(8)]
    facts = [
        hand.fact(17, "a", name="a", workload="PyTorchJob/t", created_ms=START_MS, started_ms=START_MS + 150_000),
        hand.fact(18, "b", name="b", workload="PyTorchJob/t", created_ms=START_MS, started_ms=START_MS + 300_000),
    ]
    ledger.append([hand.batch(*a, *b, *facts)], NOW_MS)
    assert ask(ledger) == [
        IdlePhases(keys("a"), 150_000_000, 150_000_000), IdlePhases(keys("b"), 300_000_000, 0),
    ]  # fmt: skip
    halves = [ask(ledger, 0, 2.25), ask(ledger, 2.25, 8)]
    assert [sum(p.starting_us for p in half) for half in halves] == [270_000_000, 180_000_000]
    assert ask(ledger, 8, 9) == []


def test_pods_nobody_reported_idle_like_any_other(hand, ledger):
    ledger.append([hand.batch(hand.row(1, busy_us=0))], NOW_MS)
    assert ask(ledger) == []


@pytest.fixture
def shared_gpu(hand, ledger):
    """Two pods hold a quarter of a GPU each, and half of it is free. `greedy` uses more than its quarter, `calm`
    less."""
    rows = []
    for minute in range(10):
        seq = minute * 3
        part = {"capacity_us": US // 4, "allocated_us": US // 4}
        rows += [
            hand.row(seq + 1, minute, minute + 1, holder=pod("greedy"), busy_us=US - 1_000_000, **part),
            hand.row(seq + 2, minute, minute + 1, holder=pod("calm"), busy_us=1_000_000, **part),
            hand.row(seq + 3, minute, minute + 1, holder=None, capacity_us=US // 2, allocated_us=0),
        ]
    ledger.append([hand.batch(*rows)], NOW_MS)
    return ledger


def test_borrowed_time_comes_from_the_free_part_then_from_co_holders(shared_gpu):
    found = shared_gpu.lent(START_MS, START_MS + 10 * MINUTE, BY)
    assert {(m.key["pod"], m.account): m.gpu_us for m in found} == {
        ("", "unallocated"): -300_000_000, ("calm", "allocated_idle"): -140_000_000, ("greedy", "busy"): 440_000_000,
    }  # fmt: skip
    assert found == sorted(found, key=lambda m: (m.key["namespace"], m.key["pod"], m.account))
    assert isinstance(found[0], LentTime)


def test_the_bill_never_exceeds_the_gpu(shared_gpu):
    text = (
        "schema: 1\ncurrency: USD\nbilling: {shared_gpus: busy}\nrows:\n"
        "  - {id: a, model: H100, price: 1, per: gpu-hour, source: s, as_of: 2026-01-01, basis: gpu-only,"
        " valid_from: 2026-01-01}\n"
    )
    book = validate(parse(text, "book.yaml"), PriceBook)
    found = charges(shared_gpu, book, START_MS, START_MS + 10 * MINUTE, ("pod",))
    assert {(c.key[0], c.account): c.gpu_us for c in found} == {
        ("calm", "busy"): 10_000_000, ("greedy", "busy"): 590_000_000,
    }  # fmt: skip
    only = charges(shared_gpu, book, START_MS, START_MS + 10 * MINUTE, ("team",), {"pod": {"greedy"}})
    assert sum(c.gpu_us for c in only) == 590_000_000


def test_a_node_that_is_down_lends_nothing(shared_gpu):
    down = Down(START_MS, START_MS + 10 * MINUTE, "maintenance")
    shared_gpu.observe(Facts(nodes=(NodeFacts("prod", "n1", down=(down,)),)), NOW_MS)
    found = shared_gpu.lent(START_MS, START_MS + 10 * MINUTE, BY)
    assert {m.account for m in found} == {"busy", "allocated_idle"}
    assert sum(m.gpu_us for m in found) == 0
