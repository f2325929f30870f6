"""Defines queues, pods, gangs, entitlements and weights as frozen values, and the policy's tree of queues.

GPUs are floats in units of one physical GPU, as in the schedulers; -1 means unlimited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from accountant.wire.policy_models import Policy, QueuePolicy, UsageWindow, WindowSpec
from fairshare.core.device_claims import PodClaim
from gputally.kubernetes.objects import GPU, Kind

UNLIMITED: Final = -1.0

Function = Literal["setResourceShare", "divideOverQuotaResource", "hierarchy"]
"""The part of a division that a problem uses: one sibling set in both phases, only the over-quota phase (on top of
`QueueClaim.initial`), or a tree of sibling sets."""


@dataclass(frozen=True, slots=True)
class QueueClaim:
    """One queue's claim in a division, in units of the resource.

    deserved, limit: -1 for unlimited.
    weight: over-quota weight, >= 0.
    usage: history, as a share of the capacity of the same window.
    creation: rank by age; the oldest queue has the lowest.
    parent: None for a root.
    initial: share before the over-quota phase, used only by `divideOverQuotaResource`."""

    name: str
    request: float
    deserved: float = 0.0
    limit: float = UNLIMITED
    weight: float = 1.0
    usage: float = 0.0
    priority: int = 100
    creation: int = 0
    parent: str | None = None
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class DivisionProblem:
    """One division: `total` units among `claims` with history factor `k`."""

    name: str
    total: float
    k: float
    claims: tuple[QueueClaim, ...]
    function: Function = "hierarchy"
    resource: str = "GPU"


@dataclass(frozen=True, slots=True)
class RoundOffer:
    """The figures of one queue in one round of the division.

    n: its normalised weight.
    usage: its usage U.
    p: P = max(0, n + k (n - U)).
    offered: its part of the pool, which is pool * P / S with S the sum of all P.
    given: the part that it took, which is its remaining request, or the offer rounded down.
    fraction: the part of a unit that the rounding down has cost it."""

    queue: str
    n: float
    usage: float
    p: float
    offered: float
    given: float
    fraction: float


@dataclass(frozen=True, slots=True)
class DivisionRound:
    """One round of the over-quota phase among the siblings under `parent` with `priority`.

    pool, remaining: the units to divide before and after the round.
    sum_p: S, the sum of all P."""

    parent: str | None
    priority: int
    number: int
    pool: float
    sum_p: float
    offers: tuple[RoundOffer, ...]
    remaining: float


@dataclass(frozen=True, slots=True)
class Remainder:
    """A unit, or less at the end of the pool, for the queue with the next largest fraction after the rounds."""

    parent: str | None
    priority: int
    queue: str
    fraction: float
    given: float


@dataclass(frozen=True, slots=True)
class Division:
    """The result of a division.

    shares: fair share by queue, sorted by name.
    remaining: the part of the total that no root queue got.
    deserved: the result of the first phase.
    steps: the rounds and remainders, if an explanation was requested."""

    shares: Mapping[str, float]
    remaining: float
    deserved: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[DivisionRound | Remainder, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a queue in its scheduler. All amounts are GPUs and include the queue's children.

    requested: contains `allocated`.
    most: the limit that the scheduler's own quotas set.
    least: the GPUs that the scheduler reserves for the queue, whatever it requests.
    weight: the over-quota weight in force, None if unset.
    direction: whether the controller's last change of the weight was up (1) or down (-1); 0 if it never changed it.
    gang: GPUs of its smallest pending gang, 0 if it has none."""

    requested: float
    allocated: float
    weight: float | None = None
    direction: int = 0
    gang: float = 0.0
    most: float = UNLIMITED
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that requests GPUs, or belongs to a gang that may. Times are UTC milliseconds.

    gang: the pod's gang, as "kind/namespace/name"; "" for a single pod.
    subgroup: the name of its part of the gang.
    rank: its scheduler places the members of a gang by this first, then by age.
    ref: its queue as a policy refers to it, "" if the pod names none.
    scheduler: the name of its scheduler, "" if that scheduler's queues are unknown.
    node: "" until the pod is bound.
    owner: its controller, as "kind/namespace/name"; "" for a bare pod.
    held: true while it is bound and not being deleted.
    ready_ms: the time since which it is ready; None while it is not.
    preempts: whether it may preempt other pods (`preemptionPolicy`).
    gated: whether a scheduling gate holds it.
    disruptable: whether its scheduler may preempt it.
    spot: whether its owner allows interruption at any time.
    keeps: true for a reservation pod, which holds a GPU for the pods that share it.
    shares: true if it has a part of a GPU that a reservation pod holds.
    selector: labels that its node must have (with the value None: must not have).
    memory_mib: requested GPU memory, if it requests memory; `gpus` is then 0, or the part that it requests too, until
        an adapter has computed the part of the memory.
    resources: its GPUs by resource, if MIG instances are among them; `gpus` then depends on the GPUs of its node
        (`fairshare.core.gpu_demand.sized`).
    overcount: by how many GPUs more it counts in its scheduler's own objects, which name no node."""

    uid: str
    namespace: str
    name: str
    gpus: float
    node: str = ""
    ref: str = ""
    gang: str = ""
    owner: str = ""
    priority: int = 0
    preempts: bool = True
    held: bool = False
    ready: bool = False
    ready_ms: int | None = None
    gated: bool = False
    created_ms: int | None = None
    started_ms: int | None = None
    checkpoint_ms: int | None = None
    disruptable: bool = True
    spot: bool = False
    keeps: bool = False
    shares: bool = False
    selector: tuple[tuple[str, str | None], ...] = ()
    memory_mib: float = 0.0
    subgroup: str = ""
    scheduler: str = ""
    rank: tuple[int, ...] = ()
    resources: tuple[tuple[str, float], ...] = ()
    overcount: float = 0.0

    @property
    def requests_gpus(self) -> bool:
        """False for a member of a gang that runs without a GPU (`Gang.companions`)."""
        return self.gpus > 0 or self.memory_mib > 0

    @property
    def leaving(self) -> bool:
        """Whether the pod is being deleted: it still has its node, and its GPUs no longer count as held."""
        return bool(self.node) and not self.held


