"""The job that a pod belongs to, and how long it waited."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.billing.queue_waits import PodWait, WaitStatistics, pod_wait, wait_statistics
from accountant.core.pod_sources import merge_sources
from accountant.inventory.pod_facts import job
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.wire.policy_models import UNASSIGNED, Policy
from agent.wire import Batch, Owner, PodFacts
from tests.moments import present
from tests.plugin_cases import plugin_cases

SCHEDULERS = plugin_cases("fairshare").values()


def chain(named: str) -> tuple[Owner, ...]:
    return tuple(Owner(*one.split("/")) for one in named.split())


CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "alone": ("", {}, ""),
    "job": ("Job/train", {}, "Job/train"),
    "job by its label alone": ("", {"batch.kubernetes.io/job-name": "train"}, "Job/train"),
    "cron job": ("Job/nightly-29 CronJob/nightly", {"batch.kubernetes.io/job-name": "nightly-29"}, "CronJob/nightly"),
    "job set": ("Job/js-w-0 JobSet/js", {}, "JobSet/js"),
    "job set, nearest owner only": ("Job/js-w-0", {"jobset.sigs.k8s.io/jobset-name": "js"}, "JobSet/js"),
    "leader worker set": ("StatefulSet/l-0 Pod/l-0 StatefulSet/l LeaderWorkerSet/l", {}, "LeaderWorkerSet/l"),
    "leader worker set, nearest only": (
        "StatefulSet/l",
        {"leaderworkerset.sigs.k8s.io/name": "l"},
        "LeaderWorkerSet/l",
    ),
    "deployment": ("ReplicaSet/web-5d9f Deployment/web", {"pod-template-hash": "5d9f"}, "Deployment/web"),
    "deployment, nearest only": ("ReplicaSet/web-5d9f", {"pod-template-hash": "5d9f"}, "Deployment/web"),
    "bare replica set": ("ReplicaSet/web-5d9f", {}, "ReplicaSet/web-5d9f"),
    "replica set of another name": ("ReplicaSet/web", {"pod-template-hash": "5d9f"}, "ReplicaSet/web"),
    "stateful set": ("StatefulSet/db", {}, "StatefulSet/db"),
    "daemon set": ("DaemonSet/exporter", {}, "DaemonSet/exporter"),
    "tf job": ("TFJob/mnist", {"training.kubeflow.org/job-name": "mnist"}, "TFJob/mnist"),
    "pytorch job": ("PyTorchJob/llm", {}, "PyTorchJob/llm"),
    "mpi job": ("Job/hvd-launcher MPIJob/hvd", {}, "MPIJob/hvd"),
    "train job": ("Job/t-node-0 JobSet/t TrainJob/t", {"jobset.sigs.k8s.io/jobset-name": "t"}, "TrainJob/t"),
    "notebook": ("StatefulSet/nb Notebook/nb", {}, "Notebook/nb"),
    "notebook, nearest only": ("StatefulSet/nb", {"notebook-name": "nb"}, "Notebook/nb"),
    "ray job": ("RayCluster/r-x1 RayJob/r", {}, "RayJob/r"),
    "ray job, nearest only": (
        "RayCluster/r-x1",
        {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "r"},
        "RayJob/r",
    ),
    "ray service": ("RayCluster/s-x1 RayService/s", {}, "RayService/s"),
    "ray cluster": (
        "RayCluster/c",
        {"ray.io/originated-from-crd": "RayCluster", "ray.io/originated-from-cr-name": "c"},
        "RayCluster/c",
    ),
    "volcano job": ("Job/v", {"volcano.sh/job-name": "v"}, "Job/v"),
    "argo workflow": ("Workflow/w", {"workflows.argoproj.io/workflow": "w"}, "Workflow/w"),
    "argo cron workflow": ("Workflow/w-1 CronWorkflow/w", {}, "CronWorkflow/w"),
    "tekton": ("TaskRun/p-t PipelineRun/p", {"tekton.dev/taskRun": "p-t"}, "PipelineRun/p"),
    "tekton, nearest only": ("TaskRun/p-t", {"tekton.dev/pipelineRun": "p"}, "PipelineRun/p"),
    "kserve": (
        "ReplicaSet/m-1-abc Deployment/m-1 Revision/m-1 Configuration/m Service/m InferenceService/m",
        {"pod-template-hash": "abc"},
        "InferenceService/m",
    ),
    "kserve, nearest only": (
        "ReplicaSet/m-predictor-abc",
        {"pod-template-hash": "abc", "serving.kserve.io/inferenceservice": "m"},
        "InferenceService/m",
    ),
    "spark executor": ("Pod/driver SparkApplication/etl", {}, "SparkApplication/etl"),
    "unknown kinds": ("Shard/s-1 Fleet/f Galaxy/g", {}, "Galaxy/g"),
    "static pod": ("Node/n1", {}, ""),
    "a place above a job": ("Job/j ClusterQueue/q", {}, "Job/j"),
    "a label does not move a whole chain": ("PyTorchJob/a", {"jobset.sigs.k8s.io/jobset-name": "mine"}, "PyTorchJob/a"),
}
"""Owners, the nearest first; labels; the job."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_job_of_a_pod(case):
    owners, labels, expected = CASES[case]
    assert job(chain(owners), labels) == expected


