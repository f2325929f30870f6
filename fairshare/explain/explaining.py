"""Why a queue has what it has, and why a pod waits: a cycle's numbers put in order. Pure.

Nothing is computed anew here but differences: entitlement, usage, weights and traces are those of the cycle
(`fairshare.report`), the reach of the law is the advisor's, the words are those of `fairshare.explain.sentences`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from accountant.wire import BudgetState, Decision, Policy, QueuePolicy
from fairshare.explain.sentences import Level, budget_words, holes, span, standing, verdict
from fairshare.model import Gang, Pod
from fairshare.report import CycleReport, TargetReport

MOST_PAST = 5
"""Past decisions that are told."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of the weight: in force at the target now, wanted, the mode, and all that stands in the way."""

    mode: str
    now: float | None
    wanted: float | None
    obstacles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueAccount:
    """A queue at one target. levels: root first, the queue itself last. gangs: what waits in it and below it,
    oldest first. lost: GPUs by node that are not among `gpus`. past: earlier decisions about it, newest first."""

    target: str
    gpus: float
    lost: Mapping[str, float]
    free: float
    levels: tuple[Level, ...]
    published: Published
    gangs: tuple[Gang, ...]
    budgets: tuple[BudgetState, ...]
    sentences: tuple[str, ...]
    cures: tuple[str, ...]
    past: tuple[Decision, ...]

    @property
    def own(self) -> Level:
        return self.levels[-1]


@dataclass(frozen=True, slots=True)
class PodAccount:
    """A pod. pod None: it is gone, and only decisions speak of it. queue: the account of its queue, where the
    policy has one."""

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
    modes: Mapping[str, str],
    budgets: Sequence[BudgetState] = (),
    past: Sequence[Decision] = (),
) -> tuple[QueueAccount, ...]:
    """One account per target that was weighed. modes: of every target as the policy has it. Raises KeyError for
    a queue that the policy does not have."""
    path = _path(policy, name)
    return tuple(
        _at(target, policy, report, path, modes, budgets, past) for target in report.targets if target.entitlements
    )


def find_pods(pods: Iterable[Pod], name: str) -> tuple[Pod, ...]:
    """Pods called `name` or `namespace/name`."""
    return tuple(pod for pod in pods if name in (pod.name, f"{pod.namespace}/{pod.name}", pod.uid))


def explain_pod(
    policy: Policy,
    report: CycleReport,
    pod: Pod,
    pods: Sequence[Pod],
    *,
    modes: Mapping[str, str],
    budgets: Sequence[BudgetState] = (),
    past: Sequence[Decision] = (),
) -> PodAccount:
    """pods: everybody's, to know what is free on each node. past: decisions, newest first."""
    name = f"{pod.namespace}/{pod.name}"
    told = tuple(d for d in past if d.kind == "preemption" and speaks_of(d, _names(pod)))[:MOST_PAST]
    found = [(target, gang) for target in report.targets for gang in target.gangs if _belongs(pod, gang)]
    gang = found[0][1] if found else None
    if gang is None:
        owner = {ref: queue.name for queue in policy.queues for ref in queue.refs}.get(pod.ref)
        if owner is None:
            ref = f"says {pod.ref!r}" if pod.ref else "names no queue"
            text = f"it {ref}, and no queue of the policy has that ref: its scheduler alone decides"
            return PodAccount(name, pod, None, None, (text,), (), told)
    else:
        owner = gang.queue
    accounts = explain_queue(policy, report, owner, modes=modes, budgets=budgets, past=past)
    account = next((a for a in accounts if not found or a.target == found[0][0].target), None)
    now_ms = report.at_ms
    if pod.held:
        since = f" for {span(now_ms - pod.started_ms)}" if pod.started_ms is not None else ""
        return PodAccount(name, pod, gang, account, (f"it has {pod.gpus:g} GPUs on {pod.node}{since}",), (), told)
    if pod.leaving:
        return PodAccount(
            name, pod, gang, account, (f"it is on its way out of {pod.node}: it waits for nothing",), (), told
        )
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
    if account is None:
        return PodAccount(name, pod, gang, None, (*sentences, *_hold(report)), (), told)
    before = [g for g in account.gangs if g.waits > 0 and gang is not None and _ahead(g, gang)]
    if before:
        ahead = fsum(g.waits for g in before)
        sentences.append(f"{len(before)} gangs of its queue with {ahead:g} GPUs are ahead of it (priority, then age)")
    whole = gang.minimum if gang is not None else pod.gpus
    why, cures = verdict(policy, account.levels, account.gpus, account.free, need, whole)
    sentences += [*why, *holes(pod, pods, report.gpus_by_node)]
    return PodAccount(name, pod, gang, account, tuple(sentences), cures, told)


