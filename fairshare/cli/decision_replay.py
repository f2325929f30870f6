"""Computes past decisions again from their records, and finds every number that differs.

The record of a cycle holds all inputs of its weights or preemptions except the policy, which the accountant has by its
version. A number differs only if this release computes it differently, or if the record was changed or is
incomplete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accountant.wire.policy_models import Decision, Policy
from fairshare.controller import cycle_report
from fairshare.controller.cycle_report import EVERYTHING, plain
from fairshare.laws.weight_calculation import WeightResult
from fairshare.preemption import preemption_cycle, preemption_types
from fairshare.preemption.preemption_types import Verdict


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """One number of a decision, as recorded and as recomputed. A CycleReplay has only numbers that differ."""

    decision: str
    number: str
    recorded: object
    recomputed: object


@dataclass(frozen=True, slots=True)
class CycleReplay:
    """The replay of one cycle of one target.

    compared: the number of compared numbers.
    fault: the reason why the cycle cannot be computed again, "" if it can.
    reason: the cause of the differences, as far as known."""

    cycle: Decision
    compared: int
    differences: tuple[ReplayDifference, ...]
    fault: str = ""
    reason: str = ""


def recount(decisions: Sequence[Decision], policies: Mapping[str, Policy], release: str) -> tuple[CycleReplay, ...]:
    """Return the replay of every cycle whose record is among `decisions`, oldest first. A replay also compares the
    decisions that refer to the cycle.

    policies: the policies by version.
    release: the running version of gputally."""
    of_cycle: dict[str, list[Decision]] = {}
    for decision in decisions:
        if isinstance(cycle := decision.inputs.get("cycle"), str):
            of_cycle.setdefault(cycle, []).append(decision)
    cycles = [d for d in decisions if d.kind in ("weight", "preemption") and d.subject == EVERYTHING]
    return tuple(
        _replay_cycle(cycle, sorted(of_cycle.get(cycle.id, []), key=lambda d: (d.subject, d.id)), policies, release)
        for cycle in sorted(cycles, key=lambda d: (d.at_ms, d.id))
    )


def _replay_cycle(
    cycle: Decision, decisions: Iterable[Decision], policies: Mapping[str, Policy], release: str
) -> CycleReplay:
    policy = policies.get(cycle.policy_version)
    if policy is None:
        return CycleReplay(cycle, 0, (), f"the accountant has no version {cycle.policy_version} of the policy")
    try:
        if cycle.kind == "weight":
            numbers = _weights(cycle, decisions, cycle_report.replay_weights(policy, cycle))
        else:
            numbers = _preemptions(cycle, decisions, preemption_cycle.replay_verdicts(policy, cycle))
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        return CycleReplay(cycle, 0, (), f"the record cannot be read: {error}")
    compared = tuple(numbers)
    differences = tuple(number for number in compared if number.recorded != number.recomputed)
    return CycleReplay(cycle, len(compared), differences, reason=_reason(cycle, release) if differences else "")


def _preemptions(
    cycle: Decision, decisions: Iterable[Decision], verdicts: Sequence[Verdict]
) -> Iterator[ReplayDifference]:
    """Yield every number of the cycle's verdicts and victims, as recorded and as recomputed."""
    expected = dict(_expected(cycle, verdicts))
    for decision in decisions:
        recorded = {"value": decision.value, "reason": decision.reason, **decision.inputs}
        fresh = expected.get(decision.id)
        if fresh is None:
            yield ReplayDifference(decision.id, "decision", decision.reason, None)
            continue
        for name, value in fresh.items():
            for number, before, now in _leaves(name, recorded.get(name), value):
                yield ReplayDifference(decision.id, number, before, now)


def _expected(cycle: Decision, verdicts: Sequence[Verdict]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the expected content of each record, by the id of its decision."""
    for n, verdict in enumerate(verdicts):
        yield (
            f"{cycle.id}/{n}",
            {"value": verdict.gpus, "reason": verdict.reason, "verdict": preemption_types.verdict_to_json(verdict)},
        )
        for m, victim in enumerate(verdict.victims):
            content = {"value": victim.gpus, "reason": victim.reason, "claimant": verdict.claimant}
            yield f"{cycle.id}/{n}/{m}", content | preemption_cycle.victim_record(victim)


def _weights(cycle: Decision, weights: Iterable[Decision], weighing: WeightResult) -> Iterator[ReplayDifference]:
    """Yield every number of the weights, and each queue's share, as recorded and as recomputed."""
    for decision in weights:
        for number, recorded, recomputed in _numbers(decision, weighing):
            yield ReplayDifference(decision.id, number, recorded, recomputed)
    recorded_due: Any = cycle.inputs["due"]
    for entitlement in weighing.entitlements:
        recorded_gpus = recorded_due.get(entitlement.queue)
        yield ReplayDifference(cycle.id, f"due.{entitlement.queue}", recorded_gpus, entitlement.gpus)
    by_model: Any = cycle.inputs.get("due_by_model", {})
    for model, entitlements in weighing.by_model.items():
        for each in entitlements:
            recorded_gpus = by_model.get(model, {}).get(each.queue)
            yield ReplayDifference(cycle.id, f"due.{model}.{each.queue}", recorded_gpus, each.gpus)


def _numbers(decision: Decision, weighing: WeightResult) -> Iterator[tuple[str, object, object]]:
    """Yield (name, recorded, recomputed) of the weight and of every step of its computation.

    A write that restored the weight from before gputally has no weight of the law. A write of another value than the
    law's has a reason of its own, and the law's beside it (`why`)."""
    if decision.value is None and "explanation" not in decision.inputs:
        return
    weight = next((w for w in weighing.weights if w.queue == decision.subject), None)
    yield "value", decision.value, weight.value if weight is not None else None
    if weight is None:
        return
    yield "previous", decision.previous, weight.previous
    yield "reason", decision.inputs.get("why", decision.reason), weight.why
    recorded: Any = decision.inputs.get("explanation", {})
    fresh = plain(weight.explanation)
    yield from _leaves("", recorded, fresh)


def _leaves(path: str, recorded: object, fresh: object) -> Iterator[tuple[str, object, object]]:
    if isinstance(recorded, list) and isinstance(fresh, list) and len(recorded) == len(fresh):
        for i, (one, other) in enumerate(zip(recorded, fresh, strict=True)):
            yield from _leaves(f"{path}.{i}", one, other)
    elif isinstance(recorded, Mapping) and isinstance(fresh, Mapping):
        for key in dict.fromkeys([*recorded, *fresh]):
            yield from _leaves(f"{path}.{key}".lstrip("."), recorded.get(key), fresh.get(key))
    else:
        yield path, recorded, fresh


def _reason(cycle: Decision, release: str) -> str:
    recorded_release = cycle.inputs.get("release")
    if recorded_release != release:
        return f"release {recorded_release} decided, and {release} computes again: their arithmetic can differ"
    return "release and inputs are the same: the record was changed, or this computer adds up differently"
