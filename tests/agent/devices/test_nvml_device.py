"""GPUs through the real binding on the fake library: readings, faults, MIG, processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.core.readings import Unavailable
from agent.devices.driver_lifecycle import RETRY_MAX_MS, RETRY_MIN_MS, REVIVE_MS, DriverReading, Gpus
from agent.devices.nvml_device import Access
from agent.devices.nvml_library import Driver, DriverReplaced
from tests.agent.values import GIB, T0

A = ["gpu GPU-aaaa NVIDIA_H200", f"mem {141 * GIB} {4 * GIB}", "util 50 20", "power 350000 123456"]
B = ["gpu GPU-bbbb NVIDIA_H200", f"mem {141 * GIB} 0", "util 0 0", "power 80000 99"]
CODES = [*range(1, 31), 999]
SAMPLERS = ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"]
MIG = [
    "gpu GPU-cccc NVIDIA_H200", f"mem {141 * GIB} {2 * GIB}", "power 90000 500", "migmode",
    f"mig MIG-1111 1 0 3 3g.71gb {70 * GIB} {GIB}", "mighole", f"mig MIG-2222 5 0 1 1g.18gb {17 * GIB} 0",
]  # fmt: skip


@pytest.fixture
def gpus(fake_nvml: Any) -> Iterator[Gpus]:
    machine = Gpus(Driver())
    yield machine
    machine.close()


def test_what_one_reading_shows(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, *B)
    scan = gpus.read(T0)
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


@pytest.mark.parametrize("version", ["", "_v2"])
def test_a_size_that_one_function_refuses_is_told_by_the_other(gpus: Gpus, fake_nvml: Any, version: str) -> None:
    fake_nvml.show(*A, f"fail nvmlDeviceGetMemoryInfo{version} 3")
    assert gpus.read(T0).devices[0].gpu.memory_mib == 141 * 1024


def test_facts_that_were_refused_at_first_are_unknown_and_asked_for_again(gpus: Gpus, fake_nvml: Any) -> None:
    refused = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMinorNumber"]
    fake_nvml.show(*A, "minor 3", *[f"fail {name} 10" for name in refused])
    gpu = gpus.read(T0).devices[0].gpu
    assert (gpu.memory_mib, gpu.minor) == (None, None)
    fake_nvml.show(*A, "minor 3")
    gpu = gpus.read(T0 + 10_000).devices[0].gpu
    assert (gpu.memory_mib, gpu.minor) == (141 * 1024, 3)


COHERENT = ["gpu GPU-dddd NVIDIA_GH200_480GB", f"mem {96 * GIB} {60 * GIB}", "util 0 0", "power 1 1", "addressing 2"]
"""Its memory is the system's too: 60 GiB of it are in use, most of them for cached files."""


def test_coherent_memory_is_what_processes_hold(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*COHERENT, f"proc 10 {2 * GIB}", f"gfx 10 {2 * GIB}", f"gfx 11 {GIB}")
    device = gpus.read(T0).devices[0]
    assert (device.memory_used_mib, device.gpu.memory_mib) == (3 * 1024, 96 * 1024)
    fake_nvml.show(*COHERENT)
    assert gpus.read(T0 + 1_000).devices[0].memory_used_mib == 0


@pytest.mark.parametrize("code", [3, 4, 13])
def test_the_model_says_whether_memory_is_coherent_where_the_driver_does_not(fake_nvml: Any, code: int) -> None:
    for model, used_gib in (("NVIDIA_GB200", 2), ("NVIDIA_GB10", 2), ("NVIDIA_H200", 60), ("NVIDIA_RTX_PRO_6000", 60)):
        fake_nvml.show(
            f"gpu GPU-{model} {model}", *COHERENT[1:], f"proc 10 {2 * GIB}", f"fail nvmlDeviceGetAddressingMode {code}"
        )
        machine = Gpus(Driver())
        assert machine.read(T0).devices[0].memory_used_mib == used_gib * 1024, model
        machine.close()


