"""Exports jobs, tasks, deliveries, inventory and request counts to Prometheus.

These metrics are for dashboards and alerts only, not for bills or weights. The ledger's own figures are exported by
accountant.api.ledger_metrics.

Costs of jobs are lifetime costs as in `GET /v1/jobs/{id}`; a job without a price has no series. Users determine the
number of jobs, so it is limited to those with the highest burn rate; another series says how many are left out.
Lifetime costs are slow to compute, so at most a twentieth of the time is spent on them; in between a scrape shows the
previous result."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.billing.job_costs import JobQuestions, jobs, lifetime_costs
from accountant.bookkeeping.corrections_and_adjustments import Proposal
from accountant.core.settings import JobMetrics
from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.protocols import JobKey, Receipt
from accountant.notifications.dispatcher import Dispatcher
from accountant.notifications.subscriptions import Outcome
from accountant.prices.price_book import PriceBook
from accountant.storage.backups import Backup
from accountant.wire.usage_cost_and_job_models import Job
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.money import exact_sum
from gputally.base.units import MS_PER_SECOND

if TYPE_CHECKING:  # an accountant without a lake does not load its libraries
    from accountant.lake.publisher import Publisher

NAMELESS = frozenset(
    {
        "account", "capacity_type", "code", "gpu_model", "kind", "le", "node", "outcome", "pool", "reason", "region",
        "result", "task", "version",
    }
)  # fmt: skip
"""Labels that never identify a team, user, namespace, queue or job."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COMMIT_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The metrics registry of one accountant. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = Counter(
            "gputally_ingest_rows",
            "Rows of the agents' batches by result.",
            ["result"],
            registry=self.registry,
        )
        self._batches = Counter(
            "gputally_ingest_batches", "Batches by HTTP status of the answer.", ["code"], registry=self.registry
        )
        self._commit = Histogram(
            "gputally_ingest_commit_seconds",
            "From the arrival of a batch to its durable commit.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )
        for result in ("stored", "duplicate", "quarantined"):
            self._rows.labels(result)
        self._batches.labels("200")
        self.registry.register(FunctionCollector(build_metrics))

    def booked(self, receipt: Receipt, seconds: float) -> None:
        """Records that a batch was committed `seconds` after its arrival."""
        self._rows.labels("stored").inc(receipt.stored)
        self._rows.labels("duplicate").inc(receipt.duplicates)
        self._rows.labels("quarantined").inc(receipt.quarantined)
        self._commit.observe(seconds)

    def rows(self) -> dict[str, int]:
        """Rows of the agents' batches so far, by result."""
        samples = (sample for family in self._rows.collect() for sample in family.samples)
        return {sample.labels["result"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}

    def answered(self, status: int) -> None:
        """Records the status of the answer to a batch; unless it is 200, nothing was stored."""
        self._batches.labels(str(status)).inc()

    def watch(self, collector: Collector) -> None:
        """Adds a collector, such as that of a ledger's figures (accountant.api.ledger_metrics). Once per collector."""
        self.registry.register(collector)

    def exposition(self, *, naming: bool = True) -> bytes:
        """The metrics as text. Reads the ledger: call it in a thread. naming: include series that name a team, or a
        user or an object of one."""
        return generate_latest(self.registry if naming else _WithoutTeams(self.registry))


class _WithoutTeams(Collector):
    """The registry without the families that name a team."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if all(NAMELESS.issuperset(sample.labels) for sample in family.samples):
                yield family


class FunctionCollector(Collector):
    """Collects the metrics that a function returns, at every scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def build_metrics() -> Iterable[Metric]:
    """The version of this accountant."""
    build = GaugeMetricFamily("gputally_accountant_build_info", "Version of this accountant.", labels=["version"])
    build.add_metric([version("gputally")], 1)
    yield build


EVERY_MS: Final = 60_000
"""Maximum age of the figures if reading them is quick."""
IDLE_PER_BUSY: Final = 20
"""If reading is slow, the pause is this many times the duration of the last reading."""


class SnapshotLedger(Protocol):
    """A ledger with snapshots."""

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[JobQuestions]: ...


@dataclass(frozen=True, slots=True)
class _JobCost:
    """A job with its lifetime cost by GPU model."""

    job: Job
    cost: Mapping[str, Decimal]


class JobCollector(Collector):
    """Costs of jobs. book: returns the price book in force. Thread-safe; concurrent scrapes share one reading."""

    def __init__(
        self,
        ledger: SnapshotLedger,
        book: Callable[[], PriceBook | None],
        settings: JobMetrics,
        clock: Clock,
        timezone: str,
    ) -> None:
        self._ledger = ledger
        self._book = book
        self._settings = settings
        self._clock = clock
        self._timezone = timezone
        self._lock = threading.Lock()
        self._families: tuple[Metric, ...] = ()
        self._due_ms: int | None = None

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            before = self._clock.monotonic_ms()
            if self._due_ms is None or before >= self._due_ms:
                self._families = self._read()
                after = self._clock.monotonic_ms()
                self._due_ms = after + max(EVERY_MS, IDLE_PER_BUSY * (after - before))
            return self._families

    def describe(self) -> Iterable[Metric]:
        return ()

    def _read(self) -> tuple[Metric, ...]:
        book = self._book()
        if book is None or not self._settings.most:
            return ()
        try:
            shown, left_out = self._jobs(book)
        except AccountantError as error:
            structlog.get_logger("accountant.runtime").error("jobs_not_read", reason=str(error))
            return ()
        cost = GaugeMetricFamily(
            "gputally_job_cost",
            "Cost of a job so far, in the currency of the price book; absent while some of its time has no price.",
            labels=["cluster", "namespace", "workload", "team", "currency"],
        )
        for one in shown:
            labels = [one.job.cluster, one.job.namespace, one.job.job, ",".join(one.job.teams), book.currency]
            cost.add_metric(labels, float(exact_sum(one.cost.values())))
        omitted = GaugeMetricFamily(
            "gputally_job_series_omitted", "Jobs that have no series because there are more than `job_metrics.most`."
        )
        omitted.add_metric([], left_out)
        usd = [self._usd(shown)] if self._settings.training_job_cost_usd and book.currency == "USD" else []
        return (cost, omitted, *usd)

    def _jobs(self, book: PriceBook) -> tuple[list[_JobCost], int]:
        """The jobs to show, and the number of others."""
        now = self._clock.wall_ms()
        kept_since = now - self._settings.keep * MS_PER_SECOND
        since = min(kept_since, now - EVERY_MS)
        with self._ledger.moment(since, now) as moment:
            recent = [
                one
                for one in jobs(moment, book, since, now, now, None, self._timezone)
                if one.state == "running" or (one.ended_ms or 0) > kept_since
            ]
            recent.sort(key=lambda one: (-(one.burn_per_hour or 0), -(one.cost or 0), one.id))
            kept = {JobKey(one.cluster, one.namespace, one.job): one for one in recent[: self._settings.most]}
            costs = lifetime_costs(moment, book, kept.keys(), now, self._timezone)
        shown = [_JobCost(one, cost) for key, one in sorted(kept.items()) if (cost := costs.get(key)) is not None]
        return shown, max(0, len(recent) - self._settings.most)

    def _usd(self, shown: Iterable[_JobCost]) -> Metric:
        family = GaugeMetricFamily(
            "training_job_cost_usd",
            "Cost of a job so far in USD, by GPU type; only where it is switched on and the price book is in USD.",
            labels=["job_name", "team", "gpu_type", "namespace"],
        )
        sums: dict[tuple[str, ...], list[Decimal]] = {}
        for one in shown:
            for model, cost in one.cost.items():
                labels = (one.job.job.partition("/")[2], ",".join(one.job.teams), model, one.job.namespace)
                sums.setdefault(labels, []).append(cost)
        for series, costs in sorted(sums.items()):
            family.add_metric(series, float(exact_sum(costs)))
        return family


def upkeep_metrics(
    tasks: BackgroundTasks, refused: Callable[[], Mapping[str, bool]], backups: Callable[[], list[Backup]]
) -> Iterable[Metric]:
    """Background tasks, files and backups.

    refused: by file, whether its newest version is not in force.
    backups: returns the backups, newest first."""
    failing = GaugeMetricFamily(
        "gputally_upkeep_failing",
        "1 while what the accountant does by itself failed the last time, or takes too long: making backups and "
        "archives, looking for late facts, reading the inventory, putting a changed file in force (prices, policy, "
        "deliveries, tokens, callers, certificate), watching the cluster; else 0.",
        labels=["task"],
    )
    faults = {name: state.fault is not None for name, state in tasks.states().items()}
    files = refused()
    for task in sorted({*faults, *files}):
        failing.add_metric([task], faults.get(task, False) or files.get(task, False))
    yield failing
    newest = GaugeMetricFamily(
        "gputally_backup_last_timestamp_seconds",
        "When the newest backup at `backups.to` was made (Unix time); absent where there is none.",
    )
    number = GaugeMetricFamily("gputally_backups", "Number of backups at `backups.to`.")
    try:
        known = backups()
    except AccountantError:
        known = []  # the task reports it; the newest backup is unknown
    number.add_metric([], len(known))
    if known:
        newest.add_metric([], known[0].at_ms / MS_PER_SECOND)
    yield from (newest, number)


def lake_metrics(publisher: Publisher) -> Iterable[Metric]:
    """The publications of this accountant in the lake."""
    if publisher.published_ms is not None:
        yield GaugeMetricFamily(
            "gputally_lake_published_timestamp_seconds",
            "When the last publication that succeeded began (Unix time); absent before the first.",
            value=publisher.published_ms / MS_PER_SECOND,
        )
    if publisher.compared is not None:
        yield GaugeMetricFamily(
            "gputally_lake_differences",
            "Figures of a cluster, a day and an account that differed between the lake and the ledger at the last "
            "comparison.",
            value=len(publisher.compared.differences),
        )


OUTCOMES: tuple[Outcome, ...] = ("delivered", "refused", "given-up", "unsure")


def delivery_metrics(deliveries: Dispatcher) -> Iterable[Metric]:
    """Reports and notices by outcome."""
    count = collections.Counter(one.outcome for one in deliveries.known())
    family = GaugeMetricFamily(
        "gputally_deliveries",
        "Reports and notices by outcome: refused ones are tried again, those given up or unsure wait for a person.",
        labels=["outcome"],
    )
    for outcome in OUTCOMES:
        family.add_metric([outcome], count[outcome])
    yield family


def inventory_metrics(inventory: ClusterInventory, clock: Clock) -> Iterable[Metric]:
    """The watches of one inventory, as of the scrape."""
    age = GaugeMetricFamily(
        "gputally_inventory_age_seconds",
        "Since the API server last answered about this kind of object; absent until it has once.",
        labels=["kind"],
    )
    failures = CounterMetricFamily(
        "gputally_inventory_failures", "Times the API server did not answer about this kind.", labels=["kind"]
    )
    for kind in inventory.kinds:
        if kind.heard_ms is not None:
            age.add_metric([kind.kind], max(0, clock.wall_ms() - kind.heard_ms) / MS_PER_SECOND)
        failures.add_metric([kind.kind], kind.failures)
    yield age
    yield failures


def proposal_metrics(waiting: Callable[[], Sequence[Proposal]]) -> Iterable[Metric]:
    """Closed months with proposals. waiting: returns the proposals found at the last check."""
    family = GaugeMetricFamily(
        "gputally_proposals_waiting",
        "Closed months with late records that wait for an admin to accept or refuse them.",
    )
    family.add_metric([], len(waiting()))
    yield family
