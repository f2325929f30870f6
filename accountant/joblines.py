"""What questions about jobs are answered with: part of the published language.

Frozen pydantic models. Integers carry their unit in the name; money is an exact decimal in the book's currency. A
cost is None where some of the time has no price; `unpriced_gpu_us` says how much.
"""

from __future__ import annotations

from typing import Literal

from accountant.answers import Accounts
from accountant.terms import Exact, Model

JobState = Literal["waiting", "running", "ended"]


class Job(Model):
    """A workload and what it did in the span that was asked for.

    state: waiting, no pod of it was ever on a node; ended, all are over (of holders that are no pods: it holds nothing
    any more). teams: who pays, by the policy in force at the time. created_ms, ended_ms: of the first and the last of
    its pods; held_from_ms, held_until_ms: of holding GPUs, ended hours rounded outwards. waited_ms: the longest that
    one of its pods was in its queue, so far. accounts_gpu_us: of held time. gpus, burn_per_hour: what it holds, and
    costs an hour, over the last minutes on record. epochs: how many it reported."""

    id: str
    cluster: str
    namespace: str
    job: str
    teams: tuple[str, ...]
    queues: tuple[str, ...]
    users: tuple[str, ...]
    state: JobState
    pods: int
    pods_running: int
    created_ms: int | None
    held_from_ms: int | None
    held_until_ms: int | None
    ended_ms: int | None
    waited_ms: int | None
    gpu_models: tuple[str, ...]
    accounts_gpu_us: Accounts
    gpus: Exact
    cost: Exact | None
    unpriced_gpu_us: int
    burn_per_hour: Exact | None
    epochs: int


class JobsAnswer(Model):
    """total_cost: exact sum of the jobs' costs, of all pages; None as soon as one is unknown."""

    start_ms: int
    end_ms: int
    currency: str | None
    price_book_version: str
    jobs: tuple[Job, ...]
    total_gpu_us: int
    total_cost: Exact | None
    next_page: str | None = None
    note: str = ""


class JobPart(Model):
    """A job's time at one price. unit_price None: it has none."""

    gpu_model: str
    capacity_type: str
    gpu_us: int
    gpu_hours: Exact
    unit_price: Exact | None
    cost: Exact | None


class EpochLine(Model):
    """What a job used and cost from the report before to this one, [start_ms, end_ms).

    epoch None: what came after the last report, which no epoch has yet."""

    epoch: int | None
    start_ms: int
    end_ms: int
    gpu_us: int
    cost: Exact | None
    unpriced_gpu_us: int


class JobAnswer(Model):
    """One job over its whole life, or the span that was asked for. parts and epochs each add up to it exactly."""

    start_ms: int
    end_ms: int
    currency: str | None
    price_book_version: str
    job: Job
    parts: tuple[JobPart, ...]
    epochs: tuple[EpochLine, ...]