def test_coherent_memory_is_unknown_where_its_processes_are(fake_nvml: Any) -> None:
    reasons = []
    for access, line in (
        (Access(processes=False), ""),
        (Access(), "fail nvmlDeviceGetComputeRunningProcesses_v3 17"),
        (Access(), "proc 11 -1"),
    ):
        fake_nvml.show(*COHERENT, f"proc 10 {2 * GIB}", line)
        machine = Gpus(Driver(), access=access)
        used = machine.read(T0).devices[0].memory_used_mib
        assert isinstance(used, Unavailable)
        reasons.append(used.reason)
        machine.close()
    assert reasons == [
        "coherent memory: the agent cannot see processes",
        "coherent memory: operating system (nvmlDeviceGetComputeRunningProcesses_v3, 17)",
        "coherent memory of a process: not reported",
    ]


def test_coherent_memory_of_a_mig_instance_is_what_its_processes_hold(gpus: Gpus, fake_nvml: Any) -> None:
    slices = [line.replace(str(GIB), str(50 * GIB), 1) if line.startswith("mig MIG-1111") else line for line in MIG]
    fake_nvml.show(*slices, "addressing 2", f"proc 10 {2 * GIB} 1 0", f"proc 11 {3 * GIB} 5 0")
    device = gpus.read(T0).devices[0]
    assert [i.memory_mib for i in device.instances] == [2 * 1024, 3 * 1024]
    assert device.memory_used_mib == 5 * 1024


def test_the_minor_number_is_the_drivers_word_not_the_index(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "minor 1", *B, "minor 0")
    assert [device.gpu.minor for device in gpus.read(T0).devices] == [1, 0]
    blind = Gpus(Driver())
    fake_nvml.show(*A, "fail nvmlDeviceGetMinorNumber 3")
    assert [device.gpu.minor for device in blind.read(T0).devices] == [None]
    blind.close()


@pytest.mark.parametrize("code", [4, 8, 11, 15, 16, 28, 999])
def test_a_gpu_that_is_not_for_us_leaves_the_others_readable(gpus: Gpus, fake_nvml: Any, code: int) -> None:
    fake_nvml.show(*A, f"fail nvmlDeviceGetHandleByIndex_v2 {code}", *B)
    scan = gpus.read(T0)
    assert (scan.failure, [device.gpu.uuid for device in scan.devices]) == ("", ["GPU-bbbb"])
    fake_nvml.show(*A, *B)
    gpus.read(T0 + RETRY_MAX_MS)
    found = gpus.read(T0 + RETRY_MAX_MS + 1_000).devices
    assert [device.gpu.uuid for device in found] == ["GPU-aaaa", "GPU-bbbb"], "it is looked for again"


def test_a_machine_on_which_no_gpu_answers_has_no_driver(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "fail nvmlDeviceGetHandleByIndex_v2 999")
    assert gpus.read(T0).failure == "unknown nvml error (nvmlDeviceGetHandleByIndex, 999)"


def test_a_gpu_without_memory_of_its_own_is_metered(gpus: Gpus, fake_nvml: Any) -> None:
    """Grace Blackwell's small ones share the host's: NVML has no figure for them."""
    fake_nvml.show(*A, "fail nvmlDeviceGetMemoryInfo 3", "fail nvmlDeviceGetMemoryInfo_v2 3", *B)
    first, second = gpus.read(T0).devices
    unsupported = Unavailable("not supported (nvmlDeviceGetMemoryInfo, 3)")
    assert (first.gpu.memory_mib, first.memory_used_mib, first.busy_us) == (None, unsupported, 0)
    assert second.gpu.memory_mib == 141 * 1024


