"""Advice on nodes from demand, on spot capacity by Daly's interval and on parts of GPUs, with figures worked out by
hand."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from io import StringIO
from math import sqrt
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from accountant.ledger.protocols import JobKey
from gputally.advise.advice_tables import Window, spots_table
from gputally.advise.autoscaling_spot_and_sharing import (
    GPU,
    VARIABLE,
    FileFormat,
    ModelUse,
    NodeHour,
    NodePool,
    PoolAdvice,
    RestartAssumptions,
    autoscaler_file,
    daly_interval,
    pool_advice,
    run_overhead,
    sharing_advice,
    slot_of,
    spot_advice,
    variables,
    young_interval,
)
from tests.hypothesis_examples import examples

HOUR_US, HOUR_MS = 3_600_000_000, 3_600_000
H100 = NodePool("prod", "h100", "NVIDIA H100", "eu", "on-demand")
QUANTITY = re.compile(
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
"""The pattern of a limit of karpenter.sh/v1 NodePools. Source: their CRD, aws/karpenter-provider-aws."""


def hours(*held: float, nodes: int = 4, gpus: int = 8, pool: NodePool = H100, day: int = 5) -> list[NodeHour]:
    """Build hours from Monday 2026-10-05 00:00 with this number of held GPUs each; nodes are filled in order."""
    rows = []
    for at, count in enumerate(held):
        for number in range(nodes):
            here = min(gpus, max(0.0, count - number * gpus))
            name = f"2026-10-{day + at // 24:02}T{at % 24:02}"
            rows.append(NodeHour(pool, f"n{number}", name, gpus * HOUR_US, round(here * HOUR_US)))
    return rows


def one(rows: list[NodeHour], price: Decimal | None = Decimal("2.50"), threshold: float = 0.75) -> PoolAdvice:
    (found,) = pool_advice(rows, {row.hour: HOUR_MS for row in rows}, {H100: price}, threshold)
    return found


def test_nodes_follow_what_is_held() -> None:
    found = one(hours(0, 6, 6.1, 24))
    # A node is due for every 6 GPUs of 8: none, one, two, four.
    assert found.weekly[:4] == (0, 1, 2, 4)
    assert (found.min_nodes, found.max_nodes, found.nodes_now, found.gpus_per_node) == (0, 4, 4, 8)
    assert found.weekly[4] is None
    assert (found.idle_node_hours, found.node_hours) == (4 + 3 + 3 + 1, 16)
    assert found.surplus_node_hours == 4 + 3 + 2 + 0
    assert found.saving == Decimal("2.50") * 9 * 8
    assert (found.peak_gpus, found.full_hours) == (24, 0)


def test_an_hour_of_the_week_takes_the_largest_need_of_all_weeks() -> None:
    rows = [*hours(6, 6), *hours(24, 0, day=12)]
    found = one(rows)
    assert found.weekly[:2] == (4, 1)
    assert found.surplus_node_hours == (4 - 4) + (4 - 1) + (4 - 4) + (4 - 1)


def test_what_is_full_differs_or_has_no_price_is_said() -> None:
    rows = [*hours(32), *[NodeHour(H100, "small", "2026-10-05T00", 4 * HOUR_US, 4 * HOUR_US)]]
    found = one(rows, price=None)
    assert (found.full_hours, found.shapes, found.gpus_per_node) == (1, (4, 8), 8)
    assert (found.unit_price, found.saving) == (None, None)
    assert found.max_nodes == 6


def test_half_hours_and_nodes_that_were_down_do_not_count() -> None:
    rows = [*hours(8), NodeHour(H100, "n9", "2026-10-05T00", 0, 0), NodeHour(H100, "n0", "2026-10-05T01", 99, 99)]
    (found,) = pool_advice(rows, {"2026-10-05T00": HOUR_MS, "2026-10-05T01": HOUR_MS // 2}, {})
    assert (found.hours, found.node_hours) == (1, 4)
    assert pool_advice([], {}, {}) == ()
    with pytest.raises(ValueError, match="threshold"):
        pool_advice(rows, {}, {}, 0)


def test_hours_of_the_week() -> None:
    assert (slot_of("2026-10-05T00"), slot_of("2026-10-11T23")) == (0, 167)


@settings(max_examples=examples(20, 120))
@given(st.lists(st.integers(0, 32), min_size=1, max_size=48), st.sampled_from([0.5, 0.75, 1.0]))
def test_the_advised_nodes_always_hold_what_was_held(held: list[int], threshold: float) -> None:
    found = one(hours(*held), threshold=threshold)
    for at, count in enumerate(held):
        nodes = found.weekly[at % 168]
        assert nodes is not None
        assert nodes * found.gpus_per_node * threshold >= count - 1e-6
        assert found.min_nodes <= nodes <= found.max_nodes
    assert found.surplus_node_hours <= found.node_hours


@pytest.mark.parametrize("form", ["tfvars", "ansible"])
def test_variables_for_terraform_and_ansible(form: FileFormat) -> None:
    text = autoscaler_file(form, [one(hours(0, 6, 24))], 0.75, "a span")
    document = json.loads(text) if form == "tfvars" else yaml.safe_load(text)
    pool = document[VARIABLE]["h100"]
    assert (pool["min_nodes"], pool["max_nodes"], pool["gpus_per_node"]) == (0, 4, 8)
    assert {len(counts) for counts in pool["weekly_nodes"].values()} == {24}
    assert pool["weekly_nodes"]["mon"][:4] == [0, 1, 4, 4]  # an hour nobody saw has the largest count
    assert pool["utilisation_threshold"] == 0.75


def test_pools_of_one_name_stay_apart() -> None:
    other = NodePool("other", "h100", "NVIDIA H100", "us", "spot")
    rows = [*hours(6), *hours(6, pool=other)]
    found = pool_advice(rows, {"2026-10-05T00": HOUR_MS}, {})
    assert list(variables(found, 0.75)) == ["h100", "prod_h100_on-demand_eu"]


def test_a_karpenter_limit_has_the_shape_of_a_node_pool() -> None:
    nameless = NodePool("prod", "NVIDIA L4", "NVIDIA L4", "", "", named=False)
    rows = [*hours(6, 24), *hours(1, pool=nameless)]
    text = autoscaler_file("karpenter", pool_advice(rows, {row.hour: HOUR_MS for row in rows}, {}), 0.75, "a span")
    (document,) = [each for each in yaml.safe_load_all(text) if each]
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert (document["apiVersion"], document["kind"]) == ("karpenter.sh/v1", "NodePool")
    assert document["metadata"] == {"name": "h100"}
    assert document["spec"] == {"limits": {GPU: "32"}}
    assert all(QUANTITY.match(value) for value in document["spec"]["limits"].values())
    assert "# NVIDIA L4: the inventory has no node pool" in text


def test_dalys_interval() -> None:
    # δ 120 s, M 24 h: Young 4553.7 s; Daly's further terms and − δ.
    assert young_interval(120, 86_400) == pytest.approx(sqrt(2 * 120 * 86_400))
    part = 120 / (2 * 86_400)
    assert daly_interval(120, 86_400) == pytest.approx(4553.68 * (1 + sqrt(part) / 3 + part / 9) - 120, rel=1e-5)
    assert daly_interval(300, 100) == 100
    with pytest.raises(ValueError, match="above 0"):
        daly_interval(0, 1)


@settings(max_examples=examples(20, 120))
@given(st.floats(1, 600), st.floats(1_800, 400_000), st.floats(0.4, 2.5))
def test_no_other_interval_is_much_better(checkpoint_s: float, between_s: float, factor: float) -> None:
    best = daly_interval(checkpoint_s, between_s)
    ours, other = (run_overhead(each, checkpoint_s, 60, between_s) for each in (best, best * factor))
    assert ours is not None
    assert other is None or ours <= other * 1.01
    assert ours > 1


def test_savings_on_spot_pay_for_what_is_lost() -> None:
    row = {"team": "llm", "cluster": "prod", "namespace": "llm", "job": "PyTorchJob/a", "gpu_hours": "100",
           "cost": "300.00", "saving_at_most": "150.00"}  # fmt: skip
    rows = [row, {**row, "job": "PyTorchJob/wide"}]
    assumed = RestartAssumptions(120, 600, 86_400)
    narrow, wide = spot_advice(rows, {JobKey("prod", "llm", "PyTorchJob/wide"): 64}, assumed)
    assert (narrow.job, narrow.nodes, wide.nodes) == ("PyTorchJob/a", 1, 64)
    stretch = run_overhead(narrow.interval_s, 120, 600, 86_400)
    assert stretch is not None
    assert narrow.stretch == stretch
    assert narrow.spot_cost == Decimal(150)
    assert narrow.saving == Decimal(300) - Decimal(150) * Decimal(str(round(stretch, 6)))
    assert wide.interval_s < narrow.interval_s
    assert wide.saving is not None
    assert wide.saving < narrow.saving
    (never,) = spot_advice([row], {}, RestartAssumptions(120, 100_000, 60))
    assert (never.stretch, never.saving) == (None, None)


def test_jobs_of_one_name_in_two_clusters_are_two_jobs() -> None:
    row = {"team": "llm", "cluster": "a", "namespace": "llm", "job": "PyTorchJob/a", "gpu_hours": "100",
           "cost": "300.00", "saving_at_most": "150.00"}  # fmt: skip
    found = spot_advice(
        [row, {**row, "cluster": "b"}], {JobKey("b", "llm", "PyTorchJob/a"): 8}, RestartAssumptions(120, 600, 86_400)
    )
    assert [(one.cluster, one.nodes) for one in found] == [("a", 1), ("b", 8)]
    window = Window.whole_hours(-7 * 86_400_000, 0, "UTC")
    for several, shown in ((found, "b/llm/PyTorchJob/a"), (found[1:], " llm/PyTorchJob/a")):
        console = Console(width=150, record=True, file=StringIO())
        console.print(spots_table(several, window, RestartAssumptions(120, 600, 86_400), 1.0, "USD"))
        assert shown in console.export_text()


def hint(job: str, peak: float, kind: str = "slice", saving: str | None = "70") -> dict[str, Any]:
    return {
        "team": "nlp",
        "cluster": "prod",
        "namespace": "nlp",
        "job": job,
        "kind": kind,
        "peak_busy_gpus": peak,
        "saving_at_most": saving,
    }


@pytest.mark.parametrize(
    ("model", "memory", "peak", "how"),
    [
        ("NVIDIA H100 80GB HBM3", 6_000, 0.10, "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", 15_000, 0.10, "1g.20gb"),
        ("NVIDIA H100 80GB HBM3", 15_000, 0.28, "2g.20gb"),
        ("NVIDIA A100-SXM4-40GB", 4_000, 0.40, "3g.20gb"),
        ("NVIDIA H200 141GB", None, 0.5, "4g.71gb"),
        ("NVIDIA A30 24GB", 5_000, 0.2, "1g.6gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 20_000, 0.2, "1g.24gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 20_000, 0.3, "2g.48gb"),
        ("NVIDIA RTX PRO 5000 Blackwell", 20_000, 0.3, "1g.24gb"),
        ("NVIDIA H100", 60_000, 0.1, "1g"),
        ("NVIDIA H100 80GB HBM3", 60_000, 0.1, "none"),
        ("NVIDIA L4 24GB", 5_000, 0.2, "4"),
        ("NVIDIA L4 24GB", 9_000, 0.2, "2"),
        ("NVIDIA L4 24GB", 15_000, 0.2, "none"),
        ("NVIDIA T4", None, 0.45, "2"),
    ],
)
def test_a_part_of_a_gpu(model: str, memory: float | None, peak: float, how: str) -> None:
    (found,) = sharing_advice([hint("Job/a", peak)], {JobKey("prod", "nlp", "Job/a"): ModelUse(model, memory)})
    assert {"mig": found.profile, "time-slicing": str(found.replicas), "none": "none"}[found.way] == how
    assert (found.saving is None) == (found.way == "none")
    assert found.reason


def test_what_is_not_known_is_no_advice() -> None:
    first, second = sharing_advice([hint("Job/a", 0.1), hint("Job/b", 0.1, saving=None), hint("Job/c", 3, "fewer")], {})
    assert (first.way, second.way) == ("none", "none")
    assert "on an unknown one" in first.reason
