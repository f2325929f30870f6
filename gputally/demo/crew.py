"""Sites in processes of their own, so that the agents share an interpreter neither with the accountant nor all with
each other.

All sites are asked at once and awaited together. Each can be asked two things at once: while the agents deliver one
hour, their machines may live the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairshare.simulator.events import Event
from gputally.demo.letters import SITE, Plot, Stocktaking
from gputally.demo.truth import Books
from gputally.demo.workers import Worker, order

PROCESSES = 2
NICE = 5
"""They have time until the next hour; who books this one has not."""
_LIFE, _DELIVERIES = 0, 1
"""The pipes of a site: what happens on it, and what its agents deliver meanwhile."""


class Crew:
    """Sites for the nodes of a plot. They load what they need from construction on, and stand from `settle` on.

    log_file: where their agents' warnings go."""

    def __init__(self, log_file: Path | None) -> None:
        self._sites = [
            Worker("a process with agents", SITE, pipes=2, nice=NICE, log_file=log_file) for _ in range(PROCESSES)
        ]
        self._home: dict[str, Worker] = {}
        self._spooled: list[dict[str, int]] = [{} for _ in self._sites]
        """Of each site: what it can deliver, as it said when it last arrived."""

    def settle(self, plot: Plot, scratch: Path | None = None) -> None:
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
