"""Idle power as the meter learns it, how busy time was come by, and activity of shared GPUs and instances."""

import pytest

from agent.core.readings import Allocation, DeviceReading, HolderReading, InstanceReading
from agent.wire import UNATTRIBUTED
from tests.agent_core.metering import (
    MIG,
    MINUTE,
    UNREAD,
    A,
    device,
    meter,
    pod,
    replaced,
    rows,
    run,
    sliced,
    snapshot,
    used,
)


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


def test_energy_goes_by_allocation_while_the_busy_time_of_a_holder_is_unknown() -> None:
    """What the unread one spent on its work is not the other's."""
    both = (sliced("a"), sliced("b"))
    unread = HolderReading(pod("b"), busy_us=UNREAD, memory_mib=UNREAD)
    first = device(0, 0, used("a", 0), unread, method="process")
    then = device(30, 600, used("a", 10), unread, method="process")
    a, b, *_ = rows(run(meter(), snapshot(0, [first], *both), snapshot(MINUTE, [then], *both)))
    assert (a.busy_us, b.busy_us) == (10_000_000, None)
    assert (a.energy_uj, b.energy_uj) == (300_000_000, 300_000_000)
