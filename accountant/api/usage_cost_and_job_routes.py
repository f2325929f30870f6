"""Serves usage, cost, windows, waits, budgets and jobs, and stores the epochs that jobs report as finished.

Window boundaries and decay are defined in accountant.core.window_decay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query
from pydantic import Field, TypeAdapter, ValidationError

from accountant.api import query_parameters
from accountant.api.access_control import (
    ProgressPrincipal,
    Reader,
    body,
    check_teams,
    recorded_span,
    require_all_teams,
    team_filter,
)
from accountant.api.answer_cache import PackedList, PagedQuery, open_page, pack
from accountant.api.dependencies import AppDeps, Deps
from accountant.api.problems import Refusal, refuses, with_body
from accountant.api.query_parameters import (
    JOBS_WIDTH,
    Compared,
    CostParams,
    GroupedParams,
    Instant,
    Params,
    QuerySpan,
    SpanParams,
    UsageParams,
    WhereParams,
    asked,
    check_cost,
    edge,
    instant,
    invalid,
    with_span_before,
)
from accountant.billing import job_attempts, quota_usage
from accountant.billing import job_costs as asking
from accountant.billing.budget_forecast import states
from accountant.billing.displayed_costs import cost_with_amounts
from accountant.billing.idle_time_causes import broken_down
from accountant.billing.queue_waits import PodWait, WaitStatistics, wait_statistics, waits_within
from accountant.billing.usage_pricing import cost
from accountant.core import periods
from accountant.core.errors import UnsupportedQuestion
from accountant.core.periods import Month
from accountant.core.record_age import BURN_MS, SETTLE_MS
from accountant.core.window_decay import bounds
from accountant.ledger.protocols import (
    HIGHEST_EPOCH,
    MOST_EPOCHS,
    EpochReport,
    JobKey,
    Moment,
    QueuedPod,
    policy_at,
)
from accountant.ledger.usage import EarlierSpan, coverage
from accountant.reports.figure_formatting import age_note
from accountant.reports.unused_while_waiting import (
    GpuHour,
    by_unit,
    hours_of_cluster,
    together,
    unused_while_waiting,
)
from accountant.wire import window_decays
from accountant.wire.job_columns import LOST
from accountant.wire.option_types import JOB_ORDERS, JobKind, JobState, WaitGroup
from accountant.wire.policy_models import Decision, Measure, UsageWindow, WindowKind, WindowSpec
from accountant.wire.usage_cost_and_job_models import (
    BudgetState,
    CostAnswer,
    Dimension,
    GuaranteesAnswer,
    JobAnswer,
    JobsAnswer,
    JobsBefore,
    JobSort,
    QueueGuarantee,
    UnusedAnswer,
    UsageAnswer,
    UsageLine,
    WaitLine,
    WaitSpread,
)
from gputally.base.money import sum_if_known
from gputally.base.near_names import nearest, shown
from gputally.base.units import MS_PER_DAY, MS_PER_SECOND, US_PER_MS
from gputally.server.config_loading import Duration, Model, fault_text
from gputally.server.tokens_and_grants import Principal

figure_router = APIRouter(tags=["figures"])
Broken = Annotated[UsageParams, Query()]
REFUSALS = refuses("bad-page", "not-found", "page-gone", "invalid-parameter", "ledger-unavailable")


@figure_router.get("/v1/usage", summary="GPU time by account and group", responses=REFUSALS)
def usage(params: Broken, deps: AppDeps, principal: Reader) -> UsageAnswer:
    """Returns the GPU-microseconds of every account per group. Unless a filter or the caller's teams limit the answer,
    they add up to the capacity over all groups. Consecutive pages belong to one answer and add up to it, even if more
    is booked meanwhile. `coverage` is that of the whole span, without filters, and the same on every page."""
    page, where, zone, note = _open_query("usage", params, deps, principal, params.breakdown)

    most = deps.page_lines(params.limit)

    def compute() -> UsageAnswer | PackedList[UsageAnswer]:
        check_teams(deps, principal, params.where_team)
        check_cost(deps.ledger, deps.settings.limits, page.span, len(params.by), params.where_cluster)
        span = page.start_ms, page.end_ms
        with deps.ledger.moment(*span) as moment:
            lines: Sequence[UsageLine] = moment.usage(span, params.by, where, zone).lines()
            # The sum of all lines does not depend on the grouping, but filtered lines do not include all time.
            covered = coverage(moment.usage(span, ()) if where else lines)
            if params.breakdown:
                lines = broken_down(moment, lines, *span, params.by, where, zone)
        head = UsageAnswer(
            start_ms=page.start_ms, end_ms=page.end_ms, by=params.by, lines=(), coverage=covered, note=note
        )
        return pack(head, lines) if len(lines) > most else head.model_copy(update={"lines": tuple(lines)})

    return deps.answers.page(page, most, compute)


@figure_router.get("/v1/cost", summary="Exact cost by group", responses=REFUSALS)
def costs(params: Annotated[CostParams, Query()], deps: AppDeps, principal: Reader) -> CostAnswer:
    """Returns billed GPU time and its cost per group. Consecutive pages belong to one answer and add up to its `total`,
    which every page shows, even if more is booked or prices change meanwhile. Unpriced time never counts as free: if
    part of a group has no price, its cost is null, and `unpriced_gpu_us` says how much. `total` is also null if nothing
    of the span is metered."""
    page, where, zone, note = _open_query("cost", params, deps, principal, params.amounts)

    def compute() -> CostAnswer:
        check_teams(deps, principal, params.where_team)
        check_cost(deps.ledger, deps.settings.limits, page.span, len(params.by), params.where_cluster)
        span = page.start_ms, page.end_ms
        with deps.ledger.moment(*span) as moment:
            priced = cost_with_amounts if params.amounts else cost
            answer = priced(moment, deps.book(), *span, params.by, where, zone)
            if not coverage(moment.usage(span, ())):  # the cost is unknown
                answer = answer.model_copy(update={"total": None, "total_amount": None})
        return answer.model_copy(update={"note": note})

    return deps.answers.page(page, deps.page_lines(params.limit), compute)


def _open_query(
    address: str, params: GroupedParams, deps: Deps, principal: Principal, *more: object
) -> tuple[PagedQuery, Mapping[Dimension, tuple[str, ...]], str, str]:
    """Reads the parameters of a paged query: returns the page, the filters, the time zone and the note of the answer.
    Raises Refusal.

    more: further parameters that determine the answer."""
    now, limits, newest = deps.clock.wall_ms(), deps.settings.limits, deps.newest_ms()
    span = params.span(now, deps.settings.timezone, limits, newest)
    zone = span.timezone
    where = dict(params.where)
    where |= team_filter(principal, where.get("team", ()))
    question = [address, params.start, params.end, zone, params.by, sorted(where.items()), *more]
    page = open_page(question, span, now, params.page, limits)
    return page, where, zone, params.note(page.start_ms, page.at_ms, zone, newest, deps.silence_note())


class WindowParams(Params):
    kind: WindowKind = Field(default="sliding", description="The kind of window (docs/windows.md).")
    size: Duration = Field(default=604_800, gt=0, description="Seconds, or 7d, 12h, 1h30m.")
    start: Instant = None
    cron: str | None = Field(default=None, max_length=100, description="minute hour day month weekday: 0 0 * * 1")
    half_life: Duration | None = Field(default=None, gt=0, description="Age at which usage counts half.")
    decay: window_decays.Decay = Field(default="exact", description=window_decays.DECAY)
    calc_period: Duration = Field(default=300, gt=0, le=900, description=window_decays.CALC_PERIOD)
    measure: Measure = Field(default="allocated", description="The measure that is summed.")
    gpu_weight: tuple[str, ...] = Field(
        default=(),
        max_length=100,
        description="MODEL:WEIGHT (repeatable): the weight of a GPU model; `*`: of all others (default: 1).",
    )
    shard: str | None = Field(default=None, max_length=253, description="Only nodes of this scheduling shard.")
    cluster: str | None = Field(
        default=None, min_length=1, max_length=253, description="Only GPUs of this cluster; default: all clusters."
    )
    by: Literal["queue"] = Field(default="queue", description="The dimension of the figures.")
    at: Instant = None
    min_coverage: float = Field(default=0.98, ge=0, le=1, description="The coverage that the watermark needs.")


@figure_router.get(
    "/v1/windows",
    summary="Usage per queue over a window",
    responses=refuses("invalid-parameter", "unsupported-question"),
)
def window(params: Annotated[WindowParams, Query()], deps: AppDeps, principal: Reader) -> UsageWindow:
    """Returns usage over a window that ends at `at` (default now). A sliding window is the last `size` seconds. A
    tumbling one begins at the last boundary; the boundaries are multiples of `size` from `start` (default 1970). A cron
    window begins when the expression last fired, and a calendar window at the beginning of the month. The caller
    decides whether watermark and coverage are sufficient. With measure `cost`, usage is the cost of allocated time at
    the price book's prices, before commitments; time without a price lowers the coverage."""
    require_all_teams(principal)
    zone = periods.zone(deps.settings.timezone)
    at = deps.clock.wall_ms() if params.at is None else instant("at", params.at, zone)
    start = None if params.start is None else instant("start", params.start, zone)
    try:
        spec = WindowSpec(
            kind=params.kind,
            size=params.size,
            half_life=params.half_life,
            start=None if start is None else datetime.fromtimestamp(start / MS_PER_SECOND, UTC),
            cron=params.cron,
            decay=params.decay,
            calc_period=params.calc_period,
            gpu_weights=_weights(params.gpu_weight),
        )
    except ValidationError as error:
        raise invalid("kind", fault_text(error.errors()[0])) from error
    span = asked(*bounds(spec, at, zone), deps.settings.limits, parameter="size")
    _check_cost(deps, spec, span, params.cluster)
    query = spec, at, params.measure, params.min_coverage
    book, shard, cluster = deps.book(), params.shard, params.cluster
    if known := deps.ledger.status().window(*query, book=book, shard=shard, cluster=cluster):
        return known
    with deps.ledger.moment() as moment:
        return moment.window(*query, book=book, shard=shard, cluster=cluster)


