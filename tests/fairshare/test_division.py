"""The division against KAI's own results, and its explanation."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from fairshare.__main__ import parse
from fairshare.core.queues_and_weights import Claim, DivisionProblem, DivisionRound, Remainder
from fairshare.explain.plan_tables import division_table
from fairshare.laws.division import divide
from gputally.base.errors import DivisionError

TOLERANCE = 1e-9


def _equal(expected: dict[str, float], shares: dict[str, float]) -> bool:
    return expected.keys() == shares.keys() and all(abs(expected[q] - shares[q]) <= TOLERANCE for q in expected)


def _check(text: str, count: int) -> None:
    vectors = json.loads(text)["vectors"]
    cases = parse(text)
    assert len(vectors) == len(cases) == count
    wrong = []
    for vector, case in zip(vectors, cases, strict=True):
        division = divide(case, kai_compat=True)
        accepted = [vector["expected"], *vector.get("alternatives", [])]
        if not any(_equal(each, dict(division.shares)) for each in accepted):
            wrong.append((case.name, vector["expected"], division.shares))
        if abs(division.remaining - vector["expectedRemaining"]) > TOLERANCE:
            wrong.append((case.name, vector["expectedRemaining"], division.remaining))
    assert wrong == []


def test_equals_the_scheduler_on_scenarios_of_this_project(golden_text: str) -> None:
    _check(golden_text, 275)


def test_equals_the_scheduler_on_its_own_test_tables(upstream_text: str) -> None:
    _check(upstream_text, 95)


def test_an_explanation_changes_nothing_and_accounts_for_every_unit(golden_text: str) -> None:
    for case in parse(golden_text):
        explained = divide(case, explain=True, kai_compat=True)
        assert explained.shares == divide(case, kai_compat=True).shares
        given = dict(explained.deserved) or {claim.name: claim.initial for claim in case.claims}
        for step in explained.steps:
            if isinstance(step, DivisionRound):
                for offer in step.offers:
                    given[offer.queue] += offer.given
            else:
                given[step.queue] += step.given
        assert given == pytest.approx(dict(explained.shares), abs=1e-9)


def test_a_round_shows_its_numbers() -> None:
    claims = (Claim("heavy", 100, usage=0.6), Claim("light", 100, usage=0.1))
    division = divide(DivisionProblem("two", 15, 1.0, claims), explain=True)
    (first, remainder) = division.steps
    assert isinstance(first, DivisionRound)
    assert (first.pool, first.sum_p) == (15, pytest.approx(1.3))
    heavy, light = first.offers
    assert (heavy.n, heavy.usage, heavy.p) == (0.5, 0.6, pytest.approx(0.4))
    assert heavy.offered == pytest.approx(15 * 0.4 / 1.3)
    assert (heavy.given, light.given) == (4, 10)
    assert isinstance(remainder, Remainder)
    assert (remainder.queue, remainder.given) == ("heavy", 1)
    assert dict(division.shares) == {"heavy": 5, "light": 10}


def test_the_pool_stays_undivided_when_every_p_is_zero() -> None:
    claims = (Claim("a", 10, usage=1.0), Claim("b", 10, usage=1.0))
    division = divide(DivisionProblem("spent", 8, 1.0, claims), kai_compat=True)
    assert dict(division.shares) == {"a": 0, "b": 0}
    assert division.remaining == 8


def test_weightless_queues_with_negative_usage_count_in_the_sum_alone() -> None:
    claims = (Claim("a", 10, weight=1.0), Claim("b", 10, weight=0.0, usage=-2.0))
    division = divide(DivisionProblem("phantom", 4, 1.0, claims), explain=True, kai_compat=True)
    assert isinstance(division.steps[0], DivisionRound)
    assert division.steps[0].sum_p == 4.0
    assert division.shares["b"] == 0.0


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ((Claim("a", 1), Claim("a", 2)), "queue 'a' occurs twice"),
        ((Claim("a", 1, parent="x"),), "queue 'a' has the unknown parent 'x'"),
        ((Claim("a", 1, parent="b"), Claim("b", 1, parent="a")), "the queue tree has a cycle: a -> b -> a"),
        ((Claim("a", 1, parent="a"),), "the queue tree has a cycle: a -> a"),
    ],
)
def test_an_impossible_tree_is_refused(claims: tuple[Claim, ...], message: str) -> None:
    with pytest.raises(DivisionError) as refused:
        divide(DivisionProblem("bad", 4, 0.0, claims))
    assert str(refused.value) == message


def test_by_default_no_queue_gets_more_than_it_requests() -> None:
    case = DivisionProblem("tiny", 1, 0.0, (Claim("a", 0.7), Claim("b", 0.7)))
    assert dict(divide(case, kai_compat=True).shares) == {"a": 1.0, "b": 0.0}
    mended = divide(case)
    assert dict(mended.shares) == pytest.approx({"a": 0.7, "b": 0.3})
    assert mended.remaining == pytest.approx(0.0)


def test_by_default_the_pool_goes_by_weight_where_usage_zeroes_every_p() -> None:
    claims = (Claim("a", 10, usage=2.0, weight=3.0), Claim("b", 10, usage=2.0))
    assert dict(divide(DivisionProblem("spent", 8, 1.0, claims)).shares) == {"a": 6, "b": 2}


def test_by_default_a_priority_is_served_to_the_end_before_the_next() -> None:
    claims = (Claim("a", 9, priority=2), Claim("b", 9, priority=2), Claim("late", 9, priority=1))
    case = DivisionProblem("odd", 9, 0.0, claims)
    assert dict(divide(case, kai_compat=True).shares) == {"a": 4, "b": 4, "late": 1}
    assert dict(divide(case).shares) == {"a": 5, "b": 4, "late": 0}


def test_ten_thousand_queues_divide_to_the_last_unit_in_any_order() -> None:
    claims = tuple(
        Claim(f"q{i:05d}", i % 64, i % 8, weight=1 + i % 9, usage=i / 5e7, creation=i) for i in range(10_000)
    )
    division = divide(DivisionProblem("wide", 160_000.0, 1.0, claims))
    assert sum(division.shares.values()) + division.remaining == pytest.approx(160_000.0)
    assert divide(DivisionProblem("wide", 160_000.0, 1.0, claims[::-1])).shares == division.shares


def test_names_deep_in_a_tree_are_still_to_be_read() -> None:
    claims = [Claim(f"q{depth:02}", 10, parent=f"q{depth - 1:02}" if depth else None) for depth in range(50)]
    case = DivisionProblem("deep", 10, 0.0, tuple(claims))
    printed = StringIO()
    Console(width=120, file=printed).print(division_table(case, divide(case)))
    assert "q49" in printed.getvalue()


def test_kais_sums_round_at_every_step_and_decide_at_exact_boundaries() -> None:
    """The smallest case in which exact sums give another answer than KAI's program: 0.3, 15.6, 0, 0.1, 0."""
    asked, deserved, weights = (0.3, 100.0, 0.3, 2.0, 1.0), (0.0, 0.7, 0.0, 0.1, 0.0), (1.0, 1.0, 2.0, 3.0, 1.0)
    rows = zip(asked, deserved, weights, (100, 100, 1, 1, 1), strict=True)
    claims = tuple(
        Claim(f"q{i}", request, quota, weight=weight, priority=priority)
        for i, (request, quota, weight, priority) in enumerate(rows)
    )
    shares = divide(DivisionProblem("boundary", 16.0, 0.0, claims), kai_compat=True).shares
    assert list(shares.values()) == pytest.approx([0.3, 15.3, 0.3, 0.1, 0.0], abs=1e-9)
