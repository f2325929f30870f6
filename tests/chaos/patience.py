"""How long a test waits for a process: longer where many others wait for a turn too.

A fixed time is either so long that a hang is found late, or too short on a busy machine; and a process
that was not given its turn has not failed.
"""

from __future__ import annotations

import os
import time

CALM_S = 30.0
"""On a machine with a core for everyone."""
MOST_S = 600.0


def patience_s() -> float:
    """Seconds of wall clock in which `CALM_S` of an idle machine's work can be expected."""
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(CALM_S * max(1.0, crowd), MOST_S)


class Deadline:
    """Begins now. A crowd that comes meanwhile moves it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._most_s = CALM_S

    @property
    def passed(self) -> bool:
        self._most_s = max(self._most_s, patience_s())
        return time.monotonic() - self._began > self._most_s

    def __str__(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s (allowed {self._most_s:.0f} s)"
