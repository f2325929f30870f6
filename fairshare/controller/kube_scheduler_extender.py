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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import fsum
from typing import Any

import msgspec

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.controller.pod_index import NO_SIDES, NodePods, PodIndex, Sides, demands_by_label
from fairshare.core.gpu_demand import queues_by_ref, read_claiming
from fairshare.core.gpu_models import OTHERS, parts_of
from fairshare.core.queues_and_weights import Condition, Entitlement, Pod, PolicyTree, Standing
from fairshare.laws.weight_calculation import WeightInputs, WeightResult, calculate_weights
from gputally.base.clock import Clock
from gputally.base.gpu_model_names import gpu_model_of_node, most_precise
from gputally.base.untrusted_text import UNDECODABLE, escaped
from gputally.kubernetes.objects import gpus_of_node

_FIT, _COMPANY = 8, 2
"""Parts of the score: how well the pod fits, and which pods run beside it."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The GPUs that a queue holds, and the GPUs that it is due."""

    allocated: float
    due: float

    def exceeded(self, more: float = 0.0) -> bool:
        """Return whether the queue would hold more than it is due with `more` additional GPUs."""
        return self.allocated + more > self.due + _TOLERANCE


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


_NODES_BETWEEN_CHECKS = 64
"""Nodes that are scored between two looks at the clock."""


def _borrows(pod: Pod, view: ExtenderView) -> bool | None:
    """Return whether the pod's queue would be above its share with the pod; None if queue or share are unknown."""
    share = view.share_of(pod)
    return share.exceeded(pod.gpus) if share is not None else None


MOST_KEPT = 64
"""Kinds of pods whose scores are kept for the next pod of the same kind."""


class NodeScores:
    """Scores nodes, and keeps the scores of earlier requests by kind of pod: its GPUs, and its queue's side.

    The scores hold for one list of nodes, one report and one division of the queues into sides. Of a node whose pods
    have changed, the score is computed again."""

    def __init__(self, nodes: Sequence[str], view: ExtenderView) -> None:
        self._nodes, self._gpus, self._sides = nodes, view.gpus, view.sides
        self._largest = max((view.gpus.get(node, 0.0) for node in nodes), default=0.0)
        self._place = {node: number for number, node in enumerate(nodes)}
        self._kept: dict[tuple[float, bool | None], tuple[list[NodePods], list[int]]] = {}

    def hold_for(self, nodes: Sequence[str], view: ExtenderView) -> bool:
        return self._gpus is view.gpus and self._sides is view.sides and self._nodes == nodes

    def of(self, pod: Pod, view: ExtenderView, deadline_passed: Callable[[], bool] = lambda: False) -> Sequence[int]:
        """Return the score of each node of the list, 0..10; 0 also if the deadline passes before it is scored."""
        neighbors = view.pods.on_nodes(self._nodes)
        for node, around in view.assumed.items():
            if node in self._place:
                neighbors[self._place[node]] = around
        if pod.resources or view.pods.get(pod.uid) is not None:  # its score depends on more than its kind
            return self._scored(pod, self._nodes, neighbors, view, deadline_passed)
        kind = (pod.gpus, _borrows(pod, view))
        before, scored = self._kept.get(kind, ([], []))
        if before:
            changed = [n for n, (one, other) in enumerate(zip(before, neighbors, strict=True)) if one is not other]
        else:
            scored, changed = [0] * len(neighbors), list(range(len(neighbors)))
        nodes, around_them = [self._nodes[n] for n in changed], [neighbors[n] for n in changed]
        scored = scored.copy()
        for n, score in zip(changed, self._scored(pod, nodes, around_them, view, deadline_passed), strict=True):
            scored[n] = score
        if not deadline_passed():
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[kind] = neighbors, scored
        return scored

    def _scored(
        self,
        pod: Pod,
        nodes: Sequence[str],
        neighbors: Sequence[NodePods],
        view: ExtenderView,
        deadline_passed: Callable[[], bool],
    ) -> list[int]:
        """neighbors: the pods of each node, those that are assumed there included."""
        result = [0] * len(nodes)
        if pod.gpus <= 0 or self._largest <= 0:
            return result
        borrows = _borrows(pod, view)
        known = view.pods.get(pod.uid)
        own_node = known.node if known is not None else ""
        for number, (node, around) in enumerate(zip(nodes, neighbors, strict=True)):
            if number % _NODES_BETWEEN_CHECKS == 0 and deadline_passed():
                break
            others = around.without(pod.uid) if node == own_node else around
            _, taken, over, within = others.occupancy(view.sides)
            needed = view.pods.placed(pod, node).gpus if pod.resources else pod.gpus
            left = view.gpus.get(node, 0.0) - taken - needed
            if left >= -_TOLERANCE:
                # which part of the neighbors is of similar queues: like the pod's, above their share or within it
                similar = None if borrows is None else over if borrows else within
                fit = _FIT * (1 - max(0.0, left) / self._largest)
                result[number] = round(fit + _COMPANY * (0.5 if similar is None else similar))
        return result


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


