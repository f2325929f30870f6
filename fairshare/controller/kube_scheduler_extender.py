"""Answers the kube-scheduler's `prioritize` and `preempt` requests: scores nodes and vetoes unfair victims.

Answers come from memory within `DEADLINE_MS`. Configure the scheduler with `ignorable: true` and a `httpTimeout` of 1
s, so that it continues without the extender. Without a view of the cluster every node has the same score and every
preemption is allowed.

Pods that have just been placed are not in the view yet. For `ASSUME_MS` the node with the best score is therefore
assumed to be the pod's node, unless the view shows another one. Otherwise members of a gang would be placed as if the
previous one were not placed at all.

JSON keys are Go's field names, capitalised. Embedded pods and nodes are Kubernetes objects. Source:
k8s.io/kube-scheduler/extender/v1 and kubernetes pkg/scheduler/extender.go.

Scores use best fit: the fewer GPUs a node has left afterwards, the better, so that whole nodes stay free for gangs. A
node without room scores 0. Among equal fits, pods of queues above their share are placed together, apart from pods
within their share. A later reclaim then frees whole nodes.

`preempt` can veto or narrow a preemption, but not start one. A pod may be a victim if its queue holds more than its
share or is the preemptor's own. Pods of unknown queues are not protected. A preemption across queues must not lift a
queue above its share. Of the remaining nodes, those with the least loss are kept. A victim counts with its whole
gang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any

import msgspec

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.pods import LABELLED, queue_namer, read_pod, taken_up
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import Condition, Entitlement, Pod, Standing
from fairshare.laws.weight_calculation import WeightInputs, weigh_pools
from gputally.base.clock import Clock
from gputally.kubernetes.objects import Object, gpus

MOST_SCORE = 10
_FIT, _COMPANY = 8, 2
"""Parts of the score: how well the pod fits, and which pods run beside it."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class QueueShare:
    """A queue's GPUs: those it holds and those it is due."""

    allocated: float
    entitled: float

    def above(self, more: float = 0.0) -> bool:
        return self.allocated + more > self.entitled + _SLACK


def _no_queue(_pod: Pod) -> str | None:
    return None


SharesFor = Callable[[Pod], Mapping[str, QueueShare]]


@dataclass(frozen=True, slots=True)
class ExtenderView:
    """The cluster's state for the answers.

    gpus: allocatable by node.
    pods: by uid.
    queue_of: policy queue of a pod, None if it has none.
    shares: by queue.
    shares_for: shares that include a pod's request, which the cycle may not have known; None: they do not depend on the
        pod."""

    gpus: Mapping[str, float]
    pods: Mapping[str, Pod]
    shares: Mapping[str, QueueShare] = field(default_factory=dict)
    queue_of: Callable[[Pod], str | None] = _no_queue
    shares_for: SharesFor | None = None

    def asked_by(self, pod: Pod) -> ExtenderView:
        """Return the view for a request about this pod."""
        if not self.shares or self.shares_for is None:
            return self
        return replace(self, shares=self.shares_for(pod), shares_for=None)


def used(room: ExtenderView) -> dict[str, list[Pod]]:
    """Pods by their node."""
    on: dict[str, list[Pod]] = {}
    for pod in room.pods.values():
        if pod.node:
            on.setdefault(pod.node, []).append(pod)
    return on


def scores(
    pod: Pod, nodes: Sequence[str], room: ExtenderView, spent: Callable[[], bool] = lambda: False
) -> dict[str, int]:
    """Return a score of 0..10 for each of `nodes`. spent: returns whether the deadline has passed; the remaining nodes
    then get 0."""
    on = used(room)
    queue = room.queue_of(pod)
    mine = room.shares.get(queue) if queue is not None else None
    borrows = mine.above(pod.gpus) if mine is not None else None
    scored = dict.fromkeys(nodes, 0)
    largest = max((room.gpus.get(node, 0.0) for node in nodes), default=0.0)
    for node in nodes:
        if spent():
            break
        there = [other for other in on.get(node, ()) if other.uid != pod.uid]
        held = taken_up(there)
        left = room.gpus.get(node, 0.0) - held - pod.gpus
        if pod.gpus <= 0 or left < -_SLACK or largest <= 0:
            continue
        fit = _FIT * (1 - max(0.0, left) / largest)
        scored[node] = round(fit + _COMPANY * _company(borrows, there, room))
    return scored


