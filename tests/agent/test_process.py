"""The agent as a process: signals, one line for a fault, no driver, a replaced driver, and its end on a Kubernetes
node."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import main
from agent.composition import JsonLines
from agent.core.process_restart import RESTARTED, was_restarted
from agent.upload.spool import Outbox
from agent.wire import UsageInterval
from tests.agent.pods import UID, pod_object
from tests.agent.scripted_accountant import ScriptedAccountant
from tests.deadlines import Deadline, patience_s, until
from tests.fakes.apiserver.server import TOKEN, FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet
from tests.plugins.installed import install

FORBIDDEN = ("pandas", "numpy", "duckdb", "fastapi", "pydantic", "kubernetes", "pyarrow", "rich", "pynvml", "httpx")


GPU = ["gpu GPU-a NVIDIA_H200", "mem 150754820096 4294967296", "util 0 0", "power 90000 5", "proc 1 1048576"]


class Process:
    """`python -m agent run …`: its log events, the rest of its standard error, and its /metrics."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "agent", "run", "--port", "0", "--listen", "127.0.0.1", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.lines: list[dict[str, Any]] = []
        self.said: list[str] = []

    def _note(self, line: str) -> None:
        if line.startswith("{"):
            self.lines.append(json.loads(line))
        else:
            self.said.append(line)

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._note(line)
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"{event!r} never came: {self.lines}")

    def get(self, path: str) -> tuple[int, str]:
        port = next(line["port"] for line in self.lines if "port" in line)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def end(self, number: int | None = None) -> int:
        """Send the signal and wait. None: it ends by itself."""
        if number is not None and self._process.poll() is None:
            self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=30)
        for line in errors.splitlines():
            self._note(line)
        return self._process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start an agent; return once the accountant has more rows of the pod than before."""
    started: list[Process] = []

    def start_(*arguments: str, **env: str) -> Process:
        started.append(Process("--spool", str(tmp_path / "spool"), *arguments, env={**os.environ, **env}))
        return started[-1]

    yield start_
    for process in started:
        process.end(signal.SIGKILL)


def spooled(folder: Path, kind: int) -> int:
    """Return the number of records of a kind in the spool. kind: 0 intervals, 1 facts."""
    with closing(sqlite3.connect(folder / "spool" / "outbox.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM record WHERE kind = ?", (kind,)).fetchone()[0])


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


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "gpus: [{model: H100}]\n"
        "events: [{after_ms: 0, place: {gpu: 0, namespace: vision, pod: train-0, utilisation_ppm: 900000}}]\n"
    )
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_everything_spooled(
    start: Callable[..., Process], scenario: str, tmp_path: Path, number: int
) -> None:
    process = start("--simulated", scenario, "--interval", "1", "--sample", "0.05")
    process.wait_for("agent started")
    assert process.get("/livez") == (200, "ok\n")
    status, text = process.get("/metrics")
    assert status == 200
    assert "gputally_agent_build_info" in text
    assert process.get("/other")[0] == 404
    while "gputally_gpu_info{" not in process.get("/metrics")[1]:
        """Until its first reading there is nothing to spool; on a crowded machine that takes a while."""
    assert process.end(number) == 0
    assert all(line["level"] == "info" for line in process.lines), process.lines
    assert (spooled(tmp_path, 1), spooled(tmp_path, 0) >= 1) == (1, True)


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


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["run", *arguments])
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("gputally agent: ")
    assert streams.err.count("\n") == 1, streams.err
    return code, streams.err


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (2, "--spool {folder}", "--holders processes"),
        (2, "--interval 7", "--interval: interval_s: 7 does not divide 900"),
        (2, "--simulated {scenario} --spool {folder} --url nowhere", "url 'nowhere': expected http(s)://"),
        (2, "--simulated {broken} --spool {folder}", "{broken}:2: "),
        (1, "--simulated {scenario} --spool {scenario}/spool", "cannot be used: Not a directory"),
    ],
)
def test_a_fault_is_one_line(
    capsys: pytest.CaptureFixture[str], scenario: str, tmp_path: Path, code: int, arguments: str, text: str
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("gpus:\n  - {model: Z9}\n")
    places = {"folder": tmp_path, "scenario": scenario, "broken": broken}
    found, said = one_line(capsys, *arguments.format(**places).split())
    assert (found, text.format(**places) in said) == (code, True)


def test_a_second_agent_on_the_outbox_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], scenario: str, tmp_path: Path, open_outbox: Callable[..., Outbox]
) -> None:
    open_outbox()
    code, text = one_line(capsys, "--simulated", scenario, "--spool", str(tmp_path))
    assert (code, "is in use by another agent" in text) == (1, True)


def test_a_port_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str], scenario: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        place = ("--spool", str(tmp_path / "s"), "--listen", "127.0.0.1", "--port", port)
        code, text = one_line(capsys, "--simulated", scenario, *place)
    assert (code, f"metrics port 127.0.0.1:{port} cannot be opened: Address already in use" in text) == (1, True)


def test_print_config_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--print-config", "--cluster", "east"]) == 0
    assert 'cluster: "east"' in capsys.readouterr().out
    assert main([]) == 2
    assert "run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0


def test_importing_the_agent_pulls_in_nothing_heavy() -> None:
    code = f"import sys, agent.__main__; print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_log_lines_are_json_with_their_extras_and_bounded() -> None:
    stream = io.StringIO()
    record = logging.LogRecord("agent.x", logging.WARNING, "f", 1, "%s happened", ("it\n" + "y" * 5_000,), None)
    record.reason = "because"
    stream.write(JsonLines().format(record))
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["reason"]) == ("warning", "agent.x", "because")
    assert line["event"].startswith("it\ny")
    assert "\n" not in stream.getvalue()
    assert len(line["event"]) == 2_000


# --- a driver that is replaced under a running agent ----------------------------------------------


def test_a_process_asks_once_whether_it_took_anothers_place() -> None:
    environ = {RESTARTED: "1"}
    assert was_restarted(environ)
    assert not was_restarted(environ)


def test_it_replaces_itself_once_and_leaves_the_rest_to_its_supervisor(
    start: Callable[..., Process], gpu_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    replaced = gpu_environment("fail * 18 200")  # of every function, after some readings
    process = start("--holders=processes", "--sample", "0.02", "--interval", "1", **replaced)
    assert process.end() == 0
    assert [line["event"] for line in process.lines].count("agent started") == 2
    assert process.said == ["gputally agent: the NVIDIA driver was replaced; the agent must be started again"] * 2
    assert spooled(tmp_path, 0) >= 1


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
