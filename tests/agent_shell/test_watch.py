"""The live table: figures from snapshots, and legible at 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from decimal import Decimal

import msgspec
import pytest
from rich.console import Console

from agent.commands.top_command import (
    TREND_CELLS,
    Drawing,
    Frame,
    History,
    Line,
    LiveTable,
    Prices,
    columns,
    from_snapshot,
    print_once,
    sparkline,
)
from agent.core.readings import (
    Allocation,
    DeviceReading,
    Gpu,
    InstanceReading,
    MigInstance,
    Reading,
    Snapshot,
    Unavailable,
)
from agent.wire import Holder
from gputally.base.clock import VirtualClock

T0 = 1_790_812_800_000
H200 = Gpu("GPU-a", 0, "NVIDIA H200", 144_384)
POD = Holder(kind="pod", uid="u1", namespace="vision", name="train-0", container="main")


def snapshot(at_ms: int, busy_us: Reading, *allocations: Allocation, gpu: Gpu = H200, health: str = "ok") -> Snapshot:
    device = DeviceReading(
        gpu=gpu,
        health="lost" if health == "lost" else "ok",
        counter_epoch="1",
        busy_us=busy_us,
        memory_used_mib=61_440,
        power_mw=512_400,
    )
    return Snapshot(at_ms, (device,), allocations)


def seen(at_ms: int, busy_us: Reading, *allocations: Allocation, health: str = "ok") -> Frame:
    return from_snapshot(snapshot(at_ms, busy_us, *allocations, health=health))


def drawn(lines: tuple[Line, ...], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(Drawing(lines, "8 GPUs, 1 held"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_busy_is_the_difference_of_the_counter() -> None:
    history = History()
    history.observe(seen(T0, 1_000_000))
    now = seen(T0 + 10_000, 6_500_000, Allocation("GPU-a", POD))
    history.observe(now)
    (line,) = history.lines(now)
    assert (line.index, line.model, line.holder, line.busy) == ("0", "H200", "vision/train-0", 55)
    assert (line.memory_mib, line.memory_of_mib, line.power_w) == (61_440, 144_384, 512)
    assert line.trend == (None,) * (TREND_CELLS - 1) + (55,)


def test_unknown_is_a_dash_and_no_zero() -> None:
    history = History()
    history.observe(seen(T0, Unavailable("MIG")))
    now = seen(T0 + 10_000, 5)
    history.observe(now)
    (line,) = history.lines(now)
    assert (line.busy, set(line.trend), line.holder) == (None, {None}, "–")
    assert " – " in drawn((line,))


def test_the_trend_covers_five_minutes() -> None:
    history = History()
    busy = 0
    for second in range(0, 700, 10):
        history.observe(seen(T0 + second * 1_000, busy))
        busy += 10_000_000 if second >= 500 else 0
    now = seen(T0 + 700_000, busy)
    history.observe(now)
    trend = history.lines(now)[0].trend
    assert trend == (0,) * 5 + (100,) * 10
    assert sparkline(trend) == "▁" * 5 + "█" * 10
    assert sparkline((None, 0, 50, 100)) == " ▁▄█"


def test_every_holder_of_a_shared_gpu_has_a_line_with_its_own_figures() -> None:
    gpu = Gpu(
        "GPU-a", 0, "NVIDIA H200", 144_384, mig=(MigInstance("MIG-1", "3g.71gb", 1, 0, 3, 71_680),), mig_enabled=True
    )
    process = Holder(kind="process", uid="1:2", namespace="ann", name="python")

    def seen(at_ms: int, busy_us: int) -> Frame:
        held = Allocation("GPU-a", POD, "MIG-1"), Allocation("GPU-a", process)
        now = snapshot(at_ms, Unavailable("MIG"), *held, gpu=gpu)
        instances = (InstanceReading("MIG-1", busy_us, 1_024),)
        return from_snapshot(replace(now, devices=(msgspec.structs.replace(now.devices[0], instances=instances),)))

    history = History(Prices("USD", everything=Decimal(7)))
    history.observe(seen(T0, 0))
    history.observe(now := seen(T0 + 10_000, 3_000_000))
    whole, pod, other = history.lines(now)
    assert (whole.index, whole.holder, whole.busy, whole.cost) == ("0", "2 holders", 30, Decimal(7))
    assert (pod.index, pod.holder, pod.busy, pod.memory_mib, pod.cost) == (
        "", "3g.71gb vision/train-0", 30, 1_024, Decimal(3),
    )  # fmt: skip
    assert (other.holder, other.busy, other.memory_mib, other.cost) == ("ann/python", None, None, Decimal(4))
    text = drawn((whole, pod, other), 100)
    assert "  3g.71gb vision" in text
    assert " 1 G" in text


def test_a_lost_gpu_says_so() -> None:
    now = seen(T0, Unavailable("gpu is lost"), health="lost")
    history = History()
    history.observe(now)
    assert "lost" in drawn(history.lines(now))


LONG = tuple(
    Line(str(n), "H100 80GB HBM3", "a-very-long-namespace/a-pod-with-a-long-name-0", 100, 81_559, 81_559, 700,
         (100,) * TREND_CELLS, Decimal("1234.567"))
    for n in range(8)
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, ("GPU", "Model", "Holder", "Busy", "Memory", "Power", "Cost/h", "5 min")),
        (80, ("GPU", "Model", "Holder", "Busy", "Memory", "Power", "Cost/h", "5 min")),
        (70, ("GPU", "Holder", "Busy", "Memory", "Power", "Cost/h", "5 min")),
        (52, ("GPU", "Holder", "Busy", "Memory", "Power", "Cost/h")),
        (44, ("GPU", "Holder", "Busy", "Memory", "Power")),
        (38, ("GPU", "Holder", "Busy", "Memory")),
    ],
)
def test_the_table_fits_the_terminal_and_leaves_out_what_matters_least(width: int, shown: tuple[str, ...]) -> None:
    text = drawn(LONG, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert columns(width, priced=True) == shown
    head = next(line for line in text.splitlines() if "GPU" in line)
    assert [name for name in shown if name in head] == list(shown)
    parts = {"Busy": "100 %", "Memory": "80/80 G", "Power": "700 W", "Cost/h": "1234.57", "5 min": "█" * TREND_CELLS,
             "Model": "H100 80GB HBM3"}  # fmt: skip
    assert all((part in text) == (name in shown) for name, part in parts.items())
    assert "a-very-long" in text


def test_without_a_price_there_is_no_column_for_it() -> None:
    assert "Cost/h" not in columns(200, priced=False)


def counting(clock: VirtualClock, devices: bool = True) -> Frame:
    """A node that is 40 % busy."""
    at_ms = clock.wall_ms()
    if not devices:
        return from_snapshot(Snapshot(at_ms, (), (), sources=(("nvml", "driver not loaded"),)))
    return seen(at_ms, (at_ms - T0) * 400, Allocation("GPU-a", POD))


def test_once_reads_twice_and_prints() -> None:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    clock = VirtualClock(T0)
    assert print_once(lambda: counting(clock), clock, console) == 0
    assert isinstance(console.file, io.StringIO)
    assert "40 %" in console.file.getvalue()
    assert print_once(lambda: counting(clock, devices=False), clock, console) == 1
    assert console.file.getvalue().splitlines()[-1] == "no GPU to watch (nvml: driver not loaded)"


def test_the_live_table_is_redrawn() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with LiveTable(console) as table:
        table.draw(seen(T0, 0, Allocation("GPU-a", POD)))
        table.draw(seen(T0 + 1_000, 250_000, Allocation("GPU-a", POD)))
    assert isinstance(console.file, io.StringIO)
    assert "25 %" in console.file.getvalue()
