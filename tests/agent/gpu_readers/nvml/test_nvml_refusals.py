"""Unknown is not zero, as a property: every NVML function with every return code, on GPUs whose true use is known.

Each run is compared, second by second, with the same run without the refusal. A refusal makes a reading unknown, with
the function and the code as its reason. It never changes the busy, idle or memory time of a holder, never books a held
GPU as unheld or down, and never makes a holder of a process that happens to be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.core.readings import Allocation, DriverReplaced
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.process_cgroups import ProcessTable
from agent.metering.meter import Meter
from agent.node_reader import NodeSource
from agent.wire import Holder, UsageInterval
from tests.agent.gpu_readers.nvml.rig import GIB, T0, Rig
from tests.agent.readers import nvml_alone
from tests.fakes.nvml.functions import CODES, FUNCTIONS
from tests.fakes.nvml.library import FakeNvml, loaded
from tests.hypothesis_examples import THOROUGH

NewRig = Callable[..., Any]
SECONDS = 9
REFUSED = {"meanwhile": range(3, 6), "at-first": range(3), "always": range(SECONDS)}
FEW = (3, 4, 10, 999)
"""The return codes that are tried for every function; each other code is tried for some functions."""
SAMPLE_US = 160_000
"""A row may differ from the truth by one sample of the driver."""
NOTHING_TO_TELL = {
    ("nvmlDeviceGetProcessUtilization", 6), ("nvmlDeviceGetProcessesUtilizationInfo", 6), ("nvmlDeviceGetSamples", 6),
    ("nvmlDeviceGetMigDeviceHandleByIndex", 2), ("nvmlDeviceGetMigDeviceHandleByIndex", 6),
}  # fmt: skip
"""Codes that are answers: no process was busy, no newer sample exists, no such instance exists."""
LACKS = {
    (name, code) for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetGraphicsRunningProcesses_v3") for code in (3, 13)
}
"""The answer, from the first reading on, of a GPU without MIG, or without graphics processes."""
MIG = [
    f"mig MIG-1 1 0 4 4g.71gb {71 * GIB} 0", f"mig MIG-2 2 0 2 2g.35gb {35 * GIB} 0",
    f"mig MIG-3 3 0 1 1c.2g.35gb {35 * GIB} 0 2", f"mig MIG-4 3 1 1 1c.2g.35gb {35 * GIB} 0 2",
]  # fmt: skip
"""The last two are compute instances of one GPU instance."""
Row = tuple[str, str, int]


class Node(Rig):
    """Five GPUs: one that a single pod holds, two that two pods each share by time-slicing (the second with accounting
    mode), one in MIG mode, and one with coherent memory. One pod only draws graphics, one draws and computes. There is
    one row for each second."""

    def __init__(self, fake: FakeNvml, root: Path) -> None:
        super().__init__(fake, root, gpus=4)
        fake.tell("gpu GPU-4 NVIDIA_GH200_480GB", f"mem {96 * GIB} {60 * GIB}", "simulate 70000 500000", "addressing 2")
        fake.tell("on 2", "accounting 1", "on 3", "migmode 1", *MIG)
        self.meter = Meter(1_000, self.zone, boot_id="boot")
        self.start(0, 0, 700_000)
        self.start(1, 1, 600_000, of=2)
        self.start(2, 1, 300_000, of=2)
        self.start(3, 2, 200_000, of=2)
        self.start(4, 2, 500_000, of=2)
        self.start(5, 3, 500_000, mig="MIG-1", gi=1)
        self.start(6, 3, 900_000, mig="MIG-2", gi=2)
        self.start(7, 3, 400_000, mig="MIG-3", gi=3)
        self.start(8, 4, 600_000)
        fake.tell("on 1", "draw 1001 1", "on 2", "draw 1003 2")

    def play(self, function: str = "", code: int = 0, refused: range = range(0)) -> int:
        """Run nine seconds. The function answers the code in the seconds in `refused`. Returns how often it was called
        in these."""
        calls = 0
        try:
            for second in range(SECONDS):
                self.fake.tell("clear")
                before = self.fake.calls(function)
                if second in refused:
                    self.fake.tell("machine", f"fail {function} {code}")
                self.look() if not second else self.tick()
                calls += self.fake.calls(function) - before if second in refused else 0
            self.fake.tell("clear")
        except DriverReplaced:
            calls += 1
        self.close()
        return calls


def by_second(rows: list[UsageInterval]) -> dict[Row, UsageInterval]:
    """Return rows by second, without busy time that has no owner: the samples' shortfall from the whole."""
    held = [row for row in rows if row.holder is None or row.holder.kind != "unattributed"]
    return {(row.gpu_uuid, row.holder.uid if row.holder else "", row.start_ms): row for row in held}