@dataclass(frozen=True, slots=True)
class ClaimingPod(Pod):
    """A pod with ResourceClaims, whose GPUs are not in `gpus` yet (`fairshare.controller.claimed_pods`)."""

    claims: tuple[PodClaim, ...] = ()

    def with_claimed(self, gpus: float, node: str) -> Pod:
        """Return the pod with `gpus` more GPUs, on this node."""
        values = {each.name: getattr(self, each.name) for each in fields(Pod)}
        held = self.held or (node != self.node)
        resources = dict(self.resources)
        if resources:
            resources[GPU] = resources.get(GPU, 0.0) + gpus
        more = {"gpus": self.gpus + gpus, "node": node, "held": held, "resources": tuple(sorted(resources.items()))}
        return Pod(**{**values, **more})


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A quota by which the scheduler may admit a waiting workload.

    pool: the node of the quota tree (`Quota`).
    selector: the labels of the nodes on which the workload then runs."""

    pool: str
    selector: tuple[tuple[str, str], ...] = ()


ALWAYS_S = 2.0**33
"""Seconds of a protection without end: 272 years. Decisions record numbers, and infinity is none in JSON."""


@dataclass(frozen=True, slots=True)
class Protection:
    """How long the scheduler itself protects a running workload after its start.

    path: the scheduler's queues from the root to the workload's own queue.
    reclaim_s: seconds of protection from a workload of another queue, by the position in `path` of the first queue that
        the other one's path does not share; of the last position if it shares all.
    preempt_s: seconds of protection from a workload of the same queue.
    surplus: whether it also protects what the workload has above its minimum."""

    path: tuple[str, ...]
    reclaim_s: tuple[float, ...]
    preempt_s: float
    surplus: bool = False

    def seconds(self, claimant: tuple[str, ...]) -> float:
        """Return the seconds of protection from a workload whose queues, from the root, are `claimant`."""
        if claimant == self.path:
            return self.preempt_s
        shared = 0
        while shared < len(self.path) - 1 and claimant[shared : shared + 1] == self.path[shared : shared + 1]:
            shared += 1
        return self.reclaim_s[shared]


NO_PLACE = (0.0, 0, 0, "")
"""The place of a workload that waits in no line."""


@dataclass(frozen=True, slots=True)
class Gang:
    """One workload. Its scheduler starts `minimum` GPUs of it or nothing, and more if there is room.

    queue: its queue in the policy.
    kind, namespace, name, uid: the object that stands for it in the cluster.
    requested, allocated, minimum: GPUs; requested contains allocated, and 0 < minimum <= requested. What exceeds the
        minimum is elastic surplus.
    created_ms: the time since which it waits.
    started_ms: the time since which it runs; None while it waits.
    checkpoint_ms: the time of its last checkpoint. Earlier work is saved.
    job: name of the object's owner, "" if it has none.
    pool: the node of the target's quota tree that admits it (`Quota`), "" if its scheduler has no quotas.
    uses: the pools that it uses, each with its GPUs, if it uses several.
    choices: the pools of which one must admit it while it waits, in the scheduler's order; empty for `pool` alone.
    pods: the members that request GPUs.
    companions: the other members. They hold no GPU; who stops the whole gang stops them too.
    core: uids of pods that are never surplus, if it matters which pods run and not only how many GPUs they have.
    topology: the topology level that all its pods must share, "" if none is required.
    protection: how long its scheduler protects it after its start; None if it does not.
    may_claim_ms: the time before which its scheduler evicts nothing for it; None if there is none.
    in_quota: true if its scheduler starts it only within the quotas of its queue and of all queues above it.
    held_back: why its scheduler does not start it now, however much room there is; "" if it does.
    line: the line of its scheduler in which it waits; "" if its scheduler has none.
    place: its place in that line; the smallest is first."""

    queue: str
    kind: Kind
    namespace: str
    name: str
    uid: str
    requested: float
    allocated: float
    minimum: float
    priority: int = 0
    preemptible: bool = True
    created_ms: int | None = None
    started_ms: int | None = None
    checkpoint_ms: int | None = None
    pods: tuple[Pod, ...] = ()
    job: str = ""
    pool: str = ""
    core: tuple[str, ...] = ()
    topology: str = ""
    protection: Protection | None = None
    may_claim_ms: int | None = None
    uses: tuple[tuple[str, float], ...] = ()
    choices: tuple[PoolChoice, ...] = ()
    companions: tuple[Pod, ...] = ()
    in_quota: bool = False
    held_back: str = ""
    line: str = ""
    place: tuple[float, int, int, str] = NO_PLACE

    @property
    def waits(self) -> float:
        """The GPUs that it still needs to start; 0 once it runs."""
        return max(0.0, self.minimum - self.allocated)

    @property
    def key(self) -> str:
        """Its name in decisions: "kind/namespace/name"."""
        return f"{self.kind.kind}/{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every number between a queue's usage and its weight.

    usage, capacity: figures of the window, in its unit. The capacity is the siblings' part of the cluster, or what they
        used if that was more.
    u: usage / capacity.
    competes: whether the queue requests more than its quota.
    n: the configured weight, normalised among the competing queues; for a queue that does not compete, among all.
    p: max(0, n + k (n - u)).
    proportional: p rescaled within bounds so that the competitors' weights add up to their configured total.
    lower, upper: the bounds.
    previous: the weight in force.
    value: the weight to publish: `proportional`, or an earlier one within the interval, or that of a turn.
    trace: the law's own numbers, in the order of computation.
    turn: whether one of the siblings has its turn."""

    usage: int
    capacity: float
    u: float
    n: float
    k: float
    p: float
    competes: bool
    configured: float
    proportional: float
    lower: float
    upper: float
    previous: float | None
    value: float
    notes: tuple[str, ...]
    trace: Mapping[str, float] = field(default_factory=dict)
    turn: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight that one queue is to have now, with a sentence for people and the numbers for a replay."""

    queue: str
    value: float
    previous: float | None
    configured: float
    why: str
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Entitlement:
    """The GPUs that a queue is due now, for its present requests.

    gpus: its share with its history.
    without_history: its share with k = 0.
    guaranteed: its deserved quota, -1 for unlimited.
    limit: the most that it may hold, by the policy and by its scheduler's own quotas; -1 for unlimited."""

    queue: str
    parent: str | None
    gpus: float
    without_history: float
    usage_ratio: float
    requested: float
    allocated: float
    guaranteed: float = 0.0
    limit: float = UNLIMITED


