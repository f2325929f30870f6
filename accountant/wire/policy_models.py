"""Defines the policy file: queues, targets, laws, budgets and preemption rules.

Frozen pydantic models, FastAPI's own tongue. Integers carry their unit in the name; money is a
decimal string with a currency. Unknown keys are refused.

Frozen pydantic models, part of `accountant.wire.policy_models.Policy`. How a weight becomes a field of a scheduler's
objects is `fairshare.targets`'; here is only what can be written down.

Frozen pydantic models, part of `accountant.wire.policy_models.Policy`. What they mean for one workload decides
`fairshare.preemption.victim_selection`; here is only what can be written down.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from operator import itemgetter
from typing import Annotated, Literal

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from accountant.wire.usage_models import Accounts as Accounts
from accountant.wire.usage_models import BudgetState as BudgetState
from accountant.wire.usage_models import CostAnswer as CostAnswer
from accountant.wire.usage_models import CostLine as CostLine
from accountant.wire.usage_models import Dimension as Dimension
from accountant.wire.usage_models import UsageAnswer as UsageAnswer
from accountant.wire.usage_models import UsageLine as UsageLine
from gputally.server.config_models import Duration, Model, bare_off
from gputally.server.config_models import parse_duration as parse_duration
from gputally.server.config_models import parse_seconds as parse_seconds

Apply = Literal["dry-run", "enforce"]
"""dry-run: ask the API server what it would say, and write nothing."""


class KaiTarget(Model):
    """mode weight: publish `overQuotaWeight`; the shard's kValue has to be 0. usage: KAI reads its history from
    the accountant, weights are left alone. off: leave KAI alone. Never both: history counts once.
    endpoint: where KAI should ask for usage, held against its shards' `connectionString` in mode usage."""

    mode: Annotated[Literal["weight", "usage", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    endpoint: str | None = Field(default=None, pattern="^https?://[^/]+", max_length=500)


class KueueTarget(Model):
    """mode weight: publish `fairSharing.weight`. config: namespace/name of the ConfigMap with Kueue's own
    configuration, read to know whether it listens to weights."""

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(default="kueue-system/kueue-manager-config", pattern="^[^/]+/[^/]+$")


class VolcanoTarget(Model):
    """mode: what Volcano's active plugin reads. weight: proportion. deserved: capacity. hierarchy: drf with
    hierarchy. config: namespace/name of the scheduler's ConfigMap, read to know which plugin is active."""

    mode: Annotated[Literal["weight", "deserved", "hierarchy", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(default="volcano-system/volcano-scheduler-configmap", pattern="^[^/]+/[^/]+$")


class KubeSchedulerTarget(Model):
    """mode extender: shares of queues with `policy:` refs act through the extender. off: leave those out."""

    mode: Annotated[Literal["extender", "off"], BeforeValidator(bare_off)] = "extender"


class RunaiTarget(Model):
    """mode weight: publish `overQuotaWeight` of projects and departments through Run:ai's API. url: its control
    plane. node_pool: of refs that name none. cluster: Run:ai's id of the cluster; None: it has but one."""

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    url: str | None = Field(default=None, pattern="^https?://[^/]+", max_length=500)
    node_pool: str = Field(default="default", min_length=1, max_length=253)
    cluster: str | None = Field(default=None, max_length=100)


class Targets(Model):
    """Where weights go. A target that no queue's refs name is left alone, whatever its mode."""

    kai: KaiTarget = KaiTarget()
    kueue: KueueTarget = KueueTarget()
    volcano: VolcanoTarget = VolcanoTarget()
    kube_scheduler: KubeSchedulerTarget = KubeSchedulerTarget()
    runai: RunaiTarget = RunaiTarget()


class PriorityClassPolicy(Model):
    """A priority class by its value. preempts: False is `preemptionPolicy: Never`, it only waits."""

    name: str = Field(min_length=1, max_length=253)
    value: int = Field(ge=-2_147_483_648, le=1_000_000_000)
    preempts: bool = True


Mode = Annotated[Literal["off", "dry-run", "enforce"], BeforeValidator(bare_off)]


class PreemptionModes(Model):
    """Per target; None: as the whole."""

    kai: Mode | None = None
    kueue: Mode | None = None
    volcano: Mode | None = None
    kube_scheduler: Mode | None = None


class SloPolicy(Model):
    """A latency that must not stay above `above` (seconds) for longer than `sustained`; what then waits of the
    queue, or of the one workload (namespace/name), may take what others borrow.

    query: PromQL; the largest of its values, in seconds, counts. gpus: freed where nothing of it waits."""

    name: str = Field(min_length=1, max_length=253)
    queue: str | None = None
    workload: str | None = Field(default=None, pattern="^[^/]+/[^/]+$")
    query: str = Field(min_length=1, max_length=2000)
    above: Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
    sustained: Duration = 300
    gpus: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _of_one(self) -> SloPolicy:
        if (self.queue is None) == (self.workload is None):
            raise ValueError(f"SLO {self.name!r} is of a queue or of a workload: name one of them")
        return self


class IdleExemptions(Model):
    """Which workloads the idle rule exempts. namespaces: shell patterns. labels, annotations: of the pod, by name and
    value (`*`: any). priority: of this and above."""

    namespaces: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    priority: int | None = None


class IdleReclaimPolicy(Model):
    """GPUs that are held and not used: the owner is warned, and after `grace` they are reclaimed.

    mode: at most what the target's own mode allows. below: part of the time that a pod's GPUs were busy, over
    `sustained` and again over `grace`; time of which nothing is known counts as busy."""

    mode: Mode = "dry-run"
    below: float = Field(default=0.05, gt=0, le=1)
    sustained: Duration = Field(default=7200, ge=300)
    grace: Duration = Field(default=1800, ge=60)
    exempt: IdleExemptions = IdleExemptions()


class PreemptionPolicy(Model):
    """When running work gives way, and how much of it at most.

    mode: dry-run decides and records, and stops no workload. quota: for queues within their deserved quota.
    over_share: for queues below their fair share, from those above theirs; never for a lower priority.
    saturation: KAI's multiplier, how much more saturated the others must stay. wait: how long a workload
    waits before it may take. min_runtime: left alone after a start. cool_down: left alone after having been
    preempted. per_team, per_cluster: workloads stopped in an hour. lost_gpu_hours: work lost in a day.
    idle: None: idle reclaim is disabled."""

    mode: Mode = "dry-run"
    targets: PreemptionModes = PreemptionModes()
    quota: bool = True
    over_share: bool = True
    saturation: float = Field(default=1.0, ge=1)
    wait: Duration = 60
    min_runtime: Duration = 600
    cool_down: Duration = 3600
    per_team: int = Field(default=10, ge=0)
    per_cluster: int = Field(default=50, ge=0)
    lost_gpu_hours: float = Field(default=500.0, ge=0)
    classes: tuple[PriorityClassPolicy, ...] = ()
    slos: tuple[SloPolicy, ...] = ()
    idle: IdleReclaimPolicy | None = None


WindowKind = Literal["sliding", "tumbling", "cron", "calendar"]
Measure = Literal["allocated", "busy", "cost", "energy"]

UNASSIGNED = "__unassigned__"
"""Team or queue of held time that no policy, namespace or label assigns."""
IDLE = "__idle__"
"""Team or queue of time without a holder: unallocated, unmetered or down."""

_CRON = re.compile(r"[0-9A-Za-z*/,#-]+( [0-9A-Za-z*/,#-]+){4}")
_RANDOM = re.compile(r"\b[RrHh]\b")
"""croniter's own letters for an instant drawn by chance or by a hash: not the same at every look."""


GpuName = Annotated[str, Field(min_length=1, max_length=200)]
GpuWeight = Annotated[Decimal, Field(ge=0, le=1_000_000, max_digits=13, decimal_places=6)]

# --- policy ---------------------------------------------------------------------------------


class WindowSpec(Model):
    """Over which past the usage of a queue is measured. half_life None: every second weighs the same.

    sliding: the last `size` seconds. tumbling: since the last boundary, a multiple of `size` after (or before)
    `start`, 1970 UTC without one. cron: since the last firing of the expression `cron`. calendar: since the
    beginning of the month. cron and calendar go by the accountant's time zone and have no size.

    decay: exact is the integral; slurm is what Slurm makes of the same half-life, period by period of `calc_period`
    (PriorityCalcPeriod), for comparing with its figures. gpu_weights: by the name of a GPU model, how much a
    GPU-second of it counts (as TRESBillingWeights do); models that are not named count 1."""

    kind: WindowKind = "sliding"
    size: Duration = Field(default=604_800, gt=0)
    half_life: Duration | None = Field(default=None, gt=0)
    start: AwareDatetime | None = None
    cron: str | None = Field(default=None, max_length=100)
    decay: Literal["exact", "slurm"] = "exact"
    calc_period: Duration = Field(default=300, gt=0, le=900)
    gpu_weights: dict[GpuName, GpuWeight] = Field(default={}, max_length=100)

    @model_validator(mode="after")
    def _belongs(self) -> WindowSpec:
        if self.decay == "slurm" and self.half_life is None:
            raise ValueError("decay: slurm needs a half_life (PriorityDecayHalfLife)")
        if 900 % self.calc_period:
            raise ValueError(f"a calc_period divides a quarter of an hour, and {self.calc_period} s does not")
        if self.start is not None and self.kind != "tumbling":
            raise ValueError(f"only tumbling windows have a start, and this one is {self.kind}")
        if (self.cron is not None) != (self.kind == "cron"):
            raise ValueError(f"a cron expression and kind: cron belong together, and this window is {self.kind}")
        if self.cron is not None:
            known_cron(self.cron)
        return self


def known_cron(expression: str) -> str:
    """The expression itself where it has five fields and fires at all. Raises ValueError."""
    from croniter import croniter  # read with a policy that has one, not with every policy

    reason = "write minute hour day month weekday, for example 0 0 * * 1"
    if not _CRON.fullmatch(expression) or _RANDOM.search(expression):
        raise ValueError(f"not a cron expression: {expression!r} ({reason})")
    try:
        croniter(expression, datetime(2000, 1, 1, tzinfo=UTC)).get_next(datetime)
    except (ValueError, KeyError) as error:
        raise ValueError(f"not a cron expression: {expression!r}: {error} ({reason})") from error
    return expression


ClusterName = Annotated[str, Field(min_length=1, max_length=253)]


class UsagePolicy(Model):
    """Whose usage counts. clusters: by the names their agents report, those whose usage counts together; the
    controller's own counts whether it is listed or not. Empty: usage of the controller's own cluster alone."""

    clusters: tuple[ClusterName, ...] = Field(default=(), max_length=1_000)

    @model_validator(mode="after")
    def _once(self) -> UsagePolicy:
        for i, name in enumerate(self.clusters):
            if name in self.clusters[:i]:
                raise ValueError(f"cluster {name!r} is listed twice in usage.clusters")
        return self


def _counts_one_cluster(usage: object) -> bool:
    """A policy without other clusters keeps the version that it had before there was `usage`."""
    return usage == UsagePolicy()


class Bounds(Model):
    """How far and how fast published weights may move away from the configured ones.

    min_multiplier/max_multiplier: of the configured weight. max_step: largest relative change per
    cycle. deadband: relative change below which nothing is published. hold_down: seconds a
    published weight stays before it may reverse direction."""

    min_multiplier: float = Field(default=0.1, gt=0, le=1)
    max_multiplier: float = Field(default=4.0, ge=1)
    max_step: float = Field(default=0.5, gt=0)
    deadband: float = Field(default=0.02, ge=0, lt=1)
    hold_down: Duration = 0


class DeficitPolicy(Model):
    """How the `deficit` law repays what queues are owed.

    repay: time in which a debt would be repaid at once. rate: most GPUs, as a part of the pool times the
    root of the target share, by which a queue of average size is moved off its fair share for it. horizon: how far
    ahead pending work counts as demand. gain, smoothing: how strongly, and averaged over which time, a
    queue off its due moves its weight. reclaim_price: largest log-weight taken from who has others
    preempted; price_knee: evictions per GPU-hour at which half of it is taken. quiet: absolute share below
    which the weight of a queue of average size does not move."""

    repay: Duration = Field(default=72_000, gt=0)
    rate: float = Field(default=0.1, ge=0, le=1)
    horizon: Duration = Field(default=129_600, ge=0)
    gain: float = Field(default=6.5, ge=0)
    smoothing: Duration = Field(default=108_000, gt=0)
    reclaim_price: float = Field(default=2.75, ge=0)
    price_knee: float = Field(default=0.03, gt=0)
    quiet: float = Field(default=0.017, ge=0)


class TurnPolicy(Model):
    """Turns for gangs that no share admits. min_turn: how long a turn lasts at least. ratio: most that the
    weight of the queue whose turn it is may be of the others'; 0 switches turns off. lump: part of the
    pool from which on a gang may have a turn."""

    min_turn: Duration = Field(default=14_400, gt=0)
    ratio: float = Field(default=1000.0, ge=0)
    lump: float = Field(default=0.04, ge=0, le=1)


MOST = 1e15
"""GPUs of a quota, and the weight of a queue: more is a slip, and sums of more may overflow."""

Quota = Annotated[float, Field(ge=-1, le=MOST)]
"""GPUs; -1: unlimited."""


class QueuePolicy(Model):
    """One queue of the tree. GPUs: deserved quota and limit (-1 unlimited), over-quota weight,
    priority (higher first). refs: the schedulers' names that belong to it: `kai:vision`, `kueue:team` (a
    ClusterQueue), `kueue-cohort:dept`, `kueue:namespace/local`, `volcano:team`, `policy:label`, `runai:project`,
    `runai-department:dept`."""

    name: str = Field(min_length=1, max_length=253)
    parent: str | None = None
    deserved: Quota = 0.0
    weight: float = Field(default=1.0, ge=0, le=MOST)
    limit: Quota = -1.0
    priority: int = 100
    team: str | None = None
    refs: tuple[str, ...] = ()


class Budget(Model):
    """What a queue (with its descendants) or a team may use in a calendar month: money (with its currency) or
    GPU-hours. thresholds: shares of the limit that are worth telling. exhausted: what a budget that is used up
    does. tell: nothing but that. no-over-quota: its queues get their deserved quota and nothing over it until the
    month ends; a spend that is unknown never does."""

    name: str = Field(min_length=1, max_length=253)
    queue: str | None = None
    team: str | None = Field(default=None, min_length=1, max_length=253)
    limit: Decimal = Field(gt=0, le=10**12)
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$")
    thresholds: tuple[Annotated[float, Field(gt=0, le=10)], ...] = (0.5, 0.8, 1.0)
    exhausted: Literal["tell", "no-over-quota"] = "tell"

    @model_validator(mode="after")
    def _of_one(self) -> Budget:
        if (self.queue is None) == (self.team is None):
            raise ValueError(f"budget {self.name!r} is of a queue or of a team: name one of them")
        return self


class Policy(Model):
    """Queue tree, feedback and targets: one file, owned by fairshare, dated by the accountant."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    window: WindowSpec = WindowSpec()
    measure: Measure = "allocated"
    usage: UsagePolicy = Field(default=UsagePolicy(), exclude_if=_counts_one_cluster)
    law: Literal["kai", "fairtree", "multifactor", "deficit"] = "kai"
    k: float = Field(default=1.0, ge=0, le=MOST)
    deficit: DeficitPolicy = DeficitPolicy()
    turns: TurnPolicy = TurnPolicy()
    min_coverage: float = Field(default=0.98, ge=0, le=1)
    max_staleness: Duration = 900
    bounds: Bounds = Bounds()
    targets: Targets = Targets()
    budgets: tuple[Budget, ...] = ()
    preemption: PreemptionPolicy = PreemptionPolicy()
    queues: tuple[QueuePolicy, ...] = Field(json_schema_extra={"minItems": 1})

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _tree(self) -> Policy:
        # Not min_length: pydantic would add that the list is empty to the fault of a single faulty queue.
        if not self.queues:
            raise PolicyError(0, "name", "a policy needs at least one queue")
        by_name: dict[str, QueuePolicy] = {}
        owner: dict[str, str] = {}
        for i, queue in enumerate(self.queues):
            if queue.name in by_name:
                raise PolicyError(i, "name", f"queue {queue.name!r} is defined twice")
            by_name[queue.name] = queue
            for ref in queue.refs:
                if ref in owner:
                    raise PolicyError(i, "refs", f"{ref!r} belongs to queue {owner[ref]!r} already")
                owner[ref] = queue.name
        names: set[str] = set()
        for i, budget in enumerate(self.budgets):
            if budget.queue is not None and budget.queue not in by_name:
                raise PolicyError(
                    i, "queue", f"budget {budget.name!r} is of the unknown queue {budget.queue!r}", "budgets"
                )
            if budget.name in names:
                raise PolicyError(i, "name", f"budget {budget.name!r} is defined twice", "budgets")
            names.add(budget.name)
        if self.window.gpu_weights and self.measure in ("cost", "energy"):
            raise ValueError(f"window.gpu_weights are for GPU time, and this policy measures {self.measure}")
        _known_preemption(self.preemption, by_name)
        _one_way_to_runai(self)
        _one_cluster_for_kai(self)
        rooted: set[str] = set()
        for i, queue in enumerate(self.queues):
            seen = {queue.name: None}  # in order
            parent = queue.parent
            while parent is not None and parent not in rooted:
                if parent not in by_name:
                    raise PolicyError(i, "parent", f"queue {queue.name!r} has the unknown parent {parent!r}")
                if parent in seen:
                    raise PolicyError(i, "parent", "the queue tree has a cycle: " + " -> ".join([*seen, parent]))
                seen[parent] = None
                parent = by_name[parent].parent
            rooted.update(seen)
        return self

    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON: equal content, equal version."""
        return _digest(self.model_dump(mode="json", by_alias=True))

    def counting(self) -> str:
        """The same of what the accountant's answers to a controller depend on: what each queue is called and made of,
        and budgets. Policies that differ in laws, shares or targets alone count alike."""
        queues = [queue.model_dump(mode="json", include={"name", "parent", "team", "refs"}) for queue in self.queues]
        budgets = [budget.model_dump(mode="json") for budget in self.budgets]
        by_name = [sorted(each, key=itemgetter("name")) for each in (queues, budgets)]
        return _digest(by_name)


def _digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _one_way_to_runai(policy: Policy) -> None:
    """Raise PolicyError where history would reach Run:ai's scheduler twice, or there is no address."""
    if policy.targets.runai.mode == "off":
        return
    for i, queue in enumerate(policy.queues):
        if not any(ref.partition(":")[0] in ("runai", "runai-department") for ref in queue.refs):
            continue
        if policy.targets.runai.url is None:
            raise PolicyError(i, "refs", f"queue {queue.name!r} is Run:ai's: say its address in targets.runai.url")
        if policy.targets.kai.mode != "off" and any(ref.startswith("kai:") for ref in queue.refs):
            reason = "Run:ai owns its Queues: set targets.kai.mode: off, or targets.runai.mode: off and kai's to usage"
            raise PolicyError(i, "refs", f"queue {queue.name!r} has refs of kai and runai: {reason}")


def _one_cluster_for_kai(policy: Policy) -> None:
    """Raise PolicyError where KAI itself would read a history that has no other cluster in it."""
    if not policy.usage.clusters or policy.targets.kai.mode != "usage":
        return
    for i, queue in enumerate(policy.queues):
        if any(ref.startswith("kai:") for ref in queue.refs):
            reason = (
                f"queue {queue.name!r} is KAI's, which reads the history of one accountant in mode usage: set"
                " targets.kai.mode: weight, or leave usage.clusters out"
            )
            raise PolicyError(i, "refs", reason)


def _known_preemption(rules: PreemptionPolicy, queues: Mapping[str, QueuePolicy]) -> None:
    """Raise PolicyError for classes and SLOs that are named twice, or are of no queue."""
    named = {"classes": [each.name for each in rules.classes], "slos": [each.name for each in rules.slos]}
    for section, names in named.items():
        for i, name in enumerate(names):
            if name in names[:i]:
                raise PolicyError(i, "name", f"{name!r} is defined twice", "preemption", section)
    for i, slo in enumerate(rules.slos):
        if slo.queue is not None and slo.queue not in queues:
            raise PolicyError(
                i, "queue", f"SLO {slo.name!r} is of the unknown queue {slo.queue!r}", "preemption", "slos"
            )


class PolicyError(ValueError):
    """A fault of one entry of a list: `path` says where in the document it stands."""

    def __init__(self, index: int, key: str, message: str, *section: str) -> None:
        """section: where the list stands; without one, the queues."""
        super().__init__(message)
        self.path: tuple[str | int, ...] = (*(section or ("queues",)), index, key)


class PolicyVersion(Model):
    """A stored policy and since when it is in force."""

    version: str
    effective_ms: int
    policy: Policy


# --- windows and decisions ------------------------------------------------------------------


def _untold(value: object) -> bool:
    """A field that callers who do not ask for it have never heard of: they refuse keys they do not know."""
    return not value


class UsageWindow(Model):
    """Usage per key over a window, with everything a caller needs to decide whether to trust it.

    usage, capacity: integers in `unit` (decayed figures are rounded to whole units once, at the end);
    capacity leaves out `down`. `unassigned` is usage that belongs to no queue (not in `usage`).
    watermark_ms: latest instant up to which at least the asked `min_coverage` is metered.
    coverage: metered share of the window's capacity, 0..1 (for busy and energy unknown is uncovered, for cost what
    has no price is). unit: gpu_us, weighted_gpu_us (by `gpu_weights`), uj, or for costs `1e-9 CUR`, at the prices
    of `price_book_version`. shard, cluster: of whose nodes alone; None: all.
    policy_counting: `Policy.counting` of the policy that counted; told, as `cluster` is, where a cluster was asked for.
    lost_ms: end of the newest stretch, a quarter-hour or less, of the window in which a GPU was lost; 0: in none;
    None: not told.
    since_ms: where the books begin: at start_ms, or in a young ledger with the first record of any GPU, at the
    latest at end_ms; None: not told."""

    kind: WindowKind
    start_ms: int
    end_ms: int
    half_life_s: int | None
    decay: Literal["exact", "slurm"] = "exact"
    measure: Measure
    unit: str
    by: str
    usage: dict[str, int]
    unassigned: int
    capacity: int
    watermark_ms: int | None
    coverage: float
    policy_version: str | None
    gpu_weights: dict[str, Decimal] = Field(default={})
    price_book_version: str | None = None
    shard: str | None = None
    cluster: str | None = Field(default=None, exclude_if=_untold)
    policy_counting: str | None = Field(default=None, exclude_if=_untold)
    lost_ms: int | None = None
    since_ms: int | None = None


class Decision(Model):
    """One thing the controller decided, with all it needs to be replayed bit for bit. cluster: whose controller; "":
    one that was not told the name of its cluster."""

    id: str = Field(min_length=1, max_length=200)
    at_ms: int = Field(ge=0, lt=2**53)
    kind: Literal["weight", "hold", "preemption"]
    target: str
    subject: str
    mode: Literal["off", "dry-run", "enforce"]
    value: float | None = None
    previous: float | None = None
    reason: str
    policy_version: str
    inputs: dict[str, JsonValue] = Field(default={})
    cluster: str = Field(default="", max_length=253, exclude_if=_untold)
