"""Defines the answers about usage, cost, budgets, jobs and the progress of imports. `accountant.wire.policy_models` has
those about usage windows and the controller's decisions.

These are frozen pydantic models. Integers have their unit in the name, and money is an exact decimal in the price
book's currency. A cost is None if some of the time has no price, and `unpriced_gpu_us` says how much."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Final, Literal, NewType, TypeAlias, TypeGuard

from pydantic import AfterValidator, Field, WithJsonSchema, create_model

from accountant.wire.dimensions import DECLARED
from accountant.wire.option_types import JOB_ORDERS, NODE_ORDERS, ORDER_HELP, JobKind, JobState, is_empty
from gputally.base.measures import REPORTED, SHOWN
from gputally.base.units import US_PER_S
from gputally.server.config_loading import Exact, Model

Dimension: TypeAlias = str
"""The name of a dimension: one of BUILT_IN, or `label:project` of an exported pod label."""
BUILT_IN: Final[tuple[Dimension, ...]] = tuple(DECLARED)
LabelDimension = NewType("LabelDimension", str)
"""An exported pod label as a dimension, for example `label:project`."""
LABEL_PREFIX: Final = "label:"
LABEL_NAME: Final = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""A name of a label, as Kubernetes allows it."""
LABEL_VALUE: Final = re.compile(r"(?!__)\w[-\w.@:/+=]{0,127}")
"""A value of a label that is kept; Kubernetes allows fewer. The ledger's own names begin with two underscores."""
OTHER_VALUE: Final = "__other__"
"""Stands for the values of an exported label that are too many (`quotas.label_values`) or no values of a label."""


JobSort = Annotated[
    str,
    AfterValidator(JOB_ORDERS.text),
    WithJsonSchema({"type": "string", "pattern": JOB_ORDERS.pattern}),
    Field(description=ORDER_HELP),
]
NodeSort = Annotated[
    str,
    AfterValidator(NODE_ORDERS.text),
    WithJsonSchema({"type": "string", "pattern": NODE_ORDERS.pattern}),
    Field(description=ORDER_HELP),
]


def label_dimension(name: str) -> LabelDimension:
    """The dimension of an exported label: `label:project` of `project`."""
    return LabelDimension(LABEL_PREFIX + name)


def is_label(dimension: str) -> TypeGuard[LabelDimension]:
    return dimension.startswith(LABEL_PREFIX)


def label_of(dimension: LabelDimension) -> str:
    """The name of the label: `project` of `label:project`."""
    return dimension.removeprefix(LABEL_PREFIX)


def known_dimension(name: str) -> Dimension:
    """The dimension of this name. Raises ValueError for another name, also for one that cannot be a label's."""
    if name in DECLARED or (is_label(name) and re.fullmatch(LABEL_NAME, label_of(name))):
        return name
    known = ", ".join(BUILT_IN)
    raise ValueError(f"there is no dimension {name[:100]!r}: choose from {known}, or label:NAME of an exported label")


