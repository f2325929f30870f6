"""Computes the rows, totals and links that the pages show, and divides long lists into pages.

The templates, which accountant.web.month_and_decision_pages renders, only format them. The present instant is an
argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Generic, TypeVar
from urllib.parse import urlencode

from accountant.billing.charge import ALLOCATED, BILLED, Account, quantify, unpriced_us
from accountant.billing.cost_allocation import statement
from accountant.billing.job_costs import JobChoice, JobFigures, JobList, chosen, lost_by
from accountant.billing.queue_waits import pod_wait
from accountant.billing.statements import Adjustment, Correction
from accountant.billing.usage_pricing import charge_table
from accountant.bookkeeping.act_contents import booked_by
from accountant.core.periods import Month, zone
from accountant.core.record_age import is_old
from accountant.ledger.journal import Acts
from accountant.ledger.protocols import Moment, QueuedPod, ReadableLedger
from accountant.ledger.usage import ACCOUNTS, PRICED_BY, START_UP
from accountant.prices.price_book import PriceBook
from accountant.reports.report_breakdowns import AccountRow, share
from accountant.wire.option_types import JobState
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, Job, JobsStops, UsageLine
from gputally.base.gpu_resources import requested_devices
from gputally.base.money import exact_sum, sum_if_known
from gputally.base.units import MS_PER_HOUR, US_PER_MS

_OF_HOLDING: Final[tuple[Dimension, ...]] = ("cluster", "team", "namespace", "job", "gpu_model")
TRUSTED = 0.98
"""Minimum coverage for a span to count as known."""
MOST_HOLDERS = 40


@dataclass(frozen=True, slots=True)
class HeldWorkload:
    """A workload and the GPUs that it holds on average over the displayed span."""

    cluster: str
    team: str
    namespace: str
    job: str
    gpu_model: str
    gpus: float
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class CurrentUse:
    """The use of GPUs in the newest metered quarter of an hour, [start_ms, end_ms).

    starting_us, gang_waiting_us: parts of its idle time.
    burn_per_hour: cost of an hour at this rate, without unpriced time; None without a price book.
    unpriced_gpus: held GPUs without a price; 0 without a price book."""

    start_ms: int
    end_ms: int
    accounts: tuple[AccountRow, ...]
    gpus: float
    holders: tuple[HeldWorkload, ...]
    held_gpus: float
    more_holders: int
    starting_us: int
    gang_waiting_us: int
    burn_per_hour: Decimal | None
    unpriced_gpus: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Pods of a queue that request GPUs and are on no node.

    gpus: requested devices, including MIG instances and replicas.
    longest_ms: time since the oldest was created."""

    team: str
    queue: str
    pods: int
    gpus: int
    longest_ms: int


@dataclass(frozen=True, slots=True)
class TeamSoFar:
    """A team's month so far. cost: payable, without unpriced time; None without a price book."""

    team: str
    allocated_us: int
    utilisation: float | None
    share: float | None
    cost: Decimal | None
    unpriced_us: int


@dataclass(frozen=True, slots=True)
class MonthSoFar:
    """The current month so far.

    total: sum of the teams' costs; None without a price book.
    recorded: whether there is any record of this month; without one the figures are unknown, not zero."""

    month: Month
    teams: tuple[TeamSoFar, ...]
    allocated_us: int
    utilisation: float | None
    total: Decimal | None
    currency: str | None
    unpriced_us: int
    coverage: float
    recorded: bool


