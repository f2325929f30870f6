"""Who held which GPU and was busy, on the driver's real binding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.core.readings import Allocation, Gpu, Unavailable
from agent.core.settings import AgentSettings
from agent.holders.process_cgroups import PodLogs, ProcessTable
from agent.holders.protocol import Holdings
from agent.main_loop import Agent
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import Holder, SharingMode, UsageInterval
from gputally.base.clock import VirtualClock
from tests.agent.holders.nvml.shown_node import GPU, NewSource, Proc, Shown, holders
from tests.agent.sample_values import CID, MIB, T0, UID


class Fraction:
    """A pod that holds a part of a GPU or of its memory."""

    def __init__(self, ppm: int | None) -> None:
        holder = Holder(kind="pod", uid=UID, namespace="n", name="p", container="main")
        self.given = Allocation("GPU-a", holder, sharing="fraction", fraction_ppm=ppm)

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        return Holdings((), (self.given,))

    def close(self) -> None:
        """Holds nothing."""


class Given:
    """A source that returns given allocations."""

    def __init__(self, *given: Allocation) -> None:
        self.given = given

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        return Holdings((), self.given)

    def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize(
    ("first", "second", "unknown"),
    [
        ((None, 0, None), ("fraction", 0, 250_000), True),
        (("time-slicing", 4, None), (None, 0, None), True),
        (("fraction", 0, 250_000), ("fraction", 0, 250_000), False),
        ((None, 0, None), (None, 0, None), False),  # equal halves: nothing of the GPU counts as free
    ],
)
def test_a_gpu_that_one_holder_has_alone_and_another_in_part_is_unknown(
    new_source: NewSource,
    first: tuple[SharingMode | None, int, int | None],
    second: tuple[SharingMode | None, int, int | None],
    unknown: bool,
) -> None:
    source = new_source(
        None,
        Given(
            *(
                Allocation("GPU-a", Holder("pod", f"u{i}", "n", f"p{i}", "main"), "", sharing, of, 1, ppm)
                for i, (sharing, of, ppm) in enumerate((first, second))
            )
        ),
    )
    found = dict(source.look(0, *GPU).unknown_holders)
    assert list(found) == ["GPU-a"] * unknown
    assert all("n/p0" in why and "n/p1" in why for why in found.values())


@pytest.mark.parametrize(("ppm", "unknown"), [(250_000, []), (None, ["GPU-a"])])
def test_a_part_of_a_memory_whose_size_was_not_read_is_unknown(
    new_source: NewSource, ppm: int | None, unknown: list[str]
) -> None:
    source = new_source(None, Fraction(ppm))
    refused = [f"fail {name} 17" for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")]
    found = source.look(0, *GPU, *refused).unknown_holders
    assert [uuid for uuid, _ in found] == unknown
    assert all(why.endswith("operating system (nvmlDeviceGetMemoryInfo, 17)") for _, why in found)


def test_a_sole_process_has_the_whole_gpu(source: Shown, proc: Proc) -> None:
    proc(10, comm="train.py", start=5)
    snapshot = source.look(0, *GPU, f"proc 10 {100 * MIB}")
    assert holders(snapshot) == [("process", "10:5", None)]
    (reading,) = snapshot.devices[0].holders
    assert (reading.memory_mib, reading.busy_us) == (100, Unavailable("sole holder"))
    assert snapshot.devices[0].method == "device"
    assert snapshot.sources == (("nvml", ""),)


def test_processes_of_one_container_are_one_holder(source: Shown, proc: Proc) -> None:
    for pid in (10, 11):
        proc(pid, cgroup=f"0::/system.slice/docker-{CID}.scope")
    snapshot = source.look(0, *GPU, f"proc 10 {100 * MIB}", f"proc 11 {50 * MIB}")
    assert holders(snapshot) == [("container", CID, None)]
    assert snapshot.devices[0].holders[0].memory_mib == 150


def test_several_holders_share_equally_and_each_has_its_own_busy_time(source: Shown, proc: Proc) -> None:
    proc(10, comm="a", start=1)
    proc(11, comm="b", start=2)
    source.look(0, *GPU, "proc 10 1", "proc 11 1")
    snapshot = source.look(2_000, *GPU, "proc 10 1", "proc 11 1", "pu 2000000 10 30", "pu 2000000 11 20")
    assert holders(snapshot) == [("process", "10:1", "processes"), ("process", "11:2", "processes")]
    device = snapshot.devices[0]
    assert device.method == "process"
    assert {r.holder.uid: r.busy_us for r in device.holders} == {"10:1": 600_000, "11:2": 400_000}


def test_an_mps_server_holds_nothing_and_its_time_belongs_to_its_clients(source: Shown, proc: Proc) -> None:
    """As on an H200: server and clients are compute processes, and every sample names the server."""
    proc(9, comm="nvidia-cuda-mps", start=1)
    assert holders(source.look(0, *GPU, f"proc 9 {66 * MIB}")) == []
    for pid in (10, 11):
        proc(pid, start=5)
    clients = [f"{how} {pid} {100 * MIB}" for pid in (10, 11) for how in ("proc", "mps")]
    source.look(2_000, *GPU, f"proc 9 {66 * MIB}", *clients, "pu 1000000 9 99")
    snapshot = source.look(4_000, *GPU, f"proc 9 {66 * MIB}", *clients, "pu 3000000 9 80")
    assert holders(snapshot) == [("process", "10:5", "processes"), ("process", "11:5", "processes")]
    busy = {r.holder.uid: r.busy_us for r in snapshot.devices[0].holders}
    assert busy == {"9:1": 0, "10:5": 1_790_000, "11:5": 1_790_000}


def test_an_idle_gpu_is_held_by_nobody(source: Shown) -> None:
    snapshot = source.look(0, *GPU)
    assert snapshot.allocations == ()
    assert snapshot.devices[0].holders == ()


def test_a_process_outside_our_table_holds_the_gpu_as_a_number(source: Shown, proc: Proc) -> None:
    proc(10, start=1)
    snapshot = source.look(0, *GPU, "proc 10 1", "proc 99 1", "pu 1000000 10 30")
    assert holders(snapshot) == [("process", "10:1", "processes"), ("process", "99:", "processes")]
    assert all(isinstance(r.busy_us, Unavailable) for r in snapshot.devices[0].holders)


def test_without_a_driver_nobody_can_say_who_holds_what(source: Shown) -> None:
    snapshot = source.look(0, "initerr 12")
    assert snapshot.devices == ()
    assert snapshot.allocations == Unavailable("libnvidia-ml.so.1 not found (nvmlInit, 12)")
    assert snapshot.sources == (("nvml", "libnvidia-ml.so.1 not found (nvmlInit, 12)"),)


def test_mig_processes_hold_their_instance(source: Shown, proc: Proc) -> None:
    proc(10, start=1)
    instance = f"mig MIG-1 1 0 3 3g.71gb {400 * MIB} {10 * MIB}"
    snapshot = source.look(0, *GPU[:1], f"mem {1000 * MIB} 0", "migmode", instance, "proc 10 1 1 0")
    assert not isinstance(snapshot.allocations, Unavailable)
    assert [(a.mig_uuid, a.holder.uid, a.sharing) for a in snapshot.allocations] == [("MIG-1", "10:1", None)]


def test_a_pod_found_by_its_process_is_called_what_its_log_folder_says(
    new_source: NewSource, proc: Proc, tmp_path: Path
) -> None:
    folders = tmp_path / "pods"
    for folder in (f"vision_train-0_{UID}", "kube-system_odd", "a__b", "nlp_idle_0a1b2c3d-1111-4222-8333-444455556666"):
        (folders / folder).mkdir(parents=True)
    outer = "11111111-2222-4333-8444-555566667777"  # a runtime inside somebody else's: not this kubelet's pod
    root = proc(10, cgroup=f"0::/pod{outer}/{'d' * 64}/kubepods/pod{UID}/{CID}")
    source = new_source(ProcessTable(root), None, PodLogs(folders), "n1")
    snapshot = source.look(0, *GPU, "proc 10 1")
    assert not isinstance(snapshot.allocations, Unavailable)
    holder = Holder(kind="pod", uid=UID, namespace="vision", name="train-0", container=CID[:12])
    assert [a.holder for a in snapshot.allocations] == [holder]
    assert [(f.uid, f.namespace, f.name, f.node) for f in snapshot.facts] == [(UID, "vision", "train-0", "n1")]


def test_standalone_end_to_end_books_every_microsecond(
    source: Shown, proc: Proc, clock: VirtualClock, open_outbox: Callable[..., Outbox],
    accountant: Any,
) -> None:  # fmt: skip
    """Ten minutes on a GPU: idle, one process at 50 %, then a second one beside it, then the GPU is lost."""
    proc(10, comm="train", start=1)
    proc(11, comm="eval", start=2)
    outbox = open_outbox()
    uploader = Uploader(outbox, accountant.url, "c", "n", "boot", None, clock)
    agent = Agent(AgentSettings(node="n"), source, outbox, uploader, clock)
    energy_mj = 0
    for second in range(0, 601, 2):
        lines = ["gpu GPU-a NVIDIA_H200", f"mem {1000 * MIB} 0", f"power 500000 {energy_mj}"]
        ring = range(max(0, second - 10) * 5 + 1, second * 5 + 1)
        if second <= 120:
            lines += ["util 0 0", *[f"sample {n * 200_000} 0" for n in ring]]
        else:
            lines += ["util 50 0", *[f"sample {n * 200_000} {50 if n > 600 else 0}" for n in ring], "proc 10 1"]
        if second > 300:
            lines += ["proc 11 1", f"pu {second * 1_000_000} 10 30", f"pu {second * 1_000_000} 11 20"]
        if second > 480:
            lines += ["lost"]
        source.fake.show(*lines)
        agent.sample()
        clock.advance(2_000)
        energy_mj += 1_000_000
    agent.shutdown()
    rows: list[UsageInterval] = [row for batch in accountant.batches for row in batch.intervals]
    spans = defaultdict(int)
    for row in rows:
        spans[row.start_ms, row.end_ms] += row.capacity_us
    assert all(total == (end - start) * 1_000 for (start, end), total in spans.items())
    assert sum(spans.values()) == 602 * 1_000_000
    lost = [row for row in rows if row.health == "lost"]
    assert sum(row.capacity_us for row in lost) == (602 - 482) * 1_000_000
    assert {row.holder.kind for row in rows if row.holder} == {"process", "unattributed"}
    by_name: defaultdict[str, list[UsageInterval]] = defaultdict(list)
    for row in rows:
        if row.holder is not None:
            by_name[row.holder.name].append(row)
    sole = [row for row in by_name["train"] if row.end_ms <= T0 + 300_000]
    assert sum(row.busy_us or 0 for row in sole) == (300 - 122) * 500_000
    for name, percent in (("train", 30), ("eval", 20)):
        shared = [row for row in by_name[name] if row.start_ms >= T0 + 302_000 and row.end_ms <= T0 + 480_000]
        assert sum(row.capacity_us for row in shared) == (480 - 302) * 500_000
        assert sum(row.busy_us or 0 for row in shared) == (480 - 302) * percent * 10_000
    # Two seconds of each newcomer passed before it was first seen.
    assert sum(row.busy_us or 0 for row in by_name[""]) == 2 * 500_000 + 2 * 200_000
    assert outbox.durable_seq == outbox.last_seq == len(rows)


def test_the_driver_and_the_process_table_are_timed(new_source: NewSource, proc: Proc) -> None:
    source = new_source(ProcessTable(proc(1)), clock=VirtualClock(T0))
    assert source.look(0, *GPU).took_ms == (("nvml", 0), ("processes", 0))
