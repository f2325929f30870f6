"""Reads everything that a report needs from the ledger, once for all teams.

A report of one team asks nothing that the cluster's does not; it takes its part of these. So who keeps readings makes
a team's report without the ledger, and all reports that are made of them show figures of the same moment. What jobs
report of their epochs is named here and asked for by the report: few do.

`read` asks a handful of questions, whatever the cluster's size, and has no clock. Names of jobs and what they held are
columns (accountant.ledger.usage_columns); of the pods' waits only the rows of the queues are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from zoneinfo import ZoneInfo

from accountant.billing import budget_forecast, queue_waits
from accountant.billing.bills import billed_columns, unused_commitments
from accountant.billing.budget_forecast import BY as BY_DAY
from accountant.billing.costs import Charge, charges
from accountant.billing.job_costs import EpochQuestions
from accountant.billing.queue_waits import KnownPod, WaitRow
from accountant.core.periods import Month, zone
from accountant.ledger.protocols import EpochReport
from accountant.ledger.usage_columns import Hours, JobName, Peak
from accountant.prices.price_book import PriceBook
from accountant.reports.job_ranking import BilledJobs
from accountant.reports.report_sections import BY_JOB
from accountant.wire.policy_models import PolicyVersion
from accountant.wire.usage_models import Dimension

CANDIDATES = 25
"""Jobs of a scope that are looked at hour by hour: those that left the most GPU time idle."""
_AT_ONCE = 1_000
"""Jobs that are looked at hour by hour together: a month of them is some ten MiB."""
_ROW_BYTES = 150
"""Of a job or a row of what was held."""
_BY_TEAM: tuple[Dimension, ...] = ("team",)


class ReportQuestions(EpochQuestions, Protocol):
    """What a report is made from: accountant.storage.snapshot.Snapshot."""

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        """What `usage` says by team, queue and hour, as columns."""
        ...

    def peaks(
        self, start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str = "UTC"
    ) -> dict[JobName, Peak]:
        """The most that these jobs, by namespace and name, held and used in any one hour."""
        ...

    def pods(self, start_ms: int, end_ms: int) -> list[KnownPod]:
        """Those that existed in the span."""
        ...


@dataclass(frozen=True, slots=True)
class Readings:
    """[start_ms, end_ms) of the ledger, at a price book. before_ms: the span that it is compared with, at book_before.

    month: the calendar month that the span is, or begins; since_ms: where the ledger begins. by_day: charges by team,
    queue and day (accountant.billing.budget_forecast.BY), where there is a month. billed, earlier: bills by team of
    the span and of the one before; unused: commitments. waits: of every team's queues. epochs: what jobs reported in
    the span.
    peaks: of the jobs that a report of one of `scopes` looks at; None among them stands for the whole cluster."""

    start_ms: int
    end_ms: int
    before_ms: tuple[int, int]
    timezone: str
    book: PriceBook | None
    book_before: PriceBook | None
    policies: Sequence[PolicyVersion]
    month: Month | None
    since_ms: int
    by_day: Sequence[Charge]
    billed: Sequence[Charge]
    earlier: Sequence[Charge]
    unused: Sequence[Charge]
    hourly: Hours
    jobs: BilledJobs
    jobs_before: BilledJobs
    waits: tuple[WaitRow, ...]
    epochs: Sequence[EpochReport]
    scopes: frozenset[str | None] = field(default=frozenset())
    peaks: dict[JobName, Peak] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of memory, about: nearly all of it is who held what."""
        return sum(_ROW_BYTES * (len(one.job) + len(one.names)) for one in (self.jobs, self.jobs_before))

    @property
    def tz(self) -> ZoneInfo:
        return zone(self.timezone)


def read(
    ledger: ReportQuestions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    scopes: Collection[str | None] | None = None,
    book_before: PriceBook | None = None,
) -> Readings:
    """What reports of these scopes are made of; None: of the cluster and every team that held anything. book_before:
    of the span before, where that is another.

    Raises ValueError for an empty span or an unknown time zone."""
    if start_ms >= end_ms:
        raise ValueError(f"a report needs a span: [{start_ms}, {end_ms}) is empty")
    before_ms = span_before(start_ms, end_ms, zone(timezone))
    book_before = book_before or book
    month = budget_forecast.month_of(start_ms, end_ms, timezone)
    billed, by_job = billed_columns(ledger, book, start_ms, end_ms, (_BY_TEAM, BY_JOB), timezone)
    earlier, by_job_before = billed_columns(ledger, book_before, *before_ms, (_BY_TEAM, BY_JOB), timezone)
    jobs = BilledJobs.of(by_job)
    wanted = frozenset((None, *jobs.teams) if scopes is None else scopes)
    return Readings(
        start_ms=start_ms,
        end_ms=end_ms,
        before_ms=before_ms,
        timezone=timezone,
        book=book,
        book_before=book_before,
        policies=tuple(ledger.policies(start_ms, end_ms)),
        month=month,
        since_ms=ledger.extent()[0],
        by_day=charges(ledger, book, start_ms, end_ms, BY_DAY, None, timezone) if month is not None else (),
        billed=billed.charges(),
        earlier=earlier.charges(),
        unused=unused_commitments(ledger, book, start_ms, end_ms, timezone),
        hourly=ledger.hours(start_ms, end_ms, timezone),
        jobs=jobs,
        jobs_before=BilledJobs.of(by_job_before),
        waits=queue_waits.queue_waits(ledger.pods(start_ms, end_ms), start_ms, end_ms, None),
        epochs=tuple(ledger.epochs_between(start_ms + 1, end_ms + 1)),
        scopes=wanted,
        peaks=_peaks(ledger, jobs, wanted, start_ms, end_ms, timezone),
    )


def span_before(start_ms: int, end_ms: int, tz: ZoneInfo) -> tuple[int, int]:
    """For a month the one before, for the beginning of a month the same stretch of that, else the same length."""
    month = Month.of(start_ms, tz)
    first, last = month.span(tz)
    if start_ms == first and end_ms <= last:
        begin, stop = month.previous.span(tz)
        return begin, stop if end_ms == last else min(begin + end_ms - start_ms, stop)
    return start_ms - (end_ms - start_ms), start_ms


def _peaks(
    ledger: ReportQuestions,
    jobs: BilledJobs,
    scopes: Collection[str | None],
    start_ms: int,
    end_ms: int,
    timezone: str,
) -> dict[JobName, Peak]:
    """Of the candidates of every scope."""
    names = sorted({(row.namespace, row.job) for team in scopes for row in jobs.ranked(team).wasteful(CANDIDATES)})
    found: dict[JobName, Peak] = {}
    for first in range(0, len(names), _AT_ONCE):
        found |= ledger.peaks(start_ms, end_ms, frozenset(names[first : first + _AT_ONCE]), timezone)
    return found
