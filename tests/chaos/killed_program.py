"""A real program that is killed with SIGKILL and started again, and the agents of simulated nodes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.accountant_process import fork_program
from tests.deadlines import patience_s

A_GPU = {"model": "A100"}
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "whole": {
        "gpus": [A_GPU, A_GPU],
        "events": [
            {"after_ms": 0, "place": {"gpu": 0, "pod": "train", "namespace": "vision", "utilisation_ppm": 900_000}}
        ],
    },
    "sliced": {
        "gpus": [A_GPU],
        "events": [
            {"after_ms": 0, "place": {"gpu": 0, "pod": f"note-{i}", "namespace": "speech", "of_replicas": 4}}
            for i in range(4)
        ],
    },
    "mig": {
        "gpus": [{**A_GPU, "mig": ["3g.40gb", "2g.20gb", "2g.20gb"]}],
        "events": [
            {
                "after_ms": 0,
                "place": {"gpu": 0, "mig": i, "pod": f"serve-{i}", "namespace": "nlp", "utilisation_ppm": 300_000},
            }
            for i in range(3)
        ],
    },
}


@dataclass
class Program:
    """A process that can be killed and started again with the same command."""

    name: str
    command: Sequence[str]
    folder: Path
    zygote: subprocess.Popen[str]
    process: subprocess.Popen[bytes] | None = None
    """None for a forked program, whose exit status only its parent receives."""
    kills: int = 0
    log: Path = field(init=False)
    _handle: int | None = None

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"

    def start(self, *, fork: bool) -> None:
        """Start the process. fork: from a process that has imported everything, which takes a tenth of the time."""
        if fork:
            self.process, pid = None, fork_program(self.zygote, self.command, self.log)
        else:
            with self.log.open("ab") as output:
                command = [sys.executable, "-m", *self.command]
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder)
            pid = self.process.pid
        self._handle = os.pidfd_open(pid)

    def live_for(self, seconds: float) -> None:
        """Let the process run; it must not end by itself."""
        if select.select([self._handle], [], [], seconds)[0]:
            pytest.fail(f"{self.name} ended by itself:\n{self.log.read_text(errors='replace')[-3000:]}")

    def ended(self) -> bool:
        """Whether the process has ended by itself."""
        return bool(select.select([self._handle], [], [], 0)[0])

    def kill(self) -> None:
        """Kill the process if it runs, and wait for its end."""
        if self._handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        select.select([self._handle], [], [])
        if self.process is not None:
            self.process.wait()
        os.close(self._handle)
        self._handle = None
        self.kills += 1

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        assert self.process is not None, "a fork"
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s())


def agent_of(folder: Path, node: str, url: str, zygote: subprocess.Popen[str], **settings: Any) -> Program:
    """Return the agent of a simulated node of SCENARIOS, which is to be started."""
    scenario, config = folder / f"{node}.yaml", folder / f"{node}-agent.yaml"
    scenario.write_text(yaml.safe_dump({"start_ms": time.time_ns() // 1_000_000, **SCENARIOS[node]}))
    given = {
        "simulated": str(scenario), "url": url, "node": node, "spool": str(folder / f"spool-{node}"),
        "interval_s": 1, "sample_s": 0.25, "ship_s": 0.2, "port": 0, **settings,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(given))
    return Program(node, ["agent", "run", "--config", str(config)], folder, zygote)
