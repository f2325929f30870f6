"""Maps the policy to KAI-Scheduler's Queue objects, and reports when weights have no effect.

Mode `weight` writes exactly one field, `spec.resources.gpu.overQuotaWeight`, and annotations. KAI's own history (kValue
with a usage database) must then be off, because otherwise the same usage counts twice. Mode `usage` writes nothing: KAI
reads its history from the accountant, and weights stay as the operator set them. The condition `Effective` reports a
wrong configuration.

Source: kai-scheduler/KAI-Scheduler, scheduling.run.ai/v2 Queue, scheduling.run.ai/v2alpha2 PodGroup and
kai.scheduler/v1 SchedulingShard, commit d5bc503a."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.pods import CHECKPOINT, by_gang, in_order, millis, named, with_pods
from fairshare.core.queue_annotations import differences, in_sync, match, owners, read_queues, target_queue
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import (
    Condition,
    Eviction,
    Gang,
    Issue,
    Observation,
    Pod,
    Shard,
    Standing,
    TargetQueue,
    Value,
)
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen
from gputally.kubernetes.objects import (
    EVENT,
    GPU,
    NODE,
    PRIORITY_CLASS,
    Kind,
    Object,
    gpus,
    node_up,
    quantity,
    value_at,
)

QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues")
SHARD = Kind("kai.scheduler/v1", "SchedulingShard", "schedulingshards")
POD_GROUP = Kind("scheduling.run.ai/v2alpha2", "PodGroup", "podgroups", namespaced=True)
CONFIG = Kind("kai.scheduler/v1", "Config", "configs")
KINDS = (QUEUE, SHARD, POD_GROUP, CONFIG)
CONFIG_NAME = "kai-config"
POOL_LABEL = "kai.scheduler/node-pool"
"""The label of node pools, unless `spec.global.nodePoolLabelKey` of KAI's Config names another."""
_NAMESPACE = "kai-scheduler"
DEFAULT_K = 1.0
"""KAI's value for a missing kValue."""
PREFIX = "kai"
CLAIMED = "gpu.nvidia.com"
"""DeviceClass of NVIDIA's driver for whole GPUs, under which KAI records claimed GPUs."""
_FIRST_NOT_PREEMPTIBLE = 100
_RECLAIMED = re.compile(r"was preempted by workload ([^/\s]+)/(\S+)\.(?=\s|$)")
"""KAI's words for reclaim; for preemption within a queue it writes of a *higher priority* workload."""
_DEFAULT_PRIORITY = 50
"""KAI's priority if the PodGroup's class does not exist and no class is the global default."""
_PRIORITIES = {"train": 50, "build-preemptible": 75, "build": 100, "inference": 125}
"""KAI's own PriorityClasses, for a controller that may not read any."""
_AGGREGATED = re.compile(r"^(?:max|min|sum|avg)\s*(?:(?:by|without)\s*\([^)]*\)\s*)?(?=\()")
_MEMORY_LABEL = "nvidia.com/gpu.memory"
_TEBIBYTE_MIB = 2**20
_METRICS = {
    f"{resource}{of}Metric": default
    for resource, gauge, capacity in (
        ("gpu", "gpus", "nvidia_com_gpu"),
        ("cpu", "cpu_cores", "cpu"),
        ("memory", "memory_bytes", "memory"),
    )
    for of, default in (
        ("Allocation", f"kai_queue_allocated_{gauge}"),
        ("Capacity", f'sum(kube_node_status_capacity{{resource="{capacity}"}})'),
    )
}
"""The metrics that KAI queries unless `extraParams` name others; the accountant's endpoint answers only these."""


