"""Defines queues, demand, entitlements and weights.

Frozen values with small derived properties. GPUs are floats in units of one physical GPU, as in the schedulers; -1
means unlimited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from accountant.wire.policy_models import UsageWindow
from gputally.kubernetes.objects import Kind

UNLIMITED: Final = -1.0

Function = Literal["setResourceShare", "divideOverQuotaResource", "hierarchy"]
"""The part of KAI's division that a case uses: one sibling set in both phases, only the over-quota phase (on top of
`Claim.initial`), or a tree of sibling sets."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One queue's claim in a division, in units of the resource.

    deserved, limit: -1 unlimited.
    weight: over-quota weight, >= 0.
    usage: history, as a share of the capacity of the same window.
    creation: rank, lower is older.
    parent: None for a root.
    initial: share held before the over-quota phase, used only by `divideOverQuotaResource`."""

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
    claims: tuple[Claim, ...]
    function: Function = "hierarchy"
    resource: str = "GPU"


@dataclass(frozen=True, slots=True)
class RoundOffer:
    """One queue in one round.

    n: its normalised weight.
    usage: its usage U.
    p: the result P of both.
    offered: its part of the pool (pool * P / S).
    given: the part that it took, which is its remaining request, or the offer rounded down."""

    queue: str
    n: float
    usage: float
    p: float
    offered: float
    given: float
    fraction: float


@dataclass(frozen=True, slots=True)
class DivisionRound:
    """One round of the over-quota phase among the siblings under `parent` with `priority`."""

    parent: str | None
    priority: int
    number: int
    pool: float
    sum_p: float
    offers: tuple[RoundOffer, ...]
    remaining: float


@dataclass(frozen=True, slots=True)
class Remainder:
    """A unit, or the rest of one, given to the queue with the next largest fraction."""

    parent: str | None
    priority: int
    queue: str
    fraction: float
    given: float


@dataclass(frozen=True, slots=True)
class Division:
    """The result: fair share per queue, sorted by name; `remaining` of the total is left over (at the roots).

    deserved: the result of the first phase.
    steps: filled only if an explanation was requested."""

    shares: Mapping[str, float]
    remaining: float
    deserved: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[DivisionRound | Remainder, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """A queue as its scheduler shows it. GPUs: requested (contains allocated) and allocated, children included.

    most: the most that its scheduler lets it hold, by quotas of its own.
    weight: the over-quota weight in force, None if unset.
    changed_ms, direction: when the controller last changed it, and whether up (1) or down (-1); None and 0 if never.
    gang: GPUs of its smallest pending gang, 0 if it has none.
    reclaims: workloads of other queues that were stopped for it since the last cycle, by its scheduler or by the
        controller (`fairshare.preemption.preemption_cycle`)."""

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
    """A pod that requests GPUs. Times are UTC milliseconds.

    gang: its group, as "kind/namespace/name"; "" for a single pod.
    subgroup: the name of its part of the gang.
    ref: its queue as a policy refers to it (`kai:vision`), "" if it names none.
    scheduler: the name of its scheduler, "" if that scheduler's queues are unknown.
    node: "" until it is bound.
    held: it is bound and not being deleted.
    ready_ms: ready since; None while it is not.
    preempts: it may preempt others (`preemptionPolicy`).
    keeps: it is a reservation pod, which holds a GPU for the pods that share it.
    shares: it has a part of a GPU that a reservation pod holds.
    selector: labels that its node must have (None: must not have).
    memory_mib: requested GPU memory, if it requests memory instead of a part of a GPU; `gpus` is then 0 until an
        adapter has computed the part."""

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
        """Return whether it is being deleted: it still has its node and no longer holds anything."""
        return bool(self.node) and not self.held


@dataclass(frozen=True, slots=True)
class Gang:
    """One workload as its scheduler treats it: all of `minimum` or nothing, more if there is room.

    GPUs: requested (contains allocated), allocated, minimum (0 < minimum <= requested; the rest is elastic surplus).

    queue: name of the queue in the policy.
    kind, namespace, name, uid: the object to act on.
    created_ms: waiting since.
    started_ms: running since; None while it waits.
    checkpoint_ms: work before it is safe.
    job: name of the object's owner, "" if it has none.
    pool: whose quota it is admitted to (`Quota`), "" if its scheduler counts only nodes.
    core: pods, by uid, that are never surplus, if it matters which pods run and not only how many GPUs they have.
    topology: the topology level that all its pods must share, "" if none is required."""

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
        """Return the GPUs it still needs to start; 0 once it runs."""
        return max(0.0, self.minimum - self.allocated)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every number between a queue's usage and its weight.

    usage, capacity: the queue's usage and the capacity in the window, in its unit; capacity is the siblings' part of
        the cluster, or what they used if that was more. u = usage / capacity.
    n: configured weight normalised among the competing queues (`competes`: it requests more than its quota; otherwise n
        is as if every sibling did). p = max(0, n + k (n - u)).
    proportional: p rescaled within bounds so that the competitors' weights add up to their configured total.
    lower, upper: those bounds.
    previous: the weight in force.
    stepped: the weight after the step bound.
    value: published, after hold-down and deadband.
    law: whose p it is.
    trace: the law's own numbers, in the order of computation."""

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
    """The GPUs that a queue is due now, for its present requests.

    gpus: the number with the queue's history.
    without_history: the number with k = 0.
    guaranteed: its deserved quota, -1 unlimited."""

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
    """An object in the cluster that cannot be used in its present state, and why."""

    subject: str
    reason: str


