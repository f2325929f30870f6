"""Pods and their GPUs from a file, and the job files of a batch system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.readings import DeviceReading, Gpu, NodeSnapshot, Unavailable
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.job_files import MAX_FILE_BYTES, MAX_FILES, HpcJobs, parse_jobs
from agent.holders.node_reader import NodeSource
from agent.holders.pods_file import PodsFile
from agent.holders.process_cgroups import ProcessTable
from agent.metering.meter import ClosedSet, Meter
from agent.simulation.simulated_node import A100, H100, make_gpu
from agent.wire import Holder, Owner
from gputally.base.yaml_file import FileFault
from tests.agent.readers import nvml_alone
from tests.agent.sample_values import T0

GPUS = (Gpu("GPU-a", 0, "NVIDIA H200", 144_384), Gpu("GPU-b", 1, "NVIDIA H200", 144_384))
FILE = """
pods:
  - uid: u1
    namespace: vision
    name: train-0
    labels: {team: vision}
    owners: [{kind: ReplicaSet, name: rs, uid: r1}, {kind: Deployment, name: train}]
    queue_ref: kai:vision
    priority: 100
    requests: {nvidia.com/gpu: "1"}
    created: 2026-09-30T22:00:00Z
    started: 2026-10-01T02:00:00+01:00
    ended: 2026-10-01T02:00:00Z
    devices: [{gpu: 0, container: main}]
  - uid: u2
    namespace: nlp
    name: notebook
    workload: Job/night
    devices:
      - {gpu: GPU-b, mig: MIG-1, sharing: time-slicing, of: 4, replicas: 2}
      - {gpu: GPU-b, sharing: fraction, fraction: 0.1}
