"""Holds the records of a group commit as columns, with their accounts and content digests, and appends rows to tables.

A group has up to a hundred thousand rows of a few thousand GPUs, pods and slices. Conditions on rows are computed for
whole columns, and conditions on names once per *distinct* name. Rows stay in the order of arrival. The *sets* of
`batch_admission` are given by row indices. The schemas list the columns in the order of the tables in `migrations/`.

A digest is used only to compare a replayed record with the stored one. A field added to the wire format later is
included only if it differs from its default, so that old digests stay valid.

`cells` computes the same figures for columns as `gpu_time_accounts` for single rows. The few rows with gaps are
computed individually. `add` passes few rows as lists, which costs a small statement half as much as an Arrow table. For
many rows the table is faster."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accountant.core.gpu_time_accounts import CELLS, split
from accountant.storage.duckdb_engine import Cursor
from agent.wire import Holder, PodFacts, Sharing, Slice, UsageInterval
from gputally.base.measures import REPORTED
from gputally.base.untrusted_text import as_name

_encoder = msgspec.json.Encoder(order="deterministic")
_FIRST_FIELDS = (
    "start_ms", "end_ms", "gpu_uuid", "gpu_model", "slice", "holder", "sharing", "health", "capacity_us",
    "allocated_us", "busy_us", "sm_active_us", "tensor_active_us", "memory_mib_s", "energy_uj", "method", "gaps",
)  # fmt: skip
_LATER_FIELDS = tuple(measure.field for measure in REPORTED if measure.field not in _FIRST_FIELDS)
CONTENT_FIELDS = (*_FIRST_FIELDS, *_LATER_FIELDS)
"""Fields of an interval except its number."""
_INTERVAL = attrgetter(*CONTENT_FIELDS)
_FACT = attrgetter(
    "uid", "namespace", "name", "node", "labels", "owners", "workload", "queue_ref", "priority", "requests",
    "created_ms", "scheduled_ms", "started_ms", "ended_ms", "observed_ms",
)  # fmt: skip


def digest(record: UsageInterval | PodFacts) -> int:
    """Return a 64-bit digest of all fields except the number."""
    fields = _digested(_INTERVAL(record)) if isinstance(record, UsageInterval) else _FACT(record)
    if isinstance(record, PodFacts) and record.stop is not None:
        fields += (record.stop,)  # a fact without one has the digest that it had before there were any
    text = _encoder.encode(fields)
    return int.from_bytes(_hash(text).digest(), "big")


def _digested(content: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the CONTENT_FIELDS of a row without those of a later measure that it does not have."""
    first = len(_FIRST_FIELDS)
    later = {name: value for name, value in zip(_LATER_FIELDS, content[first:], strict=True) if value is not None}
    return (*content[:first], later) if later else content[:first]


def contents(rows: Iterable[UsageInterval]) -> list[tuple[Any, ...]]:
    """Return the CONTENT_FIELDS of each row."""
    return list(map(_INTERVAL, rows))


def digests(of: Sequence[tuple[Any, ...]]) -> npt.NDArray[np.uint64]:
    """Return the digests, as `digest` computes them, of intervals given by their `contents`. All are encoded at once
    and then split at line breaks, which encoded JSON does not contain."""
    texts = _encoder.encode_lines(list(map(_digested, of)) if _LATER_FIELDS else of).split(b"\n")[: len(of)]
    return np.frombuffer(b"".join([_hash(text).digest() for text in texts]), ">u8").astype(np.uint64)


_hash = partial(hashlib.blake2b, digest_size=8)


MOST_CONTENT = 4_096
"""Up to this size in bytes the quarantine shows a record as it was sent."""
_SHOWN_ITEMS = 5
"""Items of a list or a mapping of a larger record that are shown."""


