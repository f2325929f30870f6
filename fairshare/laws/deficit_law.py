"""Defines the deficit law: it repays, over a set time, the GPU-hours that a queue is owed.

A queue is owed GPU-hours if it used less in the window than its target part of all usage, although it requested more.
The law repays the debt over the next days, at a rate that affects the other queues little. For example, with `repay` =
100 h a queue that is owed 100 GPU-hours gets about one GPU more than its share.

Three further rules keep weights steady and admit large gangs. A weight changes only if it differs enough from the
wanted one (the quiet zone). Preemptions that are made for a queue lower its weight (the price). A gang that is larger
than any share gets a turn (`gang_turns`).

    owed       e = fill(Σ used, used + horizon · pending; targets) - used                [GPU-hours]
    catch-up   r = clip(e / repay, ± rate · pool · √mean · size), at most the requested GPUs beyond fair  [GPUs]
    error      x = low-pass(fair + r - held, smoothing)                                        [GPUs]
    pressure   v = gain · x / (target · pool) - price                          [log of the weight]
    price      reclaim_price · q / (q + 1), with q = evictions per GPU-hour used / price_knee
    common     c = ln of the factor by which all pressures together would change the sum of the weights
    quiet      a weight stays while |ln(multiplier) - (v - c)| <= quiet / (target · size); all weights stay while
               the siblings together request no more than the pool

Symbols:

    used       GPU-hours of the queue in the window
    pending    GPUs that the queue requests and does not hold
    held       GPUs that the queue holds
    target     the queue's part of the pool by quota and weight
    mean       mean of the siblings' targets
    size       (target / mean) ^ 0.3, which is 1 for an average queue
    fair       instantaneous share of the queue by its target
    evictions  preemptions that were made for this queue
    fill       fill(total, caps; targets): the total in proportion to the targets, each part at most its cap, the
               rest to the others (`division.fill`)

The other names (repay, rate, horizon, gain, smoothing, reclaim_price, price_knee, quiet) are settings of
`accountant.wire.policy_models.DeficitPolicy`.

Only the proportions of weights matter. A change common to all weights therefore has no effect, and `common` removes it.

The GPUs that a queue holds fluctuate around its share. The other queues hardly notice a catch-up that is no larger than
this fluctuation. Jobs have the same sizes in large and small queues, so the fluctuation grows less than in proportion
to the target. This is why the bounds contain `size`: relative to their targets, small queues move further and have a
wider quiet zone.

Of the queues with a gang that fits no share, the one with the most credit gets the next turn. Credit is the amount that
the queue is owed in the window, plus the sum over all time of (fair share - held GPUs), which is limited to ± horizon ·
pool. The second term also counts time before the window.

A queue without pending jobs is never owed anything, because it could not have used more than it did. Credit therefore
exists only for real work. With `gain` and `reclaim_price` at 0 the configured weights apply, except in turns.

The law stores for each queue: x, the log of its multiplier, the sum over time for the credit, and for the price the
decaying sums of evictions and of GPU-hours used. Units are GPUs and hours internally."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, fsum, log, sqrt
from operator import mul, sub

from accountant.wire.policy_models import DeficitPolicy, TurnPolicy
from fairshare.laws.division import fill
from fairshare.laws.feedback_laws import LawQueues, LawResult, Memory
from fairshare.laws.gang_turns import queue_in_turn, queues_with_large_gangs, turn_now

State = dict[str, float]
"""State of a queue: x, evictions, used, credit, at_ms (time of the last update; absent before the first) and y (natural
logarithm of the multiplier in force). `GangTurn.kept` is the state of a turn."""
_KEYS = ("x", "evictions", "used", "credit", "at_ms", "y")


def _states(memory: Memory, siblings: LawQueues) -> dict[str, State]:
    """Return the state of these siblings without that of a turn.

    A new sibling has zeros, and as its multiplier that of its weight in force."""
    columns = siblings.columns
    states: dict[str, State] = {}
    for name, weight, in_force in zip(columns.names, columns.weights, columns.weights_now, strict=True):
        state = {"x": 0.0, "evictions": 0.0, "used": 0.0, "credit": 0.0}
        stored = memory.get(name)
        if stored is not None:
            state |= {key: stored[key] for key in _KEYS if key in stored}
        if "y" not in state:
            state["y"] = log(in_force / weight) if in_force and weight > 0 else 0.0
        states[name] = state
    return states


_MOST_PRESSURE = log(8.0)
"""Pressure is limited to a factor of 8 in both directions; the policy's multipliers are usually narrower."""
_PRICE_MEMORY_H = 336.0
"""Hours over which evictions and usage fade from the price."""
_SIZE_EXPONENT = 0.3
"""Exponent of a queue's size in its bounds; chosen on a trace (docs/evaluation.md)."""
_LEAST_TARGET = 1e-3
"""Smallest part of the pool that counts as a target, because errors are divided by it."""


