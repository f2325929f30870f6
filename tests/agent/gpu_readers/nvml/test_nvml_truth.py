"""Compares what the agent meters through NVML with the true busy time of each process.

Each sample of the fake names one running process, is rounded to whole percents, and is lost unless it is fetched in
time, as with a real driver. `noise` picks the process at random instead of by the regular turns of time-slicing."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from agent.core.readings import DeviceReading
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.gpu_readers.nvml.utilization import RING_MS
from agent.holders.process_cgroups import ProcessTable
from agent.node_reader import NodeSource
from gputally.base.clock import VirtualClock
from tests.agent.gpu_readers.nvml.rig import GIB, T0, Rig
from tests.agent.readers import nvml_alone

NewRig = Callable[..., Any]
SECONDS = 300
DEVICE_US = SECONDS * 1_000_000
MOST_WRONG = 0.02


def sums_are_right(rig: Rig, first: DeviceReading, last: DeviceReading) -> None:
    """Check that the rows of every set add up to its span, and all rows to the device's busy time and energy."""
    spans: dict[tuple[str, int, int], int] = defaultdict(int)
    for row in rig.rows():
        spans[row.gpu_uuid, row.start_ms, row.end_ms] += row.capacity_us
        assert (row.busy_us or 0) >= 0
        assert (row.energy_uj or 0) >= 0
    assert all(total == (end - start) * 1_000 for (_, start, end), total in spans.items())
    assert sum(spans.values()) == DEVICE_US
    assert isinstance(first.energy_uj, int)
    assert isinstance(last.energy_uj, int)
    assert sum(row.energy_uj or 0 for row in rig.rows()) == last.energy_uj - first.energy_uj
    if isinstance(first.busy_us, int) and isinstance(last.busy_us, int):
        assert sum(row.busy_us or 0 for row in rig.rows()) == last.busy_us - first.busy_us


