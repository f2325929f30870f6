"""Finds the jobs that keep GPUs busy and use little of them.

A GPU is busy while at least one kernel runs, even if the kernel occupies one multiprocessor of a hundred. The activity
of the multiprocessors and of the tensor cores says how much of the GPU works.

Example: a job that is busy for 96 % of its time, with multiprocessors active for 80 % and tensor cores for 4 %, likely
calculates in a precision for which there are no tensor cores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from accountant.ledger.protocols import JobKey
from gputally.base.units import US_PER_HOUR

BUSY = 0.5
"""From this part of the time on, a job counts as busy."""
LITTLE_SM = 0.3
"""Below this activity of the multiprocessors, kernels do not fill the GPU."""
LITTLE_TENSOR = 0.1
"""Below this activity of the tensor cores, hardly any work is done by them."""
LEAST_US = US_PER_HOUR
"""Jobs with less busy time are left out."""
Finding = Literal["few multiprocessors", "few tensor cores"]
_ADVICE: dict[Finding, str] = {
    "few multiprocessors": "kernels do not fill the GPU: larger batches, faster data loading, or a part of a GPU",
    "few tensor cores": "the work is not done by tensor cores: check whether bf16, fp16 or TF32 is possible",
}


@dataclass(frozen=True, slots=True)
class JobActivity:
    """What a job of a team did with the GPUs that it held, in GPU-µs. An activity is None if it is unknown."""

    team: str
    key: JobKey
    busy_us: int
    idle_us: int
    unknown_us: int
    sm_active_us: int | None
    sm_unknown_us: int
    tensor_active_us: int | None
    tensor_unknown_us: int


@dataclass(frozen=True, slots=True)
class ActivityAdvice:
    """A job that is busy and uses little of its GPUs.

    gpu_hours: its busy time.
    busy: the busy part of the held time whose use is known.
    sm, tensor: the mean activity in busy time, at most 1; None if unknown.
    inactive_gpu_hours: the busy time in which the multiprocessors, or else the tensor cores, were not active."""

    team: str
    cluster: str
    namespace: str
    job: str
    gpu_hours: float
    busy: float
    sm: float | None
    tensor: float | None
    inactive_gpu_hours: float
    finding: Finding

    @property
    def advice(self) -> str:
        return _ADVICE[self.finding]


def activity_advice(jobs: Iterable[JobActivity]) -> tuple[ActivityAdvice, ...]:
    """Return the jobs that are busy and use little of their GPUs, the largest inactive time first."""
    found = [advice for advice in map(_advice, jobs) if advice is not None]
    return tuple(
        sorted(found, key=lambda one: (-one.inactive_gpu_hours, one.team, one.cluster, one.namespace, one.job))
    )


def _advice(job: JobActivity) -> ActivityAdvice | None:
    known = job.busy_us + job.idle_us
    if job.busy_us < LEAST_US or job.busy_us < BUSY * known:
        return None
    busy = job.busy_us / known
    sm = _in_busy_time(job, job.sm_active_us, job.sm_unknown_us)
    tensor = _in_busy_time(job, job.tensor_active_us, job.tensor_unknown_us)
    finding: Finding
    if sm is not None and sm < LITTLE_SM:
        finding, active = "few multiprocessors", sm
    elif tensor is not None and tensor < LITTLE_TENSOR:
        finding, active = "few tensor cores", tensor
    else:
        return None
    hours = job.busy_us / US_PER_HOUR
    return ActivityAdvice(job.team, *job.key, hours, busy, sm, tensor, hours * (1 - active), finding)


def _in_busy_time(job: JobActivity, active_us: int | None, unknown_us: int) -> float | None:
    """The mean activity in the busy time for which it is known. Activity outside of busy time does not exist, and the
    busy part of the time with unknown activity is taken to be that of the whole."""
    held = job.busy_us + job.idle_us + job.unknown_us
    if active_us is None or unknown_us >= held:
        return None
    return min(1.0, active_us / (job.busy_us * (held - unknown_us) / held))
