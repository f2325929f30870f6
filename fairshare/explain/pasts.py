"""What a what-if replays: history from the accountant's books, or from a job trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from accountant.wire import Policy
from agent.units import MS_PER_HOUR
from fairshare.client import AccountantClient
from fairshare.errors import FairshareError
from fairshare.explain import tracefile
from fairshare.simulator import history
from fairshare.simulator.history import Held
from fairshare.simulator.what_if import daily_of, flat
from fairshare.simulator.workload import Workload, columns

HOUR_S = 3600
WARM_UP_S = 7 * 86_400
"""Most that is replayed before the span that is shown, so that it begins with full queues and a history."""
Days = list[tuple[float, list[float]]]


class WhatIfError(FairshareError):
    """There is no history to replay."""


@dataclass(frozen=True, slots=True)
class Past:
    """What is replayed. from_s: where the span that is shown begins. had: GPU-hours by queue in it, and days:
    mean GPUs day by day, as the books have them; None of a trace."""

    workload: Workload
    gpus: int
    from_s: int
    end_s: int
    had: Sequence[float] | None
    days: Days | None
    told: tuple[str, ...]


def of_books(client: AccountantClient, policy: Policy, span_s: int, given: int | None, now_ms: int) -> Past:
    """The last `span_s` seconds of whole hours, and what is replayed before them. given: GPUs, instead of those
    in the books. Raises WhatIfError, AccountantUnavailable."""
    end_ms = now_ms // MS_PER_HOUR * MS_PER_HOUR
    hours = max(1, span_s // HOUR_S)
    warm = min(WARM_UP_S, policy.window.size) // HOUR_S
    start_ms = end_ms - (hours + warm) * MS_PER_HOUR
    leaves = [queue.name for queue in flat(policy).queues]
    held: list[Held] = []
    whole = [0] * (hours + warm)
    begin = datetime.fromtimestamp(start_ms / 1000, UTC)
    for line in client.usage(start_ms, end_ms, ("queue", "job", "hour")):
        at = datetime.strptime(line.key["hour"], "%Y-%m-%dT%H").replace(tzinfo=UTC)
        hour = round((at - begin).total_seconds()) // HOUR_S
        accounts = line.accounts_gpu_us
        whole[hour] += accounts.allocated + accounts.unallocated
        held.append(Held(line.key["queue"], line.key["job"], hour, accounts.allocated))
    gpus = given or history.capacity(whole)
    known = next((hour for hour, amount in enumerate(whole) if amount > 0), None)
    if gpus <= 0 or known is None:
        raise WhatIfError(f"the books hold no GPU time in the last {span_s // HOUR_S} hours")
    different: dict[tuple[str, str], int] = {}
    for line in client.usage(start_ms, end_ms, ("queue", "job", "gpu")):
        if line.accounts_gpu_us.allocated > 0:
            key = line.key["queue"], line.key["job"]
            different[key] = different.get(key, 0) + 1
    waits = client.median_waits_s(start_ms, end_ms)
    workload = history.jobs(held, leaves, different, waits)
    if not workload.submit_s:
        raise WhatIfError(f"no queue of the policy ({', '.join(leaves)}) held a GPU in that time")
    index = {name: i for i, name in enumerate(leaves)}
    amounts = [[0] * len(leaves) for _ in range(hours)]
    for each in held:
        if each.queue in index and each.hour >= warm:
            amounts[each.hour - warm][index[each.queue]] += each.gpu_us
    had = [sum(column) / history.US_PER_GPU_HOUR for column in zip(*amounts, strict=True)]
    told = list(history.ASSUMED)
    if known > warm:
        told.append(f"the books begin {known - warm} hours into the span")
    if policy.window.kind != "sliding":
        told.append(f"the {policy.window.kind} window as a sliding one of its size")
    if workload.left_out:
        told.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return Past(workload, gpus, warm * HOUR_S, (hours + warm) * HOUR_S, had, daily_of(amounts), tuple(told))


def of_trace(path: Path, policy: Policy, gpus: int) -> Past:
    """A job trace in whole days. Raises WhatIfError, TraceError."""
    leaves = [queue.name for queue in flat(policy).queues]
    workload = columns(tracefile.load(path, 0), leaves)
    if not workload.submit_s:
        raise WhatIfError(f"{path}: no job of a queue of the policy ({', '.join(leaves)})")
    end_s = max(86_400, -(-(workload.submit_s[-1] + 1) // 86_400) * 86_400)
    told = [history.ASSUMED[-1]]
    if workload.left_out:
        told.append(f"{workload.left_out} jobs of no leaf queue of the policy are left out")
    return Past(workload, gpus, 0, end_s, None, None, tuple(told))
