"""Holds the accountant's Prometheus registry, and exports ingested batches, jobs, tasks, backups, lake, deliveries,
inventory and proposals.

These metrics are for dashboards and alerts only, not for bills or weights. The ledger's own figures are exported by
accountant.api.ledger_metrics.

Costs of jobs are lifetime costs as in `GET /v1/jobs/{id}`; a job without a price has no series. Users determine the
number of jobs, so it is limited to those with the highest burn rate; another series says how many are left out.
Lifetime costs are slow to compute, so at most a twentieth of the time is spent on them; in between a scrape shows the
previous result."""

from __future__ import annotations

import collections
import heapq
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.billing.job_costs import lifetime_costs, list_jobs
from accountant.bookkeeping.corrections_and_adjustments import Proposal
from accountant.core.settings import JobMetrics
from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.ledger.protocols import JobKey, Receipt
from accountant.notifications.dispatcher import Dispatcher
from accountant.notifications.subscriptions import Outcome
from accountant.prices.price_book import PriceBook
from accountant.storage.backups import Backup
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.usage_cost_and_job_models import Job
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.money import exact_sum
from gputally.base.units import MS_PER_SECOND
from gputally.base.version import __version__
from gputally.server.logs_and_metrics import gauge

if TYPE_CHECKING:  # an accountant without a lake does not load its libraries
    from accountant.lake.publisher import Publisher