def _check_cost(deps: Deps, spec: WindowSpec, span: QuerySpan, cluster: str | None) -> None:
    """Raises Refusal for a window that is too large. The window of the policy in force is always allowed. Nothing is
    computed."""
    most = deps.settings.limits.window_gpu_hours
    reason = query_parameters.refusal(deps.ledger, most, span, clusters=() if cluster is None else (cluster,))
    if not reason:
        return
    version = policy_at(deps.ledger.status(), span.end_ms)
    if version is not None and _unweighted(version.policy.window) == _unweighted(spec):
        return
    raise invalid("size", f"the window has {reason}, or for the window of the policy in force")


def _unweighted(spec: WindowSpec) -> WindowSpec:
    """Return the window with all models alike: a controller asks for the policy's window of each GPU model."""
    return spec.model_copy(update={"gpu_weights": {}})


def _weights(texts: Sequence[str]) -> dict[str, Decimal]:
    weights: dict[str, Decimal] = {}
    for text in texts:
        model, colon, weight = text.rpartition(":")
        try:
            weights[model] = Decimal(weight)
        except InvalidOperation:
            colon = ""
        if not colon or not model:
            raise invalid("gpu_weight", f"{text[:100]!r} is not MODEL:WEIGHT: write for example H100:4")
    return weights


