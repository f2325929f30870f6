"""The meter on hand-written snapshots: where spans close, what is a gap, what survives a restart."""

from collections.abc import Sequence
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest

from agent.meter import ClosedSet, Meter, next_month_ms
from agent.model import (
    Allocation,
    DeviceReading,
    Gpu,
    HolderReading,
    InstanceReading,
    Reading,
    Snapshot,
    Unavailable,
)
from agent.simulated_gpu import A100, H100, make_gpu
from agent.wire import UNATTRIBUTED, Gap, Holder, UsageInterval

T = 1_790_812_800_000
"""2026-10-01T00:00:00Z."""
MINUTE = 60_000
GPU = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["4g.40gb", "3g.40gb"])
UNREAD = Unavailable("driver said no")


def pod(name: str) -> Holder:
    return Holder(kind="pod", uid=name, namespace="ns", name=name, container="main")


def device(busy_s: float | Reading, energy_j: float = 0, *holders: HolderReading, **more: object) -> DeviceReading:
    busy = busy_s if isinstance(busy_s, Unavailable) else round(busy_s * 1_000_000)
    reading = DeviceReading(GPU, busy_us=busy, energy_uj=round(energy_j * 1_000_000), holders=holders)
    return replaced(reading, **more)


def replaced(reading: DeviceReading, **changes: object) -> DeviceReading:
    return msgspec.structs.replace(reading, **changes)


def snapshot(after_ms: int, devices: Sequence[DeviceReading], *allocations: Allocation, unknown: str = "") -> Snapshot:
    return Snapshot(T + after_ms, tuple(devices), Unavailable(unknown) if unknown else allocations)


def used(name: str, busy_s: float, memory_mib: int = 0) -> HolderReading:
    return HolderReading(pod(name), busy_us=round(busy_s * 1_000_000), memory_mib=memory_mib)


def sliced(name: str) -> Allocation:
    return Allocation("GPU-0", pod(name), sharing="time-slicing", sharing_replicas=2)


def meter(interval_ms: int = MINUTE, **more: object) -> Meter:
    return Meter(interval_ms, ZoneInfo("UTC"), boot_id="boot-1", **more)  # type: ignore[arg-type]


def rows(sets: Sequence[ClosedSet]) -> list[UsageInterval]:
    return [row for closed in sets for row in closed.rows]


def spans(sets: Sequence[ClosedSet]) -> list[tuple[int, int]]:
    return [(closed.rows[0].start_ms - T, closed.rows[0].end_ms - T) for closed in sets]


def run(meter: Meter, *snapshots: Snapshot) -> list[ClosedSet]:
    return [closed for one in snapshots for closed in meter.observe(one)]


A = Allocation("GPU-0", pod("a"))


@pytest.mark.parametrize("interval_ms", [0, -1, 7_000, 1_800_000])
def test_the_interval_must_divide_a_quarter_of_an_hour(interval_ms: int) -> None:
    with pytest.raises(ValueError, match="must divide 15 minutes"):
        meter(interval_ms)


def test_spans_close_at_multiples_of_the_interval_and_counters_are_cut_there() -> None:
    closed = run(meter(), snapshot(50_000, [device(0, 0)], A), snapshot(130_000, [device(8, 80)], A))
    assert spans(closed) == [(50_000, 60_000), (60_000, 120_000)]
    assert [row.busy_us for row in rows(closed)] == [1_000_000, 6_000_000]
    assert [row.energy_uj for row in rows(closed)] == [10_000_000, 60_000_000]
    assert all(row.holder == pod("a") and row.capacity_us == row.allocated_us for row in rows(closed))


