"""Job traces from files: CSV, CSV compressed with gzip, Parquet. Columns are described in docs/traces.md."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fairshare.simulator import trace
from fairshare.simulator.jobs import Job

MAX_ROWS = 2_000_000
SHOWN_FAULTS = 20
Rows = Iterator[tuple[str, Mapping[str, object]]]


class TraceError(Exception):
    """A trace that cannot be replayed; `str()` is a line per fault, each with its place."""


def load(path: Path, start_ms: int) -> list[Job]:
    """The jobs of a trace file, by submission. Raises TraceError, also for a missing or unreadable file."""
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _csv(path)
        jobs, faults = trace.parse_jobs(rows, start_ms)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from error
    if faults:
        shown = [str(fault) for fault in faults[:SHOWN_FAULTS]]
        if len(faults) > SHOWN_FAULTS:
            shown.append(f"{path}: and {len(faults) - SHOWN_FAULTS} more rows like these")
        raise TraceError("\n".join(shown))
    if not jobs:
        raise TraceError(f"{path}: no jobs")
    return jobs


def _csv(path: Path) -> Rows:
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        reader = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
        _check_columns(path, reader.fieldnames or ())
        for number, row in enumerate(reader):
            place = f"{path}:{reader.line_num}"
            if number >= MAX_ROWS:
                raise TraceError(f"{place}: more than {MAX_ROWS:,} rows")
            if None in row:
                raise TraceError(f"{place}: more cells than columns")
            yield place, row


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as raw:
            table = pyarrow.parquet.ParquetFile(raw)
            wanted = [*trace.REQUIRED, *trace.UTILISATION, "kind", "preemptible"]
            names = table.schema_arrow.names
            _check_columns(path, names)
            if table.metadata.num_rows > MAX_ROWS:
                raise TraceError(f"{path}: more than {MAX_ROWS:,} rows")
            number = 0
            for batch in table.iter_batches(columns=[name for name in wanted if name in names]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except pyarrow.ArrowException as error:
        raise TraceError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = trace.missing_columns(columns)
    if missing:
        raise TraceError(f"{path}:1: no column {', '.join(missing)} (see docs/traces.md)")
