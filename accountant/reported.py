"""What other systems tell about the holders of GPUs: part of the published HTTP language, as msgspec reads it."""

from __future__ import annotations

import msgspec

from agent.wire import PodFacts


class PodReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts of one cluster's holders; the newest observation of each counts, and none from the future."""

    cluster: str
    source: str
    pods: tuple[PodFacts, ...]
