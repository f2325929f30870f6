"""Reads pods as GPU demand: how many GPUs, which queue, which gang.

A pod belongs to a queue by the label that its scheduler reads (`gputally.base.pod_queue_labels`, the same rule for
bills and shares), or by `gputally.dev/queue` if that scheduler has no queues. Finished pods and those that request no
GPU are ignored.

Sources: KAI `kai.scheduler/queue`, `pod-group-name`, `gpu-fraction` (kai-scheduler/KAI-Scheduler); Kueue
`kueue.x-k8s.io/queue-name` (kubernetes-sigs/kueue); Volcano `scheduling.volcano.sh/queue-name`,
`scheduling.k8s.io/group-name` (volcano-sh/volcano); a pod's effective request: Kubernetes, "Resource sharing within
containers" (side-cars count with the containers, other init containers one at a time).

A scheduler's own objects (PodGroup, Workload) define which pods start together. Pods show what runs. If both exist, the
allocation is that of the pods. A gang without pods yet requests the GPUs that its object states. Pods without such an
object are gangs by their controller, or single, in the queue that `gputally.dev/queue` names.

`BoundPods` keeps pods as they were when they were bound, so that later changes give no protection from preemption.
Queue, gang, share of a GPU and "not preemptible" are labels and annotations, which the owner of a pod can change while
it runs. They count as they were when the pod was first seen on its node. A checkpoint stays recorded, because saved
work stays saved, and so does "interruptible at any time". The state is in memory: after a restart of the controller,
pods count as they are then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from math import fsum
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import Gang, Pod, Standing
from gputally.base.clock import Clock
from gputally.base.pod_queue_labels import RESERVATION_NAMESPACES, placed_by, queue_ref
from gputally.kubernetes.objects import POD, Kind, Object, gpus, quantity, value_at

QUEUE_LABEL = "gputally.dev/queue"
GANG_LABEL = "gputally.dev/gang"
CHECKPOINT = "gputally.dev/last-checkpoint"
PREEMPTABLE = "volcano.sh/preemptable"
"""Volcano's annotation, which counts on the pods that it places."""
SPOT_LABEL = "gputally.dev/spot"
SUBGROUP_LABEL = "kai.scheduler/subgroup-name"
LABELLED = "policy"
"""Prefix of refs to labels of pods: `policy:NAME`."""
_FINISHED = frozenset({"Succeeded", "Failed"})


def read_pod(obj: Object) -> Pod | None:
    """Read a pod; None if it requests no GPU, or is finished."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    if status.get("phase") in _FINISHED:
        return None
    scheduler = spec.get("schedulerName") or ""
    placer = placed_by(scheduler)
    whole = request(spec)  # not reduced by an annotation
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
    """Return the GPUs a pod (or a pod template) takes on its node. Extended resources are not overcommitted, so limits
    count."""
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
    """Return the GPUs that pods of one node take. Pods that share a GPU use one that a reservation pod keeps for them,
    so both count as one GPU."""
    whole: list[float] = []
    kept: list[float] = []
    shared: list[float] = []
    for pod in pods:
        (kept if pod.keeps else shared if pod.shares else whole).append(pod.gpus)
    return fsum((*whole, max(fsum(kept), fsum(shared))))


def fraction(annotations: Mapping[str, str]) -> float:
    """Return the GPUs a KAI pod shares by annotation; 0 if it does not."""
    part = quantity(annotations.get("gpu-fraction"))
    return 0.0 if part is None else part * (quantity(annotations.get("gpu-fraction-num-devices")) or 1.0)


def memory_mib(annotations: Mapping[str, str]) -> float:
    """Return the GPU memory, of all its GPUs, that a KAI pod requests by annotation; 0 if it requests none."""
    return (quantity(annotations.get("gpu-memory")) or 0.0) * (
        quantity(annotations.get("gpu-fraction-num-devices")) or 1.0
    )


def checkpoint(pods: Sequence[Pod], annotation: object = None) -> int | None:
    """Return when a gang's work was last saved: from its own object, otherwise the oldest of its pods' checkpoints."""
    own = millis(annotation)
    told = [pod.checkpoint_ms for pod in pods if pod.checkpoint_ms is not None]
    return own if own is not None else min(told) if told and len(told) == len(pods) else max(told, default=None)


def millis(text: object) -> int | None:
    """Parse an RFC 3339 time as milliseconds; None if it is not one."""
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
    """Return the pod's group. A scheduler's group label counts only on pods that it places; otherwise a pod could join
    another owner's gang."""
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
    """Return an object's name as in `Pod.gang`."""
    return f"{obj['kind']}/{value_at(obj, ('metadata', 'namespace')) or ''}/{obj['metadata']['name']}"


