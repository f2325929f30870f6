"""One sender of the ingest bench: `python -m tests.bench.client URL NODE BATCHES`.

Encodes everything first, says `ready`, waits for a line, sends batch after batch, each after the ack of the one before,
and prints the rows that were acknowledged and the seconds it took."""

from __future__ import annotations

import http.client
import sys
import time
from urllib.parse import urlsplit

import msgspec

from agent.wire import Ack
from tests.bench import load

GPUS, MINUTES_A_BATCH = 10, 5  # 50 rows


def main(url: str, node: str, count: int) -> None:
    batches = load.batches(node, GPUS, count * MINUTES_A_BATCH, MINUTES_A_BATCH)
    bodies = [(msgspec.json.encode(batch), batch.intervals[-1].seq) for batch in batches]
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for body, last_seq in bodies:
        connection.request("POST", "/v1/usage", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200 or msgspec.json.decode(text, type=Ack).durable_seq != last_seq:
            raise SystemExit(f"{answer.status}: {text[:300]!r}")
    print(bodies[-1][1], time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
