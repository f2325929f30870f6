"""The job a pod belongs to, over the owner chains and labels that real controllers make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.inventory.pod_facts import job
from agent.wire import Owner


def chain(*named: str) -> tuple[Owner, ...]:
    return tuple(Owner(*one.split("/")) for one in named)


CASES: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "alone": ((), {}, ""),
    "job": (("Job/train",), {}, "Job/train"),
    "job by its label alone": ((), {"batch.kubernetes.io/job-name": "train"}, "Job/train"),
    "cron job": (
        ("Job/nightly-29", "CronJob/nightly"),
        {"batch.kubernetes.io/job-name": "nightly-29"},
        "CronJob/nightly",
    ),
    "job set": (("Job/js-w-0", "JobSet/js"), {}, "JobSet/js"),
    "job set, nearest owner only": (("Job/js-w-0",), {"jobset.sigs.k8s.io/jobset-name": "js"}, "JobSet/js"),
    "leader worker set": (
        ("StatefulSet/l-0", "Pod/l-0", "StatefulSet/l", "LeaderWorkerSet/l"),
        {},
        "LeaderWorkerSet/l",
    ),
    "leader worker set, nearest only": (
        ("StatefulSet/l",),
        {"leaderworkerset.sigs.k8s.io/name": "l"},
        "LeaderWorkerSet/l",
    ),
    "deployment": (("ReplicaSet/web-5d9f", "Deployment/web"), {"pod-template-hash": "5d9f"}, "Deployment/web"),
    "deployment, nearest only": (("ReplicaSet/web-5d9f",), {"pod-template-hash": "5d9f"}, "Deployment/web"),
    "bare replica set": (("ReplicaSet/web-5d9f",), {}, "ReplicaSet/web-5d9f"),
    "replica set of another name": (("ReplicaSet/web",), {"pod-template-hash": "5d9f"}, "ReplicaSet/web"),
    "stateful set": (("StatefulSet/db",), {}, "StatefulSet/db"),
    "daemon set": (("DaemonSet/exporter",), {}, "DaemonSet/exporter"),
    "tf job": (("TFJob/mnist",), {"training.kubeflow.org/job-name": "mnist"}, "TFJob/mnist"),
    "pytorch job": (("PyTorchJob/llm",), {}, "PyTorchJob/llm"),
    "mpi job": (("Job/hvd-launcher", "MPIJob/hvd"), {}, "MPIJob/hvd"),
    "train job": (("Job/t-node-0", "JobSet/t", "TrainJob/t"), {"jobset.sigs.k8s.io/jobset-name": "t"}, "TrainJob/t"),
    "notebook": (("StatefulSet/nb", "Notebook/nb"), {}, "Notebook/nb"),
    "notebook, nearest only": (("StatefulSet/nb",), {"notebook-name": "nb"}, "Notebook/nb"),
    "ray job": (("RayCluster/r-x1", "RayJob/r"), {}, "RayJob/r"),
    "ray job, nearest only": (
        ("RayCluster/r-x1",),
        {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "r"},
        "RayJob/r",
    ),
    "ray service": (("RayCluster/s-x1", "RayService/s"), {}, "RayService/s"),
    "ray cluster": (
        ("RayCluster/c",),
        {"ray.io/originated-from-crd": "RayCluster", "ray.io/originated-from-cr-name": "c"},
        "RayCluster/c",
    ),
    "volcano job": (("Job/v",), {"volcano.sh/job-name": "v"}, "Job/v"),
    "argo workflow": (("Workflow/w",), {"workflows.argoproj.io/workflow": "w"}, "Workflow/w"),
    "argo cron workflow": (("Workflow/w-1", "CronWorkflow/w"), {}, "CronWorkflow/w"),
    "tekton": (("TaskRun/p-t", "PipelineRun/p"), {"tekton.dev/taskRun": "p-t"}, "PipelineRun/p"),
    "tekton, nearest only": (("TaskRun/p-t",), {"tekton.dev/pipelineRun": "p"}, "PipelineRun/p"),
    "kserve": (
        ("ReplicaSet/m-1-abc", "Deployment/m-1", "Revision/m-1", "Configuration/m", "Service/m", "InferenceService/m"),
        {"pod-template-hash": "abc"},
        "InferenceService/m",
    ),
    "kserve, nearest only": (
        ("ReplicaSet/m-predictor-abc",),
        {"pod-template-hash": "abc", "serving.kserve.io/inferenceservice": "m"},
        "InferenceService/m",
    ),
    "spark executor": (("Pod/driver", "SparkApplication/etl"), {}, "SparkApplication/etl"),
    "kueue group of pods": ((), {"kueue.x-k8s.io/pod-group-name": "g"}, "PodGroup/g"),
    "run:ai": (
        ("Job/x-0-0", "RunaiJob/x"),
        {"workloadKind": "TrainingWorkload", "workloadName": "x"},
        "TrainingWorkload/x",
    ),
    "unknown kinds": (("Shard/s-1", "Fleet/f", "Galaxy/g"), {}, "Galaxy/g"),
    "static pod": (("Node/n1",), {}, ""),
    "a place above a job": (("Job/j", "ClusterQueue/q"), {}, "Job/j"),
    "a label does not move a whole chain": (
        ("PyTorchJob/a",),
        {"jobset.sigs.k8s.io/jobset-name": "mine"},
        "PyTorchJob/a",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_job_of_a_pod(case: str) -> None:
    owners, labels, expected = CASES[case]
    assert job(chain(*owners), labels) == expected


@pytest.mark.parametrize("key", ["pod-group-name", "scheduling.k8s.io/group-name"])
def test_pods_without_an_owner_may_be_tied_by_a_group(key: str) -> None:
    assert job((), {}, {key: "pg"}) == "PodGroup/pg"
    assert job(chain("Job/j"), {}, {key: "pg"}) == "Job/j"


@given(st.lists(st.builds(Owner, st.sampled_from(["Fleet", "Galaxy", "Job", "Node"]), st.text(min_size=1))))
def test_without_labels_it_is_the_last_owner_before_a_place(owners: list[Owner]) -> None:
    kinds = [owner.kind for owner in owners]
    before = owners[: kinds.index("Node")] if "Node" in kinds else owners
    assert job(owners, {}) == (f"{before[-1].kind}/{before[-1].name}" if before else "")
