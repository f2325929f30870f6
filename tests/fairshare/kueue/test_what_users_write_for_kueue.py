"""What users write on Kueue's workloads."""

from __future__ import annotations

from typing import Any

from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.schedulers.kueue.adapter import GATED_BY, REPLACES, KueueAdapter
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, LOCAL_QUEUES, WORKLOADS
from fairshare.targets.whole_stop import PREEMPTION, PreemptionIntent
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Object
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.scheduler_kinds import KINDS

OTHERS = "other-namespace"


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
