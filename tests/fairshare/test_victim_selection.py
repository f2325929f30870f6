"""Victim selection: the order of victims, protection, claims in order, and laws over any cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Decision, Policy, PreemptionPolicy
from fairshare.cli.decision_replay import recount
from fairshare.core.queues_and_weights import Gang, Protection
from fairshare.preemption.claims_and_placement import MOST_CLAIMS, FreeGpus
from fairshare.preemption.eviction import EvictionResult
from fairshare.preemption.preemption_cycle import PreemptionReport, VictimStop, decisions
from fairshare.preemption.preemption_types import (
    PreemptionCall,
    PreemptionInputs,
    Verdict,
    inputs_from_json,
    inputs_to_json,
)
from fairshare.preemption.reclaim_rules_and_limits import PastPreemption, ReclaimBudget
from fairshare.preemption.victim_selection import decide
from gputally.base.units import MS_PER_DAY
from gputally.base.version import __version__
from tests.fairshare.preemption_cases import HOUR_MS, NOW_MS, gang, policy, situation
from tests.hypothesis_examples import examples

DAEMON = "its pod a0-0 belongs to a DaemonSet, which starts it again at once on the same node"
NOT_STARTED = "it has run for 0 of the 10 min for which every start is protected"
LOST = "0.0 GPU-hours of work were lost within the day, and with its 4.0 that would be more than the 3 allowed"
NODES = {f"n{i}": 8.0 for i in range(3)}
TAKES = policy({"a": 0, "b": 8})
"""b is within its quota, a has none."""
A0, B0 = gang("a0", "a", [("n0", 4)]), gang("b0", "b", waiting=[4])


def _one(
    rules: Policy,
    nodes: Mapping[str, float],
    gangs: Sequence[Gang],
    shares: Mapping[str, float] | None = None,
    **more: Any,
) -> Verdict:
    """Return the only verdict on these gangs."""
    (verdict,) = decide(rules, situation(rules, nodes, gangs, shares, **more))
    return verdict


def _stopped(verdict: Verdict) -> list[str]:
    return sorted({victim.gang.name for victim in verdict.victims})


def _why(verdict: Verdict, name: str) -> str:
    return next(each.reason for each in verdict.spared if each.key == f"Gang/ns/{name}")


def test_the_table_of_the_sample_policy() -> None:
    """A has 16 and borrows B's 8. B submits, and A's borrowed pods are preempted, least loss first."""
    rules = policy({"a": 16, "b": 8})
    running = [gang(f"a{i}", "a", [(f"n{i}", 8)], hours=5, saved=saved) for i, saved in enumerate((4.0, 0.5, 2.0))]
    verdict = _one(rules, NODES, [*running, gang("b0", "b", waiting=[8])], {"a": 16, "b": 8})
    assert verdict.outcome == "preempts"
    (victim,) = verdict.victims
    assert (victim.gang.name, victim.ground, victim.gpus, victim.lost_gpu_hours) == ("a1", "within quota", 8, 4.0)
    assert victim.reason == (
        "its 8 GPUs go to Gang/ns/b0 of queue b: queue a holds 24 GPUs with a quota of 16, and queue b is within its"
        " own quota; 4.0 GPU-hours of work since the last checkpoint are lost"
    )
    assert _why(verdict, "a0") == "workloads that lose less give way, and that is enough"


def test_a_share_is_taken_back_above_a_share_only() -> None:
    rules = policy({"a": 0, "b": 0})
    gangs = [gang(f"a{i}", "a", [("n0", 2)]) for i in range(4)] + [B0]
    fair = _one(rules, {"n0": 8}, gangs, {"a": 4, "b": 4})
    assert [v.ground for v in fair.victims] == ["above share", "above share"]
    above = _one(rules, {"n0": 8}, gangs, {"a": 8, "b": 2}).reason
    assert above == "needs 4 GPUs, but queue b holds 0 GPUs, and with 4 more it would be above its fair share of 2"
    rules = policy({"lent": 0, "full": 0, "a": {"parent": "lent"}, "b": {"parent": "full"}, "c": {"parent": "full"}})
    gangs = [gang("a0", "a", [("n0", 8)]), gang("c0", "c", [("n0", 4)]), B0]
    department = _one(rules, {"n0": 12}, gangs, {"lent": 7, "a": 7, "full": 5, "b": 5, "c": 4}).reason
    assert department == "needs 4 GPUs, but queue b would then be above its share more than those it takes from"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"spot": True, "hours": 9.0}, {"hours": 0.1}),
        ({"priority": 1000, "hours": 9.0}, {"priority": 10_000, "hours": 0.1}),
        ({"hours": 9.0, "saved": 0.1}, {"hours": 0.5}),
    ],
)
def test_the_order_of_victims(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Spot first, then the lower class, then the least loss since the last checkpoint."""
    gangs = [gang("first", "a", [("n0", 4)], **one), gang("second", "a", [("n0", 4)], **other)]
    assert _stopped(_one(TAKES, {"n0": 8}, [*gangs, B0])) == ["first"]


