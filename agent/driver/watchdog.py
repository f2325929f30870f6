"""Calls that may never return, made so that the caller goes on.

A wedged GPU lets a call hang inside the kernel, where nothing can interrupt it. So calls are made on a worker
thread; one that does not come back in time is left behind with its thread, its group is refused until it does,
and a new worker serves the rest. In the good case a whole round of calls is one hand-over and no new thread.
What a group touches belongs to its call until that returns: do not share state between groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

IMPATIENCE = 5
"""A driver is likely to hang as a whole: after the first call that does, the others get this part of the time."""


class Stuck(Exception):
    """A call of this group has not come back."""


class Watchdog:
    """One caller at a time. Groups are names; there are at most as many hung threads as groups."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._hung: dict[str, _Worker] = {}

    @property
    def stuck(self) -> tuple[str, ...]:
        """The groups whose call has not come back."""
        for group in [group for group, worker in self._hung.items() if worker.ended]:
            del self._hung[group]
        return tuple(self._hung)

    def call(self, group: str, limit_s: float, action: Callable[[], _Result]) -> _Result:
        """What `action` returns or raises. Raises Stuck, at once where the group hangs already."""
        (outcome,) = self.run([(group, action)], limit_s)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(self, calls: Sequence[tuple[str, Callable[[], _Result]]], limit_s: float) -> list[_Result | Exception]:
        """One outcome per call, in order: what it returned, the exception it raised, or Stuck.

        limit_s: how long one call may take; a hang is noticed after at most twice that."""
        hung = self.stuck
        outcomes: list[_Result | Exception] = [Stuck(group) for group, _ in calls]
        waiting = [number for number, (group, _) in enumerate(calls) if group not in hung]
        while waiting:
            worker = self._worker or _Worker()
            self._worker = worker
            done = worker.work(_Round([calls[number][1] for number in waiting]), limit_s)
            for number, outcome in zip(waiting, done, strict=False):
                outcomes[number] = outcome
            waiting = waiting[len(done) :]
            if waiting:
                self._hung[calls[waiting.pop(0)][0]] = worker
                self._worker = None
                limit_s /= IMPATIENCE
        return outcomes

    def close(self) -> None:
        """Let the idle worker go."""
        if self._worker is not None:
            self._worker.tasks.put(None)
            self._worker = None


class _Round(Generic[_Result]):
    """Calls to make one after the other. given_up: the worker stops after the call it is in."""

    def __init__(self, actions: Sequence[Callable[[], _Result]]) -> None:
        self.actions = actions
        self.lock = threading.Lock()
        self.outcomes: list[_Result | Exception] = []
        self.given_up = False

    def make(self) -> bool:
        """Whether all of them were made."""
        for action in self.actions:
            outcome: _Result | Exception
            try:
                outcome = action()
            except Exception as error:  # noqa: BLE001 - it is raised where the call was asked for
                outcome = error
            with self.lock:
                if self.given_up:
                    return False
                self.outcomes.append(outcome)
        return True


class _Worker:
    """A daemon thread: one that hangs must not keep the process."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[_Round[object] | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="nvml", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def work(self, task: _Round[_Result], limit_s: float) -> list[_Result | Exception]:
        """The outcomes so far, when all are there or the next one does not come."""
        self.tasks.put(task)  # type: ignore[arg-type]
        made = 0
        while True:
            try:
                self._finished.get(timeout=limit_s)
                return task.outcomes
            except Empty:
                with task.lock:
                    if len(task.outcomes) == made:
                        task.given_up = True
                        return list(task.outcomes)
                    made = len(task.outcomes)

    def _serve(self) -> None:
        while (task := self.tasks.get()) is not None and task.make():
            self._finished.put(None)
            del task
