"""A policy against another over the same past: what every queue had, has and would have. Pure.

For the command `what-if` and for the preview of the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accountant.wire import Policy
from fairshare.explain.pasts import Past
from fairshare.simulator.records import Record
from fairshare.simulator.what_if import Got, bounded_together, flat, got, under
from fairshare.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Row:
    """One queue: GPU-hours as they were, and under the replay of both policies."""

    queue: str
    had: float | None
    now: Got
    then: Got


def leaves(policy: Policy) -> list[str]:
    """Queues that hold GPUs themselves, in the order of the policy."""
    return [queue.name for queue in flat(policy).queues]


def assumed(past: Past, now: Policy, then: Policy) -> tuple[str, ...]:
    """What the reader has to know about the comparison."""
    told = list(past.told)
    together = dict.fromkeys((*bounded_together(now), *bounded_together(then)))
    if together:
        told.append(f"the limit of {', '.join(together)} holds for each queue below alone, and its quota for none")
    too_large = sum(1 for gpus in past.workload.gpus if gpus > past.gpus)
    if too_large:
        told.append(f"{too_large} jobs are larger than the {past.gpus:,} GPUs and are left out")
    missing = sorted(set(leaves(now)) ^ set(leaves(then)))
    if missing:
        told.append(f"only one of the policies has {', '.join(missing)}: there it held nothing")
    return tuple(told)


def replayed(policy: Policy, past: Past, progress: Callable[[float], None] | None = None) -> Record:
    """The past under `policy`. progress: hears of the part that is done, 0..1."""
    return under(policy, _sorted_into(past.workload, leaves(policy)), past.gpus, past.end_s, progress)


def _sorted_into(workload: Workload, leaves: Sequence[str]) -> Workload:
    """The same jobs with `leaves` as queues; those of others are left out."""
    index = {name: i for i, name in enumerate(leaves)}
    kept = [i for i, q in enumerate(workload.queue) if workload.queues[q] in index]
    return Workload(
        tuple(leaves), [workload.submit_s[i] for i in kept], [workload.gpus[i] for i in kept],
        [workload.duration_s[i] for i in kept], [index[workload.queues[workload.queue[i]]] for i in kept],
        len(workload.queue) - len(kept),
    )  # fmt: skip


def rows(names: Sequence[str], past: Past, before: Record, after: Record) -> list[Row]:
    """Of the queues `names`, the leaves of the policy that `after` was replayed under."""
    now = {each.queue: each for each in got(before, past.from_s)}
    nothing = Got("", 0.0, 0, 0.0, 0.0, 0)
    return [
        Row(name, past.had[q] if past.had is not None else None, now.get(name, nothing), each)
        for q, (name, each) in enumerate(zip(names, got(after, past.from_s), strict=True))
    ]