@pytest.mark.parametrize("code", [1, 15, 16, 18, 28, 999])
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"],
)  # fmt: skip
def test_a_broken_sensor_costs_its_own_figure_only(gpus: Gpus, fake_nvml: Any, function: str, code: int) -> None:
    """A code that speaks of the GPU, the library or the driver is confirmed before it is believed."""
    idle = [*A, "util 0 0"]
    fake_nvml.show(*idle, *B)
    before = gpus.read(T0).devices
    fake_nvml.show(*idle, f"fail {function} {code}", *B)
    for second in range(1, 61):
        scan = gpus.read(T0 + second * 1_000)
        assert scan.failure == ""
        assert [(d.health, d.counter_epoch, d.sample_gaps) for d in scan.devices] == [
            ("ok", d.counter_epoch, 0) for d in before
        ]
        assert [isinstance(d.busy_us, int) for d in scan.devices] == [True, True]
        assert isinstance(scan.devices[0].power_mw, int) == (function != "nvmlDeviceGetPowerUsage")
        assert scan.devices[1].power_mw == 80_000
    assert (fake_nvml.calls("nvmlInitWithFlags"), fake_nvml.calls("nvmlShutdown")) == (1, 0)


def test_a_gpu_whose_handle_fails_costs_the_others_one_new_start(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, *B)
    gpus.read(T0)
    broken = ["fail nvmlDeviceGetPowerUsage 999", "fail nvmlDeviceGetHandleByIndex_v2 999"]
    fake_nvml.show(*A, *broken, *B)
    seen = [gpus.read(T0 + second * 1_000) for second in range(1, 61)]
    assert sum(bool(scan.failure) for scan in seen) == 1
    assert [scan.devices[1].busy_us for scan in seen[2:]] == [0] * 58
    assert isinstance(seen[-1].devices[0].busy_us, Unavailable)
    assert fake_nvml.calls("nvmlInitWithFlags") == 2
    fake_nvml.show(*A, *B)
    gpus.read(T0 + RETRY_MAX_MS + 2_000)
    assert [device.busy_us for device in gpus.read(T0 + RETRY_MAX_MS + 3_000).devices] == [0, 0]


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetHandleByIndex_v2"])
@pytest.mark.parametrize("code", [3, 4, 10, 999])
def test_a_gpu_that_cannot_be_opened_again_is_unknown_not_lost(
    gpus: Gpus, fake_nvml: Any, function: str, code: int
) -> None:
    """A lost GPU is booked as down, which nobody pays for: that is said only of one the driver calls lost."""
    fake_nvml.show(*A, *B)
    gpus.read(T0)
    gpus.release("test")
    fake_nvml.show(*A, f"fail {function} {code}", *B)
    gpus.read(T0 + 1_000)
    gpus.reacquire("test")
    scan = gpus.read(T0 + 2_000)
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
def test_a_driver_that_does_not_start_is_asked_again(gpus: Gpus, fake_nvml: Any, code: int) -> None:
    fake_nvml.show(f"fail nvmlInitWithFlags {code} 0 1", *A)
    assert (gpus.read(T0).failure != "", gpus.idle) == (True, True)
    scan = gpus.read(T0 + RETRY_MIN_MS)
    assert (scan.failure, len(scan.devices)) == ("", 1)


def test_busy_time_comes_from_the_sample_ring(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "sample 1000000 100")
    gpus.read(T0)
    fake_nvml.show(*A, *[f"sample {1_000_000 + n * 200_000} {100 if n <= 5 else 0}" for n in range(11)])
    assert gpus.read(T0 + 2_000).devices[0].busy_us == 1_000_000
    assert gpus.read(T0 + 2_000).devices[0].busy_us == 1_000_000


def test_no_samples_mean_idle_only_where_the_rate_can_be_read(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*B)
    gpus.read(T0)
    assert gpus.read(T0 + 1_000).devices[0].busy_us == 0
    fake_nvml.show(*B, "fail nvmlDeviceGetUtilizationRates 3")
    assert gpus.read(T0 + 2_000).devices[0].busy_us == Unavailable("not supported (nvmlDeviceGetUtilizationRates, 3)")


def test_a_driver_without_a_ring_is_read_by_its_rate(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "fail nvmlDeviceGetSamples 3")
    gpus.read(T0)
    device = gpus.read(T0 + 1_000).devices[0]
    assert (device.busy_us, device.sample_gaps) == (500_000, 0)


