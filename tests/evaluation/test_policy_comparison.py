"""Measures on figures worked out by hand; comparisons, and the scenarios of KAI's simulator."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import TurnPolicy
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights
from fairshare.simulator.entitlement import entitlement, feasible_demand
from fairshare.simulator.scheduler_engine import replay
from fairshare.simulator.simulated_controller import Feedback
from fairshare.simulator.simulation_model import CONTROL_S, ControllerView, JobOutcome, ReplayPool, Workload
from gputally.base.errors import DivisionError
from gputally.base.yaml_file import Document, FileFault
from gputally.testing.fake_accountant import usage_window
from tests.evaluation import fairness_measures, kai_scenarios, policy_comparison, scheduling_policies
from tests.evaluation.kai_scenarios import whole_gpus
from tests.evaluation.policy_comparison import parallel_replays
from tests.evaluation.scheduling_policies import NAMES, Setup
from tests.hypothesis_examples import examples
from tests.simulator.conftest import MINUTE, job, work_of


def test_a_job_demands_no_more_than_its_gang_for_the_time_left() -> None:
    outcomes = [
        JobOutcome(job("whole", gpus=2, minutes=30)),
        JobOutcome(job("cut-off", gpus=4, minutes=600, at=90)),
        JobOutcome(job("other", queue="b", minutes=10, at=50)),
        JobOutcome(job("too-late", queue="b", at=120)),
        JobOutcome(job("impossible", queue="b", gpus=999), rejected=True),
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
def test_water_fill(total: int, demand: dict[str, int], weights: dict[str, float], expected: dict[str, float]) -> None:
    assert entitlement(total, demand, weights) == expected


@pytest.mark.thorough
@settings(max_examples=examples(50, 400))
@given(
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 10**6), st.integers(1, 9)), min_size=1),
)
def test_entitlement_is_given_in_full_and_never_above_demand(total: int, queues: dict[str, tuple[int, int]]) -> None:
    demand = {name: want for name, (want, _) in queues.items()}
    shares = entitlement(total, demand, {name: weight for name, (_, weight) in queues.items()})
    assert all(0 <= shares[name] <= want + 1e-6 for name, want in demand.items())
    assert float(sum(map(Fraction, shares.values()))) == pytest.approx(min(total, sum(demand.values())))
    backwards = dict(reversed(queues.items()))
    again = entitlement(total, demand, {name: weight for name, (_, weight) in backwards.items()})
    assert again == shares


DAY, HOUR = 86_400, 3600


def _two_teams(days: int = 15) -> Workload:
    """a fills 16 GPUs with 2-hour jobs; b requests 8 from day 8 on."""
    rows = [(at * HOUR, 1, 2 * HOUR, 0) for at in range(0, days * 24, 2) for _ in range(17)]
    rows += [(at * HOUR, 4, 2 * HOUR, 1) for at in range(8 * 24, days * 24, 2) for _ in range(2)]
    return work_of(rows)


def test_a_day_that_is_shared_by_entitlement_has_no_error_and_one_that_is_not_says_how_much() -> None:
    fair = replay(_two_teams(), ReplayPool(16, [0.0, 0.0], [1.0, 1.0]), 15 * DAY)
    unfair = replay(_two_teams(), ReplayPool(16, [0.0, 0.0], [3.0, 1.0]), 15 * DAY)
    late = [span for span in fairness_measures.spans(fair, 24) if span.start_s >= 9 * DAY]
    assert all(span.contended for span in late)
    assert max(span.error for span in late) < 0.05
    wrong = fairness_measures.spans(replace(unfair, pool=fair.pool), 24)[-1]
    assert wrong.error == pytest.approx(0.25, abs=0.06)
    assert late[-1].jain == pytest.approx(1.0, abs=0.01)
    assert sum(late[-1].due) == pytest.approx(sum(late[-1].used))


def test_demand_counts_backlog_and_arrivals_each_up_to_what_they_could_run() -> None:
    work = work_of([(0, 4, 100 * DAY, 0), (0, 8, 2 * HOUR, 1), (8 * DAY - HOUR, 2, 3 * HOUR, 1), (9 * DAY, 1, HOUR, 1)])
    record = replay(work, ReplayPool(8, [8.0, 0.0], [1.0, 0.0]), 15 * DAY)
    span = next(span for span in fairness_measures.spans(record, 24) if span.start_s == 8 * DAY - 6 * HOUR)
    assert span.demand.tolist() == [4 * DAY, 8 * 2 * HOUR + 2 * 3 * HOUR]


def test_movement_counts_half_of_every_shift_of_normalised_weights() -> None:
    pool = ReplayPool(8, [0.0, 0.0], [1.0, 1.0])

    def swap(view: ControllerView) -> list[float]:
        return [3.0, 1.0] if view.now_s // DAY % 2 else [1.0, 1.0]

    record = replay(work_of([(0, 1, HOUR, 0)]), pool, 10 * DAY, steering=swap)
    moved, swing = fairness_measures.movement(record, 0)
    assert moved == pytest.approx(0.25, rel=0.2)
    assert swing == pytest.approx(2.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_keeps_the_cluster_as_full_as_the_work_allows(name: str) -> None:
    record = scheduling_policies.run(name, _two_teams(), Setup(16, (0.5, 0.5)), 15 * DAY)
    assert max(map(sum, record.held)) <= 16
    least = 0.7 if name == "partition" else 0.95
    assert record.delivered_gpu_s / (16 * 15 * DAY) > least
    with pytest.raises(ValueError, match="no policy 'kai-x'"):
        scheduling_policies.run("kai-x", _two_teams(), Setup(16, (0.5, 0.5)), 15 * DAY)


def test_a_comparison_takes_the_contended_windows_from_the_first_come_run() -> None:
    work = _two_teams(16)
    windows = policy_comparison.windows_of(16 * DAY, 2, 15)
    assert [(w.start_s, w.end_s) for w in windows] == [(0, 15 * DAY), (DAY, 16 * DAY)]
    seen: list[float] = []
    asked = (("static", "fifo", "default"), windows, [(1.5, 16)])
    player = policy_comparison.TaskRunner(work, (0.5, 0.5))
    results = policy_comparison.compare(*asked, player, lambda _, part: seen.append(part))
    assert [r.score.policy for r in results] == ["static", "fifo", "default"] * 2
    assert seen[-1] <= 1.0
    assert seen == sorted(seen)
    with parallel_replays(player, processes=2) as replays:
        assert policy_comparison.compare(*asked, replays) == results, "in processes of their own"
    summaries = policy_comparison.summarise(results)
    assert [s.policy for s in summaries] == ["static", "fifo", "default"]
    by_name = {s.policy: s.mean for s in summaries}
    assert by_name["fifo"].week[0] > 3 * by_name["default"].week[0]
    assert all(s.windows == 2 and s.mean.contended == 1.0 for s in summaries)
    for summary in summaries:
        low, high = summary.week_interval
        ordered = [summary.week_range[0], low, summary.mean.week[0], high, summary.week_range[1]]
        assert sorted(ordered) == pytest.approx(ordered, abs=1e-12)
        assert 1.0 <= summary.mean.slowdown[0] <= summary.mean.slowdown[1]


def test_the_bootstrap_is_repeatable_and_knows_how_little_one_window_says() -> None:
    assert policy_comparison.bootstrap([]) == (0.0, 0.0)
    assert policy_comparison.bootstrap([0.3]) == (0.3, 0.3)
    low, high = policy_comparison.bootstrap([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (low, high) == policy_comparison.bootstrap([0.1, 0.2, 0.3, 0.4, 0.5])
    assert 0.1 < low < 0.3 < high < 0.5
    assert policy_comparison.bootstrap([0.2] * 3) == pytest.approx((0.2, 0.2))
    assert policy_comparison.bootstrap([0.0, 1.0] * 8) == pytest.approx((0.255, 0.745))


def test_slowdown_is_bounded_for_short_jobs() -> None:
    """8 GPUs: a job of one minute that waits 58 minutes took 59, which is 5.9 times the ten minutes it counts as."""
    record = replay(work_of([(0, 8, 59 * 60, 0), (60, 8, 60, 0)]), ReplayPool(8, [8.0, 0.0], [1.0, 1.0]), DAY)
    assert fairness_measures.slowdowns(record, 0).tolist() == [1.0, 5.9]


@pytest.mark.parametrize("name", ["kai-2", "no-turns", "default"])
def test_the_controller_in_the_loop_is_the_one_in_the_cluster(name: str) -> None:
    """Feedback's running sums give the weights of `calculate_weights` on the accountant's answer."""
    policy = scheduling_policies.law_policy(name, ("a", "b"), Setup(16, (0.5, 0.5)))
    policy = policy.model_copy(update={"window": policy.window.model_copy(update={"half_life": None})})
    feedback, memory = Feedback(policy), {}
    values: list[list[float]] = []
    for at in range(CONTROL_S, 60 * CONTROL_S, CONTROL_S):
        early, late = min(at, 10 * CONTROL_S), max(0, at - 10 * CONTROL_S)
        used = [12 * early + 4 * late, 4 * early + 12 * late]
        ours = feedback(ControllerView(at, 16, used, [12, 4], [40, 20], [1, 11], [0, 0]))
        usage = {"a": used[0] * 1_000_000, "b": used[1] * 1_000_000}
        window = usage_window(usage, 16 * at * 1_000_000, end_ms=at * 1000, start_ms=0)
        standings = {"a": Standing(40, 12, 0.5, gang=1.0), "b": Standing(20, 4, 0.5, gang=11.0)}
        weighing = calculate_weights(WeightInputs(policy, window, standings, 16.0, at * 1000, memory))
        memory = weighing.memory
        assert ours == pytest.approx([weight.value for weight in weighing.weights])
        values.append(list(ours))
    assert len({tuple(each) for each in values}) > 1


def _scenario(**changes: object) -> Document:
    data: Any = {
        "Cycles": 800, "WindowSize": 200, "HalfLifePeriod": 100, "KValue": 2, "Nodes": [{"GPUs": 16, "Count": 1}],
        "Queues": [{"Name": n, "Weight": w, "DeservedGPUs": 0} for n, w in (("a", 1), ("b", 2), ("c", 3))],
        "Jobs": {n: {"GPUs": 16, "NumPods": 1, "NumJobs": 10} for n in "abc"},
    }  # fmt: skip
    return Document("scenario.yaml", data | changes, {(): 1})


HUNDRED = {
    "Cycles": 500, "WindowSize": 150, "HalfLifePeriod": 75, "Nodes": [{"GPUs": 100, "Count": 1}],
    "Queues": [{"Name": n, "DeservedGPUs": 20, "Priority": 100} for n in ("llm", "vision", "speech")],
    "Jobs": {
        "llm": {"GPUs": 10, "NumPods": 6, "NumJobs": 10},
        "vision": {"GPUs": 10, "NumPods": 1, "NumJobs": 60},
        "speech": {"GPUs": 5, "NumPods": 1, "NumJobs": 60},
    },
}  # fmt: skip


def test_kais_scenarios_end_as_on_the_real_scheduler() -> None:
    """Figures of KAI v0.17 in its own simulator: constant from the first cycle on."""
    alone = kai_scenarios.run(kai_scenarios.parse(_scenario()), "kai")
    assert kai_scenarios.second_half(alone) == [16, 0, 0]
    assert alone.shares[-1] == (0, 6, 10)
    three = kai_scenarios.run(kai_scenarios.parse(_scenario(**HUNDRED)), "kai")
    assert kai_scenarios.second_half(three) == [30, 30, 40]
    assert three.shares[-1] == (36, 36, 28)
    assert (alone.evictions, three.evictions) == (0, 0)


def test_with_turns_every_gang_of_the_whole_cluster_has_its_part_of_the_time() -> None:
    scenario = kai_scenarios.parse(_scenario())
    record = kai_scenarios.run(scenario, "static", turns=True)
    assert kai_scenarios.second_half(record) == pytest.approx([8 / 3, 16 / 3, 8], rel=0.06)
    beside_kai = kai_scenarios.second_half(kai_scenarios.run(scenario, "kai", turns=True))
    assert beside_kai == pytest.approx([8 / 3, 16 / 3, 8], rel=0.2)
    assert beside_kai == sorted(beside_kai)
    rows = list(kai_scenarios.csv_rows(scenario, record))
    assert len(rows) == scenario.cycles * 3
    assert rows[0][:2] == (0, scenario.queues[0].name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Nodes": []}, "Nodes: must have 1 or more entries"),
        ({"Cycle": 3}, "Cycle: unknown key"),
        ({"Jobs": {"z": {"GPUs": 1}}}, "Jobs.z: no leaf queue has this name"),
        ({"KValue": "much"}, "KValue: must be a number"),
        ({"KValue": True}, "KValue: a number is needed, not true or false"),
        (
            {"Nodes": [{"GPUs": 1.5}]},
            "Nodes.0.GPUs: must be a whole number",
        ),
        ({"Cycles": float("nan")}, "Cycles: must be a finite number"),
        ({"Cycles": float("inf")}, "Cycles: must be a finite number"),
        ({"Cycles": 10**12}, "Cycles: must be at most 1000000"),
        ({"Nodes": [{"GPUs": 8 * 10**10}]}, "Nodes.0.GPUs: must be at most 1000000"),
        ({"Nodes": [{"GPUs": 10**6}] * 2}, "Nodes: 2000000 GPUs in all nodes, and at most 1000000 are allowed"),
        ({"Queues": [{"Weight": 1}]}, "Queues.0.Name: is missing"),
        ({"Queues": [{"Name": None}]}, "Queues.0.Name: is missing"),
        (
            {"Queues": [{"Name": "a", "DeservedGPUs": -2}]},
            "Queues.0.DeservedGPUs: -2 is neither -1 (unlimited) nor 0 or more",
        ),
        (
            {"Queues": [{"Name": "a"}], "Jobs": {"a": {"GPUs": 1, "NumPods": 10**5, "NumJobs": 10**6}}},
            "Jobs.a: 100000000000 pods, and at most 1000000 are allowed",
        ),
    ],
)
def test_a_faulty_scenario_is_refused_with_its_place_and_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FileFault) as refused:
        kai_scenarios.parse(_scenario(**changes))
    assert str(refused.value) == f"scenario.yaml:1: {message}"


def test_a_scenario_with_one_name_twice_is_refused() -> None:
    with pytest.raises(DivisionError, match="queue 'a' occurs twice"):
        kai_scenarios.parse(_scenario(Queues=[{"Name": "a"}, {"Name": "a"}]))


def test_endless_gangs_take_turns_by_weight() -> None:
    """16 GPUs, weights 1, 2, 3, gangs of 16: a turn lasts 4 h, a preemption begins each, no queue is left out."""
    work = work_of([(0, 16, 10**8, q) for q in range(3) for _ in range(2)], ("a", "b", "c"))
    setup = Setup(16, (1 / 6, 2 / 6, 3 / 6), guaranteed=0.0)
    policy = scheduling_policies.law_policy("default", work.queues, setup)
    record = replay(
        work, setup.pool(), 600 * HOUR, steering=Feedback(policy), dividing=whole_gpus(work.queues, [0.0] * 3)
    )
    half = record.held[len(record.held) // 2 :]
    means = [sum(row[q] for row in half) / len(half) for q in range(3)]
    assert means == pytest.approx([8 / 3, 16 / 3, 8], rel=0.06)
    owners = [row.index(16) for row in record.held]
    changes = [at for at in range(1, len(owners)) if owners[at] != owners[at - 1]]
    assert record.evictions == len(changes)
    assert min(b - a for a, b in pairwise(changes)) * CONTROL_S >= 4 * HOUR
    assert max(max(w) / min(w) for w in record.weights) <= TurnPolicy().ratio * (1 + 1e-9)
