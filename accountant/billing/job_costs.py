"""Computes the cost of jobs and their epochs.

A span may have a hundred thousand jobs, of which a page shows a hundred. `list_jobs` computes what all jobs are chosen,
sorted and added up by, from the table of their charges and the numbers of their pods. Pods and the rest are read and
built for the jobs that are shown, in one pass, and no more of a pod is kept than its job shows.

A job's time is the time that its holders held GPUs. It is priced by the price book, commitments included. Each job is
rounded separately, so its cost does not depend on the other jobs of the query. The billing policy may move start-up or
idle time to other teams, but it applies to statements and not to jobs. The number of ledger queries does not depend on
the number of jobs.

An epoch has the time from the previous report to its own. The first epoch includes all earlier time, such as start-up.
Time after the last report belongs to no epoch yet. Late or reordered reports therefore only move time between epochs,
and the epochs and the rest always add up to the job.

Charges are computed per hour and then divided in proportion to the GPU time that the job held in each part of the hour.
With one price per hour, each epoch gets exactly the cost of its own time. With several prices (commitments, shared
GPUs) the parts still add up to the hour's cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from accountant.billing import job_attempts
from accountant.billing.charge import (
    ALLOCATED,
    LINE_ACCOUNTS,
    Account,
    Charge,
    PricedTime,
    quantify,
    quantify_together,
    total_cost,
    unpriced_us,
)
from accountant.billing.charge_table import ACCOUNT, KEY, NO_CHARGES, PRICE, TIME, ChargeTable, numbered
from accountant.billing.queue_waits import pods_by_job
from accountant.billing.usage_pricing import charge_table
from accountant.core.claim_overlap import Span
from accountant.core.errors import UnsupportedQuestion
from accountant.core.gpu_time_accounts import sum_by_key
from accountant.core.record_age import BURN_MS, SETTLE_MS, silent_nodes
from accountant.ledger.protocols import EpochReport, JobKey, JobPods, Moment, QueuedPod, of_holders
from accountant.ledger.team_assignment import USER_KEY
from accountant.ledger.usage import HELD, PRICED_BY, EarlierSpan, Usage, Where
from accountant.prices.price_book import Price, PriceBook
from accountant.prices.unit_prices import Place, pieces
from accountant.wire.list_order import in_order
from accountant.wire.option_types import JobKind, JobState, Order, job_kind
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    Dimension,
    EpochLine,
    Job,
    JobAnswer,
    JobPart,
    JobsStops,
    JobStops,
    JobUse,
    label_dimension,
)
from agent.wire import PodFacts
from gputally.base import called_off
from gputally.base.apportionment import apportion
from gputally.base.gpu_resources import requested_devices
from gputally.base.money import exact_product, gpu_hours, rate, sum_if_known
from gputally.base.pod_stop import DELETED, FAILED
from gputally.base.units import MS_PER_HOUR, US_PER_MS


class EpochSpan(NamedTuple):
    """The span [start_ms, end_ms) of one epoch. epoch: None for the time after the last report."""

    epoch: int | None
    start_ms: int
    end_ms: int


def epoch_spans(reports: Iterable[EpochReport], start_ms: int, end_ms: int) -> list[EpochSpan]:
    """Splits [start_ms, end_ms) at the instants of the reports, in order of time.

    If several epochs ended at the same instant, the one with the lowest number has the time."""
    found: list[EpochSpan] = []
    begin = start_ms
    for at_ms, epoch in sorted((one.at_ms, one.epoch) for one in reports if start_ms < one.at_ms <= end_ms):
        found.append(EpochSpan(epoch, begin, at_ms))
        begin = at_ms
    if begin < end_ms or not found:
        found.append(EpochSpan(None, begin, end_ms))
    return found


Group = tuple[str, Place, str]
"""Hour, place and account of a charge."""


def divide_by_epoch(found: Sequence[Charge], held: Usage, epochs: int) -> list[list[Charge]]:
    """Divides each hour's charges among the epochs. The parts of a charge add up to it.

    found: charges whose keys are hours.
    held: the job's usage by hour and PRICED_BY; its spans are the epochs.
    epochs: the number of epochs."""
    weights: dict[Group, list[int]] = defaultdict(lambda: [0] * epochs)
    in_hour: dict[str, list[int]] = defaultdict(lambda: [0] * epochs)
    rows = zip(held.span.tolist(), held.row_keys(), held.columns(HELD).tolist(), strict=True)
    for number, (hour, *place), figures in rows:
        for account, gpu_us in zip(HELD, figures, strict=True):
            weights[hour, Place(*place), account][number] += gpu_us
            in_hour[hour][number] += gpu_us
    groups: dict[Group, list[Charge]] = {}
    for charge in found:
        groups.setdefault((charge.key[0], charge.place, charge.account), []).append(charge)
    shares: list[list[Charge]] = [[] for _ in range(epochs)]
    for group, grouped in groups.items():
        by = weights[group] if any(weights[group]) else in_hour[group[0]]
        for into, parts in zip(shares, _dealt(grouped, by), strict=True):
            into.extend(parts)
    return shares


def _dealt(charges: Sequence[Charge], weights: Sequence[int]) -> list[list[Charge]]:
    """Divides the charges of one hour, place and account in proportion to the weights.

    The charges are given out one after the other until each share is full."""
    left = [charge.gpu_us for charge in charges]
    dealt: list[list[Charge]] = []
    for wanted in apportion(sum(left), weights):
        taken = apportion(wanted, left) if wanted else [0] * len(left)
        left = [there - part for there, part in zip(left, taken, strict=True)]
        dealt.append([replace(charge, gpu_us=part) for charge, part in zip(charges, taken, strict=True) if part])
    return dealt


BY: Final[tuple[Dimension, ...]] = ("cluster", "namespace", "job", "team", "user")
_OF_JOB: Final = len(JobKey._fields)
"""The first dimensions of BY, which name a job."""
_NOTHING: Final[tuple[int, int, Decimal | None]] = (0, 0, Decimal(0))
"""The figures of a job that held nothing."""
_NO_PLACE: Final = Place("", "", "", "")
_LAST_MS: Final = BURN_MS + SETTLE_MS
"""Who held a GPU this long before the last record of its node held it until then."""


class _Time(NamedTuple):
    """A part of a job's time. key: the values of BY. price: None if it has none."""

    key: tuple[str, ...]
    gpu_model: str
    account: Account
    price: Price | None
    gpu_us: int


