"""Reads Slurm jobs from the output of sacct or slurmrestd as pod facts, and converts them into GPUs and their holds.

An agent on a Slurm node knows only a job's number. Slurm's accounting has its user, account and name. `queue_ref` is
`slurm:ACCOUNT`. The account is used as the namespace, so that an inventory can assign it to a team. A record that
cannot be read becomes a `Fault` with its place.

The command is `SLURM_TIME_FORMAT=%s sacct --parsable2 --allusers --format=JobIDRaw,JobID,JobName,Account,User,…`.
Columns are found by their heading. Times are epoch seconds, or local times in the given zone.

Slurm says how many GPUs a job had, on which nodes and when. It does not say which GPUs, how many on each node, or their
utilisation. The GPUs of a job are therefore divided evenly over its nodes. A node has as many GPUs as sinfo says, or as
its jobs needed at once if that is more. Every GPU-second of a job whose list of nodes can be read is on some GPU, so
the hours equal Slurm's exactly. Other jobs become a `Fault`."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from accountant.core.claim_overlap import Span
from accountant.history_import.gpu_assignment import Demand, GpuLayout, GpuPart, SlotHold, place
from accountant.history_import.import_run import Chunk
from accountant.history_import.kubernetes_history import NodeHistory
from agent.wire import Holder, PodFacts
from gputally.base.apportionment import apportion
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
    """One record of a job in Slurm's accounting.

    array: number of the array, if the job is one of its tasks.
    steps: id -> name.
    types: GPUs by type, as far as known.
    cluster: the Slurm cluster, "" if the record does not name one."""

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
    """The content of a file of Slurm's accounting, in the order of the file.

    jobs: the last record of each job number in each cluster.
    runs: all records of jobs; a requeued job has several."""

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
        return Reading((), (Fault("document", "there is no list `jobs`, as slurmrestd's answer has"),))
    runs: list[Job] = []
    faults = []
    for index, record in enumerate(records):
        job = _rest_job(record) if isinstance(record, dict) else None
        if job is None:
            faults.append(Fault(f"jobs[{index}]", "a job needs a job_id and an account"))
        else:
            runs.append(job)
    return _reading(runs, faults)


def _reading(runs: Sequence[Job], faults: Sequence[Fault]) -> Reading:
    jobs = {(job.cluster, job.id): job for job in runs}
    return Reading(tuple(jobs.values()), tuple(faults), tuple(runs))


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
            reason = f"the heading lacks {' and '.join(missing)}: add this to sacct's --format"
            return Reading((), (Fault("line 1", reason),))
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
    return _reading([replace(job, steps=steps.get((job.cluster, job.id), {})) for job in runs], faults)


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
        raise ValueError(f"not a time: {text!r} (run sacct with SLURM_TIME_FORMAT=%s)") from error


def _rest_job(record: Mapping[str, Any]) -> Job | None:
    number, association = _number(record.get("job_id")), _mapping(record.get("association"))
    account = _text(record.get("account")) or _text(association.get("account"))
    if not number or not account:
        return None
    times, array = _mapping(record.get("time")), _mapping(record.get("array"))
    allocated = _mapping(record.get("tres")).get("allocated")
    resources = [_mapping(tres) for tres in (allocated if isinstance(allocated, list) else ())]
    counts = {
        _text(tres.get("name")): _number(tres.get("count")) or 0 for tres in resources if tres.get("type") == "gres"
    }
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
        cluster=_text(record.get("cluster")),
    )


def _rest_steps(steps: object) -> dict[str, str]:
    found = {}
    for one in steps if isinstance(steps, list) else ():
        step = _mapping(_mapping(one).get("step"))
        identity = step.get("id")
        step_id = _mapping(identity).get("step_id", identity)
        name = str(step_id).rpartition(".")[2] if isinstance(step_id, str | int) else ""
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


MOST_NODES = 65_536
"""Maximum number of nodes of one job."""
_POOL = "gpu"
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_GRES = re.compile(r"gpu(?::([^:(),]+))?:(\d{1,5})(?:\([^)]*\))?(?:,|$)")


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a node, as sinfo lists them. model: Slurm's GPU type, "" if sinfo names none."""

    gpus: int
    model: str = ""


def node_names(text: str) -> list[str]:
    """`n[01-03,7],login` expanded, in its order. Raises ValueError if the text is not a list of nodes."""
    names: list[str] = []
    for one in re.split(r",(?![^\[]*\])", text):  # at commas outside brackets
        found = [""]
        for part in re.split(r"(\[[^\]]*\])", one):
            inside = _numbers(part[1:-1]) if part.startswith("[") else [part]
            if len(found) * len(inside) + len(names) > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES} nodes")
            found = [head + tail for head in found for tail in inside]
        names += found
    if not names or not all(names) or any(mark in name for name in names for mark in "[], "):
        raise ValueError(f"not a list of nodes: {text[:80]!r}")
    return names


