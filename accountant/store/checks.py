"""The ledger looks at itself: do the books balance, how much is metered, what was refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from accountant.accounts import ACCOUNTS, CELLS, full_us
from accountant.store.database import Cursor
from accountant.store.state import State
from accountant.store.usage import usage


@dataclass(frozen=True, slots=True)
class Imbalance:
    """total_us: sum of all absolute differences, 0 when the books balance. lines: one per difference."""

    total_us: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that was not booked, and why. content: the record as JSON."""

    cluster: str
    node: str
    epoch: str
    seq: int
    received_ms: int
    reason: str
    detail: str
    content: str


@dataclass(frozen=True, slots=True)
class Hole:
    """Numbers of an outbox that will never come: skipped by the agent, or lost before they were sent."""

    cluster: str
    node: str
    epoch: str
    first_seq: int
    last_seq: int
    reason: str


def imbalance(cursor: Cursor, state: State, start_ms: int, end_ms: int) -> Imbalance:
    """Three differences: accounts from the capacity of each GPU, negative accounts, and the daily,
    hourly and quarter-hourly sums from what they stand for (over the whole ones inside the span)."""
    total = 0
    lines: list[str] = []
    capacity: dict[tuple[str, str], int] = defaultdict(int)
    for gpu in state.fleet.tenures:
        life = state.fleet.life(gpu)
        span = min(end_ms, life.end_ms) - max(start_ms, life.start_ms)
        if span > 0:
            capacity[state.fleet.gpus[gpu].uuid, ""] += full_us(span)
    for line in usage(cursor, state, start_ms, end_ms, ("gpu",)):
        accounts = line.accounts_gpu_us
        difference = accounts.total - capacity.pop((line.key["gpu"], ""), 0)
        negative = sum(-value for value in accounts.model_dump().values() if value < 0)
        if difference or negative:
            total += abs(difference) + negative
            lines.append(f"{line.key['gpu']}: accounts differ from capacity by {difference} µs, {negative} µs negative")
    for (uuid, _), missing in capacity.items():
        total += missing
        lines.append(f"{uuid}: {missing} µs of capacity are in no account")
    for table, at_ms, *differences in cursor.rows("sums_against_rows", {"low": start_ms, "high": end_ms}):
        for name, value in zip(CELLS[:ACCOUNTS], differences, strict=True):
            if value:
                total += abs(value)
                lines.append(f"{table} of {at_ms}: {name} differs from its rows by {value}")
    return Imbalance(total, tuple(lines))


def quarantine(cursor: Cursor, limit: int) -> list[Quarantined]:
    """Newest first."""
    return [Quarantined(*row) for row in cursor.rows("quarantined", {"limit": limit})]


def holes(cursor: Cursor, limit: int) -> list[Hole]:
    """By node, the newest of each first."""
    return [Hole(*row) for row in cursor.rows("holes", {"limit": limit})]