def content(record: UsageInterval | PodFacts) -> str:
    """Return the record as JSON, which the quarantine shows. A record of more than MOST_CONTENT bytes is shown with
    shortened texts and with the first items of its lists, because the quarantine is read as a whole."""
    text = _encoder.encode(record)
    if len(text) > MOST_CONTENT:
        text = _encoder.encode({name: _shortened(part) for name, part in msgspec.to_builtins(record).items()})
    return text.decode()


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return as_name(value)
    if isinstance(value, dict):
        return {as_name(key): _shortened(value[key]) for key in list(value)[:_SHOWN_ITEMS]}
    if isinstance(value, list | tuple):
        return [_shortened(part) for part in value[:_SHOWN_ITEMS]]
    return value


Stream = tuple[str, str, str]
"""(cluster, node, epoch)."""
NodeName = tuple[str, str]
GpuName = tuple[str, str]
"""(cluster, gpu_uuid)."""
Whole: TypeAlias = npt.NDArray[np.int64]
Truth: TypeAlias = npt.NDArray[np.bool_]
K = TypeVar("K")
L = TypeVar("L")


class Section(NamedTuple):
    """New rows of one outbox that arrived together, and their digests if these are known. All rows of a set are in the
    same section."""

    stream: Stream
    rows: Sequence[UsageInterval]
    digests: Sequence[int] | None = None


class DistinctColumn(NamedTuple, Generic[K]):
    """A column as its distinct values, and for each row the index of its value."""

    values: list[K]
    of_row: Whole


class Numbering(dict[K, int]):
    """Numbers keys from 0 in the order in which they are first looked up, after the first `keys`. Thread-safe."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        super().__init__((key, number) for number, key in enumerate(keys))
        self._lock = threading.Lock()

    def __missing__(self, key: K) -> int:
        with self._lock:
            return self.setdefault(key, len(self))


def distinct(values: Sequence[K]) -> DistinctColumn[K]:
    """Return the values as a column with each distinct value once."""
    numbers: Numbering[K] = Numbering()
    of_row = np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
    return DistinctColumn(list(numbers), of_row)


def paired_column(first: DistinctColumn[K], second: DistinctColumn[L]) -> DistinctColumn[tuple[K, L]]:
    """Return both columns as one column of pairs."""
    if len(second.values) == 1:
        return DistinctColumn([(value, second.values[0]) for value in first.values], first.of_row)
    if len(first.values) == 1:
        return DistinctColumn([(first.values[0], value) for value in second.values], second.of_row)
    width = len(second.values)
    keys, of_row = np.unique(first.of_row * width + second.of_row, return_inverse=True)
    return DistinctColumn([(first.values[key // width], second.values[key % width]) for key in keys.tolist()], of_row)


class IntervalSets(NamedTuple):
    """The sets of a group: rows of one GPU with equal span in one section. Sets are in order of section, GPU and start.

    places: indices of all rows, set after set.
    first: the index in `places` at which each set begins.
    seq: the lowest sequence number of each set."""

    places: Whole
    first: Whole
    section: Whole
    gpu: Whole
    start_ms: Whole
    end_ms: Whole
    seq: Whole

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return for each row the value of its set. values: one per set."""
        spread = np.empty(len(self.places), values.dtype)
        spread[self.places] = np.repeat(values, np.diff(self.first, append=len(self.places)))
        return spread

    def members(self, number: int) -> list[int]:
        """Return the row indices of one set."""
        end = self.first[number + 1] if number + 1 < len(self.first) else len(self.places)
        found: list[int] = self.places[self.first[number] : end].tolist()
        return found


class Numbers(NamedTuple):
    """A column of integers, some of which are unknown.

    arrow: the column as an Arrow array.
    value: the column with 0 for unknown."""

    arrow: Any
    value: Whole

    @classmethod
    def of(cls, values: Sequence[int | None]) -> Numbers:
        """Raises OverflowError for a number that does not fit 64 bits."""
        try:
            arrow = pa.array(values, pa.int64())
        except pa.ArrowInvalid as error:
            raise OverflowError(str(error)) from error
        if arrow.null_count == len(arrow):
            return cls(arrow, np.zeros(len(arrow), np.int64))
        return cls(arrow, (arrow.fill_null(0) if arrow.null_count else arrow).to_numpy())

    @property
    def known(self) -> Truth:
        known: Truth = self.arrow.is_valid().to_numpy(zero_copy_only=False)
        return known