wait_router = APIRouter(tags=["usage"])


class UnusedParams(SpanParams):
    cluster: str | None = Field(
        default=None, min_length=1, max_length=253, description="Only pods of this cluster; default: all clusters."
    )


class WaitParams(UnusedParams):
    by: WaitGroup = Field(default="queue", description="The dimension of the lines.")


@wait_router.get("/v1/waits", summary="How long pods waited", responses=refuses("invalid-parameter"))
def waits(params: Annotated[WaitParams, Query()], deps: AppDeps, principal: Reader) -> list[WaitLine]:
    """Returns the waiting times of the caller's teams: of the pods that waited in the span, as known at its end. A pod
    that was placed later counts as waiting, as in reports."""
    span = _wait_span(params, deps)
    with deps.ledger.moment() as moment:
        pods = _pods(moment, span, params.cluster)
    return _wait_lines(pods, span, params.by, deps, principal)


@wait_router.get(
    "/v1/waits/unused", summary="GPU time unused while pods waited", responses=refuses("invalid-parameter")
)
def unused(params: Annotated[UnusedParams, Query()], deps: AppDeps, principal: Reader) -> UnusedAnswer:
    """Returns the GPU time that nobody held, or that was held idle, while pods waited, by hour, day or month of the
    span, and in total: upper bounds of what waiting pods could have used, as sums of hours. They need to be known of
    all pods: of one cluster whose API server is read, and for callers that may see all teams."""
    span, now = _wait_span(params, deps), deps.clock.wall_ms()
    note = params.note(span.start_ms, now, span.timezone, deps.newest_ms(), deps.silence_note())
    unknown = _unused_unknown(params.cluster, deps, principal)
    if unknown:
        return _unused_answer((), (), span, unknown, note)
    with deps.ledger.moment(span.start_ms, span.end_ms) as moment:
        hours = _known_hours(moment, span, deps)
        pods = _pods(moment, span, deps.settings.kubernetes.watched)
    return _unused_answer(pods, hours, span, "", note)


