"""Weights from usage: the laws, limits of change, explanations of a change, and gangs."""

from __future__ import annotations

import random
import re
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from accountant.wire.policy_models import Decision, Policy, QueuePolicy, TurnPolicy, UsageWindow
from fairshare.__main__ import main
from fairshare.cli.decision_replay import recount
from fairshare.controller.cycle_report import CycleReport
from fairshare.core.queues_and_weights import DivisionProblem, QueueClaim, Standing, Weight
from fairshare.explain.weight_change_causes import (
    CAUSES,
    WeightChange,
    change_sentence,
    change_table,
    weight_change,
    with_change,
)
from fairshare.laws.division import divide
from fairshare.laws.feedback_law import LawColumns, LawQueue, LawQueues, history_weights
from fairshare.laws.gang_turns import gang_reach
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights, static_parts, usage_ratios
from gputally.base.clock import VirtualClock
from gputally.testing.fake_accountant import usage_window
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests.fairshare.builders import cluster_of, policy_of
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.shared_files import shared_cases

CAPACITY = 1_000_000
FREE = {"min_multiplier": 0.01, "max_multiplier": 100, "interval": 0}


def _window(**parts: float) -> UsageWindow:
    return usage_window({queue: round(part * CAPACITY) for queue, part in parts.items()}, CAPACITY)


def _all_ask(policy: Policy, **weights: float | None) -> dict[str, Standing]:
    return {queue.name: Standing(1000.0, 0.0, weights.get(queue.name)) for queue in policy.queues}


def _weights(policy: Policy, window: UsageWindow, standings: dict[str, Standing]) -> dict[str, Weight]:
    """Return the weights of a first cycle on 16 GPUs by queue."""
    weighing = calculate_weights(WeightInputs(policy, window, standings, 16, 0))
    return {weight.queue: weight for weight in weighing.weights}


def test_the_scheduler_without_history_divides_by_our_weights_as_with_its_own() -> None:
    policy = policy_of(bounds=FREE, k=1.0)
    used = {"a": 0.5, "b": 0.3, "c": 0.2}
    weights = {name: w.value for name, w in _weights(policy, _window(**used), _all_ask(policy)).items()}
    own = divide(DivisionProblem("own", 64, 1.0, tuple(QueueClaim(q, 1000, usage=u) for q, u in used.items()))).shares
    ours = divide(DivisionProblem("ours", 64, 0.0, tuple(QueueClaim(q, 1000, weight=weights[q]) for q in used))).shares
    assert ours == own
    assert sum(weights.values()) == pytest.approx(3.0, abs=1e-5)


def test_every_number_is_in_the_explanation() -> None:
    policy = policy_of(k=1.0, bounds={"interval": "3h"})
    standings = _all_ask(policy, a=1.0)
    first = calculate_weights(WeightInputs(policy, _window(a=0.3, b=0.3, c=0.4), standings, 16, 0))
    window = _window(a=0.5, b=0.3, c=0.2)
    weight = calculate_weights(WeightInputs(policy, window, standings, 16, 3_600_000, first.memory)).weights[0]
    numbers = weight.explanation
    assert (numbers.usage, numbers.capacity, numbers.u, numbers.k) == (500_000, 1_000_000, 0.5, 1.0)
    assert (numbers.n, numbers.p) == (pytest.approx(1 / 3), pytest.approx(1 / 3 + (1 / 3 - 0.5)))
    assert (numbers.lower, numbers.upper, numbers.configured) == (0.1, 4.0, 1.0)
    assert numbers.proportional == pytest.approx(3 * numbers.p, rel=1e-5)
    assert (numbers.previous, weight.value) == (1.0, 1.1)
    assert weight.why.startswith("used 50.0% for a share of 33.3% of the queues that compete, above that share;")
    assert weight.why.endswith("stays for 120 more min")


@pytest.mark.parametrize("case", shared_cases("vectors/schedulers.json", lambda it: it["kai_time_based"]["cases"]))
def test_the_rule_is_kais_in_figures(case: dict[str, float]) -> None:
    rest = 1 - case["nW"]
    members = [LawQueue("it", case["nW"], case["nU"], 10, 0), LawQueue("rest", rest, 1 - case["nU"], 10, 0)]
    found = history_weights(LawQueues(LawColumns.of(members), 16.0, 0), case["k"])
    assert found[0] == pytest.approx(case["want"])