@dataclass(frozen=True, slots=True)
class NodeCoverage:
    """One node's current month so far. capacity_us: without down time."""

    cluster: str
    node: str
    capacity_us: int
    unmetered_us: int
    down_us: int

    @property
    def coverage(self) -> float | None:
        return share(self.capacity_us - self.unmetered_us, self.capacity_us)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs in one state, or in any.

    shown: some of the `count` jobs, one after the other in the order of the list.
    held: how many of them held a GPU in the span; the others waited, or ended without one.
    total: the sum of the known costs.
    unpriced: whether the cost of a job is unknown.
    burn_per_hour: the sum of their costs an hour; None if one is unknown.
    stops: what stops of all of them lost; None if that was not asked.
    before: the sums of the span before, if the list is compared with it and anything is known of it."""

    shown: tuple[Job, ...]
    count: int
    allocated_us: int
    idle_us: int
    total: Decimal
    unpriced: bool
    before: Jobs | None = None
    burn_per_hour: Decimal | None = None
    held: int = 0
    stops: JobsStops | None = None


NO_JOBS = Jobs((), 0, 0, 0, Decimal(0), unpriced=False, burn_per_hour=Decimal(0))


def jobs_by_state(jobs: JobList, most: int, choice: JobChoice, skipped: int = 0) -> dict[JobState | None, Jobs]:
    """The chosen jobs of each state that occurs, and those of all states under None, in their order. most: maximum
    number of jobs for each, which are the only ones that are built. skipped: number of jobs before them."""
    part = slice(skipped, skipped + most)
    ordered = chosen(jobs, choice)
    by_state: dict[JobState | None, list[JobFigures]] = {None: ordered}
    for one in ordered:
        by_state.setdefault(one.state, []).append(one)
    shown = list({one.key: one for of_state in by_state.values() for one in of_state[part]}.values())
    built = {one.key: job for one, job in zip(shown, jobs.built(shown), strict=True)}
    rates = jobs.burn_rates(ordered)
    return {
        state: replace(
            _jobs(of_state, tuple(built[one.key] for one in of_state[part])),
            burn_per_hour=sum_if_known(rates[one.key] for one in of_state),
        )
        for state, of_state in by_state.items()
    }


def _jobs(figures: Sequence[JobFigures], shown: tuple[Job, ...]) -> Jobs:
    costs = [one.cost for one in figures if one.cost is not None]
    return Jobs(
        shown=shown,
        count=len(figures),
        held=sum(1 for one in figures if one.allocated_us),
        allocated_us=sum(one.allocated_us for one in figures),
        idle_us=sum(one.idle_us for one in figures),
        total=exact_sum(costs),
        unpriced=len(costs) < len(figures),
        before=_jobs([JobFigures(one.key, one.state, *one.before) for one in figures if one.before], ())
        if any(one.before for one in figures)
        else None,
        stops=lost_by(figures),
    )


def held_by(lines: Iterable[UsageLine]) -> list[UsageLine]:
    """The lines of workloads that held GPUs, the largest first."""

    def rank(line: UsageLine) -> tuple[object, ...]:
        return -line.accounts_gpu_us.allocated, line.key["team"], line.key["namespace"], line.key["job"]

    return sorted((line for line in lines if line.accounts_gpu_us.allocated), key=rank)


def waiting(pods: Iterable[QueuedPod], at_ms: int) -> tuple[Waiting, ...]:
    """The waiting pods by queue, the longest wait first."""
    by_queue: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pod in pods:
        gpus, wait = requested_devices(pod.facts.requests), pod_wait(pod.facts, at_ms)
        if gpus and wait.waiting:
            by_queue.setdefault((pod.team, pod.queue), []).append((gpus, wait.queued_ms or 0))
    rows = [
        Waiting(
            team, queue, len(waits), sum(gpus for gpus, _ in waits), max(queued for _, queued in waits),
        )
        for (team, queue), waits in by_queue.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.longest_ms, row.team, row.queue)))


def known_until(watermark_ms: int | None, newest_by_node: Mapping[tuple[str, str], int], at_ms: int) -> int:
    """The end of the newest span that is known well enough to show it as the present.

    This is the watermark, unless nodes that fell silent hold it back. Then it is the instant up to which the share
    TRUSTED of the other nodes has records, so that a silent node hides nothing of the others. A node is silent if its
    newest record is old beside the newest one of all nodes, which is old itself if the whole ledger stopped."""
    if watermark_ms is None:
        return at_ms
    newest_ms = min(at_ms, max(newest_by_node.values(), default=watermark_ms))
    if not is_old(watermark_ms, newest_ms):
        return watermark_ms
    reached = sorted(min(one, newest_ms) for one in newest_by_node.values() if not is_old(one, newest_ms))
    return reached[int((1 - TRUSTED) * len(reached))]


def current_use(ledger: Moment, book: PriceBook | None, start: int, end: int, timezone: str) -> CurrentUse:
    """The average use of GPUs in [start, end), in epoch milliseconds."""
    gpu_us = (end - start) * US_PER_MS
    finest = ledger.usage((start, end), (*_OF_HOLDING, *PRICED_BY), None, timezone)
    sums = finest.sum_of_accounts()
    start_up = ledger.usage((start, end), (), None, timezone, START_UP)
    starting_us, gang_waiting_us = start_up.columns(START_UP).sum(axis=0).tolist()
    holders = [
        HeldWorkload(
            line.key["cluster"], line.key["team"], line.key["namespace"], line.key["job"], line.key["gpu_model"],
            line.accounts_gpu_us.allocated / gpu_us, utilisation(line.accounts_gpu_us),
        )
        for line in ledger.usage((start, end), _OF_HOLDING, None, timezone).lines()
        if line.accounts_gpu_us.allocated
    ]  # fmt: skip
    burn, without_price_us = burn_per_hour(ledger, book, start, end, timezone)
    holders.sort(key=lambda row: (-row.gpus, row.team, row.namespace, row.job, row.gpu_model))
    return CurrentUse(
        start_ms=start,
        end_ms=end,
        accounts=account_rows(sums),
        gpus=sums.total / gpu_us,
        holders=tuple(holders[:MOST_HOLDERS]),
        held_gpus=sums.allocated / gpu_us,
        more_holders=max(0, len(holders) - MOST_HOLDERS),
        starting_us=starting_us,
        gang_waiting_us=gang_waiting_us,
        burn_per_hour=burn,
        unpriced_gpus=without_price_us / gpu_us,
    )


def burn_per_hour(
    ledger: Moment, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str
) -> tuple[Decimal | None, int]:
    """The hourly cost of the GPUs that were held in [start_ms, end_ms), and the GPU-µs without a price, which this cost
    does not contain. Without a price book: (None, 0)."""
    if book is None:
        return None, 0
    held = [
        one
        for one in charge_table(ledger, book, start_ms, end_ms, (), None, timezone).charges()
        if one.account in ALLOCATED
    ]
    parts = [part for several in quantify(((), one) for one in held).values() for part in several]
    spent = exact_sum(part.cost for part in parts if part.cost is not None)
    return spent * MS_PER_HOUR / (end_ms - start_ms), unpriced_us(parts)


def month_so_far(ledger: ReadableLedger, book: PriceBook | None, at_ms: int, timezone: str) -> MonthSoFar:
    """The current month of every team that held GPUs or pays for anything, the largest first. The amounts are those of
    a statement up to now."""
    month = Month.of(at_ms - 1, zone(timezone))
    start_ms = month.span(zone(timezone))[0]
    with ledger.moment(start_ms, at_ms) as moment:
        stated = statement(moment, book, start_ms, at_ms, timezone)
    by_team: dict[str, dict[str, int]] = {}
    unpriced: dict[str, int] = {}
    for line in stated.lines:
        if line.account in BILLED and line.team != IDLE:
            sums = by_team.setdefault(line.team, {})
            sums[line.account] = sums.get(line.account, 0) + line.gpu_us
            unpriced[line.team] = unpriced.get(line.team, 0) + (line.gpu_us if line.cost is None else 0)
    accounts = {team: Accounts(**sums) for team, sums in by_team.items()}
    whole = Accounts(**{name: sum(getattr(one, name) for one in accounts.values()) for name in ALLOCATED})
    rows = [
        TeamSoFar(
            team=team,
            allocated_us=held.allocated,
            utilisation=utilisation(held),
            share=share(held.allocated, whole.allocated),
            cost=stated.payable.get(team, Decimal(0)) if book is not None else None,
            unpriced_us=unpriced[team],
        )
        for team, held in accounts.items()
    ]
    return MonthSoFar(
        month=month,
        teams=tuple(sorted(rows, key=lambda row: (-row.allocated_us, row.team))),
        allocated_us=whole.allocated,
        utilisation=utilisation(whole),
        total=exact_sum(row.cost for row in rows if row.cost is not None) if book is not None else None,
        currency=stated.currency,
        unpriced_us=sum(unpriced.values()),
        coverage=stated.coverage,
        recorded=ledger.status().extent[1] > month.span(zone(timezone))[0],
    )


def by_node(ledger: Moment, start_ms: int, end_ms: int) -> tuple[NodeCoverage, ...]:
    """The nodes, those with the most unmetered time first."""
    rows = [
        NodeCoverage(
            cluster=line.key["cluster"],
            node=line.key["node"],
            capacity_us=line.accounts_gpu_us.total - line.accounts_gpu_us.down,
            unmetered_us=line.accounts_gpu_us.unmetered,
            down_us=line.accounts_gpu_us.down,
        )
        for line in ledger.usage((start_ms, end_ms), ("cluster", "node")).lines()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.unmetered_us, row.cluster, row.node)))


@dataclass(frozen=True, slots=True)
class UnmeteredSpan:
    """Adjacent hours of a node, in each of which some time is unmetered: from the first to the end of the last."""

    cluster: str
    node: str
    start_ms: int
    end_ms: int
    unmetered_us: int


def unmetered_spans(
    ledger: Moment, start_ms: int, end_ms: int, nodes: Collection[NodeCoverage]
) -> tuple[UnmeteredSpan, ...]:
    """When time of these nodes is unmetered, the newest first."""
    if not nodes or start_ms >= end_ms:
        return ()
    edges = [start_ms, *range(start_ms - start_ms % MS_PER_HOUR + MS_PER_HOUR, end_ms, MS_PER_HOUR), end_ms]
    usage = ledger.usage(edges, ("cluster", "node"), {"node": sorted({row.node for row in nodes})}, measures=())
    keys, of_row = usage.keyed(("cluster", "node"))
    wanted = {(row.cluster, row.node) for row in nodes}
    by_node: dict[tuple[str, ...], list[UnmeteredSpan]] = {}
    for span, key, gpu_us in zip(usage.span.tolist(), of_row.tolist(), usage.column("unmetered").tolist(), strict=True):
        cluster, node = keys[key]
        if not gpu_us or (cluster, node) not in wanted:
            continue
        found = by_node.setdefault((cluster, node), [])
        if found and found[-1].end_ms == edges[span]:
            last = found.pop()
            found.append(replace(last, end_ms=edges[span + 1], unmetered_us=last.unmetered_us + gpu_us))
        else:
            found.append(UnmeteredSpan(cluster, node, edges[span], edges[span + 1], gpu_us))
    every = (one for found in by_node.values() for one in found)
    return tuple(sorted(every, key=lambda one: (-one.end_ms, one.cluster, one.node)))


def total_coverage(nodes: Iterable[NodeCoverage]) -> NodeCoverage:
    """The sums over all nodes, as one row without names."""
    rows = list(nodes)
    return NodeCoverage(
        "",
        "",
        sum(row.capacity_us for row in rows),
        sum(row.unmetered_us for row in rows),
        sum(row.down_us for row in rows),
    )


def account_rows(accounts: Accounts) -> tuple[AccountRow, ...]:
    """One row for each account, with its share of the capacity; without costs."""
    values: dict[Account, int] = {name: getattr(accounts, name) for name in ACCOUNTS}
    return tuple(AccountRow(name, gpu_us, share(gpu_us, accounts.total), Decimal(0)) for name, gpu_us in values.items())


def utilisation(accounts: Accounts) -> float | None:
    """The busy part of the allocated time whose use is known; None if there is no such time."""
    return accounts.utilisation


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a longer list.

    rows: the part of `count` rows that begins with number `first` (from 1).
    previous, following: URLs."""

    rows: Sequence[T]
    first: int
    count: int
    previous: str | None
    following: str | None

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1

    @property
    def whole(self) -> bool:
        """Whether there is no other page."""
        return len(self.rows) == self.count


