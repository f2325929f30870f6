"""Keeps the agent's time: that of the machine's clock unless the accountant contradicts it.

If the machine's clock jumps by an hour or a year and is corrected a minute later, no record may carry the wrong date.
While the accountant's answers contradict a new wall time, time continues with the monotonic clock. If they agree with
it, or are unknown, the new wall time is used.

Every time in the meter comes from here. Time advances with the monotonic clock, so durations are real durations. It is
moved towards the wall clock at a bounded rate. A wall clock that was set far ahead is adopted at once. A wall clock
that was set back is approached by running slow, so spans never overlap."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("gputally.base.clock")

SET_MS: Final = 5 * MS_PER_MINUTE
"""A wall clock that moved by more than this against the monotonic one is checked with the accountant; smaller steps are
accepted."""

Opinion = Callable[[int], bool | None]
"""Whether a clock line (wall time minus monotonic time) is right; None if unknown."""


class SteadyClock:
    """A `gputally.base.clock.Clock`. Thread-safe. opinion: may be set later, by the code that talks to the
    accountant."""

    def __init__(self, inner: Clock, opinion: Opinion = lambda _: None) -> None:
        self.opinion = opinion
        self._inner = inner
        self._lock = threading.Lock()
        self._line_ms = self._wall_line()
        self._held_ms: int | None = None
        """Wall time minus monotonic time of a wall clock that is not accepted; None if the wall clock is accepted."""

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
        """Check the wall clock with `opinion` from now on. earlier_ms: wall time minus monotonic time, as an earlier
        agent process of this boot stored it. It replaces the present difference if `opinion` rejects the wall clock and
        accepts this one."""
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
        """Return whether the wall clock was rejected at the last check."""
        return self._held_ms is not None

    def _wall_line(self) -> int:
        return self._inner.wall_ms() - self._inner.monotonic_ms()


SLEW_PPM = 500
"""How much faster or slower than the monotonic clock the timeline may run. Source: the maximum rate
of adjtime(3) and of NTP's clock discipline."""

FAST_SLEW_PPM = 100_000
"""The bound while a step back is being corrected: an hour takes ten."""

STEP_MS = MS_PER_SECOND
"""A wall clock that moved by more than this against the timeline was set, not disciplined."""

MAX_STEPS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the wall clock: at `at_ms` of the timeline it read `offset_ms` more than expected."""

    at_ms: int
    offset_ms: int


class Timeline:
    """A timeline whose `now_ms` never decreases. Between two calls it advances by the monotonic duration, plus or minus
    the slew (SLEW_PPM; FAST_SLEW_PPM after a step back), except when a step forwards is adopted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic_ms = clock.monotonic_ms()
        self._now_us = clock.wall_ms() * 1_000
        self._offset_us = 0
        self._leapt_us = 0
        self._steps: list[Step] = []
        self._step_count = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """The latest steps of the wall clock, oldest first."""
        return tuple(self._steps)

    @property
    def step_count(self) -> int:
        return self._step_count

    @property
    def leapt_ms(self) -> int:
        """Return by how much steps forwards were adopted in total: time on the timeline that did not pass."""
        return self._leapt_us // 1_000

    @property
    def offset_ms(self) -> int:
        """Return how far the wall clock was ahead of the timeline at the last call."""
        return self._offset_us // 1_000

    def now_ms(self) -> int:
        """UTC milliseconds now."""
        monotonic_ms = self._clock.monotonic_ms()
        elapsed_us = max(monotonic_ms - self._monotonic_ms, 0) * 1_000
        self._monotonic_ms = max(monotonic_ms, self._monotonic_ms)
        expected_us = self._now_us + elapsed_us
        offset_us = self._clock.wall_ms() * 1_000 - expected_us
        moved_us = offset_us - self._offset_us
        ahead = offset_us > STEP_MS * 1_000
        if ahead or abs(moved_us) > STEP_MS * 1_000:
            self._record(Step(expected_us // 1_000, moved_us // 1_000))
        if ahead:
            self._now_us = expected_us + offset_us
            self._leapt_us += offset_us
        else:
            rate = FAST_SLEW_PPM if offset_us < -STEP_MS * 1_000 else SLEW_PPM
            bound = elapsed_us * rate // 1_000_000
            self._now_us = expected_us + max(-bound, min(bound, offset_us))
        self._offset_us = offset_us - (self._now_us - expected_us)
        return self._now_us // 1_000

    def _record(self, step: Step) -> None:
        self._step_count += 1
        self._steps.append(step)
        del self._steps[:-MAX_STEPS]
