"""Processes of Slurm's jobs, by their control groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.holders.process_cgroups import ProcessTable, holder_in
from agent.wire import Holder
from tests.agent.sample_values import CID, UID

Proc = Callable[..., Path]


@pytest.mark.parametrize(("cgroup", "uid", "step"), [
    ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3", "4711", "0"),
    ("0::/system.slice/node1_slurmstepd.scope/job_4711/step_batch/user/task_0", "4711", "batch"),
    ("11:memory:/slurm/uid_1000/job_4711/step_extern/task_0\n4:devices:/slurm/uid_1000/job_4711", "4711", "extern"),
    ("9:freezer:/slurm_node1/uid_1000/job_12", "12", ""),
    (f"0::/system.slice/slurmstepd.scope/job_5/step_0/user/libpod-{CID}.scope", "5", "0"),
])  # fmt: skip
def test_a_slurm_step(cgroup: str, uid: str, step: str) -> None:
    assert holder_in(cgroup) == Holder(kind="slurm", uid=uid, name=f"job {uid}", container=step)


def test_a_job_is_one_holder_whoever_runs_in_it(proc: Proc) -> None:
    proc(1, cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", uid=4242)
    root = proc(2, cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1", uid=0)
    table = ProcessTable(root)
    assert table.holder(1) == Holder(kind="slurm", uid="7", namespace="4242", name="job 7", container="0")
    assert table.holder(2) == table.holder(1)


@pytest.mark.parametrize(
    ("cgroup", "kind"),
    [
        (f"0::/kubepods/pod{UID}/{CID}/system.slice/slurmstepd.scope/job_5/step_0", "pod"),
        ("0::/user.slice/user-1000.slice/user@1000.service/slurm/uid_0/job_5", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/job_5/step_0", None),
    ],
)
def test_nobody_becomes_another_job_by_naming_a_folder_after_it(cgroup: str, kind: str | None) -> None:
    holder = holder_in(cgroup)
    assert (holder.kind if holder else None) == kind
