"""Records as Arrow tables, one per group commit: the fast way into the engine.

The column order here is the column order of the tables in `migrations/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
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
KIND = pa.schema([("id", _I32), ("kind", _I32)])


def table(schema: Any, rows: Iterable[Sequence[object]]) -> Any:
    """Rows in the schema's column order; an empty table of that shape where there are none."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return schema.empty_table()
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


_PLAIN = attrgetter(
    "seq", "start_ms", "end_ms", "health", "method", "capacity_us", "allocated_us", "busy_us", "sm_active_us",
    "tensor_active_us", "sharing", "gaps",
)  # fmt: skip


def received(
    rows: Sequence[UsageInterval],
    cells: Sequence[Cells],
    digests: Sequence[int],
    of_set: Sequence[tuple[int, int, int, bool]],
    parties: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> Any:
    """RECEIVED, column by column. of_set: per row, its set's stream, first number and GPU, and whether it counts as
    it came. parties: device, holder and payer of each row."""
    (
        seqs, starts, ends, health, method, capacity, allocated, busy, sm_active, tensor_active, sharing, gaps,
    ) = zip(*map(_PLAIN, rows), strict=True)  # fmt: skip
    streams, set_seqs, gpus, booked = zip(*of_set, strict=True)
    found = (
        streams, seqs, set_seqs, starts, ends, gpus, *parties,
        [shared and shared.mode for shared in sharing], [shared and shared.replicas for shared in sharing],
        health, method, capacity, allocated, busy, sm_active, tensor_active,
        [msgspec.json.encode(some).decode() if some else None for some in gaps], digests, booked,
        *zip(*cells, strict=True),
    )  # fmt: skip
    return pa.Table.from_arrays(
        [pa.array(column, type=field.type) for column, field in zip(found, RECEIVED, strict=True)], schema=RECEIVED
    )
