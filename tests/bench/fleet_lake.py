"""A fleet of 100,000 GPUs over a month in the lake: 20 clusters, 77.5 million rows of `usage_hourly`.

Every query runs in a process of its own, configured as `gputally fleet` is. The baseline is one SQL statement over the
same files on the same engine: the cost of an answer without prices and statements.

GPUTALLY_BENCH_GPUS sets another size (a multiple of 160). GPUTALLY_BENCH_LAKE is a folder that keeps the lake for the
next run; it needs 26 bytes for each GPU-hour, 1.8 GiB in all, and takes four minutes on two free cores."""

from __future__ import annotations

import contextlib
import heapq
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow.parquet as pq
from sqlglot import exp

from accountant.billing.statements import for_teams
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.settings import Lake, Settings
from accountant.fleet.fleet_ledgers import Fleet, FleetQuery
from accountant.fleet.fleet_server import FleetService
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.engines.protocol import Engine
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.publisher import Publisher
from accountant.lake.union_view import union_of_ledgers
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from tests.bench import bulk, lake_data, load
from tests.bench.figure import Figure, Goal, timed
from tests.bench.lake_data import MONTH, LakeFleet
from tests.bench.service import Spent, child
from tests.lake.concurrent_writers import write_side_by_side

TEAM: Final = "team-000"
TOP: Final = 100
RUNS: Final = 3
PAGES: Final = (
    "/fleet", "/fleet/jobs", "/fleet/jobs?page=2", "/fleet/nodes?start=1d", "/fleet/nodes?start=7d",
    "/fleet/nodes?start=31d",
)  # fmt: skip
DAYS: Final = 30
_COMPLETE: Final = "complete"
"""Name of the file that marks a finished lake."""


@dataclass(frozen=True)
class Size:
    """publishing: nodes of eight GPUs of the cluster whose day is published. spark: numbers of workers. apart: a
    process for each question, so that each has its own peak memory; else only for the first."""

    fleet: LakeFleet = field(default_factory=LakeFleet)
    publishing: int = 1_250
    writers: int = 20
    spark: Sequence[int] = (1, 2)
    apart: bool = True


FULL = Size()
TINY = Size(LakeFleet(clusters=2, nodes=2, days=4, queues=8), publishing=1, writers=2, spark=(), apart=False)


