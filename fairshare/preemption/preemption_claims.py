"""Lists which workloads may request room, and whether they would fit on nodes.

Pods are placed largest first, each on the node with the least room left over. If the pods of a gang are unknown, it
only needs as many GPUs as are free in total. This module does not predict where a scheduler will place a pod, and it
does not read node selectors. A GPU that only a selector excludes counts as usable."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import fsum, inf

from accountant.wire.policy_models import Policy, PreemptionPolicy
from fairshare.core.pods import taken_up
from fairshare.core.queue_tree import PolicyTree
from fairshare.core.queues_and_weights import UNLIMITED, Entitlement, Gang, Pod, Quota
from fairshare.preemption.preemption_rules import (
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
from fairshare.preemption.preemption_types import PreemptionCall, PreemptionInputs, Trigger
from fairshare.preemption.victim_candidates import key_of
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import Object, gpus_of_nodes

GPU = "gpu"
MOST_CLAIMS = 50
"""Largest number of claims for which victims are searched in one cycle, and of refused claims that are reported. Others
wait for the next cycle."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A workload that needs room.

    sizes: sizes of the pods to place, if known.
    nodes: nodes that it can use; None for all.
    pool: the node of the quota tree whose quota it needs, "" if its target admits work only by nodes.
    topology: the topology level that all its pods must share, "" for none."""

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

    @property
    def asker(self) -> Claimant:
        return Claimant(self.queue, {GPU: self.gpus}, self.preemptible)

    @property
    def like(self) -> Hashable:
        """Return a value that is equal for claims that differ only in their workload and waiting time."""
        return (*astuple(self)[1:-2], self.why)

    @property
    def called(self) -> bool:
        """Return whether a latency objective or a person requests the room, not the workload itself."""
        return self.trigger != "waits"


def claims(policy: Policy, situation: PreemptionInputs) -> tuple[Claim, ...]:
    """Return the claims in the order of service.

    Calls are first. The others follow by these keys: within quota before others, then higher priority, then the queue
    with the least of its share, then the longest wait."""
    found = [*_called(situation), *(() if situation.calls_only else _waiting(policy.preemption, situation))]
    seen: dict[str, Claim] = {}
    for claim in found:
        seen.setdefault(claim.key, claim)
    accounts = situation.accounts

    def order(claim: Claim) -> tuple[object, ...]:
        stock = accounts[claim.queue].stocks[GPU]
        return (
            not claim.called,
            not within_quota(claim.asker, accounts[claim.queue]),
            -claim.priority,
            ratio(stock.allocated, stock.share),
            claim.since_ms,
            claim.key,
        )

    return tuple(sorted((claim for claim in seen.values() if claim.queue in accounts), key=order))


def over_limit(claim: Claim, now: Accounts, expected: Accounts) -> str | None:
    """Return in words which limit makes the claim wait even if there is room.

    now: the accounts of the inputs.
    expected: the accounts with the GPUs that earlier claims get."""
    for name in path(claim.queue, expected):
        stock = expected[name].stocks[GPU]
        if stock.limit != UNLIMITED and stock.allocated + claim.gpus > stock.limit + EPSILON:
            return f"queue {name} may hold {stock.limit:g} GPUs at most and {_holds(name, now, expected)}"
    return None


def refusal(claim: Claim, now: Accounts, expected: Accounts) -> str | None:
    """Return in words why no workload is preempted for this claim; None if preemption is allowed.

    For now and expected see `over_limit`."""
    if claim.called or may_reclaim(claim.asker, expected):
        return None
    stock = expected[claim.queue].stocks[GPU]
    if not claim.preemptible and stock.deserved != UNLIMITED and stock.fixed + claim.gpus > stock.deserved + EPSILON:
        return f"it may not be preempted itself, and of such work queue {claim.queue} may hold its quota at most"
    return (
        f"queue {claim.queue} {_holds(claim.queue, now, expected)}, and with {claim.gpus:g} more it would be above its"
        f" fair share of {stock.share:g}"
    )


def _holds(queue: str, now: Accounts, expected: Accounts) -> str:
    held, then = (books[queue].stocks[GPU].allocated for books in (now, expected))
    return f"holds {held:g} GPUs" + (f" and is to get {then - held:g} already" if then > held + EPSILON else "")


def _called(situation: PreemptionInputs) -> Sequence[Claim]:
    found = []
    for call in situation.calls:
        mine = [gang for gang in situation.gangs if call.queue in ("", gang.queue) and _is_called(gang, call)]
        waiting = [gang for gang in mine if gang.waits > 0]
        found += [_claim(gang, situation, call.trigger, call.why) for gang in waiting]
        if not waiting and call.gpus > 0:
            priority = max((gang.priority for gang in mine), default=0)
            queue = call.queue or next((gang.queue for gang in mine), "")
            key = key_of(mine[0]) if call.workload and mine else f"Queue//{queue}"
            pool = next((gang.pool for gang in mine), "")
            claim = Claim(
                key, queue, call.gpus, (), None, priority, True, pool, "", call.trigger, situation.now_ms, call.why
            )
            found.append(claim)
    return found


def _waiting(rules: PreemptionPolicy, situation: PreemptionInputs) -> Sequence[Claim]:
    never = {each.value for each in rules.classes if not each.preempts}
    found = []
    for gang in situation.gangs:
        since = situation.now_ms if gang.created_ms is None else gang.created_ms
        if (
            gang.waits > 0
            and gang.priority not in never
            and all(pod.preempts for pod in gang.pods)
            and not any(pod.gated for pod in gang.pods)
            and situation.now_ms - since >= rules.wait * MS_PER_SECOND
        ):
            found.append(_claim(gang, situation, "waits", ""))
    return found


def _claim(gang: Gang, situation: PreemptionInputs, trigger: Trigger, why: str) -> Claim:
    key = key_of(gang)
    return Claim(
        key,
        gang.queue,
        gang.waits,
        to_start(gang),
        situation.usable.get(key),
        gang.priority,
        gang.preemptible,
        gang.pool,
        gang.topology,
        trigger,
        gang.created_ms if gang.created_ms is not None else situation.now_ms,
        why,
    )


def _is_called(gang: Gang, call: PreemptionCall) -> bool:
    return not call.workload or named_by(gang, call.workload)


def named_by(gang: Gang, name: str) -> bool:
    """Return whether NAMESPACE/NAME names this gang: by its own object's name, or by that of its job."""
    return name in {f"{gang.namespace}/{each}" for each in (gang.name, gang.job) if each}


