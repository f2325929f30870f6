"""Converts the report to plain tables, records and one JSON document.

Figures are as exact as in the report: GPU-hours with nine decimals, money as in the statement, instants in UTC. Ratios
are fractions, not percentages. None is unknown or unpriced, never 0.

`records` yields one record per statement line, per team's payable amount, per unused commitment, per correction of an
earlier month, per credit or charge, per team's amount due, and one of what no team is billed for; the field `record`
distinguishes them, so that a total is not added to its parts. Costs of lines are exact: unit price × hours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Final, Literal, TypeAlias, cast

from accountant.billing.queue_waits import WaitRow
from accountant.billing.statements import StatementLine
from accountant.bookkeeping.month_closing import statement_hash
from accountant.prices.price_book import MAX_DECIMALS
from accountant.reports import figure_formatting
from accountant.reports.report_breakdowns import JobRow, TimeAndCost
from accountant.reports.report_builder import Report
from accountant.reports.savings_hints import SpotRow
from accountant.wire.policy_models import IDLE
from gputally.base.money import HOUR_PLACES, exact_sum, gpu_hours
from gputally.base.units import MS_PER_SECOND

RecordKind = Literal["line", "payable", "commitment", "correction", "adjustment", "due", "not_billed"]


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """One record.

    about: the month of a correction or adjustment, "" for the report's own.
    unit_price: per GPU-hour.
    cost: in the report's currency; exact for lines and commitments, otherwise rounded to the currency's minor unit
    (12.34, not 1234)."""

    record: RecordKind
    team: str
    account: str = ""
    detail: str = ""
    gpu_model: str = ""
    capacity_type: str = ""
    price_row: str = ""
    unit_price: Decimal | None = None
    gpu_hours: Decimal | None = None
    cost: Decimal | None = None
    about: str = ""
    reason: str = ""


TEXTS: Final = ("record", "team", "account", "detail", "gpu_model", "capacity_type", "price_row", "about", "reason")
"""The columns of a record with text."""
DECIMALS: Final = {"unit_price": MAX_DECIMALS, "gpu_hours": HOUR_PLACES, "cost": MAX_DECIMALS + HOUR_PLACES}
"""The columns of a record with numbers, each with the decimals that an exact one may have."""


def records(report: Report) -> Iterator[ReportRecord]:
    """The records in the order of `RecordKind`; lines and teams in the statement's order."""
    for line in report.lines:
        yield _of_line("line", line, line.cost)
    for team, amount in report.payable.items():
        yield ReportRecord("payable", team, cost=amount)
    for line in report.commitments:
        yield _of_line("commitment", line, line.cost)
    for correction in report.corrections:
        yield _of_line("correction", correction.line, correction.amount, correction.month, correction.reason)
    for adjustment in report.adjustments:
        yield ReportRecord(
            "adjustment", adjustment.team, cost=adjustment.amount, about=adjustment.month, reason=adjustment.reason
        )
    if report.booked_beside:
        for team, amount in report.due.items():
            yield ReportRecord("due", team, cost=amount)
        if report.not_billed is not None:
            yield ReportRecord("not_billed", IDLE, cost=report.not_billed)


def _of_line(
    kind: RecordKind, line: StatementLine, cost: Decimal | None, about: str = "", reason: str = ""
) -> ReportRecord:
    return ReportRecord(
        kind, line.team, line.account, line.detail, line.gpu_model, line.capacity_type, line.price_row or "",
        line.unit_price, line.gpu_hours, cost, about, reason,
    )  # fmt: skip


