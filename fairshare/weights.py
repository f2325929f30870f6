"""History into weights: policy, usage window and demand -> entitlements, and one bounded weight per queue.

The law is KAI's, published as weights instead of usage: with k = 0 in the scheduler, weights
proportional to P = max(0, n + k (n - U)) give the same first round as its own history would, for any
positive scale. Two repairs, on purpose:

- U of a child is relative to its parent's part of the cluster, not to the whole cluster, so that
  history corrects inside a small department as much as among the roots;
- U is never relative to less than what the siblings used together. Σ U <= 1 then holds, and so Σ P >= 1:
  the case in which KAI gives the pool to nobody cannot arise while any weight is positive. Where all
  are zero, the configured weights stand.

What the law asks for is then kept within the policy's bounds: multipliers of the configured weight,
largest step, hold-down, deadband. Every number of the way is in the Explanation.

Same inputs, same weights, whatever the order. Pure: `now_ms` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf

from accountant.wire import Bounds, Policy, QueuePolicy, UsageWindow
from fairshare.division import divide, first_round
from fairshare.model import UNLIMITED, Case, Claim, Entitlement, Explanation, Standing, Weight
from fairshare.pacing import Move, pace, tidy

_THOUSANDTHS = 1000.0
"""Static shares are divided in thousandths of a GPU, so that rounding to whole units does not show."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Outcome of one cycle: entitlements of every queue of the policy, weights of those the target has.
    Both sorted by queue."""

    entitlements: tuple[Entitlement, ...]
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A queue's usage (descendants included), what it is measured against, and the quotient U."""

    usage: int
    capacity: float
    u: float


def weigh(policy: Policy, window: UsageWindow, standings: Mapping[str, Standing], gpus: float, now_ms: int) -> Weighing:
    """standings: by policy queue, of those the target knows. gpus: what there is to divide, > 0.

    window.usage of a queue contains its descendants'."""
    queues = {queue.name: queue for queue in sorted(policy.queues, key=lambda queue: queue.name)}
    ratios = usage_ratios(policy, window, gpus)
    requests = _requests(queues, standings)
    with_history = divide(Case("entitled", gpus, policy.k, _claims(queues, requests, ratios)))
    without = divide(Case("static", gpus, 0.0, _claims(queues, requests, ratios)))
    entitlements = tuple(
        Entitlement(
            name,
            queue.parent,
            with_history.shares[name],
            without.shares[name],
            ratios[name].u,
            requests[name],
            standings[name].allocated if name in standings else 0.0,
        )
        for name, queue in queues.items()
    )
    siblings: dict[tuple[str | None, int], list[QueuePolicy]] = {}
    for name, queue in queues.items():
        if name in standings:
            siblings.setdefault((queue.parent, queue.priority), []).append(queue)
    weights = [
        weight
        for group in siblings.values()
        for weight in _weigh_siblings(group, policy, ratios, requests, standings, now_ms)
    ]
    return Weighing(entitlements, tuple(sorted(weights, key=lambda weight: weight.queue)))


def usage_ratios(policy: Policy, window: UsageWindow, gpus: float) -> dict[str, Ratio]:
    """U of every queue: its usage over max(its parent's part of the capacity, what the siblings used)."""
    queues = {queue.name: queue for queue in policy.queues}
    usage = {name: window.usage.get(name, 0) for name in queues}
    together: dict[str | None, int] = {}
    for name, queue in queues.items():
        together[queue.parent] = together.get(queue.parent, 0) + usage[name]
    part = static_parts(policy, gpus)
    ratios = {}
    for name, queue in queues.items():
        own = window.capacity * (part[queue.parent] if queue.parent is not None else 1.0)
        capacity = max(own, float(together[queue.parent]))
        ratios[name] = Ratio(usage[name], capacity, usage[name] / capacity if capacity > 0 else 0.0)
    return ratios


def static_parts(policy: Policy, gpus: float) -> dict[str, float]:
    """The part of the cluster (0..1) each queue has by quota and weight if every queue asked for everything."""
    claims = tuple(
        Claim(
            queue.name,
            inf,
            _scaled(queue.deserved),
            _scaled(queue.limit),
            queue.weight,
            0.0,
            queue.priority,
            parent=queue.parent,
        )
        for queue in policy.queues
    )
    shares = divide(Case("parts", gpus * _THOUSANDTHS, 0.0, claims)).shares
    return {name: min(1.0, share / (gpus * _THOUSANDTHS)) for name, share in shares.items()}


def _scaled(quantity: float) -> float:
    return UNLIMITED if quantity == UNLIMITED else quantity * _THOUSANDTHS


def _requests(queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]) -> dict[str, float]:
    """What each queue asks for; a queue the target does not know asks for what its children ask."""
    children: dict[str, list[str]] = {}
    for name, queue in queues.items():
        if queue.parent is not None:
            children.setdefault(queue.parent, []).append(name)

    def request(name: str) -> float:
        if name in standings:
            return standings[name].requested
        return fsum(request(child) for child in children.get(name, ()))

    return {name: request(name) for name in queues}


def _claims(
    queues: Mapping[str, QueuePolicy], requests: Mapping[str, float], ratios: Mapping[str, Ratio]
) -> tuple[Claim, ...]:
    return tuple(
        Claim(
            name,
            requests[name],
            queue.deserved,
            queue.limit,
            queue.weight,
            ratios[name].u,
            queue.priority,
            parent=queue.parent,
        )
        for name, queue in queues.items()
    )