@pytest.mark.parametrize("key", [key for one in SCHEDULERS for key in one.GROUP[2]])
def test_pods_without_an_owner_may_be_tied_by_a_group(key):
    assert job((), {}, {key: "pg"}) == "PodGroup/pg"
    assert job(chain("Job/j"), {}, {key: "pg"}) == "Job/j"


@given(st.lists(st.builds(Owner, st.sampled_from(["Fleet", "Galaxy", "Job", "Node"]), st.text(min_size=1))))
def test_without_labels_it_is_the_last_owner_before_a_place(owners):
    kinds = [owner.kind for owner in owners]
    before = owners[: kinds.index("Node")] if "Node" in kinds else owners
    assert job(owners, {}) == (f"{before[-1].kind}/{before[-1].name}" if before else "")


NOW = 1_790_816_400_000


def fact(**given: Any) -> PodFacts:
    plain: dict[str, Any] = {"seq": 0, "uid": "u", "namespace": "ns", "name": "p", "node": "n", "observed_ms": 0}
    return PodFacts(**{**plain, **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"created_ms": 10, "scheduled_ms": 40, "started_ms": 45}, PodWait(30, 5, False)),
        ({"created_ms": 10}, PodWait(90, None, True)),
        ({"created_ms": 10, "ended_ms": 50}, PodWait(40, None, False)),  # given up
        ({"created_ms": 10, "started_ms": 45}, PodWait(35, None, False)),
        ({"scheduled_ms": 40, "started_ms": 45}, PodWait(None, 5, False)),
        ({"created_ms": 50, "scheduled_ms": 40, "started_ms": 39}, PodWait(0, 0, False)),
        ({}, PodWait(None, None, True)),
    ],
)
def test_what_a_pod_waited(given, expected):
    assert pod_wait(fact(**given), 100) == expected


def test_node_and_cluster_together_know_all_instants():
    node = fact(observed_ms=9, started_ms=45, ended_ms=80, node="n1")
    cluster = fact(observed_ms=5, created_ms=10, scheduled_ms=40, queue_ref="kai:a", node="")
    both = merge_sources(node, cluster)
    assert both == merge_sources(cluster, node)
    assert (both.created_ms, both.scheduled_ms, both.started_ms, both.ended_ms) == (10, 40, 45, 80)
    assert (both.node, both.queue_ref) == ("n1", "kai:a")
    assert merge_sources(None, cluster) == cluster


@given(st.lists(st.none() | st.integers(0, 1000)))
def test_percentiles_are_waits_that_happened(waits):
    known = sorted(wait for wait in waits if wait is not None)
    found = wait_statistics(waits)
    if not known:
        assert found == WaitStatistics(0, 0, 0, 0, 0)
        return
    assert found.pods == len(known)
    assert {found.median_ms, found.p95_ms} <= set(known)
    assert sum(wait <= found.p95_ms for wait in known) * 100 >= 95 * len(known)
    assert found.median_ms <= found.p95_ms <= found.longest_ms == known[-1]


def test_the_ledger_knows_the_pods_of_a_span_with_team_and_queue(ledger):
    ledger.put_policy(Policy.model_validate({"queues": [{"name": "a", "refs": ["kai:a"]}]}), 0)
    ledger.observe(Facts(namespaces=(NamespaceFacts("c", "ns", "vision"),)), NOW)
    early = fact(seq=1, uid="early", created_ms=NOW - 900, ended_ms=NOW - 800, observed_ms=NOW - 800)
    both = fact(seq=2, uid="both", started_ms=NOW - 300, observed_ms=NOW - 200)
    batch = Batch(cluster="c", node="n", boot_id="b", epoch="0192", first_seq=1, oldest_seq=1, facts=(early, both))
    ledger.append([batch], NOW)
    seen = fact(uid="both", created_ms=NOW - 500, scheduled_ms=NOW - 400, queue_ref="kai:a", observed_ms=NOW - 400)
    waiting = fact(uid="waiting", namespace="other", created_ms=NOW - 100, observed_ms=NOW - 100)
    ledger.observe(Facts(pods=(("c", seen), ("c", waiting))), NOW)
    found = {
        pod.facts.uid: (pod.team, pod.queue, pod_wait(pod.facts, NOW)) for pod in present(ledger).pods(NOW - 600, NOW)
    }
    assert found == {
        "both": ("vision", "a", PodWait(100, 100, False)),
        "waiting": (UNASSIGNED, UNASSIGNED, PodWait(100, None, True)),
    }
    assert [pod.facts.uid for pod in present(ledger).pods(NOW - 1000, NOW - 850)] == ["early"]
