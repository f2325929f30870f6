"""GPUs through the real binding on the fake library: readings, faults, MIG, processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from agent.core.readings import DeviceReading, DriverReplaced, Unavailable
from agent.gpu_readers.nvml.driver_lifecycle import RETRY_MAX_MS, RETRY_MIN_MS, REVIVE_MS, Gpus
from agent.gpu_readers.nvml.nvml_device import Access
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.gpu_readers.protocol import GpuReadings
from tests.agent.sample_values import GIB, T0
from tests.fakes.nvml.library import FakeNvml

A = ["gpu GPU-aaaa NVIDIA_H200", f"mem {141 * GIB} {4 * GIB}", "util 50 20", "power 350000 123456"]
B = ["gpu GPU-bbbb NVIDIA_H200", f"mem {141 * GIB} 0", "util 0 0", "power 80000 99"]
CODES = [*range(1, 31), 999]
SAMPLERS = ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"]
MIG = [
    "gpu GPU-cccc NVIDIA_H200", f"mem {141 * GIB} {2 * GIB}", "power 90000 500", "migmode",
    f"mig MIG-1111 1 0 3 3g.71gb {70 * GIB} {GIB}", "mighole", f"mig MIG-2222 5 0 1 1g.18gb {17 * GIB} 0",
]  # fmt: skip


class Machine:
    """The GPUs that the fake library shows, read through the real binding."""

    def __init__(self, fake: FakeNvml, access: Access | None = None, release: Path | None = None) -> None:
        self.fake = fake
        self.gpus = Gpus(Driver(), release, access=access)

    def read(self, after_ms: int, *lines: str) -> GpuReadings:
        """Read the GPUs. lines: commands for the fake library."""
        if lines:
            self.fake.show(*lines)
        return self.gpus.read(T0 + after_ms)

    def first(self, after_ms: int, *lines: str) -> DeviceReading:
        """Return the first GPU's reading."""
        return self.read(after_ms, *lines).devices[0]


@pytest.fixture
def machine(fake_nvml: FakeNvml) -> Iterator[Machine]:
    made = Machine(fake_nvml)
    yield made
    made.gpus.close()


def test_what_one_reading_shows(machine: Machine) -> None:
    scan = machine.read(0, *A, *B)
    assert scan.failure == ""
    first, second = scan.devices
    assert (first.gpu.uuid, first.gpu.index, first.gpu.model) == ("GPU-aaaa", 0, "NVIDIA H200")
    assert (first.gpu.memory_mib, first.gpu.pci_bus_id) == (141 * 1024, "00000000:10:00.0")
    assert first.gpu.driver_version == "580.00-fake"
    assert first.memory_used_mib == 4 * 1024
    assert first.power_mw == 350_000
    assert first.energy_uj == 123_456_000
    assert first.busy_us == 0
    assert (first.health, first.method, first.sample_gaps) == ("ok", "device", 0)
    assert (second.gpu.index, second.memory_used_mib) == (1, 0)


@pytest.mark.parametrize(("version", "code"), [("", 3), *(("_v2", code) for code in CODES)])
def test_memory_that_one_function_refuses_is_told_by_the_other(machine: Machine, version: str, code: int) -> None:
    device = machine.first(0, *A, f"fail nvmlDeviceGetMemoryInfo{version} {code}")
    assert (device.gpu.memory_mib, device.memory_used_mib) == (141 * 1024, 4 * 1024)


def test_facts_that_were_refused_at_first_are_unknown_and_asked_for_again(machine: Machine) -> None:
    refused = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMinorNumber"]
    gpu = machine.first(0, *A, "minor 3", *[f"fail {name} 10" for name in refused]).gpu
    assert (gpu.memory_mib, gpu.minor) == (None, None)
    gpu = machine.first(10_000, *A, "minor 3").gpu
    assert (gpu.memory_mib, gpu.minor) == (141 * 1024, 3)


COHERENT = ["gpu GPU-dddd NVIDIA_GH200_480GB", f"mem {96 * GIB} {60 * GIB}", "util 0 0", "power 1 1", "addressing 2"]
"""It shares the system's memory, of which 60 GiB are in use, mostly for cached files."""


