"""The digest of a record's content: equal content, equal digest, in every release.

Only for comparing a replay with what was stored. A field added to the wire later joins the text
only where it differs from its default, so that old digests stay true.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from agent.wire import PodFacts, UsageInterval

_encoder = msgspec.json.Encoder(order="deterministic")
CONTENT_FIELDS = (
    "start_ms", "end_ms", "gpu_uuid", "gpu_model", "slice", "holder", "sharing", "health", "capacity_us",
    "allocated_us", "busy_us", "sm_active_us", "tensor_active_us", "memory_mib_s", "energy_uj", "method", "gaps",
)  # fmt: skip
"""Of an interval: everything but its number."""
_INTERVAL = attrgetter(*CONTENT_FIELDS)
_FACT = attrgetter(
    "uid", "namespace", "name", "node", "labels", "owners", "workload", "queue_ref", "priority", "requests",
    "created_ms", "scheduled_ms", "started_ms", "ended_ms", "observed_ms",
)  # fmt: skip


def digest(record: UsageInterval | PodFacts) -> int:
    """64 bits over everything but the number."""
    text = _encoder.encode(_INTERVAL(record) if isinstance(record, UsageInterval) else _FACT(record))
    return int.from_bytes(_hash(text), "big")


def contents(rows: Iterable[UsageInterval]) -> list[tuple[Any, ...]]:
    """CONTENT_FIELDS of each."""
    return list(map(_INTERVAL, rows))


def digests(of: Sequence[tuple[Any, ...]]) -> npt.NDArray[np.uint64]:
    """`digest` of intervals, from their `contents`. JSON has no line break of its own, so all are written at once."""
    texts = _encoder.encode_lines(of).split(b"\n")[: len(of)]
    return np.frombuffer(b"".join(map(_hash, texts)), ">u8").astype(np.uint64)


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()


def content(record: UsageInterval | PodFacts) -> str:
    """The whole record as JSON, for people who look into the quarantine."""
    return _encoder.encode(record).decode()
