"""Decides when the newest record is too old to speak of the present, and says how old it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accountant.core.periods import utc
from accountant.reports.report_text import duration
from gputally.base.units import BUCKET_MS

OLD_MS: Final = 3 * BUCKET_MS
"""A few intervals of the longest length that agents may have, a quarter of an hour."""


def is_old(newest_ms: int, now_ms: int) -> bool:
    """Whether there are records and the newest says nothing about the present. newest_ms: 0 where there is none."""
    return 0 < newest_ms < now_ms - OLD_MS


def silent_clusters(newest_by_cluster: Mapping[str, int], now_ms: int) -> dict[str, int]:
    """The clusters that stopped reporting while others go on: the end of the newest record of each, by name."""
    silent = {name: newest_ms for name, newest_ms in sorted(newest_by_cluster.items()) if is_old(newest_ms, now_ms)}
    return silent if len(silent) < len(newest_by_cluster) else {}


def silence_note(newest_by_cluster: Mapping[str, int], now_ms: int) -> str:
    """Names the clusters that stopped reporting while others go on; else ""."""
    return "; ".join(
        f"cluster {name!r} has not reported for {duration(now_ms - newest_ms)} (since {utc(newest_ms)})"
        for name, newest_ms in silent_clusters(newest_by_cluster, now_ms).items()
    )


def age_note(newest_ms: int, now_ms: int) -> str:
    """How old the newest record is, where it is old; else ""."""
    if not is_old(newest_ms, now_ms):
        return ""
    return f"the newest record is {duration(now_ms - newest_ms)} old ({utc(newest_ms)})"