def test_coherent_memory_is_what_processes_hold(machine: Machine) -> None:
    device = machine.first(0, *COHERENT, f"proc 10 {2 * GIB}", f"gfx 10 {2 * GIB}", f"gfx 11 {GIB}")
    assert (device.memory_used_mib, device.gpu.memory_mib) == (3 * 1024, 96 * 1024)
    assert machine.first(1_000, *COHERENT).memory_used_mib == 0


@pytest.mark.parametrize("code", [3, 4, 13])
@pytest.mark.parametrize(
    ("model", "used_gib"), [("NVIDIA_GB200", 2), ("NVIDIA_GB10", 2), ("NVIDIA_H200", 60), ("NVIDIA_RTX_PRO_6000", 60)]
)
def test_the_model_says_whether_memory_is_coherent_where_the_driver_does_not(
    machine: Machine, model: str, used_gib: int, code: int
) -> None:
    shown = [f"gpu GPU-x {model}", *COHERENT[1:], f"proc 10 {2 * GIB}", f"fail nvmlDeviceGetAddressingMode {code}"]
    assert machine.first(0, *shown).memory_used_mib == used_gib * 1024


@pytest.mark.parametrize(("access", "line", "reason"), [
    (Access(processes=False), "", "coherent memory: the agent cannot see processes"),
    (Access(), "fail nvmlDeviceGetComputeRunningProcesses_v3 17",
     "coherent memory: operating system (nvmlDeviceGetComputeRunningProcesses_v3, 17)"),
    (Access(), "proc 11 -1", "coherent memory of a process: not reported"),
], ids=["unseen", "refused", "not reported"])  # fmt: skip
def test_coherent_memory_is_unknown_where_its_processes_are(
    fake_nvml: FakeNvml, access: Access, line: str, reason: str
) -> None:
    machine = Machine(fake_nvml, access)
    assert machine.first(0, *COHERENT, f"proc 10 {2 * GIB}", line).memory_used_mib == Unavailable(reason)
    machine.gpus.close()


def test_coherent_memory_of_a_mig_instance_is_what_its_processes_hold(machine: Machine) -> None:
    slices = [line.replace(str(GIB), str(50 * GIB), 1) if line.startswith("mig MIG-1111") else line for line in MIG]
    device = machine.first(0, *slices, "addressing 2", f"proc 10 {2 * GIB} 1 0", f"proc 11 {3 * GIB} 5 0")
    assert [i.memory_mib for i in device.instances] == [2 * 1024, 3 * 1024]
    assert device.memory_used_mib == 5 * 1024


@pytest.mark.parametrize(("shown", "minors"), [
    ([*A, "minor 1", *B, "minor 0"], [1, 0]),
    ([*A, "fail nvmlDeviceGetMinorNumber 3"], [None]),
], ids=["two", "refused"])  # fmt: skip
def test_the_minor_number_is_the_drivers_word_not_the_index(
    machine: Machine, shown: list[str], minors: list[int | None]
) -> None:
    assert [device.gpu.minor for device in machine.read(0, *shown).devices] == minors


@pytest.mark.parametrize("code", [4, 8, 11, 15, 16, 28, 999])
def test_a_gpu_that_is_not_for_us_leaves_the_others_readable(machine: Machine, code: int) -> None:
    scan = machine.read(0, *A, f"fail nvmlDeviceGetHandleByIndex_v2 {code}", *B)
    assert (scan.failure, [device.gpu.uuid for device in scan.devices]) == ("", ["GPU-bbbb"])
    machine.read(RETRY_MAX_MS, *A, *B)
    found = machine.read(RETRY_MAX_MS + 1_000).devices
    assert [device.gpu.uuid for device in found] == ["GPU-aaaa", "GPU-bbbb"], "it is looked for again"


def test_a_machine_on_which_no_gpu_answers_has_no_driver(machine: Machine) -> None:
    failure = machine.read(0, *A, "fail nvmlDeviceGetHandleByIndex_v2 999").failure
    assert failure == "unknown nvml error (nvmlDeviceGetHandleByIndex, 999)"


def test_a_gpu_without_memory_of_its_own_is_metered(machine: Machine) -> None:
    """Small Grace Blackwell GPUs share the host's memory: NVML has no figure for it."""
    refused = [f"fail nvmlDeviceGetMemoryInfo{version} 3" for version in ("", "_v2")]
    first, second = machine.read(0, *A, *refused, *B).devices
    unsupported = Unavailable("not supported (nvmlDeviceGetMemoryInfo, 3)")
    assert (first.gpu.memory_mib, first.memory_used_mib, first.busy_us) == (None, unsupported, 0)
    assert second.gpu.memory_mib == 141 * 1024


