"""What users wait for most often, in processor time and with input that changes: a controller's cycle while usage
moves, windows that end now, first requests, batches with pod facts, reports of epochs, divisions of few queues, an
agent's step, starts.

It takes some seconds and is made for `make bench ARGS="paths --against REV"`: only ratios of one run are firm. A fast
path that answers the same question twice shows in none of these figures."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from tests.bench.figure import Figure, cpu_seconds, median_cpu_seconds

NODES, GPUS, HOURS, STARTS = 8, 8, 16, 3
EPOCH_JOBS, EPOCHS = 400, 25
"""The least of several repetitions is what other load disturbs least."""
COMMANDS = ("agent", "accountant", "jobs", "fairshare", "demo")


def measure() -> list[Figure]:
    """Return the figures of all groups that this commit can measure."""
    figures: list[Figure] = []
    for group in GROUPS:
        try:
            figures += group()
        except (ImportError, AttributeError, TypeError) as error:  # another commit may have other names for it
            print(f"{group.__name__.strip('_')} cannot be measured here: {error}", file=sys.stderr)
    return figures


def _cycle() -> Iterator[Figure]:
    from tests.bench import cycle

    controller = cycle.controller("enforce")
    spent = [cpu_seconds(controller.cycle) for _ in range(3)]
    yield Figure("controller: cycle of 1,000 queues, usage moves", statistics.median(spent[1:]) * 1e3, "ms")


def _ledger() -> Iterator[Figure]:
    """A month's beginning in a small cluster: every hour all nodes deliver rows and facts, and the controller asks."""
    from accountant.reports import html_page
    from accountant.reports.report_builder import build
    from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
    from accountant.wire.policy_models import WindowSpec
    from gputally.base.clock import VirtualClock
    from tests.bench import load, windows
    from tests.usage_records import batch, deliver, pod_facts

    clock, spec = VirtualClock(load.BEGIN_MS), WindowSpec(size=7 * 86_400, half_life=86_400)
    writing, asking = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        ledger = open_ledger(path, clock)
        ledger.put_policy(load.policy(), load.BEGIN_MS)
        nodes = [f"node-{node}" for node in range(NODES)]
        sent = {node: load.batches(node, GPUS, 60 * HOURS, 60) for node in nodes}
        for hour in range(HOURS):
            clock.advance_to(load.BEGIN_MS + (hour + 1) * 3_600_000)
            group = []
            for node in nodes:
                rows = next(sent[node])
                seq = rows.first_seq + hour * GPUS
                facts = [
                    pod_facts(
                        row.holder.name, clock.wall_ms(), uid=row.holder.uid, namespace=row.holder.namespace, node=node,
                        queue_ref=f"kai:{row.holder.namespace.replace('ns', 'queue')}", labels={"app": f"run-{hour}"},
                    )
                    for row in rows.intervals[:GPUS] if row.holder is not None
                ]  # fmt: skip
                group.append(batch(rows.intervals, facts, cluster="bench", node=node, first_seq=seq))
            writing.append(cpu_seconds(partial(deliver, ledger, clock.wall_ms(), *group)))
            asking.append(cpu_seconds(partial(windows.ask, ledger, spec, clock.wall_ms())))
        ledger.close()
        book = load.price_book()

        def page(ledger: DuckLedger) -> None:
            with ledger.moment() as moment:
                html_page.render_html(build(moment, book, load.BEGIN_MS, clock.wall_ms(), "UTC"))

        first, first_page, page_again = [], [], []
        for _ in range(STARTS):
            with closing(open_ledger(path, clock)) as ledger:
                first.append(cpu_seconds(partial(windows.ask, ledger, spec, clock.wall_ms())))
                first_page.append(cpu_seconds(partial(page, ledger)))
                page_again.append(cpu_seconds(partial(page, ledger)))
    rows_an_hour = f"{NODES * GPUS * 60:,} rows"
    yield Figure(f"ledger: books {rows_an_hour} with facts", statistics.median(writing) * 1e3, "ms")
    yield Figure("7-day window that ends now, new rows each time", min(asking[1:]) * 1e3, "ms")
    yield Figure("7-day window, the first after a start", min(first) * 1e3, "ms")
    yield Figure("month report, the first after a start", min(first_page) * 1e3, "ms")
    yield Figure("month report, again", min(page_again) * 1e3, "ms")