def test_surplus_goes_before_any_core() -> None:
    elastic = gang("elastic", "a", [("n0", 1)] * 4, least=2, hours=50)
    fixed = gang("fixed", "a", [("n0", 4)], hours=0.1)
    verdict = _one(TAKES, {"n0": 8}, [elastic, fixed, gang("b0", "b", waiting=[1, 1])])
    assert [(v.gang.name, v.whole, v.gpus) for v in verdict.victims] == [("elastic", False, 1.0)] * 2
    assert "which it can run without" in verdict.victims[0].reason


def test_whole_nodes_are_freed_for_a_pod_that_needs_one() -> None:
    """One victim on each node loses least, but only a whole node helps an 8-GPU pod."""
    gangs = [gang(f"a{n}{i}", "a", [(f"n{n}", 4)], hours=1 + i + n) for n in range(2) for i in range(2)]
    assert _stopped(_one(TAKES, {"n0": 8, "n1": 8}, [*gangs, gang("b0", "b", waiting=[8])])) == ["a00", "a01"]


def test_victims_are_chosen_on_nodes_the_claimant_may_use() -> None:
    gangs = [gang("cheap", "a", [("n0", 8)], hours=0.1), gang("dear", "a", [("n1", 8)]), gang("b0", "b", waiting=[8])]
    assert _stopped(_one(TAKES, {"n0": 8, "n1": 8}, gangs, usable={"Gang/ns/b0": ("n1",)})) == ["dear"]


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({}, {"preemptible": False}, "it may not be preempted"),
        ({"min_runtime": 7200}, {}, "it has run for 60 of the 120 min for which every start is protected"),
        ({"per_cluster": 0}, {}, "0 workloads of the cluster were stopped within the hour, and no more may be"),
        ({"per_team": 0}, {}, "0 workloads of team a were stopped within the hour, and no more may be"),
        ({"lost_gpu_hours": 3}, {}, LOST),
        ({"min_runtime": 600}, {"started_ms": None}, NOT_STARTED),
        ({}, {"owner": "DaemonSet/ns/probe"}, DAEMON),
        ({}, {"owner": "Node//n0"}, "its pod a0-0 belongs to the kubelet itself"),
    ],
)
def test_what_protects_a_victim(options: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    rules = policy({"a": 0, "b": 8}, **options)
    verdict = _one(rules, {"n0": 4}, [gang("a0", "a", [("n0", 4)], **fields), B0])
    assert verdict.outcome == "denied"
    assert _why(verdict, "a0") == words


@pytest.mark.parametrize(
    ("saved", "words"),
    [(0.5, "2.0 GPU-hours of work since the last checkpoint"), (-1.0, "4.0 GPU-hours of work since the start"),
     (3.0, "4.0 GPU-hours of work since the start"), (None, "4.0 GPU-hours of work since the start")],
)  # fmt: skip
def test_only_a_checkpoint_of_this_start_saves_work(saved: float | None, words: str) -> None:
    """A checkpoint from the future is a mistake, and one from before the start belongs to an earlier start."""
    running = gang("a0", "a", [("n0", 4)], hours=1, saved=saved)
    (victim,) = _one(TAKES, {"n0": 4}, [running, B0]).victims
    assert words in victim.reason


def test_a_victim_without_a_controller_is_told_its_pods_will_not_restart() -> None:
    gangs = [gang("a0", "a", [("n0", 2), ("n0", 2)], owner=""), B0]
    (victim,) = _one(TAKES, {"n0": 4}, gangs).victims
    assert victim.reason.endswith(
        "4.0 GPU-hours of work since the start are lost; no controller will start 2 of its pods again"
    )


def test_a_workload_is_left_alone_after_it_was_preempted() -> None:
    rules = policy({"a": 0, "b": 8}, cool_down=7200)
    past = (PastPreemption(NOW_MS - HOUR_MS, "Gang/ns/a0", "a", "a", 4, 1),)
    assert "preempted 60 min ago" in _why(_one(rules, {"n0": 4}, [A0, B0], past=past), "a0")
    old = (PastPreemption(NOW_MS - MS_PER_DAY, "Gang/ns/a0", "a", "a", 4, 1),)
    assert _one(rules, {"n0": 4}, [A0, B0], past=old).outcome == "preempts"


def test_classes_that_never_preempt_only_wait() -> None:
    rules = policy({"a": 0, "b": 8}, classes=[{"name": "development", "value": 1000, "preempts": False}])
    for waits in (gang("b0", "b", waiting=[4], priority=1000), gang("b0", "b", waiting=[4], preempts=False)):
        assert decide(rules, situation(rules, {"n0": 4}, [A0, waits])) == ()


def test_a_higher_priority_gives_way_to_a_quota_alone() -> None:
    gangs = [gang("a0", "a", [("n0", 4)], priority=10), gang("b0", "b", waiting=[4], priority=1)]
    quota = policy({"a": 0, "b": 8})
    assert _one(quota, {"n0": 4}, gangs).outcome == "preempts"
    share = policy({"a": 0, "b": 0})
    verdict = _one(share, {"n0": 4}, gangs, {"a": 0, "b": 4})
    assert _why(verdict, "a0") == "its priority 10 is above 1, and no quota is at stake"


def test_no_more_is_taken_while_pods_are_leaving() -> None:
    assert _one(TAKES, {"n0": 8}, [A0, B0]).outcome == "room"


def test_free_gpus_are_no_room_for_a_gang_that_requires_one_rack() -> None:
    """The controller does not know which GPUs share a rack: it neither reports room nor preempts."""
    wanted = gang("b0", "b", waiting=[4, 4], topology="example.com/rack")
    running = [A0, gang("a1", "a", [("n1", 4)])]
    for gpus, gangs in ((8, running[:1]), (4, running)):
        verdict = _one(TAKES, {"n0": gpus, "n1": gpus}, [*gangs, wanted])
        assert verdict.outcome == "denied"
        assert verdict.reason == (
            "needs 8 GPUs, but all of them within one example.com/rack, which is not checked here: its scheduler makes"
            " room itself"
        )


def test_a_latency_trigger_takes_borrowed_gpus_of_any_queue() -> None:
    rules = policy({"a": 4, "b": 0})
    gangs = [A0, gang("a1", "a", [("n0", 4)]), B0]
    assert _one(rules, {"n0": 8}, gangs, {"a": 8, "b": 0}).outcome == "denied"
    call = PreemptionCall("b", "ns/b0", "p99 latency is 80 ms, above 50 ms for 5 min")
    verdict = _one(rules, {"n0": 8}, gangs, {"a": 8, "b": 0}, calls=(call,))
    assert [victim.ground for victim in verdict.victims] == ["latency"]
    assert "p99 latency is 80 ms" in verdict.victims[0].reason
    guaranteed = policy({"a": 8, "b": 0})
    assert _one(guaranteed, {"n0": 8}, gangs, calls=(call,)).outcome == "denied"


def test_a_gang_that_would_carry_its_queue_below_its_quota_stays() -> None:
    rules = policy({"a": 6, "b": 8})
    gangs = [gang("a0", "a", [("n0", 8)]), B0]
    assert _why(_one(rules, {"n0": 8}, gangs), "a0") == "without its 8 GPUs queue a would hold less than its quota of 6"


def test_two_claims_never_take_the_same_pod() -> None:
    rules = policy({"a": 0, "b": 4, "c": 4})
    gangs = [A0, B0, gang("c0", "c", waiting=[4])]
    first, second = decide(rules, situation(rules, {"n0": 4}, gangs))
    assert (first.outcome, second.outcome) == ("preempts", "denied")


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Policy, PreemptionInputs]:
    """Generate queues, two levels deep, with gangs on a few nodes and gangs that wait."""
    names = ["a", "b", "c", "d"]
    quota = st.sampled_from([4, 0, 2, 8, 6, 16])
    queues: dict[str, Any] = {"dept": draw(st.sampled_from([8, 16, 0, -1]))}
    for name in names:
        parent = {"parent": "dept"} if draw(st.booleans()) else {}
        queues[name] = {"deserved": draw(quota), **parent, "team": draw(st.sampled_from(["x", "y"]))}
    rules = policy(
        queues,
        per_team=draw(st.sampled_from([9, 9, 2, 1])),
        per_cluster=draw(st.sampled_from([9, 9, 3, 1])),
        lost_gpu_hours=draw(st.sampled_from([1000.0, 1000.0, 20.0, 5.0])),
        min_runtime=draw(st.sampled_from([0, 0, 3600])),
        saturation=draw(st.sampled_from([1.0, 1.5])),
    )
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 3)))]
    hours, saved = st.sampled_from([0.5, 2.0, 5.0]), st.sampled_from([None, 0.25])
    preemptible = st.sampled_from([True] * 5 + [False])
    fields = st.fixed_dictionaries(
        {"hours": hours, "saved": saved, "priority": st.integers(0, 2), "preemptible": preemptible}
    )
    gangs = []
    for node in nodes:
        sizes = draw(st.sampled_from([(8,), (4, 4), (4, 2, 2), (2, 2, 2, 2), (8, 0), (4, 0)]))
        for i, size in enumerate(size for size in sizes if size):
            pods, least = draw(st.sampled_from([(1, 1), (size, size), (size, 1)]))
            on = [(node, size / pods)] * pods
            gangs.append(gang(f"{node}g{i}", draw(st.sampled_from("aabbc")), on, least=least, **draw(fields)))
    for i in range(draw(st.integers(1, 3))):
        waiting = [float(draw(st.sampled_from([1, 2, 8])))] * draw(st.integers(1, 2))
        queue = draw(st.sampled_from("ccdda"))
        gangs.append(gang(f"w{i}", queue, waiting=waiting, **draw(fields) | {"preemptible": True}))
    shares = {name: float(draw(st.sampled_from([16, 8, 4, 0]))) for name in queues}
    calls = (PreemptionCall("a", "", "the latency is high"),) if draw(st.booleans()) else ()
    return rules, situation(rules, dict.fromkeys(nodes, 8.0), gangs, shares, calls=calls)


