"""Holds what readers and the writer know without asking a table: one immutable value per commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo

from accountant.ledger.team_assignment import Assignment
from accountant.storage.changed_spans import Changes
from accountant.storage.device_kinds import DeviceKinds, DeviceKindsCache
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, Gpu, Tenure
from accountant.storage.write import rollups
from accountant.storage.write.name_ids import DeviceName, Devices
from accountant.storage.write.record_columns import Stream
from accountant.storage.write.reference_tables import last_act, last_decision, read_namespaces, read_nodes
from accountant.storage.write.rollups import DailySums, row_range
from accountant.wire.policy_models import Policy, PolicyVersion
from accountant.wire.usage_models import Dimension

UTC = ZoneInfo("UTC")


@dataclass(frozen=True)
class State:
    """marks: durable number per outbox. policies: ascending by since_ms. unfolded: starts of the
    hours that are summed from their rows; days: those that have sums; frozen: starts of hours whose rows are in
    the archive alone. archived: the number per outbox up to which everything lies there, parts: the newest part.
    acts, decisions: the number of the last. archived_registers: by register that only grows, the number up to which
    the archive has it. version: counts the commits of this process; changes: what they touched. devices:
    what every state since the last `load` remembers of them; aparts: and of what questions tell apart."""

    marks: Mapping[Stream, int] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)
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
    devices: Devices = field(default_factory=Devices, compare=False, repr=False)
    aparts: DeviceKindsCache = field(default_factory=DeviceKindsCache, compare=False, repr=False)
    _device_names: list[Mapping[int, DeviceName]] = field(default_factory=list, init=False, compare=False, repr=False)

    def apart(self, cursor: Cursor, asked: frozenset[Dimension]) -> DeviceKinds:
        """How far a question about these dimensions of devices tells them apart."""
        return self.aparts.read(self.fleet, self.device_names(cursor), asked)

    def device_names(self, cursor: Cursor) -> Mapping[int, DeviceName]:
        """Of this state's own snapshot, looked up once."""
        if not self._device_names:
            self._device_names.append(self.devices.read(cursor))
        return self._device_names[0]


def load(cursor: Cursor, zone: ZoneInfo = UTC) -> State:
    """Read it from the tables, which are the truth. zone: of days."""
    marks = {(cluster, node, epoch): seq for cluster, node, epoch, seq in cursor.rows("marks")}
    gpus: dict[int, Gpu] = {}
    tenures: dict[int, dict[str, Tenure]] = {}
    agents: dict[int, dict[str, Tenure]] = {}
    imported: set[int] = set()
    unfolded = frozenset(row[0] for row in cursor.run("FROM unfolded"))
    for gpu, cluster, uuid, model, node, first, last, of_import in cursor.rows("tenures", row_range(unfolded)):
        gpus[gpu] = Gpu(cluster, uuid, model)
        tenure = Tenure(first, last)
        nodes = tenures.setdefault(gpu, {})
        nodes[node] = tenure.with_(nodes.get(node))
        if of_import:
            imported.add(gpu)
        else:
            agents.setdefault(gpu, {})[node] = tenure
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
    fleet = Fleet(gpus, tenures, own, known, namespaces, retired, placed, charged)
    frozen = frozenset(row[0] for row in cursor.run("FROM frozen"))
    archived = {(cluster, node, epoch): seq for cluster, node, epoch, seq in cursor.rows("archived_marks")}
    parts: int = cursor.run("SELECT coalesce(max(number), 0) FROM archive_part")[0][0]
    kept = rollups.load(cursor).seen_from(zone)
    registers: dict[str, int] = dict(cursor.run("FROM archive_register"))
    acts, decisions = last_act(cursor), last_decision(cursor)
    return State(marks, fleet, policies, unfolded, kept, frozen, archived, parts, acts, decisions, registers)