def accused(true: dict[Row, UsageInterval], rows: list[UsageInterval], code: int) -> list[str]:
    """Return the figures of a run that are neither true nor unknown."""
    wrong = []
    for key, row in by_second(rows).items():
        one = true.get(key)
        if one is None or row.health != "ok":
            wrong.append(f"{key}: {row.holder}, {row.health}")
            continue
        if row.allocated_us != one.allocated_us or row.end_ms != one.end_ms:
            wrong.append(f"{key}: allocated {row.allocated_us}, not {one.allocated_us}")
        if row.busy_us is None:
            if one.busy_us is not None and not any(f", {code})" in gap.reason for gap in row.gaps):
                wrong.append(f"{key}: unknown for {row.gaps}")
        elif one.busy_us is None or abs(row.busy_us - one.busy_us) > SAMPLE_US:
            wrong.append(f"{key}: busy {row.busy_us}, not {one.busy_us}")
        if row.memory_mib_s not in (None, one.memory_mib_s):
            wrong.append(f"{key}: memory {row.memory_mib_s}, not {one.memory_mib_s}")
    return wrong


@pytest.fixture(scope="module")
def true(fake_nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Row, UsageInterval]:
    """The rows of the run without a refusal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with loaded(fake_nvml_library, folder) as fake:
        node = Node(fake, folder / "proc")
        node.play()
        node.source.close()
    found = by_second(node.rows())
    assert len(found) == 10 * (SECONDS - 1), "of nine pods, and of an instance that is not held"
    return found


@pytest.mark.parametrize("when", REFUSED)
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "*"])
def test_no_refusal_lowers_or_raises_what_anybody_used(
    new_rig: NewRig, fake_nvml: FakeNvml, true: dict[Row, UsageInterval], function: str, when: str
) -> None:
    wrong: list[str] = []
    for code in CODES if THOROUGH else sorted({*FEW, *CODES[FUNCTIONS.index(function) % 6 :: 6]}):
        if (function, code) in NOTHING_TO_TELL or (when != "meanwhile" and (function, code) in LACKS):
            continue
        node = new_rig(Node)
        refused = node.play(function, code, REFUSED[when])
        wrong += [f"{code}: {line}" for line in accused(true, node.rows(), code)]
        if not refused:
            break  # nobody called the function, so that no other code can be told either
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:12]])


@pytest.mark.parametrize("access", [{}, {"processes": False}])
def test_compute_instances_of_one_gpu_instance_are_unknown_and_never_idle(
    new_rig: NewRig, access: dict[str, bool]
) -> None:
    """GPM reports the activity of the GPU instance, but not of its compute instances."""
    node = new_rig(setup=["migmode 1", *MIG], **access)
    node.start(1, 0, 900_000, mig="MIG-3", gi=3)
    node.pods.claims["idle"] = Allocation("GPU-0", Holder(kind="pod", uid="idle"), "MIG-4")
    node.run(60)
    inside = [row for row in node.rows() if row.slice and row.slice.gi == 3]
    assert [(row.busy_us, row.method, *{gap.reason for gap in row.gaps}) for row in inside] == [
        (None, "allocation", "GPM: shares its GPU instance")
    ] * 2


class Standalone(Rig):
    """A node without Kubernetes, where processes are the holders."""

    def open_source(self, *, restarted: bool = False) -> None:
        super().open_source(restarted=restarted)
        self.source = NodeSource(nvml_alone(self.gpus), ProcessTable(self.root))


@pytest.mark.parametrize("code", [3, 4, 10, 13, 17])
def test_a_gpu_whose_processes_were_never_listed_is_not_booked_unheld(new_rig: NewRig, code: int) -> None:
    node = new_rig(Standalone, gpus=2)
    node.fake.tell("on 0", f"fail nvmlDeviceGetComputeRunningProcesses_v3 {code}")
    node.start(1, 0, 900_000, allocate=False)
    snapshots = [node.look(), *(node.tick() for _ in range(60))]
    reason = f"(nvmlDeviceGetComputeRunningProcesses_v3, {code})"
    assert [(uuid, why.endswith(reason)) for uuid, why in snapshots[-1].unknown_holders] == [("GPU-0", True)]
    node.close()
    assert {row.gpu_uuid for row in node.rows()} == {"GPU-1"}, "of GPU 0 nothing is known: it is unmetered"


@pytest.mark.parametrize(
    ("function", "code", "draws", "busy_known"),
    [
        ("nvmlDeviceGetComputeRunningProcesses_v3", 10, False, True),
        # A GPU that told its graphics processes once does not lack them later.
        *(("nvmlDeviceGetGraphicsRunningProcesses_v3", code, True, False) for code in (3, 4, 10, 17, 999)),
    ],
)
def test_a_holder_whose_process_is_not_listed_for_a_while_holds_on(
    new_rig: NewRig, function: str, code: int, draws: bool, busy_known: bool
) -> None:
    node = new_rig(Standalone)
    node.start(1, 0, 900_000, allocate=False)
    if draws:
        node.fake.tell("on 0", "draw 1001 1")
    node.run(60, f"fail {function} {code}")
    assert all(row.holder for row in node.rows()), "never unheld"
    (row,) = node.rows_of(1)
    assert row.allocated_us == 60_000_000
    assert not busy_known or row.busy_us == pytest.approx(49 * 900_000, rel=0.02)
    assert sum(gap.end_ms - gap.start_ms for gap in row.gaps) == 11_000
    assert all(f"({function}, {code})" in gap.reason for gap in row.gaps)


def test_an_unheld_gpu_whose_processes_cannot_be_listed_any_more_is_unmetered(new_rig: NewRig) -> None:
    node = new_rig(Standalone)
    node.run(60, "fail nvmlDeviceGetComputeRunningProcesses_v3 10")
    assert [(row.holder, row.start_ms - T0, row.end_ms - T0) for row in node.rows()] == [
        (None, 0, 21_000), (None, 31_000, 60_000),
    ]  # fmt: skip


def test_what_draws_on_a_workstation_holds_its_gpu(new_rig: NewRig) -> None:
    node = new_rig(Standalone)
    node.start(1, 0, 300_000, allocate=False)
    node.fake.tell("on 0", "draw 1001 1")
    node.start(2, 0, 500_000, allocate=False)
    node.fake.tell("on 0", "draw 1002 2")
    node.run(60)
    for pod, ppm in ((1, 300_000), (2, 500_000)):
        (row,) = node.rows_of(pod)
        assert row.allocated_us == 30_000_000
        assert row.busy_us == pytest.approx(60 * ppm, rel=0.03)
        assert row.memory_mib_s == 60 * 1024, "once, although both lists have it"


@pytest.mark.parametrize("code", [3, 13])
def test_a_gpu_that_knows_no_graphics_processes_has_none(new_rig: NewRig, code: int) -> None:
    node = new_rig(Standalone, setup=[f"fail nvmlDeviceGetGraphicsRunningProcesses_v3 {code}"])
    node.start(1, 0, 300_000, allocate=False)
    node.look()
    for _ in range(9):
        snapshot = node.tick()
    node.close()
    assert snapshot.unknown_holders == ()
    assert snapshot.devices[0].unlisted == ()


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"])
def test_beside_a_stranger_a_refusal_leaves_the_holder_unknown(new_rig: NewRig, function: str) -> None:
    """Otherwise the holder of the whole GPU would be charged for the stranger's work."""
    node = new_rig()
    node.start(1, 0, 300_000)
    node.start(2, 0, 600_000, allocate=False)
    node.run(60, f"fail {function} 4")
    (row,) = node.rows_of(1)
    assert row.busy_us == pytest.approx(49 * 300_000, rel=0.05)
    assert [(gap.end_ms - gap.start_ms, gap.reason.endswith(f"no permission ({function}, 4)")) for gap in row.gaps] == [
        (11_000, True)
    ]


