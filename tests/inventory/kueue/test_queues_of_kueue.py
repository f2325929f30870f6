"""The queues of Kueue's pods: LocalQueues, and the ClusterQueues and Cohorts above them."""

from __future__ import annotations

from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.team_assignment import Assignment
from accountant.runtime.job_and_task_metrics import FunctionCollector, inventory_metrics
from accountant.wire.policy_models import UNASSIGNED, Policy, PolicyVersion
from gputally.base.errors import ClusterRefused
from gputally.base.pod_stop import PodStop
from tests.inventory.memory_api_server import FakeApi, owner, pod, refs, thing

KUEUE = "kueue.x-k8s.io/queue-name"
ONE, ONE_MS = "2026-10-01T01:00:00Z", 1_790_816_400_000


def test_the_label_of_a_job_is_its_pods(api, inventory, clock):
    api.put("CronJob", owner("CronJob", "train"))
    api.put("Job", owner("Job", "train-1", above=("batch/v1", "CronJob", "train"), labels={KUEUE: "lq"}))
    api.put("Pod", pod("train-1-x", owners=[("batch/v1", "Job", "train-1")], gpus=4, labels={"secret": "s"}))
    inventory.sync()
    assert refs(inventory, clock) == {"train-1-x": "kueue:vision/lq"}


def test_a_condition_of_kueue_says_that_it_stopped_a_pod_also_after_the_pod_is_gone(api, inventory, clock):
    told = {"reason": "WorkloadEvicted", "message": "Preempted to accommodate a workload"}
    condition = {"type": "TerminationTarget", "status": "True", "lastTransitionTime": ONE, **told}
    stop = PodStop("evicted", "kueue", "WorkloadEvicted", "Preempted to accommodate a workload", ONE_MS)
    inventory.sync()
    api.put("Pod", pod("a", scheduler="kai-scheduler", status={"phase": "Running", "conditions": [condition]}))
    inventory.follow()
    assert [fact.stop for _, fact in inventory.read(clock.wall_ms()).pods] == [stop]
    inventory.taken()
    api.drop("Pod", "a")
    inventory.follow()
    assert [fact.stop for _, fact in inventory.read(clock.wall_ms()).pods] == [stop]


def test_failures_to_list_local_queues_are_counted(inventory, clock):
    registry = CollectorRegistry()
    registry.register(FunctionCollector(partial(inventory_metrics, inventory, clock)))
    inventory.sync()
    text = generate_latest(registry).decode()
    assert 'gputally_inventory_failures_total{kind="localqueues.kueue.x-k8s.io"} 0.0' in text


def test_where_a_local_queue_leads(api, inventory, clock):
    """The Workload names the ClusterQueue that admitted it, and the queue of a job without a label."""
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


def test_the_cohorts_above_a_cluster_queue(api, inventory, clock):
    """Nearest first. A change anywhere above reports the pods again; a change elsewhere reports none."""
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


def test_a_policy_may_name_either():
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


def test_schedulers_that_are_not_there(clock):
    api = FakeApi()
    inventory = ClusterInventory(api, clock, "prod")
    api.put("Pod", pod("a", labels={KUEUE: "lq"}))
    inventory.sync()
    assert refs(inventory, clock) == {"a": "kueue:vision/lq"}
    inventory.follow()
    api.trouble = [None] * 3 + [ClusterRefused("GET: 403: forbidden")]
    with pytest.raises(ClusterRefused, match="403"):
        ClusterInventory(api, clock, "prod").sync()


def test_a_pod_that_names_an_owner_of_another_namespace_gets_nothing_of_its_workload(api, inventory, clock):
    """Whoever creates a pod may write any uid as its owner's. Its time would otherwise be billed to another team."""
    api.put("LocalQueue", thing("lq", {"clusterQueue": "cq"}))
    api.put("Workload", thing("w", {"queueName": "lq"}, ("Job-vision-j",), admission={"clusterQueue": "cq"}))
    forged = pod("forged", namespace="intruders", owners=[("batch/v1", "Job", "j")])
    forged["metadata"]["ownerReferences"][0]["uid"] = "Job-vision-j"
    api.put("Pod", forged)
    inventory.sync()
    assert refs(inventory, clock) == {"forged": ""}
