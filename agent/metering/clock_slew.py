"""Maps monotonic time to wall-clock time, slewing at a bounded rate.

Every instant of the meter comes from here. Time advances with the monotonic clock, so durations are
real durations, and is slewed towards the wall clock at a bounded rate. A wall clock that was set far
ahead is adopted at once; one that was set back is approached by running slow, so spans never overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

SLEW_PPM = 500
"""How much faster or slower than the monotonic clock the timeline may run. Source: the maximum rate
of adjtime(3) and of NTP's clock discipline."""

FAST_SLEW_PPM = 100_000
"""The bound while a step back is being worked off: an hour takes ten."""

STEP_MS = MS_PER_SECOND
"""A wall clock that moved by more than this against the timeline was set, not disciplined."""

MAX_STEPS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """The wall clock was set: at `at_ms` of the timeline it read `offset_ms` more than expected."""

    at_ms: int
    offset_ms: int


class Timeline:
    """`now_ms` is non-decreasing. Between two calls it advances by the monotonic duration, give or
    take the slew (SLEW_PPM; FAST_SLEW_PPM after a step back), except where a step forwards is adopted."""

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
        """How far steps forwards were adopted, in all: time on this line that did not pass."""
        return self._leapt_us // 1_000

    @property
    def offset_ms(self) -> int:
        """How far the wall clock was ahead of the timeline at the last call."""
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
