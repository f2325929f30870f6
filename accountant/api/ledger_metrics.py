"""Exports figures of the ledger as Prometheus metrics.

The `gputally_month_…` families describe the current month in the configured time zone, up to `SETTLE_MS` ago. They are
gauges, because they can fall: late rows reduce `unmetered`, and a lower price reduces the cost. Prometheus would take a
falling counter for a restart and add the whole month again.

A scrape needs a few queries of the ledger, and results are cached for `CACHE_MS`. If the ledger cannot be read, its
families are left out and `gputally_ledger_up` is 0. Figures of "the last quarter of an hour" describe the 15 minutes
that ended `SETTLE_MS` ago, because their records are expected to have arrived.

The number of series is limited: by the GPU models, pools and teams, by the nodes of the inventory, by the queues and
budgets of the policy, by MOST_NODES (the nodes with the most unmetered time) and by MOST_NAMESPACES."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TypeVar

import structlog
from prometheus_client.core import Metric

from accountant.api.dependencies import ServedLedger
from accountant.billing.budget_forecast import states
from accountant.billing.charge import ALLOCATED, Charge, quantify
from accountant.billing.usage_pricing import cost_of, usage_and_charges
from accountant.core.periods import Month
from accountant.core.settings import Settings
from accountant.ledger.protocols import MOST_QUARANTINED, Moment, NodeFacts, policy_at
from accountant.ledger.usage import ACCOUNTS, Usage, coverage
from accountant.prices.price_book import PriceBook
from accountant.prices.unit_prices import price_edges
from accountant.runtime.job_and_task_metrics import CachingCollector
from accountant.wire.policy_models import IDLE, Policy
from accountant.wire.usage_cost_and_job_models import UsageLine
from gputally.base.clock import Clock
from gputally.base.errors import AccountantError
from gputally.base.money import exact_sum
from gputally.base.units import BUCKET_MS, MS_PER_HOUR, MS_PER_SECOND, US_PER_MS
from gputally.server.logs_and_metrics import gauge

MOST_NODES = 100
"""Maximum number of nodes with unmetered GPUs that are named."""
_QUARTERS_PER_HOUR = MS_PER_HOUR // BUCKET_MS
_GPU_US = BUCKET_MS * US_PER_MS
Key = TypeVar("Key", bound=tuple[str, ...])


def families(ledger: Moment, book: PriceBook | None, settled_ms: int, timezone: str) -> Iterator[Metric]:
    """The figures of the quarter-hour that ends at `settled_ms`; the rows until then are expected to have arrived."""
    start, end = settled_ms - BUCKET_MS, settled_ms
    usage, charged = _usage_and_charges(ledger, book, start, end, timezone)
    capacity: Counter[tuple[str, str]] = Counter()
    unpriced: Counter[tuple[str, str]] = Counter()
    for charge in charged:
        device = charge.place.gpu_model, charge.place.pool
        capacity[device] += charge.gpu_us
        unpriced[device] += charge.gpu_us if charge.unpriced else 0
    yield gauge(
        "gputally_capacity_gpus",
        "GPUs known to the ledger in the last quarter of an hour, on average, including GPUs that are down.",
        _in_gpus(capacity),
        labels=["gpu_model", "pool"],
    )
    by_model, by_team = by_account(usage)
    yield gauge(
        "gputally_account_gpus",
        "GPUs of the last quarter of an hour by account, on average; the accounts add up to the capacity.",
        _in_gpus(by_model),
        labels=["account", "gpu_model"],
    )
    yield gauge(
        "gputally_team_gpus",
        "GPUs held by each team in the last quarter of an hour by account, on average.",
        _in_gpus(by_team),
        labels=["team", "account"],
    )
    # A model without unpriced time has the value 0, so that an alert can end.
    yield gauge(
        "gputally_unpriced_gpus",
        "GPUs of the last quarter of an hour whose time has no price, on average.",
        _in_gpus(unpriced),
        labels=["gpu_model", "pool"],
    )
    yield gauge(
        "gputally_burn_rate_per_hour",
        "Cost of an hour at the rate of the last quarter of an hour, by team; `__idle__`: capacity that no team holds. "
        "Time without a price is not included.",
        _burn_rates(charged, book),
        labels=["team", "currency"],
    )
    yield gauge(
        "gputally_unmetered_gpus",
        f"Unmetered GPUs of a node in the last quarter of an hour, on average; the {MOST_NODES} nodes with the most.",
        _in_gpus(_unmetered(ledger, start, end) if (coverage(usage) or 0) < 1 else {}),
        labels=["node"],
    )


def _usage_and_charges(
    ledger: Moment, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str
) -> tuple[Usage, list[Charge]]:
    """The usage of a span by what prices it, and its charges by team."""
    edges = price_edges(book, start_ms, end_ms)
    usage, priced = usage_and_charges(ledger, book, edges, ("team",), None, timezone)
    return usage, priced.without_details().charges()


def _in_gpus(sums: Mapping[Key, int]) -> Iterator[tuple[Key, float]]:
    """GPU-µs of the quarter as GPUs on average."""
    return ((labels, gpu_us / _GPU_US) for labels, gpu_us in sorted(sums.items()))


def by_account(usage: Usage) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Two sums of usage in GPU-µs: by (account, GPU model), including 0, and by (team, account), without 0."""
    models: Counter[tuple[str, str]] = Counter()
    teams: Counter[tuple[str, str]] = Counter()
    by = usage.by.index("team"), usage.by.index("gpu_model")
    for key, row in zip(usage.row_keys(), usage.columns(ACCOUNTS).tolist(), strict=True):
        team, model = (key[place] for place in by)
        for account, gpu_us in zip(ACCOUNTS, row, strict=True):
            models[account, model] += gpu_us
            if gpu_us:
                teams[team, account] += gpu_us
    return models, teams


