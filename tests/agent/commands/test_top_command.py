"""`agent top`: figures from snapshots, prices, the page of a running agent, and its width at 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent.__main__ import main
from agent.commands.top_command import (
    TREND_CELLS,
    Drawing,
    Frame,
    HolderHistories,
    HourlyPrices,
    LiveTable,
    TopLine,
    columns,
    from_exposition,
    from_snapshot,
    page,
    parse,
    price,
    print_once,
    sparkline,
)
from agent.core.readings import (
    Allocation,
    DeviceReading,
    Gpu,
    InstanceReading,
    MigInstance,
    NodeSnapshot,
    Reading,
    Unavailable,
)
from agent.metering.meter import Meter
from agent.metrics.exporter import AgentMetrics, Exposition
from agent.metrics.metric_families import Operations
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Health, Holder
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.base.yaml_file import parse as parse_yaml
from tests.agent.sample_values import T0

H200 = Gpu("GPU-a", 0, "NVIDIA H200", 144_384)
POD = Holder(kind="pod", uid="u1", namespace="vision", name="train-0", container="main")


def snapshot(at_ms: int, busy_us: Reading, *given: Allocation, gpu: Gpu = H200, health: Health = "ok") -> NodeSnapshot:
    device = DeviceReading(gpu, health, "1", busy_us=busy_us, memory_used_mib=61_440, power_mw=512_400)
    return NodeSnapshot(at_ms, (device,), given)


def seen(at_ms: int, busy_us: Reading, *allocations: Allocation, health: Health = "ok") -> Frame:
    return from_snapshot(snapshot(at_ms, busy_us, *allocations, health=health))


class Screen(Console):
    """A terminal of a given width whose text a test can read."""

    def __init__(self, width: int = 80, **options: Any) -> None:
        self.written = io.StringIO()
        super().__init__(width=width, file=self.written, color_system=None, **options)

    @property
    def text(self) -> str:
        return self.written.getvalue()


def drawn(lines: tuple[TopLine, ...], width: int = 80) -> str:
    screen = Screen(width)
    screen.print(Drawing(lines, "8 GPUs, 1 held"))
    return screen.text


def observed(*frames: Frame, prices: HourlyPrices | None = None) -> tuple[TopLine, ...]:
    """The lines of the last frame."""
    history = HolderHistories(prices) if prices else HolderHistories()
    for frame in frames:
        history.observe(frame)
    return history.lines(frames[-1])


def test_busy_is_the_difference_of_the_counter() -> None:
    (line,) = observed(seen(T0, 1_000_000), seen(T0 + 10_000, 6_500_000, Allocation("GPU-a", POD)))
    assert (line.index, line.model, line.holder, line.busy) == ("0", "H200", "vision/train-0", 55)
    assert (line.memory_mib, line.memory_of_mib, line.power_w) == (61_440, 144_384, 512)
    assert line.trend == (None,) * (TREND_CELLS - 1) + (55,)


def test_unknown_is_a_dash_and_no_zero() -> None:
    (line,) = observed(seen(T0, Unavailable("MIG")), seen(T0 + 10_000, 5))
    assert (line.busy, set(line.trend), line.holder) == (None, {None}, "–")
    assert " – " in drawn((line,))


def test_the_trend_covers_five_minutes() -> None:
    """Idle for 500 seconds, then busy for 200."""
    (line,) = observed(*(seen(T0 + second * 1_000, max(0, second - 500) * 1_000_000) for second in range(0, 701, 10)))
    assert line.trend == (0,) * 5 + (100,) * 10
    assert sparkline(line.trend) == "▁" * 5 + "█" * 10
    assert sparkline((None, 0, 50, 100)) == " ▁▄█"


def test_every_holder_of_a_shared_gpu_has_a_line_with_its_own_figures() -> None:
    gpu = replace(H200, mig=(MigInstance("MIG-1", "3g.71gb", 1, 0, 3, 71_680),), mig_enabled=True)
    process = Holder(kind="process", uid="1:2", namespace="ann", name="python")

    def shared(at_ms: int, busy_us: int) -> Frame:
        held = Allocation("GPU-a", POD, "MIG-1"), Allocation("GPU-a", process)
        now = snapshot(at_ms, Unavailable("MIG"), *held, gpu=gpu)
        instances = (InstanceReading("MIG-1", busy_us, 1_024),)
        return from_snapshot(replace(now, devices=(msgspec.structs.replace(now.devices[0], instances=instances),)))

    prices = HourlyPrices("USD", everything=Decimal(7))
    whole, pod, other = observed(shared(T0, 0), shared(T0 + 10_000, 3_000_000), prices=prices)
    assert (whole.index, whole.holder, whole.busy, whole.cost) == ("0", "2 holders", 30, Decimal(7))
    assert (pod.index, pod.holder, pod.busy, pod.memory_mib, pod.cost) == (
        "", "3g.71gb vision/train-0", 30, 1_024, Decimal(3),
    )  # fmt: skip
    assert (other.holder, other.busy, other.memory_mib, other.cost) == ("ann/python", None, None, Decimal(4))
    text = drawn((whole, pod, other), 100)
    assert "  3g.71gb vision" in text
    assert " 1 G" in text


def test_a_lost_gpu_says_so() -> None:
    assert "lost" in drawn(observed(seen(T0, Unavailable("gpu is lost"), health="lost")))


LONG = tuple(
    TopLine(str(n), "H100 80GB HBM3", "a-very-long-namespace/a-pod-with-a-long-name-0", 100, 81_559, 81_559, 700,
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


def test_once_reads_twice_and_prints() -> None:
    screen, clock = Screen(), VirtualClock(T0)

    def busy() -> Frame:
        """A GPU that is 40 % busy."""
        return seen(clock.wall_ms(), (clock.wall_ms() - T0) * 400, Allocation("GPU-a", POD))

    def without_driver() -> Frame:
        return from_snapshot(NodeSnapshot(clock.wall_ms(), (), (), sources=(("nvml", "driver not loaded"),)))

    assert print_once(busy, clock, screen) == 0
    assert "40 %" in screen.text
    assert print_once(without_driver, clock, screen) == 1
    assert screen.text.splitlines()[-1] == "no GPU to watch (nvml: driver not loaded)"


def test_the_live_table_is_redrawn() -> None:
    screen = Screen(force_terminal=True)
    with LiveTable(screen) as table:
        for at_ms, busy_us in ((T0, 0), (T0 + 1_000, 250_000)):
            table.draw(seen(at_ms, busy_us, Allocation("GPU-a", POD)))
    assert "25 %" in screen.text


MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])


def prices(text: str) -> HourlyPrices:
    return parse(parse_yaml(text, "prices.yaml"))


def test_the_entry_with_the_most_words_of_a_name_wins() -> None:
    book = prices('currency: EUR\nper_hour: {H100: 2.49, H100 NVL: "2.10", A100-SXM4-80GB: 1}\n')
    assert book.currency == "EUR"
    assert book.of("NVIDIA H100 80GB HBM3") == Decimal("2.49")
    assert book.of("NVIDIA H100 NVL") == Decimal("2.10")
    assert book.of("NVIDIA A100-SXM4-80GB") == 1
    assert book.of("NVIDIA A100-PCIE-40GB") is None
    assert HourlyPrices(everything=price("3")).of("anything") == 3


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("per_hour: {H100: free}", "prices.yaml:1: 'free' is not a price from 0 to 1,000,000"),
        ("currency: usd\nper_hour: {}", "prices.yaml:1: currency: expected three capital letters, not 'usd'"),
        (
            "per_hour:\n  H100: 1\n  h100: 2",
            "prices.yaml:3: 'h100' has the same words as an earlier entry: remove one of them",
        ),
        ("per_hour:\n  '--': 1", "prices.yaml:2: '--' contains no letter or digit: write words of a GPU's name"),
        ("per_hour: {H100: -1}", "prices.yaml:1: '-1' is not a price from 0 to 1,000,000"),
        ("per_hour: [1]", "prices.yaml:1: per_hour: Expected `object`, got `array`"),
        ("per_year: {}", "prices.yaml:1: per_year: unknown key"),
    ],
)
def test_a_wrong_price_file_is_refused_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(FileFault) as refused:
        prices(text)
    assert fault in refused.value.faults


@given(st.text(max_size=200))
def test_no_price_file_is_too_strange(text: str) -> None:
    try:
        book = prices(text)
    except FileFault:
        return
    assert book.of("H100") is None or book.of("H100")  # whatever it says, it can be asked


def test_a_running_agents_page_gives_the_same_table_as_its_snapshots() -> None:
    node = SimulatedNode("node-1", [make_gpu("GPU-0", 0, H100), MIG], start_ms=T0)
    for name, ppm in (("a", 400_000), ("b", 200_000)):
        holder = Holder(kind="pod", uid=name, namespace="nlp", name=name, container="main")
        node.place(T0, Allocation("GPU-0", holder, sharing="time-slicing", sharing_replicas=4), ppm, 2_048)
    clock = VirtualClock(T0)
    meter, metrics = Meter(60_000, ZoneInfo("UTC")), AgentMetrics("node-1", "1")
    exposition = Exposition("127.0.0.1", 0, metrics.exposition, lambda: True, BackgroundTasks(VirtualClock(0)))
    look = page(f"http://127.0.0.1:{exposition.port}/metrics", clock)
    frames, rows = [], 0
    for _ in range(6):
        snapshot = node.snapshot(clock.wall_ms())
        closed = meter.observe(snapshot)
        rows += sum(len(each.rows) for each in closed)
        metrics.observe(snapshot, closed)
        metrics.operate(Operations(intervals_closed=rows))
        for _ in range(3):
            frames.append(look())
            clock.advance(20_000)
    exposition.close()
    table = drawn(observed(*frames, prices=HourlyPrices("USD", everything=Decimal(8))), 100)
    text = [line.split() for line in table.splitlines() if line.strip()]
    assert text[2:6] == [
        ["0", "H100", "80GB", "HBM3", "2", "holders", "60", "%", "4/80", "G", "448", "W", "4.00", "▅" * 12],
        ["nlp/a", "40", "%", "2", "G", "2.00", "▄" * 12],
        ["nlp/b", "20", "%", "2", "G", "2.00", "▂" * 12],
        ["1", "A100-SXM4-80GB", "–", "0", "%", "0/80", "G", "55", "W", "▁" * 12],
    ]
    gone = look()
    assert gone.devices == ()
    assert "Connection refused" in gone.message


@given(st.one_of(st.text(max_size=200), st.text(alphabet='gputally_gpu_info{}="uid,x 0.1e9\n#', max_size=200)))
def test_no_page_is_too_strange(text: str) -> None:
    try:
        from_exposition(text, T0)
    except ValueError:
        return


def test_figures_that_are_no_numbers_are_left_out() -> None:
    frame = from_exposition(
        'gputally_gpu_info{gpu_uuid="G",gpu_index="²",gpu_model="H100"} 1\n'
        'gputally_gpu_busy_seconds_total{gpu_uuid="G"} NaN\ngputally_gpu_power_watts{gpu_uuid="G"} +Inf\n'
        'gputally_gpu_lost{gpu_uuid="G"} 1\ngputally_collector_success{collector="nvml"} 0\n',
        T0,
    )
    (device,) = frame.devices
    assert (device.index, device.busy_us, device.power_mw, device.note) == (0, None, None, "lost")
    assert frame.message == "nvml: does not answer"


@pytest.mark.parametrize(("arguments", "said"), [
    ("--price-per-hour cheap", "'cheap' is not a price from 0 to 1,000,000"),
    ("--price-per-hour NaN", "not a price"),
    ("--prices {folder}/p.yaml", "p.yaml:1"),
    ("--prices {folder}/none.yaml", "No such file"),
    ("--every 60", "--every: must be between"),
    ("--metrics https://x", "--metrics: expected http://"),
])  # fmt: skip
def test_a_wrong_call_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, said: str
) -> None:
    (tmp_path / "p.yaml").write_text("per_hour: {H100: x}\n")
    assert main(["top", "--once", *arguments.format(folder=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
