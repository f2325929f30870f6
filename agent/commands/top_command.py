"""Shows a live table of this machine's GPUs, from NVML itself or from a running agent's /metrics.

A `Frame` is one reading of the machine. `HolderHistories` turns frames into lines, and `Drawing` draws them with as
many columns as fit on the terminal. An unknown value is a dash, never a zero."""

from __future__ import annotations

import argparse
import http.client
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from agent.core.lean_http_client import page_reader
from agent.core.readings import DeviceReading, NodeSnapshot, Reading, Unavailable
from agent.core.settings import SettingsError
from agent.metering.usage_attribution import Layout, Share, lay_out
from agent.metrics.metric_families import PREFIX
from gputally.base import yaml_file
from gputally.base.background_tasks import BackgroundTasks, set_on_signals
from gputally.base.clock import Clock, SystemClock
from gputally.base.units import MS_PER_MINUTE, US_PER_MS

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_MIB = 1_048_576
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class HolderFrame:
    """One holder on one device; unknown values are None.

    key: identifies the holder in all frames.
    share: the holder's part of the GPU.
    busy_us: a counter in time of the whole GPU: half a GPU that is busy for 1 s adds 0.5 s."""

    key: str
    name: str
    share: Fraction | None
    busy_us: int | None
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """One GPU; unknown values are None.

    note: why the GPU cannot be used or read; "" if it can.
    counter_epoch: identifies the start of the counters; those of different epochs cannot be compared."""

    uuid: str
    index: int
    model: str
    note: str
    counter_epoch: str
    busy_us: int | None
    memory_mib: int | None
    memory_of_mib: int | None
    power_mw: int | None
    holders: tuple[HolderFrame, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A node at `at_ms`.

    message: why a source could not be read; "" if all could.
    serial: the number of closed intervals in a running agent's page, whose counters change only when intervals close.
        Two frames with the same `serial` have the same counters. None if the counters were read from NVML."""

    at_ms: int
    devices: tuple[DeviceFrame, ...]
    message: str = ""
    serial: int | None = None


def from_snapshot(snapshot: NodeSnapshot) -> Frame:
    """Convert a snapshot to a frame."""
    failures = [f"{name}: {failure}" for name, failure in snapshot.sources if failure]
    allocations = snapshot.allocations
    if isinstance(allocations, Unavailable):
        failures = failures or [f"holders: {allocations.reason}"]
        allocations = ()
    devices = tuple(
        _device(device, lay_out(device.gpu, [a for a in allocations if a.gpu_uuid == device.gpu.uuid]))
        for device in snapshot.devices
    )
    return Frame(snapshot.at_ms, devices, "; ".join(failures))


def _device(device: DeviceReading, layout: Layout) -> DeviceFrame:
    gpu = device.gpu
    busy = [_known(instance.busy_us) for instance in device.instances]
    whole = _known(device.busy_us)
    if whole is None and busy and None not in busy:
        whole = sum(value for value in busy if value is not None)
    parts = sum(part.weight for part in layout.parts)
    shares = [
        (share, Fraction(part.weight * weight, parts * sum(part.weights)))
        for part in layout.parts
        for share, weight in zip(part.shares, part.weights, strict=True)
    ]
    note = "lost" if device.health == "lost" else ""
    if device.silent and isinstance(device.memory_used_mib, Unavailable):
        note = device.memory_used_mib.reason
    return DeviceFrame(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        note=note,
        counter_epoch=device.counter_epoch,
        busy_us=whole,
        memory_mib=_known(device.memory_used_mib),
        memory_of_mib=gpu.memory_mib,
        power_mw=_known(device.power_mw),
        holders=tuple(_holder(device, share, part, whole) for share, part in shares if share.holder is not None),
    )


def _holder(device: DeviceReading, share: Share, part: Fraction, whole_us: int | None) -> HolderFrame:
    """Return the frame of a holder. A holder that has the device alone and no reading of its own gets the device's."""
    holder = share.holder
    assert holder is not None
    own = next((r for r in device.holders if (r.holder.uid, r.holder.container, r.mig_uuid) == share.key), None)
    instance = next((i for i in device.instances if i.mig_uuid == share.mig_uuid), None)
    busy = _known(own.busy_us) if own else None
    memory = _known(own.memory_mib) if own else None
    alone = share.exclusive and (instance is not None or not device.gpu.mig_enabled)
    if alone and busy is None:
        busy = _known(instance.busy_us) if instance else whole_us
    if alone and memory is None:
        memory = _known(instance.memory_mib if instance else device.memory_used_mib)
    name = holder.name or holder.uid
    if holder.namespace:
        name = f"{holder.namespace}/{name}"
    if share.slice is not None:
        name = f"{share.slice.profile} {name}"
    return HolderFrame("|".join(share.key), name, part, busy, memory)


def _known(reading: Reading) -> int | None:
    return None if isinstance(reading, Unavailable) else reading


def from_exposition(text: str, at_ms: int) -> Frame:
    """Convert a running agent's metrics page to a frame. Raises ValueError if the text is no metrics page."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser raises the errors of its string functions
        raise ValueError(f"not a Prometheus exposition: {error}") from error
    devices: dict[str, DeviceFrame] = {}
    for sample in samples:
        if sample.name == f"{PREFIX}gpu_info":
            labels = sample.labels
            uuid, index = labels.get("gpu_uuid", ""), labels.get("gpu_index", "")
            number = int(index) if index.isascii() and index.isdigit() else 0
            devices[uuid] = DeviceFrame(uuid, number, labels.get("gpu_model", ""), "", "", None, None, 0, None, ())
    down: list[str] = []
    closed = 0
    holders: dict[tuple[str, str], HolderFrame] = {}
    for sample in samples:
        name, uuid = sample.name.removeprefix(PREFIX), sample.labels.get("gpu_uuid", "")
        if name == "collector_success" and not sample.value:
            down.append(f"{sample.labels.get('collector', '')}: does not answer")
        elif name == "agent_intervals_closed_total" and abs(sample.value) < 1e18:
            closed = round(sample.value)
        elif uuid not in devices or not abs(sample.value) < 1e18:  # false for NaN too
            continue
        elif name.startswith("pod_gpu_"):
            _add_holder(holders, name, uuid, sample)
        else:
            devices[uuid] = _with_sample(devices[uuid], name, sample.value)
    frames = [
        replace(device, holders=tuple(h for (gpu, _), h in sorted(holders.items()) if gpu == device.uuid))
        for device in devices.values()
    ]
    frames.sort(key=lambda device: (device.index, device.uuid))
    return Frame(at_ms, tuple(frames), "; ".join(down), closed)


def _with_sample(device: DeviceFrame, name: str, value: float) -> DeviceFrame:
    if name == "gpu_busy_seconds_total":
        return replace(device, busy_us=round(value * _MICRO))
    if name == "gpu_memory_used_bytes":
        return replace(device, memory_mib=round(value / _MIB))
    if name == "gpu_memory_total_bytes":
        return replace(device, memory_of_mib=round(value / _MIB))
    if name == "gpu_power_watts":
        return replace(device, power_mw=round(value * 1_000))
    if name in ("gpu_lost", "gpu_silent") and value:
        return replace(device, note=name.removeprefix("gpu_"))
    return device


def _add_holder(holders: dict[tuple[str, str], HolderFrame], name: str, uuid: str, sample: Sample) -> None:
    labels = sample.labels
    key = "|".join(labels.get(part, "") for part in ("mig_uuid", "namespace", "pod", "container"))
    names = "/".join(part for part in (labels.get("namespace", ""), labels.get("pod", "")) if part)
    holder = holders.get((uuid, key)) or HolderFrame(key, names, None, None, None)
    if name == "pod_gpu_busy_seconds_total":
        holder = replace(holder, busy_us=round(sample.value * _MICRO))
    elif name == "pod_gpu_memory_used_bytes":
        holder = replace(holder, memory_mib=round(sample.value / _MIB))
    elif name == "pod_gpu_share_ratio":
        holder = replace(holder, share=Fraction(round(sample.value * _MICRO), _MICRO))
    holders[uuid, key] = holder


_WORD = re.compile(r"[A-Za-z0-9.]+")
_CURRENCY = re.compile(r"[A-Z]{3}")
_MOST = Decimal(10**6)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    per_hour: dict[str, int | float | str]
    currency: str = ""


@dataclass(frozen=True, slots=True)
class HourlyPrices:
    """Prices per GPU-hour: one for all models (`everything`), or by words of the model's name, from a file:

        currency: USD
        per_hour:
          H100: 2.49
          H100 NVL: 2.29        # the entry with the most words of a GPU's name wins

    A GPU that no entry matches has no price: None, never 0."""

    currency: str = ""
    by_words: tuple[tuple[frozenset[str], Decimal], ...] = ()
    everything: Decimal | None = None

    def of(self, model: str) -> Decimal | None:
        """Return the price of a GPU of this model; None without a price."""
        words = frozenset(_WORD.findall(model.lower()))
        best = max(
            (entry for entry in self.by_words if entry[0] <= words), key=lambda entry: len(entry[0]), default=None
        )
        return best[1] if best else self.everything


def price(text: str) -> Decimal:
    """Parse a price. Raises ValueError."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 <= value <= _MOST:
        raise ValueError(f"{text!r} is not a price from 0 to {_MOST:,}")
    return value


def parse(document: yaml_file.Document) -> HourlyPrices:
    """Parse the document of a price file. Raises FileFault with the lines of the faults."""
    file = yaml_file.convert(document, _File)
    entries: dict[frozenset[str], Decimal] = {}
    faults: list[str] = []
    if file.currency and not _CURRENCY.fullmatch(file.currency):
        faults.append(
            f"{document.place(('currency',))}: currency: expected three capital letters, not {file.currency!r}"
        )
    for name, value in file.per_hour.items():
        place = document.place(("per_hour", name))
        words = frozenset(_WORD.findall(name.lower()))
        if not words:
            faults.append(f"{place}: {name!r} contains no letter or digit: write words of a GPU's name")
        elif words in entries:
            faults.append(f"{place}: {name!r} has the same words as an earlier entry: remove one of them")
        try:
            entries[words] = price(str(value))
        except ValueError as error:
            faults.append(f"{place}: {error}")
    if faults:
        raise yaml_file.FileFault(faults)
    return HourlyPrices(file.currency, tuple(entries.items()))


if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 5.0

FrameReader = Callable[[], Frame]
"""Reads the node once."""
_DESCRIPTION = """Show a live table of this machine's GPUs and their holders.

Without arguments the command reads NVML, and the holders are steps of jobs, containers, pods (by their log folders) and
processes. With --metrics it shows the last closed intervals of a running agent. It stores and sends nothing. An unknown
value is a dash. Exit codes: 0 success, 1 no GPU or the page cannot be read, 2 wrong call."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the arguments of `gputally agent top`."""
    parser = commands.add_parser("top", help="show a live table of this machine's GPUs", description=_DESCRIPTION)
    parser.add_argument("--once", action="store_true", help="Print the table once and exit.")
    parser.add_argument(
        "--metrics", default="", metavar="URL", help="Metrics page of a running agent, http://HOST:PORT/metrics."
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="Time between two readings (default 1)."
    )
    prices = parser.add_mutually_exclusive_group()
    prices.add_argument("--price-per-hour", metavar="PRICE", help="Price of a GPU-hour of every GPU.")
    prices.add_argument("--prices", type=Path, metavar="FILE", help="Prices by GPU model (YAML: currency, per_hour).")
    parser.add_argument("--proc", default="/proc", help="Where the host's process table is mounted (default /proc).")
    parser.add_argument(
        "--pod-logs",
        default="/var/log/pods",
        help="Where the kubelet's log folders are mounted (default /var/log/pods).",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises SettingsError, FileFault, DriverReplaced."""
    if not MIN_PERIOD_S <= arguments.every <= MAX_PERIOD_S:
        raise SettingsError(
            f"--every: must be between {MIN_PERIOD_S} and {MAX_PERIOD_S:g} seconds; the driver keeps samples for 10 s"
        )
    prices = _prices(arguments)
    logging.basicConfig(level=logging.ERROR)
    clock = SystemClock()
    with ExitStack() as stack:
        read = page(arguments.metrics, clock) if arguments.metrics else _machine(arguments, clock, stack)
        if arguments.once:
            return print_once(read, clock, prices=prices)
        stop = threading.Event()
        set_on_signals(stop)
        table = stack.enter_context(LiveTable(prices=prices))
        any_gpu = False
        while not stop.is_set():
            frame = read()
            any_gpu = any_gpu or bool(frame.devices)
            table.draw(frame)
            clock.wait(arguments.every, stop)
    return 0 if any_gpu else 1


def _prices(arguments: argparse.Namespace) -> HourlyPrices:
    if arguments.prices is not None:
        return parse(yaml_file.read(arguments.prices))
    if arguments.price_per_hour is None:
        return HourlyPrices()
    try:
        return HourlyPrices(everything=price(arguments.price_per_hour))
    except ValueError as error:
        raise SettingsError(f"--price-per-hour: {error}") from error


def _machine(arguments: argparse.Namespace, clock: Clock, stack: ExitStack) -> FrameReader:
    from agent.gpu_readers.chosen import open_readers
    from agent.gpu_readers.protocol import Surroundings
    from agent.holders.process_cgroups import PodLogs, ProcessTable
    from agent.node_reader import NodeSource

    names = PodLogs(Path(arguments.pod_logs))
    readers = open_readers("nvml", Surroundings(clock, BackgroundTasks(clock)))
    source = NodeSource(readers, ProcessTable(Path(arguments.proc)), None, names)
    stack.callback(source.close)
    return lambda: from_snapshot(source.snapshot(clock.wall_ms()))


def page(url: str, clock: Clock) -> FrameReader:
    """Return a function that reads a running agent's metrics page. If the agent does not answer, the frame has no GPUs,
    and its message has the reason.

    Raises SettingsError for an address that is not http://."""
    read_page = page_reader(url, 9401, "--metrics")

    def read() -> Frame:
        at_ms = clock.wall_ms()
        try:
            return from_exposition(read_page(), at_ms)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Frame(at_ms, (), f"{urlsplit(url).netloc}: {error}")

    return read


TREND_MS = 5 * MS_PER_MINUTE
TREND_CELLS = 15
_CELL_MS = TREND_MS // TREND_CELLS
_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "–"
_CENT = Decimal("0.01")
_HOLDER_WIDTH = 14
# On a narrow terminal, the last of these columns is left out first. Widths are without the gap between columns.
_OPTIONAL = (("Power", 6), ("Cost/h", 7), ("5 min", TREND_CELLS), ("Model", 14))
_ALWAYS = (("GPU", 3), ("Holder", _HOLDER_WIDTH), ("Busy", 5), ("Memory", 9))
_ORDER = ("GPU", "Model", "Holder", "Busy", "Memory", "Power", "Cost/h", "5 min")


@dataclass(frozen=True, slots=True)
class TopLine:
    """One row: a GPU, or one of its holders (then `index` is ""). Unknown values are None.

    busy: percent.
    trend: mean percent in each cell of the last five minutes, the newest last."""

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
    """The last five minutes of a busy-time counter."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, int | None]] = deque()
        """(start_ms, end_ms, busy percent or None if unknown) between two readings of the counter, the oldest first."""
        self._last: tuple[int, int | None, str] | None = None

    def observe(self, at_ms: int, busy_us: int | None, epoch: str) -> None:
        if self._last is not None and self._last[0] < at_ms:
            before_ms, before_us, before_epoch = self._last
            percent = None
            if before_us is not None and busy_us is not None and before_epoch == epoch and busy_us >= before_us:
                percent = min(100, (busy_us - before_us) * 100 // ((at_ms - before_ms) * US_PER_MS))
            self.steps.append((before_ms, at_ms, percent))
        while self.steps and self.steps[0][1] <= at_ms - TREND_MS:
            self.steps.popleft()
        self._last = (at_ms, busy_us, epoch)

    def percent(self) -> int | None:
        return self.steps[-1][2] if self.steps else None


class HolderHistories:
    """Busy time per GPU and holder over the last five minutes, from their counters."""

    def __init__(self, prices: HourlyPrices = HourlyPrices()) -> None:
        self.prices = prices
        self._tracks: dict[tuple[str, str], BusyHistory] = {}
        self._serial: int | None = None

    def observe(self, frame: Frame) -> None:
        """Add a frame. A frame with the same `serial` as the previous one has no new counters and is ignored."""
        if frame.serial is not None and frame.serial == self._serial:
            return
        self._serial = frame.serial
        present = set()
        for device in frame.devices:
            counters = [("", device.busy_us), *((h.key, h.busy_us) for h in device.holders)]
            for key, busy_us in counters:
                present.add((device.uuid, key))
                self._tracks.setdefault((device.uuid, key), BusyHistory()).observe(
                    frame.at_ms, busy_us, device.counter_epoch
                )
        for gone in self._tracks.keys() - present:
            del self._tracks[gone]

    def lines(self, frame: Frame) -> tuple[TopLine, ...]:
        """Return one line per GPU and, if several holders share it, one for each of them."""
        lines: list[TopLine] = []
        for device in frame.devices:
            price = self.prices.of(device.model)
            lines.append(self._device(device, price, frame.at_ms))
            if len(device.holders) > 1:
                lines += [self._holder(device, holder, price, frame.at_ms) for holder in device.holders]
        return tuple(lines)

    def _device(self, device: DeviceFrame, price: Decimal | None, at_ms: int) -> TopLine:
        track = self._tracks.get((device.uuid, ""), BusyHistory())
        shares = [holder.share for holder in device.holders if holder.share is not None]
        cost = None
        if price is not None and device.holders and len(shares) == len(device.holders):
            part = sum(shares)
            cost = price * part.numerator / part.denominator
        names = [holder.name for holder in device.holders]
        return TopLine(
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

    def _holder(self, device: DeviceFrame, holder: HolderFrame, price: Decimal | None, at_ms: int) -> TopLine:
        track = self._tracks.get((device.uuid, holder.key), BusyHistory())
        share = holder.share
        cost = None if price is None or share is None else price * share.numerator / share.denominator
        trend = _trend(track.steps, at_ms)
        return TopLine("", "", holder.name, track.percent(), holder.memory_mib, 0, None, trend, cost)


def sparkline(trend: Sequence[int | None]) -> str:
    """Draw one bar per cell. The cell of an unknown value is blank."""
    return "".join(" " if v is None else _BARS[min(v * len(_BARS) // 101, len(_BARS) - 1)] for v in trend)


def columns(width: int, priced: bool) -> tuple[str, ...]:
    """Return the names of the columns that fit into `width` characters. priced: whether there are prices."""
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
    """A table of lines that adapts to the width of the terminal. message: a line below the table."""

    def __init__(self, lines: Sequence[TopLine], message: str = "") -> None:
        self._lines = lines
        self._message = message

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table

        shown = columns(options.max_width, any(line.cost is not None for line in self._lines))
        table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False, padding=0)
        table.caption, table.caption_justify = self._message or None, "left"
        widths = dict((*_ALWAYS, *_OPTIONAL))
        for name in shown:
            if name == "Holder":
                table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
            elif name in ("Model", "5 min"):
                table.add_column(name, no_wrap=True, overflow="ellipsis", width=widths[name])
            else:
                table.add_column(name, justify="right", no_wrap=True, width=widths[name])
        for line in self._lines:
            cells = _cells(line)
            table.add_row(*(cells[name] for name in shown), style="red" if line.note else None)
        yield table


def _cells(line: TopLine) -> dict[str, str]:
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
    """A context manager with a table that is drawn again with every frame."""

    def __init__(self, console: Console | None = None, prices: HourlyPrices = HourlyPrices()) -> None:
        from rich.live import Live

        self._history = HolderHistories(prices)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self, frame: Frame) -> None:
        self._history.observe(frame)
        self._live.update(_drawing(self._history, frame), refresh=True)


def print_once(
    read: FrameReader, clock: Clock, console: Console | None = None, prices: HourlyPrices = HourlyPrices()
) -> int:
    """Print the table once and return the exit code: 0, or 1 if there is no GPU. Busy time is a difference, so the
    function reads twice, a second apart."""
    from gputally.base.terminal import Terminal

    history = HolderHistories(prices)
    frame = read()
    if frame.devices:
        history.observe(frame)
        clock.wait(1.0, threading.Event())
        frame = read()
        history.observe(frame)
    (console or Terminal()).print(_drawing(history, frame), markup=False, highlight=False)
    return 0 if frame.devices else 1


def _drawing(history: HolderHistories, frame: Frame) -> Drawing | str:
    if not frame.devices:
        return "no GPU to watch" + (f" ({frame.message})" if frame.message else "")
    lines = history.lines(frame)
    return Drawing(lines, _summary(frame, lines, history.prices.currency))


def _summary(frame: Frame, lines: Sequence[TopLine], currency: str) -> str:
    held = sum(bool(device.holders) for device in frame.devices)
    count = len(frame.devices)
    parts = [f"{count} GPU{'' if count == 1 else 's'}, {held} held"]
    costs = [line.cost for line in lines if line.index and line.cost is not None]
    if costs:
        total = sum(costs, Decimal(0)).quantize(_CENT)
        parts.append(f"{total} {currency or 'per hour'}{'/h' if currency else ''} held")
    return "; ".join([*parts, *([frame.message] if frame.message else [])])


def _trend(steps: Sequence[tuple[int, int, int | None]], at_ms: int) -> tuple[int | None, ...]:
    """Return the mean percent of each cell of the last five minutes, weighted by time; None if unknown. The newest cell
    is the last."""
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