class _HeldTime:
    """The charges of the time that jobs held, as rows of a table. keys: the jobs, sorted. Held time always has a job: a
    holder without a workload is its own."""

    def __init__(self, table: ChargeTable) -> None:
        jobs = [JobKey(*key[:_OF_JOB]) for key in called_off.each(table.keys)]
        distinct, number = numbered(jobs)
        is_held = np.isin(table.cells[:, ACCOUNT], [LINE_ACCOUNTS.index(account) for account in HELD])
        rows = np.flatnonzero(is_held)
        job = number[table.cells[rows, KEY]]
        order = np.argsort(job, kind="stable")
        held, self._first = np.unique(job[order], return_index=True)
        self._table = table.only(rows[order])
        self._edges = [*self._first.tolist(), len(rows)]
        self.keys = [distinct[index] for index in held.tolist()]
        self._number = {key: number for number, key in enumerate(self.keys)}

    def __contains__(self, key: JobKey) -> bool:
        return key in self._number

    def charges(self, key: JobKey) -> list[Charge]:
        """The charges of a job, sorted."""
        return self._table.only(np.arange(*self._rows(key))).charges()

    def times(self, key: JobKey) -> list[_Time]:
        """The parts of a job's time. Some differ only in their length."""
        begin, end = self._rows(key)
        keys, places, prices = self._table.keys, self._table.places, self._table.prices
        return [
            _Time(keys[of], places[place].gpu_model, LINE_ACCOUNTS[account], prices[price], gpu_us)
            for of, place, account, _, price, gpu_us in self._table.cells[begin:end].tolist()
        ]

    def _rows(self, key: JobKey) -> tuple[int, int]:
        """The first row of a job and the first one after it."""
        number = self._number.get(key)
        return (0, 0) if number is None else (self._edges[number], self._edges[number + 1])

    def figures(self) -> dict[JobKey, tuple[int, int, Decimal | None]]:
        """GPU-µs held, GPU-µs idle and the cost of each job, in order; the cost is None if some time has no price."""
        if not self.keys:
            return {}
        cells = self._table.cells
        idle = np.where(cells[:, ACCOUNT] == LINE_ACCOUNTS.index("allocated_idle"), cells[:, TIME], 0)
        sums = (np.add.reduceat(gpu_us, self._first).tolist() for gpu_us in (cells[:, TIME], idle))
        return dict(zip(self.keys, zip(*sums, self._costs(), strict=True), strict=True))

    def _costs(self) -> list[Decimal | None]:
        """The cost of each job, as `quantify` gives it; most jobs have one price."""
        job = np.repeat(np.arange(len(self.keys)), np.diff(self._edges))
        by_price = np.stack([job, self._table.cells[:, PRICE]], axis=1)
        numbers, gpu_us = sum_by_key(by_price, self._table.cells[:, TIME:])
        parts: list[list[tuple[Price | None, int]]] = [[] for _ in self.keys]
        for (number, price), (time,) in called_off.each(zip(numbers.tolist(), gpu_us.tolist(), strict=True)):
            parts[number].append((self._table.prices[price], time))
        return [_cost(of_job) for of_job in called_off.each(parts)]


def _accounts(times: Iterable[_Time]) -> Accounts:
    accounts: dict[str, int] = defaultdict(int)
    for time in times:
        accounts[time.account] += time.gpu_us
    return Accounts(**accounts)


