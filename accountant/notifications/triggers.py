"""Decides which reports, budget notices and anomaly notices are due.

The same message always has the same key, made of its subject and its destination, so that nothing is sent twice. Months
that ended or were closed long ago are ignored, so a new subscription does not send old reports.

An anomaly is a day on which a team held, or left idle, far more GPU time than usual. The usual value is the median of
the days in the previous four weeks on which the team held anything. The spread is their median absolute deviation,
scaled to equal the standard deviation of a normal distribution (Leys et al., "Detecting outliers", J. Exp. Soc.
Psychology 49, 2013). One extreme day therefore changes neither.

Days without use are not counted as 0. Otherwise every day would be unusual for a new ledger or team, or for teams that
work on some weekdays only. If the value was about as high on two earlier days of the same weekday, it is a weekly
rhythm and no anomaly. Less use than usual is never reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import median
from typing import Final, Literal, TypeAlias, TypeVar
from zoneinfo import ZoneInfo

from accountant.bookkeeping.month_closing import ClosedMonth
from accountant.core.periods import Month, local_date
from accountant.notifications.subscriptions import DeliveriesFile, ReportOrder
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.instants import midnight_ms
from gputally.base.money import plain
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR

DAYS: Final = 28
FEWEST_DAYS: Final = 8
"""With fewer days of use there is no usual value yet."""
LOOKED_AGAIN: Final = 4
"""Days that are checked every morning, because records can be late, or the accountant was not running."""
_WEEK: Final = 7
_RHYTHM: Final = 2
"""If the value was about as high on so many earlier days of the same weekday, it is a weekly rhythm."""
_SPREADS: Final = 4.0
_NORMAL: Final = 1.4826
_LEAST_RATIO: Final = 1.5
LEAST_US: Final = 24 * US_PER_HOUR
"""A value that exceeds the usual one by less is no anomaly."""

What = Literal["held", "idle"]


@dataclass(frozen=True, slots=True)
class TeamDay:
    """GPU-µs of a team on one day."""

    held_us: int = 0
    idle_us: int = 0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A day on which a team held, or left idle, far more than usual. usual_us: the median of the days before."""

    team: str
    day: date
    what: What
    value_us: int
    usual_us: int


def unusual(before: Sequence[int], value: int) -> int | None:
    """The median of the values in `before`, the earlier days with use, if `value` is far above it; otherwise None."""
    if len(before) < FEWEST_DAYS:
        return None
    usual = median(before)
    spread = _NORMAL * median(abs(day_value - usual) for day_value in before)
    limit = max(usual + _SPREADS * spread, usual * _LEAST_RATIO, usual + LEAST_US)
    return round(usual) if value > limit else None


def of_day(days: Mapping[str, Mapping[date, TeamDay]], day: date) -> list[Anomaly]:
    """The anomalies of one day, sorted by team. days: by team, the figures of each day; a day without an entry had no
    use."""
    past = {day - timedelta(days=back) for back in range(1, DAYS + 1)}
    unusual_days: list[Anomaly] = []
    for team in sorted(days):
        by_day = days[team]
        now = by_day.get(day, TeamDay())
        before = {past_day: use for past_day, use in sorted(by_day.items()) if past_day in past and use.held_us}
        sides: tuple[tuple[What, int, dict[date, int]], ...] = (
            ("held", now.held_us, {past_day: use.held_us for past_day, use in before.items()}),
            ("idle", now.idle_us, {past_day: use.idle_us for past_day, use in before.items()}),
        )
        for what, value, earlier in sides:
            usual = unusual(list(earlier.values()), value)
            if usual is not None and not _weekly(earlier, day, value):
                unusual_days.append(Anomaly(team, day, what, value, usual))
    return unusual_days


def _weekly(earlier: Mapping[date, int], day: date, value: int) -> bool:
    """Whether the value is a weekly rhythm: at least `_RHYTHM` earlier days of the same weekday had at least `value`
    divided by `_LEAST_RATIO`."""
    alike = [one for when, one in earlier.items() if (day - when).days % _WEEK == 0]
    return sum(value <= one * _LEAST_RATIO for one in alike) >= _RHYTHM


NEWS_MS: Final = 31 * MS_PER_DAY
"""How long after its close, or its end, a month's report is still sent."""
SETTLED_MS: Final = 6 * MS_PER_HOUR
"""How long after its end a week or a day waits for late records."""


