"""Defines the report of one cycle, turns its weights into decision records, and computes them again from the records.

Every weight can be computed again from its records: one record holds the cycle's inputs (subject `*`), and one record
per weight refers to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from accountant.wire.policy_models import Decision, Policy, UsageWindow, WindowSpec
from fairshare.core.queues_and_weights import (
    Condition,
    Entitlement,
    FleetWindow,
    Gang,
    Quota,
    SchedulerHistory,
    Standing,
    Weight,
)
from fairshare.laws.feedback_law import Memory
from fairshare.laws.weight_calculation import ModelPart, ShardCapacity, WeightInputs, WeightResult, calculate_weights
from fairshare.preemption.preemption_cycle import RELEASE, PreemptionReport
from fairshare.targets.weight_plan import Apply, Mode
from fairshare.usage.stale_usage_hold import UsageHold
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import Event

Result = Literal["applied", "would-apply", "contested", "refused", "gone", "unavailable", "deferred"]
EVERYTHING = "*"
"""Subject of the record with a cycle's inputs, and of a hold."""
INPUTS = frozenset({"window", "standings", "gpus", "memory", "exhausted", "due", "release"})
"""Keys that every cycle's record has: fields of `WeightInputs`, the entitlements, and the release."""


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The outcome of one planned write. detail: the cluster's message if it failed."""

    apply: Apply
    result: Result
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target in one cycle.

    degraded: message by reason, empty if the target works.
    memory: what was kept before the cycle.
    gangs: unfinished workloads, waiting or running.
    exhausted: queues without over-quota weight because their budget is used up.
    lost: GPUs by node that the ledger records as lost and that are not in `gpus`.
    preemption: None while it is off.
    quotas: the target's own quotas, if it admits work by quota.
    pools: parts that are divided separately; empty if `gpus` are divided as one.
    window: the usage that counted; None if no weight was computed.
    history: how the scheduler counts past use by itself, if it does.
    models, by_model: the inputs and the entitlements of each GPU model, if the policy has quotas by model.
    pool_models: by quota, the GPU model that it is for.
    waiting_models: by waiting workload, the GPU models on which it can start."""

    target: str
    mode: Mode
    standings: Mapping[str, Standing] = field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    entitlements: tuple[Entitlement, ...] = ()
    gpus: float = 0.0
    outcomes: tuple[WriteOutcome, ...] = ()
    conditions: tuple[Condition, ...] = ()
    degraded: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    gangs: tuple[Gang, ...] = ()
    exhausted: frozenset[str] = frozenset()
    preemption: PreemptionReport | None = None
    lost: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    pools: tuple[ShardCapacity, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    window: UsageWindow | None = None
    history: SchedulerHistory | None = None
    models: tuple[ModelPart, ...] = ()
    by_model: Mapping[str, tuple[Entitlement, ...]] = field(default_factory=dict)
    pool_models: Mapping[str, str] = field(default_factory=dict)
    waiting_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CycleReport:
    """One cycle.

    hold: why no weight may follow usage in this cycle; None if weights may change.
    decisions: the records of this cycle.
    gpus_by_node: GPUs of the nodes that accept work.
    free_by_node: the GPUs of these nodes that no pod holds.
    leading: false on a standby.
    model_by_node: the GPU models of these nodes, if the policy has quotas by model.
    parts: which parts of GPUs the MIG instances of pods are."""

    at_ms: int
    duration_ms: int
    policy_version: str
    window: UsageWindow | None
    hold: UsageHold | None
    conditions: tuple[Condition, ...]
    targets: tuple[TargetReport, ...] = ()
    events: tuple[Event, ...] = ()
    decisions: tuple[Decision, ...] = ()
    gpus_by_node: Mapping[str, float] = field(default_factory=dict)
    leading: bool = True
    free_by_node: Mapping[str, float] = field(default_factory=dict)
    model_by_node: Mapping[str, str] = field(default_factory=dict)
    parts: MigParts = NO_NODES

    def scoped_conditions(self) -> tuple[tuple[str, Condition], ...]:
        """Return pairs of target and condition, first the controller's own conditions with the target ""."""
        return tuple(
            [("", condition) for condition in self.conditions]
            + [(target.target, condition) for target in self.targets for condition in target.conditions]
        )


def hold_decision(hold: UsageHold, policy_version: str, at_ms: int) -> Decision:
    """Return the record of a hold."""
    return Decision(
        id=f"{policy_version}/{at_ms}/hold",
        at_ms=at_ms,
        kind="hold",
        target=EVERYTHING,
        subject=EVERYTHING,
        mode="off",
        reason=f"{hold.reason}: {hold.message}",
        policy_version=policy_version,
    )


