"""Applies the billing policy to charges: who pays for held, idle and committed time.

A bill starts with the charges of `charge_table`: held time belongs to its holder, and the rest to `__idle__`. The
policy then only moves time between payers. It never changes totals, accounts or prices, so the bills of a span add up
to its charges, account by account and price row by price row.

The order of the moves is fixed. Start-up time is first, then unused guarantees. The rest of the unallocated time is
last and is spread by the cost of held time.

Committed GPU time that was not used is not part of the capacity and is listed separately (`unused_commitments`). This
module queries the ledger. The rules are in `time_reallocation` and `quota_usage`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Final

import numpy as np

from accountant.billing.charge import ALLOCATED, DETAILS, LINE_ACCOUNTS, Charge, Detail, add_equal_charges
from accountant.billing.charge_table import ACCOUNT, DETAIL, KEY, PLACE, ChargeTable
from accountant.billing.quota_usage import Lot, ModelSpans, reserve, unused_by_team
from accountant.billing.statements import NOTHING_BESIDE, BookedItems, Statement, build, for_teams
from accountant.billing.time_reallocation import spread_shares, whole_weights
from accountant.billing.usage_pricing import charge_table, charges_by_grouping
from accountant.core.periods import hours, zone
from accountant.ledger.protocols import Moment, of_holders, without_holder
from accountant.prices.price_book import Billing, PriceBook, commitment_use
from accountant.prices.unit_prices import Place, pieces
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base import called_off
from gputally.base.money import exact_product, exact_sum
from gputally.base.units import US_PER_MS

_CLUSTER: Final = "cluster"
_START_UP: Final[tuple[Detail, ...]] = ("starting", "gang_waiting")


def bills(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str = "UTC",
) -> list[Charge]:
    """Charges by payer; `by` begins with the team. Sorted by key, place, account, detail and price row."""
    (columns,) = billed_tables(ledger, book, start_ms, end_ms, (by,), timezone)
    return columns.charges()


def billed_tables(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    groupings: Sequence[Sequence[Dimension]],
    timezone: str = "UTC",
) -> list[ChargeTable]:
    """Charges of [start_ms, end_ms) by payer, as one table for each of the groupings, which all begin with the team.

    Idle time of one cluster is not spread over teams of another, so the computation keeps clusters separate. Raises
    CalledOff when nobody waits for it any more."""
    billing = book.billing if book is not None else Billing()
    guaranteed, spread = billing.any("guaranteed", "owner"), billing.any("unallocated", "spread")
    with_cluster = [(*by, _CLUSTER) if spread and _CLUSTER not in by else tuple(by) for by in groupings]
    billed = []
    priced = charges_by_grouping(ledger, book, start_ms, end_ms, with_cluster, timezone)
    for wanted, by, own in zip(groupings, with_cluster, priced, strict=True):
        called_off.check()
        columns = bill_start_up(own, billing, by)
        if guaranteed or spread:
            rows = np.flatnonzero(columns.cells[:, ACCOUNT] == LINE_ACCOUNTS.index("unallocated"))
            unallocated = columns.only(rows).charges()
            if guaranteed:
                unallocated = bill_guarantees(ledger, book, unallocated, billing, start_ms, end_ms, by, timezone)
            if spread:
                team_and_cluster: list[Dimension] = ["team", _CLUSTER]
                held = columns.regrouped([by.index(name) for name in team_and_cluster]).charges()
                unallocated = spread_idle(unallocated, billing, by, weights(held, team_and_cluster))
            columns = columns.replaced(rows, unallocated)
        billed.append(columns if len(by) == len(wanted) else columns.regrouped(range(len(wanted))))
    return billed


def bill_start_up(columns: ChargeTable, billing: Billing, by: Sequence[Dimension]) -> ChargeTable:
    """Moves start-up time to the cluster's idle time, in pools whose policy has `starting: cluster` or `gang_waiting:
    cluster`."""
    moved = np.zeros(len(columns.cells), dtype=bool)
    for detail in _START_UP:
        pools = [getattr(billing.of_pool(place.pool), detail) == "cluster" for place in columns.places]
        to_cluster = np.array(pools, dtype=bool)[columns.cells[:, PLACE]]
        moved |= to_cluster & (columns.cells[:, DETAIL] == DETAILS.index(detail))
    moved_keys = called_off.each(np.unique(columns.cells[moved, KEY]).tolist())
    payers = {key: paid_by(IDLE, columns.keys[key], by) for key in moved_keys}
    return columns.paid_by(moved, payers) if payers else columns


def unused_commitments(
    ledger: Moment, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str = "UTC"
) -> list[Charge]:
    """GPU time that was paid for in advance and not used, by owner of the commitment. No account of the capacity
    contains it.

    It is computed hour by hour, from the ledger's first record on: what earlier hours used is unknown. GPUs that were
    down or not metered do not use commitments, because they are never billed."""
    if book is None or not book.commits(start_ms, end_ms):
        return []
    start_ms = max(start_ms, ledger.status().extent[0])
    unused_charges: list[Charge] = []
    for start, end in pieces(book, start_ms, end_ms):
        used: Counter[tuple[str, str]] = Counter()
        for charge in charge_table(ledger, book, start, end, ("hour",), None, timezone).charges():
            if charge.row is not None and charge.billed:
                used[charge.row.id, charge.key[0]] += charge.gpu_us
        lengths = hours(start, end, zone(timezone))
        for one in book.committed(start):
            row = one.price.row
            place = Place(row.model, row.pool or "", row.region or "", row.capacity_type or "")
            unused = sum(
                commitment_use(one.commitment.gpus * length_ms * US_PER_MS, used[one.price.id, hour]).unused
                for hour, length_ms in lengths.items()
            )
            if unused:
                unused_charges.append(Charge((one.commitment.owner,), place, "unused_commitment", unused, one.price))
    return add_equal_charges(unused_charges)


def spread_idle(
    unallocated: Sequence[Charge],
    billing: Billing,
    by: Sequence[Dimension],
    of_pool: Mapping[tuple[str, str], Mapping[str, int]],
) -> list[Charge]:
    """Divides unallocated time among the teams of its pool, if the policy spreads it and some GPU was held there.

    If `by` contains the cluster, each cluster's pool is separate.

    of_pool: `weights` of all held time."""
    cluster = by.index(_CLUSTER) if _CLUSTER in by else None
    spread: dict[int, Charge] = {}
    after: list[Charge] = []
    for number, charge in enumerate(called_off.each(unallocated)):
        if not charge.detail and billing.of_pool(charge.place.pool).unallocated == "spread":
            spread[number] = charge
        else:
            after.append(charge)
    shares, left = spread_shares(
        {number: charge.gpu_us for number, charge in spread.items()},
        {number: of_pool.get(_pool(charge, cluster), {}) for number, charge in spread.items()},
    )
    for number, charge in called_off.each(spread.items()):
        for team, gpu_us in shares.get(number, {}).items():
            if gpu_us:
                after.append(replace(charge, key=paid_by(team, charge.key, by), gpu_us=gpu_us, detail="spread"))
        if number in left:
            after.append(charge)
    return after


def _pool(charge: Charge, cluster: int | None) -> tuple[str, str]:
    """The cluster and the pool of a charge. cluster: the index of the cluster in the key; None if it has none."""
    return charge.key[cluster] if cluster is not None else "", charge.place.pool


def weights(held: Iterable[Charge], by: Sequence[Dimension]) -> dict[tuple[str, str], dict[str, int]]:
    """The weights of teams, sorted by team, for each pair of cluster and pool. The weight is the cost of the time that
    the team held there, or this time itself if some of the pool's held time has no price. by: begins with the team."""
    cluster = by.index(_CLUSTER) if _CLUSTER in by else None
    costs: dict[tuple[str, str], dict[str, Decimal]] = defaultdict(dict)
    time: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    unpriced: set[tuple[str, str]] = set()
    for charge in called_off.each(held):
        pool, team = _pool(charge, cluster), charge.key[0]
        if charge.account not in ALLOCATED or team == IDLE:
            continue
        time[pool][team] += charge.gpu_us
        if charge.row is None:
            unpriced.add(pool)
            continue
        cost = exact_product(charge.row.price, Decimal(charge.gpu_us))
        costs[pool][team] = exact_sum((costs[pool].get(team, Decimal(0)), cost))
    return {
        pool: dict(sorted((by_team if pool in unpriced else whole_weights(costs[pool])).items()))
        for pool, by_team in time.items()
    }


def bill_guarantees(
    ledger: Moment,
    book: PriceBook | None,
    unallocated: Sequence[Charge],
    billing: Billing,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
) -> list[Charge]:
    """Charges unused guaranteed quota to the teams that own it, up to the unallocated time of the pools whose policy
    bills it."""
    policies = ledger.status().policies(start_ms, end_ms)
    spans = ModelSpans.of(policies, start_ms, end_ms)
    usage = ledger.usage(spans.edges, ("queue", *spans.dimensions), None, timezone, ())
    unused = unused_by_team(policies, usage, start_ms, end_ms, zone(timezone))
    free: dict[Lot, Counter[tuple[Place, str]]] = defaultdict(Counter)
    for number, (begin, end) in enumerate(pairwise(spans.edges)):
        for charge in charge_table(ledger, book, begin, end, ("hour",), None, timezone).charges():
            if charge.account == "unallocated" and billing.of_pool(charge.place.pool).guaranteed == "owner":
                lot = spans.lot(number, charge.key[0], charge.place.gpu_model)
                free[lot][_place_and_price(charge)] += charge.gpu_us
    reserved: dict[tuple[Place, str], Counter[str]] = defaultdict(Counter)
    for lot in called_off.each(sorted(free)):
        for (kind, team), gpu_us in reserve(free[lot], dict(sorted(unused.get(lot, {}).items()))).items():
            reserved[kind][team] += gpu_us
    return _with_reserved(unallocated, reserved, by)


def _place_and_price(charge: Charge) -> tuple[Place, str]:
    return charge.place, charge.row.id if charge.row else ""


def _with_reserved(
    unallocated: Iterable[Charge], reserved: Mapping[tuple[Place, str], Counter[str]], by: Sequence[Dimension]
) -> list[Charge]:
    """Splits off each team's reserved time from charges for unallocated time, as charges of its own."""
    parts: list[Charge] = []
    for charge in called_off.each(unallocated):
        rest = charge.gpu_us
        teams = reserved.get(_place_and_price(charge), Counter())
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
    """The key of time that a team pays for although it did not hold it: without the names of a holder."""
    held = {**{name: without_holder(name) for name in of_holders(by)}, "team": team}
    return tuple(held.get(name, value) for name, value in zip(by, key, strict=True))


def statement(
    ledger: Moment,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    timezone: str = "UTC",
    *,
    teams: Collection[str] | None = None,
    beside: BookedItems = NOTHING_BESIDE,
) -> Statement:
    """The open statement of a span. It takes several questions, so `ledger` should be a moment of the ledger.

    teams: None for the whole cluster. The coverage is always that of the whole cluster.
    beside: what is booked beside the metered time."""
    billed = bills(ledger, book, start_ms, end_ms, ("team",), timezone)
    unused = unused_commitments(ledger, book, start_ms, end_ms, timezone)
    whole = build(billed, book, ledger.status().policies(start_ms, end_ms), start_ms, end_ms, timezone, beside, unused)
    return whole if teams is None else for_teams(whole, teams)