def waits_and_unused(
    params: WaitParams, deps: Deps, principal: Principal
) -> tuple[QuerySpan, list[WaitLine], UnusedAnswer]:
    """The span of a question about waits, and the answers of both routes, as of one moment. Raises Refusal."""
    span = _wait_span(params, deps)
    unknown = _unused_unknown(params.cluster, deps, principal)
    with deps.ledger.moment(span.start_ms, span.end_ms) as moment:
        hours = [] if unknown else _known_hours(moment, span, deps)
        pods = _pods(moment, span, params.cluster)
    lines = _wait_lines(pods, span, params.by, deps, principal)
    of_hours = [pod for pod in pods if pod.cluster == deps.settings.kubernetes.watched]
    return span, lines, _unused_answer(of_hours, hours, span, unknown)


def _wait_span(params: UnusedParams, deps: Deps) -> QuerySpan:
    span = params.span(deps.clock.wall_ms(), deps.settings.timezone, deps.settings.limits)
    check_cost(deps.ledger, deps.settings.limits, span, clusters=() if params.cluster is None else (params.cluster,))
    return span


def _pods(moment: Moment, span: QuerySpan, cluster: str | None) -> list[QueuedPod]:
    return [pod for pod in moment.pods(span.start_ms, span.end_ms) if cluster in (None, pod.cluster)]


def _unused_unknown(cluster: str | None, deps: Deps, principal: Principal) -> str:
    """Why the caller learns nothing of unused time; "" if it does."""
    if principal.teams is not None:
        return "which GPUs were free is told to those alone who may see all teams"
    return deps.waiting_unknown(() if cluster is None else (cluster,))


def _known_hours(moment: Moment, span: QuerySpan, deps: Deps) -> list[GpuHour]:
    """The hours of the span up to the newest record of the cluster whose pods are known."""
    watched, status = deps.settings.kubernetes.watched, moment.status()
    end_ms = min(span.end_ms, deps.clock.wall_ms(), status.newest_by_cluster.get(watched, status.newest_ms))
    return hours_of_cluster(moment, span.start_ms, end_ms, span.timezone, watched) if span.start_ms < end_ms else []


def _unused_answer(
    pods: Sequence[QueuedPod], hours: Sequence[GpuHour], span: QuerySpan, unknown: str, note: str = ""
) -> UnusedAnswer:
    unit = periods.time_unit(span.start_ms, span.end_ms, periods.zone(span.timezone))
    lines = by_unit(unused_while_waiting(pods, hours), unit, span.timezone)
    total = together(lines) if lines else None
    if not unknown and total is None:
        unknown = "there are no records of this time"
    elif not unknown and total is not None and not total.known_ms:
        unknown = "in no hour is enough metered, and known for how many GPUs each waiting pod asked"
    return UnusedAnswer(
        start_ms=span.start_ms, end_ms=span.end_ms, unit=unit, total=total, lines=lines, unknown=unknown, note=note
    )


def _wait_lines(
    pods: Sequence[QueuedPod], span: QuerySpan, by: WaitGroup, deps: Deps, principal: Principal
) -> list[WaitLine]:
    groups: dict[str, list[tuple[str, PodWait]]] = defaultdict(list)
    for pod, wait in waits_within(pods, span.start_ms, min(deps.clock.wall_ms(), span.end_ms)):
        if principal.teams is None or pod.team in principal.teams:
            key = {"team": pod.team, "queue": pod.queue, "namespace": pod.facts.namespace}[by]
            groups[key].append((pod.cluster, wait))
    return [
        WaitLine(
            key=key,
            pods=len(group),
            waiting=sum(wait.waiting for _, wait in group) or (None if note else 0),
            queued=_wait_spread(wait_statistics(wait.queued_ms for _, wait in group)),
            starting=_wait_spread(wait_statistics(wait.starting_ms for _, wait in group)),
            note=note,
        )
        for key, group in sorted(groups.items())
        for note in [deps.waiting_unknown({cluster for cluster, _ in group})]
    ]


