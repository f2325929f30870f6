"""Utilisation samples integrated into a counter of busy microseconds.

A driver keeps a short ring of (timestamp, percent) samples and forgets them after some ten seconds, so
a gauge read now and then misses most of what happened. Here every sample stands for the time since
the one before it. What was missed is counted as a gap and never guessed: the counter stands still over it.
Invariants: the counter never decreases and never grows faster than the reader's time.
Pure: integers only, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median_low

from agent.units import US_PER_MS

LATE_US = 3_000_000
"""How late the samples of a busy device may come. Source: open-gpu-kernel-modules, kernel_gsp.c: once a second."""
RATE_HOLDS_US = 5_000_000
"""How long a rate may stand for the time around it, where a driver has no ring."""
_PERIODS_BEFORE_GAP = 3
_FALLBACK_PERIOD_US = 1_000_000  # slowest sampling NVML documents; used until a period was seen
_PERCENT = 100


class BusyCounter:
    """The busy time of one device since it was first read. Timestamps may have any origin."""

    def __init__(self, *, gaps: int = 0) -> None:
        self.last_seen_us = 0
        """Newest timestamp the driver returned: what to ask for next (0: everything)."""
        self.gaps = gaps
        """How often samples were missing."""
        self.period_us: int | None = None
        """Time between two samples of the driver; None until it was seen."""
        self._void: frozenset[int] = frozenset()
        """Timestamps that are counted or given up, although they are later than `last_seen_us`."""
        self._percent_us = 0
        self._reported_us = 0
        self._covered_us: int | None = None
        self._waiting_us = 0
        self._at_ms: int | None = None

    @property
    def value_us(self) -> int:
        """What `take` returned last."""
        return self._reported_us

    def take(self, at_ms: int, samples: Sequence[tuple[int, int]] | None, rate: int) -> int:
        """Account for the time since the last call and return the counter in microseconds.

        samples: (timestamp in microseconds, percent) newer than `last_seen_us`, in any order; empty
        when the driver has none, None where it keeps none at all. rate: percent at this moment: it tells
        an idle device from samples that are late, and stands in where none are kept."""
        elapsed_us = 0 if self._at_ms is None else (at_ms - self._at_ms) * US_PER_MS
        limit_us = self._reported_us + elapsed_us + self._waiting_us
        if samples is None:
            self._by_rate(elapsed_us, rate)
        else:
            ordered = sorted(
                s for s in samples if 0 <= s[1] <= _PERCENT and s[0] > self.last_seen_us and s[0] not in self._void
            )
            if not ordered:
                self._without_samples(elapsed_us, rate)
            else:
                if self._at_ms is not None:
                    self._integrate(ordered, elapsed_us + self._waiting_us)
                self.last_seen_us = self._covered_us = ordered[-1][0]
                self._waiting_us = 0
        self._at_ms = at_ms
        # The newest sample may be a little younger or older than the last time; what is ahead waits.
        self._reported_us = min(self._percent_us // _PERCENT, limit_us)
        return self._reported_us

    def lose(self, at_ms: int) -> None:
        """It is not known what the device did since the last call; the next one counts from here on."""
        self._at_ms, self._covered_us, self._waiting_us = at_ms, None, 0

    def start_over(self, at_ms: int, known: Iterable[int]) -> None:
        """The clock that dates the samples was set back: what was done since the last call is a gap, and samples count
        from here on. known: the timestamps of all samples that the driver has now."""
        self.lose(at_ms)
        self._void, self.last_seen_us = frozenset(known), 0
        self.gaps += 1

    def _by_rate(self, elapsed_us: int, rate: int) -> None:
        if elapsed_us > RATE_HOLDS_US:
            self.gaps += 1
        else:
            self._percent_us += rate * elapsed_us

    def _without_samples(self, elapsed_us: int, rate: int) -> None:
        """An idle device has none. A busy one has them later, unless they are lost."""
        if not rate and not self._waiting_us:
            if self._covered_us is not None:
                self._covered_us += elapsed_us
            return
        self._waiting_us += elapsed_us
        if self._waiting_us > LATE_US:
            self.gaps += 1
            if self._covered_us is not None:
                self._covered_us += self._waiting_us
            self._waiting_us = 0

    def _integrate(self, ordered: Sequence[tuple[int, int]], elapsed_us: int) -> None:
        covered = self._covered_us
        if covered is None:  # idle since the first reading: older samples belong to before it
            covered = ordered[-1][0] - elapsed_us
        steps = [b[0] - a[0] for a, b in pairwise(ordered)]
        if steps:
            self.period_us = median_low(steps)
        period_us = self.period_us or _FALLBACK_PERIOD_US
        missed = False
        for timestamp, percent in ordered:
            step = timestamp - covered
            if step <= 0:
                continue
            if step > _PERIODS_BEFORE_GAP * period_us:
                missed = True
                step = period_us
            self._percent_us += percent * step
            covered = timestamp
        self.gaps += missed
