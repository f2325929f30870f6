"""Computes entitlements and weights for the whole queue tree, with weight 0 for queues whose budget is used up.

The law (`feedback_law`) returns the weights for every set of siblings, and the policy's multipliers limit them. The
weights of siblings are set together and then stay for the policy's `interval`, unless a queue is new or a setting
changed from which they follow. Weights set before any use of the siblings is known do not stay: they are the configured
ones, and the first use that is known sets them anew. Only a turn (`gang_turns`: a time in which the weights admit one
large gang) interrupts them. `Explanation` holds every intermediate value. The weights do not depend on the order of the
queues in the inputs.

U is a queue's usage as a part of a capacity, and P is the factor by which `division` divides. This module computes
U differently from the division's source in two ways:

- U of a child is relative to its parent's part of the cluster, not to the whole cluster. History then has as much
  effect inside a small department as among the roots.
- U is never relative to less than the siblings' total usage. The values of U therefore add up to at most 1, and those
  of P to at least 1. The source does not divide the pool if every P is 0. Here this cannot happen while any weight is
  positive.

A used-up budget removes only the over-quota weight. The deserved quota is a guarantee and stays. A budget whose spend
is unknown, because some of its time has no price, has no effect.

A scheduler may divide parts of a cluster separately, such as shards of its nodes. The queues of a part divide only the
GPUs of its nodes, minus those that pods of other schedulers hold. Their history is relative to its
part of the cluster's capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import fsum, inf
from zlib import crc32

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, UsageWindow
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.core.gpu_models import policy_of_part
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    DivisionProblem,
    Entitlement,
    Explanation,
    QueueClaim,
    Shard,
    Standing,
    Weight,
    scale_capacity,
)
from fairshare.laws.division import divide, divide_above
from fairshare.laws.feedback_law import LawColumns, LawQueue, LawQueues, Memory, history_weights, normalised_weights
from fairshare.laws.gang_turns import GangTurn, turns_now
from fairshare.laws.weight_bounds import rescale, rounded_to_configured
from gputally.kubernetes.objects import Object, gpus_of_nodes

_THOUSANDTHS = 1000.0
"""Static shares are divided in thousandths of a GPU, so that rounding to whole units is not visible."""


@dataclass(frozen=True, slots=True)
class UsageRatio:
    """A queue's usage (descendants included), the capacity it is compared with, and the quotient U."""

    usage: int
    capacity: float
    u: float


def usage_ratios(policy: Policy, window: UsageWindow, parts: Mapping[str, float]) -> dict[str, UsageRatio]:
    """Return U of every queue: its usage over its parent's part of the capacity, or over the usage of all its siblings
    if that is more.

    parts: see `static_parts`."""
    queues = {queue.name: queue for queue in policy.queues}
    usage = {name: window.usage.get(name, 0) for name in queues}
    siblings_usage: dict[str | None, int] = {}
    for name, queue in queues.items():
        siblings_usage[queue.parent] = siblings_usage.get(queue.parent, 0) + usage[name]
    ratios = {}
    for name, queue in queues.items():
        of_parent = window.capacity * (parts[queue.parent] if queue.parent is not None else 1.0)
        capacity = max(of_parent, float(siblings_usage[queue.parent]))
        ratios[name] = UsageRatio(usage[name], capacity, usage[name] / capacity if capacity > 0 else 0.0)
    return ratios


def static_parts(policy: Policy, gpus: float) -> dict[str, float]:
    """Return the part of the cluster (0..1) of each queue by quota and weight, if every queue requested everything."""

    def thousandths(quantity: float) -> float:
        return UNLIMITED if quantity == UNLIMITED else quantity * _THOUSANDTHS

    claims = tuple(
        QueueClaim(
            queue.name, inf, thousandths(queue.deserved), thousandths(queue.limit), queue.weight, 0.0, queue.priority,
            parent=queue.parent,
        )
        for queue in policy.queues
    )  # fmt: skip
    shares = divide(DivisionProblem("parts", gpus * _THOUSANDTHS, 0.0, claims)).shares
    return {name: min(1.0, share / (gpus * _THOUSANDTHS)) for name, share in shares.items()}


