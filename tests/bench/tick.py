"""The agent's own cost: one reading a second of a full node, a scrape, a start, and its memory after ten hours.

The real binding reads the fake NVML library; times are CPU time without the fake's simulation. Each figure has its goal
beside it. Needs a C compiler.

The readings run in a process of their own, with attribution, meter, spool and metrics. Its memory is read after each
simulated hour: `python -m tests.bench.tick LIBRARY FOLDER GPUS PROCESSES MIG PODS HOURS` prints one JSON object. Within
an hour a reading is five seconds apart, the longest interval that the settings allow."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent.core.settings import AgentSettings
from agent.holders.protocol import Holdings
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from tests.agent.gpu_readers.nvml.rig import Rig
from tests.agent.sample_values import GIB, T0
from tests.bench.figure import Figure
from tests.bench.service import Spent, child
from tests.fakes.nvml.library import build, loaded

HOURS = 10
TICKS, BATCH, SCRAPES = 200, 20, 50
READ_EVERY_S = 5
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
            return dict(child(__name__, library, spool, gpus, processes, mig, pods, hours, environment=environ))

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
    """Return the CPU milliseconds of `gputally agent run` until it meters and serves, with its end; of the second of
    two starts."""
    state = root / "gpus"
    state.write_text(GPU)
    environ = {**environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_STATE": str(state)}
    command = [
        sys.executable,
        "-m",
        "agent",
        "run",
        "--holders=processes",
        "--port",
        "0",
        "--spool",
        str(root / "spool"),
    ]
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


class Node:
    """A full node and its agent on a virtual clock."""

    def __init__(self, rig: Rig, folder: Path, pods: int) -> None:
        self.rig = rig
        facts = tuple(
            PodFacts(seq=0, uid=rig.uid(pod), namespace="bench", name=f"pod-{pod}", node="n", observed_ms=T0)
            for pod in range(pods)
        )
        claims = tuple(rig.pods.claims.values())
        rig.pods.read = lambda at_ms, gpus: Holdings(facts=facts, allocations=claims)  # type: ignore[method-assign]
        self.clock = VirtualClock(T0)
        outbox = Outbox(folder / "outbox.sqlite", self.clock)
        uploader = Uploader(outbox, "", "bench", "n", "boot", None, self.clock)
        self.metrics = AgentMetrics("n", "0")
        self.agent = Agent(AgentSettings(node="n"), rig.source, outbox, uploader, self.clock, metrics=self.metrics)

    def tick(self, seconds: int = 1) -> float:
        """Return the CPU seconds of one turn."""
        self.rig.wait(seconds * 1_000)
        self.clock.advance(seconds * 1_000)
        began = time.process_time()
        self.agent.sample()
        return time.process_time() - began


def main(library: str, folder: str, *numbers: str) -> None:
    gpus, processes, mig, pods, hours = (int(number) for number in numbers)
    with loaded(Path(library), Path(folder)) as fake:
        del os.environ["FAKE_NVML_STATE"]  # the fake would look at that file before every call
        cut = [f"mig MIG-{{}}-{gi} {gi} 0 1 1g.18gb {17 * GIB} 0" for gi in range(1, mig + 1)]
        rig = Rig(fake, Path(folder) / "proc", gpus)
        for gpu in range(gpus):
            if mig:
                fake.tell(f"on {gpu}", "migmode 1", *[line.format(gpu) for line in cut])
            for number in range(mig or processes):
                pod = gpu * (mig or processes) + number
                if mig:
                    rig.start(pod, gpu, 50_000, mig=f"MIG-{gpu}-{number + 1}", gi=number + 1)
                else:
                    rig.start(pod, gpu, 50_000, of=processes)
        node = Node(rig, Path(folder), pods)
        for _ in range(10):
            node.tick()
        costs = sorted(sum(node.tick() for _ in range(BATCH)) / BATCH for _ in range(TICKS // BATCH))
        began = time.process_time()
        for _ in range(SCRAPES):
            series = node.metrics.exposition().count(b"\n")
        scrape_s = (time.process_time() - began) / SCRAPES
        memory = [Spent.me().resident_mib()]
        for _ in range(hours):
            for _ in range(3_600 // READ_EVERY_S):
                node.tick(READ_EVERY_S)
            memory.append(Spent.me().resident_mib())
    answer: dict[str, object] = {"tick_ms": costs[len(costs) // 2] * 1_000, "scrape_ms": scrape_s * 1_000}
    answer |= {"series": series, "memory_mib": memory}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
