"""GPUs joined with their holders: standalone and with a pods file, through to exact rows."""

from __future__ import annotations

from pathlib import Path

from agent.core.readings import SOLE, Allocation, DeviceReading, ProcessReading, Reading, Unavailable
from agent.holders.process_cgroups import RESCAN_MS, PodLogs
from agent.node_reader import UNKNOWN_PROCESS, HolderCounters, OwnedProcess
from agent.simulation.simulated_node import H100, make_gpu
from agent.wire import Holder
from tests.agent.sample_values import T0
from tests.agent.snapshots import pod


def test_pod_names_are_read_again_after_a_while(tmp_path: Path) -> None:
    logs = PodLogs(tmp_path / "pods")
    assert logs.names(T0) == {}
    (tmp_path / "pods" / "a_b_c").mkdir(parents=True)
    assert logs.names(T0 + RESCAN_MS - 1) == {}
    (tmp_path / "pods" / "a_\udcff_d").mkdir()
    assert logs.names(T0 + RESCAN_MS) == {"c": ("a", "b")}


SILENT = Unavailable("not supported")
SERVER = Holder(kind="process", uid="1:1", name="nvidia-cuda-mps-server")


def claims(*names: str, mode: bool = True) -> list[Allocation]:
    return [Allocation("GPU-0", pod(n), sharing="time-slicing" if mode else None, sharing_replicas=4) for n in names]


def ran(
    pid: int, holder: Holder | None, busy: Reading = SILENT, accounted: Reading = SILENT, mps: bool = False
) -> OwnedProcess:
    return OwnedProcess(ProcessReading(pid, "", 10, busy, accounted, mps_client=mps), holder)


def read(counters: HolderCounters, held: list[Allocation], *owned: OwnedProcess) -> tuple[str, dict[str, Reading]]:
    device = counters.read(DeviceReading(make_gpu("GPU-0", 0, H100)), owned, held)
    return device.method, {r.holder.name: r.busy_us for r in device.holders}


def test_accounting_is_taken_before_samples_and_its_sum_goes_on() -> None:
    counters = HolderCounters()
    held = claims("a", "b")
    assert read(counters, held, ran(1, pod("a"), 90, 100), ran(2, pod("a"), 9, 10), ran(3, pod("b"), 5, 7)) == (
        "accounting",
        {"a": 110, "b": 7},
    )
    assert read(counters, held, ran(1, pod("a"), 90, 1), ran(3, pod("b"), 5, 0)) == (
        "accounting",
        {"a": 111, "b": 7},
    )


def test_one_process_without_accounting_makes_the_device_one_of_samples() -> None:
    assert read(HolderCounters(), claims("a", "b"), ran(1, pod("a"), 90, 100), ran(3, pod("b"), 5)) == (
        "process",
        {"a": 100, "b": 5},
    )


def test_where_the_driver_says_nothing_the_allocation_is_all() -> None:
    method, seen = read(HolderCounters(), claims("a", "b"), ran(1, pod("a")), ran(3, pod("b")))
    assert (method, seen) == ("device", {"a": SILENT, "b": SILENT})


def test_a_sole_holder_has_what_the_device_did_and_strangers_their_own() -> None:
    method, seen = read(HolderCounters(), claims("a", mode=False), ran(1, pod("a"), 90), ran(2, pod("x"), 10))
    assert (method, seen) == ("process", {"a": SOLE, "x": 10})


def test_in_the_step_in_which_a_gpu_becomes_somebodys_own_it_is_still_read_per_process() -> None:
    counters = HolderCounters()
    read(counters, claims("a", "b"), ran(1, pod("a"), 10), ran(2, pod("b"), 10))
    assert read(counters, claims("a", mode=False), ran(1, pod("a"), 30))[1] == {"a": 40}
    assert read(counters, claims("a", mode=False), ran(1, pod("a"), 30))[1] == {"a": SOLE}


def test_a_process_nobody_can_name_may_be_anybodys() -> None:
    method, seen = read(HolderCounters(), claims("a", "b"), ran(1, pod("a"), 30), ran(77, None, 10))
    assert method == "device"
    assert seen == {"a": UNKNOWN_PROCESS, "pid 77": UNKNOWN_PROCESS}


def test_the_time_of_an_mps_server_goes_to_its_clients() -> None:
    counters = HolderCounters()
    held = claims("a", "b")
    clients = ran(2, pod("a"), 0, mps=True), ran(3, pod("b"), 0, mps=True), ran(4, pod("b"), 0, mps=True)
    assert read(counters, held, ran(1, SERVER, 100), *clients)[1] == {SERVER.name: 0, "a": 33, "b": 67}
    busy = ran(2, pod("a"), 60, mps=True), ran(3, pod("b"), 40, mps=True)
    assert read(counters, held, ran(1, SERVER, 5), *busy)[1] == {SERVER.name: 5, "a": 93, "b": 107}


def test_a_process_that_draws_is_not_taken_for_an_mps_server() -> None:
    desktop = OwnedProcess(
        ProcessReading(9, "", 10, 70, SILENT, graphics=True), Holder(kind="process", uid="9:1", name="Xorg")
    )
    idle = ran(2, pod("a"), 0, mps=True), ran(3, pod("b"), 0, mps=True)
    assert read(HolderCounters(), claims("a", "b"), desktop, *idle)[1] == {"Xorg": 70, "a": 0, "b": 0}


def test_who_left_and_came_back_counts_from_zero() -> None:
    counters = HolderCounters()
    held = claims("a", "b")
    read(counters, held, ran(1, pod("a"), 30))
    read(counters, held)
    assert read(counters, held, ran(1, pod("a"), 5))[1] == {"a": 5}
    counters.forget([])
    assert read(counters, held, ran(1, pod("a"), 5))[1] == {"a": 5}


def test_an_empty_shared_gpu_is_known_to_have_done_nothing_only_where_processes_can_be_seen() -> None:
    counters, device = HolderCounters(), DeviceReading(make_gpu("GPU-0", 0, H100))
    assert counters.read(device, (), claims("a", "b"), visible=True).method == "process"
    assert counters.read(device, (), claims("a", "b")).method == "device"
    assert counters.read(device, (), claims("a", mode=False), visible=True).method == "device"
