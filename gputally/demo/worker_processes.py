"""Starts the demo's parts in processes of their own, and defines the messages between them.

Between the parts the only way is HTTP; what goes through a worker's pipes is what the simulation tells a part of the
world, and what it answers. An order is the name of a method with its arguments. Giving it and awaiting what came of it
are two steps, so that several parts work at once; a pipe carries one order at a time, and a worker has as many as its
part can do things at once. A worker whose other side is gone without a word ends, and takes along what would be left
of it on the disk.

All sites are asked at once and awaited together. Each can be asked two things at once: while the agents deliver one
hour, their machines may live the next.

They load what they need from construction on, and are made something of later, when it is known of what.

A part's own libraries (the accountant's server and engine, above all) are loaded where it lives, and nowhere else.
"""

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
"""Between collections: an hour of the simulation makes some ten thousand objects, and hardly any of them in cycles."""
SWITCH_S = 0.0005
"""So that the threads of a part get their turns: with Python's 5 ms they would mostly wait for each other."""


class WorkerLost(AccountantError):
    """A process ended, or could not do what it was told: one line with the reason."""


class WorkerObject(Protocol):
    """What lives in a worker; its public methods are what can be asked of it."""

    def close(self) -> None:
        """Shut down in good order."""


class Worker:
    """A process with one part in it, which is made by `start`; until then the process loads what it needs.

    who: of which a line can be said ("the accountant has ended"). part: the name of its class, MODULE:CLASS, so that
    only the process loads it. pipes: how many things it can be asked at once. nice: how far it gives way to others.
    log_file: where its warnings go."""

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
        """Have the part made, and come back at once; what goes wrong the first answer tells.

        scratch: a folder of this side's, that is to be removed where this side ends without doing so."""
        self._started = True
        self._send(0, pickle.dumps((arguments, scratch)))

    def ask(self, method: str, *arguments: object) -> Any:
        """What came of an order. Raises WorkerLost."""
        self.tell(order(method, *arguments))
        return self.answer()

    def tell(self, order: bytes, pipe: int = 0) -> None:
        """Give an order and come back at once. Raises WorkerLost."""
        self._send(pipe, order)

    def answer(self, pipe: int = 0) -> Any:
        """Wait for what came of the order given last. Raises WorkerLost."""
        try:
            value, failure = self._pipes[pipe].recv()
        except (EOFError, OSError) as error:
            raise WorkerLost(f"{self._who} has ended") from error
        if failure:
            raise WorkerLost(failure)
        return value

    def leave(self) -> None:
        """Let the part shut down in good order, and come back at once. Idempotent."""
        with suppress(OSError):
            self._pipes[0].send(None)

    def close(self) -> None:
        """The same, and wait for it. Idempotent."""
        if not self._started:
            self._process.terminate()  # it is still loading, and for nothing
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
    """What `Worker.tell` takes; one may be told to several."""
    return pickle.dumps((method, arguments))


