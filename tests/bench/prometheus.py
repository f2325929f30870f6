"""KAI's usage query on a real Prometheus 3 and on the ledger: the same 10,000 GPUs over the same 24 hours.

Prometheus holds a series for each GPU with a sample a minute, back-filled with promtool, and gets KAI's own query text
over the sum by queue, plain and decayed. The ledger holds the same minutes as rows with their sums and gets the same
text through the API for KAI (`accountant.compat.kai_usage_api`). Each query has another instant, so that neither side
answers from a cache. Needs the control plane's cache (`make control-plane`).

promtool gets two hours of the history at a time, because it would read the whole text once for each block and keep it
in memory. Prometheus' sampling explains the difference between both sides to the last digits: every run compares its
answers with `tests.compat.prometheus_sampling`, which samples the same series as Prometheus documents."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from prometheus_client import CollectorRegistry

from accountant.compat.kai_usage_api import KaiMetrics, KaiUsageSource
from accountant.core.settings import KaiUsage
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from tests.bench import bulk
from tests.bench.figure import Figure, Goal, quantile, timed
from tests.bench.service import Spent
from tests.compat.prometheus_sampling import Sampling
from tests.real.prometheus import prometheus, promtool

HALF_LIFE_S = 6 * 3_600
GOAL = Goal(500, least=True)


@dataclass(frozen=True)
class Size:
    """runs: queries of each form, on each side."""

    nodes: int = 1_250
    minutes: int = 24 * 60 + 30
    window: str = "24h"
    queues: int = 200
    runs: int = 3


FULL = Size()
TINY = Size(nodes=3, minutes=90, window="1h", queues=3, runs=2)
Questions = list[tuple[str, list[tuple[str, str, float]]]]
METRIC = "kai_queue_allocated_gpus"
BLOCK_MINUTES = 120
"""Length of Prometheus' blocks, which begin at multiples of two hours, as the history does."""
SAME = 1e-9
"""Relative tolerance: the sums add floating-point numbers in another order."""


def measure(size: Size = FULL) -> list[Figure]:
    fleet = bulk.Fleet(size.nodes, size.minutes, size.queues)
    end_s = fleet.end_ms // 1000
    questions: Questions = []
    for name, decayed in (("plain", False), ("decayed", True)):
        asked = []
        for at in (end_s - 60 * run for run in range(size.runs)):
            decay = f" * (0.5^(({at} - time()) / {HALF_LIFE_S:.6f}))"
            inner = [f"({metric}){decay if decayed else ''}" for metric in (METRIC, f"sum by (queue_name) ({METRIC})")]
            ours, theirs = (f"sum_over_time(({text})[{size.window}:1m0s])" for text in inner)
            asked.append((ours, theirs, float(at)))
        questions.append((name, asked))
    with tempfile.TemporaryDirectory() as folder:
        theirs_s, theirs_mib, reference = _prometheus(Path(folder), fleet, questions)
        ours_s, first_s, ours_mib, mine = _ledger(Path(folder), fleet, questions)
    figures = []
    for name, asked in questions:
        sampled = _sampled(fleet, size, HALF_LIFE_S if name == "decayed" else None, round(asked[-1][2]))
        for queue, value in reference[name].items():
            assert math.isclose(value, sampled[queue], rel_tol=SAME), f"{queue}: {value}, sampled {sampled[queue]}"
        label = f"{size.window} {name}, {fleet.gpus:,} GPUs"
        off = max(abs(mine[name][q] / v - 1) for q, v in reference[name].items() if v)
        beside = f"Prometheus 3, same question ({theirs_mib:,.0f} MiB), by its sampling off by {off:.2%}"
        figures.append(
            Figure(f"{label}, p50", quantile(ours_s[name], 0.5) * 1e3, "ms", beside,
                   quantile(theirs_s[name], 0.5) * 1e3, ratio_goal=GOAL, memory_mib=ours_mib)
        )  # fmt: skip
        figures.append(
            Figure(f"{label}, first after a start", first_s[name] * 1e3, "ms", "Prometheus 3, its first",
                   theirs_s[name][0] * 1e3)
        )  # fmt: skip
        assert len(asked) == size.runs
    return figures


Times = dict[str, list[float]]
Values = dict[str, dict[str, float]]