@pytest.mark.parametrize(("function", "field"), [
    ("nvmlDeviceGetPowerUsage", "power_mw"),
    ("nvmlDeviceGetTotalEnergyConsumption", "energy_uj"),
])  # fmt: skip
def test_one_figure_that_cannot_be_read_is_unavailable_and_the_rest_is_there(
    gpus: Gpus, fake_nvml: Any, function: str, field: str
) -> None:
    fake_nvml.show(*A, f"fail {function} 4")
    device = gpus.read(T0).devices[0]
    assert getattr(device, field) == Unavailable(f"no permission ({function}, 4)")
    assert device.memory_used_mib == 4 * 1024


@pytest.mark.parametrize("code", CODES)
def test_memory_without_version_2_is_read_by_version_1(gpus: Gpus, fake_nvml: Any, code: int) -> None:
    fake_nvml.show(*A, f"fail nvmlDeviceGetMemoryInfo_v2 {code}")
    assert gpus.read(T0).devices[0].memory_used_mib == 4 * 1024


def test_energy_that_decreases_begins_a_new_counter_epoch(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A)
    before = gpus.read(T0).devices[0]
    assert gpus.read(T0 + 1_000).devices[0].counter_epoch == before.counter_epoch
    fake_nvml.show(*A[:3], "power 350000 7")
    after = gpus.read(T0 + 2_000).devices[0]
    assert after.energy_uj == 7_000
    assert after.counter_epoch != before.counter_epoch


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_lost_gpu_is_listed_as_lost_and_the_others_go_on(gpus: Gpus, fake_nvml: Any, code: int) -> None:
    fake_nvml.show(*A, *B)
    gpus.read(T0)
    fake_nvml.show(*A, f"fail * {code}", *B)
    lost, fine = gpus.read(T0 + 1_000).devices
    assert (lost.gpu.uuid, lost.health) == ("GPU-aaaa", "lost")
    assert isinstance(lost.busy_us, Unavailable)
    assert (fine.gpu.uuid, fine.health, fine.memory_used_mib) == ("GPU-bbbb", "ok", 0)


def test_a_gpu_that_was_reset_is_found_again_and_the_others_count_on(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, *B)
    other = gpus.read(T0).devices[1]
    fake_nvml.show(*A, "lost", *B)
    assert gpus.read(T0 + 1_000).devices[0].health == "lost"
    gpus.read(T0 + REVIVE_MS)
    assert [d.health for d in gpus.read(T0 + REVIVE_MS + 1_000).devices] == ["lost", "ok"]
    fake_nvml.show(*A, *B)
    gpus.read(T0 + 2 * REVIVE_MS + 1_000)
    found = gpus.read(T0 + 2 * REVIVE_MS + 2_000).devices
    assert [d.health for d in found] == ["ok", "ok"]
    assert found[1].counter_epoch == other.counter_epoch


@pytest.mark.parametrize("code", [1, 999])
def test_a_library_that_lost_its_footing_is_started_again(gpus: Gpus, fake_nvml: Any, code: int) -> None:
    fake_nvml.show(*A)
    before = gpus.read(T0).devices[0]
    fake_nvml.show(f"fail nvmlDeviceGetCount_v2 {code}", *A, f"fail nvmlDeviceGetPowerUsage {code}")
    scan = gpus.read(T0 + 1_000)
    assert scan.failure.endswith(f"(nvmlDeviceGetCount, {code})")
    assert [(d.gpu.uuid, d.health, d.busy_us) for d in scan.devices] == [("GPU-aaaa", "ok", Unavailable(scan.failure))]
    fake_nvml.show(*A)
    again = gpus.read(T0 + 2_000)
    assert again.failure == ""
    assert again.devices[0].memory_used_mib == 4 * 1024
    assert again.devices[0].counter_epoch != before.counter_epoch


def test_a_replaced_driver_needs_a_new_process(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A)
    gpus.read(T0)
    fake_nvml.show(*A, "fail * 18")
    with pytest.raises(DriverReplaced, match="must be started again"):
        gpus.read(T0 + 1_000)
    fake_nvml.show("fail nvmlShutdown 18")
    gpus.close()


