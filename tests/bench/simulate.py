"""Six weeks of the Philly trace under one policy: 68,810 jobs, 11 queues, 1,432 GPUs.

Alone: seconds of CPU time, without the measures. Side by side: wall seconds for each policy, with the measures, with as
many processes as cores, as `python -m tests.evaluation compare` runs them. The goal of both is 2 s for each
policy."""

from __future__ import annotations

import time

from fairshare.simulator import job_traces
from fairshare.simulator.simulation_model import workload_of
from tests.bench.figure import Figure
from tests.evaluation import policy_comparison, scheduling_policies
from tests.evaluation.policy_comparison import parallel_replays
from tests.evaluation.scheduling_policies import Setup
from tests.shared_files import shared

DAYS, START_S, GPUS = 42, 3_544_380, 1_432
SIDE_BY_SIDE = ("fifo", "kai-0.5", "kai-1", "kai-2", "kai-1-24h", "no-turns", "default")


def measure() -> list[Figure]:
    jobs, _ = job_traces.load_with_faults(shared("traces/philly_jobs_dev.parquet"), 0, team="vc")
    share = job_traces.shares(shared("traces/philly_vc_quota.csv"), team="vc")
    names = sorted(share)
    length = DAYS * 86_400
    workload = workload_of(jobs, names).between(START_S, START_S + length)
    whole = sum(share.values())
    setup = Setup(GPUS, [share[name] / whole for name in names])
    figures = []
    for name in ("static", "kai-1", "default"):
        begin = time.process_time()
        scheduling_policies.run(name, workload, setup, length)
        figures.append(Figure(f"Philly, six weeks, {name}", time.process_time() - begin, "s CPU", "goal", 2.0))
    begin = time.perf_counter()
    with parallel_replays(policy_comparison.TaskRunner(workload, setup.share)) as replays:
        policy_comparison.compare(SIDE_BY_SIDE, [policy_comparison.Window(0, length)], [(1.13, GPUS)], replays)
    wall = (time.perf_counter() - begin) / len(SIDE_BY_SIDE)
    figures.append(Figure(f"{len(SIDE_BY_SIDE)} policies side by side, each", wall, "s wall", "goal", 2.0))
    return figures
