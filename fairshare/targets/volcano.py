"""Maps the policy to Volcano's Queue objects, and reports why weights are not effective.

- mode `weight`, for the proportion plugin: `spec.weight`, an integer that means a part of the *whole* cluster, quota
  included. It is written in ten-thousandths of the cluster, so all siblings use one scale.
- mode `deserved`, for the capacity plugin: `spec.deserved`, whole GPUs, above which Volcano reclaims.
- mode `hierarchy`, for the drf plugin with `enableHierarchy: true`: the numbers of `volcano.sh/hierarchy-weights`,
  along the path that the operator gave in `volcano.sh/hierarchy`.

The first two values come from dividing the cluster among all queues by quota and weight, as if every queue requested
GPUs, because a queue needs its share before it requests any. The weight itself is in an annotation.

Source: volcano-sh/volcano ed72c7c815a9, scheduling.volcano.sh/v1beta1, plugins proportion, capacity, drf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core import queue_annotations
from fairshare.core.pods import CHECKPOINT, amounts, by_gang, in_order, millis, named, request, with_pods
from fairshare.core.queue_annotations import match, owners, read_queues, target_queue
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Claim,
    Condition,
    DivisionProblem,
    Gang,
    Issue,
    Observation,
    Pod,
    Standing,
    TargetQueue,
    Value,
    Weight,
)
from fairshare.laws.division import divide
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen, same
from gputally.base.yaml_file import MAX_CONFIG_CHARACTERS, FileFault, parse
from gputally.kubernetes.objects import CONFIG_MAP, GPU, Kind, Object, fixed_point, gpus, quantity, value_at

QUEUE = Kind("scheduling.volcano.sh/v1beta1", "Queue", "queues")
POD_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups", namespaced=True, status=False)
JOB = Kind("batch.volcano.sh/v1alpha1", "Job", "jobs", namespaced=True)
COMMAND = Kind("bus.volcano.sh/v1alpha1", "Command", "commands", namespaced=True, status=False)
"""A command to Volcano's controllers, for example `RestartJob`. They delete it before they act on it."""
KINDS = (QUEUE, POD_GROUP, JOB, COMMAND)
PREFIX = "volcano"
HIERARCHY, HIERARCHY_WEIGHTS = "volcano.sh/hierarchy", "volcano.sh/hierarchy-weights"
MOST_WEIGHT = 65_535
SCALE = 10_000
"""A weight of 10,000 is the whole cluster."""
_CONFIGURATION, _ENABLE_HIERARCHY = "volcano-scheduler.conf", "enableHierarchy"
_LINE = {"hierarchy": f"- {{name: drf, {_ENABLE_HIERARCHY}: true}}"}
_ROOT = "root"
_DEFAULT_WEIGHT = 1.0
"""The CRD fills it in, and the API server records the Queue's creator as its owner."""
_FINE = 1000.0
"""Parts are computed in thousandths of a GPU, so that rounding to whole units is not visible in them."""
_PLUGIN = {"weight": "proportion", "deserved": "capacity", "hierarchy": "drf"}
_LIVE = frozenset({"Pending", "Inqueue", "Running", "Unknown", ""})