@pytest.mark.thorough
@settings(max_examples=examples(30, 300))
@given(clusters())
def test_no_queue_falls_below_its_quota(case: tuple[Policy, PreemptionInputs]) -> None:
    """Nor does any queue above it that is not the claimant's own: a department may move GPUs within itself."""
    rules, here = case
    queues = {queue.name: queue for queue in rules.queues}
    held = {name: account.stocks["gpu"].allocated for name, account in here.accounts.items()}
    for verdict in decide(rules, here):
        moves = [(victim.gang.queue, -victim.gpus) for victim in verdict.victims]
        touched: set[str] = set()
        for queue, amount in moves:
            at: str | None = queue
            while at is not None:
                held[at] += amount
                touched.add(at)
                at = queues[at].parent
        if verdict.outcome == "preempts":
            at = verdict.queue
            while at is not None:
                held[at] += verdict.gpus
                touched.discard(at)
                at = queues[at].parent
        for name in touched:
            own = [v for v in verdict.victims if v.gang.queue == name and v.ground == "lower class"]
            assert own or held[name] >= queues[name].deserved - 1e-9 or queues[name].deserved == -1


@pytest.mark.thorough
@settings(max_examples=examples(20, 200))
@given(clusters())
def test_gangs_go_whole_or_keep_their_minimum(case: tuple[Policy, PreemptionInputs]) -> None:
    rules, here = case
    gone: dict[str, float] = {}
    whole: set[str] = set()
    for verdict in decide(rules, here):
        for victim in verdict.victims:
            gone[victim.gang.name] = gone.get(victim.gang.name, 0.0) + victim.gpus
            whole |= {victim.gang.name} if victim.whole else set()
    for each in here.gangs:
        if each.name in gone:
            left = each.allocated - gone[each.name]
            assert left == pytest.approx(0) if each.name in whole else left >= each.minimum - 1e-9


