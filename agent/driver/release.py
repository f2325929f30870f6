"""Letting go of the driver for a while, when a signal asks for it.

SIGUSR1 is for whoever reconfigures a machine by hand or by a script of their own, without labels and without
access to the spool folder: the driver is free with the next sample and is taken again by itself, so that a
forgotten signal does not end the metering.
"""

from __future__ import annotations

import logging
from typing import Protocol

from agent.clock import Clock
from agent.model import Snapshot
from agent.units import MS_PER_SECOND

log = logging.getLogger("agent.driver.release")

BY_SIGNAL = "signal"


class Holding(Protocol):
    """A source that holds the driver: `agent.node.NodeSource`."""

    def snapshot(self, at_ms: int) -> Snapshot: ...
    def release(self, why: str) -> None: ...
    def reacquire(self, why: str) -> None: ...
    def close(self) -> None: ...


class Releasable:
    """`agent.loop.Source` around another one. hold_s: how long one request lets go."""

    def __init__(self, source: Holding, clock: Clock, hold_s: float) -> None:
        self._source = source
        self._clock = clock
        self._hold_ms = round(hold_s * MS_PER_SECOND)
        self._until_ms: int | None = None

    def let_go(self) -> None:
        """Free the driver with the next sample; a further request starts the time anew. Safe in a signal handler."""
        self._until_ms = self._clock.monotonic_ms() + self._hold_ms
        self._source.release(BY_SIGNAL)

    def snapshot(self, at_ms: int) -> Snapshot:
        """See agent.loop.Source."""
        until_ms = self._until_ms
        if until_ms is not None and self._clock.monotonic_ms() >= until_ms:
            self._until_ms = None
            self._source.reacquire(BY_SIGNAL)
            log.info("driver taken again after a signal")
        return self._source.snapshot(at_ms)

    def close(self) -> None:
        """See agent.loop.Source."""
        self._source.close()