def test_a_method_that_a_gpu_lacks_is_named(new_rig: NewRig, caplog: pytest.LogCaptureFixture) -> None:
    node = new_rig(setup=["fail nvmlDeviceGetProcessUtilization 3", "fail nvmlDeviceGetSamples 3"])
    node.start(1, 0, 300_000)
    node.ticks(3)
    node.close()
    lacking = [record for record in caplog.records if record.levelname == "WARNING"]
    assert {record.getMessage().split(";")[0] for record in lacking} == {
        "the driver does not report how busy each process of a GPU is",
        "the driver has no busy-time samples of a GPU: the utilisation rate replaces them",
    }
    assert len(lacking) == 2, "once each"


def test_a_sum_that_was_refused_for_a_while_is_not_booked_in_one_step(new_rig: NewRig) -> None:
    node = new_rig(setup=["accounting 1"])
    node.meter = Meter(1_000, node.zone, boot_id="boot")
    node.start(1, 0, 900_000, of=2)
    node.start(2, 0, 0, of=2)
    node.look()
    for second in range(20):
        node.fake.tell("clear")
        if 5 <= second < 15:
            node.fake.tell("on 0", "fail nvmlDeviceGetAccountingStats_v2 999")
        if second == 15:
            node.load(1, 0)
            node.load(2, 900_000)
        node.tick()
    node.close()
    late = [row for row in node.rows_of(1) if row.start_ms >= T0 + 15_000]
    assert [(row.busy_us or 0) <= SAMPLE_US for row in late] == [True] * 5


