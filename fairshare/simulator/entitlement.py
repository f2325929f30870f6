"""Computes the GPU time that each queue of a simulation could have used, and the part of it that the queue was due.

The feasible demand is the GPU time that its jobs could use with unlimited GPUs. Each job is limited to its own gang and
to the time left. The entitlement is the queue's part, by configured weight, of the GPU time that was delivered, up to
the feasible demand. It therefore depends neither on a policy's efficiency nor on work that no policy could run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from fairshare.laws.division import fill
from fairshare.simulator.simulation_model import JobOutcome


def feasible_demand(
    outcomes: Iterable[JobOutcome], start_ms: int, end_ms: int, parts: Mapping[str, Fraction] | None = None
) -> dict[str, int]:
    """Return the GPU-ms per queue that its jobs could use in [start_ms, end_ms) with unlimited GPUs.

    The run must begin at `start_ms`. Rejected jobs cannot run and do not count.
    parts: the fraction of a GPU that one slot of each shape has; a slot of another shape is a whole GPU."""
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
    """Return each queue's part of `total` by weight, but no more than its demand. The time that a queue cannot use goes
    to the other queues.

    A queue of weight 0 gets only the time that all others leave."""
    names = sorted(weights)
    caps = [float(demand.get(name, 0)) for name in names]
    return dict(zip(names, fill(float(total), caps, [weights[name] for name in names]), strict=True))
