"""What moved a weight since the decision before: parts that add up, in the decision, on its page and in a replay."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from math import fsum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.wire import decision_text
from accountant.wire.policy_models import Decision, Policy
from fairshare.cli.replay_command import recount
from fairshare.controller.cycle_report import CycleReport
from fairshare.explain.queue_and_pod_explanation import explain_queue
from fairshare.laws.weight_change_causes import CAUSES, WeightChange, change_sentence
from gputally.base.clock import VirtualClock
from tests.fairshare.builders import cluster_of, policy_of, queue_object, shard_object
from tests.fairshare.conftest import Accountant

Make = Callable[..., Any]
FIGURE = re.compile(r"[+-]\d+(?:\.\d+)?")


@pytest.fixture
def cycles(accountant: Accountant, controller_of: Make, clock: VirtualClock) -> Callable[..., CycleReport]:  # fmt: skip
    """One cycle after another, five minutes apart, of a controller that enforces."""
    cluster = cluster_of([*map(queue_object, "abc"), shard_object(kValue=0)])
    controller = controller_of(policy_of(k=1.0), cluster)

    def cycle(**spent: float) -> CycleReport:
        accountant.spend(**spent)
        clock.advance(300_000)
        report: CycleReport = controller.cycle()
        return report

    return cycle


def of_queue(report: CycleReport, queue: str) -> Decision:
    return next(one for one in report.decisions if one.subject == queue)


def test_the_first_decision_compares_itself_with_none(cycles: Callable[..., CycleReport]) -> None:
    assert "change" not in of_queue(cycles(a=0.4, b=0.3, c=0.3), "a").inputs


def test_its_own_usage_is_told_from_that_of_others_and_from_pace(cycles: Callable[..., CycleReport]) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    report = cycles(a=0.7, b=0.2, c=0.1)
    for queue in "abc":
        decision = of_queue(report, queue)
        change: Any = decision.inputs["change"]
        assert set(change["parts"]) == {cause for cause, _ in CAUSES}
        assert fsum([change["before"], *change["parts"].values()]) == pytest.approx(decision.value, abs=1e-12)
        assert change["parts"]["policy"] == change["parts"]["capacity"] == 0
    parts: Any = of_queue(report, "a").inputs["change"]
    assert parts["parts"]["usage"] < 0
    assert parts["parts"]["usage"] < parts["parts"]["demand"] == 0
    assert "its own usage" in of_queue(report, "a").reason


def test_the_sentence_adds_up_and_is_on_the_page(cycles: Callable[..., CycleReport]) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    report = cycles(a=0.55, b=0.2, c=0.25)
    decision = of_queue(report, "a")
    clause = decision.reason.partition(";")[0]
    whole, *parts = [float(figure) for figure in FIGURE.findall(clause)]
    assert whole == pytest.approx(fsum(parts), abs=1e-9)
    page = decision_text.decision_text(decision, report.decisions)
    assert clause[1:] in " ".join(page.sentences)
    grid = next(grid for grid in page.grids if grid.title == "What moved it since the decision before")
    assert len(grid.rows) == len([part for part in decision.inputs["change"]["parts"].values() if part]) + 2  # type: ignore[index,attr-defined]


@pytest.mark.parametrize("seed", range(8))
def test_page_explanation_and_event_give_the_sentence_of_the_decision(
    cycles: Callable[..., CycleReport], seed: int
) -> None:
    chance, policy, moved = random.Random(seed), policy_of(k=1.0), 0
    for _ in range(4):
        usage = [chance.random() for _ in "abc"]
        report = cycles(**{queue: part / fsum(usage) for queue, part in zip("abc", usage, strict=True)})
        events = {event.name: event.message for event in report.events if event.reason == "WeightChanged"}
        for decision in report.decisions:
            if "change" not in decision.inputs:
                continue
            moved += 1
            change: Any = decision.inputs["change"]
            assert fsum([change["before"], *change["parts"].values()]) == pytest.approx(decision.value, abs=1e-12)
            assert events[decision.subject] == decision.reason
            (account,) = explain_queue(policy, report, decision.subject, modes={}, past=report.decisions)
            assert [one.reason for one in account.past] == [decision.reason]
            page = " ".join(decision_text.decision_text(decision, report.decisions).sentences)
            assert decision.reason.partition(";")[0][1:] in page
    assert moved >= 6


def test_a_replay_finds_the_same_sentence(cycles: Callable[..., CycleReport]) -> None:
    cycles(a=0.4, b=0.3, c=0.3)
    report = cycles(a=0.7, b=0.2, c=0.1)
    policy: Policy = policy_of(k=1.0)
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
