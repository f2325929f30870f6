"""Defines queues, demand, entitlements and weights.

Frozen values without behaviour beyond small derived properties. GPUs are floats in units of one
physical GPU, as the schedulers write them; -1 means unlimited. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from accountant.wire.policy_models import UsageWindow
from gputally.kubernetes.objects import Kind

UNLIMITED: Final = -1.0

Function = Literal["setResourceShare", "divideOverQuotaResource", "hierarchy"]
"""Which part of KAI's division a case asks for: one sibling set in both phases, the over-quota phase
alone (on top of `Claim.initial`), or a tree of sibling sets."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One queue's part in a division, in units of the resource.

    deserved, limit: -1 unlimited. weight: over-quota weight, >= 0. usage: history, normalised by the
    capacity of the same window. creation: rank, lower = older. parent None: a root. initial: share held
    before the over-quota phase, read by `divideOverQuotaResource` alone."""

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
    """One division to be made: `total` units among `claims` with history factor `k`."""

    name: str
    total: float
    k: float
    claims: tuple[Claim, ...]
    function: Function = "hierarchy"
    resource: str = "GPU"


@dataclass(frozen=True, slots=True)
class RoundOffer:
    """One queue in one round: n its normalised weight, U its usage, P what both make of it, `offered` its
    part of the pool (pool * P / S), `given` what it took: its want, or the offer rounded down."""

    queue: str
    n: float
    usage: float
    p: float
    offered: float
    given: float
    fraction: float


@dataclass(frozen=True, slots=True)
class DivisionRound:
    """One round of the over-quota phase among the siblings under `parent` that have `priority`."""

    parent: str | None
    priority: int
    number: int
    pool: float
    sum_p: float
    offers: tuple[RoundOffer, ...]
    remaining: float


@dataclass(frozen=True, slots=True)
class Remainder:
    """A unit, or what was left of one, given to the queue with the next largest fraction."""

    parent: str | None
    priority: int
    queue: str
    fraction: float
    given: float


@dataclass(frozen=True, slots=True)
class Division:
    """The outcome: fair share per queue, sorted by name; `remaining` of the total is left over (at the roots).
    deserved: what the first phase gave. steps: filled only when an explanation was asked for."""

    shares: Mapping[str, float]
    remaining: float
    deserved: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[DivisionRound | Remainder, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """A queue as its scheduler shows it. GPUs: requested (contains allocated) and allocated, children included.

    most: what its scheduler lets it hold at most, by quotas of its own. weight: the over-quota weight in force, None
    where unset. changed_ms, direction: when we last changed
    it, and whether up (1) or down (-1); None and 0 if we never did. gang: GPUs of its smallest pending
    gang, 0 where it has none. reclaims: workloads of other queues that were stopped for its sake since the last
    cycle, by its scheduler or by us (`fairshare.preemption.preemption_cycle`)."""

    requested: float
    allocated: float
    weight: float | None = None
    changed_ms: int | None = None
    direction: int = 0
    gang: float = 0.0
    reclaims: float = 0.0
    most: float = UNLIMITED


@dataclass(frozen=True, slots=True)
class Pod:
    """What matters of a pod that asks for GPUs.

    gang: what groups it with others, as "kind/namespace/name"; "" for one alone. ref: the queue by which a
    policy may refer to it (`kai:vision`), "" where it says none. bound: a node has it. held: it is bound and
    not on its way out. ready_ms: ready since; None while it is not. preempts: it may push others out
    (`preemptionPolicy`). keeps: it holds its GPUs for others, who share them. shares: it has a part of such a GPU,
    beside the one that keeps it. selector: labels that its node must have
    (None: must not have). memory_mib: GPU memory it asks for instead
    of a part; what part that is depends on the GPU, and `gpus` is 0 until an adapter has found out. subgroup: of its
    gang. scheduler: of those whose queues we know, "" for all others. Milliseconds are UTC."""

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

    @property
    def leaving(self) -> bool:
        """On its way out: it still has its node and holds nothing any more."""
        return bool(self.node) and not self.held


@dataclass(frozen=True, slots=True)
class Gang:
    """One workload as its scheduler takes it: all of `minimum` or nothing, more where there is room.

    GPUs: requested (contains allocated), allocated, minimum (0 < minimum <= requested; the rest is elastic
    surplus). queue: of the policy. kind, namespace, name, uid: the object to act on. created_ms: waiting
    since. started_ms: running since; None while it waits. checkpoint_ms: work before it is safe. job: name of what
    the object was made for, "" where it stands for itself. pool: whose quota it is admitted to (`Quota`), "" where
    its scheduler counts in nodes alone. core: pods, by uid, that are never surplus, where it matters which pods run
    and not only how many GPUs they have. topology: the level of a topology that all its pods have to share, "" where
    none is required."""

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

    @property
    def waits(self) -> float:
        """GPUs it still needs to start; 0 once it runs."""
        return max(0.0, self.minimum - self.allocated)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every number on the way from a queue's usage to its weight.

    usage, capacity: of the window, in its unit; capacity is the part that is the siblings' own, or what
    they used if that was more. u = usage / capacity. n: configured weight normalised among those who
    compete (`competes`: it asks for more than its quota; else n is as if every sibling asked).
    p = max(0, n + k (n - u)). proportional: p rescaled within bounds so that the competitors' weights
    add up to their configured total. lower, upper: those bounds. previous: the weight in force.
    stepped: after the step bound. value: published, after hold-down and deadband. law: whose p it is;
    trace: the law's own numbers, in the order in which they arose."""

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
    stepped: float
    value: float
    notes: tuple[str, ...]
    law: str = "kai"
    trace: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight one queue should have now. `why` is for people; `explanation` for replay."""

    queue: str
    value: float
    previous: float | None
    configured: float
    why: str
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Entitlement:
    """What a queue is due now, in GPUs: `gpus` with its history, `without_history` with k = 0, both for
    what it asks at the moment. guaranteed: its deserved quota, -1 unlimited."""

    queue: str
    parent: str | None
    gpus: float
    without_history: float
    usage_ratio: float
    requested: float
    allocated: float
    guaranteed: float = 0.0


@dataclass(frozen=True, slots=True)
class Issue:
    """Something in the cluster that cannot be used as it stands, and why."""

    subject: str
    reason: str


Value = float | str
"""What a target's field takes, as we compare it: a number, or a text such as `1/2/8`."""


