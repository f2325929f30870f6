"""Reads from a pod's status by whom and why the pod was stopped.

A pod's author writes its labels and annotations, but not its status: only the programs of the cluster write that. A
scheduler that takes a pod's GPUs, and everything that evicts a pod, sets the condition `DisruptionTarget` before the
pod is deleted. A scheduler may have a condition of its own (`SchedulerPlugin.stop_condition`). A pod that is deleted
without such a condition was deleted by a person or by its own controller.

Sources: kubernetes.io, "Disruptions" (pod disruption conditions) and "Pod Lifecycle"; k8s.io/api/core/v1/types.go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from gputally.base.pod_stop import DELETED, EVICTED, FAILED, PREEMPTED, PodStop, bounded
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.kubernetes.scheduler_plugins import schedulers

DISRUPTION: Final = "DisruptionTarget"
PREEMPTION: Final = "PreemptionByScheduler"
"""The reason of `DisruptionTarget` with which a scheduler takes the GPUs of a pod for others."""
_FOR_OTHERS: Final = ": preempting to accommodate "
"""Follows the name of the scheduler in the message of Kubernetes' own one, which also preempts pods of others."""
_EVICTORS: Final = {
    "DeletionByTaintManager": "taint manager",
    "EvictionByEvictionAPI": "eviction API",
    "DeletionByPodGC": "pod garbage collector",
    "TerminationByKubelet": "kubelet",
}
"""Who evicts a pod with which reason."""

_CLOCKS_DIFFER_MS: Final = MS_PER_MINUTE
"""The clocks of a node and of the programs of the cluster differ by less."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """A condition of a pod. at_ms: when it became true; None if unknown."""

    type: str
    reason: str = ""
    message: str = ""
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class EndedContainer:
    """A container that has ended. reason: of its runtime, such as `OOMKilled`. at_ms: when; None if unknown."""

    name: str
    exit_code: int
    reason: str = ""
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PodEnd:
    """What a pod's status says about its end.

    scheduler: the name of the scheduler that its author wants.
    conditions: those that are true.
    phase, reason, message: of the status; the kubelet writes a reason if it ends a pod itself.
    ended: its containers that have ended.
    is_deleted: whether it is being deleted.
    until_ms: the end of its grace period then; None if unknown.
    grace_s: the length of that period, of any size: its author chooses it."""

    scheduler: str
    conditions: Iterable[StopCondition]
    phase: str
    reason: str
    message: str
    ended: Sequence[EndedContainer]
    is_deleted: bool
    until_ms: int | None
    grace_s: int

    @property
    def deleted_ms(self) -> int | None:
        """Since when it is being deleted; None if unknown: the API server adds the period to its clock, and a very long
        one overflows."""
        since_ms = -1 if self.until_ms is None else self.until_ms - self.grace_s * MS_PER_SECOND
        return since_ms if since_ms > 0 else None

    @property
    def over_ms(self) -> int | None:
        """When the last of its containers ended; None if unknown."""
        return max((one.at_ms for one in self.ended if one.at_ms is not None), default=None)


@cache
def stop_conditions() -> dict[str, str]:
    """Return the schedulers by the types of the conditions with which they alone stop pods."""
    return {one.stop_condition: name for name, one in schedulers().items() if one.stop_condition}


def stop_of(pod: PodEnd) -> PodStop | None:
    """Return why the pod was stopped; None if it was not, or ended by itself and well."""
    stop = _disrupted(pod) or _failed(pod)
    if stop is None and pod.is_deleted:
        stop = PodStop(DELETED, at_ms=pod.deleted_ms)
    if stop is None or (pod.phase == "Succeeded" and not _obeyed(pod, stop)):
        return None
    return bounded(stop)


def _obeyed(pod: PodEnd, stop: PodStop) -> bool:
    """Whether a pod that ended well ended because it was told to, as one does that saves its work first.

    Times are whole seconds. Within the same one, a pod is deleted by its controller after it ended, and evicted
    before."""
    if pod.over_ms is None or pod.deleted_ms is None:
        return False
    return pod.over_ms > pod.deleted_ms or (stop.how != DELETED and pod.over_ms == pod.deleted_ms)


def _disrupted(pod: PodEnd) -> PodStop | None:
    """The first of its conditions that says who stops the pod. One that it got after it had failed does not."""
    found = []
    failed_ms = pod.over_ms if pod.phase == "Failed" else None
    for one in pod.conditions:
        if failed_ms is not None and one.at_ms is not None and one.at_ms > failed_ms + _CLOCKS_DIFFER_MS:
            continue
        own = stop_conditions().get(one.type)
        if own is not None:
            found.append(PodStop(EVICTED, own, one.reason, one.message, one.at_ms))
        elif one.type == DISRUPTION and one.reason == PREEMPTION:
            scheduler, named, _ = one.message.partition(_FOR_OTHERS)
            found.append(PodStop(PREEMPTED, scheduler if named else pod.scheduler, one.reason, one.message, one.at_ms))
        elif one.type == DISRUPTION:
            found.append(PodStop(EVICTED, _EVICTORS.get(one.reason, ""), one.reason, one.message, one.at_ms))
    return min(found, key=lambda stop: (stop.at_ms is None, stop.at_ms or 0, stop.how), default=None)


def _failed(pod: PodEnd) -> PodStop | None:
    """A container's error, or what the kubelet says about a pod that it ended. An error after the pod was deleted is
    how its containers obeyed."""
    if pod.phase != "Failed":
        return None
    if pod.reason:
        return PodStop(EVICTED, "kubelet", pod.reason, pod.message)
    errors = [one for one in pod.ended if one.exit_code]
    first = min(errors, key=lambda one: (one.at_ms is None, one.at_ms or 0), default=None)
    if first is None:
        return None
    if pod.is_deleted and (first.at_ms is None or pod.deleted_ms is None or first.at_ms >= pod.deleted_ms):
        return None
    message = f"container {first.name} ended with exit code {first.exit_code}"
    return PodStop(FAILED, "", first.reason, message, first.at_ms)
