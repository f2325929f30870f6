"""KAI-Scheduler: its Queue objects as our model, our weights as patches of `overQuotaWeight`. Pure.

Mode `weight` writes exactly one field, `spec.resources.gpu.overQuotaWeight`, beside our annotations; KAI's
own history (kValue with a usage database) must then be off, else the same usage counts twice. Mode `usage`
writes none: KAI reads its history from the accountant, and weights stay the operator's. `Effective` says
where the one or the other cannot act. Never both.

Source: kai-scheduler/KAI-Scheduler, scheduling.run.ai/v2 Queue, scheduling.run.ai/v2alpha2 PodGroup and
kai.scheduler/v1 SchedulingShard, commit d5bc503a.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

from accountant.wire import Policy, QueuePolicy
from fairshare.kube import marks
from fairshare.kube.demand import by_gang, in_order, with_pods
from fairshare.kube.fields import look
from fairshare.kube.kinds import EVENT, Kind, Object
from fairshare.kube.mapping import differences, in_sync, match, owners
from fairshare.kube.pods import CHECKPOINT, millis, named
from fairshare.kube.quantities import GPU, gpus, quantity
from fairshare.model import Condition, Eviction, Gang, Held, Issue, Observation, Pod, Standing, Value, Weight
from fairshare.plan import Read, Seen

QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues")
SHARD = Kind("kai.scheduler/v1", "SchedulingShard", "schedulingshards")
POD_GROUP = Kind("scheduling.run.ai/v2alpha2", "PodGroup", "podgroups", namespaced=True)
KINDS = (QUEUE, SHARD, POD_GROUP)
DEFAULT_K = 1.0
"""What KAI takes for an absent kValue."""
PREFIX = "kai"
CLAIMED = "gpu.nvidia.com"
"""DeviceClass of NVIDIA's driver for whole GPUs: under it KAI notes what pods have claimed."""
_FIRST_NOT_PREEMPTIBLE = 100
_RECLAIMED = re.compile(r"was preempted by workload ([^/\s]+)/(\S+)\.(?=\s|$)")
"""KAI's words for reclaim; preemption within a queue speaks of a *higher priority* workload."""
_PRIORITIES = {"train": 50, "build-preemptible": 75, "build": 100, "inference": 125}
"""KAI's own PriorityClasses; others are read off the pods."""