class Accounts(Model):
    """GPU-microseconds by account. Each microsecond is in one account, so the accounts add up to the capacity."""

    busy: int = 0
    allocated_idle: int = 0
    allocated_unknown: int = 0
    unallocated: int = 0
    unmetered: int = 0
    down: int = 0

    @property
    def allocated(self) -> int:
        return self.busy + self.allocated_idle + self.allocated_unknown

    @property
    def total(self) -> int:
        return self.allocated + self.unallocated + self.unmetered + self.down

    @property
    def utilisation(self) -> float | None:
        """The busy part of the held time whose use is known; None if there is no such time."""
        known = self.busy + self.allocated_idle
        return self.busy / known if known else None

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the time: not all of it is unmetered."""
        return self.total > self.unmetered


class _AccountsOfLine(Model):
    key: dict[str, str]
    accounts_gpu_us: Accounts = Accounts()
    node_down_us: int | None = None
    borrowed_busy_us: int = 0
    unattributed_busy_us: int = 0


_FIELDS: Final = [
    part
    for each in REPORTED
    for part in (
        (each.field, int | None if each.known == "held" else int, each.text),
        (each.unknown_field, int, each.unknown_text),
    )
]
if TYPE_CHECKING:

    class _MeasuresOfLine(_AccountsOfLine):
        def __getattr__(self, name: str) -> int | None: ...

else:
    fields = {name: (kind, Field(default=0, description=text)) for name, kind, text in _FIELDS}
    _MeasuresOfLine = create_model("_MeasuresOfLine", __base__=_AccountsOfLine, **fields)


class UsageLine(_MeasuresOfLine):
    """The usage of one group. Figures outside `accounts_gpu_us` are not part of the accounts' sum. A measure of held
    time is None if it is known of none.

    node_down_us: the part of `down` in which the GPU's node was out of service; in the rest a GPU was lost on a working
    node. None: not distinguished.

    starting_us, gang_waiting_us, running_idle_us: the kinds of `allocated_idle`, adding up to it.
    reserved_unused_us: unallocated time that this queue (or team) was guaranteed and did not use. These four are set
        only if a breakdown was requested."""

    starting_us: int | None = None
    gang_waiting_us: int | None = None
    running_idle_us: int | None = None
    reserved_unused_us: int | None = None

    def shown(self, column: str) -> float | None:
        """The figure of a column of Explore that shows a measure, in its unit; None if unknown."""
        measure, how = SHOWN[column]
        accounts, figure = self.accounts_gpu_us, getattr(self, measure.field)
        time_us = accounts.allocated + (accounts.unallocated if measure.known == "in service" else 0)
        known_us = time_us - getattr(self, measure.unknown_field)
        if figure is None or (known_us <= 0 and (how.mean or not figure)):
            return None
        known = known_us / US_PER_S if measure.unit == "MiB·s" else known_us
        return float(figure / (known if how.mean else 1) / how.scale)


class UsageAnswer(Model):
    start_ms: int
    end_ms: int
    by: tuple[str, ...]
    lines: tuple[UsageLine, ...]
    next_page: str | None = None
    coverage: float | None
    """Metered share of the capacity without `down`; None if the span has no known capacity."""
    note: str = ""
    """Why the span is not the one that a reader expects; "" if it is."""


def _is_none(value: object) -> bool:
    """Whether to leave a field out: callers that did not ask for it need not know it."""
    return value is None


class CostLine(Model):
    """The cost of one group: of time that somebody held, and of time that nobody held.

    costs: None if some of this group's GPU time has no price; `unpriced_gpu_us` says how much.
    amount, unheld_amount: what pages show for cost and unheld_cost (accountant.billing.displayed_amounts), if asked."""

    key: dict[str, str]
    gpu_us: int
    cost: Exact | None
    unpriced_gpu_us: int = 0
    held_cost: Exact | None = None
    unheld_cost: Exact | None = None
    amount: Exact | None = Field(default=None, exclude_if=_is_none)
    unheld_amount: Exact | None = Field(default=None, exclude_if=_is_none)


class CostAnswer(Model):
    """Billed time and its cost by group.

    total_amount: what pages show for the total, if asked."""

    start_ms: int
    end_ms: int
    by: tuple[str, ...]
    currency: str | None
    price_book_version: str
    lines: tuple[CostLine, ...]
    total: Exact | None
    unpriced_gpu_us: int
    next_page: str | None = None
    note: str = ""
    total_amount: Exact | None = Field(default=None, exclude_if=_is_none)


class WaitSpread(Model):
    """Statistics of waiting times, in seconds. pods: number of pods whose wait is known; without any, the rest is
    null."""

    pods: int
    mean: float | None
    median: float | None
    p95: float | None
    longest: float | None


class WaitLine(Model):
    """How long the pods of one group waited.

    queued: from creation until scheduling.
    starting: from scheduling until the start of the first container.
    waiting: number of pods that are not scheduled yet; their wait so far is part of `queued`. None: unknown.
    note: why `waiting` is unknown or only a lower bound; "" if it is known."""

    key: str
    pods: int
    waiting: int | None
    queued: WaitSpread
    starting: WaitSpread
    note: str = ""


def longest_first(lines: Iterable[WaitLine]) -> list[WaitLine]:
    """The lines by the median of the time in the queue, the longest first; those without one last."""
    return sorted(lines, key=lambda one: (one.queued.median is None, -(one.queued.median or 0), one.key))


class UnusedLine(Model):
    """GPU time in [start_ms, end_ms) that was unused while pods waited: sums of what is known of each hour.

    known_ms: length of the hours that are known; without any, the figures are null. What is unknown is in no figure.
    asked_gpu_us: GPU time for which waiting pods asked.
    free_gpu_us: as much of it as nobody held in the same hour: at most this could have been theirs, because free GPUs
        may be on several nodes, of another model, or parts of GPUs.
    idle_gpu_us: as much of the rest as was held and is known to be idle; null if that is unknown."""

    start_ms: int
    end_ms: int
    known_ms: int
    asked_gpu_us: int | None
    free_gpu_us: int | None
    idle_gpu_us: int | None


class UnusedAnswer(Model):
    """GPU time that was unused while pods waited, in [start_ms, end_ms).

    unit: of which a line is: `hour`, `day` or `month`.
    total: of all lines; null if there are none.
    unknown: why nothing is known; "" if something is.
    note: what to know of the records."""

    start_ms: int
    end_ms: int
    unit: Literal["hour", "day", "month"]
    total: UnusedLine | None
    lines: tuple[UnusedLine, ...]
    unknown: str = ""
    note: str = ""


class BudgetState(Model):
    """A budget of the policy in force, and the part of it that the month has used up to as_of_ms.

    gpu_model: the GPU model whose limit within a budget this is; "" for the whole budget.
    spent_amount: what pages show for `spent` of a budget in money: rounded together with the month's other amounts.
    spent and ratio: None if unknown, because some of the time has no price or nothing of the month is metered.
    threshold: the highest threshold reached; None: none.
    forecast: for the whole month, which is what pages show as spent and the rate of its days so far for the rest of it,
        with the bounds of the middle 80 %; None after too few days, and once the month is over.

    exhausted_ms: when the budget was used up, or will be at that rate; None if not in this month.
    exhausted_earliest_ms, exhausted_latest_ms: the bounds of the middle 80 %, None beyond the month; both equal
        exhausted_ms if the budget is already used up."""

    name: str
    queue: str | None
    team: str | None
    gpu_model: str = Field(default="", exclude_if=is_empty)
    month: str
    unit: str
    limit: Decimal
    spent: Decimal | None
    spent_amount: Decimal | None = None
    ratio: float | None
    threshold: float | None
    forecast: float | None
    forecast_low: float | None
    forecast_high: float | None
    exhausted_ms: int | None = None
    exhausted_earliest_ms: int | None = None
    exhausted_latest_ms: int | None = None
    as_of_ms: int

    @property
    def shown(self) -> Decimal | None:
        """What is shown to people as spent."""
        return self.spent if self.spent_amount is None else self.spent_amount


class QueueGuarantee(Model):
    """What a queue without children is guaranteed, and what it holds: GPUs, averaged over the last minutes on record.

    gpu_model: the GPU model whose quota this is; "" for all GPUs, or all of no model that the policy names.
    guaranteed_gpus: the deserved quota of the policy in force; None: unlimited.
    held_gpus, above_gpus: None if nothing of the minutes is metered."""

    queue: str
    team: str
    gpu_model: str = Field(default="", exclude_if=is_empty)
    guaranteed_gpus: Exact | None
    held_gpus: Exact | None
    above_gpus: Exact | None


class GuaranteesAnswer(Model):
    """The guarantees of the policy in force, by queue.

    coverage: the metered share of the capacity; None without known capacity.
    gpus: GPUs in service, averaged over the span; None if the caller may see only some teams, or without records."""

    start_ms: int
    end_ms: int
    coverage: float | None
    gpus: Exact | None
    queues: tuple[QueueGuarantee, ...]


class JobUse(Model):
    """What a job held in a span, and what that cost. cost: None if some of it has no price."""

    accounts_gpu_us: Accounts
    cost: Exact | None
    unpriced_gpu_us: int


class JobStops(Model):
    """What stops of a job lost in a span: the time that it held since its last checkpoint, of each attempt that
    something else than the job ended.

    lost_gpu_us: None if it is unknown of a stop. known_lost_gpu_us: of those stops of which it is known."""

    lost_gpu_us: int | None
    known_lost_gpu_us: int


class JobsStops(JobStops):
    """What stops of several jobs lost. unknown_jobs: the number of jobs of which it is unknown of a stop."""

    unknown_jobs: int


class SpanBefore(Model):
    """The span before, with which a list is compared, or the part of it that has records. coverage: as
    `UsageAnswer.coverage`; if it is None or 0, nothing is known of that span.

    compared_ms: if it is a part, the length of the list's span up to the newest record. Compare then by day: each sum
        divided by the length of its own time."""

    start_ms: int
    end_ms: int
    coverage: float | None
    compared_ms: int | None = None


class Job(Model):
    """A workload and its usage in the requested span.

    state: `waiting`: none of its pods was ever on a node. `ended`: all of its pods have ended; a job without pods holds
        nothing any more. `failed`: all have ended, a container of one with an error, and no pod was created after that.
        `unknown`: it held GPUs up to the last record of a node that is silent while others report. `running`:
        otherwise.
    kind: by the name of its object's kind; None if that says nothing.
    teams: the payers, by the policy in force at the time.
    created_ms, ended_ms: creation of the first and end of the last of its pods.
    held_from_ms, held_until_ms: the first and last instant of holding GPUs, rounded outwards for hours that only have
        sums.
    waited_ms: the longest wait of one of its pods in its queue, so far.
    waiting_since_ms: creation of the first of its pods that wait; None if none waits.
    waiting_ms: how long that pod has waited so far; None if none waits.
    asks_gpus: the GPUs, or parts of them, that its pods request which have not been placed; None if none waits, or if
        one asks by a ResourceClaim or a label, of which the number is unknown.
    accounts_gpu_us: the accounts of held time.
    gpus, burn_per_hour: GPUs held, and their cost per hour, over the last minutes on record; None if unknown.
    epochs: number of reported epochs.
    pod: the name of one of its pods that has the searched text; None if the job's own path has it, or without a search.
    before: its use in the span before, if the list is compared with it and anything is known of it.
    stops: what its stops in the span lost, whatever part of it a filter selects; only if the request asks for it."""

    id: str
    cluster: str
    namespace: str
    job: str
    teams: tuple[str, ...]
    queues: tuple[str, ...]
    users: tuple[str, ...]
    state: JobState
    kind: JobKind | None = None
    pods: int
    pods_running: int
    created_ms: int | None
    held_from_ms: int | None
    held_until_ms: int | None
    ended_ms: int | None
    waited_ms: int | None
    waiting_since_ms: int | None = None
    waiting_ms: int | None = None
    asks_gpus: int | None = None
    gpu_models: tuple[str, ...]
    accounts_gpu_us: Accounts
    gpus: Exact | None
    cost: Exact | None
    unpriced_gpu_us: int
    burn_per_hour: Exact | None
    epochs: int
    pod: str | None = Field(default=None, exclude_if=is_empty)
    before: JobUse | None = Field(default=None, exclude_if=is_empty)
    stops: JobStops | None = Field(default=None, exclude_if=is_empty)

    @property
    def then(self) -> Job | None:
        """The job with its figures of the span before; None if they are not known."""
        if self.before is None:
            return None
        return self.model_copy(update={name: getattr(self.before, name) for name in JobUse.model_fields})


class JobsBefore(SpanBefore):
    """The sums of the listed jobs in the span before, over all pages; None if they are unknown."""

    total_gpu_us: int | None
    total_cost: Exact | None


class JobsAnswer(Model):
    """One page of the jobs of a span.

    count: number of jobs, over all pages; None if none is known and nobody reads which jobs wait (`note` says why).
    held_count: how many of them held a GPU in the span, as reports count jobs; the others waited, or ended without one.
    total_cost: exact sum of the jobs' costs, over all pages; None if any is unknown.
    total_burn_per_hour: the sum of their `burn_per_hour`, over all pages; None if any is unknown.
    before: the span before, if the list is compared with it; it then has the jobs of both spans.
    stops: what stops of all jobs lost, over all pages; only if the request asks for it, and there are jobs."""

    start_ms: int
    end_ms: int
    currency: str | None
    price_book_version: str
    jobs: tuple[Job, ...]
    count: int | None
    total_gpu_us: int
    total_cost: Exact | None
    total_burn_per_hour: Exact | None = None
    held_count: int = 0
    before: JobsBefore | None = Field(default=None, exclude_if=is_empty)
    stops: JobsStops | None = Field(default=None, exclude_if=is_empty)
    next_page: str | None = None
    note: str = ""


class GpuErrorLine(Model):
    """The errors of one kind of a GPU: `xid 79`, `ecc uncorrected`, `hardware thermal slowdown`, …

    count: how many since `since_ms`; None: since before the accountant knew of any. last_ms: when the newest one was;
    None if unknown."""

    gpu: str
    kind: str
    count: int
    since_ms: int | None
    last_ms: int | None


class GpuNeed(Model):
    """An action that a fault of a GPU requires: restart_app, reset_gpu or drain_node."""

    gpu: str
    action: str
    cause: str


class NodeLine(Model):
    """A node and what its GPUs did in the span.

    gpus: the number of GPUs that it had in the span.
    newest_ms: the end of its newest record; None if unknown. silent: whether that is too old to describe the present.
    down: why it cannot be used now; "" if it can.
    agent_version: the release of its agent; None if unknown. agent_older: whether that is known to be earlier than the
        accountant's.
    gpu_errors: the errors of its GPUs, the newest first; None if its agent does not report them. gpu_errors_unread:
        `KIND: REASON` of kinds of which the agent cannot know. gpu_needs: what its GPUs need now.
    before_gpu_us: its accounts in the span before, if the list is compared with it and anything is known of it."""

    cluster: str
    node: str
    pool: str
    capacity_type: str
    gpu_models: tuple[str, ...]
    gpus: int
    newest_ms: int | None
    silent: bool
    down: str
    agent_version: str | None
    agent_older: bool
    gpu_errors: tuple[GpuErrorLine, ...] | None
    gpu_errors_unread: tuple[str, ...]
    gpu_needs: tuple[GpuNeed, ...]
    accounts_gpu_us: Accounts
    before_gpu_us: Accounts | None = Field(default=None, exclude_if=is_empty)

    @property
    def then(self) -> NodeLine | None:
        """The node with its accounts of the span before; None if they are not known."""
        return None if self.before_gpu_us is None else self.model_copy(update={"accounts_gpu_us": self.before_gpu_us})


class NodesBefore(SpanBefore):
    """The sum of the listed nodes in the span before, over all pages; None if it is unknown."""

    total_gpu_us: Accounts | None


class NodesAnswer(Model):
    """One page of the nodes of a span.

    count: number of nodes, over all pages.
    total_gpu_us: sum of the nodes' accounts, over all pages.
    before: the span before, if the list is compared with it; it then has the nodes of both spans."""

    start_ms: int
    end_ms: int
    lines: tuple[NodeLine, ...]
    count: int
    total_gpu_us: Accounts
    before: NodesBefore | None = Field(default=None, exclude_if=is_empty)
    next_page: str | None = None
    note: str = ""


class JobPart(Model):
    """A job's time at one price. unit_price: per GPU-hour; None if the time has no price."""

    gpu_model: str
    capacity_type: str
    gpu_us: int
    gpu_hours: Exact
    unit_price: Exact | None
    cost: Exact | None


