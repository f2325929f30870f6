"""The report of a span, for the whole cluster or one team: every figure a rendering shows.

It is computed from the ledger's integers and the statement of the whole cluster, so a team's page and the
cluster's page never differ by a cent. Renderings add nothing but form.

`build` asks the ledger a handful of questions, whatever the cluster's size, and has no clock: the same ledger, price
book and span give the same report. Ask a snapshot, so that they are all answered from the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol
from zoneinfo import ZoneInfo

from accountant.bills import bills, unused_commitments
from accountant.budgets import BY as BY_DAY
from accountant.costs import Charge, charges, pieces, regrouped
from accountant.held import Held, Hours
from accountant.importing.record import ImportRow
from accountant.issuer import Issuer
from accountant.jobs import EpochQuestions
from accountant.periods import Month, zone
from accountant.prices import PriceBook
from accountant.reports import outlook, progress, queueing, ranking, rhythm, sections
from accountant.reports.focus.charges import Details
from accountant.reports.hints import Hint, hints
from accountant.reports.outlook import Outlook
from accountant.reports.progress import EpochRow
from accountant.reports.queueing import WaitRow
from accountant.reports.quota import QuotaRow, quotas
from accountant.reports.ranking import Ranking
from accountant.reports.rhythm import Rhythm
from accountant.reports.sections import BY_JOB, Headline
from accountant.reports.spot import SpotRow
from accountant.reports.tables import (
    AccountRow,
    DayRow,
    JobRow,
    KindRow,
    TeamRow,
    UnpricedRow,
    UserRow,
    payable_lines,
)
from accountant.statements import NOTHING_BESIDE, Adjustment, Beside, Correction, Statement, StatementLine
from accountant.statements import build as build_statement
from accountant.waits import KnownPod
from accountant.wire import BudgetState, Dimension

TOP = 5
"""Jobs of a ranking."""
TOP_USERS = 15
EPOCH_JOBS = 10
"""Jobs that report their progress."""
HINTS = 6
_BY_TEAM: tuple[Dimension, ...] = ("team",)
_CANDIDATES = 25
"""Jobs looked at hour by hour: those that left the most GPU time idle."""


class Asked(EpochQuestions, Protocol):
    """What a report is made from: accountant.store.snapshot.Snapshot."""

    def held(self, edges: Sequence[int], timezone: str = "UTC") -> Held:
        """What every holder held in each stretch between two neighbouring edges."""
        ...

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        """What `usage` says by team, queue and hour, as columns."""
        ...

    def pods(self, start_ms: int, end_ms: int) -> list[KnownPod]:
        """Those that existed in the span."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """See the sections of the module's renderings, which stand in this order.

    team None: the whole cluster. period: accountant.closing.Status. before: the headline of the span before, None
    where the ledger has nothing of it; before_ms: that span. budgets, outlook: of the month that the span is or
    begins. late: records that came after the close are in the breakdowns, and not in the statement. users,
    unnamed_users: the largest, and how many more. imports: what of the cluster's time no agent measured.
    details: charges by day and pod, where they were asked for."""

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
    rhythm: Rhythm
    unpriced: tuple[UnpricedRow, ...]
    imports: tuple[ImportRow, ...] = ()
    details: Details | None = None

    @property
    def currency(self) -> str | None:
        return self.statement.currency

    @property
    def lines(self) -> tuple[StatementLine, ...]:
        """The statement's lines within the scope."""
        return tuple(line for line in self.statement.lines if self.team in (None, line.team))

    @property
    def commitments(self) -> tuple[StatementLine, ...]:
        """GPU time paid for in advance and not used, within the scope: in no total but what is due."""
        return tuple(line for line in self.statement.commitments if self.team in (None, line.team))

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """Of earlier months, booked in this one, within the scope."""
        return tuple(one for one in self.statement.corrections if self.team in (None, one.line.team))

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """Credits and charges booked in this month, within the scope."""
        return tuple(one for one in self.statement.adjustments if self.team in (None, one.team))

    @property
    def payable(self) -> dict[str, Decimal]:
        """By team within the scope, in minor units."""
        return {team: amount for team, amount in self.statement.payable.items() if self.team in (None, team)}

    @property
    def due(self) -> dict[str, Decimal]:
        """Payable with corrections and adjustments, by team within the scope."""
        return {team: amount for team, amount in self.statement.due.items() if self.team in (None, team)}


