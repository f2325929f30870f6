"""Finds the scheduler queue of a pod in the pod's labels and annotations, for bills and for shares.

The queue decides which team pays, and users write the labels of their pods. A queue label therefore counts only on a
pod that the queue's own scheduler places. Otherwise a user could make another team pay. A scheduler that places no pods
has labels that always count: such a label names a queue of the pod's own namespace, and only an administrator of the
namespace can create one. The manifests of the schedulers say what the labels are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gputally.kubernetes.scheduler_plugins import PodQueueLabels, schedulers

RESERVATION_NAMESPACES = frozenset({"kai-resource-reservation", "runai-reservation"})
"""Namespaces whose pods hold GPUs for those that share them. Source: KAI Scheduler and Run:ai, GPU sharing."""
_ACCOUNTS = PodQueueLabels(
    ("slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account"), frozenset({"slurm-bridge-scheduler"})
)
"""The labels of pods that stand for jobs of a cluster with accounts. Source: Slinky (slurm-bridge) API reference."""


@cache
def _labels() -> tuple[tuple[str, PodQueueLabels], ...]:
    """Return the name of each scheduler whose pods name queues, with their labels; first those that always count."""
    found = [(name, one.pods) for name, one in schedulers().items() if one.pods is not None]
    return tuple(sorted((*found, ("slurm", _ACCOUNTS)), key=lambda each: each[1].scheduler_names is not None))


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
    """Return the scheduler (`kai`) of a pod with this `schedulerName`, "" for one without known queues."""
    return next((name for name, labels in _labels() if scheduler in (labels.scheduler_names or ())), "")


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
