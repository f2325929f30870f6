"""One turn of the agent: 8 GPUs x 12 processes read, attributed and metered, and what its process weighs.

The devices are simulated. Beside it: a turn's length (the agent samples once a second), and a bare Python.
"""

from __future__ import annotations

import subprocess
import sys
from zoneinfo import ZoneInfo

from agent.meter import Meter
from agent.model import Allocation
from agent.simulated import SimulatedNode, SimulatedSource
from agent.simulated_gpu import H100, make_gpu
from agent.wire import Holder
from tests.bench.figure import Figure, median_seconds

GPUS, PROCESSES = 8, 12
TURN_MS = 1000


def node() -> SimulatedNode:
    gpus = [make_gpu(f"GPU-bench-{i}", i, H100) for i in range(GPUS)]
    simulated = SimulatedNode("bench", gpus, start_ms=0)
    for gpu in gpus:
        for i in range(PROCESSES):
            holder = Holder(kind="pod", uid=f"{gpu.uuid}-{i}", namespace="bench", name=f"pod-{i}", container="main")
            claim = Allocation(gpu.uuid, holder, sharing="time-slicing", sharing_replicas=PROCESSES)
            simulated.place(0, claim, utilisation_ppm=50_000, memory_mib=1024)
    return simulated


def resident_mib(code: str) -> float:
    """Resident memory of a Python that ran `code`."""
    report = "; print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')][0])"
    answer = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return int(answer.stdout) / 1024


def measure() -> list[Figure]:
    source = SimulatedSource(node())
    meter = Meter(60_000, ZoneInfo("UTC"), boot_id="bench")
    now = 0

    def turn() -> None:
        nonlocal now
        now += TURN_MS
        meter.observe(source.snapshot(now))

    turn_ms = median_seconds(turn, runs=300) * 1000
    bare = resident_mib("pass")
    agent = resident_mib("import agent.__main__, agent.exposition, agent.metrics, agent.nvml, agent.node, pynvml")
    return [
        Figure(f"turn, {GPUS} GPUs x {PROCESSES} processes", turn_ms, "ms", "the turn's length", float(TURN_MS)),
        Figure("resident memory, all modules loaded", agent, "MiB", "bare Python", bare),
    ]