def test_all_rows_of_a_gpu_close_when_a_holder_comes_or_goes() -> None:
    closed = run(
        meter(),
        snapshot(0, [device(0)], sliced("a")),
        snapshot(10_000, [device(1, 0, used("a", 1))], sliced("a"), sliced("b")),
        snapshot(30_000, [device(9, 0, used("a", 3), used("b", 6))], sliced("b")),
    )
    assert spans(closed) == [(0, 10_000), (10_000, 30_000)]
    figures = [(row.holder.name if row.holder else None, row.capacity_us, row.busy_us) for row in rows(closed)]
    assert figures == [
        ("a", 5_000_000, 1_000_000),
        (None, 5_000_000, 0),
        ("a", 10_000_000, 2_000_000),
        ("b", 10_000_000, 6_000_000),
    ]


def test_the_order_in_which_holders_are_listed_means_nothing() -> None:
    first = snapshot(0, [device(0)], sliced("a"), sliced("b"))
    assert run(meter(), first, snapshot(10_000, [device(0)], sliced("b"), sliced("a"))) == []


def test_what_is_not_later_is_ignored() -> None:
    metering = meter()
    run(metering, snapshot(0, [device(0)], A), snapshot(30_000, [device(1)], A))
    assert metering.observe(snapshot(30_000, [device(5)])) == ()
    assert metering.observe(snapshot(20_000, [device(0)])) == ()
    (row,) = rows(metering.observe(snapshot(60_000, [device(2)], A)))
    assert (row.busy_us, row.gaps) == (2_000_000, ())


def test_spans_are_cut_at_local_month_edges() -> None:
    zone = ZoneInfo("Europe/Berlin")
    edge = next_month_ms(T, zone)
    assert datetime.fromtimestamp(edge / 1000, UTC) == datetime(2026, 10, 31, 23, tzinfo=UTC)  # winter time by then
    metering = Meter(900_000, ZoneInfo("Asia/Kathmandu"))
    kathmandu = next_month_ms(T, ZoneInfo("Asia/Kathmandu"))
    before = Snapshot(kathmandu - 1_000, (device(0),), (A,))
    closed = [*metering.observe(before), *metering.observe(Snapshot(kathmandu + 1_000, (device(2),), (A,)))]
    assert [closed[0].rows[0].end_ms] == [kathmandu]


def test_an_odd_month_edge_cuts_inside_an_interval() -> None:
    zone = ZoneInfo("Africa/Monrovia")  # 44 min 30 s behind UTC until 1972
    start = int(datetime(1971, 12, 31, 23, 55, tzinfo=UTC).timestamp()) * 1000 + 2_670_000 - 900_000
    edge = next_month_ms(start, zone)
    assert edge % 900_000
    metering = Meter(900_000, zone, silence_ms=10**9)
    metering.observe(Snapshot(edge - 10_000, (device(0),), (A,)))
    closed = metering.observe(Snapshot(edge + 1_000_000, (device(10),), (A,)))
    assert closed[0].rows[0].end_ms == edge


def test_a_counter_that_starts_again_is_a_gap_and_never_negative() -> None:
    for later in (device(1, 5), device(11, 105, counter_epoch="2"), device(9, 105), device(11, 5)):
        metering = meter()
        run(metering, snapshot(0, [device(4, 40)], A), snapshot(20_000, [device(10, 100)], A))
        (row,) = rows(run(metering, snapshot(30_000, [later], A), snapshot(60_000, [replaced(later)], A)))
        assert (row.busy_us, row.energy_uj) == (6_000_000, 60_000_000)
        assert row.gaps == (Gap(T + 20_000, T + 30_000, "counter reset"),)


def test_an_unavailable_reading_is_a_gap_with_its_reason() -> None:
    (row,) = rows(
        run(
            meter(),
            snapshot(0, [device(0)], A),
            snapshot(20_000, [device(UNREAD)], A),
            snapshot(40_000, [device(UNREAD)], A),
            snapshot(60_000, [device(9)], A),
        )
    )
    assert (row.busy_us, row.gaps) == (None, (Gap(T, T + MINUTE, "driver said no"),))


