"""The kube-scheduler's extender: `POST /scheduler/prioritize` and `/scheduler/preempt`.

Answers come from memory within `DEADLINE_MS`; the scheduler is to be told `ignorable: true` and a
`httpTimeout` of 1 s, so that it goes on without us. Whatever we do not know, we do not decide: without a
view of the cluster every node scores the same and every preemption stands.

Pods that have just been given a node are not in the view yet. A member of a gang must not be placed as if
the one before it were nowhere: the node that we liked best is taken as the pod's for `ASSUME_MS`, unless
the view says better.

JSON keys are Go's field names, capitalised; embedded pods and nodes are plain Kubernetes objects.
Source: k8s.io/kube-scheduler/extender/v1 and kubernetes pkg/scheduler/extender.go.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.clock import Clock
from fairshare.kube.kinds import Object
from fairshare.kube.pods import read_pod
from fairshare.kube.quantities import gpus
from fairshare.model import Condition, Pod
from fairshare.placing import Room, fair_nodes, scores

DEADLINE_MS = 300
ASSUME_MS = 10_000
MOST_BYTES = 32 * 1024 * 1024
MOST_NODES = 20_000
NOBODY_ASKS = "NobodyAsks"
REMEDY = (
    "in the KubeSchedulerConfiguration: `extenders: [{urlPrefix: https://gputally-extender.NAMESPACE.svc:9403/scheduler,"
    " enableHTTPS: true, tlsConfig: {caFile: /etc/kubernetes/gputally-extender-ca.crt}, prioritizeVerb: prioritize,"
    " preemptVerb: preempt, weight: 100, httpTimeout: 1s, nodeCacheCapable: true, ignorable: true, managedResources:"
    " [{name: nvidia.com/gpu, ignoredByScheduler: false}]}]`; with https a scheduler that has no tlsConfig.caFile asks"
    " nothing and says nothing"
)
"""What a scheduler has to be told for it to ask."""


class BadRequest(ValueError):
    """Not what a kube-scheduler sends: one clear line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """late: the deadline passed, and the rest of the answer is neutral."""

    body: Any
    late: bool = False


class Extender:
    """Answers the scheduler's questions. May be called from any thread."""

    def __init__(self, room: Callable[[], Room | None], clock: Clock, *, deadline_ms: int = DEADLINE_MS) -> None:
        """room: the latest view; None while there is none."""
        self._room = room
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()
        self._assumed: dict[str, tuple[Pod, int]] = {}
        self._asked = False

    def acts(self) -> Condition:
        """`Effective` of the kube-scheduler: its configuration cannot be read, but whether it asks is heard here."""
        if self._asked:
            return Condition("Effective", "True", "Asked", "the scheduler asks the extender")
        text = "no scheduler has asked the extender of this replica since it started: shares act where it does"
        return Condition("Effective", "Unknown", NOBODY_ASKS, text, REMEDY)

    def prioritize(self, content: bytes) -> Answer:
        """ExtenderArgs to HostPriorityList."""
        until = self._clock.monotonic_ms() + self._deadline_ms
        args = _parse(content)
        pod = _pod(args)
        self._asked = True
        nodes, capacity = _nodes(args)
        room = self._room()
        if pod is None or room is None:
            return Answer([{"Host": node, "Score": 0} for node in nodes])
        with self._lock:
            seen = self._with_assumed(room, capacity)
            found = scores(pod, nodes, seen, lambda: self._clock.monotonic_ms() > until)
            best = max(found, key=lambda node: (found[node], node), default=None)
            if best is not None and found[best] > 0:
                # One node alone at the top: the scheduler breaks ties by chance, and we could not know how.
                found = {node: score - (score == found[best] and node != best) for node, score in found.items()}
                self._assumed[pod.uid] = (replace(pod, node=best, held=True), self._clock.monotonic_ms() + ASSUME_MS)
        late = self._clock.monotonic_ms() > until
        return Answer([{"Host": node, "Score": found[node]} for node in nodes], late)

    def preempt(self, content: bytes) -> Answer:
        """ExtenderPreemptionArgs to ExtenderPreemptionResult: fewer nodes, never other victims."""
        args = _parse(content)
        pod = _pod(args)
        self._asked = True
        victims = _victims(args)
        room = self._room()
        if pod is None or room is None:
            kept: Sequence[str] = sorted(victims)
        else:
            kept = fair_nodes(pod, {node: uids for node, (uids, _) in victims.items()}, room)
        return Answer(
            {
                "NodeNameToMetaVictims": {
                    node: {"Pods": [{"UID": uid} for uid in victims[node][0]], "NumPDBViolations": victims[node][1]}
                    for node in kept
                }
            }
        )

    def _with_assumed(self, room: Room, capacity: Mapping[str, float]) -> Room:
        """The view with what we expect to be true by now; pods that the view has bound are forgotten."""
        now = self._clock.monotonic_ms()
        self._assumed = {
            uid: (pod, until)
            for uid, (pod, until) in self._assumed.items()
            if until > now and not (uid in room.pods and room.pods[uid].node)
        }
        pods = {**room.pods, **{uid: pod for uid, (pod, _) in self._assumed.items()}}
        return replace(room, gpus={**room.gpus, **capacity}, pods=pods)


def _parse(content: bytes) -> Mapping[str, Any]:
    try:
        args = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(args, dict):
        raise BadRequest("the body is not an object")
    return args


def _pod(args: Mapping[str, Any]) -> Pod | None:
    """The pod to place; None where it asks for no GPU."""
    obj = args.get("Pod")
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict) or "name" not in obj["metadata"]:
        raise BadRequest("Pod is missing")
    return _read(obj)


def _read(obj: Object) -> Pod | None:
    try:
        pod = read_pod(obj)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        raise BadRequest(f"a pod cannot be read: {error}") from error
    if pod is not None and not isinstance(pod.uid, str):
        raise BadRequest("a pod cannot be read: its uid is no text")
    return pod


def _nodes(args: Mapping[str, Any]) -> tuple[list[str], dict[str, float]]:
    """Names, and the GPUs of those that came whole (nodeCacheCapable: false)."""
    names, whole = args.get("NodeNames"), args.get("Nodes")
    capacity: dict[str, float] = {}
    if isinstance(whole, dict):
        items = whole.get("items") or []
        if not isinstance(items, list):
            raise BadRequest("Nodes.items is no list")
        try:
            capacity = {item["metadata"]["name"]: gpus((item.get("status") or {}).get("allocatable")) for item in items}
        except (TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"a node cannot be read: {error}") from error
        names = list(capacity)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadRequest("neither NodeNames nor Nodes is there")
    if len(names) > MOST_NODES:
        raise BadRequest(f"more than {MOST_NODES} nodes")
    return names, capacity


def _victims(args: Mapping[str, Any]) -> dict[str, tuple[list[str], int]]:
    """Node to (uids of its victims, violated budgets), of either form of the request."""
    meta, whole = args.get("NodeNameToMetaVictims"), args.get("NodeNameToVictims")
    found: dict[str, tuple[list[str], int]] = {}
    try:
        for node, victims in (meta or whole or {}).items():
            pods = (victims or {}).get("Pods") or []
            uids = [pod["UID"] if meta else pod["metadata"]["uid"] for pod in pods]
            if not all(isinstance(uid, str) for uid in uids):
                raise TypeError("a uid is no text")
            found[node] = (uids, int(victims.get("NumPDBViolations") or 0))
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise BadRequest(f"victims cannot be read: {error}") from error
    if len(found) > MOST_NODES:
        raise BadRequest(f"more than {MOST_NODES} nodes")
    return found
