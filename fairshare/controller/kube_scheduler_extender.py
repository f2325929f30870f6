"""Answers the kube-scheduler's `prioritize` and `preempt` requests: scores nodes and vetoes unfair victims.

The extender answers from memory. After `DEADLINE_MS` it scores no further node. Configure the scheduler with
`ignorable: true` and a `httpTimeout` of 1 s, so that it continues without the extender. Without a view of the cluster
every node has the same score. Without a view or the shares of queues every preemption is allowed.

A pod that the scheduler has just placed is not in the view yet. For `ASSUME_MS` the extender therefore assumes that the
pod is on the node with the best score, unless the view shows another node. Otherwise it would score nodes for the next
member of a gang as if the previous one took no GPU.

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
from fairshare.core.gpu_demand import LABELLED, gpus_taken, queue_lookup, read_pod
from fairshare.core.queues_and_weights import Condition, Entitlement, Pod, PolicyTree
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights
from gputally.base.clock import Clock
from gputally.base.untrusted_text import UNDECODABLE, escaped
from gputally.kubernetes.objects import gpus

MOST_SCORE = 10
_FIT, _COMPANY = 8, 2
"""Parts of the score: how well the pod fits, and which pods run beside it."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The GPUs that a queue holds, and the GPUs that it is due."""

    allocated: float
    entitled: float

    def exceeded(self, more: float = 0.0) -> bool:
        """Return whether the queue would hold more than it is due with `more` additional GPUs."""
        return self.allocated + more > self.entitled + _SLACK


def _no_queue(_pod: Pod) -> str | None:
    return None


SharesFor = Callable[[Pod], Mapping[str, QueueShare]]


@dataclass(frozen=True, slots=True)
class ExtenderView:
    """The state of the cluster from which the extender answers.

    gpus: allocatable GPUs by node.
    pods: by uid.
    shares: by queue.
    queue_of: returns the policy queue of a pod, None if it has none.
    shares_for: returns shares that include the request of a pod that the cycle did not know; None if `shares` apply to
        every pod."""

    gpus: Mapping[str, float]
    pods: Mapping[str, Pod]
    shares: Mapping[str, QueueShare] = field(default_factory=dict)
    queue_of: Callable[[Pod], str | None] = _no_queue
    shares_for: SharesFor | None = None

    def for_request(self, pod: Pod) -> ExtenderView:
        """Return the view for a request about this pod."""
        if not self.shares or self.shares_for is None:
            return self
        return replace(self, shares=self.shares_for(pod), shares_for=None)

    def share_of(self, pod: Pod) -> QueueShare | None:
        """Return the share of the pod's queue; None if queue or share are unknown."""
        queue = self.queue_of(pod)
        return self.shares.get(queue) if queue is not None else None


def scores(
    pod: Pod, nodes: Sequence[str], view: ExtenderView, deadline_passed: Callable[[], bool] = lambda: False
) -> dict[str, int]:
    """Return a score of 0..10 for each of `nodes`; 0 without room, or if the deadline passes before it is scored."""
    pods_by_node: dict[str, list[Pod]] = {}
    for other in view.pods.values():
        if other.node and other.uid != pod.uid:
            pods_by_node.setdefault(other.node, []).append(other)
    share = view.share_of(pod)
    borrows = share.exceeded(pod.gpus) if share is not None else None
    result = dict.fromkeys(nodes, 0)
    largest = max((view.gpus.get(node, 0.0) for node in nodes), default=0.0)
    for node in nodes:
        if deadline_passed():
            break
        neighbors = pods_by_node.get(node, [])
        left = view.gpus.get(node, 0.0) - gpus_taken(neighbors) - pod.gpus
        if pod.gpus <= 0 or left < -_SLACK or largest <= 0:
            continue
        fit = _FIT * (1 - max(0.0, left) / largest)
        result[node] = round(fit + _COMPANY * _company(borrows, neighbors, view))
    return result


