"""What the demo needs to play the programs of a scheduler: the objects and texts that they write in a real cluster. A
manifest names the class of its player (`SchedulerPlugin.player`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from accountant.wire.policy_models import QueuePolicy
from gputally.kubernetes.objects import GPU, Kind, Object


class QueueInReclaim(Protocol):
    """A queue as the scheduler compared it with another one: the GPUs that it holds, its quota and its fair share."""

    @property
    def name(self) -> str: ...
    @property
    def held(self) -> float: ...
    @property
    def quota(self) -> float: ...
    @property
    def share(self) -> float: ...
    @property
    def priority(self) -> int: ...


class SchedulerPlayer(ABC):
    """Plays a scheduler whose queues are objects of the cluster, with their GPUs in the status. It is made without
    arguments, and writes nothing.

    kinds: its kinds; the first is that of the queues."""

    kinds: tuple[Kind, ...]

    @abstractmethod
    def settings(self) -> Object:
        """Return the object by which the scheduler divides by weights alone."""

    @abstractmethod
    def queue_spec(self, queue: QueuePolicy, weight: float) -> Mapping[str, Any]:
        """Return the spec of a queue's object. weight: its present weight."""

    @abstractmethod
    def weight(self, queue: Object) -> float:
        """Return the weight in a queue's object."""

    @abstractmethod
    def queue_status(self, requested: float, allocated: float, not_preemptible: float) -> Mapping[str, Any]:
        """Return the status of a queue's object. not_preemptible: the allocated GPUs that cannot be taken."""

    def reclaim_message(self, pod: str, claimant: str, _compared: Sequence[QueueInReclaim], /) -> str:
        """Return what the scheduler writes on a pod whose GPUs it takes.

        pod, claimant: each as NAMESPACE/NAME.
        compared: the queue that loses GPUs and the one that claimed them."""
        return f"Pod {pod} was preempted by workload {claimant}."


def amount(gpus: float) -> dict[str, str]:
    """Return GPUs as an amount of resources."""
    return {GPU: str(gpus)}
