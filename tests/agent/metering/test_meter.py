"""The meter on hand-written snapshots: the ends of spans, gaps, and the state carried over a restart."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest

from agent.core.readings import (
    Allocation,
    DeviceReading,
    Gpu,
    HolderReading,
    InstanceReading,
    NodeSnapshot,
    Unavailable,
)
from agent.metering.meter import Meter, next_month_ms
from agent.simulation.simulated_node import H100, make_gpu
from agent.wire import UNATTRIBUTED, Gap, Holder
from tests.agent.snapshots import (
    GPU,
    MIG,
    MINUTE,
    T0,
    UNREAD,
    A,
    device,
    meter,
    over_a_minute,
    pod,
    replaced,
    rows,
    run,
    sliced,
    snapshot,
    spans,
    used,
)

BOTH = (sliced("a"), sliced("b"))


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
    edge = next_month_ms(T0, zone)
    assert datetime.fromtimestamp(edge / 1000, UTC) == datetime(2026, 10, 31, 23, tzinfo=UTC)  # winter time by then
    metering = Meter(900_000, ZoneInfo("Asia/Kathmandu"))
    kathmandu = next_month_ms(T0, ZoneInfo("Asia/Kathmandu"))
    before = NodeSnapshot(kathmandu - 1_000, (device(0),), (A,))
    closed = [*metering.observe(before), *metering.observe(NodeSnapshot(kathmandu + 1_000, (device(2),), (A,)))]
    assert [closed[0].rows[0].end_ms] == [kathmandu]


def test_an_odd_month_edge_cuts_inside_an_interval() -> None:
    zone = ZoneInfo("Africa/Monrovia")  # 44 min 30 s behind UTC until 1972
    start = int(datetime(1971, 12, 31, 23, 55, tzinfo=UTC).timestamp()) * 1000 + 2_670_000 - 900_000
    edge = next_month_ms(start, zone)
    assert edge % 900_000
    metering = Meter(900_000, zone, silence_ms=10**9)
    metering.observe(NodeSnapshot(edge - 10_000, (device(0),), (A,)))
    closed = metering.observe(NodeSnapshot(edge + 1_000_000, (device(10),), (A,)))
    assert closed[0].rows[0].end_ms == edge


def test_a_counter_that_starts_again_is_a_gap_and_never_negative() -> None:
    for later in (device(1, 5), device(11, 105, counter_epoch="2"), device(9, 105), device(11, 5)):
        metering = meter()
        run(metering, snapshot(0, [device(4, 40)], A), snapshot(20_000, [device(10, 100)], A))
        (row,) = rows(run(metering, snapshot(30_000, [later], A), snapshot(60_000, [replaced(later)], A)))
        assert (row.busy_us, row.energy_uj) == (6_000_000, 60_000_000)
        assert row.gaps == (Gap(T0 + 20_000, T0 + 30_000, "counter reset"),)


def test_an_unavailable_reading_is_a_gap_with_its_reason() -> None:
    (row,) = over_a_minute(device(0), device(UNREAD), device(UNREAD), device(9))
    assert (row.busy_us, row.gaps) == (None, (Gap(T0, T0 + MINUTE, "driver said no"),))


def test_energy_that_cannot_be_read_while_the_rest_can_is_unknown() -> None:
    (row,) = over_a_minute(device(0, 0), device(3, 30), device(5, energy_uj=UNREAD), device(9, 90))
    assert (row.busy_us, row.energy_uj, row.gaps) == (9_000_000, None, ())


def test_energy_that_cannot_be_read_while_instances_can_is_unknown() -> None:
    def reading(busy_s: int, energy_uj: int | Unavailable) -> DeviceReading:
        instances = tuple(InstanceReading(part.uuid, busy_s * 1_000_000) for part in MIG.mig)
        return DeviceReading(MIG, busy_us=UNREAD, energy_uj=energy_uj, instances=instances)

    claim = Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)
    found = over_a_minute(reading(0, 0), reading(4, 4_000_000), reading(8, UNREAD), claims=[claim])
    assert {row.energy_uj for row in found} == {None}


def test_a_shared_gpu_without_holder_readings_leaves_its_busy_time_unattributed() -> None:
    a, b, nobody = over_a_minute(device(0), device(7), claims=BOTH)
    assert (a.busy_us, b.busy_us) == (None, None)
    assert a.gaps == (Gap(T0, T0 + MINUTE, "no per-holder reading"),)
    assert (nobody.holder, nobody.busy_us, nobody.capacity_us) == (UNATTRIBUTED, 7_000_000, 0)


def test_a_shared_gpu_that_did_nothing_needs_no_holder_readings() -> None:
    found = over_a_minute(device(3), device(3), claims=BOTH)
    assert [(row.busy_us, row.gaps) for row in found] == [(0, ()), (0, ())]


def test_a_shared_gpu_without_holder_readings_keeps_its_method_idle_or_busy() -> None:
    (idle, _), (busy, *_) = (
        over_a_minute(device(3), device(3), claims=BOTH),
        over_a_minute(device(3), device(9), claims=BOTH),
    )
    assert (idle.busy_us, busy.busy_us) == (0, None)
    assert idle.method == busy.method == "allocation"


def test_busy_while_nobody_is_allocated_is_unattributed() -> None:
    unheld, nobody = over_a_minute(device(0), device(7, 700), claims=())
    assert (unheld.holder, unheld.busy_us, unheld.allocated_us) == (None, 0, 0)
    assert (nobody.holder, nobody.busy_us, nobody.allocated_us) == (UNATTRIBUTED, 7_000_000, 0)
    assert sum(row.energy_uj or 0 for row in (unheld, nobody)) == 700_000_000


def test_a_process_of_nobody_is_unattributed_beside_the_holder() -> None:
    stray, later = (HolderReading(Holder("process", "77", name="miner"), busy_us=used) for used in (0, 20_000_000))
    held, nobody = over_a_minute(device(0, 0, stray), device(50, 0, later))
    assert (held.busy_us, nobody.busy_us) == (30_000_000, 20_000_000)


def test_a_holder_that_a_complete_reading_does_not_list_did_nothing() -> None:
    held, nobody = over_a_minute(device(0, method="process"), device(60, method="process"))
    assert (held.busy_us, nobody.busy_us, held.memory_mib_s) == (0, 60_000_000, 0)


def test_a_sole_holder_gets_tensor_and_memory_readings_of_the_device() -> None:
    first = device(0, sm_active_us=0, tensor_active_us=5, memory_used_mib=1_000)
    (row,) = over_a_minute(first, device(9, sm_active_us=8, tensor_active_us=7, memory_used_mib=4_000))
    assert (row.sm_active_us, row.tensor_active_us, row.memory_mib_s) == (8, 2, 60_000)


def test_memory_of_co_holders_is_their_own_and_the_rest_is_unowned() -> None:
    first = device(0, 0, used("a", 0, 1_000), used("b", 0, 500), memory_used_mib=1_800)
    last = device(9, 0, used("a", 2), used("b", 1), memory_used_mib=0)
    a, b, nobody = over_a_minute(first, last, claims=BOTH)
    assert (a.memory_mib_s, b.memory_mib_s, nobody.memory_mib_s) == (60_000, 30_000, 18_000)


def test_mig_instances_have_their_own_readings_while_the_device_has_none() -> None:
    def reading(busy_s: int) -> DeviceReading:
        instances = (InstanceReading(MIG.mig[0].uuid, busy_s * 1_000_000, 100),)
        return DeviceReading(MIG, busy_us=UNREAD, energy_uj=busy_s * 1_000_000, instances=instances)

    held, unheld = over_a_minute(reading(0), reading(9), claims=[Allocation("GPU-1", pod("a"), MIG.mig[0].uuid)])
    assert (held.busy_us, held.memory_mib_s, held.gaps) == (9_000_000, 6_000, ())
    assert (unheld.busy_us, unheld.gaps) == (None, (Gap(T0, T0 + MINUTE, "no reading of the MIG instance"),))
    assert (held.energy_uj or 0) + (unheld.energy_uj or 0) == 9_000_000


def test_a_lost_gpu_keeps_its_rows_and_says_so() -> None:
    gone = Unavailable("gpu is lost")
    lost = DeviceReading(GPU, health="lost", busy_us=gone, energy_uj=gone)
    before, after = over_a_minute(device(0), lost, lost, lost)
    assert (before.health, before.allocated_us, before.busy_us) == ("ok", 20_000_000, None)
    assert (after.health, after.allocated_us, after.busy_us) == ("lost", 40_000_000, None)
    assert after.gaps == (Gap(T0 + 20_000, T0 + MINUTE, "gpu is lost"),)


def test_a_gpu_that_is_no_longer_listed_ends_and_one_that_appears_begins() -> None:
    other = device(0, gpu=make_gpu("GPU-9", 9, H100))
    ended, begun = over_a_minute(device(0), other, other, other)
    assert (ended.gpu_uuid, ended.start_ms - T0, ended.end_ms - T0) == ("GPU-0", 0, 20_000)
    assert (begun.gpu_uuid, begun.start_ms - T0, begun.end_ms - T0) == ("GPU-9", 20_000, 60_000)
    assert ended.gaps == (Gap(T0, T0 + 20_000, "device gone"),)


def test_a_new_mig_layout_closes_the_gpu_at_that_instant() -> None:
    cut = device(0, gpu=make_gpu("GPU-0", 0, H100, ["7g.80gb"]))
    found = over_a_minute(device(0), cut, cut, cut, claims=())
    spans = [(row.slice.profile if row.slice else None, row.end_ms - T0) for row in found]
    assert spans == [(None, 20_000), ("7g.80gb", 60_000)]


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
    assert row.gaps == (Gap(T0 + 20_000, T0 + 50_000, "kubelet gone"),)


def test_while_the_holders_are_unknown_no_time_is_booked_as_unheld() -> None:
    """A GPU that was free may have been allocated meanwhile, so its time is unknown; so is the time of a GPU that
    appears."""
    free = device(0, 0)
    new, shared = device(0, 0, gpu=make_gpu("GPU-new", 2, H100)), device(0, 0, gpu=make_gpu("GPU-shared", 3, H100))
    claim = replace(sliced("a"), gpu_uuid="GPU-shared")

    def at(at_ms: int, *devices: DeviceReading, unknown: str = "") -> NodeSnapshot:
        return snapshot(at_ms, devices, claim, unknown=unknown)

    closed = run(
        meter(),
        at(0, free, shared),
        at(10_000, free, shared, unknown="kubelet gone"),
        at(40_000, free, shared, new, unknown="kubelet gone"),
        at(50_000, free, shared, new),
        at(60_000, free, shared, new),
    )
    unheld = sorted((row.gpu_uuid, row.start_ms - T0, row.end_ms - T0) for row in rows(closed) if row.holder is None)
    assert unheld == [
        (GPU.uuid, 0, 10_000), (GPU.uuid, 50_000, 60_000), ("GPU-new", 50_000, 60_000),
        ("GPU-shared", 0, 10_000), ("GPU-shared", 50_000, 60_000),
    ]  # fmt: skip
    held = [row for row in rows(closed) if row.holder is not None]
    assert [(row.start_ms - T0, row.end_ms - T0, row.allocated_us) for row in held] == [
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
    assert row.gaps[0] == Gap(T0, T0 + 2_000, "fault 1")
    assert row.gaps[-1].end_ms == T0 + MINUTE


def test_flush_closes_the_open_rest_and_what_was_not_read_is_a_gap() -> None:
    metering = meter()
    run(metering, snapshot(0, [device(0)], A), snapshot(10_000, [device(4)], A))
    (row,) = rows(metering.flush(T0 + 12_000))
    assert (row.end_ms - T0, row.busy_us) == (12_000, 4_000_000)
    assert row.gaps == (Gap(T0 + 10_000, T0 + 12_000, "not observed"),)
    assert metering.flush(T0 + 13_000) == ()
    assert meter().flush(T0) == ()


def test_idle_power_is_learned_only_while_the_device_does_nothing() -> None:
    """60 J/min at rest (1 W), 600 J/min under load: once the idle power is known, the unheld half is charged 30 J."""
    metering, claim = meter(), sliced("a")
    run(metering, snapshot(0, [device(0, 0, used("a", 0), power_mw=9_000)], claim))
    for minute, (busy_s, energy_j, power_mw, booked) in enumerate(
        [
            (30, 600, 1_000, (450_000_000, 150_000_000)),  # half the time busy: half is active
            (30, 660, 1_000, (30_000_000, 30_000_000)),
            (60, 1_260, 9_000, (570_000_000, 30_000_000)),
        ],
        1,
    ):
        seen = device(busy_s, energy_j, used("a", busy_s), power_mw=power_mw)
        held, unheld = rows(metering.observe(snapshot(minute * MINUTE, [seen], claim)))
        assert (held.energy_uj, unheld.energy_uj) == booked


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


@pytest.mark.parametrize(
    ("before", "after", "claims", "methods"),
    [
        (
            device(0, 0, used("a", 0), used("b", 0), method="process"),
            device(30, 0, used("a", 20), used("b", 10), method="process"),
            BOTH,
            [("process", 20_000_000), ("process", 10_000_000)],
        ),
        (device(0, 0, used("a", 0), method="process"), device(30), [A], [("device", 30_000_000)]),
        (device(0), device(30), BOTH, [("allocation", None), ("allocation", None), ("device", 30_000_000)]),
        (device(0), device(0), [], [("device", 0)]),
    ],
    ids=["shared", "sole", "shared and unread", "idle"],
)
def test_every_row_says_how_its_busy_time_was_come_by(
    before: DeviceReading, after: DeviceReading, claims: list[Allocation], methods: list[tuple[str, int | None]]
) -> None:
    assert [(row.method, row.busy_us) for row in over_a_minute(before, after, claims=claims)] == methods


def test_a_row_is_as_good_as_its_coarsest_stretch() -> None:
    steps = [("accounting", 0), ("accounting", 10), ("process", 20)]
    seen = (device(used_s * 2, 0, used("a", used_s), used("b", used_s), method=how) for how, used_s in steps)
    assert [row.method for row in over_a_minute(*seen, claims=BOTH)] == ["process", "process"]


def test_activity_of_a_shared_gpu_goes_by_busy_time_and_that_of_strangers_to_nobody() -> None:
    before = device(0, 0, used("a", 0), used("b", 0), method="process", sm_active_us=0, tensor_active_us=5)
    after = device(50, 0, used("a", 30), used("b", 10), method="process", sm_active_us=10_000_000, tensor_active_us=5)
    found = over_a_minute(before, after, claims=BOTH)
    assert [(row.holder.name if row.holder else "", row.sm_active_us, row.tensor_active_us) for row in found] == [
        ("a", 6_000_000, 0), ("b", 2_000_000, 0), ("", 2_000_000, 0),
    ]  # fmt: skip


def test_an_instance_has_its_own_activity_and_its_own_method() -> None:
    def seen(busy_s: int, sm_s: int) -> DeviceReading:
        first = InstanceReading(MIG.mig[0].uuid, busy_s * 1_000_000, 1, sm_s * 1_000_000, method="gpm")
        instances = (first, InstanceReading(MIG.mig[1].uuid, UNREAD))
        return DeviceReading(MIG, busy_us=UNREAD, energy_uj=0, instances=instances, method="allocation")

    claims = [Allocation("GPU-1", pod(name), part.uuid) for name, part in zip("ab", MIG.mig, strict=True)]
    found = over_a_minute(seen(0, 0), seen(9, 5), claims=claims)
    assert [(row.method, row.busy_us, row.sm_active_us, row.tensor_active_us) for row in found] == [
        ("gpm", 9_000_000, 5_000_000, None), ("allocation", None, None, None),
    ]  # fmt: skip


def test_activity_without_busy_time_is_nobodys_and_carries_no_energy() -> None:
    """A driver may count activity in a span that its sampler calls idle."""
    found = over_a_minute(device(0, 0, sm_active_us=0), device(0, 60, sm_active_us=1_000_000), claims=())
    assert [(row.holder, row.busy_us, row.sm_active_us, row.energy_uj) for row in found] == [
        (None, 0, 0, 60_000_000), (UNATTRIBUTED, 0, 1_000_000, 0),
    ]  # fmt: skip


def test_a_holder_whose_last_process_ended_did_nothing_since() -> None:
    listed = [(used("a", 0), used("b", 0)), (used("a", 20), used("b", 0)), (), (used("b", 0),)]
    seen = (device(20 if step else 0, 0, *holders, method="process") for step, holders in enumerate(listed))
    assert [(row.busy_us, row.gaps) for row in over_a_minute(*seen, claims=BOTH)] == [(20_000_000, ()), (0, ())]


def test_energy_goes_by_allocation_while_the_busy_time_of_a_holder_is_unknown() -> None:
    """The energy of the unread holder's work is not charged to the other."""
    unread = HolderReading(pod("b"), busy_us=UNREAD, memory_mib=UNREAD)
    first = device(0, 0, used("a", 0), unread, method="process")
    a, b, *_ = over_a_minute(first, device(30, 600, used("a", 10), unread, method="process"), claims=BOTH)
    assert (a.busy_us, b.busy_us) == (10_000_000, None)
    assert (a.energy_uj, b.energy_uj) == (300_000_000, 300_000_000)


