"""Queries the ledger for the data of the pages, through the answer cache.

Invariants:
- The cache key of an answer contains everything on which the answer depends, besides the records: the span, who may see
  it, prices and acts.
- Lists of jobs are cut to what a page can show before they are cached: a month of a large fleet has tens of thousands
  of jobs.

The page modules send quick queries to the ledger directly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo

from accountant.api.answer_cache import CachedAnswer
from accountant.api.dependencies import Deps
from accountant.api.node_routes import NodesParams
from accountant.api.query_parameters import QuerySpan, SpanParams
from accountant.billing import job_costs, statement_breakdown, statements
from accountant.billing.charge_table import Groups
from accountant.billing.cost_allocation import billed_tables
from accountant.billing.job_costs import JobChoice, JobList
from accountant.billing.statement_breakdown import Cut
from accountant.billing.statements import Statement
from accountant.core import periods
from accountant.core.claim_overlap import Span
from accountant.core.errors import UnsupportedQuestion
from accountant.core.periods import Month
from accountant.ledger.protocols import GpuOwnership, Moment, ReadableLedger, policy_at
from accountant.ledger.usage import EarlierSpan, Where
from accountant.reports import figure_formatting, node_list, report_builder
from accountant.reports.node_list import Machine
from accountant.reports.report_builder import Readings
from accountant.web import explore_table, home, page_rows
from accountant.web.explore_table import Explored, Question
from accountant.wire import decision_text
from accountant.wire.option_types import JobState
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Job
from gputally.base.instants import is_duration
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR

MOST_JOBS = 500
DEAREST: Final = JobChoice()
IDLE_NOW: Final[Mapping[str, str]] = {
    "start": "30m", "state": "running", "idle": "true", "sort": "burn:desc", "columns": "team,user,gpus,idle,burn"
}  # fmt: skip
"""The parameters of the running jobs whose GPUs have done nothing of late."""


_LOOK_BACK_MS = 7 * MS_PER_DAY
"""Maximum age of the newest record about a queue's share."""
_RECORDS = 200
_WEIGHTS = 20
"""Newest decisions about a queue that are read, of all targets."""


@dataclass(frozen=True, slots=True)
class KnownDemand:
    """The known demand for GPUs.

    unknown: why nobody knows which pods wait; "" if `waiting` is complete.
    asks: the GPUs that each leaf queue requests, from the fairshare controller's newest decisions."""

    unknown: str
    waiting: tuple[page_rows.Waiting, ...]
    asks: tuple[decision_text.QueueStanding, ...]

    @property
    def known(self) -> bool:
        return bool(not self.unknown or self.waiting or self.asks)


@dataclass(frozen=True, slots=True)
class CurrentDemand:
    """The present use of GPUs, and the demand for them."""

    held: page_rows.CurrentUse
    demand: KnownDemand


def records(ledger: ReadableLedger, at_ms: int, queues: Iterable[str] = ()) -> list[Decision]:
    """The newest records of the controller's cycles until an instant, and the newest weights of these queues, for
    `decision_text.shares`."""
    since, found = at_ms - _LOOK_BACK_MS, []
    with ledger.moment() as moment:
        for subject, most in ((decision_text.EVERYTHING, _RECORDS), *((queue, _WEIGHTS) for queue in queues)):
            found += moment.decisions(since, at_ms + 1, most, kind="weight", subject=subject)
    return found


def demand(deps: Deps, waiting: tuple[page_rows.Waiting, ...], at_ms: int) -> KnownDemand:
    """The demand for GPUs: waiting pods, and the requests of queues in the controller's records."""
    version = policy_at(deps.ledger.status(), at_ms)
    queues = () if version is None else version.policy.queues
    parents = {queue.parent for queue in queues}
    leaves = [queue.name for queue in queues if queue.name not in parents]
    shares = decision_text.shares(records(deps.ledger, at_ms), leaves) if leaves else []
    asks = tuple(share for share in shares if share.asks is not None and share.holds is not None)
    return KnownDemand(deps.waiting_unknown(), waiting, asks)


