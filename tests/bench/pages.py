"""Every page's time in the server, at 1,000 and at 10,000 GPUs over a month: 34,000 pods, forty queues.

The pages read hourly and daily sums, so an interval is a quarter-hour here: the number of rows below the sums does not
matter. Requests go to the application in a process of its own, without a network. The figure is the median CPU time of
some runs after the first, which other load hardly changes, with the wall time beside it. Queries that the accountant
prefetches each minute run before the pages, as in practice, and have a row of their own; so has the first time of a
page if it is slow. The controller's pages use the sample's queues and query the ledger directly. The same month is
requested over the API: the first page of an answer computes all of it, the next ones are read from the cache."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import structlog
import yaml
from starlette.testclient import TestClient

from accountant.cli.serving import take_turns
from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PagesApp
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import QueueHistory
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR
from gputally.server.logs_and_metrics import configure
from tests.bench import bulk, load
from tests.bench.figure import Figure, Goal
from tests.bench.service import Spent, child
from tests.fairshare.web.controller_pages import Stage, stage
from tests.fake_scheduler import installed as fake_scheduler
from tests.moments import present

GOAL_MS = 200.0
RUNS = 5
MONTH = "2026-10"
ANSWERS = {
    "usage by node": "/v1/usage?by=node", "usage by job": "/v1/usage?by=job", "usage by pod": "/v1/usage?by=pod",
    "cost by job": "/v1/cost?by=job", "cost by pod": "/v1/cost?by=pod", "jobs over the API": "/v1/jobs?",
}  # fmt: skip
CONTROLLER = {
    "shares": "/shares",
    "queue": "/shares/queue/vision",
    "decisions": "/shares/decisions",
    "policy": "/shares/policy",
}


@dataclass(frozen=True)
class Size:
    """nodes of eight GPUs; minutes of October 2026, and of an interval."""

    nodes: int = 1_250
    minutes: int = 31 * 1_440
    queues: int = 40
    step: int = 15

    @property
    def page_lines(self) -> int:
        """Lines on a page of the API's answers: its default, if that makes several pages."""
        return 1_000 if self.nodes > 100 else 1

    @property
    def fleet(self) -> bulk.Fleet:
        return bulk.Fleet(self.nodes, self.minutes, self.queues, step=self.step)


FULL = Size()
TENTH = Size(nodes=125)
TINY = Size(nodes=4, minutes=1_500, queues=4)


def addresses(fleet: bulk.Fleet, job: str) -> dict[str, str]:
    """Return every page by name. job: the address of a job."""
    lines, explore = f"/month/{MONTH}/lines", f"/explore?start={MONTH}-01"
    return {
        "overview": "/", "month": f"/month/{MONTH}", "team": f"/team/team-0?month={MONTH}",
        "lines, by team": f"{lines}?account=allocated", "lines of a team, by job": f"{lines}?team=team-0",
        "lines of a team, by pod": f"{lines}?team=team-0&by=pod", "lines, by node": f"{lines}?by=node",
        "lines, by day": f"{lines}?by=day", "lines, by pod": f"{lines}?by=pod", "lines, by GPU": f"{lines}?by=gpu",
        "lines, by queue": f"{lines}?by=queue", "lines, by user": f"{lines}?by=user", "jobs": f"/jobs?start={MONTH}-01",
        "job": job, "nodes": "/nodes", "node": f"/node/bench/{fleet.prefix}-1?days=7",
        "explore": explore, "explore, by pod": f"{explore}&by=pod",
        "explore, team by day": f"{explore}&by=team,day&across=day&measure=cost",
        "decisions": "/decisions", "prices": "/prices", "invoice": f"/invoice/{MONTH}", "coverage": "/coverage",
    }  # fmt: skip


def measure(*sizes: Size) -> list[Figure]:
    return [figure for size in sizes or (TENTH, FULL) for figure in _of_size(size)]


def _of_size(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), size)
        answer = child(__name__, folder, size.nodes, size.minutes, size.queues, size.step)
    found = [Figure(f"asked ahead, {size.fleet.gpus:,} GPUs, in CPU time", answer["ahead_s"], "s")]
    for name, took in answer["pages"].items():
        title, memory = f"{name}, {size.fleet.gpus:,} GPUs", answer["peak_mib"]
        found.append(Figure(title, took["cpu_ms"], "ms", "wall clock", took["ms"], Goal(GOAL_MS), memory_mib=memory))
        if took["first_cpu_ms"] > GOAL_MS:
            found.append(Figure(f"{title}: first", took["first_cpu_ms"], "ms", "wall clock", took["first_ms"]))
    for name, took in answer["answers"].items():
        title = f"{name}, {size.fleet.gpus:,} GPUs: "
        found.append(Figure(f"{title}first page", took["first_cpu_ms"], "ms", "wall clock", took["first_ms"]))
        goal = Goal(GOAL_MS)
        found.append(Figure(f"{title}pages that follow", took["cpu_ms"], "ms", "wall clock", took["ms"], goal))
    return found


