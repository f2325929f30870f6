"""Finishes preemptions that an earlier cycle began.

The intent is an annotation on the object itself, written in the patch that acts. A Workload that was deactivated is
activated again after Kueue has taken its quota back; earlier would be a race. A Volcano Job whose Command was lost gets
another one. Every cycle checks every object, so nothing is forgotten after a crash.

This does not depend on usage, or on preemption still being enabled. A deactivated Workload must run again even if the
accountant does not answer, or preemption or the target have been switched off since. This module stops no workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fairshare.core.pods import millis
from fairshare.core.queue_annotations import say
from fairshare.core.queues_and_weights import Condition
from fairshare.targets.kueue import WORKLOADS
from fairshare.targets.volcano import COMMAND, JOB
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
    """An intent on an object.

    decision: the id under which it is recorded.
    attempts: number of Commands issued so far."""

    decision: str
    at_ms: int
    attempts: int = 1

    def text(self) -> str:
        return json.dumps({"decision": self.decision, "at_ms": self.at_ms, "attempts": self.attempts})


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result for one intent.

    name: namespace/name.
    detail: the cluster's message if it failed."""

    name: str
    action: str
    detail: str = ""
    uid: str = ""


def read(obj: Object) -> PreemptionIntent | None:
    """Return the intent that gputally wrote on an object; None if there is none."""
    text = (obj["metadata"].get("annotations") or {}).get(PREEMPTION)
    try:
        plain: Any = json.loads(text or "")
        return PreemptionIntent(str(plain["decision"]), int(plain["at_ms"]), int(plain.get("attempts", 1)))
    except (ValueError, KeyError, TypeError):
        return None


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
) -> Iterator[Resumed]:
    """Continue with every intent among `objects`, while the result is iterated."""
    for obj in objects:
        intent = read(obj)
        if intent is None:
            continue
        step = _workload(obj) if kind.kind == "Workload" else _job(obj, intent, commands, now_ms)
        if step is None:
            continue
        name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
        uid = str(obj["metadata"].get("uid", ""))
        action, change, order = step
        try:
            change = {**change, "metadata": {"uid": obj["metadata"].get("uid"), **change["metadata"]}}
            cluster.patch(kind, name, namespace, change, field_manager=FIELD_MANAGER)
            if order is not None:
                cluster.create(order, field_manager=FIELD_MANAGER)
        except ClusterError as error:
            yield Resumed(f"{namespace}/{name}", action, str(error), uid)
        else:
            yield Resumed(f"{namespace}/{name}", action, uid=uid)


_Step = tuple[str, dict[str, Any], Object | None]
_DONE = {"metadata": {"annotations": {PREEMPTION: None}}}


def _workload(obj: Object) -> _Step | None:
    reserved = any(
        c.get("type") == "QuotaReserved" and c.get("status") == "True"
        for c in value_at(obj, ("status", "conditions")) or ()
    )
    if value_at(obj, ("spec", "active")) is not False:
        return "switched on by another client", dict(_DONE), None
    if reserved:
        return None
    return "switched on again", {**_DONE, "spec": {"active": True}}, None


def _job(obj: Object, intent: PreemptionIntent, commands: Sequence[Object], now_ms: int) -> _Step | None:
    uid = obj["metadata"].get("uid")
    if any(value_at(each, ("target", "uid")) == uid for each in commands):
        return None
    if value_at(obj, ("status", "state", "phase")) != "Running":
        return "restarted", dict(_DONE), None
    since = value_at(obj, ("status", "state", "lastTransitionTime"))
    if isinstance(since, str) and _later(since, intent.at_ms):
        return "restarted", dict(_DONE), None
    if now_ms - intent.at_ms < REISSUE_MS * intent.attempts:
        return None
    if intent.attempts >= MOST_ATTEMPTS:
        return "given up", dict(_DONE), None
    again = replace(intent, attempts=intent.attempts + 1)
    name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
    reason = (obj["metadata"].get("annotations") or {}).get(REASON, "")
    order = command(name, namespace, str(uid), reason)
    return "asked again", {"metadata": {"annotations": {PREEMPTION: again.text()}}}, order


