"""Divides idle time among payers, and bills MIG instances by compute or memory.

`spread_shares` divides each pool's idle time among the pool's users, in proportion to their use. The idle time of a
pool without users stays unallocated. Every division is by largest remainder with ties to the earlier key, so parts add
up exactly. Source: OpenCost's AggregateBy. OpenCost first shares each pool's idle time by the cost incurred in that
pool, then the shared costs. Both use the costs before idle time was added.

`by_memory` bills MIG instances. Agents divide a GPU by compute slices: a 1g of 7 holds 1/7 of its time. With
`mig_basis: memory` an instance pays for its memory slices instead, 1/8 each. Memory without an instance is unallocated.
`rebase` only moves time between holders and unheld time, so the total stays the same and no account becomes negative.
Source of the geometry: NVIDIA MIG user guide (eight memory slices; seven compute slices, four on an A30)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import NamedTuple, TypeVar

from accountant.ledger.protocols import of_holders, without_holder
from accountant.ledger.usage import ACCOUNTS, HELD, LENT, PRICED_BY, START_UP, Usage, names_of
from accountant.prices.unit_prices import memory_to_compute
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.apportionment import apportion

P = TypeVar("P", bound=Hashable)
K = TypeVar("K", bound=Hashable)


def spread_shares(
    idle: Mapping[P, int], weights: Mapping[P, Mapping[K, int]]
) -> tuple[dict[P, dict[K, int]], dict[P, int]]:
    """The shares per pool and key, and the undivided time per pool. Together they equal the idle time of every pool."""
    shares: dict[P, dict[K, int]] = {}
    undivided: dict[P, int] = {}
    for pool, units in idle.items():
        positive = {key: weight for key, weight in weights.get(pool, {}).items() if weight}
        if positive:
            shares[pool] = dict(zip(positive, apportion(units, list(positive.values())), strict=True))
        elif units:
            undivided[pool] = units
    return shares, undivided


def whole_weights(amounts: Mapping[K, Decimal | Fraction]) -> dict[K, int]:
    """Integers in the same proportion as exact amounts."""
    exact = {key: Fraction(amount) for key, amount in amounts.items()}
    unit = lcm(*(value.denominator for value in exact.values()))
    return {key: int(value * unit) for key, value in exact.items()}


def by_memory(usage: Usage, *, with_unheld: bool) -> Usage:
    """Converts the time of MIG holders from compute slices to memory slices. The usage is grouped at least by PRICED_BY
    and `mig_profile`; the result has its accounts and the measures of START_UP and LENT.

    with_unheld: whether the usage includes time without a holder.

    Rows whose memory share cannot be determined are left unchanged."""
    instances, instance = usage.keyed(("mig_profile", "gpu_model"))
    ratios = [memory_to_compute(*names) or Fraction(1) for names in instances]
    _, pool_of = usage.keyed(PRICED_BY)
    kept = [name for name in (*START_UP, *LENT) if name in usage.names]
    names = (*ACCOUNTS, *kept)
    pools: dict[tuple[int, int], list[_Row]] = {}
    rows = zip(usage.span.tolist(), pool_of.tolist(), usage.row_keys(), instance.tolist(), strict=True)
    for (span, pool, key, number), figures in zip(rows, usage.columns(names).tolist(), strict=True):
        pools.setdefault((span, pool), []).append(_Row(key, dict(zip(names, figures, strict=True)), ratios[number]))
    converted = [
        (span, row.key, [row.figures[name] for name in names_of(kept)])
        for (span, _), several in pools.items()
        for row in _pool(several, usage.by, with_unheld)
    ]
    return Usage.of_rows(usage.by, converted, kept)


class _Row(NamedTuple):
    """A row of usage. ratio: that of its memory share to its compute share."""

    key: tuple[str, ...]
    figures: dict[str, int]
    ratio: Fraction


def _pool(rows: list[_Row], by: Sequence[Dimension], with_unheld: bool) -> list[_Row]:
    if all(row.ratio == 1 for row in rows):
        return rows
    held = {(number, name): (row.figures[name], row.ratio) for number, row in enumerate(rows) for name in HELD}
    before = sum(row.figures["unallocated"] for row in rows)
    if with_unheld:
        rebased, unallocated = rebase(held, before)
    else:
        rebased, unallocated = {key: int(gpu_us * ratio) for key, (gpu_us, ratio) in held.items()}, before
    for (number, name), gpu_us in rebased.items():
        rows[number].figures[name] = gpu_us
    return rows if unallocated == before else _with_unallocated(rows, by, unallocated)


def _with_unallocated(rows: list[_Row], by: Sequence[Dimension], unallocated: int) -> list[_Row]:
    """The rows, with `unallocated` as the unallocated time of all rows together."""
    free = [row.figures["unallocated"] for row in rows]
    if not any(free):
        unheld = {name: without_holder(name) for name in of_holders(by)}
        key = tuple([unheld.get(name, value) for name, value in zip(by, rows[0].key, strict=True)])
        return [*rows, _Row(key, dict.fromkeys(rows[0].figures, 0) | {"unallocated": unallocated}, Fraction(1))]
    for row, part in zip(rows, apportion(unallocated, free), strict=True):
        row.figures["unallocated"] = part
    return rows


def rebase(held: Mapping[K, tuple[int, Fraction]], unheld: int) -> tuple[dict[K, int], int]:
    """Multiplies the time of each group by the group's ratio; returns the products and the time without a holder.

    Agents send rounded microseconds, so the products for a full GPU can exceed it by a few microseconds. These are
    subtracted from the groups in proportion."""
    rebased = {key: int(gpu_us * ratio) for key, (gpu_us, ratio) in held.items()}
    rest = unheld + sum(gpu_us for gpu_us, _ in held.values()) - sum(rebased.values())
    if rest < 0:
        for key, excess in zip(rebased, apportion(-rest, list(rebased.values())), strict=True):
            rebased[key] -= excess
        rest = 0
    return rebased, rest
