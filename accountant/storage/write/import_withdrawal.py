"""Withdraws an import from the ledger, so that the same history can be imported again.

The rows of an import in a span count no more, as if they had never arrived: what they displaced counts again, their
GPUs are capacity only as far as other rows reach, and what the import said about its holders is forgotten. The rows
themselves stay in the file with the method `withdrawn`, because the archive has them too; the hours in which they lie
are therefore never frozen. An act records the withdrawal, and the replay of an archive repeats it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from accountant.core.claim_overlap import Span
from accountant.core.import_epochs import import_prefix
from accountant.core.periods import utc
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import ImportSpan
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.write import record_columns, rollups
from accountant.storage.write.interval_writer import TouchedSpan, settle
from accountant.storage.write.rollups import DailySums, hours_of
from gputally.base.units import MS_PER_HOUR, US_PER_HOUR


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What counts no more: rows, and GPU-microseconds of capacity."""

    rows: int
    capacity_us: int


def withdraw(cursor: Cursor, span: ImportSpan, days: DailySums, frozen: Collection[int]) -> Withdrawn:
    """Withdraw in the current transaction. The rows of frozen hours in the span are in the file.

    days: the days that have sums. frozen: the hours whose rows are not in the file."""
    given = {"cluster": span.cluster, "prefix": import_prefix(span.source), "start": span.start_ms, "end": span.end_ms}
    for part in statement("withdraw_import").split(";"):
        cursor.run(part, {name: value for name, value in given.items() if f"${name}" in part})
    rows, capacity_us = cursor.run("SELECT count(*), coalesce(sum(capacity_us) FILTER (booked), 0) FROM withdrawn")[0]
    if rows:
        _withdraw_rows(cursor, span, days, frozen)
    queues = f"{span.source}:"  # a batch system's history has its name, and so have the queues of its jobs
    jobs = {"queues": queues, "start": span.start_ms, "end": span.end_ms, "cluster": span.cluster}
    for part in statement("withdraw_facts").split(";"):
        cursor.run(part, {name: value for name, value in jobs.items() if f"${name}" in part})
    return Withdrawn(int(rows), int(capacity_us))


def _withdraw_rows(cursor: Cursor, span: ImportSpan, days: DailySums, frozen: Collection[int]) -> None:
    """Settle what overlapped the withdrawn rows, and drop the sums and tenures that contain them."""
    regions = [
        TouchedSpan(*found)
        for found in cursor.run("SELECT gpu, min(start_ms), max(end_ms) FROM withdrawn GROUP BY gpu ORDER BY gpu")
    ]
    settled = settle(cursor, regions)
    hours = {hour for (hour,) in cursor.run("SELECT DISTINCT start_ms - start_ms % 3600000 FROM withdrawn")}
    resum(cursor, hours | hours_of(settled), days)
    _shorten_tenures(cursor, (span.start_ms, span.end_ms), frozen)


def resum(cursor: Cursor, hours: Collection[int], days: DailySums) -> None:
    """Drop the sums of these hours, which are summed again from the rows that remain."""
    incoming = record_columns.column_table(record_columns.HOUR, [(hour,) for hour in sorted(hours)])
    cursor.rows("drop_sums", incoming=incoming)
    rollups.drop(cursor, days.touching(hours))
    cursor.run("DELETE FROM unfolded WHERE at_ms IN (SELECT unnest($hours))", {"hours": sorted(hours)})
    cursor.run(
        "INSERT INTO unfolded SELECT DISTINCT start_ms - start_ms % $hour AS hour_ms FROM present "
        "WHERE start_ms - start_ms % $hour IN (SELECT unnest($hours))",
        {"hours": sorted(hours), "hour": MS_PER_HOUR},
    )


def _shorten_tenures(cursor: Cursor, span: Span, frozen: Collection[int]) -> None:
    """Let the tenures of the import's GPUs reach only as far as its remaining rows. Rows that are only in the archive
    lie outside the span, where the stored tenure is right."""
    found = cursor.rows("imported_tenures")
    low, high = span
    tenures: list[tuple[int, str, int, int]] = []
    for gpu, node, first, last, row_first, row_last in found:
        spans = [] if row_first is None else [(row_first, row_last)]
        if first is not None and any(first <= hour < low for hour in frozen):
            spans.append((first, min(last, low)))
        if last is not None and any(high <= hour < last for hour in frozen):
            spans.append((max(first, high), last))
        if spans:
            tenures.append((gpu, node, min(start for start, _ in spans), max(end for _, end in spans)))
    for gpu, node, *_ in found:
        cursor.run("DELETE FROM tenure WHERE imported AND gpu = ? AND node = ?", [gpu, node])
    if tenures:
        gpus, nodes, firsts, lasts = map(list, zip(*tenures, strict=True))
        given = {"gpus": gpus, "nodes": nodes, "firsts": firsts, "lasts": lasts, "imported": [True] * len(tenures)}
        cursor.rows("add_tenure", given)


def withdrawal_act(span: ImportSpan, found: Withdrawn, now_ms: int, who: str, reason: str) -> NewAct:
    """Return the act that records a withdrawal."""
    text = f"{reason} ({utc(span.start_ms)} to {utc(span.end_ms)}, {found.capacity_us / US_PER_HOUR:.1f} GPU-hours)"
    return NewAct(now_ms, "withdrawn", f"{span.source}/{span.cluster}", who, text, json.dumps(span.model_dump()))
