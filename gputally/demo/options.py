"""The options of the demo, which the command line needs before any library is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DAYS = 31
"""Default length: the second half of October, which is closed and has an invoice, and the first half of November."""
MOST_DAYS = 366


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run. days: None for DAYS, or the length of the trace."""

    days: int | None = None
    interval_s: int = 900
    seed: int = 1
    trace: Path | None = None
