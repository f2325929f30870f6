"""What an explanation says, sentence by sentence: what is left, why a gang waits, what would change it. Pure.

A sentence says what the scheduler may do, never that it will: when a pod starts is the scheduler's to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import fsum

from accountant.wire import BudgetState, Policy, QueuePolicy
from agent.units import MS_PER_MINUTE, MS_PER_SECOND
from fairshare.model import UNLIMITED, Entitlement, Pod, Standing, Weight
from fairshare.weighing.advisor import reach

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Level:
    """One queue on the way from the root to the one in question. GPUs. left: what it is due and does not
    hold; negative where it holds more. weight None: the target has no object for it."""

    queue: QueuePolicy
    entitlement: Entitlement
    standing: Standing | None
    weight: Weight | None

    @property
    def left(self) -> float:
        return self.entitlement.gpus - self.entitlement.allocated


def standing(level: Level) -> str:
    """Share left, in words."""
    e = level.entitlement
    head = f"due {e.gpus:g} GPUs now, holds {e.allocated:g}, asks for {e.requested:g}"
    if level.left > _ROUNDING:
        return f"{head}: {level.left:g} GPUs of its share are left"
    if level.left < -_ROUNDING:
        return f"{head}: {-level.left:g} GPUs are borrowed, and others may take them back"
    if e.requested <= e.allocated + _ROUNDING:
        return f"{head}: it has all that it asks for" if e.requested > 0 else f"{head}: it asks for nothing"
    return f"{head}: its share is used up"


def verdict(
    policy: Policy, levels: Sequence[Level], gpus: float, free: float, need: float, whole: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why `need` more GPUs are not there, and what would have to change. The narrowest queue of the path speaks.
    whole: what the gang needs in all, with what it holds already."""
    if whole > gpus:
        return (f"it needs {whole:g} GPUs; there are {gpus:g} in all: it can never start",), ()
    for level in levels:
        with_it = level.entitlement.allocated + need
        if level.queue.limit != UNLIMITED and with_it > level.queue.limit + _ROUNDING:
            text = f"{level.queue.name!r} may hold {level.queue.limit:g} GPUs (limit) and holds"
            text = f"{text} {level.entitlement.allocated:g}: {need:g} more are too many"
            if whole > level.queue.limit:
                return (text,), (f"a limit of {whole:g} for {level.queue.name!r}, or a smaller gang",)
            return (text,), (f"{with_it - level.queue.limit:g} GPUs of {level.queue.name!r} have to come free",)
    own = levels[-1]
    wanted = own.entitlement.allocated + need
    if wanted > gpus:
        text = f"{need:g} GPUs more would be {wanted:g} for {own.queue.name!r}; there are {gpus:g} in all"
        return (text,), (f"{wanted - gpus:g} GPUs of {own.queue.name!r} have to come free",)
    narrow = max(levels, key=lambda level: need - level.left)
    short = need - narrow.left
    if short <= _ROUNDING:
        inside = all(
            lv.queue.deserved == UNLIMITED or lv.entitlement.allocated + need <= lv.queue.deserved for lv in levels
        )
        kind = "guaranteed quota" if inside else "fair share"
        if free >= need:
            return (f"it is within its {kind} and {free:g} GPUs are free: the scheduler may start it",), ()
        text = f"it is within its {kind}: the scheduler may take {need - free:g} GPUs back from who has more"
        return (text,), ("victims have to pass their minimum run time and disruption budgets",)
    text = (
        f"with it {narrow.queue.name!r} would hold {short:g} GPUs more than the {narrow.entitlement.gpus:g} it is due"
    )
    if free >= need:
        return (f"{text}, yet {free:g} GPUs are free: the scheduler may lend them",), ()
    return (f"{text}, and only {free:g} GPUs are free: nobody is preempted for it",), tuple(
        _cures(policy, levels, gpus, free, narrow, need, short)
    )


