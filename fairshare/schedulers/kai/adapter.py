"""Reads KAI-Scheduler's objects, says which field of its Queues carries the weight, and reports when KAI's
configuration gives it no effect.

In mode `usage` KAI reads usage from the accountant and counts history itself. Weights stay as the operator set them,
except in a turn for a gang that no weight admits. In mode `weight` the controller writes one field,
`spec.resources.gpu.overQuotaWeight`, and annotations. KAI's own history (kValue with a usage database) must then be
off, because otherwise the same usage counts twice. The condition `Effective` reports a wrong configuration of KAI.

Source: kai-scheduler/KAI-Scheduler, scheduling.run.ai/v2 Queue, scheduling.run.ai/v2alpha2 PodGroup and
kai.scheduler/v1 SchedulingShard, commit d5bc503a."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import fsum, inf, isfinite
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy, WindowSpec
from fairshare.core.gpu_demand import (
    CHECKPOINT,
    companions_by_gang,
    gang_key,
    millis,
    overcount_by_queue,
    pods_by_gang,
    sorted_gangs,
    with_pods,
)
from fairshare.core.queues_and_weights import (
    Condition,
    Gang,
    Issue,
    Observation,
    Pod,
    PolicyTree,
    Protection,
    SchedulerHistory,
    Shard,
    Standing,
    TargetQueue,
    Value,
)
from fairshare.core.scheduler_queue_objects import (
    differences,
    in_sync,
    match,
    owners,
    path_from_root,
    read_each,
    read_queues,
    target_queue,
)
from fairshare.schedulers.kai.conditions import REASONS
from fairshare.schedulers.kai.kinds import CONFIG, POD_GROUP, QUEUE, SHARD
from fairshare.schedulers.kai.policy_advice import advice
from fairshare.schedulers.kai.section import KaiTarget
from fairshare.targets.weight_plan import Adapter, Advice, ObjectQuery, Seen
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import (
    GPU,
    NODE,
    PRIORITY_CLASS,
    Object,
    duration_s,
    gpus,
    node_up,
    quantity,
    value_at,
)

CONFIG_NAME = "kai-config"
POOL_LABEL = "kai.scheduler/node-pool"
"""The label that names a node pool, unless `spec.global.nodePoolLabelKey` of KAI's Config names another label."""
_NAMESPACE = "kai-scheduler"
DEFAULT_K = 1.0
"""The kValue that KAI uses if none is set."""
_FETCH_S = 60.0
"""The seconds between two fetches of usage if no `fetchInterval` is set."""
_NO_BACKOFF = -1
"""The `schedulingBackoff` of a PodGroup that KAI tries in every cycle."""
_DEFAULT_POOL = "default"
"""The name of the node pool without a label, in conditions of PodGroups."""
PREFIX = "kai"
_HIERARCHY = "full-hierarchy-fairness"
"""The scheduler's argument with which it ignores the queues above the lowest ones."""
CLAIMED = "gpu.nvidia.com"
"""The DeviceClass of NVIDIA's driver for whole GPUs; KAI counts the GPUs of ResourceClaims under this name."""
_FIRST_NOT_PREEMPTIBLE = 100
_DEFAULT_PRIORITY = 50
"""KAI's priority if the PodGroup's class does not exist and no class is the global default."""
_PRIORITIES = {"train": 50, "build-preemptible": 75, "build": 100, "inference": 125}
"""The PriorityClasses that KAI installs, for a controller without the right to read PriorityClasses."""
_AGGREGATED = re.compile(r"^(?:max|min|sum|avg)\s*(?:(?:by|without)\s*\([^)]*\)\s*)?(?=\()")
_MEMORY_LABEL = "nvidia.com/gpu.memory"
_MIB = re.compile(r"\d{1,18}", re.ASCII)
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
"""The metrics that KAI queries unless `extraParams` of the shard name others. The accountant answers only these."""


