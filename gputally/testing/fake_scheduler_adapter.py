"""The adapters of the schedulers of `gputally.testing.fake_scheduler`, which the controller alone loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite

from pydantic import Field

from accountant.wire.policy_models import Policy, QueuePolicy
from accountant.wire.scheduler_sections import SchedulerTarget
from fairshare.core.gpu_demand import (
    companions_by_gang,
    gang_key,
    gangs_by_label,
    pods_by_gang,
    sorted_gangs,
    standings_of,
    with_pods,
)
from fairshare.core.queues_and_weights import Condition, Gang, Issue, Observation, Pod, Standing, TargetQueue, Value
from fairshare.core.scheduler_queue_objects import (
    differences,
    in_sync,
    match,
    owners,
    read_each,
    read_queues,
    target_queue,
)
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import GPU, Object, gpus, quantity, value_at
from gputally.testing.fake_scheduler import NAME, POD_GROUP, PODS, QUEUE, SETUP


class FakeTarget(SchedulerTarget):
    """The section `targets.fake`. usage: the scheduler counts past use itself, and weights stay as they are."""

    usage: bool = Field(default=False, title="counts past use itself")


class FakeAdapter(Adapter):
    """Reads Queues and PodGroups, and says where their weights are."""

    name = NAME
    prefixes = (NAME,)
    settings = FakeTarget

    def reads(self, _policy: Policy, /) -> tuple[ObjectQuery, ...]:
        return ObjectQuery((QUEUE,), required=True), ObjectQuery((SETUP,)), ObjectQuery((POD_GROUP,))

    def publishes(self, policy: Policy, /) -> bool:
        return not self.settings_of(policy).usage

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        owner = owners(policy, NAME)
        found = match(seen.get(QUEUE, ()), owner, lambda obj: f"{NAME}:{obj['metadata']['name']}", "fake queue")
        observation = read_queues(found, lambda _name, obj: _read_queue(obj, parts))
        differing = [
            text
            for queue in sorted(policy.queues, key=lambda queue: queue.name)
            if queue.name in observation.queues
            for text in _differences(queue, found.found[queue.name], owner)
        ]
        gangs, unreadable = _gangs(owner, seen.get(POD_GROUP, ()), pods, parts)
        setups = seen.get(SETUP, ())
        acts = _by_weight(setups) if self.publishes(policy) else _by_usage(setups)
        conditions = (acts, in_sync(differing))
        return replace(observation, conditions=conditions, gangs=gangs, unreadable=unreadable)

    def spec(self, _queue: TargetQueue, value: Value) -> Object:
        return {"weight": value}


def _read_queue(obj: Object, parts: MigParts) -> tuple[TargetQueue, Standing] | Issue:
    """Read one Queue. What its status does not state is zero: nothing runs, nothing waits."""
    name, weight = obj["metadata"]["name"], value_at(obj, ("spec", "weight"))
    if weight is not None and not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
        return Issue(name, f"spec.weight is {weight!r}")
    for key in ("requested", "allocated"):
        text = value_at(obj, ("status", key, GPU))
        if text is not None and quantity(text) is None:
            return Issue(name, f"status.{key}[{GPU}] is {text!r}, not a quantity")
    requested, allocated = (gpus(value_at(obj, ("status", key)), parts.anywhere) for key in ("requested", "allocated"))
    value = None if weight is None else float(weight)
    queue = target_queue(obj, QUEUE, value)
    return queue, Standing(max(requested, allocated), allocated, value, queue.direction)


def _differences(queue: QueuePolicy, obj: Object, owner: Mapping[str, QueuePolicy]) -> list[str]:
    spec = obj.get("spec") or {}
    parent = owner.get(f"{NAME}:{spec.get('parent') or ''}")
    pairs: list[tuple[str, object, object]] = [
        ("quota", spec.get("quota", 0), queue.deserved),
        ("limit", spec.get("limit", -1), queue.limit),
        ("priority", spec.get("priority", 100), queue.priority),
        ("parent", parent.name if parent else spec.get("parent"), queue.parent),
    ]
    return differences(obj["metadata"]["name"], pairs)


def _gangs(
    owner: Mapping[str, QueuePolicy], groups: Sequence[Object], pods: Sequence[Pod], parts: MigParts
) -> tuple[tuple[Gang, ...], tuple[str, ...]]:
    """Return the PodGroups of the policy's queues as gangs, and those that cannot be read."""
    with_gpus, without = pods_by_gang(pods), companions_by_gang(pods)

    def read(obj: Object) -> Gang | None:
        metadata, spec = obj["metadata"], obj.get("spec") or {}
        queue = owner.get(f"{NAME}:{spec.get('queue')}")
        own, others = with_gpus.get(gang_key(obj)), without.get(gang_key(obj), ())
        if queue is None or own == ():
            return None
        least = max(1, int(spec.get("minMember") or 1))
        status = obj.get("status") or {}
        allocated = gpus(status.get("allocated"), parts.anywhere)
        requested = max(allocated, gpus(status.get("requested"), parts.anywhere))
        gang = Gang(
            queue.name,
            POD_GROUP,
            metadata.get("namespace", ""),
            metadata["name"],
            metadata.get("uid", ""),
            requested,
            allocated,
            _minimum(least, own) if own else requested,
            max((pod.priority for pod in own or ()), default=0),
            preemptible=spec.get("preemptible") is not False,
            created_ms=min((pod.created_ms for pod in own or () if pod.created_ms is not None), default=None),
        )
        gang = with_pods(gang, own or (), others)
        return gang if gang.requested > 0 else None

    gangs, unreadable = read_each(groups, read)
    return sorted_gangs(gangs), unreadable