def _cures(
    policy: Policy, levels: Sequence[Level], gpus: float, free: float, narrow: Level, need: float, short: float
) -> Iterator[str]:
    missing = need - free
    yield f"{missing:g} GPUs come free anywhere, or {short:g} GPUs of {narrow.queue.name!r} itself end"
    spent = [lv for lv in levels if lv.weight is not None and lv.weight.configured == 0 < lv.queue.weight]
    if spent:
        yield f"the budget of {spent[0].queue.name!r} is exhausted: nothing over its quota until the month ends"
        return
    e = narrow.entitlement
    costs = e.without_history - e.gpus
    if costs > _ROUNDING:
        yield (
            f"its history costs {narrow.queue.name!r} {costs:g} GPUs; they come back as that usage ages"
            f" ({_window_words(policy)})"
        )
    trace = narrow.weight.explanation.trace if narrow.weight is not None else {}
    if trace.get("owed_gpu_h", 0.0) > 0:
        yield f"it is owed {trace['owed_gpu_h']:,.0f} GPU-hours: its share rises until they are repaid"
    if narrow.weight is not None and narrow.weight.explanation.stepped < narrow.weight.explanation.proportional:
        steps = narrow.weight.explanation
        yield f"its weight is on the way up from {steps.stepped:g} to {steps.proportional:g}, a step a cycle"
    own = levels[-1]
    yield reach(policy, gpus, own.queue.name, own.entitlement.allocated + need).sentence(own.entitlement.allocated)


def _window_words(policy: Policy) -> str:
    window = policy.window
    if window.half_life is not None:
        return f"half of it counts no more after {span(window.half_life * 1000)}"
    if window.kind == "sliding":
        return f"all of it after {span(window.size * 1000)}"
    return f"at the next turn of the {window.kind} window"


def budget_words(budgets: Sequence[BudgetState]) -> Iterator[str]:
    for budget in budgets:
        if budget.spent is None:
            yield f"budget {budget.name!r}: spent is unknown, some of the time has no price"
        elif budget.spent >= budget.limit:
            yield f"budget {budget.name!r} is exhausted: {budget.spent:,.2f} of {budget.limit:,.2f} {budget.unit}"
        else:
            yield (
                f"budget {budget.name!r}: {budget.spent:,.2f} of {budget.limit:,.2f} {budget.unit} in {budget.month},"
                f" {budget.limit - budget.spent:,.2f} left{_until(budget)}"
            )


def _until(budget: BudgetState) -> str:
    """How long it lasts, where that ends within the month."""
    if budget.exhausted_ms is None:
        return ""
    bounds = [
        "later" if at is None else f"{datetime.fromtimestamp(at // MS_PER_SECOND, UTC):%Y-%m-%d}"
        for at in (budget.exhausted_ms, budget.exhausted_earliest_ms, budget.exhausted_latest_ms)
    ]
    return f", used up on {bounds[0]} at this rate (80 %: {bounds[1]} to {bounds[2]}, UTC)"


def holes(pod: Pod, pods: Sequence[Pod], by_node: Mapping[str, float]) -> Iterator[str]:
    """Where the sum would do and no node does."""
    if not by_node:
        return
    taken: dict[str, float] = {}
    for other in pods:
        if other.held:
            taken[other.node] = taken.get(other.node, 0.0) + other.gpus
    free = {node: gpus - taken.get(node, 0.0) for node, gpus in by_node.items()}
    largest = max(free.values())
    if pod.gpus > max(by_node.values()):
        yield f"no node has {pod.gpus:g} GPUs at all; the largest has {max(by_node.values()):g}"
    elif pod.gpus > largest and fsum(free.values()) >= pod.gpus:
        yield f"{fsum(free.values()):g} GPUs are free, but no more than {max(0.0, largest):g} on one node"


def span(ms: int) -> str:
    """2 d 3 h, 3 h 20 min, 20 min, under a minute."""
    minutes = max(0, ms) // MS_PER_MINUTE
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{rest} min" if rest else "less than a minute"
