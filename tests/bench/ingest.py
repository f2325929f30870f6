"""Rows per second through POST /v1/usage with durable acks: 4 client processes, 50-row batches, one server.

Beside it: sqlite in this process, the same rows, one durable commit per batch, no HTTP, no checks, no rollups.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bench import load
from tests.bench.client import GPUS, MINUTES_A_BATCH
from tests.bench.figure import Figure, timed

CLIENTS, BATCHES = 4, 400


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        with _server(Path(folder)) as url:
            rows, seconds = _drive(url)
        beside = _sqlite(Path(folder) / "beside.db")
    return [
        Figure(f"{CLIENTS} clients x 50 rows, durable", rows / seconds, "rows/s", "sqlite, 50 rows a commit", beside)
    ]


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "accountant", "serve", "--data", str(folder), "--listen", address, "--auth", "off"]
    process = subprocess.Popen([*command, "--log-level", "error"])
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"http://{address}/readyz"):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise SystemExit(f"the accountant ended with {process.wait(0.1)}")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _drive(url: str) -> tuple[int, float]:
    """All clients at once; rows acknowledged in all, and the seconds of the slowest."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.client", url, f"node-{i}", str(BATCHES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(CLIENTS)
    ]
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    answers = [client.communicate()[0].split() for client in clients]
    return sum(int(rows) for rows, _ in answers), max(float(seconds) for _, seconds in answers)


def _sqlite(path: Path) -> float:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    columns = "node, seq, start_ms, end_ms, gpu, model, holder, capacity, allocated, busy, memory, energy"
    database.execute(f"CREATE TABLE usage ({columns})")
    batches = [
        [
            (
                "node-0", r.seq, r.start_ms, r.end_ms, r.gpu_uuid, r.gpu_model, msgspec.json.encode(r.holder),
                r.capacity_us, r.allocated_us, r.busy_us, r.memory_mib_s, r.energy_uj,
            )
            for r in batch.intervals
        ]
        for batch in load.batches("node-0", GPUS, BATCHES * MINUTES_A_BATCH, MINUTES_A_BATCH)
    ]  # fmt: skip

    def write() -> None:
        for rows in batches:
            database.execute("BEGIN")
            database.executemany(f"INSERT INTO usage VALUES ({','.join('?' * 12)})", rows)
            database.execute("COMMIT")

    seconds = timed(write)
    database.close()
    return sum(map(len, batches)) / seconds