class EpochLine(Model):
    """A job's usage and cost from the previous report to this one, [start_ms, end_ms).

    epoch: None for the time after the last report, which belongs to no epoch yet.
    gpu_us, cost, unpriced_gpu_us: None if this ledger cannot divide the time where epochs end: a lake has whole hours.
        Ask the cluster's own accountant."""

    epoch: int | None
    start_ms: int
    end_ms: int
    gpu_us: int | None
    cost: Exact | None
    unpriced_gpu_us: int | None


class NextHolder(Model):
    """Who held GPUs next that an attempt of a job released.

    job, team, queue: None if the reader may not see the job's team.
    gpus: the number of these GPUs, or parts of GPUs. held_gpus: how much of them it held; less than `gpus` if it shared
        some, or held parts.
    after_ms: the time until it held the first of them."""

    job: str | None
    team: str | None
    queue: str | None
    gpus: int
    held_gpus: Exact
    after_ms: int


AttemptEnd = Literal["running", "preempted", "node-down", "failed", "stopped", "ended", "unknown"]


class JobAttempt(Model):
    """A time in which pods of a job held GPUs, from its start to its stop, as far as it lies in the answer's span.

    number: 1 for the job's first attempt. None if the earlier ones are not known.
    start_ms: None if it began before the time that was read.
    end_ms: None if it still ran at the end of the span.
    pods: the number of its pods.
    nodes: at most 20 of its nodes.
    gpus: the number of GPUs, or parts of GPUs, that it held.
    held_gpus: how much of them it held; less than `gpus` if it shared some, or held parts.
    waited_ms: the wait before it, since the previous stop or, if they are younger, since the creation of its pods. None
        if unknown.
    end: `running`: it still ran at the end of the span. `preempted`: gputally's controller or a scheduler took its GPUs
        for others. `node-down`: a node could not be used any more. `failed`: a container of it ended with an error.
        `stopped`: the job did not end with it; `by` and `reason` say as much as is recorded. `ended`: the job ended
        with it. `unknown`: its node has been silent since `end_ms`, so that nobody knows whether it still runs.
    by: the program that stopped it: `gputally`, a scheduler, or another program of the cluster; "" if that is not
        recorded, and if none did.
    reason: why it stopped; "" if that is not recorded.
    decision: id of the controller's decision, and `decision_ms` its instant.
    lost_gpu_us: the time that it held since the job's last checkpoint, which its stop lost: as the controller recorded
        it, or since the last reported epoch. None if unknown, and for an attempt that was not stopped.
    checkpoint_ms: the job's last checkpoint before its end, or before the end of the span if it still ran, from which
        lost_gpu_us counts. It may be older than the attempt. None if none is known.
    next_holders: who held its GPUs next, within half an hour, the most GPUs first. It may be the job itself. None if
        unknown: of more holds than 20,000 the oldest are not read."""

    number: int | None
    start_ms: int | None
    end_ms: int | None
    pods: int
    nodes: tuple[str, ...]
    gpus: int
    held_gpus: Exact
    gpu_us: int
    waited_ms: int | None
    end: AttemptEnd
    by: str = ""
    reason: str
    decision: str | None
    decision_ms: int | None
    lost_gpu_us: int | None
    checkpoint_ms: int | None = None
    next_holders: tuple[NextHolder, ...] | None