Cell: TypeAlias = str | int | float | Decimal | datetime | None
ColumnKind = Literal["text", "count", "hours", "money", "price", "ratio", "number", "instant"]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of a report.

    columns: (name, kind).
    total: a last row with the sums, if there is one; it is not in `rows`."""

    name: str
    title: str
    columns: tuple[tuple[str, ColumnKind], ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: tuple[Cell, ...] | None = None


UNIT = "unit"
"""The column with the unit of a row's amounts, if they are not all in the report's currency."""
_USE = (
    "allocated_gpu_hours:hours busy_gpu_hours:hours idle_gpu_hours:hours unknown_gpu_hours:hours utilisation:ratio "
    "idle_cost:money cost:money unpriced_gpu_hours:hours"
)
"""The columns of `_use`."""
_JOB = "team:text cluster:text namespace:text job:text"
"""The columns of `_job_name`."""


def tables(report: Report) -> tuple[ReportTable, ...]:
    """All tables in the order of the page. Empty tables are included, so that every report has the same ones."""
    return (
        _summary(report),
        *_money(report),
        _table(
            "accounts",
            "Where the capacity went",
            "account:text gpu_hours:hours share:ratio cost:money",
            ((r.account, r.gpu_us, r.share, _known(r.cost, r.unpriced_us)) for r in report.accounts),
        ),
        _table(
            "teams",
            "Teams",
            f"team:text rank:count share:ratio {_USE} cost_change:money",
            (
                (r.team, r.rank, r.share, *_use(r.figures), r.change.absolute if r.change else None)
                for r in report.teams
            ),
        ),
        _table(
            "budgets",
            "Budgets",
            "budget:text team:text queue:text unit:text limit:money spent:money used:ratio forecast:number "
            "forecast_low:number forecast_high:number used_up:instant used_up_earliest:instant used_up_latest:instant",
            map(
                attrgetter(
                    "name", "team", "queue", "unit", "limit", "spent", "ratio", "forecast", "forecast_low",
                    "forecast_high", "exhausted_ms", "exhausted_earliest_ms", "exhausted_latest_ms",
                ),
                report.budgets,
            ),
        ),
        _table(
            "kinds",
            "GPU models and capacity types",
            f"gpu_model:text capacity_type:text unallocated_gpu_hours:hours {_USE}",
            (
                (r.gpu_model, r.capacity_type, r.figures.accounts.unallocated, *_use(r.figures))
                for r in report.kinds
            ),
        ),
        _table("jobs_by_cost", "Jobs that cost the most", f"{_JOB} {_USE}", map(_job, report.jobs_by_cost)),
        _table("jobs_by_idle", "Jobs that left the most idle", f"{_JOB} {_USE}", map(_job, report.jobs_by_waste)),
        _table(
            "epochs",
            "Cost of an epoch",
            "cluster:text namespace:text job:text epochs:count last_epoch:count gpu_hours:hours cost:money "
            "mean_cost:money since_gpu_hours:hours since_cost:money",
            map(
                attrgetter(
                    "cluster", "namespace", "job", "epochs", "last", "gpu_us", "cost", "mean_cost", "rest_us",
                    "rest_cost",
                ),
                report.epochs,
            ),
        ),
        _table(
            "users",
            "Users",
            f"user:text jobs:count {_USE}",
            ((r.user, r.jobs, *_use(r.figures)) for r in report.users),
        ),
        _table("days", "Day by day", "day:text team:text allocated_gpu_hours:hours", _days(report)),
        _table(
            "quotas",
            "Guaranteed and borrowed",
            "queue:text team:text guaranteed_gpu_hours:hours "
            "within_gpu_hours:hours unused_gpu_hours:hours borrowed_gpu_hours:hours",
            map(
                attrgetter("queue", "team", "guaranteed_us", "within_us", "unused_us", "borrowed_us"), report.quotas
            ),
        ),
        _table(
            "hints",
            "Right-sizing",
            f"{_JOB} kind:text held_gpus:number peak_busy_gpus:number needed_gpus:number needed_of:number "
            "saving_at_most:money advice:text",
            (
                (
                    *_job_name(h.job), h.kind, h.held, h.peak_busy, h.needed, h.needed_of, h.saving,
                    figure_formatting.advice(h),
                )
                for h in report.hints
            ),
        ),
        _table(
            "spot",
            "Spot candidates",
            f"{_JOB} gpu_hours:hours cost:money saving_at_most:money",
            ((*_job_name(r), r.gpu_us, r.cost, r.saving) for r in report.spot),
        ),
        _table(
            "waits",
            "Queue waits",
            "queue:text team:text pods:count waiting:count median_s:number p95_s:number "
            "longest_s:number start_median_s:number",
            map(_wait, report.waits),
        ),
        _table(
            "hours",
            "Hours of the day",
            "hour:count capacity_gpu_hours:hours allocated_gpu_hours:hours "
            "busy_gpu_hours:hours held:ratio utilisation:ratio",
            map(
                attrgetter("hour", "capacity_us", "allocated_us", "busy_us", "held", "utilisation"),
                report.rhythm.hours,
            ),
        ),
        _imports(report),
        _table(
            "unpriced",
            "Without a price",
            "gpu_model:text pool:text region:text capacity_type:text gpu_hours:hours near_row:text near_model:text",
            map(
                attrgetter("gpu_model", "pool", "region", "capacity_type", "gpu_us", "near_row", "near_model"),
                report.unpriced,
            ),
        ),
    )  # fmt: skip


def instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC)


def _table(
    name: str, title: str, columns: str, rows: Iterable[tuple[Cell, ...]], total: tuple[Cell, ...] | None = None
) -> ReportTable:
    """Makes a table. columns: `name:kind name:kind`. An integer in a column of hours is GPU-µs, and in a column of
    instants it is milliseconds."""
    headings = tuple(
        (name, cast(ColumnKind, kind)) for name, _, kind in (part.partition(":") for part in columns.split())
    )
    cells = (tuple(_converted(cell, kind) for cell, (_, kind) in zip(row, headings, strict=True)) for row in rows)
    return ReportTable(name, title, headings, tuple(cells), total)


def _converted(cell: Cell, kind: ColumnKind) -> Cell:
    if isinstance(cell, int) and kind == "hours":
        return gpu_hours(cell)
    return instant(cell) if isinstance(cell, int) and kind == "instant" else cell


def _summary(report: Report) -> ReportTable:
    """The summary; without figures if nothing of the span is metered."""
    stated, head = report.statement, report.headline
    priced = report.currency is not None and stated.metered
    use = _use(head.figures)[:5] if stated.metered else (None,) * 5
    return _table(
        "summary",
        "Summary",
        "scope:text start:instant end:instant timezone:text period:text currency:text cost:money "
        "unallocated_cost:money due:money not_billed:money booked_since:money cost_before:money "
        "before_start:instant before_end:instant "
        f"capacity_gpu_hours:hours {_USE.partition(' idle_cost')[0]} jobs:count coverage:ratio price_book_version:text "
        "policy_versions:text statement_sha256:text invoice:text issued:text payable_by:text",
        (
            (
                report.team or "cluster", report.start_ms, report.end_ms, report.tz.key, report.period,
                report.currency, _known(head.cost, head.unpriced_us) if priced else None,
                _known(head.unallocated_cost, head.unallocated_unpriced_us) if priced else None,
                report.due_total, report.not_billed,
                exact_sum(total for _, total in report.restated.values()),
                _known(report.before.cost, report.before.unpriced_us) if report.before and report.currency else None,
                *(report.before_ms if report.before else (None, None)),
                head.figures.accounts.total if stated.gpu_us else None, *use,
                head.jobs if stated.metered else None, stated.coverage if stated.gpu_us else None,
                stated.price_book_version, ", ".join(stated.policy_versions), statement_hash(stated),
                report.invoice, *("" if day is None else day.isoformat() for day in (report.issued, report.payable_by)),
            ),
        ),
    )  # fmt: skip


def _money(report: Report) -> Iterator[ReportTable]:
    """The statement's lines, payable amounts, other booked items, and amounts due."""
    all_records = list(records(report))
    lines = [record for record in all_records if record.record == "line"]
    yield _table(
        "lines",
        "Statement lines",
        "team:text account:text detail:text gpu_model:text capacity_type:text price_row:text unit_price:price "
        "gpu_hours:hours cost:money",
        (
            (r.team, r.account, r.detail, r.gpu_model, r.capacity_type, r.price_row, r.unit_price, r.gpu_hours, r.cost)
            for r in lines
        ),
        (
            "total", "", "", "", "", "", None, exact_sum(r.gpu_hours for r in lines if r.gpu_hours is not None),
            sum_of_lines(report, lines),
        ),
    )  # fmt: skip
    yield _by_team("payable", "Payable by team", all_records)
    beside = [r for r in all_records if r.record in ("commitment", "correction", "adjustment")]
    yield _table(
        "beside",
        "Corrections, credits and charges",
        "kind:text about:text team:text account:text gpu_model:text reason:text gpu_hours:hours amount:money",
        ((r.record, r.about, r.team, r.account, r.gpu_model, r.reason, r.gpu_hours, r.cost) for r in beside),
    )
    yield _by_team("due", "Due by team", all_records)


