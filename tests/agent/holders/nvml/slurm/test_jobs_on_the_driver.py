"""Jobs beside other processes, on the driver's real binding."""

from __future__ import annotations

from tests.agent.holders.nvml.shown_node import GPU, Proc, Shown, holders


def test_a_job_shares_a_gpu_with_a_process_and_each_has_its_own_busy_time(source: Shown, proc: Proc) -> None:
    proc(10, comm="a", start=1)
    proc(11, cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0")
    source.look(0, *GPU, "proc 10 1", "proc 11 1")
    snapshot = source.look(2_000, *GPU, "proc 10 1", "proc 11 1", "pu 2000000 10 30", "pu 2000000 11 20")
    assert holders(snapshot) == [("process", "10:1", "processes"), ("slurm", "7", "processes")]
    assert {r.holder.uid: r.busy_us for r in snapshot.devices[0].holders} == {"10:1": 600_000, "7": 400_000}