def _wait_spread(statistics: WaitStatistics) -> WaitSpread:
    if not statistics.pods:
        return WaitSpread(pods=0, mean=None, median=None, p95=None, longest=None)
    return WaitSpread(
        pods=statistics.pods,
        mean=statistics.mean_ms / 1000,
        median=statistics.median_ms / 1000,
        p95=statistics.p95_ms / 1000,
        longest=statistics.longest_ms / 1000,
    )


@figure_router.get("/v1/budgets", summary="Budgets, and what is spent of them", responses=refuses("ledger-unavailable"))
def budgets(deps: AppDeps, principal: Reader) -> list[BudgetState]:
    """Returns the budgets of the current month, in the policy's order. A caller that may see only some teams gets their
    budgets."""
    now, settings = deps.clock.wall_ms(), deps.settings
    version = policy_at(deps.ledger.status(), now)
    if version is None:
        return []
    month = Month.of(now, settings.zone)
    with deps.ledger.moment(month.span(settings.zone)[0], now) as moment:
        budget_states = states(moment, deps.book(), version.policy, month, now, settings.timezone)
    return [state for state in budget_states if principal.teams is None or state.team in principal.teams]


@figure_router.get(
    "/v1/guarantees",
    summary="What each queue is guaranteed and held on average",
    responses=refuses("ledger-unavailable"),
)
def guarantees(deps: AppDeps, principal: Reader) -> GuaranteesAnswer:
    """Returns the deserved quota of each queue without children, and the GPUs that it held on average in the span from
    `start_ms` to `end_ms`, the last minutes on record. What it holds at this instant may differ. A caller that may see
    only some teams gets their queues. Empty without a policy."""
    now = deps.clock.wall_ms()
    end = max(BURN_MS, min(now, deps.newest_ms() - SETTLE_MS))
    with deps.ledger.moment(end - BURN_MS, end) as moment:
        span = moment.status().recent_span(end, BURN_MS)
        whole = moment.usage(span, ())
        version = policy_at(moment.status(), span[1] - 1)
        rows: tuple[QueueGuarantee, ...] = ()
        if version is not None:
            by: tuple[Dimension, ...] = ("queue", *quota_usage.ModelSpans.of([version], *span).dimensions)
            rows = quota_usage.guarantees(version, moment.usage(span, by, None, deps.settings.timezone), *span)
    accounts = whole.sum_of_accounts()
    serving = quota_usage.gpus(accounts.total - accounts.down, (span[1] - span[0]) * US_PER_MS)
    teams = principal.teams
    return GuaranteesAnswer(
        start_ms=span[0],
        end_ms=span[1],
        coverage=coverage(whole),
        gpus=serving if teams is None and accounts.total else None,
        queues=tuple(row for row in rows if teams is None or row.team in teams),
    )


job_router = APIRouter(tags=["jobs"])
MOST_REPORTS = 1_000
"""Maximum number of reports in one request."""
Id = Annotated[
    str, Path(max_length=4_096, description="CLUSTER~NAMESPACE~KIND~NAME, as GET /v1/jobs writes it (`id`).")
]


