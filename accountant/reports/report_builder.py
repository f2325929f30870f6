"""Defines the report of a span for the cluster or one team, and builds it from the ledger and the bookkeeping.

A report is computed from the ledger's integers and the statement of the whole cluster, so the figures of a team's page
and of the cluster's page are equal. Renderers only format them.

`read_data` reads everything of one moment, with a few queries for any size of cluster, and some for each job whose
epochs a report lists (MOST_EPOCH_JOBS). `made_of` builds the report of any scope from this data and reads nothing;
`build` does both.
`report` and `readings` add the bookkeeping of the month, after the acts of the same moment.

The same moment, price book and span give the same report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import Final
from zoneinfo import ZoneInfo

from accountant.billing import budget_forecast, displayed_amounts, queue_waits
from accountant.billing.budget_forecast import Outlook
from accountant.billing.charge import Charge
from accountant.billing.charge_table import ChargeTable
from accountant.billing.cost_allocation import billed_tables, unused_commitments
from accountant.billing.displayed_amounts import Part
from accountant.billing.displayed_costs import displayed_costs
from accountant.billing.queue_waits import WaitRow
from accountant.billing.quota_usage import ModelSpans, QuotaRow, quotas
from accountant.billing.statements import (
    NOTHING_BESIDE,
    Adjustment,
    BookedItems,
    Correction,
    Statement,
    StatementLine,
    invoice_number,
    of_months,
    payable_lines,
)
from accountant.billing.statements import build as build_statement
from accountant.billing.usage_pricing import charge_table
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import booked_in_month, booked_later
from accountant.core.periods import Days, Month, by_month, compared_span, local_date, span_before, zone
from accountant.core.settings import InvoiceIssuer
from accountant.history_import.import_run import IMPORTING, ImportRow, import_rows, imported_chunks
from accountant.ledger.protocols import Moment, ReadableLedger
from accountant.ledger.usage import JobName, Usage, Where
from accountant.prices.price_book import PriceBook
from accountant.reports import job_ranking, report_breakdowns
from accountant.reports.job_ranking import BilledJobs, EpochRow
from accountant.reports.report_breakdowns import (
    BY_JOB,
    AccountRow,
    DayRow,
    Headline,
    HourlyUse,
    JobRow,
    KindRow,
    TeamRow,
    UnpricedRow,
    UserRow,
)
from accountant.reports.savings_hints import BY_NAME as _BY_NAME
from accountant.reports.savings_hints import Hint, Peak, SpotRow, peaks_of, savings_hints
from accountant.reports.statement_line_charges import ChargeListing, Details
from accountant.reports.week_parts import WeekPart, week_parts
from accountant.wire.policy_models import IDLE, PolicyVersion
from accountant.wire.usage_cost_and_job_models import BudgetState, Dimension
from gputally.base.money import exact_sum

CANDIDATES = 25
"""Jobs per scope whose hourly peaks are read: those that left the most GPU time idle."""
_AT_ONCE = 1_000
"""Jobs whose hourly peaks are read together; a month of them takes about ten MiB."""
_ROW_BYTES, _CANDIDATE_BYTES = 150, 1_000
"""Approximate size of a job or of a row of held time, and of a candidate's row, in bytes."""
_BY_TEAM: tuple[Dimension, ...] = ("team",)
_TEAM_AND_USER: Final = [BY_JOB.index("team"), BY_JOB.index("user")]