@dataclass(frozen=True, slots=True)
class Deficit:
    """The deficit law with its settings."""

    settings: DeficitPolicy
    turns: TurnPolicy
    relative = False

    def __call__(self, siblings: LawQueues, memory: Memory, /) -> LawResult:
        sorted_siblings = siblings.by_name()
        if sorted_siblings is not siblings:
            result = self(sorted_siblings, memory)
            by_name, order = result.weights, siblings.columns.names
            return replace(result, names=order, wanted=[by_name[name] for name in order])
        names, weights, targets, usage, requested, allocated, _, _, _, _, reclaims = siblings.columns
        pool, settings, now_ms = siblings.pool, self.settings, siblings.now_ms
        if pool <= 0:  # if their parent has nothing, no queue has too much or too little
            notes = dict.fromkeys(names, "there is nothing to divide here")
            return LawResult(names, list(weights), {}, notes, _states(memory, siblings))
        gain, price, knee = settings.gain, settings.reclaim_price, settings.price_knee
        repay_h, horizon_h = settings.repay / 3600, settings.horizon / 3600
        most_credit = horizon_h * pool
        shares = fill(pool, requested, targets)
        debts = _debts(usage, requested, allocated, targets, siblings, horizon_h)
        bounds, zones = _bounds_and_zones(tuple(targets), pool, settings.rate, settings.quiet)
        states = _states(memory, siblings)
        turning = queue_in_turn(memory, now_ms, names) if self.turns.ratio > 0 else None
        at_ms, previous_ms, hours, fade, smoothing = float(now_ms), None, 0.0, 1.0, 0.0
        pressures: list[float] = []
        costs: list[tuple[float, float]] = []
        for state, share, debt, request, held, evicted, (most, scale) in zip(
            states.values(), shares, debts, requested, allocated, reclaims, bounds, strict=True
        ):
            x, last_ms = state["x"], state.get("at_ms")
            if last_ms != previous_ms:  # usually the same for all queues
                previous_ms, hours = last_ms, _elapsed_h(last_ms, now_ms)
                fade, smoothing = max(0.0, 1.0 - hours / _PRICE_MEMORY_H), min(1.0, hours * 3600 / settings.smoothing)
            rate = min(_clip(debt / repay_h, most), max(0.0, request - share))
            if turning is None:
                x += (share + rate - held - x) * smoothing
            credit = _clip(state["credit"] + (share - held) * hours, most_credit)
            evictions = state["evictions"] * fade + evicted
            used = state["used"] * fade + held * hours
            q = evictions / max(used, 1.0) / knee
            cost = price * q / (q + 1.0)
            pressures.append(_clip(gain * x / scale - cost, _MOST_PRESSURE))
            state |= {"x": x, "evictions": evictions, "used": used, "credit": credit, "at_ms": at_ms}
            if siblings.explain:
                costs.append((rate, cost))
        common = _common(weights, pressures)
        logs = [state["y"] for state in states.values()]
        if turning is None and fsum(requested) > pool:
            logs = _to_quiet_zones(logs, pressures, common, zones)
        wanted = list(map(mul, weights, map(exp, logs)))
        for state, y in zip(states.values(), logs, strict=True):
            state["y"] = y
        traces: dict[str, dict[str, float]] = {}
        notes = {}
        if siblings.explain:
            traces = _traces(siblings, shares, debts, states.values(), pressures, costs, common)
            notes = {name: _note(debt, rate) for name, debt, (rate, _) in zip(names, debts, costs, strict=True)}
        if turning is None and not queues_with_large_gangs(siblings, self.turns):
            return LawResult(names, wanted, traces, notes, states)
        credits = {name: debt + states[name]["credit"] for name, debt in zip(names, debts, strict=True)}
        turn = turn_now(siblings, dict(zip(names, wanted, strict=True)), credits, memory, self.turns, turning)
        if turn is None:
            return LawResult(names, wanted, traces, notes, states)
        for name in names:
            turn_trace = {"turn_until_ms": float(turn.until_ms), "share_gpus": turn.shares[name]}
            traces[name] = {**traces.get(name, {}), **turn_trace}
        turn_state = {name: {**states[name], **turn.kept.get(name, {})} for name in names}
        return LawResult(names, [turn.weights[name] for name in names], traces, turn.notes, turn_state, turn.queue)


