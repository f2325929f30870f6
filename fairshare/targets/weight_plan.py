"""Reads a scheduler's objects, compares their weights with the desired ones, and plans the writes. `Adapter` is the
base class of all targets.

A plan is data: making it writes nothing, and the control loop executes or shows it. A plan leaves out values that the
cluster already has.

The first write records the weight that it replaces as the operator's base weight. A later weight that is neither the
published weight nor the base comes from another client, and becomes the new base. A weight that equals the base was
reset, by a GitOps sync for example: the base stays, and the controller publishes its weight again. If the other client
owns the field by server-side apply, the write is a conflict, which the controller reports and never forces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from accountant.wire.policy_models import Policy
from accountant.wire.scheduler_sections import OtherTarget, SchedulerTarget
from fairshare.core.gpu_demand import smallest_waiting
from fairshare.core.gpu_models import OWN_DECISIONS
from fairshare.core.queues_and_weights import Condition, ConditionReason, Observation, Pod, TargetQueue, Value, Weight
from fairshare.core.scheduler_queue_objects import WeightAnnotations, join_texts
from fairshare.targets.extender import Extender
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.whole_stop import WholeStop
from gputally.base.clock import Clock
from gputally.base.errors import ClusterError, ClusterRefused, NotFound
from gputally.base.yaml_file import Key
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import Cluster, Event, Kind, Object, ObjectReader, Objects
from gputally.kubernetes.scheduler_plugins import section_of
from gputally.server.config_loading import Model, faults_of

FIELD_MANAGER = "gputally-fairshare"
Mode = Literal["off", "dry-run", "enforce"]
Faults = tuple[tuple[tuple[Key, ...], str], ...]


Seen = Mapping[Kind, Sequence[Object]]
"""Objects of one target by kind, without the kinds that the API server does not serve or does not let us read."""


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """A query for all objects, or the named object, of the first of `kinds` that the API server serves.

    required: the target cannot be observed without these objects. Other objects only add advice or demand.
    fields: a Kubernetes field selector."""

    kinds: tuple[Kind, ...]
    required: bool = False
    namespace: str = ""
    name: str = ""
    fields: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting of a policy that is allowed but probably not intended. path: its place in the document."""

    path: tuple[Key, ...]
    message: str


MOST_WRITES = 500
"""Largest number of writes of one target in one cycle."""


