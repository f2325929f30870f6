"""Why a holder's GPU idles at the beginning: nothing runs yet, or the rest of its gang does not.

A pod holds its GPU from the moment it is bound. Until its first container runs it is `starting`; while it runs
but members of its gang that existed by then do not, it is `gang_waiting`; from then on what it leaves idle is
`running_idle`. A member that replaces another later makes nobody wait. What nobody reported is not guessed:
without a start, a pod is `starting` only as long as it was seen bound and not running. Pure.
"""

from __future__ import annotations

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
"""Kinds of workload whose pods begin together, or wait for each other."""
_BEGINNING = 0


class Launch(NamedTuple):
    """When a holder's pod began. gang: what ties its members together, "" for a pod alone.

    observed_ms: of the newest report. Instants that nobody reported are None."""

    holder: int
    gang: str
    created_ms: int | None
    scheduled_ms: int | None
    started_ms: int | None
    observed_ms: int


class PhaseSpan(NamedTuple):
    """[start_ms, end_ms) of one holder; what it left idle then belongs to `phase`."""

    holder: int
    phase: Phase
    start_ms: int
    end_ms: int


def in_gangs(workload: str) -> bool:
    """Whether pods of such a workload (`Kind/name`) begin together."""
    return workload.partition("/")[0] in GANGS


def gang(workload: str, place: str) -> str:
    """The gang of a pod by its workload (`Kind/name`) and where that lives; "" where its kind has none."""
    return f"{place}/{workload}" if in_gangs(workload) else ""


def phase_spans(launches: Iterable[Launch]) -> list[PhaseSpan]:
    """Spans of all holders, by holder and time; those of one holder do not overlap."""
    ordered = sorted(launches, key=attrgetter("holder"))
    members: dict[str, list[Launch]] = {}
    for launch in ordered:
        if launch.gang:
            members.setdefault(launch.gang, []).append(launch)
    found = []
    for launch in ordered:
        running = launch.started_ms
        if running is None:
            if launch.scheduled_ms is not None:
                found.append(PhaseSpan(launch.holder, "starting", _BEGINNING, launch.observed_ms))
            continue
        found.append(PhaseSpan(launch.holder, "starting", _BEGINNING, running))
        if launch.gang:
            until = max(_there(other, running) for other in members[launch.gang])
            if until > running:
                found.append(PhaseSpan(launch.holder, "gang_waiting", running, until))
    return found


def _there(other: Launch, running_ms: int) -> int:
    """Until when somebody who runs since then waits for another member."""
    if other.created_ms is None or other.created_ms > running_ms:
        return running_ms
    return other.started_ms if other.started_ms is not None else other.observed_ms
