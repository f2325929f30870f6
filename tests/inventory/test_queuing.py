"""Queues that no label of the pod names: KAI's and Volcano's pod groups, Kueue's LocalQueues and Workloads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.team_assignment import Assignment
from accountant.runtime.job_and_task_metrics import FunctionCollector, inventory_metrics
from accountant.wire.policy_models import UNASSIGNED, Policy, PolicyVersion
from gputally.base.clock import VirtualClock
from gputally.base.errors import Refused
from tests.inventory.api import SCHEDULERS, UNREACHABLE, FakeApi, owner, pod

KUEUE = "kueue.x-k8s.io/queue-name"


@pytest.fixture
def api() -> FakeApi:
    api = FakeApi()
    api.served |= SCHEDULERS
    return api


@pytest.fixture
def inventory(api: FakeApi, clock: VirtualClock) -> ClusterInventory:
    return ClusterInventory(api, clock, "prod")


def thing(name: str, spec: dict[str, Any], owners: tuple[str, ...] = (), **status: Any) -> dict[str, Any]:
    refs = [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": uid, "controller": True} for uid in owners]
    return {
        "metadata": {"name": name, "namespace": "vision", "ownerReferences": refs}, "spec": spec, "status": status
    }  # fmt: skip


def refs(inventory: ClusterInventory, clock: VirtualClock) -> dict[str, str]:
    facts = inventory.read(clock.wall_ms()).pods
    inventory.taken()
    return {fact.name: fact.queue_ref for _, fact in facts}


def test_a_pod_group_says_more_than_a_label(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    """It is what the scheduler goes by; on a pod of another scheduler it says nothing."""
    api.put("KaiGroup", thing("g", {"queue": "research"}))
    api.put("VolcanoGroup", thing("v", {"queue": "batch"}))
    grouped, older = {"pod-group-name": "g"}, {"scheduling.k8s.io/group-name": "v"}
    api.put("Pod", pod("a", scheduler="kai-scheduler", annotations=grouped))
    api.put("Pod", pod("b", scheduler="kai-scheduler", annotations=grouped, labels={"kai.scheduler/queue": "mine"}))
    api.put("Pod", pod("c", annotations=grouped))
    api.put("Pod", pod("d", scheduler="volcano", annotations=older))
    api.put("Pod", pod("e", "other", scheduler="kai-scheduler", annotations=grouped))
    inventory.sync()
    assert refs(inventory, clock) == {
        "a": "kai:research", "b": "kai:research", "c": "", "d": "volcano:batch", "e": "",
    }  # fmt: skip


def test_a_group_made_after_its_pod(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    api.put("Pod", pod("a", scheduler="kai-scheduler", annotations={"pod-group-name": "g"}))
    api.put("Pod", pod("b"))
    inventory.sync()
    assert refs(inventory, clock) == {"a": "", "b": ""}
    api.put("KaiGroup", thing("g", {"queue": "research"}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kai:research"}
    api.put("KaiGroup", thing("g", {"queue": "moved"}))
    api.drop("Pod", "b")
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kai:moved", "b": ""}
    api.drop("KaiGroup", "g")
    api.drop("Pod", "a")
    inventory.follow()
    assert refs(inventory, clock).keys() == {"a"}


def test_where_a_local_queue_leads(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    """The Workload knows which ClusterQueue admitted it, and which queue a job without a label got."""
    api.put("LocalQueue", thing("lq", {"clusterQueue": "cq"}))
    api.put("Workload", thing("w", {"queueName": "lq"}, ("Job-vision-j",), admission={"clusterQueue": "other-cq"}))
    api.put("Job", owner("Job", "j"))
    api.put("Pod", pod("labelled", labels={KUEUE: "lq"}))
    api.put("Pod", pod("unknown", labels={KUEUE: "nowhere"}))
    api.put("Pod", pod("owned", owners=[("batch/v1", "Job", "j")]))
    inventory.sync()
    assert refs(inventory, clock) == {
        "labelled": "kueue:vision/lq@cq", "unknown": "kueue:vision/nowhere", "owned": "kueue:vision/lq@other-cq",
    }  # fmt: skip
    api.put("LocalQueue", thing("lq", {"clusterQueue": "new"}))
    inventory.follow()
    assert refs(inventory, clock) == {"labelled": "kueue:vision/lq@new"}


def test_the_cohorts_above_a_cluster_queue(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    """The nearest first; a change anywhere above tells the pods again, and one elsewhere tells nobody."""
    api.put("LocalQueue", thing("lq", {"clusterQueue": "cq"}))
    api.put("ClusterQueue", thing("cq", {"cohort": "vision"}))
    api.put("ClusterQueue", thing("free", {}))
    api.put("Cohort", thing("vision", {"parentName": "research"}))
    api.put("Cohort", thing("research", {}))
    api.put("Pod", pod("a", labels={KUEUE: "lq"}))
    inventory.sync()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq@cq^vision^research"}
    api.put("Cohort", thing("research", {"parentName": "all"}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq@cq^vision^research^all"}
    api.put("ClusterQueue", thing("free", {"cohort": "speech"}))
    inventory.follow()
    assert refs(inventory, clock) == {}
    api.put("ClusterQueue", thing("cq", {"cohort": "speech"}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq@cq^speech"}
    api.put("Cohort", thing("speech", {"parentName": "round"}))
    api.put("Cohort", thing("round", {"parentName": "speech"}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq@cq^speech^round"}
    api.put("ClusterQueue", thing("cq", {}))
    inventory.follow()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq@cq"}


def test_a_policy_may_name_either() -> None:
    def rules(**queues: str) -> Assignment:
        tree = [{"name": name, "refs": [ref]} for name, ref in queues.items()]
        policy = Policy.model_validate({"schema": 1, "queues": tree})
        return Assignment(PolicyVersion(version="1", effective_ms=0, policy=policy))

    both = rules(near="kueue:vision/lq", far="kueue:cq")
    assert both.queue("kueue:vision/lq@cq") == "near"
    assert both.queue("kueue:speech/lq@cq") == "far"
    assert both.queue("kueue:speech/lq") == UNASSIGNED
    cohorts = rules(dept="kueue-cohort:research", near="kueue:cq2", top="kueue-cohort:all")
    assert cohorts.queue("kueue:x/lq@cq^vision^research^all") == "dept"
    assert cohorts.queue("kueue:x/lq@cq2^vision^research") == "near"
    assert cohorts.queue("kueue:x/lq@cq^speech^all") == "top"
    assert cohorts.queue("kueue:x/lq@cq^speech") == UNASSIGNED
    assert rules(slurm="slurm:a").queue("slurm:a@b") == UNASSIGNED


def test_schedulers_that_are_not_there(clock: VirtualClock) -> None:
    api = FakeApi()
    inventory = ClusterInventory(api, clock, "prod")
    api.put("Pod", pod("a", labels={KUEUE: "lq"}))
    inventory.sync()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq"}
    inventory.follow()
    api.trouble = [None] * 3 + [Refused("GET: 403: forbidden")]
    with pytest.raises(Refused, match="403"):
        ClusterInventory(api, clock, "prod").sync()


def test_how_old_what_is_known_is(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    registry = CollectorRegistry()
    registry.register(FunctionCollector(partial(inventory_metrics, inventory, clock)))
    assert b"gputally_inventory_age_seconds{" not in generate_latest(registry)
    inventory.sync()
    clock.advance(90_000)
    api.trouble = [None, UNREACHABLE]
    with pytest.raises(type(UNREACHABLE)):
        inventory.follow()
    text = generate_latest(registry).decode()
    assert 'gputally_inventory_age_seconds{kind="namespaces"} 0.0' in text
    assert 'gputally_inventory_age_seconds{kind="pods"} 90.0' in text
    assert 'gputally_inventory_failures_total{kind="localqueues.kueue.x-k8s.io"} 0.0' in text
