"""What a scheduler is to the controller: a plug-in that reads the scheduler's objects, and says how a weight is written
into them. `fairshare.targets.weight_plan.Adapter` is the code, and the manifest here says what the code needs.

A scheduler's objects are data of others: an object that cannot be read is named and left out, and stops no other. An
adapter decides nothing about shares. It writes no field but the one that carries the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fairshare.targets.weight_plan import Adapter
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import GPU, MIG, Kind, Object, gpus

SEAM: Final = "gputally.schedulers"


@dataclass(frozen=True, slots=True)
class OwnQueue:
    """A queue of a scheduler, as its own object defines it.

    quota: its guaranteed GPUs; None if the object states none.
    nested: True if it is below another queue.
    refs: the references by which a policy can name the queue."""

    scheduler: str
    name: str
    quota: float | None = None
    nested: bool = False
    refs: Sequence[str] = ()


def no_own_queue(_obj: Object, _parts: MigParts) -> OwnQueue | None:
    """For a scheduler whose queues are no objects."""
    return None


def stated_gpus(resources: object, parts: MigParts) -> float | None:
    """Return the number of GPUs among resources; None if no resource is a GPU."""
    if not isinstance(resources, Mapping) or not any(str(name).startswith((MIG, GPU)) for name in resources):
        return None
    return gpus(resources, parts.anywhere)


@dataclass(frozen=True, slots=True)
class SchedulerPlugin:
    """The manifest of a scheduler.

    name: the scheduler's name in reports, metrics and decisions, also the name of the entry point.
    adapter: makes the adapter. It connects to nothing.
    kinds: the kinds that the adapter and preemption read or write, each with the supported versions, the newest first.
        The first kind is that of the queues: the scheduler is installed if the API server serves it. Empty if the
        scheduler has no objects in the cluster.
    own_queue: returns the queue that an object of the first kind defines; None if it is no queue of users.
    workloads: whether the adapter reads workloads, so that victims can be chosen among them.
    reaches: what it reads, writes and connects to, for the operator.
    page: the page about it."""

    name: str
    adapter: Callable[[], Adapter]
    kinds: tuple[tuple[Kind, ...], ...]
    reaches: str
    page: str
    own_queue: Callable[[Object, MigParts], OwnQueue | None] = no_own_queue
    workloads: bool = True