def _company(borrows: bool | None, neighbors: Sequence[Pod], view: ExtenderView) -> float:
    """Return which part (0..1) of a node's pods, by GPUs, belongs to similar queues; 0.5 if this is unknown.

    borrows: whether the pod's queue is above its share; None if unknown. Queues are similar if the same is true of
        them."""
    if borrows is None or not neighbors:
        return 0.5
    similar = 0.0
    for other in neighbors:
        share = view.share_of(other)
        similar += other.gpus if share is not None and share.exceeded() is borrows else 0.0
    return similar / fsum(other.gpus for other in neighbors)


def fair_nodes(pod: Pod, victims: Mapping[str, Sequence[str]], view: ExtenderView) -> tuple[str, ...]:
    """Return the nodes on which preemption is fair and costs least; all nodes if no shares are known.

    victims: uids of the pods to be stopped, by node."""
    if not view.shares:
        return tuple(sorted(victims))
    view = view.for_request(pod)
    gangs: dict[str, float] = {}
    for other in view.pods.values():
        if other.gang:
            gangs[other.gang] = gangs.get(other.gang, 0.0) + (other.gpus if other.held else 0.0)
    costs: dict[str, float] = {}
    for node, uids in victims.items():
        known = [view.pods[uid] for uid in uids if uid in view.pods]
        if all(_is_fair(pod, victim, view) for victim in known):
            lost = {victim.gang or victim.uid: gangs.get(victim.gang, victim.gpus) for victim in known}
            costs[node] = fsum(lost.values())
    least = min(costs.values(), default=0.0)
    return tuple(sorted(node for node, cost in costs.items() if cost <= least + _SLACK))


def _is_fair(pod: Pod, victim: Pod, view: ExtenderView) -> bool:
    """Return whether the pod may preempt this victim."""
    victim_share, share = view.share_of(victim), view.share_of(pod)
    if victim_share is None or view.queue_of(victim) == view.queue_of(pod):
        return True
    return victim_share.exceeded() and not (share is not None and share.exceeded(pod.gpus))


DEADLINE_MS = 300
ASSUME_MS = 10_000
MOST_BYTES = 32 * 1024 * 1024
MOST_NODES = 20_000
_TOO_MANY_NODES = f"the request has more than {MOST_NODES} nodes"
NO_REQUESTS = "NoRequests"
REMEDY = (
    "in the KubeSchedulerConfiguration: `extenders: [{urlPrefix: https://gputally-extender.NAMESPACE.svc:9403/scheduler,"
    " enableHTTPS: true, tlsConfig: {caFile: /etc/kubernetes/gputally-extender-ca.crt}, prioritizeVerb: prioritize,"
    " preemptVerb: preempt, weight: 100, httpTimeout: 1s, nodeCacheCapable: true, ignorable: true, managedResources:"
    " [{name: nvidia.com/gpu, ignoredByScheduler: false}]}]`; with https, a scheduler without tlsConfig.caFile"
    " sends no request and logs no error"
)
"""The configuration with which the scheduler calls the extender."""


class BadRequest(ValueError):
    """The request is not one of a kube-scheduler. The message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to the scheduler. late: whether it was ready only after the deadline."""

    body: Any
    late: bool = False