def measure(size: Size = FULL) -> list[Figure]:
    fleet = size.fleet
    if gpus := int(os.environ.get("GPUTALLY_BENCH_GPUS", "0")):
        fleet = LakeFleet(nodes=max(1, gpus // (fleet.clusters * lake_data.GPUS_A_NODE)))
    with _kept_folder() as folder:
        place = folder / f"lake-{fleet.gpus}"
        if not (place / _COMPLETE).exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            lake_data.write(Lake(warehouse=str(place)), fleet, _told)
            (place / _COMPLETE).touch()
        asked: list[tuple[str, str, Goal | None]] = [
            ("month of the fleet, as stated", "month", Goal(10.0)),
            ("month of the fleet, from its rows", "month_from_rows", Goal(10.0)),
            ("  of one cluster", "month_of_one", None),
            ("a team's bill in all clusters", "bill", Goal(1.0)),
            ("a team's cost by job in all clusters", "cost_by_job", None),
            (f"{DAYS} days of usage by queue", "window", None),
            (f"top {TOP} jobs of the month", "top", None),
        ]
        figures = [_figure(place, *question, apart=size.apart or question is asked[0]) for question in asked]
        figures += _page_figures(_part(size.apart, "pages", place))
        hourly = sum(file.stat().st_size for file in _files(place))
        figures.append(Figure("bytes for each GPU-hour", hourly / fleet.gpu_hours, "bytes"))
        figures += _spark(place, size.spark)
    with tempfile.TemporaryDirectory() as folder_name:
        figures += _publishing(Path(folder_name), size.publishing, apart=size.apart)
        figures.append(_side_by_side(Path(folder_name), size.writers))
    return figures


# --- questions ---------------------------------------------------------------------------------


def _month_from_rows(fleet: Fleet, names: Sequence[str]) -> None:
    for member in fleet.members(names):
        assert member.books.month(MONTH).lines


def _bill(fleet: Fleet, names: Sequence[str]) -> None:
    assert any(for_teams(one.statement(MONTH), [TEAM]).due_total for one in fleet.members(names))


def _window(fleet: Fleet, names: Sequence[str]) -> None:
    members = fleet.members(names)
    end_ms = max(member.clock.wall_ms() for member in members)
    assert fleet.usage(members, FleetQuery(end_ms - DAYS * MS_PER_DAY, end_ms, ("queue",))).lines


def _cost_by_job(fleet: Fleet, names: Sequence[str]) -> None:
    members = fleet.members(names)
    query = FleetQuery(lake_data.BEGIN_MS, members[0].clock.wall_ms(), ("job",), {"team": (TEAM,)})
    assert fleet.cost(members, query).lines


_QUESTIONS: Final[dict[str, Callable[[Fleet, Sequence[str]], object]]] = {
    "month": lambda fleet, names: fleet.month(fleet.members(names), MONTH),
    "month_from_rows": _month_from_rows,
    "month_of_one": lambda fleet, names: _month_from_rows(fleet, names[:1]),
    "bill": _bill,
    "cost_by_job": _cost_by_job,
    "window": _window,
}
_HELD: Final = "busy_us + allocated_idle_us + allocated_unknown_us"


def _top(engine: Engine) -> list[dict[str, Any]]:
    """The 100 largest jobs by held time."""
    held = exp.cast(exp.func("sum", exp.maybe_parse(_HELD)), "DECIMAL(38, 0)").as_("held")
    names = [exp.column(name) for name in ("ledger", "team", "namespace", "job")]
    asked = exp.select(*names, held).from_("usage_hourly").where(f"{_HELD} > 0")
    asked = asked.group_by(*names).order_by("held DESC").limit(TOP)
    rows = [row for namespace in engine.namespaces() for row in engine.query(asked, namespace).to_pylist()]
    return heapq.nlargest(TOP, rows, key=itemgetter("held"))


_BY_TEAM: Final = "one sum over all rows by team", "SELECT ledger, team, gpu_model, {sums} FROM usage GROUP BY ALL"
_BESIDE: Final[dict[str, tuple[str, str]]] = {
    "month": _BY_TEAM,
    "month_from_rows": _BY_TEAM,
    "month_of_one": (
        "one sum over its rows by team",
        "SELECT ledger, team, gpu_model, {sums} FROM usage WHERE ledger = 'cluster-00' GROUP BY ALL",
    ),
    "bill": (
        "one sum over the team's rows",
        f"SELECT ledger, gpu_model, {{sums}} FROM usage WHERE team = '{TEAM}' GROUP BY ALL",
    ),
    "cost_by_job": (
        "one sum over the team's rows by job",
        f"SELECT ledger, job, gpu_model, {{sums}} FROM usage WHERE team = '{TEAM}' GROUP BY ALL",
    ),
    "window": (
        "one sum over all rows by queue",
        "SELECT queue, {sums} FROM usage WHERE day >= DATE '2026-10-02' GROUP BY ALL",
    ),
    "top": (
        "one sum over all rows by job, unordered",
        f"SELECT ledger, team, namespace, job, sum({_HELD}) FROM usage GROUP BY ALL",
    ),
}  # fmt: skip


def _part(apart: bool, *arguments: object) -> Any:
    """Return what `main` returns, from a process of its own or from this one."""
    return child(__name__, *arguments) if apart else main(*map(str, arguments))


def _figure(place: Path, name: str, question: str, goal: Goal | None, *, apart: bool) -> Figure:
    answer = _part(apart, "ask", place, question)
    print(f"  {name}: {json.dumps(answer)}", file=sys.stderr)
    reads = f"{name}: {answer['read_mib']:,.0f} MiB read"
    beside, _ = _BESIDE[question]
    return Figure(reads, answer["seconds"], "s", beside, answer["beside_s"], goal, memory_mib=answer["peak_mib"])


def _ask(place: str, question: str) -> dict[str, float]:
    """Return the median of some runs in this process, after its libraries are loaded."""
    engine = DuckDbEngine(Catalogue.connect(Lake(warehouse=place)))
    fleet = Fleet(engine)
    names = list(fleet.statuses())

    def ask() -> None:
        if question == "top":
            assert _top(engine)
        else:
            _QUESTIONS[question](fleet, names)

    first = timed(ask)
    seconds, cpu, read = [], [], _read_mib()
    for _ in range(RUNS):
        began = time.process_time()
        seconds.append(timed(ask))
        cpu.append(time.process_time() - began)
    read = (_read_mib() - read) / RUNS
    peak = Spent.me().peak_mib()
    engine.close()
    return {
        "seconds": sorted(seconds)[RUNS // 2], "first_s": first, "cpu_s": sorted(cpu)[RUNS // 2], "read_mib": read,
        "peak_mib": peak, "beside_s": _beside(place, _BESIDE[question][1]),
    }  # fmt: skip


def _beside(place: str, sql: str) -> float:
    with duckdb.connect(config={"memory_limit": "400MB"}) as connection:
        connection.read_parquet([str(file) for file in _files(Path(place))]).create_view("usage")
        return timed(lambda: connection.execute(_with_sums(sql)).fetchall())


def _with_sums(sql: str) -> str:
    return sql.format(sums=", ".join(f"sum({name})" for name in tables.ACCOUNT_COLUMNS[:6]))


def _read_mib() -> float:
    """Return the MiB that this process has read from files."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar"))) / 2**20


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("gputally_*/usage_hourly/data/**/*.parquet"))


# --- pages -------------------------------------------------------------------------------------


def _page_figures(found: dict[str, float]) -> list[Figure]:
    print(f"  pages: {json.dumps(found)}", file=sys.stderr)
    return [
        Figure("a fleet page's first view, processor time", found["first_s"], "s", goal=Goal(1.0)),
        Figure("  9 of 10 views", found["most_s"], "s", goal=Goal(0.2)),
        Figure("  prepared for a ledger's publication", found["prepare_s"], "s"),
    ]


def _pages(place: str) -> dict[str, float]:
    """Return processor times: of the slowest first view of a page, of nine views of ten, and of what is prepared before
    a publication is shown, per ledger."""
    from starlette.testclient import TestClient

    warnings.simplefilter("ignore", ResourceWarning)
    engine = DuckDbEngine(Catalogue.connect(Lake(warehouse=place)))
    service = FleetService(Settings(auth="off"), Fleet(engine), VirtualClock(lake_data.BEGIN_MS + 32 * MS_PER_DAY))
    client = TestClient(service.app, base_url="http://127.0.0.1")
    client.get("/livez")

    def spent(work: Callable[[], object]) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    def view(page: str) -> None:
        assert client.get(page).status_code == 200

    prepare_s = spent(service.prepare) / len(service.names())
    views = [[spent(lambda page=page: view(page)) for _ in range(RUNS)] for page in PAGES]  # type: ignore[misc]
    engine.close()
    every = sorted(one for several in views for one in several)
    return {
        "first_s": max(several[0] for several in views), "most_s": every[len(every) * 9 // 10 - 1],
        "prepare_s": prepare_s,
    }  # fmt: skip


# --- Spark -------------------------------------------------------------------------------------


def _spark(place: Path, workers: Sequence[int]) -> list[Figure]:
    """The baseline of one worker is the same query on DuckDB; that of several workers is one worker."""
    if importlib.util.find_spec("pyspark") is None:
        return []
    figures: list[Figure] = []
    beside, seconds = "DuckDB in one process", _beside(str(place), _BY_TEAM[1])
    for number in workers:
        found = child(__name__, "spark", place, number)
        print(f"  spark {number}: {json.dumps(found)}", file=sys.stderr)
        goal = None if number == min(workers) else Goal(1.6, least=True)
        figures.append(Figure(f"the month by team, Spark, workers: {number}", found["seconds"], "s", beside, seconds,
                              ratio_goal=goal))  # fmt: skip
        beside, seconds = f"workers: {number}", found["seconds"]
    return figures


def _ask_spark(place: str, workers: int) -> dict[str, float]:
    from tests.real.spark import spark_cluster

    warnings.simplefilter("ignore", ResourceWarning)
    with tempfile.TemporaryDirectory() as folder, spark_cluster(Path(folder), workers) as cluster:
        cluster.add_catalog("gputally", f"jdbc:sqlite:{place}/catalog.db", f"file://{place}")
        catalogue = Catalogue.connect(Lake(warehouse=place))
        union = union_of_ledgers(catalogue, catalogue.namespaces(), tables.USAGE_HOURLY, "spark", "gputally")
        catalogue.close()

        def ask() -> None:
            assert cluster.rows(f"WITH usage AS ({union}) {_with_sums(_BY_TEAM[1])}")

        first = timed(ask)
        return {"first_s": first, "seconds": sorted(timed(ask) for _ in range(RUNS))[RUNS // 2]}


# --- publishing --------------------------------------------------------------------------------


def _publishing(folder: Path, nodes: int, *, apart: bool) -> list[Figure]:
    path = folder / "ledger.duckdb"
    bulk.write(path, bulk.Fleet(nodes, 24 * 60, 40))
    found = _part(apart, "publish", folder, nodes)
    print(f"  publishing: {json.dumps(found)}", file=sys.stderr)
    gpus = f"{nodes * bulk.GPUS_A_NODE:,} GPUs"
    return [
        Figure(
            f"a day of {gpus} published, {found['rows']:,.0f} rows", found["seconds"], "s",
            "the same rows as one Parquet file", found["file_s"], Goal(5.0), memory_mib=found["peak_mib"],
        ),
        Figure("  by the run after a restart, nothing changed", found["again_s"], "s"),
    ]  # fmt: skip


def _publish(folder: Path, nodes: int) -> dict[str, float]:
    fleet = bulk.Fleet(nodes, 24 * 60, 40)
    clock = VirtualClock(fleet.end_ms)
    ledger = open_ledger(folder / "ledger.duckdb", clock)
    ledger.put_policy(fleet.policy(), bulk.BEGIN_MS)
    books = Bookkeeper(ledger, clock, "UTC")
    books.prices.take(load.price_book(), "put", "bench", "prices", bulk.BEGIN_MS)
    (folder / "lake").mkdir()
    lake = Lake(warehouse=str(folder / "lake"), ledger="one")
    catalogue = Catalogue.connect(lake)
    publisher = Publisher(ledger, books, Settings(auth="off", data=folder, lake=lake), clock, lambda: catalogue)
    seconds = timed(publisher.publish)
    rows = catalogue.open(tables.USAGE_HOURLY).scan().to_arrow()
    again = Publisher(ledger, books, Settings(auth="off", data=folder, lake=lake), clock, lambda: catalogue)
    again_s = timed(again.publish)
    peak = Spent.me().peak_mib()
    file_s = timed(lambda: pq.write_table(rows, folder / "beside.parquet", compression="zstd"))
    catalogue.close()
    ledger.close()
    return {"seconds": seconds, "again_s": again_s, "rows": rows.num_rows, "file_s": file_s, "peak_mib": peak}


def _side_by_side(folder: Path, writers: int) -> Figure:
    """Raises RuntimeError if a day is lost or doubled."""
    commits = 3

    def rate(place: str, number: int) -> float:
        (folder / place).mkdir()
        lake, found = Lake(warehouse=str(folder / place)), []
        seconds = timed(lambda: found.extend(write_side_by_side(lake, number, commits)))
        if found != sorted((f"ledger-{at}", commits) for at in range(number)):
            raise RuntimeError(f"{number} writers left {found}")
        return number * commits / seconds

    return Figure(f"{writers} writers of one lake, no day lost or doubled", rate("many", writers), "commits/s",
                  "one writer", rate("one", 1))  # fmt: skip


@contextlib.contextmanager
def _kept_folder() -> Iterator[Path]:
    if kept := os.environ.get("GPUTALLY_BENCH_LAKE"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def _told(share: float) -> None:
    print(f"\r  building the lake: {share:.0%}", end="" if share < 1 else "\n", file=sys.stderr, flush=True)


def main(action: str, place: str, *arguments: str) -> dict[str, Any]:
    if action == "ask":
        return _ask(place, *arguments)
    if action == "pages":
        return _pages(place)
    if action == "spark":
        return _ask_spark(place, int(*arguments))
    return _publish(Path(place), int(*arguments))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