def speaks_of(decision: Decision, names: frozenset[str]) -> bool:
    """Whether a decision is about, or mentions in its inputs, one of these names."""
    return decision.subject in names or any(text in names for text in _strings(decision.inputs))


def _at(
    target: TargetReport,
    policy: Policy,
    report: CycleReport,
    path: Sequence[QueuePolicy],
    modes: Mapping[str, str],
    budgets: Sequence[BudgetState],
    past: Sequence[Decision],
) -> QueueAccount:
    due = {entitlement.queue: entitlement for entitlement in target.entitlements}
    weights = {weight.queue: weight for weight in target.weights}
    levels = tuple(Level(q, due[q.name], target.standings.get(q.name), weights.get(q.name)) for q in path)
    name = path[-1].name
    family = below(policy, name)
    waiting = sorted(
        (g for g in target.gangs if g.queue in family and g.waits > 0),
        key=lambda g: (-g.priority, g.created_ms or report.at_ms, g.namespace, g.name),
    )
    free = max(0.0, target.gpus - fsum(e.allocated for e in target.entitlements if e.parent is None))
    if report.free_by_node:  # others than the target's queues hold GPUs too
        free = min(free, fsum(max(0.0, amount) for amount in report.free_by_node.values()))
    account = QueueAccount(
        target.target,
        target.gpus,
        target.lost,
        free,
        levels,
        _published(target, report, name, modes),
        tuple(waiting),
        tuple(b for b in budgets if b.queue in {q.name for q in path} or (b.team and b.team == path[-1].team)),
        (),
        (),
        tuple(d for d in past if d.target == target.target and d.subject == name)[:MOST_PAST],
    )
    sentences = [standing(account.own), *budget_words(account.budgets)]
    cures: tuple[str, ...] = ()
    if waiting:
        least = min(waiting, key=lambda gang: gang.waits)
        why, cures = verdict(policy, levels, target.gpus, free, least.waits, least.minimum)
        sentences += [f"its smallest waiting gang: {text}" for text in why]
    return QueueAccount(
        account.target, account.gpus, account.lost, free, levels, account.published, account.gangs, account.budgets,
        tuple(sentences), cures, account.past,
    )  # fmt: skip


def _published(target: TargetReport, report: CycleReport, queue: str, modes: Mapping[str, str]) -> Published:
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
    return Published(
        mode, standing.weight if standing else None, weight.value if weight else None, tuple(dict.fromkeys(obstacles))
    )


def _hold(report: CycleReport) -> tuple[str, ...]:
    if report.hold is None:
        return ()
    return (f"weights are held, {report.hold.reason}: {report.hold.message}",)


def _path(policy: Policy, name: str) -> tuple[QueuePolicy, ...]:
    queues = {queue.name: queue for queue in policy.queues}
    path = [queues[name]]
    while (parent := path[-1].parent) is not None:
        path.append(queues[parent])
    return tuple(reversed(path))


def below(policy: Policy, name: str) -> frozenset[str]:
    """The queue and all under it."""
    found, grown = {name}, True
    while grown:
        more = {queue.name for queue in policy.queues if queue.parent in found} - found
        found |= more
        grown = bool(more)
    return frozenset(found)


def _belongs(pod: Pod, gang: Gang) -> bool:
    return (
        any(each.uid == pod.uid for each in gang.pods) or pod.gang == f"{gang.kind.kind}/{gang.namespace}/{gang.name}"
    )


def _ahead(other: Gang, gang: Gang) -> bool:
    if other.uid == gang.uid and other.name == gang.name:
        return False
    mine, theirs = gang.created_ms or 0, other.created_ms or 0
    return other.priority > gang.priority or (other.priority == gang.priority and theirs < mine)


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
