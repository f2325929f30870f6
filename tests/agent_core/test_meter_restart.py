"""What the meter carries over a restart of its process, and what over a long silence."""

from zoneinfo import ZoneInfo

import msgspec
import pytest

from agent.core.readings import Allocation, Gpu
from agent.metering.meter import Meter
from agent.wire import Gap
from tests.agent_core.metering import MINUTE, A, T, device, meter, pod, replaced, rows, run, sliced, snapshot, spans


def test_unchanged_holders_are_carried_over_a_restart_in_aligned_spans() -> None:
    before = meter()
    run(before, snapshot(0, [device(0)], A), snapshot(70_000, [device(5)], A))
    after = meter()
    closed = after.resume(before.state(), snapshot(150_000, [device(9)], A))
    assert spans(closed) == [(60_000, 120_000), (120_000, 150_000)]
    for row in rows(closed):
        assert (row.method, row.holder, row.busy_us, row.energy_uj) == ("carried", pod("a"), None, None)
        assert row.gaps == (Gap(row.start_ms, row.end_ms, "not observed"),)
        assert row.allocated_us == row.capacity_us == (row.end_ms - row.start_ms) * 1_000
    assert spans(after.observe(snapshot(180_000, [device(10)], A))) == [(150_000, 180_000)]


def test_only_unchanged_holders_are_carried_and_never_unheld_time() -> None:
    before = meter()
    run(before, snapshot(0, [device(0)], sliced("a")))
    after = meter().resume(before.state(), snapshot(60_000, [device(9)], sliced("a"), sliced("b")))
    (row,) = rows(after)
    assert (row.holder, row.capacity_us) == (pod("a"), 30_000_000)
    unheld = meter()
    run(unheld, snapshot(0, [device(0)]))
    assert meter().resume(unheld.state(), snapshot(60_000, [device(9)])) == ()
    held = meter()
    run(held, snapshot(0, [device(0)], A))
    assert meter().resume(held.state(), snapshot(60_000, [device(9)], Allocation("GPU-0", pod("b")))) == ()


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff not msgpack",
        msgspec.msgpack.encode({"version": 1}),
        msgspec.msgpack.encode({"version": 99, "boot_id": "boot-1", "gpus": []}),
    ],
)
def test_a_state_that_cannot_be_read_is_ignored(state: bytes) -> None:
    metering = meter()
    assert metering.resume(state, snapshot(0, [device(0)], A)) == ()
    assert spans(metering.observe(snapshot(60_000, [device(1)], A))) == [(0, 60_000)]


def test_nothing_is_carried_over_a_reboot() -> None:
    before = meter()
    run(before, snapshot(0, [device(0)], A))
    after = Meter(MINUTE, ZoneInfo("UTC"), boot_id="boot-2")
    assert after.resume(before.state(), snapshot(60_000, [device(9)], A)) == ()


def test_carrying_waits_until_the_holders_are_known_again() -> None:
    before = meter()
    run(before, snapshot(0, [device(0)], A))
    after = meter()
    assert after.resume(before.state(), snapshot(30_000, [device(9)], unknown="kubelet gone")) == ()
    again = meter()  # killed once more before the kubelet answered
    assert again.resume(after.state(), snapshot(40_000, [], unknown="kubelet gone")) == ()
    assert spans(again.observe(snapshot(50_000, [device(9)], A))) == [(0, 50_000)]


def test_a_wall_clock_set_back_over_a_restart_makes_no_time_twice() -> None:
    before = meter()
    run(before, snapshot(0, [device(0)], A), snapshot(120_000, [device(5)], A))
    after = meter()
    assert after.resume(before.state(), snapshot(30_000, [device(6)], A)) == ()
    assert after.observe(snapshot(90_000, [device(7)], A)) == ()
    closed = [*after.observe(snapshot(150_000, [device(8)], A)), *after.observe(snapshot(180_000, [device(9)], A))]
    assert [(c.rows[0].start_ms - T, c.rows[0].end_ms - T, c.rows[0].method) for c in closed] == [
        (120_000, 150_000, "carried"),
        (150_000, 180_000, "device"),
    ]


def test_a_gpu_that_was_lost_before_and_after_is_carried_as_lost_and_one_that_changed_is_not() -> None:
    lost = replaced(device(0), health="lost")
    before = meter()
    run(before, snapshot(0, [lost], A))
    (row,) = rows(meter().resume(before.state(), snapshot(60_000, [lost], A)))
    assert row.health == "lost"
    assert meter().resume(before.state(), snapshot(60_000, [device(0)], A)) == ()


def test_a_long_silence_is_treated_like_a_restart() -> None:
    metering = meter(silence_ms=120_000)
    run(metering, snapshot(0, [device(0)], A), snapshot(10_000, [device(1)], A))
    closed = metering.observe(snapshot(200_000, [device(9)], A))
    assert spans(closed) == [(0, 10_000), (10_000, 60_000), (60_000, 120_000), (120_000, 180_000), (180_000, 200_000)]
    assert [row.method for row in rows(closed)] == ["device"] + ["carried"] * 4
    assert metering.observe(snapshot(500_000, [device(9)], Allocation("GPU-0", pod("b")))) == ()


def test_a_device_that_does_not_return_with_the_others_is_not_carried_later() -> None:
    other = replaced(device(0), gpu=Gpu("GPU-9", 9, "H100", 81_559))
    before = meter()
    run(before, snapshot(0, [device(0)], A))
    after = meter()
    assert after.resume(before.state(), snapshot(30_000, [other], A)) == ()
    assert spans(after.observe(snapshot(50_000, [other, device(0)], A))) == []
