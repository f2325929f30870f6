"""The control groups of Slurm's jobs pass the suite of batch systems."""

from __future__ import annotations

from typing import ClassVar

from agent.holders import slurm
from gputally.testing.holders import JobsSuite


class TestSlurm(JobsSuite):
    plugin = slurm.HOLDERS
    groups: ClassVar = {
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n": ("7", "0"),
        "4:memory:/slurm/uid_1000/job_12/step_batch/task_0\n": ("12", "batch"),
        "9:freezer:/slurm_node1/uid_1000/job_12\n": ("12", ""),
    }
    strangers = ("0::/podcast.slice/job_7\n", "0::/system.slice/my.service/slurmstepd.scope/job_7/step_0\n")
