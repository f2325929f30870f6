"""Eviction of a victim, every recorded answer of the API server, and preemptions that a later cycle finishes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairshare.preemption.eviction import OPT_OUT, STOPPED, EvictionCheck, EvictionResult, EvictionVeto, stop_victim
from fairshare.preemption.preemption_types import Victim
from fairshare.targets.whole_stop import PREEMPTION, REASON
from gputally.base.errors import NotFound
from gputally.kubernetes.objects import POD, Object
from tests.fairshare.builders import budget_object, cluster_with, pod_object
from tests.fairshare.case_types import victim_of
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.failing_writes import FAULTS, FaultAt
from tests.fairshare.kept_events import kept
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases
from tests.shared_files import shared

ANSWERS = {
    "no_pdb": "stopped",
    "pdb_unobserved": "blocked",
    "pdb_zero": "blocked",
    "pdb_one": "blocked",
    "two_pdbs": "refused",
    "uid_precondition_mismatch": "another",
    "not_found": "gone",
    "name_mismatch": "refused",
    "pending_pod_bypasses_pdb": "stopped",
}


@pytest.mark.parametrize(("case", "result"), sorted(ANSWERS.items()))
def test_every_recorded_answer_of_an_eviction(case: str, result: str) -> None:
    cluster = cluster_with(pod_object("p"))
    cluster.answer = json.loads(shared("vectors/eviction_responses.json").read_text())[case]
    effect = stop_victim(cluster, victim_of("p"), "d1", NOW_MS)
    assert effect.result == result
    assert (effect.detail == "") == (result == "stopped")


def test_a_pod_that_stays_carries_no_annotation() -> None:
    cluster = cluster_with(pod_object("p"))
    cluster.answer = json.loads(shared("vectors/eviction_responses.json").read_text())["pdb_zero"]
    stop_victim(cluster, victim_of("p"), "d1", NOW_MS)
    assert {REASON, PREEMPTION}.isdisjoint(cluster.get(POD, "p", "ns")["metadata"].get("annotations") or {})


CASES = plugin_cases("fairshare", "object_cases")
STOPS: dict[str, tuple[list[Object], Victim]] = {
    **{name: cases.STOP for name, cases in CASES.items() if cases.STOP is not None},
    "pods": ([pod_object("p"), pod_object("q")], victim_of("p", "q")),
}


@pytest.mark.parametrize(("error", "carried_out"), FAULTS)
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("target", STOPS)
def test_a_fault_at_any_write_leaves_the_state_before_or_counts_as_stopped(
    target: str, at: int, error: Exception, carried_out: bool
) -> None:
    objects, victim = STOPS[target]
    cluster = FaultAt(KINDS, objects)
    cluster.at, cluster.error, cluster.carried_out = at, error, carried_out
    result = stop_victim(cluster, victim, "d1", NOW_MS)
    cluster.at = None

    def left() -> list[str]:
        """Return what is or will be stopped."""
        stopped = [name for cases in CASES.values() for name in cases.stopped(cluster)]
        listed = {obj["metadata"]["name"] for obj in cluster.list(POD)}
        return stopped + [pod.name for pod in victim.pods if pod.name not in listed]

    if target in CASES:
        CASES[target].go_on(cluster)
    assert bool(left()) == (result.result in STOPPED), result
    if result.result not in STOPPED:
        kinds = [POD, *(cases.STOPPABLE for cases in CASES.values() if cases.STOPPABLE is not None)]
        noted = [obj["metadata"].get("annotations") or {} for kind in kinds for obj in cluster.list(kind)]
        assert all({PREEMPTION, REASON}.isdisjoint(each) for each in noted), noted


def test_another_pod_of_the_same_name_is_never_touched() -> None:
    cluster = cluster_with(pod_object("p", uid="uid-new"))
    assert kept(EvictionCheck(cluster), victim_of("p")) == "its pod p is now another pod of this name"
    assert stop_victim(cluster, victim_of("p"), "d1", NOW_MS).result == "another"
    assert "annotations" not in cluster.get(POD, "p", "ns")["metadata"]


def test_a_budget_that_allows_one_keeps_a_gang_of_two() -> None:
    """Each pod alone would be allowed: the API server's dry run sees one at a time."""
    cluster = cluster_with(
        *(pod_object(name, labels={"app": "x"}) for name in "pqr"), budget_object("b", 1, {"app": "x"})
    )
    assert EvictionCheck(cluster).refusal(victim_of("p")) is None
    held = "its pod q is protected by the disruption budget b, which allows 1 disruptions now"
    assert EvictionCheck(cluster).refusal(victim_of("p", "q")) == EvictionVeto("budget", held)
    vetting = EvictionCheck(cluster)
    assert vetting.refusal(victim_of("p")) is None
    assert vetting.refusal(victim_of("q")) == EvictionVeto("budget", held)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deletionTimestamp": "2026-10-01T00:00:00Z"}, "its pod p is stopping already"),
        ({"annotations": {OPT_OUT: "never"}}, "its pod p was opted out of preemption by its owner"),
    ],
)
def test_a_changed_pod_cancels_its_eviction(change: dict[str, Any], reason: str) -> None:
    assert kept(EvictionCheck(cluster_with(pod_object("p", **change))), victim_of("p")) == reason
    assert kept(EvictionCheck(cluster_with()), victim_of("p")) == "its pod p is gone already"


def test_a_gang_with_ended_pods_is_still_evicted() -> None:
    cluster = cluster_with(pod_object("q"))
    assert stop_victim(cluster, victim_of("p", "q"), "d1", NOW_MS) == EvictionResult("stopped")
    with pytest.raises(NotFound):
        cluster.get(POD, "q", "ns")
