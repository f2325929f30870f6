"""How much of the idle time was start-up: accountant.phases applied to the rows.

A breakdown of `allocated_idle`, asked for beside `usage` because only statements and reports need it.
However many pods the span has, they are looked at in parts, and rows are summed by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zoneinfo import ZoneInfo

import pyarrow as pa

from accountant.ledger import IdlePhases
from accountant.phases import Launch, gang, phase_spans
from accountant.store import columns
from accountant.store.database import Cursor, statement
from accountant.store.names import NO_DEVICE, devices, holders
from accountant.store.state import State
from accountant.store.usage import key_of, pieces_of
from accountant.wire import Dimension
from agent.units import BUCKET_MS

MOST_HOLDERS = 50_000
"""Holders looked at together: some 50 MiB."""
_PHASE = pa.schema([("holder", pa.int32()), ("phase", pa.string()), ("start_ms", pa.int64()), ("end_ms", pa.int64())])


def idle_phases(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
    most: int = MOST_HOLDERS,
) -> list[IdlePhases]:
    """See accountant.ledger.Ledger.idle_phases. most: holders that are held in memory at one time, about (a gang
    stays together)."""
    if start_ms >= end_ms:
        return []
    ((holding,),) = cursor.run(
        f"SELECT count(*) FROM ({statement('payers')})",  # noqa: S608 - our own text
        {"low": start_ms, "high": end_ms},
    )
    parts = -(-holding // most)
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for part in range(parts):
        _add(cursor, state, start_ms, end_ms, by, timezone, {"part": part, "parts": parts}, sums)
    return [
        IdlePhases(dict(zip(by, key, strict=True)), found.get("starting", 0), found.get("gang_waiting", 0))
        for key, found in sorted(sums.items())
    ]


def _add(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
    part: Mapping[str, int],
    sums: dict[tuple[str, ...], dict[str, int]],
) -> None:
    """Add the phases of one part of the holders."""
    rows = cursor.rows("launches", {"low": start_ms - BUCKET_MS, "high": end_ms, **part})
    spans = phase_spans(
        Launch(holder, gang(workload, f"{cluster}/{namespace}"), created, scheduled, started, observed)
        for holder, cluster, namespace, workload, created, scheduled, started, observed in rows
    )
    spans = [span for span in spans if span.start_ms < end_ms and span.end_ms > start_ms]
    if not spans:
        return
    table = columns.table(_PHASE, [(span.holder, span.phase, span.start_ms, span.end_ms) for span in spans])
    names = holders(cursor, {span.holder for span in spans}, state.fleet.team_labels, users="user" in by)
    device_names = devices(cursor)
    for piece in pieces_of(state, start_ms, end_ms, frozenset(by), ZoneInfo(timezone)):
        bounds = {"low": piece.start_ms - BUCKET_MS, "start": piece.start_ms, "end": piece.end_ms}
        for gpu, device, payer, phase, idle_us in cursor.rows("phase_idle", bounds, incoming=table):
            name = device_names.get(device, NO_DEVICE)
            group = sums.setdefault(key_of(by, state.fleet, piece, gpu, name, names[payer]), {})
            group[phase] = group.get(phase, 0) + int(idle_us)
