"""One node's token tries to leave so much in the ledger that later queries fail: names, GPUs and large records."""

from __future__ import annotations

import gzip
import itertools
import time
from typing import Any

import httpx2
import msgspec
import pytest

from agent.wire import Gap, Holder, Slice
from tests.attacks.conftest import Running
from tests.deadlines import patience_s
from tests.usage_records import batch, interval, pod_holder

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
MINUTE_MS = 60_000
BATCHES = 5
ROWS = 10_000
MEMORY_MIB = 1_024
"""Of the 2 GiB that the chart allows."""
EPOCH = "01930000-0000-7000-8000-000000000666"
NUMBERS = itertools.count(1)


def rows_of(attack: str, begin_ms: int) -> list[Any]:
    """Build the rows of one hostile batch, each with a name that was not used before."""
    found = []
    for number in itertools.islice(NUMBERS, ROWS if attack != "gaps" else 20):
        name, start = f"{number:08d}" + "x" * 240, begin_ms + number % 3_000_000
        gpu, holder, more = "GPU-attacker", pod_holder(name, "vision", f"uid-{number}"), {}
        if attack == "gpus":
            gpu = f"GPU-invented-{number}"
        elif attack == "parts":
            holder = Holder(kind="pod", uid="one", namespace="vision", name="one")
            more = {"slice": Slice(f"{number}g.10gb", number, 0, 1, 7, 9728, 81559)}
        elif attack == "gaps":
            more = {"gaps": tuple(Gap(start, start + 1, "y" * 4_000) for _ in range(500))}
        found.append(interval(start, gpu, holder, span_ms=1, busy_us=500, **more))
    return found


@pytest.mark.parametrize("attack", ["names", "gpus", "parts", "gaps"])
def test_what_a_node_leaves_is_bounded_and_others_go_on(running: Running, attack: str) -> None:
    begin_ms = (int(time.time() * 1000) // MINUTE_MS - 120) * MINUTE_MS
    first = next(NUMBERS)
    with httpx2.Client(base_url=running.url, timeout=120) as client:

        def ask(path: str) -> Any:
            answer = client.get(path, headers={"Authorization": "Bearer admin", "Accept": "application/json"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        def send(node: str, raw: bytes) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {node}", "Content-Encoding": "gzip"}
            return client.post("/v1/usage", content=gzip.compress(raw, 1), headers=headers)

        epoch, seq = EPOCH[:-3] + f"{first % 1000:03d}", 1
        for _ in range(BATCHES):
            rows = rows_of(attack, begin_ms)
            sent = batch(rows, cluster="prod", node="node-1", epoch=epoch, first_seq=seq)
            answer = send("node-1", msgspec.json.encode(sent))
            seq += len(rows)
            assert (answer.status_code, answer.json()["durable_seq"]) == (200, seq - 1), "the marks advance"
        started = time.monotonic()
        honest = [interval(begin_ms, "GPU-honest", pod_holder("train-0", "vision", "u"), span_ms=MINUTE_MS, busy_us=1)]
        epoch = f"01930000-0000-7000-8000-{first:012d}"
        answer = send("node-2", msgspec.json.encode(batch(honest, cluster="prod", node="node-2", epoch=epoch)))
        assert (answer.status_code, time.monotonic() - started < patience_s(5)) == (200, True), answer.text
        owners = [one for one in ask("/v1/gpus/owners")["gpus"] if one["owners"][-1]["node"] == "node-1"]
        assert len(owners) <= 64
        if attack != "gaps":  # its records are as large as records may be, and true
            assert len(ask("/v1/quarantine?limit=10")) == 10
        jobs = ask(f"/v1/jobs?start={begin_ms}&limit=10")
        assert len(jobs["jobs"]) <= 10
        assert client.get("/metrics").status_code == 200
    assert running.peak_mib() < MEMORY_MIB
