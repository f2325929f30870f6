"""Our own readers of GPUs pass the suite that every reader passes."""

from __future__ import annotations

import pytest

from agent.core.readings import DeviceReading, InstanceReading
from agent.gpu_readers import dcgm, nvml
from agent.gpu_readers.chosen import own
from agent.gpu_readers.dcgm import MAX_AGE_MS, DcgmReader, Exporter
from agent.gpu_readers.protocol import SEAM, GpuReader, GpuReaderPlugin
from agent.simulation.simulated_node import A100, make_gpu
from gputally.base.clock import VirtualClock
from gputally.base.plugins import OURS, plugins
from gputally.testing.gpu_readers import START_MS, GpuMachine, GpuReaderSuite
from tests.fakes.nvml.library import FakeNvml


def test_what_the_agent_finds_without_looking_for_plugins_is_what_is_registered() -> None:
    ours = {one.name: one.manifest for one in plugins(SEAM, GpuReaderPlugin) if one.package == OURS}
    assert ours.keys() == {"dcgm", "nvml"}
    assert {name: own(name) for name in ours} == ours
    assert [own(name) for name in ("protocol", "chosen", "nothing", "../nvml", "")] == [None] * 5


class Driver:
    """A driver with two GPUs, one of which is in MIG mode."""

    place, before, uuids = "", (), frozenset({"GPU-a", "GPU-m"})

    def __init__(self, fake: FakeNvml) -> None:
        self._fake = fake
        self.clock = VirtualClock(START_MS)
        mib = 1 << 20
        fake.tell("reset", f"at {START_MS * 1_000}")
        for gpu in ("GPU-a", "GPU-m"):
            fake.tell(
                f"gpu {gpu} NVIDIA_H200", f"mem {1_000 * mib} {300 * mib}", "simulate 70000 500000",
                f"load 10 500000 {mib}",
            )  # fmt: skip

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        self._fake.tell(f"at {self.clock.wall_ms() * 1_000}")

    def fail(self) -> None:
        self._fake.tell("process", "initerr 9")

    def mend(self) -> None:
        self._fake.tell("initerr 0")


class TestNvml(GpuReaderSuite):
    plugin = nvml.READER

    @pytest.fixture
    def machine(self, fake_nvml: FakeNvml) -> GpuMachine:
        return Driver(fake_nvml)


class ExporterPage:
    """An exporter of two GPUs that the driver lists without values."""

    place, uuids = "http://localhost:9400/metrics", frozenset({"GPU-a", "GPU-m"})

    def __init__(self) -> None:
        plain, cut = make_gpu("GPU-a", 0, A100), make_gpu("GPU-m", 1, A100, ["3g.40gb"])
        self.before = (
            DeviceReading(plain),
            DeviceReading(cut, instances=tuple(InstanceReading(part.uuid) for part in cut.mig)),
        )
        self.clock = VirtualClock(START_MS)
        self.exporter = Exporter(self.page, self.clock)
        self._answers = True

    def page(self) -> str:
        if not self._answers:
            raise ConnectionRefusedError("refused")
        return (
            'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} 0.25\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-m",GPU_I_ID="1"} 0.5\n'
        )

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        self.exporter.refresh()

    def fail(self) -> None:
        self._answers = False
        self.clock.advance(MAX_AGE_MS)

    def mend(self) -> None:
        self._answers = True


class TestDcgm(GpuReaderSuite):
    plugin = dcgm.READER

    @pytest.fixture
    def machine(self) -> GpuMachine:
        return ExporterPage()

    def open(self, machine: GpuMachine) -> GpuReader:
        """Open it on the fake's clock, without the thread that scrapes by the time of the day."""
        assert isinstance(machine, ExporterPage)
        return DcgmReader(machine.exporter)