class JobsParams(WhereParams):
    """Parameters of a list of jobs, which is filtered, sorted and paged. What the filters by dimension exclude of a job
    does not count."""

    state: JobState | None = Field(default=None, description="Only jobs in this state.")
    kind: JobKind | None = Field(
        default=None, description="Only notebooks, services (until deleted) or batch jobs (training; they end)."
    )
    idle: bool = Field(
        default=False,
        description="Only running jobs whose GPUs did nothing in the span, such as the last 30 minutes (start=30m).",
    )
    stopped: bool = Field(
        default=False,
        description="Only jobs of which a scheduler, or something else that evicts, stopped pods in the span.",
    )
    lost: bool = Field(
        default=False,
        description="With the GPU-hours held since the last checkpoint that stops lost (`stops`). The order by "
        "lost_gpu_hours has them too.",
    )
    search: str = Field(
        default="",
        max_length=253,
        description="Only jobs with this text in CLUSTER/NAMESPACE/KIND/NAME, or in CLUSTER/NAMESPACE/NAME of one of "
        "their pods, in any case.",
    )
    sort: JobSort = "name"
    compare: Compared = False
    page: str | None = Field(default=None, max_length=4096, description="`next_page` of the previous answer.")
    limit: int = Field(default=1_000, ge=1, description="Jobs of one page.")


class JobParams(SpanParams):
    """The span of one job: start defaults to the job's first use of a GPU, end to now."""


class EpochEnded(Model):
    """A training epoch that a job has finished. at: the end of the epoch; null: the time of the request."""

    epoch: int = Field(ge=0, le=HIGHEST_EPOCH)
    at: Instant = None


class ReportCount(Model):
    """The number of received reports. recorded: new ones; known: those of epochs that were already reported."""

    recorded: int
    known: int


_REPORTS = TypeAdapter(Annotated[tuple[EpochEnded, ...], Field(min_length=1, max_length=MOST_REPORTS)])


@job_router.get(
    "/v1/jobs",
    summary="Jobs and what they cost",
    responses=refuses("bad-page", "not-found", "page-gone", "invalid-parameter"),
)
def list_jobs(params: Annotated[JobsParams, Query()], deps: AppDeps, principal: Reader) -> JobsAnswer:
    """Lists the jobs of the caller's teams that held GPUs or had pods in the span, with their usage and cost in it.
    Consecutive pages belong to one answer and add up to its `total_cost`, which every page shows, even if more is
    booked or prices change meanwhile."""
    now, limits, newest = deps.clock.wall_ms(), deps.settings.limits, deps.newest_ms()
    span = params.span(now, deps.settings.timezone, limits, newest)
    zone = span.timezone
    where = {**params.where, **team_filter(principal, params.where_team)}
    order = JOB_ORDERS.read(params.sort)
    choice = asking.JobChoice(
        params.search, params.kind, order, params.idle, params.stopped, params.lost or order.column == LOST
    )
    question = ["jobs", params.start, params.end, zone, params.state, choice, sorted(where.items()), params.compare]
    page = open_page(question, span, now, params.page, limits)
    note = params.note(page.start_ms, page.at_ms, zone, newest, deps.silence_note()) or age_note(newest, page.at_ms)
    unknown = deps.waiting_unknown(params.where_cluster) if params.state == "waiting" else ""
    if unknown:
        note = f"{note}. " * bool(note) + f"Which jobs wait is known only as far as nodes say: {unknown}"

    lines = deps.page_lines(params.limit)

    def compute() -> JobsAnswer | PackedList[JobsAnswer]:
        check_teams(deps, principal, params.where_team)
        asked = QuerySpan(page.start_ms, page.end_ms, zone)
        spans = with_span_before(asked, deps.ledger.status().extent, compare=params.compare)
        for one in spans:
            check_cost(deps.ledger, limits, one, JOBS_WIDTH, params.where_cluster)
        book = deps.book()
        with deps.ledger.moment(spans[-1].start_ms, page.end_ms) as moment:
            before = EarlierSpan.of(asked[:2], moment, periods.zone(zone)) if params.compare else None
            listed = asking.list_jobs(moment, book, page.start_ms, page.end_ms, page.at_ms, where or None, zone, before)
            chosen = asking.chosen(listed, choice, params.state)
            held_before, cost_before = asking.before(chosen)
            metered = coverage(moment.usage((page.start_ms, page.end_ms), ()))
            head = JobsAnswer(
                start_ms=page.start_ms,
                end_ms=page.end_ms,
                currency=book.currency if book else None,
                price_book_version=book.version if book else "",
                jobs=(),
                count=len(chosen) or (None if unknown else 0),
                held_count=sum(1 for one in chosen if one.allocated_us),
                total_gpu_us=sum(one.allocated_us for one in chosen),
                total_cost=sum_if_known(one.cost for one in chosen) if metered else None,
                total_burn_per_hour=sum_if_known(listed.burn_rates(chosen).values()) if metered else None,
                before=None
                if before is None
                else JobsBefore(
                    start_ms=before.start_ms,
                    end_ms=before.end_ms,
                    coverage=before.coverage,
                    compared_ms=before.compared_ms,
                    total_gpu_us=held_before if before.known else None,
                    total_cost=cost_before if before.known else None,
                ),
                stops=asking.lost_by(chosen),
                note=note,
            )
            jobs = listed.built(chosen)
            return pack(head, jobs) if len(chosen) > lines else head.model_copy(update={"jobs": tuple(jobs)})

    return deps.answers.page(page, lines, compute)


