"""Declares the protocols of the ledger (reader, writer, inventory) and the values they exchange.

Usage, cost, statements and reports are all computed from `usage`, which returns integers per group and span. A caller
whose prices change inside the span splits it at those instants. The ledger itself splits it where a policy changes.
Rows that cross an edge are divided by accountant.core.gpu_time_accounts.part, so the pieces add up exactly.

An epoch report is one instant, identified by job and epoch number. If several reports name the same epoch, the earliest
instant counts, so neither their number nor their order matters. The cost of an epoch is computed from the ledger
(accountant.billing.job_costs); bills do not depend on these reports."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

from pydantic import AfterValidator, Field, model_validator

from accountant.core.claim_overlap import Span
from accountant.core.periods import zone
from accountant.ledger.journal import Acts, Journal, JournalStatus, NewAct
from accountant.ledger.usage import MEASURES, Usage, UsageMeasure, Where
from accountant.prices.price_book import PriceBook
from accountant.wire.dimensions import DECLARED, OF_HOLDERS, OF_LABELS
from accountant.wire.policy_models import IDLE, Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, is_label, label_of
from agent.wire import Ack, Batch, PodFacts
from gputally.base.instants import parse_instant
from gputally.base.near_names import shown
from gputally.base.units import MS_PER_HOUR
from gputally.base.untrusted_text import LONGEST_PLUGIN_NAME, PLUGIN_NAME, known_name
from gputally.server.config_loading import Model

EPOCH_KEY: Final = "gputally.dev/epoch"
"""Annotation of a pod: the number of the last epoch that its job completed, `12` or `12@2026-10-01T13:45:00Z`."""
MOST_EPOCHS: Final = 10_000
"""Epochs that one job may report; further ones are refused."""
HIGHEST_EPOCH: Final = 2**31 - 1
_WORD = re.compile(r"[A-Za-z0-9._-]")
_WORDS = re.compile(r"[A-Za-z0-9._-]*")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


class JobKey(NamedTuple):
    """Identifies a job. job: `Kind/name` (accountant.inventory.pod_facts), or `Pod/name` for a pod without an owner."""

    cluster: str
    namespace: str
    job: str

    @property
    def id(self) -> str:
        """The key in the form used in URLs: `prod~vision~Job~train`. Bytes other than letters, digits, `.`, `_` and `-`
        are written as =XX."""
        kind, _, name = self.job.partition("/")
        return "~".join(_escaped(part) for part in (self.cluster, self.namespace, kind, name))

    @classmethod
    def of_pod(cls, cluster: str, namespace: str, workload: str, pod: str) -> JobKey:
        """The job of a pod. workload: the pod's `Kind/name`; "" for a pod that is its own job."""
        return cls(cluster, namespace, workload or f"Pod/{pod}")

    @classmethod
    def parse(cls, text: str) -> JobKey:
        """Parses the form that `id` returns. Raises ValueError."""
        parts = text.split("~")
        if len(parts) != len(("cluster", "namespace", "kind", "name")):
            raise ValueError(f"not the id of a job: {text[:200]!r} (write CLUSTER~NAMESPACE~KIND~NAME)")
        try:
            cluster, namespace, kind, name = (_plain(part) for part in parts)
        except UnicodeDecodeError as error:
            raise ValueError(f"not the id of a job: {text[:200]!r} (its bytes =XX are not UTF-8)") from error
        key = cls(cluster, namespace, f"{kind}/{name}" if name else kind)
        if key.id != text:
            raise ValueError(f"not the id of a job: {text[:200]!r} (it would be {key.id[:200]!r})")
        return key


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Job `key` ended epoch number `epoch` at `at_ms`. who: the caller that reported it."""

    key: JobKey
    epoch: int
    at_ms: int
    who: str


def annotated(annotations: Mapping[str, str], seen_ms: int, written_ms: int | None = None) -> tuple[int, int] | None:
    """The epoch number and its instant from a pod's annotation. Without an instant in the annotation, the instant is
    when the annotation was written or, if that is unknown, first seen.

    Returns None without the annotation, or if it cannot be parsed (a pod's owner may write anything there)."""
    number, _, instant = annotations.get(EPOCH_KEY, "").strip().partition("@")
    if not (number.isascii() and number.isdigit()) or len(number) > len(str(HIGHEST_EPOCH)):
        return None
    epoch = int(number)
    try:
        at_ms = (
            parse_instant(instant, zone("UTC"))
            if instant
            else min(seen_ms, seen_ms if written_ms is None else written_ms)
        )
    except (ValueError, OverflowError):
        return None
    return (epoch, at_ms) if epoch <= HIGHEST_EPOCH and 0 <= at_ms <= seen_ms else None


def _escaped(text: str) -> str:
    if _WORDS.fullmatch(text):
        return text
    return "".join(
        character if _WORD.fullmatch(character) else "".join(f"={byte:02X}" for byte in character.encode())
        for character in text
    )


def _plain(text: str) -> str:
    raw = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    return raw.encode("latin-1", errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Hold:
    """A pod, or another holder, held a GPU or a part of one without a break over [start_ms, end_ms).

    key: the holder's job.
    team, queue: those that the time is booked to. A hold is split where they change.
    pod, uid: the holder's name and identifier.
    part: the MIG profile of the part, "" for a whole or a shared GPU.
    device: the ledger's number of the GPU, or of the part; two parts of one profile differ.
    gpu_us: the time that it held of the GPU."""

    key: JobKey
    team: str
    queue: str
    pod: str
    uid: str
    node: str
    gpu: str
    part: str
    device: int
    start_ms: int
    end_ms: int
    gpu_us: int


@dataclass(frozen=True, slots=True)
class Holds:
    """The newest holds of a question, sorted by start.

    whole_after_ms: every hold that ended later is there; None: all are there."""

    found: tuple[Hold, ...]
    whole_after_ms: int | None = None


MOST_HOLDS: Final = 20_000
"""The newest holds of a question, at most."""


def of_holders(dimensions: Iterable[Dimension]) -> frozenset[Dimension]:
    """Those of the dimensions that depend on the holder of a GPU: also all labels of pods."""
    return frozenset(name for name in dimensions if name in OF_HOLDERS or is_label(name))


def without_holder(dimension: Dimension) -> str:
    """The value of a dimension of holders for time without a holder."""
    return IDLE if is_label(dimension) or DECLARED[dimension].idle else ""


def exported_in(dimensions: Iterable[Dimension]) -> tuple[str, ...]:
    """The names of the exported labels among the dimensions, sorted."""
    return tuple(sorted(label_of(dimension) for dimension in dimensions if is_label(dimension)))


def unexported(label: str, exported: Sequence[str]) -> str:
    """Why a label is no dimension, and what to do."""
    known = f"only {', '.join(exported)}" if exported else "none"
    return f"the label {shown(label)} is not exported ({known}): name it in exported_labels in the settings"


@dataclass(frozen=True, slots=True)
class Down:
    """A span in which a node could not be used. end_ms: None while the span lasts."""

    start_ms: int
    end_ms: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class GpuErrorCount:
    """The errors of one kind of a GPU, such as `xid 79` or `ecc uncorrected`.

    count: how many since `since_ms`; None: since before the accountant knew of any.
    last_ms: when the newest one was; None if unknown.
    counted, counted_from_ms: the agent's last count, which is contained in `count`, and its begin; None: since the
        driver was loaded."""

    kind: str
    count: int
    since_ms: int | None
    last_ms: int | None
    counted: int
    counted_from_ms: int | None


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """The errors of a GPU, the newest first. A kind that is neither in `errors` nor in `unread` is not known to have
    occurred.

    needs: actions that its faults require, each `ACTION: CAUSE` with restart_app, reset_gpu or drain_node.
    unread: `KIND: REASON` of each kind of which its agent cannot know."""

    gpu_uuid: str
    errors: tuple[GpuErrorCount, ...] = ()
    needs: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def last_ms(self) -> int | None:
        return max((error.last_ms for error in self.errors if error.last_ms is not None), default=None)


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the agent of a node last said of itself and of its GPUs.

    version: its release; "" if it does not say.
    at_ms: when the accountant stored this.
    gpus: the GPUs of the node, by uuid; None if it does not report their errors."""

    version: str
    at_ms: int
    gpus: tuple[GpuHealth, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node with its complete history of down times. deleted_ms: the instant from which its GPUs are no longer
    capacity; None: it was not deleted."""

    cluster: str
    name: str
    pool: str = ""
    region: str = ""
    zone: str = ""
    capacity_type: Literal["on-demand", "spot", "reserved", "on-prem", ""] = ""
    down: tuple[Down, ...] = ()
    deleted_ms: int | None = None
    instance_type: str = ""
    gpu_model: str = ""
    """The GPU model in the node's labels. Usage does not use it, but the model that the device reports."""
    since_ms: int | None = None
    """The instant from which the labels are valid; None: the instant at which they are first read."""
    shard: str = ""
    """The part of the cluster that its scheduler divides alone, by a label of the node; "" if the node is in none."""
    provider_id: str = ""
    """The cloud provider's name of the machine (`spec.providerID` of the Node); "" if unknown."""
    uid: str = ""
    """The uid of the Node object; "" if unknown."""
    boot_id: str = ""
    """The boot of the machine (`status.nodeInfo.bootID` of the Node, or what its agent reports); "" if unknown."""
    renewed_ms: tuple[int, ...] = ()
    """The instants, ascending, at which another machine got this name, or the machine booted again."""
    listed: bool = True
    """Whether an inventory names the node; if not, only what its agent reports is known."""
    agent: AgentFacts | None = None
    """None if no agent said anything of itself, or an inventory tells of the node."""
    labels: tuple[tuple[str, str], ...] = ()
    """The values of dimensions that have no field here, by name."""

    def with_values(self, values: Mapping[str, str]) -> NodeFacts:
        """The node with these values of dimensions (OF_LABELS)."""
        own: dict[str, Any] = {name: value for name, value in values.items() if name in self.__slots__}
        others = dict(self.labels) | {name: value for name, value in values.items() if name not in own}
        return replace(self, **own, labels=tuple(sorted((name, value) for name, value in others.items() if value)))

    def value(self, dimension: str) -> str:
        """The value of a dimension; "" if it is unknown."""
        own = getattr(self, dimension) if dimension in self.__slots__ else dict(self.labels).get(dimension, "")
        return str(own)

    @property
    def values(self) -> Mapping[str, str]:
        """The known values of its dimensions."""
        return {name: value for name in OF_LABELS if (value := self.value(name))}


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """Which team pays for a namespace if the queue does not determine the team.

    team: the team that a namespace label, an annotation or the configured map names.
    label, teams: if a pod has the label `label` with one of the values in `teams`, that team pays instead; if they are
        empty, pod labels are ignored.
    since_ms: the instant from which the facts are valid; None: the instant at which they are first read."""

    cluster: str
    name: str
    team: str = ""
    label: str = ""
    teams: tuple[str, ...] = ()
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Retirement:
    """GPUs that were removed permanently: those in `gpus` (UUIDs), or all of `node`. cluster: may be "" if the ledger
    has only one cluster."""

    cluster: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()


class RetiredDevice(Model):
    """A GPU that is no longer capacity from `end_ms` on. last_ms: the end of its newest record."""

    cluster: str
    node: str
    gpu_uuid: str
    gpu_model: str
    last_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class GpuMove:
    """GPUs that an administrator assigns to another node of their cluster.

    cluster: may be "" if the ledger has only one cluster.
    from_ms: the instant from which the GPUs belong to `node`; None: for each GPU, the end of its present owner's newest
        record."""

    node: str
    gpus: tuple[str, ...]
    cluster: str = ""
    from_ms: int | None = None


class GpuOwner(Model):
    """A GPU belongs to `node` from `from_ms` until `until_ms`, which is null for the present owner.

    recorded_ms: the instant at which the accountant learned this.
    confirmed_by: the administrator who confirmed the move; "" if the accountant derived it from records."""

    node: str
    from_ms: int
    until_ms: int | None
    recorded_ms: int
    confirmed_by: str


class GpuClaim(Model):
    """A node other than the owner reported the GPU, and its records were quarantined.

    records: the number of these records.
    newest_ms: the instant at which the newest of them arrived."""

    node: str
    records: int
    newest_ms: int


class GpuOwnership(Model):
    """The nodes that a GPU belonged to, oldest first. The first owner also owns all time before its first record.

    last_ms: the end of the present owner's newest record, or the start of its ownership if it has no record.
    claims: taken from the newest 10,000 quarantined records of GPUs that belong to another node."""

    cluster: str
    gpu_uuid: str
    gpu_model: str
    last_ms: int
    owners: tuple[GpuOwner, ...]
    claims: tuple[GpuClaim, ...]

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that ever owned or claimed the GPU."""
        return frozenset({owner.node for owner in self.owners} | {claim.node for claim in self.claims})


MisdatedKind = Literal["records", "policies", "pods", "decisions", "registers", "acts"]


class ImportSpan(Model):
    """A span of the import from one source into one cluster, in whole hours."""

    cluster: Annotated[str, AfterValidator(known_name)] = Field(min_length=1)
    source: str = Field(pattern=PLUGIN_NAME, max_length=LONGEST_PLUGIN_NAME)
    start_ms: int = Field(ge=0, le=2**53, multiple_of=MS_PER_HOUR)
    end_ms: int = Field(ge=0, le=2**53, multiple_of=MS_PER_HOUR)

    @model_validator(mode="after")
    def _span(self) -> ImportSpan:
        if self.start_ms >= self.end_ms:
            raise ValueError("the span ends at or before its start")
        return self


class MisdatedRecords(Model):
    """Stored items of one kind whose dates lie in the future.

    count: the number of these items.
    first_ms, last_ms: the earliest and the latest of their dates.
    named: the names of some of them.
    healing: what a correction does to them."""

    kind: MisdatedKind
    count: int
    first_ms: int
    last_ms: int
    named: tuple[str, ...]
    healing: str


class ClockReport(Model):
    """The state of the clock check.

    doubt: why no item is given a timestamp at present, "" if the clock is trusted.
    wall_ms: the machine's clock.
    told_ms: the time that the accountant uses.
    senders: agents that recently reported their time.
    agreeing: how many of them agree with the machine's clock."""

    doubt: str
    wall_ms: int
    told_ms: int
    senders: int
    agreeing: int
    misdated: tuple[MisdatedRecords, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """One reading of an inventory. A later reading replaces the facts it names and leaves the others unchanged.

    Changed facts of a node or namespace are valid from the reading on; earlier usage keeps the labels it had. A fact
    that was unknown before is applied to all time that is not in a closed month."""

    nodes: tuple[NodeFacts, ...] = ()
    namespaces: tuple[NamespaceFacts, ...] = ()
    pods: tuple[tuple[str, PodFacts], ...] = field(default=())
    """Pairs (cluster, facts) of pods that the agents did not see, or saw late."""
    epochs: tuple[EpochReport, ...] = ()
    """Epochs reported in annotations of pods."""


class Inventory(Protocol):
    """Source of node, namespace and pod facts: YAML files, the simulator, Kubernetes."""

    def read(self, now_ms: int) -> Facts:
        """Reads all current facts; of pods, at least those not confirmed by `taken` yet. Raises
        accountant.core.errors.InventoryError with the place and the reason."""
        ...

    def taken(self) -> None:
        """Confirms that the last reading is stored in the ledger."""
        ...


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of one batch after the commit: the acknowledgement, and its numbers of intervals by outcome.

    over_quota: the number of intervals and facts that were set aside because the sender had used up a quota, by
        quota."""

    ack: Ack
    stored: int
    duplicates: int
    quarantined: int
    over_quota: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Imports:
    """State of a cluster's imports.

    marks: the highest contiguous number committed, by node and epoch of an import.
    metered: the span in which agents booked records, by node."""

    marks: Mapping[str, Mapping[str, int]]
    metered: Mapping[str, Span]


class Status(JournalStatus, Protocol):
    """What is known of a ledger as of one commit: a value, which stays as it is while the ledger moves on.

    An accountant's ledger has it in memory, so it is taken for each answer."""

    @property
    def extent(self) -> Span:
        """The span from the first booked start to the newest booked end; (0, 0) if nothing is booked."""
        ...

    @property
    def newest_ms(self) -> int:
        """The end of the newest booked record; 0 if nothing is booked."""
        return self.extent[1]

    @property
    def newest_by_cluster(self) -> Mapping[str, int]:
        """The end of the newest booked record of each cluster that agents report from and that has a GPU in
        service."""
        ...

    @property
    def newest_by_node(self) -> Mapping[tuple[str, str], int]:
        """The end of the newest record of each node, by (cluster, node); nodes of which it is unknown are missing."""
        ...

    @property
    def agents(self) -> Mapping[tuple[str, str], AgentFacts]:
        """What the agent of each node last said of itself, by (cluster, node); nodes of which it is unknown are
        missing."""
        ...

    @property
    def clusters(self) -> Collection[str]:
        """The clusters that have booked records."""
        ...

    @property
    def teams(self) -> frozenset[str]:
        """Every team that a queue or a namespace names at present."""
        ...

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node as last read, by cluster and name."""
        ...

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        """The policies in force in the span, oldest first. The mapping of the first policy also applies before
        it."""
        ...

    def watermark(
        self, at_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        """The watermark of all windows that end at `at_ms`: the latest instant up to which at least the share
        `min_coverage` of the GPUs in service is metered; None if no GPU is in service."""
        ...

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow | None:
        """The window of `Moment.window`, if all that it adds up is in memory; None: ask a moment.

        It saves opening one, which takes as long as a window whose sums are in memory. Raises
        accountant.core.errors.UnsupportedQuestion."""
        ...

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        """The number of GPUs that each node had at some time in the span, by (cluster, node)."""
        ...

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
        """The GPU-hours of capacity in the span, of all GPUs or of those of one cluster; of a lake at least that many.
        The limits on the size of questions use it."""
        ...

    def recent_span(self, until_ms: int, length_ms: int) -> Span:
        """The newest span of about this length that can be queried and ends at `until_ms` or before."""
        ...

    def mark(self, start_ms: int, end_ms: int) -> Hashable:
        """A version of the span's content: while it is equal, every question about the span has the same answer."""
        ...


def policy_at(status: Status, at_ms: int) -> PolicyVersion | None:
    """The policy in force at an instant; None without a policy."""
    return next(reversed(status.policies(at_ms, at_ms + 1)), None)


@dataclass(frozen=True, slots=True)
class QueuedPod:
    """A pod, with the team and the queue that it had when it was created."""

    cluster: str
    team: str
    queue: str
    facts: PodFacts

    @property
    def key(self) -> JobKey:
        """The job of the pod; a pod without a workload is its own job."""
        return JobKey.of_pod(self.cluster, self.facts.namespace, self.facts.workload, self.facts.name)

    def is_named(self, text: str) -> bool:
        """Whether the pod's CLUSTER/NAMESPACE/NAME has the text, in any case, and that of its job has not."""
        text, key = text.lower(), self.key
        begin = f"{key.cluster}/{key.namespace}"
        return text in f"{begin}/{self.facts.name}".lower() and text not in f"{begin}/{key.job}".lower()


class JobPods(NamedTuple):
    """How many pods a job has, how many of them have ended, and how many are placed or started and have not ended.

    queued_ms: the longest time in its queue of a pod that no longer waits; None if none is known.
    waiting_since_ms: the creation of the pod that has waited longest and still waits; None without one.
    created_ms: the creation of the newest pod; None if none is known.
    failed_ms: the last end of a pod of which a container ended with an error; None without one."""

    pods: int
    ended: int
    placed: int
    queued_ms: int | None
    waiting_since_ms: int | None
    created_ms: int | None
    failed_ms: int | None

    @property
    def has_failed(self) -> bool:
        """Whether all pods have ended, and one with an error, after which no other was created."""
        failed_ms, created_ms = self.failed_ms, self.created_ms
        return self.ended == self.pods and failed_ms is not None and (created_ms is None or failed_ms > created_ms)

    def waited_ms(self, now_ms: int) -> int | None:
        """The longest wait of a pod in its queue; None if none is known (accountant.billing.queue_waits.pod_wait)."""
        waiting = None if self.waiting_since_ms is None else max(0, now_ms - self.waiting_since_ms)
        return max((wait for wait in (self.queued_ms, waiting) if wait is not None), default=None)


MOST_QUARANTINED: Final = 10_000
"""Records that were not booked are counted, listed and looked through for a month up to this number, the newest."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The sum of all absolute differences in a ledger (0 if it balances), and a description of each difference.

    quarantined: the number of records that were not booked, of all time, up to MOST_QUARANTINED."""

    total_us: int
    lines: tuple[str, ...]
    quarantined: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Sequence numbers of an outbox that will never arrive: skipped by the agent, or lost before they were sent."""

    cluster: str
    node: str
    epoch: str
    first_seq: int
    last_seq: int
    reason: str


class Moment(Acts, Protocol):
    """Everything as of one commit; nothing else answers questions that read a table. Spans are [start_ms, end_ms) in
    UTC milliseconds. Answers are sorted by key and deterministic. What a ledger does not keep it never answers with
    nothing: each question may raise accountant.core.errors.UnsupportedQuestion, which says whom to ask."""

    def status(self) -> Status:
        """What is known of this commit without reading a table."""
        ...

    def usage(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Where | None = None,
        timezone: str = "UTC",
        measures: Collection[UsageMeasure] = MEASURES,
    ) -> Usage:
        """The accounts and measures per group, for each span between two neighbouring `edges`, which ascend.

        Time without a holder has team and queue IDLE; held time without an assigned team or queue has UNASSIGNED; any
        other missing name is "". An exported label is as a queue: IDLE, and UNASSIGNED where it is not set; "" where
        the pod's labels are unknown, and OTHER_VALUE for values that are too many. `day` and `hour` are local to
        `timezone` (2026-10-01, 2026-10-01T13; see `periods.hour_name`). Measures that are not asked for are not
        computed. Raises
        accountant.core.errors.UnsupportedQuestion for measures and labels that the ledger does not keep."""
        ...

    def decisions(
        self,
        start_ms: int,
        end_ms: int,
        limit: int = 1000,
        *,
        kind: str | None = None,
        subject: str | None = None,
        gang: Collection[str] | None = None,
        cluster: str | None = None,
        before: str | None = None,
    ) -> list[Decision]:
        """Returns decisions, newest first, and those of one millisecond by descending key.

        kind, subject: only those with this value.
        gang: only decisions whose subject begins with `<kind>/<namespace/name>` for one of these `namespace/name` of
            pods or workloads.
        cluster: only those of this cluster's controller, or of a controller that names no cluster.
        before: of the last millisecond before `end_ms`, only those with a lower key (`Decision.key`). With the last
            decision of an answer, its key and the end of its millisecond give the decisions that follow."""
        ...

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow:
        """One usage window. The rows that it needs are readable, whatever span the moment was opened for.

        book: the prices; needed for the measure `cost` only.
        shard, cluster: count only the nodes of this scheduling shard and this cluster; None: all.

        Raises accountant.core.errors.UnsupportedQuestion."""
        ...

    def holds(
        self,
        spans: Sequence[Span],
        *,
        of: Collection[JobKey] | None = None,
        gpus: Collection[tuple[str, str]] | None = None,
    ) -> Holds:
        """Who held which GPUs in these spans, from when to when, the MOST_HOLDS newest.

        of: only holds of these jobs.
        gpus: only holds of these GPUs, as pairs of cluster and UUID."""
        ...

    def pods(
        self,
        start_ms: int,
        end_ms: int,
        *,
        of: Collection[JobKey] | None = None,
        waiting: bool = False,
        placed: bool = False,
        ordered: bool = True,
        named: str = "",
    ) -> Iterator[QueuedPod]:
        """Yields the pods that existed in the span. Ask nothing else of the moment before the last one.

        of: only pods of these jobs; None: all.
        named: only those of which `QueuedPod.is_named` is true; "": all.
        waiting: only pods without a known placement, start or end.
        placed: include pods whose creation is unknown, from their placement or start on. Otherwise they are left out.
        ordered: by cluster and uid; otherwise in any order, and never all in memory."""
        ...

    def pods_by_job(self, start_ms: int, end_ms: int) -> Mapping[JobKey, JobPods]:
        """The numbers and waits of the pods that existed in the span, by job."""
        ...

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, Span]:
        """From when until when each of these jobs held GPUs, over all time. Jobs that never held one are missing."""
        ...

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        """The jobs (`Kind/name`) of a namespace's pods."""
        ...

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        """The job of a pod; None if the pod is unknown."""
        ...

    def epochs(self, span: Span | None = None, *, of: Collection[JobKey] | None = None) -> list[EpochReport]:
        """The epochs that ended in the span, by job and instant.

        span: None: all time.
        of: only epochs of these jobs; None: all."""
        ...

    def epoch_counts(self, keys: Collection[JobKey]) -> Mapping[JobKey, int]:
        """The number of epochs of each of these jobs, without jobs that reported none."""
        ...

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        """Which nodes each GPU belonged to, sorted by cluster and UUID."""
        ...

    def quarantined(self, limit: int = 1000) -> list[Quarantined]:
        """The records that were not booked, newest first."""
        ...

    def holes(self, limit: int = 1000) -> list[Hole]:
        """The sequence numbers that will never arrive, by outbox, newest first."""
        ...

    def misdated(self, now_ms: int) -> tuple[MisdatedRecords, ...]:
        """The items dated clearly after `now_ms`, by kind."""
        ...

    def imbalance(self, start_ms: int, end_ms: int) -> Imbalance:
        """What does not add up in the span, and how much is not booked at all. The moment must have been opened for
        the span."""
        ...


class ReadableLedger(Protocol):
    """Opens moments, which answer: a ledger of an accountant, or one that is published in a lake."""

    def status(self) -> Status:
        """The status of the newest commit."""
        ...

    def moment(self, start_ms: int = 0, end_ms: int = 0) -> AbstractContextManager[Moment]:
        """Opens the newest commit.

        start_ms, end_ms: a span whose rows must be readable, because questions about it may begin or end inside an
        hour."""
        ...


class Ledger(ReadableLedger, Journal, Protocol):
    """Writes, and keeps itself."""

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        """Books batches in one transaction and returns one result per batch, in the same order.

        If records before first_seq are missing, the result is accountant.core.errors.SequenceGap with the Ack to rewind
        to. Invalid intervals are quarantined, not refused. Raises accountant.core.errors.LedgerUnavailable if nothing
        was stored."""
        ...

    def imports(self, cluster: str) -> Imports:
        """Returns how far the imports of a cluster have come, and the spans that agents metered themselves."""
        ...

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0, act: NewAct | None = None) -> None:
        """Stores an inventory reading.

        closed_ms: the labels of time before this instant do not change.
        act: an act of the caller, recorded in the same transaction; None: no act."""
        ...

    def retire(
        self, retirement: Retirement, at_ms: int, now_ms: int, who: str, reason: str, closed_ms: int = 0
    ) -> tuple[RetiredDevice, ...]:
        """Ends the capacity of these GPUs at `at_ms`, until they report again, and records an act of `who`. Returns the
        GPUs, sorted by node and UUID. closed_ms: capacity before this instant does not change. Raises
        accountant.core.errors.CannotRetire."""
        ...

    def withdraw_import(self, span: ImportSpan, now_ms: int, who: str, reason: str) -> int:
        """Withdraws what an import booked in the span, records an act of `who`, and returns the number of rows. Nothing
        of it counts afterwards, and the span can be imported again under a new epoch."""
        ...

    def move_gpus(self, move: GpuMove, now_ms: int, who: str, reason: str) -> tuple[GpuOwnership, ...]:
        """Assigns the GPUs to another node, all or none, and records an act of `who`. Returns the owners of these GPUs.
        Raises accountant.core.errors.CannotMove."""
        ...

    def put_policy(self, policy: Policy, now_ms: int, who: str = "", reason: str = "") -> PolicyVersion:
        """Puts a policy in force. Idempotent: if it is already in force, its version is returned unchanged. A new one
        is recorded as an act of `who` with the reason (accountant.ledger.journal); "" records no act."""
        ...

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        """Stores epoch reports. Idempotent by job and epoch (the earliest instant counts). Returns how many were new or
        earlier than the stored report."""
        ...

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        """Stores decisions. Idempotent by cluster, id and instant; returns how many were new."""
        ...

    def checkpoint(self) -> None: ...

    def close(self) -> None: ...


MOST_VIEWS: Final = 50
"""Views that one owner may save."""
MOST_VIEWS_OF_ALL: Final = 10_000


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of the page Explore that its owner saved under a name. address: the path and query of the page."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that was not booked, with the reason. content: the record as JSON."""

    cluster: str
    node: str
    epoch: str
    seq: int
    received_ms: int
    reason: str
    detail: str
    content: str