@dataclass(frozen=True, slots=True)
class MonthBooks:
    """The bookkeeping of a month.

    kept, kept_before: the statements of the month and of the one before if they are closed; otherwise both are computed
        from the ledger, that of the month with the items in `beside`.
    later, period, imports: see Report."""

    kept: Statement | None = None
    kept_before: Statement | None = None
    beside: BookedItems = NOTHING_BESIDE
    later: BookedItems = NOTHING_BESIDE
    period: str = ""
    imports: tuple[ImportRow, ...] = ()

    @classmethod
    def of(cls, moment: Moment, books: Bookkeeper, month: Month | None, start_ms: int, end_ms: int) -> MonthBooks:
        """The bookkeeping of the month that [start_ms, end_ms) is or begins, after the acts of the moment. month None:
        the span is no month, so only the imports are read."""
        imports = import_rows(imported_chunks(moment.acts(*IMPORTING)), start_ms, end_ms)
        if month is None:
            return cls(imports=imports)
        known = books.books(moment)
        return cls(
            books.kept(month, known), books.kept(month.previous, known), booked_in_month(known, month),
            booked_later(known, month), books.status(month, known), imports,
        )  # fmt: skip


NO_BOOKS: Final = MonthBooks()


@dataclass(frozen=True, slots=True)
class MonthsPart:
    """The bills of the part of a span in one calendar month: by team, of unused commitments, and the amounts of
    users."""

    start_ms: int
    end_ms: int
    billed: Sequence[Charge]
    unused: Sequence[Charge]
    by_user: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Readings:
    """The ledger's data for the reports of [start_ms, end_ms), priced by `book`.

    before_ms: the span that this one is compared with: the part of `span_before` up to this one that has records; its
        time is priced by book_before.
    days: how both are compared if it is a part; None: as wholes.
    month: the calendar month that the span is, or begins; None for other spans.
    since_ms: start of the ledger's first record.
    by_day: charges by team, queue, day and more (`accountant.billing.budget_forecast.grouping`), if there is a month.
    of_days: costs by day and team as pages show them, if there is a month and a price book.
    billed, earlier: bills by team of the span and of the one before.
    parts, parts_before: the same of each of their months, if they are of several: amounts are the sums of those.
    unused: unused commitments.
    hourly: usage by team, queue and local hour.
    of_quotas: usage by queue, for `quota_usage`.
    waits: the waits in all teams' queues.
    by_user: amounts by team and user.
    epochs: the epochs of jobs that ended in the span, for each of `scopes`, or for the first ones (MOST_EPOCH_JOBS).
    booked: the bookkeeping of the month.
    candidates: the jobs that left the most GPU time idle in each of `scopes` (team names; None: the whole cluster).
    peaks: hourly maxima of the candidates.
    everyone: all teams of the ledger at present."""

    start_ms: int
    end_ms: int
    before_ms: tuple[int, int]
    days: Days | None
    timezone: str
    book: PriceBook | None
    book_before: PriceBook | None
    policies: Sequence[PolicyVersion]
    month: Month | None
    since_ms: int
    by_day: Sequence[Charge]
    of_days: Mapping[tuple[str, ...], Decimal | None]
    billed: Sequence[Charge]
    earlier: Sequence[Charge]
    parts: Sequence[MonthsPart]
    parts_before: Sequence[MonthsPart]
    unused: Sequence[Charge]
    hourly: Usage
    of_quotas: Usage
    jobs: BilledJobs
    jobs_before: BilledJobs
    waits: tuple[WaitRow, ...]
    epochs: Mapping[str | None, tuple[EpochRow, ...]]
    by_user: Sequence[Part] = ()
    booked: MonthBooks = NO_BOOKS
    scopes: frozenset[str | None] = field(default=frozenset())
    candidates: Mapping[str | None, Sequence[JobRow]] = field(default_factory=dict)
    peaks: dict[JobName, Peak] = field(default_factory=dict)
    everyone: frozenset[str] = frozenset()

    def has(self, team: str | None) -> bool:
        """Whether the report of a team can be made of this; None: of the cluster."""
        return team in self.epochs if team in self.scopes else team not in self.jobs.teams

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes. It counts only the jobs, their rows of held time and the candidates, which are
        most of it."""
        jobs = sum(_ROW_BYTES * (len(jobs.job) + len(jobs.names)) for jobs in (self.jobs, self.jobs_before))
        return jobs + _CANDIDATE_BYTES * sum(map(len, self.candidates.values()))

    @property
    def tz(self) -> ZoneInfo:
        return zone(self.timezone)


def read_data(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    scopes: Collection[str | None] | None = None,
    book_before: PriceBook | None = None,
    *,
    booked: MonthBooks = NO_BOOKS,
    watched: str = "",
) -> Readings:
    """Reads the data for reports.

    scopes: the teams of the reports, None among them for the whole cluster; instead of a collection, None for the
        cluster and every team that held anything.
    book_before: the price book of the span before, if it is another one.
    watched: as in `queue_waits`.

    Raises ValueError for an empty span or an unknown time zone."""
    if start_ms >= end_ms:
        raise ValueError(f"a report needs a span: [{start_ms}, {end_ms}) is empty")
    first_ms, newest_ms = ledger.status().extent
    before_ms, days = compared_span(start_ms, end_ms, (first_ms, newest_ms), zone(timezone))
    book_before = book_before or book
    month = budget_forecast.month_of(start_ms, end_ms, timezone)
    billed, by_job = billed_tables(ledger, book, start_ms, end_ms, (_BY_TEAM, BY_JOB), timezone)
    earlier, by_job_before = billed_tables(ledger, book_before, *before_ms, (_BY_TEAM, BY_JOB), timezone)
    jobs = BilledJobs.of(by_job)
    teams = frozenset((None, *jobs.teams) if scopes is None else scopes)
    candidates = {team: jobs.ranked(team).wasteful(CANDIDATES) for team in teams}
    policies = tuple(ledger.status().policies(start_ms, end_ms))
    by_day = budget_forecast.grouping(version.policy for version in policies[-1:])
    spans = ModelSpans.of(policies, start_ms, end_ms)
    hourly = ledger.usage((start_ms, end_ms), ("team", "queue", "hour"), None, timezone, ())
    parts = _parts(ledger, book, start_ms, end_ms, timezone)
    return Readings(
        start_ms=start_ms,
        end_ms=end_ms,
        before_ms=before_ms,
        days=days,
        timezone=timezone,
        book=book,
        book_before=book_before,
        policies=policies,
        month=month,
        since_ms=first_ms,
        by_day=charge_table(ledger, book, start_ms, end_ms, by_day, None, timezone).charges()
        if month is not None
        else (),
        of_days=displayed_costs(ledger, book, start_ms, end_ms, ("day", "team"), None, timezone).known
        if month is not None and book is not None
        else {},
        billed=billed.charges(),
        earlier=earlier.charges(),
        parts=parts,
        parts_before=_parts(ledger, book_before, *before_ms, timezone),
        unused=unused_commitments(ledger, book, start_ms, end_ms, timezone),
        hourly=hourly,
        of_quotas=ledger.usage(spans.edges, ("queue", *spans.dimensions), None, timezone, ())
        if any(spans.models)
        else hourly,
        jobs=jobs,
        jobs_before=BilledJobs.of(by_job_before),
        waits=queue_waits.queue_waits(ledger.pods(start_ms, end_ms), start_ms, end_ms, None, watched=watched),
        epochs=_epochs(
            ledger, book, jobs, teams, (start_ms, end_ms), timezone, MOST_EPOCH_JOBS if scopes is None else None
        ),
        by_user=[one for part in parts for one in part.by_user] or _of_users(billed, by_job, book),
        booked=booked,
        scopes=teams,
        candidates=candidates,
        peaks=_peaks(ledger, candidates.values(), start_ms, end_ms, timezone),
        everyone=ledger.status().teams,
    )


def _parts(ledger: Moment, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str) -> list[MonthsPart]:
    """The bills of each month of a span; none for a span in one month."""
    spans = list(by_month(start_ms, end_ms, zone(timezone)))
    if len(spans) == 1 or book is None:
        return []
    found = []
    for span in spans:
        billed, by_job = billed_tables(ledger, book, *span, (_BY_TEAM, BY_JOB), timezone)
        unused = unused_commitments(ledger, book, *span, timezone)
        found.append(MonthsPart(*span, billed.charges(), unused, _of_users(billed, by_job, book)))
    return found


def _of_users(billed: ChargeTable, by_job: ChargeTable, book: PriceBook | None) -> Sequence[Part]:
    """The amounts of users in bills by team and by job."""
    if book is None:
        return ()
    of_users = displayed_amounts.keyed(by_job.regrouped(_TEAM_AND_USER).charges())
    return displayed_amounts.parts(displayed_amounts.keyed(billed.charges()), of_users, 1, book.currency)


def _epochs(
    ledger: Moment,
    book: PriceBook | None,
    jobs: BilledJobs,
    scopes: Collection[str | None],
    span: tuple[int, int],
    timezone: str,
    most: int | None,
) -> dict[str | None, tuple[EpochRow, ...]]:
    """The epochs of jobs in each scope, first in the cluster.

    most: once so many jobs are read, the other scopes are left out, as every job is priced apart; None: none is."""
    reported = ledger.epochs((span[0] + 1, span[1] + 1))
    if not reported:
        return dict.fromkeys(scopes, ())
    found: dict[str | None, tuple[EpochRow, ...]] = {}
    for team in sorted(scopes, key=lambda team: (team is not None, team or "")):
        if most is not None and sum(map(len, found.values())) >= most:
            break
        found[team] = job_ranking.rows(
            ledger, book, reported, jobs.ranked(team).named, span, team, timezone, EPOCH_JOBS
        )
    return found


def _peaks(
    ledger: Moment, candidates: Iterable[Sequence[JobRow]], start_ms: int, end_ms: int, timezone: str
) -> dict[JobName, Peak]:
    """The peaks of the candidates of every scope."""
    names = sorted({(row.namespace, row.job) for rows in candidates for row in rows})
    peaks: dict[JobName, Peak] = {}
    for first in range(0, len(names), _AT_ONCE):
        some = frozenset(names[first : first + _AT_ONCE])
        where: Where = {"namespace": {name for name, _ in some}, "job": {job for _, job in some}}
        hourly = ledger.usage((start_ms, end_ms), (*_BY_NAME, "hour"), where, timezone, ())
        peaks |= {name: peak for name, peak in peaks_of(hourly).items() if name[1:3] in some}
    return peaks


TOP = 5
"""Number of jobs in a ranking."""
TOP_USERS = 15
EPOCH_JOBS = 10
"""Number of jobs listed with their epochs."""
MOST_EPOCH_JOBS = 50
"""Number of jobs from which on the data for all teams has the epochs of no further team."""


@dataclass(frozen=True, slots=True)
class Report:
    """A report. Its fields are in the order of the sections.

    team: None for the whole cluster.
    period: accountant.bookkeeping.month_closing.Status.
    before: the headline of the span before, None if the ledger has no records of it.
    before_ms: the span before, or the part of it up to this one that has records.
    by_day: how both are compared if it is a part; None: as wholes.
    budgets, outlook: budgets and forecast of the month that the span is or begins.
    late: whether records arrived after the close; they are in the breakdowns, but not in the statement.
    users, unnamed_users: the largest users, and how many more there are.
    imports: imported time of the cluster.
    details: charges by day and pod, if requested.
    issuer: who invoices it; None if nobody does.
    later: items about this month that are booked in others.
    since_ms: start of the ledger's first record; nothing is known of the time before it.
    by_memory: whether bills count MIG instances by memory slices; other figures count compute slices.
    example_prices: whether the price book has example rows.
    everyone: all teams of the ledger at present, for their colours."""

    statement: Statement
    team: str | None
    start_ms: int
    end_ms: int
    tz: ZoneInfo
    period: str
    late: bool
    headline: Headline
    before: Headline | None
    before_ms: tuple[int, int]
    by_day: Days | None
    accounts: tuple[AccountRow, ...]
    teams: tuple[TeamRow, ...]
    budgets: tuple[BudgetState, ...]
    outlook: Outlook | None
    kinds: tuple[KindRow, ...]
    jobs_by_cost: tuple[JobRow, ...]
    jobs_by_waste: tuple[JobRow, ...]
    epochs: tuple[EpochRow, ...]
    users: tuple[UserRow, ...]
    unnamed_users: int
    daily: tuple[DayRow, ...]
    quotas: tuple[QuotaRow, ...]
    hints: tuple[Hint, ...]
    idle_holders: tuple[JobRow, ...]
    spot: tuple[SpotRow, ...]
    waits: tuple[WaitRow, ...]
    rhythm: HourlyUse
    week: tuple[WeekPart, ...]
    unpriced: tuple[UnpricedRow, ...]
    imports: tuple[ImportRow, ...] = ()
    details: Details | None = None
    issuer: InvoiceIssuer | None = None
    later: BookedItems = NOTHING_BESIDE
    since_ms: int = 0
    by_memory: bool = False
    example_prices: bool = False
    everyone: frozenset[str] = frozenset()

    @property
    def currency(self) -> str | None:
        return self.statement.currency

    @property
    def invoice(self) -> str:
        """The number of the invoice that the report is; "" if it is none."""
        month = self.statement.month
        invoiced = self.issuer is not None and self.team not in (None, IDLE) and self.due_total is not None
        return invoice_number(Month.parse(month), self.team or "") if invoiced and month is not None else ""

    @property
    def issued(self) -> date | None:
        """The date of the invoice, on which its month was closed; None for a draft, and if it is no invoice."""
        closing = self.statement.closing
        return local_date(closing.at_ms, self.tz) if self.invoice and closing is not None else None

    @property
    def payable_by(self) -> date | None:
        """The date by which the invoice is to be paid; None if its issuer states none."""
        return None if self.issuer is None else self.issuer.payable_by(self.issued)

    @property
    def lines(self) -> tuple[StatementLine, ...]:
        """The statement's lines within the scope."""
        return tuple(line for line in self.statement.lines if self.team in (None, line.team))

    @property
    def commitments(self) -> tuple[StatementLine, ...]:
        """Unused commitments within the scope; of all totals only the amount due includes them."""
        return tuple(line for line in self.statement.commitments if self.team in (None, line.team))

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Corrections of earlier months that are booked in this one, within the scope."""
        return tuple(
            correction for correction in self.statement.corrections if self.team in (None, correction.line.team)
        )

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """Credits and charges booked in this month, within the scope."""
        return tuple(adjustment for adjustment in self.statement.adjustments if self.team in (None, adjustment.team))

    @property
    def restated(self) -> dict[str, tuple[int, Decimal]]:
        """Corrections, credits and charges about this month that are booked in later months: their number and sum by
        month of booking, within the scope."""
        by_month: dict[str, tuple[int, Decimal]] = {}
        booked = [(booking.line.team, booking.booked_in, booking.amount) for booking in self.later.corrections]
        booked += [(booking.team, booking.booked_in, booking.amount) for booking in self.later.adjustments]
        for team, booked_in, amount in booked:
            if amount and self.team in (None, team):
                count, total = by_month.get(booked_in, (0, Decimal(0)))
                by_month[booked_in] = count + 1, exact_sum([total, amount])
        return dict(sorted(by_month.items()))

    @property
    def payable(self) -> dict[str, Decimal]:
        """The payable amount of each team within the scope, rounded to the currency's minor unit."""
        return {team: amount for team, amount in self.statement.payable.items() if self.team in (None, team)}

    @property
    def due(self) -> dict[str, Decimal]:
        """Payable plus unused commitments, corrections and adjustments, by billed team within the scope."""
        return {team: amount for team, amount in self.charged.items() if team != IDLE}

    @property
    def not_billed(self) -> Decimal | None:
        """The same of what no team is billed for; None if the scope has nothing of it, or `due_total` is not known."""
        return None if self.due_total is None else self.charged.get(IDLE)

    @property
    def charged(self) -> dict[str, Decimal]:
        """The sums of all charges within the scope; as the team IDLE what is not billed."""
        return {team: amount for team, amount in self.statement.charged.items() if self.team in (None, team)}

    @property
    def booked_beside(self) -> bool:
        """Whether anything is due within the scope besides the span's own GPU time."""
        return bool(self.commitments or self.corrections or self.adjustments)

    @property
    def payable_total(self) -> Decimal | None:
        """The sum of `payable`; None without a price book, or if nothing of the span is metered."""
        return exact_sum(self.payable.values()) if self.currency is not None and self.statement.metered else None

    @property
    def due_total(self) -> Decimal | None:
        """The sum of `due`; None without a price book, or if nothing of the span is metered or booked."""
        known = self.statement.metered or self.booked_beside
        return exact_sum(self.due.values()) if self.currency is not None and known else None