def spare_collections() -> None:
    """What is loaded by now stays, and hardly anything that follows lies in cycles: a full collection that walks all
    libraries again and again is a fifth of a run."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)


def _work(who: str, name: str, pipes: list[Connection], nice: int, log_file: Path | None) -> None:
    """The process: does as it is told until it is told None, or the other side is gone."""
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
            said = _said(who, error)
            if first.recv() is not None:
                first.send((None, said))
            return
        with closing(part):
            for pipe in pipes[1:]:
                threading.Thread(target=_obey, args=(who, pipe, part), name="orders", daemon=True).start()
            left = _obey(who, first, part)
        if not left and scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # whichever part ends last leaves nothing


def _obey(who: str, orders: Connection, part: WorkerObject) -> bool:
    """Whether it was told to leave: not where the other side is gone."""
    with suppress(EOFError, OSError):
        while (told := orders.recv()) is not None:
            method, arguments = told
            try:
                answer = getattr(part, method)(*arguments), ""
            except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
                answer = None, _said(who, error)
            orders.send(answer)
        return True
    return False


def _said(who: str, error: Exception) -> str:
    """Describe an error in one line; log an unexpected one with its traceback."""
    if isinstance(error, AccountantError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    logging.getLogger("gputally.demo").exception("an order could not be carried out", exc_info=error)
    return f"{who} failed: {type(error).__name__}: {error}"


OFFICE = "gputally.demo.accountant_process:DemoAccountant"
SITE = "gputally.demo.agent_site:AgentSite"
LEDGER_FILES = ("report.html", "statement.csv", "ledger.duckdb")
"""What an office writes."""


@dataclass(frozen=True, slots=True)
class AccountantConfig:
    """What an office is built from. folder: for the ledger; must be empty. port 0: any free one. log_file: where
    its warnings go; None: only what is worse, to the terminal."""

    nodes: tuple[NodeSpec, ...]
    teams: tuple[str, ...]
    folder: Path
    port: int
    start_ms: int
    log_file: Path | None


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """A span as the ledger has it, and the rows that came, by what became of them. costs: payable, by team; None where
    something has no price."""

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
    """What a site is built from."""

    nodes: tuple[NodeSpec, ...]
    queues: frozenset[str]
    folder: Path
    url: str
    interval_s: int
    start_ms: int
    faults: FaultPlan
    seed: int
    scraped: bool = False
    """Whether the agents keep metrics, as they do where a Prometheus looks at them."""


@dataclass(frozen=True, slots=True)
class SiteResult:
    """At the end: what really happened on the site, and how many intervals its agents closed."""

    books: TrueTotals
    closed: int


PROCESSES = 2
NICE = 5
"""They have time until the next hour; who books this one has not."""
_LIFE, _DELIVERIES = 0, 1
"""The pipes of a site: what happens on it, and what its agents deliver meanwhile."""


class AgentPool:
    """Sites for the nodes of a plot. They load what they need from construction on, and stand from `settle` on.

    log_file: where their agents' warnings go."""

    def __init__(self, log_file: Path | None) -> None:
        self._sites = [
            Worker("a process with agents", SITE, pipes=2, nice=NICE, log_file=log_file) for _ in range(PROCESSES)
        ]
        self._home: dict[str, Worker] = {}
        self._spooled: list[dict[str, int]] = [{} for _ in self._sites]
        """What each site can deliver, as it said when it last arrived."""

    def settle(self, plot: SiteConfig, scratch: Path | None = None) -> None:
        """Deal out the plot's nodes. scratch: see Worker.start."""
        for number, site in enumerate(self._sites):
            nodes = plot.nodes[number::PROCESSES]
            site.start(replace(plot, nodes=nodes), scratch=scratch)
            self._home |= dict.fromkeys((node.name for node in nodes), site)

    def begin(self, events: Sequence[Event]) -> None:
        """See Site.begin."""
        self._ask_all("begin", events)

    def deliver(self) -> None:
        """Begin Site.deliver everywhere, of all that was there on arrival, and come back at once."""
        for site, spooled in zip(self._sites, self._spooled, strict=True):
            site.tell(order("deliver", spooled), _DELIVERIES)

    def delivered(self) -> None:
        """Wait for the end of `deliver`."""
        for site in self._sites:
            site.answer(_DELIVERIES)

    def set_out(self, events: Sequence[Event], until_ms: int) -> None:
        """Begin Site.follow everywhere and come back at once. A delivery may be under way if no agent ends
        meanwhile."""
        self._tell_all("follow", events, until_ms)

    def arrive(self) -> None:
        """Wait for the end of `set_out`; it has to be waited for before anything but `deliver` is asked."""
        self._spooled = [site.answer(_LIFE) for site in self._sites]

    def deliver_alone(self, name: str) -> int:
        """See Site.deliver_alone."""
        return int(self._home[name].ask("deliver_alone", name))

    def scrape(self) -> dict[str, str]:
        """See Site.scrape; nothing may be under way."""
        return {name: page for pages in self._ask_all("scrape") for name, page in pages.items()}

    def finish(self, end_ms: int) -> SiteResult:
        """All sites together."""
        books, closed = TrueTotals(), 0
        for taken in self._ask_all("finish", end_ms):
            books.merge(taken.books)
            closed += taken.closed
        return SiteResult(books, closed)

    def close(self) -> None:
        """Let every site shut down in good order, and wait for it."""
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
    """An office (gputally.demo.accountant_process) and a crew. Use it as a context: leaving it shuts them down in
    good order.

    log_file: where their warnings go; None: only what is worse, to the terminal."""

    def __init__(self, log_file: Path | None = None) -> None:
        self.log_file = log_file
        self.office = Worker("the accountant", OFFICE, log_file=log_file)
        self.crew = AgentPool(log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The agents first, which may have something left to deliver. Idempotent."""
        self.crew.close()
        self.office.close()
