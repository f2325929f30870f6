"""Computes the rows of a report's tables: headline, accounts, teams, GPU kinds, jobs, users, days, hours.

Tables of statement lines are sums of the same payable amounts, so their rows and columns agree to the cent. Jobs and
users are finer than statement lines; their costs are exact. Time is added as integers. Shares and utilisation are
computed from the sums, and are None if the divisor is 0."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import TypeAlias, TypeVar, cast
from zoneinfo import ZoneInfo

from accountant.billing.charge import ALLOCATED, Account, Charge, PricedTime, quantify
from accountant.billing.displayed_amounts import Part
from accountant.billing.statements import Entry, StatementLine
from accountant.core.periods import Days, days, hour_of_day
from accountant.ledger.usage import ACCOUNTS, HELD, Usage
from accountant.prices.price_book import PriceBook
from accountant.prices.unit_prices import Place
from accountant.reports.week_parts import WholeDay, is_counted
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from gputally.base.money import exact_sum, sum_if_known

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TimeAndCost:
    """GPU time and cost of a team, a job, a kind of GPU or another group.

    cost: the cost of all billed time with a price; rounded to the currency's minor unit for sums of statement lines,
        exact for jobs.
    idle_cost: the part of `cost` for allocated-idle time.
    unpriced_us: billed time without a price.
    idle_unpriced_us: the allocated-idle part of `unpriced_us`."""

    accounts: Accounts
    cost: Decimal
    idle_cost: Decimal
    unpriced_us: int
    idle_unpriced_us: int

    @property
    def utilisation(self) -> float | None:
        """Busy share of the allocated time whose use is known."""
        return self.accounts.utilisation


@dataclass(frozen=True, slots=True)
class SpanChange:
    """The change from the span before, or by day from the part of it that has records.

    absolute: None if it is by day. relative: None if the earlier value was 0."""

    absolute: Decimal | None
    relative: float | None


@dataclass(frozen=True, slots=True)
class TeamRow:
    """One team's row in a report.

    rank: by allocated GPU time, 1 is the most.
    share: the team's part of the cluster's allocated GPU time.
    change: the change of the cost from the span before; None if there is none, or if some time of either span
        has no price."""

    team: str
    figures: TimeAndCost
    share: float | None
    rank: int
    change: SpanChange | None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One account of the capacity. unpriced_us: billed time that is not in the cost."""

    account: Account
    gpu_us: int
    share: float | None
    cost: Decimal
    unpriced_us: int = 0


