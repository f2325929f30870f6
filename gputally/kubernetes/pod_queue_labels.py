"""Finds the scheduler queue of a pod in the pod's labels and annotations, for bills and for shares, and the keys with
which its scheduler reads its gang and its part of a GPU.

The queue decides which team pays, and users write the labels of their pods. A queue label therefore counts only on a
pod that the queue's own scheduler places. Otherwise a user could make another team pay. A scheduler that places no pods
has labels that always count: such a label names a queue of the pod's own namespace, and only an administrator of the
namespace can create one. The manifests of the schedulers say what the labels are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from gputally.kubernetes.scheduler_plugins import (
    PodGangKeys,
    PodJobLabels,
    PodQueueLabels,
    QueueLevels,
    SharedGpuKeys,
    schedulers,
)

ACCOUNTS = "slurm"
"""The prefix of refs to accounts of a cluster without a scheduler in Kubernetes."""
_ACCOUNT_LABELS = PodQueueLabels(
    ("slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account"), frozenset({"slurm-bridge-scheduler"})
)
"""The labels of pods that stand for jobs of a cluster with accounts. Source: Slinky (slurm-bridge) API reference."""


@cache
def _labels() -> tuple[tuple[str, PodQueueLabels], ...]:
    """Return the name of each scheduler whose pods name queues, with their labels; first those that always count."""
    found = [(name, one.pods) for name, one in schedulers().items() if one.pods is not None]
    return tuple(sorted((*found, (ACCOUNTS, _ACCOUNT_LABELS)), key=lambda each: each[1].scheduler_names is not None))


@cache
def queue_keys() -> frozenset[str]:
    """Return the keys of all labels and annotations that name a queue."""
    return frozenset(key for _, labels in _labels() for key in labels.keys)


@cache
def queue_annotation_keys() -> frozenset[str]:
    """Return those of the keys that annotations may have too."""
    return frozenset(key for _, labels in _labels() if labels.scheduler_names is not None for key in labels.keys)


@cache
def placed_by(scheduler: str) -> str:
    """Return the name of the scheduler of a pod with this `schedulerName`, "" for one without known queues."""
    return next((name for name, labels in _labels() if scheduler in (labels.scheduler_names or ())), "")


@cache
def _reservations() -> Mapping[str, str]:
    return {
        namespace: name
        for name, one in schedulers().items()
        if one.shares is not None
        for namespace in one.shares.reservations
    }


def reserved_by(namespace: str) -> str:
    """Return the scheduler for which the pods of a namespace hold GPUs that others share; "" for a usual namespace."""
    return _reservations().get(namespace, "")


@cache
def reserving_schedulers() -> frozenset[str]:
    """Return the schedulers whose pods hold GPUs for others."""
    return frozenset(_reservations().values())


@cache
def gang_keys(placer: str) -> PodGangKeys:
    """Return the keys that count on pods that this scheduler places; "": none places them."""
    plugin = schedulers().get(placer)
    return (plugin.gangs if plugin is not None else None) or PodGangKeys("", "")


@cache
def gang_keys_everywhere() -> tuple[PodGangKeys, ...]:
    """Return the keys of schedulers that place no pods, of which `gang` counts on every pod."""
    found = ((one.gangs, one.pods) for one in schedulers().values())
    return tuple(gangs for gangs, pods in found if gangs is not None and pods and pods.scheduler_names is None)


@dataclass(frozen=True, slots=True)
class GroupsWithQueue:
    """The objects of a scheduler whose `spec.queue` names the queue of a gang's pods.

    paths: of their lists, one for each supported version, the newest first.
    annotation: the annotation with which a pod names its object.
    label: a label that names the queue in the same way."""

    paths: tuple[str, ...]
    annotation: str
    label: str


@cache
def groups_with_queue() -> tuple[GroupsWithQueue, ...]:
    """Return the objects that name the queues of gangs, of each scheduler that has any."""
    return tuple(
        GroupsWithQueue(tuple(kind.path() for kind in versions), one.gangs.gang, one.pods.keys[0])
        for one in schedulers().values()
        if one.gangs is not None and one.gangs.names_queue and one.pods is not None
        for versions in one.kinds
        if versions[0].kind == one.gangs.kind
    )


@dataclass(frozen=True, slots=True)
class LedQueues:
    """The queues of a scheduler that other objects lead (`QueueLevels`).

    keys: the labels with which pods name them.
    queue_paths, …: of the lists of each kind, one for each supported version, the newest first."""

    scheduler: str
    keys: tuple[str, ...]
    levels: QueueLevels
    queue_paths: tuple[str, ...]
    workload_paths: tuple[str, ...]
    leading_paths: tuple[str, ...]
    group_paths: tuple[str, ...]


@cache
def led_queues() -> tuple[LedQueues, ...]:
    """Return the led queues of each scheduler that has any."""
    found = []
    for name, one in schedulers().items():
        if one.levels is not None and one.pods is not None:
            paths = {versions[0].kind: tuple(kind.path() for kind in versions) for versions in one.kinds}
            found.append(LedQueues(name, one.pods.keys, one.levels, *(paths[level.kind] for level in one.levels.each)))
    return tuple(found)


def with_levels(ref: str, leading: str, groups: Sequence[str]) -> str:
    """Return the reference to a pod's queue with what is above it: the queue that leads it after an `@`, then its
    groups, nearest first, each after a `^`."""
    return "^".join((f"{ref}@{leading}", *groups))


def refs_of_levels(queue_ref: str) -> tuple[str, ...]:
    """Return the references by which a policy may name a queue of `with_levels`, the nearest first; the reference
    itself if it has no levels."""
    ref, at, above = queue_ref.partition("@")
    scheduler = ref.partition(":")[0]
    plugin = schedulers().get(scheduler) if at else None
    if plugin is None or plugin.levels is None:
        return (queue_ref,)
    leading, *groups = above.split("^")
    return (ref, f"{scheduler}:{leading}", *(f"{plugin.levels.prefix}:{group}" for group in groups))


@cache
def further_gang_keys() -> tuple[str, ...]:
    """Return the annotations that name a pod's gang only as its job."""
    return tuple(key for one in schedulers().values() if one.gangs is not None for key in one.gangs.further)


