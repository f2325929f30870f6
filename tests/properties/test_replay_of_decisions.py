"""A decision that is recorded as JSON and replayed gives the same numbers bit for bit, for every law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Budget, Decision, Policy, UsageWindow
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.cli.decision_replay import recount
from fairshare.controller.cycle_report import TargetReport, WriteOutcome, replay_weights, weight_decisions
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.weight_calculation import (
    WeightInputs,
    WeightResult,
    budgets_limit_weights,
    calculate_weights,
    exhausted_queues,
)
from fairshare.targets.weight_plan import Apply
from gputally.base.version import __version__
from gputally.testing.fake_accountant import usage_window

HOUR_US = 3_600_000_000
TREE: list[dict[str, Any]] = [
    {"name": "a", "weight": 2, "deserved": 4},
    {"name": "a1", "parent": "a", "weight": 1},
    {"name": "a2", "parent": "a", "weight": 3, "limit": 12},
    {"name": "b", "weight": 1, "priority": 200},
    {"name": "c", "weight": 0.7, "deserved": 2},
]
NAMES = tuple(queue["name"] for queue in TREE)
RELEASE = __version__
Cycles = list[tuple[UsageWindow, dict[str, Standing], frozenset[str]]]


def _policy() -> Policy:
    return Policy.model_validate({"k": 1.5, "queues": TREE, "bounds": {"interval": 90}})


@st.composite
def cycles(draw: st.DrawFn) -> Cycles:
    """Runs several cycles, so that the law has a history."""
    found = []
    for i in range(draw(st.integers(1, 3))):
        used = {name: draw(st.integers(0, 20 * HOUR_US)) for name in ("a1", "a2", "b", "c")}
        used["a"] = used["a1"] + used["a2"]
        capacity = draw(st.integers(1, 64 * HOUR_US))
        window = usage_window(used, capacity, end_ms=(i + 1) * 600_000, start_ms=0, watermark_ms=1)
        standings = {
            name: Standing(
                draw(st.floats(0, 64)), draw(st.floats(0, 16)), draw(st.none() | st.floats(0.01, 9)),
                draw(st.sampled_from((-1, 0, 1))), draw(st.sampled_from((0.0, 4.0, 24.0))),
            )
            for name in NAMES
        }  # fmt: skip
        found.append((window, standings, frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2)))))
    return found


def _recorded(target: TargetReport, policy: Policy, at_ms: int) -> list[Decision]:
    news = tuple(
        WriteOutcome(Apply("kai", w.queue, w.queue, None, w.value, w.why, {}), "applied") for w in target.weights
    )
    decisions = weight_decisions(target, news, policy.version(), at_ms)
    return [Decision.model_validate_json(decision.model_dump_json()) for decision in decisions]


@given(several=cycles())
@settings(max_examples=12)
def test_what_was_recorded_comes_to_the_same_bit_for_bit(several: Cycles) -> None:
    policy = _policy()
    last = WeightResult((), ())
    for window, standings, spent in several:
        before = last.memory
        last = calculate_weights(WeightInputs(policy, window, standings, 24.5, window.end_ms, before, spent))
        target = TargetReport(
            "kai", "enforce", standings, last.weights, last.entitlements, 24.5,
            memory=before, exhausted=spent, window=window,
        )  # fmt: skip
        records = _recorded(target, policy, window.end_ms)
        assert replay_weights(policy, records[0]) == last
        (count,) = recount(records, {policy.version(): policy}, RELEASE)
        assert (count.fault, count.differences) == ("", ())
        assert count.compared >= 20 * len(NAMES)


def _one() -> tuple[Policy, list[Decision]]:
    policy = _policy()
    usage = {"a": 5 * HOUR_US, "a1": 5 * HOUR_US}
    window = usage_window(usage, 24 * HOUR_US, end_ms=600_000, start_ms=0, watermark_ms=1)
    standings = {name: Standing(30.0, 5.0, 1.0) for name in NAMES}
    weighing = calculate_weights(WeightInputs(policy, window, standings, 24.0, 600_000, {}))
    target = TargetReport("kai", "enforce", standings, weighing.weights, weighing.entitlements, 24.0, window=window)
    return policy, _recorded(target, policy, 600_000)


def test_a_number_that_was_changed_is_named_with_both_values() -> None:
    policy, records = _one()
    bent = [d.model_copy(update={"value": 9.0}) if d.subject == "c" else d for d in records]
    (count,) = recount(bent, {policy.version(): policy}, RELEASE)
    (difference,) = count.differences
    assert (difference.decision, difference.number, difference.recorded) == (f"{records[0].id}/c", "value", 9.0)
    assert difference.recomputed == next(d.value for d in records if d.subject == "c")
    assert "the record was changed" in count.reason


def test_a_record_that_lacks_an_input_names_it_and_another_release_is_named() -> None:
    policy, records = _one()
    for name in ("memory", "due"):
        lacking = {key: value for key, value in records[0].inputs.items() if key != name}
        changed = [records[0].model_copy(update={"inputs": lacking}), *records[1:]]
        (count,) = recount(changed, {policy.version(): policy}, RELEASE)
        assert f"has no {name}" in count.fault
    bent = records[-1].model_copy(update={"value": 1.25})
    (count,) = recount([records[0], bent], {policy.version(): policy}, "99.0")
    assert count.reason == f"release {RELEASE} decided, and 99.0 computes again: their arithmetic can differ"


def test_an_unknown_policy_and_an_empty_record_are_faults() -> None:
    policy, records = _one()
    (count,) = recount(records, {}, RELEASE)
    assert count.fault == f"the accountant has no version {policy.version()} of the policy"
    (count,) = recount([records[0].model_copy(update={"inputs": {}})], {policy.version(): policy}, RELEASE)
    assert "has no due, exhausted, gpus" in count.fault


# --- budgets that act ---------------------------------------------------------------------------


def _state(name: str, spent: str | None) -> BudgetState:
    return BudgetState.model_validate(
        {
            "name": name, "queue": None, "team": None, "month": "2026-11", "unit": "GPU-hours", "limit": "100",
            "spent": spent, "ratio": None, "threshold": None, "forecast": None, "forecast_low": None,
            "forecast_high": None, "as_of_ms": 0,
        }
    )  # fmt: skip


@given(several=cycles(), spent=st.sets(st.sampled_from(("a1", "b", "c")), min_size=1, max_size=2))
@settings(max_examples=10)
def test_an_exhausted_budget_leaves_the_quota_and_nothing_over_it(several: Cycles, spent: set[str]) -> None:
    policy = _policy()
    window, standings, _ = several[0]
    some = frozenset(spent)
    with_it, without_it = (
        calculate_weights(WeightInputs(policy, window, standings, 24.0, window.end_ms, {}, exhausted))
        for exhausted in (some, frozenset[str]())
    )
    without = {due.queue: due for due in without_it.entitlements}
    deserved = {queue.name: queue.deserved for queue in policy.queues}
    for weight in with_it.weights:
        if weight.queue in some:
            assert weight.value == 0.0
            assert "its budget is exhausted: nothing over its quota" in weight.why
    for due in with_it.entitlements:
        if due.queue in some:
            assert due.gpus == min(due.requested, deserved[due.queue])
            assert due.gpus <= without[due.queue].gpus
    assert sum(e.gpus for e in with_it.entitlements if e.parent is None) <= 24.0 + 1e-9


def test_only_a_budget_that_says_so_acts_and_only_once_it_is_known_to_be_spent() -> None:
    policy = _policy()
    assert not budgets_limit_weights(policy)
    told = Budget(name="t", queue="a", limit=100)
    acting = Budget(name="q", queue="c", limit=100, exhausted="no-over-quota")
    team = Budget(name="x", team="blue", limit=100, exhausted="no-over-quota")
    queues = tuple(q.model_copy(update={"team": "blue"}) if q.name in ("a1", "b") else q for q in policy.queues)
    policy = policy.model_copy(update={"budgets": (told, acting, team), "queues": queues})
    assert budgets_limit_weights(policy)
    assert exhausted_queues(policy, [_state("t", "500"), _state("q", "99.99"), _state("x", None)]) == set()
    assert exhausted_queues(policy, [_state("q", "100"), _state("gone", "500")]) == {"c"}
    assert exhausted_queues(policy, [_state("x", "100.01")]) == {"a1", "b"}


def test_the_weight_comes_back_at_once_when_the_month_turns() -> None:
    policy, records = _one()
    window = UsageWindow.model_validate(records[0].inputs["window"])
    standings = {name: Standing(30.0, 5.0, 0.0 if name == "c" else 1.0) for name in NAMES}
    usual = {name: replace(standing, weight=1.0) for name, standing in standings.items()}
    back, steady = (
        {w.queue: w.value for w in calculate_weights(WeightInputs(policy, window, each, 24.0, 0)).weights}["c"]
        for each in (standings, usual)
    )
    assert back >= steady > 0
