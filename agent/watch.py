"""The live table: what every GPU does, who holds it, and the last five minutes, legible at 80 columns.

`History` turns snapshots into figures and is pure; `render` draws them. Unknown is drawn as a dash,
never as a zero. Only this module imports rich, and only when a table is asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.model import Allocation, DeviceReading, Reading, Snapshot, Unavailable
from agent.units import MS_PER_MINUTE, US_PER_MS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from agent.clock import Clock
    from agent.loop import Source

TREND_MS = 5 * MS_PER_MINUTE
TREND_CELLS = 15
_CELL_MS = TREND_MS // TREND_CELLS
_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "–"
_MODEL_WIDTH = 14


@dataclass(frozen=True, slots=True)
class Line:
    """One row. busy and trend in percent; None = unknown."""

    index: str
    model: str
    holder: str
    busy: int | None
    memory_mib: int | None
    memory_of_mib: int
    power_w: int | None
    trend: tuple[int | None, ...]
    note: str = ""


class History:
    """Busy per GPU over the last five minutes, from its cumulative counter."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, DeviceReading]] = {}
        self._steps: dict[str, deque[tuple[int, int, int | None]]] = {}

    def observe(self, snapshot: Snapshot) -> None:
        for device in snapshot.devices:
            uuid = device.gpu.uuid
            steps = self._steps.setdefault(uuid, deque())
            if uuid in self._last:
                before_ms, before = self._last[uuid]
                if before_ms < snapshot.at_ms:
                    steps.append((before_ms, snapshot.at_ms, _percent(before_ms, before, snapshot.at_ms, device)))
            while steps and steps[0][1] <= snapshot.at_ms - TREND_MS:
                steps.popleft()
            self._last[uuid] = (snapshot.at_ms, device)

    def lines(self, snapshot: Snapshot) -> tuple[Line, ...]:
        """A line per holder; a GPU that nobody holds has one too."""
        lines: list[Line] = []
        for device in snapshot.devices:
            uuid = device.gpu.uuid
            steps = self._steps.get(uuid, deque())
            held = _held(snapshot.allocations, uuid)
            names = [_name(allocation, device) for allocation in held] or [_nobody(snapshot.allocations)]
            for position, name in enumerate(names):
                first = position == 0
                lines.append(
                    Line(
                        index=str(device.gpu.index) if first else "",
                        model=device.gpu.model.removeprefix("NVIDIA ") if first else "",
                        holder=name,
                        busy=steps[-1][2] if steps and first else None,
                        memory_mib=_known(device.memory_used_mib),
                        memory_of_mib=device.gpu.memory_mib if first else 0,
                        power_w=_watts(device.power_mw),
                        trend=_trend(steps, snapshot.at_ms) if first else (),
                        note=_note(device),
                    )
                )
        return tuple(lines)


