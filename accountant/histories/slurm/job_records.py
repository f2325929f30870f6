"""Reads the jobs in Slurm's accounting, from the output of sacct or slurmrestd, and the nodes in that of sinfo.

An agent on a Slurm node knows only a job's number. Slurm's accounting has its user, account and name. `queue_ref` is
`slurm:ACCOUNT`. The account is used as the namespace, so that an inventory can assign it to a team. A record that
cannot be read becomes a `Fault` with its place. A job whose time is not clear has a `doubt`.

JSON (`sacct --json`, slurmrestd) is the safe form. Text is `sacct --parsable2 --format=JobIDRaw,Account,…`: columns are
found by their heading, times are epoch seconds or local times in the given zone. Users choose the names of their jobs,
and sacct does not escape them, so a name may contain the separator and line ends. The reader relies on this:

- Of the columns only one is text that a user chose (`USERS_TEXT`), and the number of columns is known. What is between
  the columns before the name and those after it is the name, whatever it contains.
- A line continues the record before it if that record is not complete, or if the line does not begin as a record does.

A name that contains a whole record behind a line end looks like a record. Only JSON, or text without names, is
safe from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo

from accountant.core.node_lists import node_names
from accountant.history_import.protocol import Fault
from agent.wire import PodFacts
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import LONGEST_REFERENCE, UNDECODABLE, as_name

MOST_STEPS = 64
"""Maximum number of step names stored per job."""
_NEVER = frozenset({"", "Unknown", "None", "N/A", "0"})
OF_JOBS: Final = ("JobIDRaw", "Account")
"""The columns without which a job cannot be named."""
OF_HISTORY: Final = (*OF_JOBS, "Start", "End", "State", "NodeList", "AllocTRES")
"""The columns without which the time of a job is not known."""
USERS_TEXT: Final = frozenset(
    {
        "JobName", "Comment", "AdminComment", "SystemComment", "Extra", "WorkDir", "SubmitLine", "WCKey", "Constraints",
        "Container", "StdIn", "StdOut", "StdErr", "Reason",
    }
)  # fmt: skip
"""Columns of sacct with text that a user chose. sacct escapes neither separators nor line ends in them."""
_RUNNING = frozenset(
    {
        "PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT",
        "PD", "R", "S", "CF", "CG", "ST", "SI", "SO",
    }
)  # fmt: skip
"""States without an end, in both spellings. A record in any other state has ended."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One record of a job in Slurm's accounting.

    array: number of the array, if the job is one of its tasks.
    steps: id -> name.
    types: GPUs by type, as far as known.
    shares: parts of GPUs, by kind: `shard`, `mps`.
    cluster: the Slurm cluster, "" if the record does not name one.
    doubt: why its time is not known; "" if it is."""

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
    shares: Mapping[str, int] = field(default_factory=dict)
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a file of Slurm's accounting, in the order of the file.

    jobs: the last record of each job number in each cluster.
    runs: the last record of each start of a job; a requeued job has several.
    tracks_gpus: whether any record says what was allocated of a generic resource of GPUs."""

    jobs: tuple[JobRecord, ...]
    faults: tuple[Fault, ...]
    runs: tuple[JobRecord, ...] = ()
    tracks_gpus: bool = False


def facts(job: JobRecord, observed_ms: int) -> PodFacts:
    """The facts in the ledger's form; `uid` is the number by which agents know the job."""
    account, user = as_name(job.account), as_name(job.user)
    labels = {"slurm/user": user, "slurm/partition": as_name(job.partition)}
    labels |= {
        f"slurm/step.{as_name(step, _LONGEST_STEP)}": as_name(name)
        for step, name in list(job.steps.items())[:MOST_STEPS]
    }
    amounts = {"gres/gpu": job.gpus} | {f"gres/{kind}": count for kind, count in job.shares.items()}
    return PodFacts(
        seq=0,
        uid=job.id,
        namespace=account,
        name=as_name(job.name),
        node=job.nodes if as_name(job.nodes, LONGEST_REFERENCE) == job.nodes else "",
        labels={key: value for key, value in labels.items() if value},
        workload=f"SlurmJob/{job.array or job.id}",
        queue_ref=f"slurm:{account}" if account else "",
        priority=job.priority,
        requests={name: str(count) for name, count in amounts.items() if count},
        created_ms=job.submitted_ms,
        scheduled_ms=job.started_ms,
        started_ms=job.started_ms,
        ended_ms=job.ended_ms,
        observed_ms=observed_ms,
    )


