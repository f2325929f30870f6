"""Reads nodes, namespaces and planned maintenance from a YAML file, and merges several inventories.

The file is read again when it changes. A file with a fault raises an error and changes nothing in the ledger. Times are
UTC dates, or date-times with their offset.

    schema: 1
    cluster: prod
    nodes:
      - name: gpu-01
        pool: training
        region: eu-central-1
        capacity_type: on-demand
        down:
          - {start: 2026-10-05T08:00:00Z, end: 2026-10-05T12:00:00Z, reason: firmware}
    namespaces:
      - {name: vision, team: vision}
      - {name: shared, team: platform, label: team, teams: [vision, speech], since: 2026-10-01}
    maintenance:
      - {nodes: ["gpu-0*"], start: 2026-10-05T08:00:00Z, end: 2026-10-05T12:00:00Z, reason: firmware}
      - {pools: [training], every: "0 6 * * sun", for: 2h, start: 2026-10-01, timezone: Europe/Berlin}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, create_model, model_validator

from accountant.core.errors import InventoryError
from accountant.core.periods import utc, zone
from accountant.inventory.node_facts_and_downtime import Calendar, PlannedMaintenance, merge_nodes
from accountant.ledger.protocols import Down, EpochReport, Facts, Inventory, NamespaceFacts, NodeFacts
from accountant.wire.dimensions import OF_LABELS, names
from agent.wire import PodFacts
from gputally.base.atomic_file import Stamp, stamp_of
from gputally.base.instants import parse_instant
from gputally.base.yaml_file import FileFault, Key
from gputally.server.config_loading import Duration, Model, load_yaml

UTC = zone("UTC")


class InventoryFault(ValueError):
    """A fault of one entry. `path`: its place in the document."""

    def __init__(self, path: tuple[Key, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


Instant = Annotated[int, BeforeValidator(lambda text: parse_instant(str(text), UTC))]
"""UTC milliseconds, written as a UTC date or as a date-time with its offset."""


class DownEntry(Model):
    """A span in which the node could not be used. Without `end`, it has not ended."""

    start: Instant
    end: Instant | None = None
    reason: str = Field(default="maintenance", min_length=1, max_length=200)


class _Named(Model):
    """An entry of the inventory file that has a name. `cluster`: only if it differs from the file's."""

    name: str = Field(min_length=1, max_length=253)
    cluster: str | None = None


class _NodeEntry(_Named):
    """A node.

    deleted: the instant from which its GPUs are no capacity.
    since: the instant from which its labels are valid; without it, from the first reading."""

    capacity_type: Literal["on-demand", "spot", "reserved", "on-prem", ""] = ""
    shard: str = ""
    provider_id: str = Field(default="", max_length=2_048)
    down: tuple[DownEntry, ...] = ()
    deleted: Instant | None = None
    since: Instant | None = None


if TYPE_CHECKING:
    NodeEntry: TypeAlias = _NodeEntry
else:
    NodeEntry = create_model(
        "NodeEntry",
        __base__=_NodeEntry,
        **{name: (str, "") for name in names("label") if name not in _NodeEntry.model_fields},
    )
    """A node with a value of each dimension that nodes have."""


class NamespaceEntry(_Named):
    """The team that a namespace belongs to.

    label, teams: the pod label by which pods may choose one of these teams instead.
    since: the instant from which this is valid; without it, from the first reading."""

    team: str = Field(default="", max_length=253)
    label: str = Field(default="", max_length=253)
    teams: tuple[str, ...] = ()
    since: Instant | None = None


class MaintenanceEntry(Model):
    """Planned down time of nodes with these names (with `*` and `?` as wildcards) or pools.

    It is once, from `start` to `end`. With `every` (a cron expression) and `for` it is repeated from `start` on, until
    `end` if there is one."""

    nodes: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    cluster: str | None = None
    start: Instant
    end: Instant | None = None
    every: str | None = None
    for_: Duration | None = Field(default=None, alias="for", gt=0)
    timezone: str = "UTC"
    reason: str = Field(default="maintenance", min_length=1, max_length=200)

    def planned(self, cluster: str) -> PlannedMaintenance:
        """The entry in the form of the calendar. cluster: the file's."""
        return PlannedMaintenance(
            self.cluster or cluster, self.nodes, self.pools, self.start, self.end, self.reason, self.every, self.for_,
            self.timezone,
        )  # fmt: skip


