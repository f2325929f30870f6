"""What a replay takes and gives: the pool, what a controller sees of it, and what happened. Data only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fairshare.simulator.workload import Workload

TICK_S = 60
CONTROL_S = 600
SNAPSHOT_S = 6 * 3600


@dataclass(frozen=True, slots=True)
class Pool:
    """The cluster and how it is shared. deserved, weights, limits: per queue, in the workload's order; a
    limit of None is none. capacity_at: capacity changes to these GPUs at these seconds."""

    capacity: int
    deserved: Sequence[float]
    weights: Sequence[float]
    limits: Sequence[int | None] = ()
    reclaim: bool = True
    one_line: bool = False
    """True: one queue for all, first in first out across teams."""
    backfill: bool = False
    """True, without reclaim and limits: EASY backfilling instead of starting whatever fits."""
    scan_depth: int = 32
    checkpoint_s: int = 1800
    restart_s: int = 120
    min_runtime_s: int = 600


@dataclass(slots=True)
class View:
    """What a controller sees every `CONTROL_S`. used: GPU-seconds since the start; gang: smallest that
    waits within the scan depth; reclaims: evictions made for the queue since the start."""

    now_s: int
    capacity: int
    used: list[int]
    held: list[int]
    asked: list[float]
    gang: list[int]
    reclaims: list[int]


class Steering(Protocol):
    """A policy in the loop."""

    def __call__(self, view: View) -> Sequence[float] | None:
        """Weights from now on; None leaves them."""
        ...


Dividing = Callable[[View, Sequence[float]], list[float]]
"""Fair shares from a view and the weights in force."""
Ranking = Callable[[View], Sequence[float]]
"""Queues in the order in which they are served, lowest first, where fair shares do not decide it."""


@dataclass(slots=True)
class Record:
    """What happened. used[t], weights[t]: per control period. backlog: per snapshot, every job submitted and not
    finished and the seconds of work that it has left, in step. Times -1 where it did not come to it."""

    workload: Workload
    pool: Pool
    end_s: int
    used: list[list[int]] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    weights: list[tuple[float, ...]] = field(default_factory=list)
    shares: list[tuple[float, ...]] = field(default_factory=list)
    backlog: list[tuple[array[int], array[int]]] = field(default_factory=list)
    started_s: list[int] = field(default_factory=list)
    finished_s: list[int] = field(default_factory=list)
    evictions: int = 0
    evicted: list[int] = field(default_factory=list)
    lost_gpu_s: int = 0
    delivered_gpu_s: int = 0
