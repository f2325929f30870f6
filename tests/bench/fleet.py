"""Rows per second from 1,000 nodes through POST /v1/usage with durable acknowledgements, with senders on the same
machine.

The baseline is SQLite in this process: the same rows in 50-row commits, without HTTP, checks or sums.

`python -m tests.bench.fleet URL NODES BATCHES ROWS_PER_SECOND` runs the senders, many nodes in one process. Each node
has its own connection and sends as an agent does: gzip, batches of 56 to 200 rows, the next one after the
acknowledgement of the previous one. Everything is encoded first; then the program prints `ready`, waits for a line, and
prints acknowledged rows, seconds, and the median and 99th percentile of an acknowledgement in milliseconds.
ROWS_PER_SECOND spreads the batches evenly in time; with 0 they are sent as fast as they are acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agent.wire import Ack
from tests.bench import ingest, load
from tests.bench.figure import Figure, Goal, quantile
from tests.bench.service import accountant

GOAL = 20_000.0
GPUS = 8
_ack = msgspec.json.Decoder(Ack)


@dataclass(frozen=True)
class Size:
    """batches: for each node, of 56 to 200 rows."""

    nodes: int = 1_000
    batches: int = 4
    beside: int = 400


FULL = Size()
TINY = Size(nodes=5, batches=2, beside=2)


@dataclass
class Answer:
    """The result of the senders: rows in `seconds`, acknowledgement times in milliseconds. Set when they end."""

    rows: int = 0
    seconds: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


@contextlib.contextmanager
def sending(
    url: str, nodes: int, batches: int, rows_per_second: float = 0.0
) -> Iterator[tuple[Answer, subprocess.Popen[str]]]:
    """Run the senders during the block; its end waits for them and sets the answer."""
    command = [sys.executable, "-m", __name__, url, str(nodes), str(batches), str(rows_per_second)]
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


# --- the senders --------------------------------------------------------------------------------


@dataclass
class Node:
    """The requests that are left to send: (request, last number, rows)."""

    requests: list[tuple[bytes, int, int]]
    waited: list[float] = field(default_factory=list)

    async def send(self, host: str, port: int, begin: float, pause: float, offset: float) -> None:
        for number, (request, last_seq, _) in enumerate(self.requests):
            due = begin + offset + number * pause - time.perf_counter()
            if due > 0:
                await asyncio.sleep(due)
            since = time.perf_counter()
            # The accountant closes connections that say nothing for long.
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            text = await reader.readexactly(length)
            if b" 200 " not in head[:20] or _ack.decode(text).durable_seq != last_seq:
                raise SystemExit(f"{head[:20]!r}: {text[:300]!r}")
            self.waited.append(time.perf_counter() - since)
            writer.close()


def prepare(number: int, count: int, host: str) -> Node:
    minutes = 7 + number % 19
    found = []
    for batch in load.batches(f"node-{number}", GPUS, minutes * count, minutes):
        body = gzip.compress(msgspec.json.encode(batch), compresslevel=1)
        head = (
            f"POST /v1/usage HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        found.append((head.encode() + body, batch.intervals[-1].seq, len(batch.intervals)))
    return Node(found)


async def drive(url: str, nodes: list[Node], rows_per_second: float) -> tuple[int, float]:
    """Return the acknowledged rows, and the seconds until the last acknowledgement."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    rows = sum(count for node in nodes for _, _, count in node.requests)
    begin = time.perf_counter()
    whole = rows / rows_per_second if rows_per_second else 0.0
    tasks = []
    for number, node in enumerate(nodes):
        pause = whole / len(node.requests)
        tasks.append(node.send(place.hostname, place.port, begin, pause, pause * number / len(nodes)))
    await asyncio.gather(*tasks)
    return rows, time.perf_counter() - begin


def main(url: str, count: int, batches: int, rows_per_second: float) -> None:
    nodes = [prepare(number, batches, urlsplit(url).netloc) for number in range(count)]
    print("ready", flush=True)
    sys.stdin.readline()
    rows, seconds = asyncio.run(drive(url, nodes, rows_per_second))
    waited = [seconds * 1e3 for node in nodes for seconds in node.waited]
    print(rows, seconds, quantile(waited, 0.5), quantile(waited, 0.99), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
