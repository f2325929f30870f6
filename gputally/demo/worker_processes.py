"""Runs the demo's accountant and its two sites in worker processes, and calls their methods.

A worker process contains one object. The main process calls its methods through pipes: it sends the name of a method
with the arguments, and receives the result later, so that several workers run at the same time. A pipe carries one call
at a time. If the main process disappears, the worker ends and removes its files. Agents and accountant communicate only
over HTTP.

A site is a part of the simulated machines with their agents. It has two pipes, so that its machines can simulate an
hour while their agents deliver the hour before.

A worker imports the libraries of its object when it starts, and creates the object when its arguments are known. The
main process imports none of these libraries."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from accountant.exports.protocol import exports
from gputally.base.errors import AccountantError

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy
    from accountant.wire.usage_cost_and_job_models import Accounts
    from fairshare.simulator.simulation_model import Event, SimulatedNodeSpec
    from gputally.demo.cluster_and_workload import FaultPlan
    from gputally.demo.ground_truth import TrueTotals

GC_ALLOCATIONS = 50_000
"""Allocations between garbage collections. An hour of the simulation allocates about ten thousand objects, hardly any
of them in cycles."""
SWITCH_S = 0.0005
"""Thread switch interval. With Python's default of 5 ms the threads of a worker mostly wait for each other."""


class WorkerLost(AccountantError):
    """A worker process has ended, or a call failed. The message has one line with the reason."""


class WorkerObject(Protocol):
    """The object in a worker. The main process can call its public methods."""

    def close(self) -> None:
        """Shut down cleanly."""


