"""GPU time that nobody held, or that was held idle, while pods waited (`accountant.reports.unused_while_waiting`)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.ledger.protocols import QueuedPod
from accountant.ledger.usage import ACCOUNTS, Usage
from accountant.reports.unused_while_waiting import GpuHour, gpu_hours_of, together, unused_while_waiting
from accountant.wire.usage_cost_and_job_models import UnusedLine
from tests.hypothesis_examples import examples
from tests.usage_records import pod_facts

HOUR_MS, HOUR_US = 3_600_000, 3_600_000_000
HOURS = 6
MINUTE_MS = 60_000


def pod(created_ms: int, placed_ms: int | None = None, gpus: int | None = 1, ended_ms: int | None = None) -> QueuedPod:
    """gpus: None if it asks by a claim."""
    asked = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    facts = pod_facts("p", 0, created_ms=created_ms, scheduled_ms=placed_ms, ended_ms=ended_ms, requests=asked)
    return QueuedPod("prod", "vision", "vision", facts)


def hour(number: int, free: int | None = 0, idle: int | None = 0) -> GpuHour:
    """An hour in which so many GPUs were free, and so many held idle."""
    known = [None if gpus is None else gpus * HOUR_US for gpus in (free, idle)]
    return GpuHour(number * HOUR_MS, (number + 1) * HOUR_MS, *known)


def gpus(line: UnusedLine) -> tuple[float | None, ...]:
    """GPU-hours asked for, free and held idle."""
    found = (line.asked_gpu_us, line.free_gpu_us, line.idle_gpu_us)
    return tuple(None if gpu_us is None else gpu_us / HOUR_US for gpu_us in found)


def test_what_nobody_held_stands_beside_a_wait_first_and_then_what_was_held_idle() -> None:
    """A pod asks for 4 GPUs from 0:30 to 2:00: for 2 GPU-hours in the first hour and 4 in the second.

    In the first hour 1 GPU is free and 5 idle: 1 and 1. In the second 3 are free and 5 idle: 3 and 1. In the third
    nobody waits."""
    hours = [hour(0, 1, 5), hour(1, 3, 5), hour(2, 8, 8)]
    found = unused_while_waiting([pod(30 * MINUTE_MS, 2 * HOUR_MS, 4)], hours)
    assert [gpus(line) for line in found] == [(2, 1, 1), (4, 3, 1), (0, 0, 0)]
    assert gpus(together(found)) == (6, 4, 2)
    assert together(found).known_ms == 3 * HOUR_MS


def test_free_gpus_of_one_hour_are_not_beside_a_wait_in_another() -> None:
    hours = [hour(0, 10), hour(1, 0)]
    assert gpus(together(unused_while_waiting([pod(HOUR_MS, None, 10)], hours))) == (10, 0, 0)


def test_a_pod_that_still_waits_or_ended_waiting_asks_until_then() -> None:
    hours = [hour(0, 9), hour(1, 9)]
    waits, ended = pod(HOUR_MS, None, 2), pod(0, None, 4, ended_ms=30 * MINUTE_MS)
    assert [gpus(line) for line in unused_while_waiting([waits, ended], hours)] == [(2, 2, 0), (2, 2, 0)]


def test_an_hour_of_which_the_gpus_or_a_request_are_unknown_is_in_no_figure() -> None:
    hours = [hour(0, None, 3), hour(1, 2, 1), hour(2, 2, 1), hour(3, 2, None)]
    found = unused_while_waiting([pod(0, 4 * HOUR_MS, 3), pod(2 * HOUR_MS, 3 * HOUR_MS, None)], hours)
    assert [gpus(line) for line in found] == [(None,) * 3, (3, 2, 1), (None,) * 3, (3, 2, None)]
    assert [line.known_ms for line in found] == [0, HOUR_MS, 0, HOUR_MS]
    assert gpus(together(found[:3])) == (3, 2, 1)
    assert (together(found).free_gpu_us, together(found).idle_gpu_us) == (4 * HOUR_US, None)
    assert gpus(together(found[:1])) == (None,) * 3


def test_without_hours_there_is_nothing() -> None:
    assert unused_while_waiting([pod(0)], []) == []


def relation(*rows: tuple[str, Sequence[int]]) -> Usage:
    """Hours by their names, each with its accounts."""
    return Usage.of_rows(("hour",), [(0, (name,), row) for name, row in rows], ())


def test_hours_of_gpus_are_known_as_far_as_they_are_metered() -> None:
    """Busy, idle, unknown, free, unmetered, down. Of the hour from one o'clock 3 % is unmetered, of the one from two
    1 %, of which the use is unknown; the one from three is not in the ledger, and in the one from four all is down."""
    assert ACCOUNTS == ("busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down")
    usage = relation(
        ("1970-01-01T00", (10, 20, 30, 40, 0, 0)), ("1970-01-01T01", (0, 20, 0, 77, 3, 0)),
        ("1970-01-01T02", (0, 0, 49, 50, 1, 0)), ("1970-01-01T04", (0, 0, 0, 0, 0, 100)),
    )  # fmt: skip
    found = gpu_hours_of(usage, 0, 5 * HOUR_MS + 1, "UTC")
    assert [(one.free_us, one.idle_us) for one in found] == [
        (40, 20), (None, None), (50, None), (None, None), (0, 0), (None, None)
    ]  # fmt: skip
    assert (found[0].start_ms, found[-1].start_ms, found[-1].end_ms) == (0, 5 * HOUR_MS, 5 * HOUR_MS + 1)


AMOUNTS = st.none() | st.integers(0, 12)
INSTANTS = st.integers(-HOUR_MS, (HOURS + 1) * HOUR_MS)
PODS = st.builds(
    lambda created, waits, count: pod(created, None if waits is None else created + waits, count),
    INSTANTS, st.none() | st.integers(0, HOURS * HOUR_MS), st.none() | st.integers(0, 9),
)  # fmt: skip
SOME_HOURS = st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=HOURS).map(
    lambda several: [hour(number, free, idle) for number, (free, idle) in enumerate(several)]
)


@settings(max_examples=examples(60, 2_000))
@given(hours=SOME_HOURS, pods=st.lists(PODS, max_size=6), more=PODS)
def test_a_figure_is_within_what_was_unused_and_asked_for_and_no_further_wait_lowers_it(
    hours: list[GpuHour], pods: list[QueuedPod], more: QueuedPod
) -> None:
    found, with_more = unused_while_waiting(pods, hours), unused_while_waiting([*pods, more], hours)
    for known, line, after in zip(hours, found, with_more, strict=True):
        assert (line.start_ms, line.end_ms) == (known.start_ms, known.end_ms)
        if known.free_us is None:
            assert gpus(line) == gpus(after) == (None,) * 3
        if line.free_gpu_us is None or line.asked_gpu_us is None:
            assert (line.known_ms, *gpus(line)) == (0, None, None, None)
            continue
        assert 0 <= line.free_gpu_us <= min(known.free_us or 0, line.asked_gpu_us)
        assert line.asked_gpu_us > 0 or gpus(line) == (0, 0, 0)
        if line.idle_gpu_us is not None:
            assert 0 <= line.idle_gpu_us <= min(line.asked_gpu_us, known.idle_us or 0)
            assert line.free_gpu_us + line.idle_gpu_us <= line.asked_gpu_us
        else:
            assert known.idle_us is None
        if after.free_gpu_us is not None:
            assert after.free_gpu_us >= line.free_gpu_us
            if after.idle_gpu_us is not None and line.idle_gpu_us is not None:
                assert after.idle_gpu_us >= line.idle_gpu_us


@settings(max_examples=examples(40, 1_000))
@given(hours=SOME_HOURS, pods=st.lists(PODS, max_size=6), place=st.integers(1, HOURS))
def test_a_span_is_the_sum_of_its_parts_and_other_orders_of_pods_change_nothing(
    hours: list[GpuHour], pods: list[QueuedPod], place: int
) -> None:
    whole = unused_while_waiting(pods, hours)
    parts = [unused_while_waiting(pods[::-1], part) for part in (hours[:place], hours[place:])]
    assert [*parts[0], *parts[1]] == whole
    sums = [together(part) for part in parts if part]
    assert together(sums) == together(whole)
