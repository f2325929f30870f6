"""Reads Slurm jobs from sacct or slurmdbd as pod facts.

An agent on a Slurm node knows only a job's number; Slurm's accounting has its user, account and name. `queue_ref` is
`slurm:ACCOUNT`; the account is used as the namespace, so that an inventory can assign it to a team. A record that
cannot be read becomes a `Fault` with its place.

sacct: `SLURM_TIME_FORMAT=%s sacct --parsable2 --allusers --format=JobIDRaw,JobID,JobName,Account,User,…`; columns are
found by their heading, times are epoch seconds, or local times in the given zone.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from agent.wire import PodFacts
from gputally.base.units import MS_PER_SECOND

MOST_STEPS = 64
"""Maximum number of step names stored per job."""
_NEVER = frozenset({"", "Unknown", "None", "N/A", "0"})
_NEEDED = ("JobIDRaw", "Account")


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that was left out: its line in the file (or place in the JSON) and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """array: number of the array, if the job is one of its tasks. steps: id -> name. types: GPUs by type, as far as
    known. cluster: the column Cluster, if the file has one."""

    id: str
    name: str
    account: str
    user: str
    array: str = ""
    partition: str = ""
    nodes: str = ""
    gpus: int = 0
    priority: int | None = None
    submitted_ms: int | None = None
    started_ms: int | None = None
    ended_ms: int | None = None
    steps: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """jobs: one per number, the last one in the file; runs: all records of jobs, including those of requeued ones. Both
    in the order of the file."""

    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...]
    runs: tuple[Job, ...] = ()


def facts(job: Job, observed_ms: int) -> PodFacts:
    """The facts in the ledger's form; `uid` is the number by which agents know the job."""
    labels = {"slurm/user": job.user, "slurm/partition": job.partition}
    labels |= {f"slurm/step.{step}": name for step, name in list(job.steps.items())[:MOST_STEPS]}
    return PodFacts(
        seq=0,
        uid=job.id,
        namespace=job.account,
        name=job.name,
        node=job.nodes,
        labels={key: value for key, value in labels.items() if value},
        workload=f"SlurmJob/{job.array or job.id}",
        queue_ref=f"slurm:{job.account}" if job.account else "",
        priority=job.priority,
        requests={"gres/gpu": str(job.gpus)} if job.gpus else {},
        created_ms=job.submitted_ms,
        scheduled_ms=job.started_ms,
        started_ms=job.started_ms,
        ended_ms=job.ended_ms,
        observed_ms=observed_ms,
    )


def read(raw: bytes, zone: ZoneInfo) -> Reading:
    """Reads either format, which the first character identifies."""
    return from_rest(raw) if raw.lstrip()[:1] in (b"{", b"[") else from_sacct(raw, zone)


def from_rest(raw: bytes) -> Reading:
    """Reads the answer of slurmrestd's `/slurmdb/…/jobs`, in which a number is either plain or an object {set,
    infinite, number}."""
    try:
        document: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Reading((), (Fault("document", f"not JSON: {error}"),))
    records = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(records, list):
        return Reading((), (Fault("document", "there is no list `jobs`"),))
    jobs: dict[str, Job] = {}
    faults = []
    for index, record in enumerate(records):
        job = _rest_job(record) if isinstance(record, dict) else None
        if job is None:
            faults.append(Fault(f"jobs[{index}]", "a job needs a job_id and an account"))
        else:
            jobs[job.id] = job
    return Reading(tuple(jobs.values()), tuple(faults), tuple(jobs.values()))


def from_sacct(raw: bytes, zone: ZoneInfo) -> Reading:
    """Reads `sacct --parsable2` with a heading. Steps (`123.batch`) give their names to their job."""
    text = raw.decode("utf-8", "replace")
    rows = csv.reader(io.StringIO(text.replace("\0", "")), delimiter="|", quoting=csv.QUOTE_NONE)
    runs: list[Job] = []
    steps: dict[tuple[str, str], dict[str, str]] = {}
    faults: list[Fault] = []
    try:
        heading = next(rows, [])
        missing = [name for name in _NEEDED if name not in heading]
        if missing:
            return Reading((), (Fault("line 1", f"the heading lacks {' and '.join(missing)}"),))
        for cells in rows:
            if not cells:
                continue
            if len(cells) != len(heading):
                faults.append(Fault(f"line {rows.line_num}", f"{len(cells)} columns, the heading has {len(heading)}"))
                continue
            row = dict(zip(heading, cells, strict=True))
            number, dot, step = row["JobIDRaw"].partition(".")
            if dot:
                steps.setdefault((row.get("Cluster", ""), number), {})[step] = row.get("JobName", "")
                continue
            try:
                runs.append(_sacct_job(row, zone))
            except ValueError as error:
                faults.append(Fault(f"line {rows.line_num}", str(error)))
    except csv.Error as error:
        faults.append(Fault(f"line {rows.line_num}", str(error)))
    named = [replace(job, steps=steps.get((job.cluster, job.id), {})) for job in runs]
    jobs = {(job.cluster, job.id): job for job in named}
    return Reading(tuple(jobs.values()), tuple(faults), tuple(named))


