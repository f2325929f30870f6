"""Laws of the division and of the resulting weights, over random queue trees."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, UsageWindow
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    DivisionProblem,
    DivisionRound,
    Function,
    QueueClaim,
    Remainder,
    Standing,
)
from fairshare.laws.division import divide
from fairshare.laws.weight_calculation import (
    WeightInputs,
    WeightResult,
    calculate_weights,
    static_parts,
    usage_ratios,
)
from gputally.testing.fake_accountant import usage_window
from tests.hypothesis_examples import examples

HOUR_US = 3_600_000_000
POOL = 16.0
USUAL = settings(max_examples=examples(20, 120))
Claims = tuple[QueueClaim, ...]
Situation = tuple[Policy, dict[str, int], dict[str, Standing]]
quantities = st.one_of(st.integers(0, 60).map(float), st.floats(0, 60, allow_nan=False))


@st.composite
def claim_sets(draw: st.DrawFn) -> Claims:
    count = draw(st.integers(1, 9))
    names = [f"q{i}" for i in range(count)]
    return tuple(
        QueueClaim(
            name,
            request=draw(quantities),
            deserved=draw(st.one_of(st.just(0.0), st.integers(0, 8).map(float), st.just(UNLIMITED), quantities)),
            limit=draw(st.one_of(st.just(UNLIMITED), quantities)),
            weight=draw(st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.1, 9))),
            usage=draw(st.floats(0, 1.5)),
            priority=draw(st.sampled_from((50, 100, 200))),
            creation=draw(st.integers(0, 3)),
            parent=draw(st.sampled_from(names[:i])) if i and draw(st.booleans()) else None,
        )
        for i, name in enumerate(names)
    )


def most(claim: QueueClaim) -> float:
    """Return the most that a queue can use."""
    return claim.request if claim.limit == UNLIMITED else min(claim.request, claim.limit)


@given(claim_sets(), quantities, st.floats(0, 5), st.randoms(), st.booleans())
@USUAL
def test_order_of_input_is_of_no_account(claims: Claims, total: float, k: float, random: Random, compat: bool) -> None:
    case = DivisionProblem("x", total, k, claims)
    shuffled = list(claims)
    random.shuffle(shuffled)
    again = divide(replace(case, claims=tuple(shuffled)), explain=True, as_source=compat)
    assert again == divide(case, explain=True, as_source=compat)
    assert list(again.shares) == sorted(again.shares)


@given(claim_sets(), quantities, st.floats(0, 5), st.booleans())
@USUAL
def test_nobody_gets_more_than_he_can_use_but_for_one_remainder_in_kai(
    claims: Claims, total: float, k: float, compat: bool
) -> None:
    division = divide(DivisionProblem("x", total, k, claims), explain=True, as_source=compat)
    extra: dict[str, float] = {}
    for step in division.steps:
        if isinstance(step, Remainder):
            assert step.queue not in extra
            extra[step.queue] = step.given if compat else 0.0
    for claim in claims:
        assert -1e-9 <= division.shares[claim.name] <= most(claim) + extra.get(claim.name, 0.0) + 1e-9
        assert extra.get(claim.name, 0.0) <= 1.0


@given(st.integers(0, 10**9), st.sampled_from((0.0, 0.5, 1.0, 3.0)))
@USUAL
def test_many_queues_get_the_same_with_and_without_an_explanation(seed: int, k: float) -> None:
    """Without one they are divided in columns; with one, queue by queue."""
    chance = Random(seed)
    claims = tuple(
        QueueClaim(
            f"q{i:03d}",
            request=chance.choice((float(chance.randrange(60)), chance.random() * 10.0 ** chance.randrange(-6, 3))),
            deserved=chance.random() * chance.choice((1e-9, 8.0)),
            weight=chance.choice((0.0, 1 / 3, chance.random() * 10.0 ** chance.randrange(-6, 7))),
            usage=chance.random() / 50,
            creation=chance.randrange(5),
            priority=chance.choice((100, 100, 100, 50, 7)),
            limit=chance.choice((-1.0, -1.0, float(chance.randrange(40)))),
            initial=chance.choice((0.0, chance.random() * 9)),
        )
        for i in range(chance.randrange(48, 400))
    )
    function: Function = chance.choice(("setResourceShare", "hierarchy", "divideOverQuotaResource"))
    case = DivisionProblem("many", chance.random() * 20 * len(claims), k, claims, function)
    quick, explained = divide(case), divide(case, explain=True)
    assert (quick.shares, quick.remaining) == (explained.shares, explained.remaining)


@given(claim_sets(), quantities, st.floats(0, 5), st.booleans())
@USUAL
def test_the_pool_is_conserved(claims: Claims, total: float, k: float, compat: bool) -> None:
    flat = tuple(replace(claim, parent=None) for claim in claims)
    division = divide(DivisionProblem("x", total, k, flat), explain=True, as_source=compat)
    given_out = fsum(division.shares.values())
    if fsum(division.deserved.values()) < total:
        assert abs(given_out + division.remaining - total) <= 1e-9 * max(1.0, total)
    else:
        assert dict(division.shares) == dict(division.deserved)
        assert division.remaining == 0.0


@given(claim_sets(), st.integers(1, 60).map(float), st.floats(0, 5))
@USUAL
def test_nothing_is_left_while_somebody_wants_and_a_priority_is_served_before_the_next(
    claims: Claims, total: float, k: float
) -> None:
    flat = tuple(replace(claim, parent=None, weight=max(claim.weight, 0.1)) for claim in claims)
    division = divide(DivisionProblem("x", total, k, flat))
    short = [claim for claim in flat if division.shares[claim.name] < most(claim) - 1e-9]
    if short:
        assert division.remaining <= 1e-9
    highest = max((claim.priority for claim in short), default=0)
    quota = divide(DivisionProblem("x", total, k, flat), explain=True).deserved
    for claim in flat:
        if claim.priority < highest:
            assert division.shares[claim.name] <= quota[claim.name] + 1e-9


@given(claim_sets(), quantities)
@USUAL
def test_without_k_usage_is_of_no_account(claims: Claims, total: float) -> None:
    unused = tuple(replace(claim, usage=0.0) for claim in claims)
    used, same = (divide(DivisionProblem("x", total, 0.0, each)).shares for each in (claims, unused))
    assert used == same


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Generate a policy, usage that includes descendants, and the scheduler's state."""
    count = draw(st.integers(2, 7))
    names = [f"q{i}" for i in range(count)]
    queues = [
        QueuePolicy(
            name=name,
            parent=draw(st.sampled_from(names[:i])) if i > 1 and draw(st.booleans()) else None,
            deserved=draw(st.sampled_from((0.0, 0.0, 2.0, 4.0))),
            weight=draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))),
            priority=draw(st.sampled_from((100, 100, 200))),
        )
        for i, name in enumerate(names)
    ]
    policy = Policy(
        k=draw(st.sampled_from((0.5, 1.0, 2.0, 5.0))),
        bounds=Bounds(min_multiplier=0.1, max_multiplier=4.0, interval=0),
        queues=tuple(queues),
    )
    own = {name: draw(st.integers(0, 4 * HOUR_US)) for name in names}
    standings = {
        name: Standing(requested=draw(st.sampled_from((0.0, 3.0, 50.0))), allocated=0.0, weight=None) for name in names
    }
    return policy, _inclusive(policy, own), standings