@pytest.mark.parametrize("code", [1, 15, 16, 18, 28, 999])
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"],
)  # fmt: skip
def test_a_broken_sensor_costs_its_own_figure_only(machine: Machine, function: str, code: int) -> None:
    """An error code about the GPU, the library or the driver is confirmed by another call before it counts."""
    idle = [*A, "util 0 0"]
    before = machine.read(0, *idle, *B).devices
    machine.fake.show(*idle, f"fail {function} {code}", *B)
    for second in range(1, 61):
        scan = machine.read(second * 1_000)
        assert scan.failure == ""
        assert [(d.health, d.counter_epoch, d.sample_gaps) for d in scan.devices] == [
            ("ok", d.counter_epoch, 0) for d in before
        ]
        assert [isinstance(d.busy_us, int) for d in scan.devices] == [True, True]
        assert isinstance(scan.devices[0].power_mw, int) == (function != "nvmlDeviceGetPowerUsage")
        assert scan.devices[1].power_mw == 80_000
    assert (machine.fake.calls("nvmlInitWithFlags"), machine.fake.calls("nvmlShutdown")) == (1, 0)


def test_a_gpu_whose_handle_fails_costs_the_others_one_new_start(machine: Machine) -> None:
    machine.read(0, *A, *B)
    broken = ["fail nvmlDeviceGetPowerUsage 999", "fail nvmlDeviceGetHandleByIndex_v2 999"]
    seen = [machine.read(second * 1_000, *A, *broken, *B) for second in range(1, 61)]
    assert sum(bool(scan.failure) for scan in seen) == 1
    assert [scan.devices[1].busy_us for scan in seen[2:]] == [0] * 58
    assert isinstance(seen[-1].devices[0].busy_us, Unavailable)
    assert machine.fake.calls("nvmlInitWithFlags") == 2
    machine.read(RETRY_MAX_MS + 2_000, *A, *B)
    assert [device.busy_us for device in machine.read(RETRY_MAX_MS + 3_000).devices] == [0, 0]


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetHandleByIndex_v2"])
@pytest.mark.parametrize("code", [3, 4, 10, 999])
def test_a_gpu_that_cannot_be_opened_again_is_unknown_not_lost(machine: Machine, function: str, code: int) -> None:
    """The time of a lost GPU is `down`, which no team pays for. A GPU is lost only if the driver says so."""
    machine.read(0, *A, *B)
    machine.gpus.release("test")
    machine.read(1_000, *A, f"fail {function} {code}", *B)
    machine.gpus.reacquire("test")
    scan = machine.read(2_000)
    assert scan.failure == ""
    assert [device.health for device in scan.devices] == ["ok", "ok"]
    first, second = scan.devices
    if function == "nvmlDeviceGetName":  # its model is known from before
        assert (first.gpu.model, first.busy_us) == ("NVIDIA H200", 0)
    else:
        assert isinstance(first.busy_us, Unavailable)
        assert f", {code})" in first.busy_us.reason
    assert second.busy_us == 0


@pytest.mark.parametrize("code", CODES)
def test_a_driver_that_does_not_start_is_asked_again(machine: Machine, code: int) -> None:
    assert (machine.read(0, f"fail nvmlInitWithFlags {code} 0 1", *A).failure != "", machine.gpus.idle) == (True, True)
    scan = machine.read(RETRY_MIN_MS)
    assert (scan.failure, len(scan.devices)) == ("", 1)


def test_busy_time_comes_from_the_sample_ring(machine: Machine) -> None:
    ring = [f"sample {1_000_000 + n * 200_000} {100 if n <= 5 else 0}" for n in range(11)]
    machine.read(0, *A, "sample 1000000 100")
    assert machine.first(2_000, *A, *ring).busy_us == 1_000_000
    assert machine.first(2_000).busy_us == 1_000_000


def test_no_samples_mean_idle_only_where_the_rate_can_be_read(machine: Machine) -> None:
    machine.read(0, *B)
    assert machine.first(1_000).busy_us == 0
    refused = machine.first(2_000, *B, "fail nvmlDeviceGetUtilizationRates 3").busy_us
    assert refused == Unavailable("not supported (nvmlDeviceGetUtilizationRates, 3)")


