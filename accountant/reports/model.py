"""The report of a span, for the whole cluster or one team: every figure a rendering shows.

It is computed from the ledger's integers and the statement of the whole cluster, so a team's page and the
cluster's page never differ by a cent. Renderings (html, csv) add nothing but form.

`build` asks the ledger a fixed number of questions, whatever the cluster's size, and has no clock: the
same ledger, price book and span give the same report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from zoneinfo import ZoneInfo

from accountant.costs import ACCOUNTS, Charge, charges, quantify
from accountant.ledger import Ledger
from accountant.money import exact_sum
from accountant.periods import Month, days, zone
from accountant.prices import PriceBook
from accountant.reports.hints import HARDLY_USED, Hint, hints, known_well, peaks
from accountant.reports.quota import QuotaRow, quotas
from accountant.reports.tables import (
    AccountRow,
    DayRow,
    Entry,
    Figures,
    JobRow,
    KindRow,
    TeamRow,
    UnpricedRow,
    add_up,
    change,
    group_by,
    part_entries,
    payable_lines,
    share,
)
from accountant.statements import Statement, StatementLine, statement
from accountant.wire import IDLE, Dimension
from agent.units import US_PER_HOUR

TOP = 10
"""Rows of a ranking."""
_HINTS = 6
_CANDIDATES = 25
"""Jobs looked at hour by hour: those that left the most GPU time idle."""


Lines = Sequence[tuple[StatementLine, Entry]]
"""Statement lines, each with its account, time and payable cost."""


@dataclass(frozen=True, slots=True)
class Headline:
    """figures: of the scope (all accounts for the cluster). cost: what the scope's teams pay; unallocated_cost: of
    capacity nobody held (0 for a team); both payable. jobs: workloads that held a GPU."""

    figures: Figures
    cost: Decimal
    unallocated_cost: Decimal
    jobs: int


@dataclass(frozen=True, slots=True)
class Report:
    """See the sections of the module's renderings, which stand in this order.

    team None: the whole cluster. before: the headline of the span before, None where the ledger has
    nothing of it; before_ms: that span."""

    statement: Statement
    team: str | None
    start_ms: int
    end_ms: int
    tz: ZoneInfo
    headline: Headline
    before: Headline | None
    before_ms: tuple[int, int]
    accounts: tuple[AccountRow, ...]
    teams: tuple[TeamRow, ...]
    kinds: tuple[KindRow, ...]
    quotas: tuple[QuotaRow, ...]
    daily: tuple[DayRow, ...]
    jobs_by_cost: tuple[JobRow, ...]
    jobs_by_waste: tuple[JobRow, ...]
    idle_holders: tuple[JobRow, ...]
    hints: tuple[Hint, ...]
    unpriced: tuple[UnpricedRow, ...]

    @property
    def currency(self) -> str | None:
        return self.statement.currency

    @property
    def month(self) -> str | None:
        return self.statement.month

    @property
    def lines(self) -> tuple[StatementLine, ...]:
        """The statement's lines within the scope."""
        return tuple(line for line in self.statement.lines if self.team in (None, line.team))


def build(
    ledger: Ledger,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    team: str | None = None,
) -> Report:
    """The report of [start_ms, end_ms); team None: of the whole cluster.

    Raises ValueError for an empty span or an unknown time zone."""
    if start_ms >= end_ms:
        raise ValueError(f"a report needs a span: [{start_ms}, {end_ms}) is empty")
    tz = zone(timezone)
    month, before_ms = _periods(start_ms, end_ms, tz)
    stated = statement(ledger, book, start_ms, end_ms, timezone, month=month)
    lines = payable_lines(stated)
    before = payable_lines(statement(ledger, book, *before_ms, timezone))
    where: dict[Dimension, Collection[str]] | None = {"team": (team,)} if team is not None else None
    jobs = _jobs(charges(ledger, book, start_ms, end_ms, ("team", "namespace", "job"), None, timezone), team)
    wasteful = sorted(
        (job for job in jobs if job.figures.accounts.allocated_idle),
        key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, _name(job)),
    )
    candidates = wasteful[:_CANDIDATES]
    hourly = (
        ledger.usage(
            start_ms,
            end_ms,
            ("team", "namespace", "job", "hour"),
            {
                "team": {job.team for job in candidates},
                "namespace": {job.namespace for job in candidates},
                "job": {job.job for job in candidates},
            },
            timezone,
        )
        if candidates
        else []
    )
    return Report(
        statement=stated,
        team=team,
        start_ms=start_ms,
        end_ms=end_ms,
        tz=tz,
        headline=_headline(lines, team, len(jobs)),
        before=_headline(before, team, _job_count(ledger, before_ms, where, timezone)) if before else None,
        before_ms=before_ms,
        accounts=_accounts(lines, team),
        teams=_teams(lines, before, team),
        kinds=_kinds(lines, team),
        quotas=_quotas(ledger, start_ms, end_ms, tz, team),
        daily=_daily(ledger, start_ms, end_ms, tz, team),
        jobs_by_cost=tuple(
            sorted(jobs, key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, _name(job)))[:TOP]
        ),
        jobs_by_waste=tuple(wasteful[:TOP]),
        idle_holders=tuple(job for job in wasteful if _hardly_used(job))[:TOP],
        hints=hints(candidates, peaks(hourly))[:_HINTS],
        unpriced=_unpriced(ledger, book, start_ms, end_ms, timezone, where) if stated.unpriced_gpu_us else (),
    )


