"""Records as Arrow tables, one per group commit: the fast way into the engine.

The column order here is the column order of the tables in `migrations/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from accountant.accounts import CELLS
from accountant.store.writing.incoming import Incoming, Truth, Whole

_I32, _I64, _U64, _TEXT = pa.int32(), pa.int64(), pa.uint64(), pa.string()
_CELLS = [(name, _I64) for name in CELLS]

RECEIVED = pa.schema(
    [
        ("stream", _I32), ("seq", _I64), ("set_seq", _I64), ("start_ms", _I64), ("end_ms", _I64), ("gpu", _I32),
        ("device", _I32), ("holder", _I32), ("payer", _I32), ("sharing", _TEXT), ("replicas", _I32), ("health", _TEXT),
        ("method", _TEXT), ("capacity_us", _I64), ("allocated_us", _I64), ("measured_busy_us", _I64),
        ("sm_active_us", _I64), ("tensor_active_us", _I64), ("gaps", _TEXT), ("digest", _U64), ("booked", pa.bool_()),
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
POD_NODE = pa.schema([("cluster", _TEXT), ("uid", _TEXT), ("node", _TEXT), ("by_row", pa.bool_())])
POD_KEY = pa.schema([("cluster", _TEXT), ("uid", _TEXT)])
SPAN = pa.schema([("tag", _I64), ("gpu", _I32), ("start_ms", _I64), ("end_ms", _I64)])
STRETCH = pa.schema([*SPAN, ("reference_ms", _I64)])
BUCKET = pa.schema([("tag", _I64), ("gpu", _I32), ("at_ms", _I64)])
HOUR = pa.schema([("at_ms", _I64)])
NUMBER = pa.schema([("stream", _I32), ("seq", _I64)])
ID = pa.schema([("id", _I32)])
KIND = pa.schema([("id", _I32), ("kind", _I32)])


def table(schema: Any, rows: Iterable[Sequence[object]]) -> Any:
    """Rows in the schema's column order; an empty table of that shape where there are none."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return schema.empty_table()
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


class Ids(NamedTuple):
    """The ledger's numbers for what rows name, by row; 0 is nobody."""

    stream: Whole
    gpu: Whole
    device: Whole
    holder: Whole
    payer: Whole


def received(incoming: Incoming, cells: Whole, ids: Ids, booked: Truth) -> Any:
    """RECEIVED, column by column. booked: whether the row counts as it came."""
    sharing = incoming.sharing
    modes = [None if shared is None else shared.mode for shared in sharing.values]
    replicas = [None if shared is None else shared.replicas for shared in sharing.values]
    found = {
        **ids._asdict(),
        "seq": incoming.seq, "set_seq": incoming.sets.spread(incoming.sets.seq),
        "start_ms": incoming.start_ms, "end_ms": incoming.end_ms,
        "sharing": _taken(modes, sharing.of_row, _TEXT), "replicas": _taken(replicas, sharing.of_row, _I32),
        "health": _taken(*incoming.names("health"), _TEXT), "method": _taken(*incoming.names("method"), _TEXT),
        "capacity_us": incoming.numbers("capacity_us").told, "allocated_us": incoming.numbers("allocated_us").told,
        "measured_busy_us": incoming.numbers("busy_us").told, "sm_active_us": incoming.numbers("sm_active_us").told,
        "tensor_active_us": incoming.numbers("tensor_active_us").told,
        "gaps": _gaps(incoming), "digest": incoming.digests, "booked": booked,
        **dict(zip(CELLS, cells.T, strict=True)),
    }  # fmt: skip
    return pa.Table.from_arrays([pa.array(found[field.name], field.type) for field in RECEIVED], schema=RECEIVED)


def _taken(values: Sequence[object], of_row: Whole, kind: Any) -> Any:
    if len(values) == 1:
        return pa.repeat(pa.scalar(values[0], kind), len(of_row))
    return pa.array(values, kind).take(pa.array(of_row))


def _gaps(incoming: Incoming) -> Any:
    places = incoming.with_gaps()
    if not places:
        return pa.nulls(len(incoming.records), _TEXT)
    told: list[str | None] = [None] * len(incoming.records)
    for place in places:
        told[place] = msgspec.json.encode(incoming.records[place].gaps).decode()
    return told