def saturations(accounts: Accounts) -> Mapping[str, float]:
    """Return for every queue the GPUs that it holds over the GPUs that it is due."""
    return {
        name: ratio(account.stocks[GPU].allocated, account.stocks[GPU].share) if account.stocks[GPU].share else inf
        for name, account in accounts.items()
    }


def to_start(gang: Gang) -> tuple[float, ...]:
    """Return the sizes of the smallest pods that the gang needs to start; empty if they are unknown."""
    waiting = sorted(pod.gpus for pod in gang.pods if not pod.held and not pod.node)
    sizes: list[float] = []
    for size in waiting:
        if sum(sizes) < gang.waits - EPSILON:
            sizes.append(size)
    return tuple(sizes) if sum(sizes) >= gang.waits - EPSILON else ()


NO_QUOTAS: Mapping[str, Quota] = {}


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
) -> PreemptionInputs:
    """Return the inputs of a decision.

    nodes: those that accept work.
    pods: all pods of the cluster. A pod that is being stopped leaves room.
    quotas: the target's quotas."""
    known = {queue.name for queue in policy.queues}
    mine = tuple(gang for gang in gangs if gang.queue in known)
    usable = {}
    for gang in mine:
        wanted = {pod.selector for pod in gang.pods if not pod.node and pod.selector}
        if gang.waits > 0 and wanted:
            usable[key_of(gang)] = tuple(
                sorted(
                    node["metadata"]["name"]
                    for node in nodes
                    if all(
                        (node["metadata"].get("labels") or {}).get(key) == value
                        for selector in wanted
                        for key, value in selector
                    )
                )
            )
    return PreemptionInputs(
        now_ms,
        target,
        mine,
        _accounts(policy, mine, entitlements),
        free_by_node(nodes, pods),
        usable,
        still_limiting(past, now_ms, policy.preemption.cool_down),
        tuple(calls),
        quotas=quotas,
    )