def _minimum(least: int, pods: Sequence[Pod]) -> float:
    """Return the GPUs with which a workload starts: those of its oldest pods, or goes on: those of the smallest."""
    held = sorted(pod.gpus for pod in pods if pod.held)
    if len(held) >= least:
        return fsum(held[:least])
    waiting = sorted((pod for pod in pods if not pod.held), key=lambda pod: (pod.created_ms or 0, pod.uid))
    return fsum([*held, *(pod.gpus for pod in waiting)][:least])


def _by_weight(setups: Sequence[Object]) -> Condition:
    """Return the condition `Effective` where weights carry history."""
    if not setups:
        return Condition("Effective", "Unknown", "NoSetup", "no Setup can be read")
    for setup in setups:
        name, spec = f"Setup {setup['metadata']['name']}", setup.get("spec") or {}
        if spec.get("divides") is False:
            text, cure = f"{name} divides nothing", "set spec.divides to true"
            return Condition("Effective", "False", "WeightsUnread", text, cure)
        if spec.get("countsUsage"):
            text, cure = f"{name} counts past use too", "set spec.countsUsage to false"
            return Condition("Effective", "False", "HistoryCountedTwice", text, cure)
    return Condition("Effective", "True", "WeightsOnly", "the scheduler divides by weights alone")


def _by_usage(setups: Sequence[Object]) -> Condition:
    """Return the condition `Effective` where the scheduler counts past use itself."""
    if any((setup.get("spec") or {}).get("countsUsage") for setup in setups):
        return Condition("Effective", "True", "UsageOnly", "the scheduler counts past use itself")
    return Condition("Effective", "False", "UsageNotRead", "no Setup counts past use", "set spec.countsUsage to true")


class FakePodsAdapter(Adapter):
    """Reads pods, and writes nothing."""

    name = PODS
    prefixes = (PODS,)

    def reads(self, _policy: Policy, /) -> tuple[ObjectQuery, ...]:
        return ()

    def publishes(self, _policy: Policy, /) -> bool:
        return False

    def observe(
        self, policy: Policy, _seen: Seen, pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES
    ) -> Observation:
        gangs = gangs_by_label(policy, pods, PODS)
        demand = standings_of(policy, gangs)
        names = demand.keys() | {queue.name for queue in owners(policy, PODS).values()}
        standings = {name: demand.get(name, Standing(0.0, 0.0)) for name in sorted(names)}
        acts = Condition("Effective", "Unknown", "NoSetup", "no object shows it")
        return Observation({}, standings, (), (acts,), gangs)

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        raise AssertionError(f"it publishes no weight, and got {queue.name}: {value}")
