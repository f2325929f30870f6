"""The agent's timeline with a wall clock that drifts or is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.settings import AgentSettings
from agent.core.steady_clock import FAST_SLEW_PPM, SLEW_PPM, STEP_MS, ClockSetBack, SteadyClock, SteadyTimeline
from agent.main_loop import Agent
from agent.simulation.simulated_node import H100, SimulatedNode, SimulatedSource, make_gpu
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import Ack, Batch, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE
from tests.agent.records import T0
from tests.agent.scripted_accountant import Reply, place

WALL_MS = 1_790_812_800_000

moves = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 120_000)),
        st.tuples(st.just("drift"), st.integers(-STEP_MS, STEP_MS)),
        st.tuples(st.just("step"), st.integers(-7_200_000, 7_200_000)),
    ),
    max_size=40,
)


@given(moves)
def test_it_never_goes_back_whatever_is_done_to_the_wall_clock(moves: list[tuple[str, int]]) -> None:
    clock = VirtualClock(WALL_MS)
    timeline = SteadyTimeline(clock)
    seen = [timeline.now_ms()]
    for kind, amount in moves:
        if kind == "pass":
            clock.advance(amount)
        else:
            clock.step_wall(amount)
        seen.append(timeline.now_ms())
    assert all(a <= b for a, b in pairwise(seen))


@given(moves)
def test_durations_follow_the_monotonic_clock_within_the_slew(moves: list[tuple[str, int]]) -> None:
    """Except when a clock that is ahead is adopted, which is recorded."""
    clock = VirtualClock(WALL_MS)
    timeline = SteadyTimeline(clock)
    for kind, amount in moves:
        before_ms, steps = timeline.now_ms(), timeline.step_count
        elapsed_ms = amount if kind == "pass" else 0
        if kind == "pass":
            clock.advance(amount)
        else:
            clock.step_wall(amount)
        behind = clock.wall_ms() - (before_ms + elapsed_ms) <= -STEP_MS
        advanced_ms = timeline.now_ms() - before_ms
        if timeline.step_count == steps:
            rate = FAST_SLEW_PPM if behind else SLEW_PPM
            assert abs(advanced_ms - elapsed_ms) <= elapsed_ms * rate / 1_000_000 + 1


def test_a_wall_clock_that_runs_fast_is_followed_at_the_bound() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = SteadyTimeline(clock)
    for _ in range(60):
        clock.advance(1_000)
        clock.step_wall(1)  # 1000 ppm fast: twice the bound
        timeline.now_ms()
    assert timeline.now_ms() == WALL_MS + 60_030
    assert timeline.step_count == 0


def test_a_step_forwards_is_adopted_and_counted() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = SteadyTimeline(clock)
    clock.advance(1_000)
    clock.step_wall(3_600_000)
    assert timeline.now_ms() == WALL_MS + 3_601_000
    assert (timeline.step_count, timeline.last_step_ms) == (1, 3_600_000)


def test_a_step_back_is_counted_once_and_worked_off_by_running_slow() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = SteadyTimeline(clock)
    clock.step_wall(-60_000)
    assert timeline.now_ms() == WALL_MS
    for _ in range(600):
        clock.advance(1_000)
        timeline.now_ms()
    assert timeline.step_count == 1
    assert timeline.now_ms() == WALL_MS + 600_000 - 59_005  # the last second goes at the slow rate
    for _ in range(4_000):
        clock.advance(1_000)
        timeline.now_ms()
    assert timeline.now_ms() == clock.wall_ms()


YEAR_MS = 365 * MS_PER_DAY
SKEW_MS = 5 * MS_PER_MINUTE
TURN_MS = 10_000


class Books:
    """An accountant with a correct clock: it quarantines records from the future."""

    def __init__(self, machine: VirtualClock) -> None:
        self.machine = machine
        self.booked: list[UsageInterval] = []
        self.refused: list[UsageInterval] = []
        self.durable: dict[str, int] = {}

    @property
    def now_ms(self) -> int:
        return T0 + self.machine.monotonic_ms()

    def take(self, batch: Batch) -> Reply:
        for row in batch.intervals:
            if row.seq > self.durable.get(batch.epoch, 0):
                (self.refused if row.end_ms > self.now_ms + SKEW_MS else self.booked).append(row)
        last = max([r.seq for r in (*batch.intervals, *batch.facts, *batch.skipped)], default=batch.first_seq - 1)
        self.durable[batch.epoch] = last
        return Reply(200, Ack(epoch=batch.epoch, durable_seq=last, checkpointed_seq=last, clock_ms=self.now_ms))


class Node:
    """A node. Each start builds a new source, as a new process does."""

    def __init__(self, folder: Path, url: str, machine: VirtualClock) -> None:
        self.folder, self.url, self.machine = folder, url, machine
        self.agent: Agent | None = None

    def start(self, boot_id: str = "boot-1") -> Agent:
        clock = SteadyClock(self.machine)
        begun = min(clock.wall_ms(), T0 + self.machine.monotonic_ms())  # whichever of them the agent will go by
        node = SimulatedNode("n1", [make_gpu("GPU-a", 0, H100)], start_ms=begun)
        place(node, "u1", begun)
        outbox = Outbox(self.folder / "outbox.sqlite", clock, fsync=False, max_age_ms=MS_PER_DAY)
        uploader = Uploader(outbox, self.url, "c1", "n1", boot_id, None, clock, jitter=lambda: 1.0)
        self.agent = Agent(AgentSettings(node="n1"), SimulatedSource(node), outbox, uploader, clock)
        return self.agent

    def stop(self) -> None:
        if self.agent is not None:
            self.agent.shutdown(deliver=False)
            self.agent = None

    def run(self, milliseconds: int, *, ship: bool = True) -> None:
        """Advance the time. A process that ends because of the clock is started again."""
        for _ in range(milliseconds // TURN_MS):
            agent = self.agent or self.start()
            try:
                agent.sample()
            except ClockSetBack:
                self.stop()
                self.start().sample()
            while ship and self.agent is not None and self.agent.ship().progress:
                pass
            self.machine.advance(TURN_MS)


@pytest.fixture
def machine() -> VirtualClock:
    return VirtualClock(T0)


@pytest.fixture
def books(machine: VirtualClock, accountant: Any) -> Books:
    made = Books(machine)
    accountant.script = made.take
    return made


@pytest.fixture
def node(tmp_path: Path, accountant: Any, machine: VirtualClock, books: Books) -> Iterator[Node]:
    made = Node(tmp_path, accountant.url, machine)
    yield made
    made.stop()


def spans(rows: list[UsageInterval]) -> list[tuple[int, int]]:
    return sorted({(row.start_ms, row.end_ms) for row in rows})


def assert_whole(rows: list[UsageInterval], start_ms: int, end_ms: int) -> None:
    """Check that the rows have no gap and no overlap, up to about a minute before `end_ms`."""
    found = spans(rows)
    assert all(one[1] == following[0] for one, following in pairwise(found)), found
    assert abs(found[0][0] - start_ms) <= TURN_MS
    assert end_ms - 2 * MS_PER_MINUTE <= found[-1][1] <= end_ms


SET = pytest.mark.parametrize("by_ms", [MS_PER_HOUR, MS_PER_DAY, YEAR_MS, -MS_PER_HOUR, -YEAR_MS])
AHEAD = pytest.mark.parametrize("by_ms", [MS_PER_HOUR, MS_PER_DAY, YEAR_MS])


@SET
def test_a_clock_that_is_set_for_a_minute_dates_nothing(
    node: Node, machine: VirtualClock, books: Books, by_ms: int
) -> None:
    node.run(3 * MS_PER_MINUTE)
    machine.step_wall(by_ms)
    node.run(MS_PER_MINUTE)
    machine.step_wall(-by_ms)
    node.run(3 * MS_PER_MINUTE)
    assert books.refused == []
    assert_whole(books.booked, T0, books.now_ms)


@pytest.mark.parametrize("back", [True, False], ids=["put right in the outage", "put right after it"])
@pytest.mark.parametrize("by_ms", [MS_PER_HOUR, MS_PER_DAY, -MS_PER_HOUR, -MS_PER_DAY])
def test_a_clock_that_is_set_during_an_outage_dates_nothing(
    node: Node, machine: VirtualClock, books: Books, by_ms: int, back: bool
) -> None:
    """The agent knows the accountant's time from before the outage."""
    node.run(3 * MS_PER_MINUTE)
    node.run(4 * MS_PER_MINUTE, ship=False)
    machine.step_wall(by_ms)
    node.run(20 * MS_PER_MINUTE, ship=False)
    if back:
        machine.step_wall(-by_ms)
    node.run(4 * MS_PER_MINUTE, ship=False)
    node.run(3 * MS_PER_MINUTE)
    if not back:
        machine.step_wall(-by_ms)
    node.run(3 * MS_PER_MINUTE)
    assert books.refused == []
    assert_whole(books.booked, T0, books.now_ms)


