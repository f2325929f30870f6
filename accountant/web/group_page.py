"""The page of one value of a dimension: of a team, a user, a queue, a project (an exported label), a GPU model and so
on. It shows a month: cost and use by day beside the month before, budgets, a queue's share of what it deserves,
waits, the best and the worst jobs, and what could be saved.

Its figures are those of `GET /v1/usage` and `GET /v1/cost` with the same filter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from accountant.api.access_control import Reader, check_teams, team_filter
from accountant.api.answer_cache import CachedAnswer
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.query_parameters import NamedDimension, Params, QuerySpan, check_cost, explored, invalid
from accountant.billing.budget_forecast import states
from accountant.billing.charge import ALLOCATED
from accountant.billing.displayed_costs import displayed_costs
from accountant.billing.queue_waits import WaitRow, queue_waits
from accountant.billing.usage_pricing import charge_table
from accountant.core import periods
from accountant.core.claim_overlap import Span
from accountant.core.periods import Days, Month
from accountant.ledger.protocols import GpuHealth, Moment, of_holders, policy_at
from accountant.ledger.team_assignment import policies_between
from accountant.ledger.usage import HELD, Where
from accountant.prices.price_book import PriceBook
from accountant.reports import charts, figure_formatting, node_list, report_breakdowns, savings_hints, week_parts
from accountant.reports.charts import ChartColumn
from accountant.reports.report_breakdowns import BY_JOB
from accountant.reports.savings_hints import Hint
from accountant.reports.week_parts import WeekPart, WholeDay
from accountant.web import explore_table, home, month_and_decision_pages, page_queries
from accountant.web.explore_page import changed, figure_text
from accountant.web.explore_table import FIGURES, Question, Row
from accountant.web.list_bar import group_address, group_link, title
from accountant.wire.dimensions import OF_GPUS, OF_TIME
from accountant.wire.policy_models import IDLE, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Accounts, BudgetState, Dimension
from gputally.base.units import MS_PER_DAY, US_PER_HOUR, US_PER_MS
from gputally.server.tokens_and_grants import Principal

router = APIRouter(include_in_schema=False)
MOST: Final = 10
"""Jobs, hints and queues of one table."""
_LEAST_SHARE: Final = 100
"""A job is one of the best if it held at least this part of the group's time."""
_OF_JOBS: Final[tuple[Dimension, ...]] = ("cluster", "namespace", "job")
"""The dimensions whose values have GPUs of their own, so that it is known of each how much of its time is metered."""


class GroupParams(Params):
    """by, value: the dimension and its value. month: the current one without it."""

    by: NamedDimension
    value: str = Field(max_length=1_024)
    month: str | None = Field(default=None, max_length=10)