def _company(borrows: bool | None, there: Sequence[Pod], room: ExtenderView) -> float:
    """Return the part (0..1) of a node's GPUs held by pods whose queues are above or below their share like
    this pod's."""
    if borrows is None or not there:
        return 0.5
    alike = 0.0
    for other in there:
        queue = room.queue_of(other)
        share = room.shares.get(queue) if queue is not None else None
        alike += other.gpus if share is not None and share.above() is borrows else 0.0
    return alike / fsum(other.gpus for other in there)


def fair_nodes(pod: Pod, victims: Mapping[str, Sequence[str]], room: ExtenderView) -> tuple[str, ...]:
    """The nodes (given with the uids of their victims) where preemption is fair and costs least. Without known shares
    all nodes stay."""
    if not room.shares:
        return tuple(sorted(victims))
    room = room.asked_by(pod)
    queue = room.queue_of(pod)
    mine = room.shares.get(queue) if queue is not None else None
    gangs: dict[str, float] = {}
    for other in room.pods.values():
        if other.gang:
            gangs[other.gang] = gangs.get(other.gang, 0.0) + (other.gpus if other.held else 0.0)
    costs: dict[str, float] = {}
    for node, uids in victims.items():
        known = [room.pods[uid] for uid in uids if uid in room.pods]
        if all(_fair(pod, queue, mine, victim, room) for victim in known):
            lost = {victim.gang or victim.uid: gangs.get(victim.gang, victim.gpus) for victim in known}
            costs[node] = fsum(lost.values())
    least = min(costs.values(), default=0.0)
    return tuple(sorted(node for node, cost in costs.items() if cost <= least + _SLACK))


def _fair(pod: Pod, queue: str | None, mine: QueueShare | None, victim: Pod, room: ExtenderView) -> bool:
    theirs = room.queue_of(victim)
    share = room.shares.get(theirs) if theirs is not None else None
    if share is None or theirs == queue:
        return True
    return share.above() and not (mine is not None and mine.above(pod.gpus))


DEADLINE_MS = 300
ASSUME_MS = 10_000
MOST_BYTES = 32 * 1024 * 1024
MOST_NODES = 20_000
NO_REQUESTS = "NoRequests"
REMEDY = (
    "in the KubeSchedulerConfiguration: `extenders: [{urlPrefix: https://gputally-extender.NAMESPACE.svc:9403/scheduler,"
    " enableHTTPS: true, tlsConfig: {caFile: /etc/kubernetes/gputally-extender-ca.crt}, prioritizeVerb: prioritize,"
    " preemptVerb: preempt, weight: 100, httpTimeout: 1s, nodeCacheCapable: true, ignorable: true, managedResources:"
    " [{name: nvidia.com/gpu, ignoredByScheduler: false}]}]`; with https a scheduler that has no tlsConfig.caFile asks"
    " nothing and says nothing"
)
"""Return the configuration with which the scheduler calls the extender."""


class BadRequest(ValueError):
    """The request does not come from a kube-scheduler; a one-line message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. late: the deadline has passed, and the rest of the answer is neutral."""

    body: Any
    late: bool = False


class Extender:
    """Answers the scheduler's requests. Thread-safe."""

    def __init__(
        self, room: Callable[[], ExtenderView | None], clock: Clock, *, deadline_ms: int = DEADLINE_MS
    ) -> None:
        """room: returns the latest view; None while there is none."""
        self._room = room
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()
        self._assumed: dict[str, tuple[Pod, int]] = {}
        self._asked = False

    def acts(self) -> Condition:
        """Return the condition `Effective` of the kube-scheduler: its configuration cannot be read, but this process
        knows whether it sends requests."""
        if self._asked:
            return Condition("Effective", "True", "Asked", "the scheduler asks the extender")
        text = "no scheduler has asked the extender of this replica since it started: shares act where it does"
        return Condition("Effective", "Unknown", NO_REQUESTS, text, REMEDY)

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
                # Only one node may have the top score: the scheduler breaks ties at random, and we would not know the
                # result.
                found = {node: score - (score == found[best] and node != best) for node, score in found.items()}
                self._assumed[pod.uid] = (replace(pod, node=best, held=True), self._clock.monotonic_ms() + ASSUME_MS)
        late = self._clock.monotonic_ms() > until
        return Answer([{"Host": node, "Score": found[node]} for node in nodes], late)

    def preempt(self, content: bytes) -> Answer:
        """Answer ExtenderPreemptionArgs with ExtenderPreemptionResult: fewer nodes, never other victims."""
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

    def _with_assumed(self, room: ExtenderView, capacity: Mapping[str, float]) -> ExtenderView:
        """Return the view with the expected placements; pods that the view already has on a node are dropped
        from them."""
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
        args = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(args, dict):
        raise BadRequest("the body is not an object")
    return args


