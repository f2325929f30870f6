"""What queues would be entitled to with another weight of one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from fairshare.__main__ import main
from fairshare.explain.try_weight import Divided, divided, try_weight
from fairshare.explain.what_if_simulation import compare, history_from_ledger
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR
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


class Past:
    """An accountant of which queue `a` held one GPU for an hour in each of these hours before now, a job each, and
    whose other GPU nobody held."""

    def __init__(self, *hours_ago):
        self.hours_ago = hours_ago

    def usage(self, start_ms, end_ms, by):
        for at_ms in range(start_ms, end_ms, MS_PER_HOUR):
            ago = (NOW_MS // MS_PER_HOUR * MS_PER_HOUR - at_ms) // MS_PER_HOUR
            hour = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H")
            held = ago in self.hours_ago
            for name, accounts in ("a", {"busy": US_PER_HOUR * held}), ("", {"unallocated": US_PER_HOUR * (2 - held)}):
                key = {"queue": name, "job": f"job-{ago}" if name else "", "gpu_model": "m", "hour": hour, "gpu": "g"}
                yield UsageLine(key={part: key[part] for part in by}, accounts_gpu_us=Accounts(**accounts))

    def median_waits_s(self, _start_ms, _end_ms):
        return {}


def test_a_replay_says_how_many_jobs_held_gpus_in_its_span_and_how_many_it_replays():
    policy = Policy(queues=QUEUES, window={"size": "2d"})
    past = history_from_ledger(Past(1, 5, 30, 40), policy, MS_PER_DAY // 1000, None, NOW_MS)
    found = compare(policy, policy, past, NOW_MS, lambda _part, _step: None)
    assert (found.jobs, found.replayed, found.warm_up_ms) == (2, 4, 2 * MS_PER_DAY)
    assert found.end_ms - found.start_ms == MS_PER_DAY
    assert found.gpus == 2
