"""Draws the charts of reports, which the accountant's pages show too, as SVG.

Names of teams come from users, so charts are built as element trees. Colours are CSS classes (`s0`, `s1`, …; `a-busy`,
…) that the page defines for light and dark display and for print. Every chart has a title and a description."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from xml.etree import ElementTree as ET

from accountant.reports import figure_formatting
from accountant.reports.report_breakdowns import AccountRow, DayRow, HourlyUse
from accountant.reports.week_parts import is_weekend
from accountant.wire.policy_models import IDLE, UNASSIGNED
from gputally.base.units import US_PER_HOUR
from gputally.server.page_layout import drawn, rect, root, text

SERIES = 7
"""Colours of the palette; further teams share one grey series."""
_WIDTH, _HEIGHT = 1040, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 12, 28
_COLUMN_PX = 72
"""Widest column, so that a chart of few days stays readable."""
_LABEL_PX = 24
"""Narrowest column with a label of its own."""
_TIME_TICKS = 12
"""Most labels below a chart whose columns are hours, days or months."""


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One colour of the daily chart. teams: the teams in it."""

    css: str
    name: str
    teams: tuple[str, ...]
    gpu_us: int


def series(days: Sequence[DayRow], everyone: Collection[str]) -> tuple[ChartSeries, ...]:
    """The teams of the days, as `ranked` gives them."""
    sums: dict[str, int] = {}
    for day in days:
        for team, gpu_us in day.allocated_us.items():
            sums[team] = sums.get(team, 0) + gpu_us
    return ranked(sums, everyone)


def colours(shown: Sequence[str], everyone: Collection[str]) -> dict[str, str]:
    """The class of each of these teams, at most SERIES. A team has the same one on every page: that of its place by
    name among all teams of the ledger. In a ledger with more teams than colours, one that comes first in `shown` and
    has the same place keeps it, and the other one has the next free colour; so has a team that is no longer known.

    everyone: `Status.teams`."""
    places = {
        team: place % SERIES for place, team in enumerate((*sorted({*everyone} - {UNASSIGNED, IDLE}), UNASSIGNED, IDLE))
    }
    taken: dict[int, str] = {}
    for team in sorted(shown, key=lambda team: team not in places):
        first = places.get(team, 0)
        free = (place % SERIES for place in range(first, first + SERIES) if place % SERIES not in taken)
        taken[next(free)] = team
    return {team: f"s{place}" for place, team in taken.items()}


def ranked(sums: Mapping[str, int], everyone: Collection[str]) -> tuple[ChartSeries, ...]:
    """The teams by GPU time, largest first, in their `colours`; if there are more teams than colours, the smallest
    share one series."""
    teams = sorted(sums, key=lambda team: (-sums[team], team))
    named_teams = teams if len(teams) <= SERIES else teams[: SERIES - 1]
    css = colours(named_teams, everyone)
    stacks = [ChartSeries(css[team], figure_formatting.name(team), (team,), sums[team]) for team in named_teams]
    other_teams = tuple(teams[len(named_teams) :])
    if other_teams:
        stacks.append(
            ChartSeries(
                "s-rest", f"{len(other_teams)} other teams", other_teams, sum(sums[team] for team in other_teams)
            )
        )
    return tuple(stacks)


def daily(days: Sequence[DayRow], title: str, everyone: Collection[str] = (), *, capacity: bool = True) -> str:
    """Stacked columns of allocated GPU-hours per day; with `capacity`, the day's capacity as a line. everyone: as of
    `colours`."""
    stacks = series(days, everyone)
    columns = [
        ChartColumn(
            f"{day.day:%-d}",
            f"{day.day:%-d %b}",
            _day_text(day, stacks, capacity),
            tuple(
                (stack.css, sum(day.allocated_us.get(team, 0) for team in stack.teams) / US_PER_HOUR)
                for stack in stacks
            ),
            day.unknown,
            weekend=is_weekend(day.day),
        )
        for day in days
    ]
    levels = [day.capacity_us / US_PER_HOUR for day in days] if capacity else None
    return stacked("daily", columns, title, _describe(days), levels)


@dataclass(frozen=True, slots=True)
class ChartColumn:
    """A column of a chart of stacked values.

    label, long_label: what stands below it if every column has a label and is narrow, and otherwise.
    told: its values as text, one a line.
    parts: class and value of each part, the lowest first.
    unknown: the part of the time, from 0 to 1, of which nothing is known.
    weekend: whether its time is of a Saturday or Sunday, which is shaded.
    edges: where its time begins and ends, as a page's parameters say it, for a page whose script zooms; "" for an end
        that is that of the page."""

    label: str
    long_label: str
    told: str
    parts: Sequence[tuple[str, float]]
    unknown: float = 0.0
    edges: tuple[str, str] | None = None
    weekend: bool = False