"""


def write(path: Path, text: str, age: int = 0) -> Path:
    path.write_text(text)
    os.utime(path, ns=(age, age))
    return path


def test_facts_and_holders(tmp_path: Path) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", FILE), "n1").read(T0 + 3_600_000, GPUS)
    first, second = pods.facts
    assert (first.uid, first.namespace, first.name, first.node) == ("u1", "vision", "train-0", "n1")
    assert first.labels == {"team": "vision"}
    assert first.owners[0] == Owner("ReplicaSet", "rs", "r1")
    assert (first.workload, second.workload) == ("Deployment/train", "Job/night")
    assert (first.queue_ref, first.priority, first.requests) == ("kai:vision", 100, {"nvidia.com/gpu": "1"})
    assert (first.created_ms, first.started_ms, first.ended_ms) == (T0 - 7_200_000, T0 + 3_600_000, T0 + 7_200_000)
    assert first.observed_ms == T0 + 3_600_000
    whole, replicas, fraction = pods.allocations
    assert (whole.gpu_uuid, whole.mig_uuid, whole.sharing) == ("GPU-a", "", None)
    assert whole.holder == Holder(kind="pod", uid="u1", namespace="vision", name="train-0", container="main")
    assert (replicas.gpu_uuid, replicas.mig_uuid) == ("GPU-b", "MIG-1")
    assert (replicas.sharing, replicas.sharing_replicas, replicas.replicas) == ("time-slicing", 4, 2)
    assert (fraction.sharing, fraction.fraction_ppm) == ("fraction", 100_000)


@pytest.mark.parametrize(
    ("at_ms", "held"), [(T0 + 3_599_999, 2), (T0 + 3_600_000, 3), (T0 + 7_199_999, 3), (T0 + 7_200_000, 2)]
)
def test_a_pod_holds_from_its_start_to_its_end(tmp_path: Path, at_ms: int, held: int) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", FILE), "n1").read(at_ms, GPUS)
    assert len(pods.allocations) == held
    assert len(pods.facts) == 2


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", ""), "n1").read(T0, GPUS)
    assert (pods.facts, pods.allocations, pods.fault) == ((), (), "")


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_last_good(tmp_path: Path) -> None:
    path = write(tmp_path / "pods.yaml", FILE)
    source = PodsFile(path, "n1")
    write(path, "pods: [{uid: u9, namespace: x, name: y}]\n", age=1)
    assert [f.uid for f in source.read(T0, GPUS).facts] == ["u9"]
    write(path, "pods: [{uid: u9, namespace: x}]\n", age=2)
    broken = source.read(T0, GPUS)
    assert [f.uid for f in broken.facts] == ["u9"]
    assert broken.fault == f"{path}:1: pods.0: Object missing required field `name`"
    path.unlink()
    assert "No such file" in source.read(T0, GPUS).fault
    write(path, FILE, age=3)
    mended = source.read(T0, GPUS)
    assert (len(mended.facts), mended.fault) == (2, "")


POD = "uid: u, namespace: n, name: p"
DEVICE = "pods:\n  - uid: u\n    namespace: n\n    name: p\n    devices:\n      - "


@pytest.mark.parametrize(("text", "fault"), [
    ("pods: 5\n", ":1: pods: Expected `array`, got `int`"),
    ("pod: []\n", ":1: pod: unknown key"),
    ("pods:\n  - uid: u\n    namespace: n\n    name: p\n    gpus: 1\n", ":5: pods.0.gpus: unknown key"),
    (f"pods:\n  - {{{POD}, started: 2026-10-01T00:00:00}}\n", ":2: started: the time has no offset from UTC"),
    (DEVICE + "{gpu: 0, sharing: fraction, fraction: 1.5}\n", ":6: fraction: must be more than 0 and at most 1,"),
    (DEVICE + "{gpu: 0, sharing: mps, of: 2, replicas: 3}\n", ":6: replicas: 3 is more than `of`, 2"),
    (DEVICE + "{gpu: 0, of: 2}\n", ":6: sharing: missing"),
    (f"pods:\n  - {{{POD}}}\n  - {{{POD}}}\n", ":3: pod u is already item 0"),
    ("pods:\n  - uid: u\n    uid: v\n", ":3: key 'uid' occurs twice"),
    ("pods: [\n", ":2: "),
    (f'pods:\n  - {{{POD},\n     labels: {{a: "\\uDC80"}}}}\n', ":3: "),
    (f'pods:\n  - {{{POD},\n     labels: {{"\\uDC80": a}}}}\n', ":3: "),
])  # fmt: skip
def test_faults_are_told_with_their_line(tmp_path: Path, text: str, fault: str) -> None:
    path = write(tmp_path / "pods.yaml", text)
    with pytest.raises(FileFault) as caught:
        PodsFile(path, "n1")
    assert str(caught.value).startswith(f"{path}{fault}")


def test_a_missing_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match="No such file"):
        PodsFile(tmp_path / "none.yaml", "n1")


MIG_GPUS = [make_gpu("GPU-0", 0, H100), make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])]


def test_jobs_hold_gpus_and_instances(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n\n4712\n4711\n")
    (tmp_path / "1.2").write_text("99_3\n")
    (tmp_path / "1.1").write_text("")
    (tmp_path / "README").write_text("not a device\n")
    found = HpcJobs(tmp_path).read(T0, MIG_GPUS)
    assert found.fault == ""
    assert not isinstance(found.allocations, Unavailable)
    assert [(a.gpu_uuid, a.mig_uuid, a.holder.kind, a.holder.uid, a.sharing) for a in found.allocations] == [
        ("GPU-0", "", "slurm", "4711", "processes"),
        ("GPU-0", "", "slurm", "4712", "processes"),
        ("GPU-1", MIG_GPUS[1].mig[1].uuid, "slurm", "99_3", None),
    ]


def test_a_file_that_makes_no_sense_is_named_and_leaves_its_gpu_unknown(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n")
    (tmp_path / "1.9").write_text("1\n")
    (tmp_path / "7").write_text("1\n")
    (tmp_path / "3").mkdir()
    (tmp_path / "1.1").write_bytes(b"1\n" * MAX_FILE_BYTES)
    (tmp_path / "1.2").write_text("4711\nrm -rf /\n")
    found = HpcJobs(tmp_path).read(T0, MIG_GPUS)
    assert not isinstance(found.allocations, Unavailable)
    assert [a.holder.uid for a in found.allocations] == ["4711"]
    faults = dict(fault.removeprefix(f"{tmp_path}/").split(": ", 1) for fault in found.fault.split("; "))
    assert faults == {
        "1.1": f"the file is larger than {MAX_FILE_BYTES} bytes",
        "1.2": "line 2: 'rm -rf /' is not a job id",
        "1.9": "this GPU has no such GPU instance",
        "3": "Is a directory",
        "7": "this node has no such GPU",
    }
    assert found.unknown == {"GPU-1": f"{tmp_path}/1.1: the file is larger than {MAX_FILE_BYTES} bytes"}
    assert found.unresolved == ("1.9",), "a new instance is looked for"


def test_without_the_folder_the_jobs_of_no_gpu_are_known(tmp_path: Path) -> None:
    found = HpcJobs(tmp_path / "none").read(T0, MIG_GPUS)
    assert found.fault == f"{tmp_path}/none: No such file or directory"
    assert found.unknown == {"GPU-0": found.fault, "GPU-1": found.fault}


def test_what_cannot_be_read_keeps_the_jobs_that_were_read_last(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "0").write_text("4711\n")
    (folder / "1.2").write_text("99_3\n")
    jobs = HpcJobs(folder)
    before = jobs.read(T0, MIG_GPUS)
    assert before.unknown == {}
    (folder / "0").write_text("?\n")
    (folder / "1.2").unlink()
    broken = jobs.read(T0 + 1_000, MIG_GPUS)
    assert not isinstance(before.allocations, Unavailable)
    assert broken.allocations == before.allocations[:1], "a file that is gone is a job that ended"
    assert broken.unknown == {"GPU-0": f"{folder}/0: line 1: '?' is not a job id"}
    folder.rename(tmp_path / "away")
    assert jobs.read(T0 + 2_000, MIG_GPUS).allocations == before.allocations[:1]
    (tmp_path / "away" / "0").write_text("")
    (tmp_path / "away").rename(folder)
    after = jobs.read(T0 + 3_000, MIG_GPUS)
    assert (after.allocations, after.unknown, after.fault) == ((), {}, "")


def test_the_gpus_whose_files_are_too_many_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n")
    for number in range(MAX_FILES):
        (tmp_path / f"0.{number}").write_text("")
    (tmp_path / "1.2").write_text("99_3\n")
    found = HpcJobs(tmp_path).read(T0, MIG_GPUS)
    reason = f"not read: the folder has more than {MAX_FILES} files"
    assert found.unknown == {"GPU-0": f"{tmp_path}/0.999: {reason}", "GPU-1": f"{tmp_path}/1.2: {reason}"}
    for number in range(MAX_FILES):
        (tmp_path / f"0.{number}").unlink()
    assert HpcJobs(tmp_path).read(T0, MIG_GPUS).unknown == {}


def test_the_time_of_a_job_whose_file_cannot_be_read_is_not_booked_as_unallocated(
    fake_nvml: Any, tmp_path: Path
) -> None:
    """GPU a has a job from the start; GPU b gets one while its file cannot be read."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "0").write_text("7\n")
    facts = ("mem 1048576000 0", "util 50 0", "power 1 1")
    fake_nvml.show("gpu GPU-a NVIDIA_H200", *facts, "gpu GPU-b NVIDIA_H200", *facts)
    source = NodeSource(nvml_alone(Gpus(Driver())), None, HpcJobs(folder))
    meter = Meter(60_000, ZoneInfo("UTC"), boot_id="boot")
    closed: list[ClosedSet] = []
    for second in range(61):
        if second == 20:
            (folder / "0").write_text("?\n")
            (folder / "1").mkdir()
        if second == 40:
            (folder / "0").write_text("7\n")
            (folder / "1").rmdir()
            (folder / "1").write_text("8\n")
        closed += meter.observe(source.snapshot(T0 + second * 1_000))
    source.close()
    rows = [row for each in closed for row in each.rows]
    assert [
        (row.gpu_uuid, row.holder.uid if row.holder else "", row.start_ms - T0, row.end_ms - T0) for row in rows
    ] == [("GPU-b", "", 0, 20_000), ("GPU-a", "7", 0, 60_000), ("GPU-b", "8", 40_000, 60_000)]
    unknown = [gap for gap in rows[1].gaps if gap.reason == f"{folder}/0: line 1: '?' is not a job id"]
    assert [(gap.start_ms - T0, gap.end_ms - T0) for gap in unknown] == [(20_000, 40_000)]


