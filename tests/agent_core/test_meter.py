"""The meter on hand-written snapshots: where spans close, and what is a gap."""

from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from agent.core.readings import Allocation, DeviceReading, HolderReading, InstanceReading, Snapshot, Unavailable
from agent.metering.meter import Meter, next_month_ms
from agent.simulation.simulated_node import H100, make_gpu
from agent.wire import UNATTRIBUTED, Gap, Holder
from tests.agent_core.metering import (
    GPU,
    MIG,
    MINUTE,
    UNREAD,
    A,
    T,
    device,
    meter,
    pod,
    replaced,
    rows,
    run,
    sliced,
    snapshot,
    spans,
    used,
)


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


def test_while_the_holders_are_unknown_no_time_is_booked_as_unheld() -> None:
    """A pod may have been given what was free before: that time is unknown, as is a GPU that appears meanwhile."""
    free = device(0, 0)
    new, shared = device(0, 0, gpu=make_gpu("GPU-new", 2, H100)), device(0, 0, gpu=make_gpu("GPU-shared", 3, H100))
    claim = replace(sliced("a"), gpu_uuid="GPU-shared")

    def at(at_ms: int, *devices: DeviceReading, unknown: str = "") -> Snapshot:
        return snapshot(at_ms, devices, claim, unknown=unknown)

    closed = run(
        meter(),
        at(0, free, shared),
        at(10_000, free, shared, unknown="kubelet gone"),
        at(40_000, free, shared, new, unknown="kubelet gone"),
        at(50_000, free, shared, new),
        at(60_000, free, shared, new),
    )
    unheld = sorted((row.gpu_uuid, row.start_ms - T, row.end_ms - T) for row in rows(closed) if row.holder is None)
    assert unheld == [
        (GPU.uuid, 0, 10_000), (GPU.uuid, 50_000, 60_000), ("GPU-new", 50_000, 60_000),
        ("GPU-shared", 0, 10_000), ("GPU-shared", 50_000, 60_000),
    ]  # fmt: skip
    held = [row for row in rows(closed) if row.holder is not None]
    assert [(row.start_ms - T, row.end_ms - T, row.allocated_us) for row in held] == [
        (0, 10_000, 5_000_000), (10_000, 50_000, 20_000_000), (50_000, 60_000, 5_000_000),
    ]  # fmt: skip
    assert {gap.reason for gap in held[1].gaps} == {"kubelet gone"}


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