def _unpriced(times: Iterable[_Time]) -> int:
    return sum(time.gpu_us for time in times if time.price is None)


def _cost(parts: Sequence[tuple[Price | None, int]]) -> Decimal | None:
    """The cost of GPU-µs at prices; None if one of them is unknown."""
    if len(parts) > 1:
        return total_cost(quantify_together(Charge((), _NO_PLACE, HELD[0], gpu_us, row) for row, gpu_us in parts))
    ((price, gpu_us),) = parts
    return None if price is None else exact_product(price.price, gpu_hours(gpu_us))


@dataclass(slots=True)
class _ShownPods:
    """What a job shows of its pods. payers: their distinct teams and queues. users: those that their labels name.

    waits: whether one waits. waiting_since_ms: creation of the first of those that wait; a pod that replaces a stopped
    one is created after that stop. asks: the GPUs, or parts of them, that those request which wait; None if unknown."""

    pods: int = 0
    running: int = 0
    payers: tuple[tuple[str, str], ...] = ()
    users: frozenset[str] = frozenset()
    created_ms: int | None = None
    ended_ms: int | None = None
    waits: bool = False
    waiting_since_ms: int | None = None
    asks: int | None = 0

    def add(self, pod: QueuedPod) -> None:
        facts, payer = pod.facts, (pod.team, pod.queue)
        self.pods += 1
        self.running += facts.started_ms is not None and facts.ended_ms is None
        if payer not in self.payers:
            self.payers += (payer,)
        if user := facts.labels.get(USER_KEY):
            self.users |= {user}
        self.created_ms = _known(min, self.created_ms, facts.created_ms)
        self.ended_ms = _known(max, self.ended_ms, facts.ended_ms)
        if facts.scheduled_ms is facts.started_ms is facts.ended_ms is None:
            asked = requested_devices(facts.requests)
            self.waits, self.asks = True, None if asked is None or self.asks is None else self.asks + asked
            self.waiting_since_ms = _known(min, self.waiting_since_ms, facts.created_ms)