class WorkerProcess:
    """A worker process. `start` creates its object; until then the process imports the libraries.

    worker: the worker's name in messages ("the accountant has ended").
    part: the object's class as MODULE:CLASS, so that only the worker imports the module.
    pipes: the number of simultaneous calls.
    nice: the increment of the process's niceness.
    log_file: the file of the worker's warnings; None for no log."""

    def __init__(self, worker: str, part: str, *, pipes: int = 1, nice: int = 0, log_file: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks
        self._name = worker
        self._started = False
        self._pipes: list[Connection] = []
        worker_ends: list[Connection] = []
        for _ in range(pipes):
            own_end, worker_end = context.Pipe()
            self._pipes.append(own_end)
            worker_ends.append(worker_end)
        arguments = (worker, part, worker_ends, nice, log_file)
        self._process = context.Process(target=_work, args=arguments, name=worker, daemon=True)
        self._process.start()
        for pipe in worker_ends:
            pipe.close()

    def start(self, *arguments: object, scratch: Path | None = None) -> None:
        """Create the object, and return at once. An error is raised by the first `result`.

        scratch: a folder that the worker removes if this process ends without doing so."""
        self._started = True
        self._send_bytes(0, pickle.dumps((arguments, scratch)))

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result. Raises WorkerLost."""
        self.send(encode_call(method, *arguments))
        return self.result()

    def send(self, call: bytes, pipe: int = 0) -> None:
        """Send a call and return at once. Raises WorkerLost."""
        self._send_bytes(pipe, call)

    def result(self, pipe: int = 0) -> Any:
        """Wait for the result of the last call. Raises WorkerLost."""
        try:
            value, failure = self._pipes[pipe].recv()
        except (EOFError, OSError) as error:
            raise WorkerLost(f"{self._name} has ended") from error
        if failure:
            raise WorkerLost(failure)
        return value

    def ask_to_stop(self) -> None:
        """Ask the worker to shut down, and return at once. Idempotent."""
        with suppress(OSError):
            self._pipes[0].send(None)

    def close(self) -> None:
        """Ask the worker to shut down, and wait for its end. Idempotent."""
        if not self._started:
            self._process.terminate()  # the worker still imports libraries that are not needed
        self.ask_to_stop()
        self._process.join()
        for pipe in self._pipes:
            pipe.close()

    def _send_bytes(self, pipe: int, message: bytes) -> None:
        try:
            self._pipes[pipe].send_bytes(message)
        except OSError as error:
            raise WorkerLost(f"{self._name} has ended") from error


def encode_call(method: str, *arguments: object) -> bytes:
    """Encode a call for `WorkerProcess.send`. The same bytes can be sent to several workers."""
    return pickle.dumps((method, arguments))


def freeze_garbage_collector() -> None:
    """Exclude all present objects from garbage collection. Full collections over the objects of all libraries would
    take a fifth of a run, and hardly any later object is in a cycle."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)


def _work(worker: str, part_class: str, pipes: list[Connection], nice: int, log_file: Path | None) -> None:
    """Run the worker process: execute calls until None arrives, or the main process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    sys.setswitchinterval(SWITCH_S)
    os.nice(nice)
    if log_file is not None:
        logging.basicConfig(filename=log_file, format="%(levelname)s %(name)s %(message)s")
    make: Callable[..., WorkerObject] = resolve_name(part_class)
    freeze_garbage_collector()
    first = pipes[0]
    with suppress(EOFError, OSError):
        message = first.recv()
        if message is None:
            return
        arguments, scratch = message
        try:
            part = make(*arguments)
        except Exception as error:  # noqa: BLE001 - the main process raises every error
            failure = _error_line(worker, error)
            if first.recv() is not None:
                first.send((None, failure))
            return
        with closing(part):
            for pipe in pipes[1:]:
                threading.Thread(target=_serve_calls, args=(worker, pipe, part), name="calls", daemon=True).start()
            asked_to_stop = _serve_calls(worker, first, part)
        if not asked_to_stop and scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # the worker that ends last removes the folder


def _serve_calls(worker: str, pipe: Connection, part: WorkerObject) -> bool:
    """Execute the calls of a pipe. Return True if the main process asks the worker to stop, False if it is gone."""
    with suppress(EOFError, OSError):
        while (call := pipe.recv()) is not None:
            method, arguments = call
            try:
                result = getattr(part, method)(*arguments), ""
            except Exception as error:  # noqa: BLE001 - the main process raises every error
                result = None, _error_line(worker, error)
            pipe.send(result)
        return True
    return False


def _error_line(worker: str, error: Exception) -> str:
    """Return the reason of an error in one line, and log an error that is not expected with its traceback."""
    if isinstance(error, AccountantError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    logging.getLogger("gputally.demo").exception("a call failed", exc_info=error)
    return f"{worker} failed: {type(error).__name__}: {error}"


ACCOUNTANT = "gputally.demo.accountant_process:DemoAccountant"
SITE = "gputally.demo.simulated_machines:AgentSite"
REPORT_FILES = {form: file for form, file in (("html", "report.html"), ("csv", "statement.csv")) if form in exports()}
"""Names of the files with the month's report, by the format, of which any may be deleted."""
LEDGER_FILES = (*REPORT_FILES.values(), "ledger.duckdb")
"""Names of the files that the accountant writes."""


@dataclass(frozen=True, slots=True)
class AccountantConfig:
    """The arguments of the demo's accountant.

    folder: an empty folder for the ledger.
    port: the port to serve at; 0 for any free port.
    log_file: the file to which the accountant writes its warnings; None for no log of warnings.
    pages_policy: the controller's policy, whose pages are then at the accountant's address; None for no such pages."""

    nodes: tuple[SimulatedNodeSpec, ...]
    teams: tuple[str, ...]
    folder: Path
    port: int
    start_ms: int
    log_file: Path | None
    pages_policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """The ledger's figures of a span.

    costs: the payable amount of each team; None if some of the time has no price.
    rows: the number of received rows by outcome.
    acks_lost: the number of lost acknowledgements."""

    accounts: Accounts
    by_team: Mapping[str, Accounts]
    currency: str
    total: Decimal | None
    costs: Mapping[str, Decimal | None]
    coverage: float
    rows: Mapping[str, int]
    acks_lost: int


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """The arguments of a site of machines.

    queues: the names of the existing queues.
    folder: the folder of the outboxes.
    url: the accountant's address.
    scraped: True to have the agents keep metrics, as they do when a Prometheus scrapes them."""

    nodes: tuple[SimulatedNodeSpec, ...]
    queues: frozenset[str]
    folder: Path
    url: str
    interval_s: int
    start_ms: int
    faults: FaultPlan
    seed: int
    scraped: bool = False


@dataclass(frozen=True, slots=True)
class SiteResult:
    """The result of a site: the ground truth, and the number of intervals that its agents closed."""

    totals: TrueTotals
    closed: int


PROCESSES = 2
NICE = 5
"""Niceness of the sites. Their work has time until the next hour, and the accountant's has not."""
_EVENTS, _DELIVERIES = 0, 1
"""The pipes of a site: one for the events of its machines, one for the deliveries of its agents."""


class AgentPool:
    """The worker processes of the machines with agents. They import libraries when this object is created, and
    `create_sites` creates the sites.

    log_file: the file of the agents' warnings."""

    def __init__(self, log_file: Path | None) -> None:
        self._sites = [
            WorkerProcess("a process with agents", SITE, pipes=2, nice=NICE, log_file=log_file)
            for _ in range(PROCESSES)
        ]
        self._site_of_node: dict[str, WorkerProcess] = {}
        self._spooled: list[dict[str, int]] = [{} for _ in self._sites]
        """For each site, the newest sequence number in the outbox of each agent, after the last events."""

    def create_sites(self, config: SiteConfig, scratch: Path | None = None) -> None:
        """Divide the nodes among the sites. scratch: see WorkerProcess.start."""
        for number, site in enumerate(self._sites):
            nodes = config.nodes[number::PROCESSES]
            site.start(replace(config, nodes=nodes), scratch=scratch)
            self._site_of_node |= dict.fromkeys((node.name for node in nodes), site)

    def begin(self, events: Sequence[Event]) -> None:
        """Call `AgentSite.begin` on all sites."""
        self._call_all("begin", events)

    def start_delivery(self) -> None:
        """Start `AgentSite.deliver` on all sites for the records up to the last events, and return at once."""
        for site, spooled in zip(self._sites, self._spooled, strict=True):
            site.send(encode_call("deliver", spooled), _DELIVERIES)

    def finish_delivery(self) -> None:
        """Wait for the end of `start_delivery`."""
        for site in self._sites:
            site.result(_DELIVERIES)

    def start_hour(self, events: Sequence[Event], until_ms: int) -> None:
        """Start `AgentSite.follow` on all sites, and return at once. A delivery may run at the same time if no agent
        ends before `until_ms`."""
        self._send_all("follow", events, until_ms)

    def finish_hour(self) -> None:
        """Wait until the calls that `start_hour` started have ended. Until then, call no other method except those of a
        delivery."""
        self._spooled = [site.result(_EVENTS) for site in self._sites]

    def deliver_alone(self, name: str) -> int:
        """Call `AgentSite.deliver_alone` on the site of a node."""
        return int(self._site_of_node[name].call("deliver_alone", name))

    def scrape(self) -> dict[str, str]:
        """Call `AgentSite.scrape` on all sites, while no other call runs."""
        return {name: page for pages in self._call_all("scrape") for name, page in pages.items()}

    def finish(self, end_ms: int) -> SiteResult:
        """Finish all sites and merge their results."""
        from gputally.demo.ground_truth import TrueTotals

        totals, closed = TrueTotals(), 0
        for site_result in self._call_all("finish", end_ms):
            totals.merge(site_result.totals)
            closed += site_result.closed
        return SiteResult(totals, closed)

    def close(self) -> None:
        """Shut all sites down, and wait for their end."""
        for site in self._sites:
            site.ask_to_stop()
        for site in self._sites:
            site.close()

    def _call_all(self, method: str, *arguments: object) -> list[Any]:
        self._send_all(method, *arguments)
        return [site.result(_EVENTS) for site in self._sites]

    def _send_all(self, method: str, *arguments: object) -> None:
        call = encode_call(method, *arguments)
        for site in self._sites:
            site.send(call, _EVENTS)


class WorkerProcesses:
    """The demo's worker processes: an accountant (gputally.demo.accountant_process) and the machines with agents.

    log_file: the file to which all processes write their warnings; None for no log of warnings."""

    def __init__(self, log_file: Path | None = None) -> None:
        self.log_file = log_file
        self.accountant = WorkerProcess("the accountant", ACCOUNTANT, pipes=2, log_file=log_file)
        self.agents = AgentPool(log_file)

    def close(self) -> None:
        """Close the agents, which can still have records to deliver, and then the accountant. Idempotent."""
        self.agents.close()
        self.accountant.close()
