"""Estimates what a question costs before it is answered, and says how to ask for less.

The estimate is GPU-hours of the span, times the dimensions that the answer is grouped by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

REPORT_WIDTH: Final = 6
"""How many groupings a statement or a report adds up, about."""
JOBS_WIDTH: Final = 4
"""Dimensions that name a job and who pays it."""


class Fleet(Protocol):
    """What of a ledger the estimate needs (accountant.ledger.protocols)."""

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int: ...


def estimate(fleet: Fleet, start_ms: int, end_ms: int, width: int = 1, clusters: Sequence[str] = ()) -> int:
    """GPU-hours that the question adds up. clusters: those it is limited to; all where it names none."""
    hours = sum(fleet.gpu_hours(start_ms, end_ms, cluster) for cluster in set(clusters) or (None,))
    return hours * max(1, width)


def refusal(fleet: Fleet, most: int, start_ms: int, end_ms: int, width: int = 1, clusters: Sequence[str] = ()) -> str:
    """Why a question is too large, with how to ask for less; "" where it is answered."""
    wanted = estimate(fleet, start_ms, end_ms, width, clusters)
    if wanted <= most:
        return ""
    days, hours = ((end_ms - start_ms) * most // wanted // unit for unit in (MS_PER_DAY, MS_PER_HOUR))
    less = [f"about {days} days" if days > 1 else f"about {max(1, hours)} hours"]
    less += [f"fewer than {width} dimensions"] * (width > 1) + ["one cluster"] * (not clusters)
    times = f" (times {width} dimensions)" if width > 1 else ""
    return f"{wanted} GPU-hours to add up{times}, and {most} are the most: ask for {', or for '.join(less)}"
