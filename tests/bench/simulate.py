"""Six Philly weeks under one policy: 68,810 jobs, 11 queues, 1,432 GPUs; seconds of CPU, without the measures.

Beside it: the goal of 2 s a policy.
"""

from __future__ import annotations

import time

from fairshare.explain import tracefile
from fairshare.simulator import policies
from fairshare.simulator.policies import Setup
from fairshare.simulator.workload import columns
from tests.bench.figure import Figure
from tests.shelf import shared

DAYS, START_S, GPUS = 42, 3_544_380, 1_432


def measure() -> list[Figure]:
    jobs, _ = tracefile.load_with_faults(shared("traces/philly_jobs_dev.parquet"), 0, team="vc")
    share = tracefile.shares(shared("traces/philly_vc_quota.csv"), team="vc")
    names = sorted(share)
    length = DAYS * 86_400
    workload = columns(jobs, names).between(START_S, START_S + length)
    whole = sum(share.values())
    setup = Setup(GPUS, [share[name] / whole for name in names])
    figures = []
    for name in ("static", "kai-1", "deficit"):
        begin = time.process_time()
        policies.run(name, workload, setup, length)
        figures.append(Figure(f"Philly, six weeks, {name}", time.process_time() - begin, "s CPU", "goal", 2.0))
    return figures
