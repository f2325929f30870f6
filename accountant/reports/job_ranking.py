"""Ranks jobs and users by cost, and lists the cost of epochs.

The ranking uses the columns of the bill: GPU-microseconds times the price in its smallest unit, exactly. The GPU-hours
of each job are rounded separately (gputally.base.money), so a job has the same cost on every page. Rounding can change
the order of jobs with nearly equal costs. Objects are therefore created for four times the displayed jobs, and those
are sorted by their rounded cost.

If an epoch began before the span, only its part inside counts. The costs of epochs are exact and for the job's own
time, before the billing policy moves any of it. Epochs are read from the ledger for the displayed jobs only."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from operator import itemgetter

import numpy as np

from accountant.billing.charge import ALLOCATED, LINE_ACCOUNTS, Charge, PricedTime, total_cost
from accountant.billing.charge_table import ACCOUNT, DETAIL, KEY, PLACE, PRICE, TIME, ChargeTable, numbered
from accountant.billing.job_costs import epoch_lines, only_job
from accountant.ledger.protocols import EpochReport, JobKey, Moment
from accountant.ledger.usage import Int64Array, JobName, Where
from accountant.prices.price_book import PriceBook
from accountant.reports import report_breakdowns, savings_hints
from accountant.reports.report_breakdowns import JobRow, UserRow
from accountant.reports.savings_hints import HARDLY_USED, MAX_UNKNOWN, SpotRow, by_name
from gputally.base.units import US_PER_HOUR

_ALLOCATED = [LINE_ACCOUNTS.index(account) for account in sorted(ALLOCATED)]
_IDLE, _UNKNOWN = LINE_ACCOUNTS.index("allocated_idle"), LINE_ACCOUNTS.index("allocated_unknown")
MOST_SAVING = 100
_MORE = 4
"""This many times the displayed jobs are considered, because rounding of the costs can change the order of jobs."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """All jobs of the cluster or of a team. Lists have one value per team and job, by team, namespace, name and
    cluster.

    starts: the rows of job n in `billed` are starts[n] to starts[n + 1].
    allocated, idle, known: GPU-µs held, held and idle, and held with known use.
    cost, idle_cost: GPU-µs times the price in its smallest unit."""

    billed: ChargeTable
    starts: Sequence[int]
    allocated: Sequence[int]
    idle: Sequence[int]
    known: Sequence[int]
    cost: Sequence[int]
    idle_cost: Sequence[int]

    def __len__(self) -> int:
        return len(self.allocated)

    @property
    def count(self) -> int:
        """The number of jobs; one that several teams pay for has a row for each of them and counts once."""
        keys = (self.billed.keys[key] for key in self.billed.cells[self.starts[:-1], KEY].tolist())
        return len({(*key[1:3], key[4]) for key in keys})

    def dearest(self, most: int) -> list[JobRow]:
        """The jobs with the highest cost first, then by time, then by name."""
        rows = self._rows(self._first(most, range(len(self)), self.cost, self.allocated))
        rows.sort(key=lambda job: (-job.figures.cost, -job.figures.accounts.allocated, by_name(job)))
        return rows[:most]

    def wasteful(self, most: int) -> list[JobRow]:
        """The jobs that left GPU time idle, the most costly first."""
        return self._wasteful(most, [number for number, idle_us in enumerate(self.idle) if idle_us])

    def hardly_used(self, most: int) -> list[JobRow]:
        """The jobs whose GPUs were hardly used, the most costly first."""
        numbers = [number for number, idle_us in enumerate(self.idle) if idle_us and self._hardly_used(number)]
        return self._wasteful(most, numbers)

    def named(self, names: Collection[tuple[str, str]]) -> list[JobRow]:
        """The rows of jobs with these namespaces and names."""
        jobs = self.billed.cells[self.starts[:-1], KEY].tolist() if names else []
        return self._rows([number for number, key in enumerate(jobs) if self.billed.keys[key][1:3] in names])

    def users(self) -> list[UserRow]:
        """The users who held GPUs, the largest cost first; see accountant.reports.report_breakdowns.users. Empty if no
        job has a user."""
        keys = np.unique(self.billed.cells[:, KEY]).tolist()
        has_names = any(self.billed.keys[key][3] for key in keys)
        return report_breakdowns.users(_charges(self.billed)) if has_names else []

    def candidates(self, book: PriceBook | None, at_ms: int) -> tuple[SpotRow, ...]:
        """The candidates for spot capacity among the jobs that could save the most; see
        accountant.reports.savings_hints. at_ms: the instant of the spot prices."""
        if book is None:
            return ()
        places, prices = self.billed.places, self.billed.prices
        saves = savings_hints.savings(book, places, prices, at_ms)
        if not saves:
            return ()
        units = _units([saves.get((price, place)) for price in range(len(prices)) for place in range(len(places))])
        rows = self.billed.cells
        per_us = [units[at] for at in (rows[:, PRICE] * len(places) + rows[:, PLACE]).tolist()]
        saving = _summed(per_us, rows[:, TIME], self.starts)
        eligible = (number for number, amount in enumerate(saving) if amount)
        chosen = self._first(MOST_SAVING, eligible, saving, self.allocated)
        return savings_hints.candidates((c for n in chosen for c in self._of_job(n)), book, at_ms)

    def _first(self, most: int, numbers: Iterable[int], cost: Sequence[int], time: Sequence[int]) -> list[int]:
        return heapq.nsmallest(most * _MORE, numbers, key=lambda number: (-cost[number], -time[number], number))

    def _wasteful(self, most: int, numbers: Iterable[int]) -> list[JobRow]:
        rows = self._rows(self._first(most, numbers, self.idle_cost, self.idle))
        rows.sort(key=lambda job: (-job.figures.idle_cost, -job.figures.accounts.allocated_idle, by_name(job)))
        return rows[:most]

    def _hardly_used(self, number: int) -> bool:
        known_us, allocated_us = self.known[number], self.allocated[number]
        busy_us = known_us - self.idle[number]
        return (
            bool(known_us)
            and busy_us / known_us < HARDLY_USED
            and allocated_us >= US_PER_HOUR
            and (allocated_us - known_us <= MAX_UNKNOWN * allocated_us)
        )

    def _rows(self, numbers: Iterable[int]) -> list[JobRow]:
        return [row for number in numbers for row in report_breakdowns.jobs(self._of_job(number))]

    def _of_job(self, number: int) -> list[Charge]:
        return _charges(self.billed.only(np.arange(self.starts[number], self.starts[number + 1])))


def _charges(billed: ChargeTable) -> list[Charge]:
    """Equal charges added up, without the details of idle time."""
    table = billed.cells.copy()
    table[:, DETAIL] = 0
    return replace(billed, cells=table).charges()


@dataclass(frozen=True, slots=True)
class BilledJobs:
    """The bills of holders, by BY_JOB.

    names: (team, namespace, job, cluster), sorted.
    job: for each row of `billed` the index of its job in `names`, ascending."""

    billed: ChargeTable
    names: Sequence[JobName]
    job: Int64Array

    @classmethod
    def of(cls, billed: ChargeTable) -> BilledJobs:
        """Groups charges by BY_JOB into jobs."""
        held = np.isin(billed.cells[:, ACCOUNT], _ALLOCATED)
        held &= np.array([bool(key[2]) for key in billed.keys], dtype=bool)[billed.cells[:, KEY]]
        names, number = numbered([(key[0], key[1], key[2], key[4]) for key in billed.keys])
        rows = np.flatnonzero(held)
        job = number[billed.cells[rows, KEY]]
        order = np.argsort(job, kind="stable")
        return cls(billed.only(rows[order]), names, job[order])

    @property
    def teams(self) -> set[str]:
        """The teams that held anything."""
        return {self.names[number][0] for number in np.unique(self.job).tolist()}

    def ranked(self, team: str | None) -> Ranking:
        """The ranking of all jobs, or of a team's jobs."""
        first, last = (0, len(self.names)) if team is None else (
            bisect_left(self.names, team, key=itemgetter(0)), bisect_right(self.names, team, key=itemgetter(0))
        )  # fmt: skip
        begin, end = np.searchsorted(self.job, [first, last]).tolist()
        billed, job = self.billed.only(np.arange(begin, end)), self.job[begin:end]
        starts = [0, *(np.flatnonzero(np.diff(job)) + 1).tolist(), len(job)] if len(job) else [0]
        units = _units([price.price if price is not None else None for price in billed.prices])
        per_us = [units[price] for price in billed.cells[:, PRICE].tolist()]
        time, account = billed.cells[:, TIME], billed.cells[:, ACCOUNT]
        idle = np.where(account == _IDLE, time, 0)
        known = np.where(account == _UNKNOWN, 0, time)
        one = [1] * len(job)
        return Ranking(
            billed, starts, _summed(one, time, starts), _summed(one, idle, starts), _summed(one, known, starts),
            _summed(per_us, time, starts), _summed(per_us, idle, starts),
        )  # fmt: skip


