"""Reads the GPU demand of a pod: how many GPUs it requests, in which queue, as part of which gang.

The label that a pod's scheduler reads assigns the pod to a queue (`gputally.kubernetes.pod_queue_labels`, the same rule
for bills and shares). If that scheduler has no queues, the label `gputally.dev/queue` does. Finished pods are ignored,
and so are pods that request no GPU, unless they are members of a PodGroup: a gang may need them to start.

The manifests of the schedulers say which labels and annotations their pods have. Source of a pod's effective request:
Kubernetes, "Resource sharing within containers" (side-cars count with the containers, other init containers one at a
time).

A scheduler's own objects (PodGroup, Workload) define which pods start together, and the pods show which of them run. If
both exist, the pods determine the allocation. A gang without pods yet requests the GPUs that its object states. Pods
without such an object form one gang per controller, and a pod without a controller is a gang of its own.

Queue, gang, share of a GPU and "not preemptible" come from labels and annotations, which the owner of a pod can change
while the pod runs. `PodReducer` therefore keeps these values as they were when it first saw the pod on its node, so
that no later change protects the pod from preemption. Later changes count only if they make preemption easier: a newer
checkpoint, "preemptible", and "interruptible at any time". These values are in memory: after a restart of the
controller, pods count as they are then."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from math import fsum
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.core.device_claims import pod_claims
from fairshare.core.queues_and_weights import ClaimingPod, Gang, Pod, PolicyTree, Standing
from gputally.base.clock import Clock
from gputally.base.quantities import container_memory_mib
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import MIG, POD, Kind, Object, counts_gpus, gpus, quantity, value_at
from gputally.kubernetes.pod_queue_labels import (
    gang_keys,
    gang_keys_everywhere,
    gang_kinds,
    placed_by,
    queue_ref,
    reserved_by,
    shared_gpu_keys,
)
from gputally.kubernetes.scheduler_plugins import PodGangKeys, SharedGpuKeys

QUEUE_LABEL = "gputally.dev/queue"
GANG_LABEL = "gputally.dev/gang"
CHECKPOINT = "gputally.dev/last-checkpoint"
SPOT_LABEL = "gputally.dev/spot"
SCHEDULING_GROUP = "SchedulingGroup"
"""The kind of a gang that the kube-scheduler starts together: its pods name a PodGroup in `spec.schedulingGroup`, or
in Kubernetes 1.35 a group of a Workload in `spec.workloadRef`."""
OF_WORKLOAD = ":"
"""Joins Workload, group and replica key to the name of a gang of Kubernetes 1.35. No name of a PodGroup has it."""
LABELLED = "policy"
"""Prefix of references to pods with the label `gputally.dev/queue`: `policy:NAME`."""
MOST_DEVICES = 1_000_000
"""Largest number of GPUs that an annotation can request."""
_MOST_MEMORY_MIB = 10**18
_MOST_RANK = 10**18
_FINISHED = frozenset({"Succeeded", "Failed"})


def read_pod(obj: Object) -> Pod | None:
    """Return the pod; None if it requests no GPU, or is finished."""
    pod = read_member(obj)
    return pod if pod is not None and pod.requests_gpus else None


def read_claiming(obj: Object) -> Pod | None:
    """Return the pod as `read_member` does, and also if it has ResourceClaims, which may be of GPUs."""
    claims = pod_claims(obj)
    pod = _read(obj, claims=bool(claims))
    if pod is None or not claims:
        return pod
    return ClaimingPod(**{each.name: getattr(pod, each.name) for each in fields(Pod)}, claims=claims)


def read_member(obj: Object) -> Pod | None:
    """Return the pod; None if it is finished, or neither requests a GPU nor is a member of a PodGroup."""
    return _read(obj)


def _read(obj: Object, *, claims: bool = False) -> Pod | None:
    """claims: whether the pod has ResourceClaims."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    if status.get("phase") in _FINISHED:
        return None
    scheduler = spec.get("schedulerName") or ""
    placer = placed_by(scheduler)
    resources = requested_resources(spec)
    whole = gpus(resources, NO_NODES.anywhere)  # not reduced by an annotation
    keys, shares = gang_keys(placer), shared_gpu_keys(placer)
    part = shared_gpus(annotations, shares) if shares and not whole else 0.0
    amount = whole or part
    memory = memory_mib(annotations, shares) if shares and not whole else 0.0
    scheduling_group = "" if placer else _scheduling_group(spec)
    grouped = annotations.get(keys.gang) or scheduling_group
    if amount <= 0 and memory <= 0 and not claims and not grouped:
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
        gang=_gang(keys, namespace, labels, annotations, owner, scheduling_group),
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
        disruptable=annotations.get(keys.disruptable, labels.get(keys.disruptable)) != "false",
        spot=labels.get(SPOT_LABEL) == "true",
        keeps=bool(reserved_by(namespace)),
        shares=part > 0 or memory > 0,
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        memory_mib=memory,
        subgroup=labels.get(keys.part_label) or annotations.get(keys.part_annotation) or "",
        scheduler=placer,
        rank=_rank(labels, keys),
        resources=tuple(sorted(resources.items())) if any(name.startswith(MIG) for name in resources) else (),
    )


