"""The page of a month's report over 100 million intervals: 2,240 GPUs, a row a minute, 7,600 jobs.

A process of its own opens the finished ledger with the accountant's configuration. The baseline is the usage by team,
model and hour alone, queried from the rows on the same engine: the start of such a page without stored sums."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accountant.cli.serving import take_turns
from accountant.reports import html_page
from accountant.reports.report_builder import build
from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from tests.bench import bulk, load
from tests.bench.figure import Figure, Goal, timed
from tests.bench.service import Spent, child

GOAL_S = 1.0
RUNS = 3


@dataclass(frozen=True)
class Size:
    """nodes of eight GPUs; minutes of October 2026."""

    nodes: int = 280
    minutes: int = 31 * 1_440
    queues: int = 40


FULL = Size()
TINY = Size(nodes=4, minutes=1_500, queues=4)


def measure(size: Size = FULL, told: Callable[[float], None] = lambda _: None) -> list[Figure]:
    fleet = bulk.Fleet(size.nodes, size.minutes, size.queues)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        bulk.write(path, fleet, told)
        answer = child(__name__, path, size.nodes, size.minutes, size.queues)
        size_mib = path.stat().st_size / 2**20
    rows = f"{fleet.rows / 1e6:,.3g} M rows"
    return [
        Figure(
            f"month report as HTML, {rows}", answer["seconds"], "s", "usage by team and hour from the rows",
            answer["rows_s"], Goal(GOAL_S), memory_mib=answer["peak_mib"],
        ),
        Figure("  the first one after a start", answer["first_s"], "s"),
        Figure("  in CPU time", answer["cpu_s"], "s"),
        Figure("ledger file", size_mib, "MiB"),
    ]  # fmt: skip


def main(path: str, nodes: int, minutes: int, queues: int) -> None:
    """Print the figures of a finished ledger as JSON."""
    fleet = bulk.Fleet(nodes, minutes, queues)
    book = load.price_book()
    ledger = open_ledger(Path(path), VirtualClock(fleet.end_ms))
    ledger.put_policy(fleet.policy(), bulk.BEGIN_MS)
    take_turns()

    def page() -> None:
        with ledger.moment() as moment:
            text = html_page.render_html(build(moment, book, bulk.BEGIN_MS, fleet.end_ms, "UTC"))
        assert "team-0" in text

    first = timed(page)
    began = time.process_time()
    seconds = sorted(timed(page) for _ in range(RUNS))[RUNS // 2]
    cpu = (time.process_time() - began) / RUNS
    peak = Spent.me().peak_mib()
    ledger.close()
    database = Database(Path(path))
    with database.cursor() as cursor:
        rows = timed(lambda: cursor.run(_FROM_ROWS))
    database.close()
    print(json.dumps({"seconds": seconds, "first_s": first, "cpu_s": cpu, "peak_mib": peak, "rows_s": rows}))


_FROM_ROWS = """
SELECT h.namespace, d.gpu_model, at_ms, sum(busy_us), sum(idle_us), sum(unheld_us)
FROM (SELECT payer, device, start_ms - start_ms % 3600000 AS at_ms, sum(busy_us) AS busy_us, sum(idle_us) AS idle_us,
             sum(unheld_us) AS unheld_us FROM received WHERE booked GROUP BY ALL) r
JOIN device d ON d.id = r.device LEFT JOIN holder h ON h.id = r.payer
GROUP BY ALL
"""

if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