def _known(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    """The one of two instants that is chosen; the other one if one is unknown."""
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What a job is chosen, sorted and added up by.

    cost: None if some of its time has no price.
    waited_ms: the longest wait of its pods in their queues; None if unknown.
    before: GPU-µs held, GPU-µs idle and the cost in the span before; None if it is not compared, or nothing is known
        of its cluster then.
    pod: the name of the pod by which a search found it; "" otherwise.
    stops: what its stops lost; None if that was not asked."""

    key: JobKey
    state: JobState
    allocated_us: int
    idle_us: int
    cost: Decimal | None
    waited_ms: int | None = None
    before: tuple[int, int, Decimal | None] | None = None
    pod: str = ""
    stops: JobStops | None = None


_MOST_DECISIONS: Final = 5_000
"""The newest decisions that are read to find what stopped jobs."""
_DOES_NOTHING = 0.99
_MOST_OF = 0.75


class JobList:
    """The jobs of a span. figures: of every job, sorted by key.

    A `Job` is read and built when it is asked for, while the ledger's moment lasts."""

    def __init__(
        self,
        ledger: Moment,
        book: PriceBook | None,
        span: Span,
        until_ms: int,
        where: Where | None,
        timezone: str,
        held_until_ms: int | None = None,
        before: EarlierSpan | None = None,
    ) -> None:
        """held_until_ms: the instant after which none of the jobs held a GPU, if known.
        before: an earlier span to compare with; its jobs are listed too."""
        start_ms, end_ms = span
        self._ledger, self._span, self._where, self._until_ms = ledger, span, where, until_ms
        self._extents: dict[JobKey, Span | None] = {}
        self._held = _HeldTime(charge_table(ledger, book, start_ms, end_ms, BY, where, timezone))
        compared = None if before is None else before.known
        self._before = _HeldTime(charge_table(ledger, book, *compared, BY, where, timezone)) if compared else None
        status = ledger.status()
        recent, until = status.recent_span(min(end_ms, status.newest_ms - SETTLE_MS), BURN_MS)
        self._burnt_ms = since, _ = max(start_ms, recent), until
        # Whose time counts, and not which part of it: what a job holds now may not be what the filter selects.
        whose = {name: values for name, values in (where or {}).items() if name == "cluster" or of_holders((name,))}
        self._is_whole = len(whose) == len(where or {})
        if since < until and (held_until_ms is None or since < held_until_ms):
            self._burning = _HeldTime(charge_table(ledger, book, since, until, BY, whose or None, timezone))
        else:
            self._burning = _HeldTime(NO_CHARGES)
        only = _only(where)
        if only is not None:
            pods: Mapping[JobKey, JobPods] = pods_by_job(
                filter(self._counts, ledger.pods(*span, of=only, ordered=False))
            )
        elif where:
            pods = pods_by_job(filter(self._counts, ledger.pods(*span, ordered=False)))
        else:
            pods = ledger.pods_by_job(*span)
        self._unseen = self._unseen_jobs(pods)
        held = self._held.figures()
        earlier = {} if self._before is None else self._before.figures()
        clusters = frozenset[str]() if before is None else before.clusters
        burning = self._burning.keys if self._is_whole else ()
        self.figures = [
            JobFigures(
                key, self._state(key, pods.get(key)), *held.get(key, _NOTHING),
                pods[key].waited_ms(until_ms) if key in pods else None,
                earlier.get(key, _NOTHING) if key.cluster in clusters else None,
            )
            for key in called_off.each(sorted({*held, *burning, *pods, *earlier}))
        ]  # fmt: skip

    def is_idle(self, one: JobFigures) -> bool:
        """Whether a job runs whose GPUs did nothing in the span: it used at most 1% of the time that it held, and of
        the GPUs that it holds now it held most of the span, so that a job which has only begun is none."""
        if one.state != "running" or not one.allocated_us or one.idle_us < _DOES_NOTHING * one.allocated_us:
            return False
        since, until = self._burnt_ms
        now_us = sum(time.gpu_us for time in self._burning.times(one.key)) if since < until else 0
        return now_us > 0 and one.allocated_us >= _MOST_OF * now_us * (until - self._span[0]) / (until - since)

    @cached_property
    def stopped(self) -> frozenset[JobKey]:
        """The jobs of which a scheduler, or something else that evicts, stopped a pod in the span. It reads the facts
        of every pod, while the ledger's moment lasts."""
        pods = self._ledger.pods(*self._span, ordered=False)
        counted = filter(self._counts, pods) if self._where else pods
        return frozenset(pod.key for pod in counted if _was_stopped(pod.facts, self._span))

    @cached_property
    def stops(self) -> Mapping[JobKey, JobStops]:
        """What stops in the span lost, of each job of which something may have stopped a pod; of the others nothing is
        lost. A filter selects whose time counts, and no part of it. It reads the facts of every pod, while the ledger's
        moment lasts."""
        start_ms, end_ms = self._span
        read = self._ledger.decisions(
            start_ms, end_ms + job_attempts.CLOCKS_DIFFER_MS + 1, _MOST_DECISIONS, kind="preemption"
        )
        victims = job_attempts.stopping(read)
        nodes, teams = self._ledger.status().nodes, (self._where or {}).get("team")
        return job_attempts.lost(
            self._ledger, self._maybe_stopped(victims), self._span, victims, nodes, teams,
            decided_from_ms=read[-1].at_ms + 1 if len(read) == _MOST_DECISIONS else 0,
        )  # fmt: skip

    def _maybe_stopped(self, victims: Iterable[Decision]) -> set[JobKey]:
        """The jobs that have more than one attempt in the span, or one that the job may not have ended itself; and
        some more."""
        start_ms, end_ms = self._span
        named = {name for one in victims for name in job_attempts.named(one)}
        down = {
            (node.cluster, node.name)
            for node in self._ledger.status().nodes
            for one in node.down
            if one.start_ms < end_ms and (one.end_ms is None or one.end_ms > start_ms)
        }
        found, seen, first_end, last_begin = set[JobKey](), set[JobKey](), dict[JobKey, int](), dict[JobKey, int]()
        for pod in self._ledger.pods(start_ms, end_ms, ordered=False):
            if self._where and not self._counts(pod):
                continue
            key, facts = pod.key, pod.facts
            seen.add(key)
            if facts.stop is not None or f"{facts.namespace}/{facts.name}" in named:
                found.add(key)
            begun_ms = facts.scheduled_ms if facts.scheduled_ms is not None else facts.started_ms
            last_begin[key] = max(last_begin.get(key, 0), begun_ms or 0)
            if facts.ended_ms is not None:
                first_end[key] = min(first_end.get(key, facts.ended_ms), facts.ended_ms)
                if (pod.cluster, facts.node) in down:
                    found.add(key)
        found |= {key for key, end in first_end.items() if last_begin[key] > end - job_attempts.CLOCKS_DIFFER_MS}
        for one in self.figures:
            lasts = one.key in self._burning
            if (
                one.state == "unknown"
                or (one.state == "running" and not lasts)
                or (one.key not in seen and one.allocated_us)
            ):
                found.add(one.key)
        return found

    def with_pods_named(self, text: str) -> Mapping[JobKey, str]:
        """The jobs with a pod that has a text in CLUSTER/NAMESPACE/NAME, in any case, and the name of this pod; of
        several, one that ends with the text. Jobs that have the text in their own path are left out. It is asked while
        the ledger's moment lasts."""
        name = text.lower().rpartition("/")[2]
        found = dict[JobKey, str]()
        for pod in self._ledger.pods(*self._span, ordered=False, named=text):
            if self._counts(pod):
                mine = pod.facts.name
                found[pod.key] = min(found.get(pod.key, mine), mine, key=lambda one: (one.lower() != name, one))
        return found

    def _unseen_jobs(self, pods: Mapping[JobKey, JobPods]) -> set[JobKey]:
        """The jobs of which nobody knows whether they still run: what they hold, or held last, is on silent nodes."""
        status = self._ledger.status()
        silent = silent_nodes(status.newest_by_node, status.newest_ms)
        if not silent:
            return set()
        unseen, seen = set[JobKey](), set[JobKey]()
        begun = {key for key, of in pods.items() if of.placed and key not in self._burning}
        for pod in self._ledger.pods(*self._span, of=begun, ordered=False) if begun else ():
            facts = pod.facts
            if facts.ended_ms is None and (facts.scheduled_ms is not None or facts.started_ms is not None):
                (unseen if (pod.cluster, facts.node) in silent else seen).add(pod.key)
        return (unseen - seen) | set(self._unseen_without_pods(silent, pods))

    def _unseen_without_pods(
        self, silent: Mapping[tuple[str, str], int], pods: Mapping[JobKey, JobPods]
    ) -> Iterator[JobKey]:
        """Those whose pods are not known: they held a GPU up to the last record of a silent node, and none later."""
        jobs = {key for key in self._held.keys if key not in pods and key not in self._burning}
        low = max(self._span[0], min(silent.values()) - _LAST_MS)
        high = min(self._span[1], max(silent.values()))
        if not jobs or low >= high:
            return
        where: Where = {"cluster": {of[0] for of in silent}, "node": {of[1] for of in silent}}
        by: tuple[Dimension, ...] = ("cluster", "namespace", "job", "node")
        span = self._ledger.status().recent_span(high, high - low)
        on_node: dict[JobKey, int] = {}
        for cluster, namespace, job, node in self._ledger.usage(span, by, where, "UTC", ()).row_keys():
            key = JobKey(cluster, namespace, job)
            if key in jobs and (cluster, node) in silent:
                on_node[key] = max(on_node.get(key, 0), silent[cluster, node])
        for key, held in self._extents_of(on_node).items():
            if held is not None and on_node[key] - _LAST_MS <= held[1] < on_node[key] + MS_PER_HOUR:
                yield key

    def _extents_of(self, keys: Collection[JobKey]) -> Mapping[JobKey, Span | None]:
        """The first and last instant at which each of these jobs held a GPU; None: never. Each is read once."""
        missing = [key for key in keys if key not in self._extents]
        if missing:
            self._extents |= dict.fromkeys(missing) | dict(self._ledger.extents(missing))
        return {key: self._extents[key] for key in keys}

    def built(self, chosen: Sequence[JobFigures]) -> Iterator[Job]:
        """Yield these jobs, in this order."""
        keys = {one.key for one in chosen}
        held, epochs = self._extents_of(keys), self._ledger.epoch_counts(keys)
        pods: dict[JobKey, _ShownPods] = defaultdict(_ShownPods)
        for pod in self._ledger.pods(*self._span, of=keys, ordered=False):
            if self._counts(pod):
                pods[pod.key].add(pod)
        for one in called_off.each(chosen):
            yield self._job(one, pods.get(one.key) or _ShownPods(), held[one.key], epochs.get(one.key, 0))

    def burn_rates(self, chosen: Sequence[JobFigures]) -> dict[JobKey, Decimal | None]:
        """The `Job.burn_per_hour` of each of these jobs."""
        running = {one.key for one in chosen if one.state == "running" and one.key in self._burning}
        held = self._extents_of(running)
        return {one.key: self._burn(one.key, held.get(one.key), one.state)[1] for one in called_off.each(chosen)}

    def charges(self, key: JobKey) -> list[Charge]:
        """The charges of a job, sorted."""
        return self._held.charges(key)

    def _job(self, figures: JobFigures, pods: _ShownPods, held: Span | None, epochs: int) -> Job:
        """held: the first and last instant at which the job held a GPU; None: never."""
        key, state, times = figures.key, figures.state, self._held.times(figures.key)
        then = [] if self._before is None else self._before.times(key)
        whose = times or then
        ended_ms = pods.ended_ms if pods.ended_ms is not None or held is None else held[1]
        gpus, burn = self._burn(key, held, state)
        return Job(
            id=key.id,
            cluster=key.cluster,
            namespace=key.namespace,
            job=key.job,
            teams=_names(time.key[3] for time in times)
            or _names(team for team, _ in pods.payers)
            or _names(time.key[3] for time in then),
            queues=_names(queue for _, queue in pods.payers),
            users=_names(time.key[4] for time in whose) or _names(pods.users),
            state=state,
            kind=job_kind(key.job),
            pods=pods.pods,
            pods_running=pods.running,
            created_ms=pods.created_ms,
            held_from_ms=held[0] if held else None,
            held_until_ms=held[1] if held else None,
            ended_ms=ended_ms if state in ("ended", "failed") else None,
            waited_ms=figures.waited_ms,
            waiting_since_ms=pods.waiting_since_ms,
            waiting_ms=None if pods.waiting_since_ms is None else max(0, self._until_ms - pods.waiting_since_ms),
            asks_gpus=pods.asks if pods.waits else None,
            gpu_models=_names(time.gpu_model for time in whose),
            accounts_gpu_us=_accounts(times),
            gpus=gpus,
            cost=figures.cost,
            unpriced_gpu_us=_unpriced(times),
            burn_per_hour=burn,
            epochs=epochs,
            pod=figures.pod or None,
            stops=figures.stops,
            before=None
            if figures.before is None
            else JobUse(accounts_gpu_us=_accounts(then), cost=figures.before[2], unpriced_gpu_us=_unpriced(then)),
        )

    def _burn(self, key: JobKey, held: Span | None, state: JobState) -> tuple[Decimal | None, Decimal | None]:
        """The GPUs held, and their price per hour (None if some have no price), over the last minutes on record. Of a
        job whose state is unknown both are."""
        if state != "running":
            return (None, None) if state == "unknown" else (Decimal(0), Decimal(0))
        since, until = self._burnt_ms
        over_us = (until - max(since, held[0] if held else since)) * US_PER_MS
        burning = self._burning.times(key)
        if over_us <= 0 or not burning:
            return Decimal(0), Decimal(0)
        gpus, per_hour = Fraction(sum(time.gpu_us for time in burning), over_us), Fraction(0)
        for time in burning:
            if time.price is None:
                return rate(gpus), None
            per_hour += Fraction(time.price.price) * time.gpu_us / over_us
        return rate(gpus), rate(per_hour)

    def _counts(self, pod: QueuedPod) -> bool:
        """Whether a pod is one of a listed job: one that held time that matches the filter, or one that matches it
        itself. Users are known only for holders, and what a GPU is only for one that is held."""
        key = pod.key
        if key in self._held or (key in self._burning and self._is_whole):
            return True
        names: dict[Dimension, str] = {
            "cluster": key.cluster, "namespace": key.namespace, "job": key.job, "team": pod.team, "queue": pod.queue,
            "pod": pod.facts.name, "node": pod.facts.node,
            **{label_dimension(name): value for name, value in pod.facts.labels.items()},
        }  # fmt: skip
        return all(names.get(name, "") in values for name, values in (self._where or {}).items())

    def _state(self, key: JobKey, pods: JobPods | None) -> JobState:
        if pods is not None and pods.ended == pods.pods:
            return "failed" if pods.has_failed else "ended"
        if key in self._unseen:
            return "unknown"
        if pods is None:
            return "running" if key in self._burning else "ended"
        waits = not pods.placed and (key not in self._held or (pods.ended > 0 and pods.waiting_since_ms is not None))
        return "waiting" if waits else "running"


T = TypeVar("T")


class JobChoice(NamedTuple):
    """Which jobs a list has, and in which order.

    search: a text in CLUSTER/NAMESPACE/KIND/NAME, or in CLUSTER/NAMESPACE/NAME of a pod, in any case; "" for all.
    kind: None for all.
    idle: only those that `JobList.is_idle` names.
    stopped: only those of `JobList.stopped`.
    lost: with what stops lost. The order by it has it too.
    order: by a column of `JOB_ORDERS`; what is unknown is last."""

    search: str = ""
    kind: JobKind | None = None
    order: Order = Order("cost", descending=True)
    idle: bool = False
    stopped: bool = False
    lost: bool = False


def chosen(jobs: JobList, choice: JobChoice, state: JobState | None = None) -> list[JobFigures]:
    """The chosen jobs of a list in this state, in their order. state: None for all."""
    text = choice.search.casefold()
    of_pods = jobs.with_pods_named(choice.search) if text else {}
    found = [
        one if not text or _has(one.key, text) else replace(one, pod=of_pods[one.key])
        for one in jobs.figures
        if state in (None, one.state)
        and (choice.kind is None or job_kind(one.key.job) == choice.kind)
        and (not choice.idle or jobs.is_idle(one))
        and (not choice.stopped or one.key in jobs.stopped)
        and (not text or _has(one.key, text) or one.key in of_pods)
    ]
    column, descending = choice.order
    if choice.lost or column == "lost_gpu_hours":
        found = [replace(one, stops=jobs.stops.get(one.key, job_attempts.NOTHING_LOST)) for one in found]
    of_figures = _BY_FIGURES.get(column)
    if of_figures is not None:
        return in_order(found, of_figures, descending=descending)
    of_job = _BY_JOB[column]
    ranks = [of_job(job) for job in jobs.built(found)]
    pairs = in_order(list(zip(ranks, found, strict=True)), lambda pair: pair[0], descending=descending)
    return [one for _, one in pairs]


def _has(key: JobKey, text: str) -> bool:
    return text in f"{key.cluster}/{key.namespace}/{key.job}".casefold()


def rank_of(column: str) -> Callable[[Job], Any]:
    """Returns the function by which the jobs of several ledgers are put in the order of a column."""
    return _BY_JOB[column]


_BY_FIGURES: Final[Mapping[str, Callable[[JobFigures], Any]]] = {
    "name": lambda one: one.key,
    "cluster": lambda one: one.key.cluster,
    "namespace": lambda one: one.key.namespace,
    "state": lambda one: one.state,
    "kind": lambda one: job_kind(one.key.job),
    "cost": lambda one: (one.cost, one.allocated_us),
    "gpu_hours": lambda one: one.allocated_us,
    "idle": lambda one: (one.idle_us, one.allocated_us),
    "waited": lambda one: one.waited_ms,
    "lost_gpu_hours": lambda one: _lost_rank(one.stops),
}
_BY_JOB: Final[Mapping[str, Callable[[Job], Any]]] = {
    "name": lambda job: (job.cluster, job.namespace, job.job),
    "cluster": lambda job: job.cluster,
    "namespace": lambda job: job.namespace,
    "state": lambda job: job.state,
    "kind": lambda job: job.kind,
    "cost": lambda job: (job.cost, job.accounts_gpu_us.allocated),
    "gpu_hours": lambda job: job.accounts_gpu_us.allocated,
    "idle": lambda job: (job.accounts_gpu_us.allocated_idle, job.accounts_gpu_us.allocated),
    "waited": lambda job: job.waited_ms,
    "lost_gpu_hours": lambda job: _lost_rank(job.stops),
    "team": lambda job: job.teams or None,
    "user": lambda job: job.users or None,
    "queue": lambda job: job.queues or None,
    "gpu_model": lambda job: job.gpu_models or None,
    "gpus": lambda job: job.gpus,
    "burn": lambda job: job.burn_per_hour,
    "busy": lambda job: job.accounts_gpu_us.busy,
    "unknown": lambda job: job.accounts_gpu_us.allocated_unknown,
    "utilisation": lambda job: job.accounts_gpu_us.utilisation,
    "unpriced": lambda job: job.unpriced_gpu_us,
    "pods": lambda job: job.pods,
    "created": lambda job: job.created_ms,
    "ended": lambda job: job.ended_ms,
    "epochs": lambda job: job.epochs,
}
"""What only a job that is built knows."""


def list_jobs(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    now_ms: int,
    where: Where | None = None,
    timezone: str = "UTC",
    before: EarlierSpan | None = None,
) -> JobList:
    """Return the jobs that held GPUs or had pods in [start_ms, end_ms).

    where: a filter by any dimension. Time of a job that the filter excludes is not counted.
    before: as in `JobList`."""
    return JobList(ledger, book, (start_ms, end_ms), min(now_ms, end_ms), where, timezone, before=before)


def _lost_rank(stops: JobStops | None) -> tuple[int | None, int] | None:
    """What is lost; of jobs of which that is unknown, what is known."""
    return None if stops is None else (stops.lost_gpu_us, stops.known_lost_gpu_us)


def lost_by(jobs: Iterable[JobFigures]) -> JobsStops | None:
    """What stops of all these jobs lost; None if that was not asked."""
    every = [one.stops for one in jobs if one.stops is not None]
    if not every:
        return None
    unknown = sum(1 for one in every if one.lost_gpu_us is None)
    lost_us = sum(one.known_lost_gpu_us for one in every)
    return JobsStops(lost_gpu_us=None if unknown else lost_us, known_lost_gpu_us=lost_us, unknown_jobs=unknown)


def before(figures: Sequence[JobFigures]) -> tuple[int | None, Decimal | None]:
    """GPU-µs and cost of compared jobs in the span before; both are None if nothing is known of any, and the cost if a
    part of it has no price."""
    parts = [one.before for one in figures if one.before is not None]
    if figures and not parts:
        return None, None
    return sum(held for held, _, _ in parts), sum_if_known(cost for _, _, cost in parts)


def job(
    ledger: Moment,
    book: PriceBook | None,
    key: JobKey,
    span: Span,
    now_ms: int,
    where: Where | None = None,
    timezone: str = "UTC",
) -> JobAnswer | None:
    """One job over [start_ms, end_ms); None if it is unknown or filtered out."""
    mine: Where = {**(where or {}), **only_job(key)}
    start_ms, end_ms = span
    held = ledger.extents({key}).get(key)
    until_ms = min(now_ms, end_ms)
    listed = JobList(ledger, book, span, until_ms, mine, timezone, held[1] if held else 0)
    if not listed.figures:
        return None
    (shown,) = listed.built(listed.figures)
    reports = ledger.epochs(of={key})
    lines = epoch_lines(ledger, book, reports, (start_ms, end_ms), mine, timezone) if reports else []
    of_kinds = quantify(((c.place.gpu_model, c.place.capacity_type), c) for c in listed.charges(key))
    return JobAnswer(
        start_ms=start_ms,
        end_ms=end_ms,
        currency=book.currency if book else None,
        price_book_version=book.version if book else "",
        job=shown,
        parts=tuple(
            JobPart(
                gpu_model=model, capacity_type=capacity, gpu_us=part.gpu_us, gpu_hours=part.gpu_hours,
                unit_price=part.unit_price, cost=part.cost,
            )
            for (model, capacity), parts in of_kinds.items()
            for part in parts
        ),
        epochs=tuple(
            EpochLine(
                epoch=stretch.epoch, start_ms=stretch.start_ms, end_ms=stretch.end_ms,
                gpu_us=None if parts is None else sum(part.gpu_us for part in parts),
                cost=None if parts is None else total_cost(parts),
                unpriced_gpu_us=None if parts is None else unpriced_us(parts),
            )
            for stretch, parts in lines
        ),
    )  # fmt: skip


def lifetime_costs(
    ledger: Moment, book: PriceBook | None, keys: Collection[JobKey], now_ms: int, timezone: str = "UTC"
) -> dict[JobKey, dict[str, Decimal]]:
    """The cost of each of these jobs from its beginning until now, by GPU model.

    Jobs that are not fully priced, or never held a GPU, are missing."""
    held = ledger.extents(keys)
    if not held:
        return {}
    where: Where = {"namespace": {key.namespace for key in held}, "job": {key.job for key in held}}
    found: dict[JobKey, list[Charge]] = defaultdict(list)
    by: tuple[Dimension, ...] = ("cluster", "namespace", "job")
    for charge in charge_table(
        ledger, book, min(first for first, _ in held.values()), now_ms, by, where, timezone
    ).charges():
        if charge.account in ALLOCATED and JobKey(*charge.key) in held:
            found[JobKey(*charge.key)].append(charge)
    costs: dict[JobKey, dict[str, Decimal]] = {}
    for key, mine in found.items():
        by_model = {
            model: total_cost(parts) for (model,), parts in quantify(((c.place.gpu_model,), c) for c in mine).items()
        }
        priced = {model: cost for model, cost in by_model.items() if cost is not None}
        if len(priced) == len(by_model):
            costs[key] = priced
    return costs


def only_job(key: JobKey) -> Where:
    """The filter for this job."""
    return {"cluster": {key.cluster}, "namespace": {key.namespace}, "job": {key.job}}


def _was_stopped(facts: PodFacts, span: Span) -> bool:
    """Whether the status of a pod says that something else than its job stopped it, in the span or at an unknown time.
    Who deleted a pod is unknown."""
    stop = facts.stop
    if stop is None or stop.how in (DELETED, FAILED):
        return False
    at_ms = facts.ended_ms if stop.at_ms is None else stop.at_ms
    return at_ms is None or span[0] <= at_ms < span[1]


def _only(where: Where | None) -> Collection[JobKey] | None:
    """The jobs that a filter selects at most; None if it does not name jobs."""
    if where is None or not {"cluster", "namespace", "job"} <= where.keys():
        return None
    return {JobKey(*of) for of in product(where["cluster"], where["namespace"], where["job"])}


def epoch_lines(
    ledger: Moment,
    book: PriceBook | None,
    reports: Iterable[EpochReport],
    span: tuple[int, int],
    mine: Where,
    timezone: str,
) -> list[tuple[EpochSpan, list[PricedTime] | None]]:
    """The spans between a job's reports, and the priced parts of each. Together they equal the job exactly. The parts
    are None if an epoch ends where the ledger cannot divide time (a lake has whole hours).

    mine: the filter for this job."""
    cut = epoch_spans(reports, *span)
    shares: list[list[Charge]] = [[] for _ in cut]
    for begin, end in pieces(book, *span):
        inside = [number for number, one in enumerate(cut) if one.start_ms < end and begin < one.end_ms]
        edges = [begin, *(cut[number].end_ms for number in inside[:-1]), end]
        try:
            held = ledger.usage(edges, ("hour", *PRICED_BY), mine, timezone, ())
        except UnsupportedQuestion:
            return [(one, None) for one in cut]
        found = [
            charge
            for charge in charge_table(ledger, book, begin, end, ("hour",), mine, timezone).charges()
            if charge.account in ALLOCATED
        ]
        for number, share in zip(inside, divide_by_epoch(found, held, len(inside)), strict=True):
            shares[number] += share
    parts = quantify(((f"{number:08d}",), charge) for number, share in enumerate(shares) for charge in share)
    return [(one, parts.get((f"{number:08d}",), [])) for number, one in enumerate(cut)]


def beginning(ledger: Moment, key: JobKey, end_ms: int) -> int | None:
    """Returns when a job first held a GPU, or else when its first pod was created; None if neither is known. end_ms:
    later pods are not considered."""
    held = ledger.extents({key}).get(key)
    if held is not None:
        return held[0]
    created = [pod.facts.created_ms for pod in ledger.pods(0, end_ms, of={key}, ordered=False)]
    return min((at for at in created if at is not None), default=None)


def _names(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in found if name}))
