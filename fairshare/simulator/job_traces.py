"""Reads jobs from trace files and teams' shares from CSV, and reconstructs jobs from the ledger's history.

Every row of a trace that is not a valid job is reported as a fault with its place (`file:line`, or `file: row N` in a
Parquet file).

The ledger knows which jobs ran, but not which jobs were requested. The reconstruction makes the assumptions below.
Every result shows these assumptions, and those about the cluster (`ASSUMED`).

- A job is one gang of as many GPUs as it held in its fullest hour. If it was too short to fill an hour, the gang is the
  number of different GPUs that it held.
- A job was submitted at the time when it first held a GPU, minus the median wait of its queue. Every job finished its
  work.
- If a job holds GPUs again within a day after it stopped, it is the same job. After a longer gap it counts as a new
  job.
- The ledger has no jobs that never got a GPU, so demand is underestimated where queues waited for long."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import get_args

from fairshare.simulator.simulation_model import JobKind, SimulatedJob, Workload, workload_of_rows
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_SECOND

REQUIRED = ("job_id", "submit_offset_s", "team", "gpus", "duration_s")
UTILISATION = ("mean_gpu_util_pct", "synthetic_mean_gpu_util_pct")
"""The columns that can contain the utilisation in percent. In each row the first one with a value counts."""
OPTIONAL = (*UTILISATION, "kind", "preemptible")
DEFAULT_UTILISATION_PERMILLE = 500
"""The utilisation, in permille, of a job whose row has none. It affects busy and idle time, never shares."""
_LARGEST_S = 10 * 366 * 86_400
_LARGEST_GANG = 1_000_000
_LARGEST_SHARE = 1e12
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class TraceFault:
    """The reason why a row of a trace is not a valid job, and the row's place. `str()` gives `place: reason`."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class _BadCell(ValueError):
    """A cell with an invalid value; the text names the column."""


def parse_jobs(
    rows: Iterable[tuple[str, Mapping[str, object]]], start_ms: int
) -> tuple[list[SimulatedJob], list[TraceFault]]:
    """Return the jobs in the order of submission, and the faults in the order of the rows.

    rows: the place of each row, and its cells by column.
    start_ms: the time from which `submit_offset_s` counts."""
    jobs: list[SimulatedJob] = []
    faults: list[TraceFault] = []
    seen: dict[str, str] = {}
    for place, row in rows:
        try:
            job = _job(row, start_ms)
        except _BadCell as error:
            faults.append(TraceFault(place, str(error)))
            continue
        if job.id in seen:
            faults.append(TraceFault(place, f"job_id {job.id!r} occurs twice, first at {seen[job.id]}"))
        else:
            seen[job.id] = place
            jobs.append(job)
    jobs.sort(key=lambda job: (job.submit_ms, job.id))
    return jobs, faults


def teams_of(jobs: Iterable[SimulatedJob]) -> tuple[str, ...]:
    """Return the teams of the jobs, sorted."""
    return tuple(sorted({job.queue for job in jobs}))


def _job(row: Mapping[str, object], start_ms: int) -> SimulatedJob:
    job_id, team = _text(row, "job_id"), _text(row, "team")
    submit = _number(row, "submit_offset_s", 0, _LARGEST_S)
    duration = _number(row, "duration_s", 0.001, _LARGEST_S)
    gpus = _number(row, "gpus", 1, _LARGEST_GANG)
    if gpus != int(gpus):
        raise _BadCell(f"gpus: {gpus:g} is not a whole number; a replay has only whole GPUs")
    return SimulatedJob(
        id=job_id,
        queue=team,
        submit_ms=start_ms + round(submit * MS_PER_SECOND),
        gpus=int(gpus),
        duration_ms=max(1, round(duration * MS_PER_SECOND)),
        kind=_kind(row),
        utilisation_permille=_utilisation(row),
        preemptible=_flag(row, "preemptible", default=True),
    )


def _has_value(row: Mapping[str, object], name: str) -> bool:
    """Return True if the cell exists and is neither blank nor NaN."""
    value = row.get(name)
    return value is not None and value == value and not (isinstance(value, str) and not value.strip())


def _text(row: Mapping[str, object], name: str) -> str:
    if not _has_value(row, name):
        raise _BadCell(f"{name}: is empty")
    value = str(row[name]).strip()
    if len(value) > 200 or not value.isprintable():
        raise _BadCell(f"{name}: must be at most 200 printable characters")
    return value


