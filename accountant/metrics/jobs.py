"""What jobs cost, for Prometheus: those that run and those that ended a while ago, up to a bound.

Costs are of a job's whole life so far, as `GET /v1/jobs/{id}` tells them; a job without a price has no series. The
number of jobs is up to whoever submits them, so it is bounded: those that burn the most stay, and how many were left
out is a figure of its own. Whole lives take longer to read than other figures: at most a twentieth of the time is
spent on it, and between two readings a scrape shows the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Protocol

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.errors import AccountantError
from accountant.joblines import Job
from accountant.money import exact_sum
from accountant.prices.book import PriceBook
from accountant.progress import JobKey
from accountant.settings import JobMetrics
from accountant.work.jobs import JobQuestions, jobs, lives
from agent.clock import Clock
from agent.units import MS_PER_SECOND

EVERY_MS: Final = 60_000
"""How old the figures may be, where reading them is quick …"""
IDLE_PER_BUSY: Final = 20
"""… and how many times as long as it took the last one is waited for, where it is not."""


class Moments(Protocol):
    """A ledger that can be asked about one moment."""

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[JobQuestions]: ...


@dataclass(frozen=True, slots=True)
class _Shown:
    """A job with what its life cost, by GPU model."""

    job: Job
    cost: Mapping[str, Decimal]


class JobCollector(Collector):
    """book: the price book in force. Thread-safe; scrapes at the same time share one reading."""

    def __init__(
        self,
        ledger: Moments,
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
            structlog.get_logger("accountant.metrics").error("jobs_not_read", reason=str(error))
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

    def _jobs(self, book: PriceBook) -> tuple[list[_Shown], int]:
        """Those to show, and how many more there are."""
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
            costs = lives(moment, book, kept.keys(), now, self._timezone)
        shown = [_Shown(one, cost) for key, one in sorted(kept.items()) if (cost := costs.get(key)) is not None]
        return shown, max(0, len(recent) - self._settings.most)

    def _usd(self, shown: Iterable[_Shown]) -> Metric:
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
