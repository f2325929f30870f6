"""The driver's energy counter, continued over a wrap; what no GPU can have drawn is no reading of it.

Pure: integers only, no clock, no I/O.
"""

from __future__ import annotations

RANGE_MJ = 1 << 32
"""Where a counter of 32 bits wraps; NVML's type is wider, what fills it need not be."""
MAX_POWER_MW = 4_000_000
"""More than any GPU draws: a figure counts, and a smaller one is a wrap, only if this explains it."""
_SHORTEST_MS = 1_000
"""The driver renews the figure now and then: of a shorter time it may say that of a longer one."""
_MICROJOULES_PER_MILLIJOULE = 1_000


class EnergyCounter:
    """Microjoules since the driver's own origin. NVML counts millijoules since the driver was loaded."""

    def __init__(self) -> None:
        self.value_uj = 0
        self._last: tuple[int, int] | None = None

    def take(self, at_ms: int, millijoules: int) -> bool:
        """Take a reading over; False: the driver's counter began anew, and so does `value_uj`."""
        before, self._last = self._last, (at_ms, millijoules)
        gained_mj = self._gained(before, at_ms, millijoules)
        if gained_mj is None:
            self.value_uj = millijoules * _MICROJOULES_PER_MILLIJOULE
            return before is None
        self.value_uj += gained_mj * _MICROJOULES_PER_MILLIJOULE
        return True

    @staticmethod
    def _gained(before: tuple[int, int] | None, at_ms: int, millijoules: int) -> int | None:
        if before is None:
            return None
        gained_mj = millijoules - before[1]
        if gained_mj < 0:
            gained_mj += RANGE_MJ
        plausible_uj = MAX_POWER_MW * max(at_ms - before[0], _SHORTEST_MS)  # mW x ms = uJ
        return gained_mj if 0 <= gained_mj * _MICROJOULES_PER_MILLIJOULE <= plausible_uj else None
