"""Computes the cost of jobs and their epochs.

A span may have a hundred thousand jobs, of which a page shows a hundred. `list_jobs` computes what all jobs are chosen,
sorted and added up by. The rest is read and built for the jobs that are shown.

A job's time is the time that its holders held GPUs. It is priced by the price book, commitments included. Each job is
rounded separately, so its cost does not depend on the other jobs of the query. The billing policy may move start-up or
idle time to other teams, but it applies to statements and not to jobs. The number of ledger queries does not depend on
the number of jobs.

An epoch has the time from the previous report to its own. The first epoch includes all earlier time, such as start-up.
Time after the last report belongs to no epoch yet. Late or reordered reports therefore only move time between epochs,
and the epochs and the rest always add up to the job.

Charges are computed per hour and then divided in proportion to the GPU time that the job held in each part of the hour.
With one price per hour, each epoch gets exactly the cost of its own time. With several prices (commitments, shared
GPUs) the parts still add up to the hour's cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Final, NamedTuple, Protocol

from accountant.billing.charge import (
    ALLOCATED,
    Charge,
    PricedTime,
    quantify,
    quantify_together,
    total_cost,
    unpriced_us,
)
from accountant.billing.queue_waits import KnownPod, pod_wait
from accountant.billing.usage_pricing import charges, pieces
from accountant.core.claim_overlap import Span
from accountant.ledger.protocols import EpochReport, JobKey, Questions
from accountant.ledger.usage import HELD, PRICED_BY, Place, Usage, Where
from accountant.prices.price_book import PriceBook
from accountant.wire.option_types import JobState
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    Dimension,
    EpochLine,
    Job,
    JobAnswer,
    JobPart,
)
from gputally.base.apportionment import apportion
from gputally.base.units import US_PER_MS


class EpochSpan(NamedTuple):
    """The span [start_ms, end_ms) of one epoch. epoch: None for the time after the last report."""

    epoch: int | None
    start_ms: int
    end_ms: int


def epoch_spans(reports: Iterable[EpochReport], start_ms: int, end_ms: int) -> list[EpochSpan]:
    """Splits [start_ms, end_ms) at the instants of the reports, in order of time.

    If several epochs ended at the same instant, the one with the lowest number has the time."""
    found: list[EpochSpan] = []
    begin = start_ms
    for at_ms, epoch in sorted((one.at_ms, one.epoch) for one in reports if start_ms < one.at_ms <= end_ms):
        found.append(EpochSpan(epoch, begin, at_ms))
        begin = at_ms
    if begin < end_ms or not found:
        found.append(EpochSpan(None, begin, end_ms))
    return found


Group = tuple[str, Place, str]
"""Hour, place and account of a charge."""


def divide_by_epoch(found: Sequence[Charge], held: Usage, epochs: int) -> list[list[Charge]]:
    """Divides each hour's charges among the epochs. The parts of a charge add up to it.

    found: charges whose keys are hours.
    held: the job's usage by hour and PRICED_BY; its spans are the epochs.
    epochs: the number of epochs."""
    weights: dict[Group, list[int]] = defaultdict(lambda: [0] * epochs)
    in_hour: dict[str, list[int]] = defaultdict(lambda: [0] * epochs)
    rows = zip(held.span.tolist(), held.row_keys(), held.columns(HELD).tolist(), strict=True)
    for number, (hour, *place), figures in rows:
        for account, gpu_us in zip(HELD, figures, strict=True):
            weights[hour, Place(*place), account][number] += gpu_us
            in_hour[hour][number] += gpu_us
    groups: dict[Group, list[Charge]] = {}
    for charge in found:
        groups.setdefault((charge.key[0], charge.place, charge.account), []).append(charge)
    shares: list[list[Charge]] = [[] for _ in range(epochs)]
    for group, grouped in groups.items():
        by = weights[group] if any(weights[group]) else in_hour[group[0]]
        for into, parts in zip(shares, _dealt(grouped, by), strict=True):
            into.extend(parts)
    return shares


def _dealt(charges: Sequence[Charge], weights: Sequence[int]) -> list[list[Charge]]:
    """Divides the charges of one hour, place and account in proportion to the weights.

    The charges are given out one after the other until each share is full."""
    left = [charge.gpu_us for charge in charges]
    dealt: list[list[Charge]] = []
    for wanted in apportion(sum(left), weights):
        taken = apportion(wanted, left) if wanted else [0] * len(left)
        left = [there - part for there, part in zip(left, taken, strict=True)]
        dealt.append([replace(charge, gpu_us=part) for charge, part in zip(charges, taken, strict=True) if part])
    return dealt


BY: Final[tuple[Dimension, ...]] = ("cluster", "namespace", "job", "team", "user")
BURN_MS: Final = 5 * 60_000
"""Length of the time over which the burn rate is measured."""
SETTLE_MS: Final = 2 * 60_000
"""The measured time ends this long before the newest record, because agents do not report at the same instant."""
RATE_PLACES: Final = 6
_BUILT: Final = 20_000
"""The ledger is asked about this many jobs at a time."""


class EpochQuestions(Questions, Protocol):
    """The queries that epochs need. A read snapshot of the ledger answers them."""

    def epochs_between(self, start_ms: int, end_ms: int) -> list[EpochReport]:
        """The epochs that ended in the span."""
        ...


class JobQuestions(EpochQuestions, Protocol):
    """The queries that jobs need."""

    @property
    def newest_ms(self) -> int:
        """End of the newest record."""
        ...

    def recent_span(self, until_ms: int, length_ms: int) -> Span:
        """The newest span of about this length that can be queried and ends at `until_ms` or before."""
        ...

    def pods(
        self, start_ms: int, end_ms: int, *, of: Collection[JobKey] | None = None, waiting: bool = False
    ) -> list[KnownPod]:
        """The pods of a span.

        of: only pods of these jobs.
        waiting: only pods without a known placement or end."""
        ...

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, tuple[int, int]]:
        """The first and last instant (ms) at which each of these jobs held a GPU. Jobs that never held one are
        missing."""
        ...

    def epochs(self, keys: Collection[JobKey]) -> list[EpochReport]: ...


@dataclass(slots=True)
class _JobRecords:
    """The ledger's data of one job. burning: the charges of `burnt_ms`, the span in which the burn rate is measured."""

    charges: list[Charge] = field(default_factory=list)
    burning: list[Charge] = field(default_factory=list)
    pods: list[KnownPod] = field(default_factory=list)
    burnt_ms: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What a job is chosen, sorted and added up by. cost: None if some of its time has no price."""

    key: JobKey
    state: JobState
    allocated_us: int
    idle_us: int
    cost: Decimal | None


class JobList:
    """The jobs of a span. figures: of every job, sorted by key.

    A `Job` is read and built when it is asked for, while the ledger's moment lasts."""

    def __init__(self, ledger: JobQuestions, found: Mapping[JobKey, _JobRecords], until_ms: int) -> None:
        self._ledger = ledger
        self._found = found
        self._until_ms = until_ms
        self.figures = [_figures(key, found[key]) for key in sorted(found)]

    def built(self, chosen: Sequence[JobFigures]) -> Iterator[Job]:
        """Yield these jobs, in this order."""
        for begin in range(0, len(chosen), _BUILT):
            some = chosen[begin : begin + _BUILT]
            keys = {one.key for one in some}
            held, reports = self._ledger.extents(keys), _by_job(self._ledger.epochs(keys))
            for one in some:
                key = one.key
                yield _job(one, self._found[key], held.get(key), reports.get(key, ()), self._until_ms)