@dataclass(frozen=True, slots=True)
class Issue:
    """An object in the cluster that cannot be used in its present state, and why."""

    subject: str
    reason: str


Value = float | str
"""The value of a target's field: a number, or a text such as `1/2/8`."""


@dataclass(frozen=True, slots=True)
class TargetQueue:
    """One queue object of a target, with its field's value and the controller's annotations
    (`fairshare.core.scheduler_queue_objects`).

    weight: None if the field is unset.
    published: the value that the controller wrote last; None if it never wrote one.
    base: the operator's value before the first write; None if the operator had left the field unset.
    static: true if the scheduler keeps history for this object itself, so that it gets the configured weight.
    field: which of the object's fields this is, if there are several.
    path: the object's place in the target's tree.
    default: the schema's default for the value.
    unset: the value that the scheduler uses for an unset field.
    controller: the controller that wrote the value, as NAMESPACE/LEASE; "" if unknown."""

    name: str
    uid: str
    version: str
    weight: Value | None
    kind: Kind
    published: Value | None = None
    base: Value | None = None
    changed_ms: int | None = None
    direction: int = 0
    namespace: str = ""
    static: bool = False
    field: str = ""
    path: str = ""
    default: Value | None = None
    unset: float = 0.0
    controller: str = ""


@dataclass(frozen=True, slots=True)
class Quota:
    """The GPUs to which a target limits admission at one node of its quota tree (a ClusterQueue, a Cohort).

    parent: the node from which it borrows, "" for a root.
    nominal: its own quota.
    used: GPUs of its own work, without its children's.
    borrows, lends: the most that it may borrow and lend, -1 for unlimited."""

    parent: str
    nominal: float
    used: float = 0.0
    borrows: float = UNLIMITED
    lends: float = UNLIMITED


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the controller or a target, in the form of Kubernetes.

    remedy: what to change, with the lines to write; "" if the message says it, or nothing needs to change."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ConditionReason:
    """What a reason of a condition means, in the words of docs/conditions.md.

    type, status, reason: as in the Condition.
    cause: why the condition has this reason.
    cure: what to do; `nothing` if nothing needs to change."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a cluster that its scheduler divides separately.

    queues: the policy's queues of this part.
    nodes: names of its nodes; None for all nodes of the cluster.
    taken: GPUs on its nodes that pods of other schedulers hold, together and by node."""

    queues: tuple[str, ...]
    nodes: frozenset[str] | None = None
    taken: float = 0.0
    taken_by_node: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerHistory:
    """How a scheduler counts past use by itself: the k of its division, and the window of the usage that it reads."""

    k: float
    window: WindowSpec

    def applied_to(self, policy: Policy) -> Policy:
        """Return the policy by which this scheduler divides."""
        return policy.model_copy(update={"k": self.k, "window": self.window})


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a target as its adapter reads it from the cluster.

    queues, standings: by policy queue, for queues with exactly one object.
    issues: objects that cannot be used.
    conditions: conditions about the target's own settings.
    gangs: every unfinished workload of those queues, in the order of (queue, namespace, name).
    left_behind: objects with a published weight to which no queue of the policy refers any more, by name.
    quotas: the target's own quotas by name, if it admits work by quota; empty if it counts only nodes.
    capacity: GPUs that the target can give to these queues by its quotas; None for no limit.
    shards: parts that are divided separately; empty if the cluster is one.
    history: how the scheduler itself counts past use; None if it does not, or if its parts differ.
    unreadable: objects that were left out because they cannot be read, each as "kind namespace/name: reason".
    pools: by queue, the target's quotas (`quotas`) for its own work.
    pool_models: by quota, the GPU model that it is for (`fairshare.core.gpu_models`)."""

    queues: Mapping[str, TargetQueue]
    standings: Mapping[str, Standing]
    issues: tuple[Issue, ...] = ()
    conditions: tuple[Condition, ...] = ()
    gangs: tuple[Gang, ...] = ()
    left_behind: Mapping[str, TargetQueue] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    capacity: float | None = None
    shards: tuple[Shard, ...] = ()
    history: SchedulerHistory | None = None
    unreadable: tuple[str, ...] = ()
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pool_models: Mapping[str, str] = field(default_factory=dict)


class FleetWindow(UsageWindow):
    """The sum of the windows of several clusters.

    Usage, unassigned and capacity are exact sums. Coverage and watermark_ms are the lowest of all clusters. lost_ms is
    the newest and since_ms the earliest.

    clusters: their names, the controller's own first.
    own: the window of the controller's own cluster."""

    clusters: tuple[str, ...]
    own: UsageWindow


