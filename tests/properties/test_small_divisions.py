"""A few queues divided one by one get what the columns give them, to the last bit and the last word."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.__main__ import parse
from fairshare.core.model import UNLIMITED, Claim, DivisionProblem
from fairshare.laws.division import MOST_OF_FEW, Siblings, Steps, divide
from fairshare.laws.scalar_division import ScalarDivision
from tests.effort import examples
from tests.shelf import shared

amounts = st.one_of(st.integers(0, 60).map(float), st.floats(0, 60), st.floats(0, 1e-300), st.floats(1e12, 1e15))


@st.composite
def siblings(draw: st.DrawFn) -> list[Claim]:
    return [
        Claim(
            f"q{i}",
            request=draw(amounts),
            deserved=draw(st.one_of(st.just(0.0), st.just(UNLIMITED), amounts)),
            limit=draw(st.one_of(st.just(UNLIMITED), amounts)),
            weight=draw(st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.1, 9))),
            usage=draw(st.floats(-0.5, 1.5)),
            priority=draw(st.sampled_from((50, 100, 200))),
            creation=draw(st.integers(0, 3)),
            initial=draw(st.one_of(st.just(0.0), st.floats(0, 9))),
        )
        for i in range(draw(st.integers(1, 12)))
    ]


def _outcome(kind: type[ScalarDivision | Siblings], claims: list[Claim], total: float, k: float) -> str:
    """Everything that can be seen of it; `repr` tells any two floats apart."""
    steps: Steps = []
    served = (
        ScalarDivision(claims, None, steps, kai_compat=False)
        if kind is ScalarDivision
        else Siblings(claims, None, steps)
    )
    if any(claim.initial for claim in claims):
        served.begin_with([claim.initial for claim in claims])
        pool = total
    else:
        pool = served.give_deserved(total)
    left = served.divide_over_quota(pool, k) if pool > 0 else pool
    return repr((served.names, served.shares(), left, steps))


@given(siblings(), amounts, st.sampled_from((0.0, 0.5, 1.0, 5.0)))
@settings(max_examples=examples(40, 240), deadline=None)
def test_any_siblings(claims: list[Claim], total: float, k: float) -> None:
    assert _outcome(ScalarDivision, claims, total, k) == _outcome(Siblings, claims, total, k)


@pytest.mark.parametrize("name", ["kai_division", "kai_division_upstream"])
def test_every_case_of_the_scheduler(name: str) -> None:
    sets = 0
    for case in parse(shared(f"vectors/{name}.json").read_text()):
        shares = divide(case, kai_compat=True).shares
        ordered = sorted(case.claims, key=lambda claim: (claim.parent or "", claim.name))
        for parent, group in groupby(ordered, key=lambda claim: claim.parent):
            claims, total = list(group), case.total if parent is None else shares[parent]
            sets += 1
            assert _outcome(ScalarDivision, claims, total, case.k) == _outcome(Siblings, claims, total, case.k)
    assert sets >= 100


def test_either_is_taken_by_the_number_of_siblings() -> None:
    for count in (MOST_OF_FEW, MOST_OF_FEW + 1):
        claims = [Claim(f"q{i:02d}", request=3.0 * i, weight=1.0 + i % 3, usage=i / 900) for i in range(count)]
        case = DivisionProblem("x", 700.0, 1.0, tuple(claims), "setResourceShare")
        few, many = (_outcome(kind, claims, case.total, case.k) for kind in (ScalarDivision, Siblings))
        assert few == many
        assert repr(dict(divide(case).shares)) in few