@dataclass(frozen=True, slots=True)
class GroupDay:
    """A local day. whole: it is over, and most of it is known (`accountant.reports.week_parts`). unknown: the unmetered
    part of the value's GPUs' time, or, if it has none of its own, of all GPUs' time; 1 if nothing is known of it.

    cost: as pages show it; None if some of the time has no price. before: the same day of the month before; None if
    nothing is known of it, or it has no such day. deserved: the queues' deserved GPU-hours."""

    name: str
    day: date
    whole: bool
    weekend: bool
    unknown: float
    accounts: Accounts
    cost: Decimal | None
    cost_before: Decimal | None
    held_before: int | None
    deserved: float


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of a month so far, and of the same part of the month before.

    values: the value, and of a queue those below it.
    span_before, by_day: the span of comparison, and how it is compared (`periods.compared_span`).
    total, before: None if nothing is known of the span.
    whole_us: what all holders held; None if the reader may see only some teams.
    dearest, idlest, best: jobs, from the first.
    waits: None for a dimension that pods do not wait by."""

    found_ms: int
    values: tuple[str, ...]
    span: Span
    span_before: Span
    by_day: Days | None
    total: Row | None
    before: Row | None
    whole_us: int | None
    days: tuple[GroupDay, ...]
    dearest: tuple[Row, ...]
    idlest: tuple[Row, ...]
    best: tuple[Row, ...]
    hints: tuple[Hint, ...]
    waits: tuple[WaitRow, ...] | None
    budgets: tuple[BudgetState, ...]


@router.get("/group")
def group_page(request: Request, params: Annotated[GroupParams, Query()], deps: AppDeps, principal: Reader) -> Response:
    if params.by in OF_TIME:
        raise invalid("by", f"{params.by} has no page: choose another dimension, or open /explore")
    team_filter(principal, (params.value,) if params.by == "team" else ())
    if params.by == "team":
        check_teams(deps, principal, (params.value,))
    timezone = deps.settings.timezone
    tz, at = periods.zone(timezone), deps.clock.wall_ms()
    month = (
        periods.month_with_records(at, deps.newest_ms(), tz)
        if params.month is None
        else month_and_decision_pages.month_of(deps, params.month)
    )
    # Both months by the identity of jobs, and by day.
    both = QuerySpan(month.previous.span(tz)[0], min(month.span(tz)[1], at), timezone)
    clusters = (params.value,) if params.by == "cluster" else ()
    check_cost(deps.ledger, deps.settings.limits, both, len(_OF_JOBS) + 1, clusters, parameter="month")
    answer = _group(deps, params, month, principal)
    found, book = answer.value, deps.book()
    currency = book.currency if book is not None else None
    following = month.next if month.next.span(tz)[0] < at else None
    # The filter and the span of the figures, so that what the page leads to has equal ones.
    where = {f"where.{params.by}": found.values, "start": f"{month}-01", "timezone": timezone}
    where |= {"end": f"{following}-01" if following else periods.utc(found.span[1])}
    told = _health(deps, params.value) if params.by == "gpu" and principal.teams is None else None
    return month_and_decision_pages.page(
        request, "/explore", "group.html", deps, found=found, month=month, following=following,
        dimension=title(params.by), shown=_named(params.by, params.value), currency=currency,
        heads=[FIGURES[name] for name in ("allocated", "busy", "allocated_idle", "utilisation", "cost")],
        text=lambda column, row: figure_text(column, row, currency),
        before_short=figure_formatting.compared_short(*found.span_before, found.by_day, tz),
        changed=lambda column: changed(column, found.total, found.before, found.by_day),
        costs=_cost_chart(found, currency) if currency is not None else "", uses=_use_chart(found),
        as_of_ms=answer.as_of_ms, of_month=lambda other: group_address(params.by, params.value, str(other)),
        explore=explored({**where, "by": "job" if params.by != "job" else "pod"}),
        api=[(name, f"/v1/{name}?" + urlencode({**where, "by": "day"}, True, ":")) for name in ("usage", "cost")],
        known_before=figure_formatting.records_begin(*month.previous.span(tz), deps.ledger.status().extent[0], tz),
        related=_related(deps, params, month),
        linked=group_link, told=told, errors=node_list.errors_of(told or (), found.span),
        needs=node_list.needs_of(told or ()),
        week=figure_formatting.week_text(
            _week(found, currency), currency, unheld=params.value == IDLE or not of_holders((params.by,))
        ),
        deserved=any(day.deserved for day in found.days),
    )  # fmt: skip


def _week(found: Group, currency: str | None) -> tuple[WeekPart, ...]:
    return week_parts.week_parts(
        WholeDay(day.day, day.accounts.allocated, day.accounts.busy, day.accounts.allocated_idle,
                 day.cost if currency else None)
        for day in found.days if day.whole
    )  # fmt: skip


def _related(deps: Deps, params: GroupParams, month: Month) -> list[tuple[str, str]]:
    """Address and title of the other pages of a team or a queue: what it pays, and what it is due."""
    if params.by == "team" and params.value:
        bill = f"/team/{quote(params.value, safe='')}?month={month}"
        return [
            (bill, "Month of the team: bill and jobs"),
            *month_and_decision_pages.pages_of_queues(deps, team=params.value),
        ]
    return month_and_decision_pages.pages_of_queues(deps, queue=params.value) if params.by == "queue" else []


def _health(deps: Deps, gpu: str) -> tuple[GpuHealth, ...]:
    """What the agents of its nodes report of the errors of a GPU."""
    agents = deps.ledger.status().agents.values()
    return tuple(one for agent in agents for one in agent.gpus or () if one.gpu_uuid == gpu)


def _named(dimension: Dimension, value: str) -> str:
    if not value:
        return "unknown"
    return figure_formatting.queue(value) if dimension == "queue" else figure_formatting.name(value)


def _group(deps: Deps, params: GroupParams, month: Month, principal: Principal) -> CachedAnswer[Group]:
    timezone = deps.settings.timezone
    start, whole_end = month.span(periods.zone(timezone))
    allowed = principal.teams

    def compute() -> Group:
        at = deps.clock.wall_ms()
        with deps.ledger.moment(month.previous.span(periods.zone(timezone))[0], min(whole_end, at)) as moment:
            newest = moment.status().recent_span(home.whole_quarter(at), MS_PER_DAY)[1]
            end = min(whole_end, newest if newest > start else at)
            return figures(
                moment,
                deps.book(),
                GroupQuestion(params.by, params.value, month, end, allowed, timezone, deps.settings.kubernetes.watched),
                at,
            )

    teams = None if allowed is None else tuple(sorted(allowed))
    key = ("group", params.by, params.value, month, teams, page_queries.books(deps))
    return deps.answers.ask(key, compute)


@dataclass(frozen=True, slots=True)
class GroupQuestion:
    """A value of a dimension, in a month up to `end_ms`. teams: those whose time counts; None: all. watched: as in
    `queue_waits`."""

    by: Dimension
    value: str
    month: Month
    end_ms: int
    teams: Collection[str] | None
    timezone: str
    watched: str

    @property
    def span(self) -> Span:
        return self.month.span(periods.zone(self.timezone))[0], self.end_ms


def figures(moment: Moment, book: PriceBook | None, asked: GroupQuestion, found_ms: int) -> Group:
    """The figures of a value in a month."""
    by, value, teams, timezone = asked.by, asked.value, asked.teams, asked.timezone
    span = asked.span
    before, by_day = periods.compared_span(*span, moment.status().extent, periods.zone(timezone))
    policies = moment.status().policies(*span)
    values = _queues(policies, value) if by == "queue" else (value,)
    where: dict[Dimension, Collection[str]] = {} if teams is None else {"team": sorted(teams)}
    where[by] = values
    metered: Where | None = {by: values} if by in OF_GPUS else None
    question = Question(_OF_JOBS, where, timezone, "cost", "day")
    table = explore_table.table_of(moment, book, *span, question)
    whole = moment.usage(span, ("team",), None, timezone).lines() if teams is None else None
    totals = [_total(moment, book, one, question, metered) for one in (span, before)]
    held = [
        charge
        for charge in charge_table(moment, book, *span, BY_JOB, where, timezone).charges()
        if charge.account in ALLOCATED
    ]
    peaks = savings_hints.peaks_of(moment.usage(span, (*savings_hints.BY_NAME, "hour"), where, timezone))
    waits = None
    if by in ("team", "queue"):
        mine = teams is None or by == "queue"
        found = queue_waits(
            moment.pods(*span), *span, None if not mine or by == "queue" else value, watched=asked.watched
        )
        waits = tuple(
            row for row in found
            if (row.team == value if by == "team" else row.queue in values) and (teams is None or row.team in teams)
        )[:MOST]  # fmt: skip
    return Group(
        found_ms=found_ms,
        values=values,
        span=span,
        span_before=before,
        by_day=by_day,
        total=totals[0],
        before=totals[1],
        whole_us=None
        if whole is None
        else sum(line.accounts_gpu_us.allocated for line in whole if line.key["team"] != IDLE),
        days=_days(moment, book, asked, where, metered, policies if by == "queue" else (), values),
        **_jobs(table),
        hints=savings_hints.savings_hints(report_breakdowns.jobs(held), peaks)[:MOST],
        waits=waits,
        budgets=_budgets(moment, book, asked) if policies else (),
    )


def _total(moment: Moment, book: PriceBook | None, span: Span, question: Question, metered: Where | None) -> Row | None:
    """The sum of a span; None if nothing of the span is known. metered: the GPUs on whose records it rests."""
    if not any(line.accounts_gpu_us.is_known for line in moment.usage(span, (), metered, question.timezone).lines()):
        return None
    usage = explore_table.table_of(moment, book, *span, Question((), question.where, question.timezone, "cost", "day"))
    return usage.row(0) if len(usage) else usage.total(_none(), metered=True)


def _none() -> explore_table.Int64Array:
    import numpy as np

    return np.zeros(0, dtype=np.int64)


def _queues(policies: Sequence[PolicyVersion], name: str) -> tuple[str, ...]:
    """The queue and all queues below it, by the last of the policies."""
    found = [name]
    queues = policies[-1].policy.queues if policies else ()
    for above in found:
        found += [queue.name for queue in queues if queue.parent == above and queue.name not in found]
    return tuple(found)


def _jobs(table: explore_table.Table) -> dict[str, tuple[Row, ...]]:
    """The dearest jobs, those that left most idle, and those that used their GPUs best."""
    rows = [table.row(at) for at in range(len(table)) if table.keys[at][2]]
    held = [row for row in rows if row.line.accounts_gpu_us.allocated]
    whole = sum(row.line.accounts_gpu_us.allocated for row in held)
    used = FIGURES["utilisation"].of

    def first(rows: list[Row], rank: Callable[[Row], object]) -> tuple[Row, ...]:
        return tuple(sorted(rows, key=lambda row: (rank(row), row.key))[:MOST])

    large = [
        row for row in held
        if row.line.accounts_gpu_us.allocated * _LEAST_SHARE >= whole and used(row) is not None
    ]  # fmt: skip
    return {
        "dearest": first(held, lambda row: (-(row.cost or 0), -row.line.accounts_gpu_us.allocated)),
        "idlest": first(
            [row for row in held if row.line.accounts_gpu_us.allocated_idle],
            lambda row: -row.line.accounts_gpu_us.allocated_idle,
        ),
        "best": first(large, lambda row: -float(used(row) or 0)),
    }


def _days(
    moment: Moment,
    book: PriceBook | None,
    asked: GroupQuestion,
    where: Where,
    metered: Where | None,
    policies: Sequence[PolicyVersion],
    queues: Collection[str],
) -> tuple[GroupDay, ...]:
    timezone, tz = asked.timezone, periods.zone(asked.timezone)
    costs: list[dict[str, Decimal | None]] = []
    helds: list[dict[str, Accounts]] = []
    known: list[dict[str, float]] = []
    for begin, end in (asked.span, asked.month.previous.span(tz)):
        costs.append({
            day[-2:]: amount
            for (day,), amount in displayed_costs(moment, book, begin, end, ("day",), where, timezone).known.items()
        })  # fmt: skip
        helds.append({
            line.key["day"][-2:]: line.accounts_gpu_us
            for line in moment.usage((begin, end), ("day",), where, timezone).lines()
        })  # fmt: skip
        known.append({
            line.key["day"][-2:]: line.accounts_gpu_us.unmetered / line.accounts_gpu_us.total
            for line in moment.usage((begin, end), ("day",), metered, timezone).lines()
            if line.accounts_gpu_us.is_known
        })  # fmt: skip
    since_ms = moment.status().extent[0]
    found = []
    for day, begin, end in periods.days(*asked.span, tz):
        at = f"{day:%d}"
        found.append(
            GroupDay(
                f"{day:%-d %b}",
                day,
                week_parts.is_counted(day, (max(begin, since_ms), end), known[0].get(at, 1.0), tz),
                week_parts.is_weekend(day),
                known[0].get(at, 1.0),
                helds[0].get(at, Accounts()),
                costs[0].get(at, Decimal(0)),
                costs[1].get(at, Decimal(0)) if at in known[1] else None,
                helds[1].get(at, Accounts()).allocated if at in known[1] else None,
                _deserved(policies, queues, asked.teams, begin) * (end - begin) * US_PER_MS / US_PER_HOUR,
            )
        )
    return tuple(found)


def _deserved(
    policies: Sequence[PolicyVersion], queues: Collection[str], teams: Collection[str] | None, at_ms: int
) -> float:
    """The GPUs that the queues deserve at an instant, by the policy in force, as far as the reader may see their
    teams."""
    in_force = policies_between(policies, at_ms, at_ms + 1)
    if not in_force:
        return 0.0
    policy: Policy = in_force[-1].policy
    own = [queue for queue in policy.queues if queue.name in queues]
    parents = {queue.name for queue in own}
    return sum(
        queue.deserved for queue in own
        if queue.parent not in parents and (teams is None or policy.team_of(queue.name) in teams)
    )  # fmt: skip


def _budgets(moment: Moment, book: PriceBook | None, asked: GroupQuestion) -> tuple[BudgetState, ...]:
    if asked.by not in ("team", "queue"):
        return ()
    version = policy_at(moment.status(), asked.end_ms - 1)
    if version is None:
        return ()
    found, policy = [], version.policy
    for state in states(moment, book, policy, asked.month, asked.end_ms, asked.timezone):
        team = state.team or policy.team_of(state.queue)
        is_asked = state.queue == asked.value if asked.by == "queue" else team == asked.value
        if is_asked and (asked.teams is None or team in asked.teams):
            found.append(state)
    return tuple(found)


def _cost_chart(found: Group, currency: str) -> str:
    """The cost of each day, below a line with the same day of the month before."""
    columns = []
    for day in found.days:
        told = [day.name, f"Cost: {figure_formatting.money(day.cost, currency)} {currency}"]
        if day.cost_before is not None:
            told.append(f"Month before: {figure_formatting.money(day.cost_before, currency)} {currency}")
        if day.unknown:
            told.append(charts.unknown_text(day.unknown))
        columns.append(
            ChartColumn(
                day.name, day.name, "\n".join(told), [("a-busy", float(day.cost or 0))], day.unknown, None, day.weekend
            )
        )
    levels = [None if day.cost_before is None else float(day.cost_before) for day in found.days]
    return charts.stacked("explored", columns, f"Cost by day, {currency}",
                             "The line is the same day of the month before.", levels)  # fmt: skip


def _use_chart(found: Group) -> str:
    """The GPU-hours of each day by account, below a line: what the queues deserve, or else the month before."""
    deserved = any(day.deserved for day in found.days)
    columns = []
    for day in found.days:
        parts = [(name, getattr(day.accounts, name)) for name in HELD]
        told = [day.name, *(f"{figure_formatting.ACCOUNT_NAMES[name]}: {figure_formatting.hours(gpu_us)} GPU-h"
                            for name, gpu_us in parts if gpu_us)]  # fmt: skip
        if day.deserved:
            told.append(f"Deserved: {figure_formatting.one_decimal(day.deserved)} GPU-h")
        elif day.held_before is not None:
            told.append(f"Month before: {figure_formatting.hours(day.held_before)} GPU-h")
        if day.unknown:
            told.append(charts.unknown_text(day.unknown))
        columns.append(
            ChartColumn(
                day.name,
                day.name,
                "\n".join(told),
                [(f"a-{name}", gpu_us / US_PER_HOUR) for name, gpu_us in parts],
                day.unknown,
                weekend=day.weekend,
            )
        )
    levels = [
        day.deserved if deserved else None if day.held_before is None else day.held_before / US_PER_HOUR
        for day in found.days
    ]
    line = "what the queue deserves" if deserved else "the same day of the month before"
    return charts.stacked("explored held", columns, "GPU-hours held by day",
                             f"Parts from below: busy, idle, use unknown. The line is {line}.",
                             levels)  # fmt: skip
