"""Sites in processes of their own, so that the agents do not share one interpreter with the accountant.

As in a cluster the only way between them is HTTP; what goes through the pipes is what a site is told of the
world (the scheduler's events) and what it answers. All sites are asked at once and awaited together. Each has
two pipes: while the agents deliver one hour, their machines may live the next.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from accountant.errors import AccountantError
from fairshare.simulator.events import Event
from gputally.demo.site import Plot, Site, Stocktaking
from gputally.demo.truth import Books

PROCESSES = 2
NICE = 5
"""They have time until the next hour; who books this one has not."""
GC_ALLOCATIONS = 50_000
"""Between collections: an hour of the simulation makes some ten thousand objects, and hardly any of them in cycles."""
_SWITCH_S = 0.0005
"""So that who delivers gets a turn while the machines live on: with Python's 5 ms the accountant would wait for the
last batch of an hour longer than it books."""


class CrewLost(AccountantError):
    """A process with agents ended, or failed: one line with the reason."""


class Crew:
    """The plot's nodes, dealt out to `PROCESSES` sites. log_file: where their agents' warnings go."""

    def __init__(self, plot: Plot, log_file: Path | None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the server's threads and locks
        self._sites: list[Connection] = []
        self._deliveries: list[Connection] = []
        self._processes = []
        self._home: dict[str, Connection] = {}
        self._spooled: list[dict[str, int]] = []
        """Of each site: what it can deliver, as it said when it last arrived."""
        for number in range(min(PROCESSES, len(plot.nodes))):
            nodes = plot.nodes[number::PROCESSES]
            ours, theirs = context.Pipe()
            deliveries, delivering = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, delivering, replace(plot, nodes=nodes), log_file),
                name=f"agents-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            delivering.close()
            self._sites.append(ours)
            self._deliveries.append(deliveries)
            self._spooled.append({})
            self._processes.append(process)
            self._home |= dict.fromkeys((node.name for node in nodes), ours)

    def begin(self, events: Sequence[Event]) -> None:
        """See Site.begin."""
        self._ask_all("begin", events)

    def deliver(self) -> None:
        """Begin Site.deliver everywhere, of all that was there on arrival, and come back at once."""
        for site, spooled in zip(self._deliveries, self._spooled, strict=True):
            self._ask(site, "deliver", spooled)

    def delivered(self) -> None:
        """Wait for the end of `deliver`."""
        for site in self._deliveries:
            self._answer(site)

    def set_out(self, events: Sequence[Event], until_ms: int) -> None:
        """Begin Site.follow everywhere and come back at once. A delivery may be under way if no agent ends
        meanwhile."""
        order = pickle.dumps(("follow", (events, until_ms)))
        for site in self._sites:
            self._tell(site, order)

    def arrive(self) -> None:
        """Wait for the end of `set_out`; it has to be waited for before anything but `deliver` is asked."""
        self._spooled = [self._answer(site) for site in self._sites]

    def deliver_alone(self, name: str) -> int:
        """See Site.deliver_alone."""
        site = self._home[name]
        self._ask(site, "deliver_alone", name)
        return int(self._answer(site))

    def scrape(self) -> dict[str, str]:
        """See Site.scrape; nothing may be under way."""
        return {name: page for pages in self._ask_all("scrape") for name, page in pages.items()}

    def finish(self, end_ms: int) -> Stocktaking:
        """All sites together."""
        books, closed = Books(), 0
        for taken in self._ask_all("finish", end_ms):
            books.merge(taken.books)
            closed += taken.closed
        return Stocktaking(books, closed)

    def close(self) -> None:
        """Let every site shut down in good order, and wait for it."""
        for site in self._sites:
            with suppress(OSError):
                site.send(None)
        for process, *sites in zip(self._processes, self._sites, self._deliveries, strict=True):
            process.join()
            for site in sites:
                site.close()

    def _ask_all(self, method: str, *arguments: object) -> list[Any]:
        for site in self._sites:
            self._ask(site, method, *arguments)
        return [self._answer(site) for site in self._sites]

    def _ask(self, site: Connection, method: str, *arguments: object) -> None:
        self._tell(site, pickle.dumps((method, arguments)))

    def _tell(self, site: Connection, order: bytes) -> None:
        try:
            site.send_bytes(order)
        except OSError as error:
            raise CrewLost("a process with agents has ended") from error

    def _answer(self, site: Connection) -> Any:
        try:
            value, failure = site.recv()
        except (EOFError, OSError) as error:
            raise CrewLost("a process with agents has ended") from error
        if failure:
            raise CrewLost(f"a process with agents failed: {failure}")
        return value


def _work(orders: Connection, deliveries: Connection, plot: Plot, log_file: Path | None) -> None:
    """One site's process: does as it is asked until it is told None, or the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business
    sys.setswitchinterval(_SWITCH_S)
    os.nice(NICE)
    # What is loaded by now stays, and hardly anything that follows lies in cycles.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    if log_file is not None:
        logging.basicConfig(filename=log_file, format="%(levelname)s %(name)s %(message)s")
    site = Site(plot)
    delivering = threading.Thread(target=_obey, args=(deliveries, site), name="deliveries", daemon=True)
    delivering.start()
    _obey(orders, site)
    site.close()


def _obey(orders: Connection, site: Site) -> None:
    with suppress(EOFError, OSError):
        while (order := orders.recv()) is not None:
            method, arguments = order
            try:
                orders.send((getattr(site, method)(*arguments), ""))
            except Exception as error:
                logging.getLogger("gputally.demo").exception("an order could not be carried out")
                orders.send((None, f"{type(error).__name__}: {error}"))
