"""Kueue: ClusterQueues, Cohorts and LocalQueues as our model, weights as `spec.fairSharing.weight`. Pure.

`kueue:NAME` refers to a ClusterQueue, `kueue-cohort:NAME` to a Cohort, `kueue:NAMESPACE/NAME` to a
LocalQueue. A queue's weight goes on its Cohort, else its ClusterQueue, else its one LocalQueue; beside one of
the first two, LocalQueues only say whose workloads are meant. So the policy's tree lies over Kueue's, and
history counts between the queues of a cohort and between cohorts, where Kueue itself keeps none.

Inside one ClusterQueue Kueue may keep history of its own (admission fair sharing, AFS). There a LocalQueue
gets the configured weight, unchanged by history, which would count twice; without AFS Kueue does not read
LocalQueue weights at all, and `Effective` says so.

A weight is written as fixed-point text, 0.000001 at least: a JSON number that is no integer is refused.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/kueue/v1beta2 (v1beta1 where that alone is served).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any, Literal

import yaml

from accountant.wire import Policy, QueuePolicy
from fairshare.kube import marks
from fairshare.kube.demand import amounts, by_gang, in_order, with_pods
from fairshare.kube.fields import look
from fairshare.kube.kinds import CONFIG_MAP, Kind, Object
from fairshare.kube.mapping import match, owners, say
from fairshare.kube.pods import CHECKPOINT, millis, named, request
from fairshare.kube.quantities import fixed, gpus, quantity
from fairshare.model import Condition, Eviction, Gang, Held, Issue, Observation, Pod, Standing, Value, Weight
from fairshare.plan import Read, Seen

_GROUP = "kueue.x-k8s.io"
CLUSTER_QUEUES = tuple(Kind(f"{_GROUP}/{v}", "ClusterQueue", "clusterqueues") for v in ("v1beta2", "v1beta1"))
COHORTS = tuple(Kind(f"{_GROUP}/{v}", "Cohort", "cohorts") for v in ("v1beta2", "v1beta1"))
LOCAL_QUEUES = tuple(
    Kind(f"{_GROUP}/{v}", "LocalQueue", "localqueues", namespaced=True) for v in ("v1beta2", "v1beta1")
)
WORKLOADS = tuple(Kind(f"{_GROUP}/{v}", "Workload", "workloads", namespaced=True) for v in ("v1beta2", "v1beta1"))
KINDS = (*CLUSTER_QUEUES, *COHORTS, *LOCAL_QUEUES, *WORKLOADS)
QUEUE_PREFIX, COHORT_PREFIX = "kueue", "kueue-cohort"
LEAST = 1e-6
"""The smallest weight Kueue keeps apart from zero with room to spare."""
_AFS = "UsageBasedAdmissionFairSharing"
_ACROSS = frozenset({"InCohortReclamation", "InCohortFairSharing", "InCohortReclaimWhileBorrowing"})
"""Reasons of the condition `Preempted` that take from another ClusterQueue."""
_FOR_WORKLOAD = re.compile(r"\(UID: ([^,)\s]+)")
_FOR_QUEUE = re.compile(r"preemptor path: \S*/([^/;\s]+)")


class KueueAdapter:
    """`fairshare.plan.Adapter` for Kueue."""

    name = "kueue"
    prefixes = (QUEUE_PREFIX, COHORT_PREFIX)

    def reads(self, policy: Policy) -> tuple[Read, ...]:
        namespace, _, name = policy.targets.kueue.config.partition("/")
        return (
            Read(CLUSTER_QUEUES, required=True),
            Read(COHORTS),
            Read(LOCAL_QUEUES),
            Read(WORKLOADS),
            Read((CONFIG_MAP,), namespace=namespace, name=name),
        )

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        target = policy.targets.kueue
        return target.apply if target.mode != "off" else "off"

    def publishes(self, _policy: Policy) -> bool:
        return True

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        queues = {obj["metadata"]["name"]: obj for obj in _objects(seen, CLUSTER_QUEUES)}
        locals_ = {_ref(obj): obj for obj in _objects(seen, LOCAL_QUEUES)}
        owner = owners(policy, QUEUE_PREFIX, COHORT_PREFIX)
        carriers = {ref: queue for ref, queue in owner.items() if ref in _carriers(owner)}
        every = [*_objects(seen, COHORTS), *queues.values(), *locals_.values()]
        found = match(every, carriers, _ref, "Kueue queue")
        gangs = _gangs(owner, _objects(seen, WORKLOADS), locals_, pods)
        asked = amounts(policy, gangs)
        issues = list(found.issues)
        held: dict[str, Held] = {}
        standings: dict[str, Standing] = {}
        idle: list[str] = []
        for name, obj in sorted(found.found.items()):
            kind = _kind_of(obj)
            weight = look(obj, ("spec", "fairSharing", "weight"))
            number = None if weight is None else quantity(weight)
            if weight is not None and number is None:
                issues.append(Issue(obj["metadata"]["name"], f"spec.fairSharing.weight is {weight!r}"))
                continue
            static = kind.kind == "LocalQueue" and _keeps_history(queues.get(obj["spec"].get("clusterQueue", "")))
            idle += _why_idle(obj, kind, static)
            held[name] = _held(obj, kind, number, static)
            noted = held[name]
            own = _own(obj)
            demand = asked.get(name, Standing(own, own))
            in_force = 1.0 if number is None else number
            standings[name] = Standing(demand.requested, demand.allocated, in_force, noted.changed_ms, noted.direction)
        acts = _effective(_configuration(seen), queues.values(), idle)
        taken = tuple(_evictions(gangs, owner, _objects(seen, WORKLOADS)))
        left = {
            _ref(obj).partition(":")[2]: _held(obj, _kind_of(obj), quantity(weight), False)
            for obj in found.strangers
            if marks.carries(obj) and (weight := look(obj, ("spec", "fairSharing", "weight"))) is not None
        }
        return Observation(held, standings, tuple(issues), (acts,), gangs, taken, left)

    def express(
        self, _policy: Policy, weights: Sequence[Weight], observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """Six decimals, never zero unless the policy says zero; of a LocalQueue under AFS the configured weight."""
        values: dict[str, Value] = {}
        for weight in weights:
            held = observation.held.get(weight.queue)
            if held is None:
                continue
            wanted = weight.configured if held.static else weight.value
            local = held.kind is not None and held.kind.kind == "LocalQueue"
            values[weight.queue] = 0.0 if wanted == 0 and not local else max(LEAST, round(wanted, 6))
        return values

    def patch(self, held: Held, value: Value | None, annotations: Mapping[str, str]) -> Object:
        assert held.kind is not None, "every object of Kueue is shown with its kind"
        metadata: dict[str, Any] = {"name": held.name}
        if held.namespace:
            metadata["namespace"] = held.namespace
        if held.uid:
            metadata["uid"] = held.uid
        if annotations:
            metadata["annotations"] = dict(annotations)
        patch: dict[str, Any] = {"apiVersion": held.kind.api_version, "kind": held.kind.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = {"fairSharing": {"weight": fixed(float(value))}}
        return patch


def _evictions(
    gangs: Sequence[Gang], owner: Mapping[str, QueuePolicy], workloads: Sequence[Object]
) -> Iterator[Eviction]:
    """What the condition `Preempted` of each victim says: for which Workload, by uid, and by which path."""
    queues = {gang.uid: gang.queue for gang in gangs}
    for obj in workloads:
        metadata = obj["metadata"]
        for found in look(obj, ("status", "conditions")) or ():
            if (found.get("type"), found.get("status")) != ("Preempted", "True") or found.get("reason") not in _ACROSS:
                continue
            text = found.get("message") or ""
            uid, path = _FOR_WORKLOAD.search(text), _FOR_QUEUE.search(text)
            queue = queues.get(uid[1]) if uid else None
            named_queue = owner.get(f"{QUEUE_PREFIX}:{path[1]}") if path else None
            queue = queue if queue is not None or named_queue is None else named_queue.name
            if queue is not None and queue != queues.get(metadata.get("uid", "")):
                when = f"{metadata.get('uid', '')}/{found.get('lastTransitionTime', '')}"
                yield Eviction(when, queue, f"{metadata.get('namespace', '')}/{metadata['name']}")


def _objects(seen: Seen, kinds: Sequence[Kind]) -> Sequence[Object]:
    return next((seen[kind] for kind in kinds if kind in seen), ())


def _kind_of(obj: Object) -> Kind:
    return next(kind for kind in KINDS if (kind.api_version, kind.kind) == (obj["apiVersion"], obj["kind"]))


def _ref(obj: Object) -> str:
    metadata = obj["metadata"]
    if obj["kind"] == "Cohort":
        return f"{COHORT_PREFIX}:{metadata['name']}"
    name = f"{metadata['namespace']}/{metadata['name']}" if obj["kind"] == "LocalQueue" else metadata["name"]
    return f"{QUEUE_PREFIX}:{name}"


def _carriers(owner: Mapping[str, QueuePolicy]) -> set[str]:
    """Of each queue's refs those at the highest level: Cohort, ClusterQueue, LocalQueue."""
    best: dict[str, int] = {}
    for ref, queue in owner.items():
        best[queue.name] = min(best.get(queue.name, 3), _level(ref))
    return {ref for ref, queue in owner.items() if _level(ref) == best[queue.name]}


