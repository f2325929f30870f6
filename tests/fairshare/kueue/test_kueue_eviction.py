"""Kueue's Workloads that preemption switches off, and on again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import read_pod
from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.preemption.eviction import EvictionCheck, stop_victim
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.whole_stop import PREEMPTION, REASON, PreemptionIntent, read_intent
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Cluster, Kind, Object
from tests.fairshare.builders import (
    Failing,
    node_object,
    object_of,
    pod_object,
    policy_of,
)
from tests.fairshare.case_types import victim_of
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.fairshare.kept_events import kept
from tests.fairshare.observations import condition
from tests.fairshare.scheduler_kinds import KINDS

WORKLOAD = WORKLOADS[0]


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
    assert kept(EvictionCheck(cluster), victim) == "it is switched off already"
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