def _number(row: Mapping[str, object], name: str, least: float, most: float) -> float:
    if not _has_value(row, name):
        raise _BadCell(f"{name}: is empty")
    value = row[name]
    try:
        number = float(str(value))
    except ValueError:
        raise _BadCell(f"{name}: {str(value)[:40]!r} is not a number") from None
    if not isfinite(number) or not least <= number <= most:
        raise _BadCell(f"{name}: {number:g} is not between {least:g} and {most:,.0f}")
    return number


def _utilisation(row: Mapping[str, object]) -> int:
    for name in UTILISATION:
        if _has_value(row, name):
            return round(_number(row, name, 0, 100) * 10)
    return DEFAULT_UTILISATION_PERMILLE


def _kind(row: Mapping[str, object]) -> JobKind:
    if not _has_value(row, "kind"):
        return "training"
    kinds: Sequence[JobKind] = get_args(JobKind)
    for kind in kinds:
        if row["kind"] == kind:
            return kind
    raise _BadCell(f"kind: {str(row['kind'])[:40]!r} is none of {', '.join(kinds)}")


def _flag(row: Mapping[str, object], name: str, *, default: bool) -> bool:
    if not _has_value(row, name):
        return default
    value = _TRUTH.get(str(row[name]).strip().lower())
    if value is None:
        raise _BadCell(f"{name}: {str(row[name])[:40]!r} is neither true nor false")
    return value


MAX_ROWS = 2_000_000
SHOWN_FAULTS = 20
Rows = Iterator[tuple[str, Mapping[str, object]]]


class TraceError(FairshareError):
    """A trace cannot be replayed. The text has one line per fault, with its place."""


def load(path: Path, start_ms: int, *, team: str = "team") -> list[SimulatedJob]:
    """Return the jobs of a trace file in the order of submission.

    Raises TraceError if a row is invalid, if there is no job, or if the file cannot be read.

    team: the name of the column with a job's team."""
    jobs, faults = load_with_faults(path, start_ms, team=team)
    if faults:
        raise TraceError(_fault_lines(path, faults))
    return jobs


def load_with_faults(path: Path, start_ms: int, *, team: str = "team") -> tuple[list[SimulatedJob], list[TraceFault]]:
    """Return the jobs of a trace file and the faults of its invalid rows. Raises TraceError if there is no job."""
    with _readable(path):
        rows = _parquet(path, team) if path.suffix == ".parquet" else _csv(path, team, REQUIRED)
        jobs, faults = parse_jobs(rows, start_ms)
    if not jobs:
        raise TraceError(_fault_lines(path, faults) if faults else f"{path}: the file has no jobs")
    return jobs, faults


