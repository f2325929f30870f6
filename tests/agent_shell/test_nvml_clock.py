"""A system clock that is set while the driver dates its samples by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.devices.driver_lifecycle import Gpus
from agent.devices.nvml_library import Driver
from agent.devices.utilization import RING_MS
from agent.holders.node_snapshot import NodeSource
from agent.holders.process_cgroups import ProcessTable
from gputally.base.clock import VirtualClock
from tests.agent_shell.rig import T0, Rig
from tests.fakes.nvml.library import FakeNvml


class ClockRig(Rig):
    """A node whose system clock can be set. The meter's time goes on, as the agent's does."""

    def open_source(self, *, restarted: bool = False) -> None:
        self.clock = VirtualClock(T0)
        self.gpus = Gpus(Driver(), access=self.access, hang_s=self.hang_s, clock=self.clock)
        self.source = NodeSource(self.gpus, ProcessTable(self.root), self.pods)  # type: ignore[arg-type]

    def wait(self, milliseconds: int) -> None:
        super().wait(milliseconds)
        self.clock.advance(milliseconds)

    def set_clock(self, by_ms: int) -> None:
        self.clock.step_wall(by_ms)
        ahead_ms = self.clock.wall_ms() - self.now_ms
        self.fake.tell(f"wall {ahead_ms * 1_000}")


@pytest.mark.parametrize("by_ms", [-3_600_000, -60_000, -5_000, -600, 3_600_000])
@pytest.mark.parametrize("idle_s", [0, 20], ids=["at-work", "idle"])
def test_a_clock_that_is_set_does_not_stop_the_busy_time(
    fake_nvml: FakeNvml, tmp_path: Path, by_ms: int, idle_s: int
) -> None:
    """idle_s: for how long before the clock is set the GPU does nothing."""
    rig = ClockRig(fake_nvml, tmp_path / "proc")
    rig.start(1, 0, 600_000, of=2)
    rig.start(2, 0, 300_000, of=2)
    rig.look()
    for second in range(120):
        if second == 60 - idle_s:
            rig.load(1, 0 if idle_s else 600_000)
            rig.load(2, 0 if idle_s else 300_000)
        if second == 60:
            rig.set_clock(by_ms)
            rig.load(1, 600_000)
            rig.load(2, 300_000)
        rig.tick()
    rig.close()
    for pod, busy_us in ((1, 600_000), (2, 300_000)):
        (row,) = [row for row in rig.rows_of(pod) if row.start_ms >= T0 + 60_000]
        unknown_s = sum(gap.end_ms - gap.start_ms for gap in row.gaps) / 1_000
        assert unknown_s <= (RING_MS / 1_000 + 2 if by_ms < 0 else 1)
        assert bool(row.gaps) or by_ms > 0, "what passed while the clock was set is not made up"
        assert row.busy_us == pytest.approx((60 - unknown_s) * busy_us, rel=0.06)


def test_a_gpu_to_itself_misses_one_step(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    rig = ClockRig(fake_nvml, tmp_path / "proc")
    rig.start(1, 0, 600_000)
    rig.look()
    for second in range(60):
        if second == 30:
            rig.set_clock(-3_600_000)
        rig.tick()
    rig.close()
    (row,) = rig.rows_of(1)
    assert [(gap.end_ms - gap.start_ms, gap.reason) for gap in row.gaps] == [(1_000, "samples missed")]
    assert row.busy_us == pytest.approx(59 * 600_000, rel=0.02)
