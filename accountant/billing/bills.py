"""Applies the billing policy to charges: who pays for held, idle and committed time (columns only).

A bill begins as the charges of accountant.billing.costs (held time to its holder, the rest to `__idle__`) and time is
then only moved between payers: never made, lost, put into another account or given another price. So the bills of a
span add up to its charges, account by account and price row by price row. What was paid for in advance and not
used is no time of the span: it stands beside the bills (`unused_commitments`).

The order is fixed: start-up time, then unused guarantees, then what is still unallocated. Weights of a spread are
the costs of what was held, before any share. Asks the ledger; decides with billing, idle and guarantees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Final

from accountant.billing.billing_rules import spread_shares, whole_weights
from accountant.billing.costs import ALLOCATED, PRICED_BY, Charge, Detail, Place, charges, merged, pieces, regrouped
from accountant.billing.quota_usage import reserve, unused_by_team
from accountant.core.periods import hours, zone
from accountant.ledger.protocols import OF_HOLDERS, IdlePhases, Questions
from accountant.prices.price_book import Billing, PriceBook, settle
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_models import Dimension
from gputally.base.money import exact_product, exact_sum
from gputally.base.units import US_PER_MS

_CLUSTER: Final = "cluster"


def bills(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str = "UTC",
    counted: Sequence[Charge] | None = None,
) -> list[Charge]:
    """Charges by who pays; `by` begins with the team. Sorted by key, place, account, detail and price row.
    counted: the charges of this question, where they are at hand."""
    billing = book.billing if book is not None else Billing()
    fine = told_by(billing, by)
    at_hand = counted if len(fine) == len(by) else None
    found = told_apart(ledger, book, start_ms, end_ms, fine, None, timezone, at_hand)
    found = start_up(found, billing, fine)
    if billing.any("guaranteed", "owner"):
        found = bill_guarantees(ledger, book, found, billing, start_ms, end_ms, fine, timezone)
    return regrouped(spread_idle(found, billing, fine, weights(found, fine)), fine, by)


def told_by(billing: Billing, by: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """What charges are told apart by to be billed by these: what is idle in one cluster is not spread over teams of
    another."""
    return (*by, _CLUSTER) if billing.any("unallocated", "spread") and _CLUSTER not in by else tuple(by)


def unused_commitments(
    ledger: Questions, book: PriceBook | None, start_ms: int, end_ms: int, timezone: str = "UTC"
) -> list[Charge]:
    """What was paid for in advance and not used, by its owner; hour by hour, in no account of the capacity.

    GPUs that were down or not metered use nothing of it: they are never billed."""
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


def told_apart(
    ledger: Questions,
    book: PriceBook | None,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    where: Mapping[Dimension, Collection[str]] | None = None,
    timezone: str = "UTC",
    counted: Sequence[Charge] | None = None,
) -> list[Charge]:
    """The charges of a question with allocated_idle told apart. counted: them, where they are at hand.

    Between two changes of price each span is asked for by itself: a start-up costs what its own hours cost."""
    wanted = where or {}
    asked = tuple(dict.fromkeys((*by, *wanted, *PRICED_BY)))
    spans = pieces(book, start_ms, end_ms)
    at_hand = counted if len(spans) == 1 else None
    found: list[Charge] = []
    for start, end in spans:
        of_piece = charges(ledger, book, start, end, by, where, timezone) if at_hand is None else at_hand
        phases = ledger.idle_phases(start, end, asked, timezone)
        chosen = [one for one in phases if all(one.key[name] in values for name, values in wanted.items())]
        found += with_phases(of_piece, chosen, by)
    return found if len(spans) == 1 else merged(found)


def with_phases(found: Iterable[Charge], phases: Iterable[IdlePhases], by: Sequence[Dimension]) -> list[Charge]:
    """Charges of a span in which no price changes, with allocated_idle told apart."""
    left: dict[tuple[tuple[str, ...], Place], dict[Detail, int]] = {}
    for phase in phases:
        key = tuple(phase.key[name] for name in by), Place(*(phase.key[name] for name in PRICED_BY))
        left[key] = {"starting": phase.starting_us, "gang_waiting": phase.gang_waiting_us}
    parts: list[Charge] = []
    for charge in found:
        if charge.account != "allocated_idle":
            parts.append(charge)
            continue
        rest = charge.gpu_us
        of_group = left.get((charge.key, charge.place), {})
        for detail in of_group:
            taken = min(rest, of_group[detail])
            of_group[detail] -= taken
            rest -= taken
            if taken:
                parts.append(replace(charge, gpu_us=taken, detail=detail))
        if rest:
            parts.append(replace(charge, gpu_us=rest, detail="running_idle"))
    return parts


def start_up(found: Iterable[Charge], billing: Billing, by: Sequence[Dimension]) -> list[Charge]:
    """Start-up time to the cluster, in the pools whose policy says so."""
    return [
        replace(charge, key=paid_by(IDLE, charge.key, by))
        if charge.detail in ("starting", "gang_waiting")
        and getattr(billing.of_pool(charge.place.pool), charge.detail) == "cluster"
        else charge
        for charge in found
    ]


def spread_idle(
    found: Sequence[Charge],
    billing: Billing,
    by: Sequence[Dimension],
    of_pool: Mapping[tuple[str, str], Mapping[str, int]],
) -> list[Charge]:
    """Unallocated time over the teams of its pool, where the policy spreads it and something was held there.

    A pool is one of a cluster, where `by` tells clusters apart. of_pool: `weights` of everything that was held."""
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
    """The cluster, whose place in the key is given, and its pool."""
    return charge.key[cluster] if cluster is not None else "", charge.place.pool


def weights(found: Iterable[Charge], by: Sequence[Dimension]) -> dict[tuple[str, str], dict[str, int]]:
    """By pool and team, sorted by team: the cost of what the team held in the pool; GPU time where some of that has
    no price. by: begins with the team."""
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
    """Unused guarantees to their queues' teams, as far as time was unallocated in pools that bill them."""
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
    """Unallocated charges with what each team takes out of them as charges of its own."""
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
    """The key of time that a team pays without having held it."""
    nobody = {"team": team, "queue": IDLE}
    return tuple(nobody.get(name, "") if name in OF_HOLDERS else value for name, value in zip(by, key, strict=True))
