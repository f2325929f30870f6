"""What queues would be entitled to with another weight of one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Decision, Policy
from fairshare.__main__ import main
from fairshare.explain.try_weight import Divided, divided, try_weight
from gputally.base.errors import FairshareError
from tests.fairshare.conftest import NOW_MS, Capsys
from tests.fairshare.fixed_answers_server import serving
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
@settings(max_examples=examples(20, 100), deadline=None)
def test_more_weight_never_gives_less_and_takes_from_siblings_alone(weight):
    found = parts(weight)
    assert found["a"][1] >= found["a"][0] - 1e-9
    assert found["c"][1] == pytest.approx(found["c"][0])
    assert found["a"][1] + found["b"][1] == pytest.approx(found["all"][1])


@pytest.mark.parametrize("wrong", [{"queue": "none"}, {"weight": -1}, {"weight": float("nan")}, {"gpus": 0}])
def test_what_cannot_be_tried_has_a_reason(wrong):
    with pytest.raises(FairshareError):
        parts(**{"weight": 2, **wrong})


def cycle(at_ms: int, gpus: float, target: str = "fake", **fields: Any) -> Decision:
    """The record of a cycle that divided these GPUs."""
    given = {"kind": "weight", "subject": "*", "mode": "enforce", "reason": "", "policy_version": "v", **fields}
    return Decision(id=f"v/{at_ms}/{target}", at_ms=at_ms, target=target, inputs={"gpus": gpus}, **given)


def test_the_newest_cycle_of_each_scheduler_says_how_many_gpus_are_divided():
    of_weight, held = cycle(9, 7, subject="a"), cycle(8, 0)
    known = [of_weight, held, cycle(7, 61), cycle(6, 8, "kueue"), cycle(5, 60)]
    assert divided(known, 64) == (Divided("fake", 61, 7), Divided("kueue", 8, 6))
    assert divided([of_weight, held], 64) == (Divided("", 64),)


@pytest.mark.parametrize(
    ("recorded", "options", "gpus"),
    [([], (), 16), ([cycle(NOW_MS, 12)], (), 12), ([cycle(NOW_MS, 12)], ("--capacity", "20"), 20)],
)
def test_the_command_divides_what_the_newest_cycle_divided(recorded, options, gpus, capsys: Capsys):
    policy = Policy(queues=QUEUES)
    routes = {
        "/v1/policy": lambda _: {"version": "v", "effective_ms": 0, "policy": policy.model_dump(mode="json")},
        "/v1/guarantees": lambda _: {
            "start_ms": NOW_MS - 300_000, "end_ms": NOW_MS, "coverage": 1, "gpus": "16", "queues": [],
        },
        "/v1/decisions": lambda query: [
            each.model_dump(mode="json") for each in recorded
            if int(query["start"]) <= each.at_ms < int(query["end"]) and query["subject"] == each.subject
        ],
    }  # fmt: skip
    with serving(routes) as url:
        assert main(["try-weight", "a", "2", "--url", url, "--output", "json", *options]) == 0
    found = {row["queue"]: row["gpus_then"] for row in json.loads(capsys.readouterr().out)}
    assert found == {row.queue: row.gpus_then for row in try_weight(policy, gpus, "a", 2)}