@pytest.mark.thorough
@settings(max_examples=examples(20, 200))
@given(clusters())
def test_limits_hold(case: tuple[Policy, PreemptionInputs]) -> None:
    rules, here = case
    victims = [victim for verdict in decide(rules, here) for victim in verdict.victims]
    assert len({victim.gang.name for victim in victims}) <= rules.preemption.per_cluster
    for team in ("x", "y"):
        assert len({v.gang.name for v in victims if v.team == team}) <= rules.preemption.per_team
    assert sum(victim.lost_gpu_hours for victim in victims) <= rules.preemption.lost_gpu_hours + 1e-9


@pytest.mark.thorough
@settings(max_examples=examples(20, 200))
@given(clusters(), st.randoms(use_true_random=False))
def test_order_of_the_list_is_no_input(case: tuple[Policy, PreemptionInputs], chance: random.Random) -> None:
    rules, here = case
    gangs = list(here.gangs)
    chance.shuffle(gangs)
    shuffled = PreemptionInputs(NOW_MS, here.target, tuple(gangs), here.accounts, here.free, calls=here.calls)
    assert decide(rules, shuffled) == decide(rules, here)


@pytest.mark.thorough
@settings(max_examples=examples(15, 100))
@given(clusters())
def test_a_recorded_situation_is_decided_again_the_same(case: tuple[Policy, PreemptionInputs]) -> None:
    """From the cycle's record as the accountant keeps it, with every number and sentence."""
    rules, here = case
    verdicts = decide(rules, here)
    would = EvictionResult("would-stop")
    stops = tuple(VictimStop(each.claimant, victim, would) for each in verdicts for victim in each.victims)
    made = decisions(rules, PreemptionReport("kai", "dry-run", here, verdicts, stops), {})
    kept = [Decision.model_validate_json(each.model_dump_json()) for each in made]
    counts = recount(kept, {rules.version(): rules}, __version__)
    assert [(count.fault, count.differences) for count in counts] == [("", ())] * bool(made)
    assert decide(rules, inputs_from_json(json.loads(json.dumps(inputs_to_json(here))))) == verdicts