def _scheduling_group(spec: Object) -> str:
    """Return the name of the group that the kube-scheduler starts together; "" for none."""
    group = value_at(spec, ("schedulingGroup", "podGroupName"))
    names = [value_at(spec, ("workloadRef", key)) for key in ("name", "podGroup", "podGroupReplicaKey")]
    return str(group or OF_WORKLOAD.join(str(name) for name in names if name))


def sized(pod: Pod, parts: MigParts) -> Pod:
    """Return the pod with the GPUs of its MIG instances, which are parts of the GPUs of its node."""
    if not pod.resources:
        return pod
    resources = dict(pod.resources)
    selector = {key: value for key, value in pod.selector if value is not None}
    here = gpus(resources, parts.on(pod.node) if pod.node else parts.selected(selector))
    return replace(pod, gpus=here, overcount=max(0.0, gpus(resources, parts.anywhere) - here))


def overcount_by_queue(policy: Policy, pods: Iterable[Pod]) -> Mapping[str, float]:
    """Return the overcount of the pods of every queue that has any, descendants included (`Pod.overcount`)."""
    queue_of, own = queue_lookup(policy), dict[str, float]()
    for pod in pods:
        queue = queue_of(pod) if pod.overcount > 0 else None
        if queue is not None:
            own[queue] = own.get(queue, 0.0) + pod.overcount
    return PolicyTree(policy).sum_up(own)


def _rank(labels: Mapping[str, str], keys: PodGangKeys) -> tuple[int, ...]:
    """Return the rank by which the scheduler places the members of a gang: leaders first, then those with a priority,
    the highest first. Empty if it reads neither."""
    if not keys.leaders and not keys.rank:
        return ()
    text = labels.get(keys.rank)
    priority = _integer(text)
    unread = -_MOST_RANK if text is not None else -_MOST_RANK - 1
    leads = (labels.get(label) in values for label, *values in keys.leaders)
    return (*(not leading for leading in leads), -(unread if priority is None else priority))


def requested_gpus(spec: Mapping[str, Any], parts: MigParts) -> float:
    """Return the GPUs that a pod (or a pod template) takes on a node that its node selector allows."""
    return gpus(requested_resources(spec), parts.selected(spec.get("nodeSelector") or {}))


