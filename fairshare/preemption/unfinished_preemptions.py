"""Finishes preemptions of Kueue's Workloads and Volcano's Jobs that an earlier cycle or a person began.

The patch that stops a workload also writes an annotation on the object: the intent to stop it and let it run again. A
deactivated Workload is activated again only after Kueue has taken its quota back, because Kueue might otherwise not see
that it was stopped. A Volcano Job that did not restart gets another Command, three in all. All objects are checked in
every cycle, or every five minutes while the controller stops no workload and has nothing to finish. A crash therefore
loses no intent.

Preemptions are finished even if usage is unknown, or if preemption or the target has been switched off since, because a
deactivated Workload must run again. This module begins no preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from fairshare.core.gpu_demand import gang_key, millis
from fairshare.core.queues_and_weights import Condition
from fairshare.core.scheduler_queue_objects import join_texts
from fairshare.schedulers.kueue.adapter import condition_of
from fairshare.schedulers.kueue.kinds import WORKLOADS
from fairshare.schedulers.volcano.kinds import COMMAND, JOB
from fairshare.targets.status_config_map import decoded
from fairshare.targets.weight_plan import FIELD_MANAGER, list_if_served
from gputally.base.errors import ClusterError
from gputally.base.units import MS_PER_MINUTE
from gputally.kubernetes.objects import Cluster, Event, Kind, Object, value_at

PREEMPTION = "gputally.dev/preemption"
REASON = "gputally.dev/preempted-because"
REISSUE_MS = 60_000
MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class PreemptionIntent:
    """The annotation of a workload that gputally is stopping.

    decision: the id under which the preemption is recorded.
    attempts: the number of Commands issued so far."""

    decision: str
    at_ms: int
    attempts: int = 1

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


_INTENT = msgspec.json.Decoder(PreemptionIntent)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The result of one step towards finishing a preemption.

    name: namespace/name of the workload.
    detail: the cluster's message if the step failed."""

    name: str
    action: str
    detail: str = ""
    uid: str = ""


def read_intent(obj: Object) -> PreemptionIntent | None:
    """Return the intent that gputally wrote on an object; None without one, or if a user made it invalid."""
    text = (obj["metadata"].get("annotations") or {}).get(PREEMPTION)
    return decoded(text or "", _INTENT)


def command(name: str, namespace: str, uid: str, reason: str) -> Object:
    """Return Volcano's Command that kills a Job's pods and queues it again."""
    return {
        "apiVersion": COMMAND.api_version,
        "kind": COMMAND.kind,
        "metadata": {"generateName": "gputally-", "namespace": namespace},
        "action": "RestartJob",
        "target": {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "name": name,
            "uid": uid,
            "controller": True,
        },
        "reason": "FairshareReclaim",
        "message": reason,
    }


def resume(
    cluster: Cluster, kind: Kind, objects: Sequence[Object], commands: Sequence[Object], now_ms: int
) -> Iterator[FinishedStep]:
    """Take the next step for every intent among `objects`, one at a time while the result is iterated.

    commands: the Commands that Volcano has not yet acted on."""
    for obj in objects:
        intent = read_intent(obj)
        if intent is None:
            continue
        step = _workload(obj) if kind.kind == "Workload" else _job(obj, intent, commands, now_ms)
        if step is None:
            continue
        name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
        uid = str(obj["metadata"].get("uid", ""))
        action, change, new_command = step
        try:
            if new_command is not None:
                cluster.create(new_command, field_manager=FIELD_MANAGER)  # first: a refused one is no attempt
            change = {**change, "metadata": {"uid": obj["metadata"].get("uid"), **change["metadata"]}}
            cluster.patch(kind, name, namespace, change, field_manager=FIELD_MANAGER)
        except ClusterError as error:
            yield FinishedStep(f"{namespace}/{name}", action, str(error), uid)
        else:
            yield FinishedStep(f"{namespace}/{name}", action, uid=uid)


_Step = tuple[str, dict[str, Any], Object | None]
"""Name of the action, patch of the object, and a Command to create."""
_REMOVE_INTENT = {"metadata": {"annotations": {PREEMPTION: None}}}


