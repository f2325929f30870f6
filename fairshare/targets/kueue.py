"""Maps the policy to Kueue's ClusterQueues, Cohorts and LocalQueues, and reports where weights have no effect.

`kueue:NAME` refers to a ClusterQueue, `kueue-cohort:NAME` to a Cohort, `kueue:NAMESPACE/NAME` to a LocalQueue. A
queue's weight is written to its Cohort. Without one it is written to its ClusterQueue, and without this to its one
LocalQueue. If a queue has a Cohort or a ClusterQueue, its LocalQueues only identify its workloads. History therefore
counts between the queues of a cohort and between cohorts, where Kueue itself keeps no history.

Inside one ClusterQueue Kueue may keep history of its own (admission fair sharing, AFS). There a LocalQueue gets the
configured weight, because history would count twice. Without AFS Kueue does not read LocalQueue weights at all, and the
condition `Effective` reports this. The statuses that Kueue's manager writes show whether it reads weights. Its
configuration explains why.

Kueue admits by quota. A Workload holds the GPUs for which it is admitted. A queue can get at most the quotas of its
ClusterQueue and Cohorts (see `admission_quotas`), even if the nodes have more GPUs.

A weight is written as fixed-point text, 0.000001 at least, because a JSON number that is no integer is refused.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/kueue/v1beta2 (v1beta1 if only that is served).

The setting that switches fair sharing on differs by the version of the configuration:

- `v1beta2`: the section `fairSharing`. It must name `preemptionStrategies` and has no key `enable`; otherwise the
  manager exits.
- `v1beta1`: `fairSharing.enable: true`. Without it the section is ignored.

Admission fair sharing is switched on by `admissionFairSharing` in both, and counts nothing while its
`usageHalfLifeTime` is 0 or unset.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/config, pkg/config (read strictly: an unknown key ends the manager)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.admission_quotas import Quotas, capacity
from fairshare.core.pods import CHECKPOINT, amounts, by_gang, in_order, millis, named, request, with_pods
from fairshare.core.queue_annotations import (
    differences,
    in_sync,
    match,
    owners,
    read_queues,
    say,
    target_queue,
)
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Condition,
    Eviction,
    Gang,
    Issue,
    Observation,
    Pod,
    Quota,
    Standing,
    TargetQueue,
    Value,
    Weight,
)
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen
from gputally.base.yaml_file import MAX_CONFIG_CHARACTERS, FileFault, parse
from gputally.kubernetes.objects import CONFIG_MAP, GPU, Kind, Object, fixed_point, gpus, quantity, value_at

_CONFIGURATION_GROUP = "config.kueue.x-k8s.io/"
_FINAL, _INITIAL = "LessThanOrEqualToFinalShare", "LessThanInitialShare"
_STRATEGIES = ([_FINAL], [_INITIAL], [_FINAL, _INITIAL])
_ZERO = re.compile(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h)?)*")


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings about weights in Kueue's configuration.

    version: of the document, such as `v1beta2`.
    fair: weights of ClusterQueues and Cohorts are read.
    admission: weights of LocalQueues are read, if their ClusterQueue enables it.
    frozen: as `admission`, but nothing is counted.
    fault: why the manager does not start with it, "" if no fault is known."""

    version: str
    fair: bool
    admission: bool
    frozen: bool = False
    fault: str = ""


def read_configuration(config_maps: Iterable[Object]) -> Configuration | None:
    """Return the first configuration of Kueue in one of these ConfigMaps; None if none can be read."""
    for config_map in config_maps:
        for key, text in sorted((config_map.get("data") or {}).items()):
            try:
                document = parse(text, key, MAX_CONFIG_CHARACTERS).data
            except FileFault:
                continue
            if isinstance(document, dict) and str(document.get("apiVersion", "")).startswith(_CONFIGURATION_GROUP):
                return _configuration(document)
    return None


