"""Defines the policy file (queues, targets, history, budgets and preemption rules), the usage over a window
(`UsageWindow`) and the controller's decisions (`Decision`).

These are frozen pydantic models. Times in UTC milliseconds end in `_ms`, and money is a decimal string with a currency.
Unknown keys are refused.

The models only define what can be written. `fairshare.schedulers` writes weights into the objects of schedulers, and
`fairshare.preemption.victim_selection` applies the preemption rules."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from math import fsum, isclose
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    create_model,
    model_validator,
)

from accountant.wire.option_types import MOST, is_empty
from accountant.wire.scheduler_sections import Mode, ModesOfTargets, SchedulerSection, TargetSections
from accountant.wire.window_decays import Decay
from gputally.base.gpu_model_names import GpuModel, parse_gpu_model
from gputally.kubernetes.scheduler_plugins import own_schedulers
from gputally.server.config_loading import Duration, Model, parse_seconds


def _model(place: str) -> type[SchedulerSection]:
    module, _, name = place.partition(":")
    found: type[SchedulerSection] = getattr(importlib.import_module(module), name)
    return found


_OWN: Final = {one.section: _model(one.settings) for one in own_schedulers() if one.settings}
_STOPPED: Final = [one.section for one in own_schedulers() if one.settings and one.workloads]

if TYPE_CHECKING:
    Targets = TargetSections
    PreemptionModes = ModesOfTargets
else:
    Targets = create_model(
        "Targets",
        __base__=TargetSections,
        __doc__=TargetSections.__doc__,
        __module__=__name__,
        **{name: (model, model()) for name, model in _OWN.items()},
    )
    PreemptionModes = create_model(
        "PreemptionModes",
        __base__=ModesOfTargets,
        __doc__=ModesOfTargets.__doc__,
        __module__=__name__,
        **dict.fromkeys(_STOPPED, (Mode | None, None)),
    )


class PriorityClassPolicy(Model):
    """A priority class by its value. preempts: False means `preemptionPolicy: Never`: its pods only wait."""

    name: str = Field(min_length=1, max_length=253)
    value: int = Field(ge=-2_147_483_648, le=1_000_000_000)
    preempts: bool = True


class SloPolicy(Model):
    """A latency objective: if the latency stays above `above` (seconds) for longer than `sustained`, pending workloads
    of the queue, or the named one (namespace/name), may preempt those that borrow.

    query: PromQL; the largest of its values, in seconds, counts.
    gpus: number to free if none of its workloads is pending."""

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
            raise ValueError(f"SLO {self.name!r} needs either a queue or a workload")
        return self


class IdleExemptions(Model):
    """Workloads that idle reclaim exempts.

    namespaces: shell patterns.
    labels, annotations: labels and annotations of the pod, by name and value (`*`: any).
    priority: workloads with this priority or a higher one."""

    namespaces: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    priority: int | None = None


class IdleReclaimPolicy(Model):
    """Reclaims GPUs that are held but not used: the owner is warned, and after `grace` they are reclaimed.

    mode: limited by the target's own mode.
    below: the share of time in which a pod's GPUs were busy, over `sustained` and again over `grace`; time with unknown
        use counts as busy."""

    mode: Mode = "dry-run"
    below: float = Field(default=0.05, gt=0, le=1)
    sustained: Duration = Field(default=7200, ge=300)
    grace: Duration = Field(default=1800, ge=60)
    exempt: IdleExemptions = IdleExemptions()


class PreemptionPolicy(Model):
    """When running workloads may be preempted, and how many at most.

    mode: dry-run decides and records, but stops no workload.
    quota: whether queues within their deserved quota may preempt.
    over_share: whether queues below their fair share may preempt workloads of queues above theirs; never workloads of a
        higher priority.
    saturation: a multiplier (>= 1). A queue above its share takes GPUs only if its own held/share, times this,
        stays below that of the queues it takes from.
    wait: how long a workload must be pending before it may preempt.
    min_runtime: protection after a start.
    cool_down: protection after a preemption.
    per_team, per_cluster: maximum number of workloads stopped per hour.
    lost_gpu_hours: maximum lost work per day.
    idle: the rule of idle reclaim; None: disabled."""

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
"""croniter's letters for random or hashed times, which differ from one evaluation to the next."""


GpuName = Annotated[str, Field(min_length=1, max_length=200)]
ANY_MODEL = "*"
"""The name of all GPU models that no other entry covers."""
GpuWeight = Annotated[Decimal, Field(ge=0, le=1_000_000, max_digits=13, decimal_places=6)]

