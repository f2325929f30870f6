"""What a scheduler gets that asks the controller while it decides: the pods and shares as they are now, and a port for
its requests.

The adapter of such a scheduler names a class (`Adapter.extender`). The controller makes it once, with the function that
returns the latest view, and serves its routes on the port of the setting `extender_listen`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

from fairshare.core.queues_and_weights import Condition, Pod
from fairshare.targets.pod_index import NO_SIDES, NodePods, PodIndex, Sides
from gputally.base.clock import Clock

TOLERANCE: Final = 1e-9
"""GPUs by which sums of parts may differ."""
MOST_BYTES: Final = 32 * 1024 * 1024
"""The size of a request's body."""


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The GPUs that a queue holds, and the GPUs that it is due."""

    allocated: float
    due: float

    def exceeded(self, more: float = 0.0) -> bool:
        """Return whether the queue would hold more than it is due with `more` additional GPUs."""
        return self.allocated + more > self.due + TOLERANCE


SharesFor = Callable[[Pod], Mapping[str, QueueShare]]
SharesOn = Callable[[str], Mapping[str, QueueShare]]


@dataclass(frozen=True, slots=True)
class ExtenderView:
    """The state of the cluster from which the extender answers.

    gpus: allocatable GPUs by node.
    pods: the pods that the watch shows.
    shares: by queue.
    queues: the policy queue of each reference.
    sides: which queues are above their share.
    shares_for: returns shares that include the request of a pod that the cycle did not know; None if `shares` apply to
        every pod.
    assumed: by node, its pods together with those that are assumed there.
    shares_on: returns for a pod a function that returns the shares of the GPU model of a node; None if the policy has
        no quotas by model."""

    gpus: Mapping[str, float]
    pods: PodIndex
    shares: Mapping[str, QueueShare] = field(default_factory=dict)
    queues: Mapping[str, str] = field(default_factory=dict)
    sides: Sides = NO_SIDES
    shares_for: SharesFor | None = None
    assumed: Mapping[str, NodePods] = field(default_factory=dict)
    shares_on: Callable[[Pod], SharesOn] | None = None

    def for_request(self, pod: Pod) -> ExtenderView:
        """Return the view for a request about this pod."""
        if not self.shares or self.shares_for is None:
            return self
        return replace(self, shares=self.shares_for(pod), shares_for=None)

    def share_of(self, pod: Pod) -> QueueShare | None:
        """Return the share of the pod's queue; None if queue or share are unknown."""
        queue = self.queues.get(pod.ref)
        return self.shares.get(queue) if queue is not None else None


def sides_of(shares: Mapping[str, QueueShare], queues: Mapping[str, str]) -> Sides:
    """Return which references are to queues above their share, and which to queues within it.

    queues: by reference."""
    over: set[str] = set()
    within: set[str] = set()
    for ref, queue in queues.items():
        share = shares.get(queue)
        if share is not None:
            (over if share.exceeded() else within).add(ref)
    return Sides(frozenset(over), frozenset(within))


class BadRequest(ValueError):
    """The request is not one of the scheduler. The message is one line."""


@dataclass(frozen=True, slots=True)
class ExtenderAnswer:
    """An answer to the scheduler, which msgspec encodes. late: whether it was ready only after the deadline."""

    body: Any
    late: bool = False


class Extender(Protocol):
    """Answers the requests of a scheduler from memory. Thread-safe.

    remedy: the scheduler's configuration with which it asks."""

    remedy: ClassVar[str]

    def __init__(
        self, view: Callable[[], ExtenderView | None], clock: Clock, *, with_claims: Callable[[Pod], Pod]
    ) -> None:
        """view: returns the latest view; None while there is none.
        with_claims: returns a pod with the GPUs of its ResourceClaims."""

    @property
    def routes(self) -> Mapping[str, Callable[[bytes], ExtenderAnswer]]:
        """What answers the body of a POST request, by path. It raises BadRequest, and must not wait: it is called on
        the event loop."""
        ...

    def acts(self) -> Condition:
        """Return the condition `Effective` of the scheduler's target: whether it asks."""
        ...
