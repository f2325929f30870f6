"""The breakdown of GET /v1/usage: causes of idle time, unused guarantees, zones and instance types."""

from __future__ import annotations

from typing import Any

import pytest

from accountant.billing.idle_time_causes import broken_down
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import Facts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from agent.wire import Holder

MINUTE, US = 60_000, 60_000_000
POLICY = Policy.model_validate(
    {
        "schema": 1,
        "queues": [
            {"name": "root"},
            {"name": "vision", "parent": "root", "team": "vision", "deserved": 1.5, "refs": ["kai:vision"]},
            {"name": "speech", "parent": "root", "team": "speech", "deserved": 1, "refs": ["kai:speech"]},
        ],
    }
)


@pytest.fixture
def filled(ledger: DuckLedger, hand: Any) -> DuckLedger:
    """Ten minutes of two GPUs: vision's pod starts for 2.5 minutes and is idle afterwards, and the other GPU is
    free."""
    rows = [hand.row(i + 1, i, i + 1, holder=Holder(kind="pod", uid="pod-1"), busy_us=0) for i in range(10)]
    rows += [hand.row(i + 11, i, i + 1, "gpu-2", holder=None) for i in range(10)]
    fact = hand.fact(21, "pod-1", queue_ref="kai:vision", created_ms=hand.start_ms, started_ms=hand.start_ms + 150_000)
    ledger.append([hand.batch(*rows, fact)], hand.now_ms)
    ledger.put_policy(POLICY, 1)
    return ledger


def ask(ledger: DuckLedger, hand: Any, *by: Dimension, **where: Any) -> dict[tuple[str, ...], UsageLine]:
    span = hand.start_ms, hand.start_ms + 10 * MINUTE
    lines = ledger.usage(*span, by, where)
    return {tuple(line.key.values()): line for line in broken_down(ledger, lines, *span, by, where, "UTC")}


def test_the_sorts_of_idle_time_add_up(filled: DuckLedger, hand: Any) -> None:
    line = ask(filled, hand, "team")["vision",]
    assert (line.starting_us, line.gang_waiting_us, line.running_idle_us) == (150_000_000, 0, 450_000_000)
    assert line.accounts_gpu_us.allocated_idle == 10 * US


def test_a_guarantee_reserves_what_was_free_for_whom_it_was(filled: DuckLedger, hand: Any) -> None:
    """Vision has 0.5 GPU unused and speech 1 GPU. The one free GPU is divided among them: a third and two thirds."""
    found = ask(filled, hand, "queue")
    assert {key[0]: line.reserved_unused_us for key, line in found.items()} == {
        "__idle__": 0, "speech": 400_000_000, "vision": 200_000_000,
    }  # fmt: skip
    assert found["speech",].accounts_gpu_us.total == 0  # a memo: it held nothing
    assert sum(line.accounts_gpu_us.total for line in found.values()) == 20 * US
    assert ask(filled, hand, "gpu", "queue")["gpu-2", "speech"].reserved_unused_us == 400_000_000


def test_filters_hold_for_the_breakdown(filled: DuckLedger, hand: Any) -> None:
    (only,) = ask(filled, hand, "gpu", team=["vision"], gpu=["gpu-2"]).values()
    assert (only.key, only.reserved_unused_us, only.running_idle_us) == ({"gpu": "gpu-2"}, 200_000_000, 0)
    (other,) = ask(filled, hand, "team", pool=[""], team=["vision"]).values()
    assert (other.starting_us, other.reserved_unused_us) == (150_000_000, 200_000_000)
    assert ask(filled, hand, "team", team=["nobody"]) == {}


def test_without_a_policy_nothing_is_reserved(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, holder=None))], hand.now_ms)
    assert [line.reserved_unused_us for line in ask(ledger, hand, "team").values()] == [0]


def test_place_by_zone_and_machine(filled: DuckLedger, hand: Any) -> None:
    assert ask(filled, hand, "zone", "instance_type").keys() == {("", "")}
    node = hand.batch(hand.row(1)).node
    filled.observe(Facts(nodes=(NodeFacts("prod", node, zone="eu-1a", instance_type="p5.48xlarge"),)), hand.now_ms)
    assert ask(filled, hand, "zone", "instance_type")["eu-1a", "p5.48xlarge"].accounts_gpu_us.total == 20 * US
    assert ask(filled, hand, "team", zone=["elsewhere"]) == {}


def test_what_somebody_reported_is_recorded_with_it(filled: DuckLedger, hand: Any) -> None:
    act = NewAct(hand.now_ms, "pods", "hpc", "ada", "no holders at all")
    filled.observe(Facts(), hand.now_ms, act=act)
    assert [(found.who, found.subject) for found in filled.acts("pods")] == [("ada", "hpc")]
