"""Calls that may never return, made so that the caller goes on.

A wedged GPU lets a call hang inside the kernel, where nothing can interrupt it. So calls are made on a worker
thread; one that does not come back in time is left behind with its thread, its group is refused until it does,
and a new worker serves the rest. In the good case that is one hand-over per call and no new thread.
What a group touches belongs to its call until that returns: do not share state between groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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
        if group in self.stuck:
            raise Stuck(group)
        worker = self._worker or _Worker()
        self._worker = worker
        worker.tasks.put(action)
        try:
            result, error = worker.results.get(timeout=limit_s)
        except Empty:
            self._hung[group] = worker
            self._worker = None
            worker.tasks.put(None)
            raise Stuck(group) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the idle worker go."""
        if self._worker is not None:
            self._worker.tasks.put(None)
            self._worker = None


class _Worker:
    """A daemon thread: one that hangs must not keep the process."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="nvml", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                self.results.put((task(), None))
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
                self.results.put((None, error))
