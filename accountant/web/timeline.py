"""What each GPU did over a span, as strips of equal cells: for the pages of a job and of a node. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from xml.etree import ElementTree as ET
from zoneinfo import ZoneInfo

from accountant.costs import ACCOUNTS
from accountant.reports import formats
from accountant.reports.svg import rect, root, text
from accountant.web import views
from accountant.wire import Accounts, UsageLine
from agent.units import MS_PER_HOUR, MS_PER_SECOND

MOST_STRIPS: Final = 32
_MOST_CELLS: Final = 96
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1040, 190, 8, 6, 26
_ROW, _GAP = 26, 8
_LABELS = 6
_SHORT = 18
"""Characters of a device's name that have room."""


@dataclass(frozen=True, slots=True)
class Strip:
    """One GPU. cells: what it did in each cell of the timeline, in GPU-µs."""

    name: str
    detail: str
    cells: tuple[Accounts, ...]

    @property
    def whole(self) -> Accounts:
        return views.added(self.cells)


@dataclass(frozen=True, slots=True)
class Timeline:
    """starts: local begins of the cells, each `hours` long. more: GPUs that are not shown."""

    starts: tuple[datetime, ...]
    hours: int
    strips: tuple[Strip, ...]
    more: int


def timeline(lines: Iterable[UsageLine], start_ms: int, end_ms: int, tz: ZoneInfo) -> Timeline:
    """lines: by (node, gpu, gpu_model, hour) of [start_ms, end_ms). Of too many GPUs, those with the most
    allocated time are shown; by node and name."""
    first = datetime.fromtimestamp(start_ms // MS_PER_SECOND, tz).replace(
        minute=0, second=0, microsecond=0, tzinfo=None
    )
    span = max(1, math.ceil((end_ms - start_ms) / MS_PER_HOUR) + 1)
    hours = next(
        (size for size in (1, 2, 3, 4, 6, 12, 24) if span <= size * _MOST_CELLS), math.ceil(span / _MOST_CELLS)
    )
    count = math.ceil(span / hours)
    found: dict[tuple[str, str, str], list[Accounts]] = {}
    for line in lines:
        key = (line.key["node"], line.key["gpu"], line.key["gpu_model"])
        cells = found.setdefault(key, [Accounts()] * count)
        passed = datetime.fromisoformat(line.key["hour"] + ":00") - first
        at = min(count - 1, max(0, int(passed / timedelta(hours=hours))))
        cells[at] = views.added((cells[at], line.accounts_gpu_us))
    strips = [
        Strip(_short(gpu), f"{node}, {model}", tuple(cells)) for (node, gpu, model), cells in sorted(found.items())
    ]
    shown = sorted(strips, key=lambda strip: -strip.whole.allocated)[:MOST_STRIPS]
    shown.sort(key=lambda strip: (strip.detail, strip.name))
    starts = tuple(first + timedelta(hours=hours * i) for i in range(count))
    return Timeline(starts, hours, tuple(shown), len(strips) - len(shown))


def drawn(found: Timeline, title: str) -> str:
    """A row per GPU, a column per cell; in a column the accounts, busy at the bottom. SVG."""
    height = _TOP + len(found.strips) * (_ROW + _GAP) + _BOTTOM
    svg = root("timeline", _WIDTH, height, title, _described(found))
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(found.starts))
    most = max((cell.total for strip in found.strips for cell in strip.cells), default=0) or 1
    for number, strip in enumerate(found.strips):
        top = _TOP + number * (_ROW + _GAP)
        group = ET.SubElement(svg, "g")
        ET.SubElement(group, "title").text = f"{strip.name}, {strip.detail}: {_shares(strip.whole)}"
        text(group, "tick", 0, top + 12, strip.name)
        text(group, "tick sub", 0, top + 25, strip.detail[:30])
        for place, cell in enumerate(strip.cells):
            below = top + float(_ROW)
            for account in ACCOUNTS:
                tall = _ROW * getattr(cell, account) / most
                if tall:
                    below -= tall
                    rect(group, f"a-{account}", _LEFT + pitch * place, below, max(pitch - 0.6, 0.6), tall)
    every = max(1, math.ceil(len(found.starts) / _LABELS))
    for place, start in enumerate(found.starts):
        if place % every == 0:
            text(svg, "tick", _LEFT + pitch * place, height - 8, f"{start:%-d %b %H:%M}")
    return ET.tostring(svg, encoding="unicode")


def _described(found: Timeline) -> str:
    listed = "; ".join(f"{strip.name}: {_shares(strip.whole)}" for strip in found.strips[:8])
    return f"{len(found.strips)} GPUs in cells of {found.hours} h. {listed}"


def _shares(accounts: Accounts) -> str:
    parts = [
        f"{formats.ACCOUNT_NAMES[name]} {formats.hours(getattr(accounts, name))} GPU-h"
        for name in ACCOUNTS
        if getattr(accounts, name)
    ]
    return ", ".join(parts) or "nothing"


def _short(gpu: str) -> str:
    """Enough of a UUID to tell it from the others of a cluster; MIG rows keep their instance."""
    head, slash, rest = gpu.partition("/")
    return (head if len(head) <= _SHORT else "-".join(head.split("-")[:2])[:_SHORT]) + slash + rest
