"""`import slurm` and `slurm import`: their options, their messages and the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from accountant.history_import.protocol import Asked, CannotImport, End, HistoryPlugin, HolderNames, Import
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR


def imports(
    asked: Asked,
    file: Annotated[
        Path, Argument(help="Output of `sacct --json --duplicates`, or of `sacct --parsable2` with its heading.")
    ],
    cluster: Annotated[str | None, Option(help="Cluster in the ledger (default: that of each job's record).")] = None,
    nodes: Annotated[Path | None, Option(help="Output of `sinfo --Node --noheader --format '%N|%G'`.")] = None,
    model: Annotated[list[str] | None, Option(help="Model of a GPU type of Slurm, TYPE=MODEL (repeatable).")] = None,
    start: Annotated[
        str | None,
        Option(help="Start of the history: a date, RFC 3339, or 30d before its end (default: that of the first job)."),
    ] = None,
    end: End = None,
) -> Iterator[Import]:
    """Import allocations from Slurm's accounting. Can be interrupted and repeated without duplicates. Exit 1 if a part
    of the history was left out."""
    from accountant.histories.slurm import job_records
    from accountant.histories.slurm.job_history import SlurmHistory

    reading = job_records.read(_bytes(file), asked.zone, job_records.OF_HISTORY)
    if reading.faults and not reading.runs:
        raise CannotImport(f"{file}: {reading.faults[0].place}: {reading.faults[0].reason}")
    if not reading.tracks_gpus:
        raise CannotImport(
            f"{file}: no job of this file has a GPU. If jobs had GPUs, this site does not track them: add gres/gpu to "
            "AccountingStorageTRES in slurm.conf (Slurm counts them from then on)"
        )
    offered, faults = job_records.offers(_bytes(nodes).decode("utf-8", "replace")) if nodes is not None else ({}, [])
    asked.leave_out(str(nodes or file), faults)
    asked.leave_out(str(file), reading.faults)
    names = sorted({job.cluster for job in reading.runs})
    if cluster is not None and len(names) > 1:
        raise CannotImport(
            f"{file}: the file has jobs of {', '.join(names)}, which keep their names: leave --cluster out"
        )
    end_ms = asked.end(end)
    for name in names:
        jobs = [job for job in reading.runs if job.cluster == name]
        history = SlurmHistory(jobs, offered, end_ms, dict(map(_model, model or ())))
        asked.leave_out(str(file), history.faults)
        if history.span is None:
            asked.tell(f"{file}: no job{f' of {name}' if name else ''} held a GPU, so nothing is imported")
            continue
        first = asked.start(start, end_ms, history.span[0])
        last = min(end_ms, -(-history.span[1] // MS_PER_HOUR) * MS_PER_HOUR)
        if asked.replaces and end is not None:
            last = end_ms  # the earlier import may have gone on for longer
        left_out = len(faults) + len(reading.faults) + len(history.faults)
        yield Import(cluster or name or "default", file.name, history.read, (first, last), MS_PER_DAY, left_out)


def names(
    asked: Asked,
    file: Annotated[
        Path,
        Argument(help="Output of `sacct --json`, slurmdbd's REST answer, or `sacct --parsable2` with its heading."),
    ],
    cluster: Annotated[str, Option(help="Name of the Slurm cluster in the ledger.")] = "default",
) -> HolderNames:
    """Send the names of Slurm jobs to the accountant, because agents know only their numbers. Repeating the command
    changes nothing. Exit 1 if a record was left out."""
    from accountant.histories.slurm import job_records

    reading = job_records.read(_bytes(file), asked.zone)
    asked.leave_out(str(file), reading.faults)
    if reading.faults and not reading.jobs:
        raise CannotImport(f"{file}: no job could be read: give the output of sacct, or slurmdbd's answer")
    facts = [job_records.facts(job, asked.now_ms) for job in reading.jobs]
    return HolderNames(cluster, f"slurm ({file.name})", facts, len(reading.faults))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CannotImport(f"{file}: {error.strerror}") from error


def _model(text: str) -> tuple[str, str]:
    kind, equals, name = text.partition("=")
    if not equals or not kind or not name:
        raise CannotImport(f"--model {text}: write TYPE=MODEL, for example a100=NVIDIA A100-SXM4-80GB")
    return kind, name


HISTORY: Final = HistoryPlugin(
    name="slurm",
    title="Slurm",
    records="Slurm's accounting",
    imports=imports,
    limits=(
        "allocation only: Slurm's accounting does not say how busy a GPU was, nor which one it was",
        "GPUs of a job on several nodes are divided over them evenly, as far as they are free there",
        "unallocated time counts the GPUs that a node is described with, or that its jobs used at once",
    ),
    reaches="reads the files that its options name",
    page="docs/import-slurm.md",
    names=names,
)
