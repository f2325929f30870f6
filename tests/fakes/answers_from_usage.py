"""Derives the other answers of a ledger from its `usage`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from accountant.ledger.protocols import IdlePhases, LentTime
from accountant.ledger.usage_columns import (
    COLUMNS,
    PRICED_BY,
    Hours,
    JobName,
    Peak,
    Place,
    UsageColumns,
)
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine


class FromLines:
    """Implements methods of accountant.ledger.protocols.Ledger on `usage`. It reports no idle phases and no lent
    time."""

    usage: Callable[..., list[UsageLine]]

    def usage_between(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[list[UsageLine]]:
        return [self.usage(start, end, by, where, timezone) for start, end in pairwise(edges)]

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        return []

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[LentTime]:
        return []

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        return hours_of_lines(self.usage, start_ms, end_ms, timezone)

    def peaks(
        self, start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str = "UTC"
    ) -> dict[JobName, Peak]:
        return peaks_of_lines(self.usage, start_ms, end_ms, jobs, timezone)

    def usage_columns(
        self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC"
    ) -> list[UsageColumns]:
        return usage_columns_of_lines(self.usage, self.idle_phases, edges, cuts, timezone)


def hours_of_lines(usage: Callable[..., list[UsageLine]], start_ms: int, end_ms: int, timezone: str) -> Hours:
    """Derive `hours` from the lines of `usage`."""
    lines = usage(start_ms, end_ms, ("team", "queue", "hour"), None, timezone)
    capacity: dict[str, int] = {}
    for line in sorted(lines, key=lambda line: line.key["hour"]):
        accounts = line.accounts_gpu_us
        capacity[line.key["hour"]] = capacity.get(line.key["hour"], 0) + accounts.total - accounts.down
    rows = [(line.key, line.accounts_gpu_us) for line in lines if line.accounts_gpu_us.allocated]
    owners, hours = sorted({(key["team"], key["queue"]) for key, _ in rows}), list(capacity)
    table = np.array(
        [
            (owners.index((key["team"], key["queue"])), hours.index(key["hour"]), a.busy, a.allocated_idle,
             a.allocated_unknown)
            for key, a in rows
        ],
        dtype=np.int64,
    ).reshape(-1, 5)  # fmt: skip
    return Hours(hours, list(capacity.values()), owners, *table.T)


def peaks_of_lines(
    usage: Callable[..., list[UsageLine]], start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str
) -> dict[JobName, Peak]:
    """Derive `peaks` from the lines of `usage`."""
    where: dict[Dimension, Collection[str]] = {"namespace": {name for name, _ in jobs}, "job": {job for _, job in jobs}}
    found: dict[JobName, Peak] = {}
    for line in usage(start_ms, end_ms, ("team", "namespace", "job", "cluster", "hour"), where, timezone):
        key = (line.key["team"], line.key["namespace"], line.key["job"], line.key["cluster"])
        peak, accounts = found.get(key, Peak()), line.accounts_gpu_us
        found[key] = Peak(max(peak.held_us, accounts.allocated), max(peak.busy_us, accounts.busy))
    return {key: peak for key, peak in found.items() if key[1:3] in jobs and peak.held_us}


def usage_columns_of_lines(
    usage: Callable[..., list[UsageLine]],
    phases: Callable[..., list[IdlePhases]],
    edges: Sequence[int],
    cuts: Sequence[Sequence[Dimension]],
    timezone: str,
) -> list[UsageColumns]:
    """Derive `usage_columns` from the lines of `usage` and from `idle_phases`."""
    found = []
    for by in cuts:
        dimensions = tuple(dict.fromkeys((*by, *PRICED_BY)))
        rows: dict[tuple[int, tuple[str, ...], Place], list[int]] = {}

        def row(
            stretch: int,
            key: dict[str, str],
            by: Sequence[Dimension] = by,
            rows: dict[tuple[int, tuple[str, ...], Place], list[int]] = rows,
        ) -> list[int]:
            place = Place(*(key[name] for name in PRICED_BY))
            return rows.setdefault((stretch, tuple(key[name] for name in by), place), [0] * len(COLUMNS))

        for stretch, span in enumerate(pairwise(edges)):
            for line in usage(*span, dimensions, None, timezone):
                row(stretch, line.key)[:6] = [getattr(line.accounts_gpu_us, name) for name in COLUMNS[:6]]
            for phase in phases(*span, dimensions, timezone):
                row(stretch, phase.key)[6:] = phase.starting_us, phase.gang_waiting_us
        there = {at: cells for at, cells in sorted(rows.items()) if any(cells)}
        keys, places = sorted({key for _, key, _ in there}), sorted({place for _, _, place in there})
        numbers = [(stretch, keys.index(key), places.index(place)) for stretch, key, place in there]
        at = np.array(numbers, dtype=np.int64).reshape(-1, 3)
        cells = np.array(list(there.values()), dtype=np.int64).reshape(-1, len(COLUMNS))
        found.append(UsageColumns(keys, places, at[:, 0], at[:, 1], at[:, 2], cells))
    return found
