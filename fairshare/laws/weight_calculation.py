"""Computes entitlements and weights for the whole queue tree, and applies budgets that are used up.

The policy's law returns the weights for every set of siblings. They are then limited by the policy's bounds:
multipliers of the configured weight, largest step, hold-down and deadband. Only a turn may exceed the bounds. Every
intermediate value is kept in `Explanation`. Equal inputs give equal weights, in any order.

KAI's arithmetic is corrected deliberately in two places:

- U of a child is relative to its parent's part of the cluster, not to the whole cluster. History then has as much
  effect inside a small department as among the roots.
- U is never relative to less than the siblings' total usage. The values of U therefore add up to at most 1, and those
  of P to at least 1. KAI does not divide the pool if every P is 0, and this case cannot occur while any weight is
  positive.

A used-up budget removes only the over-quota weight. The deserved quota is a guarantee and stays. A budget whose spend
is unknown, because some of its time has no price, has no effect.

`weigh_pools` computes weights separately for each part of a cluster that its scheduler keeps apart. With KAI these are
scheduling shards. The queues of a shard divide only the GPUs of its nodes, minus those that pods of other schedulers
hold. Their history is relative to the shard's part of the cluster's capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from math import exp2, fsum, inf, log

from accountant.wire.policy_models import Bounds, Policy, QueuePolicy, UsageWindow, WindowSpec
from accountant.wire.usage_models import BudgetState
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Claim,
    DivisionProblem,
    Entitlement,
    Explanation,
    FleetWindow,
    Shard,
    Standing,
    Weight,
    scaled,
)
from fairshare.laws.deficit_law import Deficit
from fairshare.laws.division import divide
from fairshare.laws.feedback_laws import (
    FairTree,
    Kai,
    Law,
    LawColumns,
    LawQueue,
    LawQueues,
    LawResult,
    Memory,
    Multifactor,
    normalised,
)
from fairshare.laws.weight_pacing import PacedWeight, pace, rescale, rounded_to_configured
from gputally.base.units import MS_PER_SECOND, US_PER_MS
from gputally.kubernetes.objects import Object, gpus_of_nodes

_THOUSANDTHS = 1000.0
"""Static shares are divided in thousandths of a GPU, so that rounding to whole units is not visible."""


@dataclass(frozen=True, slots=True)
class UsageRatio:
    """A queue's usage (descendants included), the capacity it is compared with, and the quotient U."""

    usage: int
    capacity: float
    u: float


def effective_s(length_s: float, half_life_s: float | None) -> float:
    """Return how many seconds of full use a window of this length represents: its length, or ∫ 2^(-age / half-life)
    over it."""
    if half_life_s is None:
        return float(length_s)
    return half_life_s / log(2) * (1 - exp2(-length_s / half_life_s))


def usage_ratios(policy: Policy, window: UsageWindow, gpus: float) -> dict[str, UsageRatio]:
    """Return U of every queue: its usage over its part of the capacity.

    The divisor is its parent's part of the capacity, or what the siblings used if that is more."""
    queues = {queue.name: queue for queue in policy.queues}
    usage = {name: window.usage.get(name, 0) for name in queues}
    together: dict[str | None, int] = {}
    for name, queue in queues.items():
        together[queue.parent] = together.get(queue.parent, 0) + usage[name]
    part = static_parts(policy, gpus)
    ratios = {}
    for name, queue in queues.items():
        own = window.capacity * (part[queue.parent] if queue.parent is not None else 1.0)
        capacity = max(own, float(together[queue.parent]))
        ratios[name] = UsageRatio(usage[name], capacity, usage[name] / capacity if capacity > 0 else 0.0)
    return ratios


def static_parts(policy: Policy, gpus: float) -> dict[str, float]:
    """Return the part of the cluster (0..1) of each queue by quota and weight, if every queue requested everything."""
    claims = tuple(
        Claim(
            queue.name,
            inf,
            _scaled(queue.deserved),
            _scaled(queue.limit),
            queue.weight,
            0.0,
            queue.priority,
            parent=queue.parent,
        )
        for queue in policy.queues
    )
    shares = divide(DivisionProblem("parts", gpus * _THOUSANDTHS, 0.0, claims)).shares
    return {name: min(1.0, share / (gpus * _THOUSANDTHS)) for name, share in shares.items()}


def _scaled(quantity: float) -> float:
    return UNLIMITED if quantity == UNLIMITED else quantity * _THOUSANDTHS


