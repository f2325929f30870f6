"""Closes the driver for some time after a signal, SIGUSR1.

The signal is for a person or a script that can set neither the node's labels nor the release file. The driver is closed
at the next sample, and opened again after some time, so that a forgotten signal does not end the metering."""

from __future__ import annotations

import logging

from agent.core.readings import NodeSnapshot, Source
from agent.gpu_readers.chosen import GpuReaders
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

log = logging.getLogger("agent.gpu_readers.release_by_signal")

BY_SIGNAL = "signal"


class ReleasableSource:
    """An `agent.core.readings.Source` around another one.

    hold_s: how long one signal keeps the driver closed."""

    def __init__(self, source: Source, gpus: GpuReaders, clock: Clock, hold_s: float) -> None:
        self._source = source
        self._gpus = gpus
        self._clock = clock
        self._hold_ms = round(hold_s * MS_PER_SECOND)
        self._until_ms: int | None = None

    def close_driver(self) -> None:
        """Close the driver at the next sample. A further call starts the time again. Safe in a signal handler."""
        self._until_ms = self._clock.monotonic_ms() + self._hold_ms
        self._gpus.release(BY_SIGNAL)

    def snapshot(self, at_ms: int) -> NodeSnapshot:
        until_ms = self._until_ms
        if until_ms is not None and self._clock.monotonic_ms() >= until_ms:
            self._until_ms = None
            self._gpus.reacquire(BY_SIGNAL)
            log.info("driver opened again after a signal")
        return self._source.snapshot(at_ms)

    def close(self) -> None:
        self._source.close()
