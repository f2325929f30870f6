"""What an engine reports, in the order it happened. Frozen; at_ms is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fairshare.simulator.cluster import Outage, Slot
from fairshare.simulator.jobs import Job

StopReason = Literal["finished", "reclaimed", "outage"]


@dataclass(frozen=True, slots=True)
class Started:
    """`job` holds `slots` from now on. attempt counts from 1."""

    at_ms: int
    job: Job
    slots: tuple[Slot, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """`job` holds its slots no longer. for_queue: for whom it was reclaimed."""

    at_ms: int
    job: Job
    slots: tuple[Slot, ...]
    attempt: int
    reason: StopReason
    for_queue: str = ""


@dataclass(frozen=True, slots=True)
class OutageBegan:
    at_ms: int
    outage: Outage


@dataclass(frozen=True, slots=True)
class OutageEnded:
    at_ms: int
    outage: Outage


Event = Started | Stopped | OutageBegan | OutageEnded
