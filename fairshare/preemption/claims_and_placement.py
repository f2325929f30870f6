"""Assembles the inputs of a preemption decision, lists the claims, and computes whether a claim's pods fit on nodes.

A claim is a workload that has waited long enough and may preempt others, or a workload or queue for which a person or a
latency objective requests GPUs.

Pods are placed largest first, each on the node that then has the fewest GPUs left. A gang whose pods are unknown fits
if enough GPUs are free in total. The placement does not predict where a scheduler will place a pod."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum, inf
from typing import Any

from accountant.wire.policy_models import Policy, PreemptionPolicy
from fairshare.core.gpu_demand import gpus_taken
from fairshare.core.gpu_models import ModelMap, policy_of_part, units
from fairshare.core.queues_and_weights import NO_PLACE, UNLIMITED, Entitlement, Gang, Pod, PolicyTree, Quota
from fairshare.preemption.preemption_types import PreemptionCall, PreemptionInputs, Trigger
from fairshare.preemption.reclaim_rules_and_limits import (
    EPSILON,
    Account,
    Accounts,
    Claimant,
    PastPreemption,
    QueueResource,
    may_reclaim,
    path,
    ratio,
    still_limiting,
    within_quota,
)
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import Object, gpus_of_nodes

GPU = "gpu"
MOST_CLAIMS = 50
"""Largest number of claims for which victims are searched in one cycle, and of refused claims that are reported. Others
wait for the next cycle."""


Variant = tuple[str, tuple[str, ...] | None, str | None]
"""A way to start a workload: a pool, its nodes (None for all) and its GPU model (None without quotas by model)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A workload that needs room, or a queue for which a person or a latency objective requests GPUs.

    sizes: GPUs of each pod to place, if known.
    nodes: nodes on which the workload can run; None for all.
    pool: the node of the quota tree whose quota it needs, "" if its target admits work only by nodes.
    topology: the topology level that all its pods must share, "" for none.
    why: the reason of the call that requests the room, "" if the workload itself waits.
    path: the scheduler's queues from the root to that of the workload, if its scheduler protects others from it.
    alternatives: further pools of which one may admit it instead, each with its nodes and its GPU model.
    in_quota: as in `Gang`.
    model: the GPU model on which it starts; None if the policy has no quotas by model.
    uid: that of the workload's object, by which schedulers order workloads of the same age.
    line, place: as in `Gang`."""

    key: str
    queue: str
    gpus: float
    sizes: tuple[float, ...]
    nodes: tuple[str, ...] | None
    priority: int
    preemptible: bool
    pool: str
    topology: str
    trigger: Trigger
    since_ms: int
    why: str
    path: tuple[str, ...] = ()
    alternatives: tuple[Variant, ...] = ()
    in_quota: bool = False
    model: str | None = None
    uid: str = ""
    line: str = ""
    place: tuple[float, int, int, str] = NO_PLACE

    @property
    def variants(self) -> Sequence[Claim]:
        """The claim for each pool that may admit it, in the scheduler's order."""
        return (
            self,
            *(replace(self, pool=pool, nodes=nodes, model=model) for pool, nodes, model in self.alternatives),
        )

    @property
    def claimant(self) -> Claimant:
        return Claimant(self.queue, {GPU: self.gpus}, self.preemptible)

    @property
    def requirements(self) -> Hashable:
        """A value that is equal for claims that differ only in their workload and waiting time."""
        return replace(self, key="", since_ms=0, uid="", place=NO_PLACE)

    @property
    def called(self) -> bool:
        """Whether a latency objective or a person requests the room, not the workload itself."""
        return self.trigger != "waits"