@pytest.mark.thorough
@settings(max_examples=examples(20, 200))
@given(clusters())
def test_every_running_gang_that_stays_has_a_reason(case: tuple[Policy, PreemptionInputs]) -> None:
    rules, here = case
    running = {f"Gang/ns/{each.name}" for each in here.gangs if each.allocated > 0}
    for verdict in decide(rules, here):
        if verdict.outcome == "preempts":
            named = {each.key for each in verdict.spared} | {f"Gang/ns/{v.gang.name}" for v in verdict.victims}
            assert named <= running
            assert all(each.reason for each in verdict.spared)


def test_who_finds_room_uses_up_his_queues_share() -> None:
    """Otherwise the second of two gangs would take GPUs beyond its queue's share, and the other queues would take them
    back at once."""
    rules = policy({"a": 0, "b": 0})
    running = [gang(f"a{i}", "a", [("n0", 4)]) for i in range(2)]
    waiting = [gang("b0", "b", waiting=[4], hours=2), gang("b1", "b", waiting=[4])]
    nodes, shares = {"n0": 8.0, "n1": 4.0}, {"a": 6.0, "b": 6.0}
    first, second = decide(rules, situation(rules, nodes, [*running, *waiting], shares))
    assert (first.claimant, first.outcome, second.outcome) == ("Gang/ns/b0", "room", "denied")
    assert second.reason == (
        "needs 4 GPUs, but queue b holds 0 GPUs and is to get 4 already, and with 4 more it would be above its fair"
        " share of 6"
    )
    other = gang("c0", "c", waiting=[4], priority=-1)
    rules = policy({"a": 0, "b": 0, "c": 0})
    here = situation(rules, {"n0": 4, "n1": 4}, [running[0], waiting[0], other], {"a": 4, "b": 0, "c": 4})
    assert [v.outcome for v in decide(rules, here)] == ["room", "denied"]  # what is only expected is not taken back