# --- policy ---------------------------------------------------------------------------------


class WindowSpec(Model):
    """The past time over which the usage of a queue is measured.

    kind: `sliding`: the last `size` seconds. `tumbling`: since the last boundary, a multiple of `size` after (or
        before) `start`, by default 1970 UTC. `cron`: since the expression `cron` last fired. `calendar`: since the
        beginning of the month. `cron` and `calendar` use the accountant's time zone and have no size.
    half_life: None: no decay.
    decay: exact is the integral, another choice the calculation of another program for the same half-life, per period
        of `calc_period`, for comparison with its figures.
    gpu_weights: by name of a GPU model, the weight of a GPU-second (like TRESBillingWeights); `*` stands for all
        other models, which without it have weight 1."""

    kind: WindowKind = "sliding"
    size: Duration = Field(default=604_800, gt=0)
    half_life: Duration | None = Field(default=None, gt=0)
    start: AwareDatetime | None = None
    cron: str | None = Field(default=None, max_length=100)
    decay: Decay = "exact"
    calc_period: Duration = Field(default=300, gt=0, le=900)
    gpu_weights: dict[GpuName, GpuWeight] = Field(default={}, max_length=100)

    @model_validator(mode="after")
    def _belongs(self) -> WindowSpec:
        if self.by_period and self.half_life is None:
            raise ValueError(f"decay: {self.decay} needs a half_life (PriorityDecayHalfLife)")
        if 900 % self.calc_period:
            raise ValueError(f"calc_period must divide a quarter of an hour (900 s), and {self.calc_period} s does not")
        if self.start is not None and self.kind != "tumbling":
            raise ValueError(f"only a tumbling window has a start, and this window is {self.kind}")
        if (self.cron is not None) != (self.kind == "cron"):
            raise ValueError(f"a cron expression and kind: cron belong together, and this window is {self.kind}")
        if self.cron is not None:
            known_cron(self.cron)
        return self

    @property
    def by_period(self) -> bool:
        """Whether the history decays period by period, and not exactly."""
        return self.decay != "exact"


def known_cron(expression: str) -> str:
    """Returns the expression if it has five fields and ever fires. Raises ValueError."""
    from croniter import croniter  # imported only for policies with a cron expression

    reason = "write minute hour day month weekday, for example 0 0 * * 1"
    if not _CRON.fullmatch(expression) or _RANDOM.search(expression):
        raise ValueError(f"not a cron expression: {expression!r} ({reason})")
    try:
        croniter(expression, datetime(2000, 1, 1, tzinfo=UTC)).get_next(datetime)
    except (ValueError, KeyError) as error:
        raise ValueError(f"not a cron expression: {expression!r}: {error} ({reason})") from error
    return expression


HALF_LIFE_S = 86_400
"""The half-life of usage in a sliding window of a policy that states none."""


def _with_half_life(window: object) -> object:
    """Return the `window` of a policy file with the default half-life, if it is sliding and states none."""
    if isinstance(window, dict) and window.get("kind", "sliding") == "sliding" and "half_life" not in window:
        return {**window, "half_life": HALF_LIFE_S}
    return window


ClusterName = Annotated[str, Field(min_length=1, max_length=253)]


class UsagePolicy(Model):
    """The clusters whose usage counts and is added up.

    clusters: names as reported by agents. The controller's own cluster always counts, also if it is not listed."""

    clusters: tuple[ClusterName, ...] = Field(default=(), max_length=1_000)

    @model_validator(mode="after")
    def _once(self) -> UsagePolicy:
        for i, name in enumerate(self.clusters):
            if name in self.clusters[:i]:
                raise ValueError(f"cluster {name!r} is listed twice in usage.clusters")
        return self


def _counts_one_cluster(usage: object) -> bool:
    """Whether to leave `usage` out, so that a policy that writes the default has the same version as one without it."""
    return usage == UsagePolicy()


class Bounds(Model):
    """Limits how far and how fast published weights move away from the configured ones.

    min_multiplier, max_multiplier: the smallest and the largest weight, as multiples of the configured one.
    interval: how long weights stay after they were set by use. A change of the policy, a used-up budget and a turn
        apply at once."""

    min_multiplier: float = Field(default=0.1, gt=0, le=1)
    max_multiplier: float = Field(default=4.0, ge=1)
    interval: Duration = Field(default=10_800, ge=0, le=2_592_000)


