"""How long a test waits for what has its own time, a process or a thread: longer where many others wait for a turn too.

A fixed time is either so long that a hang is found late, or too short on a busy machine; and a process
that was not given its turn has not failed. What can have a virtual clock is not waited for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

CALM_S = 30.0
"""On a machine with a core for everyone."""
MOST_S = 600.0
PAUSE_S = 0.02
"""Between two looks."""


def patience_s(calm_s: float = CALM_S) -> float:
    """Seconds of wall clock in which `calm_s` of an idle machine's work can be expected."""
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(calm_s * max(1.0, crowd), MOST_S)


class Deadline:
    """Begins now. A crowd that comes meanwhile moves it."""

    def __init__(self, calm_s: float = CALM_S) -> None:
        self._began = time.monotonic()
        self._calm_s = self._most_s = calm_s

    @property
    def passed(self) -> bool:
        self._most_s = max(self._most_s, patience_s(self._calm_s))
        return time.monotonic() - self._began > self._most_s

    def __str__(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s (allowed {self._most_s:.0f} s)"


def until(met: Callable[[], Any], otherwise: str | Callable[[], str], calm_s: float = CALM_S) -> Any:
    """Look again and again: what `met` found, as soon as it is true. Fails with `otherwise` when patience ends."""
    deadline, pause = Deadline(calm_s), threading.Event()
    while not (found := met()):
        if deadline.passed:
            pytest.fail(f"{otherwise if isinstance(otherwise, str) else otherwise()}\nwaited {deadline}")
        pause.wait(PAUSE_S)
    return found