def stopped(*snapshots: NodeSnapshot) -> bytes:
    """The state of a meter that observed these snapshots before its process was killed."""
    metering = meter()
    run(metering, *snapshots)
    return metering.state()


HELD = stopped(snapshot(0, [device(0)], A))


def test_unchanged_holders_are_carried_over_a_restart_in_aligned_spans() -> None:
    after = meter()
    state = stopped(snapshot(0, [device(0)], A), snapshot(70_000, [device(5)], A))
    closed = after.resume(state, snapshot(150_000, [device(9)], A))
    assert spans(closed) == [(60_000, 120_000), (120_000, 150_000)]
    for row in rows(closed):
        assert (row.method, row.holder, row.busy_us, row.energy_uj) == ("carried", pod("a"), None, None)
        assert row.gaps == (Gap(row.start_ms, row.end_ms, "not observed"),)
        assert row.allocated_us == row.capacity_us == (row.end_ms - row.start_ms) * 1_000
    assert spans(after.observe(snapshot(180_000, [device(10)], A))) == [(150_000, 180_000)]


def test_only_unchanged_holders_are_carried() -> None:
    state = stopped(snapshot(0, [device(0)], sliced("a")))
    (row,) = rows(meter().resume(state, snapshot(60_000, [device(9)], *BOTH)))
    assert (row.holder, row.capacity_us) == (pod("a"), 30_000_000)