@pytest.mark.parametrize("accounting", [0, 1], ids=["sampler", "accounting"])
@pytest.mark.parametrize(("pods", "noise"), [(1, 0), (2, 0), (5, 1), (16, 0), (16, 1)])
def test_pods_that_come_and_go_on_one_gpu(new_rig: NewRig, pods: int, noise: int, accounting: int) -> None:
    chance = random.Random(pods * 10 + noise)
    rig = new_rig(setup=[f"accounting {accounting}", f"noise {noise * 77}"])
    started = 0
    alive: list[int] = []

    def arrive() -> None:
        nonlocal started
        rig.start(started, 0, chance.randrange(1_000_000) // chance.randint(1, pods), of=16)
        alive.append(started)
        started += 1

    for _ in range(pods):
        arrive()
    first = rig.look().devices[0]
    for _ in range(SECONDS - 1):
        turn = chance.random()
        if turn < 0.10:
            rig.load(chance.choice(alive), chance.randrange(1_000_000) // pods)
        elif turn < 0.12 and len(alive) > 1:
            rig.kill(alive.pop(chance.randrange(len(alive))))
        elif turn < 0.14 and len(alive) < pods:
            arrive()
        rig.tick()
    last = rig.tick().devices[0]
    rig.close()
    for pod in range(started):
        assert abs(rig.metered_us(pod) - rig.truth_us(pod)) <= MOST_WRONG * DEVICE_US, pod
    really = sum(rig.truth_us(pod) for pod in range(started))
    assert isinstance(last.busy_us, int)
    assert abs(last.busy_us - really) <= 0.005 * DEVICE_US
    assert last.sample_gaps == 0
    sums_are_right(rig, first, last)


def test_pods_on_mig_instances_are_seen_by_gpm(new_rig: NewRig) -> None:
    chance = random.Random(7)
    slices = {1: ("3g.71gb", 3), 2: ("2g.35gb", 2), 5: ("1g.18gb", 1)}
    layout = [f"mig MIG-{gi} {gi} 0 {n} {profile} {n * 18 * GIB} 0" for gi, (profile, n) in slices.items()]
    rig = new_rig(setup=["migmode", *layout])
    for pod, gi in enumerate(slices):
        rig.start(pod, 0, chance.randrange(1_000_000), mig=f"MIG-{gi}", gi=gi)
    first = rig.look().devices[0]
    for _ in range(SECONDS - 1):
        pod = chance.randrange(3)
        if chance.random() < 0.2:
            rig.load(pod, chance.randrange(1_000_000), list(slices)[pod])
        rig.tick()
    last = rig.tick().devices[0]
    rig.close()
    for pod, (_, compute) in enumerate(slices.values()):
        assert abs(rig.metered_us(pod) - rig.truth_us(pod) * compute / 7) <= MOST_WRONG * DEVICE_US
        mine = rig.rows_of(pod)
        assert {(row.method, row.slice.compute if row.slice else 0) for row in mine} == {("gpm", compute)}
        sm, tensor = sum(row.sm_active_us or 0 for row in mine), sum(row.tensor_active_us or 0 for row in mine)
        assert abs(sm - rig.metered_us(pod) * 0.8) < 0.001 * DEVICE_US
        assert abs(tensor - rig.metered_us(pod) * 0.3) < 0.001 * DEVICE_US
    sums_are_right(rig, first, last)


def test_a_gpu_to_itself_has_its_activity_beside_its_busy_time(new_rig: NewRig) -> None:
    """A hung collective keeps the GPU busy and its multiprocessors idle."""
    rig = new_rig(setup=["shares 20000 0"])
    rig.start(1, 0, 1_000_000)
    rig.run(60)
    (row,) = rig.rows()
    assert (row.busy_us, row.tensor_active_us) == (pytest.approx(60_000_000, rel=0.01), 0)
    assert row.sm_active_us == pytest.approx(1_200_000, rel=0.01)


def test_a_stall_of_the_agent_is_a_gap_and_nothing_is_made_up(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.start(1, 0, 500_000)
    rig.look()
    rig.ticks(10)
    rig.tick(25_000)
    rig.ticks(25)
    rig.close()
    (row,) = rig.rows()
    assert [(gap.start_ms - row.start_ms, gap.end_ms - row.start_ms, gap.reason) for gap in row.gaps] == [
        (10_000, 35_000, "samples missed")
    ]
    assert row.allocated_us == 60_000_000
    assert row.busy_us == pytest.approx(35 * 500_000, rel=0.02)
    assert row.energy_uj is not None


def test_a_process_between_two_readings_is_found_by_accounting(new_rig: NewRig) -> None:
    rig = new_rig(setup=["accounting 1"])
    rig.look()
    rig.wait(100)
    rig.fake.tell("on 0", "load 7 1000000")
    rig.wait(800)
    rig.fake.tell("on 0", "exit 7")
    found = [p for _ in range(6) for p in rig.tick().devices[0].processes]
    assert [(p.pid, p.running) for p in found] == [(7, False)]
    assert found[0].accounted_us == pytest.approx(rig.fake.truth_us(0, 7), rel=0.2)
    rig.close()


def test_a_process_is_not_charged_for_samples_of_one_that_ended_before_it(new_rig: NewRig) -> None:
    """A driver may name a process in samples from before its start."""
    rig = new_rig()
    for pod, load in ((1, 1_000_000), (2, 0), (3, 0)):
        rig.start(pod, 0, load, of=4)
    rig.look()
    rig.ticks(3)
    rig.wait(600)
    rig.fake.tell("on 0", "exit 1002", "exit 1001")
    rig.tick(400)
    rig.ticks(3)
    rig.fake.tell("on 0", "load 1002 0", "load 1003 500000")
    rig.ticks(3)
    rig.close()
    assert [rig.metered_us(pod) for pod in (1, 2, 3)] == [3_600_000, 0, 1_500_000]


@pytest.mark.parametrize("ended", [1, 2])
def test_the_last_use_of_a_process_is_its_own(new_rig: NewRig, ended: int) -> None:
    """A driver does not report the samples of a process that has ended."""
    rig = new_rig()
    for pod in range(ended):
        rig.start(pod, 0, 800_000 // ended, of=4)
    rig.start(7, 0, 0, of=4)
    rig.look()
    rig.ticks(10, 2_000)
    rig.wait(1_600)
    for pod in range(ended):
        rig.kill(pod)
    rig.tick(400)
    last = rig.tick().devices[0]
    rig.close()
    for pod in range(ended):
        assert rig.metered_us(pod) == pytest.approx(rig.truth_us(pod), rel=0.04 if ended > 1 else 0.01)
    assert rig.metered_us(7) == 0
    assert sum(rig.metered_us(pod) for pod in range(ended)) == last.busy_us


class ClockRig(Rig):
    """A node whose system clock a test can set. The meter's time continues, as the agent's does."""

    def open_source(self, *, restarted: bool = False) -> None:
        self.clock = VirtualClock(T0)
        self.gpus = Gpus(Driver(), access=self.access, hang_s=self.hang_s, clock=self.clock)
        self.source = NodeSource(nvml_alone(self.gpus), ProcessTable(self.root), self.pods)  # type: ignore[arg-type]

    def wait(self, milliseconds: int) -> None:
        super().wait(milliseconds)
        self.clock.advance(milliseconds)

    def set_clock(self, by_ms: int) -> None:
        self.clock.step_wall(by_ms)
        ahead_ms = self.clock.wall_ms() - self.now_ms
        self.fake.tell(f"wall {ahead_ms * 1_000}")


@pytest.mark.parametrize("by_ms", [-3_600_000, -60_000, -5_000, -600, 3_600_000])
@pytest.mark.parametrize("idle_s", [0, 20], ids=["at-work", "idle"])
def test_a_clock_that_is_set_does_not_stop_the_busy_time(new_rig: NewRig, by_ms: int, idle_s: int) -> None:
    """idle_s: for how long the GPU is idle before the clock is set."""
    rig, loads = new_rig(ClockRig), {1: 600_000, 2: 300_000}
    for pod, ppm in loads.items():
        rig.start(pod, 0, ppm, of=2)
    rig.look()
    for second in range(120):
        for pod, ppm in loads.items():
            if second == 60 - idle_s:
                rig.load(pod, 0 if idle_s else ppm)
            if second == 60:
                rig.load(pod, ppm)
        if second == 60:
            rig.set_clock(by_ms)
        rig.tick()
    rig.close()
    for pod, busy_us in loads.items():
        (row,) = [row for row in rig.rows_of(pod) if row.start_ms >= T0 + 60_000]
        unknown_s = sum(gap.end_ms - gap.start_ms for gap in row.gaps) / 1_000
        assert unknown_s <= (RING_MS / 1_000 + 2 if by_ms < 0 else 1)
        assert bool(row.gaps) or by_ms > 0, "what passed while the clock was set is not made up"
        assert row.busy_us == pytest.approx((60 - unknown_s) * busy_us, rel=0.06)


def test_a_gpu_to_itself_misses_one_step(new_rig: NewRig) -> None:
    rig = new_rig(ClockRig)
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