def requests(queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]) -> dict[str, float]:
    """Return the request of each queue. A queue that the target does not know requests the sum of its children."""
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

    entitlements: the entitlement of every queue of the policy.
    weights: the weights of the queues that exist in the target.
    memory: the law's state for the next cycle."""

    entitlements: tuple[Entitlement, ...]
    weights: tuple[Weight, ...]
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WantedWeight:
    """The weight that the law wants for one queue, before it is paced. competes: it requests more than its quota."""

    weight: float
    p: float
    n: float
    competes: bool
    trace: Mapping[str, float]
    note: str
    turn: bool


def calculate_weights(
    policy: Policy,
    window: UsageWindow,
    standings: Mapping[str, Standing],
    gpus: float,
    now_ms: int,
    memory: Memory | None = None,
    exhausted: frozenset[str] = frozenset(),
    devices: float | None = None,
) -> WeightResult:
    """Compute the entitlements and weights of one cycle.

    window: the usage of a queue in it includes that of its descendants.
    standings: by policy queue, of queues that have an object in the target.
    gpus: the GPUs to divide, > 0.
    memory: what the law stored in the previous cycle; None or empty at first.
    exhausted: queues whose budget is used up; they get their quota only.
    devices: physical GPUs behind `gpus`. It differs from `gpus` if shared GPUs are listed once per replica. None means
        equal."""
    queues = {
        queue.name: _as_it_stands(queue, standings.get(queue.name), exhausted)
        for queue in sorted(policy.queues, key=lambda queue: queue.name)
    }
    ratios = usage_ratios(policy, window, gpus)
    asked = requests(queues, standings)
    parts = static_parts(policy, gpus)
    law = law_of(policy)
    listed = gpus / devices if devices else 1.0
    weights: list[Weight] = []
    kept: dict[str, Mapping[str, float]] = {}
    for (parent, _), group in _sibling_sets(queues, standings).items():
        room = parts[parent] if parent is not None else 1.0
        members = [
            LawQueue(
                queue.name, queue.weight, parts[queue.name] / room if room > 0 else 0.0, ratios[queue.name].u,
                asked[queue.name], standings[queue.name].allocated, queue.deserved, queue.limit,
                standings[queue.name].gang, standings[queue.name].weight, standings[queue.name].reclaims,
            )
            for queue in group
        ]  # fmt: skip
        span_s = _span_s(policy.window, window, ratios[members[0].name], gpus * room / listed)
        siblings = LawQueues(LawColumns.of(members), gpus * room, span_s, now_ms)
        wishes, remembered = wanted_weight(law, siblings, policy, memory or {})
        kept |= remembered
        weights += [
            _explain(
                queue,
                policy,
                ratios[queue.name],
                wishes[queue.name],
                standings[queue.name],
                now_ms,
                exhausted=queue.name in exhausted,
            )
            for queue in group
        ]
    weights.sort(key=lambda weight: weight.queue)
    claims = _claims(queues, asked, ratios)
    due = _due(law, claims, gpus, weights)
    without = divide(DivisionProblem("static", gpus, 0.0, claims)).shares
    entitlements = tuple(
        Entitlement(
            name,
            queue.parent,
            due[name],
            without[name],
            ratios[name].u,
            asked[name],
            standings[name].allocated if name in standings else 0.0,
            queue.deserved,
        )
        for name, queue in queues.items()
    )
    return WeightResult(entitlements, tuple(weights), kept)


def _as_it_stands(queue: QueuePolicy, standing: Standing | None, exhausted: frozenset[str]) -> QueuePolicy:
    """Return the queue with the limits from its budget and from the quota that its scheduler has for it."""
    changed: dict[str, float] = {"weight": 0.0} if queue.name in exhausted else {}
    if (
        standing is not None
        and standing.most != UNLIMITED
        and (queue.limit == UNLIMITED or standing.most < queue.limit)
    ):
        changed["limit"] = standing.most
    return queue.model_copy(update=changed) if changed else queue


def law_of(policy: Policy) -> Law:
    """Return the law that the policy names, with its parameters."""
    if policy.law == "deficit":
        return Deficit(policy.deficit, policy.turns)
    if policy.law == "fairtree":
        return FairTree()
    if policy.law == "multifactor":
        return Multifactor()
    return Kai(policy.k)


