"""Compares the agent's readings of a real GPU with known loads: `make test-gpu` on a machine with one idle GPU.

The tests run in real time and do not change the GPU's settings. They verify what tests/fakes/nvml imitates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from agent.core.readings import DeviceReading, Unavailable
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.process_cgroups import ProcessTable
from agent.node_reader import NodeSource
from gputally.base.clock import SystemClock

CLOCK = SystemClock()
ROOT = Path(__file__).parents[3]
LOAD = [sys.executable, str(Path(__file__).with_name("gpu_load.py"))]
Start = Callable[..., "subprocess.Popen[str]"]


def pause(seconds: float) -> None:
    """Let real time pass."""
    CLOCK.wait(seconds, Event())


def result(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return what a load printed at its end."""
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    found: dict[str, int] = json.loads(out)
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a load; all loads are stopped after the test."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*LOAD, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environment},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


class Meter:
    """The agent's source on this machine, read once a second."""

    def __init__(self) -> None:
        self.gpus = Gpus(Driver(), clock=CLOCK)
        self.source = NodeSource(GpuReaders((ChosenReader("nvml", self.gpus),)), ProcessTable(Path("/proc")))
        self.busy_us: dict[int, int] = {}
        """Busy time by pid, scaled to that of the GPU."""
        self.device = self.source.snapshot(CLOCK.wall_ms()).devices[0]

    def read(self) -> None:
        snapshot = self.source.snapshot(CLOCK.wall_ms())
        before, self.device, self.allocations = self.device, snapshot.devices[0], snapshot.allocations
        if isinstance(self.device.busy_us, Unavailable) or isinstance(before.busy_us, Unavailable):
            return
        steps = {p.pid: p.busy_us for p in self.device.processes if isinstance(p.busy_us, int)}
        scale = min((self.device.busy_us - before.busy_us) / max(sum(steps.values()), 1), 1)
        for pid, step_us in steps.items():
            self.busy_us[pid] = self.busy_us.get(pid, 0) + round(step_us * scale)

    def watch(self, seconds: int) -> None:
        for _ in range(seconds):
            pause(1)
            self.read()

    def until_ended(self, *processes: subprocess.Popen[str]) -> list[dict[str, int]]:
        """Read until the loads have ended and the driver's samples of them have arrived."""
        while any(process.poll() is None for process in processes):
            self.watch(1)
        self.watch(3)
        return [result(process) for process in processes]


@pytest.fixture
def meter() -> Iterator[Meter]:
    made = Meter()
    made.watch(3)
    yield made
    made.source.close()


def known(reading: int | Unavailable) -> int:
    assert isinstance(reading, int), reading
    return reading


def since(before: DeviceReading, after: DeviceReading) -> tuple[float, float]:
    """Return the seconds of busy time and of activity of all multiprocessors between two readings."""
    assert after.sample_gaps == before.sample_gaps
    busy_us = known(after.busy_us) - known(before.busy_us)
    return busy_us / 1e6, (known(after.sm_active_us) - known(before.sm_active_us)) / 1e6


@pytest.mark.parametrize(("arguments", "activity"), [
    ([8], 1.0),
    ([8, "--busy", 30], 1.0),
    ([8, "--busy", 30, "--period", 97], 1.0),
    ([8, "--multiprocessors", 1], 0.05),
])  # fmt: skip
def test_busy_time_is_the_time_of_the_kernels(
    meter: Meter, start: Start, arguments: list[object], activity: float
) -> None:
    before = meter.device
    (ran,) = meter.until_ended(start(*arguments))
    busy_s, active_s = since(before, meter.device)
    kernels_s = ran["kernel_ms"] / 1_000
    assert busy_s == pytest.approx(kernels_s, rel=0.06)
    assert active_s <= (kernels_s + 0.5) * activity
    assert meter.busy_us[ran["pid"]] / 1e6 == pytest.approx(busy_s, rel=0.1)


