"""The reader of the driver passes the suite that every reader passes."""

from __future__ import annotations

import pytest

from agent.gpu_readers import nvml
from gputally.base.clock import VirtualClock
from gputally.testing.gpu_readers import START_MS, GpuMachine, GpuReaderSuite
from tests.fakes.nvml.library import FakeNvml


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

    def withhold(self) -> frozenset[str]:
        self._fake.tell("fail nvmlDeviceGetPowerUsage 3", "fail nvmlDeviceGetFieldValues 3")
        return frozenset({"power_mw"})

    def restart(self, kept: float) -> None:
        """Load another driver, whose counters begin at 0."""
        self._fake.tell("reload")


class TestNvml(GpuReaderSuite):
    plugin = nvml.READER

    @pytest.fixture
    def machine(self, fake_nvml: FakeNvml) -> GpuMachine:
        return Driver(fake_nvml)