def requests(queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]) -> dict[str, float]:
    """Return the requested GPUs of each queue. A queue without an object in the target requests the sum of its
    children's requests."""
    children: dict[str, list[str]] = {}
    for name, queue in queues.items():
        if queue.parent is not None:
            children.setdefault(queue.parent, []).append(name)

    def request(name: str) -> float:
        if name in standings:
            return standings[name].requested
        return fsum(request(child) for child in children.get(name, ()))

    return {name: request(name) for name in queues}


@dataclass(frozen=True, slots=True)
class WeightResult:
    """The result of one cycle, sorted by queue.

    entitlements: of every queue of the policy.
    weights: of the queues that exist in the target.
    memory: what is kept for the next cycle.
    by_model: the entitlements to the GPUs of each part, if the policy has quotas by GPU model; those of `entitlements`
        are then their sums."""

    entitlements: tuple[Entitlement, ...]
    weights: tuple[Weight, ...]
    memory: Memory = field(default_factory=dict)
    by_model: Mapping[str, tuple[Entitlement, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardCapacity:
    """The GPUs that the queues of one shard divide.

    queues: the policy's queues of this shard.
    part: its part of the cluster's capacity, 0..1."""

    queues: tuple[str, ...]
    gpus: float
    part: float


def pools(shards: Sequence[Shard], nodes: Sequence[Object], gpus: float) -> tuple[ShardCapacity, ...]:
    """Return the GPUs of each shard; empty if the cluster is divided as one.

    nodes: the nodes that accept work, without lost GPUs.
    gpus: the total of these nodes."""
    result = []
    for shard in shards:
        listed = gpus
        if shard.nodes is not None:
            listed = gpus_of_nodes([node for node in nodes if node["metadata"]["name"] in shard.nodes])
        result.append(ShardCapacity(shard.queues, max(0.0, listed - shard.taken), listed / gpus if gpus > 0 else 0.0))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The inputs of the division of the GPUs of one model (`fairshare.core.gpu_models`); the fields are those of
    `WeightInputs`, for these GPUs alone.

    exhausted: queues whose budget of these GPUs is used up."""

    model: str
    window: UsageWindow
    standings: Mapping[str, Standing]
    gpus: float
    exhausted: frozenset[str] = frozenset()
    pools: tuple[ShardCapacity, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightInputs:
    """All inputs of `calculate_weights`.

    window: the usage of a queue in it includes that of its descendants.
    standings: by policy queue, of queues that have an object in the target.
    gpus: the GPUs to divide, > 0.
    memory: what the previous cycle kept; empty at first.
    exhausted: queues whose budget is used up; they get their quota only.
    pools: the parts of the cluster that are divided separately; empty if `gpus` are divided as one.
    models: the inputs by GPU model, if the policy has quotas by model.
    scheduler_k: the strength with which the target's scheduler counts the same history by itself, 0 if it does not."""

    policy: Policy
    window: UsageWindow
    standings: Mapping[str, Standing]
    gpus: float
    now_ms: int
    memory: Memory = field(default_factory=dict)
    exhausted: frozenset[str] = frozenset()
    pools: tuple[ShardCapacity, ...] = ()
    models: tuple[ModelPart, ...] = ()
    scheduler_k: float = 0.0


def calculate_weights(inputs: WeightInputs) -> WeightResult:
    """Compute the entitlements and weights of one cycle, and with quotas by GPU model the entitlements to each model.

    A weight follows from the use of all models, because a scheduler has one weight for a queue."""
    result = _by_pool(inputs)
    if not inputs.models:
        return result
    by_model: dict[str, tuple[Entitlement, ...]] = {}
    memory = dict(result.memory)
    for part in inputs.models:
        policy, head = policy_of_part(inputs.policy, part.model), f"{part.model}{_OF_MODEL}"
        before = {name.removeprefix(head): each for name, each in inputs.memory.items() if name.startswith(head)}
        of_part = WeightResult(_no_entitlements(policy, part.standings), (), before)
        if part.gpus > 0:
            of_part = _by_pool(
                replace(
                    inputs, policy=policy, window=part.window, standings=part.standings, gpus=part.gpus, memory=before,
                    exhausted=inputs.exhausted | part.exhausted, pools=part.pools, models=(),
                )
            )  # fmt: skip
        by_model[part.model] = of_part.entitlements
        memory |= {head + name: each for name, each in of_part.memory.items()}
    due: dict[str, list[Entitlement]] = {}
    for part_of_all in by_model.values():
        for each in part_of_all:
            due.setdefault(each.queue, []).append(each)
    entitlements = tuple(
        replace(
            each,
            gpus=fsum(part.gpus for part in due[each.queue]),
            without_history=fsum(part.without_history for part in due[each.queue]),
        )
        for each in result.entitlements
    )
    return replace(result, entitlements=entitlements, memory=memory, by_model=by_model)


_OF_MODEL = "\n"
"""Separates model and queue in the state of a law; no queue's name has it."""


def _no_entitlements(policy: Policy, standings: Mapping[str, Standing]) -> tuple[Entitlement, ...]:
    queues = sorted(policy.queues, key=lambda queue: queue.name)
    return tuple(_no_entitlement(queue, standings) for queue in queues)


def _by_pool(inputs: WeightInputs) -> WeightResult:
    """Compute the entitlements and weights pool by pool. A queue that belongs to no pool gets the sum of what its
    children get."""
    if not inputs.pools:
        return _undivided(inputs)
    policy, standings = inputs.policy, inputs.standings
    entitlements: dict[str, Entitlement] = {}
    memory: dict[str, Mapping[str, float]] = {}
    weights: list[Weight] = []
    for pool in inputs.pools:
        pool_policy = _policy_of(policy, pool)
        if not pool_policy.queues:
            continue
        if pool.gpus <= 0:
            entitlements |= {queue.name: _no_entitlement(queue, standings) for queue in pool_policy.queues}
            continue
        result = _undivided(
            replace(
                inputs,
                policy=pool_policy,
                window=scale_capacity(inputs.window, pool.part),
                standings={name: standing for name, standing in standings.items() if name in pool.queues},
                gpus=pool.gpus,
            )
        )
        entitlements |= {each.queue: each for each in result.entitlements}
        memory |= result.memory
        weights += result.weights
    for queue in policy.queues:
        if queue.name not in entitlements:
            entitlements[queue.name] = _sum_of_children(policy, queue, entitlements, standings)
    weights.sort(key=lambda weight: weight.queue)
    return WeightResult(tuple(entitlements[name] for name in sorted(entitlements)), tuple(weights), memory)


def _policy_of(policy: Policy, pool: ShardCapacity) -> Policy:
    """Return the policy with only the pool's queues; a queue whose parent is not in this pool is a root."""
    names = set(pool.queues)
    queues = tuple(
        queue if queue.parent in names else queue.model_copy(update={"parent": None})
        for queue in policy.queues
        if queue.name in names
    )
    return policy.model_copy(update={"queues": queues})


def _no_entitlement(queue: QueuePolicy, standings: Mapping[str, Standing]) -> Entitlement:
    standing = standings.get(queue.name, Standing(0.0, 0.0))
    return Entitlement(queue.name, queue.parent, 0.0, 0.0, 0.0, standing.requested, standing.allocated, queue.deserved)


def _sum_of_children(
    policy: Policy, queue: QueuePolicy, entitlements: Mapping[str, Entitlement], standings: Mapping[str, Standing]
) -> Entitlement:
    """Return the entitlement of a queue that groups queues of several pools."""
    children = [
        entitlements[child.name] for child in policy.queues if child.parent == queue.name and child.name in entitlements
    ]
    empty = _no_entitlement(queue, standings)
    return replace(
        empty,
        gpus=fsum(child.gpus for child in children),
        without_history=fsum(child.without_history for child in children),
        requested=max(empty.requested, fsum(child.requested for child in children)),
        allocated=max(empty.allocated, fsum(child.allocated for child in children)),
    )


def _undivided(inputs: WeightInputs) -> WeightResult:
    """Compute entitlements and weights for GPUs that are divided as one, without regard to `inputs.pools`."""
    policy, standings, gpus, exhausted = inputs.policy, inputs.standings, inputs.gpus, inputs.exhausted
    queues = {
        queue.name: _with_limits(queue, standings.get(queue.name), exhausted)
        for queue in sorted(policy.queues, key=lambda queue: queue.name)
    }
    parts = static_parts(policy, gpus)
    ratios = usage_ratios(policy, inputs.window, parts)
    requested = requests(queues, standings)
    weights: list[Weight] = []
    memory: dict[str, Mapping[str, float]] = {}
    for (parent, _), group in _sibling_sets(queues, standings).items():
        parent_part = parts[parent] if parent is not None else 1.0
        members = [
            LawQueue(
                queue.name, queue.weight, ratios[queue.name].u, requested[queue.name],
                standings[queue.name].allocated, queue.deserved, queue.limit, standings[queue.name].gang,
                queue.turn == "burst",
            )
            for queue in group
        ]  # fmt: skip
        siblings = LawQueues(
            LawColumns.of(members), gpus * parent_part, inputs.now_ms, inputs.scheduler_k,
            stay=any(ratios[queue.name].usage for queue in group),
        )  # fmt: skip
        result = sibling_weights(siblings, policy, inputs.memory)
        memory |= result.memory
        weights += [_explained(queue, inputs, ratios[queue.name], result, at) for at, queue in enumerate(group)]
    weights.sort(key=lambda weight: weight.queue)
    claims = tuple(
        QueueClaim(
            name, requested[name], queue.deserved, queue.limit, queue.weight, ratios[name].u, queue.priority,
            parent=queue.parent,
        )
        for name, queue in queues.items()
    )  # fmt: skip
    least = {name: standing.least for name, standing in standings.items() if standing.least > 0 and name in queues}
    in_turn = {weight.queue: weight.value for weight in weights if weight.explanation.turn}
    due = tuple(
        replace(claim, weight=in_turn[claim.name], usage=0.0) if claim.name in in_turn else claim for claim in claims
    )
    with_history = divide_above(DivisionProblem("due", gpus, policy.k, due), least)
    without_history = divide_above(DivisionProblem("static", gpus, 0.0, claims), least)
    entitlements = tuple(
        Entitlement(
            name, queue.parent, with_history[name], without_history[name], ratios[name].u, requested[name],
            standings[name].allocated if name in standings else 0.0, queue.deserved, queue.limit,
        )
        for name, queue in queues.items()
    )  # fmt: skip
    return WeightResult(entitlements, tuple(weights), memory)


def _with_limits(queue: QueuePolicy, standing: Standing | None, exhausted: frozenset[str]) -> QueuePolicy:
    """Return the queue with the limits from its budget and from the quota that its scheduler has for it."""
    update: dict[str, float] = {"weight": 0.0} if queue.name in exhausted else {}
    if (
        standing is not None
        and standing.most != UNLIMITED
        and (queue.limit == UNLIMITED or standing.most < queue.limit)
    ):
        update["limit"] = standing.most
    return queue.model_copy(update=update) if update else queue


@dataclass(frozen=True, slots=True)
class SiblingWeights:
    """The weights of siblings, in their order.

    values: the weights to publish.
    lawful: the weights that the law returns now, within the multipliers; empty if `values` stay and no explanation is
        wanted.
    p, n, competes: see `Explanation`, as for `lawful`.
    left_ms: for how long the weights stay at least; 0 if they are set now.
    turn: the turn that interrupts them.
    owed: the GPU-hours that each is owed; empty without turns.
    memory: what is kept for the next cycle."""

    values: Sequence[float]
    lawful: Sequence[float]
    p: Sequence[float]
    n: Sequence[float]
    competes: Sequence[bool]
    left_ms: int
    turn: GangTurn | None
    owed: Sequence[float]
    memory: Memory


def sibling_weights(siblings: LawQueues, policy: Policy, memory: Memory) -> SiblingWeights:
    """Return the weights of siblings.

    A queue that does not compete gets the weight that it would have if all competed. The scheduler may need this weight
    before the next cycle."""
    columns, bounds, now_ms = siblings.columns, policy.bounds, siblings.now_ms
    marks = _marks(tuple(columns.weights), policy.k, bounds.min_multiplier, bounds.max_multiplier)
    kept = [memory.get(name, {}) for name in columns.names]
    set_ms = min(each.get("set_ms", -inf) for each in kept)
    same = all(each.get("settings") == mark for each, mark in zip(kept, marks, strict=True))
    stays = same and 0 <= now_ms - set_ms < bounds.interval * 1000
    lawful, p, n = _lawful(siblings, policy.k, bounds) if siblings.explain or not stays else ([], [], [])
    values = [each["weight"] for each in kept] if stays else lawful
    since = {"set_ms": set_ms if stays else float(now_ms)} if stays or siblings.stay else {}
    turns = turns_now(siblings, memory, policy)
    new_memory = {
        name: {"weight": value, **since, "settings": mark, **(turns.memory[name] if turns else {})}
        for name, value, mark in zip(columns.names, values, marks, strict=True)
    }
    turn = turns.turn if turns else None
    return SiblingWeights(
        turn.weights if turn else values, lawful, p, n, competing(siblings) if siblings.explain else (),
        int(set_ms) + bounds.interval * 1000 - now_ms if stays else 0, turn, turns.owed if turns else (), new_memory,
    )  # fmt: skip


@lru_cache(256)
def _marks(weights: tuple[float, ...], *settings: float) -> list[float]:
    """Return a checksum of the settings from which each weight follows. A weight set under others does not stay."""
    return [float(crc32(repr((weight, *settings)).encode())) for weight in weights]


def _lawful(siblings: LawQueues, k: float, bounds: Bounds) -> tuple[list[float], list[float], list[float]]:
    """Return the law's weights within the multipliers, with p and n of each."""
    columns, competes = siblings.columns, competing(siblings)
    whole = _compared(siblings, k, bounds) if not all(competes) else []
    some = _compared(siblings if all(competes) else siblings.only(competes), k, bounds) if any(competes) else []
    of_competitors, of_all = iter(some), iter(whole)
    rows = []
    for competitor in competes:
        row = next(of_all) if whole else None
        rows.append(next(of_competitors) if competitor else row)
    lawful, p, n = zip(*filter(None, rows), strict=True)
    return (
        [rounded_to_configured(value, weight) for value, weight in zip(lawful, columns.weights, strict=True)],
        list(p),
        list(n),
    )


def _compared(siblings: LawQueues, k: float, bounds: Bounds) -> list[tuple[float, float, float]]:
    """Return (weight, p, n) of each sibling, as compared with all the others."""
    p = history_weights(siblings, k)
    return list(zip(rescale(siblings.columns.weights, p, bounds), p, normalised_weights(siblings), strict=True))


def competing(siblings: LawQueues) -> list[bool]:
    """Return for each sibling whether it requests more than its quota and its limit allows more."""
    columns = siblings.columns
    return [
        weight > 0 and deserved != UNLIMITED and requested > deserved and (limit == UNLIMITED or limit > deserved)
        for weight, deserved, requested, limit in zip(
            columns.weights, columns.deserved, columns.requested, columns.limits, strict=True
        )
    ]


def _sibling_sets(
    queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]
) -> dict[tuple[str | None, int], list[QueuePolicy]]:
    """Return the queues that exist in the target, by parent and priority, each set sorted by name."""
    sets: dict[tuple[str | None, int], list[QueuePolicy]] = {}
    for name, queue in queues.items():
        if name in standings:
            sets.setdefault((queue.parent, queue.priority), []).append(queue)
    return sets


def _explained(queue: QueuePolicy, inputs: WeightInputs, ratio: UsageRatio, result: SiblingWeights, at: int) -> Weight:
    """Return the weight of the sibling at this position, with every reason for it."""
    policy, standing, turn = inputs.policy, inputs.standings[queue.name], result.turn
    bounds, lawful, n = policy.bounds, result.lawful[at], result.n[at]
    lower, upper = queue.weight * bounds.min_multiplier, queue.weight * bounds.max_multiplier
    notes: list[str] = []
    if queue.weight > 0:
        if n == 1:
            notes.append("alone among its siblings of this priority: there is no history to compare it with")
        elif not result.competes[at]:
            notes.append("asks for no more than its quota: weight as if every sibling competed")
        if lawful < queue.weight and lawful <= lower * (1 + 1e-6):
            notes.append(f"at the lower bound, {bounds.min_multiplier:g} x configured")
        if lawful > queue.weight and lawful >= upper * (1 - 1e-6):
            notes.append(f"at the upper bound, {bounds.max_multiplier:g} x configured")
        if turn is not None:
            notes.append(turn.note(queue.name, inputs.now_ms))
        elif result.values[at] != lawful:
            notes.append(f"stays for {-(-result.left_ms // 60_000)} more min")
        elif "set_ms" not in result.memory[queue.name]:
            notes.append("no use of these queues is known yet: the first that is sets their weights")
    elif queue.name in inputs.exhausted:
        notes.append("its budget is exhausted: nothing over its quota")
    else:
        notes.append("weight 0 in the policy stays 0")
    trace = {"n": n, "U": ratio.u, "k": policy.k, "P": result.p[at]}
    if result.owed:
        trace["owed_gpu_h"] = result.owed[at]
    if turn is not None:
        trace |= {"turn_until_ms": float(turn.until_ms), "share_gpus": turn.shares[at]}
    explanation = Explanation(
        usage=ratio.usage,
        capacity=ratio.capacity,
        u=ratio.u,
        n=n,
        k=policy.k,
        p=result.p[at],
        competes=result.competes[at],
        configured=queue.weight,
        proportional=lawful,
        lower=lower,
        upper=upper,
        previous=standing.weight,
        value=result.values[at],
        notes=tuple(notes),
        trace=trace,
        turn=turn is not None,
    )
    value = result.values[at]
    return Weight(
        queue.name, value, standing.weight, queue.weight, _why(ratio.u, n, result.competes[at], notes), explanation
    )


def _why(u: float, n: float, competes: bool, notes: Sequence[str]) -> str:
    """Return one sentence for people that explains the weight. It says among whom the share is: pages also show the
    share that the queue is entitled to if all request."""
    if n == 1 or n == 0:
        return "; ".join(notes)
    of = "the queues that compete" if competes else "all queues"
    verdict = "on that share" if abs(u - n) <= 0.005 else "above that share" if u > n else "below that share"
    return "; ".join([f"used {u:.1%} for a share of {n:.1%} of {of}, {verdict}", *notes])


def budgets_limit_weights(policy: Policy) -> bool:
    """Return whether the policy has a budget that removes over-quota weights once it is used up."""
    return any(budget.exhausted == "no-over-quota" for budget in policy.budgets)


def exhausted_queues(policy: Policy, states: Iterable[BudgetState], gpu_model: str = "") -> frozenset[str]:
    """Return the queues that a used-up budget limits: the budget's own queue, or every queue of its team.

    gpu_model: only the limits of this GPU model count; "": only those of whole budgets."""
    limiting = {
        part.name: part
        for budget in policy.budgets
        if budget.exhausted == "no-over-quota"
        for _, part in budget.parts()
    }
    limited: set[str] = set()
    for state in states:
        budget = limiting.get(state.name)
        if budget is None or state.gpu_model != gpu_model or state.spent is None or state.spent < budget.limit:
            continue
        if budget.queue is not None:
            limited.add(budget.queue)
        else:
            limited |= {queue.name for queue in policy.queues if queue.team == budget.team}
    return frozenset(limited)
