"""The division at 1,000 and 10,000 queues: medians of CPU time.

The baseline is KAI's own Go code, measured at commit d5bc503a on 2 cores: 1.6 and 18 ms."""

from __future__ import annotations

import random
from functools import partial

from fairshare.core.queues_and_weights import DivisionProblem, QueueClaim
from fairshare.laws.division import divide
from tests.bench.figure import Figure, median_cpu_seconds

KAI_GO_MS = {1_000: 1.6, 10_000: 18.0}


def case(queues: int) -> DivisionProblem:
    """Quotas, weights, requests and usage drawn at random; about half of the requests can be met."""
    chance = random.Random(queues)
    claims = tuple(
        QueueClaim(
            name=f"queue-{i:05d}",
            request=float(chance.randrange(64)),
            deserved=float(chance.randrange(8)),
            weight=float(chance.randrange(1, 10)),
            usage=2 * chance.random() / queues,
            creation=i,
        )
        for i in range(queues)
    )
    return DivisionProblem(name="bench", total=16.0 * queues, k=1.0, claims=claims, function="setResourceShare")


def measure() -> list[Figure]:
    figures = []
    for queues, kai_ms in KAI_GO_MS.items():
        drawn = case(queues)
        ms = median_cpu_seconds(partial(divide, drawn)) * 1000
        figures.append(Figure(f"{queues:,} queues", ms, "ms", "KAI's Go code, quoted", kai_ms))
    return figures