@dataclass(frozen=True)
class Incoming:
    """All rows of `sections`, at least one. Properties raise OverflowError for a figure that does not fit 64 bits."""

    sections: Sequence[Section]

    @cached_property
    def records(self) -> list[UsageInterval]:
        return [row for section in self.sections for row in section.rows]

    @cached_property
    def _contents(self) -> list[tuple[Any, ...]]:
        return contents(self.records)

    @cached_property
    def _columns(self) -> dict[str, tuple[Any, ...]]:
        return dict(zip(CONTENT_FIELDS, zip(*self._contents, strict=True), strict=True))

    @cached_property
    def digests(self) -> npt.NDArray[np.uint64]:
        if all(section.digests is None for section in self.sections):
            return digests(self._contents)
        return np.array([mark for section in self.sections for mark in section.digests or ()], np.uint64)

    @cached_property
    def section(self) -> Whole:
        """The index of each row's section."""
        return np.repeat(np.arange(len(self.sections)), [len(section.rows) for section in self.sections])

    def by_section(self, values: Sequence[K]) -> DistinctColumn[K]:
        """Return a column in which each row has the value of its section. values: one per section."""
        of_section = distinct(values)
        return DistinctColumn(of_section.values, of_section.of_row[self.section])

    @cached_property
    def seq(self) -> Whole:
        return np.array([row.seq for row in self.records], np.int64)

    @cached_property
    def start_ms(self) -> Whole:
        return self.numbers("start_ms").value

    @cached_property
    def end_ms(self) -> Whole:
        return self.numbers("end_ms").value

    @cached_property
    def _numbers(self) -> dict[str, Numbers]:
        return {}

    def numbers(self, name: str) -> Numbers:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = Numbers.of(self._columns[name])
        return found

    def names(self, name: str) -> DistinctColumn[str]:
        """Return a text column: gpu_model, health or method."""
        return distinct(self._columns[name])

    def with_gaps(self) -> list[int]:
        """Return the indices of rows with gaps, in which a reading is missing."""
        gaps = self._columns["gaps"]
        return [place for place, some in enumerate(gaps) if some] if any(gaps) else []

    @cached_property
    def lost(self) -> Truth:
        health = self.names("health")
        return np.array([value == "lost" for value in health.values])[health.of_row]

    @cached_property
    def sharing(self) -> DistinctColumn[Sharing | None]:
        return distinct(self._columns["sharing"])

    @cached_property
    def node(self) -> DistinctColumn[NodeName]:
        return self.by_section([section.stream[:2] for section in self.sections])

    @cached_property
    def gpu(self) -> DistinctColumn[GpuName]:
        return paired_column(self.cluster, distinct(self._columns["gpu_uuid"]))

    @cached_property
    def cluster(self) -> DistinctColumn[str]:
        return self.by_section([section.stream[0] for section in self.sections])

    @cached_property
    def device(self) -> DistinctColumn[tuple[tuple[NodeName, GpuName], tuple[str, Slice | None]]]:
        """The device of each row: its node and GPU, and the GPU's model and MIG instance (None: a whole GPU)."""
        sort = paired_column(distinct(self._columns["gpu_model"]), distinct(self._columns["slice"]))
        return paired_column(paired_column(self.node, self.gpu), sort)

    @cached_property
    def holder(self) -> DistinctColumn[tuple[str, Holder | None]]:
        """The holder of each row, with its cluster."""
        return paired_column(self.cluster, distinct(self._columns["holder"]))

    @cached_property
    def sets(self) -> IntervalSets:
        keys = (self.section, self.gpu.of_row, self.start_ms, self.end_ms)
        places = np.lexsort(keys[::-1])
        ordered = [key[places] for key in keys]
        begins = np.ones(len(places), np.bool_)
        begins[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in ordered])
        first = np.flatnonzero(begins)
        section, gpu, start, end = (key[first] for key in ordered)
        return IntervalSets(places, first, section, gpu, start, end, np.minimum.reduceat(self.seq[places], first))