class KaiAdapter:
    """`fairshare.plan.Adapter` for KAI."""

    name = "kai"
    prefixes = (PREFIX,)

    def reads(self, policy: Policy) -> tuple[Read, ...]:
        evictions = (Read((EVENT,), fields="reason=Evict"),) if policy.law == "deficit" else ()
        return (Read((QUEUE,), required=True), Read((SHARD,)), Read((POD_GROUP,)), *evictions)

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        target = policy.targets.kai
        return target.apply if target.mode != "off" else "off"

    def publishes(self, policy: Policy) -> bool:
        return policy.targets.kai.mode == "weight"

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        """Queues of the policy with their KAI Queue. Queues that no ref names are left alone."""
        owner = owners(policy, PREFIX)
        found = match(seen.get(QUEUE, ()), owner, lambda obj: f"{PREFIX}:{obj['metadata']['name']}", "KAI queue")
        issues = list(found.issues)
        held: dict[str, Held] = {}
        standings: dict[str, Standing] = {}
        differing: list[str] = []
        for queue in sorted(policy.queues, key=lambda queue: queue.name):
            if queue.name in found.found:
                obj = found.found[queue.name]
                read = read_queue(obj)
                if isinstance(read, Issue):
                    issues.append(read)
                    continue
                held[queue.name], standings[queue.name] = read
                differing += _differences(queue, obj, owner)
        shards = seen.get(SHARD, ())
        acts = effective(shards) if self.publishes(policy) else usage_read(shards, policy.targets.kai.endpoint)
        gangs = _gangs(owner, seen.get(POD_GROUP, ()), pods)
        taken = tuple(_evictions(owner, seen.get(POD_GROUP, ()), seen.get(EVENT, ())))
        behind = {o["metadata"]["name"]: read_queue(o) for o in found.strangers if marks.carries(o)}
        left = {name: read[0] for name, read in behind.items() if not isinstance(read, Issue)}
        return Observation(held, standings, tuple(issues), (acts, in_sync(differing)), gangs, taken, left)

    def express(
        self, _policy: Policy, weights: Sequence[Weight], _observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """KAI takes the law's weights as they are: they only matter relative to siblings'."""
        return {weight.queue: weight.value for weight in weights}

    def patch(self, held: Held, value: Value | None, annotations: Mapping[str, str]) -> Object:
        """The uid keeps the write from making a queue that has gone meanwhile."""
        metadata: dict[str, Any] = {"name": held.name}
        if held.uid:
            metadata["uid"] = held.uid
        if annotations:
            metadata["annotations"] = dict(annotations)
        patch: dict[str, Any] = {"apiVersion": QUEUE.api_version, "kind": QUEUE.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = {"resources": {"gpu": {"overQuotaWeight": value}}}
        return patch


def read_queue(obj: Object) -> tuple[Held, Standing] | Issue:
    """One Queue object. Unset quantities of its status are zero: nothing runs, nothing waits."""
    metadata = obj["metadata"]
    name = metadata["name"]
    gpu = look(obj, ("spec", "resources", "gpu")) or {}
    weight = gpu.get("overQuotaWeight")
    if weight is not None and not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
        return Issue(name, f"spec.resources.gpu.overQuotaWeight is {weight!r}")
    amounts: list[float] = []
    for key in ("requested", "allocated"):
        text = look(obj, ("status", key, GPU))
        if text is not None and quantity(text) is None:
            return Issue(name, f"status.{key}[{GPU}] is {text!r}, not a quantity")
        amounts.append(_gpus(look(obj, ("status", key))))
    requested, allocated = max(amounts), amounts[1]
    noted = marks.read(metadata.get("annotations") or {})
    value = None if weight is None else float(weight)
    identity = (name, metadata.get("uid", ""), metadata.get("resourceVersion", ""), value)
    if noted is None:
        return Held(*identity, kind=QUEUE), Standing(requested, allocated, value)
    held = Held(*identity, noted.published, noted.base, noted.changed_ms, noted.direction, QUEUE)
    return held, Standing(requested, allocated, value, noted.changed_ms, noted.direction)


def _gpus(amounts: object) -> float:
    """GPUs in an amount as KAI notes it: whole ones, MIG instances, and those of ResourceClaims under their class."""
    claimed = amounts.get(CLAIMED) if isinstance(amounts, Mapping) else None
    return gpus(amounts) + (quantity(claimed) or 0.0)


def effective(shards: Sequence[Object]) -> Condition:
    """Whether our weights are the only history KAI sees."""
    faults: list[str] = []
    for shard in shards:
        stated, reads = _stated_k(shard), bool((shard.get("spec") or {}).get("usageDBConfig"))
        k = _k(stated)
        if k != 0 and (stated is not None or reads):
            said = f"kValue is {k:g}" if stated is not None else f"kValue is unset, which means {k:g}"
            faults.append(f"{said} in SchedulingShard {shard['metadata']['name']}")
    if faults:
        return Condition(
            "Effective", "False", "HistoryCountedTwice", f"{'; '.join(faults)}: set it to 0, history is in the weights"
        )
    if not shards:
        return Condition("Effective", "Unknown", "NoShards", "no SchedulingShard to read: make sure that kValue is 0")
    return Condition("Effective", "True", "WeightsOnly", "KAI divides by our weights alone")


def usage_read(shards: Sequence[Object], endpoint: str | None = None) -> Condition:
    """Mode `usage`: whether KAI reads history at all, and from `endpoint` where the policy says which."""
    faults: list[str] = []
    for shard in shards:
        name = shard["metadata"]["name"]
        database = (shard.get("spec") or {}).get("usageDBConfig") or {}
        params = database.get("usageParams") or {}
        if _k(_stated_k(shard)) == 0:
            faults.append(f"kValue is 0 in SchedulingShard {name}: history counts for nothing")
        if not database:
            faults.append(f"SchedulingShard {name} has no usageDBConfig: give it the accountant's address")
        elif database.get("clientType") != "prometheus":
            faults.append(f"usageDBConfig.clientType of SchedulingShard {name} is {database.get('clientType')!r}")
        elif endpoint is not None and _place(database) != (wanted := usage_url(shard, endpoint, len(shards))):
            there = database.get("connectionString") or "nowhere"
            faults.append(f"SchedulingShard {name} reads usage from {there}, not from {wanted}")
        elif params.get("windowType", "sliding") != "sliding":
            faults.append(f"windowType of SchedulingShard {name} is {params['windowType']}: only sliding works")
    if faults:
        return Condition("Effective", "False", "UsageNotRead", "; ".join(faults))
    if not shards:
        return Condition("Effective", "Unknown", "NoShards", "no SchedulingShard to read: does KAI read our usage?")
    return Condition("Effective", "True", "UsageOnly", "KAI reads usage; its weights are left alone")


def usage_url(shard: Object, endpoint: str, shards: int) -> str:
    """Where a shard asks for usage: of its own nodes, where there are several shards."""
    base = endpoint.rstrip("/")
    if shards < 2:
        return base
    value = (shard.get("spec") or {}).get("partitionLabelValue")
    return f"{base}/shards/{value}" if value else f"{base}/shards"


def _place(database: Mapping[str, Any]) -> str:
    return str(database.get("connectionString", "")).rstrip("/")


def shard_advice(policy: Policy, endpoint: str) -> dict[str, Any]:
    """The part of a SchedulingShard's `spec` that goes with the policy. endpoint: where KAI asks for usage.

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


def _stated_k(shard: Object) -> object:
    """kValue as the shard has it: a plugin's own argument goes before the field."""
    stated = look(shard, ("spec", "plugins", "proportion", "arguments", "kValue"))
    return look(shard, ("spec", "kValue")) if stated is None else stated


def _k(stated: object) -> float:
    """As KAI reads it: unparsable is the default, negative is 0."""
    try:
        return DEFAULT_K if stated is None else max(0.0, float(str(stated)))
    except ValueError:
        return DEFAULT_K


def _gangs(owner: Mapping[str, QueuePolicy], groups: Sequence[Object], pods: Sequence[Pod]) -> tuple[Gang, ...]:
    """PodGroups of queues we know. A group whose status says nothing yet is sized by its pods."""
    members = by_gang(pods)
    found = []
    for obj in groups:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        queue = owner.get(f"{PREFIX}:{spec.get('queue')}")
        if queue is None:
            continue
        amounts = look(obj, ("status", "resourcesStatus")) or {}
        allocated = _gpus(amounts.get("allocated"))
        requested = max(allocated, _gpus(amounts.get("requested")))
        mine = members.get(named(obj))
        if mine is not None and not mine:
            continue  # all of it is on its way out
        priority = _PRIORITIES.get(
            spec.get("priorityClassName", ""), max((pod.priority for pod in mine or ()), default=0)
        )
        stated = spec.get("preemptibility")
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
            stated == "preemptible" if stated else priority < _FIRST_NOT_PREEMPTIBLE,
            millis(metadata.get("creationTimestamp")),
            millis((metadata.get("annotations") or {}).get("kai.scheduler/last-start-timestamp"))
            if allocated
            else None,
            millis((metadata.get("annotations") or {}).get(CHECKPOINT)),
        )
        gang = with_pods(gang, mine or (), int(spec.get("minMember") or 1))
        if gang.requested > 0:
            found.append(gang)
    return in_order(found)


def _evictions(
    owner: Mapping[str, QueuePolicy], groups: Sequence[Object], events: Sequence[Object]
) -> Iterator[Eviction]:
    """KAI's Events on the PodGroups of its victims, one per pod, which name the PodGroup they make room for."""
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
    """Where the Queue says something else than the policy. We report it and write none of it."""
    spec = obj.get("spec") or {}
    gpu = look(spec, ("resources", "gpu")) or {}
    parent = owner.get(f"{PREFIX}:{spec.get('parentQueue') or ''}")
    pairs: list[tuple[str, object, object]] = [
        ("quota", gpu.get("quota", 0), queue.deserved),
        ("limit", gpu.get("limit", 0), queue.limit),
        ("priority", spec.get("priority", 100), queue.priority),
        ("parent", parent.name if parent else spec.get("parentQueue"), queue.parent),
    ]
    return differences(obj["metadata"]["name"], pairs)