def _span_s(spec: WindowSpec, window: UsageWindow, ratio: UsageRatio, gpus: float) -> float:
    """Return the number of seconds for which U of `gpus` GPUs equals the used GPU time.

    It is derived from the window's capacity, because a window reaches back only to the first record, and the cluster
    may have had another size. If the window is not in GPU time, the present size and the full window are assumed.

    A window may contain the usage of several clusters. This cluster then repays its part of a debt, which is its part
    of their capacity. Together the clusters repay the debt once."""
    if window.unit != "gpu_us" or gpus <= 0:
        return effective_s(spec.size, spec.half_life)
    part = window.own.capacity / window.capacity if isinstance(window, FleetWindow) else 1.0
    return ratio.capacity * part / (gpus * US_PER_MS * MS_PER_SECOND)


def wanted_weight(
    law: Law, siblings: LawQueues, policy: Policy, memory: Memory
) -> tuple[dict[str, WantedWeight], Memory]:
    """Return the weight that the law wants for every sibling, within the policy's multipliers and before pace; and its
    memory.

    With a relative law, a queue that does not compete gets the weight that it would have if all competed. The scheduler
    may need this weight before the next cycle."""
    wants_more = dict(zip(siblings.columns.names, competing(siblings), strict=True))
    wishes: dict[str, WantedWeight] = {}
    kept: dict[str, Mapping[str, float]] = {}
    for some, verdict, names, values in law_results(law, siblings, policy, memory):
        kept |= verdict.memory
        weights, n = verdict.weights, dict(zip(some.columns.names, normalised(some), strict=True))
        for name, value in zip(names, values, strict=True):
            wishes[name] = WantedWeight(
                value, weights[name], n[name], wants_more[name], verdict.traces.get(name, {}),
                verdict.notes.get(name, ""), verdict.turn is not None,
            )  # fmt: skip
    return wishes, kept


Ruling = tuple[LawQueues, LawResult, Sequence[str], Sequence[float]]
"""The result of a law among some siblings: the siblings, the result, and the weights within the multipliers."""


def law_results(law: Law, siblings: LawQueues, policy: Policy, memory: Memory) -> Iterator[Ruling]:
    """Yield the result of each call of the law. Every sibling is in one of the results."""
    bounds, columns = policy.bounds, siblings.columns
    if not law.relative:
        verdict = law(siblings, memory)
        yield siblings, verdict, columns.names, _clamped(verdict, columns.weights, bounds)
        return
    which = competing(siblings)
    if any(which):
        some = siblings if all(which) else siblings.only(which)
        verdict = law(some, memory)
        weights = some.columns.weights
        values = rescale(weights, verdict.wanted, bounds)
        yield some, verdict, some.columns.names, list(map(rounded_to_configured, values, weights))
    if not all(which):
        verdict = law(siblings, memory)
        others = [not wants_more for wants_more in which]
        values = rescale(columns.weights, verdict.wanted, bounds)
        mine = map(rounded_to_configured, compress(values, others), compress(columns.weights, others))
        yield siblings, verdict, list(compress(columns.names, others)), list(mine)


def competing(siblings: LawQueues) -> list[bool]:
    """Return for each sibling whether it requests more than its quota and its limit allows more."""
    columns = siblings.columns
    return [
        weight > 0 and deserved != UNLIMITED and asked > deserved and (limit == UNLIMITED or limit > deserved)
        for weight, deserved, asked, limit in zip(
            columns.weights, columns.deserved, columns.requested, columns.limits, strict=True
        )
    ]


def _clamped(verdict: LawResult, configured: Sequence[float], bounds: Bounds) -> Sequence[float]:
    """Return the law's weights within the multipliers of the configured weights; a turn is not clamped."""
    if verdict.turn is not None:
        return verdict.wanted
    least, most = bounds.min_multiplier, bounds.max_multiplier
    return [_within(wanted, weight, least, most) for wanted, weight in zip(verdict.wanted, configured, strict=True)]


@lru_cache(1024)
def _within(wanted: float, configured: float, least: float, most: float) -> float:
    """Return a wanted weight within the multipliers of the configured one.

    It is cached, because a law with a quiet zone repeats its result."""
    return rounded_to_configured(min(max(wanted, configured * least), configured * most), configured)