def _level(ref: str) -> int:
    return 0 if ref.startswith(f"{COHORT_PREFIX}:") else 2 if "/" in ref else 1


def _keeps_history(cluster_queue: Object | None) -> bool:
    return bool(look(cluster_queue or {}, ("spec", "admissionScope", "admissionMode")) == _AFS)


def _parent(obj: Object, kind: Kind) -> object:
    spec = obj.get("spec") or {}
    if kind.kind == "Cohort":
        return spec.get("parentName") or spec.get("parent")
    return spec.get("cohortName") or spec.get("cohort")


def _why_idle(obj: Object, kind: Kind, static: bool) -> list[str]:
    """Why a weight on this object has no effect, if so."""
    name = obj["metadata"]["name"]
    if kind.kind == "LocalQueue":
        without = "its ClusterQueue has no admissionScope, so that Kueue does not read it"
        return [] if static else [f"LocalQueue {obj['metadata']['namespace']}/{name}: {without}"]
    if not _parent(obj, kind):
        return [f"{kind.kind} {name} is in no cohort: it shares with nobody"]
    return []


def _held(obj: Object, kind: Kind, weight: float | None, static: bool) -> Held:
    metadata = obj["metadata"]
    noted = marks.read(metadata.get("annotations") or {})
    return Held(
        metadata["name"],
        metadata.get("uid", ""),
        metadata.get("resourceVersion", ""),
        weight,
        noted.published if noted else None,
        noted.base if noted else None,
        noted.changed_ms if noted else None,
        noted.direction if noted else 0,
        kind,
        metadata.get("namespace", ""),
        static,
    )