def test_history_corrects_inside_a_small_department_as_much_as_outside() -> None:
    tree = [{"name": "big", "weight": 7}, {"name": "small", "weight": 1}]
    tree += [{"name": name, "parent": "small"} for name in ("sa", "sb")]
    policy = policy_of(tree, bounds=FREE, k=1.0)
    window = _window(big=0.875, small=0.125, sa=0.125, sb=0.0)
    ratios = usage_ratios(policy, window, static_parts(policy, 16))
    assert static_parts(policy, 16) == pytest.approx({"big": 0.875, "small": 0.125, "sa": 0.0625, "sb": 0.0625})
    assert (ratios["sa"].u, ratios["sb"].u) == (pytest.approx(1.0), 0.0)
    weights = _weights(policy, window, _all_ask(policy))
    assert weights["sb"].value > 50 * weights["sa"].value
    assert weights["big"].value == 7.0


def test_usage_beyond_the_capacity_still_divides_the_whole_pool() -> None:
    policy = policy_of(bounds=FREE, k=5.0)
    weights = _weights(policy, _window(a=1.5, b=1.5, c=1.0), _all_ask(policy))
    assert weights["c"].value > weights["a"].value == weights["b"].value


def test_all_weights_zero_stay_zero() -> None:
    policy = policy_of([{"name": "a", "weight": 0}, {"name": "b", "weight": 0}])
    weights = _weights(policy, _window(a=0.5), _all_ask(policy, a=3.0))
    zero = (0.0, ("weight 0 in the policy stays 0",))
    assert [(w.value, w.explanation.notes) for w in weights.values()] == [zero, zero]


def test_only_who_asks_for_more_than_his_quota_competes() -> None:
    queues = [{"name": "a"}, {"name": "b"}, {"name": "idle"}, {"name": "content", "deserved": 4}]
    policy = policy_of(queues, bounds=FREE, k=1.0)
    standings = _all_ask(policy) | {"idle": Standing(0, 0), "content": Standing(4, 4)}
    weights = _weights(policy, _window(a=0.75, b=0.25), standings)
    competing = {name: weight.explanation.competes for name, weight in weights.items()}
    assert competing == {"a": True, "b": True, "idle": False, "content": False}
    assert weights["a"].explanation.n == 0.5
    assert weights["a"].value + weights["b"].value == pytest.approx(2.0, abs=1e-5)
    assert weights["idle"].explanation.n == 0.25
    assert "as if every sibling competed" in weights["idle"].why


def test_priorities_are_weighed_apart() -> None:
    policy = policy_of([{"name": "a"}, {"name": "b", "priority": 200}, {"name": "c"}], bounds=FREE, k=1.0)
    weights = _weights(policy, _window(a=0.1, b=0.8, c=0.1), _all_ask(policy))
    assert weights["b"].explanation.n == 1.0
    assert weights["b"].value == 1.0


def test_queues_the_target_does_not_know_get_no_weight_but_an_entitlement() -> None:
    policy = policy_of([{"name": "dept"}, {"name": "x", "parent": "dept"}, {"name": "y", "parent": "dept"}])
    weighing = calculate_weights(WeightInputs(policy, _window(), {"x": Standing(6, 2), "y": Standing(3, 1)}, 16, 0))
    assert [weight.queue for weight in weighing.weights] == ["x", "y"]
    due = {entitlement.queue: entitlement for entitlement in weighing.entitlements}
    assert (due["dept"].requested, due["dept"].gpus) == (9, 9)
    assert (due["x"].gpus, due["y"].gpus, due["x"].allocated) == (6, 3, 2)


def test_bounds_hold_the_weight_and_the_rest_of_the_total_goes_to_the_others() -> None:
    policy = policy_of(bounds={**FREE, "min_multiplier": 0.5}, k=5.0)
    weights = _weights(policy, _window(a=0.9, b=0.05, c=0.05), _all_ask(policy))
    assert [w.value for w in weights.values()] == [0.5, 1.25, 1.25]
    assert "at the lower bound, 0.5 x configured" in weights["a"].why
    capped = policy_of(bounds={**FREE, "max_multiplier": 1.5}, k=5.0)
    highest = _weights(capped, _window(a=0.5, b=0.5, c=0.0), _all_ask(capped))["c"]
    assert highest.value == 1.5
    assert "at the upper bound, 1.5 x configured" in highest.why