@dataclass(frozen=True, slots=True)
class TargetQueue:
    """One queue object of a target, with what its field shows and what we noted on it (`fairshare.core.queue_objects`).

    weight None: unset. published None: never touched by us; base is then meaningless. base None: the
    operator had left the field unset. static: the scheduler keeps
    history for this object itself, so that it gets the configured weight. field: which of the
    object's fields this is, where there are several. path: the object's place in the target's tree. default: the value
    that the target's schema fills in where none is given. unset: what the scheduler takes where the field is
    unset."""

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


@dataclass(frozen=True, slots=True)
class Quota:
    """GPUs that a target admits work to: one node of its tree of quotas (a ClusterQueue, a Cohort).

    parent: the node it borrows from, "" for a root. nominal: its own quota. used: by its own work, children excluded.
    borrows, lends: at most, -1 unlimited."""

    parent: str
    nominal: float
    used: float = 0.0
    borrows: float = UNLIMITED
    lends: float = UNLIMITED


@dataclass(frozen=True, slots=True)
class Condition:
    """One standing statement about the controller or a target, as Kubernetes words them.

    remedy: what to change, with the lines to write; "" where the message says it, or nothing has to."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Work that a target's own scheduler stopped for a queue of the policy, as far as it is still to be seen.

    id: of this one act. queue: for whose sake. victim: the workload, where several of its pods go."""

    id: str
    queue: str
    victim: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a cluster that its scheduler divides by itself: its queues (of the policy) and its nodes.

    nodes: by name; None: all of the cluster. taken: GPUs on them that pods of other schedulers hold."""

    queues: tuple[str, ...]
    nodes: frozenset[str] | None = None
    taken: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What an adapter makes of a target's objects.

    held, standings: by policy queue, of those that exactly one object belongs to. issues: objects that
    cannot be used. conditions: advice on the target's own settings. gangs: every unfinished workload of
    those queues, in the order of (queue, namespace, name). evictions: those that took from another queue, however
    old they are. left: objects that carry a weight of ours and that no queue of the policy is tied to any more, by
    name. quotas: those by which the target admits work, by name; empty where it counts in nodes alone. capacity: GPUs
    that the target can give to these queues, by its quotas; None: as many as there are. shards: parts that are divided
    each by itself; empty: the cluster is one."""

    held: Mapping[str, TargetQueue]
    standings: Mapping[str, Standing]
    issues: tuple[Issue, ...] = ()
    conditions: tuple[Condition, ...] = ()
    gangs: tuple[Gang, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    left: Mapping[str, TargetQueue] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    capacity: float | None = None
    shards: tuple[Shard, ...] = ()


class FleetWindow(UsageWindow):
    """The windows of several clusters, added up. usage, unassigned and capacity are sums of whole numbers; coverage and
    watermark_ms are the lowest of any cluster; lost_ms is the newest and since_ms the earliest.

    clusters: by name, the controller's own first. own: the window of the controller's own cluster."""

    clusters: tuple[str, ...]
    own: UsageWindow


def scaled(window: UsageWindow, part: float) -> UsageWindow:
    """The same usage of a part of the GPUs."""
    changed: dict[str, object] = {"capacity": round(window.capacity * part)}
    if isinstance(window, FleetWindow):
        changed["own"] = scaled(window.own, part)
    return window.model_copy(update=changed)


def own_window(window: UsageWindow) -> UsageWindow:
    """The window of the controller's own cluster, which alone speaks for its nodes and GPUs."""
    return window.own if isinstance(window, FleetWindow) else window
