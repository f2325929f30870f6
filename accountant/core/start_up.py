"""Determines in which spans the idle time of a pod is start-up: before its first container runs, or while it waits for
its gang.

Unreported instants are not guessed. A pod without a reported start counts as `starting` until the last report that
shows it bound and not running. While a pod runs and another pod of its gang, created before this one started, has not
started yet, it is `gang_waiting`. A pod that replaces another one later does not make the others wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, NamedTuple

Phase = Literal["starting", "gang_waiting"]
GANGS = frozenset(
    {
        "PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "TrainJob", "JobSet", "LeaderWorkerSet",
        "RayJob", "RayCluster", "PodGroup",
    }
)  # fmt: skip
"""Kinds of workload whose pods start together, or wait for each other."""
_BEGINNING = 0


class Launch(NamedTuple):
    """The instants of a holder's pod; None if unreported.

    gang: a key that all members of the pod's gang share, "" for a pod without a gang.
    observed_ms: time of the newest report."""

    holder: int
    gang: str
    created_ms: int | None
    scheduled_ms: int | None
    started_ms: int | None
    observed_ms: int


class PhaseSpan(NamedTuple):
    """The span [start_ms, end_ms) of one holder in which its idle time belongs to `phase`."""

    holder: int
    phase: Phase
    start_ms: int
    end_ms: int


def in_gangs(workload: str) -> bool:
    """Whether pods of a workload (`Kind/name`) start together."""
    return workload.partition("/")[0] in GANGS


def gang(workload: str, scope: str) -> str:
    """The key of a pod's gang, from its workload (`Kind/name`) and the cluster and namespace (`scope`); "" for kinds
    without gangs."""
    return f"{scope}/{workload}" if in_gangs(workload) else ""


def phase_spans(launches: Iterable[Launch]) -> list[PhaseSpan]:
    """The start-up spans of all holders, by holder and time. Those of one holder do not overlap."""
    ordered = sorted(launches, key=attrgetter("holder"))
    members: dict[str, list[Launch]] = defaultdict(list)
    for launch in ordered:
        members[launch.gang].append(launch)
    spans = []
    for launch in ordered:
        running = launch.started_ms
        if running is None:
            if launch.scheduled_ms is not None:
                spans.append(PhaseSpan(launch.holder, "starting", _BEGINNING, launch.observed_ms))
            continue
        spans.append(PhaseSpan(launch.holder, "starting", _BEGINNING, running))
        if launch.gang:
            until = max(_waits_until(other, running) for other in members[launch.gang])
            if until > running:
                spans.append(PhaseSpan(launch.holder, "gang_waiting", running, until))
    return spans


def _waits_until(other: Launch, running_ms: int) -> int:
    """The instant until which a member that runs since `running_ms` waits for the other one."""
    if other.created_ms is None or other.created_ms > running_ms:
        return running_ms
    return other.started_ms if other.started_ms is not None else other.observed_ms
