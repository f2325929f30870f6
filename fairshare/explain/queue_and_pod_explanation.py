"""Explains why a queue has its share and why a pod waits, from the numbers of a cycle.

Entitlements, usage, weights and the law's intermediate numbers come from the cycle's report. How far the feedback law
can raise a queue for one gang comes from `gang_turns.gang_reach`. This module compares these numbers with what the pod
or the queue needs, and writes the sentences.

A sentence says what the scheduler may do, never that it will, because the scheduler decides when a pod starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import fsum
from typing import Any

from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.core.gpu_models import parts_of, policy_of_part, units
from fairshare.core.queues_and_weights import UNLIMITED, Entitlement, Gang, Pod, PolicyTree, Standing, Weight
from fairshare.laws.gang_turns import gang_reach
from fairshare.targets.installed import modes
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

_ROUNDING = 1e-6
_NEAR = 0.005
"""A use that differs less from the fair share is on that share; a weight that differs less, the configured one."""
_NAMED = 4
"""Queues that a sentence names; others are counted."""


@dataclass(frozen=True, slots=True)
class QueueLevel:
    """One queue on the path from the root to the explained queue.

    left: the GPUs that the queue is due and does not hold; negative if it holds more than it is due.
    standing: what the target reports of the queue; None if the target has no object for it.
    weight: the computed weight; None if the target has no object for the queue."""

    queue: QueuePolicy
    entitlement: Entitlement
    standing: Standing | None
    weight: Weight | None

    @property
    def left(self) -> float:
        return self.entitlement.gpus - self.entitlement.allocated


def share_sentence(level: QueueLevel) -> str:
    """Describe how much of a queue's share is left."""
    due = level.entitlement
    head = f"due {due.gpus:g} GPUs now, holds {due.allocated:g}, asks for {due.requested:g}"
    if level.left > _ROUNDING:
        return f"{head}: {level.left:g} GPUs of its share are left"
    if level.left < -_ROUNDING:
        return f"{head}: {-level.left:g} GPUs more than it is due, and others may take them back"
    if due.requested <= due.allocated + _ROUNDING:
        return f"{head}: it has all that it asks for" if due.requested > 0 else f"{head}: it asks for nothing"
    return f"{head}: its share is used up"


def sibling_words(weight: Weight, siblings: Sequence[Weight]) -> Iterator[str]:
    """Yield why a weight is below the configured one though its queue used less than its fair share: competitors used
    still less for theirs. Nothing if these weights do not state it.

    siblings: those of its parent and priority, with the weight itself."""
    own, compared = weight.explanation, [one for one in siblings if one.explanation.competes]
    if not own.competes or own.turn or own.value != own.proportional:
        return
    if own.n - own.u <= _NEAR or own.proportional >= own.configured * (1 - _NEAR):
        return
    if abs(fsum(one.explanation.n for one in compared) - 1) > _ROUNDING:
        return  # compared with others than these
    grown = own.p / own.n
    if grown >= fsum(one.explanation.p for one in compared):
        return  # the bounds lower it
    further = sorted(
        (x.u / x.n, f"{one.queue} ({x.u:.1%} for {x.n:.1%})")
        for one in compared
        if (x := one.explanation).n > 0 and x.p > grown * x.n + _ROUNDING
    )
    named = [text for _, text in further[:_NAMED]] + (
        [f"{len(further) - _NAMED} more"] if len(further) > _NAMED else []
    )
    yield (
        f"its weight is below the configured {own.configured:g} though it used less than its fair share: the weights of"
        f" those that compete add up to their configured sum, and still less for their shares was used by"
        f" {', '.join(named)}"
    )


