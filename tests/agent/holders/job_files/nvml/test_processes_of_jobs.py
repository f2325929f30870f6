"""Jobs of files beside the processes that the driver lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from agent.core.readings import Unavailable
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.job_files import HpcJobs
from agent.holders.process_cgroups import ProcessTable
from agent.metering.meter import ClosedSet, Meter
from agent.node_reader import NodeSource
from tests.agent.readers import nvml_alone
from tests.agent.sample_values import T0


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