class InventoryFile(Model):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    cluster: str = Field(default="default", min_length=1, max_length=253)
    nodes: tuple[NodeEntry, ...] = ()
    namespaces: tuple[NamespaceEntry, ...] = ()
    maintenance: tuple[MaintenanceEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> InventoryFile:
        named: tuple[tuple[str, tuple[_Named, ...]], ...] = ("nodes", self.nodes), ("namespaces", self.namespaces)
        for kind, entries in named:
            seen: set[tuple[str, str]] = set()
            for index, entry in enumerate(entries):
                key = (entry.cluster or self.cluster, entry.name)
                if key in seen:
                    raise InventoryFault((kind, index, "name"), f"{entry.name!r} occurs twice")
                seen.add(key)
        for index, planned in enumerate(self.maintenance):
            try:
                planned.planned(self.cluster).check()
            except ValueError as error:
                raise InventoryFault(("maintenance", index, "start"), str(error)) from error
        for index, space in enumerate(self.namespaces):
            if not space.team and not space.teams:
                raise InventoryFault(("namespaces", index, "team"), "a namespace needs a team, or teams to choose from")
            if bool(space.label) != bool(space.teams):
                raise InventoryFault(("namespaces", index, "label"), "set both label and teams, or neither")
        for index, node in enumerate(self.nodes):
            for number, down in enumerate(node.down):
                if down.end is not None and down.start >= down.end:
                    message = f"ends at or before it begins: {utc(down.start)} to {utc(down.end)}"
                    raise InventoryFault(("nodes", index, "down", number, "end"), message)
        return self

    def calendar(self) -> Calendar:
        return Calendar(tuple(entry.planned(self.cluster) for entry in self.maintenance))

    def facts(self) -> Facts:
        """The facts in the ledger's form, sorted by cluster and name."""
        nodes = [
            NodeFacts(
                cluster=node.cluster or self.cluster,
                **node.model_dump(exclude={"cluster", "down", "deleted", "since", *OF_LABELS}),
                down=tuple(Down(down.start, down.end, down.reason) for down in node.down),
                deleted_ms=node.deleted,
                since_ms=node.since,
            ).with_values({name: getattr(node, name) for name in OF_LABELS})
            for node in self.nodes
        ]
        namespaces = [
            NamespaceFacts(
                entry.cluster or self.cluster,
                entry.name,
                entry.team,
                entry.label,
                tuple(sorted(set(entry.teams))),
                entry.since,
            )
            for entry in self.namespaces
        ]
        return Facts(
            nodes=tuple(sorted(nodes, key=lambda node: (node.cluster, node.name))),
            namespaces=tuple(sorted(namespaces, key=lambda entry: (entry.cluster, entry.name))),
        )


class YamlInventory:
    """Implements accountant.ledger.protocols.Inventory for one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._facts = Facts()
        self._calendar = Calendar()

    def read(self, now_ms: int) -> Facts:  # noqa: ARG002  (a file says the same at any time)
        """The facts in the file, which is parsed again only if it has changed. Raises InventoryError (file:line)."""
        try:
            seen = stamp_of(self._path.stat())
        except OSError as error:
            raise InventoryError(f"{self._path}: {error.strerror}") from error
        if seen != self._seen:
            try:
                file = load_yaml(self._path, InventoryFile)
                self._facts, self._calendar = file.facts(), file.calendar()
            except FileFault as fault:
                raise InventoryError(str(fault)) from fault
            self._seen = seen
        return self._facts

    @property
    def calendar(self) -> Calendar:
        """The maintenance entries of the last reading."""
        return self._calendar

    def taken(self) -> None:
        """Does nothing, since every reading is complete."""


class MergedInventory:
    """Combines several inventories. The first one takes precedence, and each adds the facts that the ones before it
    leave open. A node was down whenever any of them says so."""

    def __init__(self, inventories: Sequence[Inventory], calendar: Callable[[], Calendar] = Calendar) -> None:
        self._inventories = tuple(inventories)
        self._calendar = calendar

    def read(self, now_ms: int) -> Facts:
        nodes: dict[tuple[str, str], NodeFacts] = {}
        namespaces: dict[tuple[str, str], NamespaceFacts] = {}
        pods: list[tuple[str, PodFacts]] = []
        epochs: list[EpochReport] = []
        for facts in [inventory.read(now_ms) for inventory in self._inventories]:
            for node in facts.nodes:
                key = (node.cluster, node.name)
                nodes[key] = merge_nodes(nodes[key], node) if key in nodes else node
            for space in facts.namespaces:
                namespaces.setdefault((space.cluster, space.name), space)
            pods += facts.pods
            epochs += facts.epochs
        planned = self._calendar().applied(nodes.values(), now_ms)
        return Facts(
            nodes=tuple(sorted(planned, key=lambda node: (node.cluster, node.name))),
            namespaces=tuple(namespaces[key] for key in sorted(namespaces)),
            pods=tuple(pods),
            epochs=tuple(epochs),
        )

    def taken(self) -> None:
        for inventory in self._inventories:
            inventory.taken()