def _own(obj: Object) -> float:
    """GPUs reserved as the queue's status says; a Cohort's does not say."""
    flavors = look(obj, ("status", "flavorsReservation")) or ()
    return fsum(gpus({r["name"]: r.get("total")}) for flavor in flavors for r in flavor.get("resources") or ())


def _gangs(
    owner: Mapping[str, QueuePolicy], workloads: Sequence[Object], locals_: Mapping[str, Object], pods: Sequence[Pod]
) -> tuple[Gang, ...]:
    """Workloads that ask for GPUs, are not finished and not switched off."""
    members = by_gang(pods)
    found = []
    for obj in workloads:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        namespace = metadata.get("namespace", "")
        conditions = {c["type"]: c["status"] for c in look(obj, ("status", "conditions")) or ()}
        queue = _queue_of(owner, locals_, namespace, obj)
        if queue is None or conditions.get("Finished") == "True" or spec.get("active") is False:
            continue
        sets = spec.get("podSets") or ()
        done = {
            each.get("name"): int(each.get("count") or 0) for each in look(obj, ("status", "reclaimablePods")) or ()
        }
        asked = fsum(_pod_set(each, _count(each), done) for each in sets)
        least = fsum(_pod_set(each, _count(each, "minCount"), done) for each in sets)
        admission = look(obj, ("status", "admission")) or {}
        counts = {each.get("name"): _count(each) for each in sets}
        admitted = fsum(_admitted(each, counts, done) for each in admission.get("podSetAssignments") or ())
        if asked <= 0:
            continue
        since = [
            millis(c.get("lastTransitionTime"))
            for c in look(obj, ("status", "conditions")) or ()
            if c["type"] == "Admitted" and c["status"] == "True"
        ]
        gang = Gang(
            queue.name,
            _kind_of(obj),
            namespace,
            metadata["name"],
            metadata.get("uid", ""),
            max(asked, admitted),
            admitted,
            min(least, max(asked, admitted)) or asked,
            int(spec.get("priority") or 0),
            True,
            millis(metadata.get("creationTimestamp")),
            next((at for at in since if at is not None), None),
            millis((metadata.get("annotations") or {}).get(CHECKPOINT)),
        )
        mine = members.get(named(obj), ())
        shown = with_pods(gang, mine)
        # What is admitted is held, whether its pods are there yet or not: Kueue gives it to nobody else.
        found.append(shown if not admission else replace(shown, allocated=admitted))
    return in_order(found)