def test_a_library_that_never_matched_the_driver_is_one_more_way_of_no_driver(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show("initerr 18")
    assert gpus.read(T0).failure == "the NVIDIA driver was replaced; the agent must be started again"
    fake_nvml.show(*A)
    assert gpus.read(T0 + RETRY_MIN_MS).failure == ""


def test_a_machine_without_a_driver_is_asked_again_ever_more_rarely(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show("initerr 9")
    asked: list[int] = []
    for second in range(3_600):
        before = fake_nvml.calls("nvmlInitWithFlags")
        assert gpus.read(T0 + second * 1_000) == DriverReading((), "driver not loaded (nvmlInit, 9)")
        if fake_nvml.calls("nvmlInitWithFlags") != before:
            asked.append(second * 1_000)
    waits = [b - a for a, b in pairwise(asked)]
    assert waits[:4] == [RETRY_MIN_MS, 2 * RETRY_MIN_MS, 4 * RETRY_MIN_MS, 8 * RETRY_MIN_MS]
    assert set(waits[4:]) == {RETRY_MAX_MS}
    fake_nvml.show(*A)
    assert gpus.read(T0 + 2 * 3_600_000).failure == ""


def test_a_gpu_that_appears_with_a_restarted_driver_is_listed(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A)
    gpus.read(T0)
    fake_nvml.show("fail * 1", *A)
    gpus.read(T0 + 1_000)
    fake_nvml.show(*A, *B)
    assert [d.gpu.uuid for d in gpus.read(T0 + 2_000).devices] == ["GPU-aaaa", "GPU-bbbb"]


def test_mig_instances_are_listed_with_their_memory(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*MIG, f"proc 77 {GIB} 1 0")
    scan = gpus.read(T0)
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


def test_slow_mig_lookups_happen_once_a_minute_holes_included(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*MIG)
    for second in range(60):
        gpus.read(T0 + second * 1_000)
    assert fake_nvml.calls("nvmlDeviceGetMigDeviceHandleByIndex") == 7
    gpus.read(T0 + 60_000)
    assert fake_nvml.calls("nvmlDeviceGetMigDeviceHandleByIndex") == 14


def test_switching_mig_on_and_off_is_seen_at_once(gpus: Gpus, fake_nvml: Any) -> None:
    plain = [line for line in MIG if not line.startswith("mig")]
    fake_nvml.show(*plain)
    assert gpus.read(T0).devices[0].gpu.mig == ()
    fake_nvml.show(*MIG)
    assert len(gpus.read(T0 + 1_000).devices[0].gpu.mig) == 2
    fake_nvml.show(*plain)
    device = gpus.read(T0 + 2_000).devices[0]
    assert (device.gpu.mig, device.gpu.mig_enabled, device.gpu.compute_slices) == ((), False, 7)


def test_processes_with_memory_and_busy_time(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, f"proc 10 {2 * GIB}", "proc 11 -1", f"mps 12 {GIB}", "pu 1000000 10 99")
    assert [(p.pid, p.memory_mib, p.busy_us) for p in gpus.read(T0).devices[0].processes] == [
        (10, 2048, 0), (11, Unavailable("not reported"), 0), (12, 1024, 0),
    ]  # fmt: skip
    fake_nvml.show(*A, f"proc 10 {2 * GIB}", "proc 11 -1", "pu 2000000 10 60", "pu 2000000 11 30", "pu 2000000 12 5")
    found = gpus.read(T0 + 2_000).devices[0].processes
    assert [(p.pid, p.busy_us, p.running) for p in found] == [
        (10, 1_200_000, True), (11, 600_000, True), (12, 100_000, False),
    ]  # fmt: skip


def test_a_process_that_computes_and_draws_is_one_with_its_memory_once(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(
        *A, f"proc 10 {2 * GIB}", "proc 11 -1", f"gfx 10 {2 * GIB}", f"gfx 11 {3 * GIB}", f"gfx 12 {GIB}", "gfx 13 -1"
    )
    (device,) = gpus.read(T0).devices
    assert [(p.pid, p.memory_mib, p.graphics) for p in device.processes] == [
        (10, 2 * 1024, True),
        (11, 3 * 1024, True),
        (12, 1024, True),
        (13, Unavailable("not reported"), True),
    ]


def test_a_graphics_process_that_begins_and_ends_is_seen_within_five_readings(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, f"proc 10 {GIB}")
    gpus.read(T0)
    fake_nvml.show(*A, f"proc 10 {GIB}", f"gfx 12 {GIB}")
    seen = [[p.pid for p in gpus.read(T0 + 1_000 * n).devices[0].processes] for n in range(1, 6)]
    assert seen[-1] == [10, 12]
    fake_nvml.show(*A, f"proc 10 {GIB}")
    ended = gpus.read(T0 + 6_000).devices[0].processes
    assert [(p.pid, p.running) for p in ended] == [(10, True), (12, False)]


def test_garbage_of_the_process_sampler_is_dropped_not_clamped(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "proc 10 1")
    gpus.read(T0)
    fake_nvml.show(*A, "proc 10 1", "pu 2000000 10 101", "pu 2000000 4000000000 50")
    assert [(p.pid, p.busy_us) for p in gpus.read(T0 + 1_000).devices[0].processes] == [(10, 0)]


def test_work_of_processes_that_are_not_listed_leaves_the_holders_unknown(gpus: Gpus, fake_nvml: Any) -> None:
    """An agent outside the host's process numbers gets empty lists, and samples that name the host's numbers."""
    unlisted = []
    for second, samples in enumerate(
        [[], ["pu 1000000 553 99"], ["pu 2000000 553 99"], [], ["pu 3000000 9 99", f"proc 9 {GIB}"]]
    ):
        fake_nvml.show(*A, *samples)
        unlisted.append(gpus.read(T0 + second * 2_000).devices[0].unlisted)
    hidden = (("", "processes outside the agent's process namespace"),)
    assert unlisted == [(), (), hidden, hidden, ()]


def test_without_a_process_sampler_nobodys_busy_time_is_known(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A, "proc 10 1", *[f"fail {name} 3" for name in SAMPLERS])
    for second in range(3):
        (process,) = gpus.read(T0 + second * 1_000).devices[0].processes
        assert process.busy_us == Unavailable(
            "no per-process utilisation: not supported (nvmlDeviceGetProcessesUtilizationInfo, 3)"
        )
    assert [fake_nvml.calls(name) for name in SAMPLERS] == [1, 1]


def test_the_driver_is_let_go_while_the_release_file_exists(fake_nvml: Any, tmp_path: Path) -> None:
    release = tmp_path / "release"
    machine = Gpus(Driver(), release)
    fake_nvml.show(*A)
    assert machine.read(T0).failure == ""
    release.touch()
    scan = machine.read(T0 + 1_000)
    assert scan.failure == "released on request"
    assert scan.devices[0].busy_us == Unavailable("released on request")
    assert fake_nvml.calls("nvmlShutdown") == 1
    machine.read(T0 + 2_000)
    assert fake_nvml.calls("nvmlShutdown") == 1
    release.unlink()
    assert machine.read(T0 + 3_000).failure == ""
    machine.close()
    assert fake_nvml.calls("nvmlShutdown") == 2


def test_the_driver_is_let_go_until_all_who_asked_have_withdrawn(gpus: Gpus, fake_nvml: Any) -> None:
    fake_nvml.show(*A)
    before = gpus.read(T0).devices[0]
    gpus.release("mig.config.state=pending")
    gpus.release("driver-upgrade")
    scan = gpus.read(T0 + 1_000)
    assert (scan.failure, gpus.idle) == ("released: driver-upgrade", True)
    assert (scan.devices[0].gpu.uuid, scan.devices[0].energy_uj) == ("GPU-aaaa", Unavailable(scan.failure))
    gpus.reacquire("driver-upgrade")
    assert gpus.read(T0 + 2_000).failure == "released: mig.config.state=pending"
    gpus.reacquire("mig.config.state=pending")
    after = gpus.read(T0 + 3_000).devices[0]
    assert after.energy_uj == 123_456_000
    assert after.counter_epoch != before.counter_epoch
    assert (fake_nvml.calls("nvmlInitWithFlags"), fake_nvml.calls("nvmlShutdown")) == (2, 1)
