"""A synthetic fleet for the benches: every GPU is held by one of 200 pods, in one of 20 queues."""

from __future__ import annotations

from collections.abc import Iterator

from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Batch, Holder, PodFacts, UsageInterval

BEGIN_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
INTERVAL_MS = 60_000
QUEUES, PODS = 20, 200


def policy() -> Policy:
    queues = tuple(QueuePolicy(name=f"queue-{i}", team=f"team-{i}", refs=(f"kai:queue-{i}",)) for i in range(QUEUES))
    return Policy(queues=queues)


def _holder(number: int) -> Holder:
    i = number % PODS
    return Holder(kind="pod", uid=f"pod-{i}", namespace=f"ns-{i % QUEUES}", name=f"train-{i}", container="main")


def facts() -> Batch:
    """One batch that says to which queue every pod belongs."""
    pods = tuple(
        PodFacts(
            seq=i + 1,
            uid=f"pod-{i}",
            namespace=f"ns-{i % QUEUES}",
            name=f"train-{i}",
            node="facts",
            queue_ref=f"kai:queue-{i % QUEUES}",
            observed_ms=BEGIN_MS,
        )
        for i in range(PODS)
    )
    return Batch(cluster="bench", node="facts", boot_id="b", epoch="e", first_seq=1, oldest_seq=1, facts=pods)


def batches(node: str, gpus: int, minutes: int, per_batch: int, begin_ms: int = BEGIN_MS) -> Iterator[Batch]:
    """What an agent on a node with `gpus` GPUs sends, `per_batch` minutes at a time."""
    seq = 1
    for first in range(0, minutes, per_batch):
        rows: list[UsageInterval] = []
        for minute in range(first, min(first + per_batch, minutes)):
            start = begin_ms + minute * INTERVAL_MS
            for gpu in range(gpus):
                busy = (gpu * 7 + minute * 13) % 61 * 1_000_000
                rows.append(
                    UsageInterval(
                        seq=seq + len(rows),
                        start_ms=start,
                        end_ms=start + INTERVAL_MS,
                        gpu_uuid=f"GPU-{node}-{gpu}",
                        gpu_model="NVIDIA H100 80GB HBM3",
                        holder=_holder(int(node.rpartition("-")[2]) * gpus + gpu),
                        capacity_us=INTERVAL_MS * 1000,
                        allocated_us=INTERVAL_MS * 1000,
                        busy_us=min(busy, INTERVAL_MS * 1000),
                        memory_mib_s=60 * 40_000,
                        energy_uj=60 * 400_000_000,
                        method="device",
                    )
                )
        yield Batch(
            cluster="bench",
            node=node,
            boot_id="b",
            epoch="e",
            first_seq=seq,
            oldest_seq=1,
            intervals=tuple(rows),
        )
        seq += len(rows)
