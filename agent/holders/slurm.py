"""The control groups of Slurm's jobs. Source: Slurm cgroup/v1 and cgroup/v2 plugins: .../job_123/step_0/...; batch,
extern and interactive are steps too."""

from __future__ import annotations

from agent.holders.protocol import HolderPlugin, JobCgroups

HOLDERS = HolderPlugin(
    name="slurm",
    reaches="nothing of its own: it reads the control groups of processes on a GPU",
    page="docs/attribution.md",
    jobs=JobCgroups(("slurm*/uid_*", "*slurmstepd.scope"), job="job_", step="step_", cancel="scancel"),
)
