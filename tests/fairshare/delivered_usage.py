"""What agents of clusters that share an accountant deliver to it."""

from __future__ import annotations

import msgspec

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from tests.usage_records import batch, interval, pod_facts, pod_holder

MINUTE_MS, MINUTES, GPUS = 60_000, 70, 4
WINDOW = {"size": "1h"}


def report(service: Service, clock: VirtualClock, cluster: str, held: dict[str, int], node: str = "n1") -> None:
    """What the agent of the one node says of the last minutes: so many GPUs held by each queue."""
    queues = [queue for queue, count in held.items() for _ in range(count)]
    now_ms = clock.wall_ms()
    facts = [pod_facts(f"pod-{queue}", now_ms, node=node, queue_ref=f"kai:{queue}") for queue in held]
    holders = [*(pod_holder(f"pod-{queue}") for queue in queues[:GPUS]), *[None] * (GPUS - len(queues))]
    rows = [
        interval(at, f"GPU-{gpu}", holder, span_ms=MINUTE_MS, gpu_model="H100", busy_us=None, method="device")
        for at in range(now_ms - MINUTES * MINUTE_MS, now_ms, MINUTE_MS)
        for gpu, holder in enumerate(holders)
    ]
    one = batch(rows, facts, cluster=cluster, node=node, epoch=f"0192-{cluster}")
    service.ingest.submit(msgspec.json.encode(one)).result(timeout=20)