def _burn_rates(charged: list[Charge], book: PriceBook | None) -> Iterator[tuple[tuple[str, str], float]]:
    if book is None:
        return
    for (team,), parts in quantify((charge.key, charge) for charge in charged if charge.billed).items():
        hourly: Decimal = exact_sum(part.cost for part in parts if part.cost is not None) * _QUARTERS_PER_HOUR
        yield (team, book.currency), float(hourly)


def _unmetered(ledger: Moment, start_ms: int, end_ms: int) -> dict[tuple[str], int]:
    """GPU-µs of unmetered time of the MOST_NODES nodes with the most, by (node,)."""
    missing = {
        (line.key["node"],): line.accounts_gpu_us.unmetered
        for line in ledger.usage((start_ms, end_ms), ("node",)).lines()
        if line.accounts_gpu_us.unmetered
    }
    return dict(sorted(missing.items(), key=lambda each: (-each[1], each[0]))[:MOST_NODES])


MOST_NAMESPACES = 500
"""Maximum number of pairs of team and namespace; those that held the most are shown."""


def of_nodes(nodes: Iterable[NodeFacts], now_ms: int) -> Metric:
    """Nodes of the inventory that are not deleted."""
    known = {
        (node.name, node.pool, node.region, node.capacity_type)
        for node in nodes
        if node.deleted_ms is None or node.deleted_ms > now_ms
    }
    return gauge(
        "gputally_node_info",
        "A node of the inventory, and where it belongs; always 1.",
        ((labels, 1) for labels in sorted(known)),
        labels=["node", "pool", "region", "capacity_type"],
    )


def of_queues(policy: Policy | None) -> Metric:
    """Queues of the policy in force."""
    queues = [] if policy is None else [(q.name, q.parent or "", policy.team_of(q.name)) for q in policy.queues]
    return gauge(
        "gputally_queue_info",
        "A queue of the policy, its parent, and the team that pays for it; always 1.",
        ((labels, 1) for labels in sorted(queues)),
        labels=["queue", "parent", "team"],
    )


