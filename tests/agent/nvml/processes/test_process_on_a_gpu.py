"""An agent's process with the driver's library, and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.agent_process import Process, spooled
from tests.deadlines import until
from tests.plugins.installed import install

GPU = ["gpu GPU-a NVIDIA_H200", "mem 150754820096 4294967296", "util 0 0", "power 90000 5", "proc 1 1048576"]


@pytest.fixture
def no_driver(tmp_path: Path) -> str:
    """A library path without the driver's library, on any machine."""
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "libnvidia-ml.so.1").write_bytes(b"")
    return str(tmp_path / "nothing")


@pytest.fixture
def gpu_environment(fake_nvml_library: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return the environment of a process that finds one GPU, after these commands for the fake library."""

    def show(*lines: str) -> dict[str, str]:
        (tmp_path / "gpus").write_text("\n".join([*lines, *GPU]) + "\n")
        return {"LD_LIBRARY_PATH": str(fake_nvml_library.parent), "FAKE_NVML_STATE": str(tmp_path / "gpus")}

    return show


def test_without_a_driver_it_says_so_once_and_keeps_serving(start: Callable[..., Process], no_driver: str) -> None:
    process = start("--holders=processes", "--sample", "0.02", LD_LIBRARY_PATH=no_driver)
    warning = process.wait_for("no NVIDIA driver answers: trying again later")
    assert warning["reason"] == "libnvidia-ml.so.1 not found (nvmlInit, 12)"
    assert "agent.runtimeClassName" in warning["remedy"]
    if not any("port" in line for line in process.lines):
        process.wait_for("agent started")
    text = ""
    for _ in range(500):  # until the first turn is over
        if "gputally_nvml_up" in text:
            break
        text = process.get("/metrics")[1]
    assert "gputally_nvml_up 0.0" in text
    assert 'gputally_collector_success{collector="nvml"} 0.0' in text
    assert process.end(signal.SIGTERM) == 0
    assert sum(line["event"].startswith("no NVIDIA driver") for line in process.lines) == 1


HANGS = """
import threading
from agent.gpu_readers.protocol import GpuReaderPlugin

class Hangs:
    def read(self, at_ms, before=()):
        threading.Event().wait()

    close = read

READER = GpuReaderPlugin("hangs", "", lambda place, surroundings: Hangs(), False, "nothing", "none")
"""


def test_a_reader_of_another_package_that_hangs_stops_neither_the_metering_nor_the_end(
    start: Callable[..., Process], gpu_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "hanging-package", {"gputally.gpu_readers": {"hangs": "hanging_reader:READER"}}, hanging_reader=HANGS)
    process = start(
        "--holders=processes",
        "--sample",
        "0.05",
        "--gpu-readers",
        "nvml,hangs",
        **gpu_environment(),
        PYTHONPATH=str(site),
    )
    process.wait_for("agent started")
    until(lambda: "gputally_gpu_info{" in process.get("/metrics")[1], "no GPU is metered")
    text = process.get("/metrics")[1]
    assert 'gputally_collector_success{collector="nvml"} 1.0' in text
    assert 'gputally_collector_success{collector="hangs"} 0.0' in text
    assert process.end(signal.SIGTERM) == 0


HOLDS = """
import threading
from agent.holders.protocol import HolderPlugin

class Hangs:
    def read(self, at_ms, gpus):
        threading.Event().wait()

    def close(self):
        threading.Event().wait()

HOLDERS = HolderPlugin("hangs", "nothing", "none", open=lambda place, node: Hangs())
"""


def test_a_source_of_holders_of_another_package_that_hangs_stops_neither_the_metering_nor_the_end(
    start: Callable[..., Process], gpu_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "hanging-package", {"gputally.holders": {"hangs": "hanging_holders:HOLDERS"}}, hanging_holders=HOLDS)
    process = start("--holders=hangs", "--sample", "0.05", **gpu_environment(), PYTHONPATH=str(site))
    process.wait_for("agent started")
    until(lambda: "gputally_gpu_info{" in process.get("/metrics")[1], "no GPU is metered")
    text = process.get("/metrics")[1]
    assert 'gputally_collector_success{collector="nvml"} 1.0' in text
    assert 'gputally_collector_success{collector="hangs"} 0.0' in text
    assert process.end(signal.SIGTERM) == 0


def once(**env: str) -> tuple[int, str, str]:
    """Run an agent that reads its GPUs once; return status, output and errors."""
    command = [sys.executable, "-m", "agent", "run", "--holders=processes", "--once"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_once_without_a_driver_is_one_line(no_driver: str) -> None:
    said = "no GPU to watch (nvml: libnvidia-ml.so.1 not found (nvmlInit, 12))\n"
    assert once(LD_LIBRARY_PATH=no_driver) == (1, said, "")


def test_once_on_a_gpu_is_a_table(gpu_environment: Callable[..., dict[str, str]]) -> None:
    code, table, errors = once(**gpu_environment(), COLUMNS="80")
    assert (code, errors) == (0, "")
    for part in ("H200", "0 %", "4/140 G", "90 W", "1 GPU, 1 held"):
        assert part in table


def test_it_replaces_itself_once_and_leaves_the_rest_to_its_supervisor(
    start: Callable[..., Process], gpu_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    replaced = gpu_environment("fail * 18 200")  # of every function, after some readings
    process = start("--holders=processes", "--sample", "0.02", "--interval", "1", **replaced)
    assert process.end() == 0
    assert [line["event"] for line in process.lines].count("agent started") == 2
    assert process.said == ["gputally agent: the NVIDIA driver was replaced; the agent must be started again"] * 2
    assert spooled(tmp_path, 0) >= 1
