"""Reports of epochs in their table: appended, bounded per job, read at their earliest (accountant.progress)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import pyarrow as pa

from accountant.progress import MOST_EPOCHS, EpochReport, JobKey
from accountant.store.database import Cursor
from accountant.store.writing import columns

_JOB = pa.schema([("cluster", pa.string()), ("namespace", pa.string()), ("job", pa.string())])
_PROGRESS = pa.schema(
    [*_JOB, ("epoch", pa.int64()), ("at_ms", pa.int64()), ("received_ms", pa.int64()), ("who", pa.string())]
)


def write_epochs(cursor: Cursor, reports: Iterable[EpochReport], now_ms: int, most: int = MOST_EPOCHS) -> int:
    """How many said something new. An epoch beyond `most` of one job is left out; instants are not after now_ms."""
    earliest: dict[tuple[JobKey, int], EpochReport] = {}
    for report in reports:
        at = report.key, report.epoch
        if at not in earliest or report.at_ms < earliest[at].at_ms:
            earliest[at] = report
    known = {(one.key, one.epoch): one.at_ms for one in read_epochs(cursor, {key for key, _ in earliest})}
    count = Counter(key for key, _ in known)
    rows: list[tuple[object, ...]] = []
    for (key, epoch), report in sorted(earliest.items()):
        at_ms = min(report.at_ms, now_ms)
        before = known.get((key, epoch))
        if before is None:
            count[key] += 1
        if (before is None and count[key] <= most) or (before is not None and at_ms < before):
            rows.append((*key, epoch, at_ms, now_ms, report.who))
    if rows:
        cursor.rows("add_progress", incoming=columns.table(_PROGRESS, rows))
    return len(rows)


def read_epochs(cursor: Cursor, keys: Collection[JobKey]) -> list[EpochReport]:
    """Of these jobs, by job and instant."""
    if not keys:
        return []
    rows = cursor.rows("known_epochs", incoming=columns.table(_JOB, sorted(keys)))
    return [EpochReport(JobKey(*row[:3]), *row[3:]) for row in rows]


def epochs_between(cursor: Cursor, start_ms: int, end_ms: int) -> list[EpochReport]:
    """Of all jobs, by job and instant."""
    rows = cursor.rows("epochs_between", {"low": start_ms, "high": end_ms})
    return [EpochReport(JobKey(*row[:3]), *row[3:]) for row in rows]