def build(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    team: str | None = None,
    booked: MonthBooks = NO_BOOKS,
    book_before: PriceBook | None = None,
    listing: ChargeListing | None = None,
    watched: str = "",
) -> Report:
    """The report of [start_ms, end_ms).

    team None: of the whole cluster.
    book_before: the price book of the statement of the month before, if it is another one.
    listing: for formats that list every charge.
    watched: as in `queue_waits`.

    Raises ValueError for an empty span or an unknown time zone."""
    readings = read_data(ledger, book, start_ms, end_ms, timezone, (team,), book_before, booked=booked, watched=watched)
    details = None if listing is None else Details.asked(ledger, book, start_ms, end_ms, timezone, listing)
    return made_of(readings, team=team, details=details)


def made_of(
    found: Readings,
    *,
    team: str | None = None,
    details: Details | None = None,
    invoiced_by: InvoiceIssuer | None = None,
) -> Report:
    """Builds the report from data that was read before; see `build`. Raises ValueError for a team that the data does
    not include."""
    if not found.has(team):
        raise ValueError(f"the data was read without the team {team!r}: add it to the scopes")
    start_ms, end_ms, timezone, tz, book = found.start_ms, found.end_ms, found.timezone, found.tz, found.book
    month, policies, booked = found.month, found.policies, found.booked
    standing = build_statement(found.billed, book, policies, start_ms, end_ms, timezone, booked.beside, found.unused)
    parts = _statements(found.parts, book, timezone)
    stated = booked.kept or of_months(standing, parts)
    lines = payable_lines(stated, parts)
    earlier = build_statement(found.earlier, found.book_before, (), *found.before_ms, timezone)
    closed = booked.kept_before
    if closed is not None and (closed.start_ms, closed.end_ms) == found.before_ms:
        earlier = closed
    before = payable_lines(earlier, _statements(found.parts_before, found.book_before, timezone))
    before = before if earlier.metered else []
    jobs = found.jobs.ranked(team)
    jobs_before = found.jobs_before.ranked(team).count if before else 0
    users = report_breakdowns.with_amounts(jobs.users(), (one for one in found.by_user if team in (None, one.team)))
    candidates = found.candidates.get(team, ())
    days, since_ms = found.by_day, found.since_ms
    by_day = found.days if before else None
    of_queues = quotas(policies, found.of_quotas, start_ms, end_ms, tz, since_ms)
    daily = report_breakdowns.daily(found.hourly, start_ms, end_ms, tz, team)
    return Report(
        statement=stated,
        team=team,
        start_ms=start_ms,
        end_ms=end_ms,
        since_ms=since_ms,
        tz=tz,
        period=booked.period or stated.status,
        late=stated.lines != standing.lines,
        headline=report_breakdowns.headline(lines, team, jobs.count),
        before=report_breakdowns.headline(before, team, jobs_before) if before else None,
        before_ms=found.before_ms,
        by_day=by_day,
        accounts=report_breakdowns.accounts(lines, team),
        teams=report_breakdowns.teams(lines, before, team, by_day),
        budgets=budget_forecast.budgets(days, book, policies, team, month, end_ms, timezone, since_ms) if month else (),
        outlook=budget_forecast.outlook(days, book, team, month, start_ms, end_ms, timezone, since_ms)
        if month and book
        else None,
        kinds=report_breakdowns.kinds(lines, team),
        jobs_by_cost=tuple(jobs.dearest(TOP)),
        jobs_by_waste=tuple(candidates[:TOP]),
        epochs=found.epochs.get(team, ()),
        users=tuple(users[:TOP_USERS]),
        unnamed_users=max(0, len(users) - TOP_USERS),
        daily=daily,
        week=week_parts(report_breakdowns.whole_days(daily, found.hourly, found.of_days, since_ms, tz, team)),
        quotas=tuple(row for row in of_queues if team in (None, row.team)),
        hints=savings_hints(candidates, found.peaks),
        idle_holders=tuple(jobs.hardly_used(TOP)),
        spot=jobs.candidates(book, end_ms - 1)[:TOP],
        waits=tuple(row for row in found.waits if team in (None, row.team)),
        rhythm=report_breakdowns.hourly_use(found.hourly, team),
        unpriced=report_breakdowns.unpriced(found.billed, team, book),
        imports=booked.imports,
        details=details,
        issuer=invoiced_by,
        later=booked.later,
        by_memory=book is not None and book.mig_basis == "memory",
        example_prices=book is not None and book.has_examples,
        everyone=found.everyone,
    )


