"""The agent as a process: signals, one line for a fault, no driver, a replaced driver, and its end on a Kubernetes
node."""

from __future__ import annotations

import io
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.composition import JsonLines
from agent.core.process_restart import RESTARTED, was_restarted
from agent.upload.spool import Outbox
from tests.agent.agent_process import Process, spooled

FORBIDDEN = ("pandas", "numpy", "duckdb", "fastapi", "pydantic", "kubernetes", "pyarrow", "rich", "pynvml", "httpx")


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
