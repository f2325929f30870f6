"""Applies the billing policy to charges: who pays for held, idle and committed time.

A bill starts with the charges of `charge_columns`: held time belongs to its holder, and the rest to `__idle__`. The
policy then only moves time between payers. It never changes totals, accounts or prices, so the bills of a span add up
to its charges, account by account and price row by price row.

The order of the moves is fixed. Start-up time is first, then unused guarantees. The rest of the unallocated time is
last and is spread by the cost of held time.

Committed GPU time that was not used is not part of the capacity and is listed separately (`unused_commitments`). This
module queries the ledger. The rules are in `unallocated_borrowed_and_mig_time` and `quota_usage`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Final

import numpy as np

from accountant.billing.charge_columns import ACCOUNT, DETAIL, KEY, PLACE, BilledLines, ChargeColumns, charges_by_cuts
from accountant.billing.quota_usage import reserve, unused_by_team
from accountant.billing.statements import Statement, build, for_teams
from accountant.billing.unallocated_borrowed_and_mig_time import spread_shares, whole_weights
from accountant.billing.usage_pricing import ALLOCATED, DETAILS, LINE_ACCOUNTS, Charge, Detail, charges, merged, pieces
from accountant.core.periods import hours, zone
from accountant.ledger.protocols import OF_HOLDERS, Questions
from accountant.ledger.usage_columns import Place
from accountant.prices.price_book import Billing, PriceBook, settle
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_models import Dimension
from gputally.base.money import exact_product, exact_sum
from gputally.base.units import US_PER_MS

_CLUSTER: Final = "cluster"
_START_UP: Final[tuple[Detail, ...]] = ("starting", "gang_waiting")


def bills(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str = "UTC",
) -> list[Charge]:
    """Charges by payer; `by` begins with the team. Sorted by key, place, account, detail and price row."""
    (found,) = billed_columns(ledger, book, start_ms, end_ms, (by,), timezone)
    return found.charges()


def bills_by_cuts(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    cuts: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
) -> list[BilledLines]:
    """The lines of a statement of [start_ms, end_ms), grouped by each of the `cuts`, which all begin with the team."""
    return [found.by_line() for found in billed_columns(ledger, book, start_ms, end_ms, cuts, timezone)]


def billed_columns(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    cuts: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
) -> list[ChargeColumns]:
    """Like `bills_by_cuts`, but returns one ChargeColumns per grouping.

    Idle time of one cluster is not spread over teams of another, so the computation keeps clusters separate."""
    billing = book.billing if book is not None else Billing()
    guaranteed, spread = billing.any("guaranteed", "owner"), billing.any("unallocated", "spread")
    fine = [(*by, _CLUSTER) if spread and _CLUSTER not in by else tuple(by) for by in cuts]
    found = []
    priced = charges_by_cuts(ledger, book, start_ms, end_ms, fine, timezone)
    for by, of_cut, columns in zip(cuts, fine, priced, strict=True):
        moved = bill_start_up(columns, billing, of_cut)
        if guaranteed or spread:
            free = np.flatnonzero(moved.table[:, ACCOUNT] == LINE_ACCOUNTS.index("unallocated"))
            unallocated = moved.only(free).charges()
            if guaranteed:
                unallocated = bill_guarantees(ledger, book, unallocated, billing, start_ms, end_ms, of_cut, timezone)
            if spread:
                named: list[Dimension] = ["team", _CLUSTER]
                held = moved.regrouped([of_cut.index(name) for name in named]).charges()
                unallocated = spread_idle(unallocated, billing, of_cut, weights(held, named))
            moved = moved.replaced(free, unallocated)
        found.append(moved if len(of_cut) == len(by) else moved.regrouped(range(len(by))))
    return found


def bill_start_up(columns: ChargeColumns, billing: Billing, by: Sequence[Dimension]) -> ChargeColumns:
    """Moves start-up time to the cluster's idle time, in pools whose policy says so."""
    moved = np.zeros(len(columns.table), dtype=bool)
    for detail in _START_UP:
        pools = [getattr(billing.of_pool(place.pool), detail) == "cluster" for place in columns.places]
        to_cluster = np.array(pools, dtype=bool)[columns.table[:, PLACE]]
        moved |= to_cluster & (columns.table[:, DETAIL] == DETAILS.index(detail))
    payers = {key: paid_by(IDLE, columns.keys[key], by) for key in np.unique(columns.table[moved, KEY]).tolist()}
    return columns.paid_by(moved, payers) if payers else columns


