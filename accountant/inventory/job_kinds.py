"""Kinds of objects that own pods, of the controllers that are known: which of them end by themselves, which labels name
the job, and what the accountant may read of them. Those of schedulers are in their manifests.

Sources: the controllers' documentation of the labels they set on pods."""

from __future__ import annotations

from typing import Final

from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import JobLabel

BATCH = frozenset(
    {
        "CronJob", "CronWorkflow", "Job", "JobSet", "MPIJob", "PaddleJob", "PipelineRun", "PyTorchJob", "RayJob",
        "ScheduledSparkApplication", "SlurmJob", "SparkApplication", "TFJob", "TaskRun", "TrainJob", "TrainingWorkload",
        "Workflow", "XGBoostJob",
    }
)  # fmt: skip
"""Kinds of jobs that end by themselves."""


def _mark(label: str, kind: str, *below: str) -> JobLabel:
    return JobLabel(label, kind, frozenset(below))


NEAR: Final = (
    _mark("ray.io/cluster", "RayCluster", "Pod"),
    _mark("batch.kubernetes.io/job-name", "Job", "Pod"),
    _mark("jobset.sigs.k8s.io/jobset-name", "JobSet", "Job"),
    _mark("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet", "StatefulSet", "Pod"),
)
FAR: Final = (
    _mark("notebook-name", "Notebook", "StatefulSet"),
    _mark("sparkoperator.k8s.io/app-name", "SparkApplication", "Pod"),
    _mark("serving.kserve.io/inferenceservice", "InferenceService", "ReplicaSet", "Deployment", "StatefulSet"),
    _mark("tekton.dev/taskRun", "TaskRun", "Pod"),
    _mark("tekton.dev/pipelineRun", "PipelineRun", "TaskRun"),
    _mark("workflows.argoproj.io/workflow", "Workflow", "Pod"),
    _mark("workflows.argoproj.io/cron-workflow", "CronWorkflow", "Workflow"),
)
"""Labels that name a job: those of the object just above the pod, and those of objects above that."""


def _owners(group: str, resources: str) -> Rights:
    return Rights(group, resources, "get list", "to name the job of a pod", "accountant", owners=True)


_TRAINING: Final = "tfjobs pytorchjobs mpijobs xgboostjobs paddlejobs jaxjobs trainjobs notebooks"
OWNERS: Final = (
    _owners("batch", "jobs cronjobs"),
    _owners("apps", "replicasets deployments statefulsets daemonsets"),
    _owners("jobset.x-k8s.io", "jobsets"),
    _owners("leaderworkerset.x-k8s.io", "leaderworkersets"),
    _owners("kubeflow.org", _TRAINING),
    _owners("trainer.kubeflow.org", _TRAINING),
    _owners("ray.io", "rayclusters rayjobs rayservices"),
    _owners("argoproj.io", "workflows cronworkflows"),
    _owners("tekton.dev", "taskruns pipelineruns"),
    _owners("serving.kserve.io", "inferenceservices"),
    _owners("serving.knative.dev", "revisions configurations services"),
    _owners("sparkoperator.k8s.io", "sparkapplications scheduledsparkapplications"),
)
"""What the accountant may read of them."""