class VolcanoAdapter(Adapter):
    """The adapter for Volcano."""

    name = "volcano"
    prefixes = (PREFIX,)

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        namespace, _, name = policy.targets.volcano.config.partition("/")
        return (
            ObjectQuery((QUEUE,), required=True),
            ObjectQuery((POD_GROUP,)),
            ObjectQuery((JOB,)),
            ObjectQuery((CONFIG_MAP,), namespace=namespace, name=name),
        )

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        owner = owners(policy, PREFIX)
        mode = policy.targets.volcano.mode
        objects = seen.get(QUEUE, ())
        found = match(objects, owner, lambda o: f"{PREFIX}:{o['metadata']['name']}", "Volcano queue")
        parents = {obj["metadata"]["name"]: value_at(obj, ("spec", "parent")) for obj in objects}
        gangs = _gangs(owner, seen.get(POD_GROUP, ()), seen.get(JOB, ()), pods)
        asked = amounts(policy, gangs)

        def read(name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            one = _target_queue(obj, mode, parents)
            if isinstance(one, Issue):
                return one
            held, weight = one
            own = gpus(value_at(obj, ("status", "allocated")))
            demand = asked.get(name, Standing(own, own))
            requested, allocated = max(demand.requested, own), max(demand.allocated, own)
            return held, Standing(requested, allocated, weight, held.changed_ms, held.direction)

        known = read_queues(found, read)
        config = policy.targets.volcano.config
        conditions = (_effective(mode, config, seen.get(CONFIG_MAP, ()), found.strangers),)
        return Observation(known.held, known.standings, known.issues, conditions, gangs, left=known.left)

    def express(
        self, policy: Policy, weights: Sequence[Weight], observation: Observation, gpus: float
    ) -> Mapping[str, Value]:
        mode = policy.targets.volcano.mode
        wanted = {weight.queue: weight.value for weight in weights}
        if mode == "hierarchy":
            owner = owners(policy, PREFIX)
            return {
                weight.queue: _along(observation.held[weight.queue], weight.queue, wanted, owner)
                for weight in weights
                if weight.queue in observation.held
            }
        if mode == "deserved":
            shares = _whole(policy, wanted, gpus, 1.0)
            return {name: shares[name] for name in observation.held if name in shares}
        shares = _whole(policy, wanted, gpus, _FINE)
        return {
            name: float(min(MOST_WEIGHT, max(1, round(shares[name] / (gpus * _FINE) * SCALE))))
            for name in observation.held
            if name in shares
        }

    def spec(self, held: TargetQueue, value: Value) -> Object:
        if held.field == "deserved":
            return {"deserved": {GPU: fixed_point(float(value))}}
        return {"weight": round(float(value))}

    def patch(self, held: TargetQueue, value: Value | None, annotations: Mapping[str, str]) -> Object:
        """In mode `hierarchy`, write the value as an annotation."""
        if value is None or held.field != "hierarchy":
            return super().patch(held, value, annotations)
        return super().patch(held, None, {**annotations, HIERARCHY_WEIGHTS: str(value)})


def _target_queue(obj: Object, mode: str, parents: Mapping[str, Any]) -> tuple[TargetQueue, float | None] | Issue:
    """Return one Queue as the mode sees it, and the weight in force (None: none published). parents: of all Queues."""
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
    held = target_queue(
        obj,
        QUEUE,
        value,
        text=hierarchy,
        field=mode,
        path=annotations.get(HIERARCHY, "") if hierarchy else _path(name, parents),
        default=_DEFAULT_WEIGHT if mode == "weight" else None,
        unset=_DEFAULT_WEIGHT if mode == "weight" else 0.0,
    )
    noted = queue_annotations.read(annotations, text=hierarchy)
    ours = noted is not None and same(value, noted.published)
    return held, noted.weight if noted is not None and ours else None


def _path(name: str, parents: Mapping[str, Any]) -> str:
    """Return `root/eng/team`, as far as known; Volcano's webhook checks the sums of `deserved` along it."""
    path = [name]
    while (above := parents.get(path[0])) and above not in path:
        path.insert(0, str(above))
    return "/".join(path if path[0] == _ROOT else [_ROOT, *path])


def _whole(policy: Policy, weights: Mapping[str, float], gpus: float, scale: float) -> dict[str, float]:
    """Return what every queue gets if all queues request everything, quota first, then by weight, in 1/scale GPUs."""
    claims = tuple(
        Claim(
            queue.name,
            inf,
            queue.deserved if queue.deserved == UNLIMITED else queue.deserved * scale,
            queue.limit if queue.limit == UNLIMITED else queue.limit * scale,
            weights.get(queue.name, queue.weight),
            0.0,
            queue.priority,
            parent=queue.parent,
        )
        for queue in policy.queues
    )
    return dict(divide(DivisionProblem("whole", gpus * scale, 0.0, claims)).shares)


def _along(held: TargetQueue, queue: str, weights: Mapping[str, float], owner: Mapping[str, QueuePolicy]) -> str:
    """Return the weights of a path such as `root/eng/team-a`; a part without a queue keeps its number."""
    parts = held.path.split("/")
    shown = str(held.weight).split("/") if held.weight is not None else []
    numbers = []
    for i, part in enumerate(parts):
        known = queue if i == len(parts) - 1 else owner[ref].name if (ref := f"{PREFIX}:{part}") in owner else None
        standing = shown[i] if i < len(shown) else "1"
        weight = weights.get(known) if known is not None else None
        numbers.append(standing if weight is None else fixed_point(max(1e-6, weight)))
    return "/".join(numbers)


def _gangs(
    owner: Mapping[str, QueuePolicy], groups: Sequence[Object], jobs: Sequence[Object], pods: Sequence[Pod]
) -> tuple[Gang, ...]:
    """Return the PodGroups of known queues. The request of a group without pods comes from its Job, otherwise from
    minResources."""
    members = by_gang(pods)
    asks = {(job["metadata"].get("namespace", ""), job["metadata"]["name"]): job for job in jobs}
    found = []
    for obj in groups:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        namespace = metadata.get("namespace", "")
        queue = owner.get(f"{PREFIX}:{spec.get('queue') or 'default'}")
        if queue is None or (value_at(obj, ("status", "phase")) or "") not in _LIVE:
            continue
        annotations: Mapping[str, str] = metadata.get("annotations") or {}
        job = next(
            (
                asks[namespace, reference["name"]]
                for reference in metadata.get("ownerReferences") or ()
                if reference.get("kind") == "Job" and (namespace, reference["name"]) in asks
            ),
            None,
        )
        tasks = value_at(job or {}, ("spec", "tasks")) or ()
        stated = fsum(int(t.get("replicas") or 1) * request(value_at(t, ("template", "spec")) or {}) for t in tasks)
        least = gpus(spec.get("minResources"))
        asked = max(stated, least)
        target = job or obj
        gang = Gang(
            queue.name,
            JOB if job is not None else POD_GROUP,
            namespace,
            target["metadata"]["name"],
            target["metadata"].get("uid", ""),
            asked,
            0.0,
            least or asked,
            0,
            annotations.get("volcano.sh/preemptable") != "false",
            millis(metadata.get("creationTimestamp")),
            None,
            millis(annotations.get(CHECKPOINT)),
        )
        mine = members.get(named(obj), ())
        if not mine and named(obj) in members:
            continue  # all its pods are being deleted
        # The controller of a PodGroup creates all pods at once, so the pods that are left are its whole request.
        gang = with_pods(
            replace(
                gang,
                requested=0.0 if mine else asked,
                priority=max((pod.priority for pod in mine), default=0),
            ),
            mine,
            int(spec["minMember"]) if spec.get("minMember") else None,
        )
        if gang.requested > 0:
            found.append(gang)
    return in_order(found)


def _effective(mode: str, name: str, configuration: Sequence[Object], strangers: Sequence[Object]) -> Condition:
    """Return whether the plugin that reads the written field is active, and only queues of the policy compete."""
    wanted = _PLUGIN[mode]
    namespace, _, config_map = name.partition("/")
    line = _LINE.get(mode, f"- {{name: {wanted}}}")
    apart = " and take proportion out of that tier" if mode == "hierarchy" else ""
    edit = f"kubectl -n {namespace} edit configmap {config_map}"
    remedy = f"{edit}: under `plugins` of a tier in {_CONFIGURATION} write `{line}`{apart}"
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
        hint = f" ({other} is no key of Volcano's, which ignores it in silence)" if other else ""
        text = f"Volcano's plugin drf has no {_ENABLE_HIERARCHY}: true{hint}"
        return Condition("Effective", "False", "HierarchyOff", text, remedy)
    if "fairshare" in plugins:
        text = "Volcano's plugin fairshare keeps history too, between the namespaces of a queue: drop one of them"
        drop = f"{edit}: take `- name: fairshare` out of {_CONFIGURATION}"
        return Condition("Effective", "False", "HistoryCountedTwice", text, drop)
    busy = sorted(
        obj["metadata"]["name"]
        for obj in strangers
        if obj["metadata"]["name"] != _ROOT and gpus(value_at(obj, ("status", "allocated"))) > 0
    )
    if busy and mode == "weight":
        text = f"queues that the policy does not know hold GPUs and dilute its weights: {', '.join(busy)}"
        refs = ", ".join(f"`refs: [volcano:{name}]`" for name in busy)
        return Condition("Effective", "False", "StrangersCompete", text, f"give each a queue of the policy: {refs}")
    return Condition("Effective", "True", "PluginActive", f"Volcano's plugin {wanted} divides by what we write")


_Tiers = Sequence[Sequence[Mapping[str, Any]]]


def _tiers(configuration: Sequence[Object]) -> _Tiers | str:
    """Return the plugins of every tier in `volcano-scheduler.conf`, or of the only entry with tiers; otherwise why they
    are unknown."""
    if not configuration:
        return "it is not there, or not ours to read"
    found: dict[str, _Tiers] = {}
    for config_map in configuration:
        for key, text in (config_map.get("data") or {}).items():
            try:
                document = parse(text, key, MAX_CONFIG_CHARACTERS).data
            except FileFault as fault:
                if key == _CONFIGURATION:
                    return f"not YAML that can be used: {fault.faults[0]}"
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
    """Return why Volcano refuses the configuration; empty if it does not."""
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
