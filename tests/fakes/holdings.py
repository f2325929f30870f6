"""accountant.held of a ledger that knows lines of `usage` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from accountant.costs import PRICED_BY, Place
from accountant.held import Held, Hours, JobName, Peak
from accountant.wire import Dimension, UsageLine


def of_lines(usage: Callable[..., list[UsageLine]], edges: Sequence[int], timezone: str) -> Held:
    """As columns, of the lines of `usage`."""
    by: tuple[Dimension, ...] = ("team", "namespace", "job", "cluster", "user", *PRICED_BY)
    rows = [
        (number, line.key, line.accounts_gpu_us)
        for number, span in enumerate(pairwise(edges))
        for line in usage(*span, by, None, timezone)
        if line.accounts_gpu_us.allocated
    ]
    told: dict[str, list[Any]] = {
        "team": [key["team"] for _, key, _ in rows],
        "job": [(key["namespace"], key["job"]) for _, key, _ in rows],
        "cluster": [key["cluster"] for _, key, _ in rows],
        "user": [key["user"] for _, key, _ in rows],
        "place": [Place(*(key[name] for name in PRICED_BY)) for _, key, _ in rows],
    }
    names = {name: sorted(set(values)) for name, values in told.items()}
    numbers = {
        name: np.array([names[name].index(value) for value in values], dtype=np.int64) for name, values in told.items()
    }
    times = zip(*((a.busy, a.allocated_idle, a.allocated_unknown) for _, _, a in rows), strict=True)
    columns = [np.array(time, dtype=np.int64) for time in times] or [np.zeros(0, dtype=np.int64)] * 3
    stretch = np.array([number for number, _, _ in rows], dtype=np.int64)
    lists = (names["team"], names["job"], names["cluster"], names["user"], names["place"])
    return Held(*lists, stretch, *numbers.values(), *columns)


def hours_of_lines(usage: Callable[..., list[UsageLine]], start_ms: int, end_ms: int, timezone: str) -> Hours:
    """As columns, of the lines of `usage`."""
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
    """Of the lines of `usage`."""
    where: dict[Dimension, Collection[str]] = {"namespace": {name for name, _ in jobs}, "job": {job for _, job in jobs}}
    found: dict[JobName, Peak] = {}
    for line in usage(start_ms, end_ms, ("team", "namespace", "job", "cluster", "hour"), where, timezone):
        key = (line.key["team"], line.key["namespace"], line.key["job"], line.key["cluster"])
        peak, accounts = found.get(key, Peak()), line.accounts_gpu_us
        found[key] = Peak(max(peak.held_us, accounts.allocated), max(peak.busy_us, accounts.busy))
    return {key: peak for key, peak in found.items() if key[1:3] in jobs and peak.held_us}