def _accounts(policy: Policy, gangs: Sequence[Gang], entitlements: Sequence[Entitlement]) -> Mapping[str, Account]:
    """Return the accounts. A queue holds the sum of its gangs, because only this can be subtracted when a gang
    stops."""
    own: dict[str, list[float]] = {}
    fixed: dict[str, list[float]] = {}
    for gang in gangs:
        own.setdefault(gang.queue, []).append(gang.allocated)
        if not gang.preemptible:
            fixed.setdefault(gang.queue, []).append(gang.allocated)
    tree = PolicyTree(policy)
    held = tree.sum_up({queue: fsum(parts) for queue, parts in own.items()})
    stuck = tree.sum_up({queue: fsum(parts) for queue, parts in fixed.items()})
    shares = {due.queue: due.gpus for due in entitlements}
    return {
        queue.name: Account(
            queue.name,
            queue.parent or "",
            {
                GPU: QueueResource(
                    queue.deserved,
                    shares[queue.name],
                    queue.limit,
                    held.get(queue.name, 0.0),
                    stuck.get(queue.name, 0.0),
                )
            },
        )
        for queue in sorted(policy.queues, key=lambda queue: queue.name)
        if queue.name in shares
    }


def free_by_node(nodes: Sequence[Object], pods: Sequence[Pod]) -> Mapping[str, float]:
    """Return the GPUs that no pod holds.

    pods: all pods of the cluster. A pod that is being stopped leaves room."""
    used: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.held:
            used.setdefault(pod.node, []).append(pod)
    return {
        name: gpus_of_nodes([node]) - taken_up(used.get(name, ()))
        for node in sorted(nodes, key=lambda node: str(node["metadata"]["name"]))
        for name in (node["metadata"]["name"],)
    }


SLACK = 1e-9


