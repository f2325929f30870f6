"""Defines the data that readers and the writer have without reading a table: one immutable `State` per commit.

`Changes` records which spans of time each commit changed, so that cached answers about other spans stay valid. Its
method `mark` returns a value for a span, which is stored with a cached answer about the span. As long as `mark` returns
an equal value, no commit has changed the answer. The value for a past span stays the same while later records arrive.

`DeviceKinds` groups devices that a query does not distinguish, so that DuckDB returns few sums. There is one kind for
all devices, one per group with equal values of the queried dimensions (model, pool, node …), or one per device. The
result by job and model then has as many rows as jobs and models, not jobs times GPUs. A GPU that belonged to several
groups, because it moved or was renamed, has a kind of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from zoneinfo import ZoneInfo

import pyarrow as pa

from accountant.core.claim_overlap import Span
from accountant.ledger.team_assignment import Assignment
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import GpuCensus, GpuLifetimes, MeteredGpu, Tenure
from accountant.storage.span_splitting import EVERY_GPU
from accountant.storage.write import record_columns, rollups
from accountant.storage.write.inventory_and_journal_tables import last_act, last_decision, read_namespaces, read_nodes
from accountant.storage.write.name_ids import NO_DEVICE, DeviceName, Devices
from accountant.storage.write.record_columns import Stream
from accountant.storage.write.rollups import DailySums, row_range
from accountant.wire.dimensions import OF_LABELS, DependsOn, depends_on
from accountant.wire.policy_models import Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.units import MS_PER_DAY

_OF_EACH: frozenset[DependsOn] = frozenset({"gpu", "part"})
Shown = tuple[int, DeviceName]
"""A GPU and a device that represent a group: their values of the queried dimensions are those of all its members."""


@dataclass(frozen=True)
class DeviceKinds:
    """How a query groups devices: all as one kind with the number 0, in several numbered kinds, or each device as a
    kind with the number of its id (`by_device`).

    kind_of: the kind of each device; None for one kind, and for a kind per device.
    shown: the representative of each kind.
    member: the member of each kind. A member is one GPU, given by its id, or a group of equal GPUs, given by another
        number.
    of_gpu: the member of each GPU.
    shared: the representative of each member that is a group."""

    by_device: bool
    kind_of: Mapping[int, int] | None
    shown: Mapping[int, Shown]
    member: Mapping[int, int]
    of_gpu: Mapping[int, int]
    shared: Mapping[int, Shown]

    @cached_property
    def table(self) -> pa.Table | None:
        """`kind_of` as an Arrow table. It is made once, because it has a row per device."""
        if self.kind_of is None:
            return None
        return record_columns.column_table(record_columns.KIND, self.kind_of.items())

    def kind(self, device: int) -> int:
        """Return the kind of a device."""
        return self.kind_of[device] if self.kind_of is not None else device * self.by_device


ONE_KIND = DeviceKinds(False, None, {}, {}, {}, {})
"""For sums that do not distinguish devices."""


class DeviceKindsCache:
    """Caches `device_kinds` from one commit to the next, until a device, node or GPU is new or changed. Thread-safe."""

    def __init__(self) -> None:
        self._cached: dict[frozenset[Dimension], tuple[tuple[object, ...], int, DeviceKinds]] = {}

    def read(
        self, fleet: GpuLifetimes, devices: Mapping[int, DeviceName], dimensions: frozenset[Dimension]
    ) -> DeviceKinds:
        """Return `device_kinds`, from the cache if possible."""
        sources = (fleet.gpus, fleet.nodes, fleet.placed, devices)
        cached = self._cached.get(dimensions)
        if cached is not None:
            cached_sources, gpus, kinds = cached
            # Identity, not equality: every change creates new objects, and comparing the content would take as long as
            # computing it.
            if gpus == len(fleet.tenures) and all(a is b for a, b in zip(cached_sources, sources, strict=True)):
                return kinds
        kinds = device_kinds(fleet, devices, dimensions)
        self._cached[dimensions] = (sources, len(fleet.tenures), kinds)
        return kinds


def device_kinds(
    fleet: GpuLifetimes, devices: Mapping[int, DeviceName], dimensions: Collection[Dimension]
) -> DeviceKinds:
    """Return the kinds of devices for a query with these dimensions of devices. devices: those that the query reads, by
    id; they are not used if there are no dimensions."""
    if not dimensions:
        every = {0: (EVERY_GPU, NO_DEVICE)}
        return DeviceKinds(False, None, every, {0: EVERY_GPU}, dict.fromkeys(fleet.tenures, EVERY_GPU), every)
    if _OF_EACH & depends_on(dimensions):
        shown = {number: (name.gpu, name) for number, name in devices.items()}
        return DeviceKinds(
            True, None, shown, {number: name.gpu for number, name in devices.items()},
            {gpu: gpu for gpu in fleet.tenures}, {},
        )  # fmt: skip
    return _grouped_kinds(fleet, devices, dimensions)


def _grouped_kinds(
    fleet: GpuLifetimes, devices: Mapping[int, DeviceName], dimensions: Collection[Dimension]
) -> DeviceKinds:
    of_model = "model" in depends_on(dimensions)
    values_of_node: dict[tuple[str, str], Hashable] = {}
    values_of: dict[int, Hashable] = {}
    values_of_gpu: dict[int, set[Hashable]] = defaultdict(set)
    for number, name in devices.items():
        key = (fleet.gpus[name.gpu].cluster, name.node)
        if key not in values_of_node:
            values_of_node[key] = _node_values(fleet, key, dimensions)
        values_of[number] = (values_of_node[key], name.gpu_model if of_model else "")
        values_of_gpu[name.gpu].add(values_of[number])
    kinds: dict[int, int] = {}
    numbers: dict[Hashable, int] = {}
    shown: dict[int, Shown] = {}
    member: dict[int, int] = {}
    shared: dict[int, Shown] = {}
    for number, name in devices.items():
        separate = len(values_of_gpu[name.gpu]) > 1
        kind = kinds[number] = numbers.setdefault(
            ("separate", number) if separate else values_of[number], len(numbers) + 1
        )
        shown.setdefault(kind, (name.gpu, name))
        # Negative, so that numbers of kinds and of GPUs do not collide.
        member[kind] = name.gpu if separate else -kind
        if not separate:
            shared[-kind] = shown[kind]
    members = {name.gpu: member[kinds[number]] for number, name in devices.items()}
    return DeviceKinds(False, kinds, shown, member, members, shared)


def _node_values(fleet: GpuLifetimes, key: tuple[str, str], dimensions: Collection[Dimension]) -> Hashable:
    """Return the values of a node that the query uses. If the query uses labels, and those of the node changed, the
    value is its name, so that it equals no other node."""
    of, of_labels = depends_on(dimensions), OF_LABELS & set(dimensions)
    if "node" in of or (of_labels and key in fleet.placed):
        return key
    facts = fleet.nodes.get(key)
    labels = tuple("" if facts is None else facts.value(name) for name in sorted(of_labels))
    return (key[0] if "cluster" in of else "", labels)


Mark = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """The commits that last changed each day.

    days: the commit that last changed rows of a day (UTC day number).
    onward: by day, the commit that last changed all time from that day on."""

    days: Mapping[int, int] = field(default_factory=dict)
    onward: Mapping[int, int] = field(default_factory=dict)

    def with_rows(self, instants: Iterable[int], version: int) -> Changes:
        """Return the changes after a commit that changed rows at these instants."""
        touched = {at // MS_PER_DAY for at in instants}
        return Changes({**self.days, **dict.fromkeys(touched, version)}, self.onward) if touched else self

    def since(self, at_ms: int, version: int) -> Changes:
        """Return the changes after a commit that may have changed anything from this instant on (0: all time)."""
        day = at_ms // MS_PER_DAY
        later = {other: known for other, known in self.onward.items() if other < day}
        return Changes(self.days, {**later, day: version})

    def mark(self, start_ms: int, end_ms: int, census: GpuCensus) -> Mark:
        """Return the mark of [start_ms, end_ms). It includes how long each GPU was capacity, according to the census,
        because records of other times can change that."""
        first, last = start_ms // MS_PER_DAY, max(start_ms, end_ms - 1) // MS_PER_DAY
        rows = max((version for day, version in self.days.items() if first <= day <= last), default=0)
        onward = max((version for day, version in self.onward.items() if day <= last), default=0)

        counts: Counter[Span] = Counter()
        ended: list[tuple[int, Span]] = []
        individual = (((life.start_ms, life.end_ms), 1, gpu) for gpu, life in census.individual.items())
        for (start, end), count, gpu in (*(((s, e), n, None) for (s, e, _), n in census.counts.items()), *individual):
            if start >= end_ms or end <= start_ms:
                continue
            if gpu is not None and end < end_ms:
                ended.append((gpu, (max(start_ms, start), end)))
            else:  # not by its number, because down time of another span makes a counted GPU an individual one
                counts[max(start_ms, start), min(end_ms, end)] += count
        return rows, onward, tuple(sorted(counts.items())), tuple(sorted(ended))


UTC = ZoneInfo("UTC")


@dataclass(frozen=True)
class State:
    """The state after a commit.

    marks: by outbox, the highest number up to which everything is committed.
    policies: ascending by since_ms.
    unfolded: starts of the hours that are summed from their rows.
    days: the days that have sums.
    frozen: starts of hours whose rows are only in the archive.
    archived: by outbox, the highest number up to which everything is archived.
    parts: the number of the newest archive part.
    acts, decisions: the numbers of the last act and of the last decision.
    archived_registers: by append-only table, the number up to which it is archived.
    version: counts the commits of this process.
    changes: which spans those commits changed.
    exported_labels: the labels of pods that are dimensions.
    devices, kinds: caches of device names and device kinds, shared by all states since the last `load`."""

    marks: Mapping[Stream, int] = field(default_factory=dict)
    fleet: GpuLifetimes = field(default_factory=GpuLifetimes)
    policies: tuple[Assignment, ...] = ()
    unfolded: frozenset[int] = frozenset()
    days: DailySums = field(default_factory=DailySums)
    frozen: frozenset[int] = frozenset()
    archived: Mapping[Stream, int] = field(default_factory=dict)
    parts: int = 0
    acts: int = 0
    decisions: int = 0
    archived_registers: Mapping[str, int] = field(default_factory=dict)
    version: int = 0
    changes: Changes = field(default_factory=Changes)
    exported_labels: tuple[str, ...] = ()
    devices: Devices = field(default_factory=Devices, compare=False, repr=False)
    kinds: DeviceKindsCache = field(default_factory=DeviceKindsCache, compare=False, repr=False)
    _device_names: list[Mapping[int, DeviceName]] = field(default_factory=list, init=False, compare=False, repr=False)

    def device_kinds(self, cursor: Cursor, dimensions: frozenset[Dimension]) -> DeviceKinds:
        """Return the kinds of devices for a query with these dimensions of devices."""
        return self.kinds.read(self.fleet, self.device_names(cursor), dimensions)

    def device_names(self, cursor: Cursor) -> Mapping[int, DeviceName]:
        """Return the devices of this state's snapshot, which are read once."""
        if not self._device_names:
            self._device_names.append(self.devices.read(cursor))
        return self._device_names[0]