Value = float | str
"""The value of a target's field: a number, or a text such as `1/2/8`."""


@dataclass(frozen=True, slots=True)
class TargetQueue:
    """One queue object of a target, with its field's value and the controller's annotations
    (`fairshare.core.queue_annotations`).

    weight None: unset.
    published None: never written by the controller; base is then meaningless.
    base None: the operator had left the field unset.
    static: the scheduler keeps history for this object itself, so it gets the configured weight.
    field: which of the object's fields this is, if there are several.
    path: the object's place in the target's tree.
    default: the schema's default for the value.
    unset: the scheduler's value for an unset field."""

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
    """GPUs to which a target limits admission: one node of its tree of quotas (a ClusterQueue, a Cohort).

    parent: the node it borrows from, "" for a root.
    nominal: its own quota.
    used: by its own work, without children.
    borrows, lends: maximum, -1 unlimited."""

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
class Eviction:
    """Work that a target's own scheduler stopped for a queue of the policy, as far as it can still be seen.

    id: the id of this eviction.
    queue: the beneficiary.
    victim: the workload, if several of its pods were evicted."""

    id: str
    queue: str
    victim: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a cluster that its scheduler divides separately: its queues (of the policy) and its nodes.

    nodes: by name; None: all of the cluster.
    taken: GPUs on them that pods of other schedulers hold."""

    queues: tuple[str, ...]
    nodes: frozenset[str] | None = None
    taken: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """An adapter's view of a target's objects.

    held, standings: by policy queue, for queues with exactly one object.
    issues: objects that cannot be used.
    conditions: about the target's own settings.
    gangs: every unfinished workload of those queues, in the order of (queue, namespace, name).
    evictions: those that took from another queue, of any age.
    left: objects with a published weight that no queue of the policy refers to any more, by name.
    quotas: the target's own quotas by name, if it admits work by quota; empty if it counts only nodes.
    capacity: GPUs that the target can give to these queues by its quotas; None: no limit.
    shards: parts that are divided separately; empty: the cluster is one."""

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
    """The sum of the windows of several clusters.

    Usage, unassigned and capacity are exact sums. Coverage and watermark_ms are the lowest of all clusters. lost_ms is
    the newest and since_ms the earliest.

    clusters: by name, the controller's own first.
    own: the window of the controller's own cluster."""

    clusters: tuple[str, ...]
    own: UsageWindow


def scaled(window: UsageWindow, part: float) -> UsageWindow:
    """Return the usage of a part of the GPUs."""
    changed: dict[str, object] = {"capacity": round(window.capacity * part)}
    if isinstance(window, FleetWindow):
        changed["own"] = scaled(window.own, part)
    return window.model_copy(update=changed)


def own_window(window: UsageWindow) -> UsageWindow:
    """Return the window of the controller's own cluster, which alone describes its nodes and GPUs."""
    return window.own if isinstance(window, FleetWindow) else window
