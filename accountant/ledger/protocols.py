"""Declares what the rest may ask of the ledger (reader, writer, journal, maintenance), and its values.

The one primitive behind usage, cost, statements and reports is `usage`: integers per group over a
span. A caller that needs prices or policies that change inside the span cuts it at those instants (`cuts`) and asks
once per piece, inside which everything is constant. Parts of an interval are taken by `gputally.base.units.prorate`, so
pieces add up exactly.

A report is one instant, named by job and epoch; several about the same epoch are one, of which the earliest
instant counts, so it does not matter how often or in what order they come. What an epoch cost is worked out from
the ledger (accountant.billing.job_costs); nothing that is billed depends on a report.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from accountant.core.claim_overlap import Span
from accountant.core.periods import parse_instant, zone
from accountant.ledger.journal import NewAct
from accountant.ledger.usage_columns import UsageColumns
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.usage_models import Dimension, UsageLine
from agent.wire import Ack, Batch, PodFacts
from gputally.server.config_models import Model

EPOCH_KEY: Final = "gputally.dev/epoch"
"""Annotation of a pod: the number of the last epoch its job ended, `12` or `12@2026-10-01T13:45:00Z`."""
MOST_EPOCHS: Final = 10_000
"""Epochs that one job may report; later ones are refused."""
HIGHEST_EPOCH: Final = 2**31 - 1
_WORD = re.compile(r"[A-Za-z0-9._-]")
_WORDS = re.compile(r"[A-Za-z0-9._-]*")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


class JobKey(NamedTuple):
    """A job by its names. job: `Kind/name` (accountant.inventory.pod_facts), `Pod/name` for a pod that stands alone."""

    cluster: str
    namespace: str
    job: str

    @property
    def id(self) -> str:
        """The key as it stands in an address: `prod~vision~Job~train`; other bytes than letters, digits and ._- as
        =XX."""
        kind, _, name = self.job.partition("/")
        return "~".join(_escaped(part) for part in (self.cluster, self.namespace, kind, name))

    @classmethod
    def parse(cls, text: str) -> JobKey:
        """The key that has this id. Raises ValueError."""
        parts = text.split("~")
        if len(parts) != len(("cluster", "namespace", "kind", "name")):
            raise ValueError(f"not the id of a job: {text[:200]!r} (write CLUSTER~NAMESPACE~KIND~NAME)")
        try:
            cluster, namespace, kind, name = (_plain(part) for part in parts)
        except UnicodeDecodeError as error:
            raise ValueError(f"not the id of a job: {text[:200]!r}") from error
        key = cls(cluster, namespace, f"{kind}/{name}" if name else kind)
        if key.id != text:
            raise ValueError(f"not the id of a job: {text[:200]!r} (it would be {key.id[:200]!r})")
        return key


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Job `key` ended epoch number `epoch` at `at_ms`. who: reported it."""

    key: JobKey
    epoch: int
    at_ms: int
    who: str


def annotated(annotations: Mapping[str, str], seen_ms: int, written_ms: int | None = None) -> tuple[int, int] | None:
    """Epoch and instant that a pod's annotation tells; without one of its own, the instant it was written at, or, where
    that is unknown, seen at.

    None without the annotation, or where it says neither (a pod's owner may write anything there)."""
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


OF_HOLDERS: Final = frozenset[Dimension](("team", "queue", "namespace", "job", "pod", "container", "user"))
"""Dimensions of who holds a GPU; time without a holder has none of them."""


@dataclass(frozen=True, slots=True)
class Down:
    """A span in which a node could not be used: end_ms None = still."""

    start_ms: int
    end_ms: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node with its whole known history of being unusable. deleted_ms: its GPUs stop being capacity."""

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
    """The model in the node's labels; usage goes by what the device says of itself."""
    since_ms: int | None = None
    """From when on its labels hold; None: from when they are first read."""
    shard: str = ""
    """The scheduling shard that the node belongs to (KAI's label kai.scheduler/node-pool); "": of none."""
    provider_id: str = ""
    """The machine as its cloud names it (`spec.providerID` of the Node); "": not known."""


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """Who pays for a namespace where the queue does not say.

    team: from a namespace label, annotation or map. label, teams: a pod whose label `label` has one of
    these values is that team's instead; without them pod labels count for nothing. since_ms: from when
    on this holds; None: from when it is first read."""

    cluster: str
    name: str
    team: str = ""
    label: str = ""
    teams: tuple[str, ...] = ()
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Retirement:
    """GPUs that were taken out for good: these, or all of a node. cluster "": the only one there is."""

    cluster: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()