class TurnPolicy(Model):
    """Turns: a temporary boost of one queue's weight, so that a gang that no weight admits can start.

    min_turn: length of a turn.
    ratio: maximum weight of the queue whose turn it is, relative to the others.
    most_queues: turns are given only among at most this many siblings; 0: never."""

    min_turn: Duration = Field(default=14_400, gt=0)
    ratio: float = Field(default=1000.0, ge=1)
    most_queues: int = Field(default=50, ge=0)


Quota = Annotated[float, Field(ge=-1, le=MOST)]
"""GPUs; -1: unlimited."""
UNLIMITED_QUOTA = -1.0


class ModelQuota(Model):
    """What a queue has of the GPUs of one model.

    deserved, limit: as in `QueuePolicy`, of these GPUs alone.
    weight: None for the queue's own weight."""

    deserved: Quota = 0.0
    weight: float | None = Field(default=None, ge=0, le=MOST)
    limit: Quota = UNLIMITED_QUOTA


class QueuePolicy(Model):
    """One queue of the tree.

    deserved, limit: the deserved (guaranteed) quota, and the most that the queue may hold, in GPUs (-1: unlimited).
    weight: the weight by which it shares GPUs beyond the deserved quotas.
    gpu_models: its quotas, weights and limits by GPU model, named as in a price book. The deserved quota is then their
        sum, and may be left out.
    priority: higher values come first.
    turn: which gangs may need a turn. gang: those that are larger than any share of the queue. burst: those that do not
        fit beside what the queue holds, for a queue with constant work and bursts.
    refs: the schedulers' names of the queue, each `PREFIX:NAME` with a prefix of its scheduler (docs/schedulers.md)."""

    name: str = Field(min_length=1, max_length=253)
    parent: str | None = None
    deserved: Quota = 0.0
    weight: float = Field(default=1.0, ge=0, le=MOST)
    limit: Quota = UNLIMITED_QUOTA
    priority: int = 100
    turn: Literal["gang", "burst"] = "gang"
    team: str | None = None
    refs: tuple[str, ...] = ()
    gpu_models: dict[GpuName, ModelQuota] = Field(default={}, max_length=100, exclude_if=is_empty)

    @model_validator(mode="wrap")
    @classmethod
    def _adds_up(cls, data: object, build: ModelWrapValidatorHandler[QueuePolicy]) -> QueuePolicy:
        """Fill in a deserved quota that is left out beside those by model."""
        queue = build(data)
        if queue.gpu_models and "deserved" not in queue.model_fields_set:
            return queue.model_copy(update={"deserved": queue.deserved_of_models})
        return queue

    @property
    def deserved_of_models(self) -> float:
        """The sum of the deserved quotas by model; -1 if one of them is unlimited."""
        quotas = [quota.deserved for quota in self.gpu_models.values()]
        return UNLIMITED_QUOTA if UNLIMITED_QUOTA in quotas else fsum(quotas)


class Budget(Model):
    """What a queue (with its descendants) or a team may use in a calendar month: money (with its currency) or
    GPU-hours.

    gpu_models: limits by GPU model within the limit, named as in a price book.
    thresholds: shares of the limit that are reported.
    exhausted: the effect when the budget is used up. tell: only a notice. no-over-quota: its queues get only their
        deserved quota until the month ends, of a used-up model only of its GPUs; unknown spend never has this
        effect."""

    name: str = Field(min_length=1, max_length=253)
    queue: str | None = None
    team: str | None = Field(default=None, min_length=1, max_length=253)
    limit: Decimal = Field(gt=0, le=10**12)
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$")
    thresholds: tuple[Annotated[float, Field(gt=0, le=10)], ...] = (0.5, 0.8, 1.0)
    exhausted: Literal["tell", "no-over-quota"] = "tell"
    gpu_models: dict[GpuName, Annotated[Decimal, Field(gt=0, le=10**12)]] = Field(
        default={}, max_length=100, exclude_if=is_empty
    )

    @model_validator(mode="after")
    def _of_one(self) -> Budget:
        if (self.queue is None) == (self.team is None):
            raise ValueError(f"budget {self.name!r} needs either a queue or a team")
        return self

    def parts(self) -> tuple[tuple[str, Budget], ...]:
        """Return the limits as budgets of their own, each with its GPU model: first the whole budget with the model "",
        then one for each model, named `BUDGET: MODEL`."""
        of_models = (
            (model, self.model_copy(update={"name": f"{self.name}: {model}", "limit": limit, "gpu_models": {}}))
            for model, limit in self.gpu_models.items()
        )
        return (("", self), *of_models)