def _workload(obj: Object) -> _Step | None:
    if value_at(obj, ("spec", "active")) is not False:
        return "switched on by another client", dict(_REMOVE_INTENT), None
    if condition_of(obj, "QuotaReserved").get("status") == "True":
        return None
    return "switched on again", {**_REMOVE_INTENT, "spec": {"active": True}}, None


def _job(obj: Object, intent: PreemptionIntent, commands: Sequence[Object], now_ms: int) -> _Step | None:
    uid = obj["metadata"].get("uid")
    if any(value_at(each, ("target", "uid")) == uid for each in commands):
        return None
    since_ms = millis(value_at(obj, ("status", "state", "lastTransitionTime")))
    running = value_at(obj, ("status", "state", "phase")) == "Running"
    if not running or (since_ms is not None and since_ms > intent.at_ms):
        return "restarted", dict(_REMOVE_INTENT), None
    if now_ms - intent.at_ms < REISSUE_MS * intent.attempts:
        return None
    if intent.attempts >= MOST_ATTEMPTS:
        return "given up", dict(_REMOVE_INTENT), None
    again = replace(intent, attempts=intent.attempts + 1)
    name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
    reason = (obj["metadata"].get("annotations") or {}).get(REASON, "")
    change = {"metadata": {"annotations": {PREEMPTION: again.text()}}}
    return "asked again", change, command(name, namespace, str(uid), reason)


SELDOM_MS: Final = 5 * MS_PER_MINUTE
"""Time between two checks of all objects if the controller itself stops no workload. A person may still stop some
(`gputally fairshare preempt`)."""
_KINDS: Final[Mapping[str, tuple[Kind, ...]]] = {"kueue": WORKLOADS, "volcano": (JOB,)}
"""Objects with intents, by target. All versions of one kind show the same objects."""
NOT_RESUMED = "NotResumed"


@dataclass(frozen=True, slots=True)
class FinishedPreemptions:
    """The result of finishing preemptions. Workloads are named by namespace/name.

    resumed: workloads that may run again.
    left: workloads that are still being stopped.
    keys: all workloads with a preemption that was not finished before, as `Gang.key`.
    events: one for each preemption that failed for good, because Volcano did not restart the Job.
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
    results = [_finish(cluster, kinds, now_ms, lambda: True)[1] for kinds in _KINDS.values()]
    return FinishedPreemptions(
        tuple(name for result in results for name in result.resumed),
        tuple(name for result in results for name in result.left),
        tuple(event for result in results for event in result.events),
        tuple(fault for result in results for fault in result.faults),
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
        kinds = _KINDS.get(target, ())
        if not kinds or (not enforces and now_ms < self._next_ms.get(target, now_ms)):
            return FinishedPreemptions()
        try:
            unfinished, result = _finish(cluster, kinds, now_ms, leading)
        except ClusterError as error:
            return FinishedPreemptions(faults=(str(error),))
        self._next_ms[target] = now_ms + (0 if unfinished else SELDOM_MS)
        return result


def _finish(
    cluster: Cluster, kinds: Sequence[Kind], now_ms: int, leading: Callable[[], bool]
) -> tuple[bool, FinishedPreemptions]:
    """Return whether there was anything to finish, and the result."""
    for kind in kinds:
        unfinished = [obj for obj in list_if_served(cluster, kind) if read_intent(obj) is not None]
        if not unfinished:
            continue
        commands = list_if_served(cluster, COMMAND) if kind == JOB else ()
        left = {f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}" for obj in unfinished}
        resumed: list[str] = []
        events: list[Event] = []
        faults: list[str] = []
        steps = resume(cluster, kind, unfinished, commands, now_ms)
        while leading() and (step := next(steps, None)) is not None:
            if step.action == "asked again" and not step.detail:
                continue
            left.discard(step.name)
            if step.detail:
                faults.append(f"{step.name}: {step.detail}")
            elif step.action == "given up":
                text = f"its preemption failed: Volcano was told {MOST_ATTEMPTS} times to restart it, and it still runs"
                namespace, _, name = step.name.partition("/")
                events.append(Event(kind, name, namespace, step.uid, "Warning", "NotRestarted", text, now_ms))
            else:
                resumed.append(step.name)
        keys = tuple(map(gang_key, unfinished))
        return True, FinishedPreemptions(tuple(resumed), tuple(sorted(left)), tuple(events), tuple(faults), keys)
    return False, FinishedPreemptions()