def _statements(parts: Sequence[MonthsPart], book: PriceBook | None, timezone: str) -> list[Statement]:
    return [
        build_statement(part.billed, book, (), part.start_ms, part.end_ms, timezone, unused=part.unused)
        for part in parts
    ]


def report(
    ledger: ReadableLedger,
    books: Bookkeeper,
    start_ms: int,
    end_ms: int,
    timezone: str,
    *,
    month: Month | None = None,
    team: str | None = None,
    listing: ChargeListing | None = None,
    invoiced_by: InvoiceIssuer | None = None,
    watched: str = "",
) -> Report:
    """Reads and builds the report of a span.

    month: the accountant's month that the span is, or begins; if it is closed, the report uses its statement.
    listing: for formats that list every charge.
    invoiced_by: the party that charges, if the report of a team is its invoice.
    watched: as in `queue_waits`."""
    # The report compares with the span before, so rows of both may be needed.
    with ledger.moment(span_before(start_ms, end_ms, zone(timezone))[0], end_ms) as moment:
        found = _read(moment, books, start_ms, end_ms, timezone, month, (team,), watched=watched)
        details = None
        if listing is not None:
            details = Details.asked(moment, found.book, start_ms, end_ms, timezone, listing)
    return made_of(found, team=team, details=details, invoiced_by=invoiced_by)


def readings(
    ledger: ReadableLedger,
    books: Bookkeeper,
    start_ms: int,
    end_ms: int,
    timezone: str,
    month: Month,
    scopes: Collection[str | None] | None = None,
    *,
    watched: str = "",
) -> Readings:
    """Reads the data for reports. scopes: as in `read_data`. month, watched: as in `report`."""
    with ledger.moment(span_before(start_ms, end_ms, zone(timezone))[0], end_ms) as moment:
        return _read(moment, books, start_ms, end_ms, timezone, month, scopes, watched=watched)


def _read(
    moment: Moment,
    books: Bookkeeper,
    start_ms: int,
    end_ms: int,
    timezone: str,
    month: Month | None,
    scopes: Collection[str | None] | None,
    *,
    watched: str,
) -> Readings:
    """Reads the data for reports, with the bookkeeping and the prices of the moment."""
    known, booked = books.books(moment), MonthBooks.of(moment, books, month, start_ms, end_ms)
    before = None if booked.kept_before is None else books.priced_by(booked.kept_before)
    return read_data(
        moment, books.priced_by(booked.kept, known), start_ms, end_ms, timezone, scopes, before, booked=booked,
        watched=watched,
    )  # fmt: skip
