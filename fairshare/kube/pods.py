"""Pods as demand: how many GPUs one asks for, for which queue, and with whom it starts. Pure.

A pod belongs to a queue by the label that the scheduler reads which places it (`agent.queues`, the one rule for
bills and shares), or by `gputally.dev/queue` where that has no queues. Finished pods and those that ask for no
GPU are nobody's demand.

Sources: KAI `kai.scheduler/queue`, `pod-group-name`, `gpu-fraction` (kai-scheduler/KAI-Scheduler);
Kueue `kueue.x-k8s.io/queue-name` (kubernetes-sigs/kueue); Volcano `scheduling.volcano.sh/queue-name`,
`scheduling.k8s.io/group-name` (volcano-sh/volcano); a pod's effective request: Kubernetes, "Resource
sharing within containers" (side-cars count with the containers, other init containers one at a time).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import fsum
from typing import Any

from agent.queues import RESERVATION_NAMESPACES, placed_by, queue_ref
from fairshare.kube.fields import look
from fairshare.kube.kinds import Object
from fairshare.kube.quantities import gpus, quantity
from fairshare.model import Pod

QUEUE_LABEL = "gputally.dev/queue"
GANG_LABEL = "gputally.dev/gang"
CHECKPOINT = "gputally.dev/last-checkpoint"
PREEMPTABLE = "volcano.sh/preemptable"
"""Volcano's own word, which counts on the pods that it places."""
SPOT_LABEL = "gputally.dev/spot"
SUBGROUP_LABEL = "kai.scheduler/subgroup-name"
LABELLED = "policy"
"""Prefix of refs that pods carry themselves: `policy:NAME`."""
_FINISHED = frozenset({"Succeeded", "Failed"})


def read_pod(obj: Object) -> Pod | None:
    """None where it asks for no GPU, or is done."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    if status.get("phase") in _FINISHED:
        return None
    scheduler = spec.get("schedulerName") or ""
    placer = placed_by(scheduler)
    whole = request(spec)  # an annotation takes nothing off it
    part = fraction(annotations) if placer == "kai" and not whole else 0.0
    amount = whole or part
    memory = memory_mib(annotations) if placer == "kai" and not amount else 0.0
    if amount <= 0 and memory <= 0:
        return None
    namespace, name = metadata.get("namespace", ""), metadata["name"]
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    node = spec.get("nodeName") or ""
    leaving = metadata.get("deletionTimestamp") is not None
    conditions = status.get("conditions") or ()
    ready = next((c for c in conditions if c.get("type") == "Ready" and c.get("status") == "True"), None)
    return Pod(
        uid=metadata.get("uid", ""),
        namespace=namespace,
        name=name,
        gpus=amount,
        node=node,
        ref=_ref(scheduler, namespace, labels, annotations),
        gang=_gang(scheduler, namespace, labels, annotations, owner),
        owner=f"{owner['kind']}/{namespace}/{owner['name']}" if owner else "",
        priority=int(spec.get("priority") or 0),
        preempts=spec.get("preemptionPolicy") != "Never",
        held=bool(node) and not leaving,
        ready=ready is not None,
        ready_ms=millis(ready.get("lastTransitionTime")) if ready is not None else None,
        gated=bool(spec.get("schedulingGates")),
        created_ms=millis(metadata.get("creationTimestamp")),
        started_ms=millis(status.get("startTime")),
        checkpoint_ms=millis(annotations.get(CHECKPOINT)),
        disruptable=placed_by(scheduler) != "volcano"
        or annotations.get(PREEMPTABLE, labels.get(PREEMPTABLE)) != "false",
        spot=labels.get(SPOT_LABEL) == "true",
        keeps=namespace in RESERVATION_NAMESPACES,
        shares=part > 0 or memory > 0,
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        memory_mib=memory,
        subgroup=labels.get(SUBGROUP_LABEL, "") if placer == "kai" else "",
        scheduler=placer,
    )


def request(spec: Mapping[str, Any]) -> float:
    """GPUs a pod (or a pod template) takes on its node. Extended resources are not overcommitted: limits rule."""
    running = [_container(c) for c in spec.get("containers") or ()]
    beside, most = 0.0, 0.0
    for container in spec.get("initContainers") or ():
        amount = _container(container)
        if container.get("restartPolicy") == "Always":
            beside += amount
            most = max(most, beside)
        else:
            most = max(most, beside + amount)
    return max(fsum(running) + beside, most)


def _container(container: Mapping[str, Any]) -> float:
    resources = container.get("resources") or {}
    return gpus(resources.get("limits")) or gpus(resources.get("requests"))


def taken_up(pods: Iterable[Pod]) -> float:
    """GPUs that pods of one node take up. Those that share a GPU have a place on one that a reservation pod keeps for
    them: the two are one GPU, not two."""
    whole: list[float] = []
    kept: list[float] = []
    shared: list[float] = []
    for pod in pods:
        (kept if pod.keeps else shared if pod.shares else whole).append(pod.gpus)
    return fsum((*whole, max(fsum(kept), fsum(shared))))


def fraction(annotations: Mapping[str, str]) -> float:
    """GPUs a KAI pod shares by annotation; 0 where it does not."""
    part = quantity(annotations.get("gpu-fraction"))
    return 0.0 if part is None else part * (quantity(annotations.get("gpu-fraction-num-devices")) or 1.0)


def memory_mib(annotations: Mapping[str, str]) -> float:
    """GPU memory, of all its GPUs, that a KAI pod asks for by annotation; 0 where it asks for none."""
    return (quantity(annotations.get("gpu-memory")) or 0.0) * (
        quantity(annotations.get("gpu-fraction-num-devices")) or 1.0
    )


def checkpoint(pods: Sequence[Pod], annotation: object = None) -> int | None:
    """When a gang's work was last safe: what its own object says, else the oldest word of its pods."""
    own = millis(annotation)
    told = [pod.checkpoint_ms for pod in pods if pod.checkpoint_ms is not None]
    return own if own is not None else min(told) if told and len(told) == len(pods) else max(told, default=None)


def millis(text: object) -> int | None:
    """An RFC 3339 instant in milliseconds; None where it is none."""
    try:
        at = datetime.fromisoformat(text if isinstance(text, str) else "")
    except ValueError:
        return None
    return round(at.timestamp() * 1000) if at.tzinfo is not None else None


def _ref(scheduler: str, namespace: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    own = labels.get(QUEUE_LABEL)
    return queue_ref(namespace, scheduler, labels, annotations) or (f"{LABELLED}:{own}" if own else "")


def _gang(
    scheduler: str,
    namespace: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    owner: Mapping[str, Any] | None,
) -> str:
    """A scheduler's group counts only on pods that it places: on any other it would be a way into foreign gangs."""
    placed = placed_by(scheduler)
    for kind, name in (
        ("PodGroup", annotations.get("pod-group-name") if placed == "kai" else None),
        ("PodGroup", annotations.get("scheduling.k8s.io/group-name") if placed == "volcano" else None),
        ("Workload", annotations.get("kueue.x-k8s.io/workload")),
        ("Gang", labels.get(GANG_LABEL)),
    ):
        if name:
            return f"{kind}/{namespace}/{name}"
    return f"{owner['kind']}/{namespace}/{owner['name']}" if owner else ""


def named(obj: Object) -> str:
    """How `Pod.gang` names an object."""
    return f"{obj['kind']}/{look(obj, ('metadata', 'namespace')) or ''}/{obj['metadata']['name']}"
