"""Derives a pod's facts (job name, requests and scheduler queue), and merges observations of one pod.

Answers of the API server are decoded once into the structs below; fields that are not needed are skipped.

The chain of owners is followed for any kind of owner, so that the pods of an unknown controller share one job name. If
the chain is incomplete (a node's agent sees only the nearest owner), labels that well-known controllers put on their
pods complete it.

A scheduler reads a pod's queue once, when it places the pod, while the pod's owner can change labels at any time. The
earliest observation of a placed pod therefore fixes its queue, and a later label cannot move booked time to another
queue. Before the placement the newest observation counts. Changes by an administrator still count: what is above the
queue (`pod_queues`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache

import msgspec
from msgspec import structs

from accountant.inventory.job_kinds import FAR, NEAR
from accountant.inventory.pod_owners import Chain, Ref, nearest
from accountant.ledger.protocols import EPOCH_KEY
from accountant.ledger.team_assignment import USER_KEY
from agent.wire import Owner, PodFacts
from gputally.base.gpu_resources import is_gpu_resource
from gputally.base.quantities import container_memory_mib
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND
from gputally.kubernetes.list_watch import Metadata, _Object
from gputally.kubernetes.pod_queue_labels import (
    further_gang_keys,
    groups_with_queue,
    job_labels,
    queue_annotation_keys,
    queue_keys,
    queue_ref,
    sharing_keys,
)
from gputally.kubernetes.pod_stops import EndedContainer, PodEnd, StopCondition, stop_of
from gputally.kubernetes.scheduler_plugins import JobLabel


class ObjectCondition(_Object, frozen=True):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    last_transition_time: datetime | None = None


class Taint(_Object, frozen=True):
    key: str
    time_added: datetime | None = None


class NodeSpec(_Object, frozen=True):
    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeInfo(_Object, frozen=True):
    boot_id: str = msgspec.field(name="bootID", default="")


class NodeStatus(_Object, frozen=True):
    node_info: NodeInfo = NodeInfo()
    capacity: dict[str, str] | None = None
    conditions: list[ObjectCondition] | None = None


class NodeObject(_Object, frozen=True):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Resources(_Object, frozen=True):
    requests: dict[str, str] | None = None
    limits: dict[str, str] | None = None


class Container(_Object, frozen=True):
    name: str
    resources: Resources = Resources()


class PodSpec(_Object, frozen=True):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: list[Container] = []  # noqa: RUF012 - msgspec copies a default
    init_containers: list[Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Terminated(_Object, frozen=True):
    exit_code: int = 0
    reason: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Running(_Object, frozen=True):
    started_at: datetime | None = None


class ContainerState(_Object, frozen=True):
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Object, frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Object, frozen=True):
    phase: str = ""
    reason: str | None = None
    message: str | None = None
    conditions: list[ObjectCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class PodObject(_Object, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


def milliseconds(at: datetime | None) -> int | None:
    """UTC milliseconds; None for None."""
    return None if at is None else round(at.timestamp() * MS_PER_SECOND)


PLACES = frozenset(
    {"Node", "Namespace", "Machine", "NodePool", "Queue", "ClusterQueue", "LocalQueue", "CustomResourceDefinition"}
)
"""Kinds that own pods without being a job: they say where a pod runs, not what it is for."""
_HASH = "pod-template-hash"


_RAY_PARENT = {"RayJob": "RayJob", "RayService": "RayService", "RayCronJob": "RayJob"}
_RAY_KIND, _RAY_NAME = "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"


@cache
def _marks() -> tuple[JobLabel, ...]:
    """Return the labels that name jobs, nearest first, so that one can complete the result of another. Those of
    schedulers own objects that other jobs are made of, or, if they own no kind, count only if nothing else is known.

    Sources: the controllers' documentation of the labels they set on pods."""
    own = [label for jobs in job_labels() for label in jobs.labels]
    return (*NEAR, *(one for one in own if one.below), *FAR, *(one for one in own if not one.below))


@cache
def _named_jobs() -> tuple[tuple[str, str], ...]:
    """Return the pairs of labels with the kind and the name of a job."""
    return tuple((jobs.kind, jobs.name) for jobs in job_labels() if jobs.kind and jobs.name)


@cache
def job_label_keys() -> frozenset[str]:
    """Return the labels that may name a pod's job."""
    pairs = (key for pair in _named_jobs() for key in pair)
    return frozenset({*(mark.label for mark in _marks()), _HASH, _RAY_KIND, _RAY_NAME, *pairs})


@cache
def group_keys() -> tuple[str, ...]:
    """The annotations that name a pod's PodGroup, also if it has no owner."""
    return tuple(dict.fromkeys((*(each.annotation for each in groups_with_queue()), *further_gang_keys())))


