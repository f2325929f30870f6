from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agent.core.steady_clock import FAST_SLEW_PPM, SLEW_PPM, STEP_MS, Timeline
from gputally.base.clock import VirtualClock

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
    timeline = Timeline(clock)
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
    """Except where a clock that is ahead is adopted, which is recorded."""
    clock = VirtualClock(WALL_MS)
    timeline = Timeline(clock)
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
    timeline = Timeline(clock)
    for _ in range(60):
        clock.advance(1_000)
        clock.step_wall(1)  # 1000 ppm fast: twice the bound
        timeline.now_ms()
    assert timeline.now_ms() == WALL_MS + 60_030
    assert timeline.step_count == 0


def test_a_step_forwards_is_adopted_and_recorded() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = Timeline(clock)
    clock.advance(1_000)
    clock.step_wall(3_600_000)
    assert timeline.now_ms() == WALL_MS + 3_601_000
    assert [(s.at_ms - WALL_MS, s.offset_ms) for s in timeline.steps] == [(1_000, 3_600_000)]


def test_a_step_back_is_recorded_once_and_worked_off_by_running_slow() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = Timeline(clock)
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


def test_only_the_latest_steps_are_kept() -> None:
    clock = VirtualClock(WALL_MS)
    timeline = Timeline(clock)
    for _ in range(150):
        clock.step_wall(2_000)
        timeline.now_ms()
    assert timeline.step_count == 150
    assert len(timeline.steps) == 100
