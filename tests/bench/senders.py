"""Many nodes in one process: `python -m tests.bench.senders URL NODES BATCHES ROWS_PER_SECOND`.

Each node has a connection of its own and sends as an agent does: gzip, batches of 56 to 200 rows, the next one
after the ack of the one before. Everything is encoded first; then it says `ready`, waits for a line, and
prints rows acknowledged, seconds, and the median and 99th percentile of an ack in milliseconds. ROWS_PER_SECOND
spreads the batches evenly in time; 0: as fast as they are answered."""

from __future__ import annotations

import asyncio
import gzip
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from agent.wire import Ack
from tests.bench import load
from tests.bench.figure import quantile

GPUS = 8
_ack = msgspec.json.Decoder(Ack)


@dataclass
class Node:
    """What is left to send: (request, last number, rows)."""

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
    """Rows acknowledged, and the seconds until the last one was."""
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