class RetiredDevice(Model):
    """A GPU that is no capacity from `end_ms` on. last_ms: the end of its newest record."""

    cluster: str
    node: str
    gpu_uuid: str
    gpu_model: str
    last_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class GpuMove:
    """GPUs that an admin gives to another node of their cluster. cluster "": the only one there is. from_ms: from when
    on; None: from the newest record of each one's present owner on."""

    node: str
    gpus: tuple[str, ...]
    cluster: str = ""
    from_ms: int | None = None


class GpuOwner(Model):
    """A GPU belongs to `node` from `from_ms` until `until_ms`; null: it is the present owner. recorded_ms: when the
    accountant learned it. confirmed_by: the admin who moved it there; "" where records showed it."""

    node: str
    from_ms: int
    until_ms: int | None
    recorded_ms: int
    confirmed_by: str


class GpuClaim(Model):
    """Another node reported the GPU, and its records were quarantined. records: how many; newest_ms: when the newest
    one arrived."""

    node: str
    records: int
    newest_ms: int


class GpuOwnership(Model):
    """Which node a GPU belonged to when, oldest first. The first owner also has all time before its first record.
    last_ms: the end of the present owner's newest record, or the start of its ownership where it has none. claims: of
    the newest 10,000 quarantined records of foreign GPUs."""

    cluster: str
    gpu_uuid: str
    gpu_model: str
    last_ms: int
    owners: tuple[GpuOwner, ...]
    claims: tuple[GpuClaim, ...]

    @property
    def nodes(self) -> frozenset[str]:
        """That ever had it or claim it."""
        return frozenset({owner.node for owner in self.owners} | {claim.node for claim in self.claims})


MisdatedKind = Literal["records", "policies", "pods", "decisions", "registers", "acts"]


class MisdatedRecords(Model):
    """Things of one kind that are dated later than now. count: how many; first_ms, last_ms: their dates; named: some of
    them; healing: what becomes of them."""

    kind: MisdatedKind
    count: int
    first_ms: int
    last_ms: int
    named: tuple[str, ...]
    healing: str