def _sibling_sets(
    queues: Mapping[str, QueuePolicy], standings: Mapping[str, Standing]
) -> dict[tuple[str | None, int], list[QueuePolicy]]:
    """Return the queues that exist in the target, by parent and priority, each set sorted by name."""
    sets: dict[tuple[str | None, int], list[QueuePolicy]] = {}
    for name, queue in queues.items():
        if name in standings:
            sets.setdefault((queue.parent, queue.priority), []).append(queue)
    return sets


def _due(law: Law, claims: tuple[Claim, ...], gpus: float, weights: Sequence[Weight]) -> Mapping[str, float]:
    """Return the entitlements with history.

    With the law KAI they come from KAI's own division with its k. With any other law they come from a division by the
    published weights."""
    if isinstance(law, Kai):
        return divide(DivisionProblem("entitled", gpus, law.k, claims)).shares
    out = {weight.queue: weight.value for weight in weights}
    ours = tuple(replace(claim, weight=out.get(claim.name, claim.weight)) for claim in claims)
    return divide(DivisionProblem("entitled", gpus, 0.0, ours)).shares


def _claims(
    queues: Mapping[str, QueuePolicy], asked: Mapping[str, float], ratios: Mapping[str, UsageRatio]
) -> tuple[Claim, ...]:
    return tuple(
        Claim(
            name,
            asked[name],
            queue.deserved,
            queue.limit,
            queue.weight,
            ratios[name].u,
            queue.priority,
            parent=queue.parent,
        )
        for name, queue in queues.items()
    )


def _explain(
    queue: QueuePolicy,
    policy: Policy,
    ratio: UsageRatio,
    wanted: WantedWeight,
    standing: Standing,
    now_ms: int,
    *,
    exhausted: bool,
) -> Weight:
    """Return the weight after pacing, with every reason for it."""
    bounds = policy.bounds
    lower, upper = queue.weight * bounds.min_multiplier, queue.weight * bounds.max_multiplier
    notes: list[str] = []
    zero = "its budget is exhausted: nothing over its quota" if exhausted else "weight 0 in the policy stays 0"
    move = PacedWeight(0.0, 0.0, (zero,))
    if queue.weight > 0:
        move = PacedWeight(wanted.weight, wanted.weight)  # a turn applies at once: half of it would not admit the gang
        if not wanted.turn:
            move = pace(wanted.weight, standing, bounds, now_ms)
        if wanted.n == 1:
            notes.append("alone among its siblings of this priority: there is no history to compare it with")
        elif not wanted.competes:
            notes.append("asks for no more than its quota: weight as if every sibling competed")
        if not wanted.turn and wanted.weight < queue.weight and wanted.weight <= lower * (1 + 1e-6):
            notes.append(f"at the lower bound, {bounds.min_multiplier:g} x configured")
        if not wanted.turn and wanted.weight > queue.weight and wanted.weight >= upper * (1 - 1e-6):
            notes.append(f"at the upper bound, {bounds.max_multiplier:g} x configured")
    if wanted.note:
        notes.append(wanted.note)
    notes.extend(move.notes)
    explanation = Explanation(
        usage=ratio.usage,
        capacity=ratio.capacity,
        u=ratio.u,
        n=wanted.n,
        k=policy.k,
        p=wanted.p,
        competes=wanted.competes,
        configured=queue.weight,
        proportional=wanted.weight,
        lower=lower,
        upper=upper,
        previous=standing.weight,
        stepped=move.stepped,
        value=move.value,
        notes=tuple(notes),
        law=policy.law,
        trace=wanted.trace,
    )
    return Weight(queue.name, move.value, standing.weight, queue.weight, _why(ratio.u, wanted.n, notes), explanation)


def _why(u: float, n: float, notes: Sequence[str]) -> str:
    """Return one sentence for people that explains the weight."""
    if n == 1 or n == 0:
        return "; ".join(notes)
    verdict = "on its share" if abs(u - n) <= 0.005 else "above its share" if u > n else "below its share"
    return "; ".join([f"used {u:.1%} for a share of {n:.1%}, {verdict}", *notes])


def acts(policy: Policy) -> bool:
    """Return whether any budget of the policy changes weights."""
    return any(budget.exhausted == "no-over-quota" for budget in policy.budgets)


