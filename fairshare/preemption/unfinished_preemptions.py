"""Finishes preemptions, which an earlier cycle or a person began, of workloads that are stopped through their objects.

`fairshare.targets.whole_stop` says what a step is. All objects are checked in every cycle, or every five minutes while
the controller stops no workload and has nothing to finish. A crash therefore loses no intent.

Preemptions are finished even if usage is unknown, or if preemption or the target has been switched off since, because a
stopped workload must run again. This module begins no preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fairshare.core.gpu_demand import gang_key
from fairshare.core.queues_and_weights import Condition
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.targets.installed import adapters, whole_stop
from fairshare.targets.weight_plan import FIELD_MANAGER, list_if_served
from fairshare.targets.whole_stop import ASKED_AGAIN, GIVEN_UP, WholeStop, read_intent
from gputally.base.errors import ClusterError
from gputally.base.units import MS_PER_MINUTE
from gputally.kubernetes.objects import Cluster, Event, Kind, Object


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The result of one step towards finishing a preemption.

    name: namespace/name of the workload.
    detail: the cluster's message if the step failed."""

    name: str
    action: str
    detail: str = ""
    uid: str = ""


def resume(
    cluster: Cluster, kind: Kind, objects: Sequence[Object], commands: Sequence[Object], now_ms: int
) -> Iterator[FinishedStep]:
    """Take the next step for every intent among `objects`, one at a time while the result is iterated.

    commands: the commands on which the scheduler has not acted yet."""
    stop = whole_stop(kind)
    for obj in objects:
        intent = read_intent(obj)
        step = stop.next_step(obj, intent, commands, now_ms) if stop is not None and intent is not None else None
        if step is None:
            continue
        name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
        uid = str(obj["metadata"].get("uid", ""))
        try:
            if step.command is not None:
                cluster.create(step.command, field_manager=FIELD_MANAGER)  # first: a refused one is no attempt
            change = {**step.change, "metadata": {"uid": obj["metadata"].get("uid"), **step.change["metadata"]}}
            cluster.patch(kind, name, namespace, change, field_manager=FIELD_MANAGER)
        except ClusterError as error:
            yield FinishedStep(f"{namespace}/{name}", step.action, str(error), uid)
        else:
            yield FinishedStep(f"{namespace}/{name}", step.action, uid=uid)


SELDOM_MS: Final = 5 * MS_PER_MINUTE
"""Time between two checks of all objects if the controller itself stops no workload. A person may still stop some
(`gputally fairshare preempt`)."""
NOT_RESUMED = "NotResumed"


@dataclass(frozen=True, slots=True)
class FinishedPreemptions:
    """The result of finishing preemptions. Workloads are named by namespace/name.

    resumed: workloads that may run again.
    left: workloads that are still being stopped.
    keys: all workloads with a preemption that was not finished before, as `Gang.key`.
    events: one for each preemption that failed for good, because the scheduler did not stop the workload.
    faults: the preemptions that could not be finished yet, and why."""

    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def condition(self) -> Condition | None:
        """Return the condition `Resumed`, which is False; None without faults."""
        return Condition("Resumed", "False", NOT_RESUMED, join_texts(self.faults)) if self.faults else None

    def lines(self) -> tuple[str, ...]:
        """Return one line for each workload, failed preemption and fault, for a person."""
        return (
            *(f"{name} was preempted and may run again" for name in self.resumed),
            *(f"{name} is still being stopped: run `release` again in a minute" for name in self.left),
            *(f"{event.namespace}/{event.name}: {event.message}" for event in self.events),
            *(f"a preemption is not finished: {fault}" for fault in self.faults),
        )


def finish_all(cluster: Cluster, now_ms: int) -> FinishedPreemptions:
    """Finish the preemptions of every target once, before a person switches the controller off.

    Raises ClusterError."""
    stops = [adapter.stop for adapter in adapters() if adapter.stop is not None]
    results = [_finish(cluster, stop, now_ms, lambda: True)[1] for stop in stops]
    return FinishedPreemptions(
        tuple(name for result in results for name in result.resumed),
        tuple(name for result in results for name in result.left),
        tuple(event for result in results for event in result.events),
        tuple(fault for result in results for fault in result.faults),
    )


def unfinished_keys(cluster: Cluster, target: str) -> frozenset[str]:
    """Return the workloads of a target whose preemption is not finished, as `Gang.key`. Raises ClusterError."""
    stop = next((adapter.stop for adapter in adapters() if adapter.name == target), None)
    kinds = stop.kinds if stop is not None else ()
    return frozenset(
        gang_key(obj) for kind in kinds for obj in list_if_served(cluster, kind) if read_intent(obj) is not None
    )


class PreemptionFinisher:
    """Finishes the preemptions that an earlier cycle or a person began, for one controller. Not thread-safe."""

    def __init__(self) -> None:
        self._next_ms: dict[str, int] = {}

    def finish(
        self, cluster: Cluster, target: str, now_ms: int, *, enforces: bool, leading: Callable[[], bool]
    ) -> FinishedPreemptions:
        """Finish the preemptions of one target.

        enforces: whether the target's preemption stops workloads now, so that new intents are possible in every
            cycle."""
        stop = next((adapter.stop for adapter in adapters() if adapter.name == target), None)
        if stop is None or (not enforces and now_ms < self._next_ms.get(target, now_ms)):
            return FinishedPreemptions()
        try:
            unfinished, result = _finish(cluster, stop, now_ms, leading)
        except ClusterError as error:
            return FinishedPreemptions(faults=(str(error),))
        self._next_ms[target] = now_ms + (0 if unfinished else SELDOM_MS)
        return result


def _finish(
    cluster: Cluster, stop: WholeStop, now_ms: int, leading: Callable[[], bool]
) -> tuple[bool, FinishedPreemptions]:
    """Return whether there was anything to finish, and the result."""
    for kind in stop.kinds:
        unfinished = [obj for obj in list_if_served(cluster, kind) if read_intent(obj) is not None]
        if not unfinished:
            continue
        commands = list_if_served(cluster, stop.commands) if stop.commands is not None else ()
        left = {f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}" for obj in unfinished}
        resumed: list[str] = []
        events: list[Event] = []
        faults: list[str] = []
        steps = resume(cluster, kind, unfinished, commands, now_ms)
        while leading() and (step := next(steps, None)) is not None:
            if step.action == ASKED_AGAIN and not step.detail:
                continue
            left.discard(step.name)
            if step.detail:
                faults.append(f"{step.name}: {step.detail}")
            elif step.action == GIVEN_UP:
                text = f"its preemption failed: {stop.gave_up}"
                namespace, _, name = step.name.partition("/")
                events.append(Event(kind, name, namespace, step.uid, "Warning", "NotRestarted", text, now_ms))
            else:
                resumed.append(step.name)
        keys = tuple(map(gang_key, unfinished))
        return True, FinishedPreemptions(tuple(resumed), tuple(sorted(left)), tuple(events), tuple(faults), keys)
    return False, FinishedPreemptions()
