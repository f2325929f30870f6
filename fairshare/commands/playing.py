"""Replays in as many processes as there are cores: each is one thread's work, and none knows of another.

What is the same for all of them goes to every process once, when it starts; a task is a few numbers. Results come back
without the jobs, which both sides have. Ctrl-C is the parent's business: it drops what has not begun.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from fairshare.simulator.compare import Heard, Player, Replays, Result, Task
from fairshare.simulator.workload import Workload

_NO_JOBS = Workload((), (), (), (), ())
_player: list[Player] = []
"""In a process of the pool: the one that plays."""


@contextmanager
def players(player: Player, most: int | None = None) -> Iterator[Replays]:
    """Plays as `player` does, several at once. most: processes; None: as many as this one may use cores."""
    count = len(os.sched_getaffinity(0)) if most is None else most
    if count < 2:
        yield player
        return
    # Not forked: whoever read the trace has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(player,))
    for _ in range(count):  # else the others begin, with all they import, only once the first run is over
        pool.submit(os.getpid)

    def play(tasks: Sequence[Task], heard: Heard) -> Iterator[Result]:
        if tasks:
            heard(tasks[0].name, 0.0)
        for number, (task, result) in enumerate(zip(tasks, pool.map(_play, tasks), strict=True), 1):
            heard(task.name, number / len(tasks))
            result.record.workload = player.jobs(task)
            yield result

    try:
        yield play
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(player: Player) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _player[:] = [player]


def _play(task: Task) -> Result:
    result = _player[0].play(task)
    return replace(result, record=replace(result.record, workload=_NO_JOBS))
