"""Ranks jobs and users by cost, and lists the cost of epochs.

They are ranked as columns of whole numbers: GPU-microseconds times the price in its smallest unit, exactly. Objects
are made of those that are shown. Each job is quantified by itself (gputally.base.money), so its cost is the same
wherever it is told; a rounding of 1.8 µs never decides which jobs are shown, only what they are shown with. Pure.

An epoch that began before the span counts with its part inside. Costs are exact and of the job's own time, before
billing policy moves any of it. Asks the ledger for the few jobs that are shown.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np

from accountant.billing.costs import ALLOCATED, Account, Charge, PricedTime, total_cost
from accountant.billing.job_costs import EpochQuestions, Where, epoch_lines, only_job
from accountant.ledger.protocols import EpochReport, JobKey
from accountant.ledger.usage_columns import HeldTime, Whole
from accountant.prices.price_book import Price, PriceBook
from accountant.reports import report_sections, savings_hints
from accountant.reports.report_rows import JobRow, UserRow
from accountant.reports.savings_hints import HARDLY_USED, MAX_UNKNOWN, SpotRow, by_name
from gputally.base.units import US_PER_HOUR

_ACCOUNTS: tuple[Account, ...] = ("busy", "allocated_idle", "allocated_unknown")
MOST_SAVING = 100
_MORE = 4
"""Times as many are looked at as are shown, for those whose rank only their rounded cost decides."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """All jobs of a scope: (team, namespace, job, cluster). Lists are by job, in order of their names; a job's rows are
    order[starts[n]:starts[n + 1]]. cost, idle_cost: GPU-microseconds times units of price."""

    held: HeldTime
    prices: Sequence[Sequence[Price | None]]
    order: Whole
    starts: Sequence[int]
    allocated: Sequence[int]
    idle: Sequence[int]
    known: Sequence[int]
    cost: Sequence[int]
    idle_cost: Sequence[int]

    def __len__(self) -> int:
        return len(self.allocated)

    def dearest(self, most: int) -> list[JobRow]:
        """The highest cost first, then the most time, then by name."""
        found = self._rows(self._first(most, range(len(self)), self.cost, self.allocated))
        key = by_name
        return sorted(found, key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, key(job)))[:most]

    def wasteful(self, most: int) -> list[JobRow]:
        """Those that left GPU time idle, the most costly first."""
        return self._wasteful(most, [number for number, idle_us in enumerate(self.idle) if idle_us])

    def hardly_used(self, most: int) -> list[JobRow]:
        """Those among them that nearly did nothing."""
        chosen = [number for number, idle_us in enumerate(self.idle) if idle_us and self._hardly_used(number)]
        return self._wasteful(most, chosen)

    def named(self, names: Collection[tuple[str, str]]) -> list[JobRow]:
        """Of these namespaces and names."""
        wanted = {number for number, name in enumerate(self.held.jobs) if name in names} if names else set()
        jobs = self.held.job[self.order[self.starts[:-1]]].tolist() if wanted else []
        return self._rows([number for number, job in enumerate(jobs) if job in wanted])

    def users(self) -> list[UserRow]:
        """Who held GPUs, the largest cost first; see accountant.reports.report_sections.users."""
        if not any(self.held.users[user] for user in np.unique(self.held.user[self.order]).tolist()):
            return []
        return report_sections.users(self._charges(self.order), None)

    def candidates(self, book: PriceBook | None, at_ms: int) -> tuple[SpotRow, ...]:
        """See accountant.reports.savings_hints: of the jobs that could save the most."""
        saves = {} if book is None else savings_hints.savings(book, self.held.places, self.prices, at_ms)
        if not saves:
            return ()
        per_us = _units([[saves.get((stretch, place)) for place in range(len(self.held.places))]
                         for stretch in range(len(self.prices))])  # fmt: skip
        saving, _ = _summed(self.held, self.order, self.starts, per_us, _allocated(self.held))
        eligible = (number for number, amount in enumerate(saving) if amount)
        chosen = self._first(MOST_SAVING, eligible, saving, self.allocated)
        rows = [self.order[self.starts[number] : self.starts[number + 1]] for number in chosen]
        return savings_hints.candidates(self._charges(np.concatenate(rows)), book, None, at_ms) if rows else ()

    # --- inside -------------------------------------------------------------------------------

    def _first(self, most: int, chosen: Iterable[int], cost: Sequence[int], time: Sequence[int]) -> list[int]:
        return heapq.nsmallest(most * _MORE, chosen, key=lambda number: (-cost[number], -time[number], number))

    def _wasteful(self, most: int, chosen: Iterable[int]) -> list[JobRow]:
        found = self._rows(self._first(most, chosen, self.idle_cost, self.idle))
        key = by_name
        return sorted(found, key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, key(job)))[
            :most
        ]

    def _hardly_used(self, number: int) -> bool:
        known, allocated = self.known[number], self.allocated[number]
        busy = known - self.idle[number]
        return (
            bool(known)
            and busy / known < HARDLY_USED
            and allocated >= US_PER_HOUR
            and (allocated - known <= MAX_UNKNOWN * allocated)
        )

    def _rows(self, numbers: Iterable[int]) -> list[JobRow]:
        found = []
        for number in numbers:
            found += report_sections.jobs(
                self._charges(self.order[self.starts[number] : self.starts[number + 1]]), None
            )
        return found

    def _charges(self, rows: Whole) -> list[Charge]:
        """Of these rows, by sections.BY_JOB, equal ones as one."""
        held = self.held
        sums: dict[tuple[int, ...], list[int]] = {}
        names = zip(*(column[rows].tolist() for column in (held.team, held.job, held.user, held.cluster)), strict=True)
        places = zip(held.stretch[rows].tolist(), held.place[rows].tolist(), strict=True)
        times = zip(*(column[rows].tolist() for column in (held.busy_us, held.idle_us, held.unknown_us)), strict=True)
        for name, place, time in zip(names, places, times, strict=True):
            before = sums.setdefault((*name, *place), [0, 0, 0])
            before[:] = [a + b for a, b in zip(before, time, strict=True)]
        return [
            Charge(
                (held.teams[team], *held.jobs[job], held.users[user], held.clusters[cluster]),
                held.places[place], account, gpu_us, self.prices[stretch][place],
            )
            for (team, job, user, cluster, stretch, place), several in sorted(sums.items())
            for account, gpu_us in zip(_ACCOUNTS, several, strict=True)
            if gpu_us
        ]  # fmt: skip


def ranking(held: HeldTime, prices: Sequence[Sequence[Price | None]], team: str | None) -> Ranking:
    """prices: by stretch and place. team: its jobs alone."""
    allocated = _allocated(held)
    chosen = allocated > 0
    if team is not None:
        chosen &= held.team == (held.teams.index(team) if team in held.teams else -1)
    rows = np.flatnonzero(chosen)
    clusters = max(1, len(held.clusters))
    jobs = (held.team[rows] * max(1, len(held.jobs)) + held.job[rows]) * clusters + held.cluster[rows]
    by_job = np.argsort(jobs, kind="stable")
    order = rows[by_job]
    starts = [0, *(np.flatnonzero(np.diff(jobs[by_job])) + 1).tolist(), len(order)] if len(order) else [0]
    per_us = _units([[None if price is None else price.price for price in of_stretch] for of_stretch in prices])
    cost, time = _summed(held, order, starts, per_us, allocated)
    idle_cost, idle = _summed(held, order, starts, per_us, held.idle_us)
    _, known = _summed(held, order, starts, per_us, held.busy_us + held.idle_us)
    return Ranking(held, prices, order, starts, time, idle, known, cost, idle_cost)


def of_charges(found: Iterable[Charge], team: str | None) -> Ranking:
    """The same of charges by sections.BY_JOB, without the billing policy."""
    return ranking(*tabled(found), team)


def tabled(found: Iterable[Charge]) -> tuple[HeldTime, list[list[Price | None]]]:
    """Charges by sections.BY_JOB as what `ranking` takes: a stretch for every price."""
    several = [charge for charge in found if charge.account in ALLOCATED and charge.key[2]]
    rows = {charge.row.id if charge.row else "": charge.row for charge in several}
    listed = (
        sorted({charge.key[0] for charge in several}), sorted({charge.key[1:3] for charge in several}),
        sorted({charge.key[4] for charge in several}), sorted({charge.key[3] for charge in several}),
        sorted({charge.place for charge in several}), sorted(rows),
    )  # fmt: skip
    number = [{value: place for place, value in enumerate(values)} for values in listed]
    table: Whole = np.array(
        [
            (
                number[0][charge.key[0]], number[1][charge.key[1:3]], number[2][charge.key[4]],
                number[3][charge.key[3]], number[4][charge.place], number[5][charge.row.id if charge.row else ""],
                *(charge.gpu_us if charge.account == account else 0 for account in _ACCOUNTS),
            )
            for charge in several
        ],
        dtype=np.int64,
    ).reshape(-1, 9)  # fmt: skip
    teams, jobs, clusters, users, places, prices = listed
    names = [(namespace, job) for namespace, job in jobs]
    held = HeldTime(teams, names, clusters, users, places, table[:, 5], *table[:, :5].T, *table[:, 6:].T)
    return held, [[rows[row]] * len(places) for row in prices]


def _allocated(held: HeldTime) -> Whole:
    return held.busy_us + held.idle_us + held.unknown_us


def _units(prices: Sequence[Sequence[Decimal | None]]) -> list[list[int]]:
    """As whole numbers of the smallest unit that any of them needs; 0 where there is none."""
    known = [price for of_stretch in prices for price in of_stretch if price is not None]
    places = max((-int(price.as_tuple().exponent) for price in known), default=0)
    return [[0 if price is None else int(price.scaleb(places)) for price in of_stretch] for of_stretch in prices]


def _summed(
    held: HeldTime, order: Whole, starts: Sequence[int], per_us: Sequence[Sequence[int]], gpu_us: Whole
) -> tuple[list[int], list[int]]:
    """By job: Σ price × µs, and Σ µs."""
    if not len(order):
        return [], []
    time = gpu_us[order]
    dearest = max((price for of_stretch in per_us for price in of_stretch), default=0)
    fits = int(time.sum()) * max(1, dearest) < 2**62
    price = np.array(per_us, dtype=np.int64 if fits else object)[held.stretch[order], held.place[order]]
    cost = np.add.reduceat(price * (time if fits else time.astype(object)), starts[:-1])
    return cost.tolist(), np.add.reduceat(time, starts[:-1]).tolist()


@dataclass(frozen=True, slots=True)
class EpochRow:
    """Of one job. cluster: where it ran. epochs: how many ended in the span; last: the number of the newest. gpu_us,
    cost: of all of them; rest_us, rest_cost: since the last of them. Costs are None where some of the time has no
    price."""

    cluster: str
    namespace: str
    job: str
    epochs: int
    last: int
    gpu_us: int
    cost: Decimal | None
    rest_us: int
    rest_cost: Decimal | None

    @property
    def mean_cost(self) -> Decimal | None:
        """Of an epoch, rounded to the places of the cost's own: for people."""
        if self.cost is None:
            return None
        exponent = self.cost.as_tuple().exponent
        places = -exponent if isinstance(exponent, int) and exponent < 0 else 0
        return Decimal(round(Fraction(self.cost) / self.epochs * 10**places)).scaleb(-places)