class Adapter(ABC):
    """Converts the objects of one scheduler to the controller's model and back.

    prefixes: the prefixes of the policy's refs to this scheduler's queues, such as `lanes`.
    settings: the model of the scheduler's section of the policy; that of a scheduler of another package is a
        SchedulerTarget. The form of the policy shows its fields, by their titles and descriptions.
    reasons: what the reasons of its conditions mean, for the page of conditions.
    stop: stops its workloads through their own objects; None: by evicting their pods, as for every scheduler of another
        package.
    most_writes: the largest number of writes in one cycle; for a scheduler of another package at most MOST_WRITES.
    extender: answers the scheduler's own requests, and says whether it asks and so weights act; None: it asks nothing,
        as every scheduler of another package.
    managers: what to do about a field that another manager owns, by the beginning of the manager's name; the text can
        name {group}, {kind} and {field}."""

    name: str
    prefixes: tuple[str, ...]
    settings: type[Model] = SchedulerTarget
    reasons: tuple[ConditionReason, ...] = ()
    stop: WholeStop | None = None
    most_writes: int = MOST_WRITES
    extender: type[Extender] | None = None
    managers: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def reads(self, policy: Policy, /) -> tuple[ObjectQuery, ...]:
        """Return the queries whose objects `observe` needs."""

    @abstractmethod
    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        """Return the target's present state. pods: all pods of the cluster that request GPUs."""

    @abstractmethod
    def spec(self, queue: TargetQueue, value: Value) -> Object:
        """Return the fields of an object's spec that carry the value."""

    def mode(self, policy: Policy) -> Mode:
        """Return whether the policy lets the controller write to this target, and whether only as a dry run."""
        target = policy.targets.of(self.section)
        mode: Mode = "off" if target.mode == "off" else target.apply
        return mode

    def settings_of(self, policy: Policy) -> Any:
        """Return the scheduler's section of the policy, as `settings` models it. For schedulers of other packages."""
        return self.settings.model_validate(policy.targets.of(self.section).model_dump())

    def faults(self, section: OtherTarget) -> Faults:
        """Return (path, reason) of every fault in the scheduler's section of a policy."""
        return faults_of(section.model_dump(), self.settings)

    @property
    def section(self) -> str:
        """The name of the scheduler's section of the policy."""
        return section_of(self.name)

    def advise(self, _policy: Policy, /) -> Iterable[Advice]:
        """Return the settings of a policy with queues of this scheduler that are probably not intended."""
        return ()

    def configuration(self, _policy: Policy, _endpoint: str, /) -> Object | None:
        """Return the part of the `spec` of the scheduler's own configuration that matches the policy; None if none
        depends on it. For gputally's own schedulers.

        endpoint: the address at which the scheduler can read usage."""
        return None

    def opened(
        self,
        _policy: Policy,
        _cluster: Cluster,
        _files: Mapping[str, Path | None],
        _where: StatusObject,
        _clock: Clock,
        /,
    ) -> AbstractContextManager[Objects | None]:
        """Return a context with the client of objects that are not in the cluster, None if the policy needs none. For
        gputally's own schedulers with `files` in their manifest.

        where: the controller's ConfigMap. Raises FairshareError if a setting is missing."""
        return nullcontext()

    def publishes(self, _policy: Policy, /) -> bool:
        """Return True if the controller writes this target's weights, False if history reaches the target otherwise."""
        return True

    def express(
        self, _policy: Policy, weights: Sequence[Weight], _observation: Observation, _gpus: float, /
    ) -> Mapping[str, Value]:
        """Return the value of each queue's field, in the target's own unit. gpus: the GPUs of the cluster, > 0.

        The default is the law's weights themselves, because only their proportions among siblings matter."""
        return {weight.queue: weight.value for weight in weights}

    def patch(self, queue: TargetQueue, value: Value | None, annotations: Mapping[str, str]) -> Object:
        """Return the fields for server-side apply. value None: leave the field unset.

        The uid prevents the write from creating an object that was deleted since it was read."""
        optional = {"namespace": queue.namespace, "uid": queue.uid, "annotations": dict(annotations)}
        metadata = {"name": queue.name, **{key: each for key, each in optional.items() if each}}
        patch: dict[str, Any] = {"apiVersion": queue.kind.api_version, "kind": queue.kind.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = self.spec(queue, value)
        return patch


@dataclass(frozen=True, slots=True)
class Apply:
    """One planned server-side apply of a queue's weight.

    previous, value: the field's value before and after; None: unset.
    why: the reason, as text.
    order: the position among the writes of one target, see `write_order`.
    default: the value that the object's schema fills in for an unset field."""

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

    @property
    def size(self) -> float:
        """The relative change; infinite for a first value or a text."""
        old, new = self.previous, self.value
        if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
            return float("inf")
        return abs(new - old) / old


Action = Apply | Event | Condition


def plan(
    adapter: Adapter,
    weights: Sequence[Weight],
    values: Mapping[str, Value],
    observation: Observation,
    policy_version: str,
    now_ms: int,
    controller: str = "",
) -> tuple[Action, ...]:
    """Return the applies with their events, then the conditions. values: see `Adapter.express`.

    controller: NAMESPACE/LEASE of this controller, recorded on the objects; "" without a Lease.

    The applies are in the order of the queue names, or in `write_order` where the scheduler checks sums in a tree."""
    planned: list[tuple[tuple[int, int], list[Action]]] = []
    for weight in sorted(weights, key=lambda weight: weight.queue):
        queue = observation.queues.get(weight.queue)
        if queue is not None and weight.queue in values:
            steps = _plan_queue(adapter, weight, values[weight.queue], queue, policy_version, now_ms, controller)
            planned.append((write_order(queue, values[weight.queue]), steps))
    actions = [action for _, steps in sorted(planned, key=lambda each: each[0]) for action in steps]
    actions += observation.conditions
    issues = [f"{issue.subject}: {issue.reason}" for issue in observation.issues]
    orphans = [
        f"{name} has the controller's weight {show(queue.weight)} (its base: {show(_base(queue))}), and no queue of the"
        " policy refers to it: restore the base with `gputally fairshare release --left-behind` (name the other"
        " policies of this cluster with `--other FILE`)"
        for name, queue in sorted(observation.left_behind.items())
        if queue.published is not None
    ]
    if issues or orphans:
        reason = "QueuesLeftOut" if issues else "WeightsLeftBehind"
        actions.append(
            Condition("Mapped", "False", reason, "; ".join(map(join_texts, filter(None, (issues, orphans)))))
        )
    else:
        actions.append(Condition("Mapped", "True", "AllFound", "every queue of the policy that has a ref was found"))
    return tuple(actions)


ObjectKey = tuple[Kind, str, str, str]
"""Identifies a field of an object by kind, namespace, name and field."""


def object_key(queue: TargetQueue) -> ObjectKey:
    return queue.kind, queue.namespace, queue.name, queue.field


def release(
    adapter: Adapter, observation: Observation, *, left_behind: bool = False, theirs: Collection[ObjectKey] = ()
) -> tuple[Apply, ...]:
    """Return the writes that restore the base weights of the policy's objects and remove the controller's annotations.

    left_behind: restore the objects that no queue of the policy refers to, instead of the policy's objects.
    theirs: objects of another policy, which stay as they are."""
    queues = observation.left_behind if left_behind else observation.queues
    applies = (
        Apply(
            adapter.name,
            name,
            queue.name,
            queue.weight,
            base,
            "restored the weight from before gputally" if base is not None else "unset, as before gputally",
            adapter.patch(queue, base, {}),
            order=write_order(queue, base),
            default=queue.default,
        )
        for name, queue in sorted(queues.items())
        if queue.published is not None and object_key(queue) not in theirs
        for base in (_base(queue),)
    )
    return tuple(sorted(applies, key=lambda apply: apply.order))


def write_order(queue: TargetQueue, value: Value | None) -> tuple[int, int]:
    """Return a sort key: first the writes that lower a value, children before parents, then those that raise one,
    parents before children.

    The scheduler's webhook checks at every write that children stay within their parent. In this order every step is
    valid if the first and the last state are valid."""
    if not queue.path or isinstance(value, str) or isinstance(queue.weight, str):
        return (0, 0)
    depth = queue.path.count("/")
    return (-1, -depth) if (value or 0.0) < (queue.weight or 0.0) else (1, depth)


def same(one: Value | None, other: Value | None, unset: float = 0.0) -> bool:
    """Return True if the scheduler reads both values as the same number: `1/2` is `1.0/2`.

    unset: the number that the scheduler takes for an unset field."""
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


def _base(queue: TargetQueue) -> Value | None:
    """Return the operator's value: the recorded base, or the present value if another client has changed it."""
    ours = (queue.published, queue.base)
    if queue.published is None or not any(same(queue.weight, value, queue.unset) for value in ours):
        return queue.weight
    return queue.base


def _plan_queue(
    adapter: Adapter,
    weight: Weight,
    value: Value,
    queue: TargetQueue,
    policy_version: str,
    now_ms: int,
    controller: str,
) -> list[Action]:
    reset = queue.published is not None and not same(queue.weight, queue.published, queue.unset)
    changed = not same(value, queue.weight, queue.unset)
    if not changed and not reset:
        return []
    changed_ms, direction = queue.changed_ms, queue.direction
    if changed and not same(value, queue.published, queue.unset):
        changed_ms = now_ms
        direction = (weight.value > (weight.previous or 0.0)) - (weight.value < (weight.previous or 0.0))
    law = None if value == weight.value else weight.value
    note = WeightAnnotations(_base(queue), value, changed_ms, direction, policy_version, law, controller)
    annotations = note.annotations()
    actions: list[Action] = [
        Apply(
            adapter.name,
            weight.queue,
            queue.name,
            queue.weight,
            value,
            "the configured weight, because the scheduler itself counts history here" if queue.static else weight.why,
            adapter.patch(queue, value, annotations),
            order=write_order(queue, value),
            default=queue.default,
        )
    ]
    if reset:
        if same(queue.weight, queue.base, queue.unset):
            reason = "WeightReset"
            text = (
                f"the weight was reset to its base {show(queue.weight)}; the controller publishes {show(value)} again"
            )
        else:
            reason = "BaseWeightChanged"
            text = f"another client changed the weight to {show(queue.weight)}, which is the new base"
        actions.append(Event(queue.kind, queue.name, queue.namespace, queue.uid, "Normal", reason, text, now_ms))
    return actions


def show(value: Value | None) -> str:
    """Format a value for sentences: 2.5, 1/2/8, unset."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else f"{value:g}"


_RIGHTS = (
    "let the controller read them: `gputally doctor --only permissions` lists the missing rights; name a scheduler's"
    " ConfigMap in `fairshare.rbac.schedulerConfigMaps` of the chart"
)


def look_at(
    adapter: Adapter,
    policy: Policy,
    cluster: ObjectReader,
    pods: Sequence[Pod] = (),
    parts: MigParts = NO_NODES,
) -> Observation:
    """Read one target. Raises ClusterError if required objects cannot be read, or if the API server does not answer.

    If the API server refuses to list optional objects, or objects cannot be read, the observation has the condition
    `Readable` with status False, because demand is then underestimated."""
    seen: dict[Kind, Sequence[Object]] = {}
    refusals: list[str] = []
    for query in adapter.reads(policy):
        answer = _read(cluster, query, refusals)
        if answer is not None:
            seen[answer[0]] = answer[1]
    observation = adapter.observe(policy, seen, pods, parts)
    if policy.gpu_models and not any(condition.type == "ByModel" for condition in observation.conditions):
        observation = replace(observation, conditions=(*observation.conditions, _one_quantity(policy, adapter)))
    waiting = smallest_waiting(observation.gangs)
    standings = {
        queue: replace(standing, gang=waiting.get(queue, standing.gang))
        for queue, standing in observation.standings.items()
    }
    readable = _readable(refusals)
    if observation.unreadable and not refusals:
        readable = (Condition("Readable", "False", "ObjectsLeftOut", join_texts(observation.unreadable)),)
    return replace(observation, standings=standings, conditions=(*observation.conditions, *readable))


ONE_QUANTITY = ConditionReason(
    "ByModel",
    "False",
    "OneQuantity",
    "a queue has one quantity of GPUs, so the scheduler gives GPUs of any model within it",
    "nothing; for hard quotas, a node pool with queues of its own for each model",
)


def _one_quantity(policy: Policy, adapter: Adapter) -> Condition:
    """Return the condition `ByModel` of a scheduler whose queues have one quantity of GPUs."""
    models = join_texts(policy.gpu_models)
    text = f"{adapter.name} has one quantity of GPUs for a queue, and gives GPUs of any model within it"
    return Condition("ByModel", "False", "OneQuantity", f"{text}; of the quotas of {models}: {OWN_DECISIONS}")


def list_if_served(cluster: ObjectReader, kind: Kind) -> Sequence[Object]:
    """Return all objects of a kind, or none if the API server does not serve the kind or refuses to list it."""
    return list_first_served(cluster, (kind,))[0]


def list_first_served(cluster: ObjectReader, kinds: Sequence[Kind]) -> tuple[Sequence[Object], tuple[Condition, ...]]:
    """Return all objects of the first kind that the API server serves, and a condition if it refuses to list them."""
    refusals: list[str] = []
    answer = _read(cluster, ObjectQuery(tuple(kinds)), refusals)
    return answer[1] if answer is not None else (), _readable(refusals)


def _readable(refusals: Sequence[str]) -> tuple[Condition, ...]:
    return (Condition("Readable", "False", "ReadRefused", join_texts(refusals), _RIGHTS),) if refusals else ()


def with_texts(obj: Object) -> Object:
    """Return the object with those of its labels and annotations that are texts, as all of Kubernetes itself are: what
    an API server has that checks no schema stops nobody who looks one up."""
    metadata = obj["metadata"]
    wrong = {
        name: {key: value for key, value in given.items() if isinstance(value, str)} if isinstance(given, dict) else {}
        for name in ("labels", "annotations")
        if (given := metadata.get(name)) is not None
        and not (isinstance(given, dict) and all(isinstance(value, str) for value in given.values()))
    }
    return {**obj, "metadata": {**metadata, **wrong}} if wrong else obj


def _read(cluster: ObjectReader, query: ObjectQuery, refusals: list[str]) -> tuple[Kind, Sequence[Object]] | None:
    """Return the first kind of the query that the API server serves, and its objects.

    Returns None if the API server serves none of the kinds, if the named object does not exist, or if the API server
    refuses the query; the refusal is then added to `refusals`. Raises ClusterError instead if the query is required,
    and if the API server does not answer."""
    absent: ClusterError | None = None
    for kind in query.kinds:
        try:
            if query.name:
                return kind, (cluster.get(kind, query.name, query.namespace),)
            listed = cluster.list(kind, fields=query.fields) if query.fields else cluster.list(kind)
            return kind, list(map(with_texts, listed))
        except NotFound as error:
            absent = absent or error
        except ClusterRefused as error:
            if query.required:
                raise
            refusals.append(str(error))
            break
    if query.required and absent is not None:
        raise absent
    return None
