"""What agents of clusters that share an accountant deliver to it."""

from __future__ import annotations

import msgspec

from accountant.composition import Service
from agent.wire import Batch, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock

MINUTE_MS, MINUTES, GPUS = 60_000, 70, 4
WINDOW = {"size": "1h"}


def report(service: Service, clock: VirtualClock, cluster: str, held: dict[str, int], node: str = "n1") -> None:
    """What the agent of the one node says of the last minutes: so many GPUs held by each queue."""
    queues = [queue for queue, count in held.items() for _ in range(count)]
    facts = tuple(
        PodFacts(
            seq=i + 1, uid=f"pod-{queue}", namespace="ns", name=f"pod-{queue}", node=node, queue_ref=f"kai:{queue}",
            observed_ms=clock.wall_ms(),
        )
        for i, queue in enumerate(held)
    )  # fmt: skip
    begin, whole = clock.wall_ms() - MINUTES * MINUTE_MS, MINUTE_MS * 1000
    rows = []
    for minute in range(MINUTES):
        for gpu in range(GPUS):
            start = begin + minute * MINUTE_MS
            queue = queues[gpu] if gpu < len(queues) else None
            pod = None if queue is None else Holder("pod", f"pod-{queue}", "ns", f"pod-{queue}", "")
            rows.append(
                UsageInterval(
                    seq=len(facts) + len(rows) + 1, start_ms=start, end_ms=start + MINUTE_MS, gpu_uuid=f"GPU-{gpu}",
                    gpu_model="H100", holder=pod, capacity_us=whole, allocated_us=whole if pod else 0, method="device",
                )
            )  # fmt: skip
    batch = Batch(
        cluster=cluster, node=node, boot_id="b", epoch=f"0192-{cluster}", first_seq=1, oldest_seq=1, facts=facts,
        intervals=tuple(rows),
    )  # fmt: skip
    service.ingest.submit(msgspec.json.encode(batch)).result(timeout=20)
