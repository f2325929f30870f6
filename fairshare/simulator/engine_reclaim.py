"""Applies reclaim rules inside the simulated scheduler.

Queues are compared at the children of their lowest common ancestor, by the controller's own rules
(`preempting.reclaim`). Who is above what it may hold there gives back, most over its share first at every level on
the way down, its newest jobs first, until the gang fits or a queue on the way would fall below its deserved quota.
Whole gangs only. As in KAI the share is looked at before a victim is taken, so its gang may carry a queue below its
share; unlike there it never carries one below its quota. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairshare.core.model import UNLIMITED
from fairshare.preemption.preemption_claims import GPU
from fairshare.preemption.preemption_rules import (
    Accounts,
    Claimant,
    TakenBundles,
    above_share,
    path,
    queues_to_compare,
    ratio,
)
from fairshare.simulator.engine_state import Placement
from fairshare.simulator.simulation_model import Flavour, Job, Slot


@dataclass(slots=True)
class Run:
    """One attempt of one job: on its slots since `start_ms`, to end at `end_ms` if nothing stops it."""

    job: Job
    slots: tuple[Slot, ...]
    start_ms: int
    end_ms: int
    restart_ms: int
    attempt: int

    @property
    def flavour(self) -> Flavour:
        return self.slots[0].flavour


@dataclass(frozen=True, slots=True)
class Debtor:
    """A leaf queue that may have to give back: its preemptible runs past their minimum run time, newest first."""

    queue: str
    runs: Sequence[Run]


def levels(asking: str, queue: str, accounts: Accounts) -> tuple[str, ...]:
    """The queues that have to agree when a leaf gives back to another: from the child of their lowest common
    ancestor down to the leaf."""
    way = path(queue, accounts)
    return way[way.index(queues_to_compare(asking, queue, accounts)[1]) :]


def choose(
    job: Job, placement: Placement, debtors: Sequence[Debtor], accounts: Accounts
) -> tuple[Flavour, list[Run]] | None:
    """The flavour to run on and the jobs to stop, with as few GPUs as possible; None where nothing helps."""
    best: tuple[int, int, Flavour, list[Run]] | None = None
    for order, flavour in enumerate(placement.flavours(job)):
        victims = collect(job, job.gpus - placement.free(flavour), flavour, debtors, accounts)
        if victims:
            cost = sum(run.job.gpus for run in victims)
            if best is None or (cost, order) < best[:2]:
                best = (cost, order, flavour, victims)
    return (best[2], best[3]) if best else None


def collect(job: Job, missing: int, flavour: Flavour, debtors: Sequence[Debtor], accounts: Accounts) -> list[Run]:
    """The jobs to stop for `missing` GPUs of a flavour; none where it is not enough, or where the gang's queue or one
    above it would then be fuller than those it takes from."""
    taking = TakenBundles(Claimant(job.queue, {GPU: float(job.gpus)}, job.preemptible), accounts)
    rows = [
        (levels(job.queue, debtor.queue, accounts), [run for run in debtor.runs if run.flavour == flavour])
        for debtor in debtors
    ]
    at = [0] * len(rows)
    victims: list[Run] = []
    freed = 0
    while freed < missing:
        best: tuple[tuple[float, ...], int] | None = None
        for row, (way, runs) in enumerate(rows):
            if not above_share(accounts[way[0]], taking.held(way[0])):
                continue
            held = [taking.held(name)[GPU] for name in way]
            while at[row] < len(runs) and not _keeps_quotas(way, held, runs[at[row]].job.gpus, accounts):
                at[row] += 1
            if at[row] == len(runs):
                continue
            over = tuple(
                ratio(amount, accounts[name].stocks[GPU].share) for name, amount in zip(way, held, strict=True)
            )
            if best is None or over > best[0]:
                best = (over, row)
        if best is None:
            return []
        row = best[1]
        way, runs = rows[row]
        run = runs[at[row]]
        at[row] += 1
        taking.take(way[-1], {GPU: float(run.job.gpus)})
        freed += run.job.gpus
        victims.append(run)
    return _without_surplus(victims, freed - missing) if taking.fair() else []


def _keeps_quotas(way: Sequence[str], held: Sequence[float], gpus: int, accounts: Accounts) -> bool:
    """Whether every queue on the way still has its deserved quota without these GPUs."""
    for name, amount in zip(way, held, strict=True):
        quota = accounts[name].stocks[GPU].deserved
        if quota == UNLIMITED or amount - gpus < quota:
            return False
    return True


def _without_surplus(victims: list[Run], surplus: int) -> list[Run]:
    """Spare the jobs that the gang can do without, those who would lose most first: the longest running."""
    spared: set[int] = set()
    for i in sorted(range(len(victims)), key=lambda i: (victims[i].start_ms, victims[i].job.id)):
        if victims[i].job.gpus <= surplus:
            surplus -= victims[i].job.gpus
            spared.add(i)
    return [run for i, run in enumerate(victims) if i not in spared]


def loss_ms(run: Run, now_ms: int, checkpoint_ms: int) -> tuple[int, int]:
    """(saved, lost) of a run stopped now: work kept at its last checkpoint, and wall time that was in vain."""
    elapsed = now_ms - run.start_ms
    progress = max(0, elapsed - run.restart_ms)
    saved = progress // checkpoint_ms * checkpoint_ms
    return saved, elapsed - saved
