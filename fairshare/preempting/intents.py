"""What was begun and has to be brought to its end, whatever happens to us meanwhile.

The intent stands as an annotation on the object itself, written in the patch that acts. A Workload that was
switched off is switched on again once Kueue has taken its quota back (sooner would race); a Volcano Job whose
Command was lost gets another. Every cycle looks at every object, so a crash delays and forgets nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairshare.adapters.volcano import COMMAND
from fairshare.errors import ClusterError
from fairshare.kube.fields import look
from fairshare.kube.kinds import Kind, Object
from fairshare.kube.pods import millis
from fairshare.kube.ports import Cluster
from fairshare.plan import FIELD_MANAGER

PREEMPTION = "gputally.dev/preemption"
REASON = "gputally.dev/preempted-because"
REISSUE_MS = 60_000
MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Intent:
    """decision: the id under which it is recorded. attempts: Commands issued so far."""

    decision: str
    at_ms: int
    attempts: int = 1

    def text(self) -> str:
        return json.dumps({"decision": self.decision, "at_ms": self.at_ms, "attempts": self.attempts})


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was done for one intent. name: namespace/name. detail: the cluster's words where it failed."""

    name: str
    action: str
    detail: str = ""
    uid: str = ""


def read(obj: Object) -> Intent | None:
    """The intent on an object; None where there is none of ours."""
    text = (obj["metadata"].get("annotations") or {}).get(PREEMPTION)
    try:
        plain: Any = json.loads(text or "")
        return Intent(str(plain["decision"]), int(plain["at_ms"]), int(plain.get("attempts", 1)))
    except (ValueError, KeyError, TypeError):
        return None


def command(name: str, namespace: str, uid: str, reason: str) -> Object:
    """Volcano's order to kill a Job's pods and queue it again."""
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
    """Go on with every intent among `objects`. Carried out as it is iterated."""
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
        for c in look(obj, ("status", "conditions")) or ()
    )
    if look(obj, ("spec", "active")) is not False:
        return "somebody switched it on", dict(_DONE), None
    if reserved:
        return None
    return "switched on again", {**_DONE, "spec": {"active": True}}, None


def _job(obj: Object, intent: Intent, commands: Sequence[Object], now_ms: int) -> _Step | None:
    uid = obj["metadata"].get("uid")
    if any(look(each, ("target", "uid")) == uid for each in commands):
        return None
    if look(obj, ("status", "state", "phase")) != "Running":
        return "restarted", dict(_DONE), None
    since = look(obj, ("status", "state", "lastTransitionTime"))
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