_LONGEST_STEP = 100
"""Characters of a step's id."""


def read(raw: bytes, zone: ZoneInfo, needed: Sequence[str] = OF_JOBS) -> Reading:
    """Reads either format, which the first character identifies. needed: columns that the text must have."""
    return from_rest(raw) if raw.lstrip()[:1] in (b"{", b"[") else from_sacct(raw, zone, needed)


def from_rest(raw: bytes) -> Reading:
    """Reads the answer of slurmrestd's `/slurmdb/…/jobs` or the output of `sacct --json`, in which a number is either
    plain or an object {set, infinite, number}.

    Bytes of a name that are not UTF-8, and control characters that are not escaped, do not spoil the document."""
    try:
        document: Any = json.loads(raw.decode("utf-8-sig", "replace"), strict=False)
    except UNDECODABLE as error:
        return Reading((), (Fault("document", f"not JSON: {error}"),))
    records = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(records, list):
        return Reading((), (Fault("document", "there is no list `jobs`, as slurmrestd's answer has"),))
    runs: list[JobRecord] = []
    faults = []
    for index, record in enumerate(records):
        job = _rest_job(record) if isinstance(record, dict) else None
        if job is None:
            faults.append(Fault(f"jobs[{index}]", "a job needs a job_id and an account"))
        else:
            runs.append(job)
    return _reading(runs, faults)


def _reading(runs: Sequence[JobRecord], faults: Sequence[Fault]) -> Reading:
    """The reading of these records. Exports that overlap contain a record twice, the later one perhaps with an end."""
    starts = {(job.cluster, job.id, job.started_ms): job for job in runs}
    jobs = {(job.cluster, job.id): job for job in runs}
    tracks = any(job.gpus or job.shares for job in runs)
    return Reading(tuple(jobs.values()), tuple(faults), tuple(starts.values()), tracks)


def from_sacct(raw: bytes, zone: ZoneInfo, needed: Sequence[str] = OF_JOBS) -> Reading:
    """Reads `sacct --parsable2` with a heading. Steps (`123.batch`) give their names to their job."""
    first, *lines = [line.removesuffix("\r") for line in raw.decode("utf-8-sig", "replace").split("\n")]
    heading = first.split("|")
    missing = [name for name in needed if name not in heading]
    if missing:
        reason = f"the heading lacks {' and '.join(missing)}: add {'it' if len(missing) == 1 else 'them'} to --format"
        return Reading((), (Fault("line 1", reason),))
    if len(set(heading)) < len(heading):
        return Reading((), (Fault("line 1", "the heading names a column twice"),))
    table = _Table(heading, zone)
    for number, group in table.records(lines):
        try:
            table.take(number, "\n".join(group))
        except ValueError as error:
            # No name of a user makes a record unreadable. The file is damaged, and each line counts for itself.
            if len(group) == 1:
                table.faults.append(Fault(f"line {number}", str(error)))
                continue
            for at, line in enumerate(group, start=number):
                try:
                    if line:
                        table.take(at, line)
                except ValueError as fault:
                    table.faults.append(Fault(f"line {at}", str(fault)))
    runs = [
        replace(job, steps=steps) if (steps := table.steps.get((job.cluster, job.id))) else job for job in table.runs
    ]
    return _reading(runs, table.faults)


_STEP = re.compile(r"[0-9]{1,19}(?:\.[^|\n]*)?")
"""A job's number, or that of a step."""


