"""Usage windows over a ledger of a million intervals (1,000 GPUs, 1,000 minutes).

Beside them: the same sums with pandas over the same rows in memory, names resolved and nothing else to do.
"""

from __future__ import annotations

import math
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd

from accountant.store import DuckLedger, open_ledger
from accountant.wire import WindowSpec
from agent.clock import VirtualClock
from tests.bench import load
from tests.bench.figure import Figure, quantile, timed

NODES, GPUS, MINUTES = 125, 8, 1_000
SIZE_S, HALF_LIFE_S = 12 * 3600, 6 * 3600
RUNS = 30


def fill(ledger: DuckLedger, now_ms: int) -> list[tuple[int, int, int]]:
    """Book a million intervals; returns (queue, start, allocated µs) of each for the baseline."""
    ledger.put_policy(load.policy(), load.BEGIN_MS)
    ledger.append([load.facts()], now_ms)
    rows = []
    senders = [load.batches(f"node-{n}", GPUS, MINUTES, 100) for n in range(NODES)]
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


def measure() -> list[Figure]:
    end_ms = load.BEGIN_MS + MINUTES * load.INTERVAL_MS
    clock = VirtualClock(end_ms)
    with tempfile.TemporaryDirectory() as folder:
        ledger = open_ledger(Path(folder) / "ledger.duckdb", clock)
        try:
            frame = pd.DataFrame(fill(ledger, end_ms), columns=["queue", "start_ms", "us"])
            figures = []
            for name, half_life in (("sliding 12 h", None), ("with half-life 6 h", HALF_LIFE_S)):
                spec = WindowSpec(size=SIZE_S, half_life=half_life)
                # Each question another instant, so that no answer is a remembered one.
                instants = [end_ms - i * 61_000 for i in range(RUNS)]
                ours = [timed(partial(ledger.window, spec, at, "allocated", 0.98)) for at in instants]
                theirs = [timed(partial(by_pandas, frame, at, half_life)) for at in instants]
                for label, q in (("p50", 0.5), ("p99", 0.99)):
                    figures.append(
                        Figure(
                            f"{name}, {label}",
                            quantile(ours, q) * 1e3,
                            "ms",
                            f"pandas {label}",
                            quantile(theirs, q) * 1e3,
                        )
                    )
            return figures
        finally:
            ledger.close()


def by_pandas(frame: pd.DataFrame, at_ms: int, half_life_s: int | None) -> dict[int, float]:
    inside = frame[(frame.start_ms >= at_ms - SIZE_S * 1000) & (frame.start_ms < at_ms)]
    used = inside.us
    if half_life_s is not None:
        age = (at_ms - inside.start_ms) / 1000 / half_life_s
        used = used * (-math.log(2) * age).map(math.exp)
    return dict(used.groupby(inside.queue).sum())