def claims(policy: Policy, situation: PreemptionInputs) -> tuple[Claim, ...]:
    """Return the claims in the order of service.

    Calls are first. The others follow by these keys: within quota before others, then higher priority, then the queue
    that holds the smallest part of its share, then the longest wait. Of workloads that wait for equally long, the
    lower uid is first, as in the schedulers. Those that wait in one line of their scheduler are in its order among
    themselves, because it gives the room to its own first."""
    candidates = [*_called(situation), *(() if situation.calls_only else _waiting(policy.preemption, situation))]
    by_workload: dict[str, Claim] = {}
    for claim in candidates:
        by_workload.setdefault(claim.key, claim)
    accounts = situation.accounts

    def order(claim: Claim) -> tuple[object, ...]:
        account = situation.accounts_of(claim.model)[claim.queue]
        stock = account.stocks[GPU]
        return (
            not claim.called,
            not within_quota(claim.claimant, account),
            -claim.priority,
            ratio(stock.allocated, stock.share),
            claim.since_ms,
            claim.uid,
            claim.key,
        )

    return _in_line(sorted((claim for claim in by_workload.values() if claim.queue in accounts), key=order))


def _in_line(ordered: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return the claims with those of each line in its order, at the places that they have together."""
    lines: dict[str, list[int]] = {}
    for number, claim in enumerate(ordered):
        if claim.line and not claim.called:
            lines.setdefault(claim.line, []).append(number)
    result = list(ordered)
    for numbers in lines.values():
        for number, claim in zip(numbers, sorted((ordered[n] for n in numbers), key=lambda c: c.place), strict=True):
            result[number] = claim
    return tuple(result)


def over_limit(claim: Claim, now: Accounts, expected: Accounts, model: str | None = None) -> str | None:
    """Return in words which limit of a queue makes the claim wait even if GPUs are free; None if no limit does.

    now: the accounts of the inputs.
    expected: the accounts with the GPUs that earlier claims get.
    model: the GPU model of these accounts; None for those of all GPUs."""
    for name in path(claim.queue, expected):
        stock = expected[name].stocks[GPU]
        if stock.limit != UNLIMITED and stock.allocated + claim.gpus > stock.limit + EPSILON:
            unit = units(model)
            return f"queue {name} may hold {stock.limit:g} {unit} at most and {_holds(name, now, expected, unit)}"
        over_quota = stock.deserved != UNLIMITED and stock.fixed + claim.gpus > stock.deserved + EPSILON
        if claim.in_quota and model is None and over_quota:
            return f"it may not be preempted itself, and queue {name} may hold at most its quota of such work"
    return None


def refusal(claim: Claim, now: Accounts, expected: Accounts) -> str | None:
    """Return in words why no workload is preempted for this claim; None if preemption is allowed.

    For now and expected see `over_limit`."""
    if claim.called or may_reclaim(claim.claimant, expected):
        return None
    stock = expected[claim.queue].stocks[GPU]
    if not claim.preemptible and stock.deserved != UNLIMITED and stock.fixed + claim.gpus > stock.deserved + EPSILON:
        return f"it may not be preempted itself, and queue {claim.queue} may hold at most its quota of such work"
    return (
        f"queue {claim.queue} {_holds(claim.queue, now, expected, units(claim.model))}, and with {claim.gpus:g} more it"
        f" would be above its fair share of {stock.share:g}"
    )


def _holds(queue: str, now: Accounts, expected: Accounts, unit: str) -> str:
    held, later = (accounts[queue].stocks[GPU].allocated for accounts in (now, expected))
    return f"holds {held:g} {unit}" + (f" and is to get {later - held:g} already" if later > held + EPSILON else "")


def _called(situation: PreemptionInputs) -> Sequence[Claim]:
    """Return the claims of the calls: one per waiting workload, or one for the whole call if none waits."""
    result = []
    for call in situation.calls:
        gangs = [
            gang
            for gang in situation.gangs
            if call.queue in ("", gang.queue) and (not call.workload or named_by(gang, call.workload))
        ]
        waiting = [gang for gang in gangs if gang.waits > 0]
        result += [_claim(gang, situation, call.trigger, call.why) for gang in waiting]
        if not waiting and call.gpus > 0:
            priority = max((gang.priority for gang in gangs), default=0)
            queue = call.queue or next((gang.queue for gang in gangs), "")
            key = gangs[0].key if call.workload and gangs else f"Queue//{queue}"
            pool = next((gang.pool for gang in gangs), "")
            held = (model for gang in gangs for model in situation.held_models.get(gang.key, ()))
            model = next(chain(held, situation.models), None)
            nodes = None if model is None else situation.model_nodes.get(model, ())
            claim = Claim(
                key, queue, call.gpus, (), nodes, priority, True, pool, "", call.trigger, situation.now_ms, call.why,
                model=model,
            )  # fmt: skip
            result.append(claim)
    return result


def _waiting(rules: PreemptionPolicy, situation: PreemptionInputs) -> Sequence[Claim]:
    """Return the claims of workloads that have waited long enough and may preempt others."""
    never = {each.value for each in rules.classes if not each.preempts}
    result = []
    for gang in situation.gangs:
        since = situation.now_ms if gang.created_ms is None else gang.created_ms
        if (
            gang.waits > 0
            and not gang.held_back
            and gang.priority not in never
            and all(pod.preempts for pod in gang.pods)
            and not any(pod.gated for pod in gang.pods)
            and (gang.may_claim_ms is None or situation.now_ms >= gang.may_claim_ms)
            and situation.now_ms - since >= rules.wait * MS_PER_SECOND
        ):
            result.append(_claim(gang, situation, "waits", ""))
    return result


def _claim(gang: Gang, situation: PreemptionInputs, trigger: Trigger, why: str) -> Claim:
    key = gang.key
    usable = situation.usable.get(key)
    pools: Sequence[tuple[str, str | None]] = [(choice.pool, None) for choice in gang.choices] or [(gang.pool, None)]
    if situation.models:
        pools = situation.model_choices.get(key) or [(gang.pool, next(iter(situation.models)))]
    (pool, nodes, model), *others = (
        (pool, _both(_both(usable, situation.pool_nodes.get(pool)), situation.model_nodes.get(model or "")), model)
        for pool, model in pools
    )
    return Claim(
        key,
        gang.queue,
        gang.waits,
        to_start(gang),
        nodes,
        gang.priority,
        gang.preemptible,
        pool,
        gang.topology,
        trigger,
        gang.created_ms if gang.created_ms is not None else situation.now_ms,
        why,
        gang.protection.path if gang.protection is not None else (),
        tuple(others),
        gang.in_quota,
        model,
        gang.uid,
        gang.line,
        gang.place,
    )


def _both(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the nodes in both; None stands for all nodes."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(sorted({*one} & {*other}))


def named_by(gang: Gang, name: str) -> bool:
    """Return whether NAMESPACE/NAME names this gang: by its own object's name, or by that of its job."""
    return name in {f"{gang.namespace}/{each}" for each in (gang.name, gang.job) if each}


def saturations(accounts: Accounts) -> Mapping[str, float]:
    """Return for every queue the GPUs that it holds over the GPUs that it is due; infinite if it is due none."""
    return {
        name: ratio(account.stocks[GPU].allocated, account.stocks[GPU].share) if account.stocks[GPU].share else inf
        for name, account in accounts.items()
    }


def to_start(gang: Gang) -> tuple[float, ...]:
    """Return the sizes of the pods that the gang needs to start; empty if they are unknown.

    Those that its scheduler takes first (`Gang.core`) are before the others, and the smallest before larger ones."""
    core = frozenset(gang.core)
    waiting = sorted((pod.uid not in core, pod.gpus) for pod in gang.pods if not pod.held and not pod.node)
    sizes: list[float] = []
    for _, size in waiting:
        if sum(sizes) < gang.waits - EPSILON:
            sizes.append(size)
    return tuple(sizes) if sum(sizes) >= gang.waits - EPSILON else ()


NO_QUOTAS: Mapping[str, Quota] = {}
NO_MODELS: Mapping[str, tuple[Entitlement, ...]] = {}
NO_POOL_MODELS: Mapping[str, str] = {}


def preemption_inputs(
    policy: Policy,
    target: str,
    gangs: Sequence[Gang],
    entitlements: Sequence[Entitlement],
    nodes: Sequence[Object],
    pods: Sequence[Pod],
    now_ms: int,
    *,
    past: Sequence[PastPreemption] = (),
    calls: Sequence[PreemptionCall] = (),
    quotas: Mapping[str, Quota] = NO_QUOTAS,
    by_model: Mapping[str, Sequence[Entitlement]] = NO_MODELS,
    pool_models: Mapping[str, str] = NO_POOL_MODELS,
) -> PreemptionInputs:
    """Return the inputs of a decision.

    nodes: the nodes that accept work.
    pods: the pods of the whole cluster. The GPUs of a pod that is being deleted count as free.
    past: earlier preemptions, which the limits count.
    calls: requests for room of latency objectives and people.
    quotas: the target's own quotas.
    by_model: the entitlements to each GPU model, if the policy has quotas by model.
    pool_models: the model of each quota."""
    queues = {queue.name for queue in policy.queues}
    known_gangs = tuple(gang for gang in gangs if gang.queue in queues)
    usable = {}
    for gang in known_gangs:
        selectors = {pod.selector for pod in gang.pods if not pod.node and pod.selector}
        if gang.waits > 0 and selectors:
            usable[gang.key] = _selected(nodes, selectors)
    choices = {choice for gang in known_gangs for choice in gang.choices if choice.selector}
    of_models = _by_model(policy, known_gangs, nodes, by_model, pool_models) if by_model else {}
    return PreemptionInputs(
        now_ms,
        target,
        known_gangs,
        _accounts(policy, known_gangs, entitlements),
        free_by_node(gpus_by_node(nodes), pods),
        usable,
        still_limiting(past, now_ms, policy.preemption.cool_down),
        tuple(calls),
        quotas=quotas,
        pool_nodes={choice.pool: _selected(nodes, [choice.selector]) for choice in choices},
        **of_models,
    )


def _by_model(
    policy: Policy,
    gangs: Sequence[Gang],
    nodes: Sequence[Object],
    entitlements: Mapping[str, Sequence[Entitlement]],
    pool_models: Mapping[str, str],
) -> dict[str, Any]:
    """Return the fields of the inputs by GPU model."""
    of = ModelMap.of(policy, nodes, pool_models)
    held = {gang.key: of.held(gang) for gang in gangs}
    accounts: dict[str, Mapping[str, Account]] = {}
    for model in of.models:
        of_model = [replace(gang, allocated=held[gang.key].get(model, 0.0)) for gang in gangs]
        accounts[model] = _accounts(policy_of_part(policy, model), of_model, entitlements[model])
    return {
        "models": accounts,
        "model_nodes": {
            model: tuple(sorted(name for name, other in of.of_node.items() if other == model)) for model in of.models
        },
        "held_models": {gang.key: dict(sorted(held[gang.key].items())) for gang in gangs if held[gang.key]},
        "model_choices": {gang.key: of.choices(gang) for gang in gangs if gang.waits > 0},
    }


def _selected(nodes: Sequence[Object], selectors: Collection[tuple[tuple[str, str | None], ...]]) -> tuple[str, ...]:
    """Return the names of the nodes with all labels of all selectors."""
    return tuple(
        sorted(
            node["metadata"]["name"]
            for node in nodes
            if all(
                (node["metadata"].get("labels") or {}).get(key) == value
                for selector in selectors
                for key, value in selector
            )
        )
    )


def _accounts(policy: Policy, gangs: Sequence[Gang], entitlements: Sequence[Entitlement]) -> Mapping[str, Account]:
    """Return the accounts. A queue holds the sum of its gangs, from which the GPUs of a stopped gang can be
    subtracted."""
    by_queue: dict[str, list[float]] = {}
    fixed_by_queue: dict[str, list[float]] = {}
    for gang in gangs:
        by_queue.setdefault(gang.queue, []).append(gang.allocated)
        if not gang.preemptible:
            fixed_by_queue.setdefault(gang.queue, []).append(gang.allocated)
    tree = PolicyTree(policy)
    allocated = tree.sum_up({queue: fsum(parts) for queue, parts in by_queue.items()})
    fixed = tree.sum_up({queue: fsum(parts) for queue, parts in fixed_by_queue.items()})
    shares = {due.queue: due.gpus for due in entitlements}
    limits = {due.queue: due.limit for due in entitlements}
    return {
        queue.name: Account(
            queue.name,
            queue.parent or "",
            {
                GPU: QueueResource(
                    queue.deserved,
                    shares[queue.name],
                    min((one for one in (queue.limit, limits[queue.name]) if one != UNLIMITED), default=UNLIMITED),
                    allocated.get(queue.name, 0.0),
                    fixed.get(queue.name, 0.0),
                )
            },
        )
        for queue in sorted(policy.queues, key=lambda queue: queue.name)
        if queue.name in shares
    }


def gpus_by_node(nodes: Iterable[Object]) -> Mapping[str, float]:
    """Return the GPUs of each node, in the order of the names; 0 for a node that is down."""
    listed = {str(node["metadata"]["name"]): gpus_of_nodes([node]) for node in nodes}
    return dict(sorted(listed.items()))


def free_by_node(listed: Mapping[str, float], pods: Iterable[Pod]) -> Mapping[str, float]:
    """Return by node the GPUs that no pod holds. A pod that is being deleted holds none.

    listed: the GPUs of each node. pods: the pods of the whole cluster."""
    pods_by_node: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.held:
            pods_by_node.setdefault(pod.node, []).append(pod)
    return {name: gpus - gpus_taken(pods_by_node.get(name, ())) for name, gpus in listed.items()}


class FreeGpus:
    """Free GPUs by node. Not thread-safe."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self._free = dict(free)

    def add(self, amounts: Mapping[str, float]) -> None:
        """Add freed GPUs by node. GPUs on unknown nodes are ignored."""
        for node, amount in amounts.items():
            if node in self._free:
                self._free[node] += amount

    def total(self, nodes: Collection[str] | None = None) -> float:
        """Return the free GPUs on `nodes` together (None: on all nodes).

        A node whose pods hold more than it lists counts as 0, not as negative."""
        return _total(self._on(nodes).values())

    def place(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> bool:
        """Reserve room for pods of these sizes. Returns False, and reserves nothing, if they do not fit.

        If no sizes are known, `total` GPUs are reserved anywhere."""
        usable = self._on(nodes)
        remaining = fit(sizes, usable) if sizes else _fill(total, usable)
        if remaining is None:
            return False
        self._free.update(remaining)
        return True

    def _on(self, nodes: Collection[str] | None) -> dict[str, float]:
        """Return a copy of the free GPUs by node, of these nodes as far as they are known; None: of all."""
        free = self._free
        return dict(free) if nodes is None else {node: free[node] for node in nodes if node in free}

    def trial(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> PlacementTrial:
        """Return an object that tests repeatedly whether `place` would succeed if more GPUs were free."""
        return PlacementTrial(self._on(nodes), sizes, total)


class PlacementTrial:
    """Tests whether pods would fit on nodes if parts of other workloads were stopped. Each part has a number, by which
    it can be taken back.

    The result is that of `FreeGpus.place`, and the free GPUs themselves do not change. In nearly every gang all pods
    have one size. For such pods the number that fits on each node is enough, and a part changes it on few nodes."""

    def __init__(self, free: dict[str, float], sizes: Sequence[float], total: float) -> None:
        """free: free GPUs of the usable nodes. This object changes it."""
        self._free = free
        self._base = dict(free)
        self._sizes = sizes
        self._total = total
        self._common_size = sizes[0] if sizes and min(sizes) == max(sizes) else None
        self._fitting = sum([self._pods_on(amount) for amount in free.values() if amount > EPSILON])
        self._parts: dict[int, Mapping[str, float]] = {}
        self._unplaced: dict[int, float] = {}
        self._freed: dict[str, dict[int, float]] = {}

    def add(self, number: int, amounts: Mapping[str, float], unplaced: float = 0.0) -> None:
        """Add a part.

        amounts: its GPUs by node; unknown nodes are ignored.
        unplaced: its GPUs on unknown nodes."""
        self._parts[number] = amounts
        if unplaced:
            self._unplaced[number] = unplaced
        for node, amount in amounts.items():
            if node in self._free:
                self._freed.setdefault(node, {})[number] = amount
                self._set(node, self._sum(node))

    def take_out(self, number: int) -> None:
        """Remove a part again, as if it had never been added."""
        for node, amount in self._without(number).items():
            del self._freed[node][number]
            self._set(node, amount)
        self._unplaced.pop(number, None)
        del self._parts[number]

    def fits(self, without: int | None = None) -> bool:
        """Return whether the pods fit.

        without: the number of a part that is left out; None to leave out none."""
        reduced = self._without(without) if without is not None else {}
        unplaced = fsum(amount for number, amount in self._unplaced.items() if number != without)
        if unplaced and _total((self._free | reduced).values()) + unplaced >= self._total - EPSILON:
            return True  # its nodes are unknown, so its scheduler counts only quota
        if not self._sizes:
            return _total((self._free | reduced).values()) >= self._total - EPSILON
        if self._common_size is None:
            return fit(self._sizes, self._free | reduced) is not None
        fewer = sum(self._pods_on(self._free[node]) - self._pods_on(amount) for node, amount in reduced.items())
        return self._fitting - fewer >= len(self._sizes)

    def _without(self, number: int) -> dict[str, float]:
        """Return the free GPUs that the part's nodes would have without it.

        They are added up again, because subtracting fractions of a GPU would not be exact."""
        return {node: self._sum(node, number) for node in self._parts[number] if node in self._free}

    def _sum(self, node: str, without: int | None = None) -> float:
        freed = self._freed[node].items()
        return fsum([self._base[node], *(amount for number, amount in freed if number != without)])

    def _set(self, node: str, amount: float) -> None:
        self._fitting += self._pods_on(amount) - self._pods_on(self._free[node])
        self._free[node] = amount

    def _pods_on(self, amount: float) -> int:
        """Return how many pods of the common size fit on a node with this amount of free GPUs; 0 if sizes differ."""
        return int((amount + EPSILON) / self._common_size) if self._common_size is not None and amount > EPSILON else 0


def _total(amounts: Iterable[float]) -> float:
    return fsum(amount for amount in amounts if amount > 0)


def _fill(total: float, free: Mapping[str, float]) -> dict[str, float] | None:
    """Return what is left on the used nodes after `total` GPUs are taken from the fullest nodes; None if too few are
    free."""
    left, remaining = total, {}
    for node in sorted(free, key=lambda node: (free[node], node)):
        if left <= EPSILON:
            break
        part = min(left, max(0.0, free[node]))
        remaining[node] = free[node] - part
        left -= part
    return remaining if left <= EPSILON else None


def fit(sizes: Sequence[float], amounts: Mapping[str, float]) -> dict[str, float] | None:
    """Return what is left on each node after pods of these sizes are placed; None if not all of them fit."""
    free = {node: amount for node, amount in amounts.items() if amount > EPSILON}
    if fsum(sizes) > fsum(free.values()) + EPSILON:
        return None
    for size in sorted(sizes, reverse=True):
        best = min(
            (node for node, amount in free.items() if amount >= size - EPSILON),
            key=lambda node: (free[node], node),
            default=None,
        )
        if best is None:
            return None
        free[best] -= size
    return free


def unplaceable_gpus(free: Mapping[str, float], gangs: Iterable[Gang]) -> float:
    """Return the free GPUs that are left after every waiting gang that fits is placed, the largest first.

    The result is 0 if all waiting gangs fit. free: free GPUs by node."""
    room = FreeGpus({node: max(0.0, amount) for node, amount in free.items()})
    waiting = sorted(
        (gang for gang in gangs if gang.waits > 0),
        key=lambda gang: (-gang.waits, gang.queue, gang.namespace, gang.name),
    )
    placed = [room.place(to_start(gang), gang.waits) for gang in waiting]
    return 0.0 if all(placed) else room.total()
