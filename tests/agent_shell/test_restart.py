"""A driver exchanged under a running agent: the process replaces itself, once, and goes on where it was."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent.devices.driver_lifecycle import RESTARTED, was_restarted

GPU = "gpu GPU-a NVIDIA_H200\nmem 150754820096 4294967296\nutil 0 0\npower 90000 5\nproc 1 1048576\n"


def test_a_process_asks_once_whether_it_took_anothers_place() -> None:
    environ = {RESTARTED: "1"}
    assert was_restarted(environ)
    assert not was_restarted(environ)


def test_it_replaces_itself_once_and_leaves_the_rest_to_its_supervisor(fake_nvml_library: Path, tmp_path: Path) -> None:
    state = tmp_path / "gpus"
    state.write_text(f"fail * 18 200\n{GPU}")  # of every function, after some readings
    env = {"LD_LIBRARY_PATH": str(fake_nvml_library.parent), "FAKE_NVML_STATE": str(state)}
    options = ["--standalone", "--sample", "0.02", "--interval", "1", "--port", "0", "--listen", "127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "run", "--spool", str(tmp_path / "spool"), *options],
        env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    events: list[dict[str, Any]] = []
    said: list[str] = []
    for line in process.stderr:
        if line.startswith("{"):
            events.append(json.loads(line))
        else:
            said.append(line)
    assert process.wait(30) == 0
    process.stderr.close()
    assert [e["event"] for e in events].count("agent started") == 2
    assert said == ["gputally agent: the NVIDIA driver was replaced; the agent must be started again\n"] * 2
    with sqlite3.connect(tmp_path / "spool" / "outbox.sqlite") as db:
        assert db.execute("SELECT count(*) FROM record WHERE kind = 0").fetchone()[0] >= 1
    db.close()