def scale_capacity(window: UsageWindow, part: float) -> UsageWindow:
    """Return the window with this part of its capacity, for queues that divide only this part of the GPUs."""
    update: dict[str, object] = {"capacity": round(window.capacity * part)}
    if isinstance(window, FleetWindow):
        update["own"] = scale_capacity(window.own, part)
    return window.model_copy(update=update)


def with_unit(window: UsageWindow, unit: str) -> UsageWindow:
    """Return the window with its figures in this unit, which the caller knows to be the same."""
    update: dict[str, object] = {"unit": unit}
    if isinstance(window, FleetWindow):
        update["own"] = with_unit(window.own, unit)
    return window.model_copy(update=update)


def own_window(window: UsageWindow) -> UsageWindow:
    """Return the window of the controller's own cluster, which alone describes its nodes and GPUs."""
    return window.own if isinstance(window, FleetWindow) else window


class PolicyTree:
    """The policy's queues as a tree.

    queues: by name.
    children: by parent, None for the roots, siblings in the order of the policy."""

    def __init__(self, policy: Policy) -> None:
        self.queues: Mapping[str, QueuePolicy] = {queue.name: queue for queue in policy.queues}
        self.children: dict[str | None, list[QueuePolicy]] = {}
        for queue in policy.queues:
            self.children.setdefault(queue.parent, []).append(queue)

    def upwards(self, name: str) -> Iterator[QueuePolicy]:
        """Yield the queue, its parent and so on to the root."""
        at: str | None = name
        while at is not None and at in self.queues:
            yield self.queues[at]
            at = self.queues[at].parent

    def path(self, name: str) -> tuple[QueuePolicy, ...]:
        """Return the queues from the root to the queue. Raises KeyError for a queue that the policy does not have."""
        return tuple(reversed(list(self.upwards(self.queues[name].name))))

    def downwards(self, name: str | None = None) -> Iterator[tuple[int, QueuePolicy]]:
        """Yield (depth, queue) for each queue below `name` (None: for all queues), every queue after its parent."""
        pending = [(0, queue) for queue in reversed(self.children.get(name, ()))]
        while pending:
            depth, queue = pending.pop()
            yield depth, queue
            pending += [(depth + 1, child) for child in reversed(self.children.get(queue.name, ()))]

    def family(self, name: str) -> frozenset[str]:
        """Return the names of the queue and of all queues below it."""
        return frozenset((name, *(queue.name for _, queue in self.downwards(name))))

    def leaves(self, name: str | None = None) -> list[QueuePolicy]:
        """Return the queues without children below `name` (None: all of them), in the order of the tree."""
        return [queue for _, queue in self.downwards(name) if queue.name not in self.children]

    def team(self, name: str) -> str | None:
        """Return the team of the queue, or of the nearest queue above it with a team."""
        return next((queue.team for queue in self.upwards(name) if queue.team), None)

    def sum_up(self, own: Mapping[str, float]) -> dict[str, float]:
        """Add the descendants' amounts to each queue's own, for every queue of the policy that has any."""
        total: dict[str, float] = {}
        for name in sorted(own):
            for queue in self.upwards(name):
                total[queue.name] = total.get(queue.name, 0.0) + own[name]
        return total