def by_gang(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    """Return pods by group, oldest first, without single pods. A pod being deleted neither holds nor requests GPUs; a
    group with no other pods is left out."""
    groups: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.gang:
            group = groups.setdefault(pod.gang, [])
            if not pod.leaving:
                group.append(pod)
    return {gang: tuple(sorted(found, key=_age)) for gang, found in groups.items()}


def with_pods(gang: Gang, pods: Sequence[Pod], least: int | None = None) -> Gang:
    """Return the gang with the data of its pods. least: pods without which it does not run; None: from the object."""
    if not pods:
        return gang
    held = fsum(pod.gpus for pod in pods if pod.held)
    asked = max(gang.requested, fsum(pod.gpus for pod in pods))
    smallest = sorted(pod.gpus for pod in pods)
    minimum = gang.minimum if least is None else fsum(smallest[: max(1, least)])
    starts = [pod.started_ms for pod in pods if pod.held and pod.started_ms is not None]
    return replace(
        gang,
        requested=asked,
        allocated=held,
        minimum=min(asked, max(minimum, smallest[0])),
        started_ms=max(starts, default=gang.started_ms) if held > 0 else None,
        checkpoint_ms=gang.checkpoint_ms if gang.checkpoint_ms is not None else checkpoint(pods),
        preemptible=gang.preemptible and all(pod.disruptable for pod in pods),
        pods=tuple(pods),
    )


def labelled(policy: Policy, pods: Iterable[Pod]) -> tuple[Gang, ...]:
    """Return gangs of pods that name a queue of the policy by label, under no scheduler's queue."""
    queue_of = queue_namer(policy)
    groups: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        queue = queue_of(pod) if pod.ref.startswith(f"{LABELLED}:") else None
        if queue is not None and not pod.gated and not pod.leaving:
            groups.setdefault((queue, pod.gang or f"Pod/{pod.namespace}/{pod.name}"), []).append(pod)
    gangs = []
    for (queue, key), found in sorted(groups.items()):
        found.sort(key=_age)
        kind, namespace, name = key.split("/", 2)
        asked = fsum(pod.gpus for pod in found)
        # A gang label means that pods start together; pods that only share a controller start individually.
        together = kind in ("Gang", "Pod", "PodGroup", "Workload")
        blank = Gang(
            queue,
            POD if kind == "Pod" else Kind("", kind, ""),
            namespace,
            name,
            found[0].uid if kind == "Pod" else "",
            asked,
            0.0,
            asked,
            priority=max(pod.priority for pod in found),
            created_ms=min((pod.created_ms for pod in found if pod.created_ms is not None), default=None),
        )
        gangs.append(with_pods(blank, found, None if together else 1))
    return in_order(gangs)


def queue_namer(policy: Policy) -> Callable[[Pod], str | None]:
    """Return a function that gives the policy queue that a pod names."""
    owner = {ref: queue.name for queue in policy.queues for ref in queue.refs}
    names = {queue.name for queue in policy.queues}

    def queue_of(pod: Pod) -> str | None:
        prefix, _, label = pod.ref.partition(":")
        return owner.get(pod.ref) or (label if prefix == LABELLED and label in names else None)

    return queue_of


def in_order(gangs: Iterable[Gang]) -> tuple[Gang, ...]:
    return tuple(sorted(gangs, key=lambda gang: (gang.queue, gang.namespace, gang.name, gang.uid)))


def amounts(policy: Policy, gangs: Iterable[Gang]) -> Mapping[str, Standing]:
    """Return requested and allocated GPUs of every queue that has a gang, descendants included."""
    requested: dict[str, float] = {}
    allocated: dict[str, float] = {}
    for gang in gangs:
        requested[gang.queue] = requested.get(gang.queue, 0.0) + gang.requested
        allocated[gang.queue] = allocated.get(gang.queue, 0.0) + gang.allocated
    tree = PolicyTree(policy)
    asked, held = tree.sum_up(requested), tree.sum_up(allocated)
    return {queue: Standing(asked[queue], held[queue]) for queue in asked}


def smallest_waiting(gangs: Iterable[Gang]) -> Mapping[str, float]:
    """Return the GPUs of the smallest waiting gang of each queue; queues without one are left out."""
    least: dict[str, float] = {}
    for gang in gangs:
        if gang.waits > 0:
            least[gang.queue] = min(least.get(gang.queue, gang.minimum), gang.minimum)
    return least


def _age(pod: Pod) -> tuple[int, str]:
    return pod.created_ms or 0, pod.name


MOST_PODS = 200_000


class BoundPods:
    """Reduces pods for `gputally.kubernetes.list_watch.Reflector`. Not thread-safe: one reflector owns it."""

    def __init__(self, clock: Clock, read: Callable[[Object], Pod | None] = read_pod) -> None:
        self._clock = clock
        self._read = read
        self._known: dict[str, Pod] = {}

    def __call__(self, obj: Object) -> Pod | None:
        pod = self._read(obj)
        uid = obj["metadata"].get("uid", "")
        known = self._known.get(uid)
        if pod is None or not pod.node or not uid:
            return pod
        if known is not None:
            pod = self._as_bound(pod, known)
        elif len(self._known) >= MOST_PODS:
            del self._known[next(iter(self._known))]
        self._known[uid] = pod
        return pod

    def _as_bound(self, pod: Pod, known: Pod) -> Pod:
        now_ms = self._clock.wall_ms()
        safe = [at for at in (pod.checkpoint_ms, known.checkpoint_ms) if at is not None and at <= now_ms]
        return replace(
            pod,
            gpus=known.gpus,
            shares=known.shares,
            ref=known.ref,
            gang=known.gang,
            priority=known.priority,
            spot=pod.spot or known.spot,
            disruptable=pod.disruptable or known.disruptable,
            checkpoint_ms=max(safe, default=None),
        )
