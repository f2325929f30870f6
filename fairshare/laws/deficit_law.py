"""Defines the deficit law: what a queue is owed is repaid over a set time.

A queue is owed GPU-hours if it used less in the window than it should have, given its real demand. The law repays the
debt over the next days, at a rate that affects the other queues little. For example, with `repay` = 100 h a queue that
is owed 100 GPU-hours gets about one GPU more than its share.

Three rules go with this. Weights change only when necessary. A queue that causes many preemptions pays a small price. A
gang that fits no share gets a turn.

    owed       e = fill(Σ used, used + horizon · pending; targets) - used                [GPU-hours]
    catch-up   r = clip(e / repay, ± rate · pool · √mean · size), and not above the GPUs it waits for  [GPUs]
    error      x = low-pass(fair + r - held, smoothing)                                        [GPUs]
    pressure   v = gain · x / (target · pool) - price                          [log of the weight]
    price      reclaim_price · q / (q + 1), with q = evictions per GPU-hour used / price_knee
    common     c = ln of the factor by which all pressures together would change the sum of the weights
    quiet      a weight stays while |ln(multiplier) - (v - c)| <= quiet / (target · size), and while its
               siblings request no more than the pool

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

Only the proportions of weights matter. A change common to all weights therefore has no effect, and `common` removes it.

The GPUs that a queue holds fluctuate around its share. A catch-up of the size of this fluctuation costs the other
queues little per day. Jobs have the same sizes in large and small queues, so the fluctuation grows less than in
proportion to the target. This is why the bounds contain `size`: relative to their targets, small queues move further
and have a wider quiet zone.

Of the queues with a gang that fits no share, the one with the most credit gets the next turn. Credit is the amount that
the queue is owed in the window, plus the sum over all time of (fair share - held GPUs). The second term remembers what
a short window forgets.

A queue without pending jobs is never owed anything, because it could not have used more than it did. Credit therefore
exists only for real work. With gain and rate at 0 the configured weights apply.

The law stores per queue: x, the sum over time for the credit, and for the price the decaying sums of evictions and of
GPU-hours used. Units are GPUs and hours internally.

`DeficitState` is a `Memory`: numbers by name and queue, which can be stored as JSON. The law reuses the columns of its
own state. It reads any other mapping by name, for example one from a status object or from a decision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, fsum, log, sqrt
from operator import mul, sub

from accountant.wire.policy_models import DeficitPolicy, TurnPolicy
from fairshare.laws.division import fill
from fairshare.laws.feedback_laws import LawQueues, LawResult, Memory
from fairshare.laws.gang_turns import gang_lumps, turn_now, under_way

Row = tuple[float, float, float, float, float | None]
"""State of a queue: x, evictions, usage, sum over time of the missing GPUs, and time of the last update."""
_NOTHING: Mapping[str, float] = {}


class DeficitState(Mapping[str, Mapping[str, float]]):
    """The state of the law as columns: one of `rows` and one of `logs` for each of `names`.

    logs: natural logarithms of the multipliers in force. The state of a turn is stored separately."""

    __slots__ = ("_places", "logs", "names", "rows")

    def __init__(self, names: Sequence[str], rows: Sequence[Row], logs: Sequence[float]) -> None:
        self.names, self.rows, self.logs = names, rows, logs
        self._places: dict[str, int] | None = None

    @classmethod
    def of(cls, memory: Memory, siblings: LawQueues) -> DeficitState:
        """Return the state of these siblings; a new one has an empty state."""
        columns = siblings.columns
        if isinstance(memory, cls) and memory.names == columns.names:
            return memory
        rows: list[Row] = []
        logs: list[float] = []
        for name, weight, now in zip(columns.names, columns.weights, columns.weights_now, strict=True):
            get = memory.get(name, _NOTHING).get
            rows.append((get("x", 0.0), get("evictions", 0.0), get("used", 0.0), get("credit", 0.0), get("at_ms")))
            y = get("y")
            logs.append(y if y is not None else log(now / weight) if now and weight > 0 else 0.0)
        return cls(columns.names, rows, logs)

    def __getitem__(self, name: str) -> dict[str, float]:
        if self._places is None:
            self._places = {each: place for place, each in enumerate(self.names)}
        place = self._places[name]
        x, evictions, used, credit, at_ms = self.rows[place]
        kept = {"x": x, "evictions": evictions, "used": used, "credit": credit}
        if at_ms is not None:
            kept["at_ms"] = at_ms
        kept["y"] = self.logs[place]
        return kept

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


_MOST = log(8.0)
"""Pressure is limited to a factor of 8 in both directions; the policy's multipliers are usually narrower."""
_PRICE_MEMORY_H = 336.0
_SIZE = 0.3
"""Exponent of a queue's size in its bounds; chosen on a trace (docs/evaluation.md)."""
_LEAST_TARGET = 1e-3
"""Smallest part of the pool that counts as a target, because errors are divided by it."""


