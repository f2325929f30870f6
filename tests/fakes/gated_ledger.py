"""A ledger whose reads wait until a test lets them go on, or until they are called off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gputally.base import called_off


class Gate:
    """Stops every read of the ledger until it opens. inside: how many reads wait in it."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self.inside = 0

    def pass_through(self) -> None:
        with self._lock:
            self.inside += 1
        stop = threading.Event()
        try:
            with called_off.stoppable(stop.set):
                while not (self._opened.wait(0.01) or stop.is_set()):
                    pass
        finally:
            with self._lock:
                self.inside -= 1

    def open(self) -> None:
        self._opened.set()


class GatedLedger:
    """A ledger whose snapshots wait at the gate."""

    def __init__(self, ledger: Any, gate: Gate) -> None:
        self._ledger, self._gate = ledger, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    @contextmanager
    def moment(self, *span: int) -> Iterator[Any]:
        self._gate.pass_through()
        with self._ledger.moment(*span) as moment:
            yield moment