class KaiAdapter(Adapter):
    """Reads KAI's objects. Weights are the over-quota weights of its Queues."""

    name = "kai"
    prefixes = (PREFIX,)
    settings = KaiTarget
    reasons = REASONS

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return (
            ObjectQuery((QUEUE,), required=True),
            ObjectQuery((SHARD,)),
            ObjectQuery((POD_GROUP,)),
            ObjectQuery((PRIORITY_CLASS,)),
            ObjectQuery((NODE,)),
            ObjectQuery((CONFIG,), name=CONFIG_NAME),
        )

    def advise(self, policy: Policy) -> Iterator[Advice]:
        return advice(policy)

    def configuration(self, policy: Policy, endpoint: str) -> Object:
        """Return the part of a SchedulingShard's `spec` that matches the policy. endpoint: the accountant's address.

        A change of a shard restarts KAI's scheduler. The window and half-life are those of the policy; mode `weight`
        needs only `kValue: 0`."""
        if KaiTarget.of(policy).mode != "usage":
            return {"kValue": 0}
        window = policy.window
        params: dict[str, Any] = {"windowSize": f"{window.size}s", "windowType": "sliding", "fetchInterval": "30s"}
        if window.half_life is not None:
            params["halfLifePeriod"] = f"{window.half_life}s"
        return {
            "kValue": policy.k,
            "usageDBConfig": {"clientType": "prometheus", "connectionString": endpoint, "usageParams": params},
        }

    def publishes(self, policy: Policy) -> bool:
        return KaiTarget.of(policy).mode == "weight"

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        owner = owners(policy, PREFIX)
        found = match(seen.get(QUEUE, ()), owner, lambda obj: f"{PREFIX}:{obj['metadata']['name']}", "KAI queue")
        observation = read_queues(found, lambda _name, obj: read_queue(obj, parts))
        differing: list[str] = []
        for queue in sorted(policy.queues, key=lambda queue: queue.name):
            if queue.name in observation.queues:
                differing += _differences(queue, found.found[queue.name], owner)
        shards = seen.get(SHARD, ())
        endpoint, config = KaiTarget.of(policy).endpoint, next(iter(seen.get(CONFIG, ())), None)
        history = (
            effective(shards) if self.publishes(policy) else usage_read(shards, endpoint, config, policy.max_staleness)
        )
        pods = _with_gpu_parts(pods, seen.get(NODE, ()))
        standings = _with_pods_counted(policy, owner, observation.standings, pods)
        label = str(value_at(config or {}, ("spec", "global", "nodePoolLabelKey")) or POOL_LABEL)
        pool_of_queue = {name: _label_of(obj, label) for name, obj in found.found.items()}
        pools = [_pool_of_shard(shard) for shard in shards] or None
        divided, unscheduled = _shards(policy, label, pool_of_queue, pools, seen.get(NODE, ()), pods)
        if any(shard.nodes is not None for shard in divided):
            pods = _bound_to_pools(pods, label, owner, pool_of_queue)
        dropped = _dropped(policy, seen.get(QUEUE, ()), found.found, label)
        protections = _protections(seen.get(QUEUE, ()), shards, label)
        inner = frozenset(str(value_at(obj, ("spec", "parentQueue")) or "") for obj in seen.get(QUEUE, ()))
        gangs, unreadable = _gangs(
            owner, seen.get(POD_GROUP, ()), pods, seen.get(PRIORITY_CLASS), protections, parts,
            lambda obj: _held_back(obj, inner, label),
        )  # fmt: skip
        gangs = tuple(gang for gang in gangs if gang.queue not in dropped)
        issues = (*observation.issues, *unscheduled, *(Issue(name, text) for name, text in sorted(dropped.items())))
        conditions = (history, in_sync(differing))
        return replace(
            observation,
            queues={name: queue for name, queue in observation.queues.items() if name not in dropped},
            standings={name: standing for name, standing in standings.items() if name not in dropped},
            issues=issues,
            conditions=conditions,
            gangs=gangs,
            shards=divided,
            history=None if self.publishes(policy) else _history(shards),
            unreadable=unreadable,
        )

    def spec(self, _queue: TargetQueue, value: Value) -> Object:
        return {"resources": {"gpu": {"overQuotaWeight": value}}}


def read_queue(obj: Object, parts: MigParts = NO_NODES) -> tuple[TargetQueue, Standing] | Issue:
    """Read one Queue object. A quantity that is missing in its status is zero: nothing runs, nothing waits."""
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
        amounts.append(_gpus(value_at(obj, ("status", key)), parts))
    requested, allocated = max(amounts), amounts[1]
    value = None if weight is None else float(weight)
    queue = target_queue(obj, QUEUE, value)
    return queue, Standing(requested, allocated, value, queue.direction)


def _gpus(amounts: object, parts: MigParts) -> float:
    """Return the GPUs in KAI's resource amounts: whole GPUs, MIG instances, and GPUs of ResourceClaims."""
    claimed = amounts.get(CLAIMED) if isinstance(amounts, Mapping) else None
    return gpus(amounts, parts.anywhere) + (quantity(claimed) or 0.0)


def effective(shards: Sequence[Object]) -> Condition:
    """Return the condition `Effective` of mode `weight`: True if history reaches KAI only through the controller's
    weights, because every shard has kValue 0 or no usage database.

    A shard without a usage database keeps no history, whatever its kValue is."""
    faults: list[str] = []
    commands: list[str] = []
    if undivided := _undivided(shards):
        return undivided
    for shard in shards:
        stated = _stated_k(shard)
        if (k := _k(stated)) != 0 and (shard.get("spec") or {}).get("usageDBConfig"):
            faults.append(f"{_k_text(shard, stated, k)} in SchedulingShard {shard['metadata']['name']}")
            commands.append(_patch_command(shard, _k_change(shard, 0)))
    if faults:
        text = f"{'; '.join(faults)}: set it to 0, history is in the weights"
        return Condition("Effective", "False", "HistoryCountedTwice", text, "; ".join(commands))
    if not shards:
        text = "no SchedulingShard can be read: make sure that kValue is 0"
        return Condition("Effective", "Unknown", "NoShards", text)
    return Condition("Effective", "True", "WeightsOnly", "KAI divides by the controller's weights alone")