@cache
def job_labels() -> tuple[PodJobLabels, ...]:
    """Return how pods name jobs of schedulers."""
    return tuple(one.jobs for one in schedulers().values() if one.jobs is not None)


@cache
def gang_kinds() -> frozenset[str]:
    """Return the kinds of the objects that stand for gangs."""
    return frozenset(one.gangs.kind for one in schedulers().values() if one.gangs is not None)


@cache
def shard_labels() -> tuple[str, ...]:
    """Return the labels of nodes by which schedulers divide a cluster."""
    return tuple(one.shard_label for one in schedulers().values() if one.shard_label)


@cache
def all_shared_gpu_keys() -> tuple[SharedGpuKeys, ...]:
    """Return how pods request parts of GPUs, whichever scheduler places them."""
    return tuple(one.shares for one in schedulers().values() if one.shares is not None)


@cache
def sharing_keys() -> frozenset[str]:
    """Return the keys of all annotations with which pods request parts of GPUs."""
    return frozenset(key for one in all_shared_gpu_keys() for key in (one.fraction, one.memory, one.devices))


@cache
def shared_gpu_keys(placer: str) -> SharedGpuKeys | None:
    """Return how pods that this scheduler places request parts of GPUs; None if they cannot."""
    plugin = schedulers().get(placer)
    return plugin.shares if plugin is not None else None


@cache
def declaring_keys(placer: str) -> SharedGpuKeys:
    """Return the keys under which the part of a pod is told that this scheduler places: its own, or else those of the
    first scheduler that has any; "": none has any."""
    return shared_gpu_keys(placer) or next(iter(all_shared_gpu_keys()), SharedGpuKeys("", "", ""))


def declared_part(requests: Mapping[str, str]) -> tuple[str, str]:
    """Return (fraction, memory in MiB) that a pod's requests declare; "" for what they do not."""
    every = all_shared_gpu_keys()
    fraction = next((requests[keys.fraction] for keys in every if requests.get(keys.fraction)), "")
    return fraction, next((requests[keys.memory] for keys in every if requests.get(keys.memory)), "")


def queue_ref(
    namespace: str, scheduler: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> str:
    """Return a pod's queue in the form of `agent.wire.PodFacts.queue_ref`, or "" if no label counts.

    scheduler: the pod's `schedulerName`. A label takes precedence over an annotation with the same key."""
    metadata: Mapping[str, str] | None = None
    for name, known in _labels():
        if known.scheduler_names is None:
            if local_queue := next((labels[key] for key in known.keys if labels.get(key)), ""):
                return f"{name}:{namespace}/{local_queue}"
        elif scheduler in known.scheduler_names:
            metadata = metadata if metadata is not None else {**(annotations or {}), **labels}
            if queue := next((metadata[key] for key in known.keys if metadata.get(key)), ""):
                return f"{name}:{queue}"
    return ""