def _units(prices: Sequence[Decimal | None]) -> list[int]:
    """The prices as integers of the smallest unit that any of them needs; 0 for no price."""
    places = max((-int(price.as_tuple().exponent) for price in prices if price is not None), default=0)
    return [0 if price is None else int(price.scaleb(places)) for price in prices]


def _summed(per_us: Sequence[int], gpu_us: Int64Array, starts: Sequence[int]) -> list[int]:
    """For each job, the sum of price times microseconds over its rows."""
    if not len(gpu_us):
        return []
    fits = int(gpu_us.sum()) * max(1, *per_us) < 2**62
    kind = np.int64 if fits else object
    sums: list[int] = np.add.reduceat(np.array(per_us, dtype=kind) * gpu_us.astype(kind), starts[:-1]).tolist()
    return sums


@dataclass(frozen=True, slots=True)
class EpochRow:
    """The epochs of one job.

    epochs: how many ended in the span.
    last: the number of the newest epoch.
    gpu_us, cost: GPU time and cost of all these epochs.
    rest_us, rest_cost: GPU time and cost since the last epoch ended. Costs are None if some of the time has no
        price, and all four if the ledger cannot divide the time where the epochs end."""

    cluster: str
    namespace: str
    job: str
    epochs: int
    last: int
    gpu_us: int | None
    cost: Decimal | None
    rest_us: int | None
    rest_cost: Decimal | None

    @property
    def mean_cost(self) -> Decimal | None:
        """The mean cost of an epoch, rounded to the decimals of `cost`; for display."""
        if self.cost is None:
            return None
        exponent = self.cost.as_tuple().exponent
        places = -exponent if isinstance(exponent, int) and exponent < 0 else 0
        return Decimal(round(Fraction(self.cost) / self.epochs * 10**places)).scaleb(-places)


