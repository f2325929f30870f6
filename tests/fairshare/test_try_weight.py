"""What queues would be entitled to with another weight of one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Policy
from fairshare.explain.try_weight import try_weight
from gputally.base.errors import FairshareError
from tests.hypothesis_examples import examples

QUEUES = [
    {"name": "all", "deserved": 4}, {"name": "a", "parent": "all", "deserved": 1}, {"name": "b", "parent": "all"},
    {"name": "c", "weight": 2},
]  # fmt: skip


def parts(weight, queue="a", gpus=16.0, queues=QUEUES):
    return {row.queue: (row.part, row.part_then) for row in try_weight(Policy(queues=queues), gpus, queue, weight)}


def test_twice_the_weight_divides_what_is_above_the_quotas():
    queues = [{"name": "a", "deserved": 2}, {"name": "b", "deserved": 0.5}]
    (a, b) = try_weight(Policy(queues=queues), 3, "b", 2)
    assert (a.gpus, a.gpus_then, b.gpus, b.gpus_then) == pytest.approx((2.25, 2 + 1 / 6, 0.75, 0.5 + 1 / 3), abs=1e-3)
    assert (a.weight, a.weight_then, b.weight, b.weight_then) == (1, 1, 1, 2)


@given(weight=st.floats(1, 100))
@settings(max_examples=examples(100, 20), deadline=None)
def test_more_weight_never_gives_less_and_takes_from_siblings_alone(weight):
    found = parts(weight)
    assert found["a"][1] >= found["a"][0] - 1e-9
    assert found["c"][1] == pytest.approx(found["c"][0])
    assert found["a"][1] + found["b"][1] == pytest.approx(found["all"][1])


@pytest.mark.parametrize("wrong", [{"queue": "none"}, {"weight": -1}, {"weight": float("nan")}, {"gpus": 0}])
def test_what_cannot_be_tried_has_a_reason(wrong):
    with pytest.raises(FairshareError):
        parts(**{"weight": 2, **wrong})