def sum_of(some_records: Iterable[ReportRecord], column: str) -> Decimal:
    """The sum of a column, without what is unknown."""
    values = (getattr(record, column) for record in some_records)
    return exact_sum(value for value in values if value is not None)


def sum_of_lines(report: Report, lines: Iterable[ReportRecord]) -> Decimal | None:
    """The cost of the statement's priced lines; None if no billed time has a price, or no time is metered."""
    if not report.statement.metered:
        return None
    return _known(exact_sum(line.cost for line in lines if line.cost is not None), report.statement.unpriced_gpu_us)


def _by_team(record: str, title: str, all_records: Iterable[ReportRecord]) -> ReportTable:
    """Amounts of one kind of record by team."""
    amounts = [(r.team, r.cost) for r in all_records if r.record == record]
    total = exact_sum(amount for _, amount in amounts if amount is not None)
    return _table(record, title, "team:text amount:money", amounts, ("total", total))


def _imports(report: Report) -> ReportTable:
    """Imported time; it concerns the whole cluster and not a single team."""
    return _table(
        "imports",
        "Imported history",
        "cluster:text source:text origin:text start:instant end:instant gpu_hours:hours held_gpu_hours:hours "
        "unknown_gpu_hours:hours coverage:ratio limits:text",
        (
            (
                *(r.cluster, r.source, r.origin, r.start_ms, r.end_ms),
                *((None,) * 3 if report.team else (r.sent_us, r.held_us, r.unknown_us)),
                r.coverage,
                "; ".join(r.limits),
            )
            for r in report.imports
        ),
    )