def current_demand(deps: Deps) -> CachedAnswer[CurrentDemand]:
    """Returns the use of GPUs in the newest quarter of an hour (in a lake: hour) for which the nodes that report have
    records (`page_rows.known_until`)."""

    def compute() -> CurrentDemand:
        at = deps.clock.wall_ms()
        with deps.ledger.moment(at - BUCKET_MS, at) as moment:
            status = moment.status()
        end = page_rows.known_until(status.watermark(at, page_rows.TRUSTED), status.newest_by_node, at)
        with deps.ledger.moment(end - BUCKET_MS, end) as moment:
            span = moment.status().recent_span(end, BUCKET_MS)
            use = page_rows.current_use(moment, deps.book(), *span, deps.settings.timezone)
            waiting = page_rows.waiting(moment.pods(at - 1, at, waiting=True), at)
        return CurrentDemand(use, demand(deps, waiting, at))

    return deps.answers.ask(("now", books(deps)), compute)


def home_of(deps: Deps, now: Span) -> CachedAnswer[home.Home]:
    """The figures of the first page beside the present. now: the newest metered span."""

    def compute() -> home.Home:
        at, timezone = home.whole_quarter(deps.clock.wall_ms()), deps.settings.timezone
        with deps.ledger.moment(*home.span_of(at, timezone)) as moment:
            end = moment.status().recent_span(at, MS_PER_DAY)[1]
            return home.figures(moment, deps.book(), end, now, timezone)

    return deps.answers.ask(("home", books(deps)), compute)


def recorded_of(deps: Deps, month: Month) -> bool:
    """Whether there are records of the month. Without records its figures are unknown, not zero."""
    first_ms, newest_ms = deps.ledger.status().extent
    start, end = month.span(periods.zone(deps.settings.timezone))
    return newest_ms > start and first_ms < end


def month_so_far(deps: Deps, month: Month) -> CachedAnswer[page_rows.MonthSoFar]:
    """The sums of the current month up to now. month: the current month."""

    def compute() -> page_rows.MonthSoFar:
        return page_rows.month_so_far(deps.ledger, deps.book(), deps.clock.wall_ms(), deps.settings.timezone)

    return deps.answers.ask(("month so far", month, books(deps)), compute)


@dataclass(frozen=True, slots=True)
class ListSpan:
    """The span of a list.

    end_ms: None for now, at any time another now.
    is_recent: whether it is the last hours or days up to now, of which a lake has whole hours only.
    compared: whether it is compared with the span before."""

    start_ms: int
    end_ms: int | None
    timezone: str
    is_recent: bool = False
    compared: bool = False

    def until(self, at_ms: int) -> int:
        return at_ms if self.end_ms is None else min(self.end_ms, at_ms)

    def within(self, moment: Moment, at_ms: int) -> Span:
        """The span that the ledger answers about."""
        end_ms = self.until(at_ms)
        return (
            moment.status().recent_span(end_ms, end_ms - self.start_ms) if self.is_recent else (self.start_ms, end_ms)
        )

    @contextmanager
    def moment(self, deps: Deps, at_ms: int) -> Iterator[tuple[Moment, Span, EarlierSpan | None]]:
        """Opens a moment; yields the span that the ledger answers about, and the one before if it is compared."""
        zone, until = periods.zone(self.timezone), self.until(at_ms)
        # An hour more, because the span that a lake answers about may begin earlier.
        first = periods.span_before(self.start_ms, until, zone)[0] - MS_PER_HOUR if self.compared else self.start_ms
        with deps.ledger.moment(first, until) as moment:
            within = self.within(moment, at_ms)
            yield moment, within, EarlierSpan.of(within, moment, zone) if self.compared else None

    @classmethod
    def of(cls, params: SpanParams, deps: Deps, *, compared: bool = False) -> ListSpan:
        """The span that a request asks for. Raises Refusal."""
        now = deps.clock.wall_ms()
        span = params.span(now, deps.settings.timezone, deps.settings.limits, deps.newest_ms())
        end_ms = None if params.end is None and span.end_ms >= now else span.end_ms
        is_recent = end_ms is None and params.start is not None and is_duration(params.start)
        return cls(span.start_ms, end_ms, span.timezone, is_recent, compared)

    @classmethod
    def of_month(cls, month: Month, deps: Deps) -> ListSpan:
        """A month in the ledger's time zone."""
        start, end = month.span(periods.zone(deps.settings.timezone))
        return cls(start, end if end <= deps.clock.wall_ms() else None, deps.settings.timezone)


