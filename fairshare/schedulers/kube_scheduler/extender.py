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
from dataclasses import replace
from math import fsum
from typing import Any, ClassVar

import msgspec

from fairshare.core.gpu_demand import read_claiming
from fairshare.core.queues_and_weights import Condition, Pod
from fairshare.targets.extender import TOLERANCE, BadRequest, ExtenderAnswer, ExtenderView
from fairshare.targets.pod_index import NodePods, PodIndex
from gputally.base.clock import Clock
from gputally.base.untrusted_text import UNDECODABLE, escaped
from gputally.kubernetes.objects import gpus_of_node

_FIT, _COMPANY = 8, 2
"""Parts of the score: how well the pod fits, and which pods run beside it."""
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
            if left >= -TOLERANCE:
                # which part of the neighbors is of similar queues: like the pod's, above their share or within it
                similar = None if borrows is None else over if borrows else within
                fit = _FIT * (1 - max(0.0, left) / self._largest)
                result[number] = round(fit + _COMPANY * (0.5 if similar is None else similar))
        return result


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
    return tuple(sorted(node for node, cost in costs.items() if cost <= least + TOLERANCE))


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


class HostPriority(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """The score of one node, as the scheduler reads it."""

    host: str
    score: int


class KubeSchedulerExtender:
    """Answers the scheduler's requests. Thread-safe."""

    remedy: ClassVar[str] = REMEDY

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

    @property
    def routes(self) -> Mapping[str, Callable[[bytes], ExtenderAnswer]]:
        return {"/scheduler/prioritize": self.prioritize, "/scheduler/preempt": self.preempt}

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