def _periods(start_ms: int, end_ms: int, tz: ZoneInfo) -> tuple[str | None, tuple[int, int]]:
    """The month's name if the span is one, and the span before: the same stretch of the month before for (the
    beginning of) a month, else the same length."""
    month = Month.of(start_ms, tz)
    first, last = month.span(tz)
    if start_ms == first and end_ms <= last:
        begin, stop = month.previous.span(tz)
        before = (begin, stop if end_ms == last else min(begin + end_ms - start_ms, stop))
        return (str(month) if end_ms == last else None), before
    return None, (start_ms - (end_ms - start_ms), start_ms)


def _headline(lines: Lines, team: str | None, jobs: int) -> Headline:
    figures = add_up(entry for line, entry in lines if team in (None, line.team))
    idle = add_up(entry for line, entry in lines if team is None and line.team == IDLE)
    return Headline(figures, exact_sum([figures.cost, -idle.cost]), idle.cost, jobs)


def _accounts(lines: Lines, team: str | None) -> tuple[AccountRow, ...]:
    scope = [(line.account, entry) for line, entry in lines if team in (None, line.team)]
    costs = {account: figures.cost for account, figures in group_by(scope).items()}
    sums = {name: sum(gpu_us for account, (_, gpu_us, _) in scope if account == name) for name in ACCOUNTS}
    whole = sum(sums.values())
    return tuple(
        AccountRow(name, sums[name], share(sums[name], whole), costs.get(name, Decimal(0)))
        for name in ACCOUNTS
        if sums[name] or team is None
    )


def _teams(lines: Lines, earlier: Lines, team: str | None) -> tuple[TeamRow, ...]:
    """All teams for the cluster, the one for a team (its rank and share are of the cluster all the same)."""
    by_team = group_by((line.team, entry) for line, entry in lines)
    before = group_by((line.team, entry) for line, entry in earlier)
    held = {name: figures for name, figures in by_team.items() if figures.accounts.allocated}
    whole = sum(figures.accounts.allocated for figures in held.values())
    ranked = sorted(held, key=lambda name: (-held[name].accounts.allocated, name))
    rows = [
        TeamRow(
            team=name,
            figures=held[name],
            share=share(held[name].accounts.allocated, whole),
            rank=rank,
            change=change(held[name].cost, before[name].cost) if name in before else None,
        )
        for rank, name in enumerate(ranked, 1)
    ]
    return tuple(row for row in rows if team in (None, row.team))


def _kinds(lines: Lines, team: str | None) -> tuple[KindRow, ...]:
    scope = [(line, entry) for line, entry in lines if team in (None, line.team)]
    figures = group_by(((line.gpu_model, line.capacity_type), entry) for line, entry in scope)
    prices: dict[tuple[str, str], dict[str, Decimal]] = {}
    for line, _ in scope:
        if line.price_row is not None and line.unit_price is not None:
            prices.setdefault((line.gpu_model, line.capacity_type), {})[line.price_row] = line.unit_price
    return tuple(
        KindRow(
            *key,
            figures=figures[key],
            unit_prices=tuple(dict.fromkeys(price for _, price in sorted(prices.get(key, {}).items()))),
        )
        for key in sorted(figures)
    )


def _jobs(found: list[Charge], team: str | None) -> list[JobRow]:
    parts = quantify(((*charge.key, charge.account), charge) for charge in found)
    return [
        JobRow(name, namespace, job, figures)
        for (name, namespace, job), figures in group_by(part_entries(parts)).items()
        if figures.accounts.allocated and job and team in (None, name)
    ]


def _job_count(
    ledger: Ledger, span: tuple[int, int], where: Mapping[Dimension, Collection[str]] | None, timezone: str
) -> int:
    lines = ledger.usage(*span, ("team", "namespace", "job"), where, timezone)
    return sum(1 for line in lines if line.key["job"] and line.accounts_gpu_us.allocated)


def _quotas(ledger: Ledger, start_ms: int, end_ms: int, tz: ZoneInfo, team: str | None) -> tuple[QuotaRow, ...]:
    policies = ledger.policies(start_ms, end_ms)
    if not policies:
        return ()
    hourly = ledger.usage(start_ms, end_ms, ("queue", "hour"), None, tz.key)
    return tuple(row for row in quotas(policies, hourly, start_ms, end_ms, tz) if team in (None, row.team))


def _daily(ledger: Ledger, start_ms: int, end_ms: int, tz: ZoneInfo, team: str | None) -> tuple[DayRow, ...]:
    allocated: dict[str, dict[str, int]] = {}
    capacity: dict[str, int] = {}
    for line in ledger.usage(start_ms, end_ms, ("day", "team"), None, tz.key):
        day, name, accounts = line.key["day"], line.key["team"], line.accounts_gpu_us
        capacity[day] = capacity.get(day, 0) + accounts.total - accounts.down
        if accounts.allocated and team in (None, name):
            allocated.setdefault(day, {})[name] = accounts.allocated
    return tuple(
        DayRow(day, start, end, allocated.get(day.isoformat(), {}), capacity.get(day.isoformat(), 0))
        for day, start, end in days(start_ms, end_ms, tz)
    )


def _hardly_used(job: JobRow) -> bool:
    utilisation = job.figures.utilisation
    return (
        utilisation is not None
        and utilisation < HARDLY_USED
        and known_well(job.figures.accounts)
        and job.figures.accounts.allocated >= US_PER_HOUR
    )


def _unpriced(
    ledger: Ledger, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str,
    where: Mapping[Dimension, Collection[str]] | None,
) -> tuple[UnpricedRow, ...]:  # fmt: skip
    sums: dict[tuple[str, str, str, str], int] = {}
    for charge in charges(ledger, book, start_ms, end_ms, (), where, timezone):
        if charge.unpriced:
            sums[charge.place] = sums.get(charge.place, 0) + charge.gpu_us
    return tuple(UnpricedRow(*place, gpu_us=sums[place]) for place in sorted(sums))


def _name(job: JobRow) -> tuple[str, str, str]:
    return job.team, job.namespace, job.job
