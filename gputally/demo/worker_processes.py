"""Starts the demo's parts in processes of their own, and defines the messages between them.

The parts call each other only over HTTP. A worker's pipes carry the simulation's calls and their results. A call is the
name of a method with its arguments. Sending a call and waiting for its result are two steps, so that several parts work
at once. A pipe carries one call at a time, and a worker has as many pipes as its part can run calls at once. If the
other side of a pipe disappears, the worker ends and removes its files.

All sites are called at once and awaited together. Each site has two pipes: while the agents deliver one hour, their
machines can simulate the next.

A worker loads its libraries when it starts, and creates its part later, when the arguments are known. The libraries of
a part (above all the accountant's server and engine) are loaded only in its own process."""

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from fairshare.simulator.simulation_model import Event, NodeSpec
from gputally.base.errors import AccountantError
from gputally.demo.cluster_and_workload import FaultPlan
from gputally.demo.ground_truth import TrueTotals

if TYPE_CHECKING:
    from accountant.wire.usage_models import Accounts

GC_ALLOCATIONS = 50_000
"""Allocations between garbage collections: an hour of the simulation makes about ten thousand objects, hardly any of
them in cycles."""
SWITCH_S = 0.0005
"""Thread switch interval. With Python's 5 ms the threads of a part would mostly wait for each other."""


class WorkerLost(AccountantError):
    """A worker process ended or could not execute a call: one line with the reason."""


class WorkerObject(Protocol):
    """The part that lives in a worker; its public methods are the calls."""

    def close(self) -> None:
        """Shut down in good order."""


