"""What each queue is guaranteed and holds."""

from __future__ import annotations

from decimal import Decimal

from accountant.billing.quota_usage import ModelSpans, guarantees
from accountant.wire.policy_models import Policy, PolicyVersion
from tests.billing.usage_rows import at, held, ledger_of, unheld

START, END = at("2026-11-10T12:00"), at("2026-11-10T12:05")


def told(queues, *rows):
    policy = PolicyVersion(version="v", effective_ms=0, policy=Policy(queues=queues))
    by = ("queue", *ModelSpans.of((policy,), START, END).dimensions)
    with ledger_of(*rows).moment(START, END) as moment:
        found = guarantees(policy, moment.usage((START, END), by), START, END)
    return {(one.queue, one.gpu_model): (one.guaranteed_gpus, one.held_gpus, one.above_gpus) for one in found}


def test_a_queue_above_its_guarantee_says_by_how_much():
    queues = [{"name": "all"}, {"name": "a", "parent": "all", "deserved": 1.5}, {"name": "b", "parent": "all"}]
    assert told(queues, held(START, END, 2, queue="a")) == {
        ("a", ""): (Decimal("1.5"), Decimal(2), Decimal("0.5")), ("b", ""): (0, 0, 0),
    }  # fmt: skip


def test_a_queue_without_a_bound_is_never_above():
    assert told([{"name": "a", "deserved": -1}], held(START, END, 7, queue="a")) == {("a", ""): (None, 7, 0)}


def test_time_on_one_model_uses_nothing_of_the_guarantee_of_another():
    queues = [{"name": "a", "gpu_models": {"H100": {"deserved": 4}, "A100": {"deserved": 1}}}]
    rows = [held(START, END, 3, queue="a", gpu_model="NVIDIA A100-SXM4-40GB", gpu="GPU-9")]
    assert told(queues, *rows) == {("a", "A100"): (1, 3, 2), ("a", "H100"): (4, 0, 0)}


def test_where_nothing_is_metered_nothing_is_known():
    assert told([{"name": "a", "deserved": 1}], unheld(START, END, "unmetered")) == {("a", ""): (1, None, None)}
    assert told([{"name": "a", "deserved": 1}]) == {("a", ""): (1, None, None)}