def test_a_driver_without_a_ring_is_read_by_its_rate(machine: Machine) -> None:
    machine.read(0, *A, "fail nvmlDeviceGetSamples 3")
    device = machine.first(1_000)
    assert (device.busy_us, device.sample_gaps) == (500_000, 0)


@pytest.mark.parametrize(("function", "field"), [
    ("nvmlDeviceGetPowerUsage", "power_mw"),
    ("nvmlDeviceGetTotalEnergyConsumption", "energy_uj"),
])  # fmt: skip
def test_one_figure_that_cannot_be_read_is_unavailable_and_the_rest_is_there(
    machine: Machine, function: str, field: str
) -> None:
    device = machine.first(0, *A, f"fail {function} 4")
    assert getattr(device, field) == Unavailable(f"no permission ({function}, 4)")
    assert device.memory_used_mib == 4 * 1024


def test_energy_that_decreases_begins_a_new_counter_epoch(machine: Machine) -> None:
    before = machine.first(0, *A)
    assert machine.first(1_000).counter_epoch == before.counter_epoch
    after = machine.first(2_000, *A[:3], "power 350000 7")
    assert after.energy_uj == 7_000
    assert after.counter_epoch != before.counter_epoch


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_lost_gpu_is_listed_as_lost_and_the_others_go_on(machine: Machine, code: int) -> None:
    machine.read(0, *A, *B)
    lost, fine = machine.read(1_000, *A, f"fail * {code}", *B).devices
    assert (lost.gpu.uuid, lost.health) == ("GPU-aaaa", "lost")
    assert isinstance(lost.busy_us, Unavailable)
    assert (fine.gpu.uuid, fine.health, fine.memory_used_mib) == ("GPU-bbbb", "ok", 0)


def test_a_gpu_that_was_reset_is_found_again_and_the_others_count_on(machine: Machine) -> None:
    other = machine.read(0, *A, *B).devices[1]
    assert machine.first(1_000, *A, "lost", *B).health == "lost"
    machine.read(REVIVE_MS)
    assert [d.health for d in machine.read(REVIVE_MS + 1_000).devices] == ["lost", "ok"]
    machine.read(2 * REVIVE_MS + 1_000, *A, *B)
    found = machine.read(2 * REVIVE_MS + 2_000).devices
    assert [d.health for d in found] == ["ok", "ok"]
    assert found[1].counter_epoch == other.counter_epoch


@pytest.mark.parametrize("code", [1, 999])
def test_a_library_that_lost_its_footing_is_started_again(machine: Machine, code: int) -> None:
    before = machine.first(0, *A)
    scan = machine.read(1_000, f"fail nvmlDeviceGetCount_v2 {code}", *A, f"fail nvmlDeviceGetPowerUsage {code}")
    assert scan.failure.endswith(f"(nvmlDeviceGetCount, {code})")
    assert [(d.gpu.uuid, d.health, d.busy_us) for d in scan.devices] == [("GPU-aaaa", "ok", Unavailable(scan.failure))]
    again = machine.read(2_000, *A)
    assert again.failure == ""
    assert (again.devices[0].memory_used_mib, again.devices[0].busy_us) == (4 * 1024, 0)
    assert again.devices[0].counter_epoch != before.counter_epoch


def test_a_replaced_driver_needs_a_new_process(machine: Machine) -> None:
    machine.read(0, *A)
    machine.fake.show(*A, "fail * 18")
    with pytest.raises(DriverReplaced, match="must be started again"):
        machine.read(1_000)
    machine.fake.show("fail nvmlShutdown 18")
    machine.gpus.close()


def test_a_library_that_never_matched_the_driver_is_one_more_way_of_no_driver(machine: Machine) -> None:
    assert machine.read(0, "initerr 18").failure == "the NVIDIA driver was replaced; the agent must be started again"
    assert machine.read(RETRY_MIN_MS, *A).failure == ""


def test_a_machine_without_a_driver_is_asked_again_ever_more_rarely(machine: Machine) -> None:
    machine.fake.show("initerr 9")
    asked: list[int] = []
    for second in range(3_600):
        before = machine.fake.calls("nvmlInitWithFlags")
        assert machine.read(second * 1_000) == GpuReadings((), "driver not loaded (nvmlInit, 9)")
        if machine.fake.calls("nvmlInitWithFlags") != before:
            asked.append(second * 1_000)
    waits = [b - a for a, b in pairwise(asked)]
    assert waits[:4] == [RETRY_MIN_MS, 2 * RETRY_MIN_MS, 4 * RETRY_MIN_MS, 8 * RETRY_MIN_MS]
    assert set(waits[4:]) == {RETRY_MAX_MS}
    assert machine.read(2 * 3_600_000, *A).failure == ""