def _undivided(shards: Sequence[Object]) -> Condition | None:
    """Return the condition `Effective` if a shard does not divide by the queues' quotas and weights; None if all do."""
    off = [shard for shard in shards if value_at(shard, ("spec", "plugins", "proportion", "enabled")) is False]
    if off:
        names = ", ".join(shard["metadata"]["name"] for shard in off)
        text = f"the plugin proportion is off in SchedulingShard {names}: KAI divides nothing by quota, weight or usage"
        remedy = "; ".join(_patch_command(shard, {"plugins": {"proportion": {"enabled": None}}}) for shard in off)
        return Condition("Effective", "False", "ProportionOff", text, remedy)
    flat = [shard for shard in shards if str(value_at(shard, ("spec", "args", _HIERARCHY))).lower() == "false"]
    if flat:
        names = ", ".join(shard["metadata"]["name"] for shard in flat)
        text = f"SchedulingShard {names} has {_HIERARCHY}: false, so KAI divides among the lowest queues alone"
        remedy = "; ".join(_patch_command(shard, {"args": {_HIERARCHY: None}}) for shard in flat)
        return Condition("Effective", "False", "HierarchyIgnored", text, remedy)
    return None


def _history(shards: Sequence[Object]) -> SchedulerHistory | None:
    """Return the k and the window of usage with which KAI divides; None if no shard counts usage, or if shards differ.

    Source: KAI pkg/scheduler/cache/usagedb/api/defaults.go."""
    found = set()
    for shard in shards:
        database = value_at(shard, ("spec", "usageDBConfig"))
        if not database:
            return None
        params = database.get("usageParams") or {}
        size_s = _window_s(params.get("windowSize"))
        half_life_s = duration_s(params.get("halfLifePeriod")) or None
        if params.get("windowType", "sliding") != "sliding" or size_s is None:
            return None
        found.add((_k(_stated_k(shard)), round(size_s), None if half_life_s is None else round(half_life_s)))
    if len(found) != 1:
        return None
    k, size, half_life = found.pop()
    if not isfinite(k) or size <= 0 or half_life == 0:
        return None
    return SchedulerHistory(k, WindowSpec(size=size, half_life=half_life))


def _window_s(text: object) -> float | None:
    """Parse a duration of Prometheus ("1w", "1d12h") as seconds; a week if there is none."""
    if text is None:
        return 7.0 * 86_400
    days = re.fullmatch(r"(?:(\d{1,4})y)?(?:(\d{1,4})w)?(?:(\d{1,4})d)?(.*)", str(text), re.ASCII)
    if days is None or not str(text):
        return None
    years, weeks, whole = (int(part or 0) for part in days.groups()[:3])
    rest = duration_s(days[4]) if days[4] else 0.0
    return None if rest is None else (years * 365 + weeks * 7 + whole) * 86_400.0 + rest


def usage_read(
    shards: Sequence[Object],
    endpoint: str | None = None,
    config: Object | None = None,
    max_staleness_s: float = inf,
) -> Condition:
    """Return the condition `Effective` of mode `usage`: True if KAI reads usage from the accountant, and often enough.

    KAI divides by the usage that it fetched last, whatever its `stalenessPeriod` is: it only writes a warning then.

    endpoint: the accountant's address in the policy; without it the condition is Unknown.
    config: KAI's Config, from which KAI's operator takes a missing address; None if it cannot be read.
    max_staleness_s: the age of usage beyond which the policy wants no division by it."""
    faults: list[str] = []
    doubts: list[str] = []
    rare: dict[str, str] = {}
    remedies: list[str] = []
    if undivided := _undivided(shards):
        return undivided
    for shard in shards:
        name = f"SchedulingShard {shard['metadata']['name']}"
        database = (shard.get("spec") or {}).get("usageDBConfig") or {}
        params = database.get("usageParams") or {}
        stated = _stated_k(shard)
        if _k(stated) == 0:
            faults.append(f"{_k_text(shard, stated, 0.0)} in {name}: history counts for nothing")
            remedies.append(_patch_command(shard, _k_change(shard, 1)))
        expected = usage_url(shard, endpoint, len(shards)) if endpoint is not None else None
        client = {"clientType": "prometheus", "connectionString": expected or "URL", "connectionStringEnvVar": None}
        set_address = _patch_command(shard, {"usageDBConfig": client})
        if not database:
            faults.append(f"{name} has no usageDBConfig: give it the accountant's address")
            remedies.append(set_address)
            continue
        if database.get("clientType") != "prometheus":
            faults.append(f"usageDBConfig.clientType of {name} is {database.get('clientType')!r}")
            remedies.append(set_address)
            continue
        if params.get("windowType", "sliding") != "sliding":
            faults.append(f"windowType of {name} is {params['windowType']}: only sliding works")
            remedies.append(_patch_command(shard, {"usageDBConfig": {"usageParams": {"windowType": "sliding"}}}))
        fetch_s = duration_s(params.get("fetchInterval")) or _FETCH_S
        if fetch_s > max_staleness_s:
            text = f"{name} divides by usage that is up to {fetch_s:g} s old (fetchInterval)"
            rare[text] = _patch_command(shard, {"usageDBConfig": {"usageParams": {"fetchInterval": None}}})
        address, note = _usage_address(database, config)
        if address is None:
            doubts.append(f"{name}: {note}")
            remedies.append(set_address)
        elif expected is None:
            doubts.append(f"{name} reads usage from {address}: is that the accountant's? Set targets.kai.endpoint")
            remedies.append("in the policy: `targets: {kai: {mode: usage, endpoint: URL}}`")
        elif address != expected:
            faults.append(f"{name} reads usage from {address or 'nowhere'}, not from {expected}{note}")
            remedies.append(set_address)
        if address is None or address == expected:
            unanswered, uncertain, keys = _foreign_metrics(name, params.get("extraParams") or {})
            faults += unanswered
            doubts += uncertain
            if keys:
                extra = {"extraParams": dict.fromkeys(keys)}
                remedies.append(_patch_command(shard, {"usageDBConfig": {"usageParams": extra}}))
    remedy = "; ".join(dict.fromkeys(remedies))
    if faults:
        return Condition("Effective", "False", "UsageNotRead", "; ".join(faults), remedy)
    if not shards:
        text = "no SchedulingShard can be read: make sure that KAI reads usage from the accountant"
        return Condition("Effective", "Unknown", "NoShards", text)
    if rare:
        text = f"{'; '.join(rare)}, and the policy wants none older than {max_staleness_s:g} s (max_staleness)"
        return Condition("Effective", "False", "UsageTooOld", text, "; ".join(rare.values()))
    if doubts:
        return Condition("Effective", "Unknown", "AddressUnknown", "; ".join(doubts), remedy)
    return Condition("Effective", "True", "UsageOnly", "KAI reads usage from the accountant; its weights stay as set")