@dataclass(frozen=True, slots=True)
class KindRow:
    """One GPU model of one capacity type. unit_prices: the prices that applied, by row id; empty if nothing was billed,
    or nothing has a price."""

    gpu_model: str
    capacity_type: str
    figures: TimeAndCost
    unit_prices: tuple[Decimal, ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One workload of one team in one cluster. gpu_models: the models of the GPUs that it held."""

    team: str
    namespace: str
    job: str
    figures: TimeAndCost
    cluster: str = ""
    gpu_models: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class UserRow:
    """A user who ran jobs, as named by the jobs; "" for jobs without a user.

    shown: the figures with the amounts that pages show; None without a price book."""

    user: str
    jobs: int
    figures: TimeAndCost
    shown: TimeAndCost | None = None


@dataclass(frozen=True, slots=True)
class DayRow:
    """One local day (cut to the span): allocated GPU-µs by team, and the capacity without down time.

    unknown: the part of the day's GPU time, from 0 to 1, that is not metered; 1 if there are no records of the day."""

    day: date
    start_ms: int
    end_ms: int
    allocated_us: Mapping[str, int]
    capacity_us: int
    unknown: float


@dataclass(frozen=True, slots=True)
class UnpricedRow:
    """GPUs that match no row of the price book. near_row, near_model: the row that nearly matches; "" without one."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str
    gpu_us: int
    near_row: str = ""
    near_model: str = ""


def share(part: int, whole: int) -> float | None:
    """part / whole; None if whole is 0."""
    return part / whole if whole else None


def change(now: Decimal, before: Decimal) -> SpanChange:
    return SpanChange(exact_sum([now, -before]), float((now - before) / before) if before else None)


def part_entries(parts: Mapping[tuple[str, ...], Iterable[PricedTime]]) -> list[tuple[tuple[str, ...], Entry]]:
    """Returns (group, entry) pairs. The last element of each key in `parts` is the account; it moves from the key into
    the entry."""
    return [
        (group[:-1], (cast(Account, group[-1]), part.gpu_us, part.cost))
        for group, several in parts.items()
        for part in several
    ]


def add_up(entries: Iterable[Entry]) -> TimeAndCost:
    """The sum of all entries."""
    sums: dict[str, int] = {}
    costs: list[Decimal] = []
    idle: list[Decimal] = []
    unpriced = idle_unpriced = 0
    for account, gpu_us, cost in entries:
        sums[account] = sums.get(account, 0) + gpu_us
        if cost is None:
            unpriced += gpu_us
            idle_unpriced += gpu_us if account == "allocated_idle" else 0
            continue
        costs.append(cost)
        if account == "allocated_idle":
            idle.append(cost)
    return TimeAndCost(Accounts(**sums), exact_sum(costs), exact_sum(idle), unpriced, idle_unpriced)


def group_by(entries: Iterable[tuple[K, Entry]]) -> dict[K, TimeAndCost]:
    """The sum per group, in order of first appearance."""
    groups: dict[K, list[Entry]] = {}
    for group, entry in entries:
        groups.setdefault(group, []).append(entry)
    return {group: add_up(several) for group, several in groups.items()}


BY_JOB: tuple[Dimension, ...] = ("team", "namespace", "job", "user", "cluster")

Lines: TypeAlias = Sequence[tuple[StatementLine, Entry]]
"""Statement lines, each with its account, time and payable cost."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The report's totals.

    figures: all time of the scope (for the cluster: all accounts, teams and platform together).
    cost: what the scope's teams pay.
    unpriced_us: billed time that is not in `cost`.
    platform: what no team pays (0 for a team): unallocated capacity, and start-up time that the price book assigns to
        the cluster. Costs are payable.
    jobs: workloads that held a GPU."""

    figures: TimeAndCost
    cost: Decimal
    unpriced_us: int
    teams: TimeAndCost
    platform: TimeAndCost
    jobs: int

    @property
    def unallocated_cost(self) -> Decimal:
        """The cost of capacity without holder and payer."""
        return exact_sum([self.platform.cost, -self.platform.idle_cost])

    @property
    def unallocated_unpriced_us(self) -> int:
        return self.platform.unpriced_us - self.platform.idle_unpriced_us


def headline(lines: Lines, team: str | None, jobs: int) -> Headline:
    figures = add_up(entry for line, entry in lines if team in (None, line.team))
    teams = add_up(entry for line, entry in lines if (line.team != IDLE if team is None else line.team == team))
    platform = add_up(entry for line, entry in lines if team is None and line.team == IDLE)
    return Headline(figures, teams.cost, teams.unpriced_us, teams, platform, jobs)


def accounts(lines: Lines, team: str | None) -> tuple[AccountRow, ...]:
    scope = [(line.account, entry) for line, entry in lines if team in (None, line.team)]
    by_account = {account: (figures.cost, figures.unpriced_us) for account, figures in group_by(scope).items()}
    sums = {name: sum(gpu_us for account, (_, gpu_us, _) in scope if account == name) for name in ACCOUNTS}
    whole = sum(sums.values())
    return tuple(
        AccountRow(name, sums[name], share(sums[name], whole), *by_account.get(name, (Decimal(0), 0)))
        for name in ACCOUNTS
        if sums[name] or team is None
    )


def teams(lines: Lines, earlier: Lines, team: str | None, by_day: Days | None = None) -> tuple[TeamRow, ...]:
    """For the cluster all teams that held or pay for anything, for a team only that one; rank and share always refer to
    the whole cluster. by_day: None to compare the sums of both spans."""
    by_team = group_by((line.team, entry) for line, entry in lines)
    before = group_by((line.team, entry) for line, entry in earlier)
    holders = {
        name: figures
        for name, figures in by_team.items()
        if name != IDLE and (figures.accounts.allocated or figures.cost or figures.unpriced_us)
    }
    allocated_us = sum(figures.accounts.allocated for figures in holders.values())
    ranked = sorted(holders, key=lambda name: (-holders[name].accounts.allocated, name))
    rows = [
        TeamRow(
            team=name,
            figures=holders[name],
            share=share(holders[name].accounts.allocated, allocated_us),
            rank=rank,
            change=_change(holders[name], before.get(name), by_day),
        )
        for rank, name in enumerate(ranked, 1)
    ]
    return tuple(row for row in rows if team in (None, row.team))


def _change(now: TimeAndCost, before: TimeAndCost | None, by_day: Days | None) -> SpanChange | None:
    """The change of the cost; None if there is no earlier value, or one of the costs is incomplete."""
    if before is None or now.unpriced_us or before.unpriced_us:
        return None
    if by_day is not None:
        return replace(change(*by_day.rates(now.cost, before.cost)), absolute=None)
    return change(now.cost, before.cost)


def kinds(lines: Lines, team: str | None) -> tuple[KindRow, ...]:
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


def jobs(charges: Iterable[Charge]) -> list[JobRow]:
    """Workloads that held a GPU, in order of their names. charges: by BY_JOB."""
    charges = list(charges)
    models: dict[tuple[str, ...], set[str]] = {}
    for charge in charges:
        models.setdefault((*charge.key[:3], charge.key[4]), set()).add(charge.place.gpu_model)
    parts = quantify(((*charge.key[:3], charge.key[4], charge.account), charge) for charge in charges)
    return [
        JobRow(name, namespace, job, figures, cluster, frozenset(models[name, namespace, job, cluster]))
        for (name, namespace, job, cluster), figures in group_by(part_entries(parts)).items()
        if figures.accounts.allocated and job
    ]


def users(charges: Iterable[Charge]) -> list[UserRow]:
    """The users who held GPUs, the largest cost first. charges: by BY_JOB."""
    held = [charge for charge in charges if charge.account in ALLOCATED]
    jobs_of: dict[str, set[tuple[str, ...]]] = {}
    for charge in held:
        jobs_of.setdefault(charge.key[3], set()).add((*charge.key[1:3], charge.key[4]))  # whoever pays
    parts = quantify(((*charge.key[3:4], charge.account), charge) for charge in held)
    rows = [UserRow(user, len(jobs_of[user]), figures) for (user,), figures in group_by(part_entries(parts)).items()]
    return sorted(rows, key=lambda row: (-row.figures.cost, -row.figures.accounts.allocated, row.user))


def with_amounts(users: Iterable[UserRow], amounts: Iterable[Part]) -> list[UserRow]:
    """The users with what pages show. amounts: those of the scope, by user."""
    of_user: dict[str, list[Part]] = defaultdict(list)
    for one in amounts:
        if one.account in ALLOCATED:
            of_user[one.key[0]].append(one)
    return [
        replace(row, shown=replace(
            row.figures,
            cost=exact_sum(one.amount for one in of_user[row.user]),
            idle_cost=exact_sum(one.amount for one in of_user[row.user] if one.account == "allocated_idle"),
        ))
        for row in users
    ]  # fmt: skip


def daily(hourly: Usage, start_ms: int, end_ms: int, tz: ZoneInfo, team: str | None) -> tuple[DayRow, ...]:
    """The days of the span. hourly: usage of the whole cluster by team, queue and hour."""
    of_hours, hours = _sums_by(hourly, ("hour",))
    total, capacity, unmetered = Counter[str](), Counter[str](), Counter[str]()
    for (hour,), figures in zip(hours, of_hours, strict=True):
        day = hour.partition("T")[0]
        total[day] += sum(figures)
        capacity[day] += sum(figures) - figures[ACCOUNTS.index("down")]
        unmetered[day] += figures[ACCOUNTS.index("unmetered")]
    of_teams, teams = _sums_by(hourly, ("hour", "team"))
    allocated: dict[str, dict[str, int]] = defaultdict(dict)
    for (hour, name), figures in zip(teams, of_teams, strict=True):
        gpu_us, day = sum(figures[: len(HELD)]), hour.partition("T")[0]
        if gpu_us and team in (None, name):
            allocated[day][name] = allocated[day].get(name, 0) + gpu_us
    rows = []
    for date_of_day, start, end in days(start_ms, end_ms, tz):
        day = date_of_day.isoformat()
        unknown = unmetered[day] / total[day] if total[day] else 1.0
        rows.append(DayRow(date_of_day, start, end, allocated.get(day, {}), capacity[day], unknown))
    return tuple(rows)


def whole_days(
    rows: Sequence[DayRow],
    hourly: Usage,
    costs: Mapping[tuple[str, ...], Decimal | None],
    since_ms: int,
    tz: ZoneInfo,
    team: str | None,
) -> tuple[WholeDay, ...]:
    """What teams, or one of them, held on each day that is over and metered, and its cost.

    rows, hourly: as in `daily`. costs: by day and team, as pages show them; none: they are unknown. since_ms: start of
    the first record."""
    of_hours, keys = _sums_by(hourly, ("hour", "team"))
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for (hour, name), figures in zip(keys, of_hours, strict=True):
        if team in (None, name):
            sums[hour.partition("T")[0]].update(dict(zip(HELD, figures[: len(HELD)], strict=True)))
    found = []
    for row in rows:
        day = row.day.isoformat()
        if is_counted(row.day, (max(row.start_ms, since_ms), row.end_ms), row.unknown, tz):
            amounts = [
                cost for (at, name), cost in costs.items() if at == day and name != IDLE and team in (None, name)
            ]
            found.append(
                WholeDay(
                    row.day, sums[day].total(), sums[day]["busy"], sums[day]["allocated_idle"],
                    sum_if_known(amounts) if costs else None,
                )
            )  # fmt: skip
    return tuple(found)


def _sums_by(hourly: Usage, by: Sequence[Dimension]) -> tuple[list[list[int]], list[tuple[str, ...]]]:
    """The accounts and the key of each group."""
    found = hourly.grouped(by)
    return found.columns(ACCOUNTS).tolist(), list(found.row_keys())


def unpriced(charges: Iterable[Charge], team: str | None, book: PriceBook | None) -> tuple[UnpricedRow, ...]:
    sums: dict[Place, int] = {}
    for charge in charges:
        if charge.unpriced and team in (None, charge.key[0]):
            sums[charge.place] = sums.get(charge.place, 0) + charge.gpu_us
    near = {model: book.near_row(model) if book is not None else None for model, *_ in sums}
    return tuple(
        UnpricedRow(*place, gpu_us=sums[place], near_row=row.id if row else "", near_model=row.model if row else "")
        for place in sorted(sums)
        for row in [near[place.gpu_model]]
    )


@dataclass(frozen=True, slots=True)
class HourRow:
    """One hour of the day, in GPU-µs.

    capacity_us: the cluster's capacity without down time; the other figures are those of the scope.
    known_us: held time whose use is known."""

    hour: int
    capacity_us: int
    allocated_us: int
    busy_us: int
    known_us: int

    @property
    def held(self) -> float | None:
        """Share of the capacity that the scope held."""
        return share(self.allocated_us, self.capacity_us)

    @property
    def utilisation(self) -> float | None:
        return share(self.busy_us, self.known_us)


@dataclass(frozen=True, slots=True)
class HourlyUse:
    """The use of GPUs by hour of the day.

    hours: 0 to 23, local.
    busiest: the local hour of the span, "2026-10-05T14", in which most GPUs were held; None if none were. An hour that
        occurs twice is two hours."""

    hours: tuple[HourRow, ...]
    busiest: str | None
    busiest_row: HourRow | None

    @property
    def peak(self) -> HourRow | None:
        """The hour of the day in which most is held."""
        held_hours = [row for row in self.hours if row.allocated_us]
        return max(held_hours, key=lambda row: (row.held or 0, -row.hour), default=None)

    @property
    def trough(self) -> HourRow | None:
        """The hour of the day in which least is held."""
        hours_with_capacity = [row for row in self.hours if row.capacity_us]
        return min(hours_with_capacity, key=lambda row: (row.held or 0, row.hour), default=None)


def hourly_use(hourly: Usage, team: str | None) -> HourlyUse:
    """Sums by hour of the day. hourly: usage of the whole cluster by team, queue and hour."""
    sums: dict[str, list[int]] = {}
    for figures, (name,) in zip(*_sums_by(hourly, ("hour",)), strict=True):
        sums[name] = [sum(figures) - figures[ACCOUNTS.index("down")], 0, 0, 0]
    for (busy, idle, unknown, *_), (name, owner) in zip(*_sums_by(hourly, ("hour", "team")), strict=True):
        if team in (None, owner):
            held = busy + idle + unknown, busy, busy + idle
            sums[name][1:] = [known + more for known, more in zip(sums[name][1:], held, strict=True)]
    of_day = [[0, 0, 0, 0] for _ in range(24)]
    for name, row in sums.items():
        day = of_day[hour_of_day(name)]
        day[:] = [a + b for a, b in zip(day, row, strict=True)]
    held_hours = [name for name in sums if sums[name][1]]
    busiest = min(held_hours, key=lambda name: (-sums[name][1], name), default=None)
    return HourlyUse(
        tuple(HourRow(hour, *row) for hour, row in enumerate(of_day)),
        busiest,
        HourRow(hour_of_day(busiest), *sums[busiest]) if busiest is not None else None,
    )
