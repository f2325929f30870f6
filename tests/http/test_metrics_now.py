"""The last settled quarter: capacity, burn rate, unpriced and unmetered GPUs, on a ledger that answers by the hour."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from accountant import metrics_now
from accountant.wire import Accounts, UsageLine
from agent.units import BUCKET_MS, US_PER_MS

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