class Policy(Model):
    """A policy: queue tree, history and targets. It is one file of the controller, and the accountant stores each
    version with its date.

    window: without `half_life`, usage in a sliding window counts half after a day; `half_life: null` switches that off.
    k: the strength of history (`fairshare.laws.feedback_law`); 0: weights stay as configured."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    window: Annotated[WindowSpec, BeforeValidator(_with_half_life)] = WindowSpec(half_life=HALF_LIFE_S)
    measure: Measure = "allocated"
    usage: UsagePolicy = Field(default=UsagePolicy(), exclude_if=_counts_one_cluster)
    k: float = Field(default=1.0, ge=0, le=MOST)
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
        # Not min_length: pydantic would add the fault "list is empty" to that of a single faulty queue.
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
                    i, "queue", f"budget {budget.name!r} names the unknown queue {budget.queue!r}", "budgets"
                )
            for _, part in budget.parts():
                if part.name in names:
                    raise PolicyError(i, "name", f"budget {part.name!r} is defined twice", "budgets")
                names.add(part.name)
        _known_models(self)
        if self.window.gpu_weights and self.measure in ("cost", "energy"):
            raise ValueError(f"window.gpu_weights are for GPU time, and this policy measures {self.measure}")
        _known_preemption(self.preemption, by_name)
        for section in self.targets.sections():
            for i, reason in section.faults(self):
                raise PolicyError(i, "refs", reason)
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

    @property
    def gpu_models(self) -> tuple[str, ...]:
        """The GPU models by which queues have quotas, in the order in which the file first names them. GPUs of other
        models are one further part."""
        return tuple(dict.fromkeys(model for queue in self.queues for model in queue.gpu_models))

    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON; equal content has an equal version."""
        return _digest(self.model_dump(mode="json", by_alias=True))

    def lineage(self, name: str | None) -> list[QueuePolicy]:
        """The queue of that name and its ancestors, nearest first; empty for an unknown name."""
        by_name = {queue.name: queue for queue in self.queues}
        queues = []
        while name is not None and name in by_name:
            queues.append(by_name[name])
            name = by_name[name].parent
        return queues

    def team_of(self, name: str | None) -> str:
        """The team of a queue or of its nearest ancestor with a team; "" if there is none."""
        return next((queue.team for queue in self.lineage(name) if queue.team), "")

    def counting(self) -> str:
        """A digest, like `version`, of the parts on which the accountant's answers to a controller depend: names,
        parents, teams and refs of queues, and budgets. Policies that differ only in history, shares or targets have the
        same digest."""
        queues = [queue.model_dump(mode="json", include={"name", "parent", "team", "refs"}) for queue in self.queues]
        budgets = [budget.model_dump(mode="json") for budget in self.budgets]
        by_name = [sorted(each, key=itemgetter("name")) for each in (queues, budgets)]
        return _digest(by_name)


def _digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _known_models(policy: Policy) -> None:
    """Raises PolicyError for names of GPU models that are ambiguous, and for figures by model that contradict those of
    their queue or budget."""
    names: dict[GpuModel, str] = {}
    sections: Sequence[tuple[str, Sequence[QueuePolicy | Budget]]] = (
        ("queues", policy.queues), ("budgets", policy.budgets),
    )  # fmt: skip
    for section, entries in sections:
        for i, entry in enumerate(entries):
            for name in entry.gpu_models:
                model = parse_gpu_model(name)
                if not model.family or name == ANY_MODEL:
                    raise PolicyError(i, "gpu_models", f"{name!r} is no name of a GPU model", section)
                if names.setdefault(model, name) != name:
                    text = f"{names[model]!r} and {name!r} are one GPU model: write one of the names"
                    raise PolicyError(i, "gpu_models", text, section)
            _no_contradiction(i, entry)
    for i, budget in enumerate(policy.budgets):
        unknown = [model for model in budget.gpu_models if model not in policy.gpu_models]
        if unknown and budget.exhausted == "no-over-quota":
            text = f"no queue has a quota of {unknown[0]}, so its used-up limit takes nothing: write it in gpu_models"
            raise PolicyError(i, "gpu_models", text, "budgets")
    if not policy.gpu_models:
        return
    if policy.measure in ("cost", "energy"):
        raise ValueError(f"quotas by GPU model divide GPU time, and this policy measures {policy.measure}")
    for i, queue in enumerate(policy.queues):
        if not queue.gpu_models and queue.deserved > 0:
            text = (
                f"queue {queue.name!r} deserves {queue.deserved:g} GPUs of no stated model, and other queues have"
                " quotas by model: write its gpu_models"
            )
            raise PolicyError(i, "gpu_models", text)