def waiting_reasons(
    policy: Policy, levels: Sequence[QueueLevel], gpus: float, free: float, need: float, gang_gpus: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples of sentences: whether a gang can get `need` more GPUs and why, and what would have to change.
    The most restrictive queue of the path decides.

    levels: the path from the root to the gang's queue.
    gpus, free: all GPUs of the target, and the free ones.
    gang_gpus: the GPUs that the gang needs in total, including those that it holds."""
    if gang_gpus > gpus:
        return (f"it needs {gang_gpus:g} GPUs; there are {gpus:g} in all: it can never start",), ()
    for level in levels:
        allocated = level.entitlement.allocated + need
        if level.queue.limit != UNLIMITED and allocated > level.queue.limit + _ROUNDING:
            text = f"{level.queue.name!r} may hold {level.queue.limit:g} GPUs (limit) and holds"
            text = f"{text} {level.entitlement.allocated:g}: {need:g} more are too many"
            if gang_gpus > level.queue.limit:
                return (text,), (f"a limit of {gang_gpus:g} for {level.queue.name!r}, or a smaller gang",)
            return (text,), (f"{allocated - level.queue.limit:g} GPUs of {level.queue.name!r} have to come free",)
    own = levels[-1]
    allocated = own.entitlement.allocated + need
    if allocated > gpus:
        text = f"{need:g} GPUs more would be {allocated:g} for {own.queue.name!r}; there are {gpus:g} in all"
        return (text,), (f"{allocated - gpus:g} GPUs of {own.queue.name!r} have to come free",)
    tightest = max(levels, key=lambda level: need - level.left)
    excess = need - tightest.left
    if excess <= _ROUNDING:
        inside = all(
            level.queue.deserved == UNLIMITED or level.entitlement.allocated + need <= level.queue.deserved
            for level in levels
        )
        kind = "guaranteed quota" if inside else "fair share"
        if free >= need:
            return (f"it is within its {kind} and {free:g} GPUs are free: the scheduler may start it",), ()
        text = f"it is within its {kind}: the scheduler may take {need - free:g} GPUs back from queues that have more"
        return (text,), ("victims have to pass their minimum run time and disruption budgets",)
    name, due = tightest.queue.name, tightest.entitlement
    text = f"with it {name!r} would hold {excess:g} GPUs more than the {due.gpus:g} it is due"
    if free >= need:
        return (f"{text}, yet {free:g} GPUs are free: the scheduler may lend them",), ()
    text = f"{text}, and only {free:g} GPUs are free: no workload is preempted for it"
    remedies = [f"{need - free:g} GPUs come free anywhere, or {excess:g} GPUs of {name!r} itself end"]
    exhausted = [
        level.queue.name
        for level in levels
        if level.weight is not None and level.weight.configured == 0 < level.queue.weight
    ]
    if exhausted:
        remedies.append(f"the budget of {exhausted[0]!r} is exhausted: nothing over its quota until the month ends")
    else:
        remedies += _history_remedies(policy, tightest)
        allocated = own.entitlement.allocated
        remedies.append(gang_reach(policy, gpus, own.queue.name, allocated + need).sentence(allocated))
    return (text,), tuple(remedies)


def _history_remedies(policy: Policy, level: QueueLevel) -> Iterator[str]:
    """Yield a sentence for each change that time brings to a queue's share: its usage ages, its turn comes, its
    weight changes."""
    cost = level.entitlement.without_history - level.entitlement.gpus
    if cost > _ROUNDING:
        yield (
            f"its history costs {level.queue.name!r} {cost:g} GPUs; they come back as that usage ages"
            f" ({_window_words(policy)})"
        )
    if level.weight is None:
        return
    numbers = level.weight.explanation
    if numbers.trace.get("owed_gpu_h", 0.0) >= 1:
        yield f"it is owed {numbers.trace['owed_gpu_h']:,.0f} GPU-hours, which count for its next turn"
    if numbers.value < numbers.proportional:
        yield f"its weight rises from {numbers.value:g} to {numbers.proportional:g} at the next change"


def _window_words(policy: Policy) -> str:
    window = policy.window
    if window.half_life is not None:
        return f"half of it no longer counts after {span(window.half_life * 1000)}"
    if window.kind == "sliding":
        return f"all of it after {span(window.size * 1000)}"
    return f"at the next turn of the {window.kind} window"


def budget_words(budgets: Sequence[BudgetState]) -> Iterator[str]:
    """Yield a sentence for each budget: what is spent and left, and until when it lasts."""
    for budget in budgets:
        if budget.spent is None:
            yield f"budget {budget.name!r}: spent is unknown: nothing is metered, or time has no price"
        elif budget.spent >= budget.limit:
            yield f"budget {budget.name!r} is exhausted: {budget.spent:,.2f} of {budget.limit:,.2f} {budget.unit}"
        else:
            yield (
                f"budget {budget.name!r}: {budget.spent:,.2f} of {budget.limit:,.2f} {budget.unit} in {budget.month},"
                f" {budget.limit - budget.spent:,.2f} left{_until(budget)}"
            )


def _until(budget: BudgetState) -> str:
    """Describe when the budget will be used up; "" if it is expected to last for the month."""
    if budget.exhausted_ms is None:
        return ""
    bounds = [
        "later" if at is None else f"{datetime.fromtimestamp(at // MS_PER_SECOND, UTC):%Y-%m-%d}"
        for at in (budget.exhausted_ms, budget.exhausted_earliest_ms, budget.exhausted_latest_ms)
    ]
    return f", used up on {bounds[0]} at this rate (80 %: {bounds[1]} to {bounds[2]}, UTC)"


def fragmentation_notes(pod: Pod, pods: Sequence[Pod], by_node: Mapping[str, float]) -> Iterator[str]:
    """Yield a note if no node has as many GPUs as the pod requests, or if only the free GPUs of several nodes together
    are enough. by_node: the GPUs of each node; empty if unknown."""
    if not by_node:
        return
    allocated: dict[str, float] = {}
    for other in pods:
        if other.held:
            allocated[other.node] = allocated.get(other.node, 0.0) + other.gpus
    free = {node: gpus - allocated.get(node, 0.0) for node, gpus in by_node.items()}
    largest = max(free.values())
    if pod.gpus > max(by_node.values()):
        yield f"no node has {pod.gpus:g} GPUs at all; the largest has {max(by_node.values()):g}"
    elif pod.gpus > largest and fsum(free.values()) >= pod.gpus:
        yield f"{fsum(free.values()):g} GPUs are free, but no more than {max(0.0, largest):g} on one node"


def span(ms: int) -> str:
    """Format a duration in its two largest units: `2 d 3 h`, `3 h 20 min`, `20 min`, `less than a minute`."""
    minutes = max(0, ms) // MS_PER_MINUTE
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{rest} min" if rest else "less than a minute"


MOST_PAST = 5
"""Largest number of past decisions that an explanation has."""


@dataclass(frozen=True, slots=True)
class PublishedWeight:
    """The weight of a queue at a target: the one in force now, the computed one (wanted), and what prevents its
    publication. None: the target has no object for the queue."""

    mode: str
    now: float | None
    wanted: float | None
    obstacles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A queue's figures for the GPUs of one model.

    gpus: the word for these GPUs.
    queue: with the quota, the weight and the limit for them."""

    gpus: str
    queue: QueuePolicy
    entitlement: Entitlement


@dataclass(frozen=True, slots=True)
class QueueAccount:
    """The explanation of a queue at one target.

    gpus, free: all GPUs of the target, and the free ones.
    lost: lost GPUs by node, which are not part of `gpus`.
    levels: the queues on the path, root first, the queue itself last.
    gangs: waiting gangs in it and below it, by priority, then oldest first.
    sentences: why the queue has its share and why its gangs wait.
    cures: what would have to change so that its smallest waiting gang starts.
    past: earlier decisions about it, newest first.
    models: its figures for the GPUs of each model, if the policy has quotas by model."""

    target: str
    gpus: float
    lost: Mapping[str, float]
    free: float
    levels: tuple[QueueLevel, ...]
    published: PublishedWeight
    gangs: tuple[Gang, ...]
    budgets: tuple[BudgetState, ...]
    sentences: tuple[str, ...]
    cures: tuple[str, ...]
    past: tuple[Decision, ...]
    models: tuple[ModelFigures, ...] = ()

    @property
    def own(self) -> QueueLevel:
        return self.levels[-1]


@dataclass(frozen=True, slots=True)
class PodAccount:
    """The explanation of a pod.

    pod: None if the pod does not exist any more and only decisions mention it.
    gang: the gang with which the pod starts; None if the cycle does not know one.
    queue: the explanation of the pod's queue; None if the policy has no such queue.
    sentences: why the pod runs or waits.
    cures: what would have to change so that the pod starts.
    past: earlier preemptions that mention the pod, newest first."""

    name: str
    pod: Pod | None
    gang: Gang | None
    queue: QueueAccount | None
    sentences: tuple[str, ...]
    cures: tuple[str, ...]
    past: tuple[Decision, ...]


def explain_queue(
    policy: Policy,
    report: CycleReport,
    name: str,
    *,
    budgets: Sequence[BudgetState] = (),
    past: Sequence[Decision] = (),
) -> tuple[QueueAccount, ...]:
    """Return one explanation per target for which the cycle computed entitlements.

    past: decisions, newest first.

    Raises KeyError for a queue that the policy does not have."""
    path = PolicyTree(policy).path(name)
    return tuple(
        _explain_at(target, policy, report, path, budgets, past) for target in report.targets if target.entitlements
    )


def find_pods(pods: Iterable[Pod], name: str) -> tuple[Pod, ...]:
    """Return the pods whose name, namespace/name or uid is `name`."""
    return tuple(pod for pod in pods if name in (pod.name, f"{pod.namespace}/{pod.name}", pod.uid))


def explain_pod(
    policy: Policy,
    report: CycleReport,
    pod: Pod,
    pods: Sequence[Pod],
    *,
    budgets: Sequence[BudgetState] = (),
    past: Sequence[Decision] = (),
) -> PodAccount:
    """Explain why a pod runs or waits.

    pods: all pods, to find free GPUs on each node.
    past: decisions, newest first."""
    name = f"{pod.namespace}/{pod.name}"
    preemptions = tuple(d for d in past if d.kind == "preemption" and mentions(d, _names(pod)))[:MOST_PAST]
    gangs = [(target, gang) for target in report.targets for gang in target.gangs if _belongs(pod, gang)]
    gang = gangs[0][1] if gangs else None
    if gang is None:
        owner = {ref: queue.name for queue in policy.queues for ref in queue.refs}.get(pod.ref)
        if owner is None:
            ref = f"says {pod.ref!r}" if pod.ref else "names no queue"
            text = f"it {ref}, and no queue of the policy has that ref: its scheduler alone decides"
            return PodAccount(name, pod, None, None, (text,), (), preemptions)
    else:
        owner = gang.queue
    accounts = explain_queue(policy, report, owner, budgets=budgets, past=past)
    account = next((a for a in accounts if not gangs or a.target == gangs[0][0].target), None)
    now_ms = report.at_ms
    if pod.held:
        since = f" for {span(now_ms - pod.started_ms)}" if pod.started_ms is not None else ""
        text = f"it has {pod.gpus:g} GPUs on {pod.node}{since}"
        return PodAccount(name, pod, gang, account, (text,), (), preemptions)
    if pod.leaving:
        text = f"it is being deleted on {pod.node}: it waits for nothing"
        return PodAccount(name, pod, gang, account, (text,), (), preemptions)
    sentences: list[str] = []
    if pod.created_ms is not None:
        sentences.append(f"it has waited {span(now_ms - pod.created_ms)} for {pod.gpus:g} GPUs")
    if pod.gated:
        sentences.append("a scheduling gate holds it: its queueing system has not admitted it yet")
    need = gang.waits if gang is not None else pod.gpus
    if gang is not None and gang.minimum > pod.gpus:
        sentences.append(
            f"it starts with its gang: {gang.minimum:g} GPUs at once, {gang.allocated:g} of them held, {need:g} missing"
        )
    if gang is not None and gang.held_back:
        sentences.append(gang.held_back)
    if account is None:
        return PodAccount(name, pod, gang, None, (*sentences, *_hold(report)), (), preemptions)
    ahead = [other for other in account.gangs if other.waits > 0 and gang is not None and _is_ahead(other, gang)]
    if ahead:
        gpus = fsum(other.waits for other in ahead)
        sentences.append(f"{len(ahead)} gangs of its queue with {gpus:g} GPUs are ahead of it (priority, then age)")
    gang_gpus = gang.minimum if gang is not None else pod.gpus
    levels = account.levels
    target = next(each for each in report.targets if each.target == account.target)
    models = target.waiting_models.get(gang.key, ()) if gang is not None else parts_of(policy)
    why, cures = _waiting(policy, report, target, models, levels, account.free, need, gang_gpus)
    sentences += [*why, *fragmentation_notes(pod, pods, report.gpus_by_node)]
    return PodAccount(name, pod, gang, account, tuple(sentences), cures, preemptions)


def mentions(decision: Decision, names: frozenset[str]) -> bool:
    """Return True if one of these names is the decision's subject, or a text in the decision's inputs."""
    return decision.subject in names or any(text in names for text in _strings(decision.inputs))


def _explain_at(
    target: TargetReport,
    policy: Policy,
    report: CycleReport,
    path: Sequence[QueuePolicy],
    budgets: Sequence[BudgetState],
    past: Sequence[Decision],
) -> QueueAccount:
    due = {entitlement.queue: entitlement for entitlement in target.entitlements}
    weights = {weight.queue: weight for weight in target.weights}
    levels = tuple(QueueLevel(q, due[q.name], target.standings.get(q.name), weights.get(q.name)) for q in path)
    name = path[-1].name
    family = PolicyTree(policy).family(name)
    waiting = sorted(
        (g for g in target.gangs if g.queue in family and g.waits > 0),
        key=lambda g: (-g.priority, g.created_ms or report.at_ms, g.uid, g.namespace, g.name),
    )
    free = max(0.0, target.gpus - fsum(e.allocated for e in target.entitlements if e.parent is None))
    if report.free_by_node:  # pods outside the target's queues hold GPUs too
        free = min(free, fsum(max(0.0, amount) for amount in report.free_by_node.values()))
    limiting = tuple(b for b in budgets if b.queue in {q.name for q in path} or (b.team and b.team == path[-1].team))
    sentences = [share_sentence(levels[-1])]
    if name in weights and not target.models:
        siblings = {
            one.name for one in policy.queues if (one.parent, one.priority) == (path[-1].parent, path[-1].priority)
        }
        sentences += sibling_words(weights[name], [one for one in target.weights if one.queue in siblings])
    sentences += budget_words(limiting)
    cures: tuple[str, ...] = ()
    if waiting:
        smallest = min(waiting, key=lambda gang: gang.waits)
        models = target.waiting_models.get(smallest.key, ())
        why, cures = _waiting(policy, report, target, models, levels, free, smallest.waits, smallest.minimum)
        sentences += [f"its smallest waiting gang: {text}" for text in why]
    decisions = tuple(d for d in past if d.target == target.target and d.subject == name)[:MOST_PAST]
    return QueueAccount(
        target.target, target.gpus, target.lost, free, levels, _published(target, report, name, modes(policy)),
        tuple(waiting), limiting, tuple(sentences), cures, decisions,
        tuple(
            ModelFigures(units(part.model), own[-1].queue, own[-1].entitlement)
            for part in target.models
            for own in (_levels_of_part(policy, target, part.model, path),)
        ),
    )  # fmt: skip


def _levels_of_part(
    policy: Policy, target: TargetReport, model: str, path: Sequence[QueuePolicy]
) -> tuple[QueueLevel, ...]:
    """Return the queues of the path with their figures for the GPUs of one model."""
    queues = {queue.name: queue for queue in policy_of_part(policy, model).queues}
    standings = next(part.standings for part in target.models if part.model == model)
    due = {each.queue: each for each in target.by_model[model]}
    return tuple(QueueLevel(queues[q.name], due[q.name], standings.get(q.name), None) for q in path)


def _waiting(
    policy: Policy,
    report: CycleReport,
    target: TargetReport,
    models: Sequence[str],
    levels: Sequence[QueueLevel],
    free: float,
    need: float,
    gang_gpus: float,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what `waiting_reasons` returns: with quotas by GPU model, for each model on which the gang can start."""
    if not target.models:
        return waiting_reasons(policy, levels, target.gpus, free, need, gang_gpus)
    if not models:
        return ("no node that accepts work has the labels that it requests",), ()
    why: list[str] = []
    cures: list[str] = []
    path = [level.queue for level in levels]
    for part in target.models:
        if part.model in models:
            nodes = [node for node, model in report.model_by_node.items() if model == part.model]
            free_of_part = fsum(max(0.0, report.free_by_node.get(node, 0.0)) for node in nodes)
            own = _levels_of_part(policy, target, part.model, path)
            found = waiting_reasons(policy_of_part(policy, part.model), own, part.gpus, free_of_part, need, gang_gpus)
            why += [f"on {units(part.model)}: {text}" for text in found[0]]
            cures += [f"on {units(part.model)}: {text}" for text in found[1]]
    return tuple(why), tuple(cures)


def _published(target: TargetReport, report: CycleReport, queue: str, modes: Mapping[str, str]) -> PublishedWeight:
    standing = target.standings.get(queue)
    weight = next((w for w in target.weights if w.queue == queue), None)
    obstacles = [*_hold(report)]
    obstacles += [
        f"{condition.type}={condition.status} {condition.reason}: {condition.message}"
        for condition in target.conditions
        if condition.status == "False"
    ]
    obstacles += [f"{o.result}: {o.detail}" for o in target.outcomes if o.apply.queue == queue and o.detail]
    if standing is None:
        obstacles.append("the target has no object for this queue")
    mode = modes.get(target.target, target.mode)
    if mode == "dry-run":
        obstacles.append("dry-run: weights are computed and not written")
    return PublishedWeight(
        mode, standing.weight if standing else None, weight.value if weight else None, tuple(dict.fromkeys(obstacles))
    )


def _hold(report: CycleReport) -> tuple[str, ...]:
    if report.hold is None:
        return ()
    return (f"weights are held, {report.hold.reason}: {report.hold.message}",)


def _belongs(pod: Pod, gang: Gang) -> bool:
    return any(member.uid == pod.uid for member in gang.pods) or pod.gang == gang.key


def _is_ahead(other: Gang, gang: Gang) -> bool:
    if other.uid == gang.uid and other.name == gang.name:
        return False
    return (-other.priority, other.created_ms or 0, other.uid) < (-gang.priority, gang.created_ms or 0, gang.uid)


def _names(pod: Pod) -> frozenset[str]:
    gang = {pod.gang, pod.gang.partition("/")[2]} if pod.gang else set()
    return frozenset({pod.uid, f"{pod.namespace}/{pod.name}", *gang} - {""})


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
