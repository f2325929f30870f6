"""Reads Slurm's files as the command does, and sums the hours that an import would book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo

from accountant.histories.slurm.job_history import SlurmHistory
from accountant.histories.slurm.job_records import OF_HISTORY, Fault, offers, read
from accountant.history_import.gpu_assignment import rows
from accountant.history_import.protocol import Chunk
from gputally.base.units import US_PER_HOUR

COLUMNS = (
    "Cluster", "JobIDRaw", "JobID", "JobName", "Account", "User", "Partition", "Priority", "Submit", "Start", "End",
    "State", "NodeList", "AllocTRES",
)  # fmt: skip
START_S = 1_791_288_000
"""2026-10-06T12:00:00Z."""
HOUR_S = 3_600


def record(number: int, account: str, gpus: int | str, *, hours: float = 10, **cells: str) -> dict[str, str]:
    """Build the cells of a job that began at START_S. gpus: their number, or all of AllocTRES."""
    return {
        "Cluster": "prod", "JobIDRaw": str(number), "JobID": str(number), "JobName": "train", "Account": account,
        "User": "ann", "Partition": "gpu", "Priority": "1", "Submit": str(START_S), "Start": str(START_S),
        "End": str(int(START_S + hours * HOUR_S)), "State": "COMPLETED", "NodeList": f"n{number}",
        "AllocTRES": gpus if isinstance(gpus, str) else f"gres/gpu={gpus}", **cells,
    }  # fmt: skip


def sacct(*records: dict[str, str], columns: Sequence[str] = COLUMNS) -> bytes:
    """Print the records as sacct does: without any escape."""
    lines = ["|".join(columns), *("|".join(one[name] for name in columns) for one in records)]
    return ("\n".join(lines) + "\n").encode()


@dataclass(frozen=True)
class Imported:
    """What an import would book. hours: GPU-hours by account; by_model: by GPU model. capacity: GPUs."""

    hours: dict[str, float] = field(default_factory=dict)
    by_model: dict[str, float] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unplaced: float = 0.0
    faults: tuple[Fault, ...] = ()


def imported(
    raw: bytes, nodes: str = "", zone: str = "UTC", until_s: int = START_S + 400 * 24 * HOUR_S, **models: str
) -> Imported:
    """The hours of a file of sacct with a file of sinfo."""
    reading = read(raw, ZoneInfo(zone), OF_HISTORY)
    offered, faults = offers(nodes)
    history = SlurmHistory(reading.runs, offered, until_s * 1000, models)
    every = (*faults, *reading.faults, *history.faults)
    if history.span is None:
        return Imported(faults=every)
    hours: Counter[str] = Counter()
    by_model: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    names: dict[str, str] = {}
    unplaced = 0
    for node in history.read(Chunk("", *history.span)):
        unplaced += node.unplaced_us
        accounts = {fact.uid: fact.namespace for fact in node.facts}
        names |= {fact.uid: fact.name for fact in node.facts}
        gpus[node.node] += len(node.gpus)
        for gpu in node.gpus:
            for row in rows(gpu, node.holds.get(gpu.uuid, ()), history.span, [history.span]):
                if row.holder is not None:
                    hours[accounts[row.holder.uid]] += row.allocated_us
                    by_model[gpu.model] += row.allocated_us
    return Imported(_hours(hours), _hours(by_model), dict(gpus), names, unplaced / US_PER_HOUR, every)


def _hours(us: dict[str, int]) -> dict[str, float]:
    return {name: round(value / US_PER_HOUR, 6) for name, value in us.items()}