@dataclass(frozen=True, slots=True)
class EndedPeriod:
    """A span whose reports are due.

    name: such as `2026-10` or `2026-W43`.
    month: None for a week.
    edition: the version of a closed month. Closing the month again makes a new version, which is sent again."""

    name: str
    start_ms: int
    end_ms: int
    month: Month | None = None
    edition: str = ""


@dataclass(frozen=True, slots=True)
class ReportDue:
    """A report to send. team: None for the report of the whole cluster."""

    destination: str
    period: EndedPeriod
    team: str | None
    forms: tuple[str, ...]

    @property
    def key(self) -> str:
        period, team = self.period, "*" if self.team is None else self.team
        return "/".join(("report", period.name, "+".join(self.forms), self.destination, period.edition, team))


@dataclass(frozen=True, slots=True)
class BudgetDue:
    """A notice that a budget reached a threshold."""

    destination: str
    budget: BudgetState

    @property
    def key(self) -> str:
        # After its limit was raised, a budget reports its thresholds again.
        limit = plain(self.budget.limit.normalize())
        what = self.budget.month, f"{self.budget.threshold}", limit, self.destination, self.budget.name
        return "/".join(("budget", *what))


@dataclass(frozen=True, slots=True)
class AnomalyDue:
    """A notice of an anomaly."""

    destination: str
    anomaly: Anomaly

    @property
    def key(self) -> str:
        anomaly = self.anomaly
        return "/".join(("anomaly", anomaly.day.isoformat(), anomaly.what, self.destination, anomaly.team))


DueMessage: TypeAlias = ReportDue | BudgetDue | AnomalyDue


def reports(
    deliveries_file: DeliveriesFile,
    closed: Sequence[ClosedMonth],
    now_ms: int,
    tz: ZoneInfo,
    grace_ms: int,
    teams: Callable[[int, int], Collection[str]],
) -> list[ReportDue]:
    """The due reports in the order of the file.

    closed: months, oldest first.
    teams: returns the teams that get a report of a span."""
    due_reports: list[ReportDue] = []
    for order in deliveries_file.reports:
        for period in _ended(order, closed, now_ms, tz, grace_ms):
            teams_of_order = sorted(teams(period.start_ms, period.end_ms)) if order.each_team else [order.team]
            due_reports += [
                ReportDue(destination, period, team, order.forms) for destination in order.to for team in teams_of_order
            ]
    return due_reports


def budgets(deliveries_file: DeliveriesFile, states: Iterable[BudgetState]) -> list[BudgetDue]:
    """The notices of the highest threshold that each budget has reached."""
    reached = [state for state in states if state.threshold is not None]
    return [BudgetDue(destination, state) for destination, state in _subscribed(deliveries_file, "budgets", reached)]


def anomalies(deliveries_file: DeliveriesFile, found: Sequence[Anomaly]) -> list[AnomalyDue]:
    """The notices of these anomalies, for each destination that subscribes to anomalies of the team."""
    return [
        AnomalyDue(destination, anomaly) for destination, anomaly in _subscribed(deliveries_file, "anomalies", found)
    ]


E = TypeVar("E", BudgetState, Anomaly)


def _subscribed(
    deliveries_file: DeliveriesFile, subject: Literal["budgets", "anomalies"], events: Sequence[E]
) -> Iterator[tuple[str, E]]:
    """Each event with each destination that subscribes to notices of this subject about its team."""
    for order in deliveries_file.notices:
        for event in events if subject in order.about else ():
            if order.teams is None or event.team in order.teams:
                yield from ((destination, event) for destination in order.to)


def _ended(
    order: ReportOrder, closed: Sequence[ClosedMonth], now_ms: int, tz: ZoneInfo, grace_ms: int
) -> Iterable[EndedPeriod]:
    if order.of == "week":
        today = local_date(now_ms - SETTLED_MS, tz)
        monday = today - timedelta(days=today.weekday())
        first = monday - timedelta(days=7)
        year, week, _ = first.isocalendar()
        yield EndedPeriod(f"{year}-W{week:02}", midnight_ms(first, tz), midnight_ms(monday, tz))
    elif order.when == "closed":
        for closed_month in closed:
            if now_ms - closed_month.at_ms < NEWS_MS:
                month = Month.parse(closed_month.month)
                yield EndedPeriod(closed_month.month, *month.span(tz), month, closed_month.hash[:12])
    else:
        month = Month.of(now_ms - grace_ms, tz).previous
        start, end = month.span(tz)
        if now_ms - grace_ms - end < NEWS_MS:
            yield EndedPeriod(str(month), start, end, month)