def test_energy_that_cannot_be_read_while_the_rest_can_is_unknown() -> None:
    readings = [device(0, 0), device(3, 30), replaced(device(5), energy_uj=UNREAD), device(9, 90)]
    (row,) = rows(run(meter(), *(snapshot(20_000 * i, [reading], A) for i, reading in enumerate(readings))))
    assert (row.busy_us, row.energy_uj, row.gaps) == (9_000_000, None, ())


def test_a_shared_gpu_without_holder_readings_leaves_its_busy_time_unattributed() -> None:
    closed = run(
        meter(),
        snapshot(0, [device(0)], sliced("a"), sliced("b")),
        snapshot(60_000, [device(7)], sliced("a"), sliced("b")),
    )
    a, b, nobody = rows(closed)
    assert (a.busy_us, b.busy_us) == (None, None)
    assert a.gaps == (Gap(T, T + MINUTE, "no per-holder reading"),)
    assert (nobody.holder, nobody.busy_us, nobody.capacity_us) == (UNATTRIBUTED, 7_000_000, 0)


def test_a_shared_gpu_that_did_nothing_needs_no_holder_readings() -> None:
    claims = (sliced("a"), sliced("b"))
    closed = run(meter(), snapshot(0, [device(3)], *claims), snapshot(60_000, [device(3)], *claims))
    assert [(row.busy_us, row.gaps) for row in rows(closed)] == [(0, ()), (0, ())]


def test_busy_while_nobody_is_allocated_is_unattributed() -> None:
    unheld, nobody = rows(run(meter(), snapshot(0, [device(0)]), snapshot(60_000, [device(7, 700)])))
    assert (unheld.holder, unheld.busy_us, unheld.allocated_us) == (None, 0, 0)
    assert (nobody.holder, nobody.busy_us, nobody.allocated_us) == (UNATTRIBUTED, 7_000_000, 0)
    assert sum(row.energy_uj or 0 for row in (unheld, nobody)) == 700_000_000


def test_a_process_of_nobody_is_unattributed_beside_the_holder() -> None:
    stray = HolderReading(Holder("process", "77", name="miner"), busy_us=0)
    later = HolderReading(Holder("process", "77", name="miner"), busy_us=20_000_000)
    held, nobody = rows(
        run(
            meter(),
            snapshot(0, [device(0, 0, stray)], A),
            snapshot(60_000, [device(50, 0, later)], A),
        )
    )
    assert (held.busy_us, nobody.busy_us) == (30_000_000, 20_000_000)


def test_a_holder_that_a_complete_reading_does_not_list_did_nothing() -> None:
    held, nobody = rows(
        run(
            meter(),
            snapshot(0, [replaced(device(0), method="process")], A),
            snapshot(60_000, [replaced(device(60), method="process")], A),
        )
    )
    assert (held.busy_us, nobody.busy_us) == (0, 60_000_000)


def test_a_sole_holder_gets_tensor_and_memory_readings_of_the_device() -> None:
    first = replaced(device(0), sm_active_us=0, tensor_active_us=5, memory_used_mib=1_000)
    last = replaced(device(9), sm_active_us=8, tensor_active_us=7, memory_used_mib=4_000)
    (row,) = rows(run(meter(), snapshot(0, [first], A), snapshot(60_000, [last], A)))
    assert (row.sm_active_us, row.tensor_active_us, row.memory_mib_s) == (8, 2, 60_000)


def test_memory_of_co_holders_is_their_own_and_the_rest_is_unowned() -> None:
    claims = (sliced("a"), sliced("b"))
    first = replaced(device(0, 0, used("a", 0, 1_000), used("b", 0, 500)), memory_used_mib=1_800)
    last = replaced(device(9, 0, used("a", 2), used("b", 1)), memory_used_mib=0)
    a, b, nobody = rows(run(meter(), snapshot(0, [first], *claims), snapshot(60_000, [last], *claims)))
    assert (a.memory_mib_s, b.memory_mib_s, nobody.memory_mib_s) == (60_000, 30_000, 18_000)


