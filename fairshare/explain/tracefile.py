"""Job traces from files: CSV, CSV compressed with gzip, Parquet. Columns are described in docs/traces.md."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

from fairshare.errors import FairshareError
from fairshare.simulator import trace
from fairshare.simulator.jobs import Job

MAX_ROWS = 2_000_000
SHOWN_FAULTS = 20
Rows = Iterator[tuple[str, Mapping[str, object]]]


class TraceError(FairshareError):
    """A trace that cannot be replayed; `str()` is a line per fault, each with its place."""


def load(path: Path, start_ms: int, *, team: str = "team") -> list[Job]:
    """The jobs of a trace file, by submission. team: the column that says whose job it is.

    Raises TraceError, also for a missing or unreadable file."""
    jobs, faults = load_with_faults(path, start_ms, team=team)
    if faults:
        raise TraceError(_told(path, faults))
    return jobs


def load_with_faults(path: Path, start_ms: int, *, team: str = "team") -> tuple[list[Job], list[trace.Fault]]:
    """The jobs, and the rows that cannot be one. Raises TraceError where nothing can be read."""
    try:
        rows = _parquet(path, team) if path.suffix == ".parquet" else _csv(path, team)
        jobs, faults = trace.parse_jobs(rows, start_ms)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from error
    if not jobs:
        raise TraceError(_told(path, faults) if faults else f"{path}: no jobs")
    return jobs, faults


def _told(path: Path, faults: Sequence[trace.Fault]) -> str:
    """A line per fault, as many as anybody reads."""
    shown = [str(fault) for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS:
        shown.append(f"{path}: and {len(faults) - SHOWN_FAULTS} more rows like these")
    return "\n".join(shown)


def _csv(path: Path, team: str) -> Rows:
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        reader = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
        _check_columns(path, reader.fieldnames or (), team)
        for number, row in enumerate(reader):
            place = f"{path}:{reader.line_num}"
            if number >= MAX_ROWS:
                raise TraceError(f"{place}: more than {MAX_ROWS:,} rows")
            if None in row:
                raise TraceError(f"{place}: more cells than columns")
            yield place, _named(row, team)


def _parquet(path: Path, team: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as raw:
            table = pyarrow.parquet.ParquetFile(raw)
            wanted = [team, *trace.REQUIRED, *trace.UTILISATION, "kind", "preemptible"]
            names = table.schema_arrow.names
            _check_columns(path, names, team)
            if table.metadata.num_rows > MAX_ROWS:
                raise TraceError(f"{path}: more than {MAX_ROWS:,} rows")
            number = 0
            for batch in table.iter_batches(columns=list(dict.fromkeys(name for name in wanted if name in names))):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", _named(row, team)
    except pyarrow.ArrowException as error:
        raise TraceError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error


def _named(row: Mapping[str, object], team: str) -> Mapping[str, object]:
    return row if team == "team" else {**row, "team": row[team]}


def _check_columns(path: Path, columns: Sequence[str], team: str) -> None:
    read = {team, *trace.REQUIRED, *trace.UTILISATION, "kind", "preemptible"}
    twice = next((name for number, name in enumerate(columns) if name in read and name in columns[:number]), None)
    if twice is not None:
        raise TraceError(f"{path}:1: column {twice!r} stands there twice")
    missing = trace.missing_columns(["team" if name == team else name for name in columns])
    if team != "team" and team not in columns:
        missing = (team, *(name for name in missing if name != "team"))
    if missing:
        raise TraceError(f"{path}:1: no column {', '.join(missing)} (see docs/traces.md)")


def shares(path: Path, *, team: str = "team") -> dict[str, float]:
    """Configured share per team from a CSV with the columns `team` and `share`; rows without a share are left
    out. Raises TraceError."""
    found: dict[str, float] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            missing = [name for name in (team, "share") if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}:1: no column {', '.join(missing)}")
            for row in reader:
                text, place = (row["share"] or "").strip(), f"{path}:{reader.line_num}"
                if not text:
                    continue
                try:
                    value = float(text)
                except ValueError:
                    raise TraceError(f"{place}: share: {text[:40]!r} is not a number") from None
                if not 0 < value < inf or row[team] in found:
                    raise TraceError(f"{place}: {row[team]!r} needs one share above 0")
                found[row[team]] = value
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from error
    if not found:
        raise TraceError(f"{path}: no share")
    return found