def _usage_address(database: Mapping[str, Any], config: Object | None) -> tuple[str | None, str]:
    """Return the address at which a shard's scheduler queries usage, and a note on it for messages.

    If the address cannot be read, it is None, and the note is the reason.

    Source: KAI pkg/operator/operands/scheduler/resources_for_shard.go, getUsageDBConfig."""
    variable = database.get("connectionStringEnvVar")
    if address := str(database.get("connectionString") or "").rstrip("/"):
        return ("", f" ({variable} is set too, which KAI refuses)") if variable else (address, "")
    if variable:
        return None, f"the scheduler reads the address from its environment variable {variable}"
    if config is None:
        return None, f"it has no connectionString, and the Config {CONFIG_NAME} with the default cannot be read"
    spec = config.get("spec") or {}
    prometheus = spec.get("prometheus") or {}
    note = f" (it has no connectionString; the address comes from spec.prometheus of the Config {CONFIG_NAME})"
    if prometheus.get("enabled") is True:
        namespace = spec.get("namespace") or _NAMESPACE
        return f"http://usage-prometheus.{namespace}.svc.cluster.local:9090", note
    return str(prometheus.get("externalPrometheusUrl") or "").rstrip("/"), note


def _patch_command(shard: Object, spec: Mapping[str, Any]) -> str:
    """Return the command that changes the shard's spec. KAI's operator then restarts the scheduler of the shard."""
    change = json.dumps({"spec": spec}, separators=(",", ":"))
    return f"kubectl patch schedulingshard {shard['metadata']['name']} --type merge -p '{change}'"


def _k_change(shard: Object, k: int) -> Mapping[str, Any]:
    """Return the change that sets the shard's kValue: a number in its spec, or a text in the plugin's arguments."""
    if _arguments(shard) is None:
        return {"kValue": k}
    return {"plugins": {"proportion": {"arguments": {"kValue": str(k)}}}}