def test_mig_instances_have_their_own_readings_while_the_device_has_none() -> None:
    def reading(busy_s: int) -> DeviceReading:
        instances = (InstanceReading(MIG.mig[0].uuid, busy_s * 1_000_000, 100),)
        return DeviceReading(MIG, busy_us=UNREAD, energy_uj=busy_s * 1_000_000, instances=instances)

    claim = Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)
    held, unheld = rows(run(meter(), snapshot(0, [reading(0)], claim), snapshot(60_000, [reading(9)], claim)))
    assert (held.busy_us, held.memory_mib_s, held.gaps) == (9_000_000, 6_000, ())
    assert (unheld.busy_us, unheld.gaps) == (None, (Gap(T, T + MINUTE, "no reading of the MIG instance"),))
    assert (held.energy_uj or 0) + (unheld.energy_uj or 0) == 9_000_000


def test_a_lost_gpu_keeps_its_rows_and_says_so() -> None:
    lost = DeviceReading(GPU, health="lost", busy_us=Unavailable("gpu is lost"), energy_uj=Unavailable("gpu is lost"))
    closed = run(meter(), snapshot(0, [device(0)], A), snapshot(20_000, [lost], A), snapshot(60_000, [lost], A))
    assert [(row.health, row.allocated_us, row.busy_us) for row in rows(closed)] == [
        ("ok", 20_000_000, None),
        ("lost", 40_000_000, None),
    ]
    assert rows(closed)[1].gaps == (Gap(T + 20_000, T + MINUTE, "gpu is lost"),)


def test_a_gpu_that_is_no_longer_listed_ends_and_one_that_appears_begins() -> None:
    other = replaced(device(0), gpu=make_gpu("GPU-9", 9, H100))
    closed = run(meter(), snapshot(0, [device(0)], A), snapshot(20_000, [other], A), snapshot(60_000, [other], A))
    assert [(row.gpu_uuid, row.start_ms - T, row.end_ms - T) for row in rows(closed)] == [
        ("GPU-0", 0, 20_000),
        ("GPU-9", 20_000, 60_000),
    ]
    assert rows(closed)[0].gaps == (Gap(T, T + 20_000, "device gone"),)


def test_a_new_mig_layout_closes_the_gpu_at_that_instant() -> None:
    cut = replaced(device(0), gpu=make_gpu("GPU-0", 0, H100, ["7g.80gb"]))
    closed = run(meter(), snapshot(0, [device(0)]), snapshot(20_000, [cut]), snapshot(60_000, [cut]))
    assert [(row.slice.profile if row.slice else None, row.end_ms - T) for row in rows(closed)] == [
        (None, 20_000),
        ("7g.80gb", 60_000),
    ]


def test_when_nobody_says_who_holds_what_the_last_known_holders_stay_with_a_gap() -> None:
    (row,) = rows(
        run(
            meter(),
            snapshot(0, [device(0)], A),
            snapshot(20_000, [device(2)], unknown="kubelet gone"),
            snapshot(50_000, [device(5)], A),
            snapshot(60_000, [device(6)], A),
        )
    )
    assert (row.holder, row.allocated_us, row.busy_us) == (pod("a"), 60_000_000, 6_000_000)
    assert row.gaps == (Gap(T + 20_000, T + 50_000, "kubelet gone"),)


def test_before_the_holders_are_first_known_nothing_is_claimed() -> None:
    closed = run(
        meter(),
        snapshot(0, [device(0)], unknown="kubelet gone"),
        snapshot(20_000, [device(2)], A),
        snapshot(60_000, [device(6)], A),
    )
    assert spans(closed) == [(20_000, 60_000)]


def test_flapping_readings_keep_a_row_small() -> None:
    metering = meter()
    run(metering, snapshot(0, [device(0)], A))
    for second in range(1, 60):
        metering.observe(snapshot(second * 1_000, [device(Unavailable(f"fault {second}"))], A))
    (row,) = rows(metering.observe(snapshot(60_000, [device(60)], A)))
    assert len(row.gaps) == 32
    assert row.gaps[0] == Gap(T, T + 2_000, "fault 1")
    assert row.gaps[-1].end_ms == T + MINUTE