def fair_sharing_lines(version: str) -> str:
    """Return the lines that switch fair sharing on, in a configuration of this version."""
    if version == "v1beta1":
        return "fairSharing: {enable: true}"
    return f"fairSharing: {{preemptionStrategies: [{_FINAL}, {_INITIAL}]}}"


def admission_lines() -> str:
    """Return the lines that switch admission fair sharing on, in any version."""
    return "admissionFairSharing: {usageHalfLifeTime: 168h, usageSamplingInterval: 5m}"


def _configuration(document: Mapping[str, Any]) -> Configuration:
    version = str(document["apiVersion"]).removeprefix(_CONFIGURATION_GROUP)
    fair, fault = _fair_sharing(version, document.get("fairSharing"))
    admission = document.get("admissionFairSharing")
    gates = document.get("featureGates")
    switched_off = isinstance(gates, Mapping) and gates.get("AdmissionFairSharing") is False
    on = isinstance(admission, Mapping) and not switched_off
    frozen = isinstance(admission, Mapping) and bool(_ZERO.fullmatch(str(admission.get("usageHalfLifeTime") or "0")))
    return Configuration(version, fair, on, frozen, fault)


def _fair_sharing(version: str, section: object) -> tuple[bool, str]:
    """Return whether weights are read, and why the manager does not start."""
    if section is None:
        return False, ""
    if not isinstance(section, Mapping):
        return False, "fairSharing is no section"
    known = {"preemptionStrategies"} | ({"enable"} if version == "v1beta1" else set())
    strange = sorted(str(key) for key in section if key not in known)
    if strange:
        return False, f"fairSharing.{strange[0]} is unknown in {version}"
    if version == "v1beta1" and section.get("enable") is not True:
        return False, ""
    strategies = section.get("preemptionStrategies")
    if not strategies:
        return version == "v1beta1", "" if version == "v1beta1" else "fairSharing.preemptionStrategies is required"
    if strategies not in _STRATEGIES:
        return False, f"fairSharing.preemptionStrategies are {strategies}"
    return True, ""


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
"""The smallest weight that Kueue safely distinguishes from zero."""
UNSET = 1.0
"""Kueue's value for a weight that is not set."""
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
"""Annotation of an elastic job's new Workload: namespace/name of the Workload that it replaces once admitted."""
_AFS = "UsageBasedAdmissionFairSharing"
_WITHIN = "due to prioritization in the ClusterQueue"
"""Words of a preemption that does not take from another ClusterQueue."""
_FOR_WORKLOAD = re.compile(r"\(UID: ([^,)\s]+)")
_FOR_QUEUE = re.compile(r"preemptor path: \S*/([^/;\s]+)")