Pods = Mapping[str | None, int]
"""Pods by the name of their set."""


def _count(pod_set: Mapping[str, Any], which: str = "count") -> int:
    found = next((pod_set[key] for key in (which, "count") if pod_set.get(key) is not None), 1)
    return int(found)


def _pod_set(pod_set: Mapping[str, Any], count: int, done: Pods) -> float:
    """GPUs of `count` of its pods, at most those that are not done: what these held Kueue has given to others."""
    left = max(0, _count(pod_set) - done.get(pod_set.get("name"), 0))
    return min(count, left) * request(look(pod_set, ("template", "spec")) or {})


def _admitted(assignment: Mapping[str, Any], counts: Pods, done: Pods) -> float:
    """GPUs that an admitted set of pods still holds. Its `resourceUsage` stays as it was when it was admitted."""
    name = assignment.get("name")
    pods = int(assignment.get("count") or counts.get(name) or 1)
    return gpus(assignment.get("resourceUsage")) * max(0, pods - done.get(name, 0)) / pods


def _queue_of(
    owner: Mapping[str, QueuePolicy], locals_: Mapping[str, Object], namespace: str, obj: Object
) -> QueuePolicy | None:
    """By its LocalQueue, else by the ClusterQueue that this leads to."""
    local = f"{QUEUE_PREFIX}:{namespace}/{look(obj, ('spec', 'queueName')) or ''}"
    cluster = look(obj, ("status", "admission", "clusterQueue")) or look(
        locals_.get(local, {}), ("spec", "clusterQueue")
    )
    return owner.get(local) or owner.get(f"{QUEUE_PREFIX}:{cluster}")


def _configuration(seen: Seen) -> Mapping[str, Any] | None:
    """Kueue's own configuration; None where it cannot be read."""
    for config_map in seen.get(CONFIG_MAP, ()):
        for text in (config_map.get("data") or {}).values():
            try:
                document = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            if isinstance(document, dict) and document.get("kind") == "Configuration":
                return document
    return None


def _effective(
    configuration: Mapping[str, Any] | None,
    queues: Iterable[Object],
    idle: Sequence[str],
) -> Condition:
    """Whether Kueue reads our weights: by its configuration, else by the shares it shows."""
    shares = any(look(queue, ("status", "fairSharing")) is not None for queue in queues)
    fair = (configuration or {}).get("fairSharing")
    off = configuration is not None and (not isinstance(fair, Mapping) or fair.get("enable") is False)
    if off:
        text = (
            "Kueue's configuration has no fairSharing: it does not read weights; add `fairSharing: {}` and restart it"
        )
        return Condition("Effective", "False", "FairSharingOff", text)
    if idle:
        reason = "AdmissionFairSharingOff" if all(each.startswith("LocalQueue") for each in idle) else "NothingToShare"
        return Condition("Effective", "False", reason, say(idle))
    if configuration is None and not shares:
        text = "Kueue's configuration cannot be read, and no ClusterQueue shows a weighted share"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text)
    return Condition("Effective", "True", "FairSharing", "Kueue divides what is borrowed by our weights")
