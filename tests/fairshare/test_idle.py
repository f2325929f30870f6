"""The idle rule: never without measured time, monotone, forgiving, exempting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import IdleReclaimPolicy, Policy
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.preemption import idle_reclaim
from fairshare.preemption.preemption_types import Idleness, PodUse, PreemptionInputs, inputs_from_json, inputs_to_json
from fairshare.preemption.victim_selection import decide
from tests.effort import examples
from tests.fairshare.preemption_cases import NOW_MS, gang, policy, situation

RULE: dict[str, Any] = {"mode": "enforce", "below": 0.05, "sustained": "2h", "grace": "30m"}
LONG_MS, GRACE_MS = 7_200_000, 1_800_000
END_MS = NOW_MS - 60_000


def _ready(each: Gang, since_ms: int = NOW_MS - 10 * LONG_MS) -> Gang:
    return replace(each, pods=tuple(replace(pod, ready_ms=since_ms) for pod in each.pods))


def _use(pod: Pod, span_ms: int, busy: float, unknown: float = 0.0) -> PodUse:
    held = pod.gpus * span_ms * 1000
    return PodUse(round(held * busy), round(held * (1 - busy - unknown)), round(held * unknown))


def _idleness(gangs: list[Gang], busy: Mapping[str, float] | None = None, **more: Any) -> Idleness:
    """Every pod by its busy part over both spans; without one, idle all the time. All were warned long ago."""
    pods = [pod for each in gangs for pod in each.pods]
    parts = {pod.uid: (busy or {}).get(pod.uid, 0.0) for pod in pods}
    fields: dict[str, Any] = {
        "lasting": {pod.uid: _use(pod, LONG_MS, parts[pod.uid]) for pod in pods},
        "recent": {pod.uid: _use(pod, GRACE_MS, parts[pod.uid]) for pod in pods},
        "warned": {pod.uid: NOW_MS - GRACE_MS for pod in pods},
    }
    return Idleness(END_MS, **fields | more)


def _here(rules: Policy, gangs: list[Gang], idleness: Idleness) -> PreemptionInputs:
    return situation(rules, {"n0": 16}, gangs, {"a": 16}, idle=idleness)


def _gone(rules: Policy, gangs: list[Gang], idleness: Idleness) -> set[str]:
    return {pod.uid for each in decide(rules, _here(rules, gangs, idleness)) for v in each.victims for pod in v.pods}


def test_the_reason_says_what_was_measured_and_what_is_lost() -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    (verdict,) = decide(rules, _here(rules, gangs, _idleness(gangs, {"nb-0": 0.012}, worked={"nb-0": 3.0})))
    (victim,) = verdict.victims
    assert (verdict.claimant, verdict.trigger, victim.ground, victim.whole) == ("Idle/Gang/ns/nb", "idle", "idle", True)
    assert verdict.reason == "does not use 2 GPUs: 2 are reclaimed"
    assert victim.reason == (
        "its 2 GPUs were busy at most 1.2% of the last 120 min, less than 5 %; its owner was warned 30 min ago;"
        " 3.0 GPU-hours of work since the start are lost"
    )


def test_without_an_idle_rule_no_pod_is_idle() -> None:
    gangs = [_ready(gang("nb", "a", [("n0", 2)]))]
    assert _gone(policy({"a": 16}), gangs, _idleness(gangs)) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"lasting": {}},  # no row at all
        {"recent": {}},
        {"lasting": {"nb-0": PodUse(0, 0, 2 * LONG_MS * 1000)}},  # held, allocation only
        {"lasting": {"nb-0": PodUse(0, LONG_MS * 1000, 0)}},  # half of its GPUs, or of the time
        {"recent": {"nb-0": PodUse(0, 0, 2 * GRACE_MS * 1000)}},
        {"warned": {}},
        {"warned": {"nb-0": NOW_MS - GRACE_MS + 1}},
        {"exempt": {"nb-0": "its label x exempts it"}},
    ],
)
def test_what_never_triggers_it(change: dict[str, Any]) -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("nb", "a", [("n0", 2)]))]
    assert _gone(rules, gangs, _idleness(gangs)) == {"nb-0"}
    assert _gone(rules, gangs, _idleness(gangs, **change)) == set()


def test_a_pod_ready_for_less_than_the_span_is_left_alone() -> None:
    rules = policy({"a": 16}, idle=RULE)
    for since in (None, END_MS - LONG_MS + 1):
        gangs = [gang("nb", "a", [("n0", 2)])]
        gangs = [replace(gangs[0], pods=(replace(gangs[0].pods[0], ready_ms=since),))]
        assert _gone(rules, gangs, _idleness(gangs)) == set()


def test_one_pod_that_works_keeps_its_gang_and_idle_surplus_goes_alone() -> None:
    rules = policy({"a": 16}, idle=RULE)
    whole = [_ready(gang("train", "a", [("n0", 1)] * 4))]
    assert _gone(rules, whole, _idleness(whole, {"train-2": 0.9})) == set()
    elastic = [_ready(gang("ray", "a", [("n0", 1)] * 4, least=2))]
    shed = {pod.uid for part in idle_reclaim.bundles(elastic[0], NOW_MS) if not part.whole for pod in part.pods}
    core = {pod.uid for pod in elastic[0].pods} - shed
    assert _gone(rules, elastic, _idleness(elastic, dict.fromkeys(core, 0.9))) == shed
    (verdict,) = decide(rules, _here(rules, elastic, _idleness(elastic)))
    assert [(victim.whole, victim.gpus) for victim in verdict.victims] == [(True, 4.0)]


def test_a_gang_that_waits_for_the_rest_of_it_is_not_idle() -> None:
    rules = policy({"a": 16}, idle=RULE)
    gangs = [_ready(gang("train", "a", [("n0", 1)] * 2, waiting=[1.0]))]
    assert _gone(rules, gangs, _idleness(gangs)) == set()


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"per_team": 0}, "per-team"), ({"per_cluster": 0}, "per-cluster"), ({"lost_gpu_hours": 1}, "lost-hours")],
)
def test_it_counts_against_every_limit(options: dict[str, Any], limit: str) -> None:
    rules = policy({"a": 16}, idle=RULE, **options)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    (verdict,) = decide(rules, _here(rules, gangs, _idleness(gangs)))
    assert (verdict.outcome, [each.limit for each in verdict.spared]) == ("denied", [limit])


def test_only_work_that_was_done_is_lost() -> None:
    """Twenty hours of two GPUs are forty, but the ledger saw two of them busy: the limit is no matter."""
    rules = policy({"a": 16}, idle=RULE, lost_gpu_hours=5)
    gangs = [_ready(gang("nb", "a", [("n0", 2)], hours=20))]
    assert _gone(rules, gangs, _idleness(gangs)) == set()
    assert _gone(rules, gangs, _idleness(gangs, worked={"nb-0": 2.0})) == {"nb-0"}


def test_a_preempted_workload_is_not_reclaimed_as_idle_too() -> None:
    gangs = [_ready(gang("a0", "a", [("n0", 16)])), gang("b0", "b", waiting=[8])]
    rules = policy({"a": 0, "b": 16}, idle=RULE)
    here = situation(rules, {"n0": 16}, gangs, {"a": 0, "b": 16}, idle=_idleness(gangs))
    verdicts = decide(rules, here)
    assert [(each.trigger, len(each.victims)) for each in verdicts] == [("waits", 1)]


# --- laws -------------------------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Gang], Idleness]:
    """Some gangs, and whatever a ledger may say of their pods."""
    gangs = []
    for i in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 3))
        least = draw(st.sampled_from([None, 1]))
        made = gang(
            f"g{i}", "a", [("n0", draw(st.sampled_from([0.5, 1.0, 2.0])))] * size, least=least,
            priority=draw(st.integers(0, 2)), preemptible=draw(st.sampled_from([True, True, False])),
        )  # fmt: skip
        gangs.append(_ready(made, draw(st.sampled_from([NOW_MS - 10 * LONG_MS, NOW_MS - LONG_MS]))))
    parts = st.sampled_from([0.0, 0.0, 0.01, 0.049, 0.05, 0.06, 0.5, 1.0])
    lasting, recent, warned = {}, {}, {}
    for pod in (pod for each in gangs for pod in each.pods):
        for span, spans in ((LONG_MS, lasting), (GRACE_MS, recent)):
            if draw(st.sampled_from([True] * 5 + [False])):
                busy = draw(parts)
                spans[pod.uid] = _use(pod, span, busy, min(1 - busy, draw(parts)))
        if draw(st.sampled_from([True] * 4 + [False])):
            warned[pod.uid] = NOW_MS - draw(st.sampled_from([GRACE_MS, 2 * GRACE_MS, GRACE_MS - 1]))
    return gangs, Idleness(END_MS, lasting, recent, warned)


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.sampled_from([0.01, 0.05, 0.5, 1.0]))
def test_never_without_measured_idle_time(case: tuple[list[Gang], Idleness], below: float) -> None:
    """Each victim was warned, and measured idle for more than the rest of the time, over both spans."""
    gangs, idleness = case
    rules = policy({"a": 16}, idle=RULE | {"below": below})
    pods = {pod.uid: pod for each in gangs for pod in each.pods}
    for uid in _gone(rules, gangs, idleness):
        for span, uses in ((LONG_MS, idleness.lasting), (GRACE_MS, idleness.recent)):
            assert uses[uid].idle_us > (1 - below) * pods[uid].gpus * span * 1000 - 1
        assert NOW_MS - idleness.warned[uid] >= GRACE_MS
    blind = {uid: PodUse(0, 0, use.busy_us + use.idle_us + use.unknown_us) for uid, use in idleness.lasting.items()}
    assert _gone(rules, gangs, replace(idleness, lasting=blind)) == set()


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_monotone(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    """More busy or unknown time, a lower threshold, a longer grace: never more that go."""
    gangs, idleness = case
    before = _gone(policy({"a": 16}, idle=RULE), gangs, idleness)
    uses = dict(data.draw(st.sampled_from([idleness.lasting, idleness.recent])))
    name = "lasting" if uses == idleness.lasting else "recent"
    if uses:
        uid = data.draw(st.sampled_from(sorted(uses)))
        moved = data.draw(st.integers(0, uses[uid].idle_us))
        known = data.draw(st.booleans())
        use = uses[uid]
        uses[uid] = PodUse(use.busy_us + moved * known, use.idle_us - moved, use.unknown_us + moved * (not known))
    busier = replace(idleness, **{name: uses})
    rules = policy({"a": 16}, idle=RULE)
    whole = {pod.uid for each in gangs for pod in each.pods}
    assert _gone(rules, gangs, busier) <= before
    assert _gone(policy({"a": 16}, idle=RULE | {"below": 0.02}), gangs, idleness) <= before
    later = replace(idleness, warned={uid: at + 1 for uid, at in idleness.warned.items()})
    assert _gone(rules, gangs, later) <= before <= whole


@settings(max_examples=examples(16, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_the_exempt_are_never_chosen(case: tuple[list[Gang], Idleness], data: st.DataObject) -> None:
    gangs, idleness = case
    uids = sorted(pod.uid for each in gangs for pod in each.pods)
    exempt = data.draw(st.sets(st.sampled_from(uids)))
    rules = policy({"a": 16}, idle=RULE | {"exempt": {"priority": 1}})
    gone = _gone(rules, gangs, replace(idleness, exempt=dict.fromkeys(exempt, "its label exempts it")))
    low = {pod.uid for each in gangs if each.priority < 1 and each.preemptible for pod in each.pods}
    assert gone <= low - exempt
    assert _gone(policy({"a": 16}, idle=RULE | {"exempt": {"namespaces": ["n*"]}}), gangs, idleness) == set()


@settings(max_examples=examples(20, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives())
def test_a_recorded_idleness_is_decided_again_the_same(case: tuple[list[Gang], Idleness]) -> None:
    rules = policy({"a": 16}, idle=RULE)
    here = _here(rules, *case)
    assert decide(rules, inputs_from_json(json.loads(json.dumps(inputs_to_json(here))))) == decide(rules, here)


@pytest.mark.parametrize(
    ("exempt", "reason"),
    [
        ({"labels": {"app": "chat"}}, "its label app exempts it"),
        ({"labels": {"app": "*"}}, "its label app exempts it"),
        ({"labels": {"app": "other"}}, None),
        ({"annotations": {"keep": "*"}}, "its annotation keep exempts it"),
        ({}, None),
    ],
)
def test_exemptions_by_what_the_owner_wrote(exempt: dict[str, Any], reason: str | None) -> None:
    rule = IdleReclaimPolicy.model_validate({"exempt": exempt})
    pod = {"metadata": {"name": "p", "labels": {"app": "chat"}, "annotations": {"keep": "yes"}}}
    assert idle_reclaim.exemption(rule.exempt, pod) == reason