def _prometheus(folder: Path, fleet: bulk.Fleet, questions: Questions) -> tuple[Times, float, Values]:
    """Return the seconds of each query, the server's peak memory in MiB, and the last values by queue."""
    text = folder / "history.om"
    for low in range(0, fleet.minutes, BLOCK_MINUTES):
        with text.open("w", encoding="ascii") as file:
            file.writelines(_openmetrics(fleet, low, min(low + BLOCK_MINUTES, fleet.minutes)))
        promtool("tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text), str(folder / "data"), cwd=folder)
    text.unlink()
    times: Times = {}
    values: Values = {}
    with prometheus(folder, arguments=["--query.timeout=10m", "--query.max-samples=500000000"]) as server:
        for name, asked in questions:
            times[name] = []
            for _, theirs, at in asked:
                found: list[dict[str, float]] = []
                times[name].append(timed(lambda q=theirs, t=at, f=found: f.append(_by_queue(server.instant(q, t)))))  # type: ignore[misc]
                values[name] = found[0]
        return times, Spent(server.pid).peak_mib(), values


def _ledger(folder: Path, fleet: bulk.Fleet, questions: Questions) -> tuple[Times, dict[str, float], float, Values]:
    """Return the same for the ledger, with the first query after opening it separate."""
    path = folder / "ledger.duckdb"
    bulk.write_apart(path, fleet)
    ledger = open_ledger(path, VirtualClock(fleet.end_ms))
    try:
        ledger.put_policy(fleet.policy(), bulk.BEGIN_MS)
        times: Times = {}
        first: dict[str, float] = {}
        values: Values = {}
        for name, asked in questions:
            times[name] = []
            for number, (ours, _, at) in enumerate([asked[-1], *asked]):
                # A source of its own for each question: it would remember a window for a quarter of a minute.
                source = KaiUsageSource(
                    ledger, VirtualClock(fleet.end_ms), KaiUsage(listen="127.0.0.1:1"), KaiMetrics(CollectorRegistry())
                )
                found: list[dict[str, float]] = []
                seconds = timed(lambda q=ours, t=at, f=found, s=source: f.append(_answered(s, q, t)))  # type: ignore[misc]
                if number:
                    times[name].append(seconds)
                else:
                    first[name] = seconds
                values[name] = found[0]
        return times, first, Spent.me().peak_mib(), values
    finally:
        ledger.close()


def _answered(source: KaiUsageSource, query: str, at: float) -> dict[str, float]:
    data = source.answer(query, f"{at:.3f}")["data"]
    assert isinstance(data, dict)
    return _by_queue(data["result"])


def _by_queue(rows: list[dict[str, object]]) -> dict[str, float]:
    found = {}
    for row in rows:
        labels, value = row["metric"], row["value"]
        assert isinstance(labels, dict)
        assert isinstance(value, list)
        found[labels["queue_name"]] = float(value[1])
    return found


def _openmetrics(fleet: bulk.Fleet, begin: int, end: int) -> Iterator[str]:
    """Return a series for each GPU and holder in the minutes [begin, end): 1 at the start of every held minute."""
    yield f"# HELP {METRIC} GPUs allocated.\n# TYPE {METRIC} gauge\n"
    begin_s = bulk.BEGIN_MS // 1000
    for node, slot, low, high, queue in _holdings(fleet):
        stamps = [f"{begin_s + minute * 60}\n" for minute in range(max(low, begin), min(high, end))]
        for gpu in range(node * bulk.GPUS_A_NODE, (node + 1) * bulk.GPUS_A_NODE) if stamps else ():
            labels = f'{METRIC}{{gpu="GPU-{gpu}",node="node-{node}",pod="{node}-{slot}",queue_name="queue-{queue}"}} 1 '
            yield labels + labels.join(stamps)
    yield "# EOF\n"


def _holdings(fleet: bulk.Fleet) -> Iterator[tuple[int, int, int, int, int]]:
    """Return node, slot, minutes [low, high) and queue of the holders of all GPUs of a node."""
    edges = [*range(0, fleet.minutes, bulk.SLOT_MINUTES), fleet.minutes]
    for node in range(fleet.nodes):
        for slot, (low, high) in enumerate(pairwise(edges)):
            if (node * 7 + slot) % bulk.IDLE_EVERY:
                yield node, slot, low, high, (node * 13 + slot * 7) % fleet.queues


def _sampled(fleet: bulk.Fleet, size: Size, half_life_s: int | None, at_s: int) -> dict[str, float]:
    """Return the result of sampling these series, by queue."""
    sampling = Sampling(int(size.window.removesuffix("h")) * 3_600, 60, 60, half_life_s, left_closed=False)
    alike = Counter((queue, low, high) for _, _, low, high, queue in _holdings(fleet))
    of_series = {
        span: sampling.sum([(span[0] * 60.0, span[1] * 60.0, 1.0)], at_s - bulk.BEGIN_MS // 1000)
        for span in {(low, high) for _, low, high in alike}
    }
    found: dict[str, float] = defaultdict(float)
    for (queue, low, high), nodes in alike.items():
        found[f"queue-{queue}"] += nodes * bulk.GPUS_A_NODE * of_series[low, high]
    return found
