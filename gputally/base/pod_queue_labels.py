"""Reads from a pod's labels which scheduler queue it was sent to, for bills and for shares.

Users write the labels of their pods, and the queue decides which team pays. A queue therefore counts only on a pod that
the queue's own scheduler places. Otherwise a user could let another team pay. Kueue places no pods. Its label names a
LocalQueue of the pod's own namespace, and only an administrator of the namespace can create one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESERVATION_NAMESPACES = frozenset({"kai-resource-reservation", "runai-reservation"})
"""Namespaces whose pods hold GPUs for those that share them. Source: KAI Scheduler and Run:ai, GPU sharing."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How one scheduler's pods name their queue.

    schedulers: names under which the scheduler places pods.
    keys: labels or annotations, the newest first."""

    name: str
    schedulers: frozenset[str]
    keys: tuple[str, ...]


# Sources: kai-scheduler pkg/common/constants; Volcano and Slinky (slurm-bridge) API references.
_SCHEMES = (
    _Scheme("kai", frozenset({"kai-scheduler", "runai-scheduler"}), ("kai.scheduler/queue", "runai/queue")),
    _Scheme("volcano", frozenset({"volcano"}), ("scheduling.volcano.sh/queue-name", "volcano.sh/queue-name")),
    _Scheme(
        "slurm",
        frozenset({"slurm-bridge-scheduler"}),
        ("slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account"),
    ),
)
QUEUE_KEYS = frozenset({KUEUE_QUEUE, *(key for scheme in _SCHEMES for key in scheme.keys)})
"""Labels and annotations that may name a queue."""


def placed_by(scheduler: str) -> str:
    """Return `kai`, `volcano` or `slurm` for a pod's `schedulerName`, "" for a scheduler without known queues."""
    return next((scheme.name for scheme in _SCHEMES if scheduler in scheme.schedulers), "")


def queue_ref(
    namespace: str, scheduler: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> str:
    """Return the queue a pod was sent to, as in `agent.wire.PodFacts`, or "" if no label counts.

    scheduler: the pod's `schedulerName`. A label takes precedence over an annotation with the same key."""
    if local := labels.get(KUEUE_QUEUE):
        return f"kueue:{namespace}/{local}"
    written = {**(annotations or {}), **labels}
    for scheme in _SCHEMES:
        named = next((written[key] for key in scheme.keys if written.get(key)), "")
        if named and scheduler in scheme.schedulers:
            return f"{scheme.name}:{named}"
    return ""
