"""Invariants of the law: order, scale, monotonicity, static weights without history, pace; and the limits of turns."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.feedback_law import LawColumns, LawQueue, LawQueues, Memory, history_weights
from fairshare.laws.gang_turns import shares_in_whole_gpus, turn_weights
from fairshare.laws.weight_calculation import SiblingWeights, WeightInputs, calculate_weights, sibling_weights
from gputally.testing.fake_accountant import usage_window
from tests.hypothesis_examples import examples

HOUR_MS = 3_600_000
KS = st.sampled_from((0.5, 1.0, 2.0, 5.0))
USUAL = settings(max_examples=examples(13, 80))


@st.composite
def groups(draw: st.DrawFn) -> LawQueues:
    size = draw(st.integers(2, 6))
    weights = [draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))) for _ in range(size)]
    used = [draw(st.integers(0, 100)) for _ in range(size)]
    whole = max(100, sum(used))
    members = tuple(
        LawQueue(
            f"q{i}", weights[i], used[i] / whole, float(draw(st.sampled_from((0, 5, 40, 400)))),
            float(draw(st.integers(0, 5))),
        )
        for i in range(size)
    )  # fmt: skip
    return LawQueues(LawColumns.of(members), 64.0, 1_000_000)


def of_members(siblings: LawQueues, members: list[LawQueue]) -> LawQueues:
    return replace(siblings, columns=LawColumns.of(members))


def policy(**settings_: object) -> Policy:
    return Policy.model_validate({"queues": [QueuePolicy(name="unused")], **settings_})


def weights(siblings: LawQueues, k: float) -> dict[str, float]:
    return dict(zip(siblings.columns.names, history_weights(siblings, k), strict=True))


@given(groups(), KS, st.randoms())
@USUAL
def test_the_order_of_the_queues_decides_nothing(siblings: LawQueues, k: float, chance: Random) -> None:
    members = list(siblings.members)
    chance.shuffle(members)
    assert weights(siblings, k) == weights(of_members(siblings, members), k)


@given(groups(), KS, st.sampled_from((0.25, 2.0, 8.0)))
@USUAL
def test_only_the_proportions_of_the_configured_weights_count(siblings: LawQueues, k: float, factor: float) -> None:
    scaled = of_members(siblings, [m._replace(weight=m.weight * factor) for m in siblings.members])
    assert weights(scaled, k) == pytest.approx(weights(siblings, k))


@given(groups(), KS, st.integers(0, 5), st.floats(0.01, 0.3))
@USUAL
def test_more_past_usage_never_raises_the_own_part(siblings: LawQueues, k: float, which: int, more: float) -> None:
    members = list(siblings.members)
    at = which % len(members)
    before = weights(siblings, k)
    members[at] = members[at]._replace(usage=members[at].usage + more)
    after = weights(of_members(siblings, members), k)
    part = before[members[at].name] / (sum(before.values()) or 1.0)
    assert after[members[at].name] / (sum(after.values()) or 1.0) <= part + 1e-9


@given(groups(), KS)
@USUAL
def test_without_history_the_configured_weights_stand(siblings: LawQueues, k: float) -> None:
    unused = of_members(siblings, [m._replace(usage=0.0) for m in siblings.members])
    result = sibling_weights(unused, policy(k=k), {})
    assert result.values == pytest.approx([m.weight for m in siblings.members])
    still = sibling_weights(siblings, policy(k=0), {})
    assert still.values == pytest.approx([m.weight for m in siblings.members])


@given(groups(), KS)
@USUAL
def test_weights_are_kept_within_the_multipliers(siblings: LawQueues, k: float) -> None:
    result = sibling_weights(siblings, policy(k=k, bounds={"min_multiplier": 0.5, "max_multiplier": 2.0}), {})
    for member, value in zip(siblings.members, result.values, strict=True):
        assert 0.5 * member.weight * (1 - 1e-5) <= value <= 2.0 * member.weight * (1 + 1e-5)


@given(groups(), groups(), st.integers(1, 12), st.booleans())
@USUAL
def test_weights_stay_for_the_interval_and_follow_a_changed_policy_at_once(
    siblings: LawQueues, later: LawQueues, hours: int, changed: bool
) -> None:
    """Whatever usage and demand become, and also if the memory was written down in between."""
    names = siblings.columns.names
    used = [m.usage for m in later.members] * 3
    first = sibling_weights(siblings, policy(), {})
    written: Memory = json.loads(json.dumps({name: dict(numbers) for name, numbers in first.memory.items()}))
    moved = [m._replace(usage=used[i], requested=500.0) for i, m in enumerate(siblings.members)]
    now = replace(of_members(siblings, moved), now_ms=siblings.now_ms + hours * HOUR_MS)
    rules = policy(k=1.5) if changed else policy()
    second = sibling_weights(now, rules, written)
    fresh = sibling_weights(now, rules, {})
    assert second.values == (first.values if hours < 3 and not changed else fresh.values)
    assert second.lawful == fresh.lawful
    assert set(second.memory) == set(names)


@given(groups())
@USUAL
def test_weights_without_any_known_use_do_not_stay(siblings: LawQueues) -> None:
    """Those that follow from use stay, also once it has left the window."""
    unused = replace(of_members(siblings, [m._replace(usage=0.0) for m in siblings.members]), stay=False)
    first = sibling_weights(unused, policy(), {})
    assert first.values == pytest.approx([m.weight for m in siblings.members])
    written: Memory = json.loads(json.dumps({name: dict(numbers) for name, numbers in first.memory.items()}))
    used = replace(siblings, now_ms=siblings.now_ms + 60_000)
    second = sibling_weights(used, policy(), written)
    assert (second.values, second.left_ms) == (sibling_weights(used, policy(), {}).values, 0)
    third = sibling_weights(replace(unused, now_ms=used.now_ms + HOUR_MS), policy(), second.memory)
    assert (third.values, third.left_ms) == (second.values, 2 * HOUR_MS)
    ended = sibling_weights(replace(unused, now_ms=used.now_ms + 2 * HOUR_MS), policy(), third.memory)
    assert ended.values == second.values


def _lumps(held: float = 16.0, limit: float = -1.0, pool: float = 16.0) -> LawQueues:
    """The holder has a gang of 16, while every queue waits with another one."""
    rows = (("holder", 1.0, held), ("second", 2.0, 0.0), ("third", 3.0, 0.0))
    members = [LawQueue(n, w, 0.0, 32.0 if had else 16.0, had, limit=limit, gang=16.0) for n, w, had in rows]
    return LawQueues(LawColumns.of(members), pool, 0)


def after(siblings: LawQueues, hours: int, rules: Policy, memory: Memory | None = None) -> SiblingWeights:
    """Return the weights after as many hours of cycles, one an hour, or at the first turn."""
    result = sibling_weights(siblings, rules, memory or {})
    for hour in range(1, hours + 1):
        if result.turn is not None:
            break
        result = sibling_weights(replace(siblings, now_ms=hour * HOUR_MS), rules, result.memory)
    return result


def test_the_turn_goes_to_who_is_owed_most_and_admits_its_gang() -> None:
    """On 16 GPUs third is due 8 and second 16/3: owed 8 and 5.3 GPU-hours an hour; a turn needs 16 more than -13.3."""
    siblings, rules = _lumps(), policy()
    assert after(siblings, 0, rules).turn is None
    begun = after(siblings, 8, rules)
    assert begun.turn is not None
    assert begun.turn.queue == "third"
    by_name = dict(zip(siblings.columns.names, shares_in_whole_gpus(siblings, begun.turn.weights), strict=True))
    assert by_name["third"] == 16.0
    assert max(begun.values) / min(begun.values) <= rules.turns.ratio * (1 + 1e-9)
    began_ms = begun.turn.until_ms - rules.turns.min_turn * 1000
    later = sibling_weights(replace(siblings, now_ms=begun.turn.until_ms - 1), rules, begun.memory)
    assert (later.turn, later.values) == (begun.turn, begun.values)
    regular = [begun.memory[name]["weight"] for name in siblings.columns.names]
    nobody = of_members(siblings, [m._replace(gang=0.0) for m in siblings.members])
    without = policy(turns={"most_queues": 0})
    ended = sibling_weights(replace(nobody, now_ms=began_ms + HOUR_MS), without, begun.memory)
    assert (ended.turn, ended.values) == (None, regular)


@pytest.mark.parametrize(
    ("rules", "siblings"),
    [
        (policy(turns={"most_queues": 2}), _lumps()),
        (policy(turns={"ratio": 2}), _lumps()),
        (policy(), _lumps(limit=8.0)),
        (policy(), _lumps(pool=160.0)),
        (policy(), _lumps(held=0.0, pool=8.0)),
    ],
    ids=["too many queues", "too small a ratio", "beyond a limit", "everything fits", "larger than the cluster"],
)
def test_no_turn_without_need_or_beyond_a_limit(rules: Policy, siblings: LawQueues) -> None:
    assert after(siblings, 200, rules).turn is None


@pytest.mark.parametrize("burst", [False, True])
def test_what_a_queue_holds_counts_for_a_burst_only(burst: bool) -> None:
    """The queue holds 30 of 100 GPUs. With twice its weight it would be due 60, and it waits with a gang of 50."""
    members = [
        LawQueue("steady", 1.0, 0.0, 80.0, 30.0, deserved=20.0, gang=50.0, burst=burst),
        LawQueue("other", 1.0, 0.0, 200.0, 70.0, deserved=20.0),
    ]
    found = after(LawQueues(LawColumns.of(members), 100.0, 0), 20, policy()).turn
    assert (found.queue if found else None) == ("steady" if burst else None)


def test_a_queue_that_is_stuck_for_six_turns_gets_one() -> None:
    """Its share is 8, and it holds 2: its gang of 7 would fit alone, but not beside them."""
    members = [LawQueue("stuck", 1.0, 0.0, 9.0, 2.0, gang=7.0), LawQueue("holder", 1.0, 0.0, 32.0, 14.0)]
    siblings = LawQueues(LawColumns.of(members), 16.0, 0)
    assert after(siblings, 23, policy()).turn is None
    assert after(siblings, 24, policy()).turn is not None


def test_owed_is_against_real_work_and_fades_with_the_half_life() -> None:
    members = [
        LawQueue("a", 1.0, 0.0, 16.0, 4.0),
        LawQueue("b", 1.0, 0.0, 4.0, 4.0),
        LawQueue("idle", 2.0, 0.0, 0.0, 0.0),
    ]
    siblings = LawQueues(LawColumns.of(members), 16.0, 0)
    first = sibling_weights(siblings, policy(), {})
    hour = sibling_weights(replace(siblings, now_ms=HOUR_MS), policy(), first.memory)
    assert list(hour.owed) == [8.0, 0.0, 0.0]
    rest = of_members(siblings, [m._replace(requested=m.allocated) for m in members])
    day = sibling_weights(replace(rest, now_ms=25 * HOUR_MS), policy(), hour.memory)
    assert list(day.owed) == pytest.approx([4.0, 0.0, 0.0])


def test_a_concentrated_weight_keeps_the_ratio() -> None:
    assert turn_weights([1.0, 2.0, 0.0], 0, 0.001, 50.0) == [2.0, 0.04, 0.0]


@given(st.integers(0, 1_000_000))
@settings(max_examples=examples(6, 30))
def test_in_a_tree_every_weight_changes_at_most_once_an_interval_and_stays_within_the_multipliers(seed: int) -> None:
    chance = Random(seed)
    parents = {"dept": None, "a": "dept", "b": "dept", "c": None}
    rules = Policy.model_validate(
        {
            "k": 3.0, "bounds": {"interval": "30m", "min_multiplier": 0.2, "max_multiplier": 3.0},
            "turns": {"most_queues": 0},
            "queues": [{"name": n, "parent": p, "weight": 2.0, "deserved": 1.0} for n, p in parents.items()],
        }
    )  # fmt: skip
    memory: Memory = {}
    values: dict[str, list[float]] = {name: [] for name in parents}
    for cycle in range(12):
        asked = {name: float(chance.choice((2, 20, 60))) for name in parents}
        usage = {name: chance.randrange(40) for name in "abc"}
        window = usage_window({**usage, "dept": usage["a"] + usage["b"]}, 120, end_ms=cycle * 600_000, start_ms=0)
        standings = {name: Standing(asked[name], min(asked[name], chance.uniform(0, 16))) for name in parents}
        weighing = calculate_weights(WeightInputs(rules, window, standings, 64.0, cycle * 600_000, memory))
        memory = weighing.memory
        for weight in weighing.weights:
            assert 0.4 * (1 - 1e-5) <= weight.value <= 6.0 * (1 + 1e-5)
            values[weight.queue].append(weight.value)
    assert all(len(set(each[at : at + 3])) == 1 for each in values.values() for at in range(0, 12, 3))
