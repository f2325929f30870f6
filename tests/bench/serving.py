"""Window queries over HTTP while 1,000 nodes send 10,000 rows a second.

The ledger holds twelve hours of another 8,000 GPUs. A client queries the last 12 hours, plain and decayed in turn, each
up to a minute that all nodes have reached, as a controller does. The baseline is the same query to the same accountant
without senders. The first query of each form finds no cache; it runs before, and is listed separately."""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec

from tests.bench import bulk, load
from tests.bench.figure import Figure, Goal, quantile
from tests.bench.fleet import sending
from tests.bench.service import accountant

GOAL_MS = 50.0
LEAST_MINUTES = 7
"""Minutes in the batches of the slowest node."""
PAST_MINUTES = 720
FORMS = {"12 h": {"size": "12h"}, "12 h, half-life 6 h": {"size": "12h", "half_life": "6h"}}


@dataclass(frozen=True)
class Size:
    """batches: for each node, of 56 to 200 rows. still: queries of each form without senders."""

    nodes: int = 1_000
    batches: int = 3
    rows_per_second: float = 10_000
    pause_s: float = 0.1
    still: int = 30


FULL = Size()
TINY = Size(nodes=4, batches=3, rows_per_second=1_000, pause_s=0.02, still=2)


def measure(size: Size = FULL) -> list[Figure]:
    past = bulk.Fleet(
        size.nodes, PAST_MINUTES, load.QUEUES, begin_ms=load.BEGIN_MS - PAST_MINUTES * load.INTERVAL_MS, prefix="past"
    )
    with tempfile.TemporaryDirectory() as folder:
        bulk.write(Path(folder) / "ledger.duckdb", past)
        return _measure(Path(folder), size)


def _measure(folder: Path, size: Size) -> list[Figure]:
    with accountant(folder) as server, closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as connection:
        server.send("PUT", "/v1/policy", msgspec.json.encode(load.policy().model_dump(mode="json")))
        server.send("POST", "/v1/usage", msgspec.json.encode(load.facts()))
        first = {name: asked(connection, spec, 0) for name, spec in FORMS.items()}
        busy: dict[str, list[float]] = {name: [] for name in FORMS}
        last = LEAST_MINUTES * size.batches
        with sending(server.url, size.nodes, size.batches, size.rows_per_second) as (answer, senders):
            begin = time.monotonic()
            whole_s = size.nodes * size.batches * 128 / size.rows_per_second
            while senders.poll() is None:
                minute = min(last, LEAST_MINUTES + int((time.monotonic() - begin) / whole_s * last))
                for name, spec in FORMS.items():
                    busy[name].append(asked(connection, spec, minute))
                    time.sleep(size.pause_s)
        still = {
            name: [asked(connection, spec, last - number % LEAST_MINUTES) for number in range(size.still)]
            for name, spec in FORMS.items()
        }
        peak = server.peak_mib()
    return [
        Figure(
            f"{name}, {label}, at {answer.rows / answer.seconds:,.0f} rows/s", quantile(busy[name], q), "ms",
            "the same, nobody sending", quantile(still[name], q), Goal(GOAL_MS) if label == "p50" else None,
            memory_mib=peak,
        )
        for name in FORMS
        for label, q in (("p50", 0.5), ("p99", 0.99))
    ] + [
        Figure("ack meanwhile, p99", answer.p99_ms, "ms"),
        *(Figure(f"{name}, the first question", first[name], "ms") for name in FORMS),
    ]  # fmt: skip


def asked(connection: http.client.HTTPConnection, spec: dict[str, str], minute: int) -> float:
    """Query a window that ends `minute` minutes after the first row; return the milliseconds."""
    at = datetime.fromtimestamp(load.BEGIN_MS / 1000 + minute * 60, UTC).isoformat().replace("+00:00", "Z")
    begin = time.perf_counter()
    connection.request("GET", f"/v1/windows?{urlencode({'kind': 'sliding', **spec, 'at': at})}")
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 200, found
    return (time.perf_counter() - begin) * 1e3
