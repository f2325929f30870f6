"""Figures of the ledger for Prometheus, read at the scrape, at most once per `CACHE_MS`.

The `gputally_month_…` families are what the ledger says of the current month in the configured time zone, up to
`SETTLE_MS` ago. They are gauges: late rows take time out of `unmetered`, and a lower price makes a month cheaper. A
counter would have to stay high, and to Prometheus it would begin anew, with all the month at once, where a
restarted accountant tells the lower figure.

A scrape costs a handful of questions over the rollups, however often it is asked. When the ledger
cannot be read, its families are left out and `gputally_ledger_up` is 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.api.checks import MOST_QUARANTINED
from accountant.api.deps import Checked
from accountant.books.budgets import states
from accountant.books.costs import cost
from accountant.errors import AccountantError
from accountant.metrics import names as metrics_names
from accountant.metrics import now as metrics_now
from accountant.periods import Month
from accountant.prices.book import PriceBook
from accountant.settings import Settings
from accountant.wire import Policy, UsageLine
from agent.clock import Clock
from agent.units import MS_PER_HOUR, MS_PER_SECOND, US_PER_MS

CACHE_MS = 15_000
"""How old a figure may be at a scrape."""
SETTLE_MS = 5 * 60_000
"""How long after its end an interval may take to arrive before it is seen as missing."""
_US_PER_SECOND = US_PER_MS * MS_PER_SECOND
_WATERMARK_COVERAGE = 0.98
_BUDGET = ("budget", "team", "queue")


class LedgerCollector(Collector):
    """book: the price book in force. Thread-safe; scrapes at the same time share one reading."""

    def __init__(self, ledger: Checked, book: Callable[[], PriceBook | None], settings: Settings, clock: Clock) -> None:
        self._ledger = ledger
        self._book = book
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._families: tuple[Metric, ...] = ()
        self._read_ms: int | None = None

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            now = self._clock.monotonic_ms()
            if self._read_ms is None or now - self._read_ms >= CACHE_MS:
                self._families = self._read()
                self._read_ms = now
            return self._families

    def describe(self) -> Iterable[Metric]:
        return ()

    def _read(self) -> tuple[Metric, ...]:
        up = GaugeMetricFamily("gputally_ledger_up", "1 if the ledger could be read for this scrape, else 0.")
        try:
            families = tuple(self._of_the_ledger(self._clock.wall_ms()))
        except AccountantError as error:
            structlog.get_logger("accountant.metrics").error("ledger_not_read", reason=str(error))
            families = ()
        up.add_metric([], 1 if families else 0)
        return (up, *families)

    def _of_the_ledger(self, now_ms: int) -> Iterator[Metric]:
        settled = now_ms - SETTLE_MS
        month = Month.of(settled, self._settings.zone)
        start = month.span(self._settings.zone)[0]
        zone = self._settings.timezone
        spent = self._ledger.usage(start, settled, ("team", "gpu_model"), None, zone) if settled > start else []
        yield from self._time(spent)
        by_namespace = self._ledger.usage(start, settled, ("team", "namespace")) if settled > start else []
        yield self._namespaces(by_namespace)
        yield self._cost(start, settled)
        yield from metrics_now.families(self._ledger, self._book(), settled, zone)
        policies = self._ledger.policies(settled, settled + 1)
        policy = policies[-1].policy if policies else None
        yield metrics_names.of_nodes(self._ledger.nodes(), now_ms)
        yield metrics_names.of_queues(policy)
        yield from self._budgets(policy, month, settled)
        yield from self._trust(start, settled, now_ms)

    def _time(self, lines: list[UsageLine]) -> Iterator[Metric]:
        by_account = GaugeMetricFamily(
            "gputally_month_account_gpu_seconds",
            "GPU time of the current month so far by account; the accounts add up to the capacity.",
            labels=["account", "gpu_model"],
        )
        by_team = GaugeMetricFamily(
            "gputally_month_team_gpu_seconds",
            "GPU time held by each team in the current month so far, by account.",
            labels=["team", "account"],
        )
        metrics_now.add_accounts(lines, by_account, by_team, _US_PER_SECOND)
        yield from (by_account, by_team)

    def _cost(self, start_ms: int, end_ms: int) -> Metric:
        family = GaugeMetricFamily(
            "gputally_month_team_cost",
            "Cost of what each team held in the current month so far, before shares of idle capacity; `__idle__`: of "
            "what nobody held; absent for a team with unpriced time.",
            labels=["team", "currency"],
        )
        book = self._book()
        if book is not None and end_ms > start_ms:
            whole = cost(self._ledger, book, start_ms, end_ms, ("team",), None, self._settings.timezone)
            for line in whole.lines:
                if line.cost is not None:
                    family.add_metric([line.key["team"], book.currency], float(line.cost))
        return family

    def _namespaces(self, lines: list[UsageLine]) -> Metric:
        family = metrics_names.namespaces_family()
        for labels, gpu_us in metrics_names.of_namespaces(lines):
            family.add_metric(labels, gpu_us / _US_PER_SECOND)
        return family

    def _budgets(self, policy: Policy | None, month: Month, settled_ms: int) -> Iterator[Metric]:
        """Absent without budgets; a budget whose spend is unknown has no share. team: of the budget or its queue."""
        spent = GaugeMetricFamily(
            "gputally_budget_spent_ratio", "Share of each budget that the current month has used.", labels=_BUDGET
        )
        forecast = GaugeMetricFamily(
            "gputally_budget_forecast_ratio",
            "Share of each budget that the month will come to at the rate of its days so far.",
            labels=_BUDGET,
        )
        limit = GaugeMetricFamily(
            "gputally_budget_limit",
            "What each budget allows in a month; unit: a currency, or GPU-hours.",
            labels=[*_BUDGET, "unit"],
        )
        exhausted = GaugeMetricFamily(
            "gputally_budget_exhausted_timestamp_seconds",
            "When each budget was used up, or will be at the rate of its days; absent where not in this month. bound: "
            "expected, or earliest and latest of the middle 80 %.",
            labels=[*_BUDGET, "bound"],
        )
        if policy is not None:
            zone = self._settings.timezone
            for state in states(self._ledger, self._book(), policy, month, settled_ms, zone):
                team = state.team or metrics_names.team_of(policy, state.queue)
                whose = [state.name, team, state.queue or ""]
                limit.add_metric([*whose, state.unit], float(state.limit))
                if state.ratio is not None:
                    spent.add_metric(whose, state.ratio)
                if state.forecast is not None:
                    forecast.add_metric(whose, state.forecast / float(state.limit))
                bounds = {
                    "expected": state.exhausted_ms,
                    "earliest": state.exhausted_earliest_ms,
                    "latest": state.exhausted_latest_ms,
                }
                for bound, at_ms in bounds.items():
                    if at_ms is not None:
                        exhausted.add_metric([*whose, bound], at_ms / MS_PER_SECOND)
        yield from (spent, forecast, limit, exhausted)

    def _trust(self, start_ms: int, settled_ms: int, now_ms: int) -> Iterator[Metric]:
        yield _gauge(
            "gputally_ledger_coverage_ratio",
            "Metered share of the current month's capacity, 0 to 1.",
            self._ledger.coverage(start_ms, settled_ms) if settled_ms > start_ms else 1.0,
        )
        watermark = GaugeMetricFamily(
            "gputally_ledger_watermark_timestamp_seconds",
            "Latest instant up to which at least 98 % of the last day is metered.",
        )
        reached = self._ledger.watermark(now_ms, _WATERMARK_COVERAGE)
        if reached is not None:
            watermark.add_metric([], reached / MS_PER_SECOND)
        yield watermark
        yield _gauge(
            "gputally_ledger_imbalance_seconds",
            "GPU-seconds of the last settled hour that stand in no account or in two; 0 unless there is a defect.",
            self._ledger.examine(settled_ms - MS_PER_HOUR, settled_ms).total_us / (US_PER_MS * MS_PER_SECOND),
        )
        yield _gauge(
            "gputally_ledger_quarantined_rows",
            f"Records that were not booked, up to {MOST_QUARANTINED}.",
            len(self._ledger.quarantined(MOST_QUARANTINED)),
        )
        yield _gauge("gputally_ledger_wal_bytes", "Size of the write-ahead log.", self._ledger.wal_bytes())
        yield _gauge(
            "gputally_ledger_room_bytes",
            "Disk space left before nothing is taken in any more; below 0 batches are refused with 503.",
            self._ledger.room_bytes(),
        )


def _gauge(name: str, help_text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, help_text)
    family.add_metric([], value)
    return family
