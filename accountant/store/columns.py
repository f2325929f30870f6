"""Records as Arrow tables, one per group commit: the fast way into the engine.

The column order here is the column order of the tables in `migrations/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from accountant.accounts import CELLS, Cells
from agent.wire import UsageInterval

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
POD = pa.schema(
    [("cluster", _TEXT), ("uid", _TEXT), ("namespace", _TEXT), ("name", _TEXT), ("workload", _TEXT),
     ("queue_ref", _TEXT), ("observed_ms", _I64), ("content", _TEXT)]
)  # fmt: skip
POD_LABEL = pa.schema([("cluster", _TEXT), ("uid", _TEXT), ("observed_ms", _I64), ("labels", _TEXT)])
POD_KEY = pa.schema([("cluster", _TEXT), ("uid", _TEXT)])
SPAN = pa.schema([("tag", _I64), ("gpu", _I32), ("start_ms", _I64), ("end_ms", _I64)])
STRETCH = pa.schema([*SPAN, ("reference_ms", _I64)])
BUCKET = pa.schema([("tag", _I64), ("gpu", _I32), ("at_ms", _I64)])
HOUR = pa.schema([("at_ms", _I64)])
NUMBER = pa.schema([("stream", _I32), ("seq", _I64)])
ID = pa.schema([("id", _I32)])


def table(schema: Any, rows: Iterable[Sequence[object]]) -> Any:
    """Rows in the schema's column order; an empty table of that shape where there are none."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return schema.empty_table()
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def received(
    row: UsageInterval, cells: Cells, digest: int, ids: tuple[int, int, int, int, int, int], booked: bool
) -> tuple[object, ...]:
    """One row of RECEIVED. ids: stream, set_seq, gpu, device, holder, payer."""
    stream, set_seq, gpu, device, holder, payer = ids
    return (
        stream, row.seq, set_seq, row.start_ms, row.end_ms, gpu, device, holder, payer,
        row.sharing.mode if row.sharing else None, row.sharing.replicas if row.sharing else None,
        row.health, row.method, row.capacity_us, row.allocated_us, row.busy_us,
        row.sm_active_us, row.tensor_active_us, msgspec.json.encode(row.gaps).decode() if row.gaps else None,
        digest, booked, *cells,
    )  # fmt: skip


def pays(row: UsageInterval) -> bool:
    """Whether the holder does: lost, unheld and unattributed time is nobody's."""
    return row.health == "ok" and row.holder is not None and row.holder.kind != "unattributed"
