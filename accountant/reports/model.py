"""The report of a span, for the whole cluster or one team: every figure a rendering shows.

It is computed from the ledger's integers and the statement of the whole cluster, so a team's page and the
cluster's page never differ by a cent. Renderings add nothing but form.

What is asked of the ledger is accountant.reports.readings; `build` asks it for one report, `made_of` makes reports of
every scope of what was read once. There is no clock: the same ledger, price book and span give the same report. Ask a
snapshot, so that all questions are answered from the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from zoneinfo import ZoneInfo

from accountant.books.held import repeated
from accountant.books.issuer import Issuer
from accountant.books.payable import payable_lines
from accountant.books.quota import QuotaRow, quotas
from accountant.books.statements import NOTHING_BESIDE, Adjustment, Beside, Correction, Statement, StatementLine
from accountant.books.statements import build as build_statement
from accountant.importing.record import ImportRow
from accountant.money import exact_sum
from accountant.prices.book import PriceBook
from accountant.reports import outlook, progress, rhythm, sections
from accountant.reports.focus.charges import Details
from accountant.reports.hints import Hint, hints
from accountant.reports.outlook import Outlook
from accountant.reports.progress import EpochRow
from accountant.reports.queueing import WaitRow
from accountant.reports.readings import CANDIDATES, Asked, Readings, read
from accountant.reports.rhythm import Rhythm
from accountant.reports.sections import Headline
from accountant.reports.spot import SpotRow
from accountant.reports.tables import (
    AccountRow,
    DayRow,
    JobRow,
    KindRow,
    TeamRow,
    UnpricedRow,
    UserRow,
)
from accountant.wire import BudgetState
from accountant.work.jobs import EpochQuestions

TOP = 5
"""Jobs of a ranking."""
TOP_USERS = 15
EPOCH_JOBS = 10
"""Jobs that report their progress."""
HINTS = 6


@dataclass(frozen=True, slots=True)
class Report:
    """See the sections of the module's renderings, which stand in this order.

    team None: the whole cluster. period: accountant.books.closing.Status. before: the headline of the span before, None
    where the ledger has nothing of it; before_ms: that span. budgets, outlook: of the month that the span is or
    begins. late: records that came after the close are in the breakdowns, and not in the statement. users,
    unnamed_users: the largest, and how many more. imports: what of the cluster's time no agent measured.
    details: charges by day and pod, where they were asked for. later: what is booked about the month in others.
    by_memory: what is billed counts MIG instances by their memory slices; what is read beside it, by compute slices."""

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
    later: Beside = NOTHING_BESIDE
    by_memory: bool = False

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
    def restated(self) -> dict[str, tuple[int, Decimal]]:
        """By the month in which it was booked: how many corrections, credits and charges about this one, and their sum,
        within the scope."""
        found: dict[str, tuple[int, Decimal]] = {}
        booked = [(one.line.team, one.booked_in, one.amount) for one in self.later.corrections]
        booked += [(one.team, one.booked_in, one.amount) for one in self.later.adjustments]
        for team, booked_in, amount in booked:
            if amount and self.team in (None, team):
                count, total = found.get(booked_in, (0, Decimal(0)))
                found[booked_in] = count + 1, exact_sum([total, amount])
        return dict(sorted(found.items()))

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
    kept_before: Statement | None = None,
    book_before: PriceBook | None = None,
    beside: Beside = NOTHING_BESIDE,
    later: Beside = NOTHING_BESIDE,
    period: str = "",
    issuer: Issuer | None = None,
    imports: tuple[ImportRow, ...] = (),
) -> Report:
    """The report of [start_ms, end_ms); team None: of the whole cluster. kept: the statement of a closed month;
    without it, as the ledger stands, with what is booked `beside`. kept_before, book_before: the statement of the month
    before, where that is closed, and the price book that it was made with, where it is another. period: what the
    books say of the month. issuer: whose charges they are, for forms that list every charge. imports, later: see
    Report.

    Raises ValueError for an empty span or an unknown time zone."""
    found = read(ledger, book, start_ms, end_ms, timezone, (team,), book_before)
    details = Details.asked(ledger, book, start_ms, end_ms, timezone, issuer) if issuer is not None else None
    return made_of(
        found, ledger, team=team, kept=kept, kept_before=kept_before, beside=beside, later=later, period=period,
        imports=imports, details=details,
    )  # fmt: skip


def made_of(
    found: Readings,
    ledger: EpochQuestions,
    *,
    team: str | None = None,
    kept: Statement | None = None,
    kept_before: Statement | None = None,
    beside: Beside = NOTHING_BESIDE,
    later: Beside = NOTHING_BESIDE,
    period: str = "",
    imports: tuple[ImportRow, ...] = (),
    details: Details | None = None,
) -> Report:
    """The report of the readings' span; see `build`. ledger: asked for the epochs of jobs that reported any, of which
    ten are shown. Raises ValueError for a team that the readings are not of."""
    if team not in found.scopes and team in found.jobs.held.teams:
        raise ValueError(f"the readings are not those of {team}")
    start_ms, end_ms, timezone, tz, book = found.start_ms, found.end_ms, found.timezone, found.tz, found.book
    month, policies = found.month, found.policies
    standing = build_statement(found.billed, book, policies, start_ms, end_ms, timezone, beside, found.unused)
    stated = kept or standing
    lines = payable_lines(stated)
    earlier = build_statement(found.earlier, found.book_before, (), *found.before_ms, timezone)
    if kept_before is not None and (kept_before.start_ms, kept_before.end_ms) == found.before_ms:
        earlier = kept_before
    before = payable_lines(earlier)
    jobs = found.jobs.ranked(team)
    jobs_before = len(found.jobs_before.ranked(team)) if before else 0
    users = jobs.users()
    candidates = jobs.wasteful(CANDIDATES)
    days, since_ms = found.by_day, found.since_ms
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
        before_ms=found.before_ms,
        accounts=sections.accounts(lines, team),
        teams=sections.teams(lines, before, team),
        budgets=outlook.budgets(days, book, policies, team, month, end_ms, timezone, since_ms) if month else (),
        outlook=outlook.outlook(days, team, month, start_ms, end_ms, timezone, since_ms) if month and book else None,
        kinds=sections.kinds(lines, team),
        jobs_by_cost=tuple(jobs.dearest(TOP)),
        jobs_by_waste=tuple(candidates[:TOP]),
        epochs=progress.rows(ledger, book, found.epochs, jobs.named, (start_ms, end_ms), team, timezone, EPOCH_JOBS),
        users=tuple(users[:TOP_USERS]),
        unnamed_users=max(0, len(users) - TOP_USERS),
        daily=sections.daily(found.hourly, start_ms, end_ms, tz, team),
        quotas=tuple(row for row in quotas(policies, found.hourly, start_ms, end_ms, tz) if team in (None, row.team)),
        hints=hints(candidates, found.peaks)[:HINTS],
        idle_holders=tuple(jobs.hardly_used(TOP)),
        spot=jobs.candidates(book, end_ms - 1)[:TOP],
        waits=tuple(row for row in found.waits if team in (None, row.team)),
        rhythm=rhythm.rhythm(found.hourly, team, repeated(start_ms, end_ms, timezone)),
        unpriced=sections.unpriced(found.billed, team),
        imports=imports,
        details=details,
        later=later,
        by_memory=book is not None and book.mig_basis == "memory",
    )