@AHEAD
@pytest.mark.parametrize("killed", [False, True])
def test_a_clock_that_was_ahead_from_the_start_is_right_again_within_a_minute(
    node: Node, machine: VirtualClock, books: Books, by_ms: int, killed: bool
) -> None:
    """The first answer reports the error. Later records are held back, and redated once the clock is right."""
    machine.step_wall(by_ms)
    node.run(4 * MS_PER_MINUTE)
    machine.step_wall(-by_ms)
    if killed:
        node.stop()
    node.run(2 * MS_PER_MINUTE)
    lost = spans(books.refused)
    assert len(lost) <= 1  # what was sent before the first answer
    begin = T0 + sum(end - start for start, end in lost)
    assert_whole(books.booked, begin, books.now_ms)


@AHEAD
def test_an_agent_that_starts_while_the_clock_is_wrong_goes_on_in_the_right_time(
    node: Node, machine: VirtualClock, books: Books, by_ms: int
) -> None:
    """The accountant was unreachable while the clock was wrong, but answered earlier in this boot."""
    node.run(2 * MS_PER_MINUTE)
    node.stop()
    machine.step_wall(by_ms)
    node.run(3 * MS_PER_MINUTE, ship=False)
    machine.step_wall(-by_ms)
    node.run(2 * MS_PER_MINUTE)
    assert books.refused == []
    assert_whole(books.booked, T0, books.now_ms)


