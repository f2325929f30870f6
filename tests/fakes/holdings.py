"""accountant.held.Held of a ledger that knows lines of `usage` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from accountant.costs import PRICED_BY, Place
from accountant.held import Held
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