def list_jobs(
    ledger: JobQuestions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    now_ms: int,
    where: Where | None = None,
    timezone: str = "UTC",
) -> JobList:
    """Return the jobs that held GPUs or had pods in [start_ms, end_ms).

    where: a filter by teams, namespaces, users or jobs. Time of a job that the filter excludes is not counted."""
    return JobList(ledger, _seen(ledger, book, start_ms, end_ms, where, timezone), min(now_ms, end_ms))


def job(
    ledger: JobQuestions,
    book: PriceBook | None,
    key: JobKey,
    span: Span,
    now_ms: int,
    where: Where | None = None,
    timezone: str = "UTC",
) -> JobAnswer | None:
    """One job over [start_ms, end_ms); None if it is unknown or filtered out."""
    mine: Where = {**(where or {}), **only_job(key)}
    start_ms, end_ms = span
    held = ledger.extents({key}).get(key)
    found = _seen(ledger, book, start_ms, end_ms, mine, timezone, held[1] if held else 0).get(key)
    if found is None:
        return None
    reports = ledger.epochs({key})
    edges, lines = epoch_lines(ledger, book, reports, (start_ms, end_ms), mine, timezone) if reports else ([], [])
    of_kinds = quantify(((c.place.gpu_model, c.place.capacity_type), c) for c in found.charges)
    return JobAnswer(
        start_ms=start_ms,
        end_ms=end_ms,
        currency=book.currency if book else None,
        price_book_version=book.version if book else "",
        job=_job(_figures(key, found), found, held, reports, min(now_ms, end_ms)),
        parts=tuple(
            JobPart(
                gpu_model=model, capacity_type=capacity, gpu_us=part.gpu_us, gpu_hours=part.gpu_hours,
                unit_price=part.unit_price, cost=part.cost,
            )
            for (model, capacity), parts in of_kinds.items()
            for part in parts
        ),
        epochs=tuple(
            EpochLine(
                epoch=stretch.epoch, start_ms=stretch.start_ms, end_ms=stretch.end_ms,
                gpu_us=sum(part.gpu_us for part in parts), cost=total_cost(parts), unpriced_gpu_us=unpriced_us(parts),
            )
            for stretch, parts in zip(edges, lines, strict=True)
        ),
    )  # fmt: skip


