"""Finds jobs that could run on preemptible GPUs, and what that saves.

A candidate is a batch job (its kind runs to an end and may be started again) that held GPUs of another capacity
type for which the book has a spot price of the same model and region. Whether it keeps checkpoints, and how often
spot capacity is taken away, the ledger does not know: the saving is what the same GPU-hours would have cost less,
before any work that has to be done twice. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from accountant.billing.costs import ALLOCATED, Charge, Place
from accountant.prices.price_book import Price, PriceBook
from gputally.base.money import exact_product, exact_sum, gpu_hours
from gputally.base.units import US_PER_HOUR

BATCH = frozenset(
    {
        "CronJob", "CronWorkflow", "Job", "JobSet", "MPIJob", "PaddleJob", "PipelineRun", "PyTorchJob", "RayJob",
        "ScheduledSparkApplication", "SlurmJob", "SparkApplication", "TFJob", "TaskRun", "TrainJob", "TrainingWorkload",
        "Workflow", "XGBoostJob",
    }
)  # fmt: skip
"""Kinds that run to an end: of Kubernetes, Kubeflow, Ray, Spark, Argo, Tekton, Run:ai, and Slurm's jobs."""
MIN_SPOT_GPU_HOURS = 8
"""Below this no candidate is worth reading."""
SPOT = "spot"


@dataclass(frozen=True, slots=True)
class SpotRow:
    """Of one job in one cluster. gpu_us: held on other than spot capacity and with a spot price. cost: of it; saving:
    at most, both exact."""

    team: str
    namespace: str
    job: str
    gpu_us: int
    cost: Decimal
    saving: Decimal
    cluster: str


def candidates(found: Iterable[Charge], book: PriceBook | None, team: str | None, at_ms: int) -> tuple[SpotRow, ...]:
    """found: charges by accountant.reports.report_sections.BY_JOB. at_ms: whose spot prices count.

    The largest saving first."""
    if book is None:
        return ()
    spot: dict[Place, Price | None] = {}
    rows: dict[tuple[str, str, str, str], list[tuple[int, Decimal, Decimal]]] = {}
    for charge in found:
        name, namespace, job, _, cluster = charge.key
        if (
            charge.account not in ALLOCATED
            or charge.row is None
            or charge.place.capacity_type == SPOT
            or team not in (None, name)
            or job.partition("/")[0] not in BATCH
        ):
            continue
        if charge.place not in spot:
            spot[charge.place] = _spot_price(book, charge.place, at_ms)
        price = spot[charge.place]
        if price is not None and price.price < charge.row.price:
            hours = gpu_hours(charge.gpu_us)
            cheaper = exact_sum([charge.row.price, -price.price])
            row = charge.gpu_us, exact_product(charge.row.price, hours), exact_product(cheaper, hours)
            rows.setdefault((name, namespace, job, cluster), []).append(row)
    summed = [
        SpotRow(
            *key[:3], sum(g for g, _, _ in parts), exact_sum(c for _, c, _ in parts),
            exact_sum(s for _, _, s in parts), key[3],
        )
        for key, parts in rows.items()
    ]  # fmt: skip
    worth = [row for row in summed if row.gpu_us >= MIN_SPOT_GPU_HOURS * US_PER_HOUR]
    return tuple(sorted(worth, key=lambda row: (-row.saving, row.team, row.namespace, row.job, row.cluster)))


def savings(
    book: PriceBook, places: Sequence[Place], prices: Sequence[Sequence[Price | None]], at_ms: int
) -> dict[tuple[int, int], Decimal]:
    """What an hour would cost less, by stretch and place, where it would. prices: by these."""
    found: dict[tuple[int, int], Decimal] = {}
    for number, place in enumerate(places):
        cheaper = None if place.capacity_type == SPOT else _spot_price(book, place, at_ms)
        for stretch, of_stretch in enumerate(prices):
            price = of_stretch[number]
            if cheaper is not None and price is not None and cheaper.price < price.price:
                found[stretch, number] = exact_sum([price.price, -cheaper.price])
    return found


def _spot_price(book: PriceBook, place: Place, at_ms: int) -> Price | None:
    """Of the same pool, else of whatever pool; only a row that is a spot row: one that names no capacity type is
    no spot price."""
    for pool in (place.pool, ""):
        found = book.unit_price(place.gpu_model, at_ms, pool, place.region, SPOT)
        if found is not None and found.row.capacity_type == SPOT:
            return found
    return None