def unused_commitments(
    ledger: Questions, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str = "UTC"
) -> list[Charge]:
    """Return GPU time that was paid for in advance and not used, by its owner. It is in no account of the capacity.

    It is computed hour by hour. GPUs that were down or not metered do not use commitments, because they are never
    billed."""
    if book is None or not book.commits(start_ms, end_ms):
        return []
    found: list[Charge] = []
    for start, end in pieces(book, start_ms, end_ms):
        used: dict[tuple[str, str], int] = {}
        for charge in charges(ledger, book, start, end, ("hour",), None, timezone):
            if charge.row is not None and charge.billed:
                at = charge.row.id, charge.key[0]
                used[at] = used.get(at, 0) + charge.gpu_us
        lengths = hours(start, end, zone(timezone))
        for one in book.committed(start):
            row = one.price.row
            place = Place(row.model, row.pool or "", row.region or "", row.capacity_type or "")
            unused = sum(
                settle(one.commitment.gpus * length_ms * US_PER_MS, used.get((one.price.id, hour), 0)).unused
                for hour, length_ms in lengths.items()
            )
            if unused:
                found.append(Charge((one.commitment.owner,), place, "unused_commitment", unused, one.price))
    return merged(found)


def spread_idle(
    found: Sequence[Charge],
    billing: Billing,
    by: Sequence[Dimension],
    of_pool: Mapping[tuple[str, str], Mapping[str, int]],
) -> list[Charge]:
    """Divide unallocated time among the teams of its pool, if the policy spreads it and some GPU was held there.

    If `by` contains the cluster, each cluster's pool is separate.

    of_pool: `weights` of everything that was held."""
    cluster = by.index(_CLUSTER) if _CLUSTER in by else None
    idle: dict[int, Charge] = {}
    kept: list[Charge] = []
    for at, charge in enumerate(found):
        free = charge.account == "unallocated" and not charge.detail
        if free and billing.of_pool(charge.place.pool).unallocated == "spread":
            idle[at] = charge
        else:
            kept.append(charge)
    shares, left = spread_shares(
        {at: charge.gpu_us for at, charge in idle.items()},
        {at: of_pool.get(_pool(charge, cluster), {}) for at, charge in idle.items()},
    )
    for at, charge in idle.items():
        for team, gpu_us in shares.get(at, {}).items():
            if gpu_us:
                kept.append(replace(charge, key=paid_by(team, charge.key, by), gpu_us=gpu_us, detail="spread"))
        if at in left:
            kept.append(charge)
    return kept


def _pool(charge: Charge, cluster: int | None) -> tuple[str, str]:
    """Return the cluster (at the given index of the key) and the pool."""
    return charge.key[cluster] if cluster is not None else "", charge.place.pool


