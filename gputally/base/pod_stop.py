"""By whom and why a pod was stopped, as its status says: the form in which agents send it and the ledger keeps it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import structs

from gputally.base.untrusted_text import as_name

PREEMPTED: Final = "preempted"
"""A scheduler took the pod's GPUs for other pods."""
EVICTED: Final = "evicted"
"""Another program of the cluster, or a person through the eviction API, stopped it."""
DELETED: Final = "deleted"
"""It was deleted, by a person or by its own controller: its status does not say by which."""
FAILED: Final = "failed"
"""A container of it ended with an error."""
LONGEST_MESSAGE: Final = 800
LATEST_MS: Final = 10**15
"""Later than every time that the API server can write."""

_Text = Annotated[str, msgspec.Meta(max_length=4_096)]
"""Wider than what is kept (`bounded`)."""


class PodStop(msgspec.Struct, frozen=True, gc=False):
    """Why a pod was stopped. Only the programs of the cluster write a pod's status; its author cannot.

    how: one of the words above. A word of a newer sender means only that the pod was stopped.
    by: the program that stopped it, such as a scheduler; "" if the status does not say it.
    reason: one word, such as `PreemptionByScheduler` or `OOMKilled`.
    message: in words, "" for none.
    at_ms: when; None if unknown."""

    how: _Text
    by: _Text = ""
    reason: _Text = ""
    message: _Text = ""
    at_ms: int | None = None


def bounded(stop: PodStop) -> PodStop:
    """The stop with texts of one line and bounded length, and without a time that is none. A message may quote names
    that users chose."""
    return structs.replace(
        stop,
        how=as_name(stop.how, 32),
        by=as_name(stop.by),
        reason=as_name(stop.reason),
        message=as_name(" ".join(stop.message.split()), LONGEST_MESSAGE),
        at_ms=stop.at_ms if stop.at_ms is not None and 0 < stop.at_ms <= LATEST_MS else None,
    )