def fair_nodes(pod: Pod, victims: Mapping[str, Sequence[str]], view: ExtenderView) -> tuple[str, ...]:
    """Return the nodes on which preemption is fair and costs least; all nodes if no shares are known.

    victims: uids of the pods to be stopped, by node."""
    if not view.shares:
        return tuple(sorted(victims))
    view = view.for_request(pod)
    shares_on = view.shares_on(pod) if view.shares_on is not None else None
    costs: dict[str, float] = {}
    for node, uids in victims.items():
        known = [victim for uid in uids if (victim := view.pods.get(uid)) is not None]
        of_node = view if shares_on is None else replace(view, shares=shares_on(node))
        if all(_is_fair(pod, victim, of_node) for victim in known):
            lost = {victim.gang or victim.uid: _lost_with(victim, view.pods) for victim in known}
            costs[node] = fsum(lost.values())
    least = min(costs.values(), default=0.0)
    return tuple(sorted(node for node, cost in costs.items() if cost <= least + _TOLERANCE))


def _lost_with(victim: Pod, pods: PodIndex) -> float:
    """Return the GPUs that are lost with the victim: those of its whole gang."""
    of_gang = pods.held_by_gang(victim.gang) if victim.gang else None
    return victim.gpus if of_gang is None else of_gang


def _is_fair(pod: Pod, victim: Pod, view: ExtenderView) -> bool:
    """Return whether the pod may preempt this victim."""
    victim_share, share = view.share_of(victim), view.share_of(pod)
    if victim_share is None or view.queues.get(victim.ref) == view.queues.get(pod.ref):
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


