"""What the accountant may do in the cluster, whichever schedulers there are; the manifests of schedulers add to it. It
changes nothing."""

from __future__ import annotations

from typing import Final

from gputally.kubernetes.rights import Rights


def _owners(group: str, resources: str) -> Rights:
    return Rights(group, resources, "get list", "to name the job of a pod", "accountant", owners=True)


_TRAINING: Final = "tfjobs pytorchjobs mpijobs xgboostjobs paddlejobs jaxjobs trainjobs notebooks"
RIGHTS: Final = (
    Rights("", "pods namespaces nodes", "list watch", "to know pods, teams and nodes", "accountant"),
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
    Rights("authentication.k8s.io", "tokenreviews", "create", "to know callers by their tokens", "accountant"),
    Rights("authorization.k8s.io", "subjectaccessreviews", "create", "to know what callers may do", "accountant"),
)
