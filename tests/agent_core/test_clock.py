import threading

import pytest

from gputally.base.clock import SystemClock, VirtualClock


def test_virtual_time_passes_on_both_clocks_and_only_when_moved() -> None:
    clock = VirtualClock(wall_ms=1_000_000, monotonic_ms=7)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1_000_000, 7)
    clock.advance(250)
    clock.advance_to(1_001_000)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1_001_000, 1_007)


def test_setting_the_wall_clock_does_not_move_the_monotonic_one() -> None:
    clock = VirtualClock(wall_ms=1_000_000)
    clock.step_wall(-5_000)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (995_000, 0)


def test_virtual_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="negative time"):
        VirtualClock(wall_ms=10).advance_to(9)


def test_waiting_passes_virtual_time_unless_it_is_stopped() -> None:
    clock, stop = VirtualClock(wall_ms=0), threading.Event()
    assert clock.wait(1.5, stop) is False
    stop.set()
    assert clock.wait(10, stop) is True
    assert clock.wall_ms() == 1_500


def test_the_system_clock_reads_milliseconds() -> None:
    clock = SystemClock()
    assert clock.wall_ms() > 1_700_000_000_000
    before = clock.monotonic_ms()
    assert clock.monotonic_ms() >= before >= 0
    stop = threading.Event()
    stop.set()
    assert clock.wait(60, stop) is True
