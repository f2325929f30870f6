"""Demand: what every queue asks for and holds, as gangs. Pure.

A scheduler's own objects say what starts together (PodGroup, Workload); pods say what runs. Where both are
there, allocation is what the pods hold; a gang without pods yet asks for what its object says. Pods that no
object groups are gangs by their controller, or one by one, in the queue that `gputally.dev/queue` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum

from accountant.wire import Policy
from fairshare.kube.kinds import POD, Kind
from fairshare.kube.mapping import sum_up
from fairshare.kube.pods import LABELLED, checkpoint
from fairshare.model import Gang, Pod, Standing


def by_gang(pods: Iterable[Pod]) -> dict[str, tuple[Pod, ...]]:
    """Pods by what groups them, oldest first; those alone are left out. A pod on its way out neither holds nor asks:
    a group of which nothing else is left has none."""
    groups: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.gang:
            group = groups.setdefault(pod.gang, [])
            if not pod.leaving:
                group.append(pod)
    return {gang: tuple(sorted(found, key=_age)) for gang, found in groups.items()}


def with_pods(gang: Gang, pods: Sequence[Pod], least: int | None = None) -> Gang:
    """The gang as its pods show it. least: pods without which it does not run; None: what the object said."""
    if not pods:
        return gang
    held = fsum(pod.gpus for pod in pods if pod.held)
    asked = max(gang.requested, fsum(pod.gpus for pod in pods))
    smallest = sorted(pod.gpus for pod in pods)
    minimum = gang.minimum if least is None else fsum(smallest[: max(1, least)])
    starts = [pod.started_ms for pod in pods if pod.held and pod.started_ms is not None]
    return replace(
        gang,
        requested=asked,
        allocated=held,
        minimum=min(asked, max(minimum, smallest[0])),
        started_ms=max(starts, default=gang.started_ms) if held > 0 else None,
        checkpoint_ms=gang.checkpoint_ms if gang.checkpoint_ms is not None else checkpoint(pods),
        preemptible=gang.preemptible and all(pod.disruptable for pod in pods),
        pods=tuple(pods),
    )


def labelled(policy: Policy, pods: Iterable[Pod]) -> tuple[Gang, ...]:
    """Gangs of pods that name a queue of the policy by label, under no scheduler's queue."""
    queue_of = queue_namer(policy)
    groups: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        queue = queue_of(pod) if pod.ref.startswith(f"{LABELLED}:") else None
        if queue is not None and not pod.gated and not pod.leaving:
            groups.setdefault((queue, pod.gang or f"Pod/{pod.namespace}/{pod.name}"), []).append(pod)
    gangs = []
    for (queue, key), found in sorted(groups.items()):
        found.sort(key=_age)
        kind, namespace, name = key.split("/", 2)
        asked = fsum(pod.gpus for pod in found)
        # A label says that pods start together; a mere controller's pods each start on their own.
        together = kind in ("Gang", "Pod", "PodGroup", "Workload")
        blank = Gang(
            queue,
            POD if kind == "Pod" else Kind("", kind, ""),
            namespace,
            name,
            found[0].uid if kind == "Pod" else "",
            asked,
            0.0,
            asked,
            priority=max(pod.priority for pod in found),
            created_ms=min((pod.created_ms for pod in found if pod.created_ms is not None), default=None),
        )
        gangs.append(with_pods(blank, found, None if together else 1))
    return in_order(gangs)


def queue_namer(policy: Policy) -> Callable[[Pod], str | None]:
    """The queue of the policy to which a pod belongs by its own word."""
    owner = {ref: queue.name for queue in policy.queues for ref in queue.refs}
    names = {queue.name for queue in policy.queues}

    def queue_of(pod: Pod) -> str | None:
        prefix, _, label = pod.ref.partition(":")
        return owner.get(pod.ref) or (label if prefix == LABELLED and label in names else None)

    return queue_of


def in_order(gangs: Iterable[Gang]) -> tuple[Gang, ...]:
    return tuple(sorted(gangs, key=lambda gang: (gang.queue, gang.namespace, gang.name, gang.uid)))


def amounts(policy: Policy, gangs: Iterable[Gang]) -> Mapping[str, Standing]:
    """Requested and allocated GPUs of every queue that has a gang, descendants included."""
    requested: dict[str, float] = {}
    allocated: dict[str, float] = {}
    for gang in gangs:
        requested[gang.queue] = requested.get(gang.queue, 0.0) + gang.requested
        allocated[gang.queue] = allocated.get(gang.queue, 0.0) + gang.allocated
    asked, held = sum_up(policy, requested), sum_up(policy, allocated)
    return {queue: Standing(asked[queue], held[queue]) for queue in asked}


def smallest_waiting(gangs: Iterable[Gang]) -> Mapping[str, float]:
    """GPUs of the smallest gang that waits in each queue; queues where none waits are left out."""
    least: dict[str, float] = {}
    for gang in gangs:
        if gang.waits > 0:
            least[gang.queue] = min(least.get(gang.queue, gang.minimum), gang.minimum)
    return least


def _age(pod: Pod) -> tuple[int, str]:
    return pod.created_ms or 0, pod.name