def weight_decisions(
    target: TargetReport, news: tuple[WriteOutcome, ...], policy_version: str, at_ms: int
) -> tuple[Decision, ...]:
    """Return the record of the cycle's inputs, then one record for each outcome in `news`; empty without news."""
    if not news or target.window is None:
        return ()
    cycle = f"{policy_version}/{at_ms}/{target.target}"
    inputs: dict[str, Any] = {
        "window": target.window.model_dump(mode="json"),
        "standings": {queue: plain(standing) for queue, standing in sorted(target.standings.items())},
        "gpus": target.gpus,
        **({"history": _history_to_json(target.history)} if target.history is not None else {}),
        **({"pools": [plain(pool) for pool in target.pools]} if target.pools else {}),
        **({"models": [_part_to_json(part) for part in target.models]} if target.models else {}),
        "lost": dict(sorted(target.lost.items())),
        "memory": {queue: dict(numbers) for queue, numbers in sorted(target.memory.items())},
        "exhausted": sorted(target.exhausted),
        "release": RELEASE,
        "due": _due(target.entitlements),
        **({"due_by_model": {model: _due(due) for model, due in target.by_model.items()}} if target.by_model else {}),
    }
    common: dict[str, Any] = {
        "at_ms": at_ms,
        "kind": "weight",
        "target": target.target,
        "mode": target.mode,
        "policy_version": policy_version,
    }
    weights = {weight.queue: weight for weight in target.weights}

    def record(outcome: WriteOutcome) -> Decision:
        apply = outcome.apply
        weight = weights.get(apply.queue)
        return Decision(
            id=f"{cycle}/{apply.queue}",
            subject=apply.queue,
            value=weight.value if weight is not None else None,
            previous=weight.previous if weight is not None else None,
            reason=apply.why,
            inputs={
                "cycle": cycle,
                "object": apply.name,
                "published": apply.value,
                "result": outcome.result,
                "detail": outcome.detail,
                **({"explanation": plain(weight.explanation)} if weight is not None else {}),
                **({"why": weight.why} if weight is not None and weight.why != apply.why else {}),
            },
            **common,
        )

    return (
        Decision(id=cycle, subject=EVERYTHING, reason="the inputs of this cycle", inputs=inputs, **common),
        *map(record, news),
    )


def _due(entitlements: Sequence[Entitlement]) -> dict[str, float]:
    return {entitlement.queue: entitlement.gpus for entitlement in entitlements}


def _part_to_json(part: ModelPart) -> dict[str, Any]:
    return {
        "model": part.model,
        "window": part.window.model_dump(mode="json"),
        "standings": {queue: plain(standing) for queue, standing in sorted(part.standings.items())},
        "gpus": part.gpus,
        "exhausted": sorted(part.exhausted),
        "pools": [plain(pool) for pool in part.pools],
    }


def _part_from_json(plain_part: Mapping[str, Any]) -> ModelPart:
    return ModelPart(
        plain_part["model"], _window(plain_part["window"]), _standings(plain_part["standings"]), plain_part["gpus"],
        frozenset(plain_part["exhausted"]), _pools(plain_part["pools"]),
    )  # fmt: skip


def _window(recorded: Mapping[str, Any]) -> UsageWindow:
    return (FleetWindow if "clusters" in recorded else UsageWindow).model_validate(recorded)


def _standings(recorded: Mapping[str, Any]) -> dict[str, Standing]:
    return {queue: Standing(**standing) for queue, standing in recorded.items()}


def _pools(recorded: Sequence[Mapping[str, Any]]) -> tuple[ShardCapacity, ...]:
    return tuple(ShardCapacity(tuple(each["queues"]), each["gpus"], each["part"]) for each in recorded)


def _history_to_json(history: SchedulerHistory) -> dict[str, Any]:
    return {"k": history.k, "window": history.window.model_dump(mode="json")}


def replay_weights(policy: Policy, cycle: Decision) -> WeightResult:
    """Compute a cycle again from its record, with the same numbers, bit for bit.

    policy: the policy in force at that time. Raises ValueError for a record without inputs."""
    return calculate_weights(recorded_inputs(policy, cycle))


def recorded_inputs(policy: Policy, cycle: Decision) -> WeightInputs:
    """Return the inputs of a cycle from its record. Raises ValueError for a record without them.

    policy: the policy in force at that time."""
    if missing := sorted(INPUTS - cycle.inputs.keys()):
        raise ValueError(
            f"decision {cycle.id} has no {', '.join(missing)}: take the decision with subject {EVERYTHING!r} of the "
            "same time"
        )
    inputs: Any = cycle.inputs
    history = inputs.get("history")
    if history is not None:
        window_spec = WindowSpec.model_validate(history["window"])
        policy = SchedulerHistory(history["k"], window_spec).applied_to(policy)
    return WeightInputs(
        policy=policy,
        window=_window(inputs["window"]),
        standings=_standings(inputs["standings"]),
        gpus=inputs["gpus"],
        now_ms=cycle.at_ms,
        memory=inputs["memory"],
        exhausted=frozenset(inputs["exhausted"]),
        pools=_pools(inputs.get("pools", ())),
        models=tuple(map(_part_from_json, inputs.get("models", ()))),
        scheduler_k=history["k"] if history is not None else 0.0,
    )


def plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that contains no other, with lists in place of tuples, as a JSON decoder returns
    them."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
