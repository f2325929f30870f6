"""An agent's work in a process of its own: the real binding on the fake NVML, attribution, meter, spool, metrics.

`python -m tests.bench.agent_load LIBRARY FOLDER GPUS PROCESSES MIG PODS HOURS` prints one JSON object. Times are CPU
time of the whole process, the fake driver's own work left out; the simulated hours are read every five
seconds, the longest the settings allow, and the agent's memory is looked at after each of them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from agent.core.settings import Settings
from agent.holders.pod_and_job_files import Pods
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from tests.agent.nvml_rig import Rig
from tests.agent.values import GIB, T0
from tests.fakes.nvml.library import loaded

TICKS, BATCH, SCRAPES = 200, 20, 50
READ_EVERY_S = 5


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


class Node:
    """A full node and its agent on a virtual clock."""

    def __init__(self, rig: Rig, folder: Path, pods: int) -> None:
        self.rig = rig
        facts = tuple(
            PodFacts(seq=0, uid=rig.uid(pod), namespace="bench", name=f"pod-{pod}", node="n", observed_ms=T0)
            for pod in range(pods)
        )
        claims = tuple(rig.pods.claims.values())
        rig.pods.read = lambda at_ms, gpus: Pods(facts=facts, allocations=claims)  # type: ignore[method-assign]
        self.clock = VirtualClock(T0)
        outbox = Outbox(folder / "outbox.sqlite", self.clock)
        uploader = Uploader(outbox, "", "bench", "n", "boot", None, self.clock)
        self.metrics = AgentMetrics("n", "0")
        self.agent = Agent(Settings(node="n"), rig.source, outbox, uploader, self.clock, metrics=self.metrics)

    def tick(self, seconds: int = 1) -> float:
        """CPU seconds of one turn."""
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
        memory = [resident_mib()]
        for _ in range(hours):
            for _ in range(3_600 // READ_EVERY_S):
                node.tick(READ_EVERY_S)
            memory.append(resident_mib())
    answer: dict[str, object] = {"tick_ms": costs[len(costs) // 2] * 1_000, "scrape_ms": scrape_s * 1_000}
    answer |= {"series": series, "memory_mib": memory}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