def test_flush_closes_the_open_rest_and_what_was_not_read_is_a_gap() -> None:
    metering = meter()
    run(metering, snapshot(0, [device(0)], A), snapshot(10_000, [device(4)], A))
    (row,) = rows(metering.flush(T + 12_000))
    assert (row.end_ms - T, row.busy_us, row.gaps) == (
        12_000,
        4_000_000,
        (Gap(T + 10_000, T + 12_000, "not observed"),),
    )
    assert metering.flush(T + 13_000) == ()
    assert meter().flush(T) == ()


# --- restarts -----------------------------------------------------------------------------------


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


def test_idle_power_is_learned_only_while_the_device_does_nothing() -> None:
    """60 J/min at rest (1 W), 600 J/min under load: with the idle power known, the unheld half pays 30 J."""
    metering = meter()
    claim = sliced("a")
    run(metering, snapshot(0, [replaced(device(0, 0, used("a", 0)), power_mw=9_000)], claim))
    loaded = replaced(device(30, 600, used("a", 30)), power_mw=1_000)
    held, unheld = rows(metering.observe(snapshot(60_000, [loaded], claim)))
    assert (held.energy_uj, unheld.energy_uj) == (450_000_000, 150_000_000)  # half the time busy: half is active
    at_rest = replaced(device(30, 660, used("a", 30)), power_mw=1_000)
    held, unheld = rows(metering.observe(snapshot(120_000, [at_rest], claim)))
    assert (held.energy_uj, unheld.energy_uj) == (30_000_000, 30_000_000)
    again = replaced(device(60, 1_260, used("a", 60)), power_mw=9_000)
    held, unheld = rows(metering.observe(snapshot(180_000, [again], claim)))
    assert (held.energy_uj, unheld.energy_uj) == (570_000_000, 30_000_000)


def test_idle_power_of_a_mig_device_is_learned_while_every_instance_rests() -> None:
    def reading(busy_s: int, energy_j: int, power_w: int) -> DeviceReading:
        instances = tuple(InstanceReading(m.uuid, busy_s * 1_000_000) for m in MIG.mig)
        return DeviceReading(
            MIG,
            busy_us=UNREAD,
            energy_uj=energy_j * 1_000_000,
            power_mw=power_w * 1_000,
            instances=instances,
        )

    metering = meter()
    claim = Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)
    run(metering, snapshot(0, [reading(0, 0, 7)], claim), snapshot(60_000, [reading(0, 420, 400)], claim))
    held, unheld, nobody = rows(metering.observe(snapshot(120_000, [reading(10, 1_840, 7)], claim)))
    # 7 W for a minute go by compute (4 : 3), the 1,000 J above it by busy time.
    assert nobody.energy_uj == 500_000_000
    assert held.energy_uj == pytest.approx(740_000_000, abs=10)
    assert unheld.energy_uj == pytest.approx(180_000_000, abs=10)
    assert sum(row.energy_uj or 0 for row in (held, unheld, nobody)) == 1_420_000_000


def test_every_row_says_how_its_busy_time_was_come_by() -> None:
    holders = (used("a", 0), used("b", 0)), (used("a", 20), used("b", 10))
    both = (sliced("a"), sliced("b"))
    before, after = (device(i * 30, 0, *h, method="process") for i, h in enumerate(holders))
    shared = run(meter(), snapshot(0, [before], *both), snapshot(MINUTE, [after], *both))
    assert [row.method for row in rows(shared)] == ["process", "process"]
    sole = run(meter(), snapshot(0, [before], A), snapshot(MINUTE, [device(30)], A))
    assert [row.method for row in rows(sole)] == ["device"]
    unread = run(meter(), snapshot(0, [device(0)], *both), snapshot(MINUTE, [device(30)], *both))
    assert [(row.method, row.busy_us) for row in rows(unread)] == [
        ("allocation", None), ("allocation", None), ("device", 30_000_000),
    ]  # fmt: skip
    idle = run(meter(), snapshot(0, [device(0)]), snapshot(MINUTE, [device(0)]))
    assert [row.method for row in rows(idle)] == ["device"]


