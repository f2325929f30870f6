"""Every page's time in the server, at 10,000 GPUs over a month: 1,250 nodes, 34,000 pods, forty queues.

The pages read sums by the hour and the day, so an interval is a quarter of an hour here: the rows beneath matter for
none of them. Asked of the application itself, in a process of its own, without a network: the median of some runs after
the first, and the first, which finds nothing remembered.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import structlog
import yaml
from starlette.testclient import TestClient

from accountant.log import configure
from accountant.service import Service
from accountant.settings import Settings
from accountant.wire import Decision
from agent.clock import VirtualClock
from agent.units import MS_PER_HOUR
from tests.bench import bulk
from tests.bench.figure import Figure, Goal, timed
from tests.bench.month import prices
from tests.bench.service import Spent

GOAL_MS = 200.0
RUNS = 5
MONTH = "2026-10"


@dataclass(frozen=True)
class Size:
    """nodes of eight GPUs; minutes of October 2026, and of an interval."""

    nodes: int = 1_250
    minutes: int = 31 * 1_440
    queues: int = 40
    step: int = 15

    @property
    def fleet(self) -> bulk.Fleet:
        return bulk.Fleet(self.nodes, self.minutes, self.queues, step=self.step)


FULL = Size()
TINY = Size(nodes=4, minutes=1_500, queues=4)


def addresses(fleet: bulk.Fleet, job: str) -> dict[str, str]:
    """Every page, by its name. job: the address of one."""
    lines = f"/month/{MONTH}/lines"
    return {
        "overview": "/", "month": f"/month/{MONTH}", "team": f"/team/team-0?month={MONTH}",
        "lines, by team": f"{lines}?account=allocated", "lines of a team, by job": f"{lines}?team=team-0",
        "lines of a team, by pod": f"{lines}?team=team-0&by=pod", "lines, by node": f"{lines}?by=node",
        "lines, by day": f"{lines}?by=day", "jobs": f"/jobs?month={MONTH}",
        "job": job, "nodes": "/nodes", "node": f"/node/bench/{fleet.prefix}-1?days=7",
        "decisions": "/decisions", "prices": "/prices", "invoice": f"/invoice/{MONTH}", "coverage": "/coverage",
    }  # fmt: skip


def measure(size: Size = FULL) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), size)
        command = [
            sys.executable,
            "-m",
            __name__,
            folder,
            *map(str, (size.nodes, size.minutes, size.queues, size.step)),
        ]
        answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    figures = []
    for name, took in answer["pages"].items():
        figures += [
            Figure(
                name, took["ms"], "ms", "in CPU time", took["cpu_ms"], Goal(GOAL_MS), memory_mib=answer["peak_mib"]
            ),
            Figure("  made for the first time, in CPU time", took["first_ms"], "ms"),
        ]  # fmt: skip
    return figures


def prepare(folder: Path, size: Size) -> None:
    """The ledger and the price book of the run."""
    bulk.write(folder / "ledger.duckdb", size.fleet)
    content = prices().model_dump(mode="json", by_alias=True, exclude_none=True)
    (folder / "prices.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


@contextmanager
def site(folder: Path, size: Size) -> Iterator[TestClient]:
    """The application over the prepared ledger, at the end of the month."""
    clock = VirtualClock(size.fleet.end_ms)
    with Service(Settings(data=folder, auth="off", prices=folder / "prices.yaml"), clock) as service:
        service.ledger.put_policy(size.fleet.policy(), bulk.BEGIN_MS)
        service.ledger.record_decisions(list(_decisions(size)), clock.wall_ms())
        with TestClient(service.app, base_url="http://127.0.0.1", headers={"Accept": "text/html"}) as client:
            yield client


def _decisions(size: Size) -> Iterator[Decision]:
    """A change of a weight every hour, as large as they are in life."""
    for hour in range(size.minutes // 60):
        at_ms = bulk.BEGIN_MS + hour * MS_PER_HOUR
        yield Decision(
            id=f"p/{at_ms}/kai/queue-1", at_ms=at_ms, kind="weight", target="kai", subject="queue-1", mode="enforce",
            value=1.0, previous=2.0, reason="bench", policy_version="p",
            inputs={"explanation": {f"number-{n}": n / 7 for n in range(60)}},
        )  # fmt: skip


def main(folder: str, nodes: int, minutes: int, queues: int, step: int) -> None:
    """Print what each page takes as JSON."""
    configure("error")
    structlog.contextvars.clear_contextvars()
    size = Size(nodes, minutes, queues, step)
    took = {}
    with site(Path(folder), size) as client:
        listed = re.search(r'href="(/job/[^"]+)"', client.get(f"/jobs?month={MONTH}").text)
        if listed is None:
            raise SystemExit("no job is on the list of jobs")
        for name, address in addresses(size.fleet, listed[1]).items():
            began = time.process_time()
            answer = client.get(address)
            first_s = time.process_time() - began
            if answer.status_code != 200:
                raise SystemExit(f"{address}: {answer.status_code}\n{answer.text[:2000]}")
            began = time.process_time()
            runs = [timed(lambda address=address: client.get(address)) for _ in range(RUNS)]
            took[name] = {"ms": median(runs) * 1000, "cpu_ms": (time.process_time() - began) / RUNS * 1000,
                          "first_ms": first_s * 1000}  # fmt: skip
    print(json.dumps({"pages": took, "peak_mib": Spent.me().peak_mib()}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
