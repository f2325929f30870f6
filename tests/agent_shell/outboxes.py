"""What an outbox has to send, and an accountant's answer to it, in a line."""

from __future__ import annotations

from typing import Any

from agent.upload.spool import Outbox
from agent.wire import Ack

ALL = {"max_rows": 10_000, "max_bytes": 100_000_000}


def acknowledge(outbox: Outbox, durable: int, checkpointed: int = 0, archived: int | None = None) -> None:
    outbox.acknowledge(
        Ack(epoch=outbox.epoch, durable_seq=durable, checkpointed_seq=checkpointed, archived_seq=archived)
    )


def pending_seqs(outbox: Outbox, **limits: Any) -> list[int]:
    pending = outbox.pending(**{**ALL, **limits})
    if pending is None:
        return []
    return sorted(r.seq for r in (*pending.intervals, *pending.facts, *pending.skipped))