def test_a_very_deep_tree_is_read_in_one_pass() -> None:
    queues = [{"name": f"q{depth}", **({"parent": f"q{depth - 1}"} if depth else {})} for depth in range(20_000)]
    assert len(Policy.model_validate({"queues": queues}).queues) == 20_000
    queues[0]["parent"] = "q19999"
    with pytest.raises(ValidationError, match="the queue tree has a cycle: q0 -> q19999 -> q19998"):
        Policy.model_validate({"queues": queues})


DEPARTMENTS = [
    {"name": "A"}, {"name": "B"}, {"name": "C"},
    {"name": "a1", "parent": "A"}, {"name": "a2", "parent": "A"},
    {"name": "b1", "parent": "B"}, {"name": "b2", "parent": "B"}, {"name": "b3", "parent": "B"},
    {"name": "c1", "parent": "C"}, {"name": "c2", "parent": "C"},
]  # fmt: skip


def test_every_department_has_its_own_turns() -> None:
    """A gang waits in two departments of 16 GPUs. Each gives its turn, and the third goes on without one."""
    policy = Policy.model_validate({"queues": DEPARTMENTS, "bounds": {"interval": 0}})
    running, waiting = Standing(16, 16, 1.0), Standing(16, 0, 1.0, gang=16)
    standings = {name: Standing(32, 16, 1.0) for name in "ABC"} | {
        "a1": running, "a2": waiting, "b1": running, "b2": waiting, "b3": Standing(2, 0, 1.0),
        "c1": Standing(48, 12, 1.0), "c2": Standing(48, 4, 1.0),
    }  # fmt: skip
    used = {"A": 0.3, "B": 0.3, "C": 0.3, "a1": 0.3, "b1": 0.3, "c1": 0.2, "c2": 0.1}
    memory: Any = {}
    whose, values = [], []
    for hour in range(8):
        weighing = calculate_weights(WeightInputs(policy, _window(**used), standings, 48, hour * 3_600_000, memory))
        memory = weighing.memory
        whose.append(sorted(name for name, kept in memory.items() if "turn_until_ms" in kept))
        values.append({weight.queue: weight.value for weight in weighing.weights})
    assert ["a2", "b2"] in whose
    begun = whose.index(["a2", "b2"])
    assert whose[begun + 1] == ["a2", "b2"]
    assert values[begun]["a2"] > 10 * values[begun]["a1"]
    assert values[begun]["c1"] == values[0]["c1"]
    due = {each.queue: each.gpus for each in weighing.entitlements}
    assert due["a1"] + due["a2"] == 16


def test_in_a_turn_the_gang_is_due_its_gpus() -> None:
    """Preemption decides by what a queue is due: it has to make room for the gang whose turn it is."""
    policy = Policy.model_validate({"queues": [{"name": "a"}, {"name": "b"}]})
    standings = {"a": Standing(16, 16, 1.0), "b": Standing(16, 0, 1.0, gang=16)}
    memory: Any = {}
    due: list[float] = []
    for hour in range(4):
        found = calculate_weights(WeightInputs(policy, _window(a=0.5), standings, 16, hour * 3_600_000, memory))
        memory = found.memory
        due.append(found.entitlements[1].gpus)
    assert due[0] < 16
    assert due[-1] == 16


@pytest.mark.parametrize("above", [{"limit": 0}, {"weight": 0}])
def test_a_department_without_entitlement_does_not_block_the_others(above: dict[str, float]) -> None:
    queues = [{"name": "closed", **above}, {"name": "a", "parent": "closed"}, {"name": "b", "parent": "closed"}]
    policy = Policy.model_validate({"queues": [*queues, {"name": "open"}, {"name": "other"}]})
    standings = {queue.name: Standing(8, 0, 1.0) for queue in policy.queues}
    memory: Any = {}
    for minute in range(3):
        weighing = calculate_weights(WeightInputs(policy, _window(open=0.9), standings, 16, minute * 60_000, memory))
        memory = weighing.memory
    weights = {weight.queue: weight.value for weight in weighing.weights}
    assert (weights["a"], weights["b"]) == (1, 1)
    assert sum(due.gpus for due in weighing.entitlements if due.queue in ("open", "other")) == 16


