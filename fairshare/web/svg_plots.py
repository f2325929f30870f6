"""Draws usage and entitlements as inline SVG.

The style sheet gives the CSS classes colours that people with any colour vision can distinguish; lines also differ in
dashes. An element tree escapes every name in the SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from gputally.base.number_format import percent
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.server.page_layout import drawn, rect, root, text

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 1040, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
_BULLET_W, _BULLET_H = 240, 22
_MOST_TICKS = 9
_STEPS_MS = (
    10 * MS_PER_MINUTE,
    MS_PER_HOUR,
    3 * MS_PER_HOUR,
    6 * MS_PER_HOUR,
    12 * MS_PER_HOUR,
    *(n * MS_PER_DAY for n in (1, 2, 5, 7, 14)),
)


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line of a plot.

    css: the CSS class.
    points: (milliseconds UTC, value), oldest first.
    area: the area between the line and zero is filled.
    steps: each value holds until the next one."""

    css: str
    name: str
    points: Points
    area: bool = False
    steps: bool = False


def bullet(name: str, used: float | None, entitled: float, top: float) -> str:
    """Draw a bar of usage with a mark at the entitlement. Usage beyond the entitlement has another colour.

    used, entitled: parts of the capacity; used None: unknown. top: the part at the end of the axis."""
    description = f"{name}: used {percent(used)} of the capacity, entitled to {percent(entitled)}"
    svg = ET.Element(
        "svg",
        {
            "class": "bullet", "viewBox": f"0 0 {_BULLET_W} {_BULLET_H}", "role": "img", "aria-label": description,
            "preserveAspectRatio": "none",
        },
    )  # fmt: skip
    ET.SubElement(svg, "title").text = description
    scale = _BULLET_W / top if top > 0 else 0.0
    known = used or 0.0
    rect(svg, "track", 0, 6, _BULLET_W, 10)
    rect(svg, "within", 0, 6, min(known, entitled) * scale, 10)
    rect(svg, "beyond", entitled * scale, 6, (known - entitled) * scale, 10)
    rect(svg, "mark", min(entitled * scale, _BULLET_W - 2.5) - 1.25, 1, 2.5, 20)
    return drawn(svg)


def over_time(
    name: str, lines: Sequence[PlotLine], start_ms: int, end_ms: int, unit: str = "GPUs", *, height: int = _HEIGHT
) -> str:
    """Draw lines over [start_ms, end_ms), on an axis from zero. name: the chart's title, unique on the page."""
    highest = max((value for line in lines for _, value in line.points), default=0.0)
    top = nice(highest)
    described = "; ".join(_described(line, unit) for line in lines)
    svg = root("over-time", _WIDTH, height, name, described)
    marks = {"title": f"{slug(name)}-title", "desc": f"{slug(name)}-desc"}
    for child in svg:
        child.set("id", marks[child.tag])
    svg.set("aria-labelledby", " ".join(marks.values()))
    plot_w, plot_h = _WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + plot_w * min(1.0, max(0.0, (at - start_ms) / max(1, end_ms - start_ms)))

    def y(value: float) -> float:
        return _TOP + plot_h * (1 - value / top)

    for step in range(5 if height > 180 else 3):
        value = top * step / (4 if height > 180 else 2)
        level = f"{y(value):.1f}"
        ET.SubElement(
            svg, "line", {"class": "grid", "x1": f"{_LEFT}", "x2": f"{_WIDTH - _RIGHT}", "y1": level, "y2": level}
        )
        text(svg, "tick end", _LEFT - 8, y(value) + 4, f"{value:,.2f}".rstrip("0").rstrip("."))
    for at, label in ticks(start_ms, end_ms):
        text(svg, "tick mid", x(at), height - 8, label)
    for line in lines:
        points = _stepped(line.points, end_ms) if line.steps else list(line.points)
        if not points:
            continue
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        if line.area:
            corners = f"{x(points[0][0]):.1f},{y(0):.1f} {path} {x(points[-1][0]):.1f},{y(0):.1f}"
            ET.SubElement(svg, "polygon", {"class": f"area {line.css}", "points": corners})
        ET.SubElement(svg, "polyline", {"class": f"line {line.css}", "points": path})
    return drawn(svg)


def ticks(start_ms: int, end_ms: int) -> list[tuple[int, str]]:
    """Return at most nine times (milliseconds UTC) at whole steps, with their labels."""
    span = end_ms - start_ms
    step = next((step for step in _STEPS_MS if span <= step * _MOST_TICKS), 30 * MS_PER_DAY)
    form = "%-d %b" if step >= MS_PER_DAY else "%-d %b %H:%M"
    first = -(-start_ms // step) * step
    edge = span * 0.03
    return [
        (at, f"{datetime.fromtimestamp(at // MS_PER_SECOND, UTC):{form}}")
        for at in range(first, end_ms + 1, step)
        if start_ms + edge <= at <= end_ms - edge
    ]


def nice(highest: float) -> float:
    """Return the end of an axis for values up to `highest`: the smallest of 1, 2, 4, 5 and 10 times a power of ten that
    is not below it."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(step * power for step in (1, 2, 4, 5, 10) if highest <= step * power * 1.0001)


def slug(name: str) -> str:
    """Return the part of an HTML id that stands for a name: letters and digits, different for every name."""
    return "p" + name.encode().hex()


def _stepped(points: Points, end_ms: int) -> list[tuple[float, float]]:
    """Return the points of a line in steps: each value holds until the next point, and the last one until `end_ms`."""
    corners: list[tuple[float, float]] = []
    for at, value in points:
        if corners:
            corners.append((at, corners[-1][1]))
        corners.append((at, value))
    if corners and corners[-1][0] < end_ms:
        corners.append((end_ms, corners[-1][1]))
    return corners


def _described(line: PlotLine, unit: str) -> str:
    values = [value for _, value in line.points]
    if not values:
        return f"{line.name}: no values"
    return f"{line.name}: {min(values):,.1f} to {max(values):,.1f} {unit}, at the end {values[-1]:,.1f}"