class KaiAdapter(Adapter):
    """The adapter for KAI."""

    name = "kai"
    prefixes = (PREFIX,)

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        evictions = (ObjectQuery((EVENT,), fields="reason=Evict"),) if policy.law == "deficit" else ()
        return (
            ObjectQuery((QUEUE,), required=True),
            ObjectQuery((SHARD,)),
            ObjectQuery((POD_GROUP,)),
            ObjectQuery((PRIORITY_CLASS,)),
            ObjectQuery((NODE,)),
            ObjectQuery((CONFIG,), name=CONFIG_NAME),
            *evictions,
        )

    def publishes(self, policy: Policy) -> bool:
        return policy.targets.kai.mode == "weight"

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        """Return the queues of the policy with their KAI Queues. Queues that no ref names are ignored."""
        owner = owners(policy, PREFIX)
        found = match(seen.get(QUEUE, ()), owner, lambda obj: f"{PREFIX}:{obj['metadata']['name']}", "KAI queue")
        queues = read_queues(found, lambda _name, obj: read_queue(obj))
        differing: list[str] = []
        for queue in sorted(policy.queues, key=lambda queue: queue.name):
            if queue.name in queues.held:
                differing += _differences(queue, found.found[queue.name], owner)
        shards = seen.get(SHARD, ())
        endpoint, config = policy.targets.kai.endpoint, next(iter(seen.get(CONFIG, ())), None)
        acts = effective(shards) if self.publishes(policy) else usage_read(shards, endpoint, config)
        sized = _sized(pods, seen.get(NODE, ()))
        standings = _with_memory(policy, owner, queues.standings, sized)
        key = str(value_at(config or {}, ("spec", "global", "nodePoolLabelKey")) or POOL_LABEL)
        labels = {name: _pool_of(obj, key) for name, obj in found.found.items()}
        values = None if SHARD not in seen or not shards else [_value(shard) for shard in shards]
        apart, unserved = _shards(policy, key, labels, values, seen.get(NODE, ()), sized)
        if any(shard.nodes is not None for shard in apart):
            sized = _bound_to_pools(sized, key, owner, labels)
        gangs = _gangs(owner, seen.get(POD_GROUP, ()), sized, seen.get(PRIORITY_CLASS))
        taken = tuple(_evictions(owner, seen.get(POD_GROUP, ()), seen.get(EVENT, ())))
        issues = (*queues.issues, *unserved)
        conditions = (acts, in_sync(differing))
        return Observation(queues.held, standings, issues, conditions, gangs, taken, queues.left, shards=apart)

    def spec(self, _held: TargetQueue, value: Value) -> Object:
        return {"resources": {"gpu": {"overQuotaWeight": value}}}


def read_queue(obj: Object) -> tuple[TargetQueue, Standing] | Issue:
    """Read one Queue object. Missing quantities of its status are zero: nothing runs, nothing waits."""
    name = obj["metadata"]["name"]
    gpu = value_at(obj, ("spec", "resources", "gpu")) or {}
    weight = gpu.get("overQuotaWeight")
    if weight is not None and not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
        return Issue(name, f"spec.resources.gpu.overQuotaWeight is {weight!r}")
    amounts: list[float] = []
    for key in ("requested", "allocated"):
        text = value_at(obj, ("status", key, GPU))
        if text is not None and quantity(text) is None:
            return Issue(name, f"status.{key}[{GPU}] is {text!r}, not a quantity")
        amounts.append(_gpus(value_at(obj, ("status", key))))
    requested, allocated = max(amounts), amounts[1]
    value = None if weight is None else float(weight)
    held = target_queue(obj, QUEUE, value)
    return held, Standing(requested, allocated, value, held.changed_ms, held.direction)


def _gpus(amounts: object) -> float:
    """Return the GPUs in an amount of KAI's: whole ones, MIG instances, and those of ResourceClaims under
    their class."""
    claimed = amounts.get(CLAIMED) if isinstance(amounts, Mapping) else None
    return gpus(amounts) + (quantity(claimed) or 0.0)


def effective(shards: Sequence[Object]) -> Condition:
    """Return whether gputally's weights are KAI's only history. Without a usage database KAI has no history, whatever k
    is."""
    faults: list[str] = []
    lines: list[str] = []
    for shard in shards:
        stated = _stated_k(shard)
        if (k := _k(stated)) != 0 and (shard.get("spec") or {}).get("usageDBConfig"):
            faults.append(f"{_said_k(shard, stated, k)} in SchedulingShard {shard['metadata']['name']}")
            lines.append(_patch_line(shard, _k_change(shard, 0)))
    if faults:
        text = f"{'; '.join(faults)}: set it to 0, history is in the weights"
        return Condition("Effective", "False", "HistoryCountedTwice", text, "; ".join(lines))
    if not shards:
        return Condition("Effective", "Unknown", "NoShards", "no SchedulingShard to read: make sure that kValue is 0")
    return Condition("Effective", "True", "WeightsOnly", "KAI divides by our weights alone")