class JobAnswer(Model):
    """One job over its whole life, or the requested span. The parts add up exactly to the job's usage and cost, and so
    do the epochs.

    attempts: the newest 50 attempts in this time, in order of time. None if this ledger does not know them: a lake
        has whole hours; ask the cluster's own accountant. They have the job's held time, unless there are
        `earlier_attempts`, which are counted only.
        earlier_attempts: None if their number is unknown, because not all holds are read.
    lost_gpu_us: the time that it held since a checkpoint and lost by a stop, over all attempts in this time. None if
        that is unknown of one of them. known_lost_gpu_us: of those of which it is known; None without attempts."""

    start_ms: int
    end_ms: int
    currency: str | None
    price_book_version: str
    job: Job
    parts: tuple[JobPart, ...]
    epochs: tuple[EpochLine, ...]
    attempts: tuple[JobAttempt, ...] | None = None
    earlier_attempts: int | None = 0
    lost_gpu_us: int | None = None
    known_lost_gpu_us: int | None = None

    @property
    def last_stop(self) -> JobAttempt | None:
        """The newest attempt that something else than the job itself ended."""
        stops = (one for one in reversed(self.attempts or ()) if one.end not in ("running", "ended", "unknown"))
        return next(stops, None)


class DoneSpan(Model):
    """The span of a finished chunk of an import."""

    epoch: str
    start_ms: int
    end_ms: int


class MeteredSpan(Model):
    """The span of the records that agents sent for a node. An import sends nothing for this span."""

    node: str
    start_ms: int
    end_ms: int


class ImportMark(Model):
    """The highest committed sequence number of one node's records in an import."""

    node: str
    epoch: str
    durable_seq: int


class ImportState(Model):
    """The progress of an import, and the spans that it leaves out. generation: how often an import from this source was
    withdrawn; it is a part of the epochs of the next one."""

    done: tuple[DoneSpan, ...]
    marks: tuple[ImportMark, ...]
    metered: tuple[MeteredSpan, ...]
    generation: int = 0


class Withdrawal(Model):
    """The answer to the withdrawal of an import. rows: intervals that count no more."""

    rows: int


class ChunkNote(Model):
    """The answer to an import that reports a chunk as finished. new: false if the chunk was recorded before."""

    new: bool
