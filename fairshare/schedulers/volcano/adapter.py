"""Maps the policy to Volcano's Queue objects, and reports why weights are not effective.

- Mode `weight`, for the proportion plugin, writes `spec.weight`: the queue's part of the *whole* cluster, quota
  included, as an integer number of ten-thousandths, so that all siblings use one scale.
- Mode `deserved`, for the capacity plugin, writes `spec.deserved`: whole GPUs, above which Volcano reclaims.
- Mode `hierarchy`, for the drf plugin with `enableHierarchy: true`, writes the annotation
  `volcano.sh/hierarchy-weights`: the weights along the path that the operator gave in `volcano.sh/hierarchy`.

In the first two modes the adapter divides the cluster among all queues by quota and weight as if every queue requested
GPUs, because a queue needs its share before it requests any. An annotation records the weight itself.

Source: volcano-sh/volcano ed72c7c815a9, scheduling.volcano.sh/v1beta1, plugins proportion, capacity, drf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core import scheduler_queue_objects
from fairshare.core.gpu_demand import (
    CHECKPOINT,
    companions_by_gang,
    gang_key,
    millis,
    overcount_by_queue,
    pods_by_gang,
    requested_gpus,
    sorted_gangs,
    standings_of,
    with_pods,
)
from fairshare.core.queues_and_weights import (
    ALWAYS_S,
    UNLIMITED,
    Condition,
    DivisionProblem,
    Gang,
    Issue,
    Observation,
    Pod,
    Protection,
    QueueClaim,
    Standing,
    TargetQueue,
    Value,
    Weight,
)
from fairshare.core.scheduler_queue_objects import (
    QueueMatch,
    differences,
    in_sync,
    join_texts,
    match,
    owners,
    path_from_root,
    read_each,
    read_queues,
    target_queue,
)
from fairshare.laws.division import divide_above
from fairshare.schedulers.volcano.conditions import REASONS
from fairshare.schedulers.volcano.kinds import JOB, POD_GROUP, QUEUE
from fairshare.schedulers.volcano.section import VolcanoTarget
from fairshare.schedulers.volcano.stop import RestartJob
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen, same
from gputally.base.yaml_file import MAX_CONFIG_CHARACTERS, FileFault, parse
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import (
    CONFIG_MAP,
    GPU,
    Object,
    duration_s,
    fixed_point,
    gpus,
    quantity,
    value_at,
)

PREFIX = "volcano"
HIERARCHY, HIERARCHY_WEIGHTS = "volcano.sh/hierarchy", "volcano.sh/hierarchy-weights"
MOST_WEIGHT = 65_535
SCALE = 10_000
"""The weight that means the whole cluster."""
_CONFIGURATION, _ENABLE_HIERARCHY = "volcano-scheduler.conf", "enableHierarchy"
_LINE = {"hierarchy": f"- {{name: drf, {_ENABLE_HIERARCHY}: true}}"}
_HISTORY = "fairshare"
"""Volcano's plugin that counts past use itself. Of the resources that it may count, only devices have a `/`."""
_ROOT = "root"
_DEFAULT_WEIGHT = 1.0
"""The weight that the CRD fills in for an unset field; the API server then records the Queue's creator as owner."""
_UNITS_PER_GPU = 1000.0
"""Units of a GPU in which mode `weight` divides, so that rounding to whole units does not change a weight."""
_PLUGIN = {"weight": "proportion", "deserved": "capacity", "hierarchy": "drf"}
_UNFINISHED = frozenset({"Pending", "Inqueue", "Running", "Unknown", ""})
"""Phases of PodGroups that count."""
_OPEN = "Open"
"""The state of a queue in which Volcano starts work; also of one whose status has none yet."""


