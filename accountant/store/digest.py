"""The digest of a record's content: equal content, equal digest, in every release.

Only for comparing a replay with what was stored. A field added to the wire later joins the text
only where it differs from its default, so that old digests stay true.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter

import msgspec

from agent.wire import PodFacts, UsageInterval

_encode = msgspec.json.Encoder(order="deterministic").encode
_INTERVAL = attrgetter(
    "start_ms", "end_ms", "gpu_uuid", "gpu_model", "slice", "holder", "sharing", "health", "capacity_us",
    "allocated_us", "busy_us", "sm_active_us", "tensor_active_us", "memory_mib_s", "energy_uj", "method", "gaps",
)  # fmt: skip
_FACT = attrgetter(
    "uid", "namespace", "name", "node", "labels", "owners", "workload", "queue_ref", "priority", "requests",
    "created_ms", "scheduled_ms", "started_ms", "ended_ms", "observed_ms",
)  # fmt: skip


def digest(record: UsageInterval | PodFacts) -> int:
    """64 bits over everything but the number."""
    text = _encode(_INTERVAL(record) if isinstance(record, UsageInterval) else _FACT(record))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def content(record: UsageInterval | PodFacts) -> str:
    """The whole record as JSON, for people who look into the quarantine."""
    return _encode(record).decode()
