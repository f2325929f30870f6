"""How many nodes a pool needs, by hour of the week; how many node-hours nobody used. Pure.

A node is needed for every `threshold` × GPUs-per-node GPUs that are held on average over an hour: held, not busy, for
what is held cannot be given back. The week's hour takes the largest need of all weeks in the window, the pool's
smallest and largest node counts are the least and the most of those. Demand that waited because nothing was free does
not show in what was held: hours in which (nearly) everything was held are counted and said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from accountant.money import exact_product, gpu_hours
from agent.units import US_PER_HOUR, US_PER_MS

THRESHOLD = 0.75
"""Part of a node's GPUs that may be held before another node is due."""
FULL = 0.98
"""Part of a pool's GPUs from which on an hour counts as full: what waited then is not seen."""
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = 24


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """name: the inventory's node pool, or the GPU model where it knows none (`named` False)."""

    cluster: str
    name: str
    gpu_model: str
    region: str
    capacity_type: str
    named: bool = True

    @property
    def key(self) -> str:
        """As variables name it: letters, digits and underscores."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower()).strip("_") or "gpus"


@dataclass(frozen=True, slots=True)
class NodeHour:
    """One node in one local hour (`2026-10-05T14`). GPU-µs: up_us capacity without what was down; held_us of it."""

    pool: Pool
    node: str
    hour: str
    up_us: int
    held_us: int


@dataclass(frozen=True, slots=True)
class PoolAdvice:
    """weekly: nodes by hour of the week from Monday 00:00, None where the window has no such hour. node_hours: that
    were up; idle_node_hours: in which nothing was held; surplus_node_hours: up beyond the week's need. saving: of the
    surplus at `unit_price` an hour and GPU, None without a price. full_hours: see the module. shapes: GPUs per node,
    where nodes differ; the largest counts."""

    pool: Pool
    gpus_per_node: int
    nodes_now: int
    min_nodes: int
    max_nodes: int
    weekly: tuple[int | None, ...]
    hours: int
    node_hours: float
    idle_node_hours: int
    surplus_node_hours: float
    full_hours: int
    peak_gpus: float
    mean_gpus: float
    shapes: tuple[int, ...]
    unit_price: Decimal | None
    saving: Decimal | None


def pools(
    rows: Iterable[NodeHour],
    lengths: Mapping[str, int],
    prices: Mapping[Pool, Decimal | None],
    threshold: float = THRESHOLD,
) -> tuple[PoolAdvice, ...]:
    """lengths: of the window's local hours in ms; only whole ones are looked at. prices: of a GPU-hour. Raises
    ValueError for a threshold outside (0, 1]."""
    if not 0 < threshold <= 1:
        raise ValueError(f"a threshold is above 0 and at most 1, and not {threshold}")
    whole = {hour: ms for hour, ms in lengths.items() if ms >= US_PER_HOUR // US_PER_MS}
    by_pool: dict[Pool, list[NodeHour]] = {}
    for row in rows:
        if row.hour in whole and row.up_us > 0:
            by_pool.setdefault(row.pool, []).append(row)
    return tuple(_pool(pool, found, whole, prices.get(pool), threshold) for pool, found in sorted(by_pool.items()))


def _pool(
    pool: Pool, rows: Sequence[NodeHour], lengths: Mapping[str, int], price: Decimal | None, threshold: float
) -> PoolAdvice:
    shapes = _shapes(rows, lengths)
    per_node = shapes[-1]
    held: dict[str, int] = {}
    up: dict[str, int] = {}
    nodes: dict[str, set[str]] = {}
    for row in rows:
        held[row.hour] = held.get(row.hour, 0) + row.held_us
        up[row.hour] = up.get(row.hour, 0) + row.up_us
        nodes.setdefault(row.hour, set()).add(row.node)
    gpus = {hour: held[hour] / (lengths[hour] * US_PER_MS) for hour in held}
    needed = {hour: math.ceil(round(count / (threshold * per_node), 9)) for hour, count in gpus.items()}
    weekly: list[int | None] = [None] * (len(DAYS) * HOURS)
    for hour, count in needed.items():
        slot = slot_of(hour)
        weekly[slot] = max(count, weekly[slot] or 0)
    known = [count for count in weekly if count is not None]
    surplus_us = sum(
        max(0, up[hour] - (weekly[slot_of(hour)] or 0) * per_node * lengths[hour] * US_PER_MS) for hour in held
    )
    return PoolAdvice(
        pool=pool,
        gpus_per_node=per_node,
        nodes_now=len(nodes[max(nodes)]),
        min_nodes=min(known),
        max_nodes=max(known),
        weekly=tuple(weekly),
        hours=len(held),
        node_hours=sum(up.values()) / US_PER_HOUR / per_node,
        idle_node_hours=sum(1 for row in rows if not row.held_us),
        surplus_node_hours=surplus_us / US_PER_HOUR / per_node,
        full_hours=sum(1 for hour in held if held[hour] >= FULL * up[hour]),
        peak_gpus=max(gpus.values()),
        mean_gpus=math.fsum(gpus.values()) / len(gpus),
        shapes=shapes,
        unit_price=price,
        saving=None if price is None else exact_product(price, gpu_hours(surplus_us)),
    )


def slot_of(hour: str) -> int:
    """Hour of the week of a local hour: 0 is Monday 00:00."""
    at = datetime.strptime(hour, "%Y-%m-%dT%H")  # noqa: DTZ007 - a local hour has no offset
    return at.weekday() * HOURS + at.hour


def _shapes(rows: Sequence[NodeHour], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Different numbers of GPUs of the pool's nodes, each node by its fullest hour."""
    most: dict[str, int] = {}
    for row in rows:
        count = max(1, round(row.up_us / (lengths[row.hour] * US_PER_MS)))
        most[row.node] = max(count, most.get(row.node, 0))
    return tuple(sorted(set(most.values())))