def _inclusive(policy: Policy, own: dict[str, int]) -> dict[str, int]:
    parents = {queue.name: queue.parent for queue in policy.queues}
    usage = dict.fromkeys(own, 0)
    for name, value in own.items():
        at: str | None = name
        while at is not None:
            usage[at] += value
            at = parents[at]
    return usage


def _window(usage: dict[str, int]) -> UsageWindow:
    return usage_window(usage, 16 * HOUR_US)


def weigh(policy: Policy, usage: dict[str, int], standings: dict[str, Standing]) -> WeightResult:
    return calculate_weights(WeightInputs(policy, _window(usage), standings, POOL, 0))


@given(situations())
@USUAL
def test_siblings_never_use_more_than_all_so_the_pool_always_goes_to_somebody(situation: Situation) -> None:
    policy, usage, _ = situation
    ratios = usage_ratios(policy, _window(usage), static_parts(policy, POOL))
    for parent in {queue.parent for queue in policy.queues}:
        siblings = [queue for queue in policy.queues if queue.parent == parent]
        assert fsum(ratios[queue.name].u for queue in siblings) <= 1 + 1e-12
        claims = [QueueClaim(queue.name, 1.0, weight=queue.weight, usage=ratios[queue.name].u) for queue in siblings]
        first = divide(DivisionProblem("x", POOL, policy.k, tuple(claims)), explain=True).steps[0]
        assert isinstance(first, DivisionRound)
        assert fsum(offer.p for offer in first.offers) >= 1 - 1e-9


@given(situations(), st.randoms())
@USUAL
def test_weights_stay_within_bounds_and_do_not_depend_on_order(situation: Situation, random: Random) -> None:
    policy, usage, standings = situation
    weighing = weigh(policy, usage, standings)
    for weight in weighing.weights:
        assert 0.1 * weight.configured * (1 - 1e-5) <= weight.value <= 4.0 * weight.configured * (1 + 1e-5)
    queues = list(policy.queues)
    random.shuffle(queues)
    shuffled = policy.model_copy(update={"queues": tuple(queues)})
    assert weigh(shuffled, dict(reversed(usage.items())), dict(reversed(standings.items()))) == weighing


@given(situations())
@USUAL
def test_without_k_the_configured_weights_stand(situation: Situation) -> None:
    policy, usage, standings = situation
    for weight in weigh(policy.model_copy(update={"k": 0.0}), usage, standings).weights:
        assert weight.value == weight.configured


@given(situations(), st.data())
@settings(max_examples=examples(26, 160))
def test_who_used_more_gets_no_more_weight(situation: Situation, data: st.DataObject) -> None:
    policy, usage, standings = situation
    roots = [queue.name for queue in policy.queues if queue.parent is None]
    name = data.draw(st.sampled_from(roots))
    more = usage | {name: usage[name] + data.draw(st.integers(1, 8 * HOUR_US))}
    before, after = (
        {weight.queue: weight.value for weight in weigh(policy, used, standings).weights} for used in (usage, more)
    )
    assert after[name] <= before[name] * (1 + 1e-5)