def lifetime_costs(
    ledger: JobQuestions, book: PriceBook | None, keys: Collection[JobKey], now_ms: int, timezone: str = "UTC"
) -> dict[JobKey, dict[str, Decimal]]:
    """The cost of each of these jobs from its beginning until now, by GPU model.

    Jobs that are not fully priced, or never held a GPU, are missing."""
    held = ledger.extents(keys)
    if not held:
        return {}
    where: Where = {"namespace": {key.namespace for key in held}, "job": {key.job for key in held}}
    found: dict[JobKey, list[Charge]] = defaultdict(list)
    by: tuple[Dimension, ...] = ("cluster", "namespace", "job")
    for charge in charges(ledger, book, min(first for first, _ in held.values()), now_ms, by, where, timezone):
        if charge.account in ALLOCATED and JobKey(*charge.key) in held:
            found[JobKey(*charge.key)].append(charge)
    costs: dict[JobKey, dict[str, Decimal]] = {}
    for key, mine in found.items():
        by_model = {
            model: total_cost(parts) for (model,), parts in quantify(((c.place.gpu_model,), c) for c in mine).items()
        }
        priced = {model: cost for model, cost in by_model.items() if cost is not None}
        if len(priced) == len(by_model):
            costs[key] = priced
    return costs


def only_job(key: JobKey) -> Where:
    """The filter for this job."""
    return {"cluster": {key.cluster}, "namespace": {key.namespace}, "job": {key.job}}


def _only(where: Where | None) -> Collection[JobKey] | None:
    """The jobs that a filter selects at most; None if it does not name jobs."""
    if where is None or not {"cluster", "namespace", "job"} <= where.keys():
        return None
    return {JobKey(*of) for of in product(where["cluster"], where["namespace"], where["job"])}


def epoch_lines(
    ledger: EpochQuestions,
    book: PriceBook | None,
    reports: Iterable[EpochReport],
    span: tuple[int, int],
    mine: Where,
    timezone: str,
) -> tuple[list[EpochSpan], list[list[PricedTime]]]:
    """The spans between a job's reports, and the priced parts of each. Together they equal the job exactly.

    mine: the filter for this job."""
    cut = epoch_spans(reports, *span)
    shares: list[list[Charge]] = [[] for _ in cut]
    for begin, end in pieces(book, *span):
        inside = [number for number, one in enumerate(cut) if one.start_ms < end and begin < one.end_ms]
        edges = [begin, *(cut[number].end_ms for number in inside[:-1]), end]
        found = [
            charge
            for charge in charges(ledger, book, begin, end, ("hour",), mine, timezone)
            if charge.account in ALLOCATED
        ]
        held = ledger.usage(edges, ("hour", *PRICED_BY), mine, timezone, ())
        for number, share in zip(inside, divide_by_epoch(found, held, len(inside)), strict=True):
            shares[number] += share
    parts = quantify(((f"{number:08d}",), charge) for number, share in enumerate(shares) for charge in share)
    return cut, [parts.get((f"{number:08d}",), []) for number in range(len(cut))]


def _seen(
    ledger: JobQuestions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    where: Where | None,
    timezone: str,
    held_until_ms: int | None = None,
) -> dict[JobKey, _JobRecords]:
    """The ledger's data of each job. held_until_ms: the instant after which none of the jobs held a GPU, if
    known."""
    found: dict[JobKey, _JobRecords] = defaultdict(_JobRecords)
    for charge in charges(ledger, book, start_ms, end_ms, BY, where, timezone):
        if charge.account in ALLOCATED and charge.key[2]:
            found[JobKey(*charge.key[:3])].charges.append(charge)
    recent, until = ledger.recent_span(min(end_ms, ledger.newest_ms - SETTLE_MS), BURN_MS)
    since = max(start_ms, recent)
    if since < until and (held_until_ms is None or since < held_until_ms):
        for charge in charges(ledger, book, since, until, BY, where, timezone):
            if charge.account in ALLOCATED and charge.key[2]:
                found[JobKey(*charge.key[:3])].burning.append(charge)
    for pod in ledger.pods(start_ms, end_ms, of=_only(where)):
        key = pod.key
        if key in found or _passes(key, pod, where):
            found[key].pods.append(pod)
    for seen in found.values():
        seen.burnt_ms = since, until
    return dict(found)