_I32, _I64, _U64, _TEXT = pa.int32(), pa.int64(), pa.uint64(), pa.string()
_CELLS = [(name, _I64) for name in CELLS]

RECEIVED = pa.schema(
    [
        ("stream", _I32), ("seq", _I64), ("set_seq", _I64), ("start_ms", _I64), ("end_ms", _I64), ("gpu", _I32),
        ("device", _I32), ("holder", _I32), ("payer", _I32), ("sharing", _TEXT), ("replicas", _I32), ("health", _TEXT),
        ("method", _TEXT), ("capacity_us", _I64), ("allocated_us", _I64), ("measured_busy_us", _I64),
        ("gaps", _TEXT), ("digest", _U64), ("booked", pa.bool_()),
        *_CELLS,
    ]
)  # fmt: skip
PIECE = pa.schema(
    [("stream", _I32), ("seq", _I64), ("set_seq", _I64), ("start_ms", _I64), ("end_ms", _I64), ("gpu", _I32),
     ("device", _I32), ("payer", _I32), *_CELLS]
)  # fmt: skip
QUARANTINE = pa.schema(
    [("stream", _I32), ("seq", _I64), ("digest", _U64), ("received_ms", _I64), ("reason", _TEXT), ("detail", _TEXT),
     ("content", _TEXT)]
)  # fmt: skip
HOLE = pa.schema([("stream", _I32), ("first_seq", _I64), ("last_seq", _I64), ("reason", _TEXT)])
FACT = pa.schema([("stream", _I32), ("seq", _I64), ("digest", _U64)])
GPU_OWNER = pa.schema(
    [("cluster", _TEXT), ("gpu_uuid", _TEXT), ("node", _TEXT), ("from_ms", _I64), ("at_ms", _I64), ("who", _TEXT)]
)
POD = pa.schema(
    [("cluster", _TEXT), ("uid", _TEXT), ("namespace", _TEXT), ("name", _TEXT), ("workload", _TEXT),
     ("queue_ref", _TEXT), ("observed_ms", _I64), ("content", _TEXT)]
)  # fmt: skip
POD_LABEL = pa.schema([("cluster", _TEXT), ("uid", _TEXT), ("observed_ms", _I64), ("labels", _TEXT)])
EXPORTED_LABEL = pa.schema(
    [("cluster", _TEXT), ("uid", _TEXT), ("since_ms", _I64), ("changed", pa.bool_()), ("content", _TEXT)]
)
POD_NODE = pa.schema([("cluster", _TEXT), ("uid", _TEXT), ("node", _TEXT), ("by_row", pa.bool_())])
POD_KEY = pa.schema([("cluster", _TEXT), ("uid", _TEXT)])
SPAN = pa.schema([("tag", _I64), ("gpu", _I32), ("start_ms", _I64), ("end_ms", _I64)])
WEIGHTED_SPAN = pa.schema([*SPAN, ("by_span", pa.bool_()), ("weight", pa.float64())])
BUCKET = pa.schema([("tag", _I64), ("gpu", _I32), ("at_ms", _I64)])
HOUR = pa.schema([("at_ms", _I64)])
NUMBER = pa.schema([("stream", _I32), ("seq", _I64)])
ID = pa.schema([("id", _I32)])
KIND = pa.schema([("id", _I32), ("kind", _I32)])


def column_table(schema: Any, rows: Iterable[Sequence[object]]) -> Any:
    """Return rows, whose columns are in the order of the schema, as an Arrow table."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return schema.empty_table()
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


class RowIds(NamedTuple):
    """The ledger's ids of the names in the rows, by row; 0 without a holder."""

    stream: Whole
    gpu: Whole
    device: Whole
    holder: Whole
    payer: Whole