def rows(
    ledger: Moment,
    book: PriceBook | None,
    reported: Iterable[EpochReport],
    jobs: Callable[[Collection[tuple[str, str]]], Sequence[JobRow]],
    span: tuple[int, int],
    team: str | None,
    timezone: str,
    most: int,
) -> tuple[EpochRow, ...]:
    """The epochs of jobs that ended an epoch in the span, for at most `most` jobs, those with the highest cost first.

    team: count only this team's part.
    reported: the reports of the span.
    jobs: returns the rows of jobs with given namespaces and names."""
    reports: dict[JobKey, list[EpochReport]] = defaultdict(list)
    for report in reported:
        reports[report.key].append(report)
    costs: dict[JobKey, Decimal] = defaultdict(Decimal)
    for job in jobs({(key.namespace, key.job) for key in reports}):
        costs[JobKey(job.cluster, job.namespace, job.job)] += job.figures.cost
    listed = sorted(
        (key for key in reports if key in costs),
        key=lambda key: (-costs[key], key),
    )[:most]
    epoch_rows = []
    for key in listed:
        filters: Where = {**only_job(key), **({"team": {team}} if team is not None else {})}
        ended, rest = list[PricedTime](), list[PricedTime]()
        is_known = True
        for stretch, parts in epoch_lines(ledger, book, reports[key], span, filters, timezone):
            is_known = is_known and parts is not None
            (rest if stretch.epoch is None else ended).extend(parts or ())
        figures = (_held_time(ended), total_cost(ended), _held_time(rest), total_cost(rest))
        last = max(reports[key], key=lambda epoch_report: (epoch_report.at_ms, epoch_report.epoch)).epoch
        epoch_rows.append(EpochRow(*key, len(reports[key]), last, *(figures if is_known else (None,) * 4)))
    return tuple(epoch_rows)


def _held_time(parts: Iterable[PricedTime]) -> int:
    return sum(part.gpu_us for part in parts)
