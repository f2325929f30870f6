"""Programs as processes of their own, and their CPU time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.deadlines import patience_s
from tests.real.programs import free_ports


@dataclass(frozen=True)
class Spent:
    """The CPU time and memory of a running process."""

    pid: int

    @classmethod
    def me(cls) -> Spent:
        return cls(os.getpid())

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        """Return the largest resident memory so far."""
        return self._status_mib("VmHWM")

    def resident_mib(self) -> float:
        """Return the resident memory now."""
        return self._status_mib("VmRSS")

    def _status_mib(self, field: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


@dataclass(frozen=True)
class Accountant(Spent):
    """An accountant that serves at `url` (http://127.0.0.1:PORT)."""

    url: str

    def send(self, method: str, path: str, body: bytes) -> None:
        """Send JSON, which the accountant has to accept."""
        with closing(HTTPConnection(urlsplit(self.url).netloc)) as connection:
            post(connection, method, path, body)


def post(connection: HTTPConnection, method: str, path: str, body: bytes, encoding: str = "identity") -> bytes:
    """Send JSON and return the answer's content. Raises SystemExit for a refusal."""
    connection.request(method, path, body, {"Content-Type": "application/json", "Content-Encoding": encoding})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 300:
        raise SystemExit(f"{path}: {answer.status} {text[:300]!r}")
    return text


@contextlib.contextmanager
def program(ready_url: str, *command: str) -> Iterator[Spent]:
    """Run `gputally COMMAND`; yields once it answers at this address."""
    with subprocess.Popen([sys.executable, "-m", "gputally", *command]) as process:
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(ready_url, timeout=patience_s(10)):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise SystemExit(f"{command[0]} ended with {process.wait(0.1)}")
            yield Spent(process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def accountant(folder: Path) -> Iterator[Accountant]:
    """Serve a ledger in `folder` until the block ends."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "bench.yaml"
    settings.write_text(yaml.safe_dump({"limits": {"connections_by_address": 8_192}}))  # all senders are at one address
    flags = ["--data", str(folder), "--listen", address, "--auth", "off", "--config", str(settings)]
    url = f"http://{address}"
    with program(f"{url}/readyz", "accountant", "serve", *flags, "--log-level", "error") as process:
        yield Accountant(process.pid, url)


def child(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run a module as a process and return the last line that it prints, parsed as JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])