def received(incoming: Incoming, cells: Whole, ids: RowIds, booked: Truth) -> Any:
    """Return the columns of RECEIVED. `booked` states for each row whether it counts as received."""
    sharing = incoming.sharing
    modes = [None if shared is None else shared.mode for shared in sharing.values]
    replicas = [None if shared is None else shared.replicas for shared in sharing.values]
    found = {
        **ids._asdict(),
        "seq": incoming.seq, "set_seq": incoming.sets.spread(incoming.sets.seq),
        "start_ms": incoming.start_ms, "end_ms": incoming.end_ms,
        "sharing": _by_row(modes, sharing.of_row, _TEXT), "replicas": _by_row(replicas, sharing.of_row, _I32),
        "health": _by_row(*incoming.names("health"), _TEXT), "method": _by_row(*incoming.names("method"), _TEXT),
        "capacity_us": incoming.numbers("capacity_us").arrow, "allocated_us": incoming.numbers("allocated_us").arrow,
        "measured_busy_us": incoming.numbers("busy_us").arrow,
        "gaps": _gaps(incoming), "digest": incoming.digests, "booked": booked,
        **dict(zip(CELLS, cells.T, strict=True)),
    }  # fmt: skip
    return pa.Table.from_arrays([pa.array(found[field.name], field.type) for field in RECEIVED], schema=RECEIVED)


def _by_row(values: Sequence[object], of_row: Whole, kind: Any) -> Any:
    if len(values) == 1:
        return pa.repeat(pa.scalar(values[0], kind), len(of_row))
    return pa.array(values, kind).take(pa.array(of_row))


def _gaps(incoming: Incoming) -> Any:
    places = incoming.with_gaps()
    if not places:
        return pa.nulls(len(incoming.records), _TEXT)
    arrow: list[str | None] = [None] * len(incoming.records)
    for place in places:
        arrow[place] = msgspec.json.encode(incoming.records[place].gaps).decode()
    return arrow


def cells(incoming: Incoming) -> Whole:
    """Return the cells (accountant.core.gpu_time_accounts.AccountVector) of each row.

    This is accountant.core.gpu_time_accounts.split on columns, which reads rows with gaps itself."""
    capacity, allocated = (incoming.numbers(name).value for name in ("capacity_us", "allocated_us"))
    busy = incoming.numbers("busy_us")
    by_holder = incoming.holder
    kinds = [None if held is None else held.kind for _, held in by_holder.values]
    working = ~incoming.lost
    unattributed = working & np.array([kind == "unattributed" for kind in kinds])[by_holder.of_row]
    unheld = working & np.array([kind is None for kind in kinds])[by_holder.of_row]
    held = working & ~unattributed & ~unheld
    unknown = np.where(busy.known, 0, allocated)
    booked = np.minimum(busy.value, allocated - unknown)
    found = {
        "busy_us": held * booked,
        "idle_us": held * (allocated - unknown - booked),
        "unknown_us": held * unknown,
        "unheld_us": held * (capacity - allocated) + unheld * capacity,
        "down_us": incoming.lost * capacity,
        "borrowed_us": held * (busy.value - booked),
        "unattributed_us": unattributed * busy.value,
    }
    times = {"held": (held, allocated), "in service": (working, capacity)}
    for measure in REPORTED:
        read, (rows, time_us) = incoming.numbers(measure.field), times[measure.known]
        found[measure.field] = read.value
        found[measure.unknown_column] = (rows & ~read.known) * time_us
    table = np.stack([found[name] for name in CELLS]).T  # stored column by column, as Arrow needs it
    for place in incoming.with_gaps():
        table[place] = split(incoming.records[place])
    return table


MOST_AS_LISTS = 64


def add(cursor: Cursor, table: str, schema: pa.Schema, rows: Sequence[Sequence[object]]) -> None:
    """Append rows, whose columns are in the order of `schema` and of the table."""
    if not rows:
        return
    if len(rows) <= MOST_AS_LISTS:
        lists = [list(column) for column in zip(*rows, strict=True)]
        cursor.plainly(f"INSERT INTO {table} SELECT {', '.join(['unnest(?)'] * len(lists))}", lists)
    else:
        cursor.insert(table, column_table(schema, rows))