def _later(text: str, at_ms: int) -> bool:
    found = millis(text)
    return found is not None and found > at_ms


SELDOM_MS: Final = 5 * MS_PER_MINUTE
"""How often objects are checked if the controller itself stops no workload. A person may still stop some (`gputally
fairshare preempt`)."""
_KINDS: Final[Mapping[str, tuple[Kind, ...]]] = {"kueue": WORKLOADS, "volcano": (JOB,)}
"""Objects with intents, by target. All versions of one kind show the same objects."""
NOT_RESUMED = "NotResumed"


@dataclass(frozen=True, slots=True)
class FinishedPreemptions:
    """Workloads by namespace/name, and the faults.

    resumed: workloads that may run again.
    left: workloads that are still being stopped.
    faults: the preemptions that could not be finished yet, and why."""

    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()

    def condition(self) -> Condition | None:
        """Return the condition; None if nothing is left to finish."""
        return Condition("Resumed", "False", NOT_RESUMED, say(self.faults)) if self.faults else None

    def told(self) -> tuple[str, ...]:
        """Return one line each, for a person."""
        return (
            *(f"{name} had given way and may run again" for name in self.resumed),
            *(f"{name} is still giving way: release again in a minute" for name in self.left),
            *(f"not given back: {fault}" for fault in self.faults),
        )


def end_all(cluster: Cluster, now_ms: int) -> FinishedPreemptions:
    """Finish the preemptions of every target once, because a person switches everything off. Raises ClusterError."""
    each = [_end(cluster, kinds, now_ms, lambda: True)[1] for kinds in _KINDS.values()]
    return FinishedPreemptions(
        tuple(name for ended in each for name in ended.resumed),
        tuple(name for ended in each for name in ended.left),
        tuple(event for ended in each for event in ended.events),
        tuple(fault for ended in each for fault in ended.faults),
    )


class PreemptionFinisher:
    """The unfinished preemptions of one controller. Not thread-safe."""

    def __init__(self) -> None:
        self._next_ms: dict[str, int] = {}

    def go_on(
        self, cluster: Cluster, target: str, now_ms: int, *, enforces: bool, leading: Callable[[], bool]
    ) -> FinishedPreemptions:
        """Finish the preemptions of one target.

        enforces: whether the target's preemption stops workloads now, so that new intents are possible in every
        cycle."""
        kinds = _KINDS.get(target, ())
        if not kinds or (not enforces and now_ms < self._next_ms.get(target, now_ms)):
            return FinishedPreemptions()
        try:
            found, ended = _end(cluster, kinds, now_ms, leading)
        except ClusterError as error:
            return FinishedPreemptions(faults=(str(error),))
        self._next_ms[target] = now_ms + (0 if found else SELDOM_MS)
        return ended


def _end(
    cluster: Cluster, kinds: Sequence[Kind], now_ms: int, leading: Callable[[], bool]
) -> tuple[bool, FinishedPreemptions]:
    """Return whether there was anything to finish, and the result."""
    for kind in kinds:
        begun = [obj for obj in list_if_served(cluster, kind) if read(obj) is not None]
        if not begun:
            continue
        commands = list_if_served(cluster, COMMAND) if kind == JOB else ()
        resumed: list[str] = []
        events: list[Event] = []
        faults: list[str] = []
        steps = resume(cluster, kind, begun, commands, now_ms)
        while leading() and (step := next(steps, None)) is not None:
            if step.detail:
                faults.append(f"{step.name}: {step.detail}")
                continue
            resumed.append(step.name)
            if step.action == "given up":
                text = f"it was asked to restart {MOST_ATTEMPTS} times for another workload, and goes on as it was"
                namespace, _, name = step.name.partition("/")
                events.append(Event(kind, name, namespace, step.uid, "Warning", "NotRestarted", text, now_ms))
        names = {f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}" for obj in begun}
        return True, FinishedPreemptions(
            tuple(resumed), tuple(sorted(names.difference(resumed))), tuple(events), tuple(faults)
        )
    return False, FinishedPreemptions()
