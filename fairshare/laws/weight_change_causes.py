"""Splits the change of a weight into parts that add up to it, one for each cause (policy, usage, demand, ...).

The module replaces the inputs of the previous decision by the present ones, one after the other in a fixed order, and
computes the law's result after each replacement. The part of a cause is the change of the result when its input is
replaced. The rest of the change is the part of pacing: of the step bound, the hold-down and the deadband."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor, fsum, log10

from accountant.wire.policy_models import UsageWindow
from fairshare.core.queues_and_weights import Standing, Weight
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights

CAUSES = (
    ("policy", "the policy"),
    ("capacity", "capacity"),
    ("usage", "its own usage"),
    ("demand", "its own demand"),
    ("others", "usage and demand of others"),
    ("memory", "what the law remembers"),
    ("pace", "pace (step bound, hold-down, deadband)"),
)
"""Causes and their names for people, in the order in which inputs are replaced."""
MOST_WEIGHTS = 32
"""Largest number of weights of one cycle whose change is split. Each of them needs two computations of all weights."""
MOST_PREVIOUS_INPUTS = 4
"""Largest number of different previous inputs. Each of them needs five more computations of all weights."""
_SHOWN_DIGITS = 4


@dataclass(frozen=True, slots=True)
class DecidedWeight:
    """A queue's decided weight and its inputs."""

    inputs: WeightInputs
    value: float


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The change of a weight since the previous decision.

    before: the previously decided weight.
    parts: by cause; they add up to the change."""

    before: float
    parts: Mapping[str, float]


def weight_changes(
    decided: Mapping[str, DecidedWeight], now: WeightInputs, weights: Iterable[Weight]
) -> dict[str, WeightChange]:
    """Return the causes of the change of each weight that differs from the decided one, of MOST_WEIGHTS at most.

    decided: the previous decision, by queue.
    now: the inputs from which `weights` were computed."""
    changed = [
        (decided[weight.queue], weight)
        for weight in sorted(weights, key=lambda weight: weight.queue)
        if weight.queue in decided and decided[weight.queue].value != weight.value
    ]
    groups: dict[int, tuple[WeightInputs, list[tuple[float, Weight]]]] = {}
    for before, weight in changed[:MOST_WEIGHTS]:
        groups.setdefault(id(before.inputs), (before.inputs, []))[1].append((before.value, weight))
    newest = sorted(groups.values(), key=lambda group: -group[0].now_ms)[:MOST_PREVIOUS_INPUTS]
    return {queue: change for inputs, group in newest for queue, change in _since(inputs, now, group).items()}


def _since(before: WeightInputs, now: WeightInputs, changed: Iterable[tuple[float, Weight]]) -> dict[str, WeightChange]:
    """Return the changes of weights whose previous decision had the inputs `before`.

    changed: the decided weight and the present one of each queue."""
    policy = replace(
        before, policy=now.policy, exhausted=now.exhausted, standings=_standings(before.standings, now.standings, ())
    )
    window = now.window.model_copy(update={"usage": before.window.usage})
    capacity = replace(policy, window=window, gpus=now.gpus, devices=now.devices, pools=now.pools)
    others = replace(now, memory=before.memory, now_ms=before.now_ms)
    first_results = [_law_weights(inputs) for inputs in (before, policy, capacity)]
    last_results = [_law_weights(others), _law_weights(now)]
    result: dict[str, WeightChange] = {}
    for decided, weight in changed:
        queue = weight.queue
        usage = replace(capacity, window=_with_usage(capacity.window, now.window, queue))
        demand = replace(usage, standings=_standings(before.standings, now.standings, (queue,)))
        results = (*first_results, _law_weights(usage), _law_weights(demand), *last_results)
        values = [weights[queue] for weights in results if queue in weights]
        if len(values) < len(results):
            continue  # a queue that did not exist before
        parts = {cause: after - value for (cause, _), value, after in zip(CAUSES, values, values[1:], strict=False)}
        parts["pace"] = weight.value - decided - fsum(parts.values())
        result[queue] = WeightChange(decided, parts)
    return result


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


def _law_weights(inputs: WeightInputs) -> Mapping[str, float]:
    """Return the law's weight for every queue, before pace."""
    return {weight.queue: weight.explanation.proportional for weight in calculate_weights(inputs).weights}


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