def test_a_row_is_as_good_as_its_coarsest_stretch() -> None:
    both = (sliced("a"), sliced("b"))
    steps = [("accounting", 0), ("accounting", 10), ("process", 20)]
    seen = [
        snapshot(i * 30_000, [device(s * 2, 0, used("a", s), used("b", s), method=m)], *both)
        for i, (m, s) in enumerate(steps)
    ]
    assert [row.method for row in rows(run(meter(), *seen))] == ["process", "process"]


def test_activity_of_a_shared_gpu_goes_by_busy_time_and_that_of_strangers_to_nobody() -> None:
    both = (sliced("a"), sliced("b"))
    before = device(0, 0, used("a", 0), used("b", 0), method="process", sm_active_us=0, tensor_active_us=5)
    after = device(50, 0, used("a", 30), used("b", 10), method="process", sm_active_us=10_000_000, tensor_active_us=5)
    closed = rows(run(meter(), snapshot(0, [before], *both), snapshot(MINUTE, [after], *both)))
    assert [(r.holder.name if r.holder else "", r.sm_active_us, r.tensor_active_us) for r in closed] == [
        ("a", 6_000_000, 0), ("b", 2_000_000, 0), ("", 2_000_000, 0),
    ]  # fmt: skip


def test_an_instance_has_its_own_activity_and_its_own_method() -> None:
    def seen(busy_s: int, sm_s: int) -> DeviceReading:
        instances = (
            InstanceReading(MIG.mig[0].uuid, busy_s * 1_000_000, 1, sm_s * 1_000_000, method="gpm"),
            InstanceReading(MIG.mig[1].uuid, UNREAD),
        )
        return DeviceReading(MIG, busy_us=UNREAD, energy_uj=0, instances=instances, method="allocation")

    held = Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)
    other = Allocation("GPU-1", pod("b"), MIG.mig[1].uuid)
    closed = rows(run(meter(), snapshot(0, [seen(0, 0)], held, other), snapshot(MINUTE, [seen(9, 5)], held, other)))
    assert [(r.method, r.busy_us, r.sm_active_us, r.tensor_active_us) for r in closed] == [
        ("gpm", 9_000_000, 5_000_000, None), ("allocation", None, None, None),
    ]  # fmt: skip


def test_activity_without_busy_time_is_nobodys_and_carries_no_energy() -> None:
    """A driver may count activity in a stretch that its sampler calls idle."""
    before = device(0, 0, sm_active_us=0)
    after = device(0, 60, sm_active_us=1_000_000)
    closed = rows(run(meter(), snapshot(0, [before]), snapshot(MINUTE, [after])))
    assert [(r.holder, r.busy_us, r.sm_active_us, r.energy_uj) for r in closed] == [
        (None, 0, 0, 60_000_000), (UNATTRIBUTED, 0, 1_000_000, 0),
    ]  # fmt: skip


def test_a_holder_whose_last_process_ended_did_nothing_since() -> None:
    both = (sliced("a"), sliced("b"))
    seen = [
        device(0, 0, used("a", 0), used("b", 0), method="process"),
        device(20, 0, used("a", 20), used("b", 0), method="process"),
        device(20, 0, method="process"),
        device(20, 0, used("b", 0), method="process"),
    ]
    closed = rows(run(meter(), *(snapshot(i * 20_000, [reading], *both) for i, reading in enumerate(seen))))
    assert [(row.busy_us, row.gaps) for row in closed] == [(20_000_000, ()), (0, ())]
