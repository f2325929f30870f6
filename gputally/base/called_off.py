"""Lets work in threads end early when nobody waits for its result any more.

The owner of the work makes a `Work` current, and calls it off when the caller has gone. Code that takes long runs under
`stoppable`, which names how to stop it. Work that nobody can call off, such as a background task or an act that changes
something, has no current `Work`, and `stoppable` does nothing there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

T = TypeVar("T")
_AGAIN_S: Final = 0.2


class CalledOff(Exception):
    """The work was called off: nobody waits for its result."""


class Work:
    """One piece of work that may be called off. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: list[Callable[[], None]] = []
        self.over = False
        """True once the work has been called off."""

    def call_off(self) -> None:
        """Stop the work. What runs under `stoppable` raises CalledOff, now or at its next step. Call it again until the
        work has ended, because what has not quite begun may ignore its `stop`."""
        with self._lock:
            self.over = True
            for stop in self._stops:
                stop()

    def end(self, thread: threading.Thread) -> None:
        """Call the work off until the thread that does it has ended."""
        while thread.is_alive():
            self.call_off()
            thread.join(_AGAIN_S)

    @contextmanager
    def stoppable(self, stop: Callable[[], None]) -> Iterator[None]:
        """Run the block so that `call_off` calls `stop`, which must not wait. Raises CalledOff once the work has been
        called off, also instead of an exception of the block, which then results from it."""
        with self._lock:
            if self.over:
                raise CalledOff
            self._stops.append(stop)
        try:
            yield
        except Exception as error:
            if self.over:
                raise CalledOff from error
            raise
        finally:
            with self._lock:
                self._stops.remove(stop)


_current: ContextVar[Work | None] = ContextVar("work", default=None)


def current() -> Work | None:
    """Return the work that this thread or task does; None if it cannot be called off."""
    return _current.get()


def make_current(work: Work | None) -> None:
    """Set the work of this task, and of threads that it starts with a copy of its context."""
    _current.set(work)


def check() -> None:
    """Raise CalledOff if the current work has been called off. For long work in Python."""
    work = _current.get()
    if work is not None and work.over:
        raise CalledOff


def each(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, for long loops in Python. Raises CalledOff before the next item once the current work has been
    called off."""
    work = _current.get()
    return iter(items) if work is None else _until_over(items, work)


def _until_over(items: Iterable[T], work: Work) -> Iterator[T]:
    for item in items:
        if work.over:
            raise CalledOff
        yield item


@contextmanager
def stoppable(stop: Callable[[], None]) -> Iterator[None]:
    """Run the block under `Work.stoppable` of the current work, if there is any."""
    work = _current.get()
    if work is None:
        yield
        return
    with work.stoppable(stop):
        yield
