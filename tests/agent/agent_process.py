"""An agent in a process of its own, and what it leaves in its spool."""

from __future__ import annotations

import http.client
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any


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


def spooled(folder: Path, kind: int) -> int:
    """Return the number of records of a kind in the spool. kind: 0 intervals, 1 facts."""
    with closing(sqlite3.connect(folder / "spool" / "outbox.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM record WHERE kind = ?", (kind,)).fetchone()[0])