class FreeGpus:
    """Free GPUs by node. Not thread-safe."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self._free = dict(free)

    def give(self, amounts: Mapping[str, float]) -> None:
        """Free GPUs on nodes. GPUs on unknown nodes are ignored."""
        for node, amount in amounts.items():
            if node in self._free:
                self._free[node] += amount

    def free(self, nodes: Collection[str] | None = None) -> float:
        """Return the GPUs free in total, on `nodes` (None: on every node).

        A node that holds more than it lists counts as 0, not as negative."""
        return _free(self._free[node] for node in self._usable(nodes))

    def place(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> bool:
        """Reserve room for pods of these sizes. Returns False, and reserves nothing, if they do not fit.

        If no sizes are known, `total` GPUs are reserved anywhere."""
        taken = self._found(sizes, total, nodes)
        if taken is None:
            return False
        self._free.update(taken)
        return True

    def _found(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None) -> dict[str, float] | None:
        """Return what would be left on the used nodes. The order of the nodes does not matter."""
        usable = self._usable(nodes)
        return self._fill(total, usable) if not sizes else fit(sizes, {node: self._free[node] for node in usable})

    def _usable(self, nodes: Collection[str] | None) -> Collection[str]:
        return self._free.keys() if nodes is None else [node for node in nodes if node in self._free]

    def _fill(self, total: float, nodes: Collection[str]) -> dict[str, float] | None:
        """Take GPUs from the fullest nodes first, so that whole nodes stay free."""
        left, taken = total, {}
        for node in sorted(nodes, key=lambda node: (self._free[node], node)):
            if left <= SLACK:
                break
            part = min(left, max(0.0, self._free[node]))
            taken[node] = self._free[node] - part
            left -= part
        return taken if left <= SLACK else None

    def trial(self, sizes: Sequence[float], total: float, nodes: Collection[str] | None = None) -> PlacementTrial:
        """Return an object that tests repeatedly whether `place` would succeed with further GPUs freed."""
        return PlacementTrial({node: self._free[node] for node in self._usable(nodes)}, sizes, total)


class PlacementTrial:
    """Tests whether pods fit while parts are added to the room by number and removed again. The room itself does not
    change.

    It gives the same results as `FreeGpus.place`. In nearly every gang all pods have one size. Such pods are only
    counted: the number that fits on each node, which a part changes on few nodes."""

    def __init__(self, free: dict[str, float], sizes: Sequence[float], total: float) -> None:
        """free: free GPUs of the usable nodes. This object changes it."""
        self._free = free
        self._base = dict(free)
        self._sizes = sizes
        self._total = total
        self._size = sizes[0] if sizes and min(sizes) == max(sizes) else None
        self._places = sum(map(self._holds, free.values()))
        self._parts: dict[int, Mapping[str, float]] = {}
        self._unplaced: dict[int, float] = {}
        self._given: dict[str, dict[int, float]] = {}

    def give(self, number: int, amounts: Mapping[str, float], unplaced: float = 0.0) -> None:
        """Add a part.

        amounts: its GPUs by node; unknown nodes are ignored.
        unplaced: its GPUs on unknown nodes."""
        self._parts[number] = amounts
        if unplaced:
            self._unplaced[number] = unplaced
        for node, amount in amounts.items():
            if node in self._free:
                self._given.setdefault(node, {})[number] = amount
                self._set(node, self._sum(node))

    def take_out(self, number: int) -> None:
        """Remove a part again, as if it had never been added."""
        for node, amount in self._without(number).items():
            del self._given[node][number]
            self._set(node, amount)
        self._unplaced.pop(number, None)
        del self._parts[number]

    def fits(self, without: int | None = None) -> bool:
        """Return whether the pods fit.

        without: the number of a part that is left out."""
        fewer = self._without(without) if without is not None else {}
        unplaced = fsum(amount for number, amount in self._unplaced.items() if number != without)
        if unplaced and _free((self._free | fewer).values()) + unplaced >= self._total - SLACK:
            return True  # its nodes are unknown, so its scheduler counts only quota
        if not self._sizes:
            return _free((self._free | fewer).values()) >= self._total - SLACK
        if self._size is None:
            return fit(self._sizes, self._free | fewer) is not None
        lost = sum(self._holds(self._free[node]) - self._holds(amount) for node, amount in fewer.items())
        return self._places - lost >= len(self._sizes)

    def _without(self, number: int) -> dict[str, float]:
        """Return the free GPUs of this part's nodes without it.

        They are added up again, because subtracting fractions of a GPU would not be exact."""
        return {node: self._sum(node, number) for node in self._parts[number] if node in self._free}

    def _sum(self, node: str, without: int | None = None) -> float:
        given = self._given[node].items()
        return fsum([self._base[node], *(amount for number, amount in given if number != without)])

    def _set(self, node: str, amount: float) -> None:
        self._places += self._holds(amount) - self._holds(self._free[node])
        self._free[node] = amount

    def _holds(self, amount: float) -> int:
        """Return how many pods fit on a node with so much free."""
        return int((amount + SLACK) / self._size) if self._size is not None and amount > SLACK else 0


def _free(amounts: Iterable[float]) -> float:
    return fsum(amount for amount in amounts if amount > 0)


def fit(sizes: Sequence[float], amounts: Mapping[str, float]) -> dict[str, float] | None:
    """Return what is left on each node after pods of these sizes are placed; None if not all of them fit."""
    free = {node: amount for node, amount in amounts.items() if amount > SLACK}
    if fsum(sizes) > fsum(free.values()) + SLACK:
        return None
    for size in sorted(sizes, reverse=True):
        best = min(
            (node for node, amount in free.items() if amount >= size - SLACK),
            key=lambda node: (free[node], node),
            default=None,
        )
        if best is None:
            return None
        free[best] -= size
    return free


def unplaceable_gpus(free: Mapping[str, float], gangs: Iterable[Gang]) -> float:
    """Return the GPUs left free after every waiting gang that fits has been placed, the largest first.

    If no gang waits after that, the result is 0, because the room is then simply free. free: by node."""
    room = FreeGpus({node: max(0.0, amount) for node, amount in free.items()})
    waiting = sorted(
        (gang for gang in gangs if gang.waits > 0),
        key=lambda gang: (-gang.waits, gang.queue, gang.namespace, gang.name),
    )
    placed = [room.place(to_start(gang), gang.waits) for gang in waiting]
    return 0.0 if all(placed) else room.free()
