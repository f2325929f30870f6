"""A pod of the API server as facts: trimmed to those that ask for a GPU. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from accountant.inventory import workloads
from accountant.inventory.kube import Container, Metadata, Pod, PodSpec, milliseconds
from accountant.inventory.owners import Chain, Ref, nearest
from accountant.inventory.teams import USER_KEY
from accountant.progress import EPOCH_KEY
from agent.queues import KUEUE_QUEUE, QUEUE_KEYS, queue_ref
from agent.wire import PodFacts

GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/", "habana.ai/gaudi")
"""Beginnings of the names of resources that are GPUs or parts of one."""
GPU_ANNOTATIONS = frozenset({"gpu-fraction", "gpu-memory", "gpu-fraction-num-devices"})
"""By which KAI's pods ask for a part of a GPU; they may stand among the labels too."""
_ENDED = frozenset({"Succeeded", "Failed"})
_MARKS = frozenset(mark.label for mark in workloads.MARKS) | {
    "pod-template-hash", "workloadKind", "workloadName", "ray.io/originated-from-crd", "ray.io/originated-from-cr-name",
}  # fmt: skip
_LONGEST_USER = 253
_LONGEST_EPOCH = 64
_EPOCH_FIELD = f'"f:{EPOCH_KEY}"'.encode()
GROUP_KEYS = ("pod-group-name", "scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
"""Annotations that name a pod's PodGroup: KAI's, Volcano's older and newer one."""
_NOTES = frozenset(GROUP_KEYS) | QUEUE_KEYS - {KUEUE_QUEUE}  # of the annotations; Kueue reads its label alone
_QUEUE_MARKS = frozenset(GROUP_KEYS) | QUEUE_KEYS


@dataclass(frozen=True, slots=True)
class Sighted:
    """What is held of a GPU pod: its facts without its chain, and where that begins."""

    facts: PodFacts
    owner: Ref | None
    scheduler: str
    marks: tuple[tuple[str, str], ...]
    """Labels and annotations that may name its job or its queue."""
    epoch: str = ""
    """What its annotation says of its job's progress (accountant.progress)."""
    epoch_ms: int | None = None
    """By when it said so at the latest, as the API server knows; None where it does not."""


def is_gpu_resource(name: str) -> bool:
    return name.startswith(GPU_RESOURCES)


def sighted(pod: Pod, now_ms: int, team_labels: Collection[str] = (), user_keys: Sequence[str] = ()) -> Sighted | None:
    """None for a pod that asks for no GPU. team_labels: labels that some namespace lets name a team; of the
    others nothing is kept. user_keys: further labels and annotations that name who runs it, best first."""
    meta, spec, status = pod.metadata, pod.spec, pod.status
    labels, annotations = meta.labels or {}, meta.annotations or {}
    requests = _requests(spec)
    claimed = bool(spec.resource_claims) or bool(GPU_ANNOTATIONS & (labels.keys() | annotations.keys()))
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
        labels={key: labels[key] for key in sorted(team_labels) if key in labels}
        | ({USER_KEY: user[:_LONGEST_USER]} if user else {}),
        priority=spec.priority,
        requests=requests,
        created_ms=milliseconds(meta.creation_timestamp),
        scheduled_ms=milliseconds(scheduled.last_transition_time) if scheduled else None,
        started_ms=min(started, default=None),
        ended_ms=max(finished, default=None) if status.phase in _ENDED else None,
        observed_ms=now_ms,
    )
    kept = {key: value for key, value in annotations.items() if key in _NOTES}
    kept |= {key: value for key, value in labels.items() if key in _MARKS | QUEUE_KEYS}
    owner = nearest(meta.owner_references, meta.namespace)
    told = annotations.get(EPOCH_KEY, "")[:_LONGEST_EPOCH]
    return Sighted(
        facts, owner, spec.scheduler_name, tuple(sorted(kept.items())), told, _written(meta) if told else None
    )


def as_placed(now: tuple[tuple[str, str], ...], before: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The marks of a pod that has its node: what names its queue is what the scheduler read, whatever came later."""
    kept = {key: value for key, value in before if key in _QUEUE_MARKS}
    return tuple(sorted({**{key: value for key, value in now if key not in _QUEUE_MARKS}, **kept}.items()))


def complete(pod: Sighted, chain: Chain) -> PodFacts:
    """The facts with job and queue. A queue that only an owner names counts as the pod's own."""
    marks = dict(pod.marks)
    wanted: Mapping[str, str] = {**chain.labels, **{key: value for key, value in marks.items() if key in QUEUE_KEYS}}
    return structs.replace(
        pod.facts,
        owners=chain.owners,
        workload=workloads.job(chain.owners, marks, marks),
        queue_ref=queue_ref(pod.facts.namespace, pod.scheduler, wanted, marks),
    )


def _written(meta: Metadata) -> int | None:
    """When whoever wrote the epoch last changed something of his; of several writers the last."""
    times = [milliseconds(one.time) for one in meta.managed_fields or () if _EPOCH_FIELD in bytes(one.fields)]
    return max((at for at in times if at is not None), default=None)


def _requests(spec: PodSpec) -> dict[str, str]:
    """GPU resources of the pod: the sum over its containers, or one init container's if that is more."""
    running: dict[str, int] = {}
    most: dict[str, int] = {}
    for container in spec.containers:
        for name, count in _asked(container).items():
            running[name] = running.get(name, 0) + count
    for container in spec.init_containers or ():
        for name, count in _asked(container).items():
            most[name] = max(count, most.get(name, 0))
    return {name: str(max(running.get(name, 0), most.get(name, 0))) for name in sorted({*running, *most})}


def _asked(container: Container) -> dict[str, int]:
    """Whole numbers only: extended resources have no others. Limits are requests too."""
    told = (container.resources.requests, container.resources.limits)
    return {
        name: int(count)
        for asked in told
        if asked
        for name, count in asked.items()
        if is_gpu_resource(name) and count.isdigit()
    }
