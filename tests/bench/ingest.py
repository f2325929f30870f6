"""Rows per second through POST /v1/usage with durable acknowledgements: 4 client processes, 50-row batches, one server.

The baseline is SQLite in this process: the same rows, one durable commit for each batch, without HTTP, checks or sums.

`python -m tests.bench.ingest URL NODE BATCHES` is one client: it encodes everything first, prints `ready`, waits for a
line, sends batch after batch, each after the acknowledgement of the previous one, and prints the acknowledged rows and
the seconds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agent.wire import Ack
from tests.bench import load
from tests.bench.figure import Figure, timed
from tests.bench.service import accountant, post

CLIENTS = 4
GPUS, MINUTES_A_BATCH = 10, 5  # 50 rows


@dataclass(frozen=True)
class Size:
    """batches: of 50 rows, for each client."""

    batches: int = 400


FULL = Size()
TINY = Size(batches=2)


def measure(size: Size = FULL) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        with accountant(Path(folder)) as server:
            rows, seconds = _drive(server.url, size.batches)
            peak = server.peak_mib()
        beside = by_sqlite(Path(folder) / "beside.db", size.batches)
    name = f"{CLIENTS} clients x 50 rows, durable"
    return [Figure(name, rows / seconds, "rows/s", "sqlite, 50 rows a commit", beside, memory_mib=peak)]


def _drive(url: str, batches: int) -> tuple[int, float]:
    """Run all clients at once; return the acknowledged rows of all, and the seconds of the slowest."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, url, f"node-{i}", str(batches)],
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


def by_sqlite(path: Path, count: int) -> float:
    """Return rows per second of `count` 50-row commits."""
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
        for batch in load.batches("node-0", GPUS, count * MINUTES_A_BATCH, MINUTES_A_BATCH)
    ]  # fmt: skip

    def write() -> None:
        for rows in batches:
            database.execute("BEGIN")
            database.executemany(f"INSERT INTO usage VALUES ({','.join('?' * 12)})", rows)
            database.execute("COMMIT")

    seconds = timed(write)
    database.close()
    return sum(map(len, batches)) / seconds


def main(url: str, node: str, count: int) -> None:
    batches = load.batches(node, GPUS, count * MINUTES_A_BATCH, MINUTES_A_BATCH)
    bodies = [(msgspec.json.encode(batch), batch.intervals[-1].seq) for batch in batches]
    with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()
        for body, last_seq in bodies:
            text = post(connection, "POST", "/v1/usage", body)
            if msgspec.json.decode(text, type=Ack).durable_seq != last_seq:
                raise SystemExit(f"not durable: {text[:300]!r}")
        print(bodies[-1][1], time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
