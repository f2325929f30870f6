"""Eviction of a victim, every recorded answer of the API server, and preemptions that a later cycle finishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import read_pod
from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.preemption.eviction import OPT_OUT, STOPPED, EvictionCheck, EvictionResult, EvictionVeto, stop_victim
from fairshare.preemption.preemption_types import Victim
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.whole_stop import PREEMPTION, REASON, PreemptionIntent, read_intent
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused, ClusterUnavailable, Conflict, NotFound
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD, Cluster, Kind, Object
from tests.fairshare.builders import (
    Failing,
    budget_object,
    cluster_with,
    node_object,
    object_of,
    pod_object,
    policy_of,
)
from tests.fairshare.case_types import victim_of
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.fairshare.failing_writes import FaultAt
from tests.fairshare.observations import condition
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases
from tests.shared_files import shared

WORKLOAD = WORKLOADS[0]
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


def _kept(vetting: EvictionCheck, victim: Victim) -> str | None:
    """Return the reason for keeping a victim that has changed since the decision."""
    veto = vetting.refusal(victim)
    assert veto is None or veto.kind == "changed"
    return veto.reason if veto is not None else None


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


CASES = plugin_cases("fairshare")
STOPS: dict[str, tuple[list[Object], Victim]] = {
    "kueue": ([object_of(WORKLOAD, "x", {"active": True}, uid="uid-x")], victim_of(kind=WORKLOAD)),
    **{name: cases.STOP for name, cases in CASES.items()},
    "pods": ([pod_object("p"), pod_object("q")], victim_of("p", "q")),
}
FAULTS = [
    (ClusterUnavailable("timeout"), True),
    (ClusterUnavailable("503"), False),
    (ClusterRefused("403"), False),
    (Conflict("409"), False),
]


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
        stopped += [obj["metadata"]["name"] for obj in cluster.list(WORKLOAD) if not obj["spec"]["active"]]
        listed = {obj["metadata"]["name"] for obj in cluster.list(POD)}
        return stopped + [pod.name for pod in victim.pods if pod.name not in listed]

    if target in CASES:
        CASES[target].go_on(cluster)
    assert bool(left()) == (result.result in STOPPED), result
    if result.result not in STOPPED:
        kinds = [WORKLOAD, POD, *(cases.STOPPABLE for cases in CASES.values())]
        noted = [obj["metadata"].get("annotations") or {} for kind in kinds for obj in cluster.list(kind)]
        assert all({PREEMPTION, REASON}.isdisjoint(each) for each in noted), noted


def test_another_pod_of_the_same_name_is_never_touched() -> None:
    cluster = cluster_with(pod_object("p", uid="uid-new"))
    assert _kept(EvictionCheck(cluster), victim_of("p")) == "its pod p is now another pod of this name"
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
    assert _kept(EvictionCheck(cluster_with(pod_object("p", **change))), victim_of("p")) == reason
    assert _kept(EvictionCheck(cluster_with()), victim_of("p")) == "its pod p is gone already"


def test_a_gang_with_ended_pods_is_still_evicted() -> None:
    cluster = cluster_with(pod_object("q"))
    assert stop_victim(cluster, victim_of("p", "q"), "d1", NOW_MS) == EvictionResult("stopped")
    with pytest.raises(NotFound):
        cluster.get(POD, "q", "ns")


_TEMPLATE = {"spec": {"containers": [{"name": "c", "image": "x"}], "restartPolicy": "Never"}}


def _workload(reserved: bool = True, **spec: Any) -> dict[str, Any]:
    spec = {"queueName": "q", "podSets": [{"name": "main", "count": 1, "template": _TEMPLATE}], **spec}
    return object_of(WORKLOAD, "x", spec, {"conditions": [_reserved("True" if reserved else "False")]}, uid="uid-x")


def _reserved(status: str) -> dict[str, str]:
    at = "2026-10-01T00:00:00Z"
    return {"type": "QuotaReserved", "status": status, "reason": "R", "message": "m", "lastTransitionTime": at}


def _uid(cluster: Cluster, kind: Kind) -> str:
    """Return the uid of object x, which a real API server assigns."""
    return str(cluster.get(kind, "x", "ns")["metadata"]["uid"])


def test_a_workload_is_switched_off_and_on_again_after_its_quota_is_back(either_of: Make, others_of: Make) -> None:
    cluster = either_of([_workload()])
    victim = victim_of(kind=WORKLOAD, uid=_uid(cluster, WORKLOAD))
    assert EvictionCheck(cluster).refusal(victim) is None
    assert stop_victim(cluster, victim, "d1", NOW_MS).result == "stopped"
    off = cluster.get(WORKLOAD, "x", "ns")
    assert off["spec"]["active"] is False
    assert read_intent(off) == PreemptionIntent("d1", NOW_MS)
    assert _kept(EvictionCheck(cluster), victim) == "it is switched off already"
    assert list(unfinished.resume(cluster, WORKLOAD, [off], (), NOW_MS)) == []
    gone = {**off, "status": {"conditions": [_reserved("False")]}}
    others_of(cluster).put(gone, field_manager="kueue", subresource="status")
    (done,) = unfinished.resume(cluster, WORKLOAD, cluster.list(WORKLOAD), (), NOW_MS)
    on = cluster.get(WORKLOAD, "x", "ns")
    assert done.action == "switched on again"
    assert on["spec"]["active"] is True
    assert PREEMPTION not in on["metadata"]["annotations"]
    assert on["metadata"]["annotations"][REASON] == "because"


def test_a_workload_switched_off_by_another_client_stays_off(either_of: Make) -> None:
    cluster = either_of([_workload(reserved=False, active=False)])
    assert list(unfinished.resume(cluster, WORKLOAD, cluster.list(WORKLOAD), (), NOW_MS)) == []


HERE = StatusObject("gputally", "gputally-fairshare")
SINCE = "2026-10-01T00:00:00Z"


def _switched_off(version: Kind = WORKLOAD) -> Object:
    """Build a preempted Workload whose quota is free by now."""
    template = {"spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}}
    intent = PreemptionIntent("d1", NOW_MS - 60_000)
    spec = {"active": False, "queueName": "a", "podSets": [{"name": "main", "count": 1, "template": template}]}
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "lastTransitionTime": SINCE}]}
    return object_of(version, "x", spec, status, annotations={PREEMPTION: intent.text()})


@pytest.fixture
def kueue(controller_of: Make) -> Callable[..., tuple[Failing, Controller]]:
    """A Kueue controller and the Workload that an earlier one has deactivated."""

    def make(*, target: Any = None, version: Kind = WORKLOAD, **options: Any) -> tuple[Failing, Controller]:
        rules = options.pop("preemption", {"mode": "enforce"})
        kinds = [kind for kind in KINDS if kind.kind != "Workload" or kind == version]
        objects = [object_of(CLUSTER_QUEUES[0], name, {"cohortName": "m"}) for name in "ab"]
        cluster = Failing(kinds, [*objects, _switched_off(version)])
        queues = [{"name": name, "refs": [f"kueue:{name}"]} for name in "ab"]
        policy = policy_of(queues, targets={"kueue": target or {"apply": "enforce"}}, preemption=rules)
        return cluster, controller_of(policy, cluster, status_object=HERE, **options)

    return make


def _holding(name: str, queue: str = "a", **spec: Any) -> Object:
    """Build a Workload of 4 GPUs, admitted unless it has no ClusterQueue."""
    template = {"spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}}
    pod_set = {"name": "main", "count": 1, "template": template}
    usage = {"name": "main", "flavors": {"nvidia.com/gpu": "f"}, "resourceUsage": {"nvidia.com/gpu": "4"}}
    reserved = [{"type": kind, "status": "True", "lastTransitionTime": SINCE} for kind in ("QuotaReserved", "Admitted")]
    status = {"admission": {"clusterQueue": queue, "podSetAssignments": [usage]}, "conditions": reserved}
    return object_of(
        WORKLOAD, name, {"queueName": queue, "podSets": [pod_set], **spec}, status if queue == "a" else {},
        uid=f"uid-{name}", creationTimestamp=SINCE,
    )  # fmt: skip


def _released(cluster: MemoryCluster, name: str) -> None:
    """Play Kueue, which takes the quota of a deactivated Workload back."""
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "lastTransitionTime": SINCE}]}
    released = {**cluster.get(WORKLOAD, name, "ns"), "status": status}
    cluster.put(released, field_manager="kueue", subresource="status")


@pytest.mark.parametrize(("restarts", "silent"), [(False, False), (True, False), (True, True)])
def test_a_claim_stops_nobody_else_before_its_victims_have_gone(
    controller_of: Make, clock: VirtualClock, restarts: bool, silent: bool
) -> None:
    """Queue b waits for 4 of the 16 GPUs that a holds with a quota of 4. Kueue takes its time, and then the API server
    shows the quota free and the pods not yet gone. A Kueue that is silent holds preemption up for five minutes."""
    quota = [{"name": "nvidia.com/gpu", "nominalQuota": "8"}]
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "f", "resources": quota}]}]
    names = [f"w{i}" for i in range(4)]
    objects = [
        *(object_of(CLUSTER_QUEUES[0], name, {"cohortName": "m", "resourceGroups": groups}) for name in "ab"),
        *(object_of(LOCAL_QUEUES[0], name, {"clusterQueue": name}) for name in "ab"),
        *map(_holding, names), _holding("waits", "b"), node_object("n0", 16),
    ]  # fmt: skip
    cluster = MemoryCluster(KINDS, objects)
    queues = [{"name": name, "deserved": 4, "refs": [f"kueue:{name}"]} for name in "ab"]
    rules = {"mode": "enforce", "wait": 0, "min_runtime": 0}
    policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}}, preemption=rules)
    pods = tuple(replace(read_pod(pod_object(f"p-{name}", node="n0", gpus=4)), ref="") for name in names)

    def make() -> Any:
        return controller_of(policy, cluster, status_object=HERE, pods=lambda: pods)

    def stopped() -> list[str]:
        return [name for name in names if "gputally.dev/preempted-because" in _notes(cluster, name)]

    controller = make()
    controller.cycle()
    (victim,) = stopped()
    if restarts:
        controller = make()
    for _ in range(2):
        (target,) = controller.later().targets
        assert (stopped(), condition(target, "Preemption").reason) == ([victim], "Stopping")
    if silent:
        clock.advance(300_000)
        controller.cycle()
        assert len(stopped()) == 2
        return
    _released(cluster, victim)
    (target,) = controller.later().targets
    assert (stopped(), condition(target, "Preemption").reason) == ([victim], "Stopping")
    assert cluster.get(WORKLOAD, victim, "ns")["spec"]["active"]


def _notes(cluster: MemoryCluster, name: str) -> Any:
    return cluster.get(WORKLOAD, name, "ns")["metadata"].get("annotations") or {}


def _active(cluster: MemoryCluster, version: Kind = WORKLOAD) -> bool:
    return bool(cluster.get(version, "x", "ns")["spec"]["active"])


CHANGED: dict[str, dict[str, Any]] = {
    "as ever": {},
    "preemption is only tried by now": {"preemption": {"mode": "dry-run"}},
    "preemption is off by now": {"preemption": {"mode": "off"}},
    "the target is off by now": {"target": {"mode": "off"}},
    "weights are only tried": {"target": {"apply": "dry-run"}},
    "an older Kueue": {"version": WORKLOADS[1]},
}


@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("trouble", [{}, {"down": True}, {"age_ms": None}])
def test_who_was_switched_off_is_switched_on(
    kueue: Make, accountant: Accountant, case: dict[str, Any], trouble: dict[str, Any]
) -> None:
    vars(accountant).update(trouble)
    cluster, controller = kueue(**case)
    controller.cycle()
    found = cluster.get(case.get("version", WORKLOAD), "x", "ns")
    assert found["spec"]["active"] is True
    assert PREEMPTION not in found["metadata"]["annotations"]


@pytest.mark.parametrize("options", [{"silent": True}, {"term": lambda: None}])
def test_who_may_not_write_ends_nothing(kueue: Make, options: dict[str, Any]) -> None:
    cluster, controller = kueue(**options)
    controller.cycle()
    assert not _active(cluster)


def test_who_cannot_be_switched_on_is_told_until_he_is(kueue: Make) -> None:
    cluster, controller = kueue(preemption={"mode": "off"})
    cluster.failing, cluster.error = frozenset({"patch Workload"}), ClusterRefused("PATCH: 403: workloads is forbidden")
    for _ in range(2):
        (target,) = controller.cycle().targets
        assert "ns/x" in target.degraded["NotResumed"]
        assert "forbidden" in target.degraded["NotResumed"]
        assert ("Resumed", "False") in {(c.type, c.status) for c in target.conditions}
    assert [event.reason for event in cluster.events].count("NotResumed") == 1
    cluster.failing = frozenset()
    (target,) = controller.cycle().targets
    assert "NotResumed" not in target.degraded
    assert _active(cluster)


def test_victims_are_not_searched_again_where_none_can_be_stopped(kueue: Make) -> None:
    cluster, controller = kueue(preemption={"mode": "off"})
    for _ in range(5):
        controller.cycle()
    # Once by the adapter in each cycle; of our own: the one that found a workload, and the one that found none.
    assert cluster.listed.count(WORKLOAD) == 5 + 2


@pytest.mark.parametrize(
    "text",
    ["no json", "[1]", '{"decision": "d1", "at_ms": 1e999}', '{"deep": ' + "[" * 100_000, '{"at_ms": ' + "[" * 100_000],
    ids=["no JSON", "a list", "an endless number", "deep nesting", "deep nesting of a field"],
)
def test_an_annotation_of_preemption_that_a_user_wrote_ends_no_cycle(kueue: Make, text: str) -> None:
    cluster, controller = kueue()
    workload = cluster.get(WORKLOAD, "x", "ns")
    workload["metadata"]["annotations"][PREEMPTION] = text
    cluster.load([workload])
    (target,) = controller.cycle().targets
    assert target.degraded == {}
    assert not _active(cluster)


def test_release_lets_run_again_who_gave_way(kueue: Make) -> None:
    cluster, _ = kueue()
    holds = {**_switched_off(), "metadata": {**_switched_off()["metadata"], "name": "y"}}
    reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": SINCE}
    cluster.load([{**holds, "status": {"conditions": [reserved]}}])
    ended = unfinished.finish_all(cluster, NOW_MS)
    assert (ended.resumed, ended.left) == (("ns/x",), ("ns/y",))
    assert ended.lines()[1] == "ns/y is still being stopped: run `release` again in a minute"
    assert _active(cluster)


def test_release_names_a_workload_that_it_cannot_switch_on_once(kueue: Make) -> None:
    cluster, _ = kueue()
    cluster.failing, cluster.error = frozenset({"patch Workload"}), ClusterRefused("PATCH: 403: workloads is forbidden")
    ended = unfinished.finish_all(cluster, NOW_MS)
    assert (ended.resumed, ended.left) == ((), ())
    assert ended.lines() == ("a preemption is not finished: ns/x: PATCH: 403: workloads is forbidden",)


def test_what_is_not_for_us_to_read_is_said(kueue: Make) -> None:
    """Without the Workloads the demand would seem to be zero."""
    cluster, controller = kueue()
    cluster.failing, cluster.error = frozenset({"list Workload"}), ClusterRefused("GET: 403: workloads is forbidden")
    (target,) = controller.cycle().targets
    assert target.degraded["ReadRefused"] == "GET: 403: workloads is forbidden"
    assert "ReadRefused" in {event.reason for event in cluster.events}
    cluster.failing = frozenset()
    assert "ReadRefused" not in controller.cycle().targets[0].degraded
