"""Waits for a process or a thread, longer on a busy machine.

A fixed limit is either so long that a hang is found late, or too short on a busy machine. The limits here therefore
grow with the machine's load. Code that can use a virtual clock is tested with one, without waiting."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

CALM_S = 30.0
"""The usual limit on an idle machine."""
MOST_S = 600.0
PAUSE_S = 0.02
"""Time between two checks of a condition."""


def patience_s(calm_s: float = CALM_S) -> float:
    """Return how long a test waits for work that takes at most `calm_s` on an idle machine."""
    load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(calm_s * max(1.0, load_per_core), MOST_S)


class Deadline:
    """A limit that starts now, and that moves later if the load of the machine grows."""

    def __init__(self, calm_s: float = CALM_S) -> None:
        self._began = time.monotonic()
        self._calm_s = self._most_s = calm_s

    @property
    def since_s(self) -> float:
        return time.monotonic() - self._began

    def extend(self, calm_s: float) -> None:
        """Allow `calm_s` more on an idle machine."""
        self._calm_s += calm_s

    @property
    def passed(self) -> bool:
        self._most_s = max(self._most_s, patience_s(self._calm_s))
        return self.since_s > self._most_s

    def __str__(self) -> str:
        return f"{self.since_s:.0f} s (allowed {self._most_s:.0f} s)"


def until(met: Callable[[], Any], otherwise: str | Callable[[], str], calm_s: float = CALM_S) -> Any:
    """Call `met` until its result is true, and return it. At the deadline the test fails with the text `otherwise`."""
    deadline, pause = Deadline(calm_s), threading.Event()
    while not (found := met()):
        if deadline.passed:
            pytest.fail(f"{otherwise if isinstance(otherwise, str) else otherwise()}\nwaited {deadline}")
        pause.wait(PAUSE_S)
    return found
