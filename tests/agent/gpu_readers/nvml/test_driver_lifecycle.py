"""Changes of drivers and GPUs while the agent runs: errors, hangs, new layouts, counters that wrap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accountant.core.gpu_time_accounts import split
from agent.core.readings import (
    DeviceCondition,
    DriverReplaced,
    ProcessReading,
    Recovery,
    RecoveryAction,
    Unavailable,
    XidCount,
)
from agent.gpu_readers.nvml.driver_lifecycle import RETRY_MIN_MS, REVIVE_MS, Gpus
from agent.gpu_readers.nvml.nvml_device import CONDITION_EVERY_MS
from agent.gpu_readers.nvml.nvml_library import Driver
from gputally.base.clock import VirtualClock
from tests.agent.gpu_readers.nvml.rig import GIB, T0, Rig
from tests.fakes.nvml.library import FakeNvml

NewRig = Callable[..., Any]
OLD_FORM = "MIG-GPU-0/1/0"


@pytest.fixture
def rig(new_rig: NewRig, fake_nvml: FakeNvml) -> Iterator[Rig]:
    yield new_rig(gpus=2)
    fake_nvml.tell("unhang")
    join_workers()


def join_workers() -> None:
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(0.2)


def test_the_condition_is_read_every_ten_seconds(rig: Rig) -> None:
    rig.fake.tell("on 0", "temp 61", "clocks 1980 2619", "ecc 3 1", "throttle 4")
    assert rig.look().devices[0].condition == DeviceCondition(61, 1980, 2619, 4, 3, 1, xids_unread="")
    rig.fake.tell("on 0", "temp 70")
    assert rig.tick().devices[0].condition.temperature_c == 61
    assert rig.tick(CONDITION_EVERY_MS).devices[0].condition.temperature_c == 70


def test_errors_are_counted_at_once_and_survive_the_driver(rig: Rig) -> None:
    rig.look()
    rig.fake.tell("on 1", "xid 31", "xid 31", "xid 79")
    first, second = rig.tick().devices
    assert first.condition.xids == ()
    assert second.condition.xids == (XidCount(31, 2, T0 + 1_000), XidCount(79, 1, T0 + 1_000))
    rig.fake.tell("on 1", "lost")
    rig.let_go("driver upgrade")
    rig.fake.tell("on 1", "found")
    rig.tick()
    rig.fake.tell("on 1", "xid 31")
    assert rig.tick().devices[1].condition.xids[0] == XidCount(31, 3, T0 + 4_000)


@pytest.mark.parametrize(
    ("xid", "action"),
    [
        (48, "reset_gpu"),
        (64, "reset_gpu"),
        (79, "drain_node"),
        (95, "reset_gpu"),
        (119, "reset_gpu"),
        (120, "reset_gpu"),
    ],
)
def test_an_error_that_makes_a_gpu_unusable_loses_it_until_the_driver_is_let_go(
    rig: Rig, xid: int, action: RecoveryAction
) -> None:
    rig.look()
    rig.fake.tell("on 1", f"xid {xid}")
    first, second = rig.tick().devices
    assert (first.health, first.condition.recoveries) == ("ok", ())
    assert (second.health, second.condition.recoveries) == ("lost", (Recovery(action, f"xid {xid}"),))
    assert [d.health for d in rig.tick(CONDITION_EVERY_MS).devices] == ["ok", "lost"]
    rig.let_go("reset")
    assert [d.health for d in rig.tick().devices] == ["ok", "ok"]


@pytest.mark.parametrize("xid", [48, 79, 94, 119])
def test_a_gpu_that_was_lost_and_answers_again_is_back_without_a_restart(rig: Rig, xid: int) -> None:
    rig.start(7, 1, 500_000)
    rig.look()
    rig.fake.tell("on 1", f"xid {xid}", "lost")
    rig.tick()
    assert [d.health for d in rig.tick().devices] == ["ok", "lost"]
    rig.fake.tell("on 1", "found")
    rig.tick(REVIVE_MS)
    reading = rig.tick().devices[1]
    assert (reading.health, reading.condition.recoveries) == ("ok", ())
    rig.fake.tell("on 1", f"xid {xid}")
    rig.tick()
    assert rig.tick().devices[1].condition.recoveries, "a fault that is reported again counts again"


def test_the_time_of_a_gpu_that_must_be_reset_is_down_from_the_error_on(rig: Rig) -> None:
    rig.start(7, 1, 500_000)
    rig.look()
    for second in range(90):
        if second == 30:
            rig.fake.tell("on 1", "xid 48")
        rig.tick()
    rig.close()
    spans = {"ok": 0, "lost": 0}
    for row in rig.rows():
        if row.gpu_uuid == "GPU-1":
            assert row.holder is not None
            spans[row.health] += row.end_ms - row.start_ms
        if row.health == "lost":
            assert split(row).down_us == row.capacity_us
    assert spans == {"ok": 31_000, "lost": 59_000}


def test_a_program_error_leaves_the_gpu_well(rig: Rig) -> None:
    rig.look()
    rig.fake.tell("on 1", "xid 13", "xid 31", "xid 63")
    assert [(d.health, d.condition.recoveries) for d in rig.tick().devices] == [("ok", ()), ("ok", ())]


def test_a_contained_memory_error_asks_for_the_programs_restart_until_it_has_ended(rig: Rig) -> None:
    rig.start(7, 1, 500_000)
    rig.look()
    rig.fake.tell("on 1", "xid 94")
    restart = (Recovery("restart_app", "xid 94"),)
    for _ in range(2):
        reading = rig.tick().devices[1]
        assert (reading.health, reading.condition.recoveries) == ("ok", restart)
    rig.kill(7)
    rig.start(8, 1, 500_000)
    assert rig.tick().devices[1].condition.recoveries == ()


def test_rows_that_cannot_be_remapped_lose_the_gpu(rig: Rig) -> None:
    rig.fake.tell("on 0", "remap 1 0", "on 1", "remap 0 1")
    first, second = rig.look().devices
    assert (first.health, first.condition.row_remap_pending, first.condition.recoveries) == ("ok", True, ())
    assert (second.health, second.condition.recoveries) == ("lost", (Recovery("reset_gpu", "row remapping failed"),))
    rig.fake.tell("on 1", "remap 0 0")
    assert rig.tick(CONDITION_EVERY_MS).devices[1].health == "ok"


@pytest.mark.parametrize(("code", "action"), [(1, "reset_gpu"), (2, "drain_node"), (4, "reset_gpu")])
def test_what_the_driver_asks_for_outlasts_a_new_start(rig: Rig, code: int, action: RecoveryAction) -> None:
    rig.fake.tell("on 1", f"recovery {code}")
    reading = rig.look().devices[1]
    assert (reading.health, reading.condition.recoveries) == ("lost", (Recovery(action, "driver"),))
    rig.let_go("upgrade")
    assert rig.tick().devices[1].health == "lost"
    rig.fake.tell("on 1", "recovery 0")
    assert rig.tick(CONDITION_EVERY_MS).devices[1].health == "ok"


@pytest.mark.parametrize(
    ("fault", "function"),
    [("remap 0 1", "nvmlDeviceGetRemappedRows"), ("recovery 1", "nvmlDeviceGetFieldValues")],
)
def test_a_fault_stands_while_the_driver_does_not_answer_for_it(rig: Rig, fault: str, function: str) -> None:
    rig.fake.tell("on 1", fault)
    assert rig.look().devices[1].health == "lost"
    rig.fake.tell("on 1", f"fail {function} 999")
    assert rig.tick(CONDITION_EVERY_MS).devices[1].health == "lost"
    rig.fake.tell("clear", "on 1", f"fail {function} 3")
    assert rig.tick(CONDITION_EVERY_MS).devices[1].health == "ok", "not supported: there is nothing to wait for"


def test_an_event_that_cannot_be_taken_leaves_those_behind_it(rig: Rig) -> None:
    rig.look()
    rig.fake.tell("on 1", "xid 31", "xid 48", "machine", "fail nvmlEventSetWait_v2 15 0 1")
    snapshot = rig.tick()
    assert [error.xid for error in snapshot.devices[1].condition.xids] == [31, 48]
    assert ("events", "gpu is lost (nvmlEventSetWait_v2, 15)") in snapshot.sources
    assert "events" not in dict(rig.tick().sources)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("nvmlDeviceRegisterEvents 4", "no permission (nvmlDeviceRegisterEvents, 4)"), ("nvmlEventSetCreate 3", None)],
    ids=["refused", "not supported"],
)
def test_a_driver_without_events_is_metered_all_the_same(rig: Rig, fault: str, told: str | None) -> None:
    rig.fake.tell("machine", f"fail {fault}")
    snapshot = rig.look()
    assert [d.health for d in snapshot.devices] == ["ok", "ok"]
    assert dict(snapshot.sources).get("events") == told


def test_energy_goes_on_over_a_wrap(rig: Rig) -> None:
    rig.fake.tell("on 0", f"wrap {(1 << 32) - 50}")
    before = rig.look().devices[0]
    after = rig.tick().devices[0]
    assert isinstance(before.energy_uj, int)
    assert after.energy_uj == before.energy_uj + 70_000_000
    assert after.counter_epoch == before.counter_epoch


def test_a_gpu_that_hangs_costs_its_own_readings_only_and_is_named(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.look()
    rig.gpus._hang_s = 0.05
    rig.fake.tell("on 0", "hang nvmlDeviceGetPowerUsage")
    first, second = rig.tick().devices
    assert (first.health, first.busy_us) == ("ok", Unavailable("the driver does not answer"))
    assert second.energy_uj == 70_000_000
    calls = rig.fake.calls("nvmlDeviceGetPowerUsage")
    assert isinstance(rig.tick().devices[0].busy_us, Unavailable)
    assert rig.fake.calls("nvmlDeviceGetPowerUsage") == calls + 1
    assert [record.uuid for record in caplog.records if "does not answer" in record.message] == ["GPU-0"]  # type: ignore[attr-defined]
    assert [device.silent for device in rig.look().devices] == [True, False]
    rig.gpus.release("driver upgrade")
    rig.tick()
    assert not rig.gpus.idle
    rig.fake.tell("unhang")
    rig.gpus._hang_s = 30.0
    join_workers()
    rig.tick()
    assert rig.gpus.idle
    rig.gpus.reacquire("driver upgrade")
    assert [isinstance(d.busy_us, int) for d in rig.tick().devices] == [True, True]


def test_a_library_that_hangs_at_its_start_is_one_more_way_of_no_driver(rig: Rig) -> None:
    rig.fake.tell("machine", "hang nvmlDeviceGetCount_v2")
    rig.gpus._hang_s = 0.002
    assert rig.source.snapshot(rig.now_ms).sources[0] == ("nvml", "the driver does not answer")
    rig.fake.tell("unhang")
    rig.gpus._hang_s = 30.0
    join_workers()
    assert len(rig.tick(RETRY_MIN_MS).devices) == 2
    assert rig.fake.calls("nvmlInitWithFlags") == 2


def test_a_process_begun_because_the_driver_was_replaced_gives_up_when_it_still_is(rig: Rig) -> None:
    rig.look()
    rig.fake.tell("replaced 1")
    with pytest.raises(DriverReplaced):
        rig.tick()
    rig.gpus._was_up = False
    rig.gpus._stop(forget=True)
    assert rig.tick(RETRY_MIN_MS).sources[0][1].startswith("the NVIDIA driver was replaced")
    rig.fake.tell("replaced 0")
    assert len(rig.tick(2 * RETRY_MIN_MS).devices) == 2


def test_mig_is_cut_anew_while_the_agent_lets_go(rig: Rig) -> None:
    cut = ["on 0", "migclear", f"mig {OLD_FORM} 1 0 3 3g.71gb {70 * GIB} 0", f"mig MIG-b 2 0 4 4g.71gb {70 * GIB} 0"]
    rig.fake.tell("on 0", "migmode 1", *cut[1:])
    rig.start(1, 0, 500_000, mig=OLD_FORM, gi=1)
    assert [m.uuid for m in rig.look().devices[0].gpu.mig] == [OLD_FORM, "MIG-b"]
    device = rig.tick().devices[0]
    assert [(i.busy_us, i.method) for i in device.instances] == [(500_000 * 3 // 7, "gpm"), (0, "gpm")]
    assert [(p.pid, p.mig_uuid, p.busy_us) for p in device.processes] == [
        (1_001, OLD_FORM, Unavailable("MIG: no per-process utilisation"))
    ]
    rig.kill(1)
    rig.gpus.release("mig.config.state=pending")
    assert rig.tick().devices[0].busy_us == Unavailable("released: mig.config.state=pending")
    assert rig.gpus.idle
    rig.fake.tell("on 0", "migclear", f"mig MIG-new 1 0 7 7g.141gb {140 * GIB} 0")
    rig.gpus.reacquire("mig.config.state=pending")
    device = rig.tick().devices[0]
    assert [(m.uuid, m.gi, m.compute) for m in device.gpu.mig] == [("MIG-new", 1, 7)]
    assert device.instances[0].busy_us == 0


def test_a_new_mig_layout_is_seen_at_the_drivers_word(rig: Rig) -> None:
    rig.fake.tell("on 0", "migmode 1", f"mig MIG-a 1 0 7 7g.141gb {140 * GIB} 0")
    rig.look()
    rig.fake.tell("on 0", "migclear", f"mig MIG-b 1 0 3 3g.71gb {70 * GIB} 0")
    assert [m.uuid for m in rig.tick().devices[0].gpu.mig] == ["MIG-b"]


def test_compute_instances_that_share_a_gpu_instance_cannot_be_told_apart_by_gpm(rig: Rig) -> None:
    inside = [f"mig MIG-{ci} 1 {ci} 1 1c.3g.71gb {70 * GIB} 0 3" for ci in (0, 1)]
    rig.fake.tell("on 0", "migmode 1", *inside)
    rig.look()
    shared = Unavailable("GPM: shares its GPU instance")
    assert [(i.busy_us, i.method) for i in rig.tick().devices[0].instances] == [(shared, "allocation")] * 2


def test_without_gpm_an_instance_is_billed_by_allocation(rig: Rig) -> None:
    rig.fake.tell("on 0", "gpm 0", "migmode 1", f"mig MIG-a 1 0 7 7g.141gb {140 * GIB} 0")
    rig.look()
    (instance,) = rig.tick().devices[0].instances
    assert (instance.busy_us, instance.method) == (Unavailable("no GPM on this GPU"), "allocation")
    assert instance.memory_mib == 0


def test_gpm_that_refuses_once_loses_nothing(rig: Rig) -> None:
    rig.start(1, 0, 1_000_000)
    rig.look()
    rig.fake.tell("on 0", "fail nvmlGpmSampleGet 4 0 2")
    assert rig.tick().devices[0].sm_active_us == Unavailable("GPM: no permission (nvmlGpmSampleGet, 4)")
    rig.tick()
    assert rig.tick().devices[0].sm_active_us == 3 * 800_000


class Slow(Driver):
    """A library whose energy counter answers late, by `delays`."""

    def __init__(self, fake: FakeNvml, clock: VirtualClock, delays: list[int]) -> None:
        super().__init__()
        self.fake, self.clock, self.delays = fake, clock, delays

    def another(self) -> Driver:
        return Slow(self.fake, self.clock, self.delays)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlDeviceGetTotalEnergyConsumption" and self.delays:
            self.clock.advance(self.delays.pop(0))
            self.fake.tell(f"at {self.clock.wall_ms() * 1_000}")
        return super().call(name, *arguments)


def test_the_span_of_gpm_is_that_of_its_samples(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """The second sample is taken 300 ms after its reading began, and the load ends at that moment."""
    rig, clock = Rig(fake_nvml, tmp_path / "a"), VirtualClock(T0)
    rig.start(1, 0, 1_000_000)
    machine = Gpus(Slow(fake_nvml, clock, delays=[0, 300, 0]), clock=clock)
    machine.read(T0)
    clock.advance_to(T0 + 1_000)
    fake_nvml.tell(f"at {clock.wall_ms() * 1_000}")
    machine.read(clock.wall_ms())
    rig.load(1, 0)
    clock.advance_to(T0 + 2_000)
    fake_nvml.tell(f"at {clock.wall_ms() * 1_000}")
    device = machine.read(clock.wall_ms()).devices[0]
    machine.close()
    assert device.sm_active_us == 1_300_000 * 8 // 10


def test_buffers_and_events_are_given_back_before_the_library_goes(rig: Rig) -> None:
    rig.look()
    rig.source.close()
    names = ("nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlEventSetCreate", "nvmlEventSetFree")
    assert [rig.fake.calls(name) for name in names] == [4, 4, 1, 1]


def test_accounting_is_used_where_it_is_on_and_switched_on_only_where_asked(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.start(1, 0, 400_000)
    rig.look()
    assert rig.tick().devices[0].processes[0].accounted_us == Unavailable("accounting mode is off")
    assert rig.fake.calls("nvmlDeviceSetAccountingMode") == 0
    rig.source.close()
    rig = new_rig(enable_accounting=True)
    rig.start(1, 0, 400_000)
    rig.look()
    assert rig.fake.calls("nvmlDeviceSetAccountingMode") == 1
    exact = [rig.tick().devices[0].processes[0].accounted_us for _ in range(10)]
    assert sum(e for e in exact if isinstance(e, int)) == pytest.approx(4_000_000, rel=0.05)


def test_accounting_without_running_sums_serves_those_nobody_saw(new_rig: NewRig) -> None:
    rig = new_rig(setup=["accounting 1"])
    rig.fake.tell("machine", "fail nvmlDeviceGetAccountingStats_v2 13")
    rig.start(1, 0, 300_000)
    rig.look()
    (seen,) = rig.tick().devices[0].processes
    assert isinstance(seen.accounted_us, Unavailable)
    assert isinstance(seen.busy_us, int)
    rig.fake.tell("on 0", "load 50 600000")
    rig.wait(700)
    rig.fake.tell("on 0", "exit 50")
    rig.kill(1)
    found = [p for _ in range(7) for p in rig.tick().devices[0].processes if p.pid == 50]
    assert len(found) == 1
    assert found[0].accounted_us == pytest.approx(420_000, rel=0.3)
    assert rig.fake.calls("nvmlDeviceGetAccountingStats_v2") == 1


def test_in_a_process_namespace_of_its_own_the_ended_are_unknown(new_rig: NewRig) -> None:
    rig = new_rig(setup=["accounting 1"])
    rig.fake.tell("namespace 1")
    rig.start(1, 0, 300_000)
    rig.look()
    rig.tick()
    rig.kill(1)
    (ended,) = rig.tick().devices[0].processes
    assert isinstance(ended.accounted_us, Unavailable)


def test_a_number_used_again_is_another_process(new_rig: NewRig) -> None:
    rig = new_rig(setup=["accounting 1"])
    rig.look()
    rig.start(1, 0, 1_000_000)
    rig.tick(3_000)
    rig.fake.tell("on 0", "exit 1001", "load 1001 1000000")
    (again,) = rig.tick().devices[0].processes
    assert again.accounted_us == pytest.approx(1_000_000, rel=0.15)


def test_more_ended_processes_than_the_driver_remembers(new_rig: NewRig) -> None:
    """The driver keeps 128. The time of older ones has no holder, and nothing is counted twice."""
    rig = new_rig(setup=["accounting 1"])
    rig.look()
    found: list[ProcessReading] = []
    for burst in range(3):
        for pid in range(100):
            rig.fake.tell("on 0", f"load {5_000 + burst * 100 + pid} 1000000")
            rig.wait(20)
            rig.fake.tell("on 0", f"exit {5_000 + burst * 100 + pid}")
        for _ in range(5):
            found += rig.tick().devices[0].processes
    assert len({p.pid for p in found}) == len(found)
    total = sum(p.accounted_us for p in found if isinstance(p.accounted_us, int))
    assert total == pytest.approx(3 * 2_000_000, rel=0.1)


def test_a_sampler_that_stays_silent_is_replaced_by_the_newer_one(rig: Rig) -> None:
    rig.fake.tell("on 0", "sampler 0")
    rig.start(1, 0, 900_000)
    rig.look()
    seen = [rig.tick().devices[0].processes[0].busy_us for _ in range(12)]
    assert seen[0] == 0
    assert seen[-1] == pytest.approx(900_000, abs=140_000)


def test_readings_that_no_process_made_are_ignored(rig: Rig) -> None:
    rig.fake.tell("on 0", "garbage 3")
    rig.start(1, 0, 500_000)
    rig.look()
    assert [p.pid for p in rig.tick().devices[0].processes] == [1_001]


@pytest.mark.parametrize("function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetUUID"])
def test_a_mig_lookup_that_fails_changes_nothing_and_is_repeated(rig: Rig, function: str) -> None:
    """If the instance counted as removed, its holder would get the whole GPU."""
    rig.fake.tell("on 1", "migmode 1", f"mig MIG-a 1 0 3 3g.71gb {70 * GIB} 0")
    before = rig.look().devices[1].gpu
    rig.fake.tell("on 1", f"fail {function} 4", "migclear", f"mig MIG-a 1 0 3 3g.71gb {70 * GIB} 0")
    for _ in range(3):
        assert rig.tick(60_000).devices[1].gpu == before
    rig.fake.tell("clear", "on 1", "migclear")
    assert rig.tick().devices[1].gpu.mig == ()


def test_a_gpu_whose_layout_was_never_read_is_not_listed_yet(rig: Rig) -> None:
    rig.fake.tell("on 1", "migmode 1", "fail nvmlDeviceGetMaxMigDeviceCount 4 0 2")
    assert [d.gpu.uuid for d in rig.look().devices] == ["GPU-0"]
    rig.tick()
    assert [d.gpu.uuid for d in rig.tick().devices] == ["GPU-0", "GPU-1"]