def rows(
    ledger: EpochQuestions,
    book: PriceBook | None,
    reported: Iterable[EpochReport],
    jobs: Callable[[Collection[tuple[str, str]]], Sequence[JobRow]],
    span: tuple[int, int],
    team: str | None,
    timezone: str,
    most: int,
) -> tuple[EpochRow, ...]:
    """Of the jobs with the highest cost that ended an epoch in the span; at most `most`. team: their part alone.
    reported: in the span. jobs: those of some namespaces and names."""
    reports: dict[JobKey, list[EpochReport]] = defaultdict(list)
    for report in reported:
        reports[report.key].append(report)
    costs: dict[JobKey, Decimal] = defaultdict(Decimal)
    for job in jobs({(key.namespace, key.job) for key in reports}):
        costs[JobKey(job.cluster, job.namespace, job.job)] += job.figures.cost
    shown = sorted(
        (key for key in reports if key in costs),
        key=lambda key: (-costs[key], key),
    )[:most]
    found = []
    for key in shown:
        mine: Where = {**only_job(key), **({"team": {team}} if team is not None else {})}
        edges, parts = epoch_lines(ledger, book, reports[key], span, mine, timezone)
        of_stretch = list(zip(edges, parts, strict=True))
        ended = [part for stretch, several in of_stretch if stretch.epoch is not None for part in several]
        rest = [part for stretch, several in of_stretch if stretch.epoch is None for part in several]
        last = max(reports[key], key=lambda one: (one.at_ms, one.epoch)).epoch
        found.append(
            EpochRow(
                *key, len(reports[key]), last, _held_time(ended), total_cost(ended), _held_time(rest),
                total_cost(rest),
            )
        )  # fmt: skip
    return tuple(found)


def _held_time(parts: Iterable[PricedTime]) -> int:
    return sum(part.gpu_us for part in parts)