@dataclass(frozen=True, slots=True)
class Deficit:
    """The law with its settings."""

    settings: DeficitPolicy
    turns: TurnPolicy
    relative = False

    def __call__(self, siblings: LawQueues, memory: Memory, /) -> LawResult:
        ordered = siblings.by_name()
        if ordered is not siblings:
            verdict = self(ordered, memory)
            by_name, as_given = verdict.weights, siblings.columns.names
            return replace(verdict, names=as_given, wanted=[by_name[name] for name in as_given])
        names, weights, targets, usage, asked, held, _, _, _, _, reclaims = siblings.columns
        pool, settings, now_ms = siblings.pool, self.settings, siblings.now_ms
        if pool <= 0:  # if their parent has nothing, no queue has too much or too little
            kept = DeficitState.of(memory, siblings)
            return LawResult(names, list(weights), {}, dict.fromkeys(names, "there is nothing to divide here"), kept)
        gain, price, knee = settings.gain, settings.reclaim_price, settings.price_knee
        repay_h, horizon_h = settings.repay / 3600, settings.horizon / 3600
        most_credit = horizon_h * pool
        fair = fill(pool, asked, targets)
        owed = _owed(usage, asked, held, targets, siblings, horizon_h)
        bounds, zones = _sized(tuple(targets), pool, settings.rate, settings.quiet)
        before = DeficitState.of(memory, siblings)
        turning = under_way(memory, now_ms, names) if before is not memory else None
        at_ms, seen_ms, hours, fades, nearer = float(now_ms), None, 0.0, 1.0, 0.0
        rows: list[Row] = []
        pressures: list[float] = []
        costs: list[tuple[float, float]] = []
        for (x_then, caused, had, lacked, then_ms), due, mine, ask, has, evicted, (most, scale) in zip(
            before.rows, fair, owed, asked, held, reclaims, bounds, strict=True
        ):
            if then_ms != seen_ms:  # usually the same for all queues
                seen_ms, hours = then_ms, _elapsed_h(then_ms, now_ms)
                fades, nearer = max(0.0, 1.0 - hours / _PRICE_MEMORY_H), min(1.0, hours * 3600 / settings.smoothing)
            rate = mine / repay_h
            if rate > 0.0:
                lacks = ask - due
                if rate > most:
                    rate = most
                if rate > lacks:
                    rate = max(0.0, lacks)
            elif rate < -most:
                rate = -most
            x = x_then + (due + rate - has - x_then) * nearer if turning is None else x_then
            integral = lacked + (due - has) * hours
            if not -most_credit <= integral <= most_credit:
                integral = _clip(integral, most_credit)
            evictions = caused * fades + evicted
            used = had * fades + has * hours
            q = evictions / max(used, 1.0) / knee
            pays = price * q / (q + 1.0)
            v = gain * x / scale - pays
            pressures.append(v if -_MOST <= v <= _MOST else _clip(v, _MOST))
            rows.append((x, evictions, used, integral, at_ms))
            if siblings.explain:
                costs.append((rate, pays))
        common = _common(weights, pressures)
        logs = before.logs
        if turning is None and fsum(asked) > pool:
            logs = _moved(logs, pressures, common, zones)
        wanted = list(map(mul, weights, map(exp, logs)))
        kept = DeficitState(names, rows, logs)
        traces: dict[str, dict[str, float]] = {}
        notes: dict[str, str] = {}
        if siblings.explain:
            traces = _traces(siblings, fair, owed, rows, pressures, costs, common)
            notes = {name: _note(mine, rate) for name, mine, (rate, _) in zip(names, owed, costs, strict=True)}
        if turning is None and not gang_lumps(siblings, self.turns):
            return LawResult(names, wanted, traces, notes, kept)
        credits = {name: mine + row[3] for name, mine, row in zip(names, owed, rows, strict=True)}
        turn = turn_now(siblings, dict(zip(names, wanted, strict=True)), credits, memory, self.turns, turning)
        if turn is None:
            return LawResult(names, wanted, traces, notes, kept)
        for name in names:
            at = {"turn_until_ms": float(turn.until_ms), "share_gpus": turn.shares[name]}
            traces[name] = {**traces.get(name, {}), **at}
        recalled = {name: {**kept[name], **turn.kept.get(name, {})} for name in names}
        return LawResult(names, [turn.weights[name] for name in names], traces, turn.notes, recalled, turn.queue)