def _epochs() -> Iterator[Figure]:
    """Training jobs report the end of an epoch each time that the inventory is read."""
    from accountant.ledger.protocols import EpochReport, JobKey
    from accountant.storage.duckdb_ledger import open_ledger
    from gputally.base.clock import VirtualClock
    from tests.bench import load

    jobs = [JobKey("bench", f"ns-{job % 50}", f"Job/run-{job}") for job in range(EPOCH_JOBS)]
    clock, spent = VirtualClock(load.BEGIN_MS), []
    with tempfile.TemporaryDirectory() as folder, closing(open_ledger(Path(folder) / "ledger.duckdb", clock)) as ledger:
        for epoch in range(EPOCHS):
            clock.advance_to(load.BEGIN_MS + (epoch + 1) * 60_000)
            ledger.report_epochs([EpochReport(job, epoch, clock.wall_ms(), "") for job in jobs], clock.wall_ms())
        for at in range(0, EPOCH_JOBS, 4):
            clock.advance_to(clock.wall_ms() + 10_000)
            new = [EpochReport(job, EPOCHS, clock.wall_ms(), "") for job in jobs[at : at + 4]]
            spent.append(cpu_seconds(partial(ledger.report_epochs, new, clock.wall_ms())))
    yield Figure(f"ledger: stores 4 epochs beside {EPOCHS * EPOCH_JOBS:,}", statistics.median(spent) * 1e3, "ms")


def _divisions() -> Iterator[Figure]:
    from fairshare.laws.division import divide
    from tests.bench.division import case

    for queues in (5, 100, 1_000):
        seconds = median_cpu_seconds(partial(divide, case(queues)), runs=401, warmup=20)
        yield Figure(f"division of {queues:,} queues", seconds * 1e6, "µs")


def _agent_step() -> Iterator[Figure]:
    from agent.core.readings import Allocation
    from agent.core.settings import AgentSettings
    from agent.main_loop import Agent
    from agent.simulation.simulated_node import SimulatedNode, SimulatedSource
    from agent.upload.spool import Outbox
    from agent.upload.uploader import Uploader
    from agent.wire import Holder
    from gputally.base.clock import VirtualClock
    from gputally.demo.cluster_and_workload import devices, nodes

    spec, clock = nodes()[0], VirtualClock(1_790_812_800_000)
    node = SimulatedNode(spec.name, devices(spec), start_ms=clock.wall_ms())
    for gpu in node.gpus:
        holder = Holder("pod", f"uid-{gpu.uuid}", "team", f"pod-{gpu.uuid}", "main")
        node.place(clock.wall_ms(), Allocation(gpu.uuid, holder), 500_000, 40_000, None)
    with tempfile.TemporaryDirectory() as folder:
        outbox = Outbox(Path(folder) / "spool.sqlite", clock, fsync=False)
        uploader = Uploader(outbox, "", "bench", spec.name, "boot", None, clock)
        agent = Agent(AgentSettings(node=spec.name, interval_s=60), SimulatedSource(node), outbox, uploader, clock)
        spent = []
        for _ in range(60):
            begin = time.process_time()
            for _ in range(12):
                clock.advance_to(clock.wall_ms() + 5_000)
                agent.sample()
            spent.append(time.process_time() - begin)
        agent.shutdown()
    yield Figure(f"agent: a minute of readings of {len(node.gpus)} GPUs", statistics.median(spent[5:]) * 1e3, "ms")


def _starts() -> Iterator[Figure]:
    for name in COMMANDS:
        command = [sys.executable, "-m", "gputally", name, "--help"]
        yield Figure(f"gputally {name} --help", _cpu_of(command) * 1e3, "ms")
    loading = [sys.executable, "-c", "import accountant.composition"]
    yield Figure("accountant: loading its libraries", _cpu_of(loading) * 1e3, "ms")


def _cpu_of(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


GROUPS = (_cycle, _ledger, _epochs, _divisions, _agent_step, _starts)