@dataclass(frozen=True, slots=True)
class ListedJobs:
    """The first MOST_JOBS jobs of each state, and of all states under None. before: the span that they are compared
    with, if they are."""

    of_state: Mapping[JobState | None, page_rows.Jobs]
    before: EarlierSpan | None

    def of(self, state: JobState | None) -> page_rows.Jobs:
        return self.of_state.get(state, page_rows.NO_JOBS)


def jobs_of(
    deps: Deps,
    span: ListSpan,
    where: Where,
    choice: JobChoice = DEAREST,
    skipped: int = 0,
    check: Callable[[], None] = lambda: None,
) -> CachedAnswer[ListedJobs]:
    """The first jobs of each state in the chosen order. skipped: leave out this number of jobs before them. check:
    refuses what is too large to be computed."""

    def compute() -> ListedJobs:
        check()
        with _listed(deps, span, where) as (jobs, before):
            return ListedJobs(page_rows.jobs_by_state(jobs, MOST_JOBS, choice, skipped), before)

    return deps.answers.ask(("jobs", span, _filters(where), choice, skipped, books(deps)), compute)


def every_job(
    deps: Deps, span: ListSpan, where: Where, choice: JobChoice, state: JobState | None, most: int | None = None
) -> list[Job]:
    """All jobs in a state, or the first ones, in the chosen order; as `jobs_of`. Not cached: it is as long as the
    ledger has jobs."""
    with _listed(deps, span, where) as (jobs, _):
        return list(jobs.built(job_costs.chosen(jobs, choice, state)[:most]))


@contextmanager
def _listed(deps: Deps, span: ListSpan, where: Where) -> Iterator[tuple[JobList, EarlierSpan | None]]:
    at = deps.clock.wall_ms()
    with span.moment(deps, at) as (moment, within, before):
        yield job_costs.list_jobs(moment, deps.book(), *within, at, where or None, span.timezone, before), before


def _filters(where: Where) -> Hashable:
    """A filter as a part of a cache key."""
    return tuple(sorted((name, tuple(sorted(values))) for name, values in where.items()))


@dataclass(frozen=True, slots=True)
class ListedNodes:
    """The nodes of a span, by cluster and name. before: the span that they are compared with, if they are."""

    nodes: tuple[Machine, ...]
    before: EarlierSpan | None


def machines(
    deps: Deps, span: ListSpan, where: Where = MappingProxyType({}), check: Callable[[], None] = lambda: None
) -> CachedAnswer[ListedNodes]:
    """The nodes of a span. check: refuses what is too large to be computed."""

    def compute() -> ListedNodes:
        check()
        with span.moment(deps, deps.clock.wall_ms()) as (moment, within, before):
            return ListedNodes(node_list.machines(moment, *within, where or None, span.timezone, before), before)

    return deps.answers.ask(("machines", span, _filters(where), books(deps)), compute)


def before_text(earlier: EarlierSpan | None, zone: ZoneInfo) -> str:
    """What a list is compared with; "" if with nothing."""
    if earlier is None:
        return ""
    return figure_formatting.compared_text(earlier.start_ms, earlier.end_ms, earlier.days, zone)


