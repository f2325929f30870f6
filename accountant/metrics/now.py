"""Figures of the ledger's last settled quarter of an hour, for Prometheus: capacity and its accounts, burn rate, what
has no price and what is not metered. Asks the ledger; keeps nothing.

The quarter ends with the last settled one, so that a figure does not jump with the second at which it is asked.
Series are bounded: per model and pool, per team, and per node only the MOST_NODES worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal

from prometheus_client.core import GaugeMetricFamily, Metric

from accountant.books.costs import ACCOUNTS, Charge, charges, quantify
from accountant.ledger import Questions
from accountant.money import exact_sum
from accountant.prices.book import PriceBook
from accountant.wire import UsageLine
from agent.units import BUCKET_MS, MS_PER_HOUR, US_PER_MS

MOST_NODES = 100
"""Nodes with unmetered GPUs that are named."""
_QUARTERS_PER_HOUR = MS_PER_HOUR // BUCKET_MS
_GPU_US = BUCKET_MS * US_PER_MS


def families(ledger: Questions, book: PriceBook | None, settled_ms: int, timezone: str) -> Iterator[Metric]:
    """settled_ms: up to which late rows are not waited for any more."""
    start, end = settled_ms - BUCKET_MS, settled_ms
    found = charges(ledger, book, start, end, ("team",), None, timezone)
    yield _capacity(found)
    yield from _accounts(ledger.usage(start, end, ("team", "gpu_model"), None, timezone))
    yield _unpriced(found)
    yield _burn_rate(found, book)
    yield _unmetered(ledger, start, end)


def _capacity(found: list[Charge]) -> Metric:
    family = GaugeMetricFamily(
        "gputally_capacity_gpus",
        "GPUs known to the ledger in the last quarter of an hour, those that are down included.",
        labels=["gpu_model", "pool"],
    )
    sums: dict[tuple[str, str], int] = {}
    for charge in found:
        key = (charge.place.gpu_model, charge.place.pool)
        sums[key] = sums.get(key, 0) + charge.gpu_us
    for key, gpu_us in sorted(sums.items()):
        family.add_metric(key, gpu_us / _GPU_US)
    return family


def _accounts(lines: Iterable[UsageLine]) -> Iterator[Metric]:
    by_account = GaugeMetricFamily(
        "gputally_account_gpus",
        "GPUs of the last quarter of an hour by account, in the mean; the accounts add up to the capacity.",
        labels=["account", "gpu_model"],
    )
    by_team = GaugeMetricFamily(
        "gputally_team_gpus",
        "GPUs held by each team in the last quarter of an hour by account, in the mean.",
        labels=["team", "account"],
    )
    add_accounts(lines, by_account, by_team, _GPU_US)
    yield from (by_account, by_team)


def add_accounts(
    lines: Iterable[UsageLine], by_account: GaugeMetricFamily, by_team: GaugeMetricFamily, unit_us: int
) -> None:
    """Usage by team and GPU model as a series for each account of a model, 0 included, and for those of a team that
    it has. unit_us: what counts as 1."""
    models: dict[tuple[str, str], int] = {}
    teams: dict[tuple[str, str], int] = {}
    for line in lines:
        for account in ACCOUNTS:
            gpu_us = getattr(line.accounts_gpu_us, account)
            model = (account, line.key["gpu_model"])
            models[model] = models.get(model, 0) + gpu_us
            if gpu_us:
                team = (line.key["team"], account)
                teams[team] = teams.get(team, 0) + gpu_us
    for family, sums in ((by_account, models), (by_team, teams)):
        for labels, gpu_us in sorted(sums.items()):
            family.add_metric(labels, gpu_us / unit_us)


def _unpriced(found: list[Charge]) -> Metric:
    """0 of a model all of whose time has a price, so that an alert has something to compare with."""
    family = GaugeMetricFamily(
        "gputally_unpriced_gpus",
        "GPUs of the last quarter of an hour whose time has no price, in the mean.",
        labels=["gpu_model", "pool"],
    )
    sums: dict[tuple[str, str], int] = {}
    for charge in found:
        key = (charge.place.gpu_model, charge.place.pool)
        sums[key] = sums.get(key, 0) + (charge.gpu_us if charge.unpriced else 0)
    for key, gpu_us in sorted(sums.items()):
        family.add_metric(key, gpu_us / _GPU_US)
    return family


def _burn_rate(found: list[Charge], book: PriceBook | None) -> Metric:
    family = GaugeMetricFamily(
        "gputally_burn_rate_per_hour",
        "What an hour costs at the rate of the last quarter, by team; `__idle__`: capacity that nobody held. "
        "Time without a price is not in it.",
        labels=["team", "currency"],
    )
    if book is not None:
        for (team,), parts in quantify((charge.key, charge) for charge in found if charge.billed).items():
            known = [part.cost for part in parts if part.cost is not None]
            hourly: Decimal = exact_sum(known) * _QUARTERS_PER_HOUR
            family.add_metric([team, book.currency], float(hourly))
    return family


def _unmetered(ledger: Questions, start_ms: int, end_ms: int) -> Metric:
    family = GaugeMetricFamily(
        "gputally_unmetered_gpus",
        f"GPUs of a node that nothing was heard of in the last quarter of an hour, in the mean; only the {MOST_NODES} "
        "nodes that lack most.",
        labels=["node"],
    )
    if ledger.coverage(start_ms, end_ms) < 1:
        missing = {
            line.key["node"]: line.accounts_gpu_us.unmetered
            for line in ledger.usage(start_ms, end_ms, ("node",))
            if line.accounts_gpu_us.unmetered
        }
        worst = sorted(missing.items(), key=lambda each: (-each[1], each[0]))[:MOST_NODES]
        for node, gpu_us in sorted(worst):
            family.add_metric([node], gpu_us / _GPU_US)
    return family
