"""A day unlike the days before: a team that suddenly holds, or leaves idle, far more GPU time than it used to. Pure.

The usual is the median of those of the four weeks before on which the team held anything, its spread the median
absolute deviation, scaled so that it equals the standard deviation of a normal distribution (Leys et al., "Detecting
outliers", J. Exp. Soc. Psychology 49, 2013). One wild day in those weeks moves neither. A day without use says nothing
of how much a team uses when it does: counted as 0 it would make every day odd for a ledger, or a team, of two weeks,
and for who works on some days of the week only. Less than usual is no cause for a notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import median
from typing import Final, Literal

from agent.units import US_PER_HOUR

DAYS: Final = 28
FEWEST_DAYS: Final = 8
"""Days of use, below which nothing is usual yet."""
_SPREADS: Final = 4.0
_NORMAL: Final = 1.4826
_LEAST_RATIO: Final = 1.5
LEAST_US: Final = 24 * US_PER_HOUR
"""How far above the usual a day has to be at least."""

What = Literal["held", "idle"]


@dataclass(frozen=True, slots=True)
class Use:
    """GPU-µs of a team on one day."""

    held_us: int = 0
    idle_us: int = 0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """usual_us: the median of the days before."""

    team: str
    day: date
    what: What
    value_us: int
    usual_us: int


def unusual(before: Sequence[int], value: int) -> int | None:
    """The usual value of the days of use before, where this one is far above it; else None."""
    if len(before) < FEWEST_DAYS:
        return None
    usual = median(before)
    spread = _NORMAL * median(abs(one - usual) for one in before)
    limit = max(usual + _SPREADS * spread, usual * _LEAST_RATIO, usual + LEAST_US)
    return round(usual) if value > limit else None


def of_day(days: Mapping[str, Mapping[date, Use]], day: date) -> list[Anomaly]:
    """Of every team, by name. days: per team what each day had; a day without an entry had nothing."""
    past = {day - timedelta(days=back) for back in range(1, DAYS + 1)}
    found: list[Anomaly] = []
    for team in sorted(days):
        by_day = days[team]
        now = by_day.get(day, Use())
        before = [use for one, use in sorted(by_day.items()) if one in past and use.held_us]
        sides: tuple[tuple[What, int, list[int]], ...] = (
            ("held", now.held_us, [one.held_us for one in before]),
            ("idle", now.idle_us, [one.idle_us for one in before]),
        )
        for what, value, earlier in sides:
            usual = unusual(earlier, value)
            if usual is not None:
                found.append(Anomaly(team, day, what, value, usual))
    return found
