"""The machine's clock, unless it was set to something that the accountant's clock contradicts.

An hour, a day or a year that a clock was wrong for a minute dates nothing: while the accountant's answers show a new
wall time to be wrong, time goes on with the monotonic clock. Where they agree with it, or are unknown, it is taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE

log = logging.getLogger("gputally.base.clock")

SET_MS: Final = 5 * MS_PER_MINUTE
"""A wall clock that moved by more than this against the monotonic one is asked about; smaller steps are taken."""

Opinion = Callable[[int], bool | None]
"""Whether a line (wall time less monotonic time) is right; None: it is unknown."""


class SteadyClock:
    """`gputally.base.clock.Clock`. Thread-safe. opinion: may be set later, by who hears the accountant."""

    def __init__(self, inner: Clock, opinion: Opinion = lambda _: None) -> None:
        self.opinion = opinion
        self._inner = inner
        self._lock = threading.Lock()
        self._line_ms = self._wall_line()
        self._held_ms: int | None = None
        """The line that is not taken."""

    def wall_ms(self) -> int:
        with self._lock:
            line = self._wall_line()
            if abs(line - self._line_ms) > SET_MS and self.opinion(line) is False:
                if self._held_ms is None:
                    log.error("the clock was set and the accountant's disagrees", extra={"by_ms": line - self._line_ms})
                self._held_ms = line
                return self._line_ms + self._inner.monotonic_ms()
            if self._held_ms is not None:
                self._held_ms = None
                log.warning("the clock is believed again")
            self._line_ms = line
            return line + self._inner.monotonic_ms()

    def ask(self, opinion: Opinion, earlier_ms: int | None) -> None:
        """Ask from now on. earlier_ms: the line of an earlier process of this boot, to go on with where the wall clock
        is contradicted and it is not."""
        with self._lock:
            self.opinion = opinion
            if earlier_ms is not None and opinion(self._wall_line()) is False and opinion(earlier_ms):
                self._line_ms = earlier_ms

    def monotonic_ms(self) -> int:
        return self._inner.monotonic_ms()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return self._inner.wait(seconds, stop)

    @property
    def held(self) -> bool:
        """Whether the wall clock was not taken when it was asked last."""
        return self._held_ms is not None

    def _wall_line(self) -> int:
        return self._inner.wall_ms() - self._inner.monotonic_ms()
