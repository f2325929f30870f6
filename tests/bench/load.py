"""A synthetic fleet for the benchmarks: one of 200 pods, in one of 20 queues, holds each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Batch, Holder
from tests.usage_records import batch, interval, pod_facts, pod_holder

BEGIN_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
INTERVAL_MS = 60_000
QUEUES, PODS = 20, 200
PRICES: Final = {"A100-80GB": "2.74", "H100": "6.45"}


def policy() -> Policy:
    queues = tuple(QueuePolicy(name=f"queue-{i}", team=f"team-{i}", refs=(f"kai:queue-{i}",)) for i in range(QUEUES))
    return Policy(queues=queues)


def _holder(number: int) -> Holder:
    i = number % PODS
    return pod_holder(f"train-{i}", f"ns-{i % QUEUES}", f"pod-{i}", "main")


def facts() -> Batch:
    """Build one batch with the queue of every pod."""
    pods = [
        pod_facts(
            f"train-{i}", BEGIN_MS, uid=f"pod-{i}", namespace=f"ns-{i % QUEUES}", node="facts",
            queue_ref=f"kai:queue-{i % QUEUES}",
        )
        for i in range(PODS)
    ]  # fmt: skip
    return batch((), pods, cluster="bench", node="facts")


def batches(node: str, gpus: int, minutes: int, per_batch: int, begin_ms: int = BEGIN_MS) -> Iterator[Batch]:
    """Build the batches of an agent on a node with `gpus` GPUs, `per_batch` minutes each."""
    first_pod, seq = int(node.rpartition("-")[2]) * gpus, 1
    shape: dict[str, Any] = {
        "span_ms": INTERVAL_MS, "memory_mib_s": 60 * 40_000, "energy_uj": 60 * 400_000_000, "method": "device",
    }  # fmt: skip
    for first in range(0, minutes, per_batch):
        rows = [
            interval(
                begin_ms + minute * INTERVAL_MS, f"GPU-{node}-{gpu}", _holder(first_pod + gpu),
                busy_us=min((gpu * 7 + minute * 13) % 61 * 1_000_000, INTERVAL_MS * 1000), **shape,
            )
            for minute in range(first, min(first + per_batch, minutes))
            for gpu in range(gpus)
        ]  # fmt: skip
        yield batch(rows, cluster="bench", node=node, first_seq=seq)
        seq += len(rows)


def price_book() -> PriceBook:
    row = {"capacity_type": None, "per": "gpu-hour", "basis": "gpu-only", "source": "bench", "as_of": "2026-01-01"}
    rows = [
        {**row, "id": model, "model": model, "price": price, "valid_from": "2026-01-01"}
        for model, price in PRICES.items()
    ]
    return PriceBook.model_validate({"schema": 1, "currency": "USD", "timezone": "UTC", "rows": rows})