class VolcanoAdapter(Adapter):
    """Reads Volcano's objects, and writes weights or quotas to its Queues."""

    name = "volcano"
    prefixes = (PREFIX,)
    settings = VolcanoTarget
    reasons = REASONS
    stop = RestartJob()

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        namespace, _, name = VolcanoTarget.of(policy).config.partition("/")
        return (
            ObjectQuery((QUEUE,), required=True),
            ObjectQuery((POD_GROUP,)),
            ObjectQuery((JOB,)),
            ObjectQuery((CONFIG_MAP,), namespace=namespace, name=name),
        )

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        owner = owners(policy, PREFIX)
        mode = VolcanoTarget.of(policy).mode
        objects = seen.get(QUEUE, ())
        found = match(objects, owner, lambda o: f"{PREFIX}:{o['metadata']['name']}", "Volcano queue")
        by_name = {obj["metadata"]["name"]: obj for obj in objects}
        parents = {name: value_at(obj, ("spec", "parent")) for name, obj in by_name.items()}
        configuration = seen.get(CONFIG_MAP, ())
        cools_down = _cools_down(configuration)
        gangs, stopped, unreadable = _gangs(
            owner, by_name, seen.get(POD_GROUP, ()), seen.get(JOB, ()), pods, parts, cools_down
        )
        overcount = overcount_by_queue(policy, (pod for pod in pods if pod.held and pod.ref in owner))
        demand_of = standings_of(policy, gangs)

        def read(name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            result = _target_queue(obj, mode, parents)
            if isinstance(result, Issue):
                return result
            queue, weight = result
            in_status = max(
                0.0, gpus(value_at(obj, ("status", "allocated")), parts.anywhere) - overcount.get(name, 0.0)
            )
            demand = demand_of.get(name, Standing(in_status, in_status))
            requested, allocated = max(demand.requested, in_status), max(demand.allocated, in_status)
            least, most = _bounds(obj["metadata"]["name"], by_name, parents, parts)
            return queue, Standing(requested, allocated, weight, queue.direction, least=least, most=most)

        observation = read_queues(found, read)
        config = VolcanoTarget.of(policy).config
        conditions = (
            _effective(mode, config, configuration, found),
            _in_sync(policy, owner, {name: found.found[name] for name in observation.queues}, parts, stopped),
        )
        return replace(observation, conditions=conditions, gangs=gangs, unreadable=unreadable)

    def express(
        self, policy: Policy, weights: Sequence[Weight], observation: Observation, gpus: float
    ) -> Mapping[str, Value]:
        mode = VolcanoTarget.of(policy).mode
        wanted = {weight.queue: weight.value for weight in weights}
        if mode == "hierarchy":
            owner = owners(policy, PREFIX)
            return {
                weight.queue: _path_weights(observation.queues[weight.queue], weight.queue, wanted, owner)
                for weight in weights
                if weight.queue in observation.queues
            }
        if mode == "deserved":
            shares = _full_demand_shares(policy, wanted, observation, gpus, 1.0)
            return {name: shares[name] for name in observation.queues if name in shares}
        shares = _full_demand_shares(policy, wanted, observation, gpus, _UNITS_PER_GPU)
        return {
            name: float(min(MOST_WEIGHT, max(1, round(shares[name] / (gpus * _UNITS_PER_GPU) * SCALE))))
            for name in observation.queues
            if name in shares
        }

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        if queue.field == "deserved":
            return {"deserved": {GPU: fixed_point(float(value))}}
        return {"weight": round(float(value))}

    def patch(self, queue: TargetQueue, value: Value | None, annotations: Mapping[str, str]) -> Object:
        """Return the fields for server-side apply; in mode `hierarchy` the value is an annotation."""
        if value is None or queue.field != "hierarchy":
            return super().patch(queue, value, annotations)
        return super().patch(queue, None, {**annotations, HIERARCHY_WEIGHTS: str(value)})


def _target_queue(obj: Object, mode: str, parents: Mapping[str, Any]) -> tuple[TargetQueue, float | None] | Issue:
    """Return a Queue object with the field that the mode writes, and the published weight that is in force, if any.

    parents: the parent of every Queue, by name."""
    metadata = obj["metadata"]
    name, annotations = metadata["name"], metadata.get("annotations") or {}
    value: Value | None
    if mode == "hierarchy":
        value = annotations.get(HIERARCHY_WEIGHTS)
        if not annotations.get(HIERARCHY):
            return Issue(name, f"has no annotation {HIERARCHY}: its place in the tree is not known")
    elif mode == "deserved":
        text = value_at(obj, ("spec", "deserved", GPU))
        value = None if text is None else quantity(text)
        if text is not None and value is None:
            return Issue(name, f"spec.deserved[{GPU}] is {text!r}")
    else:
        number = value_at(obj, ("spec", "weight"))
        value = None if number is None else quantity(number)
    hierarchy = mode == "hierarchy"
    queue = target_queue(
        obj,
        QUEUE,
        value,
        text=hierarchy,
        field=mode,
        path=annotations.get(HIERARCHY, "") if hierarchy else _path(name, parents),
        default=_DEFAULT_WEIGHT if mode == "weight" else None,
        unset=_DEFAULT_WEIGHT if mode == "weight" else 0.0,
    )
    recorded = scheduler_queue_objects.read(annotations, text=hierarchy)
    return queue, recorded.weight if recorded is not None and same(value, recorded.published) else None


def _path(name: str, parents: Mapping[str, Any]) -> str:
    """Return the queue's path, such as `root/eng/team`. Volcano's webhook checks the sums of `deserved` along it."""
    path = path_from_root(name, parents)
    return "/".join(path if path[0] == _ROOT else [_ROOT, *path])


def _bounds(
    name: str, queues: Mapping[str, Object], parents: Mapping[str, Any], parts: MigParts
) -> tuple[float, float]:
    """Return the GPUs that Volcano reserves for a queue (`guarantee`), and the most that it gives to it, by its own
    `capability` and those of the queues above it.

    Source: Volcano pkg/scheduler/plugins/proportion/proportion.go and plugins/capacity/capacity.go."""
    least = gpus(value_at(queues[name], ("spec", "guarantee", "resource")), parts.anywhere)
    capabilities = (value_at(queues.get(each, {}), ("spec", "capability")) for each in path_from_root(name, parents))
    limits = [gpus(each, parts.anywhere) for each in capabilities if isinstance(each, Mapping) and GPU in each]
    return least, min(limits, default=UNLIMITED)


def _in_sync(
    policy: Policy,
    owner: Mapping[str, QueuePolicy],
    objects: Mapping[str, Object],
    parts: MigParts,
    stopped: Sequence[str],
) -> Condition:
    """Return the condition `InSync`: whether limits, reserved GPUs and parents of Volcano match the policy.

    stopped: a sentence for each queue that starts nothing, although work waits in it.
    objects: the Queue of each queue of the policy. A reserved part of a queue's quota is no difference, because the
    weights give the rest of it."""
    differing: list[str] = []
    for queue in sorted(policy.queues, key=lambda queue: queue.name):
        obj = objects.get(queue.name)
        if obj is None:
            continue
        capability = value_at(obj, ("spec", "capability"))
        capped = isinstance(capability, Mapping) and GPU in capability
        reserved = gpus(value_at(obj, ("spec", "guarantee", "resource")), parts.anywhere)
        above = value_at(obj, ("spec", "parent")) or _ROOT
        parent = owner.get(f"{PREFIX}:{above}")
        pairs: list[tuple[str, object, object]] = [
            ("capability", gpus(capability, parts.anywhere) if capped else UNLIMITED, queue.limit),
            ("guarantee", reserved, min(reserved, max(0.0, queue.deserved))),
            ("parent", parent.name if parent else None if above == _ROOT else above, queue.parent),
        ]
        differing += differences(obj["metadata"]["name"], pairs)
    return in_sync(differing, stopped, what="capability, guarantee and parent")


def _full_demand_shares(
    policy: Policy, weights: Mapping[str, float], observation: Observation, gpus: float, scale: float
) -> dict[str, float]:
    """Return each queue's share if all queues request the whole cluster: its quota first, then by weight, within what
    Volcano reserves for it and the most that Volcano gives it.

    The unit of the shares is 1/scale of a GPU."""

    def scaled(amount: float) -> float:
        return UNLIMITED if amount == UNLIMITED else amount * scale

    bounds = {name: (standing.least, standing.most) for name, standing in observation.standings.items()}
    claims = []
    for queue in policy.queues:
        _least, most = bounds.get(queue.name, (0.0, UNLIMITED))
        limits = [limit for limit in (queue.limit, most) if limit != UNLIMITED]
        limit = min(limits, default=UNLIMITED)
        claims.append(
            QueueClaim(
                queue.name,
                inf,
                scaled(queue.deserved),
                scaled(limit),
                weights.get(queue.name, queue.weight),
                0.0,
                queue.priority,
                parent=queue.parent,
            )
        )
    least_of = {name: least * scale for name, (least, _) in bounds.items() if least > 0}
    return dict(divide_above(DivisionProblem("whole", gpus * scale, 0.0, tuple(claims)), least_of))


def _path_weights(queue: TargetQueue, name: str, weights: Mapping[str, float], owner: Mapping[str, QueuePolicy]) -> str:
    """Return the weights along a queue's path, such as `1/2/0.5` for `root/eng/team-a`.

    A part of the path that is no queue of the policy keeps its present number, or 1."""
    parts = queue.path.split("/")
    present = str(queue.weight).split("/") if queue.weight is not None else []
    numbers = []
    for i, part in enumerate(parts):
        policy_name = name if i == len(parts) - 1 else owner[ref].name if (ref := f"{PREFIX}:{part}") in owner else None
        weight = weights.get(policy_name) if policy_name is not None else None
        unchanged = present[i] if i < len(present) else "1"
        numbers.append(unchanged if weight is None else fixed_point(max(1e-6, weight)))
    return "/".join(numbers)


COOLDOWN = "volcano.sh/cooldown-time"
"""The label or annotation of a Job or PodGroup with the time for which Volcano's plugin cdp protects its pods."""


_CDP = "cdp"
_RECLAIMING = frozenset({"capacity", _CDP, "conformance", "drf", "extender", "gang", "pdb", "proportion"})
_PREEMPTING = frozenset({_CDP, "conformance", "drf", "extender", "gang", "pdb", "priority", "tdm"})
"""The plugins that choose victims for other queues, and for work of the same queue."""


def _cools_down(configuration: Sequence[Object]) -> tuple[bool, bool]:
    """Return whether Volcano's plugin cdp protects pods for a time after their start: from work of other queues, and
    from work of their own.

    It protects them if no later tier chooses victims: that decides alone where the tier of cdp finds none.

    Source: Volcano pkg/scheduler/framework/session_plugins.go, Reclaimable and Preemptable."""
    tiers = _tiers(configuration)
    named = [{plugin.get("name") for plugin in tier} for tier in (() if isinstance(tiers, str) else tiers)]
    last = max((n for n, names in enumerate(named) if _CDP in names), default=len(named))
    later: set[object] = set().union(*named[last + 1 :])
    return last < len(named) and not later & _RECLAIMING, last < len(named) and not later & _PREEMPTING


def _protection(name: str, queue: Object, group: Object, cools_down: tuple[bool, bool]) -> Protection | None:
    """Return what Volcano protects a workload from; None if from nothing. A queue with `reclaimable: false` gives
    nothing to other queues. cools_down: as `_cools_down` returns it.

    Source: Volcano pkg/scheduler/actions/reclaim/reclaim.go; pkg/scheduler/plugins/cdp/cdp.go."""
    metadata = group["metadata"]
    stated = (value_at(metadata, (kind, COOLDOWN)) for kind in ("labels", "annotations"))
    cooldown_s = duration_s(next((text for text in stated if text is not None), None)) or 0.0
    reclaim_s, preempt_s = (cooldown_s if protects else 0.0 for protects in cools_down)
    if value_at(queue, ("spec", "reclaimable")) is False:
        reclaim_s = ALWAYS_S
    # A workload that is protected from nothing says of which queue it is, if others are protected from that queue.
    known = reclaim_s or preempt_s or any(cools_down)
    return Protection((name,), (reclaim_s,), preempt_s, True) if known else None


def _gangs(
    owner: Mapping[str, QueuePolicy],
    queues: Mapping[str, Object],
    groups: Sequence[Object],
    jobs: Sequence[Object],
    pods: Sequence[Pod],
    parts: MigParts,
    cools_down: tuple[bool, bool],
) -> tuple[tuple[Gang, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the PodGroups of the policy's queues as gangs, sentences on stopped queues, and the PodGroups that cannot
    be read.

    queues: Volcano's, by name. What waits in one that is not open is left out; the sentence states how many GPUs wait.
    cools_down: as `_cools_down` returns it.

    The request of a group without pods is the larger of its Job's request and its `minResources`."""
    gpu_pods, companions = pods_by_gang(pods), companions_by_gang(pods)
    jobs_by_name = {(job["metadata"].get("namespace", ""), job["metadata"]["name"]): job for job in jobs}
    waiting_gpus: dict[str, float] = {}

    def read(obj: Object) -> Gang | None:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        namespace, name = metadata.get("namespace", ""), str(spec.get("queue") or "default")
        queue = owner.get(f"{PREFIX}:{name}")
        if queue is None or (value_at(obj, ("status", "phase")) or "") not in _UNFINISHED:
            return None
        annotations: Mapping[str, str] = metadata.get("annotations") or {}
        job = next(
            (
                jobs_by_name[namespace, reference["name"]]
                for reference in metadata.get("ownerReferences") or ()
                if reference.get("kind") == "Job" and (namespace, reference["name"]) in jobs_by_name
            ),
            None,
        )
        tasks = value_at(job or {}, ("spec", "tasks")) or ()
        own_pods, others = gpu_pods.get(gang_key(obj), ()), companions.get(gang_key(obj), ())
        if not own_pods and gang_key(obj) in gpu_pods:
            return None  # all its pods are being deleted
        roles = _roles_of_tasks(tasks, parts) or _roles_of_pods((*own_pods, *others))
        reserved = gpus(spec.get("minResources"), parts.anywhere)
        requested = max(fsum(role.members * role.gpus for role in roles), reserved)
        least = _least_gpus(roles, spec)
        if not tasks and reserved:
            least = min(least or reserved, reserved)  # not all members need have a pod yet
        if (value_at(obj, ("status", "phase")) or "Pending") == "Pending":
            least = max(least, reserved)  # Volcano creates no pod before its queue has room for these
        target = job or obj
        gang = Gang(
            queue.name,
            JOB if job is not None else POD_GROUP,
            namespace,
            target["metadata"]["name"],
            target["metadata"].get("uid", ""),
            requested,
            0.0,
            min(least, requested) or requested,
            0,
            annotations.get("volcano.sh/preemptable") != "false",
            millis(metadata.get("creationTimestamp")),
            None,
            millis(annotations.get(CHECKPOINT)),
            protection=_protection(name, queues.get(name, {}), obj, cools_down),
        )
        # The controller of a PodGroup creates all pods at once, so the pods that are left are its whole request.
        gang = with_pods(
            replace(
                gang,
                requested=0.0 if own_pods else requested,
                priority=max((pod.priority for pod in own_pods), default=0),
            ),
            own_pods,
            others,
        )
        state = value_at(queues.get(name, {}), ("status", "state")) or _OPEN
        if state != _OPEN and gang.requested > gang.allocated:
            halt = f"Queue {name} starts nothing (state {state})"
            waiting_gpus[halt] = waiting_gpus.get(halt, 0.0) + gang.requested - gang.allocated
            gang = replace(gang, requested=gang.allocated, minimum=min(gang.minimum, gang.allocated))
        return gang if gang.requested > 0 else None

    gangs, unreadable = read_each(groups, read)
    stopped = (f"{halt}: {amount:g} GPUs that wait there are not counted" for halt, amount in waiting_gpus.items())
    return sorted_gangs(gangs), tuple(sorted(stopped)), unreadable


@dataclass(frozen=True, slots=True)
class _Role:
    """Members of a gang with the same role and size. gpus: of one member."""

    name: str
    members: int
    gpus: float


def _roles_of_tasks(tasks: Iterable[Mapping[str, Any]], parts: MigParts) -> list[_Role]:
    return [
        _Role(
            str(task.get("name")),
            1 if task.get("replicas") is None else int(task["replicas"]),
            requested_gpus(value_at(task, ("template", "spec")) or {}, parts),
        )
        for task in tasks
    ]


def _roles_of_pods(pods: Iterable[Pod]) -> list[_Role]:
    counts = Counter((pod.subgroup, pod.gpus) for pod in pods)
    return [_Role(name, count, size) for (name, size), count in sorted(counts.items())]


def _least_gpus(roles: Sequence[_Role], spec: Mapping[str, Any]) -> float:
    """Return the fewest GPUs with which Volcano starts a gang: those of `minMember` members, among them the least
    members of each role (`minTaskMember`). If the roles need more than `minMember` together, Volcano ignores them.

    Members without GPUs count, and come first.

    Source: Volcano pkg/scheduler/api/job_info.go, IsReady, CheckTaskReady, NeedContinueAllocating."""
    least_members = max(1, int(spec.get("minMember") or 1))
    stated: Mapping[str, Any] = spec.get("minTaskMember") or {}
    least_of_role = {str(name): int(count or 0) for name, count in stated.items()}
    if sum(least_of_role.values()) > least_members:
        least_of_role = {}
    parts: list[float] = []
    left: list[tuple[float, int]] = []
    taken = 0
    for role in sorted(roles, key=lambda role: (role.gpus, role.name)):
        own = min(role.members, least_of_role.get(role.name, 0))
        least_of_role[role.name] = least_of_role.get(role.name, 0) - own
        parts.append(own * role.gpus)
        left.append((role.gpus, role.members - own))
        taken += own
    for size, count in left:
        more = max(0, min(count, least_members - taken))
        parts.append(more * size)
        taken += more
    return fsum(parts)


def _effective(mode: str, name: str, configuration: Sequence[Object], found: QueueMatch) -> Condition:
    """Return the condition `Effective`: True if Volcano's active plugin reads the field that the mode writes.

    name: namespace/name of the ConfigMap with Volcano's configuration.
    found: the Queue objects. Those that no queue of the policy refers to dilute weights if they hold GPUs."""
    wanted = _PLUGIN[mode]
    namespace, _, config_map = name.partition("/")
    line = _LINE.get(mode, f"- {{name: {wanted}}}")
    removal = " and take proportion out of that tier" if mode == "hierarchy" else ""
    edit = f"kubectl -n {namespace} edit configmap {config_map}"
    remedy = f"{edit}: under `plugins` of a tier in {_CONFIGURATION} write `{line}`{removal}"
    tiers = _tiers(configuration)
    if isinstance(tiers, str):
        text = f"Volcano's configuration cannot be read ({tiers}): make sure that the plugin {wanted} is active"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text, remedy)
    refused = _refused(tiers)
    if refused:
        text = f"Volcano refuses its configuration and goes on with the one before: {refused}"
        return Condition("Effective", "False", "ConfigurationRefused", text, remedy)
    plugins = {str(plugin.get("name")): plugin for tier in tiers for plugin in tier}
    if wanted not in plugins:
        other = next((m for m, plugin in _PLUGIN.items() if plugin in plugins and plugin != "drf"), None)
        hint = f": set targets.volcano.mode to {other}" if other else ""
        text = f"Volcano's plugin {wanted} is not active{hint}"
        other_mode = f", or in the policy `targets: {{volcano: {{mode: {other}}}}}`" if other else ""
        return Condition("Effective", "False", "PluginNotActive", text, remedy + other_mode)
    if mode == "hierarchy" and plugins["drf"].get(_ENABLE_HIERARCHY) is not True:
        other = next(
            (key for key in plugins["drf"] if "hierarchy" in str(key).lower() and key != _ENABLE_HIERARCHY), ""
        )
        hint = f" (Volcano ignores the unknown key {other})" if other else ""
        text = f"Volcano's plugin drf has no {_ENABLE_HIERARCHY}: true{hint}"
        return Condition("Effective", "False", "HierarchyOff", text, remedy)
    own = sorted(obj["metadata"]["name"] for obj in found.found.values())
    if remembered := _remembered(plugins.get(_HISTORY), own):
        text = (
            f"Volcano's plugin {_HISTORY} counts history too, between the namespaces of a queue"
            f" ({join_texts(remembered)}): use one of the two"
        )
        removal = f"{edit}: take `- name: fairshare` out of {_CONFIGURATION}"
        return Condition("Effective", "False", "HistoryCountedTwice", text, removal)
    busy = sorted(
        obj["metadata"]["name"]
        for obj in found.strangers
        if obj["metadata"]["name"] != _ROOT and gpus(value_at(obj, ("status", "allocated")), NO_NODES.anywhere) > 0
    )
    if busy and mode == "weight":
        text = f"queues outside the policy hold GPUs and dilute its weights: {', '.join(busy)}"
        refs = ", ".join(f"`refs: [volcano:{name}]`" for name in busy)
        return Condition("Effective", "False", "StrangersCompete", text, f"give each a queue of the policy: {refs}")
    text = f"Volcano's plugin {wanted} divides by the controller's values"
    return Condition("Effective", "True", "PluginActive", text)


def _remembered(plugin: Mapping[str, Any] | None, queues: Sequence[str]) -> list[str]:
    """Return those of the queues among whose namespaces Volcano's plugin fairshare counts past use of GPUs. Without
    readable arguments these are all.

    Source: volcano-sh/volcano pull request 5161, pkg/scheduler/plugins/fairshare/fairshare.go."""
    if plugin is None:
        return []
    stated = plugin.get("arguments")
    arguments: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}

    def text(key: str) -> str:
        return str(arguments.get(f"{_HISTORY}.{key}") or "").strip()

    named = {name.strip() for name in text("targetQueues").split(",")} - {""}
    of_queue = {name: text(f"resourceKey.{name}") if name in named else "" for name in queues}
    default = text("resourceKey") or GPU
    return [name for name in queues if (not named or name in named) and "/" in (of_queue[name] or default)]


_Tiers = Sequence[Sequence[Mapping[str, Any]]]


def _tiers(configuration: Sequence[Object]) -> _Tiers | str:
    """Return the plugins of every tier, or the reason why they are unknown.

    The tiers are in the entry `volcano-scheduler.conf` of the ConfigMap, or in its only entry with tiers."""
    if not configuration:
        return "the ConfigMap does not exist, or the controller may not read it"
    found: dict[str, _Tiers] = {}
    for config_map in configuration:
        for key, text in (config_map.get("data") or {}).items():
            try:
                document = parse(text, key, MAX_CONFIG_CHARACTERS).data
            except FileFault as fault:
                if key == _CONFIGURATION:
                    return f"invalid YAML: {fault.faults[0]}"
                continue
            tiers = document.get("tiers") if isinstance(document, dict) else None
            if isinstance(tiers, list):
                listed = [tier.get("plugins") for tier in tiers if isinstance(tier, dict)]
                found[key] = [
                    [p for p in plugins if isinstance(p, dict)] for plugins in listed if isinstance(plugins, list)
                ]
    if _CONFIGURATION in found:
        return found[_CONFIGURATION]
    if len(found) == 1:
        return next(iter(found.values()))
    return f"several entries have tiers: {', '.join(sorted(found))}" if found else "no entry has tiers"


def _refused(tiers: _Tiers) -> str:
    """Return the reason why Volcano refuses the configuration; "" if Volcano accepts it."""
    for tier in tiers:
        hierarchy = False
        for plugin in tier:
            stated = plugin.get(_ENABLE_HIERARCHY)
            if stated is not None and not isinstance(stated, bool):
                return f"{_ENABLE_HIERARCHY} of {plugin.get('name')} is {stated!r}, not true or false"
            hierarchy |= plugin.get("name") == "drf" and stated is True
        if hierarchy and any(plugin.get("name") == "proportion" for plugin in tier):
            return f"one tier has proportion and drf with {_ENABLE_HIERARCHY}: take proportion out"
    return ""