class Extender:
    """Answers the scheduler's requests. Thread-safe."""

    def __init__(
        self, view: Callable[[], ExtenderView | None], clock: Clock, *, deadline_ms: int = DEADLINE_MS
    ) -> None:
        """view: returns the latest view; None while there is none."""
        self._view = view
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()
        self._assumed: dict[str, tuple[Pod, int]] = {}
        self._asked = False

    def acts(self) -> Condition:
        """Return the condition `Effective` of the target kube-scheduler, which is True once a scheduler has sent a
        request. The scheduler's own configuration cannot be read."""
        if self._asked:
            return Condition("Effective", "True", "Asked", "the scheduler asks the extender")
        text = "no scheduler has sent this replica a request since it started: shares may have no effect"
        return Condition("Effective", "Unknown", NO_REQUESTS, text, REMEDY)

    def prioritize(self, content: bytes) -> Answer:
        """Answer ExtenderArgs with HostPriorityList, the scores of the nodes."""
        deadline_ms = self._clock.monotonic_ms() + self._deadline_ms
        args = _parse(content)
        pod = _pod(args)
        self._asked = True
        nodes, capacity = _nodes(args)
        view = self._view()
        if pod is None or view is None:
            return Answer([{"Host": node, "Score": 0} for node in nodes])
        with self._lock:
            view = self._with_assumed(view, capacity)
            result = scores(pod, nodes, view, lambda: self._clock.monotonic_ms() > deadline_ms)
            best = max(result, key=lambda node: (result[node], node), default=None)
            if best is not None and result[best] > 0:
                # Only one node may have the top score: the scheduler breaks ties at random, and the extender would not
                # know the result.
                result = {node: score - (score == result[best] and node != best) for node, score in result.items()}
                self._assumed[pod.uid] = (replace(pod, node=best, held=True), self._clock.monotonic_ms() + ASSUME_MS)
        late = self._clock.monotonic_ms() > deadline_ms
        return Answer([{"Host": node, "Score": result[node]} for node in nodes], late)

    def preempt(self, content: bytes) -> Answer:
        """Answer ExtenderPreemptionArgs with ExtenderPreemptionResult: fewer nodes, never other victims."""
        args = _parse(content)
        pod = _pod(args)
        self._asked = True
        victims = _victims(args)
        view = self._view()
        nodes: Sequence[str] = sorted(victims)
        if pod is not None and view is not None:
            nodes = fair_nodes(pod, {node: uids for node, (uids, _) in victims.items()}, view)
        return Answer(
            {
                "NodeNameToMetaVictims": {
                    node: {"Pods": [{"UID": uid} for uid in victims[node][0]], "NumPDBViolations": victims[node][1]}
                    for node in nodes
                }
            }
        )

    def _with_assumed(self, view: ExtenderView, capacity: Mapping[str, float]) -> ExtenderView:
        """Return the view with the assumed placements of pods that it does not show on a node yet."""
        now = self._clock.monotonic_ms()
        self._assumed = {
            uid: (pod, until)
            for uid, (pod, until) in self._assumed.items()
            if until > now and not (uid in view.pods and view.pods[uid].node)
        }
        pods = {**view.pods, **{uid: pod for uid, (pod, _) in self._assumed.items()}}
        return replace(view, gpus={**view.gpus, **capacity}, pods=pods)


def _parse(content: bytes) -> Mapping[str, Any]:
    try:
        args = msgspec.json.decode(content)
    except UNDECODABLE as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(args, dict):
        raise BadRequest("the body is not a JSON object")
    return args


def _malformed(what: str, error: Exception) -> BadRequest:
    """Return the error for a part of the request that could not be read."""
    return BadRequest(escaped(f"{what}: a field is missing or has the wrong type ({type(error).__name__}: {error})"))


def _pod(args: Mapping[str, Any]) -> Pod | None:
    """Return the pod to place; None if it requests no GPU."""
    obj = args.get("Pod")
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict) or "name" not in obj["metadata"]:
        raise BadRequest("Pod is missing, or has no metadata.name")
    try:
        pod = read_pod(obj)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        raise _malformed(f"Pod {obj['metadata']['name']}", error) from error
    if pod is not None and not isinstance(pod.uid, str):
        raise BadRequest(escaped(f"Pod {pod.name}: metadata.uid is not a string"))
    return pod


def _nodes(args: Mapping[str, Any]) -> tuple[list[str], dict[str, float]]:
    """Return the node names, and the GPUs of nodes sent as full objects (nodeCacheCapable: false)."""
    names, objects = args.get("NodeNames"), args.get("Nodes")
    capacity: dict[str, float] = {}
    if isinstance(objects, dict):
        items = objects.get("items") or []
        if not isinstance(items, list):
            raise BadRequest("Nodes.items is not a list")
        try:
            capacity = {item["metadata"]["name"]: gpus((item.get("status") or {}).get("allocatable")) for item in items}
        except (TypeError, KeyError, AttributeError) as error:
            raise _malformed("Nodes", error) from error
        names = list(capacity)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadRequest("the request has neither Nodes nor a list of strings NodeNames")
    if len(names) > MOST_NODES:
        raise BadRequest(_TOO_MANY_NODES)
    return names, capacity


