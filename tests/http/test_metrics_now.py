"""The last settled quarter: capacity, burn rate, unpriced and unmetered GPUs, on a ledger that answers by the hour."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from accountant.api import ledger_metrics as metrics_names
from accountant.api import ledger_metrics as metrics_now
from accountant.ledger.protocols import NodeFacts
from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.base.units import BUCKET_MS, US_PER_MS

GPU_US = BUCKET_MS * US_PER_MS
"""One GPU over the quarter."""
NOW_MS = 1_794_000_000_000


def line(team: str, model: str, node: str = "n1", **accounts: int) -> UsageLine:
    key = {"team": team, "gpu_model": model, "pool": "train", "node": node}
    return UsageLine(key=key, accounts_gpu_us=Accounts(**{name: gpus * GPU_US for name, gpus in accounts.items()}))


def shown(families: Iterable[object]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("gputally_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples  # type: ignore[attr-defined]
    }


@pytest.fixture
def quarter(ledger):
    ledger.lines[:] = [
        line("vision", "NVIDIA H100 80GB HBM3", busy=3, allocated_idle=1),
        line("__idle__", "NVIDIA H100 80GB HBM3", unallocated=2, down=1),
        line("vision", "Tesla T4", busy=5),
    ]
    return ledger


def test_capacity_counts_every_account(quarter, book):
    seen = shown(metrics_now.families(quarter, book, NOW_MS, "UTC"))
    assert seen["capacity_gpus", "NVIDIA H100 80GB HBM3", "train"] == 7
    assert seen["capacity_gpus", "Tesla T4", "train"] == 5


def test_the_accounts_of_the_quarter_add_up_to_the_capacity(quarter, book):
    seen = shown(metrics_now.families(quarter, book, NOW_MS, "UTC"))
    accounts = {key[1:]: gpus for key, gpus in seen.items() if key[0] == "account_gpus"}
    assert accounts["busy", "Tesla T4"] == 5
    assert accounts["down", "NVIDIA H100 80GB HBM3"] == 1
    for model in ("NVIDIA H100 80GB HBM3", "Tesla T4"):
        assert sum(gpus for (_, of), gpus in accounts.items() if of == model) == seen["capacity_gpus", model, "train"]
    assert seen["team_gpus", "vision", "busy"] == 8
    assert seen["team_gpus", "vision", "allocated_idle"] == 1
    assert ("team_gpus", "vision", "unallocated") not in seen


def test_the_burn_rate_is_price_times_gpus_and_idle_capacity_has_its_own(quarter, book):
    seen = shown(metrics_now.families(quarter, book, NOW_MS, "UTC"))
    assert seen["burn_rate_per_hour", "vision", "EUR"] == 4 * 2.5
    assert seen["burn_rate_per_hour", "__idle__", "EUR"] == 2 * 2.5


def test_gpus_without_a_price_are_counted_and_priced_ones_are_zero(quarter, book):
    seen = shown(metrics_now.families(quarter, book, NOW_MS, "UTC"))
    assert seen["unpriced_gpus", "Tesla T4", "train"] == 5
    assert seen["unpriced_gpus", "NVIDIA H100 80GB HBM3", "train"] == 0
    without = shown(metrics_now.families(quarter, None, NOW_MS, "UTC"))
    assert without["unpriced_gpus", "NVIDIA H100 80GB HBM3", "train"] == 6
    assert not [key for key in without if key[0] == "burn_rate_per_hour"]


def test_the_nodes_that_lack_most_are_named_and_no_more(quarter, monkeypatch):
    monkeypatch.setattr(type(quarter), "coverage", lambda *_: 0.5)
    quarter.lines[:] = [line("__idle__", "T4", f"n{i:03}", unmetered=1 + (i == 150)) for i in range(200)]
    seen = shown(metrics_now.families(quarter, None, NOW_MS, "UTC"))
    nodes = {key[1]: value for key, value in seen.items() if key[0] == "unmetered_gpus"}
    assert len(nodes) == metrics_now.MOST_NODES
    assert nodes["n150"] == 2


def test_nodes_queues_and_namespaces_are_told_for_joins():
    nodes = [
        NodeFacts("c", "n1", pool="train", region="eu", capacity_type="spot"),
        NodeFacts("c", "gone", pool="train", deleted_ms=NOW_MS),
    ]
    assert shown([metrics_names.of_nodes(nodes, NOW_MS)]) == {("node_info", "n1", "train", "eu", "spot"): 1}
    policy = Policy.model_validate(
        {"queues": [{"name": "all", "team": "hall"}, {"name": "nlp", "parent": "all"}, {"name": "own", "team": "me"}]}
    )
    assert shown([metrics_names.of_queues(policy)]) == {
        ("queue_info", "all", "", "hall"): 1,
        ("queue_info", "nlp", "all", "hall"): 1,
        ("queue_info", "own", "", "me"): 1,
    }
    assert shown([metrics_names.of_queues(None)]) == {}


def test_of_namespaces_those_that_held_most_are_told():
    def held(team: str, namespace: str, gpus: int) -> UsageLine:
        return UsageLine(key={"team": team, "namespace": namespace}, accounts_gpu_us=Accounts(allocated_idle=gpus))

    lines = [held("t", f"n{i:03}", i) for i in range(metrics_names.MOST_NAMESPACES + 10)] + [held("__idle__", "", 999)]
    told = dict(metrics_names.of_namespaces(lines))
    assert len(told) == metrics_names.MOST_NAMESPACES
    assert ("t", "n009") not in told
    assert told["t", "n010"] == 10
    assert ("__idle__", "") not in told


def test_a_budget_is_told_with_the_team_that_pays(door, ledger):
    budgets = [
        {"name": "nlp-money", "queue": "nlp", "limit": 10, "currency": "EUR"},
        {"name": "x", "team": "speech", "limit": 4},
    ]
    policy = Policy.model_validate({"queues": [{"name": "nlp", "team": "hall"}], "budgets": budgets})
    ledger.put_policy(policy, 0)
    text = door().client.get("/metrics").text
    assert 'gputally_budget_limit{budget="nlp-money",queue="nlp",team="hall",unit="EUR"} 10.0' in text
    assert 'gputally_budget_limit{budget="x",queue="",team="speech",unit="GPU-hours"} 4.0' in text
    assert 'gputally_budget_spent_ratio{budget="x",queue="",team="speech"}' in text
