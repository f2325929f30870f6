"""Splits the change of a weight since the decision before into parts that add up to it, one for each cause (policy,
usage, demand, ...), from the recorded inputs of both decisions.

The module replaces the inputs of the previous decision by the present ones, one after the other in a fixed order, and
computes the law's result after each replacement. The part of a cause is the change of the result when its input is
replaced. The rest of the change is the part of pace: weights stay for an interval, and a turn interrupts them. That
takes six computations of all weights, so it is done for an explanation or a page, and never in a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor, fsum, log10

from accountant.wire.decision_text import TextTable, four_digits
from accountant.wire.policy_models import Decision, Policy, UsageWindow
from fairshare.controller.cycle_report import recorded_inputs
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights
from gputally.base.number_format import MINUS

CAUSES = (
    ("policy", "the policy"),
    ("capacity", "capacity"),
    ("usage", "its own usage"),
    ("demand", "its own demand"),
    ("others", "usage and demand of others"),
    ("pace", "pace (the interval between changes, turns)"),
)
"""Causes and their names for people, in the order in which inputs are replaced."""
_SHOWN_DIGITS = 4


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The change of a weight since the previous decision.

    before: the previously decided weight.
    parts: by cause; they add up to the change."""

    before: float
    parts: Mapping[str, float]


def decision_before(decision: Decision, decisions: Iterable[Decision]) -> Decision | None:
    """Return the newest of `decisions` that decided the same queue's weight at the same target earlier."""
    earlier = (
        other
        for other in decisions
        if (other.kind, other.target, other.subject) == ("weight", decision.target, decision.subject)
        and other.at_ms < decision.at_ms
        and other.value is not None
    )
    return max(earlier, key=lambda other: other.at_ms, default=None)


def weight_change(
    decision: Decision, decisions: Iterable[Decision], policies: Mapping[str, Policy]
) -> WeightChange | None:
    """Return the causes of the change that a decision made to a weight.

    None: it decided no weight or the weight of before, there is no decision before it, or records do not say enough.
    decisions: at least the decision before, and the records of the inputs of both cycles.
    policies: the policies by version."""
    decisions = tuple(decisions)
    before = decision_before(decision, decisions)
    if before is None or before.value is None or decision.value is None or before.value == decision.value:
        return None
    by_id = {each.id: each for each in decisions}
    try:
        then, now = (
            recorded_inputs(policies[cycle.policy_version], cycle)
            for cycle in (by_id[str(each.inputs["cycle"])] for each in (before, decision))
        )
        return _split(then, now, decision.subject, before.value, decision.value)
    except (KeyError, ValueError, TypeError, ArithmeticError):
        return None  # a posted decision is external JSON


def _split(before: WeightInputs, now: WeightInputs, queue: str, decided: float, value: float) -> WeightChange:
    """Raises KeyError for a queue that did not exist before."""
    policy = replace(
        before, policy=now.policy, exhausted=now.exhausted, standings=_standings(before.standings, now.standings, ())
    )
    window = now.window.model_copy(update={"usage": before.window.usage})
    capacity = replace(policy, window=window, gpus=now.gpus, pools=now.pools)
    usage = replace(capacity, window=_with_usage(window, now.window, queue))
    demand = replace(usage, standings=_standings(before.standings, now.standings, (queue,)))
    values = [_law_weight(inputs, queue) for inputs in (before, policy, capacity, usage, demand, now)]
    parts = {cause: after - value for (cause, _), value, after in zip(CAUSES, values, values[1:], strict=False)}
    return WeightChange(decided, parts | {"pace": value - decided - fsum(parts.values())})


def with_change(decision: Decision, change: WeightChange | None) -> Decision:
    """Return the decision with the causes of its change before its reason."""
    if change is None or decision.value is None:
        return decision
    causes = change_sentence(change, decision.value)
    return decision.model_copy(update={"reason": "; ".join(filter(None, (causes, decision.reason)))})


def change_table(change: WeightChange, value: float) -> TextTable:
    """Return a table of the parts of a change, the largest first. value: the present weight."""
    names = dict(CAUSES)
    parts = sorted(((cause, part) for cause, part in change.parts.items() if part), key=lambda row: -abs(row[1]))
    rows = [
        (names[cause][:1].upper() + names[cause][1:], f"{'+' if part > 0 else MINUS}{four_digits(abs(part))}")
        for cause, part in parts
    ]
    return TextTable(
        "What changed it since the previous decision",
        "The inputs of the previous decision were replaced by those of this one, one at a time.",
        ("Cause", "Weight"),
        (("Weight at the previous decision", four_digits(change.before)), *rows, ("New weight", four_digits(value))),
    )


def change_sentence(change: WeightChange, value: float) -> str:
    """Return one clause for people with the parts of a change, the largest first; "" if no part is visible.

    The parts are rounded to four digits so that they add up to the displayed change. value: the present weight."""
    size = max(abs(change.before), abs(value))
    if size == 0:
        return ""
    places = _SHOWN_DIGITS - 1 - floor(log10(size))
    total = round(value, places) - round(change.before, places)
    units = _apportioned(change.parts, round(total * 10**places), 10**places)
    names = dict(CAUSES)
    visible = sorted(
        ((cause, count) for cause, count in units.items() if count), key=lambda row: (-abs(row[1]), row[0])
    )
    if not visible:
        return ""
    decimals = max(0, places)
    parts = ", ".join(f"{names[cause]} {count / 10**places:+.{decimals}f}" for cause, count in visible)
    return f"since the decision before {round(total, decimals):+.{decimals}f}: {parts}"


def _apportioned(parts: Mapping[str, float], total: int, scale: float) -> dict[str, int]:
    """Return the parts times `scale` in whole units that add up to `total`, by largest remainder."""
    floors = {cause: floor(part * scale) for cause, part in parts.items()}
    remainders = sorted(parts, key=lambda cause: (floors[cause] - parts[cause] * scale, cause))
    missing = total - sum(floors.values())
    for number in range(abs(missing)):
        cause = remainders[number % len(remainders)] if missing > 0 else remainders[-1 - number % len(remainders)]
        floors[cause] += 1 if missing > 0 else -1
    return floors


def _law_weight(inputs: WeightInputs, queue: str) -> float:
    """Return the law's weight for the queue as of now, whenever it is published. Raises KeyError if it has none."""
    weights = {weight.queue: weight.explanation.proportional for weight in calculate_weights(inputs).weights}
    return weights[queue]


def _standings(
    before: Mapping[str, Standing], now: Mapping[str, Standing], replaced: Iterable[str]
) -> dict[str, Standing]:
    """Return the standings of the present queues: replaced and new ones as they are now, the others as before."""
    return {queue: standing if queue in replaced else before.get(queue, standing) for queue, standing in now.items()}


def _with_usage(window: UsageWindow, now: UsageWindow, queue: str) -> UsageWindow:
    """Return the window with the queue's usage from `now`."""
    usage = {name: used for name, used in window.usage.items() if name != queue}
    if queue in now.usage:
        usage[queue] = now.usage[queue]
    return window.model_copy(update={"usage": usage})
