"""The columns of a list of jobs, and the columns of a file for which each stands.

The page, its files, those of a fleet and the command's CSV are made from this table, so that a column has one name and
one meaning in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from accountant.wire.list_fields import FileCell, ListField, before
from accountant.wire.option_types import JOB_ORDERS, JobOrder
from accountant.wire.usage_cost_and_job_models import Job
from gputally.base.money import gpu_hours
from gputally.base.units import MS_PER_SECOND

JobField = ListField[Job]


@dataclass(frozen=True, slots=True)
class JobColumn:
    """A column of the list. parts: the columns of a file that it stands for; none for what names the job."""

    title: str
    parts: tuple[JobField, ...] = ()


def _account(name: str) -> JobField:
    return JobField(f"{name}_gpu_hours", "hours", lambda job: gpu_hours(getattr(job.accounts_gpu_us, name)))


def _names(name: str) -> JobField:
    return JobField(name, "text", lambda job: ", ".join(getattr(job, name)))


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / MS_PER_SECOND


def _lost(name: str) -> JobField:
    """A column of what stops lost; empty if it is unknown, or was not asked."""

    def of(job: Job) -> FileCell:
        lost_us: int | None = None if job.stops is None else getattr(job.stops, f"{name}_gpu_us")
        return None if lost_us is None else gpu_hours(lost_us)

    return JobField(f"{name}_gpu_hours", "hours", of)


LOST: Final = "lost_gpu_hours"
"""The column of the GPU-hours since the last checkpoint that stops lost. Only who asks for it has it."""
_UNPRICED: Final[JobField] = JobField("unpriced_gpu_hours", "hours", lambda job: gpu_hours(job.unpriced_gpu_us))
COLUMNS: Final[Mapping[JobOrder, JobColumn]] = {
    "cluster": JobColumn("Cluster"),
    "namespace": JobColumn("Namespace"),
    "team": JobColumn("Team", (_names("teams"),)),
    "user": JobColumn("User", (_names("users"),)),
    "queue": JobColumn("Queue", (_names("queues"),)),
    "state": JobColumn("State", (JobField("state", "text", lambda job: job.state),)),
    "kind": JobColumn("Kind", (JobField("kind", "text", lambda job: job.kind or ""),)),
    "gpus": JobColumn(
        "GPUs now",
        (
            JobField("gpus_now", "float", lambda job: None if job.gpus is None else float(job.gpus)),
            JobField("asks_gpus", "integer", lambda job: job.asks_gpus),
        ),
    ),
    "waited": JobColumn(
        "Waited",
        (
            JobField("waited_s", "float", lambda job: _seconds(job.waited_ms)),
            JobField("waiting_s", "float", lambda job: _seconds(job.waiting_ms)),
        ),
    ),
    "gpu_hours": JobColumn("Held", (_account("allocated"),)),
    "busy": JobColumn("Busy", (_account("busy"),)),
    "utilisation": JobColumn(
        "Utilisation",
        (JobField("utilisation_share", "float", lambda job: job.accounts_gpu_us.utilisation),),
    ),
    "idle": JobColumn("Idle", (_account("allocated_idle"),)),
    "unknown": JobColumn("Use unknown", (_account("allocated_unknown"),)),
    "cost": JobColumn("Cost", (JobField("cost", "money", lambda job: job.cost), _UNPRICED)),
    "unpriced": JobColumn("Unpriced", (_UNPRICED,)),
    "burn": JobColumn("Cost per hour now", (JobField("burn_per_hour", "money", lambda job: job.burn_per_hour),)),
    "gpu_model": JobColumn("GPU model", (_names("gpu_models"),)),
    "pods": JobColumn(
        "Pods",
        (
            JobField("pods", "integer", lambda job: job.pods),
            JobField("pods_running", "integer", lambda job: job.pods_running),
        ),
    ),
    "created": JobColumn("Created", (JobField("created", "instant", lambda job: job.created_ms),)),
    "ended": JobColumn("Ended", (JobField("ended", "instant", lambda job: job.ended_ms),)),
    "epochs": JobColumn("Epochs", (JobField("epochs", "integer", lambda job: job.epochs),)),
    LOST: JobColumn("Lost by stops", (_lost("lost"), _lost("known_lost"))),
}
"""The columns beside the name of the job, by their names in addresses, which are also orders."""
TEXTS: Final = frozenset({*JOB_ORDERS.ascending, "created", "ended"})
"""The columns that are written from the left."""
COMPARED: Final[Mapping[JobOrder, JobField]] = {
    name: COLUMNS[name].parts[0] for name in ("gpu_hours", "busy", "utilisation", "idle", "unknown", "cost", "unpriced")
}
"""The columns that have a figure of the span before."""
_OF_MONEY: Final = frozenset({"cost", "burn"})
NAMING: Final[tuple[JobField, ...]] = (
    JobField("id", "text", lambda job: job.id), JobField("cluster", "text", lambda job: job.cluster),
    JobField("namespace", "text", lambda job: job.namespace), JobField("job", "text", lambda job: job.job),
)  # fmt: skip
"""The columns of a file that name the job."""


def asks_lost(shown: Sequence[str], order: str) -> bool:
    """Whether a list with these columns, in the order of that one, must know what stops lost."""
    return LOST in (*shown, order)


def file_columns(shown: Sequence[JobOrder], *, compare: bool) -> tuple[list[JobField], bool]:
    """The columns of a file with these columns of the list, and whether the currency follows them. compare: with the
    figures of the span before."""
    parts = [*NAMING]
    parts += [part for name in shown for part in COLUMNS[name].parts if part not in parts]
    if compare:
        compared = dict.fromkeys(part for name in shown if name in COMPARED for part in COLUMNS[name].parts)
        parts += [before(part, lambda job: job.then) for part in compared]
    return parts, bool(_OF_MONEY & set(shown))


def cells(parts: Sequence[JobField], job: Job, currency: str | None, *, with_currency: bool) -> list[FileCell]:
    """The cells of a job, with the currency at the end if it follows; without one, no amounts."""
    return [
        *(None if currency is None and part.kind == "money" else part.of(job) for part in parts),
        *([currency or ""] if with_currency else []),
    ]