class Worker:
    """A process with one part in it, which `start` creates; until then the process loads its libraries.

    who: the name in messages ("the accountant has ended").
    part: the name of the class, MODULE:CLASS, so that only the process imports it.
    pipes: the number of simultaneous calls.
    nice: lowers the process's priority.
    log_file: for its warnings."""

    def __init__(self, who: str, part: str, *, pipes: int = 1, nice: int = 0, log_file: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks
        self._who = who
        self._started = False
        self._pipes: list[Connection] = []
        theirs: list[Connection] = []
        for _ in range(pipes):
            here, there = context.Pipe()
            self._pipes.append(here)
            theirs.append(there)
        self._process = context.Process(target=_work, args=(who, part, theirs, nice, log_file), name=who, daemon=True)
        self._process.start()
        for pipe in theirs:
            pipe.close()

    def start(self, *arguments: object, scratch: Path | None = None) -> None:
        """Create the part, and return at once; an error is raised with the first answer.

        scratch: a folder of this process, which the worker removes if this process ends without doing so."""
        self._started = True
        self._send(0, pickle.dumps((arguments, scratch)))

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result. Raises WorkerLost."""
        self.tell(order(method, *arguments))
        return self.answer()

    def tell(self, order: bytes, pipe: int = 0) -> None:
        """Send a call and return at once. Raises WorkerLost."""
        self._send(pipe, order)

    def answer(self, pipe: int = 0) -> Any:
        """Wait for the result of the last call. Raises WorkerLost."""
        try:
            value, failure = self._pipes[pipe].recv()
        except (EOFError, OSError) as error:
            raise WorkerLost(f"{self._who} has ended") from error
        if failure:
            raise WorkerLost(failure)
        return value

    def leave(self) -> None:
        """Ask the part to shut down, and return at once. Idempotent."""
        with suppress(OSError):
            self._pipes[0].send(None)

    def close(self) -> None:
        """Ask the part to shut down, and wait for it. Idempotent."""
        if not self._started:
            self._process.terminate()  # it is still loading and is not needed any more
        self.leave()
        self._process.join()
        for pipe in self._pipes:
            pipe.close()

    def _send(self, pipe: int, message: bytes) -> None:
        try:
            self._pipes[pipe].send_bytes(message)
        except OSError as error:
            raise WorkerLost(f"{self._who} has ended") from error


def order(method: str, *arguments: object) -> bytes:
    """Encode a call for `Worker.tell`; the same bytes can be sent to several workers."""
    return pickle.dumps((method, arguments))


def spare_collections() -> None:
    """Exclude everything that is loaded now from garbage collection. Hardly any later object is in a cycle, and full
    collections over all libraries would take a fifth of a run."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)


def _work(who: str, name: str, pipes: list[Connection], nice: int, log_file: Path | None) -> None:
    """Run the process: execute calls until None arrives, or the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business
    sys.setswitchinterval(SWITCH_S)
    os.nice(nice)
    if log_file is not None:
        logging.basicConfig(filename=log_file, format="%(levelname)s %(name)s %(message)s")
    make: Callable[..., WorkerObject] = resolve_name(name)
    spare_collections()
    first = pipes[0]
    with suppress(EOFError, OSError):
        told = first.recv()
        if told is None:
            return
        arguments, scratch = told
        try:
            part = make(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
            said = _error_line(who, error)
            if first.recv() is not None:
                first.send((None, said))
            return
        with closing(part):
            for pipe in pipes[1:]:
                threading.Thread(target=_obey, args=(who, pipe, part), name="orders", daemon=True).start()
            left = _obey(who, first, part)
        if not left and scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # the part that ends last removes the folder


def _obey(who: str, orders: Connection, part: WorkerObject) -> bool:
    """Execute the calls of a pipe; returns whether the worker was asked to leave, False if the other side is gone."""
    with suppress(EOFError, OSError):
        while (told := orders.recv()) is not None:
            method, arguments = told
            try:
                answer = getattr(part, method)(*arguments), ""
            except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
                answer = None, _error_line(who, error)
            orders.send(answer)
        return True
    return False


def _error_line(who: str, error: Exception) -> str:
    """Describe an error in one line; log an unexpected one with its traceback."""
    if isinstance(error, AccountantError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    logging.getLogger("gputally.demo").exception("an order could not be carried out", exc_info=error)
    return f"{who} failed: {type(error).__name__}: {error}"


ACCOUNTANT = "gputally.demo.accountant_process:DemoAccountant"
SITE = "gputally.demo.simulated_machines:AgentSite"
LEDGER_FILES = ("report.html", "statement.csv", "ledger.duckdb")
"""Files that the accountant writes."""


@dataclass(frozen=True, slots=True)
class AccountantConfig:
    """The arguments of the demo's accountant.

    folder: for the ledger; must be empty.
    port 0: any free one.
    log_file: for its warnings; None: only errors, to the terminal."""

    nodes: tuple[NodeSpec, ...]
    teams: tuple[str, ...]
    folder: Path
    port: int
    start_ms: int
    log_file: Path | None


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """The ledger's figures of a span, and the number of received rows by outcome. costs: payable, by team; None if some
    time has no price."""

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
    """The arguments of a site."""

    nodes: tuple[NodeSpec, ...]
    queues: frozenset[str]
    folder: Path
    url: str
    interval_s: int
    start_ms: int
    faults: FaultPlan
    seed: int
    scraped: bool = False
    """Whether the agents keep metrics, as they do when a Prometheus scrapes them."""


@dataclass(frozen=True, slots=True)
class SiteResult:
    """The result of a site: the ground truth, and the number of intervals that its agents closed."""

    books: TrueTotals
    closed: int


PROCESSES = 2
NICE = 5
"""Priority of the sites, which have time until the next hour; the accountant has not."""
_LIFE, _DELIVERIES = 0, 1
"""The pipes of a site: one for its events, one for the deliveries of its agents."""


class AgentPool:
    """The sites of a scenario's nodes. Their processes load libraries when this object is created, and `settle` creates
    the sites.

    log_file: for the agents' warnings."""

    def __init__(self, log_file: Path | None) -> None:
        self._sites = [
            Worker("a process with agents", SITE, pipes=2, nice=NICE, log_file=log_file) for _ in range(PROCESSES)
        ]
        self._home: dict[str, Worker] = {}
        self._spooled: list[dict[str, int]] = [{} for _ in self._sites]
        """The newest numbers that each site can deliver, as it reported after its last events."""

    def settle(self, plot: SiteConfig, scratch: Path | None = None) -> None:
        """Divide the nodes among the sites. scratch: see Worker.start."""
        for number, site in enumerate(self._sites):
            nodes = plot.nodes[number::PROCESSES]
            site.start(replace(plot, nodes=nodes), scratch=scratch)
            self._home |= dict.fromkeys((node.name for node in nodes), site)

    def begin(self, events: Sequence[Event]) -> None:
        """See Site.begin."""
        self._ask_all("begin", events)

    def deliver(self) -> None:
        """Start AgentSite.deliver on all sites, up to the last reported numbers, and return at once."""
        for site, spooled in zip(self._sites, self._spooled, strict=True):
            site.tell(order("deliver", spooled), _DELIVERIES)

    def delivered(self) -> None:
        """Wait for the end of `deliver`."""
        for site in self._sites:
            site.answer(_DELIVERIES)

    def set_out(self, events: Sequence[Event], until_ms: int) -> None:
        """Start AgentSite.follow on all sites and return at once. A delivery may be running if no agent ends
        meanwhile."""
        self._tell_all("follow", events, until_ms)

    def arrive(self) -> None:
        """Wait for the end of `set_out`, before any other call except `deliver`."""
        self._spooled = [site.answer(_LIFE) for site in self._sites]

    def deliver_alone(self, name: str) -> int:
        """See Site.deliver_alone."""
        return int(self._home[name].ask("deliver_alone", name))

    def scrape(self) -> dict[str, str]:
        """See AgentSite.scrape; no other call may be running."""
        return {name: page for pages in self._ask_all("scrape") for name, page in pages.items()}

    def finish(self, end_ms: int) -> SiteResult:
        """Finish all sites and merge their results."""
        books, closed = TrueTotals(), 0
        for taken in self._ask_all("finish", end_ms):
            books.merge(taken.books)
            closed += taken.closed
        return SiteResult(books, closed)

    def close(self) -> None:
        """Let every site shut down, and wait for it."""
        for site in self._sites:
            site.leave()
        for site in self._sites:
            site.close()

    def _ask_all(self, method: str, *arguments: object) -> list[Any]:
        self._tell_all(method, *arguments)
        return [site.answer(_LIFE) for site in self._sites]

    def _tell_all(self, method: str, *arguments: object) -> None:
        told = order(method, *arguments)
        for site in self._sites:
            site.tell(told, _LIFE)


class Parts:
    """The demo's worker processes: an accountant (gputally.demo.accountant_process) and the pool of agents. Use it as a
    context: leaving it shuts them down.

    log_file: for their warnings; None: only errors, to the terminal."""

    def __init__(self, log_file: Path | None = None) -> None:
        self.log_file = log_file
        self.office = Worker("the accountant", ACCOUNTANT, log_file=log_file)
        self.crew = AgentPool(log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the agents first, which may still have records to deliver. Idempotent."""
        self.crew.close()
        self.office.close()
