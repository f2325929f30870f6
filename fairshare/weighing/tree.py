"""The policy's queue tree in figures: usage relative to the parent, static parts, requests. Pure.

Two repairs of KAI's own arithmetic live here, on purpose:

- U of a child is relative to its parent's part of the cluster, not to the whole cluster, so that
  history corrects inside a small department as much as among the roots;
- U is never relative to less than what the siblings used together. Σ U <= 1 then holds, and so Σ P >= 1:
  the case in which KAI gives the pool to nobody cannot arise while any weight is positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp2, fsum, inf, log

from accountant.wire import Policy, QueuePolicy, UsageWindow
from fairshare.division import divide
from fairshare.model import UNLIMITED, Case, Claim, Standing

_THOUSANDTHS = 1000.0
"""Static shares are divided in thousandths of a GPU, so that rounding to whole units does not show."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A queue's usage (descendants included), what it is measured against, and the quotient U."""

    usage: int
    capacity: float
    u: float


def effective_s(length_s: float, half_life_s: float | None) -> float:
    """How many seconds of full use a window of this length holds: as many, or ∫ 2^(-age / half-life) over it."""
    if half_life_s is None:
        return float(length_s)
    return half_life_s / log(2) * (1 - exp2(-length_s / half_life_s))


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


def requests(queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]) -> dict[str, float]:
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