POLICY = policy_of(k=1.0, bounds={"interval": 0})
FIGURE = re.compile(r"[+-]\d+(?:\.\d+)?")


@pytest.fixture
def cycles(accountant: Accountant, controller_of: Make, clock: VirtualClock) -> Make:
    """Return a function that runs cycles of an enforcing controller, five minutes apart."""
    cluster = cluster_of([*map(queue_object, "abc"), setup_object()])
    controller = controller_of(POLICY, cluster)

    def cycle(**spent: float) -> CycleReport:
        accountant.spend(**spent)
        clock.advance(300_000)
        return controller.cycle()

    return cycle


def of_queue(report: CycleReport, queue: str) -> Decision:
    return next(one for one in report.decisions if one.subject == queue)


def change_of(accountant: Accountant, policy: Policy, decision: Decision) -> WeightChange | None:
    """Return the causes as an explanation reads them from the accountant's records."""
    return weight_change(decision, accountant.decisions, {policy.version(): policy})


def test_the_first_decision_has_none_to_compare_with(cycles: Make, accountant: Accountant) -> None:
    assert change_of(accountant, POLICY, of_queue(cycles(a=0.4, b=0.3, c=0.3), "a")) is None


def test_its_own_usage_is_told_from_that_of_others_and_from_pace(cycles: Make, accountant: Accountant) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    report = cycles(a=0.7, b=0.2, c=0.1)
    changes = {}
    for queue in "abc":
        decision = of_queue(report, queue)
        change = changes[queue] = change_of(accountant, POLICY, decision)
        assert change is not None
        assert set(change.parts) == {cause for cause, _ in CAUSES}
        assert fsum([change.before, *change.parts.values()]) == pytest.approx(decision.value, abs=1e-12)
        assert change.parts["policy"] == change.parts["capacity"] == 0
    assert changes["a"] is not None
    assert changes["a"].parts["usage"] < changes["a"].parts["demand"] == 0
    assert "its own usage" in change_sentence(changes["a"], 0.1)


@pytest.mark.parametrize("lost", ["before", "cycle", "policy", "standings"])
def test_incomplete_records_tell_no_cause(cycles: Make, accountant: Accountant, lost: str) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    decision = of_queue(cycles(a=0.7, b=0.2, c=0.1), "a")
    policies = {} if lost == "policy" else {decision.policy_version: POLICY}
    records: list[Decision] = list(accountant.decisions)
    assert weight_change(decision, records, {decision.policy_version: POLICY}) is not None
    if lost == "before":
        records = [each for each in records if each.subject == "*" or each.at_ms == decision.at_ms]
    elif lost == "cycle":
        records = [each for each in records if each.id != decision.inputs["cycle"]]
    elif lost == "standings":
        records = [each.model_copy(update={"inputs": each.inputs | {"standings": {"a": {}}}}) for each in records]
    assert weight_change(decision, records, policies) is None


@pytest.mark.parametrize("seed", range(3))
def test_sentence_and_table_of_a_change_add_up_to_it(cycles: Make, accountant: Accountant, seed: int) -> None:
    chance, policy, moved = random.Random(seed), POLICY, 0
    for _ in range(4):
        usage = [chance.random() for _ in "abc"]
        report = cycles(**{queue: part / fsum(usage) for queue, part in zip("abc", usage, strict=True)})
        events = {event.name: event.message for event in report.events if event.reason == "WeightChanged"}
        for decision in report.decisions:
            change = change_of(accountant, policy, decision)
            if change is None or decision.value is None:
                continue
            moved += 1
            assert events[decision.subject] == decision.reason
            assert fsum([change.before, *change.parts.values()]) == pytest.approx(decision.value, abs=1e-12)
            told = with_change(decision, change)
            clause = told.reason.partition(";")[0]
            whole, *parts = [float(figure) for figure in FIGURE.findall(clause)]
            assert whole == pytest.approx(fsum(parts), abs=1e-9)
            assert told.reason.endswith(decision.reason)
            assert len(change_table(change, decision.value).rows) == 2 + sum(map(bool, change.parts.values()))
    assert moved >= 6


