"""Rows per second from 1,000 nodes through POST /v1/usage with durable acks, senders on the same machine.

Beside it: sqlite in this process, the same rows in 50-row commits, no HTTP, no checks, no sums."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench import ingest
from tests.bench.figure import Figure, Goal
from tests.bench.service import accountant

GOAL = 20_000.0


@dataclass(frozen=True)
class Size:
    """batches: per node, of 56 to 200 rows."""

    nodes: int = 1_000
    batches: int = 4
    beside: int = 400


FULL = Size()
TINY = Size(nodes=5, batches=2, beside=2)


@dataclass
class Answer:
    """What the senders were told: rows in `seconds`, acks in milliseconds. Filled when they are done."""

    rows: int = 0
    seconds: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


@contextlib.contextmanager
def sending(
    url: str, nodes: int, batches: int, rows_per_second: float = 0.0
) -> Iterator[tuple[Answer, subprocess.Popen[str]]]:
    """Senders at work while the block runs; its end waits for them and fills the answer."""
    command = [sys.executable, "-m", "tests.bench.senders", url, str(nodes), str(batches), str(rows_per_second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the senders did not get ready")
        process.stdin.write("go\n")
        process.stdin.flush()
        answer = Answer()
        yield answer, process
        words = process.communicate()[0].split()
        answer.rows = int(words[0])
        answer.seconds, answer.p50_ms, answer.p99_ms = (float(word) for word in words[1:])


def measure(size: Size = FULL) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        with accountant(Path(folder)) as server:
            before = server.cpu_s()
            with sending(server.url, size.nodes, size.batches) as (answer, _):
                pass
            cpu_us, peak = (server.cpu_s() - before) * 1e6 / answer.rows, server.peak_mib()
        beside = ingest.by_sqlite(Path(folder) / "beside.db", size.beside)
    return [
        Figure(
            f"{size.nodes:,} nodes x 56-200 rows, durable", answer.rows / answer.seconds, "rows/s",
            "sqlite, 50 rows a commit", beside, Goal(GOAL, least=True), memory_mib=peak,
        ),
        Figure("CPU of the accountant", cpu_us, "µs/row", "one core at 20,000 rows/s", 1e6 / GOAL),
        Figure("ack, p50, all nodes at once", answer.p50_ms, "ms"),
        Figure("ack, p99", answer.p99_ms, "ms"),
    ]  # fmt: skip
