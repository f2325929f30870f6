"""The report of a span, for the whole cluster or one team: every figure a rendering shows.

It is computed from the ledger's integers and the statement of the whole cluster, so a team's page and the
cluster's page never differ by a cent. Renderings (html, csv) add nothing but form.

`build` asks the ledger four times (and once more where a price changes), whatever the cluster's size, and has no
clock: the same ledger, price book and span give the same report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from zoneinfo import ZoneInfo

from accountant.bills import bills, unused_commitments
from accountant.costs import ACCOUNTS, Charge, Place, quantify
from accountant.ledger import Ledger
from accountant.money import exact_sum
from accountant.periods import Month, days, zone
from accountant.prices import PriceBook
from accountant.reports.hints import HARDLY_USED, Hint, Peak, hints, known_well, peaks
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
from accountant.statements import NOTHING_BESIDE, Beside, Statement, StatementLine
from accountant.statements import build as build_statement
from accountant.wire import IDLE, Dimension, UsageLine
from agent.units import US_PER_HOUR

TOP = 10
"""Rows of a ranking."""
_HINTS = 6
_BY_JOB: tuple[Dimension, ...] = ("team", "namespace", "job")
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
    kept: Statement | None = None,
    beside: Beside = NOTHING_BESIDE,
) -> Report:
    """The report of [start_ms, end_ms); team None: of the whole cluster. kept: the statement of a closed month;
    without it, as the ledger stands, with what is booked `beside`.

    Raises ValueError for an empty span or an unknown time zone."""
    if start_ms >= end_ms:
        raise ValueError(f"a report needs a span: [{start_ms}, {end_ms}) is empty")
    tz = zone(timezone)
    before_ms = _span_before(start_ms, end_ms, tz)
    policies = ledger.policies(start_ms, end_ms)
    found = bills(ledger, book, start_ms, end_ms, _BY_JOB, timezone)
    earlier = bills(ledger, book, *before_ms, _BY_JOB, timezone)
    unused = unused_commitments(ledger, book, start_ms, end_ms, timezone)
    stated = kept or build_statement(found, book, policies, start_ms, end_ms, timezone, beside, unused)
    lines = payable_lines(stated)
    before = payable_lines(build_statement(earlier, book, (), *before_ms, timezone))
    hourly = ledger.usage(start_ms, end_ms, ("team", "queue", "hour"), None, timezone)
    jobs = _jobs(found, team)
    wasteful = sorted(
        (job for job in jobs if job.figures.accounts.allocated_idle),
        key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, _name(job)),
    )
    candidates = wasteful[:_CANDIDATES]
    return Report(
        statement=stated,
        team=team,
        start_ms=start_ms,
        end_ms=end_ms,
        tz=tz,
        headline=_headline(lines, team, len(jobs)),
        before=_headline(before, team, len(_jobs(earlier, team))) if before else None,
        before_ms=before_ms,
        accounts=_accounts(lines, team),
        teams=_teams(lines, before, team),
        kinds=_kinds(lines, team),
        quotas=tuple(row for row in quotas(policies, hourly, start_ms, end_ms, tz) if team in (None, row.team)),
        daily=_daily(hourly, start_ms, end_ms, tz, team),
        jobs_by_cost=tuple(
            sorted(jobs, key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, _name(job)))[:TOP]
        ),
        jobs_by_waste=tuple(wasteful[:TOP]),
        idle_holders=tuple(job for job in wasteful if _hardly_used(job))[:TOP],
        hints=hints(candidates, _peaks(ledger, candidates, start_ms, end_ms, timezone))[:_HINTS],
        unpriced=_unpriced(found, team),
    )


def _span_before(start_ms: int, end_ms: int, tz: ZoneInfo) -> tuple[int, int]:
    """For a month the one before, for the beginning of a month the same stretch of that, else the same length."""
    month = Month.of(start_ms, tz)
    first, last = month.span(tz)
    if start_ms == first and end_ms <= last:
        begin, stop = month.previous.span(tz)
        return begin, stop if end_ms == last else min(begin + end_ms - start_ms, stop)
    return start_ms - (end_ms - start_ms), start_ms


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


def _peaks(
    ledger: Ledger, jobs: Sequence[JobRow], start_ms: int, end_ms: int, timezone: str
) -> dict[tuple[str, str, str], Peak]:
    if not jobs:
        return {}
    where: dict[Dimension, Collection[str]] = {
        "team": {job.team for job in jobs},
        "namespace": {job.namespace for job in jobs},
        "job": {job.job for job in jobs},
    }
    return peaks(ledger.usage(start_ms, end_ms, (*_BY_JOB, "hour"), where, timezone))


def _daily(
    hourly: Iterable[UsageLine], start_ms: int, end_ms: int, tz: ZoneInfo, team: str | None
) -> tuple[DayRow, ...]:
    allocated: dict[str, dict[str, int]] = {}
    capacity: dict[str, int] = {}
    for line in hourly:
        day, name, accounts = line.key["hour"].split("T")[0], line.key["team"], line.accounts_gpu_us
        capacity[day] = capacity.get(day, 0) + accounts.total - accounts.down
        if accounts.allocated and team in (None, name):
            teams = allocated.setdefault(day, {})
            teams[name] = teams.get(name, 0) + accounts.allocated
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


def _unpriced(found: Iterable[Charge], team: str | None) -> tuple[UnpricedRow, ...]:
    sums: dict[Place, int] = {}
    for charge in found:
        if charge.unpriced and team in (None, charge.key[0]):
            sums[charge.place] = sums.get(charge.place, 0) + charge.gpu_us
    return tuple(UnpricedRow(*place, gpu_us=sums[place]) for place in sorted(sums))


def _name(job: JobRow) -> tuple[str, str, str]:
    return job.team, job.namespace, job.job