def test_a_gpu_that_appears_with_a_restarted_driver_is_listed(machine: Machine) -> None:
    machine.read(0, *A)
    machine.read(1_000, "fail * 1", *A)
    assert [d.gpu.uuid for d in machine.read(2_000, *A, *B).devices] == ["GPU-aaaa", "GPU-bbbb"]


def test_mig_instances_are_listed_with_their_memory(machine: Machine) -> None:
    scan = machine.read(0, *MIG, f"proc 77 {GIB} 1 0")
    (device,) = scan.devices
    assert (device.gpu.mig_enabled, device.gpu.compute_slices, device.method) == (True, 7, "allocation")
    assert [(m.uuid, m.profile, m.gi, m.ci, m.compute, m.memory_mib) for m in device.gpu.mig] == [
        ("MIG-1111", "3g.71gb", 1, 0, 3, 70 * 1024),
        ("MIG-2222", "1g.18gb", 5, 0, 1, 17 * 1024),
    ]
    assert [(i.mig_uuid, i.memory_mib) for i in device.instances] == [("MIG-1111", 1024), ("MIG-2222", 0)]
    assert isinstance(device.busy_us, Unavailable)
    assert device.energy_uj == 500_000
    assert [(p.mig_uuid, p.pid, p.memory_mib) for p in device.processes] == [("MIG-1111", 77, 1024)]


@pytest.mark.parametrize(
    ("model", "slices", "profile"),
    [
        ("NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition", 4, "1g.24gb"),
        ("NVIDIA_RTX_PRO_5000_Blackwell", 2, "1g.24gb+gfx"),
        ("NVIDIA_A30", 4, "1g.6gb"),
        ("NVIDIA_of_next_year", 9, "1g.10gb"),
    ],
)
def test_the_driver_says_into_how_many_slices_mig_divides_a_gpu(
    machine: Machine, model: str, slices: int, profile: str
) -> None:
    layout = [f"mig MIG-{number} {number} 0 1 {profile} {GIB} 0" for number in range(slices)]
    gpu = machine.first(0, f"gpu GPU-a {model}", f"mem {96 * GIB} 0", f"migmode {slices}", *layout).gpu
    assert (gpu.mig_enabled, gpu.compute_slices) == (True, slices)
    assert [(one.profile, one.compute) for one in gpu.mig] == [(profile, 1)] * slices


def test_slow_mig_lookups_happen_once_a_minute_holes_included(machine: Machine) -> None:
    machine.fake.show(*MIG)
    for second in range(60):
        machine.read(second * 1_000)
    assert machine.fake.calls("nvmlDeviceGetMigDeviceHandleByIndex") == 7
    machine.read(60_000)
    assert machine.fake.calls("nvmlDeviceGetMigDeviceHandleByIndex") == 14


def test_switching_mig_on_and_off_is_seen_at_once(machine: Machine) -> None:
    plain = [line for line in MIG if not line.startswith("mig")]
    assert machine.first(0, *plain).gpu.mig == ()
    assert len(machine.first(1_000, *MIG).gpu.mig) == 2
    device = machine.first(2_000, *plain)
    assert (device.gpu.mig, device.gpu.mig_enabled, device.gpu.compute_slices) == ((), False, 7)


def test_processes_with_memory_and_busy_time(machine: Machine) -> None:
    listed = [*A, f"proc 10 {2 * GIB}", "proc 11 -1"]
    begun = machine.first(0, *listed, f"mps 12 {GIB}", "pu 1000000 10 99").processes
    assert [(p.pid, p.memory_mib, p.busy_us) for p in begun] == [
        (10, 2048, 0), (11, Unavailable("not reported"), 0), (12, 1024, 0),
    ]  # fmt: skip
    found = machine.first(2_000, *listed, "pu 2000000 10 60", "pu 2000000 11 30", "pu 2000000 12 5").processes
    assert [(p.pid, p.busy_us, p.running) for p in found] == [
        (10, 1_200_000, True), (11, 600_000, True), (12, 100_000, False),
    ]  # fmt: skip


