"""Suggests how jobs could cost less: by releasing idle GPUs, by holding fewer or a slice of one, or on spot capacity.

A hint is given only if enough of a job's GPU use is known. It states what was observed: the largest number of busy GPUs
in any hour, or the utilisation over the observed hours. A MIG slice is suggested only for holders of a whole GPU,
because hourly figures do not show how much of a partial GPU is needed. GPU memory is not considered. Check that the
model still fits before you follow a hint. `gputally advise sharing` lists the jobs with a hint of the kind `slice`, and
no other hint suggests a slice.

A candidate for spot capacity is a batch job (a kind that ends and can be restarted) on another capacity type, if the
price book has a spot price of the same model and region. The ledger does not know whether the job writes checkpoints or
how often spot capacity is withdrawn. The saving is the difference in price for the same GPU-hours, without repeated
work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from accountant.billing.charge import ALLOCATED, Charge
from accountant.inventory.job_kinds import BATCH
from accountant.ledger.usage import HELD, JobName, Usage
from accountant.prices.price_book import Price, PriceBook
from accountant.prices.unit_prices import Place
from accountant.reports.report_breakdowns import JobRow
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from gputally.base.mig_profiles import COMPUTE_SLICES, compute_slices
from gputally.base.money import exact_product, exact_sum, gpu_hours
from gputally.base.units import US_PER_HOUR

MIN_HINT_GPU_HOURS = 8
"""Jobs with fewer GPU-hours get no hint."""
MAX_UNKNOWN = 0.1
"""Maximum share of a job's allocated time whose use is unknown."""
HARDLY_USED = 0.05
"""Utilisation below which a holder counts as idle."""
SLICE_AT = 0.5
"""Peak use of a single GPU up to which a slice of it is suggested."""
WHOLE = 0.95
"""GPU-hours held in one hour from which it counts as a whole GPU; an instance has at most 6 of 7 slices."""