def requested_resources(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the GPUs and MIG instances that a pod (or a pod template) takes on its node, by resource.

    Limits count before requests, because Kubernetes does not overcommit extended resources."""
    running: dict[str, float] = {}
    for container in spec.get("containers") or ():
        for name, amount in _container_resources(container).items():
            running[name] = running.get(name, 0.0) + amount
    if not spec.get("initContainers"):
        return running
    side_cars: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for container in spec["initContainers"]:
        amounts = Counter(_container_resources(container))
        if container.get("restartPolicy") == "Always":
            side_cars += amounts
            peak |= side_cars
        else:
            peak |= side_cars + amounts
    return dict((side_cars + Counter(running)) | peak)


def _container_resources(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    for key in ("limits", "requests"):
        listed = resources.get(key)
        if isinstance(listed, Mapping):
            amounts = {
                str(name): amount for name, text in listed.items() if counts_gpus(name) and (amount := quantity(text))
            }
            if amounts:
                return amounts
    return {}


def gpus_taken(pods: Iterable[Pod]) -> float:
    """Return the GPUs that pods of one node take.

    Pods that share a GPU use a GPU that a reservation pod holds for them. The reservation pod and the pods that share
    its GPU therefore count once."""
    whole: list[float] = []
    reserved: list[float] = []
    shared: list[float] = []
    for pod in pods:
        (reserved if pod.keeps else shared if pod.shares else whole).append(pod.gpus)
    return fsum((*whole, max(fsum(reserved), fsum(shared))))


_FLOAT = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def shared_gpus(annotations: Mapping[str, str], keys: SharedGpuKeys) -> float:
    """Return the GPUs that a pod requests by annotation as a fraction of one or more GPUs; 0 if none."""
    text = annotations.get(keys.fraction) or ""
    fraction = float(text) if _FLOAT.fullmatch(text) else 0.0
    return fraction * _devices(annotations, keys) if 0 < fraction <= 1 else 0.0


def memory_mib(annotations: Mapping[str, str], keys: SharedGpuKeys) -> float:
    """Return the GPU memory in MiB, of all its GPUs together, that a pod requests by annotation; 0 if none. Of that of
    the pod and that of a container the larger counts."""
    size = max(_integer(annotations.get(keys.memory)) or 0, container_memory_mib(annotations))
    return float(max(0, min(size, _MOST_MEMORY_MIB)) * _devices(annotations, keys))


def _devices(annotations: Mapping[str, str], keys: SharedGpuKeys) -> int:
    count = _integer(annotations.get(keys.devices))
    return 1 if count is None else min(max(0, count), MOST_DEVICES)


def _integer(text: str | None) -> int | None:
    return int(text) if text and _INTEGER.fullmatch(text) else None


def last_checkpoint(pods: Sequence[Pod]) -> int | None:
    """Return when the pods of a gang last saved its work; None if unknown.

    The oldest checkpoint counts if every pod has one, otherwise the newest."""
    of_pods = [pod.checkpoint_ms for pod in pods if pod.checkpoint_ms is not None]
    return min(of_pods) if of_pods and len(of_pods) == len(pods) else max(of_pods, default=None)


def millis(text: object) -> int | None:
    """Parse an RFC 3339 time as milliseconds; None if it is not one."""
    try:
        at = datetime.fromisoformat(text if isinstance(text, str) else "")
    except ValueError:
        return None
    return round(at.timestamp() * 1000) if at.tzinfo is not None else None


def _ref(scheduler: str, namespace: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    label = labels.get(QUEUE_LABEL)
    return queue_ref(namespace, scheduler, labels, annotations) or (f"{LABELLED}:{label}" if label else "")


def _gang(
    keys: PodGangKeys,
    namespace: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    owner: Mapping[str, Any] | None,
    scheduling_group: str,
) -> str:
    """Return the pod's gang; "" for a single pod.

    scheduling_group: the name of the PodGroup of `scheduling.k8s.io` with which the kube-scheduler starts it, whatever
        a label says; "" for none.

    A scheduler's group label counts only on pods that it places. Otherwise a pod could join another owner's gang."""
    for kind, name in (
        *((each.kind, annotations.get(each.gang)) for each in (keys, *gang_keys_everywhere())),
        (SCHEDULING_GROUP, scheduling_group),
        ("Gang", labels.get(GANG_LABEL)),
    ):
        if name:
            return f"{kind}/{namespace}/{name}"
    return f"{owner['kind']}/{namespace}/{owner['name']}" if owner else ""


def gang_key(obj: Object) -> str:
    """Return the gang that a scheduler's object stands for, as "kind/namespace/name" (`Pod.gang`)."""
    return f"{obj['kind']}/{value_at(obj, ('metadata', 'namespace')) or ''}/{obj['metadata']['name']}"


def pods_by_gang(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    """Return the pods of each gang that request GPUs, oldest first, without single pods.

    A pod that is being deleted neither holds nor requests GPUs. A gang with only such pods has an empty tuple."""
    return _by_gang(pod for pod in pods if pod.requests_gpus)


def companions_by_gang(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    """Return the other pods of each gang, oldest first."""
    return _by_gang(pod for pod in pods if not pod.requests_gpus)


def _by_gang(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    gangs: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.gang:
            members = gangs.setdefault(pod.gang, [])
            if not pod.leaving:
                members.append(pod)
    return {gang: tuple(sorted(members, key=_age)) for gang, members in gangs.items()}


def with_pods(gang: Gang, pods: Sequence[Pod], companions: Sequence[Pod] = ()) -> Gang:
    """Return the gang with the amounts and times of its pods; without pods, the gang as it is.

    Its minimum is at least its smallest pod: a gang that starts without GPUs then waits for one pod with GPUs after the
    other."""
    if not pods:
        return gang
    allocated = fsum(pod.gpus for pod in pods if pod.held)
    stated = gang.requested - fsum(pod.overcount for pod in pods)
    requested = max(stated, fsum(pod.gpus for pod in pods))
    starts = [pod.started_ms for pod in pods if pod.held and pod.started_ms is not None]
    return replace(
        gang,
        requested=requested,
        allocated=allocated,
        minimum=min(requested, max(gang.minimum, min(pod.gpus for pod in pods))),
        started_ms=max(starts, default=gang.started_ms) if allocated > 0 else None,
        checkpoint_ms=max((at for at in (gang.checkpoint_ms, last_checkpoint(pods)) if at is not None), default=None),
        preemptible=gang.preemptible and all(pod.disruptable for pod in (*pods, *companions)),
        pods=tuple(pods),
        companions=tuple(companions),
    )


def gangs_by_label(policy: Policy, pods: Iterable[Pod], prefix: str = LABELLED) -> tuple[Gang, ...]:
    """Return the gangs of pods that name a queue of the policy themselves, for a scheduler without objects of its own.

    prefix: that of references to its queues; without it, pods with the label `gputally.dev/queue`."""
    queue_of = queue_lookup(policy)
    groups: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        queue = queue_of(pod) if pod.ref.startswith(f"{prefix}:") and pod.requests_gpus else None
        if queue is not None and not pod.gated and not pod.leaving:
            groups.setdefault((queue, pod.gang or f"Pod/{pod.namespace}/{pod.name}"), []).append(pod)
    gangs = []
    for (queue, key), members in sorted(groups.items()):
        members.sort(key=_age)
        kind, namespace, name = key.split("/", 2)
        requested = fsum(pod.gpus for pod in members)
        # A gang label means that pods start together; pods that only share a controller start individually.
        together = kind in ("Gang", "Pod", SCHEDULING_GROUP) or kind in gang_kinds()
        without_pods = Gang(
            queue,
            POD if kind == "Pod" else Kind("", kind, ""),
            namespace,
            name,
            members[0].uid if kind == "Pod" else "",
            requested,
            0.0,
            requested if together else 0.0,
            priority=max(pod.priority for pod in members),
            created_ms=min((pod.created_ms for pod in members if pod.created_ms is not None), default=None),
        )
        gangs.append(with_pods(without_pods, members))
    return sorted_gangs(gangs)


def queue_lookup(policy: Policy) -> Callable[[Pod], str | None]:
    """Return a function that returns the name of a pod's queue in the policy, None if it has none."""
    queues = queues_by_ref(policy)
    return lambda pod: queues.get(pod.ref)


def queues_by_ref(policy: Policy) -> Mapping[str, str]:
    """Return the queue of the policy to which each reference of a pod (`Pod.ref`) belongs.

    A label names a queue by its name, unless another queue has this label among its references."""
    labels = {f"{LABELLED}:{queue.name}": queue.name for queue in policy.queues}
    return labels | {ref: queue.name for queue in policy.queues for ref in queue.refs}


def sorted_gangs(gangs: Iterable[Gang]) -> tuple[Gang, ...]:
    return tuple(sorted(gangs, key=lambda gang: (gang.queue, gang.namespace, gang.name, gang.uid)))


def standings_of(policy: Policy, gangs: Iterable[Gang]) -> Mapping[str, Standing]:
    """Return requested and allocated GPUs of every queue that has a gang, descendants included."""
    requested: dict[str, float] = {}
    allocated: dict[str, float] = {}
    for gang in gangs:
        requested[gang.queue] = requested.get(gang.queue, 0.0) + gang.requested
        allocated[gang.queue] = allocated.get(gang.queue, 0.0) + gang.allocated
    tree = PolicyTree(policy)
    requested, allocated = tree.sum_up(requested), tree.sum_up(allocated)
    return {queue: Standing(requested[queue], allocated[queue]) for queue in requested}


def smallest_waiting(gangs: Iterable[Gang]) -> Mapping[str, float]:
    """Return the GPUs of the smallest waiting gang of each queue; queues without one are left out."""
    smallest: dict[str, float] = {}
    for gang in gangs:
        if gang.waits > 0:
            smallest[gang.queue] = min(smallest.get(gang.queue, gang.minimum), gang.minimum)
    return smallest


def _age(pod: Pod) -> tuple[int, str]:
    return pod.created_ms or 0, pod.name


MOST_PODS = 200_000
"""Largest number of bound pods that are remembered; the oldest entry is dropped first."""


class PodReducer:
    """Converts watched objects to pods, and keeps what their owners must not change after binding.

    It is the reducer of a `gputally.kubernetes.list_watch.Reflector`. Not thread-safe."""

    def __init__(self, clock: Clock, read: Callable[[Object], Pod | None] = read_member) -> None:
        self._clock = clock
        self._read = read
        self._known: dict[str, Pod] = {}

    def __call__(self, obj: Object) -> Pod | None:
        pod = self._read(obj)
        uid = obj["metadata"].get("uid", "")
        known = self._known.get(uid)
        if pod is None and known is not None and value_at(obj, ("status", "phase")) not in _FINISHED:
            # Its annotations no longer request a GPU, or name its gang: it has both until it ends.
            return replace(known, held=obj["metadata"].get("deletionTimestamp") is None)
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
        checkpoints = [at for at in (pod.checkpoint_ms, known.checkpoint_ms) if at is not None and at <= now_ms]
        return replace(
            pod,
            gpus=known.gpus,
            resources=known.resources,
            memory_mib=known.memory_mib,
            shares=known.shares,
            ref=known.ref,
            gang=known.gang,
            priority=known.priority,
            spot=pod.spot or known.spot,
            disruptable=pod.disruptable or known.disruptable,
            checkpoint_ms=max(checkpoints, default=None),
        )
