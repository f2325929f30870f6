"""The pages' commands that need a GPU, on the simulated driver: each as a process, stopped by Ctrl-C if it would
continue.

The agent's own tests check the output; these check that the commands run as written and end with status 0."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import patience_s, until
from tests.docs.code_blocks import COMMANDS, PAGES, ROOT, Step, steps
from tests.fakes.compiled import compiled
from tests.fakes.cuda.library import build as build_cuda
from tests.fakes.nvml.library import build as build_nvml
from tests.real.programs import free_ports

pytestmark = pytest.mark.real
LOOKS_S, ENDS_S = 4.0, 40.0
"""Seconds for which a continuous command runs once it can be stopped, and the usual limit of one that ends itself."""
PORT = "9401"
METRICS = f"http://node:{PORT}/metrics"
GPU = "gpu GPU-11111111-2222-3333-4444-555555555555 NVIDIA_H200\nmem 150754820096 0\nutil 0 0\npower 90000 5\n"
STEPS = {
    " ".join(shlex.split(step.command, comments=True)).removeprefix(".venv/bin/"): step
    for blocks in PAGES.values()
    for block in blocks
    if block.language in COMMANDS and block.mark == "gpu"
    for step in steps(block)
}
"""The distinct commands of all pages."""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with the simulated driver and CUDA."""
    folder = tmp_path_factory.mktemp("driver")
    nvml, cuda = compiled(build_nvml, folder), compiled(build_cuda, folder)
    (folder / "gpus").write_text(GPU)
    return {
        **os.environ, "LD_LIBRARY_PATH": str(cuda.parent), "FAKE_NVML_STATE": str(folder / "gpus"),
        "FAKE_NVML_LIBRARY": str(nvml), "FAKE_CUDA_UUID": "11111111222233334444555555555555",
        "GPUTALLY_AGENT_SPOOL": str(folder / "spool"), "GPUTALLY_AGENT_LISTEN": "127.0.0.1",
        "PYTHONPATH": str(ROOT), "COLUMNS": "120",
    }  # fmt: skip


@pytest.fixture
def metrics(environ: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The metrics page of another agent."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "gputally", "agent", "run", "--holders=processes", f"--port={port}"]
    own = {**environ, "GPUTALLY_AGENT_SPOOL": str(tmp_path / "theirs")}
    with subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            until(lambda: process.poll() is not None or _answers(url), "no metrics")
            assert process.poll() is None, f"the agent ended with status {process.returncode}"
            yield url
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return b"gputally_nvml_up 1" in answer.read()
    except OSError:
        return False


def _can_be_stopped(process: subprocess.Popen[str]) -> bool:
    """Return whether a command has ended, or handles the signals that ask it to."""
    if process.poll() is not None:
        return True
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("step", [pytest.param(step, id=step.where) for step in STEPS.values()])
def test_the_command_runs_until_it_ends_or_is_ended(
    step: Step, environ: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    command = step.command
    if METRICS in command:
        command = command.replace(METRICS, request.getfixturevalue("metrics"))
    (port,) = free_ports(1)  # several such tests may run on this machine
    words = shlex.split(command.replace(f"--port {PORT}", f"--port {port}"), comments=True)
    assert words.pop(0).rsplit("/", 1)[-1] == "gputally", "another program's: mark it `host` or `elsewhere`"
    smokes = words[:2] == ["agent", "smoke"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gputally", *words], cwd=tmp_path, text=True,
        env={**environ, "GPUTALLY_AGENT_SPOOL": str(tmp_path / "spool"), "GPUTALLY_AGENT_PORT": str(port)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        if not smokes:
            until(lambda: _can_be_stopped(process), "it cannot be stopped")
        printed, _ = process.communicate(timeout=patience_s(ENDS_S) if smokes else LOOKS_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=patience_s())
    finally:
        process.kill()
    assert "Traceback" not in printed
    if smokes:  # the simulated GPU's time stands still: it was never seen busy
        assert re.search(r"^ *memory .* ok *$", printed, re.MULTILINE), printed
    else:
        assert process.returncode == 0, printed