def _fault_lines(path: Path, faults: Sequence[TraceFault]) -> str:
    """Return a line for each of the first `SHOWN_FAULTS` faults, and a last line with the number of further faults."""
    shown = [str(fault) for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS:
        shown.append(f"{path}: {len(faults) - SHOWN_FAULTS} more rows are invalid")
    return "\n".join(shown)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise TraceError if the block fails because the file cannot be read or is no CSV file."""
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from error


def _csv(path: Path, team: str, required: Sequence[str]) -> Rows:
    """Yield the rows of a CSV file with their places. The column `team` is returned under the name `team`."""
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        reader = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
        _check_columns(path, reader.fieldnames or (), team, required)
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
            wanted = [team, *REQUIRED, *OPTIONAL]
            names = table.schema_arrow.names
            _check_columns(path, names, team, REQUIRED)
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


def _check_columns(path: Path, columns: Sequence[str], team: str, required: Sequence[str]) -> None:
    read = [team if name == "team" else name for name in required]
    twice = next((name for name in (*read, *OPTIONAL) if columns.count(name) > 1), None)
    if twice is not None:
        raise TraceError(f"{path}:1: column {twice!r} occurs twice")
    missing = [name for name in read if name not in columns]
    if missing:
        raise TraceError(f"{path}:1: no column {', '.join(missing)} (see docs/traces.md)")


def shares(path: Path, *, team: str = "team") -> dict[str, float]:
    """Return the share of each team from a CSV with the columns `team` and `share`. Raises TraceError.

    A team with an empty share is left out. team: the name of the column with the team."""
    share_of: dict[str, float] = {}
    with _readable(path):
        for place, row in _csv(path, team, ("team", "share")):
            if not _has_value(row, "share"):
                continue
            try:
                name, share = _text(row, "team"), _number(row, "share", 0, _LARGEST_SHARE)
            except _BadCell as error:
                raise TraceError(f"{place}: {error}") from error
            if not share or name in share_of:
                raise TraceError(f"{place}: {name!r} needs exactly one share, a number above 0")
            share_of[name] = share
    if not share_of:
        raise TraceError(f"{path}: no team has a share; write a number above 0 into the column `share`")
    return share_of


HOUR_S = 3600
SAME_JOB_H = 24
FULL_AFTER_H = 3
"""A job that held GPUs in at least this many hours held all of them for at least one full hour."""
US_PER_GPU_HOUR = 3_600_000_000
_CLOCK_ERROR = 0.02
"""The part of a GPU below which held time is an inaccuracy of the clock, not another GPU."""
ASSUMED = (
    "a job requested the GPUs that it held in its fullest hour, and finished its work",
    "a job was submitted before it first held a GPU, by the median wait of its queue",
    "a job that holds GPUs again within a day after it stopped is the same job; after a longer gap it is a new job",
    "the ledger has no jobs that never got a GPU, so demand is underestimated where queues waited for long",
    "the cluster, or each model by which the policy has quotas, is one pool of equal GPUs of the median capacity",
    "each leaf queue has its part of its parents' weight",
)


@dataclass(frozen=True, slots=True)
class HeldHour:
    """The GPU-microseconds that a job of a queue held in an hour. hour: hours since the start of the history."""

    queue: str
    job: str
    hour: int
    gpu_us: int


def jobs(
    held: Iterable[HeldHour],
    queues: Sequence[str],
    gpus_of: Mapping[tuple[str, str], int],
    waits_s: Mapping[str, float],
) -> Workload:
    """Return the workload of `queues`, reconstructed from held hours. `left_out` counts the jobs of other queues.

    gpus_of: the number of different GPUs that each (queue, job) held.
    waits_s: the median wait of each queue."""
    by_job: dict[tuple[str, str], dict[int, int]] = {}
    for each in held:
        if each.gpu_us > 0:
            hours = by_job.setdefault((each.queue, each.job), {})
            hours[each.hour] = hours.get(each.hour, 0) + each.gpu_us
    index = {name: i for i, name in enumerate(queues)}
    rows: list[tuple[int, str, int, int, int]] = []
    left_out = 0
    for (queue, job), hours in sorted(by_job.items()):
        if queue not in index:
            left_out += 1
            continue
        for run in _runs(sorted(hours)):
            amounts = [hours[hour] for hour in run]
            gang = _gang(amounts, gpus_of.get((queue, job), 0))
            start = run[0] * HOUR_S
            if len(run) > 1:  # a job that continues holds its GPUs to the end of its first hour
                start += max(0, HOUR_S - ceil(amounts[0] / gang / 1e6))
            submit = max(0, start - round(waits_s.get(queue, 0.0)))
            rows.append((submit, job, gang, max(1, ceil(sum(amounts) / gang / 1e6)), index[queue]))
    rows.sort()
    return workload_of_rows(queues, [(submit_s, *row) for submit_s, _, *row in rows], left_out)


def capacity(gpu_us_by_hour: Iterable[int]) -> int:
    """Return the median over hours of the GPUs that were not down; 0 if no hour is known."""
    known = [amount for amount in gpu_us_by_hour if amount > 0]
    return round(median(known) / US_PER_GPU_HOUR) if known else 0


def _runs(hours: Sequence[int]) -> list[list[int]]:
    """Split the hours in which a job held GPUs wherever more than `SAME_JOB_H` hours lie between two of them."""
    runs: list[list[int]] = []
    for hour in hours:
        if runs and hour - runs[-1][-1] <= SAME_JOB_H:
            runs[-1].append(hour)
        else:
            runs.append([hour])
    return runs


def _gang(amounts: Sequence[int], different: int) -> int:
    """Return the GPUs that a job requested.

    amounts: the GPU-microseconds that it held in each hour.
    different: the number of different GPUs that it held."""
    fullest = max(1, ceil(max(amounts) / US_PER_GPU_HOUR - _CLOCK_ERROR))
    return max(fullest, different) if len(amounts) < FULL_AFTER_H else fullest