def _sacct_job(row: Mapping[str, str], zone: ZoneInfo) -> Job:
    number = row["JobIDRaw"]
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"not a job number: {number!r}")
    array, underscore, _ = row.get("JobID", "").partition("_")
    gpus, types = _gpus_of(row.get("AllocTRES", "").split(","))
    return Job(
        id=number,
        name=row.get("JobName", ""),
        account=row["Account"],
        user=row.get("User", ""),
        array=array if underscore and array.isdigit() else "",
        partition=row.get("Partition", ""),
        nodes=row.get("NodeList", "") if row.get("NodeList") != "None assigned" else "",
        gpus=gpus,
        priority=int(row["Priority"]) if row.get("Priority", "").isdecimal() else None,
        submitted_ms=_time(row.get("Submit", ""), zone),
        started_ms=_time(row.get("Start", ""), zone),
        ended_ms=_time(row.get("End", ""), zone),
        types=types,
        cluster=row.get("Cluster", ""),
    )


def _gpus_of(parts: Iterable[str]) -> tuple[int, dict[str, int]]:
    """(total from `gres/gpu=4`, by type from `gres/gpu:a100=4`); often only one of the two forms is present."""
    total, types = 0, dict[str, int]()
    for part in parts:
        name, _, count = part.partition("=")
        kind, colon, model = name.partition(":")
        if kind == "gres/gpu" and count.isascii() and count.isdigit() and len(count) < 10:
            if colon:
                types[model] = types.get(model, 0) + int(count)
            else:
                total = int(count)
    return total or sum(types.values()), types


def _time(text: str, zone: ZoneInfo) -> int | None:
    """Parses epoch seconds or a local time. Raises ValueError."""
    if text in _NEVER:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 11:
        return int(text) * MS_PER_SECOND
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=zone)).timestamp() * MS_PER_SECOND)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a time: {text!r}") from error


def _rest_job(record: Mapping[str, Any]) -> Job | None:
    number, association = _number(record.get("job_id")), _mapping(record.get("association"))
    account = _text(record.get("account")) or _text(association.get("account"))
    if not number or not account:
        return None
    times, array = _mapping(record.get("time")), _mapping(record.get("array"))
    allocated = _mapping(record.get("tres")).get("allocated")
    told = [_mapping(tres) for tres in (allocated if isinstance(allocated, list) else ())]
    counts = {_text(tres.get("name")): _number(tres.get("count")) or 0 for tres in told if tres.get("type") == "gres"}
    types = {name.partition(":")[2]: count for name, count in counts.items() if name.startswith("gpu:")}
    return Job(
        id=str(number),
        name=_text(record.get("name")),
        account=account,
        user=_text(record.get("user")) or _text(association.get("user")),
        array=str(_number(array.get("job_id")) or ""),
        partition=_text(record.get("partition")),
        nodes=_text(record.get("nodes")),
        gpus=counts.get("gpu", 0) or sum(types.values()),
        priority=_number(record.get("priority")),
        submitted_ms=_instant(times.get("submission")),
        started_ms=_instant(times.get("start")),
        ended_ms=_instant(times.get("end")),
        steps=_rest_steps(record.get("steps")),
        types=types,
    )


def _rest_steps(steps: object) -> dict[str, str]:
    found = {}
    for one in steps if isinstance(steps, list) else ():
        step = _mapping(_mapping(one).get("step"))
        identity = step.get("id")
        told = _mapping(identity).get("step_id", identity)
        name = str(told).rpartition(".")[2] if isinstance(told, str | int) else ""
        if name:
            found[name] = _text(step.get("name"))
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    """A plain number, or Slurm's `{set, infinite, number}`; None if it is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _instant(value: object) -> int | None:
    seconds = _number(value)
    return seconds * MS_PER_SECOND if seconds else None
