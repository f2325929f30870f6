"""A demo that is stopped in any way leaves no processes and no files in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.deadlines import until

pytestmark = pytest.mark.real


@contextmanager
def demo(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a demo that runs long enough to be stopped in the middle."""
    command = [sys.executable, "-m", "gputally", "demo", "--once", "--quiet", "--to", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


def folder_of(process: subprocess.Popen[bytes]) -> tuple[Path, int] | None:
    """Return the folder of its ledger, and the processes that have it open."""
    for child in children(process):
        for link in Path(f"/proc/{child}/fd").iterdir():
            with suppress(OSError):
                file = link.readlink()
                if file.name == "ledger.duckdb":
                    return file.parent, child
    return None


@pytest.mark.parametrize(("signal_number", "whom"), [("SIGTERM", "demo"), ("SIGTERM", "part"), ("SIGKILL", "demo")])
def test_a_demo_that_is_stopped_leaves_nothing(tmp_path: Path, signal_number: str, whom: str) -> None:
    with demo(tmp_path / "out") as process:
        folder, part = until(lambda: folder_of(process), "no ledger was opened")
        os.kill(process.pid if whom == "demo" else part, getattr(signal, signal_number))
        # Its parts say what is wrong where it does: when that has ended, so have they.
        _, said = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if signal_number == "SIGKILL" else 1)
    assert b"Traceback" not in said
    assert not folder.exists()