def test_room_is_not_reserved_for_a_claim_that_a_limit_blocks() -> None:
    rules = policy({"a": 0, "b": {"deserved": 0, "limit": 4}, "c": 0})
    gangs = [A0, gang("b0", "b", [("n1", 4)]), gang("b1", "b", waiting=[4], priority=9)]
    gangs.append(gang("c0", "c", waiting=[4]))
    full, placed = decide(rules, situation(rules, {"n0": 4, "n1": 8}, gangs, {"a": 0, "b": 4, "c": 4}))
    words = "needs 4 GPUs, but queue b may hold 4 GPUs at most and holds 4 GPUs"
    assert (full.claimant, full.reason) == ("Gang/ns/b1", words)
    assert (placed.claimant, placed.outcome) == ("Gang/ns/c0", "room")


def test_a_claim_that_can_never_run_does_not_block_later_claims() -> None:
    """It has a higher priority and exceeds one cycle's search: it is refused outright, or searched for in vain."""
    rules = policy({"a": 0, "b": 4, "c": 0})
    running = [gang("a0", "a", [("n0", 8)]), gang("a1", "a", [("n1", 8)], priority=200)]
    last = gang("b0", "b", waiting=[8], priority=1)
    for share in (0.0, 64.0):
        crowd = [gang(f"c{i}", "c", waiting=[8, 8], priority=100) for i in range(MOST_CLAIMS + 10)]
        here = situation(rules, {"n0": 8, "n1": 8}, [*running, *crowd, last], {"a": 0, "b": 8, "c": share})
        verdicts = decide(rules, here)
        assert verdicts[-1].claimant == "Gang/ns/b0"
        assert [each.gang.name for each in verdicts[-1].victims] == ["a0"]
        told = [each for each in verdicts if each.queue == "c"]
        assert len(told) == MOST_CLAIMS + (share > 0)
        assert len({(each.outcome, each.reason, each.spared) for each in told}) == 1


def test_a_node_that_holds_more_than_it_lists_takes_no_room_from_others() -> None:
    """Three of its GPUs were lost while pods held them."""
    gangs = [gang("a0", "a", [("n0", 8)], preemptible=False), gang("a1", "a", [("n1", 4)]), B0]
    here = situation(TAKES, {"n0": 8, "n1": 4}, gangs)
    (verdict,) = decide(TAKES, replace(here, free={**here.free, "n0": -3.0}))
    assert [each.gang.name for each in verdict.victims] == ["a1"]


def test_words_at_the_edge_of_a_time() -> None:
    """9 min 59 s are not written as "10 of the 10 min"; at the full ten the victim may be evicted."""
    rules = policy({"a": 0, "b": 8}, min_runtime=600, cool_down=90)
    for seconds, words in ((599, "it has run for 9 of the 10 min for which every start is protected"), (600, "")):
        gangs = [gang("a0", "a", [("n0", 4)], hours=seconds / 3600), B0]
        (verdict,) = decide(rules, situation(rules, {"n0": 4}, gangs))
        assert [each.reason for each in verdict.spared] == [words] * bool(words)
    past = (PastPreemption(NOW_MS - 80_000, "Gang/ns/a0", "a", "a", 4, 1),)
    (verdict,) = decide(rules, situation(rules, {"n0": 4}, [A0, B0], past=past))
    assert verdict.spared[0].reason == "it was preempted 1 min ago, and is protected for 1.5 min"


ROOM_NODES = ("n0", "n1", "n2")
AMOUNTS = st.sampled_from([1.0, 2.0, 4.0, 0.5, 1 / 7, 3 / 7, 0.1])
PARTS = st.lists(st.dictionaries(st.sampled_from([*ROOM_NODES, "elsewhere"]), AMOUNTS, max_size=2), max_size=6)


