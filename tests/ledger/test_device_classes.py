"""Sums by kind of device equal the added sums of single GPUs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from gputally.base.clock import VirtualClock
from tests.effort import examples
from tests.fresh import fresh

SEEN: tuple[Dimension, ...] = ("node", "gpu_model", "cluster", "pool", "region", "capacity_type")
OTHERS: tuple[Dimension, ...] = ("job", "team", "hour")
NODES, GPUS, MODELS = ("n1", "n2", "n3"), ("a", "b", "c", "d"), ("H100", "A100")

stays = st.lists(
    st.tuples(st.sampled_from(GPUS), st.sampled_from(NODES), st.sampled_from(MODELS), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=8,
)
downs = st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 50), st.integers(1, 20)), max_size=3)


def booked(path: Any, hand: Any, told: Any, down: Any, moved: bool) -> DuckLedger:
    """GPUs that are on nodes for ten minutes at a time, some of them held. The nodes have pools, and one node changes
    its pool."""
    ledger = open_ledger(fresh(path), VirtualClock(hand.now_ms))
    for number, (gpu, node, model, when, held) in enumerate(told):
        row = {"gpu_model": model} if held else {"gpu_model": model, "holder": None}
        rows = [hand.row(i + 1, when * 10 + i, when * 10 + i + 1, gpu, **row) for i in range(8)]
        cluster = "prod" if node != "n3" else "lab"
        ledger.append([hand.batch(*rows, node=node, cluster=cluster, epoch=f"0192-{number}")], hand.now_ms)
    spans: dict[str, list[Down]] = defaultdict(list)
    for node, start, length in down:
        begin = hand.start_ms + start * 60_000
        spans[node].append(Down(begin, begin + length * 60_000, "cordoned"))
    pools = {"n1": "x", "n2": "x", "n3": "y"}
    for pool in ("old", None) if moved else (None,):
        nodes = [
            NodeFacts("prod" if node != "n3" else "lab", node, pool or pools[node], "eu", capacity_type="spot",
                      down=tuple(spans[node]), since_ms=hand.start_ms + (0 if pool else 25) * 60_000)
            for node in NODES
        ]  # fmt: skip
        ledger.observe(Facts(nodes=tuple(nodes)), hand.now_ms)
    return ledger


def figures(lines: list[UsageLine], by: tuple[Dimension, ...]) -> dict[tuple[str, ...], list[int]]:
    found: dict[tuple[str, ...], list[int]] = {}
    for line in lines:
        values = [*line.accounts_gpu_us.model_dump().values(), line.borrowed_busy_us, line.energy_uj]
        key = tuple(line.key[name] for name in by)
        found[key] = [a + b for a, b in zip(found.get(key, [0] * len(values)), values, strict=True)]
    return {key: values for key, values in found.items() if any(values)}


@pytest.mark.thorough
@settings(max_examples=examples(6, 40), deadline=None, suppress_health_check=list(HealthCheck))
@given(stays, downs, st.booleans(), st.sets(st.sampled_from(SEEN), min_size=1), st.sets(st.sampled_from(OTHERS)))
def test_kinds_add_up_to_what_each_gpu_has(
    tmp_path_factory: Any, hand: Any, told: Any, down: Any, moved: bool, seen: Any, others: Any
) -> None:
    ledger = booked(tmp_path_factory.mktemp("apart") / "ledger.duckdb", hand, told, down, moved)
    try:
        by = tuple(name for name in get_args(Dimension) if name in seen | others)
        for span in ((0, 60), (7, 33)):
            at = tuple(hand.start_ms + minute * 60_000 for minute in span)
            told_apart = ledger.usage(*at, ("gpu", *by))
            assert figures(ledger.usage(*at, by), by) == figures(told_apart, by)
    finally:
        ledger.close()


@pytest.mark.thorough
@settings(max_examples=examples(6, 40), deadline=None, suppress_health_check=list(HealthCheck))
@given(stays, downs, st.booleans(), st.sampled_from(NODES), st.sampled_from(GPUS), st.sets(st.sampled_from(OTHERS)))
def test_a_node_asked_for_alone_has_what_it_has_among_all(
    tmp_path_factory: Any, hand: Any, told: Any, down: Any, moved: bool, node: Any, gpu: Any, others: Any
) -> None:
    ledger = booked(tmp_path_factory.mktemp("alone") / "ledger.duckdb", hand, told, down, moved)
    cluster = "prod" if node != "n3" else "lab"
    filters: tuple[dict[Dimension, tuple[str, ...]], ...] = (
        {"node": (node,)}, {"cluster": (cluster,), "node": (node,)}, {"gpu": (gpu,)}, {"node": ("nowhere",)},
        {"node": NODES, "gpu": (gpu,)},
    )  # fmt: skip
    try:
        by = tuple(name for name in get_args(Dimension) if name in {"cluster", "node", "gpu", "gpu_model", *others})
        for span in ((0, 60), (7, 33)):
            at = tuple(hand.start_ms + minute * 60_000 for minute in span)
            among_all = ledger.usage(*at, by)
            for where in filters:
                mine = [line for line in among_all if all(line.key[name] in where[name] for name in where)]
                assert figures(ledger.usage(*at, by, where), by) == figures(mine, by)
    finally:
        ledger.close()