@job_router.get(
    "/v1/jobs/{id}",
    summary="One job, by price and by epoch",
    responses=refuses("invalid-parameter", "not-found"),
)
def get_job(id: Id, params: Annotated[JobParams, Query()], deps: AppDeps, principal: Reader) -> JobAnswer:
    """Returns a job from its beginning until now, or over the requested span. The costs of its epochs and of the time
    after the last epoch add up to the job's cost exactly. `attempts` are the times of the span in which it held GPUs,
    with who stopped it and who held its GPUs next."""
    key, where = _job_key(id), team_filter(principal, ())
    now = deps.clock.wall_ms()
    zone = periods.zone(params.timezone or deps.settings.timezone)
    end = now if params.end is None else edge("end", params.end, zone, now)
    start = None if params.start is None else edge("start", params.start, zone, end)
    span = job_span(deps, principal, key, start, end)
    with deps.ledger.moment(span.start_ms, min(now, span.end_ms + job_attempts.NEXT_WITHIN_MS)) as moment:
        job = asking.job(moment, deps.book(), key, (span.start_ms, span.end_ms), now, where or None, zone.key)
        if job is None:
            raise unknown_job(deps, principal, key)
        decided = decisions_about(moment, key, span.start_ms, span.end_ms)
        return with_attempts(job, moment, span, decided, principal)


MOST_DECISIONS = 500


def decisions_about(moment: Moment, key: JobKey, start_ms: int, end_ms: int) -> list[Decision]:
    """The newest decisions of a span about a job's preemptions, and about its own claims."""
    until_ms = end_ms + job_attempts.CLOCKS_DIFFER_MS
    gangs = job_attempts.gangs_of(key)
    found = moment.decisions(start_ms, until_ms + 1, MOST_DECISIONS, kind="preemption", gang=gangs, cluster=key.cluster)
    if not found:
        return []
    names = {pod.facts.name for pod in moment.pods(start_ms, end_ms, of={key})}
    return job_attempts.decisions_about_job(found, key, names, moment.jobs_in(key.cluster, key.namespace))


def with_attempts(
    answer: JobAnswer,
    moment: Moment,
    span: QuerySpan,
    decisions: Sequence[Decision],
    principal: Principal,
) -> JobAnswer:
    """The answer with the attempts in the span, of which the caller sees what is of its teams. The moment must have
    been opened for the span and `NEXT_WITHIN_MS` more."""
    key = JobKey(answer.job.cluster, answer.job.namespace, answer.job.job)
    began = asking.beginning(moment, key, span.end_ms)
    whole = began is None or began >= span.start_ms
    nodes = moment.status().nodes
    try:
        found = job_attempts.attempts(moment, key, span[:2], decisions, nodes, principal.teams, whole=whole)
    except UnsupportedQuestion:
        return answer
    return answer.model_copy(update={
            "attempts": found.newest, "earlier_attempts": found.earlier,
            "lost_gpu_us": found.stops.lost_gpu_us, "known_lost_gpu_us": found.stops.known_lost_gpu_us,
        })  # fmt: skip


def job_span(
    deps: Deps, principal: Principal, key: JobKey, start_ms: int | None, end_ms: int, *, cut: bool = False
) -> QuerySpan:
    """The span of a query about one job. Raises Refusal for one that is too long or too large, or that ends before the
    job began.

    start_ms: None for the job's beginning.
    cut: shorten a span that is too long, instead of refusing it."""
    limits = deps.settings.limits
    if start_ms is None:
        with deps.ledger.moment() as moment:
            start_ms = asking.beginning(moment, key, end_ms)
        if start_ms is None or start_ms >= end_ms:
            raise unknown_job(deps, principal, key)
        if cut:
            start_ms = max(start_ms, end_ms - limits.span_days * MS_PER_DAY)
    span = asked(start_ms, end_ms, limits)
    check_cost(deps.ledger, limits, span, clusters=(key.cluster,))
    return span