def exhausted(policy: Policy, states: Iterable[BudgetState]) -> frozenset[str]:
    """Return the queues that a used-up budget limits: the budget's own queue, or every queue of its team."""
    acting = {budget.name: budget for budget in policy.budgets if budget.exhausted == "no-over-quota"}
    found: set[str] = set()
    for state in states:
        budget = acting.get(state.name)
        if budget is None or state.spent is None or state.spent < budget.limit:
            continue
        if budget.queue is not None:
            found.add(budget.queue)
        else:
            found |= {queue.name for queue in policy.queues if queue.team == budget.team}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Pool:
    """The GPUs that the queues of one shard divide.

    queues: the policy's queues of this shard.
    part: a part of the cluster's capacity, 0..1."""

    queues: tuple[str, ...]
    gpus: float
    part: float


def pools(shards: Sequence[Shard], nodes: Sequence[Object], gpus: float) -> tuple[Pool, ...]:
    """Return the GPUs of each shard. The result is empty if the cluster is divided as one.

    nodes: those that accept work, without lost GPUs.
    gpus: the total of these nodes."""
    found = []
    for shard in shards:
        own = (
            gpus
            if shard.nodes is None
            else gpus_of_nodes([node for node in nodes if node["metadata"]["name"] in shard.nodes])
        )
        found.append(Pool(shard.queues, max(0.0, own - shard.taken), own / gpus if gpus > 0 else 0.0))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WeightInputs:
    """All inputs of `calculate_weights`.

    pools: the parts of the cluster that are divided separately. If empty, `gpus` are divided as one."""

    policy: Policy
    window: UsageWindow
    standings: Mapping[str, Standing]
    gpus: float
    now_ms: int
    memory: Memory = field(default_factory=dict)
    exhausted: frozenset[str] = frozenset()
    devices: float | None = None
    pools: tuple[Pool, ...] = ()


def weigh_pools(of: WeightInputs) -> WeightResult:
    """Calculate the weights pool by pool. A queue that belongs to no pool gets the sum of what its children get."""
    policy, standings, gpus = of.policy, of.standings, of.gpus
    common = (of.now_ms, of.memory, of.exhausted)
    if not of.pools:
        return calculate_weights(policy, of.window, standings, gpus, *common, of.devices)
    due: dict[str, Entitlement] = {}
    kept: dict[str, Mapping[str, float]] = {}
    weights: list[Weight] = []
    for pool in of.pools:
        own = _policy_of(policy, pool)
        if not own.queues:
            continue
        if pool.gpus <= 0:
            due |= {queue.name: _nothing(queue.name, queue.parent, queue.deserved, standings) for queue in own.queues}
            continue
        seen = scaled(of.window, pool.part)
        known = {name: standing for name, standing in standings.items() if name in pool.queues}
        behind = None if of.devices is None else of.devices * pool.gpus / gpus
        weighing = calculate_weights(own, seen, known, pool.gpus, *common, behind)
        due |= {each.queue: each for each in weighing.entitlements}
        kept |= weighing.memory
        weights += weighing.weights
    for queue in policy.queues:
        if queue.name not in due:
            due[queue.name] = _together(policy, queue.name, due, standings)
    weights.sort(key=lambda weight: weight.queue)
    return WeightResult(tuple(due[name] for name in sorted(due)), tuple(weights), kept)


def _policy_of(policy: Policy, pool: Pool) -> Policy:
    """Return the policy with only the pool's queues; a queue whose parent is not in this pool is a root."""
    names = set(pool.queues)
    queues = tuple(
        queue if queue.parent in names else queue.model_copy(update={"parent": None})
        for queue in policy.queues
        if queue.name in names
    )
    return policy.model_copy(update={"queues": queues})


def _nothing(name: str, parent: str | None, deserved: float, standings: Mapping[str, Standing]) -> Entitlement:
    standing = standings.get(name, Standing(0.0, 0.0))
    return Entitlement(name, parent, 0.0, 0.0, 0.0, standing.requested, standing.allocated, deserved)


def _together(
    policy: Policy, name: str, due: Mapping[str, Entitlement], standings: Mapping[str, Standing]
) -> Entitlement:
    """Return the entitlement of a queue that groups queues of several pools."""
    queue = next(each for each in policy.queues if each.name == name)
    children = [due[each.name] for each in policy.queues if each.parent == name and each.name in due]
    empty = _nothing(name, queue.parent, queue.deserved, standings)
    return Entitlement(
        name,
        queue.parent,
        fsum(each.gpus for each in children),
        fsum(each.without_history for each in children),
        0.0,
        max(empty.requested, fsum(each.requested for each in children)),
        max(empty.allocated, fsum(each.allocated for each in children)),
        queue.deserved,
    )