def paged(
    rows: Sequence[T], number: int, size: int, address: str, count: int | None = None, skipped: int | None = None
) -> Page[T]:
    """The page with this number, from 1, or the last page if there are fewer.

    address: URL of a page without its number.
    count: number of all rows; None: `rows` are all.
    skipped: number of rows before `rows`, which contain the whole page; None: there are no pages beyond `rows`."""
    count = len(rows) if count is None else count
    pages = max(1, -(-(len(rows) if skipped is None else count) // size))
    number = min(number, pages)
    first = (number - 1) * size
    at = first - (skipped or 0)
    return Page(
        rows[at : at + size],
        first + 1,
        count,
        f"{address}{number - 1}" if number > 1 else None,
        f"{address}{number + 1}" if number < pages else None,
    )


def to_lines(month: Month, team: str | None) -> Callable[..., str]:
    """Returns a function that makes the URL of the lines behind a figure. team: None for the page of the month."""

    def address(**filters: object) -> str:
        return of_lines(month, filters | ({"team": team} if team is not None else {}))

    return address


def of_lines(month: Month, query: Mapping[str, object], ending: str = "") -> str:
    """The URL of the lines behind a figure.

    query: the parameters; None and False are left out.
    ending: the ending of a file's URL, such as `.csv`."""
    parameters = {
        name: "true" if value is True else str(value)
        for name, value in query.items()
        if value is not None and value is not False
    }
    return f"/month/{month}/lines{ending}" + (f"?{urlencode(parameters)}" if parameters else "")


def correcting(journal: Acts) -> Mapping[Correction, int]:
    """The number of the act that booked each correction; for equal corrections, the last act."""
    return {correction: act.number for act in journal.acts("corrected") for correction in booked_by(act)[0]}


def adjusting(adjustment: Adjustment) -> int:
    """The number of the act that booked an adjustment. The id of the adjustment ends with it."""
    return int(adjustment.id.rpartition("-")[2])
