"""The mapping folder of a batch system: who holds which GPU and instance, and what cannot be understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.driver.gpus import Gpus
from agent.hpcmap import MAX_FILE_BYTES, HpcJobs, parse_jobs
from agent.model import Unavailable
from agent.node import NodeSource
from agent.nvml import Driver
from agent.processes import ProcessTable
from agent.simulation.simulated_gpu import A100, H100, make_gpu

T0 = 1_790_812_800_000
GPUS = [make_gpu("GPU-0", 0, H100), make_gpu("GPU-1", 1, A100, ["3g.40gb", "1g.10gb"])]


def test_jobs_hold_gpus_and_instances(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n\n4712\n4711\n")
    (tmp_path / "1.2").write_text("99_3\n")
    (tmp_path / "1.1").write_text("")
    (tmp_path / "README").write_text("not a device\n")
    found = HpcJobs(tmp_path).read(T0, GPUS)
    assert found.fault == ""
    assert [(a.gpu_uuid, a.mig_uuid, a.holder.kind, a.holder.uid, a.sharing) for a in found.allocations] == [
        ("GPU-0", "", "slurm", "4711", "processes"),
        ("GPU-0", "", "slurm", "4712", "processes"),
        ("GPU-1", GPUS[1].mig[1].uuid, "slurm", "99_3", None),
    ]


def test_a_file_that_makes_no_sense_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n")
    (tmp_path / "1.9").write_text("1\n")
    (tmp_path / "7").write_text("1\n")
    (tmp_path / "3").mkdir()
    (tmp_path / "1.1").write_bytes(b"1\n" * MAX_FILE_BYTES)
    (tmp_path / "1.2").write_text("4711\nrm -rf /\n")
    found = HpcJobs(tmp_path).read(T0, GPUS)
    assert [a.holder.uid for a in found.allocations] == ["4711"]
    faults = dict(fault.removeprefix(f"{tmp_path}/").split(": ", 1) for fault in found.fault.split("; "))
    assert faults == {
        "1.1": f"more than {MAX_FILE_BYTES} bytes",
        "1.2": "line 2: not a job id: 'rm -rf /'",
        "1.9": "no such GPU instance here",
        "3": "Is a directory",
        "7": "no such GPU here",
    }


def test_no_folder_is_a_fault(tmp_path: Path) -> None:
    assert HpcJobs(tmp_path / "none").read(T0, GPUS).fault == f"{tmp_path}/none: No such file or directory"


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
    source = NodeSource(Gpus(Driver()), ProcessTable(root), HpcJobs(folder))
    snapshot = source.snapshot(T0)
    assert not isinstance(snapshot.allocations, Unavailable)
    assert [a.holder.uid for a in snapshot.allocations] == ["7", "8"]
    assert snapshot.devices[0].holders[0].holder == snapshot.allocations[0].holder
    source.close()