def sparkline(trend: Sequence[int | None]) -> str:
    """One bar per cell; a blank where nothing is known."""
    return "".join(" " if v is None else _BARS[min(v * len(_BARS) // 101, len(_BARS) - 1)] for v in trend)


def render(lines: Sequence[Line], message: str = "") -> Table:
    """The table; message: one line under it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = message or None, "left"
    table.add_column("GPU", justify="right", no_wrap=True, width=3)
    table.add_column("Model", no_wrap=True, overflow="ellipsis", width=_MODEL_WIDTH)
    table.add_column("Holder", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("Busy", justify="right", no_wrap=True, width=5)
    table.add_column("Memory", justify="right", no_wrap=True, width=9)
    table.add_column("Power", justify="right", no_wrap=True, width=6)
    table.add_column("5 min", no_wrap=True, width=TREND_CELLS)
    for line in lines:
        if not line.index:
            table.add_row("", "", line.holder, "", "", "", "")
            continue
        table.add_row(
            line.index,
            line.model,
            line.note or line.holder,
            _UNKNOWN if line.busy is None else f"{line.busy} %",
            f"{_gib(line.memory_mib)}/{_gib(line.memory_of_mib)} G",
            _UNKNOWN if line.power_w is None else f"{line.power_w} W",
            sparkline(line.trend),
            style="red" if line.note else None,
        )
    return table


class LiveTable:
    """A table that is redrawn with every snapshot; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.live import Live

        self._history = History()
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        self._history.observe(snapshot)
        self._live.update(_drawing(self._history, snapshot), refresh=True)


def print_once(source: Source, clock: Clock, console: Console | None = None) -> int:
    """Read twice, a second apart (busy is a difference), print, and answer the exit code: 1 without a GPU."""
    from rich.console import Console

    history = History()
    snapshot = source.snapshot(clock.wall_ms())
    if snapshot.devices:
        history.observe(snapshot)
        clock.wait(1.0, threading.Event())
        snapshot = source.snapshot(clock.wall_ms())
        history.observe(snapshot)
    (console or Console()).print(_drawing(history, snapshot), markup=False, highlight=False)
    return 0 if snapshot.devices else 1


def _drawing(history: History, snapshot: Snapshot) -> Table | str:
    return unavailable(snapshot) or render(history.lines(snapshot), _summary(snapshot))


def unavailable(snapshot: Snapshot) -> str:
    """Why there is nothing to show, in one line; "" where there is something."""
    if snapshot.devices:
        return ""
    failures = [f"{name}: {failure}" for name, failure in snapshot.sources if failure]
    return "no GPU to watch" + (f" ({'; '.join(failures)})" if failures else "")


def _summary(snapshot: Snapshot) -> str:
    held = {a.gpu_uuid for a in snapshot.allocations} if not isinstance(snapshot.allocations, Unavailable) else set()
    failures = [f"{name}: {failure}" for name, failure in snapshot.sources if failure]
    count = len(snapshot.devices)
    return "; ".join([f"{count} GPU{'' if count == 1 else 's'}, {len(held)} held", *failures])


def _percent(before_ms: int, before: DeviceReading, at_ms: int, device: DeviceReading) -> int | None:
    first, last = before.busy_us, device.busy_us
    if isinstance(first, Unavailable) or isinstance(last, Unavailable) or before.counter_epoch != device.counter_epoch:
        return None
    span_us = (at_ms - before_ms) * US_PER_MS
    return min(100, (last - first) * 100 // span_us) if last >= first else None


def _trend(steps: Sequence[tuple[int, int, int | None]], at_ms: int) -> tuple[int | None, ...]:
    """Mean per cell, weighted by time; the newest cell is the last."""
    cells: list[int | None] = []
    for cell in range(TREND_CELLS):
        start = at_ms - TREND_MS + cell * _CELL_MS
        end = start + _CELL_MS
        weight = total = 0
        for since, until, percent in steps:
            overlap = min(until, end) - max(since, start)
            if overlap > 0 and percent is not None:
                weight += overlap
                total += percent * overlap
        cells.append(total // weight if weight else None)
    return tuple(cells)


def _held(allocations: tuple[Allocation, ...] | Unavailable, uuid: str) -> list[Allocation]:
    if isinstance(allocations, Unavailable):
        return []
    return [a for a in allocations if a.gpu_uuid == uuid]


def _name(allocation: Allocation, device: DeviceReading) -> str:
    holder = allocation.holder
    name = (
        f"{holder.namespace}/{holder.name}" if holder.namespace and holder.kind == "pod" else holder.name or holder.uid
    )
    profile = next((m.profile for m in device.gpu.mig if m.uuid == allocation.mig_uuid), "")
    return f"{profile} {name}" if profile else name


def _nobody(allocations: tuple[Allocation, ...] | Unavailable) -> str:
    return f"({allocations.reason})" if isinstance(allocations, Unavailable) else "–"


def _note(device: DeviceReading) -> str:
    if device.health == "lost":
        return "lost"
    return device.memory_used_mib.reason if isinstance(device.memory_used_mib, Unavailable) else ""


def _known(reading: Reading) -> int | None:
    return None if isinstance(reading, Unavailable) else reading


def _watts(reading: Reading) -> int | None:
    return None if isinstance(reading, Unavailable) else round(reading / 1000)


def _gib(mib: int | None) -> str:
    return _UNKNOWN if mib is None else f"{mib / 1024:.0f}"