def recent_nodes(deps: Deps) -> ListSpan:
    """The span of a list of nodes if the request has none."""
    return ListSpan.of(NodesParams(), deps)


def gpus_of(deps: Deps, cluster: str, node: str) -> tuple[GpuOwnership, ...] | None:
    """The GPUs that ever belonged to the node, or that it claims; None if the ledger does not know them."""
    with deps.ledger.moment() as moment, suppress(UnsupportedQuestion):
        return tuple(gpu for gpu in moment.gpu_owners() if gpu.cluster == cluster and node in gpu.nodes)
    return None


def _so_far(deps: Deps, month: Month) -> tuple[int, int]:
    """The span of a month, up to now."""
    start, end = month.span(periods.zone(deps.settings.timezone))
    return start, min(end, deps.clock.wall_ms())


def coverage(deps: Deps, month: Month) -> CachedAnswer[tuple[page_rows.NodeCoverage, ...]]:
    """The coverage of each node in a month, up to now."""

    def compute() -> tuple[page_rows.NodeCoverage, ...]:
        start, end = _so_far(deps, month)
        with deps.ledger.moment(start, end) as moment:
            return page_rows.by_node(moment, start, end)

    return deps.answers.ask(("coverage", month, books(deps)), compute)


def unmetered_spans(deps: Deps, month: Month, most: int) -> CachedAnswer[tuple[page_rows.UnmeteredSpan, ...]]:
    """When time of a month is unmetered, up to now. most: nodes that are looked at, those that lack most."""

    def compute() -> tuple[page_rows.UnmeteredSpan, ...]:
        start, end = _so_far(deps, month)
        with deps.ledger.moment(start, end) as moment:
            lacking = [row for row in page_rows.by_node(moment, start, end) if row.unmetered_us]
            return page_rows.unmetered_spans(moment, start, end, lacking[:most])

    return deps.answers.ask(("unmetered", month, books(deps)), compute)


@dataclass(frozen=True, slots=True)
class MonthReadings:
    """The data of a month's reports, for the cluster and for each team. found_ms: when it was read."""

    found_ms: int
    readings: Readings

    @property
    def nbytes(self) -> int:
        return self.readings.nbytes


def readings_of(deps: Deps, month: Month, team: str | None = None) -> CachedAnswer[MonthReadings]:
    """The data of the month's report of the cluster or a team. It is read once for all teams, so that other report
    pages need not wait, and again for a team that it leaves out."""
    timezone = deps.settings.timezone
    start, whole_end = month.span(periods.zone(timezone))

    def read(scopes: tuple[str] | None) -> MonthReadings:
        at = deps.clock.wall_ms()
        return MonthReadings(
            at,
            report_builder.readings(
                deps.ledger,
                deps.books,
                start,
                min(whole_end, at),
                timezone,
                month,
                scopes,
                watched=deps.settings.kubernetes.watched,
            ),
        )

    # A report compares with the month before.
    mark = _unchanged(deps, periods.span_before(start, whole_end, periods.zone(timezone))[0], whole_end)
    key = ("readings", month, deps.books.status(month), books(deps))
    whole = deps.answers.ask(key, lambda: read(None), mark)
    if team is None or whole.value.readings.has(team):
        return whole
    return deps.answers.ask((*key, team), lambda: read((team,)), mark)


@dataclass(frozen=True, slots=True)
class Bills:
    """The bills of a month by job, node or another grouping, from which the figures of its pages are itemised.

    found_ms: when they were computed.
    stated: the statement of these bills, without corrections, credits and charges."""

    found_ms: int
    stated: Statement
    groups: Groups

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes


def bills_of(deps: Deps, month: Month, by: Cut) -> CachedAnswer[Bills]:
    """The bills of a month from its records, at the month's prices."""
    (key,), mark = _bills_keys(deps, month, (by,))
    return deps.answers.ask(key, lambda: _bills(deps, month, (by,))[0], mark)


