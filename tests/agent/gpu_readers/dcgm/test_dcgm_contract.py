"""The reader of an exporter passes the suite of readers."""

from __future__ import annotations

import pytest

from agent.core.readings import DeviceReading, InstanceReading
from agent.gpu_readers import dcgm
from agent.gpu_readers.dcgm import MAX_AGE_MS, DcgmReader, Exporter
from agent.gpu_readers.protocol import GpuReader
from agent.simulation.simulated_node import A100, make_gpu
from gputally.base.clock import VirtualClock
from gputally.testing.gpu_readers import START_MS, GpuMachine, GpuReaderSuite


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
        self._sm_active = "0.25"

    def page(self) -> str:
        if not self._answers:
            raise ConnectionRefusedError("refused")
        return (
            f'DCGM_FI_PROF_SM_ACTIVE{{UUID="GPU-a"}} {self._sm_active}\n'
            'DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-m",GPU_I_ID="1"} 0.5\n'
        )

    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        self.exporter.refresh()

    def fail(self) -> None:
        self._answers = False
        self.clock.advance(MAX_AGE_MS)

    def mend(self) -> None:
        self._answers = True

    def withhold(self) -> frozenset[str]:
        self._sm_active = "9223372036854775792"  # what DCGM writes for "not supported"
        return frozenset({"sm_active_us"})

    def restart(self, kept: float) -> None:
        """Nothing: it tells how busy the devices are, and counts nothing."""


class TestDcgm(GpuReaderSuite):
    plugin = dcgm.READER

    @pytest.fixture
    def machine(self) -> GpuMachine:
        return ExporterPage()

    def open(self, machine: GpuMachine) -> GpuReader:
        """Open it on the fake's clock, without the thread that scrapes by the time of the day."""
        assert isinstance(machine, ExporterPage)
        return DcgmReader(machine.exporter)