def _to_quiet_zones(
    logs: Sequence[float], pressures: Sequence[float], common: float, zones: Sequence[float]
) -> list[float]:
    """Return the logs of the multipliers. One outside its quiet zone moves to the edge of the zone."""
    result = []
    for y, v, zone in zip(logs, pressures, zones, strict=True):
        aim = _clip(v - common, _MOST_PRESSURE)
        low, high = aim - zone, aim + zone
        result.append(low if y < low else min(y, high))
    return result


@lru_cache(256)
def _bounds_and_zones(
    targets: tuple[float, ...], pool: float, rate: float, quiet: float
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return the values that depend only on targets, pool and settings. They are cached, because these inputs stay the
    same for weeks.

    The first list contains for each queue the largest catch-up in GPUs, and the GPUs by which its error is divided. The
    second contains the width of each queue's quiet zone."""
    mean = max(fsum(targets) / max(len(targets), 1), _LEAST_TARGET)
    average_bound = pool * sqrt(mean)
    bounds, zones = [], []
    for target in targets:
        floor = max(target, _LEAST_TARGET)
        size = (max(target, 0.0) / mean) ** _SIZE_EXPONENT
        bounds.append((rate * (average_bound * size), floor * pool))
        zones.append(quiet / floor * (mean / floor) ** _SIZE_EXPONENT)
    return bounds, zones


def _debts(
    usage: Sequence[float],
    requested: Sequence[float],
    allocated: Sequence[float],
    targets: Sequence[float],
    siblings: LawQueues,
    horizon_h: float,
) -> list[float]:
    """Return the GPU-hours that every queue is owed; a negative number means that it used more than its part.

    A queue's part is its part by target of the usage of all. It is limited to the GPU-hours that the queue used, plus
    those that its pending requests could use in the next `horizon_h` hours."""
    pool, window_h = siblings.pool, siblings.window_s / 3600
    used = [part * pool * window_h for part in usage]
    usable = [
        past + horizon_h * (request - held) if request > held else past
        for past, request, held in zip(used, requested, allocated, strict=True)
    ]
    return list(map(sub, fill(fsum(used), usable, targets), used))


def _traces(
    siblings: LawQueues,
    shares: Sequence[float],
    debts: Sequence[float],
    states: Iterable[State],
    pressures: Sequence[float],
    costs: Sequence[tuple[float, float]],
    common: float,
) -> dict[str, dict[str, float]]:
    """Return the intermediate numbers by queue. Each of `costs` is a pair of catch-up rate and price."""
    columns = siblings.columns
    rows = zip(columns.names, columns.allocated, shares, debts, states, pressures, costs, strict=True)
    return {
        name: {
            "owed_gpu_h": debt, "rate_gpus": rate, "fair_gpus": share, "held_gpus": held, "x_gpus": state["x"],
            "price": cost, "credit_gpu_h": debt + state["credit"], "v": v, "common": common,
            "aim": _clip(v - common, _MOST_PRESSURE),
        }
        for name, held, share, debt, state, v, (rate, cost) in rows
    }  # fmt: skip


def _clip(value: float, most: float) -> float:
    return max(-most, min(value, most))


def _common(weights: Sequence[float], pressures: Sequence[float]) -> float:
    """Return the log of the factor by which these pressures would change the sum of the weights."""
    total = fsum(weights)
    if total <= 0:
        return 0.0
    return log(fsum(map(mul, weights, map(exp, pressures))) / total)


def _elapsed_h(last_ms: float | None, now_ms: int) -> float:
    """Return the hours since a queue's last update, at most one, so that an outage makes no large step."""
    return min(1.0, max(0.0, now_ms - last_ms) / 3_600_000) if last_ms is not None else 0.0


def _note(owed: float, rate: float) -> str:
    if abs(owed) < 1:
        return "neither owed nor owing"
    if owed > 0:
        return f"owed {owed:,.0f} GPU-hours" + (f", repaid at {rate:.1f} GPUs" if rate > 0 else "")
    return f"had {-owed:,.0f} GPU-hours more than its part"
