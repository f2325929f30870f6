"""Random sequences of faults on the fake NVML: the accounts balance after each of them. `make test-real` runs a
thousand, `make test` the first hundred.

A sequence follows from its number alone. Allocations come from outside the driver, so no fault of the driver may lose
an allocated microsecond, count one twice, or produce a negative value."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.readings import DriverReplaced
from agent.core.steady_clock import SteadyTimeline
from agent.metering.meter import Meter
from gputally.base.clock import VirtualClock
from tests.agent.gpu_readers.nvml.rig import GIB, T0, Rig
from tests.fakes.nvml.functions import CODES, FUNCTIONS
from tests.fakes.nvml.library import FakeNvml
from tests.hypothesis_examples import examples

HISTORIES, BLOCKS, LENGTH = examples(100, 1_000), 10, 14
HANGING = 40  # one history in so many has a call that does not return: each costs real time
NOTHING_THERE = (2, 6)
LAYOUT = [f"mig MIG-{gi} {gi} 0 {n} {n}g.18gb {n * 18 * GIB} 0" for gi, n in ((1, 4), (2, 3))]


class History(Rig):
    """Two GPUs, the second in MIG mode, read on a timeline whose wall clock can be set."""

    def __init__(self, fake: FakeNvml, root: Path, number: int) -> None:
        chance = self.chance = random.Random(number)
        self.hanging = number % HANGING == 0
        self.hang_s = 0.05 if self.hanging else 30.0
        super().__init__(fake, root, gpus=2, setup=[f"accounting {chance.randint(0, 1)}", f"noise {number}"])
        fake.tell("on 1", "migmode 1", *LAYOUT)
        self.clock = VirtualClock(T0)
        self.timeline = SteadyTimeline(self.clock)
        self.allocated_us: dict[str, int] = defaultdict(int)
        self.at_ms = self.timeline.now_ms()
        self.started = 0
        for pod in range(3):
            self.begin(pod)
        self.closed += self.meter.observe(self.source.snapshot(self.at_ms))

    def begin(self, pod: int) -> None:
        ppm = self.chance.randrange(1_000_001)
        if pod % 3 == 2:
            gi = self.chance.choice([1, 2])
            if all(claim.mig_uuid != f"MIG-{gi}" for claim in self.pods.claims.values()):
                self.start(pod, 1, ppm, mig=f"MIG-{gi}", gi=gi)
        elif sum(claim.gpu_uuid == "GPU-0" for claim in self.pods.claims.values()) < 4:
            self.start(pod, 0, ppm, of=4)

    def wait(self, milliseconds: int) -> None:
        super().wait(milliseconds)
        self.clock.advance(milliseconds)

    def turn(self) -> None:
        """Take a reading. From then on the time held before it is due."""
        at_ms = self.timeline.now_ms()
        for uid, claim in self.held.items():
            share = {"": 4, "MIG-1": 4, "MIG-2": 3}[claim]
            self.allocated_us[uid] += (at_ms - self.at_ms) * 1_000 * share // (16 if not claim else 7)
        self.at_ms = at_ms
        try:
            self.closed += self.meter.observe(self.source.snapshot(at_ms))
        except DriverReplaced:
            self.replace_process(at_ms)

    def end_source(self) -> None:
        """Let calls that hung return first, so that they cannot affect the next sequence."""
        self.fake.tell("unhang")
        self.source.close()
        for thread in threading.enumerate():
            if thread.name == "nvml":
                thread.join(10)

    @property
    def held(self) -> dict[str, str]:
        return self._held

    def note(self) -> None:
        self._held = {uid: claim.mig_uuid for uid, claim in self.pods.claims.items()}

    def replace_process(self, at_ms: int) -> None:
        """Restart as the command does: close, end, and start with the spooled state."""
        self.closed += self.meter.flush(at_ms)
        state = self.meter.state()
        self.end_source()
        # A GPU that is lost has no name for a process that never saw it: its time is nobody's then.
        self.fake.tell("replaced 0", "clear", "process", "on 0", "found", "on 1", "found")
        self.open_source(restarted=True)
        self.meter = Meter(60_000, self.zone, boot_id="boot")
        self.closed += self.meter.resume(state, self.source.snapshot(at_ms))

    def act(self) -> None:
        """Apply one random event."""
        chance, tell = self.chance, self.fake.tell
        what = chance.randrange(20)
        if what < 6:
            where = chance.choice(["machine", "on 0", "on 1"])
            function, code = chance.choice(FUNCTIONS), chance.choice(CODES)
            if function in ("*", "nvmlDeviceGetMigDeviceHandleByIndex") and code in NOTHING_THERE:
                return  # that instance really is not there any more, as far as anybody can tell
            tell(where, f"fail {function} {code} {chance.randrange(4)} {chance.choice([-1, 1, 3])}")
        elif what < 9:
            tell("clear")
        elif what == 9:
            tell(f"on {chance.randint(0, 1)}", "lost")
        elif what == 10:
            tell("on 0", "found", "on 1", "found")
        elif what == 11:
            tell("reload")
        elif what == 12:
            tell("replaced 1")
        elif what == 13 and self.hanging:
            tell(f"on {chance.randint(0, 1)}", f"hang {chance.choice(FUNCTIONS[5:32])}")
        elif what == 14:
            self.gpus.release("test")
        elif what == 15:
            self.gpus.reacquire("test")
        elif what == 16:
            self.clock.step_wall(chance.choice([-3_600_000, -700, 800, 90_000]))
        elif what == 17:
            tell("on 0", f"xid {chance.randint(1, 150)}", "garbage 2", "on 1", "migclear", *reversed(LAYOUT))
        elif what == 18 and self.pods.claims:
            self.kill(int(chance.choice(sorted(self.pods.claims))[-12:], 16))
        elif what == 19:
            self.begin(self.started + 3)
            self.started += 1


def balanced(history: History) -> None:
    """Check the laws on every closed set."""
    sets: dict[tuple[str, int, int], int] = defaultdict(int)
    given: dict[str, int] = defaultdict(int)
    rows_of: dict[str, int] = defaultdict(int)
    for row in history.rows():
        sets[row.gpu_uuid, row.start_ms, row.end_ms] += row.capacity_us
        figures = (row.capacity_us, row.allocated_us, row.busy_us, row.sm_active_us, row.tensor_active_us)
        assert all(figure is None or figure >= 0 for figure in (*figures, row.memory_mib_s, row.energy_uj))
        assert all(row.start_ms <= gap.start_ms < gap.end_ms <= row.end_ms for gap in row.gaps)
        if row.holder is not None and row.holder.kind == "pod":
            given[row.holder.uid] += row.allocated_us
            rows_of[row.holder.uid] += 1
    last: dict[str, int] = {}
    for gpu, start, end in sorted(sets):
        assert start >= last.get(gpu, 0)
        assert sets[gpu, start, end] <= (end - start) * 1_000
        last[gpu] = end
    for uid, owed in history.allocated_us.items():
        # Sevenths of a span are whole microseconds only by rounding, once per row and once per reading.
        assert abs(given[uid] - owed) <= rows_of[uid] + LENGTH + 1, uid


@pytest.fixture
def still_hanging(fake_nvml: FakeNvml) -> Iterator[None]:
    yield
    fake_nvml.tell("unhang")


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_the_driver_does_the_books_balance(
    fake_nvml: FakeNvml, tmp_path: Path, still_hanging: None, block: int
) -> None:
    for number in range(block, HISTORIES, BLOCKS):
        history = History(fake_nvml, tmp_path / f"proc{number}", number)
        history.note()
        for _ in range(LENGTH):
            history.act()
            history.wait(history.chance.choice([200, 1_000, 1_000, 2_000, 12_000, 61_000]))
            history.turn()
            history.note()
        fake_nvml.tell("replaced 0")
        history.closed += history.meter.flush(history.at_ms)
        history.end_source()
        try:
            balanced(history)
        except AssertionError as error:
            raise AssertionError(f"history {number}: {error}") from error