def weights(found: Iterable[Charge], by: Sequence[Dimension]) -> dict[tuple[str, str], dict[str, int]]:
    """Return for each pool and team, sorted by team, the cost of what the team held in the pool.

    If some of that has no price, GPU time is returned instead. by: begins with the team."""
    cluster = by.index(_CLUSTER) if _CLUSTER in by else None
    costs: dict[tuple[str, str], dict[str, Decimal]] = {}
    time: dict[tuple[str, str], dict[str, int]] = {}
    unpriced: set[tuple[str, str]] = set()
    for charge in found:
        pool, team = _pool(charge, cluster), charge.key[0]
        if charge.account not in ALLOCATED or team == IDLE:
            continue
        of_time = time.setdefault(pool, {})
        of_time[team] = of_time.get(team, 0) + charge.gpu_us
        if charge.row is None:
            unpriced.add(pool)
            continue
        of_cost = costs.setdefault(pool, {})
        cost = exact_product(charge.row.price, Decimal(charge.gpu_us))
        of_cost[team] = exact_sum((of_cost.get(team, Decimal(0)), cost))
    return {
        pool: dict(sorted((of_time if pool in unpriced else whole_weights(costs[pool])).items()))
        for pool, of_time in time.items()
    }


def bill_guarantees(
    ledger: Questions,
    book: PriceBook | None,
    found: Sequence[Charge],
    billing: Billing,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
) -> list[Charge]:
    """Charges unused guaranteed quota to the teams that own it, up to the unallocated time of the pools whose policy
    bills it."""
    policies = ledger.policies(start_ms, end_ms)
    hourly = ledger.usage(start_ms, end_ms, ("queue", "hour"), None, timezone)
    unused = unused_by_team(policies, hourly, start_ms, end_ms, zone(timezone))
    free: dict[str, dict[int, int]] = {}
    kinds: dict[tuple[Place, str], int] = {}
    for charge in charges(ledger, book, start_ms, end_ms, ("hour",), None, timezone):
        if charge.account == "unallocated" and billing.of_pool(charge.place.pool).guaranteed == "owner":
            kind = kinds.setdefault((charge.place, charge.row.id if charge.row else ""), len(kinds))
            of_hour = free.setdefault(charge.key[0], {})
            of_hour[kind] = of_hour.get(kind, 0) + charge.gpu_us
    moved: dict[int, dict[str, int]] = {}
    for hour in sorted(free):
        for (kind, team), gpu_us in reserve(free[hour], dict(sorted(unused.get(hour, {}).items()))).items():
            of_kind = moved.setdefault(kind, {})
            of_kind[team] = of_kind.get(team, 0) + gpu_us
    return _moved(found, {at: moved.get(kind, {}) for at, kind in kinds.items()}, by)


def _moved(
    found: Iterable[Charge], taken: Mapping[tuple[Place, str], Mapping[str, int]], by: Sequence[Dimension]
) -> list[Charge]:
    """Return the charges, in which the time that each team takes from the unallocated time is a separate charge."""
    left = {at: dict(teams) for at, teams in taken.items()}
    parts: list[Charge] = []
    for charge in found:
        if charge.account != "unallocated":
            parts.append(charge)
            continue
        rest = charge.gpu_us
        teams = left.get((charge.place, charge.row.id if charge.row else ""), {})
        for team in teams:
            gpu_us = min(rest, teams[team])
            teams[team] -= gpu_us
            rest -= gpu_us
            if gpu_us:
                parts.append(replace(charge, key=paid_by(team, charge.key, by), gpu_us=gpu_us, detail="reserved"))
        if rest:
            parts.append(replace(charge, gpu_us=rest))
    return parts


def paid_by(team: str, key: tuple[str, ...], by: Sequence[Dimension]) -> tuple[str, ...]:
    """The key of time that a team pays for without having held it."""
    unheld = {"team": team, "queue": IDLE}
    return tuple(unheld.get(name, "") if name in OF_HOLDERS else value for name, value in zip(by, key, strict=True))


def statement(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    teams: Collection[str] | None = None,
) -> Statement:
    """Return the statement of a span from the present state of the ledger.

    teams: None for the whole cluster. The coverage is always that of the whole cluster."""
    found = bills(ledger, book, start_ms, end_ms, ("team",), timezone)
    unused = unused_commitments(ledger, book, start_ms, end_ms, timezone)
    whole = build(found, book, ledger.policies(start_ms, end_ms), start_ms, end_ms, timezone, unused=unused)
    return whole if teams is None else for_teams(whole, teams)
