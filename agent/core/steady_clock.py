"""Defines the two clocks of the agent: `SteadyClock` rejects a wrong wall clock, `SteadyTimeline` never runs backwards.

If the machine's clock jumps by an hour or a year and is corrected a minute later, no record may carry the wrong date.
After such a jump, `SteadyClock` compares the new wall time with the time in the accountant's answers. If the two
contradict each other, `SteadyClock` continues with the monotonic clock. If they agree, or if the accountant has not
answered in this boot, `SteadyClock` uses the new wall time.

Every time in the meter comes from `SteadyTimeline`. It advances with the monotonic clock, so durations are real
durations. It approaches the wall clock at a bounded rate. It adopts at once a wall clock that was set ahead by more
than `STEP_MS`. If the wall clock was set back, `SteadyTimeline` runs slow until the two agree, so spans never overlap.

The origin of a wall clock is the wall time at which the monotonic clock was 0. Only setting the wall clock moves it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from gputally.base.clock import Clock
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.core.steady_clock")

SET_MS: Final = 5 * MS_PER_MINUTE
"""`SteadyClock` checks a wall clock that moved by more than this against the monotonic clock; it accepts smaller steps
unchecked."""

OriginCheck = Callable[[int], bool | None]
"""Returns True if an origin agrees with the accountant's clock, and None if the accountant's clock is unknown."""


class ClockSetBack(AgentError):
    """The wall clock was far ahead and is right now. Only a new process can correct the times in the spool and continue
    with the right time."""


class SteadyClock:
    """A `gputally.base.clock.Clock` that rejects a wall clock that was set to a wrong time. Thread-safe.

    check: compares an origin with the accountant's clock. `check_with` replaces it once the accountant's clock can be
        known."""

    def __init__(self, inner: Clock, check: OriginCheck = lambda _: None) -> None:
        self._check = check
        self._inner = inner
        self._lock = threading.Lock()
        self._origin_ms = self._wall_origin_ms()
        self._rejected = False

    def wall_ms(self) -> int:
        with self._lock:
            origin_ms = self._wall_origin_ms()
            if abs(origin_ms - self._origin_ms) > SET_MS and self._check(origin_ms) is False:
                if not self._rejected:
                    log.error(
                        "the wall clock was set and contradicts the accountant's clock: time continues without it",
                        extra={"by_ms": origin_ms - self._origin_ms},
                    )
                self._rejected = True
            else:
                if self._rejected:
                    log.warning("the wall clock is used again")
                self._rejected = False
                self._origin_ms = origin_ms
            return self._origin_ms + self._inner.monotonic_ms()

    def check_with(self, check: OriginCheck, earlier_ms: int | None) -> None:
        """Check the wall clock with `check` from now on.

        earlier_ms: the origin that an earlier agent process of this boot stored; None if there is none. It replaces the
            present origin if `check` rejects the present one and accepts `earlier_ms`."""
        with self._lock:
            self._check = check
            if earlier_ms is not None and check(self._wall_origin_ms()) is False and check(earlier_ms):
                self._origin_ms = earlier_ms

    def monotonic_ms(self) -> int:
        return self._inner.monotonic_ms()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return self._inner.wait(seconds, stop)

    @property
    def rejected(self) -> bool:
        """True while the wall clock is rejected, as of the last call of `wall_ms`."""
        return self._rejected

    def _wall_origin_ms(self) -> int:
        return self._inner.wall_ms() - self._inner.monotonic_ms()


SLEW_PPM = 500
"""How much faster or slower than the monotonic clock the timeline runs at most. Source: the maximum rate of adjtime(3)
and of NTP's clock discipline."""

FAST_SLEW_PPM = 100_000
"""The bound while the timeline corrects a step back: correcting one hour takes ten hours."""

STEP_MS = MS_PER_SECOND
"""A wall clock that moved by more than this against the timeline was set, not adjusted by NTP."""


class SteadyTimeline:
    """A timeline whose `now_ms` never decreases. Between two calls it advances by the monotonic duration, plus or minus
    the slew (SLEW_PPM; FAST_SLEW_PPM after a step back), except when it adopts a step forwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic_ms = clock.monotonic_ms()
        self._now_us = clock.wall_ms() * 1_000
        self._offset_us = 0
        self._skipped_us = 0
        self.step_count = 0
        """How often the wall clock was set."""
        self.last_step_ms = 0
        """By how much the wall clock was last set; negative for a step back."""

    @property
    def skipped_ms(self) -> int:
        """The sum of all steps forwards that the timeline adopted. This time did not really pass."""
        return self._skipped_us // 1_000

    @property
    def offset_ms(self) -> int:
        """How far the wall clock was ahead of the timeline at the last call of `now_ms`."""
        return self._offset_us // 1_000

    def now_ms(self) -> int:
        """Return the UTC time in milliseconds."""
        monotonic_ms = self._clock.monotonic_ms()
        elapsed_us = max(monotonic_ms - self._monotonic_ms, 0) * 1_000
        self._monotonic_ms = max(monotonic_ms, self._monotonic_ms)
        expected_us = self._now_us + elapsed_us
        offset_us = self._clock.wall_ms() * 1_000 - expected_us
        change_us = offset_us - self._offset_us
        ahead = offset_us > STEP_MS * 1_000
        if ahead or abs(change_us) > STEP_MS * 1_000:
            self.step_count += 1
            self.last_step_ms = change_us // 1_000
        if ahead:
            self._now_us = expected_us + offset_us
            self._skipped_us += offset_us
        else:
            rate = FAST_SLEW_PPM if offset_us < -STEP_MS * 1_000 else SLEW_PPM
            bound = elapsed_us * rate // 1_000_000
            self._now_us = expected_us + max(-bound, min(bound, offset_us))
        self._offset_us = offset_us - (self._now_us - expected_us)
        return self._now_us // 1_000