class HostPriority(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """The score of one node, as the scheduler reads it."""

    host: str
    score: int


@dataclass(frozen=True, slots=True)
class ExtenderAnswer:
    """An answer to the scheduler, which msgspec encodes. late: whether it was ready only after the deadline."""

    body: Any
    late: bool = False


class Extender:
    """Answers the scheduler's requests. Thread-safe."""

    def __init__(
        self,
        view: Callable[[], ExtenderView | None],
        clock: Clock,
        *,
        deadline_ms: int = DEADLINE_MS,
        with_claims: Callable[[Pod], Pod] = lambda pod: pod,
    ) -> None:
        """view: returns the latest view; None while there is none.
        with_claims: returns a pod with the GPUs of its ResourceClaims."""
        self._view = view
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._with_claims = with_claims
        self._lock = threading.Lock()
        self._assumed: dict[str, tuple[Pod, int]] = {}
        self._on_nodes: dict[str, tuple[NodePods, list[Pod], NodePods]] = {}
        self._kept: NodeScores | None = None
        self._asked = False

    def acts(self) -> Condition:
        """Return the condition `Effective` of the target kube-scheduler, which is True once a scheduler has sent a
        request. The scheduler's own configuration cannot be read."""
        if self._asked:
            return Condition("Effective", "True", "Asked", "the scheduler asks the extender")
        text = "no scheduler has sent this replica a request since it started: shares may have no effect"
        return Condition("Effective", "Unknown", NO_REQUESTS, text, REMEDY)

    def prioritize(self, content: bytes) -> ExtenderAnswer:
        """Answer ExtenderArgs with HostPriorityList, the scores of the nodes."""
        deadline_ms = self._clock.monotonic_ms() + self._deadline_ms
        args = _parse(content)
        pod = self._pod(args)
        self._asked = True
        nodes, capacity = _nodes(args)
        view = self._view()
        if pod is None or view is None:
            return ExtenderAnswer([HostPriority(node, 0) for node in nodes])
        pod = view.pods.placed(pod, pod.node)
        with self._lock:
            view = self._with_assumed(view, pod.uid, capacity)
            if self._kept is None or not self._kept.hold_for(nodes, view):
                self._kept = NodeScores(nodes, view)
            result = list(self._kept.of(pod, view, lambda: self._clock.monotonic_ms() > deadline_ms))
            top = max(result, default=0)
            if top > 0:
                # Only one node may have the top score: the scheduler breaks ties at random, and the extender would not
                # know the result.
                equal = [number for number, score in enumerate(result) if score == top]
                best = max(equal, key=nodes.__getitem__)
                for number in equal:
                    result[number] = top - 1
                result[best] = top
                placed = view.pods.placed(pod, nodes[best])
                self._assumed[pod.uid] = (placed, self._clock.monotonic_ms() + ASSUME_MS)
        late = self._clock.monotonic_ms() > deadline_ms
        return ExtenderAnswer(list(map(HostPriority, nodes, result)), late)

    def preempt(self, content: bytes) -> ExtenderAnswer:
        """Answer ExtenderPreemptionArgs with ExtenderPreemptionResult: fewer nodes, never other victims."""
        args = _parse(content)
        pod = self._pod(args)
        self._asked = True
        victims = _victims(args)
        view = self._view()
        nodes: Sequence[str] = sorted(victims)
        if pod is not None and view is not None:
            pod = view.pods.placed(pod, pod.node)
            nodes = fair_nodes(pod, {node: uids for node, (uids, _) in victims.items()}, view)
        return ExtenderAnswer(
            {
                "NodeNameToMetaVictims": {
                    node: {"Pods": [{"UID": uid} for uid in victims[node][0]], "NumPDBViolations": victims[node][1]}
                    for node in nodes
                }
            }
        )

    def _pod(self, args: Mapping[str, Any]) -> Pod | None:
        """Return the pod to place; None if it requests no GPU."""
        pod = _read_pod(args)
        pod = self._with_claims(pod) if pod is not None else None
        return pod if pod is not None and pod.requests_gpus else None

    def _with_assumed(self, view: ExtenderView, asking: str, capacity: Mapping[str, float]) -> ExtenderView:
        """Return the view with the assumed placements of pods that it does not show on a node yet.

        asking: uid of the pod that is to be placed; where it was assumed before does not count."""
        now = self._clock.monotonic_ms()
        self._assumed = {
            uid: (pod, until)
            for uid, (pod, until) in self._assumed.items()
            if until > now and not ((known := view.pods.get(uid)) is not None and known.node)
        }
        by_node: dict[str, list[Pod]] = {}
        for uid, (pod, _) in self._assumed.items():
            if uid != asking:
                by_node.setdefault(pod.node, []).append(pod)
        self._on_nodes = {node: self._joined(node, view.pods.on_node(node), pods) for node, pods in by_node.items()}
        assumed = {node: joined for node, (_, _, joined) in self._on_nodes.items()}
        return replace(view, gpus={**view.gpus, **capacity} if capacity else view.gpus, assumed=assumed)

    def _joined(self, node: str, shown: NodePods, pods: list[Pod]) -> tuple[NodePods, list[Pod], NodePods]:
        """Return the pods that a node shows, those that are assumed there, and both, whose sums are kept until one of
        them changes."""
        known = self._on_nodes.get(node)
        if known is not None and known[0] is shown and known[1] == pods:
            return known
        return shown, pods, shown.and_also(pods)


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


def _read_pod(args: Mapping[str, Any]) -> Pod | None:
    """Return the pod to place; None if it requests neither a GPU nor a device by a ResourceClaim."""
    obj = args.get("Pod")
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict) or "name" not in obj["metadata"]:
        raise BadRequest("Pod is missing, or has no metadata.name")
    try:
        pod = read_claiming(obj)
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
            capacity = {item["metadata"]["name"]: gpus_of_node(item) for item in items}
        except (TypeError, KeyError, AttributeError) as error:
            raise _malformed("Nodes", error) from error
        names = list(capacity)
    if not isinstance(names, list) or set(map(type, names)) - {str}:
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