def prepare(folder: Path, size: Size) -> None:
    """Write the ledger and the price book of the run."""
    bulk.write(folder / "ledger.duckdb", size.fleet)
    content = load.price_book().model_dump(mode="json", by_alias=True, exclude_none=True)
    (folder / "prices.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


@contextmanager
def site(folder: Path, size: Size) -> Iterator[tuple[TestClient, DuckLedger, Service]]:
    """Build the application over the prepared ledger, at the end of the month."""
    clock = VirtualClock(size.fleet.end_ms)
    with Service(Settings(data=folder, auth="off", prices=folder / "prices.yaml"), clock) as service:
        service.ledger.put_policy(size.fleet.policy(), bulk.BEGIN_MS)
        service.ledger.record_decisions(list(_decisions(size)), clock.wall_ms())
        with TestClient(service.app, base_url="http://127.0.0.1", headers={"Accept": "text/html"}) as client:
            yield client, service.ledger, service


def _decisions(size: Size) -> Iterator[Decision]:
    """Record a change of a weight every hour, of a realistic size."""
    for hour in range(size.minutes // 60):
        at_ms = bulk.BEGIN_MS + hour * MS_PER_HOUR
        yield Decision(
            id=f"p/{at_ms}/kai/queue-1", at_ms=at_ms, kind="weight", target="kai", subject="queue-1", mode="enforce",
            value=1.0, previous=2.0, reason="bench", policy_version="p",
            inputs={"explanation": {f"number-{n}": n / 7 for n in range(60)}},
        )  # fmt: skip


def main(folder: str, nodes: int, minutes: int, queues: int, step: int) -> None:
    """Print each page's time as JSON."""
    configure("error")
    structlog.contextvars.clear_contextvars()
    size = Size(nodes, minutes, queues, step)
    took = {}
    with site(Path(folder), size) as (client, ledger, service):
        take_turns()
        began = time.process_time()
        service.ask_ahead()
        ahead_s = time.process_time() - began
        jobs = _timed("jobs", lambda: client.get(f"/jobs?start={MONTH}-01").status_code)
        listed = re.search(r'href="(/job/[^"]+)"', client.get(f"/jobs?start={MONTH}-01").text)
        if listed is None:
            raise SystemExit("no job is on the list of jobs")
        for name, address in addresses(size.fleet, listed[1]).items():
            took[name] = jobs if name == "jobs" else _timed(name, partial(_status, client, address))
        with tempfile.TemporaryDirectory() as other, fake_scheduler(Path(other)):
            house = _controller(Path(other), ledger)
            house.site.compile_templates()
            for name, address in CONTROLLER.items():
                took[f"controller: {name}"] = _timed(name, partial(_controller_status, house, address))
        peak = Spent.me().peak_mib()
        answers = {name: _turned(name, client, address, size) for name, address in ANSWERS.items()}
    print(json.dumps({"pages": took, "answers": answers, "ahead_s": ahead_s, "peak_mib": peak}))


def _turned(name: str, client: TestClient, address: str, size: Size) -> dict[str, float]:
    """Return the milliseconds of an answer's first page, and medians of up to RUNS following pages."""
    span = f"start={size.fleet.begin_ms}&end={size.fleet.end_ms}&limit={size.page_lines}"
    following = ""

    def turn() -> int:
        nonlocal following
        answer = client.get(f"{address}&{span}{following}")
        page = answer.json().get("next_page")
        if page is not None:  # the last page is turned to again
            following = f"&page={page}"
        return answer.status_code

    return _timed(name, turn)


def _status(client: TestClient, address: str) -> int:
    return client.get(address).status_code


def _controller_status(stage: Stage, address: str) -> int:
    return stage.get(address).status


def _timed(name: str, ask: Callable[[], int]) -> dict[str, float]:
    """Return the milliseconds of the first run, and medians of the others."""
    spent = []
    for _ in range(RUNS + 1):
        began, wall = time.process_time(), time.perf_counter()
        status = ask()
        spent.append(((time.process_time() - began) * 1000, (time.perf_counter() - wall) * 1000))
        if status != 200:
            raise SystemExit(f"{name}: {status}")
    first, *others = spent
    return {
        "first_cpu_ms": first[0], "first_ms": first[1],
        "cpu_ms": median(cpu for cpu, _ in others), "ms": median(wall for _, wall in others),
    }  # fmt: skip


class _Books:
    """The queries of `fairshare.web.queue_history.QueueHistory` on the ledger itself."""

    def __init__(self, ledger: DuckLedger) -> None:
        self._ledger = ledger

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]:
        yield from present(self._ledger).usage((start_ms, end_ms), by, where).lines()

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]:
        yield from present(self._ledger).decisions(start_ms, end_ms)


def _controller(folder: Path, ledger: DuckLedger) -> Stage:
    """Build the controller's pages with the ledger's history."""
    here = stage(folder)
    client: Any = _Books(ledger)
    context = replace(here.site.context, history=QueueHistory(client, VirtualClock(ledger.status().extent[1])))
    return replace(here, site=PagesApp(context, PageAuthentication(None), ROUTES))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
