"""Groups holders (pods and other users of GPUs) and spans of time by the dimensions of a query, and looks up the values
of dimensions.

Holders with equal values of the queried dimensions form one class, and DuckDB sums per class. The cost of an answer
therefore grows with its number of rows, not with the number of pods.

The values of dimensions change over time. `pieces_of` therefore splits a span where a policy, a label of a node or a
namespace, or the local day or hour changes, if the query uses that value. Within a piece, the holder and the device
determine every value.

`ResultCache` caches results for one snapshot, because a page runs a dozen queries about the same job or the same
quarter-hour. The holders of a job are looked up once. A coarser grouping is derived from a cached finer one, and fewer
measures from more: for example, usage by team from usage by team and queue. Sums are integers, so the derived answer
equals that of the engine exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from accountant.core.claim_overlap import cut
from accountant.core.periods import local_hours
from accountant.ledger.protocols import exported_in, of_holders, without_holder
from accountant.ledger.team_assignment import NO_POLICY, Assignment, in_force
from accountant.ledger.usage import Int64Array, Usage
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.gpu_lifetimes import GpuLifetimes, changes_between
from accountant.storage.ledger_state import State
from accountant.storage.write.name_ids import DeviceName, HolderName, holders, label_history
from accountant.wire.dimensions import DECLARED, DIMENSIONS, OF_LABELS, OF_TIME, DeclaredDimension, sources, value_of
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension, is_label, label_of
from gputally.base import called_off

MOST_CANDIDATES: Final = 1_000
"""Up to this many holders are grouped in Python. DuckDB groups more than that."""
MOST_CLASSES: Final = 8
"""Largest number of groupings of holders in the cache of a snapshot."""
MOST_ROWS: Final = 20_000
"""Answers with more rows are not cached."""
MOST_QUESTIONS: Final = 64
"""Largest number of questions whose answers a snapshot caches; the oldest goes first."""


class UsageQuestion(NamedTuple):
    """The parameters of a usage query except its grouping and its figures."""

    edges: tuple[int, ...]
    where: Hashable
    timezone: str


@dataclass(frozen=True, slots=True)
class StartUp:
    """Start-up time by piece of time.

    starts: the start of each piece, ascending. The pieces are adjacent, and the last one ends at `end_ms`.
    rows: int64, columns COLUMNS; a phase is an index into `START_UP`."""

    COLUMNS: ClassVar = ("piece", "gpu", "device", "holder", "phase", "gpu_us")
    starts: tuple[int, ...]
    end_ms: int
    rows: Int64Array


@dataclass(slots=True)
class ResultCache:
    """Cached holders, usage and start-up time of one snapshot, limited in number. Not thread-safe."""

    _holders: dict[Hashable, Mapping[int, HolderName] | None] = field(default_factory=dict)
    _classes: dict[Hashable, HolderClasses] = field(default_factory=dict)
    _usage: dict[UsageQuestion, list[Usage]] = field(default_factory=dict)
    _start_up: StartUp | None = None

    def candidates(
        self,
        cursor: Cursor,
        jobs: Collection[str],
        pods: Collection[str],
        labels: Collection[str],
        exported: Sequence[str] = (),
    ) -> Mapping[int, HolderName] | None:
        """Return a superset of the holders that belong to these jobs or are these pods, with their labels and users.

        Returns None if there are more than MOST_CANDIDATES."""
        key = (frozenset(jobs), frozenset(pods), frozenset(labels), frozenset(exported))
        if key not in self._holders:
            names = {*pods, *(job.partition("/")[2] or job for job in jobs)}
            sql = statement("holders_named")
            ids = {id_ for (id_,) in cursor.run(sql, {"jobs": sorted(jobs), "names": sorted(names)})}
            few = len(ids) <= MOST_CANDIDATES
            self._holders[key] = holders(cursor, ids, labels, exported, users=True) if few else None
        return self._holders[key]

    def classes(self, question: Hashable, read: Callable[[], HolderClasses]) -> HolderClasses:
        """Return the classes that answer a question, from the cache or from `read`."""
        if question not in self._classes:
            if len(self._classes) >= MOST_CLASSES:
                self._classes.pop(next(iter(self._classes)))
            self._classes[question] = read()
        return self._classes[question]

    def usage(
        self, question: UsageQuestion, by: Sequence[Dimension], names: Sequence[str], compute: Callable[[], Usage]
    ) -> Usage:
        """Return the figures `names` grouped by `by`, from a cached answer that has them in an equal or finer grouping
        if there is one, otherwise from `compute`."""
        if question not in self._usage and len(self._usage) >= MOST_QUESTIONS:
            self._usage.pop(next(iter(self._usage)))
        groupings = self._usage.setdefault(question, [])
        for finer in groupings:
            if set(by) <= set(finer.by) and set(names) <= set(finer.names):
                found = finer if finer.by == tuple(by) else finer.grouped(by)
                return found if found.names == tuple(names) else found.only(names)
        computed = compute()
        if len(computed) <= MOST_ROWS:
            groupings.append(computed)
        return computed

    def start_up(self, starts: Sequence[int], end_ms: int, read: Callable[[], Iterable[Sequence[int]]]) -> StartUp:
        """Return the start-up time of pieces that begin at `starts` and end at `end_ms`, from the cache if it has
        these pieces or finer ones, otherwise from `read`, which yields the rows (piece, GPU, device, holder, phase,
        µs). Only the newest is kept, because it takes memory in proportion to the pods."""
        known = self._start_up
        if (
            known is None
            or known.end_ms != end_ms
            or known.starts[0] != starts[0]
            or not set(starts) <= set(known.starts)
        ):
            table = np.array([*read()], dtype=np.int64).reshape(-1, len(StartUp.COLUMNS))
            known = self._start_up = StartUp(tuple(starts), end_ms, table)
        return known


ASSIGNED: frozenset[str] = frozenset({"team", "queue"})
"""Sources of dimensions that the policy in force tells."""
OF_FEW: frozenset[Dimension] = frozenset({"job", "pod"})
"""Dimensions whose values are shared by few holders."""
UNHELD = 0
"""The holder id of unheld time, and its class."""


@dataclass(frozen=True, slots=True)
class HolderClasses:
    """The class of each holder id (`of`), and the values of the dimensions of each class (`names`).

    A holder without a class does not match the filter."""

    of: Mapping[int, int]
    names: Mapping[int, HolderName]

    def only(self, condition: Callable[[HolderName], bool]) -> HolderClasses:
        """Return only the classes for whose names the condition is true."""
        names = {number: name for number, name in self.names.items() if condition(name)}
        return HolderClasses({holder: number for holder, number in self.of.items() if number in names}, names)


def asks_for_unheld_time(where: Mapping[Dimension, Collection[str]]) -> bool:
    """Return whether the filter on holder dimensions includes time without a payer."""
    return all(without_holder(dimension) in where[dimension] for dimension in of_holders(where))


def classes(
    cursor: Cursor,
    start_ms: int,
    end_ms: int,
    dimensions: Collection[Dimension],
    where: Mapping[Dimension, Collection[str]],
    labels: Collection[str] = (),
    cache: ResultCache | None = None,
) -> HolderClasses:
    """Return the classes of the holders in [start_ms, end_ms) by some dimensions.

    `labels` are the pod labels that can name a team. `cache` is that of the snapshot. If it is given, a filter by job
    or pod is answered from it, and the result can contain holders outside the span."""
    columns, exported = _class_columns(dimensions), exported_in(dimensions)
    read = partial(_read_classes, cursor, start_ms, end_ms, columns, where, labels, exported)
    if cache is None:
        return read()
    if OF_FEW & where.keys():
        candidates = cache.candidates(cursor, where.get("job", ()), where.get("pod", ()), labels, exported)
        if candidates is not None:
            return _classes_of(candidates, columns, where)
    filters = frozenset((name, frozenset(values)) for name, values in where.items())
    return cache.classes((start_ms, end_ms, columns, filters, frozenset(labels), exported), read)


def _read_classes(
    cursor: Cursor,
    start_ms: int,
    end_ms: int,
    columns: Sequence[str],
    where: Mapping[Dimension, Collection[str]],
    labels: Collection[str],
    exported: Sequence[str],
) -> HolderClasses:
    """Return the classes of the holders in [start_ms, end_ms) by these columns."""
    filters = {name: sorted(where[dimension]) for dimension, name in _FILTERED.items() if dimension in where}
    by_label = "labels" in columns and bool(labels)
    by_user = "user" in columns or "user" in filters
    joins = (
        f"LEFT JOIN ({statement('holder_labels')}) l(id, labels) ON l.id = n.id " * by_label
        + f"LEFT JOIN ({statement('holder_users')}) u(id, who) ON u.id = n.id " * by_user
        + f"LEFT JOIN ({statement('holder_exports')}) e(id, history) ON e.id = n.id" * bool(exported)
    )
    label_values = "[json_extract_string(l.labels, '$.\"' || k || '\"') FOR k IN $labels]" if by_label else "NULL"
    sql = statement(
        "holder_classes",
        joins=joins, labels=label_values, exported="e.history" if exported else "NULL",
        user="coalesce(u.who, '')" if by_user else "''", columns=", ".join(_QUOTED[name] for name in columns),
        filter=" AND ".join(f"list_contains(${name}s, {_QUOTED[name]})" for name in filters) or "true",
    )  # fmt: skip
    parameters: dict[str, object] = {"low": start_ms, "high": end_ms}
    parameters |= {f"{name}s": values for name, values in filters.items()}
    if by_label:
        parameters["labels"] = sorted(labels)
    if exported:
        parameters["exported"] = list(exported)
    of: dict[int, int] = {}
    names: dict[int, HolderName] = {}
    for number, (*values, members) in enumerate(called_off.each(cursor.run(sql, parameters)), 1):
        names[number] = _holder_name(dict(zip(columns, values, strict=True)), labels, exported)
        of |= dict.fromkeys(members, number)
    if asks_for_unheld_time(where):
        of[UNHELD] = UNHELD
    return HolderClasses(of, names)


def of_all(names: Mapping[int, HolderName]) -> HolderClasses:
    """Return classes of one holder each. names: the holders, by id."""
    return HolderClasses({holder: holder for holder in names}, names)


def _classes_of(
    candidates: Mapping[int, HolderName], columns: Sequence[str], where: Mapping[Dimension, Collection[str]]
) -> HolderClasses:
    """Return the classes of the candidates that match the filter."""
    filters = [(_FILTERED[dimension], allowed) for dimension, allowed in where.items() if dimension in _FILTERED]
    class_of: dict[tuple[Any, ...], int] = {}
    of: dict[int, int] = {}
    names: dict[int, HolderName] = {}
    for holder, name in called_off.each(candidates.items()):
        if all(getattr(name, attribute) in allowed for attribute, allowed in filters):
            values = tuple([getattr(name, column) for column in columns])
            of[holder] = class_of.setdefault(values, holder)
            names.setdefault(of[holder], name)
    if asks_for_unheld_time(where):
        of[UNHELD] = UNHELD
    return HolderClasses(of, names)


def _class_columns(dimensions: Collection[Dimension]) -> tuple[str, ...]:
    """Return the columns of `holder_class` that the dimensions need.

    A dimension may need several columns: a team, for example, depends on the cluster, the namespace and the queue."""
    needed = {name for source in sources(dimensions) for name in _NEEDED.get(source, (source,))}
    needed |= {"exported"} if any(map(is_label, dimensions)) else set()
    return tuple(name for name in _QUOTED if name in needed) or ("cluster",)


def _holder_name(columns: Mapping[str, Any], labels: Collection[str], exported: Sequence[str]) -> HolderName:
    """Return a HolderName with only the given columns set."""
    values = dict.fromkeys(("cluster", "namespace", "name", "queue_ref", "job"), "") | dict(columns)
    label_values = values.pop("labels", None) or ()
    pairs = zip(sorted(labels), label_values, strict=False)
    return HolderName(
        **values | {"exported": label_history(exported, values.get("exported"))},
        labels=frozenset((key, value) for key, value in pairs if value is not None),
    )


_FILTERED: Mapping[Dimension, str] = {
    one.name: one.source for one in DIMENSIONS if one.of == "holder" and one.source not in ASSIGNED and one.read is None
}
"""Dimensions by which holders can be filtered before they are grouped, with the attribute of the holder's name."""
_NEEDED: Mapping[str, Sequence[str]] = {
    "queue": ("queue_ref",), "team": ("cluster", "namespace", "queue_ref", "labels"),
}  # fmt: skip
"""Sources of dimensions that are no column of `holder_class`, with the columns that they need."""
_QUOTED = {
    **{name: name for name in ("cluster", "namespace", "name", "queue_ref", "job", "container", "labels", "exported")},
    "user": '"user"',
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConstantSpan:
    """A span in which policy, labels of nodes and namespaces, local day and local hour are constant.

    Only what the query uses is considered. Spans with the same `era` differ only in day and hour."""

    start_ms: int
    end_ms: int
    rules: Assignment
    day: str = ""
    hour: str = ""
    era: int = 0

    @property
    def month(self) -> str:
        """The local month of the day."""
        return self.day[: len("2026-10")]


def pieces_of(
    state: State,
    start_ms: int,
    end_ms: int,
    dimensions: frozenset[Dimension],
    zone: ZoneInfo,
    label_changes: Sequence[int] = (),
) -> list[ConstantSpan]:
    """Split [start_ms, end_ms) into ConstantSpans for these dimensions, in order and without gaps. Days and hours are
    those of `zone`. label_changes: the instants at which a queried label of a pod changed."""
    pieces = [ConstantSpan(start_ms, end_ms, NO_POLICY)]
    asked = sources(dimensions)
    if asked & ASSIGNED:
        pieces = [ConstantSpan(*part) for part in in_force(state.policies, start_ms, end_ms)]
    relabelled = changes_between(state.fleet.charged.values() if "team" in asked else (), start_ms, end_ms)
    relabelled += changes_between(state.fleet.placed.values() if dimensions & OF_LABELS else (), start_ms, end_ms)
    relabelled += [at for at in label_changes if start_ms < at < end_ms]
    if relabelled:
        edges = sorted(set(relabelled))
        pieces = [replace(p, start_ms=b, end_ms=e) for p in pieces for b, e in cut((p.start_ms, p.end_ms), edges)]
    pieces = [replace(piece, era=number) for number, piece in enumerate(pieces)]
    if not dimensions & OF_TIME:
        return pieces
    local: list[ConstantSpan] = []
    finest = next(name for name in ("hour", "day", "month") if name in asked)
    for each in local_hours(start_ms, end_ms, zone):
        piece = ConstantSpan(each.start_ms, each.end_ms, NO_POLICY, each.day, each.hour)
        if local and getattr(local[-1], finest) == getattr(piece, finest):
            local[-1] = replace(local[-1], end_ms=piece.end_ms)
        else:
            local.append(piece)
    eras = {piece.start_ms: piece for piece in pieces}
    current = pieces[0]
    split = []
    for hour_or_day in local:
        for begin, end in cut((hour_or_day.start_ms, hour_or_day.end_ms), list(eras)):
            current = eras.get(begin, current)
            split.append(ConstantSpan(begin, end, current.rules, hour_or_day.day, hour_or_day.hour, current.era))
    return split


def key_of(
    dimensions: Sequence[Dimension],
    fleet: GpuLifetimes,
    piece: ConstantSpan,
    gpu: int,
    device: DeviceName,
    holder: HolderName | None,
) -> tuple[str, ...]:
    """Return the values of the dimensions for time of a GPU, a device and a holder in a piece. `holder` is None for
    unheld time."""
    return tuple(_value(dimension, fleet, piece, gpu, device, holder) for dimension in dimensions)


def _value(
    dimension: Dimension,
    fleet: GpuLifetimes,
    piece: ConstantSpan,
    gpu: int,
    device: DeviceName,
    holder: HolderName | None,
) -> str:
    if is_label(dimension):
        return IDLE if holder is None else holder.exported_at(label_of(dimension), piece.start_ms)
    declared = DECLARED[dimension]
    if declared.of != "holder":
        return value_of(dimension, _of_device(declared, fleet, piece, gpu, device))
    if holder is None:
        return without_holder(dimension)
    return value_of(dimension, _of_holder(declared.source, fleet, piece, holder))


def _of_holder(source: str, fleet: GpuLifetimes, piece: ConstantSpan, holder: HolderName) -> str:
    if source not in ASSIGNED:
        return str(getattr(holder, source))
    queue = piece.rules.queue(holder.queue_ref)
    if source == "queue":
        return queue
    space = fleet.namespace_at((holder.cluster, holder.namespace), piece.start_ms)
    return piece.rules.team(queue, space, dict(holder.labels))


def _of_device(
    declared: DeclaredDimension, fleet: GpuLifetimes, piece: ConstantSpan, gpu: int, device: DeviceName
) -> str:
    match declared.of:
        case "model":
            return device.gpu_model
        case "node":
            return device.node
        case "part":
            return device.profile
        case "gpu":
            return fleet.gpus[gpu].uuid
        case "cluster":
            return fleet.gpus[gpu].cluster
        case "time":
            return str(getattr(piece, declared.source))
        case _:
            facts = fleet.node_at((fleet.gpus[gpu].cluster, device.node), piece.start_ms)
            return "" if facts is None else facts.value(declared.name)