class KueueAdapter(Adapter):
    """The adapter for Kueue."""

    name = "kueue"
    prefixes = (QUEUE_PREFIX, COHORT_PREFIX)

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        namespace, _, name = policy.targets.kueue.config.partition("/")
        return (
            ObjectQuery(CLUSTER_QUEUES, required=True),
            ObjectQuery(COHORTS),
            ObjectQuery(LOCAL_QUEUES),
            ObjectQuery(WORKLOADS),
            ObjectQuery((CONFIG_MAP,), namespace=namespace, name=name),
        )

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        queues = {obj["metadata"]["name"]: obj for obj in _objects(seen, CLUSTER_QUEUES)}
        cohorts = {obj["metadata"]["name"]: obj for obj in _objects(seen, COHORTS)}
        locals_ = {_ref(obj): obj for obj in _objects(seen, LOCAL_QUEUES)}
        workloads = _objects(seen, WORKLOADS)
        owner = owners(policy, QUEUE_PREFIX, COHORT_PREFIX)
        carriers = {ref: queue for ref, queue in owner.items() if ref in _carriers(owner)}
        found = match([*cohorts.values(), *queues.values(), *locals_.values()], carriers, _ref, "Kueue queue")
        configuration = read_configuration(seen.get(CONFIG_MAP, ()))
        nodes = _quotas(queues, cohorts, workloads if any(kind in seen for kind in WORKLOADS) else None)
        quotas = Quotas(nodes)
        gangs, stopped = _gangs(owner, workloads, locals_, queues, nodes, pods)
        asked = amounts(policy, gangs)

        def read(name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            weight = value_at(obj, ("spec", "fairSharing", "weight"))
            number = None if weight is None else quantity(weight)
            if weight is not None and number is None:
                return Issue(obj["metadata"]["name"], f"spec.fairSharing.weight is {weight!r}")
            kind = _kind_of(obj)
            static = _keeps_history(obj, kind, queues, configuration)
            held = target_queue(obj, kind, number, static=static, unset=UNSET)
            demand = asked.get(name, Standing(_own(obj), _own(obj)))
            most = quotas.most(_pool(obj))
            return held, Standing(
                demand.requested,
                demand.allocated,
                UNSET if number is None else number,
                held.changed_ms,
                held.direction,
                most=UNLIMITED if most == inf else most,
            )

        known = read_queues(found, read)
        carried = {name: found.found[name] for name in known.held}
        conditions = (
            _effective(policy, configuration, carried, queues),
            _in_sync(policy, owner, carried, quotas, stopped),
        )
        taken = tuple(_evictions(gangs, owner, workloads))
        can_give = capacity(quotas, map(_pool, carried.values()))
        return Observation(
            known.held, known.standings, known.issues, conditions, gangs, taken, known.left, nodes, can_give
        )

    def express(
        self, _policy: Policy, weights: Sequence[Weight], observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """Write six decimals, never zero unless the policy says zero; for a LocalQueue under AFS the
        configured weight."""
        values: dict[str, Value] = {}
        for weight in weights:
            held = observation.held.get(weight.queue)
            if held is None:
                continue
            wanted = weight.configured if held.static else weight.value
            local = held.kind.kind == "LocalQueue"
            values[weight.queue] = 0.0 if wanted == 0 and not local else max(LEAST, round(wanted, 6))
        return values

    def spec(self, _held: TargetQueue, value: Value) -> Object:
        return {"fairSharing": {"weight": fixed_point(float(value))}}


def _evictions(
    gangs: Sequence[Gang], owner: Mapping[str, QueuePolicy], workloads: Sequence[Object]
) -> Iterator[Eviction]:
    """Yield evictions from the condition `Preempted` of each victim. It names the Workload that gets the room, by uid,
    and by which path. Once the victim is admitted again, the condition is False and its message still states this. The
    status counts preemptions, so none between two cycles is missed. If there were several since the last cycle, only
    the latest is known."""
    queues = {gang.uid: gang.queue for gang in gangs}
    for obj in workloads:
        metadata = obj["metadata"]
        found: Mapping[str, Any] = next(
            (c for c in value_at(obj, ("status", "conditions")) or () if c.get("type") == "Preempted"), {}
        )
        text = found.get("message") or ""
        count = _preempted(obj)
        within = found.get("reason") == "InClusterQueue" or _WITHIN in text
        if not text or within or (count == 0 and found.get("status") != "True"):
            continue
        uid, path = _FOR_WORKLOAD.search(text), _FOR_QUEUE.search(text)
        queue = queues.get(uid[1]) if uid else None
        named_queue = owner.get(f"{QUEUE_PREFIX}:{path[1]}") if path else None
        queue = queue if queue is not None or named_queue is None else named_queue.name
        if queue is not None and queue != queues.get(metadata.get("uid", "")):
            when = count or found.get("lastTransitionTime", "")
            yield Eviction(
                f"{metadata.get('uid', '')}/{when}", queue, f"{metadata.get('namespace', '')}/{metadata['name']}"
            )


def _preempted(workload: Object) -> int:
    """Return how often Kueue has preempted it; 0 if its release does not count."""
    counts = value_at(workload, ("status", "schedulingStats", "evictions")) or ()
    return sum(int(each.get("count") or 0) for each in counts if each.get("reason") == "Preempted")


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
    """Return for each queue its refs at the highest level: Cohort, ClusterQueue, LocalQueue."""
    best: dict[str, int] = {}
    for ref, queue in owner.items():
        best[queue.name] = min(best.get(queue.name, 3), _level(ref))
    return {ref for ref, queue in owner.items() if _level(ref) == best[queue.name]}


def _level(ref: str) -> int:
    return 0 if ref.startswith(f"{COHORT_PREFIX}:") else 2 if "/" in ref else 1


def _asks_for_history(cluster_queue: Object | None) -> bool:
    return bool(value_at(cluster_queue or {}, ("spec", "admissionScope", "admissionMode")) == _AFS)


def _keeps_history(obj: Object, kind: Kind, queues: Mapping[str, Object], configuration: Configuration | None) -> bool:
    """Return whether Kueue itself counts what a LocalQueue used; True if this is unknown."""
    asks = kind.kind == "LocalQueue" and _asks_for_history(queues.get(obj["spec"].get("clusterQueue", "")))
    return asks and (configuration is None or configuration.admission)


def _cohort(obj: Object) -> str:
    """Return the name of the Cohort above a ClusterQueue or Cohort, "" if there is none."""
    spec = obj.get("spec") or {}
    names = ("parentName", "parent") if obj["kind"] == "Cohort" else ("cohortName", "cohort")
    return str(next((spec[name] for name in names if spec.get(name)), ""))


def _title(obj: Object) -> str:
    namespace = obj["metadata"].get("namespace")
    return f"{obj['kind']} {namespace + '/' if namespace else ''}{obj['metadata']['name']}"


def _own(obj: Object) -> float:
    """Return the reserved GPUs in the queue's status; a Cohort's status has none."""
    flavors = value_at(obj, ("status", "flavorsReservation")) or ()
    return fsum(gpus({r["name"]: r.get("total")}) for flavor in flavors for r in flavor.get("resources") or ())


def _pool(obj: Object) -> str:
    """Return the node of the quota tree by which a queue's work is admitted."""
    if obj["kind"] == "LocalQueue":
        return f"ClusterQueue {obj['spec'].get('clusterQueue', '')}"
    return _title(obj)


def _quotas(
    queues: Mapping[str, Object], cohorts: Mapping[str, Object], workloads: Sequence[Object] | None
) -> dict[str, Quota]:
    """Return every ClusterQueue with a GPU quota, and the Cohorts above. workloads: None if they cannot be read."""
    used: dict[str, list[float]] = {}
    for obj in workloads or ():
        cluster_queue = value_at(obj, ("status", "admission", "clusterQueue"))
        if cluster_queue and not _finished(obj):
            used.setdefault(cluster_queue, []).append(_admitted(obj))
    found: dict[str, Quota] = {}
    for name, obj in queues.items():
        if _counts_gpus(obj):
            held = _own(obj) if workloads is None else fsum(used.get(name, ()))
            found[_title(obj)] = _quota(obj, held)
    for obj in cohorts.values():
        found[_title(obj)] = _quota(obj, 0.0)
    return found


def _resources(obj: Object) -> Iterator[Mapping[str, Any]]:
    """Yield the quotas of a ClusterQueue or Cohort, flavor by flavor, of GPU resources."""
    for group in value_at(obj, ("spec", "resourceGroups")) or ():
        for flavor in group.get("flavors") or ():
            for resource in flavor.get("resources") or ():
                if str(resource.get("name")).startswith((GPU, "nvidia.com/mig-")):
                    yield resource


def _counts_gpus(obj: Object) -> bool:
    return next(_resources(obj), None) is not None


def _quota(obj: Object, used: float) -> Quota:
    def add_up(what: str) -> float:
        return fsum(gpus({each["name"]: each.get(what)}) for each in resources)

    def bound(what: str) -> float:
        return add_up(what) if resources and all(each.get(what) is not None for each in resources) else UNLIMITED

    resources = list(_resources(obj))
    above = _cohort(obj)
    return Quota(
        f"Cohort {above}" if above else "", add_up("nominalQuota"), used, bound("borrowingLimit"), bound("lendingLimit")
    )


def _finished(workload: Object) -> bool:
    conditions = value_at(workload, ("status", "conditions")) or ()
    return any((c.get("type"), c.get("status")) == ("Finished", "True") for c in conditions)


def _gangs(
    owner: Mapping[str, QueuePolicy],
    workloads: Sequence[Object],
    locals_: Mapping[str, Object],
    queues: Mapping[str, Object],
    quotas: Mapping[str, Quota],
    pods: Sequence[Pod],
) -> tuple[tuple[Gang, ...], tuple[str, ...]]:
    """Return Workloads that request GPUs and are neither finished nor deactivated. Also return a sentence for each
    queue that keeps work waiting. Work that no queue admits requests nothing."""
    members = by_gang(pods)
    live = {f"{o['metadata'].get('namespace', '')}/{o['metadata']['name']}": o for o in workloads if not _finished(o)}
    replaced = {
        value_at(obj, ("metadata", "annotations", REPLACES))
        for obj in live.values()
        if value_at(obj, ("status", "admission")) is not None
    }
    found = []
    kept_out: dict[str, float] = {}
    for key, obj in live.items():
        spec = obj.get("spec") or {}
        queue, pool = _queue_of(owner, locals_, obj)
        if queue is None or spec.get("active") is False or key in replaced:
            continue
        admitted = value_at(obj, ("status", "admission")) is not None
        gang = _gang(obj, queue.name, f"ClusterQueue {pool}", live)
        if gang.requested <= 0:
            continue
        if gang.pool not in quotas:
            gang = replace(gang, pool="")
        halt = None if admitted else _halt(obj, locals_, queues.get(pool))
        if halt is not None:
            kept_out[halt] = kept_out.get(halt, 0.0) + gang.requested
            continue
        shown = with_pods(gang, members.get(named(obj), ()))
        # An admitted Workload holds its GPUs even before its pods exist: Kueue gives them to no other Workload.
        found.append(
            shown
            if not admitted
            else replace(
                shown, requested=gang.requested, allocated=gang.allocated, minimum=min(shown.minimum, gang.requested)
            )
        )
    stopped = tuple(f"{halt}: {amount:g} GPUs that wait there are not counted" for halt, amount in kept_out.items())
    return in_order(found), tuple(sorted(stopped))


def _gang(obj: Object, queue: str, pool: str, live: Mapping[str, Object]) -> Gang:
    """Read one Workload. An admitted Workload gets no more, even if it requested more (partial admission). The next
    Workload of an elastic job requests what it adds to the one that it replaces."""
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    sets = spec.get("podSets") or ()
    done = _done(obj)
    asked = fsum(_pod_set(each, _count(each), done) for each in sets)
    least = fsum(_pod_set(each, _count(each, "minCount"), done) for each in sets)
    held = _admitted(obj)
    if value_at(obj, ("status", "admission", "podSetAssignments")):
        asked = held
    elif value_at(obj, ("status", "admission")) is None:
        before = live.get(value_at(metadata, ("annotations", REPLACES)) or "")
        given = _admitted(before) if before is not None else 0.0
        asked, least = max(0.0, asked - given), max(0.0, least - given)
    since = [
        millis(c.get("lastTransitionTime"))
        for c in value_at(obj, ("status", "conditions")) or ()
        if c["type"] == "Admitted" and c["status"] == "True"
    ]
    owners_ = [each for each in metadata.get("ownerReferences") or () if each.get("kind") != "Pod"]
    return Gang(
        queue,
        _kind_of(obj),
        metadata.get("namespace", ""),
        metadata["name"],
        metadata.get("uid", ""),
        asked,
        held,
        min(least, asked) or asked,
        int(spec.get("priority") or 0),
        True,
        millis(metadata.get("creationTimestamp")),
        next((at for at in since if at is not None), None),
        millis((metadata.get("annotations") or {}).get(CHECKPOINT)),
        job=next((each["name"] for each in owners_ if each.get("controller")), ""),
        pool=pool,
        topology=next((level for each in sets if (level := value_at(each, ("topologyRequest", "required")))), ""),
    )


Pods = Mapping[str | None, int]
"""Pods by the name of their set."""


def _done(workload: Object) -> Pods:
    """Return pods that have completed; Kueue has given their quota to others."""
    done = value_at(workload, ("status", "reclaimablePods")) or ()
    return {each.get("name"): int(each.get("count") or 0) for each in done}


def _count(pod_set: Mapping[str, Any], which: str = "count") -> int:
    found = next((pod_set[key] for key in (which, "count") if pod_set.get(key) is not None), 1)
    return int(found)


def _pod_set(pod_set: Mapping[str, Any], count: int, done: Pods) -> float:
    """Return the GPUs of `count` of its pods, at most of those that are not done."""
    left = max(0, _count(pod_set) - done.get(pod_set.get("name"), 0))
    return min(count, left) * request(value_at(pod_set, ("template", "spec")) or {})


def _admitted(workload: Object) -> float:
    """Return the GPUs that a Workload is admitted for and still holds: of each set the admitted number of pods, times a
    pod's request. The admission's own figures may be of other resources, into which Kueue transforms GPUs."""
    done = _done(workload)
    sets = {each.get("name"): each for each in value_at(workload, ("spec", "podSets")) or ()}
    held = []
    for assignment in value_at(workload, ("status", "admission", "podSetAssignments")) or ():
        pod_set = sets.get(assignment.get("name"), {})
        pods = _count(assignment) if assignment.get("count") is not None else _count(pod_set)
        left = max(0, pods - done.get(assignment.get("name"), 0))
        held.append(left * request(value_at(pod_set, ("template", "spec")) or {}))
    return fsum(held)


def _queue_of(
    owner: Mapping[str, QueuePolicy], locals_: Mapping[str, Object], obj: Object
) -> tuple[QueuePolicy | None, str]:
    """Return the policy's queue by its LocalQueue, else by that LocalQueue's ClusterQueue, which is the
    second value."""
    local = _local(obj)
    cluster = value_at(obj, ("status", "admission", "clusterQueue")) or value_at(
        locals_.get(local, {}), ("spec", "clusterQueue")
    )
    return owner.get(local) or owner.get(f"{QUEUE_PREFIX}:{cluster}"), str(cluster or "")


def _local(workload: Object) -> str:
    """Return the LocalQueue of a Workload, as a ref."""
    namespace = workload["metadata"].get("namespace", "")
    return f"{QUEUE_PREFIX}:{namespace}/{value_at(workload, ('spec', 'queueName')) or ''}"


def _halt(workload: Object, locals_: Mapping[str, Object], cluster_queue: Object | None) -> str | None:
    """Describe what prevents its admission, whatever quota there is."""
    for obj in (locals_.get(_local(workload)), cluster_queue):
        if obj is None:
            continue
        policy = value_at(obj, ("spec", "stopPolicy")) or "None"
        if policy != "None":
            return f"{_title(obj)} admits nothing (stopPolicy {policy})"
        for found in value_at(obj, ("status", "conditions")) or ():
            if (found.get("type"), found.get("status")) == ("Active", "False"):
                return f"{_title(obj)} admits nothing ({found.get('reason')}: {found.get('message')})"
    return None


def _in_sync(
    policy: Policy,
    owner: Mapping[str, QueuePolicy],
    carried: Mapping[str, Object],
    quotas: Quotas,
    stopped: Sequence[str],
) -> Condition:
    """Return where Kueue's own quotas, limits and Cohorts differ from the policy. A LocalQueue has none."""
    differing: list[str] = []
    unknown: list[str] = []
    above: dict[str | None, dict[str, list[str]]] = {}
    for queue in sorted(policy.queues, key=lambda queue: queue.name):
        obj = carried.get(queue.name)
        if obj is None or obj["kind"] == "LocalQueue":
            continue
        pool, cohort = _pool(obj), _cohort(obj)
        parent = owner.get(f"{COHORT_PREFIX}:{cohort}") if cohort else None
        pairs: list[tuple[str, object, object]] = []
        if pool in quotas:
            most, quota = quotas.most(pool), _quota(obj, 0.0)
            pairs.append(("quota", quotas.total(pool), queue.deserved))
            limit = most if not cohort or quota.borrows != UNLIMITED else UNLIMITED
            if cohort or queue.limit != UNLIMITED:
                pairs.append(("limit", limit, queue.limit))
        else:
            unknown.append(pool)
        if parent is not None or any(ref.startswith(f"{COHORT_PREFIX}:") for ref in _refs(policy, queue.parent)):
            pairs.append(("parent", parent.name if parent else cohort or None, queue.parent))
        elif cohort:
            above.setdefault(queue.parent, {}).setdefault(cohort, []).append(queue.name)
        differing += differences(obj["metadata"]["name"], pairs)
    for parted in above.values():
        if len(parted) > 1:
            places = "; ".join(f"{', '.join(names)} in Cohort {cohort}" for cohort, names in sorted(parted.items()))
            differing.append(f"siblings in the policy share no Cohort: {places}")
    text = f"{say(unknown)} has no quota of {GPU}: what it can get is not known" if unknown else ""
    return in_sync(differing, stopped, what="quota, limit and parent", unknown=text)


def _refs(policy: Policy, name: str | None) -> Sequence[str]:
    return next((queue.refs for queue in policy.queues if queue.name == name), ())


def _effective(
    policy: Policy,
    configuration: Configuration | None,
    carried: Mapping[str, Object],
    queues: Mapping[str, Object],
) -> Condition:
    """Return whether Kueue reads the weights of ClusterQueues and Cohorts, and separately of LocalQueues."""
    where = policy.targets.kueue.config
    shared = {name: obj for name, obj in carried.items() if obj["kind"] != "LocalQueue"}
    locals_ = [obj for _, obj in sorted(carried.items()) if obj["kind"] == "LocalQueue"]
    verdicts = [_admits_by(configuration, locals_, queues, where)] if locals_ else []
    if shared or not locals_:
        verdicts.append(_shares(configuration, queues.values(), where))
        alone = _alone(policy, shared)
        if alone and verdicts[-1].status != "False":
            verdicts[-1] = Condition("Effective", "False", "NothingToShare", say(alone))
    worst = min(verdicts, key=lambda verdict: ("False", "Unknown", "True").index(verdict.status))
    said = dict.fromkeys(verdict.message for verdict in verdicts if verdict.status == worst.status)
    return replace(worst, message="; ".join(said))


def _shares(configuration: Configuration | None, queues: Iterable[Object], where: str) -> Condition:
    """Return whether the manager shows shares on every ClusterQueue, or on none. where: its configuration's
    ConfigMap."""
    told = [obj for obj in queues if obj.get("status")]
    on = sum(value_at(obj, ("status", "fairSharing")) is not None for obj in told)
    advice = _remedy(where, fair_sharing_lines(configuration.version if configuration else "v1beta2"), configuration)
    if told and 0 < on < len(told):
        text = f"{on} of {len(told)} ClusterQueues show a weighted share: Kueue's manager has not come to all of them"
        return Condition("Effective", "Unknown", "SharesDisagree", text)
    shown = bool(told) and on == len(told)
    if configuration is not None and configuration.fault:
        text = f"Kueue's manager does not start with ConfigMap {where}: {configuration.fault}"
        return Condition("Effective", "Unknown" if shown else "False", "ConfigurationRefused", text, advice)
    if shown:
        if configuration is not None and not configuration.fair:
            text = f"Kueue reads weights now, and ConfigMap {where} switches that off at its manager's next start"
            return Condition("Effective", "Unknown", "RestartPending", text, advice)
        return Condition("Effective", "True", "FairSharing", "Kueue divides what is borrowed by our weights")
    if told and configuration is not None and configuration.fair:
        text = f"no ClusterQueue shows a weighted share, though ConfigMap {where} switches fair sharing on"
        return Condition("Effective", "False", "FairSharingOff", f"{text}: restart Kueue's manager", advice)
    if told or (configuration is not None and not configuration.fair):
        seen = "no ClusterQueue shows a weighted share" if told else f"ConfigMap {where} does not switch it on"
        text = f"fair sharing is off in Kueue: it does not read weights ({seen})"
        return Condition("Effective", "False", "FairSharingOff", text, advice)
    if configuration is None:
        text = f"Kueue's configuration cannot be read from ConfigMap {where}, and no ClusterQueue has a status"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text)
    return Condition("Effective", "Unknown", "SharesUnseen", "no ClusterQueue has a status: does Kueue's manager run?")


def _remedy(where: str, lines: str, configuration: Configuration | None) -> str:
    """Return what to write, and where."""
    namespace, _, name = where.partition("/")
    version = f" ({configuration.version})" if configuration is not None else ""
    return (
        f"kubectl -n {namespace} edit configmap {name}, and write in Kueue's Configuration{version}: `{lines}`; then"
        f" kubectl -n {namespace} rollout restart deployment/kueue-controller-manager"
    )


def _alone(policy: Policy, shared: Mapping[str, Object]) -> list[str]:
    """Return objects without a Cohort above, which borrow from no other. The root of a tree has none on purpose: it is
    left out if the policy has nothing beside it."""
    parents = {queue.name: queue.parent for queue in policy.queues}
    beside: dict[str | None, int] = {}
    for name in shared:
        beside[parents[name]] = beside.get(parents[name], 0) + 1
    return [
        f"{_title(obj)} is in no cohort: it shares with no other"
        for name, obj in sorted(shared.items())
        if not _cohort(obj) and (obj["kind"] != "Cohort" or beside[parents[name]] > 1)
    ]


def _admits_by(
    configuration: Configuration | None, locals_: Sequence[Object], queues: Mapping[str, Object], where: str
) -> Condition:
    """Return whether, for LocalQueues, Kueue orders a ClusterQueue's work by usage over weight."""
    scoped = [obj for obj in locals_ if _asks_for_history(queues.get(obj["spec"].get("clusterQueue", "")))]
    faults = [
        f"{_title(obj)}: its ClusterQueue has no admissionScope, so that Kueue does not read its weight"
        for obj in locals_
        if obj not in scoped
    ]
    remedy = ""
    if faults:
        remedy = "write in the spec of its ClusterQueue: `admissionScope: {admissionMode: " + _AFS + "}`"
    elif configuration is not None and (not configuration.admission or configuration.frozen):
        lack = "usageHalfLifeTime" if configuration.admission else "admissionFairSharing"
        faults = [f"ConfigMap {where} has no {lack}: Kueue counts no usage of LocalQueues"]
        remedy = _remedy(where, admission_lines(), configuration)
    if faults:
        return Condition("Effective", "False", "AdmissionFairSharingOff", say(faults), remedy)
    if configuration is None:
        text = f"Kueue's configuration cannot be read from ConfigMap {where}: does it have admissionFairSharing?"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text)
    silent = [obj for obj in scoped if value_at(obj, ("status", "fairSharing", "admissionFairSharingStatus")) is None]
    if silent:
        text = f"Kueue shows no usage yet of {say([_title(obj) for obj in silent])}: does its manager run?"
        return Condition("Effective", "Unknown", "UsageUnseen", text)
    return Condition(
        "Effective", "True", "AdmissionFairSharing", "Kueue admits by what a LocalQueue used over its weight"
    )
