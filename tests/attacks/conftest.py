"""An accountant in its own process, with a token for each role, and its memory use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from gputally.server.tokens_and_grants import sha256
from tests.price_books import price_book_text

ROLES = {
    "lead": "scopes: [read], teams: [vision]",
    "reader": "scopes: [read]",
    "reporter": "scopes: [progress], teams: [vision]",
    "governor": "scopes: [policy]",
    "importer": "scopes: [import], cluster: prod",
    "agent": "scopes: [ingest], cluster: prod, node: node-1",
    "admin": "scopes: [admin]",
}
"""Entries of the token file by name; each token equals its name."""
PRICES = price_book_text(H100="2.5")
_URL = re.compile(rb"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True)
class Running:
    """A running accountant."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def memory_mib(self) -> int:
        """Return its resident memory in MiB."""
        return self._status("VmRSS")

    def peak_mib(self) -> int:
        """Return the highest resident memory so far, in MiB."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) // 1024


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("accountant")
    entries = "".join(f"  - {{name: {name}, token_sha256: {sha256(name)}, {what}}}\n" for name, what in ROLES.items())
    entries += "".join(
        f"  - {{name: node-{n}, token_sha256: {sha256(f'node-{n}')}, scopes: [ingest],"
        f" cluster: prod, node: node-{n}}}\n"
        for n in range(1_000)
    )
    (folder / "tokens.yaml").write_text("tokens:\n" + entries)
    (folder / "prices.yaml").write_text(PRICES)
    (folder / "accountant.yaml").write_text(
        f"data: {folder}/data\nlisten: 127.0.0.1:0\ntokens: {folder}/tokens.yaml\nprices: {folder}/prices.yaml\n"
    )
    log = folder / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "accountant", "serve", "--config", str(folder / "accountant.yaml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GPUTALLY_ACCOUNTANT_LOG_LEVEL": "info"},
        )
        try:
            yield Running(process, _serving(process, said), log)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _serving(process: subprocess.Popen[bytes], said: IO[bytes]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        said.write(line)
        found = _URL.search(line)
        if found:
            threading.Thread(target=lambda: [said.write(line) for line in process.stdout or ()], daemon=True).start()
            return found[0].decode()
    pytest.fail("the accountant did not start")
