"""Defines units of time, and the width of the finest rollup."""

from __future__ import annotations

US_PER_MS = 1_000
US_PER_S = 1_000_000
US_PER_HOUR = 3_600_000_000
MS_PER_SECOND = 1_000
MS_PER_MINUTE = 60_000
MS_PER_HOUR = 3_600_000
MS_PER_DAY = 86_400_000
BUCKET_MS = 15 * MS_PER_MINUTE
"""Width of the finest rollup. The UTC offset of every time zone in use is a multiple of it."""