def _no_contradiction(i: int, entry: QueuePolicy | Budget) -> None:
    """Raises PolicyError if the figures by GPU model contradict the plain ones. i: the position of the entry."""
    if isinstance(entry, Budget):
        for model, most in entry.gpu_models.items():
            if most > entry.limit:
                text = f"budget {entry.name!r} is {entry.limit:f}, and {most:f} for {model} alone"
                raise PolicyError(i, "gpu_models", text, "budgets")
        return
    together = entry.deserved_of_models
    if entry.gpu_models and not isclose(entry.deserved, together, rel_tol=1e-9, abs_tol=1e-9):
        text = (
            f"queue {entry.name!r} deserves {_gpus_text(entry.deserved)}, and by its gpu_models {_gpus_text(together)}:"
            " leave deserved out, or write the sum"
        )
        raise PolicyError(i, "deserved", text)
    for model, quota in entry.gpu_models.items():
        if UNLIMITED_QUOTA < entry.limit < quota.limit:
            text = f"queue {entry.name!r} may hold {entry.limit:g} GPUs, and {quota.limit:g} of {model} alone"
            raise PolicyError(i, "limit", text)


def _gpus_text(quota: float) -> str:
    return "unlimited GPUs" if quota == UNLIMITED_QUOTA else f"{quota:g} GPUs"


def _known_preemption(rules: PreemptionPolicy, queues: Mapping[str, QueuePolicy]) -> None:
    """Raises PolicyError for duplicate priority classes and SLOs, and for SLOs of unknown queues."""
    named = {"classes": [each.name for each in rules.classes], "slos": [each.name for each in rules.slos]}
    for section, names in named.items():
        for i, name in enumerate(names):
            if name in names[:i]:
                raise PolicyError(i, "name", f"{name!r} is defined twice", "preemption", section)
    for i, slo in enumerate(rules.slos):
        if slo.queue is not None and slo.queue not in queues:
            raise PolicyError(
                i, "queue", f"SLO {slo.name!r} names the unknown queue {slo.queue!r}", "preemption", "slos"
            )


class PolicyError(ValueError):
    """A fault of one entry of a list. `path`: its place in the document."""

    def __init__(self, index: int, key: str, message: str, *section: str) -> None:
        """section: the path of the list; default: the queues."""
        super().__init__(message)
        self.path: tuple[str | int, ...] = (*(section or ("queues",)), index, key)


class PolicyVersion(Model):
    """A stored policy, and the instant from which it is in force."""

    version: str
    effective_ms: int
    policy: Policy


# --- windows and decisions ------------------------------------------------------------------


class UsageWindow(Model):
    """The usage of each queue over a window, with figures that show whether it can be trusted.

    usage, capacity: integers in `unit`. Decayed figures are rounded to integers once, at the end. The capacity excludes
        `down`.
    unassigned: usage outside all queues (not in `usage`).
    watermark_ms: the instant up to which the required share of the GPUs in service is metered.
    lost_ms: the end of the last quarter-hour in which a GPU was lost; 0 if none was, null if unknown.
    since_ms: the instant in the window from which the ledger knows GPUs."""

    kind: WindowKind
    start_ms: int
    end_ms: int
    half_life_s: int | None
    decay: Decay = "exact"
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
    cluster: str | None = Field(default=None, exclude_if=is_empty)
    policy_counting: str | None = Field(default=None, exclude_if=is_empty)
    lost_ms: int | None = None
    since_ms: int | None = None


DecisionKind = Literal["weight", "hold", "preemption", "policy"]


class Decision(Model):
    """One decision of the controller, with everything needed to replay it bit for bit, or a change of its policy with
    the difference.

    cluster: the cluster of the controller; "" if the controller does not know its name."""

    id: str = Field(min_length=1, max_length=200)
    at_ms: int = Field(ge=0, lt=2**53)
    kind: DecisionKind
    target: str
    subject: str
    mode: Literal["off", "dry-run", "enforce"]
    value: float | None = None
    previous: float | None = None
    reason: str
    policy_version: str
    inputs: dict[str, JsonValue] = Field(default={})
    cluster: str = Field(default="", max_length=253, exclude_if=is_empty)

    @property
    def key(self) -> str:
        """What identifies the decision among those of its millisecond. Controllers of several clusters may decide about
        queues of the same name at once."""
        return f"{self.cluster}/{self.id}" if self.cluster else self.id
