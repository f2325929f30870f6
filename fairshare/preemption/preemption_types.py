"""Defines the inputs and the results of a preemption decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from fairshare.core.model import Gang, Pod, Quota
from fairshare.preemption.preemption_rules import Account, Limit, PastPreemption

Trigger = Literal["waits", "latency", "by hand", "idle"]
Ground = Literal["within quota", "above share", "latency", "lower class", "idle"]
"""Why a part may be taken: its queue holds more than its quota while the other is within its own; its queue is
above its share and the other below; it borrows while a latency is over its threshold; it is of the same
queue and a lower priority (for a latency alone); or it does not use what it holds."""

Outcome = Literal["room", "preempts", "denied"]


@dataclass(frozen=True, slots=True)
class PreemptionCall:
    """A workload for which a latency objective, or a person, asks for room at once. workload: namespace/name, or "" for
    all of the queue; a workload alone says its queue itself. gpus: to be freed where nothing of it waits. why: one
    sentence."""

    queue: str
    workload: str
    why: str
    gpus: float = 0.0
    trigger: Trigger = "latency"


@dataclass(frozen=True, slots=True)
class PodUse:
    """GPU-microseconds that a pod held in some span. unknown_us: held, and nothing is known of it."""

    busy_us: int
    idle_us: int
    unknown_us: int


@dataclass(frozen=True, slots=True)
class Idleness:
    """What the ledger measured of pods up to `end_ms`, by uid, and what is known of their warnings.

    lasting, recent: over the rule's `sustained` and over its `grace`. warned: since when their owners know.
    exempt: why the rule leaves them alone. worked: GPU-hours since the last checkpoint, or the start, that were
    not measured idle."""

    end_ms: int
    lasting: Mapping[str, PodUse]
    recent: Mapping[str, PodUse]
    warned: Mapping[str, int] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    worked: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreemptionInputs:
    """Everything a decision is made from, beside the policy.

    accounts: GPUs by queue. free: GPUs by node, those of pods on their way out included. usable: nodes by
    workload, where it cannot run on all. vetoed: workload to the reason why the cluster will not let it go.
    calls_only: no other claim may take. idle: of pods that may not use what they hold; None: not asked. quotas: by
    which the target admits work, by the pools that gangs name; empty where it counts in nodes alone."""

    now_ms: int
    target: str
    gangs: tuple[Gang, ...]
    accounts: Mapping[str, Account]
    free: Mapping[str, float]
    usable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    past: tuple[PastPreemption, ...] = ()
    calls: tuple[PreemptionCall, ...] = ()
    vetoed: Mapping[str, str] = field(default_factory=dict)
    calls_only: bool = False
    idle: Idleness | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victim:
    """A workload, or some of its pods, that gives way. reason: one sentence for its owner."""

    gang: Gang
    pods: tuple[Pod, ...]
    gpus: float
    lost_gpu_hours: float
    whole: bool
    ground: Ground
    team: str
    reason: str


@dataclass(frozen=True, slots=True)
class SparedWorkload:
    """A running workload that was looked at and stays, and why. limit: the one that spares it, if one does."""

    key: str
    queue: str
    reason: str
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one claim. outcome: there is room already; others give way; or nothing can be done."""

    claimant: str
    queue: str
    gpus: float
    trigger: Trigger
    outcome: Outcome
    reason: str
    victims: tuple[Victim, ...] = ()
    spared: tuple[SparedWorkload, ...] = ()


_SITUATION: TypeAdapter[PreemptionInputs] = TypeAdapter(PreemptionInputs)
_VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)


def write(value: PreemptionInputs) -> dict[str, Any]:
    """The value as complete JSON: `read` gives the same value back."""
    plain: dict[str, Any] = _SITUATION.dump_python(value, mode="json")
    return plain


def read(plain: Mapping[str, Any]) -> PreemptionInputs:
    """Raises ValueError for what `write` did not write."""
    return _SITUATION.validate_python(plain)


def show(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON, for the record."""
    plain: dict[str, Any] = _VERDICT.dump_python(verdict, mode="json")
    return plain