def usage_read(shards: Sequence[Object], endpoint: str | None = None, config: Object | None = None) -> Condition:
    """In mode `usage`, return whether KAI reads history, and from `endpoint` if the policy names one. config: KAI's own
    Config, from which its operator fills in a missing address; None if it cannot be read."""
    faults: list[str] = []
    unknown: list[str] = []
    lines: list[str] = []
    for shard in shards:
        name = f"SchedulingShard {shard['metadata']['name']}"
        database = (shard.get("spec") or {}).get("usageDBConfig") or {}
        params = database.get("usageParams") or {}
        stated = _stated_k(shard)
        if _k(stated) == 0:
            faults.append(f"{_said_k(shard, stated, 0.0)} in {name}: history counts for nothing")
            lines.append(_patch_line(shard, _k_change(shard, 1)))
        wanted = usage_url(shard, endpoint, len(shards)) if endpoint is not None else None
        there = {"clientType": "prometheus", "connectionString": wanted or "URL", "connectionStringEnvVar": None}
        to_there = _patch_line(shard, {"usageDBConfig": there})
        if not database:
            faults.append(f"{name} has no usageDBConfig: give it the accountant's address")
            lines.append(to_there)
            continue
        if database.get("clientType") != "prometheus":
            faults.append(f"usageDBConfig.clientType of {name} is {database.get('clientType')!r}")
            lines.append(to_there)
            continue
        if params.get("windowType", "sliding") != "sliding":
            faults.append(f"windowType of {name} is {params['windowType']}: only sliding works")
            lines.append(_patch_line(shard, {"usageDBConfig": {"usageParams": {"windowType": "sliding"}}}))
        place, doubt = _address(database, config)
        if place is None:
            unknown.append(f"{name}: {doubt}")
            lines.append(to_there)
        elif wanted is None:
            unknown.append(f"{name} reads usage from {place}: is that the accountant's? Set targets.kai.endpoint")
            lines.append("in the policy: `targets: {kai: {mode: usage, endpoint: URL}}`")
        elif place != wanted:
            faults.append(f"{name} reads usage from {place or 'nowhere'}, not from {wanted}{doubt}")
            lines.append(to_there)
        if place is None or place == wanted:
            wrong, odd, out = _own_metrics(name, params.get("extraParams") or {})
            faults += wrong
            unknown += odd
            if out:
                extra = {"extraParams": dict.fromkeys(out)}
                lines.append(_patch_line(shard, {"usageDBConfig": {"usageParams": extra}}))
    remedy = "; ".join(dict.fromkeys(lines))
    if faults:
        return Condition("Effective", "False", "UsageNotRead", "; ".join(faults), remedy)
    if not shards:
        return Condition("Effective", "Unknown", "NoShards", "no SchedulingShard to read: does KAI read our usage?")
    if unknown:
        return Condition("Effective", "Unknown", "AddressUnknown", "; ".join(unknown), remedy)
    return Condition("Effective", "True", "UsageOnly", "KAI reads usage; its weights are left alone")


def _address(database: Mapping[str, Any], config: Object | None) -> tuple[str | None, str]:
    """Return where a shard's scheduler queries usage, and the source of the address; None and the reason if it cannot
    be read.

    Source: KAI pkg/operator/operands/scheduler/resources_for_shard.go, getUsageDBConfig."""
    variable = database.get("connectionStringEnvVar")
    if place := str(database.get("connectionString") or "").rstrip("/"):
        return ("", f" ({variable} is set too, which KAI refuses)") if variable else (place, "")
    if variable:
        return None, f"its address stands in the environment variable {variable} of the scheduler"
    if config is None:
        return None, f"it has no connectionString, and the Config {CONFIG_NAME} that fills it in cannot be read"
    spec = config.get("spec") or {}
    prometheus = spec.get("prometheus") or {}
    whence = f" (no connectionString: filled in from spec.prometheus of the Config {CONFIG_NAME})"
    if prometheus.get("enabled") is True:
        namespace = spec.get("namespace") or _NAMESPACE
        return f"http://usage-prometheus.{namespace}.svc.cluster.local:9090", whence
    return str(prometheus.get("externalPrometheusUrl") or "").rstrip("/"), whence


