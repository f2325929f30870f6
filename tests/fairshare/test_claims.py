"""Preemption claims in order: what earlier claims leave of room, shares and limits."""

from __future__ import annotations

from dataclasses import replace

from fairshare.preemption.claims_and_placement import MOST_CLAIMS
from fairshare.preemption.reclaim_rules_and_limits import PastPreemption
from fairshare.preemption.victim_selection import decide
from tests.fairshare.preemption_cases import NOW_MS, gang, policy, situation


def test_who_finds_room_uses_up_his_queues_share() -> None:
    """Else the second of two gangs takes what its queue may not have, and the others take it back at once."""
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
    gangs = [gang("a0", "a", [("n0", 4)]), gang("b0", "b", [("n1", 4)]), gang("b1", "b", waiting=[4], priority=9)]
    gangs.append(gang("c0", "c", waiting=[4]))
    full, placed = decide(rules, situation(rules, {"n0": 4, "n1": 8}, gangs, {"a": 0, "b": 4, "c": 4}))
    assert (full.claimant, full.reason) == (
        "Gang/ns/b1",
        "needs 4 GPUs, but queue b may hold 4 GPUs at most and holds 4 GPUs",
    )
    assert (placed.claimant, placed.outcome) == ("Gang/ns/c0", "room")


def test_a_claim_that_can_never_run_does_not_block_later_claims() -> None:
    """Of a higher priority, and more than one cycle looks for: refused outright, or searched for in vain."""
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
    """Three of its GPUs were lost under the pods that hold them."""
    rules = policy({"a": 0, "b": 8})
    gangs = [
        gang("a0", "a", [("n0", 8)], preemptible=False),
        gang("a1", "a", [("n1", 4)]),
        gang("b0", "b", waiting=[4]),
    ]
    here = situation(rules, {"n0": 8, "n1": 4}, gangs)
    (verdict,) = decide(rules, replace(here, free={**here.free, "n0": -3.0}))
    assert [each.gang.name for each in verdict.victims] == ["a1"]


def test_words_at_the_edge_of_a_time() -> None:
    """9 min 59 s are not "10 of the 10 min"; at the full ten it may go."""
    rules = policy({"a": 0, "b": 8}, min_runtime=600, cool_down=90)
    for seconds, words in ((599, "it has run for 9 of the 10 min for which every start is protected"), (600, "")):
        gangs = [gang("a0", "a", [("n0", 4)], hours=seconds / 3600), gang("b0", "b", waiting=[4])]
        (verdict,) = decide(rules, situation(rules, {"n0": 4}, gangs))
        assert [each.reason for each in verdict.spared] == [words] * bool(words)
    past = (PastPreemption(NOW_MS - 80_000, "Gang/ns/a0", "a", "a", 4, 1),)
    (verdict,) = decide(rules, situation(rules, {"n0": 4}, gangs, past=past))
    assert verdict.spared[0].reason == "it was preempted 1 min ago, and is left alone for 1.5 min"