def job(owners: Sequence[Owner], labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> str:
    """`Kind/name` of the job; "" for a single pod.

    owners: the known part of the chain, nearest first."""
    for kind_label, name_label in _named_jobs():
        if labels.get(kind_label) and labels.get(name_label):
            return f"{labels[kind_label]}/{labels[name_label]}"
    kind, name = _outermost(owners, labels)
    for mark in () if job_label_keys().isdisjoint(labels) else _marks():
        value = labels.get(mark.label)
        if value and (not kind or kind in mark.below):
            kind, name = mark.kind, value
    if kind in ("", "RayCluster") and labels.get(_RAY_KIND) in _RAY_PARENT and labels.get(_RAY_NAME):
        kind, name = _RAY_PARENT[labels[_RAY_KIND]], labels[_RAY_NAME]
    if not kind:
        group = next((value for key in group_keys() if (value := (annotations or {}).get(key))), "")
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
        # A Deployment's ReplicaSets are named after it with a hash, which is also a label of their pods.
        return "Deployment", last.name.removesuffix(suffix)
    return last.kind, last.name


_ENDED = frozenset({"Succeeded", "Failed"})
_LONGEST_USER = 253
_LONGEST_EPOCH = 64
_EPOCH_FIELD = f'"f:{EPOCH_KEY}"'.encode()


@cache
def _notes() -> frozenset[str]:
    """Return the keys of annotations that may name a pod's queue."""
    return queue_annotation_keys().union(group_keys())


@cache
def _queue_marks() -> frozenset[str]:
    """Return the keys of labels and annotations that may name a pod's queue."""
    return queue_keys().union(group_keys())


@dataclass(frozen=True, slots=True)
class PodSighting:
    """The stored facts of a GPU pod without its chain of owners, and where the chain begins."""

    facts: PodFacts
    owner: Ref | None
    scheduler: str
    marks: tuple[tuple[str, str], ...]
    """Labels and annotations that may name its job or its queue."""
    epoch: str = ""
    """The epoch in its annotation (accountant.ledger.protocols)."""
    epoch_ms: int | None = None
    """The latest time at which the annotation was written, according to the API server; None if unknown."""


def pod_sighting(
    pod: PodObject, now_ms: int, kept_labels: Collection[str] = (), user_keys: Sequence[str] = ()
) -> PodSighting | None:
    """The facts of a pod; None if it requests no GPU.

    kept_labels: exported labels, and those by which some namespace lets pods choose a team; others are dropped.
    user_keys: further labels and annotations that name the user, in order of precedence."""
    meta, spec, status = pod.metadata, pod.spec, pod.status
    labels, annotations = meta.labels or {}, meta.annotations or {}
    requests = _requests(spec)
    # The annotations may also be labels.
    shared = bool(sharing_keys() & (labels.keys() | annotations.keys())) or container_memory_mib(annotations) > 0
    claimed = bool(spec.resource_claims) or shared
    if not requests and not claimed:
        return None
    states = [state for c in status.container_statuses or () for state in (c.last_state, c.state)]
    started = [at for s in states for one in (s.running, s.terminated) if one and (at := milliseconds(one.started_at))]
    finished = [at for s in states if s.terminated and (at := milliseconds(s.terminated.finished_at))]
    scheduled = next((c for c in status.conditions or () if c.type == "PodScheduled" and c.status == "True"), None)
    written = {**annotations, **labels}
    user = next((written[key] for key in (USER_KEY, *user_keys) if written.get(key)), "")
    facts = PodFacts(
        seq=0,
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        node=spec.node_name,
        labels={key: labels[key] for key in sorted(kept_labels) if key in labels}
        | ({USER_KEY: user[:_LONGEST_USER]} if user else {}),
        priority=spec.priority,
        requests=requests,
        created_ms=milliseconds(meta.creation_timestamp),
        scheduled_ms=milliseconds(scheduled.last_transition_time) if scheduled else None,
        started_ms=min(started, default=None),
        ended_ms=max(finished, default=None) if status.phase in _ENDED else None,
        observed_ms=now_ms,
        stop=stop_of(_end(pod)),
    )
    kept = {key: value for key, value in annotations.items() if key in _notes()}
    kept |= {key: value for key, value in labels.items() if key in job_label_keys() or key in queue_keys()}
    owner = nearest(meta.owner_references, meta.namespace)
    epoch = annotations.get(EPOCH_KEY, "")[:_LONGEST_EPOCH]
    return PodSighting(
        facts, owner, spec.scheduler_name, tuple(sorted(kept.items())), epoch, _written(meta) if epoch else None
    )


def as_placed(now: tuple[tuple[str, str], ...], before: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The labels and annotations of a pod that is bound to a node. Those that name its queue stay as they were
    when the scheduler read them; later changes are ignored."""
    keys = _queue_marks()
    kept = {key: value for key, value in before if key in keys}
    return tuple(sorted({**{key: value for key, value in now if key not in keys}, **kept}.items()))


def complete(pod: PodSighting, chain: Chain) -> PodFacts:
    """Adds job and queue to the facts. If only an owner of the pod names a queue, that is the pod's queue."""
    marks = dict(pod.marks)
    wanted: Mapping[str, str] = {**chain.labels, **{key: value for key, value in marks.items() if key in queue_keys()}}
    return structs.replace(
        pod.facts,
        owners=chain.owners,
        workload=job(chain.owners, marks, marks),
        queue_ref=queue_ref(pod.facts.namespace, pod.scheduler, wanted, marks),
    )


def _end(pod: PodObject) -> PodEnd:
    status = pod.status
    return PodEnd(
        pod.spec.scheduler_name,
        [
            StopCondition(one.type, one.reason or "", one.message or "", milliseconds(one.last_transition_time))
            for one in status.conditions or ()
            if one.status == "True"
        ],
        status.phase,
        status.reason or "",
        status.message or "",
        [
            EndedContainer(one.name, end.exit_code, end.reason or "", milliseconds(end.finished_at))
            for one in status.container_statuses or ()
            if (end := one.state.terminated) is not None
        ],
        pod.metadata.deletion_timestamp is not None,
        milliseconds(pod.metadata.deletion_timestamp),
        pod.metadata.deletion_grace_period_seconds or 0,
    )


def _written(meta: Metadata) -> int | None:
    """The time (ms) of the last write by a field manager of the epoch annotation; None if unknown."""
    times = [milliseconds(one.time) for one in meta.managed_fields or () if _EPOCH_FIELD in bytes(one.fields)]
    return max((at for at in times if at is not None), default=None)


def _requests(spec: PodSpec) -> dict[str, str]:
    """GPU resources of the pod: the sum over its containers, or one init container's if that is more."""
    running: dict[str, int] = {}
    most: dict[str, int] = {}
    for container in spec.containers:
        for name, count in _requested(container).items():
            running[name] = running.get(name, 0) + count
    for container in spec.init_containers or ():
        for name, count in _requested(container).items():
            most[name] = max(count, most.get(name, 0))
    return {name: str(max(running.get(name, 0), most.get(name, 0))) for name in sorted({*running, *most})}


def _requested(container: Container) -> dict[str, int]:
    """The container's GPU resources. Limits count as requests. Extended resources have only integers as quantities."""
    quantities = (container.resources.requests, container.resources.limits)
    return {
        name: int(count)
        for requested in quantities
        if requested
        for name, count in requested.items()
        if is_gpu_resource(name) and count.isdigit()
    }


LATE_MS = MS_PER_HOUR
"""For so long after a pod's start its queue may still be determined through its owners, if the pod itself names
none."""


class ObservedPod(PodFacts, frozen=True, kw_only=True):
    """One observer's knowledge of a pod. queue_ms: the instant since which `queue_ref` is fixed; None if it is not."""

    queue_ms: int | None = None


def observed(fact: PodFacts, *, through_owners: bool) -> ObservedPod:
    """One observation of a pod. through_owners: whether the observer also reads the pod's owners. As that takes time,
    the queue of a pod that names none stays open until LATE_MS after the pod was scheduled. The queue of a batch
    system's job is never fixed, because the batch system itself reports it and may correct it."""
    begun = next((at for at in (fact.scheduled_ms, fact.started_ms) if at is not None), None)
    open_ = through_owners and not fact.queue_ref and begun is not None and fact.observed_ms <= begun + LATE_MS
    known = getattr(fact, "queue_ms", None)
    if known is None and begun is not None and not open_ and not is_job_number(fact.uid):
        known = fact.observed_ms
    values = structs.asdict(fact) | {"seq": 0, "queue_ms": known}  # the number belongs to the outbox, not to the pod
    return ObservedPod(**values)


def is_job_number(uid: str) -> bool:
    """Return whether a batch system can have issued the identifier: it begins with a digit and is neither a UUID nor a
    hash (of a static pod, or of a container). Examples: 4711, 4711_3, 1234.server."""
    return uid[:1].isdigit() and _RANDOM.fullmatch(uid) is None


_RANDOM = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{32}|[0-9a-fA-F]{64}")


def merge_observations(one: ObservedPod, other: ObservedPod) -> ObservedPod:
    """Combines two observations of one observer: the newer one, with the queue that was fixed first."""
    newer, older = (one, other) if one.observed_ms > other.observed_ms else (other, one)
    if newer.observed_ms == older.observed_ms:
        newer, older = sorted((one, other), key=_order, reverse=True)
    with_queue = [fact for fact in (newer, older) if fact.queue_ms is not None]
    if not with_queue:
        return newer
    first = min(with_queue, key=lambda fact: (fact.queue_ms, _base(fact.queue_ref), -fact.observed_ms))
    same = [fact for fact in (newer, older) if _base(fact.queue_ref) == _base(first.queue_ref)]
    return structs.replace(newer, queue_ref=same[0].queue_ref, queue_ms=first.queue_ms)


def _base(queue_ref: str) -> str:
    """The reference without the part that an administrator decides."""
    return queue_ref.partition("@")[0]


def _order(fact: ObservedPod) -> tuple[object, ...]:
    """An arbitrary but fixed order of observations with equal times."""
    return repr(structs.replace(fact, queue_ref="", queue_ms=None)), fact.queue_ref