@pytest.mark.parametrize(
    ("state", "boot_id", "claims"),
    [
        (stopped(snapshot(0, [device(0)])), "boot-1", ()),
        (HELD, "boot-1", (Allocation("GPU-0", pod("b")),)),
        (HELD, "boot-2", (A,)),
        (stopped(snapshot(0, [device(0, health="lost")], A)), "boot-1", (A,)),
    ],
    ids=["unheld time", "another holder", "a reboot", "a GPU that was lost"],
)
def test_what_is_not_carried(state: bytes, boot_id: str, claims: tuple[Allocation, ...]) -> None:
    after = Meter(MINUTE, ZoneInfo("UTC"), boot_id=boot_id)
    assert after.resume(state, snapshot(60_000, [device(9)], *claims)) == ()


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


def test_carrying_waits_until_the_holders_are_known_again() -> None:
    after = meter()
    assert after.resume(HELD, snapshot(30_000, [device(9)], unknown="kubelet gone")) == ()
    again = meter()  # killed once more before the kubelet answered
    assert again.resume(after.state(), snapshot(40_000, [], unknown="kubelet gone")) == ()
    assert spans(again.observe(snapshot(50_000, [device(9)], A))) == [(0, 50_000)]


def test_a_wall_clock_set_back_over_a_restart_makes_no_time_twice() -> None:
    after = meter()
    state = stopped(snapshot(0, [device(0)], A), snapshot(120_000, [device(5)], A))
    assert after.resume(state, snapshot(30_000, [device(6)], A)) == ()
    closed = run(after, *(snapshot(at_ms, [device(at_ms // 10_000)], A) for at_ms in (90_000, 150_000, 180_000)))
    assert spans(closed) == [(120_000, 150_000), (150_000, 180_000)]
    assert [row.method for row in rows(closed)] == ["carried", "device"]


def test_a_gpu_that_was_lost_before_and_after_is_carried_as_lost() -> None:
    lost = snapshot(60_000, [device(0, health="lost")], A)
    (row,) = rows(meter().resume(stopped(snapshot(0, lost.devices, A)), lost))
    assert row.health == "lost"


def test_a_long_silence_is_treated_like_a_restart() -> None:
    metering = meter(silence_ms=120_000)
    run(metering, snapshot(0, [device(0)], A), snapshot(10_000, [device(1)], A))
    closed = metering.observe(snapshot(200_000, [device(9)], A))
    assert spans(closed) == [(0, 10_000), (10_000, 60_000), (60_000, 120_000), (120_000, 180_000), (180_000, 200_000)]
    assert [row.method for row in rows(closed)] == ["device"] + ["carried"] * 4
    assert metering.observe(snapshot(500_000, [device(9)], Allocation("GPU-0", pod("b")))) == ()


def test_a_device_that_does_not_return_with_the_others_is_not_carried_later() -> None:
    other, after = device(0, gpu=Gpu("GPU-9", 9, "H100", 81_559)), meter()
    assert after.resume(HELD, snapshot(30_000, [other], A)) == ()
    assert spans(after.observe(snapshot(50_000, [other, device(0)], A))) == []


def test_the_busy_time_of_a_gpu_is_that_of_its_only_holder_even_if_it_declares_a_fraction() -> None:
    half = Allocation("GPU-0", pod("a"), fraction_ppm=500_000)
    found = over_a_minute(device(0), device(20), claims=(half,))
    figures = [(row.holder.name if row.holder else None, row.allocated_us, row.busy_us) for row in found]
    assert figures == [("a", 30_000_000, 20_000_000), (None, 0, 0)]