def test_a_structure_of_another_size_changes_no_figure_and_no_other_memory(new_rig: NewRig) -> None:
    """The driver writes 8 bytes more than the binding's structure has, in every call of one function."""
    node = new_rig(Node)
    node.play()
    true = by_second(node.rows())
    wrong: list[str] = []
    for function in (name for name in FUNCTIONS if name != "*"):
        node = new_rig(Node)
        node.fake.tell(f"grow {function} 8")
        node.play()
        wrong += [f"{function}: {line}" for line in accused(true, node.rows(), -1)]
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:12]])


ENTRY_SIZES = [16, 24, 32, 40, 64]


@pytest.mark.parametrize("size", ENTRY_SIZES)
def test_three_equal_processes_get_a_third_each_whatever_the_size_of_the_drivers_entries(
    new_rig: NewRig, size: int
) -> None:
    node = new_rig(setup=[f"entry {size}"])
    for pod in (1, 2, 3):
        node.start(pod, 0, 300_000, of=3)
    node.fake.tell("on 0", "draw 1002 2", f"mps 1003 {GIB}")
    node.run(60)
    for pod in (1, 2, 3):
        assert sum(row.busy_us or 0 for row in node.rows_of(pod)) == pytest.approx(60 * 300_000, rel=0.05)
        assert sum(row.memory_mib_s or 0 for row in node.rows_of(pod)) == 60 * 1024


@pytest.mark.parametrize("size", ENTRY_SIZES)
@pytest.mark.parametrize("count", [1, 2, 25, 30, 100, 200])
def test_a_list_of_any_length_is_read(fake_nvml: FakeNvml, size: int, count: int) -> None:
    fake_nvml.tell("reset", "gpu GPU-0 NVIDIA_H200", f"entry {size}")
    for kind in ("proc", "gfx", "mps"):
        fake_nvml.tell("on 0", *(f"{kind} {pid} {pid * 7}" for pid in range(1, count + 1)))
    driver = Driver()
    driver.call("nvmlInit")
    handle = driver.call("nvmlDeviceGetHandleByIndex", 0)
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = driver.processes(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle)
        assert listed == {pid: pid * 7 for pid in range(1, count + 1)}


@pytest.mark.parametrize("fault", ["scrambled 1", "entry 23", "entry 33"])
def test_a_list_that_names_no_processes_is_unreadable_and_never_empty(new_rig: NewRig, fault: str) -> None:
    node = new_rig(setup=[fault])
    for pod in (1, 2, 3):
        node.start(pod, 0, 300_000, of=3)
    node.run(60)
    rows = [row for row in node.rows() if row.holder and row.holder.kind == "pod"]
    assert {row.holder.uid for row in rows if row.holder} == {node.uid(pod) for pod in (1, 2, 3)}
    assert {row.busy_us for row in rows} == {None}
    assert all("nvmlDeviceGetComputeRunningProcesses_v3" in gap.reason for row in rows for gap in row.gaps)


def test_an_unreadable_list_is_not_blamed_on_the_process_namespace(
    new_rig: NewRig, caplog: pytest.LogCaptureFixture
) -> None:
    node = new_rig(setup=["scrambled 1"])
    node.start(1, 0, 300_000)
    node.run(20)
    assert not [record for record in caplog.records if "hostPID" in record.getMessage()]
    assert len([r for r in caplog.records if "RunningProcesses" in str(getattr(r, "reason", ""))]) == 1


def test_a_gpu_whose_list_is_unreadable_is_not_booked_unheld(new_rig: NewRig) -> None:
    node = new_rig(Standalone, setup=["scrambled 1"])
    node.start(1, 0, 900_000, allocate=False)
    node.run(60)
    assert node.rows() == [], "nothing is known about its holders"


@pytest.mark.parametrize("busy_ppm", [0, 400_000])
def test_a_shared_gpu_without_the_right_to_look_at_processes_keeps_one_method(new_rig: Any, busy_ppm: int) -> None:
    """Its label stays the same from minute to minute, idle or not, and is one that a real GPU has."""
    rig = new_rig(setup=["fail nvmlDeviceGetProcessUtilization 4", "fail nvmlDeviceGetProcessesUtilizationInfo 4"])
    for pod in (1, 2):
        rig.start(pod, 0, busy_ppm if pod == 1 else 0, of=2)
    rig.run(240)
    methods = {row.method for pod in (1, 2) for row in rig.rows_of(pod)}
    assert len(methods) == 1
    assert not methods & {"simulated", "imported", "carried"}
