"""Finds the scheduler queue of a pod in the pod's labels and annotations, for bills and for shares.

The queue decides which team pays, and users write the labels of their pods. A queue label therefore counts only on a
pod that the queue's own scheduler places. Otherwise a user could make another team pay. Kueue places no pods, so its
label always counts: the label names a LocalQueue of the pod's own namespace, and only an administrator of the namespace
can create one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESERVATION_NAMESPACES = frozenset({"kai-resource-reservation", "runai-reservation"})
"""Namespaces whose pods hold GPUs for those that share them. Source: KAI Scheduler and Run:ai, GPU sharing."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, slots=True)
class _QueueLabels:
    """The labels and annotations with which the pods of one scheduler name their queue.

    name: the prefix of a queue reference.
    schedulers: values of `schedulerName` that select the scheduler.
    keys: keys of the labels and annotations, the newest first."""

    name: str
    schedulers: frozenset[str]
    keys: tuple[str, ...]


# Sources: kai-scheduler pkg/common/constants; Volcano and Slinky (slurm-bridge) API references.
_SCHEDULERS = (
    _QueueLabels("kai", frozenset({"kai-scheduler", "runai-scheduler"}), ("kai.scheduler/queue", "runai/queue")),
    _QueueLabels("volcano", frozenset({"volcano"}), ("scheduling.volcano.sh/queue-name", "volcano.sh/queue-name")),
    _QueueLabels(
        "slurm",
        frozenset({"slurm-bridge-scheduler"}),
        ("slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account"),
    ),
)
QUEUE_KEYS = frozenset({KUEUE_QUEUE, *(key for labels in _SCHEDULERS for key in labels.keys)})
"""Keys of all labels and annotations that name a queue."""


def placed_by(scheduler: str) -> str:
    """Return `kai`, `volcano` or `slurm` for a pod's `schedulerName`, "" for a scheduler without known queues."""
    return next((known.name for known in _SCHEDULERS if scheduler in known.schedulers), "")


def queue_ref(
    namespace: str, scheduler: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> str:
    """Return a pod's queue in the form of `agent.wire.PodFacts.queue_ref`, or "" if no label counts.

    scheduler: the pod's `schedulerName`. A label takes precedence over an annotation with the same key."""
    if local_queue := labels.get(KUEUE_QUEUE):
        return f"kueue:{namespace}/{local_queue}"
    metadata = {**(annotations or {}), **labels}
    for known in _SCHEDULERS:
        queue = next((metadata[key] for key in known.keys if metadata.get(key)), "")
        if queue and scheduler in known.schedulers:
            return f"{known.name}:{queue}"
    return ""