def of_namespaces(lines: Iterable[UsageLine]) -> Iterator[tuple[tuple[str, str], int]]:
    """((team, namespace), GPU-µs held) of the MOST_NAMESPACES pairs that held the most, sorted by name."""
    held = {
        (line.key["team"], line.key["namespace"]): sum(
            getattr(line.accounts_gpu_us, each) for each in sorted(ALLOCATED)
        )
        for line in lines
        if line.key["team"] != IDLE
    }
    most = sorted(held.items(), key=lambda each: (-each[1], each[0]))[:MOST_NAMESPACES]
    yield from sorted((key, gpu_us) for key, gpu_us in most if gpu_us)


CACHE_MS = 15_000
"""Maximum age of a figure at a scrape."""
SETTLE_MS = 5 * 60_000
"""How long after its end an interval may arrive before it counts as missing."""
_US_PER_SECOND = US_PER_MS * MS_PER_SECOND
_WATERMARK_COVERAGE = 0.98
_BUDGET = ("budget", "team", "queue")


def _month(moment: Moment, book: PriceBook | None, start_ms: int, settled_ms: int, timezone: str) -> Iterator[Metric]:
    """The figures of a month up to `settled_ms`."""
    usage, charged = _usage_and_charges(moment, book, start_ms, settled_ms, timezone)
    by_model, by_team = by_account(usage)
    yield gauge(
        "gputally_month_account_gpu_seconds",
        "GPU time of the current month so far by account; the accounts add up to the capacity.",
        _in_seconds(by_model.items()),
        labels=["account", "gpu_model"],
    )
    yield gauge(
        "gputally_month_team_gpu_seconds",
        "GPU time held by each team in the current month so far, by account.",
        _in_seconds(by_team.items()),
        labels=["team", "account"],
    )
    by_namespace = moment.usage((start_ms, settled_ms), ("team", "namespace")).lines()
    yield gauge(
        "gputally_month_namespace_gpu_seconds",
        f"GPU time held in the current month so far by team and namespace, used or not; the {MOST_NAMESPACES} largest.",
        _in_seconds(of_namespaces(by_namespace)),
        labels=["team", "namespace"],
    )
    costs = cost_of(charged, book, start_ms, settled_ms, ("team",)).lines if book else ()
    currency = book.currency if book else ""
    yield gauge(
        "gputally_month_team_cost",
        "Cost of what each team held in the current month so far, without shares of idle capacity; `__idle__`: "
        "cost of capacity that no team held; absent for a team with unpriced time.",
        (([line.key["team"], currency], float(line.cost)) for line in costs if line.cost is not None),
        labels=["team", "currency"],
    )
    yield _figure(
        "gputally_ledger_coverage_ratio",
        "Metered share of the current month's capacity, 0 to 1; absent while the month has no known capacity.",
        coverage(usage),
    )


