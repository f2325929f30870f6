"""The agent's own cost: one reading a second of a full node, a scrape, a start, and its memory after ten hours.

The real binding reads the fake NVML library; times are CPU time, the fake's simulation left out. Beside each
figure stands its goal. Needs a C compiler."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.figure import Figure
from tests.fakes.nvml.library import build

HOURS = 10
GOAL_TICK_MS, GOAL_SCRAPE_MS, GOAL_MEMORY_MIB, GOAL_START_MS = 5.0, 2.0, 48.0, 500.0
GPU = "gpu GPU-a NVIDIA_H200\nmem 150754820096 4294967296\nutil 0 0\npower 90000 5\nproc 1 1048576\n"


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        library = build(root)
        # As in the image: modules are compiled once, and not again at every start.
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(root / "cache"), "PYTHONDONTWRITEBYTECODE": ""}

        def load(gpus: int, processes: int, mig: int, pods: int, hours: int) -> dict[str, Any]:
            spool = tempfile.mkdtemp(dir=root)
            numbers = [str(number) for number in (gpus, processes, mig, pods, hours)]
            command = [sys.executable, "-m", "tests.bench.agent_load", str(library), spool, *numbers]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            return dict(json.loads(done.stdout))

        load(1, 1, 0, 1, 0)  # compiles
        full = load(8, 12, 0, 110, HOURS)
        mig = load(16, 0, 7, 112, 0)
        start_ms = start(library, root, environ)
    memory = full["memory_mib"]
    goal = "goal"
    return [
        Figure("reading of 8 GPUs x 12 processes, 110 pods", full["tick_ms"], "ms", goal, GOAL_TICK_MS),
        Figure("reading of 16 GPUs x 7 MIG instances", mig["tick_ms"], "ms", goal, GOAL_TICK_MS),
        Figure(f"scrape of {full['series']} lines", full["scrape_ms"], "ms", goal, GOAL_SCRAPE_MS),
        Figure(f"memory after {HOURS} simulated hours", memory[-1], "MiB", goal, GOAL_MEMORY_MIB),
        Figure("the same after the first hour", memory[1], "MiB", goal, GOAL_MEMORY_MIB),
        Figure("start to the first reading", start_ms, "ms", goal, GOAL_START_MS),
    ]


def start(library: Path, root: Path, environ: dict[str, str]) -> float:
    """CPU milliseconds of `gputally agent run` until it meters and serves, with its end; the second of two starts."""
    state = root / "gpus"
    state.write_text(GPU)
    environ = {**environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_STATE": str(state)}
    command = [sys.executable, "-m", "agent", "run", "--standalone", "--port", "0", "--spool", str(root / "spool")]
    spent = 0.0
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as agent:
            assert agent.stderr is not None
            if not any("NVML answers" in line for line in agent.stderr):
                raise RuntimeError("the agent did not start")
            agent.terminate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent * 1_000
