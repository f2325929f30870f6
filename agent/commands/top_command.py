"""Shows a live table of this machine's GPUs, from NVML itself or from a running agent's /metrics.

It meters and ships nothing. Without arguments it reads NVML and says who runs on what (Slurm steps, containers,
pods by their log folders, processes). With --metrics it shows what that agent last closed, which changes with
its intervals. Exit codes: 0, 1 without a GPU (or where the page cannot be read), 2 wrong call.

`History` turns pictures into lines and is pure; `render` draws them, as many columns as the terminal is wide
for. Unknown is drawn as a dash, never as a zero. Only this module imports rich, and only when a table is
asked for.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent.commands.top_frames import (
    DeviceFrame,
    Frame,
    HolderFrame,
    Prices,
    from_exposition,
    from_snapshot,
    load,
    uniform_price,
)
from agent.core.errors import SettingsError
from agent.core.readings import Snapshot
from gputally.base import json_log
from gputally.base.clock import Clock, SystemClock
from gputally.base.units import MS_PER_MINUTE, US_PER_MS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from agent.main_loop import Source

TIMEOUT_S = 2.0
MAX_BYTES = 8 * 1024 * 1024
MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 5.0

Look = Callable[[], Frame]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of `gputally agent top`."""
    parser = commands.add_parser("top", help="show a live table of this machine's GPUs", description=__doc__)
    parser.add_argument("--once", action="store_true", help="Print the table once and exit.")
    parser.add_argument("--metrics", default="", metavar="URL", help="Read a running agent's http://HOST:PORT/metrics.")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="Time between two readings (1).")
    prices = parser.add_mutually_exclusive_group()
    prices.add_argument("--price-per-hour", metavar="PRICE", help="What an hour of any GPU costs.")
    prices.add_argument("--prices", type=Path, metavar="FILE", help="Prices by GPU model (YAML: currency, per_hour).")
    parser.add_argument("--proc", default="/proc", help="The process table (default /proc).")
    parser.add_argument(
        "--pod-logs", default="/var/log/pods", help="The kubelet's log folders (default /var/log/pods)."
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises SettingsError, FileFault, DriverReplaced."""

    if not MIN_PERIOD_S <= arguments.every <= MAX_PERIOD_S:
        raise SettingsError(
            f"--every: between {MIN_PERIOD_S} and {MAX_PERIOD_S:g} seconds, the driver forgets after 10"
        )
    prices = _prices(arguments)
    json_log.configure("ERROR")
    clock = SystemClock()
    with ExitStack() as stack:
        look = page(arguments.metrics, clock) if arguments.metrics else _machine(arguments, clock, stack)
        if arguments.once:
            return print_frame(look, clock, prices=prices)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        table = stack.enter_context(LiveTable(prices=prices))
        seen = False
        while not stop.is_set():
            frame = look()
            seen = seen or bool(frame.devices)
            table.draw(frame)
            clock.wait(arguments.every, stop)
    return 0 if seen else 1


def _prices(arguments: argparse.Namespace) -> Prices:
    if arguments.prices is not None:
        return load(arguments.prices)
    return uniform_price(arguments.price_per_hour) if arguments.price_per_hour is not None else Prices()


def _machine(arguments: argparse.Namespace, clock: Clock, stack: ExitStack) -> Look:
    from agent.devices.driver_lifecycle import Gpus
    from agent.devices.nvml_library import Driver
    from agent.holders.node_source import NodeSource
    from agent.holders.process_cgroups import PodLogs, ProcessTable

    names = PodLogs(Path(arguments.pod_logs))
    source = NodeSource(Gpus(Driver()), ProcessTable(Path(arguments.proc)), None, names)
    stack.callback(source.close)
    return lambda: from_snapshot(source.snapshot(clock.wall_ms()))


def page(url: str, clock: Clock) -> Look:
    """Pictures of a running agent; one that does not answer is a picture without GPUs that says so.

    Raises SettingsError for anything but a plain http:// address."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SettingsError(f"--metrics: expected http://HOST:PORT/metrics, got {url!r}")
    host, port, path = parts.hostname, parts.port or 9401, parts.path or "/metrics"

    def look() -> Frame:
        at_ms = clock.wall_ms()
        import http.client

        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
            if answer.status != http.client.OK:
                raise ValueError(f"HTTP {answer.status}")
            return from_exposition(body.decode("utf-8", "replace"), at_ms)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Frame(at_ms, (), f"{host}:{port}: {error}")
        finally:
            connection.close()

    return look


TREND_MS = 5 * MS_PER_MINUTE
TREND_CELLS = 15
_CELL_MS = TREND_MS // TREND_CELLS
_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "–"
_CENT = Decimal("0.01")
_HOLDER_WIDTH = 14
# What is left out first where the terminal is narrow stands last. Widths without the gap between columns.
_OPTIONAL = (("Power", 6), ("Cost/h", 7), ("5 min", TREND_CELLS), ("Model", 14))
_ALWAYS = (("GPU", 3), ("Holder", _HOLDER_WIDTH), ("Busy", 5), ("Memory", 9))
_ORDER = ("GPU", "Model", "Holder", "Busy", "Memory", "Power", "Cost/h", "5 min")


@dataclass(frozen=True, slots=True)
class Line:
    """One row: a GPU, or one of its holders (index ""). busy and trend in percent; None = unknown."""

    index: str
    model: str
    holder: str
    busy: int | None
    memory_mib: int | None
    memory_of_mib: int | None
    power_w: int | None
    trend: tuple[int | None, ...]
    cost: Decimal | None = None
    note: str = ""


class BusyHistory:
    """A counter of busy microseconds over the last five minutes, as steps of known percent."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, int | None]] = deque()
        self._last: tuple[int, int | None, str] | None = None

    def observe(self, at_ms: int, busy_us: int | None, origin: str) -> None:
        if self._last is not None and self._last[0] < at_ms:
            before_ms, before_us, before_origin = self._last
            percent = None
            if before_us is not None and busy_us is not None and before_origin == origin and busy_us >= before_us:
                percent = min(100, (busy_us - before_us) * 100 // ((at_ms - before_ms) * US_PER_MS))
            self.steps.append((before_ms, at_ms, percent))
        while self.steps and self.steps[0][1] <= at_ms - TREND_MS:
            self.steps.popleft()
        self._last = (at_ms, busy_us, origin)

    def percent(self) -> int | None:
        return self.steps[-1][2] if self.steps else None


class History:
    """Busy per GPU and holder over the last five minutes, from their counters."""

    def __init__(self, prices: Prices | None = None) -> None:
        self._prices = prices or Prices()
        self._tracks: dict[tuple[str, str], BusyHistory] = {}
        self._serial: int | None = None

    def observe(self, frame: Frame) -> None:
        """A picture whose counters were closed no later than the last one's adds nothing."""
        if frame.serial is not None and frame.serial == self._serial:
            return
        self._serial = frame.serial
        present = set()
        for device in frame.devices:
            counters = [("", device.busy_us), *((h.key, h.busy_us) for h in device.holders)]
            for key, busy_us in counters:
                place = device.uuid, key
                present.add(place)
                self._tracks.setdefault(place, BusyHistory()).observe(frame.at_ms, busy_us, device.origin)
        for gone in self._tracks.keys() - present:
            del self._tracks[gone]

    def lines(self, frame: Frame) -> tuple[Line, ...]:
        """A line per GPU; where several hold it, one more for each of them."""
        lines: list[Line] = []
        for device in frame.devices:
            price = self._prices.of(device.model)
            shared = len(device.holders) > 1
            lines.append(self._device(device, price, frame.at_ms))
            if shared:
                lines += [self._holder(device, holder, price, frame.at_ms) for holder in device.holders]
        return tuple(lines)

    def _device(self, device: DeviceFrame, price: Decimal | None, at_ms: int) -> Line:
        track = self._tracks.get((device.uuid, ""), BusyHistory())
        shares = [holder.share for holder in device.holders if holder.share is not None]
        cost = None
        if price is not None and device.holders and len(shares) == len(device.holders):
            part = sum(shares)
            cost = price * part.numerator / part.denominator
        names = [holder.name for holder in device.holders]
        return Line(
            index=str(device.index),
            model=device.model.removeprefix("NVIDIA "),
            holder=names[0] if len(names) == 1 else f"{len(names)} holders" if names else _UNKNOWN,
            busy=track.percent(),
            memory_mib=device.memory_mib,
            memory_of_mib=device.memory_of_mib,
            power_w=None if device.power_mw is None else round(device.power_mw / 1000),
            trend=_trend(track.steps, at_ms),
            cost=cost,
            note=device.note,
        )

    def _holder(self, device: DeviceFrame, holder: HolderFrame, price: Decimal | None, at_ms: int) -> Line:
        track = self._tracks.get((device.uuid, holder.key), BusyHistory())
        share = holder.share
        cost = None if price is None or share is None else price * share.numerator / share.denominator
        trend = _trend(track.steps, at_ms)
        return Line("", "", holder.name, track.percent(), holder.memory_mib, 0, None, trend, cost)


def sparkline(trend: Sequence[int | None]) -> str:
    """One bar per cell; a blank where nothing is known."""
    return "".join(" " if v is None else _BARS[min(v * len(_BARS) // 101, len(_BARS) - 1)] for v in trend)


def columns(width: int, priced: bool) -> tuple[str, ...]:
    """Which columns a terminal of that width has room for."""
    left = width + 1 - sum(size + 1 for _, size in _ALWAYS)
    chosen = {name for name, _ in _ALWAYS}
    for name, size in _OPTIONAL:
        if name == "Cost/h" and not priced:
            continue
        if left < size + 1:
            break
        left -= size + 1
        chosen.add(name)
    return tuple(name for name in _ORDER if name in chosen)


class Drawing:
    """The lines as a table of whatever width there is; message: one line under it."""

    def __init__(self, lines: Sequence[Line], message: str = "") -> None:
        self._lines = lines
        self._message = message

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render(self._lines, self._message, options.max_width)


def render(lines: Sequence[Line], message: str = "", width: int = 80) -> Table:
    """The table for a terminal of that width."""
    from rich import box
    from rich.table import Table

    priced = any(line.cost is not None for line in lines)
    shown = columns(width, priced)
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False, padding=0)
    table.caption, table.caption_justify = message or None, "left"
    widths = dict((*_ALWAYS, *_OPTIONAL))
    for name in shown:
        if name == "Holder":
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        elif name in ("Model", "5 min"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", width=widths[name])
        else:
            table.add_column(name, justify="right", no_wrap=True, width=widths[name])
    for line in lines:
        cells = _cells(line)
        table.add_row(*(cells[name] for name in shown), style="red" if line.note else None)
    return table


def _cells(line: Line) -> dict[str, str]:
    whole = bool(line.index)
    memory = f"{_gib(line.memory_mib)}/{_gib(line.memory_of_mib)} G" if whole else f"{_gib(line.memory_mib)} G"
    return {
        "GPU": line.index,
        "Model": line.model,
        "Holder": line.note or (line.holder if whole else f"  {line.holder}"),
        "Busy": _UNKNOWN if line.busy is None else f"{line.busy} %",
        "Memory": memory if whole or line.memory_mib is not None else _UNKNOWN,
        "Power": ("" if not whole else _UNKNOWN) if line.power_w is None else f"{line.power_w} W",
        "Cost/h": "" if line.cost is None else f"{line.cost.quantize(_CENT)}",
        "5 min": sparkline(line.trend),
    }


class LiveTable:
    """A table that is redrawn with every picture; a context manager."""

    def __init__(self, console: Console | None = None, prices: Prices | None = None) -> None:
        from rich.live import Live

        self._prices = prices or Prices()
        self._history = History(self._prices)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw from a snapshot of our own source."""
        self.draw(from_snapshot(snapshot))

    def draw(self, frame: Frame) -> None:
        """Redraw."""
        self._history.observe(frame)
        self._live.update(_drawing(self._history, frame, self._prices), refresh=True)


def print_once(source: Source, clock: Clock, console: Console | None = None, prices: Prices | None = None) -> int:
    """Read twice, a second apart (busy is a difference), print, and answer the exit code: 1 without a GPU."""
    return print_frame(lambda: from_snapshot(source.snapshot(clock.wall_ms())), clock, console, prices)


def print_frame(
    look: Callable[[], Frame], clock: Clock, console: Console | None = None, prices: Prices | None = None
) -> int:
    """`print_once` of any picture."""
    from gputally.base.terminal import Terminal

    history = History(prices)
    frame = look()
    if frame.devices:
        history.observe(frame)
        clock.wait(1.0, threading.Event())
        frame = look()
        history.observe(frame)
    (console or Terminal()).print(_drawing(history, frame, prices or Prices()), markup=False, highlight=False)
    return 0 if frame.devices else 1


def _drawing(history: History, frame: Frame, prices: Prices) -> Drawing | str:
    lines = history.lines(frame)
    return unavailable(frame) or Drawing(lines, _summary(frame, lines, prices.currency))


def unavailable(frame: Frame) -> str:
    """Why there is nothing to show, in one line; "" where there is something."""
    if frame.devices:
        return ""
    return "no GPU to watch" + (f" ({frame.message})" if frame.message else "")


def _summary(frame: Frame, lines: Sequence[Line], currency: str) -> str:
    held = sum(bool(device.holders) for device in frame.devices)
    count = len(frame.devices)
    parts = [f"{count} GPU{'' if count == 1 else 's'}, {held} held"]
    costs = [line.cost for line in lines if line.index and line.cost is not None]
    if costs:
        total = sum(costs, Decimal(0)).quantize(_CENT)
        parts.append(f"{total} {currency or 'per hour'}{'/h' if currency else ''} held")
    return "; ".join([*parts, *([frame.message] if frame.message else [])])


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


def _gib(mib: int | None) -> str:
    return _UNKNOWN if mib is None else f"{mib / 1024:.0f}"
