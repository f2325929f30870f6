"""What spot capacity saves once checkpoints, interruptions and lost work are paid for. Pure.

The interval between checkpoints that wastes least (Daly's higher order estimate; its first term is Young's): with a
checkpoint that takes δ and interruptions that are M apart on average, exponentially distributed,

    τ = √(2δM) · [1 + ⅓ √(δ/2M) + ⅑ (δ/2M)] − δ    for δ < 2M, else M.

The time a run of length T then takes (Daly's complete model): M · e^(R/M) · (e^((τ+δ)/M) − 1) · T/τ, R to start again.

Sources: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006) 303-312; J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974) 530-531.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import exp, expm1, sqrt
from typing import Any

from accountant.money import exact_product, exact_sum
from accountant.progress import JobKey

_MOST_EXPONENT = 50.0
"""Beyond it no run would ever end."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the ledger does not know; seconds. checkpoint_s: to write one; restart_s: from an interruption to work
    again; between_s: mean time between interruptions of one node."""

    checkpoint_s: float
    restart_s: float
    between_s: float


@dataclass(frozen=True, slots=True)
class SpotAdvice:
    """gpu_hours held on other capacity; cost: of it; spot_cost: of as many hours at the book's spot price. nodes: the
    most the job had at once. interval_s: between checkpoints; stretch: by what the run becomes longer, None where it
    would never end. saving: what is left of the difference, None where stretch is; may be negative."""

    team: str
    cluster: str
    namespace: str
    job: str
    gpu_hours: Decimal
    cost: Decimal
    spot_cost: Decimal
    nodes: int
    interval_s: float
    stretch: float | None
    saving: Decimal | None


def young(checkpoint_s: float, between_s: float) -> float:
    """First order: √(2δM), seconds."""
    return sqrt(2 * checkpoint_s * between_s)


def daly(checkpoint_s: float, between_s: float) -> float:
    """Higher order, seconds. Raises ValueError for what is not above 0."""
    if checkpoint_s <= 0 or between_s <= 0:
        raise ValueError("a checkpoint takes time, and interruptions are apart: both are above 0")
    if checkpoint_s >= 2 * between_s:
        return between_s
    part = checkpoint_s / (2 * between_s)
    return young(checkpoint_s, between_s) * (1 + sqrt(part) / 3 + part / 9) - checkpoint_s


def stretched(interval_s: float, checkpoint_s: float, restart_s: float, between_s: float) -> float | None:
    """By what a run becomes longer (1.1: a tenth); None where it would never end."""
    segment, restart = (interval_s + checkpoint_s) / between_s, restart_s / between_s
    if segment + restart > _MOST_EXPONENT:
        return None
    return between_s * exp(restart) * expm1(segment) / interval_s


def job_of(row: Mapping[str, Any]) -> JobKey:
    """Of a row of the report's tables."""
    return JobKey(row["cluster"], row["namespace"], row["job"])


def advised(
    rows: Iterable[Mapping[str, Any]], nodes_of: Mapping[JobKey, int], assumed: Assumed
) -> tuple[SpotAdvice, ...]:
    """rows: the report's table `spot`. nodes_of: the most nodes that a job had at once; an interruption of any of
    them interrupts the job. The largest saving first."""
    found = [_one(row, max(1, nodes_of.get(job_of(row), 1)), assumed) for row in rows]
    return tuple(sorted(found, key=lambda one: (-(one.saving or 0), one.team, one.cluster, one.namespace, one.job)))


def _one(row: Mapping[str, Any], nodes: int, assumed: Assumed) -> SpotAdvice:
    cost, gross = Decimal(str(row["cost"])), Decimal(str(row["saving_at_most"]))
    between_s = assumed.between_s / nodes
    interval_s = daly(assumed.checkpoint_s, between_s)
    stretch = stretched(interval_s, assumed.checkpoint_s, assumed.restart_s, between_s)
    spot_cost = exact_sum([cost, -gross])
    saving = None if stretch is None else exact_sum([cost, -exact_product(spot_cost, Decimal(str(round(stretch, 6))))])
    return SpotAdvice(
        row["team"], *job_of(row), Decimal(str(row["gpu_hours"])), cost, spot_cost, nodes, interval_s,
        stretch, saving,
    )  # fmt: skip
