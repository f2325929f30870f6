"""Defines the inputs and the results of a preemption decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from fairshare.core.queues_and_weights import Gang, Pod, Quota
from fairshare.preemption.reclaim_rules_and_limits import Account, Limit, PastPreemption

Trigger = Literal["waits", "latency", "by hand", "idle"]
Ground = Literal["within quota", "above share", "latency", "lower class", "idle"]
"""Why a part of a workload may be taken:

- within quota: its queue holds more than its quota while the other queue is within its own
- above share: its queue is above its share and the other queue below
- latency: its queue holds more than its quota, and a latency objective or a person requests the GPUs
- lower class: it is in the same queue with a lower priority (only for such a request)
- idle: it does not use the GPUs that it holds"""

Outcome = Literal["room", "preempts", "denied"]


@dataclass(frozen=True, slots=True)
class PreemptionCall:
    """A request of a latency objective or a person to make room without the usual wait.

    workload: namespace/name, or "" for the whole queue. A workload determines its queue.
    why: the reason in one sentence.
    gpus: the GPUs to free if no pod of the workload waits."""

    queue: str
    workload: str
    why: str
    gpus: float = 0.0
    trigger: Trigger = "latency"


@dataclass(frozen=True, slots=True)
class PodUse:
    """The GPU time of a pod in a span, in microseconds, by use. unknown_us: time in which the use was not measured."""

    busy_us: int
    idle_us: int
    unknown_us: int


@dataclass(frozen=True, slots=True)
class Idleness:
    """Idle time of pods up to `end_ms` from the ledger, and the warnings of their owners, by uid of the pod.

    lasting, recent: the use over the rule's `sustained` and over its `grace`.
    warned: the times of the warnings.
    exempt: the reason for each exempt pod.
    worked: GPU-hours since the last checkpoint, or the start, that were not measured idle."""

    end_ms: int
    lasting: Mapping[str, PodUse]
    recent: Mapping[str, PodUse]
    warned: Mapping[str, int] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    worked: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreemptionInputs:
    """All inputs of a preemption decision besides the policy.

    accounts: the GPUs of each queue.
    free: free GPUs by node, including those of pods that are being deleted.
    usable: the nodes of each workload that cannot run on all nodes.
    vetoed: by workload, the reason why the cluster does not allow it to be stopped.
    calls_only: whether only `calls` may take GPUs.
    idle: pods that may not be using their GPUs; None if this was not queried.
    quotas: the target's quotas by the pools that gangs name; empty if it counts only nodes.
    pool_nodes: the nodes of each pool that is not for all nodes.
    models: the GPUs of each queue by GPU model, if the policy has quotas by model (`fairshare.core.gpu_models`).
    model_nodes: the nodes of each model.
    held_models: by running workload, its GPUs of each model.
    model_choices: by waiting workload, the pools and models by which it may start, in the scheduler's order."""

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
    pool_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Account]] = field(default_factory=dict)
    model_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held_models: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    model_choices: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def accounts_of(self, model: str | None) -> Mapping[str, Account]:
        """Return the GPUs of each queue of one model; None: of all."""
        return self.accounts if model is None else self.models[model]


@dataclass(frozen=True, slots=True)
class Victim:
    """A workload, or some of its pods, that is to be stopped.

    whole: whether the workload stops. Otherwise it continues with fewer pods.
    team: the team against whose limits it counts.
    reason: one sentence for its owner."""

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
    """A running workload that was considered and is not stopped, and why.

    limit: the limit that protects it, if one does."""

    key: str
    queue: str
    reason: str
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one claim.

    outcome: `room` if it fits without preemption, `preempts` if victims make room, `denied` otherwise.
    spared: running workloads that were considered and stay."""

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


def inputs_to_json(value: PreemptionInputs) -> dict[str, Any]:
    """Return the inputs as JSON, from which `inputs_from_json` restores them."""
    plain: dict[str, Any] = _SITUATION.dump_python(value, mode="json")
    by_model = ("models", "model_nodes", "held_models", "model_choices")
    return {key: each for key, each in plain.items() if each or key not in by_model}


def inputs_from_json(plain: Mapping[str, Any]) -> PreemptionInputs:
    """Restore the inputs from JSON. Raises ValueError for anything that `inputs_to_json` did not write."""
    return _SITUATION.validate_python(plain)


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON for its decision record."""
    plain: dict[str, Any] = _VERDICT.dump_python(verdict, mode="json")
    return plain