def _numbers(text: str) -> list[str]:
    """`01-03,7` -> 01, 02, 03, 7."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a range of nodes: {part[:40]!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} nodes")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def offers(text: str) -> tuple[dict[str, NodeGpus], list[Fault]]:
    """Reads `sinfo --Node --noheader --format '%N|%G'`: a node and its generic resources per line."""
    found: dict[str, NodeGpus] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        name, bar, gres = line.strip().partition("|")
        if not line.strip():
            continue
        kinds = [(match[1] or "", int(match[2])) for match in _GRES.finditer(gres)]
        if not bar or not name:
            faults.append(Fault(f"line {number}", "not a node with its GRES: write for example gpu-01|gpu:a100:8"))
        elif kinds:
            found[name] = NodeGpus(sum(count for _, count in kinds), max(kinds, key=lambda kind: kind[1])[0])
    return found, faults


class SlurmHistory:
    """The jobs of one Slurm cluster. The constructor assigns them to nodes and GPUs, and `read` returns those of one
    chunk.

    until_ms: the end of jobs that have none yet; later ends are cut to it.
    models: the ledger's name for each GPU type of Slurm."""

    def __init__(
        self,
        jobs: Iterable[Job],
        offered: Mapping[str, NodeGpus],
        until_ms: int,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.faults: list[Fault] = []
        self._until_ms = until_ms
        self._models = models or {}
        self._offered = offered
        self._jobs: dict[str, list[Job]] = {}
        demands: dict[str, list[Demand]] = {}
        types: dict[str, Counter[str]] = {}
        for job in jobs:
            for node, count in self._nodes(job):
                start, end = self._span(job)
                demands.setdefault(node, []).append(
                    Demand(Holder("slurm", job.id, name=f"job {job.id}"), _POOL, count, start, end)
                )
                self._jobs.setdefault(node, []).append(job)
                types.setdefault(node, Counter()).update(job.types)
        self._nodes_of = {node: self._place(node, found, types[node]) for node, found in sorted(demands.items())}
        for node in sorted(offered.keys() - demands.keys()):
            self._nodes_of[node] = self._place(node, [], Counter())
        spans = [(one.start_ms, one.end_ms) for found in demands.values() for one in found]
        self.span: Span | None = (min(s for s, _ in spans), max(e for _, e in spans)) if spans else None

    def read(self, chunk: Chunk) -> list[NodeHistory]:
        """The nodes in one chunk. A node without a description exists from its first job to its last."""
        found = []
        for node, (layouts, holds) in self._nodes_of.items():
            own = {
                uuid: [hold for hold in of_gpu if hold.start_ms < chunk.end_ms and hold.end_ms > chunk.start_ms]
                for uuid, of_gpu in holds.items()
            }
            running = {hold.holder.uid for of_gpu in own.values() for hold in of_gpu}
            jobs = {job.id: job for job in self._jobs.get(node, ()) if job.id in running}
            found.append(NodeHistory(node, layouts, own, tuple(facts(jobs[uid], chunk.end_ms) for uid in sorted(jobs))))
        return found

    def _nodes(self, job: Job) -> Iterator[tuple[str, int]]:
        """The nodes of a job with the number of GPUs held on each."""
        start, end = self._span(job)
        if not job.gpus or start >= end:
            return
        try:
            names = node_names(job.nodes)
        except ValueError as error:
            self.faults.append(Fault(f"job {job.id}", f"its time on {job.gpus} GPUs is left out: {error}"))
            return
        for name, count in zip(names, apportion(job.gpus, [1] * len(names)), strict=True):
            if count:
                yield name, count

    def _span(self, job: Job) -> Span:
        """The job's time; empty if it never began."""
        if job.started_ms is None:
            return 0, 0
        return job.started_ms, min(self._until_ms, job.ended_ms if job.ended_ms is not None else self._until_ms)

    def _place(
        self, node: str, demands: Sequence[Demand], types: Counter[str]
    ) -> tuple[tuple[GpuLayout, ...], dict[str, list[SlotHold]]]:
        offer = self._offered.get(node)
        count = max(_most_at_once(demands), offer.gpus if offer is not None else 0)
        kind = (offer.model if offer is not None else "") or (types.most_common(1)[0][0] if types else "")
        known = (
            (0, self._until_ms)
            if offer is not None
            else (min(one.start_ms for one in demands), max(one.end_ms for one in demands))
        )
        names = [f"imported:slurm/{node}/{number}" for number in range(count)]
        layouts = tuple(GpuLayout(uuid, self._models.get(kind, kind), (GpuPart(),), (known,)) for uuid in names)
        holds: dict[str, list[SlotHold]] = {}
        for hold in place(demands, {_POOL: [(uuid, 0, 0) for uuid in names]}, 0).holds:
            holds.setdefault(hold.gpu, []).append(hold)
        return layouts, holds


def _most_at_once(demands: Iterable[Demand]) -> int:
    changes = [(at, sign * one.count) for one in demands for at, sign in ((one.start_ms, 1), (one.end_ms, -1))]
    held = most = 0
    for _, change in sorted(changes):  # ends before starts at the same instant
        held += change
        most = max(most, held)
    return most