def _pod(args: Mapping[str, Any]) -> Pod | None:
    """Return the pod to place; None if it requests no GPU."""
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
    """Return the node names, and the GPUs of nodes sent as full objects (nodeCacheCapable: false)."""
    names, whole = args.get("NodeNames"), args.get("Nodes")
    capacity: dict[str, float] = {}
    if isinstance(whole, dict):
        items = whole.get("items") or []
        if not isinstance(items, list):
            raise BadRequest("Nodes.items is not a list")
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
    """Return for each node (uids of its victims, violated budgets), from either form of the request."""
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


STALE_MS = 600_000
"""Age of entitlements above which they no longer show which queues are above their shares."""


class ExtenderViews:
    """Keeps the view from every report; any thread may call it at any time."""

    def __init__(self, pods: Callable[[], Sequence[Pod]], clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        self._held: tuple[CycleReport, Policy] | None = None

    def observe(self, report: CycleReport, policy: Policy) -> None:
        with self._lock:
            self._held = (report, policy)

    def room(self) -> ExtenderView | None:
        """Return the view; None before the first report. Shares are omitted while usage is held or too old."""
        with self._lock:
            held = self._held
        if held is None:
            return None
        report, policy = held
        queue_of = queue_namer(policy)
        pods = {pod.uid: pod for pod in self._pods()}
        if report.hold is not None or self._clock.wall_ms() - report.at_ms > STALE_MS:
            return ExtenderView(report.gpus_by_node, pods, {}, queue_of)
        allocated: dict[str, list[float]] = {}
        for pod in pods.values():
            queue = queue_of(pod) if pod.held else None
            if queue is not None:
                allocated.setdefault(queue, []).append(pod.gpus)
        held_by = {queue: fsum(amounts) for queue, amounts in allocated.items()}

        def shares_for(asking: Pod) -> Mapping[str, QueueShare]:
            now = {**pods, asking.uid: asking}
            found: dict[str, QueueShare] = {}
            for target in report.targets:
                due = _with_newcomers(target, report, policy, now, queue_of)
                found |= _shares(target.standings, due, held_by)
            return found

        shares: dict[str, QueueShare] = {}
        for target in report.targets:
            shares |= _shares(target.standings, target.entitlements, held_by)
        return ExtenderView(report.gpus_by_node, pods, shares, queue_of, shares_for)


def _shares(
    standings: Mapping[str, Standing], due: Sequence[Entitlement], held: Mapping[str, float]
) -> dict[str, QueueShare]:
    return {each.queue: QueueShare(held.get(each.queue, 0.0), each.gpus) for each in due if each.queue in standings}


def _with_newcomers(
    target: TargetReport,
    report: CycleReport,
    policy: Policy,
    pods: Mapping[str, Pod],
    queue_of: Callable[[Pod], str | None],
) -> tuple[Entitlement, ...]:
    """Return the queues' entitlements including pods that the cycle has not seen. A queue that requested nothing was
    due nothing, so its first pod would otherwise be refused its own share until the next cycle."""
    seen = {pod.uid for gang in target.gangs for pod in gang.pods}
    asked: dict[str, float] = {}
    for pod in pods.values():
        # For pods in a scheduler's own queue, the scheduler's objects already include their request.
        queue = queue_of(pod) if pod.ref.startswith(f"{LABELLED}:") else None
        if queue is None or queue not in target.standings:
            continue
        if pod.uid not in seen and not pod.gated and not pod.leaving:
            asked[queue] = asked.get(queue, 0.0) + pod.gpus
    if not asked or report.window is None or target.gpus <= 0 or not target.entitlements:
        return target.entitlements
    more = PolicyTree(policy).sum_up(asked)
    standings = {
        queue: replace(standing, requested=standing.requested + more.get(queue, 0.0))
        for queue, standing in target.standings.items()
    }
    return weigh_pools(
        WeightInputs(
            policy, report.window, standings, target.gpus, report.at_ms, target.memory, target.exhausted,
            target.devices, target.pools,
        )
    ).entitlements  # fmt: skip