@settings(max_examples=examples(60, 2_000))
@given(
    st.fixed_dictionaries(dict.fromkeys(ROOM_NODES, st.sampled_from([0.0, 1.0, 2.5, -1.0]))),
    st.lists(AMOUNTS, max_size=4) | st.builds(lambda size, n: [size] * n, AMOUNTS, st.integers(1, 5)),
    PARTS,
    st.sets(st.integers(0, 5)),
    st.none() | st.sets(st.sampled_from(ROOM_NODES)),
)
def test_a_trial_answers_as_the_room_would(
    free: dict[str, float],
    sizes: list[float],
    parts: list[dict[str, float]],
    out: set[int],
    nodes: set[str] | None,
) -> None:
    total = fsum(sizes) or 2.0
    room = FreeGpus(free)
    trial = room.trial(sizes, total, nodes)
    for number, part in enumerate(parts):
        trial.add(number, part)
    kept = dict(enumerate(parts))

    def room_with(given: dict[int, dict[str, float]]) -> FreeGpus:
        found = FreeGpus(free)
        for part in given.values():
            found.add(part)
        return found

    for number in sorted(out & kept.keys()):
        del kept[number]
        assert trial.fits(without=number) == room_with(kept).place(sizes, total, nodes)
        trial.take_out(number)
        assert trial.fits() == trial.fits(without=None)
    assert room.place((), 0.0)
    assert trial.fits() == room_with(kept).place(sizes, total, nodes)


@settings(max_examples=examples(60, 2_000))
@given(
    st.lists(
        st.builds(
            PastPreemption,
            st.sampled_from([NOW_MS - each for each in (0, 1, HOUR_MS - 1, HOUR_MS, MS_PER_DAY - 1, MS_PER_DAY, -5)]),
            st.sampled_from(["Gang/ns/a", "Gang/ns/b", "Gang/ns/c"]),
            st.just("q"),
            st.sampled_from(["x", "y"]),
            st.just(1.0),
            st.sampled_from([0.1, 0.2, 0.3, 1e15, 7.0]),
        ),
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_limits_are_those_of_everything_that_was_stopped(past: list[PastPreemption], known: int) -> None:
    rules = PreemptionPolicy(cool_down=0, per_team=3, per_cluster=4, lost_gpu_hours=0)
    budget = ReclaimBudget(rules, past[:known], NOW_MS)
    other = budget.copy()
    for each in past[known:]:
        budget.spend(each)
    lost = fsum(each.lost_gpu_hours for each in past if each.at_ms > NOW_MS - MS_PER_DAY)
    hour = {(each.key, each.at_ms) for each in past if each.at_ms > NOW_MS - HOUR_MS}
    theirs = {(each.key, each.at_ms) for each in past if each.at_ms > NOW_MS - HOUR_MS and each.team == "x"}
    denial = budget.refusal("Gang/ns/new", "x", 1.0)
    if len(theirs) >= 3:
        assert denial.reason.startswith(f"{len(theirs)} workloads of team x")
    elif len(hour) >= 4:
        assert denial.reason.startswith(f"{len(hour)} workloads of the cluster")
    else:
        assert denial.reason.startswith(f"{lost:.1f} GPU-hours of work were lost")
    if known == 0:
        fresh = other.refusal("Gang/ns/new", "x", 1.0)
        assert fresh.reason.startswith("0.0 GPU-hours")


def test_what_its_scheduler_protects_is_not_preempted() -> None:
    """a is protected for 2 h from reclaims that meet it below the root, and b's claim waits until its delay ends."""
    kept = Protection(("root", "a"), (3600.0, 7200.0), 0.0)
    near, far = (Protection(path, (0.0,) * len(path), 0.0) for path in (("root", "b"), ("other", "b")))
    victim = gang("a0", "a", [("n0", 8)], hours=1.5, protection=kept)
    for claimant, outcome in ((near, "denied"), (far, "preempts")):
        verdict = _one(
            TAKES, {"n0": 8.0}, [victim, gang("b0", "b", waiting=[4], protection=claimant)], {"a": 0, "b": 8}
        )
        assert verdict.outcome == outcome
        if outcome == "denied":
            assert _why(verdict, "a0").startswith("its scheduler protects it for 120 min")
    longer = gang("a0", "a", [("n0", 8)], hours=2.1, protection=kept)
    claim = gang("b0", "b", waiting=[4], protection=near)
    assert _one(TAKES, {"n0": 8.0}, [longer, claim], {"a": 0, "b": 8}).outcome == "preempts"
    delayed = gang("b0", "b", waiting=[4], may_claim_ms=NOW_MS + 1)
    assert decide(TAKES, situation(TAKES, {"n0": 8.0}, [longer, delayed], {"a": 0, "b": 8})) == ()
