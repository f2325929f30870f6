"""Integration of utilisation samples, of energy over a wrap, and calls that do not return."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.gpu_readers.nvml.nvml_library import CallHangs, CallWatchdog
from agent.gpu_readers.nvml.utilization import MAX_POWER_MW, RANGE_MJ, RATE_HOLDS_US, BusyCounter, EnergyCounter
from tests.hypothesis_examples import examples

PERIOD = 139_000
RECORDED = json.loads((Path(__file__).parents[3] / "golden/nvml_h200_samples.json").read_text())["loads"]


@pytest.mark.parametrize("every_ms", [1_000, 2_000, 5_000])
@pytest.mark.parametrize("load", RECORDED, ids=[load["load"] for load in RECORDED])
def test_samples_of_a_real_gpu_give_the_time_of_the_kernels(load: dict[str, Any], every_ms: int) -> None:
    """Recorded on an H200. Its samples are truncated to whole percents, so they read up to 2 % low."""
    counter = BusyCounter()
    last_ms = load["samples"][-1][0]
    for at_ms in range(0, last_ms + every_ms, every_ms):
        since_us = counter.last_seen_us
        new = [
            (ms * 1_000 + 1, percent) for ms, percent in load["samples"] if ms <= at_ms and ms * 1_000 + 1 > since_us
        ]
        counter.take(at_ms, new, new[-1][1] if new else 0)
    assert counter.gaps == 0
    assert 0.98 * load["kernel_ms"] <= counter.value_us / 1_000 <= 1.01 * load["kernel_ms"]


def test_steps_between_samples_are_integrated_exactly() -> None:
    counter = BusyCounter()
    assert counter.take(0, [(1_000_000, 50)], 0) == 0
    samples = [(1_000_000 + n * 200_000, 100 if n <= 5 else 25) for n in range(1, 11)]
    assert counter.take(2_000, samples, 0) == 5 * 200_000 + 5 * 50_000
    assert counter.gaps == 0
    assert counter.last_seen_us == 3_000_000


def test_an_idle_stretch_without_samples_is_no_gap() -> None:
    counter = BusyCounter()
    counter.take(0, [(5_000_000, 0)], 0)
    for second in range(1, 31):
        assert counter.take(second * 1_000, [], 0) == 0
    resumed = [(5_000_000 + 30_000_000 + n * PERIOD, 100) for n in range(1, 8)]
    assert counter.take(31_000, resumed, 100) == 7 * PERIOD
    assert counter.gaps == 0


def test_samples_lost_from_the_ring_are_a_gap_and_not_guessed() -> None:
    counter = BusyCounter()
    counter.take(0, [(0, 0), (PERIOD, 0)], 0)
    late = [(PERIOD + 20_000_000 + n * PERIOD, 100) for n in range(10)]
    assert counter.take(22_000, late, 50) == 10 * PERIOD
    assert counter.gaps == 1


def test_where_no_samples_are_kept_the_rate_stands_for_a_short_while() -> None:
    counter = BusyCounter()
    counter.take(0, None, 80)
    assert counter.take(1_000, None, 80) == 800_000
    assert counter.gaps == 0
    assert counter.take(1_000 + RATE_HOLDS_US // 1_000 + 1, None, 80) == 800_000
    assert counter.gaps == 1


def test_samples_of_a_busy_device_may_come_late() -> None:
    counter = BusyCounter()
    counter.take(0, [(0, 0), (PERIOD, 100)], 100)
    assert counter.take(1_000, [], 100) == 0
    assert counter.take(2_000, [(PERIOD * n, 100) for n in range(2, 16)], 100) == 14 * PERIOD
    assert counter.gaps == 0


def test_samples_of_a_busy_device_that_do_not_come_are_a_gap() -> None:
    counter = BusyCounter()
    counter.take(0, [(0, 0), (PERIOD, 100)], 100)
    for second in range(1, 9):
        assert counter.take(second * 1_000, [], 100) == 0
    assert counter.gaps == 2
    assert counter.take(9_000, [(PERIOD + 8_000_000 + PERIOD * n, 100) for n in range(1, 8)], 100) == 7 * PERIOD


def test_what_was_busy_before_the_first_reading_is_not_claimed() -> None:
    counter = BusyCounter()
    counter.take(0, [], 0)
    ring = [(n * PERIOD, 100) for n in range(1, 73)]
    assert counter.take(1_000, ring, 100) == 1_000_000


def test_garbage_percentages_and_old_timestamps_are_dropped() -> None:
    counter = BusyCounter()
    counter.take(0, [(1_000_000, 10)], 0)
    assert counter.take(1_000, [(900_000, 100), (1_500_000, 101), (2_000_000, 40)], 0) == 400_000


polls = st.lists(
    st.tuples(st.integers(1, 15_000), st.lists(st.tuples(st.integers(1, 400_000), st.integers(0, 100)), max_size=20)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(16, 100))
@given(polls, st.integers(0, 100))
def test_the_counter_never_decreases_and_never_outruns_time(
    polls: list[tuple[int, list[tuple[int, int]]]], rate: int
) -> None:
    counter = BusyCounter()
    at_ms, timestamp, before, waited_ms = 0, 0, counter.take(0, [], 0), 0
    for wait_ms, steps in polls:
        at_ms += wait_ms
        waited_ms += wait_ms
        samples = []
        for step, percent in steps:
            timestamp += step
            samples.append((timestamp, percent))
        after = counter.take(at_ms, list(reversed(samples)), rate)
        assert before <= after <= before + waited_ms * 1_000
        if samples:
            waited_ms = 0
        before = after
    assert before <= at_ms * 1_000


@settings(max_examples=examples(16, 100))
@given(st.lists(st.integers(0, 100), min_size=8, max_size=80), st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_how_often_the_ring_is_read_does_not_change_the_sum(load: list[int], chunks: list[int]) -> None:
    ring = [((n + 2) * 200_000, percent) for n, percent in enumerate(load)]
    often = BusyCounter()
    once = BusyCounter()
    for counter in (often, once):
        counter.take(0, [(200_000, 0)], 0)
    position = total = 0
    for chunk in chunks:
        part = ring[position : position + chunk]
        position += len(part)
        total = often.take(position * 200, part, 0)
    seen = ring[:position]
    assert once.take(position * 200, seen, 0) == total == sum(percent * 2_000 for _, percent in seen)


def test_it_begins_where_the_driver_stands_and_goes_on() -> None:
    counter = EnergyCounter()
    assert counter.take(0, 123_456)
    assert counter.value_uj == 123_456_000
    assert counter.take(1_000, 123_956)
    assert counter.value_uj == 123_956_000


def test_a_wrap_is_no_reset() -> None:
    counter = EnergyCounter()
    counter.take(0, RANGE_MJ - 100)
    assert counter.take(1_000, 400)
    assert counter.value_uj == (RANGE_MJ + 400) * 1_000


def test_a_decrease_no_wrap_can_explain_begins_anew() -> None:
    counter = EnergyCounter()
    counter.take(0, 5_000_000)
    assert not counter.take(1_000, 7)
    assert counter.value_uj == 7_000
    counter = EnergyCounter()
    counter.take(0, RANGE_MJ - 1)
    assert not counter.take(1_000, MAX_POWER_MW)  # mW over a second, and the one to the wrap


def test_what_no_gpu_can_have_drawn_is_nobodys() -> None:
    """A counter that once reads 0 must not charge its whole former value to the next holder."""
    counter = EnergyCounter()
    counter.take(0, 900_000_000)
    assert not counter.take(2_000, 0)
    assert not counter.take(4_000, 900_000_100)
    assert counter.take(4_001, 900_000_200), "the driver's figure may be renewed between two readings"
    assert counter.value_uj == 900_000_200_000


def test_results_and_errors_come_back_on_one_worker() -> None:
    dog = CallWatchdog()
    threads = {dog.call("a", 5, threading.get_ident), dog.call("b", 5, threading.get_ident)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    with pytest.raises(ZeroDivisionError):
        dog.call("a", 5, lambda: 1 // 0)
    assert dog.call("a", 5, lambda: 3) == 3
    assert dog.stuck == ()
    dog.close()


def test_a_call_that_hangs_is_left_behind_and_the_rest_goes_on() -> None:
    dog = CallWatchdog()
    gate, done = threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait(30)
        done.set()

    with pytest.raises(CallHangs):
        dog.call("a", 0.01, hang)
    assert dog.stuck == ("a",)
    with pytest.raises(CallHangs):
        dog.call("a", 5, lambda: 1)
    assert dog.call("b", 5, lambda: 2) == 2
    gate.set()
    assert done.wait(5)
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(0.5)
    assert dog.stuck == ()
    assert dog.call("a", 5, lambda: 4) == 4
    dog.close()
