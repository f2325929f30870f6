"""A day unlike the days before: a team that suddenly holds, or leaves idle, far more GPU time than it used to. Pure.

The usual is the median of those of the four weeks before on which the team held anything, its spread the median
absolute deviation, scaled so that it equals the standard deviation of a normal distribution (Leys et al., "Detecting
outliers", J. Exp. Soc. Psychology 49, 2013). One wild day in those weeks moves neither. A day without use says nothing
of how much a team uses when it does: counted as 0 it would make every day odd for a ledger, or a team, of two weeks,
and for who works on some days of the week only. Nor is a Saturday odd after two Saturdays with as much: that is a
rhythm. Less than usual is no cause for a notice.
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
LOOKED_AGAIN: Final = 4
"""Days that are looked at every morning: agents may have told late of the older ones, or the accountant was away."""
_WEEK: Final = 7
_RHYTHM: Final = 2
"""On so many of the same weekdays there was as much: a rhythm."""
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
        before = {one: use for one, use in sorted(by_day.items()) if one in past and use.held_us}
        sides: tuple[tuple[What, int, dict[date, int]], ...] = (
            ("held", now.held_us, {one: use.held_us for one, use in before.items()}),
            ("idle", now.idle_us, {one: use.idle_us for one, use in before.items()}),
        )
        for what, value, earlier in sides:
            usual = unusual(list(earlier.values()), value)
            if usual is not None and not _weekly(earlier, day, value):
                found.append(Anomaly(team, day, what, value, usual))
    return found


def _weekly(earlier: Mapping[date, int], day: date, value: int) -> bool:
    """Whether days like this one came as high before, by the same measure as a day has to be higher than usual."""
    alike = [one for when, one in earlier.items() if (day - when).days % _WEEK == 0]
    return sum(value <= one * _LEAST_RATIO for one in alike) >= _RHYTHM
