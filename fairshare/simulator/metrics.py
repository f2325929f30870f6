"""What a division of the cluster is measured against: feasible demand and entitlement.

Definitions: feasible demand of a queue in a window is what its jobs could use there with unlimited
GPUs, each limited to its own gang and to the time left; its entitlement is its part of what was
actually delivered, by weight, capped at that demand. So the target depends neither on how efficient a
policy is nor on work that no policy could run. Pure; GPU-milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from fairshare.simulator.jobs import Outcome


def feasible_demand(
    outcomes: Iterable[Outcome], start_ms: int, end_ms: int, parts: Mapping[str, Fraction] | None = None
) -> dict[str, int]:
    """GPU-ms per queue that its jobs could use in [start_ms, end_ms) with unlimited GPUs, when the run
    began at `start_ms`. Rejected jobs are left out: nothing could run them.

    parts: how much of a GPU a slot of a shape is; a shape that is not listed is a whole one."""
    sizes = parts or {}
    demand: dict[str, Fraction] = {}
    for outcome in outcomes:
        job = outcome.job
        if outcome.rejected or job.submit_ms >= end_ms:
            continue
        able = min(job.duration_ms, end_ms - max(start_ms, job.submit_ms))
        demand[job.queue] = demand.get(job.queue, Fraction(0)) + job.gpus * able * sizes.get(job.shape, 1)
    return {queue: int(amount) for queue, amount in demand.items()}


def entitlement(total: int, demand: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Water-filling: `total` by weight, nobody above his demand, what one leaves goes to the others.

    Exact inside (fractions), so the result does not depend on the order of the queues. A queue without
    weight gets what the others leave, which is nothing while one of them still wants."""
    shares = {name: Fraction(0) for name in sorted(weights)}
    left = Fraction(total)
    open_ = {name: Fraction(weights[name]) for name in shares if weights[name] > 0 and demand.get(name, 0) > 0}
    while open_ and left > 0:
        whole = sum(open_.values())
        full = [name for name, weight in open_.items() if demand[name] - shares[name] <= left * weight / whole]
        if not full:
            for name, weight in open_.items():
                shares[name] += left * weight / whole
            break
        for name in full:
            left -= demand[name] - shares[name]
            shares[name] = Fraction(demand[name])
            del open_[name]
    return {name: float(share) for name, share in shares.items()}