def _foreign_metrics(shard: str, extra: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return faults for expressions that the accountant does not answer, doubts about others, and the keys of both.

    The accountant answers KAI's default metrics, also in an aggregation, and a capacity that selects by `resource`."""
    unanswered: list[str] = []
    uncertain: list[str] = []
    keys: list[str] = []
    for key, default in _METRICS.items():
        text = str(extra.get(key) or default)
        if text == default or _AGGREGATED.sub("", text).strip("() ") == default:
            continue
        keys.append(key)
        setting = f"extraParams.{key} of {shard} is {text!r}"
        metric = default if "Allocation" in key else default.partition("{")[2].strip("{})")
        if metric in text:
            uncertain.append(f"{setting}: it is unknown whether the accountant answers it")
        else:
            unanswered.append(f"{setting}, which the accountant does not answer: leave it out")
    return unanswered, uncertain, keys


def usage_url(shard: Object, endpoint: str, shards: int) -> str:
    """Return the address at which a shard queries usage. If there are several shards, it ends in `/shards/POOL`
    (`/shards` for the unnamed node pool), where the answer covers only the nodes of that pool."""
    base = endpoint.rstrip("/")
    if shards < 2:
        return base
    pool = _pool_of_shard(shard)
    return f"{base}/shards/{pool}" if pool else f"{base}/shards"


def _arguments(shard: Object) -> Mapping[str, Any] | None:
    """Return the arguments of the proportion plugin. If they are set, even empty, they replace all other settings."""
    arguments = value_at(shard, ("spec", "plugins", "proportion", "arguments"))
    return arguments if isinstance(arguments, Mapping) else None


def _stated_k(shard: Object) -> object:
    """Return the kValue that the shard passes to KAI's scheduler; None if it passes none.

    Source: KAI pkg/apis/kai/v1/schedulingshard_types.go: a plugin's arguments replace the defaults."""
    arguments = _arguments(shard)
    return value_at(shard, ("spec", "kValue")) if arguments is None else arguments.get("kValue")


def _k_text(shard: Object, stated: object, k: float) -> str:
    if stated is not None:
        return f"kValue is {k:g}"
    if _arguments(shard) is not None:
        return (
            f"plugins.proportion.arguments replace all other settings and have no kValue, which means {k:g} (add"
            f' kValue: "0" to them)'
        )
    return f"kValue is unset, which means {k:g}"


def _k(stated: object) -> float:
    """Return the number that KAI reads: the default for an invalid kValue, 0 for a negative one, and NaN for NaN."""
    try:
        k = DEFAULT_K if stated is None else float(str(stated))
    except ValueError:
        return DEFAULT_K
    return 0.0 if k <= 0 else k


def _with_gpu_parts(pods: Sequence[Pod], nodes: Sequence[Object]) -> tuple[Pod, ...]:
    """Return the pods; a pod that requests GPU memory gets the corresponding part of a GPU, as KAI computes it.

    The part is of a GPU of the pod's node or, while it waits, of the smallest GPU in the cluster. It stays 0 if no node
    states the memory of its GPUs. If the pod requests a part of a GPU too, the larger part counts, because it depends
    on KAI's version which of them KAI reads."""
    memory = {node["metadata"]["name"]: size for node in nodes if (size := _memory(node)) > 0}
    least = min(memory.values(), default=0)
    if not any(pod.memory_mib for pod in pods):
        return tuple(pods)
    return tuple(
        replace(pod, gpus=max(pod.gpus, pod.memory_mib / size))
        if pod.memory_mib > 0 and (size := memory.get(pod.node, 0) if pod.node else least) > 0
        else pod
        for pod in pods
    )


def _with_pods_counted(
    policy: Policy, owner: Mapping[str, QueuePolicy], standings: Mapping[str, Standing], pods: Sequence[Pod]
) -> dict[str, Standing]:
    """Return the standings with the requests of pods that wait for GPU memory, and without what the status of the
    Queues, which name no node, counts too much for MIG instances.

    KAI's scheduler counts the pods that wait, but the status of its Queues does not contain them."""
    waiting: dict[str, float] = {}
    for pod in pods:
        if pod.memory_mib > 0 and not pod.node and not pod.gated and pod.ref in owner:
            waiting[owner[pod.ref].name] = waiting.get(owner[pod.ref].name, 0.0) + pod.gpus
    requests = PolicyTree(policy).sum_up(waiting)
    own = [pod for pod in pods if pod.ref in owner]
    overcount, of_held = overcount_by_queue(policy, own), overcount_by_queue(policy, (p for p in own if p.held))
    return {
        queue: replace(
            standing,
            requested=max(0.0, standing.requested - overcount.get(queue, 0.0)) + requests.get(queue, 0.0),
            allocated=max(0.0, standing.allocated - of_held.get(queue, 0.0)),
        )
        for queue, standing in standings.items()
    }


def _dropped(policy: Policy, queues: Sequence[Object], found: Mapping[str, Object], label: str) -> Mapping[str, str]:
    """Return the queues of the policy that KAI leaves out, each with the reason: a queue above them does not exist, or
    is in another node pool, so that the shard's scheduler does not see it.

    Source: KAI pkg/scheduler/cache/cluster_info/queue.go, cleanQueueOrphans."""
    by_name = {obj["metadata"]["name"]: obj for obj in queues}
    dropped: dict[str, str] = {}
    for queue in policy.queues:
        if queue.name not in found:
            continue
        obj, passed = found[queue.name], set[str]()
        pool = _label_of(obj, label)
        while above := str(value_at(obj, ("spec", "parentQueue")) or ""):
            parent = by_name.get(above)
            if parent is None or _label_of(parent, label) != pool or above in passed:
                state = "does not exist" if parent is None else "is in another node pool"
                dropped[queue.name] = (
                    f"Queue {above} above it {state}: KAI drops it and all queues below it (`kubectl get queues`)"
                )
                break
            passed.add(above)
            obj = parent
    return dropped


def _protections(queues: Sequence[Object], shards: Sequence[Object], label: str) -> Mapping[str, Protection]:
    """Return how long KAI protects the workloads of each Queue, by its name; empty if it protects none.

    A queue without protection is among them, because the protection from its workloads depends on its path.

    Source: KAI pkg/scheduler/plugins/minruntime, resolver.go; pkg/apis/kai/v1/schedulingshard_types.go."""
    by_name = {obj["metadata"]["name"]: obj for obj in queues}
    defaults = {_pool_of_shard(shard): _shard_runtimes(shard) for shard in shards}
    parents = {name: value_at(obj, ("spec", "parentQueue")) for name, obj in by_name.items()}
    protections: dict[str, Protection] = {}
    for name, obj in by_name.items():
        preempt_s, reclaim_s, by_queue = defaults.get(_label_of(obj, label), (0.0, 0.0, False))
        if preempt_s < 0:
            continue
        path = path_from_root(name, parents)
        stated = [
            tuple(
                duration_s(value_at(by_name.get(each, {}), ("spec", key)))
                for key in ("reclaimMinRuntime", "preemptMinRuntime")
            )
            for each in path
        ]
        resolved, preempt_least = [], preempt_s
        least = reclaim_s
        for reclaim, preempt in stated:
            least = reclaim if reclaim is not None else least
            preempt_least = preempt if preempt is not None else preempt_least
            resolved.append(least)
        if by_queue:
            resolved = [least] * len(path)
        protections[name] = Protection(tuple(path), tuple(resolved), preempt_least)
    protect = any(any(each.reclaim_s) or each.preempt_s for each in protections.values())
    return protections if protect else {}


def _shard_runtimes(shard: Object) -> tuple[float, float, bool]:
    """Return the seconds for which a shard protects workloads from preemption and from reclaim if their queues state
    none, and whether a reclaim goes by the victim's queue alone. Negative seconds: the plugin is off."""
    plugin = value_at(shard, ("spec", "plugins", "minruntime")) or {}
    if plugin.get("enabled") is False:
        return -1.0, -1.0, False
    arguments = plugin.get("arguments")
    if isinstance(arguments, Mapping):
        stated = [arguments.get(f"default{kind}MinRuntime") for kind in ("Preempt", "Reclaim")]
    else:
        arguments = {}
        stated = [value_at(shard, ("spec", "minRuntime", f"{kind}MinRuntime")) for kind in ("preempt", "reclaim")]
    preempt_s, reclaim_s = (duration_s(text) or 0.0 for text in stated)
    return preempt_s, reclaim_s, arguments.get("reclaimResolveMethod") == "queue"


def _label_of(obj: Object, label: str) -> str:
    return str((value_at(obj, ("metadata", "labels")) or {}).get(label) or "")


def _pool_of_shard(shard: Object) -> str:
    return str((shard.get("spec") or {}).get("partitionLabelValue") or "")


def _shards(
    policy: Policy,
    label: str,
    pool_of_queue: Mapping[str, str],
    pools: Sequence[str] | None,
    nodes: Sequence[Object],
    pods: Sequence[Pod],
) -> tuple[tuple[Shard, ...], list[Issue]]:
    """Return the queues and nodes that each SchedulingShard divides, and an issue per queue that no shard schedules.

    A shard's scheduler sees only the queues and nodes of its node pool, without the GPUs of these nodes that pods of
    other schedulers hold.

    label: the label that names the node pool of a queue or node; "" is the unnamed pool.
    pool_of_queue: the node pool of each queue of the policy that has a Queue object.
    pools: the node pools of the SchedulingShards; None: they cannot be read, and the whole cluster counts as one shard.

    Source: KAI pkg/scheduler/plugins/proportion/proportion.go, getNodeResources; pkg/scheduler/cache."""
    foreign: dict[str, float] = {}
    up = {node["metadata"]["name"] for node in nodes if node_up(node)}
    for pod in pods:
        kais = pod.scheduler == PREFIX or pod.ref.startswith(f"{PREFIX}:")
        if pod.held and pod.node in up and not pod.keeps and not kais:
            foreign[pod.node] = foreign.get(pod.node, 0.0) + pod.gpus
    pool_of_node = {node["metadata"]["name"]: _label_of(node, label) for node in nodes}
    if pools is None or not {*pools, *pool_of_queue.values(), *pool_of_node.values()} - {""}:
        foreign_gpus = fsum(foreign.values())
        whole_cluster = Shard(tuple(queue.name for queue in policy.queues), None, foreign_gpus, foreign)
        return ((whole_cluster,) if foreign_gpus else ()), []
    issues = [
        Issue(name, f"it has {label}: {pool or '(none)'}, a node pool that no SchedulingShard schedules")
        for name, pool in sorted(pool_of_queue.items())
        if pool not in pools
    ]
    pool_of_any_queue = _with_parents(policy, pool_of_queue)
    shards = []
    for pool in sorted({*pools, *pool_of_queue.values()}):
        own = frozenset(name for name, other in pool_of_node.items() if other == pool and pool in pools)
        names = tuple(queue.name for queue in policy.queues if pool_of_any_queue.get(queue.name) == pool)
        if names:
            shards.append(Shard(names, own, fsum(foreign.get(name, 0.0) for name in sorted(own)), foreign))
    return tuple(shards), issues


def _with_parents(policy: Policy, pool_of_queue: Mapping[str, str]) -> Mapping[str, str]:
    """Return the node pools with those of queues that have no Queue object of their own.

    Such a queue belongs to the pool of all queues below it, if they share one."""
    tree, pool_of_any_queue = PolicyTree(policy), dict(pool_of_queue)
    for name in tree.queues:
        pools = {pool_of_queue[queue.name] for _, queue in tree.downwards(name) if queue.name in pool_of_queue}
        if name not in pool_of_queue and len(pools) < 2:
            pool_of_any_queue[name] = next(iter(pools), "")
    return pool_of_any_queue


def _bound_to_pools(
    pods: Sequence[Pod], label: str, owner: Mapping[str, QueuePolicy], pool_of_queue: Mapping[str, str]
) -> tuple[Pod, ...]:
    """Return the pods with the node pool of their queue as a required label of their node."""
    return tuple(
        replace(pod, selector=(*pod.selector, (label, pool_of_queue[queue.name] or None)))
        if (queue := owner.get(pod.ref)) is not None and queue.name in pool_of_queue
        else pod
        for pod in pods
    )


def _memory(node: Object) -> int:
    """Return the memory of one GPU of a node in MiB, rounded down to hundreds; 0 if the node does not state it.

    Source: KAI pkg/scheduler/api/node_info/node_info.go, getNodeGpuMemory."""
    text = (value_at(node, ("metadata", "labels")) or {}).get(_MEMORY_LABEL, "")
    size = int(text) if isinstance(text, str) and _MIB.fullmatch(text) else 0
    size = size if size < _TEBIBYTE_MIB else size // 2**20
    return size - size % 100


def _priority(spec: Mapping[str, Any], classes: Sequence[Object] | None, pods: Sequence[Pod]) -> int:
    """Return the priority that KAI reads: that of the PodGroup's class, else of the global default class, else 50.

    classes: the PriorityClasses. None: they cannot be read, so the value of one that KAI installs counts, or else the
        highest priority of the pods.

    Source: KAI pkg/scheduler/cache/cluster_info/cluster_info.go, getPodGroupPriority."""
    name = spec.get("priorityClassName", "")
    if classes is None:
        return _PRIORITIES.get(name, max((pod.priority for pod in pods), default=_DEFAULT_PRIORITY))
    values = {each["metadata"]["name"]: int(each.get("value") or 0) for each in classes}
    default = next((int(each.get("value") or 0) for each in classes if each.get("globalDefault")), _DEFAULT_PRIORITY)
    return values.get(name, default)


def _preemptible(spec: Mapping[str, Any], priority: int, classes: Sequence[Object] | None) -> bool:
    """Return True if KAI may preempt the PodGroup; False if it may not, or if this is unknown."""
    stated = spec.get("preemptibility")
    if stated:
        return bool(stated == "preemptible")
    known = classes is not None or spec.get("priorityClassName", "") in _PRIORITIES
    return known and priority < _FIRST_NOT_PREEMPTIBLE


def _in_quota(spec: Mapping[str, Any], priority: int, classes: Sequence[Object] | None) -> bool:
    """Return True if KAI starts the PodGroup only within the quotas of all its queues; False if not, or if unknown.

    Source: KAI pkg/scheduler/plugins/proportion/capacity_policy."""
    stated = spec.get("preemptibility")
    if stated:
        return bool(stated != "preemptible")
    known = classes is not None or spec.get("priorityClassName", "") in _PRIORITIES
    return known and priority >= _FIRST_NOT_PREEMPTIBLE


def _core(spec: Mapping[str, Any], pods: Sequence[Pod]) -> tuple[float, tuple[str, ...]]:
    """Return the GPUs without which a gang of subgroups does not run, and the uids of the pods that it cannot lose.

    These pods are the first of every subgroup, as many as the subgroup needs, and the pods of no subgroup. Of the
    subgroups, those that run count first, then those first by name, as KAI takes them.
    pods: all members of the gang, in KAI's order.

    Source: KAI pkg/scheduler/api/podgroup_info, allocation_info.go and subgroup_info; plugins/subgrouporder."""
    children: dict[str, list[Mapping[str, Any]]] = {}
    # A name counts once, so that each subgroup is visited once.
    for each in {str(each.get("name")): each for each in spec["subGroups"]}.values():
        children.setdefault(str(each.get("parent") or "").lower(), []).append(each)
    members: dict[str, list[Pod]] = {}
    for pod in pods:
        members.setdefault(pod.subgroup, []).append(pod)
    core = [pod.uid for pod in members.get("", ())]

    def minimum(name: str, needed: object, path: tuple[str, ...]) -> tuple[bool, float]:
        """Return whether a subgroup runs, and its GPUs."""
        parts: list[tuple[bool, str, float]] = []
        for each in children.get(name, ()):
            child = str(each.get("name"))
            if child in path:
                continue
            if child in children:
                runs, least_gpus = minimum(child, each.get("minSubGroup"), (*path, child))
            else:
                least = int(each.get("minMember") or 0)
                child_pods = members.get(child, [])
                running = [pod for pod in child_pods if pod.held]
                core.extend(pod.uid for pod in (running or child_pods)[:least])
                runs, least_gpus = bool(running), fsum(pod.gpus for pod in (running or child_pods)[:least])
            parts.append((not runs, child, least_gpus))
        first = sorted(parts)[: len(parts) if needed is None else max(0, int(str(needed)))]
        return any(not waits for waits, _, _ in parts), fsum(least_gpus for _, _, least_gpus in first)

    return minimum("", spec.get("minSubGroup"), ())[1], tuple(sorted(core))


def _first(least: int, members: Sequence[Pod]) -> tuple[float, tuple[str, ...]]:
    """Return the GPUs with which KAI starts a gang without subgroups, and the uids of the members that start.

    KAI takes the first members in its order, those without GPUs too. A gang that runs goes on with any members that are
    enough, so then there are no such uids, and the GPUs are the fewest with which it goes on.

    least: the number of members that it needs.
    members: all members of the gang, in KAI's order.

    Source: KAI pkg/scheduler/api/podgroup_info, allocation_info.go and eviction_info.go."""
    running = [pod for pod in members if pod.held]
    if len(running) >= least:
        return fsum(sorted(pod.gpus for pod in running)[:least]), ()
    first = [*running, *(pod for pod in members if not pod.held)][:least]
    return fsum(pod.gpus for pod in first), tuple(sorted(pod.uid for pod in first))


def _kais_order(pod: Pod) -> tuple[tuple[int, ...], int, str]:
    return pod.rank, pod.created_ms or 0, pod.uid


def _gangs(
    owner: Mapping[str, QueuePolicy],
    groups: Sequence[Object],
    pods: Sequence[Pod],
    classes: Sequence[Object] | None,
    protections: Mapping[str, Protection],
    parts: MigParts,
    held_back: Callable[[Object], str],
) -> tuple[tuple[Gang, ...], tuple[str, ...]]:
    """Return the PodGroups of the policy's queues as gangs, and those that cannot be read. A group with an empty status
    has the size of its pods. held_back: returns why KAI does not start a PodGroup."""
    gpu_pods, companions = pods_by_gang(pods), companions_by_gang(pods)

    def read(obj: Object) -> Gang | None:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        annotations: Mapping[str, str] = metadata.get("annotations") or {}
        queue = owner.get(f"{PREFIX}:{spec.get('queue')}")
        if queue is None:
            return None
        amounts = value_at(obj, ("status", "resourcesStatus")) or {}
        allocated = _gpus(amounts.get("allocated"), parts)
        requested = max(allocated, _gpus(amounts.get("requested"), parts))
        own_pods, others = gpu_pods.get(gang_key(obj)), companions.get(gang_key(obj), ())
        if own_pods is not None and not own_pods:
            return None  # all its pods are being deleted
        priority = _priority(spec, classes, own_pods or ())
        least_members = max(1, int(spec.get("minMember") or 1))
        least, core = requested, tuple[str, ...]()
        if own_pods:
            members = sorted((*own_pods, *others), key=_kais_order)
            if spec.get("subGroups"):
                least, core = _core(spec, members)
            else:
                least, core = _first(least_members, members)
        gang = Gang(
            queue.name,
            POD_GROUP,
            metadata.get("namespace", ""),
            metadata["name"],
            metadata.get("uid", ""),
            requested,
            allocated,
            least,
            priority,
            _preemptible(spec, priority, classes),
            millis(metadata.get("creationTimestamp")),
            millis(annotations.get("kai.scheduler/last-start-timestamp")) if allocated else None,
            millis(annotations.get(CHECKPOINT)),
            topology=_required_level(spec),
            protection=protections.get(str(spec.get("queue"))),
            may_claim_ms=_delay_end_ms(metadata, spec),
            in_quota=_in_quota(spec, priority, classes),
            held_back=held_back(obj),
            core=core,
        )
        gang = with_pods(gang, own_pods or (), others)
        return gang if gang.requested > 0 else None

    gangs, unreadable = read_each(groups, read)
    return sorted_gangs(gangs), unreadable


def _held_back(group: Object, inner: Set[str], label: str) -> str:
    """Return why KAI does not start a PodGroup, however much room there is; "" if it does.

    inner: the queues that have queues below them. label: the key of the label with a PodGroup's node pool.

    Source: KAI pkg/scheduler/actions/utils, input_jobs.go; pkg/scheduler/cache/cluster_info, cluster_info.go."""
    spec, conditions = group.get("spec") or {}, value_at(group, ("status", "schedulingConditions")) or ()
    if str(spec.get("queue")) in inner:
        return f"Queue {spec.get('queue')} has queues below it, and KAI starts work only in queues without"
    if spec.get("schedulingBackoff") in (None, _NO_BACKOFF) or not conditions:
        return ""
    last = max(conditions, key=lambda each: _whole_number(each.get("transitionID")))
    if last.get("nodePool") != (_label_of(group, label) or _DEFAULT_POOL):
        return ""
    return f"KAI has tried it once (schedulingBackoff {spec['schedulingBackoff']}) and does not try it again"


def _whole_number(text: object) -> int:
    return int(text) if isinstance(text, str) and re.fullmatch(r"\d{1,18}", text, re.ASCII) else -1


def _delay_end_ms(metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> int | None:
    """Return the time before which KAI evicts nothing for a PodGroup (`preemptionDelay`), counted from its creation or
    its last eviction; None if it has no delay."""
    delay_s = duration_s(spec.get("preemptionDelay"))
    if not delay_s:
        return None
    starts = [
        millis(metadata.get("creationTimestamp")),
        millis((metadata.get("annotations") or {}).get("kai.scheduler/last-eviction-timestamp")),
    ]
    since_ms = max((start for start in starts if start is not None), default=None)
    return since_ms + round(delay_s * MS_PER_SECOND) if since_ms is not None else None


def _required_level(spec: Mapping[str, Any]) -> str:
    """Return the topology level that the pods of a PodGroup, or of one of its subgroups, must share; "" if none."""
    constraints = [
        spec.get("topologyConstraint"),
        *(each.get("topologyConstraint") for each in spec.get("subGroups") or ()),
    ]
    return next((str(level) for each in constraints if (level := (each or {}).get("requiredTopologyLevel"))), "")


def _differences(queue: QueuePolicy, obj: Object, owner: Mapping[str, QueuePolicy]) -> list[str]:
    """Return where the Queue object differs from the policy, for the condition `InSync`."""
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