class _Table:
    """The table that sacct prints: its columns, and the records that were read so far."""

    def __init__(self, heading: Sequence[str], zone: ZoneInfo) -> None:
        self._heading = heading
        self._zone = zone
        self._free = [place for place, name in enumerate(heading) if name in USERS_TEXT]
        self._number = heading.index("JobIDRaw")
        self.runs: list[JobRecord] = []
        self.steps: dict[tuple[str, str], dict[str, str]] = {}
        self.faults: list[Fault] = []

    def records(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """The lines of each record, with the number of its first line, which is 2 for the first record."""
        begun, parts, bars = 0, list[str](), 0
        for number, line in enumerate(lines, start=2):
            if parts and bars >= len(self._heading) - 1 and self._begins(line):
                yield begun, parts
                parts, bars = [], 0
            if parts or line:
                begun = begun if parts else number
                parts.append(line)
                bars += line.count("|")
        if parts:
            yield begun, parts

    def _begins(self, line: str) -> bool:
        """Whether a line begins as a record does. If a user's text comes before the job's number, any line does."""
        if self._free and self._free[0] < self._number:
            return True
        cells = line.split("|", self._number + 1)
        return len(cells) > self._number and _STEP.fullmatch(cells[self._number]) is not None

    def take(self, number: int, text: str) -> None:
        """Reads one record. Raises ValueError."""
        row = self._row(text)
        job, dot, step = row["JobIDRaw"].partition(".")
        if dot:
            self.steps.setdefault((row.get("Cluster", ""), job), {})[step] = row.get("JobName", "")
            return
        self.runs.append(_sacct_job(row, self._zone))
        behind = [place for place in self._free if place > self._number]
        if any(self._begins(line) for place in behind for line in row[self._heading[place]].split("\n")[1:]):
            reason = (
                f"job {job}: a text that a user chose has a line that begins as a record does, and was read as a part "
                "of the text; if the line before it was cut off, a record is missing: take the output of sacct --json"
            )
            self.faults.append(Fault(f"line {number}", reason))

    def _row(self, text: str) -> dict[str, str]:
        """The cells by column. Raises ValueError if it is not clear where they end."""
        cells = text.split("|")
        extra = len(cells) - len(self._heading)
        if extra > 0 and len(self._free) == 1:
            (at,) = self._free
            cells[at : at + extra + 1] = ["|".join(cells[at : at + extra + 1])]
        elif extra:
            several = " and ".join(self._heading[place] for place in self._free)
            what = f": ask sacct for only one of {several}" if extra > 0 and self._free else ""
            raise ValueError(f"{len(cells)} columns, the heading has {len(self._heading)}{what}")
        cells[-1] = cells[-1].rstrip("\n")  # an empty line at the end of the file
        for place, cell in enumerate(cells):
            if "\n" in cell and place not in self._free:
                raise ValueError(f"a line end in column {self._heading[place]}: the record is cut off")
        return dict(zip(self._heading, cells, strict=True))


def _sacct_job(row: Mapping[str, str], zone: ZoneInfo) -> JobRecord:
    number = row["JobIDRaw"]
    if not number.isascii() or not number.isdigit() or len(number) > _LONGEST_NUMBER:
        raise ValueError(f"not a job number: {number[:80]!r}")
    array, underscore, _ = row.get("JobID", "").partition("_")
    found = _allocated_text(row.get("AllocTRES", ""))
    start, end, doubt = _time(row, zone)
    return JobRecord(
        id=number,
        name=row.get("JobName", ""),
        account=row["Account"],
        user=row.get("User", ""),
        array=array if underscore and array.isdigit() else "",
        partition=row.get("Partition", ""),
        nodes=row.get("NodeList", "") if row.get("NodeList") != "None assigned" else "",
        gpus=found.gpus,
        priority=int(row["Priority"]) if row.get("Priority", "").isdecimal() and len(row["Priority"]) < 18 else None,
        submitted_ms=min(_instants(row.get("Submit", ""), zone), default=None),
        started_ms=start,
        ended_ms=end,
        types=found.types,
        cluster=row.get("Cluster", ""),
        shares=found.shares,
        doubt=doubt,
    )


def _time(row: Mapping[str, str], zone: ZoneInfo) -> tuple[int | None, int | None, str]:
    """When a job began and ended, and why that is not known. Raises ValueError."""
    starts, ends = _instants(row.get("Start", ""), zone), _instants(row.get("End", ""), zone)
    doubt = missing_end(row.get("State", ""), started=bool(starts), ended=bool(ends))
    if doubt or not (starts and ends):
        if not doubt and len(starts) > 1:
            doubt = f"its local time {row['Start']} occurs twice in {zone.key}"
        return min(starts, default=None), max(ends, default=None), doubt
    possible = [(start, end) for start in starts for end in ends if end >= start]
    if len(starts) + len(ends) > 2:
        elapsed = _elapsed_ms(row)
        possible = [span for span in possible if elapsed in (None, _length(span))]
    if not possible or len(set(map(_length, possible))) > 1:
        what = f"{row['Start']} to {row['End']} in {zone.key}"
        doubt = f"its time is not known ({what} may be several spans, or none): {_SAFE_TIMES}"
    return *min(possible, default=(None, None)), doubt


_LONGEST_NUMBER = 19
_SAFE_TIMES = "run sacct with SLURM_TIME_FORMAT=%s, or add Elapsed to its --format"


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def missing_end(state: str, *, started: bool, ended: bool) -> str:
    """Why the end of a job in this state is not known; "" if it is, or if the job never began."""
    word = (state.split() or [""])[0].rstrip("+")
    if not started or ended or word in _RUNNING:
        return ""
    return f"its state is {as_name(word, 40) or 'not known'}, but it has no end: look at sacctmgr show runawayjobs"


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a job had of GPUs: all of them, those of each type, and parts by kind (`shard`, `mps`)."""

    gpus: int
    types: Mapping[str, int]
    shares: Mapping[str, int]


@lru_cache(maxsize=10_000)
def _allocated_text(text: str) -> Allocated:
    """`allocated` for a text of sacct; most jobs have one of few. Raises ValueError."""
    return allocated(text.split(","))


_MOST_COUNT = 999_999_999
SHARED: Final = ("shard", "mps")
"""Generic resources that are parts of GPUs."""


def allocated(parts: Iterable[str]) -> Allocated:
    """Reads `gres/gpu=4`, `gres/gpu:a100=4` and `gres/shard=2`. Often a total or the types are missing. Raises
    ValueError, also for a text that was cut to the width of a column, because the GPUs come last."""
    total, types, shares = 0, dict[str, int](), dict[str, int]()
    for part in parts:
        name, _, count = part.strip().partition("=")
        if part.strip() and not count:
            raise ValueError(f"AllocTRES is cut off at {as_name(part.strip(), 40)!r}: print it without a width")
        kind, colon, model = name.removeprefix("gres/").partition(":")
        if not name.startswith("gres/") or kind not in ("gpu", *SHARED):
            continue
        if not count.isascii() or not count.isdigit() or len(count) >= 10:
            raise ValueError(f"not a number of {as_name(name, 40)}: {count[:40]!r}")
        if kind == "gpu" and colon:
            types[model] = types.get(model, 0) + int(count)
        elif kind == "gpu":
            total = int(count)
        elif int(count):
            shares[kind] = max(int(count), shares.get(kind, 0))
    return Allocated(total or sum(types.values()), {kind: n for kind, n in types.items() if n}, shares)


def _instants(text: str, zone: ZoneInfo) -> frozenset[int]:
    """The instants that epoch seconds or a local time can mean: two in an hour that occurs twice, none without a time.
    Raises ValueError if it is not a time, or one that does not occur in the zone."""
    if text in _NEVER:
        return frozenset()
    if text.isascii() and text.isdigit() and len(text) <= 11:
        return frozenset({int(text) * MS_PER_SECOND})
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo:
            return frozenset({round(at.timestamp() * MS_PER_SECOND)})
        local = [at.replace(tzinfo=zone, fold=fold) for fold in (0, 1)]
        found = frozenset(round(one.timestamp() * MS_PER_SECOND) for one in local)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a time: {text[:80]!r} (run sacct with SLURM_TIME_FORMAT=%s)") from error
    occurs = [one for one in found if datetime.fromtimestamp(one / MS_PER_SECOND, zone).replace(tzinfo=None) == at]
    if not occurs:
        raise ValueError(f"{text} does not occur in {zone.key}: name the zone in which sacct ran with --timezone")
    return frozenset(occurs)


_ELAPSED = re.compile(r"(?:(\d{1,6})-)?(\d{1,2}):(\d{2}):(\d{2})")


def _elapsed_ms(row: Mapping[str, str]) -> int | None:
    """How long the job ran, from `ElapsedRaw` or `Elapsed`; None if neither says it."""
    raw = row.get("ElapsedRaw", "")
    if raw.isascii() and raw.isdigit() and len(raw) <= 11:
        return int(raw) * MS_PER_SECOND
    match = _ELAPSED.fullmatch(row.get("Elapsed", ""))
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * MS_PER_SECOND


def _rest_job(record: Mapping[str, Any]) -> JobRecord | None:
    number, association = _number(record.get("job_id")), _mapping(record.get("association"))
    account = _text(record.get("account")) or _text(association.get("account"))
    if not number or not account:
        return None
    times, array = _mapping(record.get("time")), _mapping(record.get("array"))
    listed = _mapping(record.get("tres")).get("allocated")
    resources = [_mapping(tres) for tres in (listed if isinstance(listed, list) else ())]
    found = allocated(
        f"gres/{_text(tres.get('name'))}={min(_number(tres.get('count')) or 0, _MOST_COUNT)}"
        for tres in resources
        if tres.get("type") == "gres"
    )
    started, ended = _instant(times.get("start")), _instant(times.get("end"))
    state = _mapping(record.get("state")).get("current", record.get("state"))
    word = _text(state[0]) if isinstance(state, list) and state else _text(state)
    doubt = missing_end(word, started=started is not None, ended=ended is not None)
    return JobRecord(
        id=str(number),
        name=_text(record.get("name")),
        account=account,
        user=_text(record.get("user")) or _text(association.get("user")),
        array=str(_number(array.get("job_id")) or ""),
        partition=_text(record.get("partition")),
        nodes=_text(record.get("nodes")) if record.get("nodes") != "None assigned" else "",
        gpus=found.gpus,
        priority=_number(record.get("priority")),
        submitted_ms=_instant(times.get("submission")),
        started_ms=started,
        ended_ms=ended,
        steps=_rest_steps(record.get("steps")),
        types=found.types,
        cluster=_text(record.get("cluster")),
        shares=found.shares,
        doubt=doubt,
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


_GRES = re.compile(r"([a-z]+)(?::([^,]*))?:(\d{1,6})")
_SOCKETS = re.compile(r"\([^()]*\)")
MOST_GPUS = 1_024
"""Maximum number of GPUs (or MIG instances of one type) of a node."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a node, as sinfo lists them.

    types: the GPUs of each of Slurm's GPU types; the type is "" if sinfo names none.
    shares: by kind (`shard`, `mps`), the parts into which the GPUs are divided together."""

    types: Mapping[str, int]
    shares: Mapping[str, int] = field(default_factory=dict)


def offers(text: str) -> tuple[dict[str, NodeGpus], list[Fault]]:
    """Reads `sinfo --Node --noheader --format '%N|%G'`: a node (or a list of nodes) and its generic resources per
    line. The sockets and indices in brackets do not matter."""
    found: dict[str, NodeGpus] = {}
    faults = []
    for number, line in enumerate(text.split("\n"), start=1):
        name, bar, gres = line.strip().partition("|")
        if not line.strip():
            continue
        types: dict[str, int] = {}
        shares: dict[str, int] = {}
        for one in _SOCKETS.sub("", gres).split(","):
            match = _GRES.fullmatch(one.strip())
            if match is not None and match[1] == "gpu":
                kind = (match[2] or "").removesuffix("no_consume").strip(":")
                types[kind] = types.get(kind, 0) + int(match[3])
            elif match is not None and match[1] in SHARED:
                shares[match[1]] = shares.get(match[1], 0) + int(match[3])
        try:
            names = node_names(name) if bar else []
        except ValueError:
            names = []
        if not names:
            faults.append(Fault(f"line {number}", "not a node with its GRES: write for example gpu-01|gpu:a100:8"))
        elif max(types.values(), default=0) > MOST_GPUS:
            faults.append(Fault(f"line {number}", f"more than {MOST_GPUS} GPUs on a node"))
        elif types:
            found |= dict.fromkeys(names, NodeGpus(types, shares))
    return found, faults