def _competes(queue: QueuePolicy, requested: float) -> bool:
    """Whether it wants more than its quota, and may have it."""
    cap = requested if queue.limit == UNLIMITED else min(queue.limit, requested)
    return queue.weight > 0 and queue.deserved != UNLIMITED and cap > queue.deserved


def _weigh_siblings(
    group: Sequence[QueuePolicy],
    policy: Policy,
    ratios: Mapping[str, Ratio],
    requests: Mapping[str, float],
    standings: Mapping[str, Standing],
    now_ms: int,
) -> list[Weight]:
    """Weights of the siblings of one priority. Who does not compete gets the weight he would have if all did:
    the scheduler may need it before the next cycle."""
    competitors = [queue for queue in group if _competes(queue, requests[queue.name])]
    weights = []
    for members, wanted in ((competitors, True), (group, False)):
        total = fsum(queue.weight for queue in members)
        claims = [Claim(queue.name, inf, weight=queue.weight, usage=ratios[queue.name].u) for queue in members]
        p = first_round(claims, policy.k)
        proportional = _rescale(members, p, policy.bounds)
        for queue in members:
            if _competes(queue, requests[queue.name]) is wanted:
                n = queue.weight / total if total > 0 else 0.0
                weights.append(
                    _explain(
                        queue,
                        policy,
                        ratios[queue.name],
                        n,
                        p[queue.name],
                        wanted,
                        proportional[queue.name],
                        standings[queue.name],
                        now_ms,
                    )
                )
    return weights


def _rescale(members: Sequence[QueuePolicy], p: Mapping[str, float], bounds: Bounds) -> dict[str, float]:
    """clamp(c p, lower, upper) with the one c that makes the sum the configured total.

    Monotone: who used more never gets more. All p zero: the configured weights."""
    configured = {queue.name: queue.weight for queue in members}
    if fsum(p.values()) == 0:
        return configured
    rows = [(p[name], w * bounds.min_multiplier, w * bounds.max_multiplier) for name, w in configured.items()]
    total = fsum(configured.values())

    def summed(c: float) -> float:
        return fsum(min(max(c * part, low), high) for part, low, high in rows)

    # The sum grows with c, in straight pieces between the points where a queue meets a bound.
    corners = sorted({bound / part for part, *both in rows if part > 0 for bound in both} | {0.0})
    first, last = 0, len(corners) - 1
    while first < last:
        middle = (first + last) // 2
        if summed(corners[middle]) >= total:
            last = middle
        else:
            first = middle + 1
    c = corners[first]
    if first > 0 and summed(c) > total:
        start = corners[first - 1]
        rise, run = summed(c) - summed(start), c - start
        c = start + (total - summed(start)) * run / rise
    scaled = {name: min(max(c * part, low), high) for name, (part, low, high) in zip(configured, rows, strict=True)}
    return {name: _settled(value, configured[name]) for name, value in scaled.items()}


def _settled(value: float, configured: float) -> float:
    """Tidy, and exactly the configured weight where only rounding sets them apart."""
    return configured if abs(value - configured) <= 1e-9 * configured else tidy(value)


def _explain(
    queue: QueuePolicy,
    policy: Policy,
    ratio: Ratio,
    n: float,
    p: float,
    competes: bool,
    proportional: float,
    standing: Standing,
    now_ms: int,
) -> Weight:
    """The weight with its pace and every reason."""
    bounds = policy.bounds
    lower, upper = queue.weight * bounds.min_multiplier, queue.weight * bounds.max_multiplier
    notes: list[str] = []
    move = Move(0.0, 0.0, ("weight 0 in the policy stays 0",))
    if queue.weight > 0:
        move = pace(proportional, standing, bounds, now_ms)
        if n == 1:
            notes.append("alone among its siblings of this priority: history has nobody to compare it with")
        elif not competes:
            notes.append("asks for no more than its quota: weight as if every sibling competed")
        if proportional < queue.weight and proportional <= lower * (1 + 1e-6):
            notes.append(f"at the lower bound, {bounds.min_multiplier:g} x configured")
        if proportional > queue.weight and proportional >= upper * (1 - 1e-6):
            notes.append(f"at the upper bound, {bounds.max_multiplier:g} x configured")
    notes.extend(move.notes)
    explanation = Explanation(
        usage=ratio.usage,
        capacity=ratio.capacity,
        u=ratio.u,
        n=n,
        k=policy.k,
        p=p,
        competes=competes,
        configured=queue.weight,
        proportional=proportional,
        lower=lower,
        upper=upper,
        previous=standing.weight,
        stepped=move.stepped,
        value=move.value,
        notes=tuple(notes),
    )
    return Weight(queue.name, move.value, standing.weight, queue.weight, _why(ratio.u, n, notes), explanation)


def _why(u: float, n: float, notes: Sequence[str]) -> str:
    """One sentence for people."""
    if n == 1 or n == 0:
        return "; ".join(notes)
    verdict = "on its share" if abs(u - n) <= 0.005 else "above its share" if u > n else "below its share"
    return "; ".join([f"used {u:.1%} for a share of {n:.1%}, {verdict}", *notes])