def test_a_replay_finds_the_same_weights(cycles: Make) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    report = cycles(a=0.7, b=0.2, c=0.1)
    policy: Policy = POLICY
    [again] = recount(report.decisions, {policy.version(): policy}, "")
    assert (again.fault, again.differences) == ("", ())


@given(
    st.dictionaries(st.sampled_from([cause for cause, _ in CAUSES]), st.floats(-1e6, 1e6), min_size=1),
    st.floats(1e-6, 1e6),
)
def test_what_is_said_adds_up_for_any_parts(parts: dict[str, float], before: float) -> None:
    value = before + fsum(parts.values())
    said = change_sentence(WeightChange(before, parts), value)
    if said:
        whole, *shown = [float(figure) for figure in FIGURE.findall(said)]
        assert fsum(shown) == pytest.approx(whole, rel=1e-9, abs=1e-9)


NO_TURNS = TurnPolicy(most_queues=0)


def _equal(queues: int, **policy: object) -> Policy:
    members = tuple(QueuePolicy(name=f"q{i}") for i in range(queues))
    return Policy.model_validate({"queues": members, **policy})


@pytest.mark.parametrize(
    ("gpus", "queues", "gang", "least_k"),
    [(16, 2, 16, 0.938), (16, 3, 12, 1.125), (100, 2, 60, 0.191), (64, 4, 32, 0.985), (64, 8, 16, 0.985)],
)
def test_the_least_k_is_the_one_known_for_the_scheduler(gpus: int, queues: int, gang: int, least_k: float) -> None:
    found = gang_reach(_equal(queues, k=0.0, turns=NO_TURNS), gpus, "q0", gang)
    assert found.needed_k == pytest.approx(least_k, abs=0.0015)
    assert not found.admitted
    assert f"k >= {found.needed_k:.3f} or a turn" in found.sentence()
    assert gang_reach(_equal(queues, k=least_k + 0.002, turns=NO_TURNS), gpus, "q0", gang).admitted


def test_a_gang_within_its_share_needs_nothing() -> None:
    found = gang_reach(_equal(2), 16, "q0", 8)
    assert (found.static, found.needed_k) == (8, 0.0)
    assert found.sentence() == "a gang of 8 GPUs in 'q0' fits its share of 8"


def test_guarantees_of_others_are_out_of_reach() -> None:
    policy = Policy(queues=(QueuePolicy(name="a"), QueuePolicy(name="b", deserved=8)), k=50.0)
    found = gang_reach(policy, 16, "a", 12)
    assert (found.best, found.needed_k) == (8, None)
    assert found.sentence().startswith("a gang of 12 GPUs in 'a' can never be admitted")


def test_turns_reach_what_no_gain_does() -> None:
    assert gang_reach(_equal(3), 16, "q0", 16).admitted
    assert not gang_reach(_equal(3, turns=TurnPolicy(ratio=3)), 16, "q0", 16).admitted
    assert not gang_reach(_equal(3, turns=TurnPolicy(most_queues=2)), 16, "q0", 16).admitted


def test_departments_bound_what_a_team_can_reach() -> None:
    teams = (QueuePolicy(name=name, parent="small") for name in "xy")
    tree = (QueuePolicy(name="big", weight=3), QueuePolicy(name="small"), *teams)
    found = gang_reach(Policy(queues=tree, k=1.0), 64, "x", 16)
    assert found.static == 8
    assert found.best > 16 - 1


def test_check_warns_of_a_gang_that_never_gets_in(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "policy.yaml"
    queues = "queues:\n  - {name: a, refs: ['fake:a']}\n  - {name: b, refs: ['fake:b']}\n"
    file.write_text(f"k: 0.5\nturns: {{most_queues: 0}}\n{queues}")
    assert main(["check", str(file), "--capacity", "16", "--gang", "a=16", "--gang", "b=8"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning: a gang" in line]
    assert line.startswith(f"{file}:4: warning: a gang of 16 GPUs in 'a' is never admitted by this policy")
    assert main(["check", str(file), "--capacity", "16", "--gang", "z=16"]) == 1
    assert "--gang z=16: write QUEUE=GPUS, a queue of the policy" in capsys.readouterr().err