def build(
    ledger: Asked,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    team: str | None = None,
    kept: Statement | None = None,
    beside: Beside = NOTHING_BESIDE,
    period: str = "",
    issuer: Issuer | None = None,
    imports: tuple[ImportRow, ...] = (),
) -> Report:
    """The report of [start_ms, end_ms); team None: of the whole cluster. kept: the statement of a closed month;
    without it, as the ledger stands, with what is booked `beside`. period: what the books say of the month.
    issuer: whose charges they are, for forms that list every charge. imports: see Report.

    Raises ValueError for an empty span or an unknown time zone."""
    if start_ms >= end_ms:
        raise ValueError(f"a report needs a span: [{start_ms}, {end_ms}) is empty")
    tz = zone(timezone)
    before_ms = span_before(start_ms, end_ms, tz)
    policies = ledger.policies(start_ms, end_ms)
    month, since = outlook.month_of(start_ms, end_ms, timezone), ledger.extent()[0]
    by_team, by_day = _counted(ledger, book, start_ms, end_ms, timezone, daily=month is not None)
    found = bills(ledger, book, start_ms, end_ms, _BY_TEAM, timezone, by_team)
    earlier = bills(ledger, book, *before_ms, _BY_TEAM, timezone)
    unused = unused_commitments(ledger, book, start_ms, end_ms, timezone)
    standing = build_statement(found, book, policies, start_ms, end_ms, timezone, beside, unused)
    stated = kept or standing
    lines = payable_lines(stated)
    before = payable_lines(build_statement(earlier, book, (), *before_ms, timezone))
    hourly = ledger.hours(start_ms, end_ms, timezone)
    jobs = _ranked(ledger, book, start_ms, end_ms, timezone, team)
    jobs_before = len(_ranked(ledger, book, *before_ms, timezone, team)) if before else 0
    users = jobs.users()
    candidates = jobs.wasteful(_CANDIDATES)
    return Report(
        statement=stated,
        team=team,
        start_ms=start_ms,
        end_ms=end_ms,
        tz=tz,
        period=period or stated.status,
        late=stated.lines != standing.lines,
        headline=sections.headline(lines, team, len(jobs)),
        before=sections.headline(before, team, jobs_before) if before else None,
        before_ms=before_ms,
        accounts=sections.accounts(lines, team),
        teams=sections.teams(lines, before, team),
        budgets=outlook.budgets(by_day, book, policies, team, month, end_ms, timezone, since) if month else (),
        outlook=outlook.outlook(by_day, team, month, start_ms, end_ms, timezone, since) if month and book else None,
        kinds=sections.kinds(lines, team),
        jobs_by_cost=tuple(jobs.dearest(TOP)),
        jobs_by_waste=tuple(candidates[:TOP]),
        epochs=progress.rows(ledger, book, jobs.named, (start_ms, end_ms), team, timezone, EPOCH_JOBS),
        users=tuple(users[:TOP_USERS]),
        unnamed_users=max(0, len(users) - TOP_USERS),
        daily=sections.daily(hourly, start_ms, end_ms, tz, team),
        quotas=tuple(row for row in quotas(policies, hourly, start_ms, end_ms, tz) if team in (None, row.team)),
        hints=hints(candidates, sections.peaks_of(ledger, candidates, start_ms, end_ms, timezone))[:HINTS],
        idle_holders=tuple(jobs.hardly_used(TOP)),
        spot=jobs.candidates(book, end_ms - 1)[:TOP],
        waits=queueing.queue_waits(ledger.pods(start_ms, end_ms), start_ms, end_ms, team),
        rhythm=rhythm.rhythm(hourly, team),
        unpriced=sections.unpriced(found, team),
        imports=imports,
        details=Details.asked(ledger, book, start_ms, end_ms, timezone, issuer) if issuer is not None else None,
    )


def _counted(
    ledger: Asked, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str, *, daily: bool
) -> tuple[list[Charge], list[Charge]]:
    """Charges by team, and BY_DAY where they are wanted: one reading for both, but where commitments divide them."""
    span = (start_ms, end_ms)
    if not daily:
        return charges(ledger, book, *span, _BY_TEAM, None, timezone), []
    fine = charges(ledger, book, *span, BY_DAY, None, timezone)
    if book is not None and book.commits(*span):
        return charges(ledger, book, *span, _BY_TEAM, None, timezone), fine
    return regrouped(fine, BY_DAY, _BY_TEAM), fine


def _ranked(
    ledger: Asked, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str, team: str | None
) -> Ranking:
    """Jobs by what they are billed. Where who pays, or at which price, depends on more than who held what where and
    when, all charges are looked at one by one."""
    if book is not None and not book.plain(start_ms, end_ms):
        return ranking.of_charges(bills(ledger, book, start_ms, end_ms, BY_JOB, timezone), team)
    spans = pieces(book, start_ms, end_ms)
    held = ledger.held((start_ms, *(end for _, end in spans)), timezone)
    prices = [
        [book.unit_price(place.gpu_model, start, *place[1:]) if book else None for place in held.places]
        for start, _ in spans
    ]
    return ranking.ranking(held, prices, team)


def span_before(start_ms: int, end_ms: int, tz: ZoneInfo) -> tuple[int, int]:
    """For a month the one before, for the beginning of a month the same stretch of that, else the same length."""
    month = Month.of(start_ms, tz)
    first, last = month.span(tz)
    if start_ms == first and end_ms <= last:
        begin, stop = month.previous.span(tz)
        return begin, stop if end_ms == last else min(begin + end_ms - start_ms, stop)
    return start_ms - (end_ms - start_ms), start_ms