MOST_COMPUTED = 100
"""Entitlements with additional requests that are kept for one report."""


class ExtenderViews:
    """Combines the latest report with the pods as they are now. Thread-safe."""

    def __init__(self, pods: PodIndex, clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        self._latest: _Shares | None = None

    def observe(self, report: CycleReport, policy: Policy) -> None:
        """Store the latest report, and the policy that was in force."""
        self._pods.count_by(report.parts)
        self._latest = _Shares(report, policy, self._pods)

    def view(self) -> ExtenderView | None:
        """Return the view; None before the first report. It has no shares during a hold, or if the report is too
        old."""
        latest = self._latest
        if latest is None:
            return None
        report = latest.report
        if report.hold is not None or self._clock.wall_ms() - report.at_ms > STALE_MS:
            return ExtenderView(report.gpus_by_node, self._pods, {}, latest.queues)
        return ExtenderView(
            report.gpus_by_node, self._pods, latest, latest.queues, latest.sides(), latest.with_request,
            shares_on=latest.by_node if latest.report.model_by_node else None,
        )  # fmt: skip


class _Shares(Mapping[str, QueueShare]):
    """The shares of queues: what they are due by one report, and what their pods hold now."""

    def __init__(self, report: CycleReport, policy: Policy, pods: PodIndex) -> None:
        self.report = report
        self.queues = queues_by_ref(policy)
        self._policy = policy
        self._models = parts_of(policy)
        self._pods = pods
        self._refs: dict[str, list[str]] = {}
        for ref, queue in self.queues.items():
            self._refs.setdefault(queue, []).append(ref)
        self._due_gpus = self._due(lambda target: target.entitlements)
        self._computed: dict[Hashable, WeightResult] = {}
        self._split: tuple[list[float], Sides] = ([], NO_SIDES)

    def by_node(self, pod: Pod) -> SharesOn:
        """Return a function that returns the shares of the GPU model of a node: what queues hold of it now, and what
        they are due of it, including the request of this pod."""
        models = self.report.model_by_node

        @cache
        def of_model(model: str) -> Mapping[str, QueueShare]:
            held: dict[str, list[float]] = {}
            for node, other in models.items():
                for one in self._pods.on_node(node).pods if other == model else ():
                    queue = self.queues.get(one.ref)
                    if queue is not None and one.held:
                        held.setdefault(queue, []).append(one.gpus)
            return {
                due.queue: QueueShare(fsum(held.get(due.queue, ())), due.gpus)
                for target in self.report.targets
                for due in self._with_new_pods(target, pod).by_model.get(model, ())
                if due.queue in target.standings
            }

        return lambda node: of_model(models.get(node, OTHERS))

    def __getitem__(self, queue: str) -> QueueShare:
        return QueueShare(fsum(self._pods.held_by_ref(self._refs.get(queue, ()))), self._due_gpus[queue])

    def __iter__(self) -> Iterator[str]:
        return iter(self._due_gpus)

    def __len__(self) -> int:
        return len(self._due_gpus)

    def sides(self) -> Sides:
        """Return which queues are above their share now: the same object until another queue is."""
        held, sides = self._pods.held_by_ref(self.queues), self._split[1]
        if held != self._split[0]:
            changed = sides_of(self, self.queues)
            sides = sides if sides == changed else changed
            self._split = held, sides
        return sides

    def with_request(self, pod: Pod) -> _Shares:
        """Return the shares that include the requests of this pod and of other pods that the cycle has not seen."""
        other = copy(self)
        other._due_gpus = self._due(lambda target: self._with_new_pods(target, pod).entitlements)
        return other

    def _due(self, entitlements_of: Callable[[TargetReport], Sequence[Entitlement]]) -> dict[str, float]:
        return {
            due.queue: due.gpus
            for target in self.report.targets
            for due in entitlements_of(target)
            if due.queue in target.standings
        }

    @cached_property
    def _known(self) -> Mapping[str, frozenset[str]]:
        """By target, the uids of the pods that its cycle has seen."""
        return {
            target.target: frozenset(pod.uid for gang in target.gangs for pod in gang.pods)
            for target in self.report.targets
        }

    def _with_new_pods(self, target: TargetReport, pod: Pod) -> WeightResult:
        """Return the queues' entitlements with the requests of pods that the cycle has not seen.

        A queue that requested nothing was due nothing. Without these requests its first pod would not get the queue's
        own share until the next cycle."""
        as_reported = WeightResult(target.entitlements, (), by_model=target.by_model)
        if self.report.window is None or target.gpus <= 0 or not target.entitlements:
            return as_reported
        known = self._known[target.target]
        unknown = {**self._pods.demanding_besides(known), pod.uid: pod}
        by_queue: dict[tuple[str | None, str], list[float]] = {}
        for other in unknown.values():
            queue = self.queues.get(other.ref) if other.uid not in known and demands_by_label(other) else None
            if queue is not None and queue in target.standings:
                for model in (None, *self._models_of(other)):
                    by_queue.setdefault((model, queue), []).append(other.gpus)
        if not by_queue:
            return as_reported
        requested = {of: fsum(amounts) for of, amounts in sorted(by_queue.items(), key=str)}
        key = (target.target, *requested.items())
        computed = self._computed.get(key)
        if computed is None:
            if len(self._computed) >= MOST_COMPUTED:
                self._computed.clear()
            computed = self._computed[key] = self._with_requests(target, requested)
        return computed

    def _models_of(self, pod: Pod) -> Sequence[str]:
        """Return the parts of the GPUs on which a pod can run, by the model that its node selector states, if any."""
        if not self._models:
            return ()
        stated = gpu_model_of_node({key: value for key, value in pod.selector if value is not None})
        return [most_precise(stated, self._policy.gpu_models) or OTHERS] if stated else self._models

    def _with_requests(self, target: TargetReport, requested: Mapping[tuple[str | None, str], float]) -> WeightResult:
        """requested: by GPU model and queue; with the model None, of any model."""
        report, tree = self.report, PolicyTree(self._policy)
        assert report.window is not None  # `_with_new_pods` has looked

        def raised(standings: Mapping[str, Standing], model: str | None) -> dict[str, Standing]:
            own = {queue: gpus for (of_model, queue), gpus in requested.items() if of_model == model}
            more = tree.sum_up(own)
            return {
                queue: replace(standing, requested=standing.requested + more.get(queue, 0.0))
                for queue, standing in standings.items()
            }

        models = tuple(replace(part, standings=raised(part.standings, part.model)) for part in target.models)
        return calculate_weights(
            WeightInputs(
                self._policy, report.window, raised(target.standings, None), target.gpus, report.at_ms, target.memory,
                target.exhausted, target.pools, models,
            )
        )  # fmt: skip
