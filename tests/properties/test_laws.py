"""Invariants of every feedback law: order, scale, monotonicity, static weights without history; and limits of turns."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Bounds, DeficitPolicy, Policy, QueuePolicy, TurnPolicy
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.deficit_law import Deficit
from fairshare.laws.feedback_laws import (
    FairTree,
    Kai,
    Law,
    LawColumns,
    LawQueue,
    LawQueues,
    Memory,
    Multifactor,
)
from fairshare.laws.gang_turns import shares_in_whole_gpus, turn_weights
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights, wanted_weights
from tests.hypothesis_examples import examples
from tests.usage_windows import usage_window

NO_TURNS = TurnPolicy(ratio=0)
LAWS: tuple[Law, ...] = (Kai(2.0), FairTree(), Multifactor(), Deficit(DeficitPolicy(), NO_TURNS))
WEEK_S = 604_800.0
MANY = settings(max_examples=25)
USUAL = settings(max_examples=examples(13, 80))
EVERY_LAW = pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)


@st.composite
def groups(draw: st.DrawFn) -> LawQueues:
    size = draw(st.integers(2, 6))
    weights = [draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))) for _ in range(size)]
    used = [draw(st.integers(0, 100)) for _ in range(size)]
    whole = max(100, sum(used))
    members = tuple(
        LawQueue(
            f"q{i}", weights[i], weights[i] / sum(weights), used[i] / whole,
            float(draw(st.sampled_from((0, 5, 40, 400)))), float(draw(st.integers(0, 5))), weight_now=weights[i],
        )
        for i in range(size)
    )  # fmt: skip
    return LawQueues(LawColumns.of(members), 64.0, WEEK_S, 1_000_000)


def _policy(siblings: LawQueues, **bounds: float) -> Policy:
    free = {"min_multiplier": 0.01, "max_multiplier": 100.0} | bounds
    return Policy(bounds=Bounds(**free), queues=tuple(QueuePolicy(name=m.name) for m in siblings.members))


@EVERY_LAW
@given(siblings=groups(), chance=st.randoms())
@MANY
def test_the_order_of_the_queues_decides_nothing(law: Law, siblings: LawQueues, chance: Random) -> None:
    members = list(siblings.members)
    chance.shuffle(members)
    verdict, shuffled = law(siblings, {}), law(replace(siblings, columns=LawColumns.of(members)), {})
    assert dict(verdict.weights) == dict(shuffled.weights)
    assert verdict.traces.keys() == {member.name for member in members}


@EVERY_LAW
@given(siblings=groups(), factor=st.sampled_from((0.25, 2.0, 8.0)))
@MANY
def test_only_the_proportions_of_the_configured_weights_count(law: Law, siblings: LawQueues, factor: float) -> None:
    scaled = replace(
        siblings,
        columns=LawColumns.of(
            [m._replace(weight=m.weight * factor, weight_now=(m.weight_now or 0.0) * factor) for m in siblings.members]
        ),
    )
    weights, other = law(siblings, {}).weights, law(scaled, {}).weights
    for name, weight in weights.items():
        assert other[name] / (1.0 if law.relative else factor) == pytest.approx(weight)


@EVERY_LAW
@given(siblings=groups(), which=st.integers(0, 5), more=st.floats(0.01, 0.3))
@USUAL
def test_more_past_usage_never_raises_the_own_part(law: Law, siblings: LawQueues, which: int, more: float) -> None:
    members = siblings.members
    member = members[which % len(members)]
    more = min(more, 1.0 - sum(m.usage for m in siblings.members))
    heavier = member._replace(usage=member.usage + max(0.0, more))
    later = replace(siblings, columns=LawColumns.of([heavier if m is member else m for m in members]))
    memory = {m.name: {"x": 0.0, "y": 0.0, "at_ms": 0.0} for m in siblings.members}
    before, after = law(siblings, memory).weights, law(later, memory).weights
    part = before[member.name] / (sum(before.values()) or 1.0)
    assert after[member.name] / (sum(after.values()) or 1.0) <= part + 1e-9


@given(siblings=groups())
@USUAL
def test_without_history_or_gain_the_configured_weights_stand(siblings: LawQueues) -> None:
    unused = replace(siblings, columns=LawColumns.of([m._replace(usage=0.0) for m in siblings.members]))
    whole = sum(m.weight for m in unused.members)
    for law in (Kai(0.0), Kai(3.0), FairTree(), Multifactor()):
        weights = law(unused, {}).weights
        total = sum(weights.values())
        for m in unused.members:
            assert weights[m.name] / total == pytest.approx(m.weight / whole)
    still = Deficit(DeficitPolicy(gain=0, rate=0, reclaim_price=0), NO_TURNS)
    assert still(siblings, {}).weights == pytest.approx({m.name: m.weight for m in siblings.members})


@given(siblings=groups())
@USUAL
def test_debts_are_only_against_real_work_and_never_exceed_what_was_used(siblings: LawQueues) -> None:
    traces = Deficit(DeficitPolicy(horizon=86_400), NO_TURNS)(siblings, {}).traces
    owed = {name: trace["owed_gpu_h"] for name, trace in traces.items()}
    for member in siblings.members:
        if member.requested <= member.allocated:
            assert owed[member.name] <= 1e-6
    used = sum(m.usage for m in siblings.members) * siblings.pool * WEEK_S / 3600
    assert sum(owed.values()) <= 1e-6 * max(1.0, used)


@given(siblings=groups(), data=st.data())
@USUAL
def test_inside_the_quiet_zone_nothing_moves(siblings: LawQueues, data: st.DataObject) -> None:
    law = Deficit(DeficitPolicy(quiet=50.0), NO_TURNS)
    verdict = law(siblings, {})
    for _ in range(3):
        jitter = {m.name: data.draw(st.floats(0.9, 1.1)) for m in siblings.members}
        moved = tuple(m._replace(usage=m.usage * jitter[m.name] * 0.9) for m in siblings.members)
        siblings = replace(siblings, columns=LawColumns.of(moved), now_ms=siblings.now_ms + 600_000)
        following = law(siblings, verdict.memory)
        assert following.weights == pytest.approx(dict(verdict.weights))
        verdict = following


@given(siblings=groups())
@settings(max_examples=examples(10, 80))
def test_a_memory_that_was_written_down_is_the_same_memory(siblings: LawQueues) -> None:
    law = Deficit(DeficitPolicy(), NO_TURNS)
    memory = law(siblings, {}).memory
    written = json.loads(json.dumps({name: dict(numbers) for name, numbers in memory.items()}))
    assert dict(memory) == written
    later = replace(siblings, now_ms=siblings.now_ms + 600_000)
    kept, read = law(later, memory), law(later, written)
    assert (kept.weights, dict(kept.memory)) == (read.weights, dict(read.memory))


@EVERY_LAW
@given(siblings=groups())
@MANY
def test_what_a_law_wants_is_kept_within_the_multipliers(law: Law, siblings: LawQueues) -> None:
    wishes, _ = wanted_weights(law, siblings, _policy(siblings, min_multiplier=0.5, max_multiplier=2.0), {})
    for member in siblings.members:
        assert 0.5 * member.weight * (1 - 1e-5) <= wishes[member.name].weight <= 2.0 * member.weight * (1 + 1e-5)


def _lumps(owed_to: str, limit: float = -1.0) -> LawQueues:
    """16 GPUs held by a gang of `holder`, while every queue waits with another gang."""
    usage = {"holder": 0.5, "second": 0.33, "third": 0.17}
    if owed_to == "second":
        usage = {"holder": 0.7, "second": 0.05, "third": 0.25}
    weights = {"holder": 1.0, "second": 2.0, "third": 3.0} if owed_to == "third" else dict.fromkeys(usage, 1.0)
    members = tuple(
        LawQueue(
            name, weights[name], weights[name] / sum(weights.values()), used, 32.0 if name == "holder" else 16.0,
            16.0 if name == "holder" else 0.0, limit=limit, gang=16.0, weight_now=weights[name],
        )
        for name, used in usage.items()
    )  # fmt: skip
    return LawQueues(LawColumns.of(members), 16.0, WEEK_S, 0)


@pytest.mark.parametrize("owed_to", ["second", "third"])
def test_the_turn_goes_to_who_is_owed_most_and_admits_its_gang(owed_to: str) -> None:
    law = Deficit(DeficitPolicy(), TurnPolicy())
    siblings = _lumps(owed_to)
    verdict = law(siblings, {})
    assert verdict.turn == owed_to
    assert shares_in_whole_gpus(siblings, verdict.weights)[owed_to] == 16.0
    assert max(verdict.weights.values()) / min(verdict.weights.values()) <= TurnPolicy().ratio * (1 + 1e-9)
    wishes, kept = wanted_weights(law, siblings, _policy(siblings), {})
    assert wishes[owed_to].turn
    assert "its turn for 240 more min" in wishes[owed_to].note
    later = law(replace(siblings, now_ms=4 * 3_600_000 - 1), kept)
    assert (later.turn, later.weights) == (owed_to, verdict.weights)
    assert law(replace(siblings, now_ms=4 * 3_600_000), kept).turn == owed_to


LUMPS = _lumps("third")


@pytest.mark.parametrize(
    ("turns", "siblings"),
    [
        (NO_TURNS, LUMPS),
        (TurnPolicy(ratio=2), LUMPS),
        (TurnPolicy(), _lumps("third", limit=8.0)),
        (TurnPolicy(), replace(LUMPS, pool=160.0)),
        (TurnPolicy(), replace(LUMPS, columns=LawColumns.of([m._replace(usage=m.target) for m in LUMPS.members]))),
    ],
    ids=["no turns", "too small a ratio", "beyond a limit", "everything fits", "nothing is owed"],
)
def test_no_turn_without_need_without_claim_or_beyond_a_limit(turns: TurnPolicy, siblings: LawQueues) -> None:
    assert Deficit(DeficitPolicy(), turns)(siblings, {}).turn is None


def test_a_policy_without_turns_ends_a_turn_in_progress() -> None:
    _, kept = wanted_weights(Deficit(DeficitPolicy(), TurnPolicy()), LUMPS, _policy(LUMPS), {})
    result = Deficit(DeficitPolicy(), NO_TURNS)(replace(LUMPS, now_ms=60_000), kept)
    assert result.turn is None


def test_a_turn_freezes_what_was_smoothed() -> None:
    law = Deficit(DeficitPolicy(), TurnPolicy())
    siblings = _lumps("third")
    memory = law(siblings, {}).memory
    before = {name: (numbers["x"], numbers["y"]) for name, numbers in memory.items()}
    kept = law(replace(siblings, now_ms=3_000_000), memory).memory
    assert {name: (numbers["x"], numbers["y"]) for name, numbers in kept.items()} == before


def test_a_concentrated_weight_keeps_the_ratio() -> None:
    out = turn_weights({"a": 1.0, "b": 2.0, "c": 0.0}, "a", 0.001, 50.0)
    assert out == {"a": 2.0, "b": 0.04, "c": 0.0}


def test_the_quiet_zone_is_wider_for_small_queues() -> None:
    settings_ = DeficitPolicy(quiet=0.01, gain=3.0, smoothing=600)
    members = (
        LawQueue("big", 9.0, 0.9, 0.5, 64.0, 50.0, weight_now=9.0),
        LawQueue("small", 1.0, 0.1, 0.5, 64.0, 14.0, weight_now=1.0),
    )
    memory = {name: {"x": 0.0, "y": 0.0, "at_ms": 0.0} for name in ("big", "small")}
    verdict = Deficit(settings_, NO_TURNS)(LawQueues(LawColumns.of(members), 64.0, WEEK_S, 600_000), memory)
    for name, target in (("big", 0.9), ("small", 0.1)):
        aim = verdict.traces[name]["aim"]
        moved = log(verdict.weights[name] / {"big": 9.0, "small": 1.0}[name])
        zone = 0.01 / target * (0.5 / target) ** 0.3
        assert moved == pytest.approx(max(0.0, abs(aim) - zone) * (1 if aim > 0 else -1))


def test_what_moves_all_alike_moves_nobody() -> None:
    """A price that every queue pays has no effect: without gain, weights follow only which queue has others preempted
    more."""
    law = Deficit(DeficitPolicy(gain=0.0, quiet=0.0), NO_TURNS)
    members = tuple(LawQueue(n, 1.0, 0.5, 0.5, 64.0, 32.0, weight_now=1.0, reclaims=8.0) for n in ("a", "b"))
    memory = {n: {"x": 0.0, "y": 0.0, "at_ms": 0.0} for n in ("a", "b")}
    alike = law(LawQueues(LawColumns.of(members), 64.0, WEEK_S, 600_000), memory)
    assert alike.weights == pytest.approx({"a": 1.0, "b": 1.0})
    one = (members[0], members[1]._replace(reclaims=0.0))
    apart = law(LawQueues(LawColumns.of(one), 64.0, WEEK_S, 600_000), memory)
    assert apart.weights["a"] < 1.0 < apart.weights["b"]
    assert sum(apart.weights.values()) == pytest.approx(2.0)


@pytest.mark.parametrize("law", ["kai", "fairtree", "multifactor", "deficit"])
@given(seed=st.integers(0, 1_000_000))
@settings(max_examples=6)
def test_in_a_tree_no_cycle_goes_further_than_a_step_nor_past_the_multipliers(law: str, seed: int) -> None:
    chance = Random(seed)
    parents = {"dept": None, "a": "dept", "b": "dept", "c": None}
    policy = Policy.model_validate(
        {
            "law": law, "k": 3.0, "turns": {"ratio": 0},
            "bounds": {"max_step": 0.3, "deadband": 0.02, "min_multiplier": 0.2, "max_multiplier": 3.0},
            "queues": [{"name": n, "parent": p, "weight": 2.0, "deserved": 1.0} for n, p in parents.items()],
        }
    )  # fmt: skip
    memory: Memory = {}
    weights = dict.fromkeys(parents, 2.0)
    for cycle in range(1, 13):
        asked = {name: float(chance.choice((2, 20, 60))) for name in parents}
        held = {name: min(asked[name], chance.uniform(0, 16)) for name in parents}
        usage = {name: chance.randrange(40) for name in "abc"}
        window = usage_window({**usage, "dept": usage["a"] + usage["b"]}, 120, end_ms=cycle * 600_000, start_ms=0)
        standings = {name: Standing(asked[name], held[name], weights[name]) for name in parents}
        weighing = calculate_weights(WeightInputs(policy, window, standings, 64.0, cycle * 600_000, memory))
        memory = weighing.memory
        for weight in weighing.weights:
            before = weights[weight.queue]
            assert 0.7 - 1e-5 <= weight.value / before <= 1.3 + 1e-5
            assert 0.4 * (1 - 1e-5) <= weight.value <= 6.0 * (1 + 1e-5)
            assert weight.value == before or abs(weight.value - before) > 0.02 * before
            weights[weight.queue] = weight.value
