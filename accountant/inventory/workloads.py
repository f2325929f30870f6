"""Which job a pod belongs to: the outermost owner that somebody submitted. Pure.

Owners are followed whatever their kind, so that a controller nobody here has heard of still gives its
pods one name. A chain may be cut short (a node's agent sees the nearest owner alone): then the labels
that well-known controllers put on their pods complete it, and where the chain is whole they add nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.wire import Owner

PLACES = frozenset(
    {"Node", "Namespace", "Machine", "NodePool", "Queue", "ClusterQueue", "LocalQueue", "CustomResourceDefinition"}
)
"""Kinds that own pods without being a job: where a pod is, not what it is for."""
_HASH = "pod-template-hash"


@dataclass(frozen=True, slots=True)
class Mark:
    """A label that names a job. below: kinds this job owns; it is believed only where the chain ends in one
    of them or is empty."""

    label: str
    kind: str
    below: frozenset[str]


def _mark(label: str, kind: str, *below: str) -> Mark:
    return Mark(label, kind, frozenset(below))


MARKS = (
    _mark("ray.io/cluster", "RayCluster", "Pod"),
    _mark("batch.kubernetes.io/job-name", "Job", "Pod"),
    _mark("jobset.sigs.k8s.io/jobset-name", "JobSet", "Job"),
    _mark("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet", "StatefulSet", "Pod"),
    _mark("volcano.sh/job-name", "Job", "PodGroup"),
    _mark("notebook-name", "Notebook", "StatefulSet"),
    _mark("sparkoperator.k8s.io/app-name", "SparkApplication", "Pod"),
    _mark("serving.kserve.io/inferenceservice", "InferenceService", "ReplicaSet", "Deployment", "StatefulSet"),
    _mark("tekton.dev/taskRun", "TaskRun", "Pod"),
    _mark("tekton.dev/pipelineRun", "PipelineRun", "TaskRun"),
    _mark("workflows.argoproj.io/workflow", "Workflow", "Pod"),
    _mark("workflows.argoproj.io/cron-workflow", "CronWorkflow", "Workflow"),
    _mark("kueue.x-k8s.io/pod-group-name", "PodGroup"),
)
"""Nearest first, so that one may complete what another began. Sources: the controllers' own documentation of
the labels they set on pods."""
_RAY_PARENT = {"RayJob": "RayJob", "RayService": "RayService", "RayCronJob": "RayJob"}
_RAY_KIND, _RAY_NAME = "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"
_RUNAI_KIND, _RUNAI_NAME = "workloadKind", "workloadName"
_POD_GROUPS = ("pod-group-name", "scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
"""Annotations by which KAI and Volcano tie pods without an owner together."""


def job(owners: Sequence[Owner], labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> str:
    """`Kind/name` of the job; "" for a pod that stands alone.

    owners: the chain as far as it is known, nearest first."""
    if labels.get(_RUNAI_NAME) and labels.get(_RUNAI_KIND):
        return f"{labels[_RUNAI_KIND]}/{labels[_RUNAI_NAME]}"
    kind, name = _outermost(owners, labels)
    for mark in MARKS:
        value = labels.get(mark.label)
        if value and (not kind or kind in mark.below):
            kind, name = mark.kind, value
    if kind in ("", "RayCluster") and labels.get(_RAY_KIND) in _RAY_PARENT and labels.get(_RAY_NAME):
        kind, name = _RAY_PARENT[labels[_RAY_KIND]], labels[_RAY_NAME]
    if not kind:
        group = next((value for key in _POD_GROUPS if (value := (annotations or {}).get(key))), "")
        return f"PodGroup/{group}" if group else ""
    return f"{kind}/{name}"


def _outermost(owners: Sequence[Owner], labels: Mapping[str, str]) -> tuple[str, str]:
    chain = []
    for owner in owners:
        if owner.kind in PLACES:
            break
        chain.append(owner)
    if not chain:
        return "", ""
    last = chain[-1]
    suffix = f"-{labels.get(_HASH, '')}"
    if last.kind == "ReplicaSet" and labels.get(_HASH) and last.name.endswith(suffix):
        # A Deployment names its ReplicaSets after itself and the hash it also puts on their pods.
        return "Deployment", last.name.removesuffix(suffix)
    return last.kind, last.name
