"""Defines the clock that every program takes as an argument, and a virtual clock for tests and the demo.

A clock has two readings: wall time (UTC, which an administrator can set) and monotonic time (which never goes back and
has an arbitrary origin). The demo and the tests move a `VirtualClock` themselves, so they do not sleep."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A clock with wall time and monotonic time."""

    def wall_ms(self) -> int:
        """Return UTC milliseconds since 1970-01-01."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds of steady time since an arbitrary origin; it also advances while the machine is
        suspended."""
        ...

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Wait `seconds`, or until `stop` is set. Return True if `stop` is set."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds)


class VirtualClock:
    """A clock that advances only when a method moves it.

    `wait` advances the clock and returns at once, so a loop written for real time does not sleep in a test. `step_wall`
    models an administrator (or NTP) that sets the wall clock; monotonic time does not change."""

    def __init__(self, wall_ms: int, monotonic_ms: int = 0) -> None:
        self._lock = threading.Lock()
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, milliseconds: int) -> None:
        """Let time pass on both clocks. Raises ValueError for a negative step."""
        if milliseconds < 0:
            raise ValueError(f"a clock does not advance by a negative time: {milliseconds} ms")
        with self._lock:
            self._wall_ms += milliseconds
            self._monotonic_ms += milliseconds

    def advance_to(self, wall_ms: int) -> None:
        """Let time pass until the wall clock reads `wall_ms`."""
        self.advance(wall_ms - self._wall_ms)

    def step_wall(self, milliseconds: int) -> None:
        """Set the wall clock forwards or backwards; no time passes."""
        with self._lock:
            self._wall_ms += milliseconds

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        if stop.is_set():
            return True
        self.advance(round(seconds * 1000))
        return stop.is_set()