def _days(report: Report) -> Iterator[tuple[Cell, ...]]:
    for day in report.daily:
        for team in sorted(day.allocated_us):
            yield day.day.isoformat(), team, day.allocated_us[team]


def _job(job: JobRow) -> tuple[Cell, ...]:
    return *_job_name(job), *_use(job.figures)


def _job_name(row: JobRow | SpotRow) -> tuple[Cell, ...]:
    return row.team, row.cluster, row.namespace, row.job


def _wait(row: WaitRow) -> tuple[Cell, ...]:
    queued = (ms / MS_PER_SECOND for ms in (row.queued.median_ms, row.queued.p95_ms, row.queued.longest_ms))
    start_s = row.starting.median_ms / MS_PER_SECOND if row.starting.pods else None
    return row.queue, row.team, row.pods, row.waiting, *queued, start_s


def _use(figures: TimeAndCost) -> tuple[Cell, ...]:
    accounts = figures.accounts
    idle_cost = _known(figures.idle_cost, figures.idle_unpriced_us)
    cost = _known(figures.cost, figures.unpriced_us)
    times = accounts.allocated, accounts.busy, accounts.allocated_idle, accounts.allocated_unknown
    return *times, figures.utilisation, idle_cost, cost, figures.unpriced_us


def _known(cost: Decimal, unpriced_us: int) -> Decimal | None:
    """The cost; None if nothing has a price."""
    return None if unpriced_us and not cost else cost
