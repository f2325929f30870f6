"""Usage windows over a ledger of a million intervals (1,000 GPUs, 1,000 minutes), in processor time.

A window is asked as the accountant's routes ask it. The baseline is the same sums with pandas over the same rows in
memory, with names resolved."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd

from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Measure, UsageWindow, WindowSpec
from gputally.base.clock import VirtualClock
from tests.bench import load
from tests.bench.figure import Figure, Goal, cpu_seconds, quantile

GPUS = 8
SIZE_S, HALF_LIFE_S = 12 * 3600, 6 * 3600
WHOLE_MINUTES = Goal(5.0)
"""Goal for the median. A window that begins at any other second splits the row of every GPU and has no goal."""
FIRST = Goal(1_000.0)


@dataclass(frozen=True)
class Size:
    """runs: queries of each form."""

    nodes: int = 125
    minutes: int = 1_000
    runs: int = 30


FULL = Size()
TINY = Size(nodes=2, minutes=200, runs=3)


def fill(ledger: DuckLedger, now_ms: int, size: Size = FULL) -> list[tuple[int, int, int]]:
    """Book the intervals; return (queue, start, allocated µs) of each for the baseline."""
    ledger.put_policy(load.policy(), load.BEGIN_MS)
    ledger.append([load.facts()], now_ms)
    rows: list[tuple[int, int, int]] = []
    senders = [load.batches(f"node-{n}", GPUS, size.minutes, 100) for n in range(size.nodes)]
    # A round takes 100 minutes of every node: arrival in time order, as in life.
    for group in zip(*senders, strict=True):
        for failed in (r for r in ledger.append(group, now_ms) if isinstance(r, Exception)):
            raise failed
        rows.extend(
            (int(row.holder.name.split("-")[1]) % load.QUEUES, row.start_ms, row.allocated_us)
            for row in chain.from_iterable(batch.intervals for batch in group)
            if row.holder is not None
        )
    ledger.checkpoint()
    return rows


def measure(size: Size = FULL) -> list[Figure]:
    end_ms = load.BEGIN_MS + size.minutes * load.INTERVAL_MS
    clock = VirtualClock(end_ms)
    with tempfile.TemporaryDirectory() as folder:
        ledger = open_ledger(Path(folder) / "ledger.duckdb", clock)
        try:
            frame = pd.DataFrame(fill(ledger, end_ms, size), columns=["queue", "start_ms", "us"])
            figures = []
            # Each question another instant, so that no answer is a remembered one.
            for name, half_life in (("sliding 12 h", None), ("with half-life 6 h", HALF_LIFE_S)):
                first = cpu_seconds(partial(ask, ledger, WindowSpec(size=SIZE_S, half_life=half_life), end_ms))
                figures.append(Figure(f"{name}, the first question", first * 1e3, "ms", goal=FIRST))
                for when, step_ms, goal in (("whole minutes", 60_000, WHOLE_MINUTES), ("any second", 61_000, None)):
                    instants = [end_ms - i * step_ms for i in range(1, size.runs + 1)]
                    figures += _asked(ledger, frame, f"{name}, at {when}", instants, half_life, goal)
            return figures
        finally:
            ledger.close()


def ask(ledger: DuckLedger, spec: WindowSpec, at_ms: int) -> UsageWindow:
    """Answer as `GET /v1/windows` does: from the state in memory, and only if that lacks something from a moment."""
    query: tuple[WindowSpec, int, Measure, float] = (spec, at_ms, "allocated", 0.98)
    if known := ledger.status().window(*query):
        return known
    with ledger.moment() as moment:
        return moment.window(*query)


def _asked(
    ledger: DuckLedger, frame: pd.DataFrame, name: str, instants: list[int], half_life: int | None, goal: Goal | None
) -> list[Figure]:
    spec = WindowSpec(size=SIZE_S, half_life=half_life)
    ours = [cpu_seconds(partial(ask, ledger, spec, at)) for at in instants]
    theirs = [cpu_seconds(partial(by_pandas, frame, at, half_life)) for at in instants]
    return [
        Figure(
            f"{name}, {label}", quantile(ours, q) * 1e3, "ms", f"pandas {label}", quantile(theirs, q) * 1e3,
            goal if label == "p50" else None,
        )
        for label, q in (("least", 0.0), ("p50", 0.5))
    ]  # fmt: skip


def by_pandas(frame: pd.DataFrame, at_ms: int, half_life_s: int | None) -> dict[int, float]:
    inside = frame[(frame.start_ms >= at_ms - SIZE_S * 1000) & (frame.start_ms < at_ms)]
    used = inside.us
    if half_life_s is not None:
        age = (at_ms - inside.start_ms) / 1000 / half_life_s
        used = used * (-math.log(2) * age).map(math.exp)
    return dict(used.groupby(inside.queue).sum())
