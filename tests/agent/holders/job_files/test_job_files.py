"""The folder of job files: what cannot be read leaves its GPU unknown."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from agent.core.readings import DeviceReading, NodeSnapshot, Unavailable
from agent.holders.job_files import MAX_FILE_BYTES, MAX_FILES, HpcJobs, parse_jobs
from agent.metering.meter import ClosedSet, Meter
from agent.simulation.simulated_node import A100, H100, make_gpu
from tests.agent.sample_values import T0

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