def test_energy_is_power_over_time(meter: Meter, start: Start) -> None:
    load = start(8)
    meter.watch(3)
    first_uj, milliwatts = known(meter.device.energy_uj), []
    for _ in range(4):
        meter.watch(1)
        milliwatts.append(known(meter.device.power_mw))
    joules = (known(meter.device.energy_uj) - first_uj) / 1e6
    assert joules == pytest.approx(sum(milliwatts) / 1e3, rel=0.1)
    meter.until_ended(load)


def test_processes_that_follow_each_other_keep_their_own_time(meter: Meter, start: Start) -> None:
    before = meter.device
    ran = [meter.until_ended(start(3.3))[0] for _ in range(3)]
    busy_s, _ = since(before, meter.device)
    for one in ran:
        assert meter.busy_us[one["pid"]] / 1e6 == pytest.approx(one["kernel_ms"] / 1e3, rel=0.2)
    assert sum(meter.busy_us[one["pid"]] for one in ran) / 1e6 == pytest.approx(busy_s, rel=0.05)


def test_processes_at_the_same_time_hold_the_gpu_together(meter: Meter, start: Start) -> None:
    before = meter.device
    loads = [start(10, "--busy", 60, "--period", 310, "--memory", 256), start(10, "--busy", 10, "--period", 290)]
    meter.watch(6)
    assert not isinstance(meter.allocations, Unavailable)
    assert {a.sharing for a in meter.allocations} == {"processes"}
    held = {p.pid: known(p.memory_mib) for p in meter.device.processes}
    assert held[loads[0].pid] - held[loads[1].pid] == 192
    heavy, light = meter.until_ended(*loads)
    busy_s, _ = since(before, meter.device)
    assert meter.busy_us[heavy["pid"]] > 2 * meter.busy_us[light["pid"]] > 0
    assert sum(meter.busy_us[one["pid"]] for one in (heavy, light)) / 1e6 == pytest.approx(busy_s, rel=0.2)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare command")
def test_an_agent_outside_the_hosts_process_namespace_says_so(start: Start) -> None:
    load = start(12)
    pause(3)
    program = (
        "from tests.hardware.nvml.gpu_suite import Meter\nmeter = Meter()\nmeter.watch(4)\nprint(meter.device.unlisted)"
    )
    seen = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert seen.stdout.strip() == "(('', \"processes outside the agent's process namespace\"),)"
    result(load)


@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="no MPS on this machine")
def test_the_time_of_an_mps_server_belongs_to_its_clients(meter: Meter, start: Start, tmp_path: Path) -> None:
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    environment = {**os.environ, **pipe}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
    try:
        clients = [start(8, **pipe), start(8, "--busy", 25, **pipe)]
        meter.watch(7)
        assert not isinstance(meter.allocations, Unavailable)
        held = {a.holder.uid.partition(":")[0] for a in meter.allocations}
        assert held == {str(client.pid) for client in clients}
        busy = {r.holder.uid.partition(":")[0]: known(r.busy_us) for r in meter.device.holders}
        assert len(busy) == 3
        assert all(busy.pop(pid) > 2_000_000 for pid in held)
        assert list(busy.values()) == [0], "the server itself has none"
        meter.until_ended(*clients)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 2\n", text=True, check=True, env=environment)


def test_an_error_of_a_program_is_counted(meter: Meter, start: Start) -> None:
    (ran,) = meter.until_ended(start(1, "--fault"))
    assert "illegal memory access" in str(ran["fault"])
    assert [(event.xid, event.count) for event in meter.device.condition.xids] == [(31, 1)]


def test_a_released_driver_leaves_no_open_file(meter: Meter) -> None:
    def open_files() -> list[str]:
        targets = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [target for target in targets if "nvidia" in target]

    assert open_files()
    meter.gpus.release("test")
    meter.watch(1)
    assert open_files() == []
    meter.gpus.reacquire("test")
    meter.watch(2)
    known(meter.device.busy_us)
