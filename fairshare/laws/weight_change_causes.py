"""Attributes a change of a weight to its causes (policy, capacity, usage, demand, ...), so that the parts add up to it.

The inputs of the law are replaced one after the other, in a fixed order: the input of the previous decision by the
present one. The effect of each replacement on the law's result is the contribution of that input. The rest, between the
law's result and the published weight, is pace: the step bound, the hold-down and the deadband."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor, fsum, log10

from accountant.wire.policy_models import UsageWindow
from fairshare.core.queues_and_weights import Standing, Weight
from fairshare.laws.weight_calculation import WeightInputs, weigh_pools

CAUSES = (
    ("policy", "the policy"),
    ("capacity", "capacity"),
    ("usage", "its own usage"),
    ("demand", "its own demand"),
    ("others", "usage and demand of others"),
    ("memory", "what the law remembers"),
    ("pace", "pace (step bound, hold-down, deadband)"),
)
"""Contributions and their names, in the order in which inputs are replaced."""
MOST = 32
"""Largest number of weights of one cycle whose change is split. Each of them needs two computations of all weights."""
MOST_SITUATIONS = 4
"""Largest number of different previous decisions. Each of them needs five more computations of all weights."""
_SHOWN_DIGITS = 4


@dataclass(frozen=True, slots=True)
class DecidedWeight:
    """A queue's decided weight and its inputs."""

    situation: WeightInputs
    value: float


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A change of a weight.

    before: the previously decided weight.
    parts: by cause; they add up to the change since."""

    before: float
    parts: Mapping[str, float]


def changes(
    decided: Mapping[str, DecidedWeight], now: WeightInputs, weights: Iterable[Weight]
) -> dict[str, WeightChange]:
    """Return the causes of change of each weight in `now` that differs from the decided one; MOST weights at most."""
    moved = [
        (decided[one.queue], one)
        for one in sorted(weights, key=lambda one: one.queue)
        if one.queue in decided and decided[one.queue].value != one.value
    ]
    groups: dict[int, tuple[WeightInputs, list[tuple[float, Weight]]]] = {}
    for before, weight in moved[:MOST]:
        groups.setdefault(id(before.situation), (before.situation, []))[1].append((before.value, weight))
    newest = sorted(groups.values(), key=lambda group: -group[0].now_ms)[:MOST_SITUATIONS]
    return {queue: change for situation, several in newest for queue, change in _since(situation, now, several).items()}


def _since(before: WeightInputs, now: WeightInputs, moved: Iterable[tuple[float, Weight]]) -> dict[str, WeightChange]:
    policy = replace(
        before, policy=now.policy, exhausted=now.exhausted, standings=_standings(before.standings, now.standings, ())
    )
    window = now.window.model_copy(update={"usage": before.window.usage})
    capacity = replace(policy, window=window, gpus=now.gpus, devices=now.devices, pools=now.pools)
    others = replace(now, memory=before.memory, now_ms=before.now_ms)
    steps = [_answers(one) for one in (before, policy, capacity)]
    last = [_answers(others), _answers(now)]
    found: dict[str, WeightChange] = {}
    for decided, weight in moved:
        queue = weight.queue
        usage = replace(capacity, window=_with_usage(capacity.window, now.window, queue))
        demand = replace(usage, standings=_standings(before.standings, now.standings, (queue,)))
        way = [each.get(queue) for each in (*steps, _answers(usage), _answers(demand), *last)]
        known = [answer for answer in way if answer is not None]
        if len(known) < len(way):
            continue  # a queue that did not exist before
        parts = {cause: after - answer for (cause, _), answer, after in zip(CAUSES, known, known[1:], strict=False)}
        parts["pace"] = weight.value - decided - fsum(parts.values())
        found[queue] = WeightChange(decided, parts)
    return found


def change_sentence(change: WeightChange, value: float) -> str:
    """Return one clause for people with the visible parts, the largest first.

    The parts are rounded to four digits so that they add up to the displayed change of the weight."""
    size = max(abs(change.before), abs(value))
    if size == 0:
        return ""
    places = _SHOWN_DIGITS - 1 - floor(log10(size))
    whole = round(value, places) - round(change.before, places)
    units = _apportioned(change.parts, round(whole * 10**places), 10**places)
    words = dict(CAUSES)
    rows = sorted(
        ((abs(each), cause, each) for cause, each in units.items() if each), key=lambda row: (-row[0], row[1])
    )
    if not rows:
        return ""
    decimals = max(0, places)
    shown = ", ".join(f"{words[cause]} {each / 10**places:+.{decimals}f}" for _, cause, each in rows)
    return f"since the decision before {round(whole, decimals):+.{decimals}f}: {shown}"


def _apportioned(parts: Mapping[str, float], whole: int, scale: float) -> dict[str, int]:
    """Return whole units that add up to `whole`, by largest remainder."""
    floors = {cause: floor(part * scale) for cause, part in parts.items()}
    remainders = sorted(parts, key=lambda cause: (floors[cause] - parts[cause] * scale, cause))
    missing = whole - sum(floors.values())
    for number in range(abs(missing)):
        cause = remainders[number % len(remainders)] if missing > 0 else remainders[-1 - number % len(remainders)]
        floors[cause] += 1 if missing > 0 else -1
    return floors


def _answers(one: WeightInputs) -> Mapping[str, float]:
    """Return the law's weight for every queue, before pace."""
    return {weight.queue: weight.explanation.proportional for weight in weigh_pools(one).weights}


def _standings(
    before: Mapping[str, Standing], now: Mapping[str, Standing], replaced: Iterable[str]
) -> dict[str, Standing]:
    """Return the standings of the present queues: replaced and new ones as they are now, the others as before."""
    return {queue: standing if queue in replaced else before.get(queue, standing) for queue, standing in now.items()}


def _with_usage(window: UsageWindow, now: UsageWindow, queue: str) -> UsageWindow:
    usage = {name: used for name, used in window.usage.items() if name != queue}
    if queue in now.usage:
        usage[queue] = now.usage[queue]
    return window.model_copy(update={"usage": usage})
