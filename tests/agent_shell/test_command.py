"""The agent as a process: signals, faults in one line, no driver, and what importing it costs."""

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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import JsonLines, main
from agent.metrics import exporter
from agent.metrics.exporter import PortUnavailable
from agent.upload.spool import Outbox
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock

FORBIDDEN = ("pandas", "numpy", "duckdb", "fastapi", "pydantic", "kubernetes", "pyarrow", "rich", "pynvml", "httpx")


class Process:
    """`python -m agent run ...`, its log lines, and its /metrics."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "agent", "run", "--port", "0", "--listen", "127.0.0.1", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.lines: list[dict[str, Any]] = []

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"{event!r} never came: {self.lines}")

    def get(self, path: str) -> tuple[int, str]:
        port = next(line["port"] for line in self.lines if "port" in line)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        answer = response.status, response.read().decode()
        connection.close()
        return answer

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=30)
        self.lines += [json.loads(line) for line in errors.splitlines()]
        return self._process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start_(*arguments: str, **env: str) -> Process:
        started.append(Process("--spool", str(tmp_path / "spool"), *arguments, env={**os.environ, **env}))
        return started[-1]

    yield start_
    for process in started:
        process.stop(signal.SIGKILL)


@pytest.fixture
def no_driver(tmp_path: Path) -> str:
    """A library path on which the driver's library cannot be loaded, on any machine."""
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    return str(folder)


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
    assert process.stop(number) == 0
    assert all(line["level"] == "info" for line in process.lines), process.lines
    with sqlite3.connect(tmp_path / "spool" / "outbox.sqlite") as db:
        kinds = dict(db.execute("SELECT kind, count(*) FROM record GROUP BY kind").fetchall())
    db.close()
    assert kinds[1] == 1
    assert kinds[0] >= 1


def test_without_a_driver_it_says_so_once_and_keeps_serving(start: Callable[..., Process], no_driver: str) -> None:
    process = start("--standalone", "--sample", "0.02", LD_LIBRARY_PATH=no_driver)
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
    assert process.stop() == 0
    assert sum(line["event"].startswith("no NVIDIA driver") for line in process.lines) == 1


def test_once_without_a_driver_is_one_line(no_driver: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", "run", "--standalone", "--once"],
        env={**os.environ, "LD_LIBRARY_PATH": no_driver}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "no GPU to watch (nvml: libnvidia-ml.so.1 not found (nvmlInit, 12))\n"


def test_once_on_a_gpu_is_a_table(fake_nvml_library: Path, tmp_path: Path) -> None:
    state = tmp_path / "gpus"
    state.write_text("gpu GPU-a NVIDIA_H200\nmem 150754820096 4294967296\nutil 0 0\npower 90000 5\nproc 1 1048576\n")
    env = {"LD_LIBRARY_PATH": str(fake_nvml_library.parent), "FAKE_NVML_STATE": str(state), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "agent", "run", "--standalone", "--once"],
        env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("H200", "0 %", "4/140 G", "90 W", "1 GPU, 1 held"):
        assert part in done.stdout


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
        (2, "--spool {folder}", "--standalone"),
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


NO_TASKS = BackgroundTasks(VirtualClock(0))


class TestExposition:
    def test_a_hanging_sampler_fails_the_probe(self) -> None:
        server = exporter.Exposition("127.0.0.1", 0, lambda: b"", lambda: False, NO_TASKS)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/livez")
        response = connection.getresponse()
        assert (response.status, response.read()) == (503, b"sampling hangs\n")
        connection.close()
        server.close()

    def test_a_port_in_use(self) -> None:
        server = exporter.Exposition("127.0.0.1", 0, lambda: b"", lambda: True, NO_TASKS)
        with pytest.raises(PortUnavailable, match="Address already in use"):
            exporter.Exposition("127.0.0.1", server.port, lambda: b"", lambda: True, NO_TASKS)
        server.close()

    def test_more_requests_than_allowed_are_hung_up_on(self) -> None:
        entered, release = threading.Semaphore(0), threading.Event()

        def slow() -> bool:
            entered.release()
            return release.wait(10)

        server = exporter.Exposition("127.0.0.1", 0, lambda: b"", slow, NO_TASKS)
        clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(5)]
        for client in clients[: exporter.MAX_REQUESTS]:
            client.request("GET", "/livez")
            assert entered.acquire(timeout=10)
        clients[-1].connect()
        assert clients[-1].sock.recv(1) == b""
        release.set()
        for client in clients[: exporter.MAX_REQUESTS]:
            assert client.getresponse().read() == b"ok\n"
        for client in clients:
            client.close()
        server.close()
