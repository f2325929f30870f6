"""Rows of a job trace -> jobs. Columns are described in docs/traces.md.

Pure: rows come as mappings of text or plain values, with the place each stands at (`file:line`).
A row that cannot be a job is a fault with its place, never skipped silently and never guessed at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import get_args

from agent.units import MS_PER_SECOND
from fairshare.simulator.jobs import Job, JobKind

REQUIRED = ("job_id", "submit_offset_s", "team", "gpus", "duration_s")
UTILISATION = ("mean_gpu_util_pct", "synthetic_mean_gpu_util_pct")
"""Either may be there; the first that is counts."""
DEFAULT_UTILISATION_PERMILLE = 500
"""Where a trace has no utilisation: half. It changes accounts (busy or idle), never shares."""
_LARGEST_S = 10 * 366 * 86_400
_LARGEST_GANG = 1_000_000
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a trace, and where. `str()` is one line."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class _Bad(ValueError):
    """One cell that cannot be read."""


def missing_columns(columns: Collection[str]) -> tuple[str, ...]:
    """Required columns that are not there."""
    return tuple(name for name in REQUIRED if name not in columns)


def parse_jobs(rows: Iterable[tuple[str, Mapping[str, object]]], start_ms: int) -> tuple[list[Job], list[Fault]]:
    """Jobs by submission, `submit_offset_s` counted from `start_ms`; and every fault in the order of the rows."""
    jobs: list[Job] = []
    faults: list[Fault] = []
    seen: dict[str, str] = {}
    for place, row in rows:
        try:
            job = _job(row, start_ms)
        except _Bad as error:
            faults.append(Fault(place, str(error)))
            continue
        if job.id in seen:
            faults.append(Fault(place, f"job_id {job.id!r} stands here twice, first at {seen[job.id]}"))
        else:
            seen[job.id] = place
            jobs.append(job)
    jobs.sort(key=lambda job: (job.submit_ms, job.id))
    return jobs, faults


def teams_of(jobs: Iterable[Job]) -> tuple[str, ...]:
    """Every team of the trace, sorted."""
    return tuple(sorted({job.queue for job in jobs}))


def _job(row: Mapping[str, object], start_ms: int) -> Job:
    job_id, team = _text(row, "job_id"), _text(row, "team")
    submit = _number(row, "submit_offset_s", 0, _LARGEST_S)
    duration = _number(row, "duration_s", 0.001, _LARGEST_S)
    gpus = _number(row, "gpus", 1, _LARGEST_GANG)
    if gpus != int(gpus):
        raise _Bad(f"gpus: {gpus:g} is not a whole number (parts of a GPU are not replayed)")
    return Job(
        id=job_id,
        queue=team,
        submit_ms=start_ms + round(submit * MS_PER_SECOND),
        gpus=int(gpus),
        duration_ms=max(1, round(duration * MS_PER_SECOND)),
        kind=_kind(row),
        utilisation_permille=_utilisation(row),
        preemptible=_flag(row, "preemptible", default=True),
    )


def _given(row: Mapping[str, object], name: str) -> bool:
    """Present and not empty; NaN is how tables write an empty number."""
    value = row.get(name)
    return value is not None and value != "" and value == value


def _text(row: Mapping[str, object], name: str) -> str:
    value = str(row.get(name, "") if _given(row, name) else "").strip()
    if not value:
        raise _Bad(f"{name}: is empty")
    if len(value) > 200 or not value.isprintable():
        raise _Bad(f"{name}: must be at most 200 printable characters")
    return value


def _number(row: Mapping[str, object], name: str, least: float, most: float) -> float:
    if not _given(row, name):
        raise _Bad(f"{name}: is empty")
    value = row[name]
    try:
        number = float(str(value))
    except ValueError:
        raise _Bad(f"{name}: {str(value)[:40]!r} is not a number") from None
    if not isfinite(number) or not least <= number <= most:
        raise _Bad(f"{name}: {number:g} is outside {least:g} … {most:g}")
    return number


def _utilisation(row: Mapping[str, object]) -> int:
    for name in UTILISATION:
        if _given(row, name):
            return round(_number(row, name, 0, 100) * 10)
    return DEFAULT_UTILISATION_PERMILLE


def _kind(row: Mapping[str, object]) -> JobKind:
    if not _given(row, "kind"):
        return "training"
    kinds: Sequence[JobKind] = get_args(JobKind)
    for kind in kinds:
        if row["kind"] == kind:
            return kind
    raise _Bad(f"kind: {str(row['kind'])[:40]!r} is none of {', '.join(kinds)}")


def _flag(row: Mapping[str, object], name: str, *, default: bool) -> bool:
    if not _given(row, name):
        return default
    value = _TRUTH.get(str(row[name]).strip().lower())
    if value is None:
        raise _Bad(f"{name}: {str(row[name])[:40]!r} is neither true nor false")
    return value