NAMELESS = frozenset(
    {
        "account", "capacity_type", "code", "gpu_model", "kind", "le", "node", "outcome", "pool", "quota", "reason",
        "region", "result", "task", "version",
    }
)  # fmt: skip
"""Labels that never identify a team, user, namespace, queue or job."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COMMIT_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class AccountantMetrics:
    """The metrics registry of one accountant. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = Counter(
            "gputally_ingest_rows",
            "Rows of the agents' batches by result.",
            ["result"],
            registry=self.registry,
        )
        self._over_quota = Counter(
            "gputally_ingest_over_quota_records",
            "Records that were set aside, and requests that were refused, because their sender had used up a quota.",
            ["quota"],
            registry=self.registry,
        )
        self._batches = Counter(
            "gputally_ingest_batches", "Batches by HTTP status of the answer.", ["code"], registry=self.registry
        )
        self._commit = Histogram(
            "gputally_ingest_commit_seconds",
            "Time from the arrival of a batch to its durable commit.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )
        for result in ("stored", "duplicate", "quarantined"):
            self._rows.labels(result)
        for quota in (
            "gpus",
            "cluster_gpus",
            "parts",
            "holders",
            "bytes",
            "outboxes",
            "import_nodes",
            "nodes",
            "decisions",
            "acts",
        ):
            self._over_quota.labels(quota)
        self._batches.labels("200")
        self.registry.register(FunctionCollector(build_metrics))

    def booked(self, receipt: Receipt, seconds: float) -> None:
        """Records that a batch was committed `seconds` after its arrival."""
        self._rows.labels("stored").inc(receipt.stored)
        self._rows.labels("duplicate").inc(receipt.duplicates)
        self._rows.labels("quarantined").inc(receipt.quarantined)
        for quota, records in receipt.over_quota.items():
            self._over_quota.labels(quota).inc(records)
        self._commit.observe(seconds)

    def refused(self, quota: str) -> None:
        """Record that a request was refused, because its sender had used up a quota."""
        self._over_quota.labels(quota).inc()

    def rows(self) -> dict[str, int]:
        """Rows of the agents' batches so far, by result."""
        samples = (sample for family in self._rows.collect() for sample in family.samples)
        return {sample.labels["result"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}

    def answered(self, status: int) -> None:
        """Records the HTTP status of the answer to a batch."""
        self._batches.labels(str(status)).inc()

    def watch(self, collector: Collector) -> None:
        """Adds a collector, such as that of a ledger's figures (accountant.api.ledger_metrics). Once per collector."""
        self.registry.register(collector)

    def exposition(self, *, naming: bool = True) -> bytes:
        """The metrics in the text format of Prometheus. Reads the ledger: call it in a thread.

        naming: include series that name a team, a user or one of their objects."""
        return generate_latest(self.registry if naming else _WithoutTeams(self.registry))


class _WithoutTeams(Collector):
    """The registry without families whose labels may name a team, a user or one of their objects."""

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


class CachingCollector(Collector):
    """Collects the metrics that `_read` returns, and reuses them for a while. Thread-safe: concurrent scrapes share one
    reading.

    reuse_ms: returns how long after the start of a reading its metrics are reused, given how long it took."""

    def __init__(self, clock: Clock, reuse_ms: Callable[[int], int]) -> None:
        self._clock = clock
        self._reuse_ms = reuse_ms
        self._lock = threading.Lock()
        self._families: tuple[Metric, ...] = ()
        self._due_ms: int | None = None

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            began = self._clock.monotonic_ms()
            if self._due_ms is None or began >= self._due_ms:
                self._families = self._read()
                self._due_ms = began + self._reuse_ms(self._clock.monotonic_ms() - began)
            return self._families

    @abstractmethod
    def _read(self) -> tuple[Metric, ...]: ...


def build_metrics() -> Iterable[Metric]:
    """The version of this accountant."""
    samples = [([__version__], 1)]
    yield gauge("gputally_accountant_build_info", "Version of this accountant.", samples, labels=["version"])


EVERY_MS: Final = 60_000
"""Maximum age of the figures if reading them is quick."""
IDLE_PER_BUSY: Final = 20
"""If reading is slow, the pause is this many times the duration of the last reading."""


@dataclass(frozen=True, slots=True)
class _JobCost:
    """A job with its lifetime cost by GPU model."""

    job: Job
    cost: Mapping[str, Decimal]


class JobCollector(CachingCollector):
    """Collects the costs of jobs. book: returns the price book in force."""

    def __init__(
        self,
        ledger: DuckLedger,
        book: Callable[[], PriceBook | None],
        settings: JobMetrics,
        clock: Clock,
        timezone: str,
    ) -> None:
        super().__init__(clock, lambda took_ms: took_ms + max(EVERY_MS, IDLE_PER_BUSY * took_ms))
        self._ledger = ledger
        self._book = book
        self._settings = settings
        self._timezone = timezone

    def _read(self) -> tuple[Metric, ...]:
        book = self._book()
        if book is None or not self._settings.most:
            return ()
        try:
            shown, left_out = self._jobs(book)
        except AccountantError as error:
            structlog.get_logger("accountant.runtime").error("jobs_not_read", reason=str(error))
            return ()
        cost = gauge(
            "gputally_job_cost",
            "Cost of a job so far, in the currency of the price book; absent while some of its time has no price.",
            (
                (
                    [one.job.cluster, one.job.namespace, one.job.job, ",".join(one.job.teams), book.currency],
                    float(exact_sum(one.cost.values())),
                )
                for one in shown
            ),
            labels=["cluster", "namespace", "workload", "team", "currency"],
        )
        omitted = gauge(
            "gputally_job_series_omitted",
            "Jobs that have no series because there are more than `job_metrics.most`.",
            [([], left_out)],
        )
        usd = [self._usd(shown)] if self._settings.training_job_cost_usd and book.currency == "USD" else []
        return (cost, omitted, *usd)

    def _jobs(self, book: PriceBook) -> tuple[list[_JobCost], int]:
        """The jobs that get a series, and the number of those that get none."""
        now = self._clock.wall_ms()
        kept_since = now - self._settings.keep * MS_PER_SECOND
        since = min(kept_since, now - EVERY_MS)
        with self._ledger.moment(since, now) as moment:
            listed = list_jobs(moment, book, since, now, now, None, self._timezone)
            number = 0

            def recent() -> Iterator[Job]:
                nonlocal number
                for one in listed.built(listed.figures):
                    if one.state in ("running", "unknown") or (one.ended_ms or 0) > kept_since:
                        number += 1
                        yield one

            first = heapq.nsmallest(
                self._settings.most, recent(), key=lambda one: (-(one.burn_per_hour or 0), -(one.cost or 0), one.id)
            )
            kept = {JobKey(one.cluster, one.namespace, one.job): one for one in first}
            costs = lifetime_costs(moment, book, kept.keys(), now, self._timezone)
        shown = [_JobCost(one, cost) for key, one in sorted(kept.items()) if (cost := costs.get(key)) is not None]
        return shown, max(0, number - self._settings.most)

    def _usd(self, shown: Iterable[_JobCost]) -> Metric:
        sums: dict[tuple[str, ...], list[Decimal]] = {}
        for one in shown:
            for model, cost in one.cost.items():
                labels = (one.job.job.partition("/")[2], ",".join(one.job.teams), model, one.job.namespace)
                sums.setdefault(labels, []).append(cost)
        return gauge(
            "training_job_cost_usd",
            "Cost of a job so far in USD, by GPU type; only where it is switched on and the price book is in USD.",
            ((series, float(exact_sum(costs))) for series, costs in sorted(sums.items())),
            labels=["job_name", "team", "gpu_type", "namespace"],
        )


def upkeep_metrics(
    tasks: BackgroundTasks, refused: Mapping[str, bool], backups: Callable[[], list[Backup]]
) -> Iterable[Metric]:
    """Background tasks, files and backups.

    refused: for each file, whether its newest version is not in force.
    backups: returns the backups, newest first."""
    faults = {name: state.fault is not None for name, state in tasks.states().items()}
    yield gauge(
        "gputally_upkeep_failing",
        "1 while a task of the accountant failed the last time or takes too long, else 0. The tasks make backups and "
        "archives, look for late facts, read the inventory, put changed files in force (prices, policy, deliveries, "
        "tokens, callers, certificate) and watch the cluster.",
        (([task], faults.get(task, False) or refused.get(task, False)) for task in sorted({*faults, *refused})),
        labels=["task"],
    )
    listed: list[Backup] | None
    try:
        listed = backups()
    except AccountantError:
        listed = None  # the task reports why
    known = None if listed is None else [backup for backup in listed if not backup.damage]
    yield gauge(
        "gputally_backup_last_timestamp_seconds",
        "When the newest intact backup at `backups.to` was made (Unix time); absent if there is none or it is unknown.",
        [([], known[0].at_ms / MS_PER_SECOND)] if known else [],
    )
    yield gauge(
        "gputally_backups",
        "Number of intact backups at `backups.to`; absent while the backups cannot be listed.",
        [] if known is None else [([], len(known))],
    )
    yield gauge(
        "gputally_backups_damaged",
        "Number of backups at `backups.to` whose .json file is damaged, which `gputally accountant backups` names; "
        "absent while the backups cannot be listed.",
        [] if listed is None or known is None else [([], len(listed) - len(known))],
    )


def label_metrics(cut: Mapping[str, int]) -> Iterable[Metric]:
    """Values of exported labels that were not kept. cut: their number by reason."""
    family = CounterMetricFamily(
        "gputally_exported_label_values_cut",
        "Observed values of exported pod labels that were kept as `__other__` (reason values: too many in the "
        "namespace; invalid: no value of a label) or not at all (changes: too many of one pod), since the start.",
        labels=["reason"],
    )
    for reason in ("changes", "invalid", "values"):
        family.add_metric([reason], cut.get(reason, 0))
    yield family


def lake_metrics(publisher: Publisher) -> Iterable[Metric]:
    """What this accountant published in the lake, and how it compared with the ledger."""
    if publisher.published_ms is not None:
        yield GaugeMetricFamily(
            "gputally_lake_published_timestamp_seconds",
            "When the last publication that succeeded began (Unix time); absent before the first.",
            value=publisher.published_ms / MS_PER_SECOND,
        )
    yield GaugeMetricFamily(
        "gputally_lake_refused",
        "1 if the accountant publishes nothing because the lake or the ledger is not what it was, and a person has to "
        "decide; the log and /v1/check?lake=true have the reason.",
        value=float(bool(publisher.refused)),
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
    """The number of reports and notices by outcome."""
    count = collections.Counter(one.outcome for one in deliveries.known())
    yield gauge(
        "gputally_deliveries",
        "Reports and notices by outcome: refused ones are tried again, those given up or unsure wait for a person.",
        (([outcome], count[outcome]) for outcome in OUTCOMES),
        labels=["outcome"],
    )


def inventory_metrics(inventory: ClusterInventory, clock: Clock) -> Iterable[Metric]:
    """The watches of the cluster's objects, at the time of the scrape."""
    yield gauge(
        "gputally_inventory_age_seconds",
        "Time since this kind of object was last known as the API server has it, after a whole list and in a watch; "
        "absent before.",
        (
            ([kind.kind], max(0, clock.wall_ms() - kind.heard_ms) / MS_PER_SECOND)
            for kind in inventory.kinds
            if kind.heard_ms is not None
        ),
        labels=["kind"],
    )
    failures = CounterMetricFamily(
        "gputally_inventory_failures",
        "Requests about this kind of object that the API server did not answer.",
        labels=["kind"],
    )
    for kind in inventory.kinds:
        failures.add_metric([kind.kind], kind.failures)
    yield failures
    yield gauge(
        "gputally_inventory_unreadable_objects",
        "Objects of this kind that cannot be read and count as they were before, if at all. The log names each.",
        (([kind.kind], kind.unreadable) for kind in inventory.kinds),
        labels=["kind"],
    )


def proposal_metrics(waiting: Callable[[], Sequence[Proposal]]) -> Iterable[Metric]:
    """The number of closed months with proposals. waiting: returns the proposals found at the last check."""
    yield gauge(
        "gputally_proposals_waiting",
        "Closed months with late records that wait for an administrator to accept or refuse them.",
        [([], len(waiting()))],
    )
