"""Whose jobs give way to a gang that its queue is owed: the choice of victims.

A queue above what it may hold by the controller's own rule (`fairshare.reclaim.allocatable`) gives back,
most over its share first, its newest jobs first, until the gang fits or the queue would fall below its
deserved quota. Whole gangs only. As in KAI the share is looked at before a victim is taken, so its gang
may carry a queue below its share; unlike there it never carries it below its quota. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fairshare.reclaim import allocatable
from fairshare.simulator.cluster import Flavour, Slot
from fairshare.simulator.jobs import Job
from fairshare.simulator.placement import Placement


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
    """A queue that may have to give back: held, deserved and share in GPUs; its preemptible runs past
    their minimum run time, newest first."""

    queue: str
    held: int
    deserved: float
    share: float
    runs: Sequence[Run]


def choose(job: Job, placement: Placement, debtors: Sequence[Debtor]) -> tuple[Flavour, list[Run]] | None:
    """The flavour to run on and whom to stop, with as few GPUs as possible; None where nothing helps."""
    best: tuple[int, int, Flavour, list[Run]] | None = None
    for order, flavour in enumerate(placement.flavours(job)):
        victims = _collect(job.gpus - placement.free(flavour), flavour, debtors)
        if victims:
            cost = sum(run.job.gpus for run in victims)
            if best is None or (cost, order) < best[:2]:
                best = (cost, order, flavour, victims)
    return (best[2], best[3]) if best else None


def _collect(missing: int, flavour: Flavour, debtors: Sequence[Debtor]) -> list[Run]:
    held = {debtor.queue: debtor.held for debtor in debtors}
    queues = [(debtor, [run for run in debtor.runs if run.flavour == flavour]) for debtor in debtors]
    at = {debtor.queue: 0 for debtor in debtors}
    victims: list[Run] = []
    freed = 0
    while freed < missing:
        best: tuple[float, Debtor, Run] | None = None
        for debtor, runs in queues:
            name = debtor.queue
            if held[name] <= allocatable(debtor.deserved, debtor.share):
                continue
            while at[name] < len(runs) and held[name] - runs[at[name]].job.gpus < debtor.deserved:
                at[name] += 1
            if at[name] == len(runs):
                continue
            over = held[name] / debtor.share if debtor.share > 0 else inf
            if best is None or over > best[0]:
                best = (over, debtor, runs[at[name]])
        if best is None:
            return []
        _, debtor, run = best
        at[debtor.queue] += 1
        held[debtor.queue] -= run.job.gpus
        freed += run.job.gpus
        victims.append(run)
    return _without_surplus(victims, freed - missing)


def _without_surplus(victims: list[Run], surplus: int) -> list[Run]:
    """Spare whom the gang can do without, those who would lose most first: the longest running."""
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
