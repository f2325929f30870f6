"""Reads demand of the policy's queues from pods of the default kube-scheduler.

The label `gputally.dev/queue` names a pod's queue, and the ref `policy:NAME` refers to that label. Pods of a PodGroup
of `scheduling.k8s.io` start as it says: `minCount` of them at once, those without GPUs included. The controller writes
no weight here. Shares take effect through the extender (`extender`), which the scheduler's own configuration must
name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.core.gpu_demand import (
    LABELLED,
    OF_WORKLOAD,
    SCHEDULING_GROUP,
    companions_by_gang,
    gangs_by_label,
    pods_by_gang,
    standings_of,
)
from fairshare.core.queues_and_weights import Condition, Gang, Observation, Pod, Standing, TargetQueue, Value
from fairshare.core.scheduler_queue_objects import owners, read_each
from fairshare.schedulers.kube_scheduler.conditions import REASONS
from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.schedulers.kube_scheduler.section import KubeSchedulerTarget
from fairshare.targets.weight_plan import Adapter, Mode, ObjectQuery, Seen
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import POD_GROUPS, Object, value_at

NAME = "kube-scheduler"
_TOLERANCE = 1e-9


class KubeSchedulerAdapter(Adapter):
    """Reads the pods of the default scheduler. The controller writes no object for this target."""

    name = NAME
    prefixes = (LABELLED,)
    settings = KubeSchedulerTarget
    extender = KubeSchedulerExtender
    reasons = REASONS

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return (ObjectQuery(POD_GROUPS),)

    def mode(self, policy: Policy) -> Mode:
        return "off" if KubeSchedulerTarget.of(policy).mode == "off" else "enforce"

    def publishes(self, _policy: Policy) -> bool:
        return False

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES) -> Observation:
        gangs, unreadable = _as_groups_start(gangs_by_label(policy, pods), seen, pods)
        demand = standings_of(policy, gangs)
        names = {queue.name for queue in owners(policy, LABELLED).values()}
        standings = {name: demand.get(name, Standing(0.0, 0.0)) for name in sorted(names | demand.keys())}
        text = (
            "shares take effect if the scheduler's configuration names gputally's extender; a metric counts its calls"
        )
        conditions = [Condition("Effective", "Unknown", "AsksTheExtender", text)]
        if policy.gpu_models:
            text = "the extender's verdicts on preemptions and the controller's victims follow the quotas by model"
            conditions.append(Condition("ByModel", "True", "ByNode", text))
        return Observation({}, standings, (), tuple(conditions), gangs, unreadable=unreadable)

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        raise AssertionError(f"the controller writes no object for kube-scheduler, and got {queue.name}: {value}")


@dataclass(frozen=True, slots=True)
class _Group:
    """What a PodGroup says of its pods.

    least: how many of them start at once; 1 if they start one by one.
    together: whether they are stopped together.
    topology: the key of the node label whose value they share; "" if they need not."""

    least: int
    together: bool
    topology: str


def _read_group(obj: Object) -> tuple[str, _Group]:
    """Return the gang of a PodGroup, and the group. Raises what a field with another form raises."""
    spec = obj["spec"]
    policy, mode = spec["schedulingPolicy"], spec.get("disruptionMode")
    least = 1 if policy.get("basic") is not None else max(1, int(policy["gang"]["minCount"]))
    levels = value_at(spec, ("schedulingConstraints", "topology")) or ()
    together = mode == "PodGroup" or (isinstance(mode, Mapping) and mode.get("all") is not None)
    return _key(obj), _Group(least, together, next((str(level["key"]) for level in levels), ""))


def _key(obj: Object) -> str:
    return f"{SCHEDULING_GROUP}/{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def _as_groups_start(
    gangs: Sequence[Gang], seen: Seen, pods: Sequence[Pod]
) -> tuple[tuple[Gang, ...], tuple[str, ...]]:
    """Return the gangs, those of a PodGroup as it says, and the PodGroups that cannot be read, whose pods all start
    together. So do all groups of Kubernetes 1.35, whose Workloads are not read, and all groups if the API server does
    not serve PodGroups or does not let us read them."""
    objects = next((seen[kind] for kind in POD_GROUPS if kind in seen), None)
    if objects is None:
        return tuple(gangs), ()
    existing = {_key(obj) for obj in objects}
    read, unreadable = read_each(objects, _read_group)
    groups = dict(read)
    with_gpus, without = pods_by_gang(pods), companions_by_gang(pods)

    def started(gang: Gang) -> Gang:
        if gang.kind.kind != SCHEDULING_GROUP:
            return gang
        if gang.key not in existing and OF_WORKLOAD not in gang.name:
            return replace(gang, held_back=f"its PodGroup {gang.namespace}/{gang.name} does not exist")
        group, others = groups.get(gang.key), without.get(gang.key, ())
        if group is None:
            return replace(gang, companions=others)
        members = [pod for pod in (*with_gpus[gang.key], *others) if not pod.gated]
        least = _least_gpus(members, group.least)
        too_few = f"its PodGroup has {len(members)} pods, and starts with {group.least}"
        return replace(
            gang,
            minimum=min(gang.requested, max(least, min(pod.gpus for pod in gang.pods))),
            companions=others,
            core=tuple(pod.uid for pod in gang.pods) if group.together else (),
            topology=group.topology,
            held_back=too_few if len(members) < group.least else "",
        )

    return tuple(map(started, gangs)), unreadable


def _least_gpus(members: Sequence[Pod], least: int) -> float:
    """Return the GPUs with which `least` of these pods start; of a group that has started, those that it keeps with any
    `least` of its running pods.

    The scheduler tries all pods, by priority and age, and starts those that fit if they are enough. With room for the
    smallest only, a larger one may take it first; then the group surely starts with the GPUs of those that come first.

    Source: the behavior of kube-scheduler 1.36.3."""
    held = sorted((pod.gpus for pod in members if pod.held), reverse=True)
    if len(held) >= least:
        return fsum(held[:least])
    missing = least - len(held)
    waiting = sorted(
        (pod for pod in members if not pod.held),
        key=lambda pod: (pod.gpus > 0, -pod.priority, pod.created_ms or 0, -pod.gpus),
    )
    room = smallest = fsum(sorted(pod.gpus for pod in waiting)[:missing])
    fitting = 0
    for pod in waiting:
        if pod.gpus <= room + _TOLERANCE:
            room -= pod.gpus
            fitting += 1
    first = fsum(pod.gpus for pod in waiting[:missing])
    return fsum(held) + (smallest if fitting >= missing else first)