def unknown_job(deps: Deps, principal: Principal, key: JobKey) -> Refusal:
    """The refusal of a job that had no GPU and no pod in the queried span. It names similar jobs of the namespace, but
    not to a principal that may see only some teams."""
    near = "" if principal.teams is not None else nearest(key.job, _jobs_beside(deps, key))
    detail = f"no job {shown(key.id)} that this caller may see had a GPU or pods in the queried time{near}"
    return Refusal("not-found", detail)


def _jobs_beside(deps: Deps, key: JobKey) -> set[str]:
    """The jobs of the same namespace, now or in the past."""
    start, end = recorded_span(deps)
    where: dict[Dimension, tuple[str, ...]] = {"cluster": (key.cluster,), "namespace": (key.namespace,)}
    with deps.ledger.moment(start, end) as moment:
        jobs = set(moment.jobs_in(key.cluster, key.namespace))
        if start < end:
            jobs |= {line.key["job"] for line in moment.usage((start, end), ("job",), where).lines()}
    return jobs


@job_router.post(
    "/v1/jobs/{id}/progress",
    summary="Report finished epochs of a job",
    **with_body(
        EpochEnded, "invalid-parameter", "not-found", "too-many-epochs", "ledger-unavailable", at_most=MOST_REPORTS
    ),
)
def report_progress(
    id: Id,
    epochs: Annotated[tuple[EpochEnded, ...], body(_REPORTS, "progress")],
    deps: AppDeps,
    principal: ProgressPrincipal,
) -> ReportCount:
    """Stores when epochs of a job ended. Of several reports of one epoch, the earliest instant counts, in whatever
    order they arrive. The answer for a job that the ledger does not know yet is 404: report again later."""
    key = _job_key(id)
    now, zone = deps.clock.wall_ms(), periods.zone(deps.settings.timezone)
    reports = [EpochReport(key, epoch.epoch, _end_of_epoch(epoch, now, zone), principal.name) for epoch in epochs]
    return _store_reports(deps, principal, key, reports, now)


def _store_reports(
    deps: Deps, principal: Principal, key: JobKey, reports: list[EpochReport], now_ms: int
) -> ReportCount:
    with deps.ledger.moment() as moment:
        _check_reporter(moment, principal, key)
        known = {report.epoch for report in moment.epochs(of={key})}
    if len(known | {report.epoch for report in reports}) > MOST_EPOCHS:
        raise Refusal("too-many-epochs", f"a job may have at most {MOST_EPOCHS} epochs: report only every tenth")
    new = deps.ledger.report_epochs(reports, now_ms)
    return ReportCount(recorded=new, known=len(reports) - new)


def _check_reporter(moment: Moment, principal: Principal, key: JobKey) -> None:
    """Raises Refusal if a pod reports for a job other than its own, or if a person or program reports for a job that
    has held no GPU yet, or that the caller's teams did not pay for."""
    if principal.pod is not None and principal.cluster is not None:
        if moment.job_of(principal.cluster, principal.pod) != key:
            raise Refusal("forbidden", f"{principal.name!r} may report progress only for its own job")
        return
    extent = moment.extents({key}).get(key)
    if extent is not None and principal.progress_teams is not None:
        paid = moment.usage(extent, ("team",), asking.only_job(key)).lines()
        extent = extent if {line.key["team"] for line in paid} & principal.progress_teams else None
    if extent is None:
        raise Refusal(
            "not-found",
            f"no job {key.id[:200]!r} that this caller may report on has held a GPU yet: report again later",
        )


def _job_key(text: str) -> JobKey:
    try:
        return JobKey.parse(text)
    except ValueError as error:
        raise invalid("id", str(error)) from error


def _end_of_epoch(epoch: EpochEnded, now_ms: int, zone: ZoneInfo) -> int:
    at = now_ms if epoch.at is None else instant("at", epoch.at, zone)
    if at > now_ms:
        raise invalid("at", f"epoch {epoch.epoch} ends in the future: report it when it has ended")
    return at
