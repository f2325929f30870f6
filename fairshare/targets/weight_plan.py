"""Observes a target, compares desired with observed weights, and plans the writes.

A plan contains only values. The control loop executes or shows it. Applying a plan twice changes nothing the second
time, because a value that is already there is not planned again.

The first write records the weight that it replaces as the operator's base weight. If a later weight is neither the
published one nor the base, another owner has set it, and it is the new base. If the weight equals the base, it was
reset, by a GitOps sync for example. The base then stays, and the weight is published again. If the other owner applies
with ownership, this becomes a conflict, which is reported and never forced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, Literal

from accountant.wire.policy_models import Policy
from fairshare.core.pods import smallest_waiting
from fairshare.core.queue_annotations import WeightAnnotations, say
from fairshare.core.queues_and_weights import Condition, Observation, Pod, TargetQueue, Value, Weight
from gputally.base.errors import ClusterError, NotFound, Refused
from gputally.kubernetes.objects import Event, Kind, Object, ObjectReader

FIELD_MANAGER = "gputally-fairshare"
Mode = Literal["off", "dry-run", "enforce"]


Seen = Mapping[Kind, Sequence[Object]]
"""Objects of one target by kind; a kind that is not served, or may not be read, is not a key."""


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """The objects that an adapter needs to read: all objects of the first of `kinds` that is served, or the named one.

    required: without it there is nothing to publish to; otherwise it is read only for advice or demand.
    fields: a field selector."""

    kinds: tuple[Kind, ...]
    required: bool = False
    namespace: str = ""
    name: str = ""
    fields: str = ""


class Adapter(ABC):
    """One scheduler: converts its objects to the controller's model and back. This class contains what most schedulers
    have in common.

    prefixes: of the refs of its queues."""

    name: str
    prefixes: tuple[str, ...]

    @abstractmethod
    def reads(self, policy: Policy, /) -> tuple[ObjectQuery, ...]:
        """Return what `observe` needs to read."""

    @abstractmethod
    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        """Return the target's present state. pods: of the whole cluster, those that request GPUs."""

    @abstractmethod
    def spec(self, held: TargetQueue, value: Value) -> Object:
        """Return the part of an object's spec with the value."""

    def mode(self, policy: Policy) -> Mode:
        target = getattr(policy.targets, self.name)
        mode: Mode = "off" if target.mode == "off" else target.apply
        return mode

    def publishes(self, _policy: Policy, /) -> bool:
        """Return False if history reaches this target in another way, so its weights are not written."""
        return True

    def express(
        self, _policy: Policy, weights: Sequence[Weight], _observation: Observation, _gpus: float, /
    ) -> Mapping[str, Value]:
        """Return the value of each queue's field for its weight, in the target's own unit. gpus: the GPUs of the
        cluster, > 0. By default these are the law's weights, because only their proportions among siblings matter."""
        return {weight.queue: weight.value for weight in weights}

    def patch(self, held: TargetQueue, value: Value | None, annotations: Mapping[str, str]) -> Object:
        """Return the fields for server-side apply. value None: leave the field unset. The uid keeps the write from
        creating an object that was deleted meanwhile."""
        given = {"namespace": held.namespace, "uid": held.uid, "annotations": dict(annotations)}
        metadata = {"name": held.name, **{key: each for key, each in given.items() if each}}
        patch: dict[str, Any] = {"apiVersion": held.kind.api_version, "kind": held.kind.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = self.spec(held, value)
        return patch


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply.

    value: the field's new value; None leaves it unset.
    why: the reason, as text.
    order: its position among the writes of one target, see `write_order`.
    default: the schema's default value."""

    target: str
    queue: str
    name: str
    previous: Value | None
    value: Value | None
    why: str
    patch: Object
    field_manager: str = FIELD_MANAGER
    order: tuple[int, int] = (0, 0)
    default: Value | None = None


Action = Apply | Event | Condition


def plan(
    adapter: Adapter,
    weights: Sequence[Weight],
    values: Mapping[str, Value],
    observation: Observation,
    policy_version: str,
    now_ms: int,
) -> tuple[Action, ...]:
    """Return applies and their events in the order of the queues (in a tree whose sums are checked: in `write_order`),
    then the conditions. values: see `Adapter.express`."""
    planned: list[tuple[tuple[int, int], list[Action]]] = []
    for weight in sorted(weights, key=lambda weight: weight.queue):
        held = observation.held.get(weight.queue)
        if held is not None and weight.queue in values:
            steps = _plan_one(adapter, weight, values[weight.queue], held, policy_version, now_ms)
            planned.append((write_order(held, values[weight.queue]), steps))
    actions = [action for _, steps in sorted(planned, key=lambda each: each[0]) for action in steps]
    actions += observation.conditions
    issues = [f"{issue.subject}: {issue.reason}" for issue in observation.issues]
    behind = [_behind(name, held) for name, held in sorted(observation.left.items()) if held.published is not None]
    if issues or behind:
        reason = "QueuesLeftOut" if issues else "WeightsLeftBehind"
        actions.append(Condition("Mapped", "False", reason, "; ".join(map(say, filter(None, (issues, behind))))))
    else:
        actions.append(Condition("Mapped", "True", "AllFound", "every queue of the policy that has a ref was found"))
    return tuple(actions)


def _behind(name: str, held: TargetQueue) -> str:
    return (
        f"{name} carries our weight {show(held.weight)} (its own: {show(_base(held))}) and belongs to no queue of the"
        " policy: `gputally fairshare release --left-behind` gives it its own back (`--other FILE`: not of that policy)"
    )


ObjectKey = tuple[Kind, str, str, str]
"""Kind, namespace, name and field: identifies a field of an object."""


def object_key(held: TargetQueue) -> ObjectKey:
    return held.kind, held.namespace, held.name, held.field


def release(
    adapter: Adapter, observation: Observation, *, left_behind: bool = False, theirs: Collection[ObjectKey] = ()
) -> tuple[Apply, ...]:
    """Return the writes that restore the base weights of the policy's objects and remove gputally's annotations.

    left_behind: restore the objects that no queue of the policy refers to, instead of the policy's objects.
    theirs: objects of another policy; they are not changed."""
    held_by = observation.left if left_behind else observation.held
    applies = (
        Apply(
            adapter.name,
            queue,
            held.name,
            held.weight,
            base,
            "restored what stood there before" if base is not None else "unset, as it was before",
            adapter.patch(held, base, {}),
            order=write_order(held, base),
            default=held.default,
        )
        for queue, held in sorted(held_by.items())
        if held.published is not None and object_key(held) not in theirs
        for base in (_base(held),)
    )
    return tuple(sorted(applies, key=lambda apply: apply.order))


def write_order(held: TargetQueue, value: Value | None) -> tuple[int, int]:
    """Shrink children before parents, then grow parents before children: the scheduler's webhook checks at every write
    that children stay within their parent, so every step is valid if the first and the last state are."""
    if not held.path or isinstance(value, str) or isinstance(held.weight, str):
        return (0, 0)
    depth = held.path.count("/")
    return (-1, -depth) if (value or 0.0) < (held.weight or 0.0) else (1, depth)


def same(one: Value | None, other: Value | None, unset: float = 0.0) -> bool:
    """Compare values as the scheduler reads them, never as text: `1/2` is `1.0/2`. unset: its value for an
    unset field."""
    left, right = _numbers(one, unset), _numbers(other, unset)
    if left is None or right is None:
        return one == other
    return len(left) == len(right) and all(isclose(a, b, rel_tol=1e-9) for a, b in zip(left, right, strict=True))


def _numbers(value: Value | None, unset: float) -> list[float] | None:
    if not isinstance(value, str):
        return [unset if value is None else value]
    try:
        return [float(part) for part in value.split("/")]
    except ValueError:
        return None


def _base(held: TargetQueue) -> Value | None:
    """Return the operator's value, as far as it is known."""
    unset = held.unset
    if held.published is None or not (same(held.weight, held.published, unset) or same(held.weight, held.base, unset)):
        return held.weight
    return held.base


def _plan_one(
    adapter: Adapter, weight: Weight, value: Value, held: TargetQueue, policy_version: str, now_ms: int
) -> list[Action]:
    base = _base(held)
    reset = held.published is not None and not same(held.weight, held.published, held.unset)
    changed = not same(value, held.weight, held.unset)
    if not changed and not reset:
        return []
    direction = (weight.value > (weight.previous or 0.0)) - (weight.value < (weight.previous or 0.0))
    law = None if value == weight.value else weight.value
    noted = (
        WeightAnnotations(base, value, now_ms, direction, policy_version, law)
        if changed and not same(value, held.published, held.unset)
        else WeightAnnotations(base, value, held.changed_ms, held.direction, policy_version, law)
    )
    why = "the scheduler keeps history here itself: the configured weight" if held.static else weight.why
    actions: list[Action] = [
        Apply(
            adapter.name,
            weight.queue,
            held.name,
            held.weight,
            value,
            why,
            adapter.patch(held, value, noted.annotations()),
            order=write_order(held, value),
            default=held.default,
        )
    ]
    if reset and same(held.weight, held.base, held.unset):
        text = f"the weight was set back to its base {show(held.weight)}; {show(value)} is published again"
        actions.append(_event(held, "WeightReset", text, now_ms))
    elif reset:
        text = f"another client changed the weight to {show(held.weight)}: that is the new base"
        actions.append(_event(held, "BaseWeightChanged", text, now_ms))
    return actions


def show(value: Value | None) -> str:
    """Format a value for sentences: 2.5, 1/2/8, unset."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else f"{value:g}"


def _event(held: TargetQueue, reason: str, message: str, now_ms: int) -> Event:
    return Event(held.kind, held.name, held.namespace, held.uid, "Normal", reason, message, now_ms)


_RIGHTS = (
    "let the controller read them: `gputally doctor --only permissions` names the rights; a scheduler's ConfigMap"
    " belongs into `fairshare.rbac.schedulerConfigMaps` of the chart"
)


def look_at(adapter: Adapter, policy: Policy, cluster: ObjectReader, pods: Sequence[Pod] = ()) -> Observation:
    """Read one target. Raises ClusterError if a required object does not exist.

    Objects that may not be read are left out and reported, because demand is then underestimated."""
    seen: dict[Kind, Sequence[Object]] = {}
    refused: list[str] = []
    for read in adapter.reads(policy):
        found = _read(cluster, read, refused)
        if found is not None:
            seen[found[0]] = found[1]
    observation = adapter.observe(policy, seen, pods)
    waiting = smallest_waiting(observation.gangs)
    standings = {
        queue: replace(standing, gang=waiting.get(queue, standing.gang))
        for queue, standing in observation.standings.items()
    }
    said = [Condition("Readable", "False", "ReadRefused", say(refused), _RIGHTS)] if refused else []
    return replace(observation, standings=standings, conditions=(*observation.conditions, *said))


def list_if_served(cluster: ObjectReader, kind: Kind) -> Sequence[Object]:
    """Return objects that are read for advice: empty if the kind is unknown or may not be read."""
    found = _read(cluster, ObjectQuery((kind,)), [])
    return found[1] if found is not None else ()


def _read(cluster: ObjectReader, read: ObjectQuery, refused: list[str]) -> tuple[Kind, Sequence[Object]] | None:
    """Return the objects of the first kind that is served; None if none is served, or if reading is not permitted (then
    the kind is added to `refused`). Raises for a required kind."""
    absent: ClusterError | None = None
    for kind in read.kinds:
        try:
            if read.name:
                return kind, (cluster.get(kind, read.name, read.namespace),)
            return kind, cluster.list(kind, fields=read.fields) if read.fields else cluster.list(kind)
        except NotFound as error:
            absent = absent or error
        except Refused as error:
            if read.required:
                raise
            absent = absent or error
            refused.append(str(error))
            break
    if read.required and absent is not None:
        raise absent
    return None
