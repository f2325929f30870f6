"""Who held each GPU of a node: at an instant as a table, and over the local day around it as a drawing by team."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from xml.etree import ElementTree as ET
from zoneinfo import ZoneInfo

from accountant.core import periods
from accountant.core.claim_overlap import Span
from accountant.core.errors import UnsupportedQuestion
from accountant.ledger.protocols import Hold, Moment
from accountant.ledger.usage import Where
from accountant.reports import figure_formatting
from accountant.reports.charts import ChartSeries, ranked
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.server.page_layout import drawn, rect, root, text

_AT: Final[tuple[Dimension, ...]] = (
    "gpu", "gpu_model", "mig_profile", "team", "queue", "cluster", "namespace", "job", "pod", "user",
)  # fmt: skip
MOST_ROWS: Final = 200
MOST_BARS: Final = 1_000
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1040, 190, 8, 6, 26
_ROW, _GAP = 20, 8
_SHORT = 22


@dataclass(frozen=True, slots=True)
class GpuHolders:
    """Who held the GPUs of a node.

    minute: the span of `rows`, a minute (in a lake: an hour).
    rows: the usage in it by GPU and holder, at most MOST_ROWS; more: the number of those left out.
    day: the local day, up to now.
    holds: those of the day, the first MOST_BARS; None if the ledger has only whole hours.
    more_holds: whether some are left out.
    series: the colours of the teams."""

    minute: Span
    rows: tuple[UsageLine, ...]
    more: int
    day: Span
    holds: tuple[Hold, ...] | None
    more_holds: bool
    series: tuple[ChartSeries, ...]


def holders_of(moment: Moment, cluster: str, node: str, at_ms: int, day: Span, timezone: str) -> GpuHolders:
    """Who held the node's GPUs in the minute of an instant and in the day around it. The moment must have been opened
    for the day."""
    here: Where = {"cluster": (cluster,), "node": (node,)}
    minute_ms = at_ms - at_ms % MS_PER_MINUTE
    minute = moment.status().recent_span(minute_ms + MS_PER_MINUTE, MS_PER_MINUTE)
    rows = sorted(moment.usage(minute, _AT, here, timezone).lines(), key=_rank)
    found, more_holds = None, False
    shares: dict[str, int] = {}
    if day[0] < day[1]:
        whole = moment.status().recent_span(day[1], day[1] - day[0])
        of_day = moment.usage(whole, ("gpu", "team"), here, timezone).lines()
        for line in of_day:
            if gpu_us := line.accounts_gpu_us.allocated:
                shares[line.key["team"]] = shares.get(line.key["team"], 0) + gpu_us
        with suppress(UnsupportedQuestion):
            holds = moment.holds((day,), gpus={(cluster, line.key["gpu"]) for line in of_day})
            there = tuple(hold for hold in holds.found if hold.node == node)
            found, more_holds = there[:MOST_BARS], len(there) > MOST_BARS or holds.whole_after_ms is not None
    more = max(0, len(rows) - MOST_ROWS)
    return GpuHolders(
        minute, tuple(rows[:MOST_ROWS]), more, day, found, more_holds, ranked(shares, moment.status().teams)
    )


def _rank(line: UsageLine) -> tuple[object, ...]:
    return line.key["gpu"], line.key["mig_profile"], -line.accounts_gpu_us.allocated, *line.key.values()


def day_of(at_ms: int, now_ms: int, timezone: ZoneInfo) -> Span:
    """The local day of an instant, up to now."""
    local = datetime.fromtimestamp(at_ms // MS_PER_SECOND, timezone)
    start, end = periods.day_span(local.date(), timezone)
    return start, max(start, min(end, now_ms))


def day_svg(found: GpuHolders, timezone: ZoneInfo, title: str) -> str:
    """An SVG with a row for each GPU, and a bar in the team's colour for each hold; holds at one time share the row."""
    holds = found.holds or ()
    start, end = found.day
    by_gpu: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        by_gpu[hold.gpu].append(hold)
    css = {team: series.css for series in found.series for team in series.teams}
    height = _TOP + len(by_gpu) * (_ROW + _GAP) + _BOTTOM
    parted = "; ".join(
        f"{series.name} {figure_formatting.hours(series.gpu_us)} GPU-h" for series in found.series if series.gpu_us
    )
    svg = root("holders", _WIDTH, height, title, parted or "nobody")
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1, end - start)
    for number, (gpu, of_gpu) in enumerate(sorted(by_gpu.items())):
        top = _TOP + number * (_ROW + _GAP)
        text(svg, "tick", 0, top + 14, gpu if len(gpu) <= _SHORT else gpu[: _SHORT - 1] + "…")
        lanes = _lanes(of_gpu)
        tall = _ROW / (max(lanes, default=0) + 1)
        for hold, lane in zip(of_gpu, lanes, strict=True):
            group = ET.SubElement(svg, "g")
            low, high = max(start, hold.start_ms), min(end, hold.end_ms)
            ET.SubElement(group, "title").text = (
                f"{figure_formatting.name(hold.team)}: {hold.key.namespace}/{hold.pod}, {_clock(low, timezone)} to "
                f"{_clock(high, timezone)}"
            )
            x, wide = _LEFT + (low - start) * scale, max((high - low) * scale - 1, 0.8)
            rect(group, css.get(hold.team, "s-rest"), x, top + lane * tall, wide, max(tall - 0.5, 0.8))
    hours = math.ceil((end - start) / MS_PER_HOUR)
    step = next((step for step in (1, 2, 3, 4, 6) if hours <= step * 8), 6)
    for hour in range(0, hours, step):
        at = start + hour * MS_PER_HOUR
        text(svg, "tick", _LEFT + (at - start) * scale, height - 8, _clock(at, timezone))
    return drawn(svg)


def _lanes(holds: Sequence[Hold]) -> list[int]:
    """The lane of each hold, so that holds at one time have different lanes. holds: sorted by start."""
    ends: list[int] = []
    lanes = []
    for hold in holds:
        free = next((lane for lane, end in enumerate(ends) if end <= hold.start_ms), len(ends))
        ends[free : free + 1] = [hold.end_ms]
        lanes.append(free)
    return lanes


def _clock(at_ms: int, timezone: ZoneInfo) -> str:
    return f"{datetime.fromtimestamp(at_ms // MS_PER_SECOND, timezone):%H:%M}"