def _patch_line(shard: Object, spec: Mapping[str, Any]) -> str:
    """Return the command that writes the spec. KAI's operator then restarts the scheduler of the shard."""
    change = json.dumps({"spec": spec}, separators=(",", ":"))
    return f"kubectl patch schedulingshard {shard['metadata']['name']} --type merge -p '{change}'"


def _k_change(shard: Object, k: int) -> Mapping[str, Any]:
    """Return the change that sets the shard's k: a number in its spec, text among the plugin's arguments."""
    if _arguments(shard) is None:
        return {"kValue": k}
    return {"plugins": {"proportion": {"arguments": {"kValue": str(k)}}}}


def _own_metrics(shard: str, extra: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return expressions of the shard that the accountant's endpoint does not answer, those it may not answer, and
    their keys. It answers KAI's own metrics, in aggregations too, and a capacity selected by `resource`."""
    wrong: list[str] = []
    odd: list[str] = []
    keys: list[str] = []
    for key, default in _METRICS.items():
        text = str(extra.get(key) or default)
        if text == default or _AGGREGATED.sub("", text).strip("() ") == default:
            continue
        keys.append(key)
        told = f"extraParams.{key} of {shard} is {text!r}"
        known = default if "Allocation" in key else default.partition("{")[2].strip("{})")
        if known in text:
            odd.append(f"{told}: whether the accountant answers it is not known")
        else:
            wrong.append(f"{told}, which the accountant does not answer: leave it out")
    return wrong, odd, keys


def usage_url(shard: Object, endpoint: str, shards: int) -> str:
    """Return where a shard queries usage: of its own nodes, if there are several shards."""
    base = endpoint.rstrip("/")
    if shards < 2:
        return base
    value = (shard.get("spec") or {}).get("partitionLabelValue")
    return f"{base}/shards/{value}" if value else f"{base}/shards"


def shard_advice(policy: Policy, endpoint: str) -> dict[str, Any]:
    """Return the part of a SchedulingShard's `spec` that matches the policy. endpoint: where KAI queries usage.

    Changing a shard restarts KAI's scheduler. The window is the accountant's in both modes."""
    if policy.targets.kai.mode != "usage":
        return {"kValue": 0}
    window = policy.window
    params: dict[str, Any] = {"windowSize": f"{window.size}s", "windowType": "sliding", "fetchInterval": "30s"}
    if window.half_life is not None:
        params["halfLifePeriod"] = f"{window.half_life}s"
    return {
        "kValue": policy.k,
        "usageDBConfig": {"clientType": "prometheus", "connectionString": endpoint, "usageParams": params},
    }


def _arguments(shard: Object) -> Mapping[str, Any] | None:
    """Return the proportion plugin's own arguments; if they are set, even empty, only they count."""
    found = value_at(shard, ("spec", "plugins", "proportion", "arguments"))
    return found if isinstance(found, Mapping) else None


def _stated_k(shard: Object) -> object:
    """Return kValue as KAI's scheduler gets it; None if it gets none.

    Source: KAI pkg/apis/kai/v1/schedulingshard_types.go: a plugin's arguments replace the defaults."""
    arguments = _arguments(shard)
    return value_at(shard, ("spec", "kValue")) if arguments is None else arguments.get("kValue")


def _said_k(shard: Object, stated: object, k: float) -> str:
    if stated is not None:
        return f"kValue is {k:g}"
    if _arguments(shard) is not None:
        return (
            f"kValue is not among plugins.proportion.arguments, which replace all others, and so it is {k:g} (add"
            f' kValue: "0" there)'
        )
    return f"kValue is unset, which means {k:g}"


def _k(stated: object) -> float:
    """Return the kValue as KAI reads it: an invalid one is the default, a negative one is 0, and NaN stays NaN."""
    try:
        k = DEFAULT_K if stated is None else float(str(stated))
    except ValueError:
        return DEFAULT_K
    return 0.0 if k <= 0 else k


def _sized(pods: Sequence[Pod], nodes: Sequence[Object]) -> tuple[Pod, ...]:
    """Return pods that request GPU memory, with the corresponding part of a GPU: of their node's or, while they wait,
    of the smallest in the cluster, as KAI does. If no node states the size of its GPUs, the part stays 0."""
    memory = {node["metadata"]["name"]: size for node in nodes if (size := _memory(node)) > 0}
    least = min(memory.values(), default=0)
    if not any(pod.memory_mib for pod in pods):
        return tuple(pods)
    return tuple(
        replace(pod, gpus=pod.memory_mib / size)
        if pod.memory_mib > 0 and (size := memory.get(pod.node, 0) if pod.node else least) > 0
        else pod
        for pod in pods
    )


def _with_memory(
    policy: Policy, owner: Mapping[str, QueuePolicy], standings: Mapping[str, Standing], pods: Sequence[Pod]
) -> dict[str, Standing]:
    """Add pods that wait for GPU memory to the requests: the scheduler counts them, the status of its Queues
    does not."""
    own: dict[str, float] = {}
    for pod in pods:
        if pod.memory_mib > 0 and not pod.node and not pod.gated and pod.ref in owner:
            own[owner[pod.ref].name] = own.get(owner[pod.ref].name, 0.0) + pod.gpus
    more = PolicyTree(policy).sum_up(own)
    return {
        queue: replace(standing, requested=standing.requested + more.get(queue, 0.0))
        for queue, standing in standings.items()
    }


def _pool_of(obj: Object, key: str) -> str:
    """Return the node pool of a Queue or a node, from the label `key`; "" for the unnamed pool."""
    return str((value_at(obj, ("metadata", "labels")) or {}).get(key) or "")


def _value(shard: Object) -> str:
    return str((shard.get("spec") or {}).get("partitionLabelValue") or "")


def _shards(
    policy: Policy,
    key: str,
    labels: Mapping[str, str],
    values: Sequence[str] | None,
    nodes: Sequence[Object],
    pods: Sequence[Pod],
) -> tuple[tuple[Shard, ...], list[Issue]]:
    """Return what every SchedulingShard divides: its scheduler sees only queues and nodes of its node pool, and no GPU
    of these nodes that a pod of another scheduler holds.

    key: of the label that names a node pool.
    labels: node pool by queue of the policy.
    values: node pools of the SchedulingShards; None: they cannot be read, and the cluster counts as one.

    Source: KAI pkg/scheduler/plugins/proportion/proportion.go, getNodeResources; pkg/scheduler/cache."""
    foreign: dict[str, float] = {}
    up = {node["metadata"]["name"] for node in nodes if node_up(node)}
    for pod in pods:
        if pod.held and pod.node in up and not pod.keeps and not _kais(pod):
            foreign[pod.node] = foreign.get(pod.node, 0.0) + pod.gpus
    pooled = {node["metadata"]["name"]: _pool_of(node, key) for node in nodes}
    if values is None or not {*values, *labels.values(), *pooled.values()} - {""}:
        taken = fsum(foreign.values())
        return ((Shard(tuple(queue.name for queue in policy.queues), None, taken),) if taken else ()), []
    issues = [
        Issue(name, f"it has {key}: {pool or '(none)'}, a node pool that no SchedulingShard schedules")
        for name, pool in sorted(labels.items())
        if pool not in values
    ]
    places = _places(policy, labels)
    found = []
    for value in sorted({*values, *labels.values()}):
        own = frozenset(name for name, pool in pooled.items() if pool == value and value in values)
        names = tuple(queue.name for queue in policy.queues if places.get(queue.name) == value)
        if names:
            found.append(Shard(names, own, fsum(foreign.get(name, 0.0) for name in sorted(own))))
    return tuple(found), issues


def _kais(pod: Pod) -> bool:
    return pod.scheduler == PREFIX or pod.ref.startswith(f"{PREFIX}:")


def _places(policy: Policy, labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the node pool of every queue of the policy; a queue without a Queue object belongs to the pool of all
    queues below it, if that is a single one."""
    tree, places = PolicyTree(policy), dict(labels)
    for name in tree.queues:
        pools = {labels[queue.name] for _, queue in tree.downwards(name) if queue.name in labels}
        if name not in labels and len(pools) < 2:
            places[name] = next(iter(pools), "")
    return places


def _bound_to_pools(
    pods: Sequence[Pod], key: str, owner: Mapping[str, QueuePolicy], labels: Mapping[str, str]
) -> tuple[Pod, ...]:
    """Return pods with their queue's node pool as a required label of their node."""
    return tuple(
        replace(pod, selector=(*pod.selector, (key, labels[queue.name] or None)))
        if (queue := owner.get(pod.ref)) is not None and queue.name in labels
        else pod
        for pod in pods
    )


def _memory(node: Object) -> int:
    """Return the MiB of one of a node's GPUs, in whole hundreds; 0 if it does not state it.

    Source: KAI pkg/scheduler/api/node_info/node_info.go, getNodeGpuMemory."""
    text = (value_at(node, ("metadata", "labels")) or {}).get(_MEMORY_LABEL, "")
    size = int(text) if isinstance(text, str) and text.isdecimal() else 0
    size = size if size < _TEBIBYTE_MIB else size // 2**20
    return size - size % 100


def _priority(spec: Mapping[str, Any], classes: Sequence[Object] | None, pods: Sequence[Pod]) -> int:
    """Return the priority as KAI reads it: of the PodGroup's class, else the global default, else 50. classes: None if
    they may not be read.

    Source: KAI pkg/scheduler/cache/cluster_info/cluster_info.go, getPodGroupPriority."""
    name = spec.get("priorityClassName", "")
    if classes is None:
        return _PRIORITIES.get(name, max((pod.priority for pod in pods), default=_DEFAULT_PRIORITY))
    values = {each["metadata"]["name"]: int(each.get("value") or 0) for each in classes}
    usual = next((int(each.get("value") or 0) for each in classes if each.get("globalDefault")), _DEFAULT_PRIORITY)
    return values.get(name, usual)


def _preemptible(spec: Mapping[str, Any], priority: int, classes: Sequence[Object] | None) -> bool:
    """Return whether it is preemptible; if this is unknown, it is not."""
    stated = spec.get("preemptibility")
    if stated:
        return bool(stated == "preemptible")
    known = classes is not None or spec.get("priorityClassName", "") in _PRIORITIES
    return known and priority < _FIRST_NOT_PREEMPTIBLE


def _core(spec: Mapping[str, Any], pods: Sequence[Pod]) -> tuple[float, tuple[str, ...]]:
    """Return the GPUs without which a gang of subgroups does not run, and the pods that are never surplus. These are
    the oldest pods of every subgroup, as many as it needs, and those of no subgroup. Source: KAI
    pkg/scheduler/api/podgroup_info/subgroup_info."""
    children: dict[str, list[Mapping[str, Any]]] = {}
    for each in spec["subGroups"]:
        children.setdefault(each.get("parent") or "", []).append(each)
    members: dict[str, list[Pod]] = {}
    for pod in pods:  # the oldest first
        members.setdefault(pod.subgroup, []).append(pod)
    core = [pod.uid for pod in members.get("", ())]

    def minimum(name: str, needed: object, path: tuple[str, ...]) -> float:
        parts = []
        for each in children.get(name, ()):
            child = str(each.get("name"))
            if child in path:
                continue
            if child in children:
                parts.append(minimum(child, each.get("minSubGroup"), (*path, child)))
                continue
            least = int(each.get("minMember") or 0)
            mine = members.get(child, [])
            held = [pod for pod in mine if pod.held] or mine
            core.extend(pod.uid for pod in held[:least])
            parts.append(fsum(sorted(pod.gpus for pod in mine)[:least]))
        return fsum(sorted(parts)[: len(parts) if needed is None else max(0, int(str(needed)))])

    return minimum("", spec.get("minSubGroup"), ()), tuple(sorted(core))


def _gangs(
    owner: Mapping[str, QueuePolicy],
    groups: Sequence[Object],
    pods: Sequence[Pod],
    classes: Sequence[Object] | None,
) -> tuple[Gang, ...]:
    """Return the PodGroups of known queues. If a group's status is empty, its pods determine its size."""
    members = by_gang(pods)
    found = []
    for obj in groups:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        queue = owner.get(f"{PREFIX}:{spec.get('queue')}")
        if queue is None:
            continue
        amounts = value_at(obj, ("status", "resourcesStatus")) or {}
        allocated = _gpus(amounts.get("allocated"))
        requested = max(allocated, _gpus(amounts.get("requested")))
        mine = members.get(named(obj))
        if mine is not None and not mine:
            continue  # all its pods are being deleted
        priority = _priority(spec, classes, mine or ())
        gang = Gang(
            queue.name,
            POD_GROUP,
            metadata.get("namespace", ""),
            metadata["name"],
            metadata.get("uid", ""),
            requested,
            allocated,
            requested,
            priority,
            _preemptible(spec, priority, classes),
            millis(metadata.get("creationTimestamp")),
            millis((metadata.get("annotations") or {}).get("kai.scheduler/last-start-timestamp"))
            if allocated
            else None,
            millis((metadata.get("annotations") or {}).get(CHECKPOINT)),
            topology=_required_level(spec),
        )
        if spec.get("subGroups") and mine:
            least, core = _core(spec, mine)
            gang = with_pods(replace(gang, minimum=least, core=core), mine)
        else:
            gang = with_pods(gang, mine or (), int(spec.get("minMember") or 1))
        if gang.requested > 0:
            found.append(gang)
    return in_order(found)


def _required_level(spec: Mapping[str, Any]) -> str:
    """Return the topology level that the pods of a group, or of one of its subgroups, must share."""
    constraints = [
        spec.get("topologyConstraint"),
        *(each.get("topologyConstraint") for each in spec.get("subGroups") or ()),
    ]
    return next((str(level) for each in constraints if (level := (each or {}).get("requiredTopologyLevel"))), "")


def _evictions(
    owner: Mapping[str, QueuePolicy], groups: Sequence[Object], events: Sequence[Object]
) -> Iterator[Eviction]:
    """Yield evictions from KAI's Events on the PodGroups of its victims, one per pod, which name the PodGroup that gets
    the room."""
    queues = {
        (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]): (obj.get("spec") or {}).get("queue")
        for obj in groups
    }
    for event in events:
        said = _RECLAIMED.search(event.get("note") or "")
        queue = owner.get(f"{PREFIX}:{queues.get((said[1], said[2]))}") if said else None
        victim = event.get("regarding") or {}
        name = (victim.get("namespace", ""), victim.get("name", ""))
        if said and queue is not None and queues.get(name) != queues.get((said[1], said[2])):
            yield Eviction(event["metadata"].get("uid", ""), queue.name, f"{name[0]}/{name[1]}")


def _differences(queue: QueuePolicy, obj: Object, owner: Mapping[str, QueuePolicy]) -> list[str]:
    """Return where the Queue differs from the policy. Differences are reported, never written."""
    spec = obj.get("spec") or {}
    gpu = value_at(spec, ("resources", "gpu")) or {}
    parent = owner.get(f"{PREFIX}:{spec.get('parentQueue') or ''}")
    pairs: list[tuple[str, object, object]] = [
        ("quota", gpu.get("quota", 0), queue.deserved),
        ("limit", gpu.get("limit", 0), queue.limit),
        ("priority", spec.get("priority", 100), queue.priority),
        ("parent", parent.name if parent else spec.get("parentQueue"), queue.parent),
    ]
    return differences(obj["metadata"]["name"], pairs)
