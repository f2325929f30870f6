"""Feasible demand and entitlement, on figures worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.simulator.fairness_measures import entitlement, feasible_demand
from fairshare.simulator.simulation_model import Outcome
from tests.effort import examples
from tests.simulator.conftest import MINUTE, job


def test_a_job_demands_no_more_than_its_gang_for_the_time_left() -> None:
    outcomes = [
        Outcome(job("whole", gpus=2, minutes=30)),
        Outcome(job("cut-off", gpus=4, minutes=600, at=90)),
        Outcome(job("other", queue="b", minutes=10, at=50)),
        Outcome(job("too-late", queue="b", at=120)),
        Outcome(job("impossible", queue="b", gpus=999), rejected=True),
    ]
    assert feasible_demand(outcomes, 0, 120 * MINUTE) == {"a": (2 * 30 + 4 * 30) * MINUTE, "b": 10 * MINUTE}


@pytest.mark.parametrize(
    ("total", "demand", "weights", "expected"),
    [
        (100, {"a": 100, "b": 100}, {"a": 1, "b": 3}, {"a": 25, "b": 75}),
        (100, {"a": 10, "b": 100}, {"a": 1, "b": 1}, {"a": 10, "b": 90}),
        (100, {"a": 10, "b": 20}, {"a": 1, "b": 1}, {"a": 10, "b": 20}),
        (90, {"a": 5, "b": 40, "c": 99}, {"a": 1, "b": 1, "c": 1}, {"a": 5, "b": 40, "c": 45}),
        (100, {"a": 100}, {"a": 1, "b": 1}, {"a": 100, "b": 0}),
        (100, {"a": 100, "b": 100}, {"a": 0, "b": 1}, {"a": 0, "b": 100}),
        (0, {"a": 1}, {"a": 1}, {"a": 0}),
    ],
)
def test_water_filling(
    total: int, demand: dict[str, int], weights: dict[str, float], expected: dict[str, float]
) -> None:
    assert entitlement(total, demand, weights) == expected


@pytest.mark.thorough
@settings(max_examples=examples(50, 400), deadline=None)
@given(
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 10**6), st.integers(1, 9)), min_size=1),
)
def test_entitlement_is_given_out_in_full_and_never_above_demand(
    total: int, queues: dict[str, tuple[int, int]]
) -> None:
    demand = {name: want for name, (want, _) in queues.items()}
    shares = entitlement(total, demand, {name: weight for name, (_, weight) in queues.items()})
    assert all(0 <= shares[name] <= want + 1e-6 for name, want in demand.items())
    assert float(sum(map(Fraction, shares.values()))) == pytest.approx(min(total, sum(demand.values())))
    backwards = dict(reversed(queues.items()))
    again = entitlement(total, demand, {name: weight for name, (_, weight) in backwards.items()})
    assert again == shares
