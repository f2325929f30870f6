"""The accountant as a process of its own, and what it spends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.real.programs import free_ports


@dataclass(frozen=True)
class Spent:
    """A running process seen from outside."""

    pid: int

    @classmethod
    def me(cls) -> Spent:
        return cls(os.getpid())

    def cpu_s(self) -> float:
        """Seconds of CPU so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        """Its largest resident memory so far."""
        return self._status_mib("VmHWM")

    def resident_mib(self) -> float:
        """Its resident memory now."""
        return self._status_mib("VmRSS")

    def _status_mib(self, field: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


@dataclass(frozen=True)
class Accountant(Spent):
    """Serving at `url` (http://127.0.0.1:PORT)."""

    url: str


@contextlib.contextmanager
def accountant(folder: Path) -> Iterator[Accountant]:
    """Serve a ledger in `folder` until the block ends."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "bench.yaml"
    settings.write_text(yaml.safe_dump({"limits": {"connections_by_address": 8_192}}))  # all senders are at one address
    command = [sys.executable, "-m", "accountant", "serve", "--data", str(folder), "--listen", address, "--auth", "off"]
    process = subprocess.Popen([*command, "--config", str(settings), "--log-level", "error"])
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"http://{address}/readyz"):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise SystemExit(f"the accountant ended with {process.wait(0.1)}")
        yield Accountant(process.pid, f"http://{address}")
    finally:
        process.terminate()
        process.wait()