Kind = Literal["idle", "fewer", "slice"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint that one job could have used fewer GPUs.

    kind: `idle` if the job hardly used its GPUs, `fewer` if it never needed so many, `slice` if a part of one would do.

    held, peak_busy: GPUs, the maximum of any hour.
    needed: GPUs that would have been enough; for `slice` the compute slices of one GPU.
    needed_of: the compute slices into which MIG divides the job's GPU, of several models the fewest; 1 for whole GPUs.
    saving: an upper bound: the cost of the GPUs held beyond `needed`, at most the cost of the idle time; None if some
        of the job's time has no price."""

    kind: Kind
    job: JobRow
    held: float
    peak_busy: float
    needed: Decimal
    saving: Decimal | None
    needed_of: int = 1


BY_NAME: Final[tuple[Dimension, ...]] = ("team", "namespace", "job", "cluster")
"""The dimensions of a `JobName`."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a job held, and the most that it used, in one local hour, in GPU-µs."""

    held_us: int = 0
    busy_us: int = 0


def peaks_of(hourly: Usage) -> dict[JobName, Peak]:
    """The peaks of the jobs that held anything. hourly: usage by BY_NAME and hour."""
    peaks: dict[JobName, Peak] = {}
    held = hourly.columns(HELD).tolist()
    for (team, namespace, job, cluster, _), (busy_us, *others) in zip(hourly.row_keys(), held, strict=True):
        name, held_us = (team, namespace, job, cluster), busy_us + sum(others)
        known = peaks.get(name, Peak())
        if held_us:
            peaks[name] = Peak(max(known.held_us, held_us), max(known.busy_us, busy_us))
    return peaks


def savings_hints(jobs: Iterable[JobRow], peak_of: Mapping[JobName, Peak]) -> tuple[Hint, ...]:
    """At most one hint per job, the largest saving first."""
    hints = [hint for job in jobs if (hint := _hint(job, peak_of.get(by_name(job), Peak())))]
    return tuple(sorted(hints, key=lambda hint: (-(hint.saving or 0), *by_name(hint.job))))


def by_name(job: JobRow) -> JobName:
    """The name by which jobs are sorted and their peaks are found."""
    return job.team, job.namespace, job.job, job.cluster


def known_well(accounts: Accounts) -> bool:
    """Whether enough of the use is known for a hint."""
    return accounts.allocated > 0 and accounts.allocated_unknown <= MAX_UNKNOWN * accounts.allocated


def _hint(job: JobRow, peak: Peak) -> Hint | None:
    figures, held_gpus, busy_gpus = job.figures, peak.held_us / US_PER_HOUR, peak.busy_us / US_PER_HOUR
    utilisation = figures.utilisation
    if (
        not known_well(figures.accounts)
        or utilisation is None
        or figures.accounts.allocated < MIN_HINT_GPU_HOURS * US_PER_HOUR
    ):
        return None
    kind: Kind
    slices = 1
    if utilisation < HARDLY_USED:
        kind, needed = "idle", Decimal(0)
    elif held_gpus > 1 and (whole_gpus := max(1, math.ceil(busy_gpus))) <= held_gpus / 2:
        kind, needed = "fewer", Decimal(whole_gpus)
    elif WHOLE <= held_gpus <= 1 and max(busy_gpus, utilisation) <= SLICE_AT:
        slices = min(map(compute_slices, job.gpu_models), default=COMPUTE_SLICES)
        kind, needed = "slice", Decimal(max(1, math.ceil(busy_gpus * slices)))
    else:
        return None
    held_units = slices if kind == "slice" else max(1, math.ceil(held_gpus))
    return Hint(kind, job, held_gpus, busy_gpus, needed, _saving(kind, job, needed / held_units), slices)


def _saving(kind: Kind, job: JobRow, needed_share: Decimal) -> Decimal | None:
    """An estimated part of the job's cost; not rounded, never booked."""
    if job.figures.unpriced_us:
        return None
    if kind == "idle":
        return job.figures.idle_cost
    beyond = exact_sum([job.figures.cost, -exact_product(job.figures.cost, round(needed_share, 6))])
    return min(beyond, job.figures.idle_cost)


MIN_SPOT_GPU_HOURS = 8
"""Jobs with fewer GPU-hours are not candidates."""
SPOT = "spot"


@dataclass(frozen=True, slots=True)
class SpotRow:
    """The spot saving of one job in one cluster.

    gpu_us: time held on capacity other than spot, for which there is a spot price.
    cost: the exact cost of that time.
    saving: an upper bound of the saving, exact."""

    team: str
    namespace: str
    job: str
    gpu_us: int
    cost: Decimal
    saving: Decimal
    cluster: str


def candidates(charges: Iterable[Charge], book: PriceBook, at_ms: int) -> tuple[SpotRow, ...]:
    """The candidates for spot capacity, the largest saving first.

    charges: by accountant.reports.report_breakdowns.BY_JOB.
    at_ms: instant of the spot prices."""
    spot: dict[Place, Price | None] = {}
    rows: dict[tuple[str, str, str, str], list[tuple[int, Decimal, Decimal]]] = {}
    for charge in charges:
        name, namespace, job, _, cluster = charge.key
        if (
            charge.account not in ALLOCATED
            or charge.row is None
            or charge.place.capacity_type == SPOT
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
    book: PriceBook, places: Sequence[Place], prices: Sequence[Price | None], at_ms: int
) -> dict[tuple[int, int], Decimal]:
    """The saving per GPU-hour, if there is one, by the indices of price and place."""
    by_price_and_place: dict[tuple[int, int], Decimal] = {}
    for place_number, place in enumerate(places):
        cheaper = None if place.capacity_type == SPOT else _spot_price(book, place, at_ms)
        for price_number, price in enumerate(prices):
            if cheaper is not None and price is not None and cheaper.price < price.price:
                by_price_and_place[price_number, place_number] = exact_sum([price.price, -cheaper.price])
    return by_price_and_place


def _spot_price(book: PriceBook, place: Place, at_ms: int) -> Price | None:
    """The spot price of the same pool, otherwise of any pool. Rows without a capacity type do not count as spot
    prices."""
    for pool in (place.pool, ""):
        price = book.unit_price(place.gpu_model, at_ms, pool, place.region, SPOT)
        if price is not None and price.row.capacity_type == SPOT:
            return price
    return None