def test_beside_a_held_instance_the_others_are_unmetered_while_their_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "1.1").write_text("7\n")
    jobs, meter = HpcJobs(tmp_path), Meter(60_000, ZoneInfo("UTC"), boot_id="boot")
    closed: list[ClosedSet] = []
    for second in range(61):
        if second == 20:
            (tmp_path / "1.2").mkdir()
        if second == 40:
            (tmp_path / "1.2").rmdir()
        at_ms = T0 + second * 1_000
        found = jobs.read(at_ms, MIG_GPUS)
        reading = DeviceReading(MIG_GPUS[1], busy_us=0, energy_uj=0)
        snapshot = NodeSnapshot(at_ms, (reading,), found.allocations, unknown_holders=tuple(found.unknown.items()))
        closed += meter.observe(snapshot)
    rows = [row for each in closed for row in each.rows]
    held = [(row.start_ms - T0, row.end_ms - T0, row.method) for row in rows if row.holder]
    assert [span[:2] for span in held] == [(0, 20_000), (20_000, 40_000), (40_000, 60_000)]
    assert held[1][2] == "carried"
    assert {(row.start_ms - T0, row.end_ms - T0) for row in rows if not row.holder} == {(0, 20_000), (40_000, 60_000)}


@given(st.text(max_size=300))
def test_no_mapping_file_is_too_strange(text: str) -> None:
    try:
        jobs = parse_jobs(text)
    except ValueError:
        return
    assert all(job == job.strip() and job for job in jobs)


@pytest.mark.parametrize("step", ["0", "batch"])
def test_the_processes_of_a_mapped_job_are_that_job(
    fake_nvml: Any, proc: Callable[..., Path], tmp_path: Path, step: str
) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "0").write_text("7\n8\n")
    root = proc(10, cgroup=f"0::/system.slice/slurmstepd.scope/job_7/step_{step}/user/task_0")
    fake_nvml.show("gpu GPU-a NVIDIA_H200", "mem 1048576000 0", "util 50 0", "power 1 1", "proc 10 1048576")
    source = NodeSource(nvml_alone(Gpus(Driver())), ProcessTable(root), HpcJobs(folder))
    snapshot = source.snapshot(T0)
    assert not isinstance(snapshot.allocations, Unavailable)
    assert [a.holder.uid for a in snapshot.allocations] == ["7", "8"]
    assert snapshot.devices[0].holders[0].holder == snapshot.allocations[0].holder
    source.close()