def _victims(args: Mapping[str, Any]) -> dict[str, tuple[list[str], int]]:
    """Return by node the uids of its victims and the number of violated budgets, from either form of the request."""
    by_uid, by_object = args.get("NodeNameToMetaVictims"), args.get("NodeNameToVictims")
    result: dict[str, tuple[list[str], int]] = {}
    try:
        for node, of_node in (by_uid or by_object or {}).items():
            victims = of_node or {}
            pods = victims.get("Pods") or []
            uids = [pod["UID"] if by_uid else pod["metadata"]["uid"] for pod in pods]
            if not all(isinstance(uid, str) for uid in uids):
                raise TypeError("a uid is not a string")
            result[node] = (uids, int(victims.get("NumPDBViolations") or 0))
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise _malformed("victims", error) from error
    if len(result) > MOST_NODES:
        raise BadRequest(_TOO_MANY_NODES)
    return result


STALE_MS = 600_000
"""Age of entitlements above which they no longer show which queues are above their shares."""


class ExtenderViews:
    """Builds the extender's view from the latest report. Thread-safe."""

    def __init__(self, pods: Callable[[], Sequence[Pod]], clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        self._latest: tuple[CycleReport, Policy] | None = None

    def observe(self, report: CycleReport, policy: Policy) -> None:
        """Store the latest report, and the policy that was in force."""
        self._latest = (report, policy)

    def view(self) -> ExtenderView | None:
        """Return the view; None before the first report. It has no shares during a hold, or if the report is too
        old."""
        latest = self._latest
        if latest is None:
            return None
        report, policy = latest
        queue_of = queue_lookup(policy)
        pods = {pod.uid: pod for pod in self._pods()}
        if report.hold is not None or self._clock.wall_ms() - report.at_ms > STALE_MS:
            return ExtenderView(report.gpus_by_node, pods, {}, queue_of)
        allocated: dict[str, list[float]] = {}
        for pod in pods.values():
            queue = queue_of(pod) if pod.held else None
            if queue is not None:
                allocated.setdefault(queue, []).append(pod.gpus)
        allocated_gpus = {queue: fsum(amounts) for queue, amounts in allocated.items()}

        def shares(entitlements_of: Callable[[TargetReport], Sequence[Entitlement]]) -> dict[str, QueueShare]:
            return {
                due.queue: QueueShare(allocated_gpus.get(due.queue, 0.0), due.gpus)
                for target in report.targets
                for due in entitlements_of(target)
                if due.queue in target.standings
            }

        def shares_for(pod: Pod) -> Mapping[str, QueueShare]:
            with_pod = {**pods, pod.uid: pod}
            return shares(lambda target: _with_new_pods(target, report, policy, with_pod, queue_of))

        known_shares = shares(lambda target: target.entitlements)
        return ExtenderView(report.gpus_by_node, pods, known_shares, queue_of, shares_for)


def _with_new_pods(
    target: TargetReport,
    report: CycleReport,
    policy: Policy,
    pods: Mapping[str, Pod],
    queue_of: Callable[[Pod], str | None],
) -> tuple[Entitlement, ...]:
    """Return the queues' entitlements with the requests of pods that the cycle has not seen.

    A queue that requested nothing was due nothing. Without these requests its first pod would not get the queue's own
    share until the next cycle."""
    known = {pod.uid for gang in target.gangs for pod in gang.pods}
    requested: dict[str, float] = {}
    for pod in pods.values():
        # For pods in a scheduler's own queue, the scheduler's objects already include their request.
        queue = queue_of(pod) if pod.ref.startswith(f"{LABELLED}:") else None
        if queue is None or queue not in target.standings:
            continue
        if pod.uid not in known and not pod.gated and not pod.leaving:
            requested[queue] = requested.get(queue, 0.0) + pod.gpus
    if not requested or report.window is None or target.gpus <= 0 or not target.entitlements:
        return target.entitlements
    requested = PolicyTree(policy).sum_up(requested)
    standings = {
        queue: replace(standing, requested=standing.requested + requested.get(queue, 0.0))
        for queue, standing in target.standings.items()
    }
    return calculate_weights(
        WeightInputs(
            policy, report.window, standings, target.gpus, report.at_ms, target.memory, target.exhausted,
            target.devices, target.pools,
        )
    ).entitlements  # fmt: skip