def all_bills_of(deps: Deps, month: Month) -> None:
    """Caches the bills of a month in all groupings, which are computed together from one snapshot."""
    cuts = tuple(statement_breakdown.DIMENSIONS)
    keys, mark = _bills_keys(deps, month, cuts)
    deps.answers.ask_together(keys, lambda: _bills(deps, month, cuts), mark)


def _bills_keys(deps: Deps, month: Month, cuts: Sequence[Cut]) -> tuple[list[Hashable], Callable[[], Hashable] | None]:
    """The cache key of each grouping, and the mark of a past month."""
    start, whole_end = month.span(periods.zone(deps.settings.timezone))
    versions = deps.books.status(month), prices_and_policy(deps)
    return [("bills", month, by, *versions) for by in cuts], _unchanged(deps, start, whole_end)


def _unchanged(deps: Deps, start_ms: int, end_ms: int) -> Callable[[], Hashable] | None:
    """A function that returns the mark of a past span (accountant.api.answer_cache). None for a span that has not
    ended."""
    return (lambda: deps.ledger.status().mark(start_ms, end_ms)) if end_ms <= deps.clock.wall_ms() else None


def _bills(deps: Deps, month: Month, cuts: Sequence[Cut]) -> list[Bills]:
    at, timezone = deps.clock.wall_ms(), deps.settings.timezone
    start, whole_end = month.span(periods.zone(timezone))
    end = min(whole_end, at)
    book = deps.books.priced_by(deps.books.kept(month))
    with deps.ledger.moment(start, end) as moment:
        groupings = [statement_breakdown.DIMENSIONS[by] for by in cuts]
        tables = billed_tables(moment, book, start, end, groupings, timezone)
    of_cuts = [table.by_line() for table in tables]
    return [
        Bills(at, statements.build(bills.charges, book, (), start, end, timezone), bills.groups) for bills in of_cuts
    ]


def explored(
    deps: Deps,
    identity: Hashable,
    asked: Question,
    spans: Callable[[], Sequence[QuerySpan]],
    most_series: int,
    *,
    ends: bool,
) -> CachedAnswer[Explored]:
    """The answer of the page Explore.

    identity: distinguishes the question.
    ends: whether the span has an end of its own; otherwise it ends now, at any time another now.
    spans: returns the span, and the one to compare it with, if there is one, at the time at which it is called."""

    def compute() -> Explored:
        at = deps.clock.wall_ms()
        span, *before = spans()
        with deps.ledger.moment(min(one.start_ms for one in (span, *before)), span.end_ms) as moment:
            return explore_table.explore(
                moment, deps.book(), span[:2], asked, at, most_series, figure_formatting.name, compare=bool(before)
            )

    span, *before = spans()
    mark = _unchanged(deps, min(one.start_ms for one in (span, *before)), span.end_ms) if ends else None
    return deps.answers.ask(("explored", identity, books(deps)), compute, mark)


def prepare_answers(deps: Deps, month: Month) -> None:
    """Caches the answers of the most visited pages, except reports. month: the current month. Raises
    AccountantError."""
    present = current_demand(deps).value.held
    home_of(deps, (present.start_ms, present.end_ms))
    month_so_far(deps, month)
    coverage(deps, month)
    machines(deps, recent_nodes(deps))
    jobs_of(deps, ListSpan.of(SpanParams(), deps), {})


def books(deps: Deps) -> Hashable:
    """A value that changes with the price book, the policy or the administrative acts."""
    return prices_and_policy(deps), deps.ledger.status().last_act


def prices_and_policy(deps: Deps) -> Hashable:
    """A value that changes with the price book or the policy."""
    book = deps.book()
    policy = policy_at(deps.ledger.status(), deps.clock.wall_ms())
    return book.version if book else "", policy.version if policy else ""
