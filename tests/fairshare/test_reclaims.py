"""Evictions by the schedulers: claimant read from their events, counted once, and priced by the deficit law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accountant.wire.policy_models import Policy
from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Eviction, Pod, Standing
from fairshare.preemption.preemption_controller import PreemptionCounts
from fairshare.targets import KINDS
from fairshare.targets.kai import POD_GROUP, KaiAdapter
from fairshare.targets.kube_scheduler import KubeSchedulerAdapter
from fairshare.targets.kueue import CLUSTER_QUEUES, WORKLOADS, KueueAdapter
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import EVENT, POD, Cluster
from tests.fairshare.builders import object_of, pod_group, queue_object
from tests.fairshare.conftest import Accountant
from tests.fairshare.victims import node_object, pod_object

Make = Callable[..., Any]
TREE = [
    {"name": "org", "refs": []},
    {"name": "a", "parent": "org", "refs": ["kai:a", "kueue:cq-a", "policy:a"]},
    {"name": "b", "parent": "org", "refs": ["kai:b", "kueue:cq-b", "policy:b"]},
]
RECLAIMED = (
    "Pod ns/{pod} was preempted by workload ns/{by}.\n"
    "A uses <GPU: 8, CPU: 0 (cores), memory: 0 (GB)> with a quota of <GPU: 4, CPU: 0 (cores), memory: 0 (GB)>, "
    "fair-share of <GPU: 4, CPU: 0 (cores), memory: 0 (GB)> and queue priority of <100>."
)


def _policy(law: str = "deficit") -> Policy:
    return Policy.model_validate({"law": law, "queues": TREE, "targets": {"kai": {"apply": "enforce"}}})


def _event(name: str, reason: str, note: str, regarding: str, related: str = "") -> dict[str, Any]:
    kind = "PodGroup" if reason == "Evict" else "Pod"
    return {
        **object_of(EVENT, name, uid=name), "reason": reason, "note": note,
        "regarding": {"kind": kind, "namespace": "ns", "name": regarding, "uid": f"uid-{regarding}"},
        "related": {"kind": "Pod", "namespace": "ns", "name": related, "uid": f"uid-{related}"} if related else None,
    }  # fmt: skip


def test_kai_names_the_workload_it_makes_room_for() -> None:
    """One of a gang's pods each; a preemption within the queue, a consolidation and a stranger's do not count."""
    groups = [
        pod_group("pg-b.v1", "b", requested=4),
        pod_group("pg-a", "a", requested=4),
        pod_group("pg-a2", "a", requested=4),
    ]
    events = [
        _event("e1", "Evict", RECLAIMED.format(pod="a-0", by="pg-b.v1"), "pg-a"),
        _event("e2", "Evict", RECLAIMED.format(pod="a-1", by="pg-b.v1"), "pg-a"),
        _event("e3", "Evict", "Pod ns/a-0 was preempted by higher priority workload ns/pg-a2", "pg-a"),
        _event("e4", "Evict", RECLAIMED.format(pod="a-0", by="pg-a2"), "pg-a"),
        _event("e5", "Evict", "Pod ns/a-0 was preempted and rescheduled due to bin packing", "pg-a"),
        _event("e6", "Evict", RECLAIMED.format(pod="a-0", by="pg-other"), "pg-a"),
    ]
    seen = {POD_GROUP: groups, EVENT: events}
    found = KaiAdapter().observe(_policy(), seen).evictions
    assert found == (Eviction("e1", "b", "ns/pg-a"), Eviction("e2", "b", "ns/pg-a"))


def _workload(name: str, queue: str, *conditions: dict[str, Any]) -> dict[str, Any]:
    containers = [{"resources": {"requests": {"nvidia.com/gpu": "4"}}}]
    spec = {"podSets": [{"count": 1, "template": {"spec": {"containers": containers}}}]}
    status = {"admission": {"clusterQueue": f"cq-{queue}"}, "conditions": list(conditions)}
    return object_of(WORKLOADS[0], name, spec, status, uid=f"uid-{name}")


def _preempted(reason: str, by: str, path: str, status: str = "True") -> dict[str, Any]:
    message = f"Preempted to accommodate a workload (UID: {by}, JobUID: j) due to x; preemptor path: {path}; y"
    at = "2026-10-01T00:00:00Z"
    return {"type": "Preempted", "status": status, "reason": reason, "message": message, "lastTransitionTime": at}


def test_kueue_names_it_by_uid_and_by_path() -> None:
    queues = [object_of(CLUSTER_QUEUES[0], f"cq-{queue}", {}) for queue in "ab"]
    workloads = [
        _workload("b0", "b"),
        _workload("a0", "a", _preempted("InCohortReclamation", "uid-b0", "/r/x")),
        _workload("a1", "a", _preempted("InCohortFairSharing", "gone", "/r/c/cq-b")),
        _workload("a2", "a", _preempted("InClusterQueue", "uid-b0", "/r/cq-b")),
        _workload("a3", "a", _preempted("InCohortReclamation", "uid-a0", "/r/cq-a")),
        _workload("a4", "a", _preempted("InCohortReclamation", "uid-b0", "/r/cq-b", status="False")),
        _workload("a5", "a", _preempted("InCohortReclamation", "gone", "/r/other")),
    ]
    found = KueueAdapter().observe(_policy(), {CLUSTER_QUEUES[0]: queues, WORKLOADS[0]: workloads}).evictions
    at = "2026-10-01T00:00:00Z"
    assert found == (Eviction(f"uid-a0/{at}", "b", "ns/a0"), Eviction(f"uid-a1/{at}", "b", "ns/a1"))


def test_kueue_counts_what_happens_between_two_looks() -> None:
    """The condition turns False when the victim is admitted again, ten seconds later; the count stays."""
    queues = [
        {
            "apiVersion": CLUSTER_QUEUES[0].api_version,
            "kind": "ClusterQueue",
            "metadata": {"name": f"cq-{q}"},
            "spec": {},
        }
        for q in "ab"
    ]
    said = _preempted("InCohortFairSharing", "uid-b0", "/ml/cq-b")
    again = {**said, "status": "False", "reason": "QuotaReserved", "message": f"Previously: {said['message']}"}
    within = {**again, "message": again["message"].replace("due to x", "due to prioritization in the ClusterQueue")}

    def ids(condition: dict[str, Any], count: int) -> list[str]:
        victim = _workload("a0", "a", condition)
        evictions = [
            {"reason": "Preempted", "underlyingCause": "", "count": count},
            {"reason": "PodsReadyTimeout", "underlyingCause": "", "count": 7},
        ]
        victim["status"]["schedulingStats"] = {"evictions": evictions}
        seen = {CLUSTER_QUEUES[0]: queues, WORKLOADS[0]: [_workload("b0", "b"), victim]}
        return [each.id for each in KueueAdapter().observe(_policy(), seen).evictions]

    assert ids(said, 1) == ids(again, 1) == ["uid-a0/1"]  # one act, however it is seen
    assert ids(again, 3) == ["uid-a0/3"]
    assert ids(within, 3) == []


def test_the_kube_scheduler_names_the_pod_and_we_do_not() -> None:
    pods = [Pod(f"uid-{name}", "ns", name, 4.0, ref=f"policy:{name[0]}", gang=f"Job/ns/{name[0]}") for name in
            ("a0", "a1", "b0")]  # fmt: skip
    events = [
        _event("e1", "Preempted", "Preempted by pod uid-b0 on node n0", "a0", "b0"),
        _event("e2", "Preempted", "Preempted by pod uid-b0 on node n0", "gone", "b0"),
        _event("e3", "Preempted", "Preempted by pod uid-a1 on node n0", "a0", "a1"),
        _event("e4", "Preempted", "its 4 GPUs go to Pod/ns/b0 of queue b", "a0"),
    ]
    found = KubeSchedulerAdapter().observe(_policy(), {EVENT: events}, pods).evictions
    assert found == (Eviction("e1", "b", "Job/ns/a"), Eviction("e2", "b", "uid-gone"))


def test_events_are_read_only_where_the_law_asks_for_them() -> None:
    for adapter in (KaiAdapter(), KubeSchedulerAdapter()):
        kinds = [read.fields for read in adapter.reads(_policy()) if read.kinds == (EVENT,)]
        assert kinds == ["reason=Evict" if adapter.name == "kai" else "reason=Preempted"]
        assert not any(read.kinds == (EVENT,) for read in adapter.reads(_policy("kai")))


def test_what_is_new_counts_once_per_workload_and_for_every_queue_above() -> None:
    tally, policy = PreemptionCounts(), _policy()
    standings = {name: Standing(8.0, 4.0) for name in ("org", "a", "b")}
    old = (Eviction("e0", "b", "ns/x"),)
    assert tally.add_to(standings, policy, "kai", old)["b"].reclaims == 0.0  # of unknown age
    new = (*old, Eviction("e1", "b", "ns/y"), Eviction("e2", "b", "ns/y"), Eviction("e3", "a", "ns/z"))
    counted = tally.add_to(standings, policy, "kai", new)
    assert {name: each.reclaims for name, each in counted.items()} == {"org": 2.0, "a": 1.0, "b": 1.0}
    assert {each.reclaims for each in tally.add_to(standings, policy, "kai", new).values()} == {0.0}
    assert {each.reclaims for each in tally.add_to(standings, policy, "kueue", new).values()} == {0.0}


@pytest.fixture
def kai_cluster(either_of: Make) -> Cluster:
    queues = [queue_object(name, requested="16", allocated="8") for name in "ab"]
    found: Cluster = either_of(
        [
            *queues,
            pod_group("pg-a", "a", requested=4),
            pod_group("pg-b", "b", requested=4),
        ]
    )
    return found


def test_a_reclaim_that_the_scheduler_made_costs_weight(
    kai_cluster: Cluster, accountant: Accountant, clock: VirtualClock
) -> None:
    """From the Event through the standing, in the record, to the price of the law."""
    accountant.spend(a=0.5, b=0.5)
    loop = Controller(_policy(), accountant, kai_cluster, clock)
    loop.cycle()
    told = _event("e1", "Evict", RECLAIMED.format(pod="a-0", by="pg-b"), "pg-a")
    told["metadata"].pop("uid")  # the server's to give
    rest = {"eventTime": "2026-10-01T00:00:00.000001Z", "reportingController": "kai", "reportingInstance": "kai-0"}
    kai_cluster.create({**told, "type": "Normal", "action": "Evict", **rest}, field_manager="kai")
    clock.advance(60_000)
    kai = next(target for target in loop.cycle().targets if target.target == "kai")
    assert {name: each.reclaims for name, each in kai.standings.items()} == {"a": 0.0, "b": 1.0}
    prices = {weight.queue: weight.explanation.trace["price"] for weight in kai.weights}
    assert prices["b"] > prices["a"] == 0.0
    clock.advance(60_000)
    kai = next(target for target in loop.cycle().targets if target.target == "kai")
    assert {each.reclaims for each in kai.standings.values()} == {0.0}


def test_our_own_reclaims_count_as_the_schedulers_do(accountant: Accountant, clock: VirtualClock) -> None:
    cluster = MemoryCluster(
        (*KINDS,), [node_object(), pod_object("a0"), pod_object("a1"), pod_object("b0", "b", node="")]
    )
    queues = [{"name": name, "deserved": 4, "refs": [f"policy:{name}"]} for name in "ab"]
    rules = {"mode": "enforce", "min_runtime": 0}
    policy = Policy.model_validate({"law": "deficit", "queues": queues, "preemption": rules})
    loop = Controller(
        policy, accountant, cluster, clock,
        pods=lambda: tuple(found for obj in cluster.list(POD) if (found := read_pod(obj)) is not None),
    )  # fmt: skip
    counts = []
    for _ in range(3):
        counts.append({name: each.reclaims for name, each in loop.cycle().targets[0].standings.items()})
        clock.advance(60_000)
    assert counts == [{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}]