class LedgerCollector(CachingCollector):
    """Collects all families of the ledger. book: returns the price book in force."""

    def __init__(
        self, ledger: ServedLedger, book: Callable[[], PriceBook | None], settings: Settings, clock: Clock
    ) -> None:
        super().__init__(clock, lambda _: CACHE_MS)
        self._ledger = ledger
        self._book = book
        self._settings = settings

    def _read(self) -> tuple[Metric, ...]:
        try:
            families = tuple(self._of_the_ledger(self._clock.wall_ms()))
        except AccountantError as error:
            structlog.get_logger("accountant.runtime").error("ledger_not_read", reason=str(error))
            families = ()
        up = 1 if families else 0
        return (_figure("gputally_ledger_up", "1 if the ledger could be read for this scrape, else 0.", up), *families)

    def _of_the_ledger(self, now_ms: int) -> Iterator[Metric]:
        settled = now_ms - SETTLE_MS
        month = Month.of(settled - 1, self._settings.zone)
        start = month.span(self._settings.zone)[0]
        zone, book = self._settings.timezone, self._book()
        with self._ledger.moment(min(start, settled - MS_PER_HOUR), settled) as moment:
            status = moment.status()
            version = policy_at(status, settled)
            policy = None if version is None else version.policy
            yield from _month(moment, book, start, settled, zone)
            yield from families(moment, book, settled, zone)
            yield of_nodes(status.nodes, now_ms)
            yield of_queues(policy)
            yield from self._budgets(moment, book, policy, month, settled)
            yield from self._trust(moment, settled, now_ms)

    def _budgets(
        self, moment: Moment, book: PriceBook | None, policy: Policy | None, month: Month, settled_ms: int
    ) -> Iterator[Metric]:
        """The families of the policy's budgets. A budget with unknown spend has no share. The label `team` is the
        budget's team, or the team of its queue."""
        budgets = []
        if policy is not None:
            zone = self._settings.timezone
            for state in states(moment, book, policy, month, settled_ms, zone):
                team = state.team or policy.team_of(state.queue)
                budgets.append(((state.name, team, state.queue or ""), state))
        yield gauge(
            "gputally_budget_spent_ratio",
            "Share of each budget that the current month has used.",
            ((labels, state.ratio) for labels, state in budgets if state.ratio is not None),
            labels=_BUDGET,
        )
        yield gauge(
            "gputally_budget_forecast_ratio",
            "Share of each budget that the month is expected to use at the rate of the days so far.",
            ((labels, state.forecast / float(state.limit)) for labels, state in budgets if state.forecast is not None),
            labels=_BUDGET,
        )
        yield gauge(
            "gputally_budget_limit",
            "Limit of each budget for a month; unit: a currency, or GPU-hours.",
            (((*labels, state.unit), float(state.limit)) for labels, state in budgets),
            labels=[*_BUDGET, "unit"],
        )
        yield gauge(
            "gputally_budget_exhausted_timestamp_seconds",
            "When each budget was used up, or will be at the rate of the month so far (Unix time); absent if not in "
            "this month. bound: expected, or the earliest and latest of an 80 % interval.",
            (
                ((*labels, bound), at_ms / MS_PER_SECOND)
                for labels, state in budgets
                for bound, at_ms in (
                    ("expected", state.exhausted_ms),
                    ("earliest", state.exhausted_earliest_ms),
                    ("latest", state.exhausted_latest_ms),
                )
                if at_ms is not None
            ),
            labels=[*_BUDGET, "bound"],
        )

    def _trust(self, moment: Moment, settled_ms: int, now_ms: int) -> Iterator[Metric]:
        reached = moment.status().watermark(now_ms, _WATERMARK_COVERAGE)
        yield _figure(
            "gputally_ledger_watermark_timestamp_seconds",
            "Latest instant up to which at least 98 % of the GPUs in service have records.",
            None if reached is None else reached / MS_PER_SECOND,
        )
        imbalance = moment.imbalance(settled_ms - MS_PER_HOUR, settled_ms)
        yield _figure(
            "gputally_ledger_imbalance_seconds",
            "GPU-seconds of the last settled hour that are in no account or in two; more than 0 shows a defect.",
            imbalance.total_us / _US_PER_SECOND,
        )
        yield _figure(
            "gputally_ledger_quarantined_rows",
            f"Records that were not booked, up to {MOST_QUARANTINED}.",
            imbalance.quarantined,
        )
        yield _figure("gputally_ledger_wal_bytes", "Size of the write-ahead log.", self._ledger.wal_bytes())
        yield _figure(
            "gputally_ledger_room_bytes",
            "Free disk space above the limit at which ingestion stops; below 0 batches are refused with 503.",
            self._ledger.room_bytes(),
        )


def _in_seconds(sums: Iterable[tuple[Key, int]]) -> Iterator[tuple[Key, float]]:
    """GPU-µs as GPU-seconds."""
    return ((labels, gpu_us / _US_PER_SECOND) for labels, gpu_us in sorted(sums))


def _figure(name: str, text: str, value: float | None) -> Metric:
    """A gauge without labels. value: None leaves the sample out."""
    return gauge(name, text, [] if value is None else [((), value)])
