"""The driver's reader with one that adds values of dcgm-exporter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agent.__main__ import main


def test_a_reader_that_needs_a_place_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--holders=processes", "--once", "--gpu-readers", "nvml,dcgm"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gputally agent: gpu_readers: ")
    assert "dcgm=PLACE" in said
    assert said.count("\n") == 1


def test_what_only_adds_values_is_not_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--holders=processes", "--once", "--gpu-readers", "dcgm=http://x:1/metrics"]) == 2
    assert "nvml" in capsys.readouterr().err


PROGRAM = """
import sys
from agent.gpu_readers.chosen import open_readers
from agent.gpu_readers.protocol import Surroundings
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock
clock = SystemClock()
open_readers("nvml,dcgm=http://localhost:1/metrics", Surroundings(clock, BackgroundTasks(clock))).close()
print([name for name in ("importlib.metadata", "gputally.base.plugins") if name in sys.modules])
"""


def test_an_agent_with_its_own_readers_does_not_look_for_plugins() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
