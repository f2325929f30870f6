"""An agent's process on a node: kubelet, API server, accountant and the driver are fakes behind real interfaces."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from agent.wire import UsageInterval
from tests.agent.holders.kubelet.pods import UID, pod_object
from tests.agent.scripted_accountant import ScriptedAccountant
from tests.deadlines import Deadline, patience_s
from tests.fakes.apiserver.server import TOKEN, FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet

# --- on a Kubernetes node: asked to end, killed, or with the whole node -----------------------------
# kubelet, API server, accountant and the driver's library are fakes behind their real interfaces.


GRACE_S = 5
SLEW_MS = 5


class World:
    """A node with one pod on its only GPU, and an agent."""

    def __init__(self, kubelet: FakeKubelet, library: Path, folder: Path) -> None:
        self.accountant, self.api = ScriptedAccountant(), FakeApiServer()
        self.folder = folder
        self.boot_id = folder / "proc" / "sys" / "kernel" / "random" / "boot_id"
        self.boot_id.parent.mkdir(parents=True)
        self.boot_id.write_text("first\n")
        (folder / "token").write_text(TOKEN)
        (folder / "gpus").write_text("gpu GPU-a NVIDIA_H200\nmem 150754820096 4294967296\nutil 50 0\npower 90000 5\n")
        kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-a"]}})
        self.api.put(pod_object())
        self._environ = {
            **os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_STATE": str(folder / "gpus"),
            "PYTHONFAULTHANDLER": "1",
        }  # fmt: skip
        settings = {
            "node": "node-1", "kubelet-socket": kubelet.path, "api-url": self.api.url,
            "api-token-file": folder / "token", "url": self.accountant.url, "proc": folder / "proc",
            "spool": folder / "spool", "port": 0, "interval": 1, "sample": 0.1, "ship": 0.1,
            "grace": GRACE_S, "listen": "127.0.0.1",
        }  # fmt: skip
        self._command = [sys.executable, "-m", "agent", "run"]
        self._command += [f"--{name}={value}" for name, value in settings.items()]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the accountant has more rows of the pod than before."""
        had = len(self.held())
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stderr=log)
        self.until(lambda: len(self.held()) > had + 1)

    def until(self, met: Callable[[], bool]) -> None:
        assert self._process is not None
        deadline = Deadline()
        while not met():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
                pytest.fail(f"it ended by itself: {(self.folder / 'log').read_text()[-3000:]}")
            assert not deadline.passed, (self.folder / "log").read_text()[-3000:]

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(patience_s())
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # it says what each thread is doing
            self._process.wait(patience_s())
            pytest.fail(f"it does not end:\n{(self.folder / 'log').read_text()[-9000:]}")

    def held(self) -> list[UsageInterval]:
        """Return the pod's delivered rows in order of time."""
        rows = {row.seq: row for batch in list(self.accountant.batches) for row in batch.intervals}
        mine = [row for row in rows.values() if row.holder is not None and row.holder.uid == UID]
        return sorted(mine, key=lambda row: row.start_ms)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.accountant.close()
        self.api.close()


def holes_ms(rows: list[UsageInterval]) -> list[int]:
    """Return the gaps between rows in milliseconds; a negative gap is an overlap."""
    return [later.start_ms - row.end_ms for row, later in pairwise(rows) if later.start_ms != row.end_ms]


@pytest.fixture
def world(kubelet: FakeKubelet, fake_nvml_library: Path, tmp_path: Path) -> Iterator[World]:
    found = World(kubelet, fake_nvml_library, tmp_path)
    yield found
    found.close()


def test_asked_to_end_it_delivers_everything_up_to_that_instant_within_the_grace_period(world: World) -> None:
    world.start()
    asked_ms, began = time.time_ns() // 1_000_000, time.monotonic()
    assert world.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < patience_s(GRACE_S + 2)
    rows = world.held()
    # Two clocks: the agent's timeline follows the wall clock, and both are cut to milliseconds.
    assert rows[-1].end_ms >= asked_ms - SLEW_MS
    assert holes_ms(rows) == []
    assert sum(row.allocated_us for row in rows) == (rows[-1].end_ms - rows[0].start_ms) * 1_000
    with sqlite3.connect(world.folder / "spool" / "outbox.sqlite") as spool:
        (newest,) = spool.execute("SELECT max(seq) FROM record").fetchone()
    spool.close()
    assert newest == max(r.seq for batch in world.accountant.batches for r in (*batch.intervals, *batch.facts))


def test_killed_it_loses_no_time_of_a_pod_that_holds_on(world: World) -> None:
    world.start()
    world.end(signal.SIGKILL)
    world.start()
    assert world.end(signal.SIGTERM) == 0
    rows = world.held()
    assert holes_ms(rows) == []
    assert any(row.method == "carried" for row in rows)
    assert sum(row.allocated_us for row in rows) == (rows[-1].end_ms - rows[0].start_ms) * 1_000


def test_over_a_boot_of_the_node_nothing_is_carried(world: World) -> None:
    """The pod's containers ended with the node, so no pod held the GPU during the reboot."""
    world.start()
    world.end(signal.SIGKILL)
    world.boot_id.write_text("second\n")
    world.start()
    assert world.end(signal.SIGTERM) == 0
    rows = world.held()
    (hole,) = holes_ms(rows)
    assert hole > 0
    assert all(row.method != "carried" for row in rows)