def load(cursor: Cursor, zone: ZoneInfo = UTC, exported_labels: tuple[str, ...] = ()) -> State:
    """Read the state from the tables. `zone` is the time zone of the daily sums."""
    marks = {(cluster, node, epoch): seq for cluster, node, epoch, seq in cursor.rows("marks")}
    gpus: dict[int, MeteredGpu] = {}
    tenures: dict[int, dict[str, Tenure]] = {}
    agents: dict[int, dict[str, Tenure]] = {}
    imported: set[int] = set()
    unfolded = frozenset(row[0] for row in cursor.run("FROM unfolded"))
    for gpu, cluster, uuid, model, node, first, last, of_import in cursor.rows("tenures", row_range(unfolded)):
        gpus[gpu] = MeteredGpu(cluster, uuid, model)
        tenure = Tenure(first, last)
        nodes = tenures.setdefault(gpu, {})
        nodes[node] = tenure.with_(nodes.get(node))
        if of_import:
            imported.add(gpu)
        else:
            agents.setdefault(gpu, {})[node] = tenure
    # A device keeps its number when all records of its GPU were withdrawn or quarantined.
    for gpu, cluster, uuid, model in cursor.run(
        "SELECT g.id, g.cluster, g.gpu_uuid, max(d.gpu_model) FROM device d JOIN gpu g ON g.id = d.gpu GROUP BY ALL"
    ):
        gpus.setdefault(gpu, MeteredGpu(cluster, uuid, model))
    known, placed = read_nodes(cursor)
    namespaces, charged = read_namespaces(cursor)
    retired: dict[int, int] = dict(cursor.run("SELECT gpu, max(at_ms) FROM retired GROUP BY gpu"))
    policies = tuple(
        Assignment(PolicyVersion(version=version, effective_ms=effective, policy=Policy.model_validate_json(content)))
        for version, effective, content in cursor.run(
            "SELECT version, effective_ms, content FROM policy ORDER BY effective_ms, version"
        )
    )
    own = {gpu: agents.get(gpu, {}) for gpu in imported}
    fleet = GpuLifetimes(gpus, tenures, own, known, namespaces, retired, placed, charged)
    frozen = frozenset(row[0] for row in cursor.run("FROM frozen"))
    archived = {(cluster, node, epoch): seq for cluster, node, epoch, seq in cursor.rows("archived_marks")}
    parts: int = cursor.run("SELECT coalesce(max(number), 0) FROM archive_part")[0][0]
    kept = rollups.load(cursor).seen_from(zone)
    registers: dict[str, int] = dict(cursor.run("FROM archive_register"))
    acts, decisions = last_act(cursor), last_decision(cursor)
    return State(
        marks, fleet, policies, unfolded, kept, frozen, archived, parts, acts, decisions, registers,
        exported_labels=exported_labels,
    )  # fmt: skip