def test_an_agent_that_starts_in_the_past_goes_on_in_the_right_time(
    node: Node, machine: VirtualClock, books: Books
) -> None:
    """The clock was set back for a while."""
    node.run(MS_PER_MINUTE)
    node.stop()
    machine.step_wall(-MS_PER_DAY)
    node.run(2 * MS_PER_MINUTE, ship=False)
    machine.step_wall(MS_PER_DAY)
    node.run(2 * MS_PER_MINUTE)
    assert_whole(books.booked, T0, books.now_ms)


def test_records_of_another_boot_are_not_dated_again(node: Node, machine: VirtualClock, books: Books) -> None:
    """The time between two boots is unknown: the accountant quarantines the records, and the node's clock is right."""
    machine.step_wall(MS_PER_DAY)
    node.run(3 * MS_PER_MINUTE, ship=False)
    node.stop()
    machine.step_wall(-MS_PER_DAY)
    node.start("boot-2")
    node.run(3 * MS_PER_MINUTE)
    assert all(row.start_ms >= T0 + MS_PER_DAY for row in books.refused)
    assert books.refused
    assert books.now_ms - 2 * MS_PER_MINUTE <= spans(books.booked)[-1][1] <= books.now_ms


def test_a_clock_that_nobody_corrects_is_seen_at_the_accountant(
    node: Node, machine: VirtualClock, books: Books
) -> None:
    machine.step_wall(MS_PER_DAY)
    node.run(10 * MS_PER_MINUTE)
    before = len(books.refused)
    node.run(MS_PER_HOUR)
    assert len(books.refused) > before


def test_without_an_accountant_that_says_the_time_the_clock_is_taken_as_it_is(machine: VirtualClock) -> None:
    checks: list[Callable[[int], bool | None]] = [lambda origin_ms: None, lambda origin_ms: True]
    for check in checks:
        steady = SteadyClock(machine, check)
        machine.step_wall(MS_PER_DAY)
        assert steady.wall_ms() == machine.wall_ms()
        assert not steady.rejected
