"""The live table: figures from snapshots, and legible at 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from agent.clock import VirtualClock
from agent.model import Allocation, DeviceReading, Gpu, MigInstance, Reading, Snapshot, Unavailable
from agent.watch import TREND_CELLS, History, Line, LiveTable, print_once, render, sparkline, unavailable
from agent.wire import Holder

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


def drawn(lines: tuple[Line, ...], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(lines, "8 GPUs, 1 held"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_busy_is_the_difference_of_the_counter() -> None:
    history = History()
    history.observe(snapshot(T0, 1_000_000))
    now = snapshot(T0 + 10_000, 6_500_000, Allocation("GPU-a", POD))
    history.observe(now)
    (line,) = history.lines(now)
    assert (line.index, line.model, line.holder, line.busy) == ("0", "H200", "vision/train-0", 55)
    assert (line.memory_mib, line.memory_of_mib, line.power_w) == (61_440, 144_384, 512)
    assert line.trend == (None,) * (TREND_CELLS - 1) + (55,)


def test_unknown_is_a_dash_and_no_zero() -> None:
    history = History()
    history.observe(snapshot(T0, Unavailable("MIG")))
    now = snapshot(T0 + 10_000, 5)
    history.observe(now)
    (line,) = history.lines(now)
    assert (line.busy, set(line.trend), line.holder) == (None, {None}, "–")
    assert " – " in drawn((line,))


def test_the_trend_covers_five_minutes() -> None:
    history = History()
    busy = 0
    for second in range(0, 700, 10):
        history.observe(snapshot(T0 + second * 1_000, busy))
        busy += 10_000_000 if second >= 500 else 0
    now = snapshot(T0 + 700_000, busy)
    history.observe(now)
    trend = history.lines(now)[0].trend
    assert trend == (0,) * 5 + (100,) * 10
    assert sparkline(trend) == "▁" * 5 + "█" * 10
    assert sparkline((None, 0, 50, 100)) == " ▁▄█"


def test_every_holder_of_a_shared_gpu_has_a_line() -> None:
    gpu = Gpu(
        "GPU-a", 0, "NVIDIA H200", 144_384, mig=(MigInstance("MIG-1", "3g.71gb", 1, 0, 3, 71_680),), mig_enabled=True
    )
    process = Holder(kind="process", uid="1:2", namespace="ann", name="python")
    now = snapshot(T0, 0, Allocation("GPU-a", POD, "MIG-1"), Allocation("GPU-a", process), gpu=gpu)
    history = History()
    history.observe(now)
    assert [(line.index, line.holder) for line in history.lines(now)] == [
        ("0", "3g.71gb vision/train-0"), ("", "python"),
    ]  # fmt: skip


def test_a_lost_gpu_says_so() -> None:
    now = snapshot(T0, Unavailable("gpu is lost"), health="lost")
    history = History()
    history.observe(now)
    assert "lost" in drawn(history.lines(now))


def test_the_table_is_legible_at_80_columns() -> None:
    lines = tuple(
        Line(str(n), "H100 80GB HBM3", "a-very-long-namespace/a-pod-with-a-long-name-0", 100, 81_559, 81_559, 700,
             (100,) * TREND_CELLS)
        for n in range(8)
    )  # fmt: skip
    text = drawn(lines)
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in (
        "H100 80GB HBM3",
        "100 %",
        "80/80 G",
        "700 W",
        "█" * TREND_CELLS,
        "Holder",
        "a-very-long-n…",
        "8 GPUs",
    ):
        assert part in text


def test_nothing_to_watch_is_one_line() -> None:
    empty = Snapshot(T0, (), (), sources=(("nvml", "driver not loaded"),))
    assert unavailable(empty) == "no GPU to watch (nvml: driver not loaded)"
    assert unavailable(snapshot(T0, 0)) == ""


class Counting:
    """A source that is 40 % busy."""

    def __init__(self, devices: bool = True) -> None:
        self.devices = devices

    def snapshot(self, at_ms: int) -> Snapshot:
        if not self.devices:
            return Snapshot(at_ms, (), (), sources=(("nvml", "driver not loaded"),))
        return snapshot(at_ms, (at_ms - T0) * 400, Allocation("GPU-a", POD))

    def close(self) -> None: ...


def test_once_reads_twice_and_prints() -> None:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    assert print_once(Counting(), VirtualClock(T0), console) == 0
    assert isinstance(console.file, io.StringIO)
    assert "40 %" in console.file.getvalue()
    assert print_once(Counting(devices=False), VirtualClock(T0), console) == 1
    assert console.file.getvalue().splitlines()[-1] == "no GPU to watch (nvml: driver not loaded)"


def test_the_live_table_is_redrawn() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with LiveTable(console) as table:
        table.show(snapshot(T0, 0, Allocation("GPU-a", POD)))
        table.show(snapshot(T0 + 1_000, 250_000, Allocation("GPU-a", POD)))
    assert isinstance(console.file, io.StringIO)
    assert "25 %" in console.file.getvalue()