class ClockReport(Model):
    """doubt: why nothing is dated now; "" where all is well. wall_ms: the clock of the machine; told_ms: what is taken
    for the time. senders: agents that told the time lately; agreeing: with the clock of the machine."""

    doubt: str
    wall_ms: int
    told_ms: int
    senders: int
    agreeing: int
    misdated: tuple[MisdatedRecords, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """One reading of an inventory. Later readings replace what they name and leave the rest.

    What a node or a namespace is changes from the reading on; before it, usage keeps the labels it had.
    Only what was unknown until then is known for all open time."""

    nodes: tuple[NodeFacts, ...] = ()
    namespaces: tuple[NamespaceFacts, ...] = ()
    pods: tuple[tuple[str, PodFacts], ...] = field(default=())
    """(cluster, facts): what the agents could not see, or saw late."""
    epochs: tuple[EpochReport, ...] = ()
    """What pods say of their jobs' progress."""


class Inventory(Protocol):
    """Where node, namespace and pod facts come from: YAML, the simulator, Kubernetes."""

    def read(self, now_ms: int) -> Facts:
        """Everything known now; of pods, at least what was not `taken` yet. Raises
        accountant.core.errors.InventoryError with the place and the reason."""
        ...

    def taken(self) -> None:
        """The last reading is in the ledger."""
        ...


@dataclass(frozen=True, slots=True)
class IdlePhases:
    """How much of a group's `allocated_idle` was start-up: bound but nothing running, or waiting for its gang."""

    key: dict[str, str]
    starting_us: int
    gang_waiting_us: int


@dataclass(frozen=True, slots=True)
class LentTime:
    """What an account of a group gains (or, below zero, loses) when borrowed time is billed to who used it."""

    key: dict[str, str]
    account: str
    gpu_us: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one batch, after the commit."""

    ack: Ack
    stored: int
    duplicates: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Imports:
    """marks: by node and epoch of an import, the highest contiguous number committed. metered: by node, the span in
    which agents booked records."""

    marks: Mapping[str, Mapping[str, int]]
    metered: Mapping[str, Span]


class Questions(Protocol):
    """Spans are [start_ms, end_ms), UTC milliseconds. Answers are sorted by key and deterministic."""

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        """Accounts per group. Time without a holder has team and queue IDLE; held time that nothing assigns
        has UNASSIGNED; any other missing name is "". `day` and `hour` are local to `timezone`
        (2026-10-01, 2026-10-01T13)."""
        ...

    def usage_columns(
        self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC"
    ) -> list[UsageColumns]:
        """What `usage` and `idle_phases` say by each of the cuts and PRICED_BY, in each stretch between two
        neighbouring edges, which ascend."""
        ...

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        """The part of `allocated_idle` that was start-up, per group that has some; the rest is `running_idle`."""
        ...

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[LentTime]:
        """Changes of accounts that add up to 0, if busy time beyond a holder's share is billed to it."""
        ...

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        """Those in force in the span, oldest first. Before the first policy its mapping is used."""
        ...

    def coverage(self, start_ms: int, end_ms: int) -> float | None:
        """Metered share of the capacity without `down`, 0..1; None where there is no capacity."""
        ...

    def extent(self) -> Span:
        """From the first booked start to the newest booked end; (0, 0) where nothing is booked."""
        ...

    def newest_by_cluster(self) -> Mapping[str, int]:
        """End of the newest booked record of each cluster that agents report from and that has a GPU in service."""
        ...


class Ledger(Questions, Protocol):
    """What is asked, and what is written. To ask several questions about the same instant, ask a snapshot."""

    def append(self, batches: Sequence[Batch], now_ms: int) -> list[Receipt | Exception]:
        """Book batches in one transaction, one result per batch in the same order.

        A batch the protocol refuses (a hole before first_seq) gives accountant.core.errors.SequenceGap with
        the Ack to rewind to; bad intervals are quarantined, not refused. Raises
        accountant.core.errors.LedgerUnavailable when nothing was stored."""
        ...

    def imports(self, cluster: str) -> Imports:
        """How far the imports of a cluster came, and what they must leave alone."""
        ...

    def observe(self, facts: Facts, now_ms: int, closed_ms: int = 0, act: NewAct | None = None) -> None:
        """Take in a reading. closed_ms: no label of time before it changes any more. act: of the caller, recorded in
        the same transaction."""
        ...

    def retire(
        self, asked: Retirement, at_ms: int, now_ms: int, who: str, reason: str, closed_ms: int = 0
    ) -> tuple[RetiredDevice, ...]:
        """From `at_ms` on these GPUs are no capacity, until they report again; by node and GPU. An act of `who`,
        recorded with it. closed_ms: what was capacity before it stays so. Raises
        accountant.core.errors.CannotRetire."""
        ...

    def gpu_owners(self) -> tuple[GpuOwnership, ...]:
        """The register of which node each GPU belonged to, by cluster and UUID."""
        ...

    def move_gpus(self, asked: GpuMove, now_ms: int, who: str, reason: str) -> tuple[GpuOwnership, ...]:
        """The GPUs belong to another node from then on, all or none; an act of `who`, recorded with it. Raises
        accountant.core.errors.CannotMove."""
        ...

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node as last read, by cluster and name."""
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
        """book: prices of measure cost. shard, cluster: of its nodes alone. Raises
        accountant.core.errors.UnsupportedQuestion."""
        ...

    def watermark(
        self, at_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        """That of every window that ends at `at_ms`: the latest instant up to which so much of what is in service is
        metered; None where nothing is."""
        ...

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
        """How long all GPUs, or those of one cluster, were capacity in the span: what a question about it adds up.
        Costs next to nothing."""
        ...

    def clusters(self) -> Collection[str]:
        """Those that anything was booked of."""
        ...

    def put_policy(self, policy: Policy, now_ms: int, who: str = "") -> PolicyVersion:
        """Idempotent: the version already in force is answered unchanged. A new one is an act of `who`,
        recorded with it (accountant.ledger.journal); "": without a caller, and not recorded."""
        ...

    def report_epochs(self, reports: Sequence[EpochReport], now_ms: int) -> int:
        """Idempotent by job and epoch, the earliest instant counts; how many said something new."""
        ...

    def job_of(self, cluster: str, uid: str) -> JobKey | None:
        """Return the job of a pod, None if the pod is unknown."""
        ...

    def record_decisions(self, decisions: Sequence[Decision], now_ms: int) -> int:
        """Idempotent by cluster and id; returns how many were new."""
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
    ) -> list[Decision]:
        """Newest first. kind, subject: only those of it. gang: only of subjects `<kind>/<one of
        them>…`: of pods and workloads whose namespace/name begins so. cluster: of its controller, or of one that
        names none."""
        ...

    def checkpoint(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that was not booked, and why. content: the record as JSON."""

    cluster: str
    node: str
    epoch: str
    seq: int
    received_ms: int
    reason: str
    detail: str
    content: str