def _passes(key: JobKey, pod: KnownPod, where: Where | None) -> bool:
    """Whether a job that held nothing matches the filter. Users are known only for holders."""
    names = {"cluster": key.cluster, "namespace": key.namespace, "job": key.job, "team": pod.team, "queue": pod.queue}
    return all(names.get(name, "") in values for name, values in (where or {}).items())


def _figures(key: JobKey, seen: _JobRecords) -> JobFigures:
    held = [charge for charge in seen.charges if charge.account in ALLOCATED]
    return JobFigures(
        key,
        _state(seen),
        sum(charge.gpu_us for charge in held),
        sum(charge.gpu_us for charge in held if charge.account == "allocated_idle"),
        total_cost(quantify_together(seen.charges)),
    )


def _job(
    figures: JobFigures,
    seen: _JobRecords,
    held: tuple[int, int] | None,
    reports: Sequence[EpochReport],
    now_ms: int,
) -> Job:
    key, state = figures.key, figures.state
    accounts: dict[str, int] = defaultdict(int)
    for charge in seen.charges:
        accounts[charge.account] += charge.gpu_us
    facts = [pod.facts for pod in seen.pods]
    waits = [wait for fact in facts if (wait := pod_wait(fact, now_ms).queued_ms) is not None]
    created = [fact.created_ms for fact in facts if fact.created_ms is not None]
    ended = [fact.ended_ms for fact in facts if fact.ended_ms is not None]
    gpus, burn = _burn(seen, held) if state == "running" else (Decimal(0), Decimal(0))
    return Job(
        id=key.id,
        cluster=key.cluster,
        namespace=key.namespace,
        job=key.job,
        teams=_names(charge.key[3] for charge in seen.charges) or _names(pod.team for pod in seen.pods),
        queues=_names(pod.queue for pod in seen.pods),
        users=_names(charge.key[4] for charge in seen.charges),
        state=state,
        pods=len(facts),
        pods_running=sum(1 for fact in facts if fact.started_ms is not None and fact.ended_ms is None),
        created_ms=min(created, default=None),
        held_from_ms=held[0] if held else None,
        held_until_ms=held[1] if held else None,
        ended_ms=max(ended, default=held[1] if held else None) if state == "ended" else None,
        waited_ms=max(waits, default=None),
        gpu_models=_names(charge.place.gpu_model for charge in seen.charges),
        accounts_gpu_us=Accounts(**accounts),
        gpus=gpus,
        cost=figures.cost,
        unpriced_gpu_us=sum(charge.gpu_us for charge in seen.charges if charge.unpriced),
        burn_per_hour=burn,
        epochs=len(reports),
    )


def _state(seen: _JobRecords) -> JobState:
    facts = [pod.facts for pod in seen.pods]
    if not facts:
        return "running" if seen.burning else "ended"
    if all(fact.ended_ms is not None for fact in facts):
        return "ended"
    placed = any(fact.scheduled_ms is not None or fact.started_ms is not None for fact in facts)
    return "running" if placed or seen.charges else "waiting"


def _burn(seen: _JobRecords, held: tuple[int, int] | None) -> tuple[Decimal, Decimal | None]:
    """The GPUs held, and their price per hour (None if some have no price), over the last minutes on record."""
    since, until = seen.burnt_ms
    over_us = (until - max(since, held[0] if held else since)) * US_PER_MS
    if over_us <= 0 or not seen.burning:
        return Decimal(0), Decimal(0)
    gpus = Fraction(sum(charge.gpu_us for charge in seen.burning), over_us)
    if any(charge.row is None for charge in seen.burning):
        return _rounded(gpus), None
    price = sum((Fraction(c.row.price) * c.gpu_us / over_us for c in seen.burning if c.row is not None), Fraction(0))
    return _rounded(gpus), _rounded(price)


def _rounded(value: Fraction) -> Decimal:
    """A rate for display. It is never added to others."""
    return Decimal(round(value * 10**RATE_PLACES)).scaleb(-RATE_PLACES)


def beginning(ledger: JobQuestions, key: JobKey, end_ms: int) -> int | None:
    """Returns when a job first held a GPU, or else when its first pod was created; None if neither is known. end_ms:
    later pods are not considered."""
    held = ledger.extents({key}).get(key)
    if held is not None:
        return held[0]
    created = [pod.facts.created_ms for pod in ledger.pods(0, end_ms, of={key})]
    return min((at for at in created if at is not None), default=None)


def _names(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in found if name}))


def _by_job(reports: Iterable[EpochReport]) -> dict[JobKey, list[EpochReport]]:
    found: dict[JobKey, list[EpochReport]] = defaultdict(list)
    for report in reports:
        found[report.key].append(report)
    return found
