"""What a user writes into an object speaks of that object alone, as in the table of docs/security.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fairshare.core.gpu_demand import CHECKPOINT, GANG_LABEL, QUEUE_LABEL, SPOT_LABEL, read_pod
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.preemption.eviction import OPT_OUT, EvictionCheck
from fairshare.preemption.preemption_types import Victim
from fairshare.schedulers.kai.adapter import KaiAdapter
from fairshare.schedulers.kai.kinds import POD_GROUP
from fairshare.schedulers.kai.kinds import QUEUE as KAI_QUEUE
from fairshare.schedulers.kueue.adapter import GATED_BY, REPLACES, KueueAdapter
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.whole_stop import PREEMPTION, PreemptionIntent
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, POD, Object
from tests.fairshare.builders import object_of, pod_group, pod_object, policy_of, queue_object
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

SCHEDULERS = tuple(plugin_cases("fairshare").values())
OTHERS = "other-namespace"


def _pod(scheduler: str = "default-scheduler", **metadata: Any) -> Pod:
    obj = pod_object("p", **metadata)
    obj["spec"]["schedulerName"] = scheduler
    read = read_pod(obj)
    assert read is not None
    return read


def test_a_gang_of_another_namespace_is_joined_by_no_label_and_no_annotation() -> None:
    group = {"scheduling.k8s.io/group-name": f"{OTHERS}/g", "pod-group-name": f"{OTHERS}/g"}
    for scheduler in ("default-scheduler", "kai-scheduler", *(cases.PLACES[0] for cases in SCHEDULERS)):
        for metadata in (
            {"labels": {GANG_LABEL: f"{OTHERS}/g"}},
            {"annotations": group | {"kueue.x-k8s.io/workload": f"{OTHERS}/w"}},
            {"ownerReferences": [{"kind": "Job", "name": "j", "uid": "theirs", "controller": True}]},
        ):
            pod = _pod(scheduler, **metadata)
            assert pod.gang == "" or pod.gang.split("/")[1] == "ns"
            assert pod.owner == "" or pod.owner.split("/")[1] == "ns"
    obj = pod_object("p")
    obj["spec"]["schedulingGroup"] = {"podGroupName": f"{OTHERS}/g"}
    pod = read_pod(obj)
    assert pod is not None
    assert pod.gang.split("/")[1] == "ns"


def test_a_label_chooses_the_queue_only_where_the_scheduler_has_none() -> None:
    labels = {QUEUE_LABEL: "b", "kai.scheduler/queue": "a"}
    assert _pod("kai-scheduler", labels=labels).ref == "kai:a"
    assert _pod(labels=labels).ref == "policy:b"


def test_a_checkpoint_speaks_of_its_own_gang_and_the_newest_counts() -> None:
    later = replace(_pod(), gang="PodGroup/ns/g", ref="kai:a", checkpoint_ms=NOW_MS, scheduler="kai")
    noted = {CHECKPOINT: "2026-01-01T00:00:00Z"}
    groups = [pod_group("g", requested=4, annotations=noted), pod_group("other", requested=4)]
    seen = {KAI_QUEUE: [queue_object("a")], POD_GROUP: groups}
    found = {gang.name: gang for gang in KaiAdapter().observe(policy_of(), seen, [later]).gangs}
    assert (found["g"].checkpoint_ms, found["other"].checkpoint_ms) == (NOW_MS, None)


def test_a_group_that_claims_to_have_just_started_is_as_old_as_its_pods() -> None:
    later = "2099-01-01T00:00:00Z"
    noted = {"kai.scheduler/last-start-timestamp": later, "kai.scheduler/last-eviction-timestamp": later}
    held = replace(_pod("kai-scheduler"), gang="PodGroup/ns/g", ref="kai:a", node="n0", held=True, started_ms=NOW_MS)
    groups = [pod_group("g", requested=4, allocated=4, annotations=noted), pod_group("other", requested=4, allocated=4)]
    seen = {KAI_QUEUE: [queue_object("a")], POD_GROUP: groups}
    found = {gang.name: gang for gang in KaiAdapter().observe(policy_of(), seen, [held]).gangs}
    assert (found["g"].started_ms, found["other"].started_ms) == (NOW_MS, None)
    assert found["other"].may_claim_ms is None


def _workload(name: str, namespace: str = "ns", *, owner: str = "", **annotations: str) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {GPU: "4"}}}]
    sets = [{"name": "main", "count": 1, "template": {"spec": {"containers": containers}}}]
    assigned = [{"name": "main", "count": 1, "flavors": {GPU: "f"}}]
    status = {"admission": {"clusterQueue": "k", "podSetAssignments": assigned}}
    owners = [{"kind": "Job", "name": owner, "uid": owner, "controller": True}] if owner else []
    metadata = {"annotations": annotations, "ownerReferences": owners, "namespace": namespace, "uid": name}
    return object_of(WORKLOADS[0], name, {"queueName": "k", "podSets": sets}, status, **metadata)


def test_a_workload_replaces_only_one_of_its_own_owner() -> None:
    """Otherwise the annotation would make another one vanish, with its GPUs."""
    policy = policy_of([{"name": "k", "refs": ["kueue:k"]}])
    queue = object_of(CLUSTER_QUEUES[0], "k", {})

    def names(*workloads: Object) -> list[str]:
        seen = {CLUSTER_QUEUES[0]: [queue], WORKLOADS[0]: workloads}
        return sorted(gang.name for gang in KueueAdapter().observe(policy, seen).gangs)

    own = _workload("new", owner="job", **{REPLACES: "ns/old"})
    assert names(_workload("old", owner="job"), own) == ["new"]
    assert names(_workload("old", owner="another"), own) == ["new", "old"]
    thief = _workload("new", owner="job", **{REPLACES: f"{OTHERS}/old"})
    assert names(_workload("old", OTHERS, owner="job"), thief) == ["new", "old"]


def test_a_gate_keeps_only_the_workload_that_has_it_from_starting() -> None:
    policy = policy_of([{"name": "k", "refs": ["kueue:k"]}])
    queue = object_of(CLUSTER_QUEUES[0], "k", {"queueingStrategy": "StrictFIFO"})
    local = object_of(LOCAL_QUEUES[0], "k", {"clusterQueue": "k"})
    waiting = [_workload("gated", **{GATED_BY: f"{OTHERS}/other"}), _workload("free"), _workload("later")]
    for workload in waiting:
        workload["status"] = {}
    seen = {CLUSTER_QUEUES[0]: [queue], LOCAL_QUEUES[0]: [local], WORKLOADS[0]: waiting}
    held_back = {gang.name: gang.held_back for gang in KueueAdapter().observe(policy, seen).gangs}
    assert {name for name, why in held_back.items() if why} == {"gated", "later"}


def test_an_intent_that_a_user_wrote_concerns_only_the_object_that_has_it() -> None:
    intent = PreemptionIntent(f"{OTHERS}/x", NOW_MS - 1).text()
    mine = _workload("mine", **{PREEMPTION: intent})
    mine["spec"]["active"] = False
    mine["status"] = {}
    theirs = _workload("theirs", OTHERS)
    theirs["spec"]["active"] = False
    cluster = MemoryCluster(KINDS, [mine, theirs])
    assert unfinished.finish_all(cluster, NOW_MS).resumed == ("ns/mine",)
    assert cluster.get(WORKLOADS[0], "theirs", OTHERS)["spec"]["active"] is False


def test_hints_about_preemption_concern_the_pod_that_has_them() -> None:
    assert _pod(labels={SPOT_LABEL: "true"}).spot
    for cases in SCHEDULERS:
        assert _pod("kai-scheduler", annotations=cases.PROTECTED).disruptable
        assert not _pod(cases.PLACES[0], annotations=cases.PROTECTED).disruptable
    never, other = pod_object("never", annotations={OPT_OUT: "never"}), pod_object("other")
    check = EvictionCheck(MemoryCluster(KINDS, [never, other]))
    refusals = {name: check.refusal(_victim(obj)) for name, obj in (("never", never), ("other", other))}
    assert refusals["never"] is not None
    assert refusals["other"] is None


def _victim(obj: Object) -> Victim:
    pod = read_pod(obj)
    assert pod is not None
    gang = Gang("a", POD, "ns", pod.name, pod.uid, 4.0, 4.0, 4.0, pods=(pod,))
    return Victim(gang, (pod,), 4.0, 0.0, True, "within quota", "a", "")
