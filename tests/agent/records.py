"""Builds records for an outbox, lists the records it still has to send, and acknowledges them."""

from __future__ import annotations

from typing import Any

from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.wire import Ack, PodFacts, UsageInterval
from tests.agent.sample_values import T0

ALL = {"max_rows": 10_000, "max_bytes": 100_000_000}


def make_row(start_ms: int = T0, gpu: str = "GPU-a", part: int = 60_000_000, span_ms: int = 60_000) -> UsageInterval:
    return UsageInterval(
        seq=0,
        start_ms=start_ms,
        end_ms=start_ms + span_ms,
        gpu_uuid=gpu,
        gpu_model="NVIDIA H200",
        capacity_us=part,
        allocated_us=0,
        busy_us=0,
        method="device",
    )


def make_set(start_ms: int = T0, rows: int = 1, gpu: str = "GPU-a") -> ClosedSet:
    return ClosedSet(tuple(make_row(start_ms, gpu, 60_000_000 // rows) for _ in range(rows)))


def make_facts(uid: str, observed_ms: int = T0, **fields: Any) -> PodFacts:
    return PodFacts(seq=0, uid=uid, namespace="vision", name=f"pod-{uid}", node="n1", observed_ms=observed_ms, **fields)


def acknowledge(outbox: Outbox, durable: int, checkpointed: int = 0, archived: int | None = None) -> None:
    outbox.acknowledge(
        Ack(epoch=outbox.epoch, durable_seq=durable, checkpointed_seq=checkpointed, archived_seq=archived)
    )


def pending_seqs(outbox: Outbox, **limits: Any) -> list[int]:
    pending = outbox.pending(**{**ALL, **limits})
    if pending is None:
        return []
    return sorted(r.seq for r in (*pending.intervals, *pending.facts, *pending.skipped))
