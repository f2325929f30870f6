"""Guarantees that can never be kept: quotas beyond the cluster, gangs beyond a limit or beyond any share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum

from accountant.wire import Policy, QueuePolicy
from fairshare.model import UNLIMITED, Gang
from fairshare.policy import advice
from fairshare.weighing.advisor import reach
from gputally.doctor.model import Finding, Seen, listed, most
from gputally.doctor.schedulers import QueueObject

_CHECK = "gputally fairshare check POLICY.yaml --capacity {capacity:g}"


def guarantees(
    policy: Policy | None, capacity: float, installed: float, objects: Sequence[QueueObject], gangs: Sequence[Gang]
) -> Seen:
    """capacity: GPUs on nodes that are up; installed: on all. gangs: of the policy's queues, as they ask now."""
    findings = [*_quotas(policy, capacity, installed), *_native(objects, installed)]
    if policy is not None:
        findings += most(_gangs(policy, capacity, gangs), "workloads that can never start")
    deserved = sum(max(0.0, queue.deserved) for queue in _roots(policy))
    return Seen(f"{deserved:g} GPUs deserved of {capacity:g} up and {installed:g} installed", tuple(findings))


def _roots(policy: Policy | None) -> list[QueuePolicy]:
    return [queue for queue in policy.queues if queue.parent is None] if policy is not None else []


def _quotas(policy: Policy | None, capacity: float, installed: float) -> Iterator[Finding]:
    if policy is None:
        return
    promised = fsum(max(0.0, queue.deserved) for queue in _roots(policy))
    if promised > installed:
        text = "deserved quotas add up to more GPUs than the cluster has: they can never all be kept"
    elif promised > capacity:
        text = "deserved quotas add up to more GPUs than are up now"
    else:
        text = ""
    if text:
        parts = (f"{queue.name} {queue.deserved:g}" for queue in _roots(policy) if queue.deserved > 0)
        yield Finding(
            "error" if promised > installed else "warning",
            text,
            f"{promised:g} deserved, {installed:g} installed, {capacity:g} up: {listed(parts, 6)}",
            _CHECK.format(capacity=installed),
        )
    for each in advice(policy):
        if each.path[:1] == ("queues",) and each.path[-1] == "deserved":
            queue = policy.queues[int(each.path[1])]
            evidence = f"deserved {queue.deserved:g}, limit {_limit(queue.limit)}"
            yield Finding("warning", each.message, evidence, _CHECK.format(capacity=installed))


def _native(objects: Sequence[QueueObject], installed: float) -> Iterator[Finding]:
    """Quotas as the schedulers' own objects state them."""
    by_scheduler: dict[str, list[QueueObject]] = {}
    for each in objects:
        if each.quota and not each.nested:
            by_scheduler.setdefault(each.scheduler, []).append(each)
    for scheduler, queues in sorted(by_scheduler.items()):
        promised = fsum(queue.quota or 0.0 for queue in queues)
        if promised > installed:
            parts = (f"{queue.name} {queue.quota:g}" for queue in sorted(queues, key=lambda q: -(q.quota or 0)))
            yield Finding(
                "error",
                f"{scheduler}'s own queues are guaranteed more GPUs than the cluster has",
                f"{promised:g} guaranteed, {installed:g} installed: {listed(parts, 6)}",
                "lower the quotas of those queues until they fit",
            )


def _gangs(policy: Policy, capacity: float, gangs: Sequence[Gang]) -> Iterator[Finding]:
    queues = {queue.name: queue for queue in policy.queues}
    shares: dict[tuple[str, float], str] = {}
    for gang in sorted((each for each in gangs if each.waits > 0), key=lambda each: -each.minimum):
        name = f"{gang.namespace}/{gang.name}"
        barred = next(((at, at.limit) for at in _path(queues, gang.queue) if UNLIMITED < at.limit < gang.minimum), None)
        if barred is not None:
            at, limit = barred
            yield Finding(
                "error",
                f"{name} needs {gang.minimum:g} GPUs at once, above the limit of queue {at.name}: it never starts",
                f"limit {limit:g}; it asks {gang.requested:g}, has {gang.allocated:g}",
                f"raise the limit of {at.name} in the policy, or make the gang smaller",
            )
        elif gang.minimum > capacity:
            yield Finding(
                "error",
                f"{name} needs {gang.minimum:g} GPUs at once, more than the cluster has up",
                f"{capacity:g} GPUs up",
                "make the gang smaller, or add nodes",
            )
        elif capacity > 0:
            key = gang.queue, gang.minimum
            if key not in shares:
                reached = reach(policy, capacity, *key)
                shares[key] = "" if reached.admitted else reached.sentence()
            if shares[key]:
                yield Finding(
                    "warning",
                    f"{name} waits for more than its queue {gang.queue} is ever due while others ask",
                    shares[key],
                    f"{_CHECK.format(capacity=capacity)} --gang {gang.queue}={gang.minimum:.0f}",
                )


def _path(queues: Mapping[str, QueuePolicy], name: str) -> Iterator[QueuePolicy]:
    """The queue and those above it."""
    at: str | None = name
    while at is not None and at in queues:
        yield queues[at]
        at = queues[at].parent


def _limit(limit: float) -> str:
    return "none" if limit == UNLIMITED else f"{limit:g}"