def shade_weekends(svg: ET.Element, days: Sequence[bool], left: float, pitch: float, top: float, height: float) -> None:
    """Shade the columns that are of weekends, those side by side as one. days: whether each column is."""
    for weekend, several in groupby(enumerate(days), key=itemgetter(1)):
        places = [place for place, _ in several]
        if weekend:
            rect(svg, "weekend", left + pitch * places[0], top, pitch * len(places), height)


def time_name(unit: str, begin: datetime) -> str:
    """The name of an hour, a day or a month, by its local begin."""
    return format(begin, {"hour": "%-d %b %H:%M", "day": "%-d %b", "month": "%b %Y"}[unit])


def time_labels(unit: str, begins: Sequence[datetime]) -> list[str]:
    """What stands below each hour, day or month; "" for those between. Of hours, every so many of a day have a label,
    so that midnight has one."""
    every = max(1, -(-len(begins) // _TIME_TICKS))
    hours = next(step for step in (1, 2, 3, 4, 6, 12, 24) if every <= step or step == 24)
    return [
        time_name(unit, begin) if (begin.hour % hours if unit == "hour" else place % every) == 0 else ""
        for place, begin in enumerate(begins)
    ]


def unknown_text(part: float) -> str:
    """What is said of a unit of time that is not metered, or not all of it. part: the unmetered part of it."""
    return "Nothing is known of it" if part == 1 else f"{figure_formatting.percent(part)} of it is not metered"


def stacked(
    css: str,
    columns: Sequence[ChartColumn],
    title: str,
    description: str,
    levels: Sequence[float | None] | None = None,
    *,
    thinned: bool = True,
) -> str:
    """A chart of stacked columns.

    levels: a line above them, with a level for each column; None where it is unknown, where the line is interrupted.
    thinned: leave out labels for which there is no room; otherwise the caller has left them empty.

    Time of which nothing is known is hatched from above, so that a low column is not read as a low value."""
    tops = [sum(value for _, value in column.parts) for column in columns]
    top = _nice(max([*tops, *(level for level in levels or () if level is not None)], default=0))
    svg = root(css, _WIDTH, _HEIGHT, title, description)
    plot_w, plot_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return round(_TOP + plot_h * (1 - value / top), 2)

    pitch = plot_w / max(1, len(columns))
    shade_weekends(svg, [column.weekend for column in columns], _LEFT, pitch, _TOP, plot_h)
    for step in range(5):
        _grid_line(svg, _TOP + plot_h * (1 - step / 4), f"{top * step / 4:,.2f}".rstrip("0").rstrip("."))
    if any(column.edges for column in columns):
        svg.set("data-left", str(_LEFT))
        svg.set("data-right", str(_LEFT + plot_w))
    width = min(_COLUMN_PX, max(1.0, pitch * 0.78))
    labels = 0
    label_every = 1 if pitch >= _LABEL_PX or not thinned else math.ceil(_LABEL_PX / pitch)
    for i, column in enumerate(columns):
        x = _LEFT + pitch * i + (pitch - width) / 2
        below = 0.0
        group = ET.SubElement(svg, "g")
        if column.edges is not None:
            group.set("data-start", column.edges[0])
            group.set("data-end", column.edges[1])
        ET.SubElement(group, "title").text = column.told
        if column.unknown:
            rect(group, "unknown", x, _TOP, width, plot_h * column.unknown)
        for part, value in column.parts:
            if value:
                rect(group, part, x, y(below + value), width, y(below) - y(below + value))
                below += value
        if i % label_every == 0 and column.label:
            label = column.label if label_every == 1 and pitch < 60 else column.long_label
            # On a narrow screen one label of three stays.
            text(svg, "tick mid minor" if labels % 3 else "tick mid", x + width / 2, _HEIGHT - _BOTTOM + 18, label)
            labels += 1
    if levels is not None:
        for known, run in groupby(enumerate(levels), lambda one: one[1] is not None):
            if known:
                _capacity_line(svg, [(_LEFT + pitch * i, y(level or 0.0)) for i, level in run], pitch)
    return drawn(svg)


def accounts(rows: Sequence[AccountRow], title: str) -> str:
    """One bar of the whole capacity, divided into its accounts."""
    width, height = _WIDTH, 36
    parts = [row for row in rows if row.gpu_us]
    parted = "; ".join(
        f"{figure_formatting.ACCOUNT_NAMES[row.account]} {figure_formatting.percent(row.share)}" for row in parts
    )
    svg = root("accounts", width, height, title, parted)
    svg.set("preserveAspectRatio", "none")
    whole = sum(row.gpu_us for row in parts)
    at = 0
    for row in parts:
        x0, x1 = width * at / whole, width * (at + row.gpu_us) / whole
        at += row.gpu_us
        group = ET.SubElement(svg, "g")
        hours, share = figure_formatting.hours(row.gpu_us), figure_formatting.percent(row.share)
        ET.SubElement(group, "title").text = f"{figure_formatting.ACCOUNT_NAMES[row.account]}: {hours} GPU-h, {share}"
        gap = 2 if x1 - x0 > 4 else 0
        rect(group, f"a-{row.account}", x0, 0, x1 - x0 - gap, height)
    return drawn(svg)


def hours(use: HourlyUse, title: str) -> str:
    """A column per hour of the day: the held share of the capacity, and the busy part of it."""
    height, bottom = 190, 26
    rows = use.hours
    most = max((row.held or 0.0 for row in rows), default=0.0)
    top = next((step for step in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if most <= step), 1.0)
    peak = use.peak
    peaked = (
        f"Most is held from {figure_formatting.clock(peak.hour)}: {figure_formatting.percent(peak.held)}."
        if peak
        else "Nothing was held."
    )
    svg = root("hours", _WIDTH, height, title, peaked)
    plot = height - bottom - 10
    for step in (0.0, 0.5, 1.0):
        _grid_line(svg, 10 + plot * (1 - step), figure_formatting.percent(top * step, 0))
    pitch = (_WIDTH - _LEFT - _RIGHT) / 24
    for row in rows:
        column = ET.SubElement(svg, "g")
        held_share, busy_share = row.held or 0.0, (row.busy_us / row.capacity_us if row.capacity_us else 0.0)
        tooltip = f"{figure_formatting.percent(row.held)} held, {figure_formatting.percent(row.utilisation)} of it busy"
        ET.SubElement(column, "title").text = f"{figure_formatting.clock(row.hour)}: {tooltip}"
        x, bar_width = _LEFT + pitch * row.hour + pitch * 0.14, pitch * 0.72
        for css, part in (("a-unallocated", held_share), ("a-busy", busy_share)):
            rect(column, css, x, 10 + plot * (1 - min(part, top) / top), bar_width, plot * min(part, top) / top)
        if row.hour % 3 == 0:
            text(svg, "tick mid", x + bar_width / 2, height - bottom + 18, f"{row.hour:02d}")
    return drawn(svg)


def _grid_line(svg: ET.Element, y: float, label: str) -> None:
    level = f"{round(y, 2):g}"
    ET.SubElement(
        svg, "line", {"class": "grid", "x1": str(_LEFT), "x2": str(_WIDTH - _RIGHT), "y1": level, "y2": level}
    )
    text(svg, "tick end", _LEFT - 8, float(level) + 4, label)


def _capacity_line(svg: ET.Element, steps: Sequence[tuple[float, float]], pitch: float) -> None:
    path = "".join(
        f"{'M' if i == 0 else 'L'}{round(x, 2):g} {level:g}L{round(x + pitch, 2):g} {level:g}"
        for i, (x, level) in enumerate(steps)
    )
    if path:
        ET.SubElement(svg, "path", {"class": "capacity", "d": path})


def _describe(days: Sequence[DayRow]) -> str:
    if not days:
        return "No days."
    sums = [sum(day.allocated_us.values()) for day in days]
    most = max(range(len(days)), key=lambda i: sums[i])
    return (
        f"{len(days)} days; {figure_formatting.hours(sum(sums))} GPU-hours allocated in all, "
        f"most on {days[most].day:%-d %B} with {figure_formatting.hours(sums[most])}."
    )


def _day_text(day: DayRow, stacks: Sequence[ChartSeries], capacity: bool) -> str:
    lines = [f"{day.day:%A %-d %B}"]
    for stack in stacks:
        gpu_us = sum(day.allocated_us.get(team, 0) for team in stack.teams)
        if gpu_us:
            lines.append(f"{stack.name}: {figure_formatting.hours(gpu_us)} GPU-h")
    if capacity:
        lines.append(f"Capacity: {figure_formatting.hours(day.capacity_us)} GPU-h")
    if day.unknown:
        lines.append(unknown_text(day.unknown))
    return "\n".join(lines)


def _nice(value: float) -> float:
    """The smallest of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10 and 12 times a power of ten that is not below the value by
    more than 0.01 %. The quarters of these numbers are round too."""
    if value <= 0:
        return 4.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if step * power >= value * 0.9999)