def _moved(logs: Sequence[float], pressures: Sequence[float], common: float, zones: Sequence[float]) -> list[float]:
    """Return the logs of the multipliers, each moved only to the edge of its quiet zone."""
    moved = []
    for y, v, zone in zip(logs, pressures, zones, strict=True):
        aim = _clip(v - common, _MOST)
        low, high = aim - zone, aim + zone
        moved.append(low if y < low else min(y, high))
    return moved


@lru_cache(256)
def _sized(
    targets: tuple[float, ...], pool: float, rate: float, quiet: float
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return the values that depend only on targets, pool and settings. They stay the same for weeks, so they are
    cached.

    The first list contains for each queue the largest catch-up in GPUs, and the GPUs by which its error is divided. The
    second contains the width of each queue's quiet zone."""
    mean = max(fsum(targets) / max(len(targets), 1), _LEAST_TARGET)
    usual = pool * sqrt(mean)
    bounds, zones = [], []
    for target in targets:
        floor = max(target, _LEAST_TARGET)
        size = (max(target, 0.0) / mean) ** _SIZE
        bounds.append((rate * (usual * size), floor * pool))
        zones.append(quiet / floor * (mean / floor) ** _SIZE)
    return bounds, zones


def ledger(siblings: LawQueues, horizon_h: float) -> dict[str, float]:
    """Return the GPU-hours that every queue is owed; a negative number means that it used more than its part.

    A queue's part is its part by target of the usage of all. It is limited to what the queue used and could still use
    in the next `horizon_h` hours."""
    siblings = siblings.by_name()
    names, _, targets, usage, asked, held, *_ = siblings.columns
    owed = _owed(usage, asked, held, targets, siblings, horizon_h)
    return dict(zip(names, owed, strict=True))


def _owed(
    usage: Sequence[float],
    asked: Sequence[float],
    held: Sequence[float],
    targets: Sequence[float],
    siblings: LawQueues,
    horizon_h: float,
) -> list[float]:
    pool, whole = siblings.pool, siblings.window_s / 3600
    used = [part * pool * whole for part in usage]
    able = [
        had + horizon_h * (ask - has) if ask > has else had for had, ask, has in zip(used, asked, held, strict=True)
    ]
    return list(map(sub, fill(fsum(used), able, targets), used))


def _traces(
    siblings: LawQueues,
    fair: Sequence[float],
    owed: Sequence[float],
    kept: Sequence[Row],
    pressures: Sequence[float],
    costs: Sequence[tuple[float, float]],
    common: float,
) -> dict[str, dict[str, float]]:
    """Return the intermediate numbers by queue. Each of `costs` is a pair of catch-up rate and price."""
    columns = siblings.columns
    rows = zip(columns.names, columns.allocated, fair, owed, kept, pressures, costs, strict=True)
    return {
        name: {
            "owed_gpu_h": mine, "rate_gpus": rate, "fair_gpus": due, "held_gpus": has, "x_gpus": x,
            "price": pays, "credit_gpu_h": mine + credit, "v": v, "common": common,
            "aim": _clip(v - common, _MOST),
        }
        for name, has, due, mine, (x, _, _, credit, _), v, (rate, pays) in rows
    }  # fmt: skip


def _clip(value: float, most: float) -> float:
    if -most <= value <= most:
        return value
    return most if value > most else -most


def _common(weights: Sequence[float], pressures: Sequence[float]) -> float:
    """Return the log of the change that these pressures would make to the sum of the weights."""
    whole = fsum(weights)
    if whole <= 0:
        return 0.0
    return log(fsum(map(mul, weights, map(exp, pressures))) / whole)


def _elapsed_h(then_ms: float | None, now_ms: int) -> float:
    """Return the hours since a queue's last update, at most one, so that an outage makes no large step."""
    return min(1.0, max(0.0, now_ms - then_ms) / 3_600_000) if then_ms is not None else 0.0


def _note(owed: float, rate: float) -> str:
    if abs(owed) < 1:
        return "neither owed nor owing"
    if owed > 0:
        return f"owed {owed:,.0f} GPU-hours" + (f", repaid at {rate:.1f} GPUs" if rate > 0 else "")
    return f"had {-owed:,.0f} GPU-hours more than its part"
