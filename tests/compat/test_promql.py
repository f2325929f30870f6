"""KAI's queries are parsed: each form its client can be configured to send, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.compat.kai_usage_api import UnknownQuery, parse
from tests.compat.conftest import vectors

ALLOCATED = "kai_queue_allocated_gpus"


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v.get("name"))
def test_every_vector_is_understood(vector) -> None:
    for query, of in ((vector["gpuAllocationQuery"], "allocation"), (vector["gpuCapacityQuery"], "capacity")):
        asked = parse(query)
        assert (asked.resource, asked.of) == ("gpu", of)
        assert (asked.window_s, asked.resolution_s) == (vector["windowSeconds"], vector["resolutionSeconds"])
        assert asked.half_life_s == vector["halfLifeSeconds"]
        assert asked.reference_s == (vector["now"] if vector["halfLifeSeconds"] else None)


def test_a_week_is_604800_seconds_and_aggregations_change_nothing() -> None:
    plain = parse(f"sum_over_time(({ALLOCATED})[1w:1m0s])")
    assert plain.window_s == 604_800
    assert parse(f"sum_over_time((max by (queue_name) ({ALLOCATED}))[168h0m0s:60s])") == plain


def test_a_capacity_may_be_that_of_a_node_pool() -> None:
    asked = parse('sum_over_time((sum(resources_per_nodepool{resource="memory",nodepool="h100"}))[1d:1m])')
    assert (asked.resource, asked.of, asked.pool) == ("memory", "capacity", "h100")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "not PromQL"),
        ("((", "not PromQL"),
        ("up", r"expected sum_over_time"),
        (f"sum_over_time({ALLOCATED}[5m])", "expected a subquery"),
        (f"sum_over_time(({ALLOCATED})[5m:])", "no resolution"),
        (f"sum_over_time(({ALLOCATED})[1w:1m] offset 5m)", "expected a subquery"),
        (f"sum_over_time(({ALLOCATED} offset 5m)[1w:1m])", "expected one metric"),
        (f"sum_over_time(({ALLOCATED})[10ms:1m])", "whole number of seconds"),
        (f"sum_over_time((({ALLOCATED}) * 2)[1w:1m])", "half_life"),
        (f"sum_over_time((({ALLOCATED}) * (0.4^((1 - time()) / 5)))[1w:1m])", "decay"),
        (f"sum_over_time((({ALLOCATED}) * (0.5^((1 - time()) / 1e300)))[1w:1m])", "half-life"),
        ("sum_over_time((node_load1)[1w:1m])", "unknown metric 'node_load1'"),
        ('sum_over_time((kube_node_status_capacity{resource="pods"})[1w:1m])', "unknown metric"),
        ('sum_over_time((kube_node_status_capacity{resource="cpu",node="a"})[1w:1m])', "unknown selector node='a'"),
        (
            'sum_over_time((kube_node_status_capacity{resource="nvidia_com_gpu",node=~"gpu.*"})[1w:1m])',
            "unknown selector node=~'gpu",
        ),
        (
            'sum_over_time((resources_per_nodepool{resource="cpu",nodepool!="a"})[1w:1m])',
            "unknown selector nodepool!='a'",
        ),
        ('sum_over_time((kube_node_status_capacity{resource=~"nvidia.*"})[1w:1m])', "unknown metric"),
        ("x" * 5_000, "more than 4096 characters"),
    ],
)
def test_what_is_no_question_of_kai_is_refused_with_the_part_at_fault(query, reason) -> None:
    with pytest.raises(UnknownQuery, match=reason):
        parse(query)


@given(
    st.text(max_size=80) | st.from_regex(r"sum_over_time\(\(\(kai_queue_allocated_gpus\)[^\"]{0,40}", fullmatch=True)
)
def test_no_text_gives_anything_but_a_question_or_a_refusal(text: str) -> None:
    with contextlib.suppress(UnknownQuery):
        assert parse(text).window_s > 0