def test_a_process_that_computes_and_draws_is_one_with_its_memory_once(machine: Machine) -> None:
    drawing = [f"gfx 10 {2 * GIB}", f"gfx 11 {3 * GIB}", f"gfx 12 {GIB}", "gfx 13 -1"]
    device = machine.first(0, *A, f"proc 10 {2 * GIB}", "proc 11 -1", *drawing)
    assert [(p.pid, p.memory_mib) for p in device.processes] == [
        (10, 2 * 1024), (11, 3 * 1024), (12, 1024), (13, Unavailable("not reported")),
    ]  # fmt: skip
    assert all(p.graphics for p in device.processes)


def test_a_graphics_process_that_begins_and_ends_is_seen_within_five_readings(machine: Machine) -> None:
    computing = [*A, f"proc 10 {GIB}"]
    machine.read(0, *computing)
    seen = [machine.first(1_000 * second, *computing, f"gfx 12 {GIB}").processes for second in range(1, 6)]
    assert [p.pid for p in seen[-1]] == [10, 12]
    ended = machine.first(6_000, *computing).processes
    assert [(p.pid, p.running) for p in ended] == [(10, True), (12, False)]


def test_garbage_of_the_process_sampler_is_dropped_not_clamped(machine: Machine) -> None:
    machine.read(0, *A, "proc 10 1")
    device = machine.first(1_000, *A, "proc 10 1", "pu 2000000 10 101", "pu 2000000 4000000000 50")
    assert [(p.pid, p.busy_us) for p in device.processes] == [(10, 0)]


def test_work_of_processes_that_are_not_listed_leaves_the_holders_unknown(machine: Machine) -> None:
    """Outside the host's PID namespace an agent gets empty process lists, and samples with the host's process ids."""
    unlisted = []
    for second, samples in enumerate(
        [[], ["pu 1000000 553 99"], ["pu 2000000 553 99"], [], ["pu 3000000 9 99", f"proc 9 {GIB}"]]
    ):
        unlisted.append(machine.first(second * 2_000, *A, *samples).unlisted)
    hidden = (("", "processes outside the agent's process namespace"),)
    assert unlisted == [(), (), hidden, hidden, ()]


def test_without_a_process_sampler_nobodys_busy_time_is_known(machine: Machine) -> None:
    machine.fake.show(*A, "proc 10 1", *[f"fail {name} 3" for name in SAMPLERS])
    for second in range(3):
        (process,) = machine.first(second * 1_000).processes
        assert process.busy_us == Unavailable(
            "no per-process utilisation: not supported (nvmlDeviceGetProcessesUtilizationInfo, 3)"
        )
    assert [machine.fake.calls(name) for name in SAMPLERS] == [1, 1]


def test_the_driver_is_let_go_while_the_release_file_exists(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    release = tmp_path / "release"
    machine = Machine(fake_nvml, release=release)
    assert machine.read(0, *A).failure == ""
    release.touch()
    scan = machine.read(1_000)
    assert scan.failure == "released on request"
    assert scan.devices[0].busy_us == Unavailable("released on request")
    machine.read(2_000)
    assert fake_nvml.calls("nvmlShutdown") == 1
    release.unlink()
    assert machine.read(3_000).failure == ""
    machine.gpus.close()
    assert fake_nvml.calls("nvmlShutdown") == 2


def test_the_driver_is_let_go_until_all_who_asked_have_withdrawn(machine: Machine) -> None:
    before = machine.first(0, *A)
    machine.gpus.release("mig.config.state=pending")
    machine.gpus.release("driver-upgrade")
    scan = machine.read(1_000)
    assert (scan.failure, machine.gpus.idle) == ("released: driver-upgrade", True)
    assert (scan.devices[0].gpu.uuid, scan.devices[0].energy_uj) == ("GPU-aaaa", Unavailable(scan.failure))
    machine.gpus.reacquire("driver-upgrade")
    assert machine.read(2_000).failure == "released: mig.config.state=pending"
    machine.gpus.reacquire("mig.config.state=pending")
    after = machine.first(3_000)
    assert after.energy_uj == 123_456_000
    assert after.counter_epoch != before.counter_epoch
    assert (machine.fake.calls("nvmlInitWithFlags"), machine.fake.calls("nvmlShutdown")) == (2, 1)
