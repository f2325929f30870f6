"""Runs background tasks and records their state, so that a program can report which task does not work and why.

A task has a fault while its last run failed, while a run takes longer than its patience, and after its thread has
ended. Readiness checks and metrics of all programs show the faults. A task decides nothing itself. The loop of its
owner runs it, catches its exceptions and continues. `BackgroundTasks.start` is such a loop on a thread of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

PATIENCE_S: Final = 45.0
"""Default time that one run may take, so that a run that hangs is noticed within a minute."""


END: Final = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a program to end."""

RESTART_S: Final = 5.0
"""Pause before a loop that raised an exception starts again."""

STOPPED_HELP: Final = (
    "1 while a background task of this program hangs, has ended, or failed of an error of an unexpected kind; else 0."
)
FAILURES_HELP: Final = "Runs of a background task of this program that failed."


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task's state at one moment.

    fault: why the task does not work, None while it works.
    stopped: the fault is unexpected (the task hangs, its thread has ended, or it raised an error of an unexpected
        kind).
    failures: since the start.
    running_s: duration of the current run."""

    fault: str | None
    stopped: bool
    failures: int
    running_s: float | None


class BackgroundTask:
    """One task. Thread-safe: one thread runs it, and any thread reads its state."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        expected: tuple[type[BaseException], ...] = (),
    ) -> None:
        """expected: exceptions of a run that are not defects, such as an API server that does not answer."""
        self.name = name
        self._expected = expected
        self._clock = clock
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._fault: str | None = None
        self._unexpected = False
        self._began_ms: int | None = None
        self._over = False

    def watch(self, thread: threading.Thread) -> None:
        """Report a fault once this thread has ended."""
        self._thread = thread

    def begin(self) -> None:
        """Record that a run begins, or that the current run made progress."""
        self._began_ms = self._clock.monotonic_ms()

    def progress(self) -> None:
        """Record that the current run succeeded once and continues; earlier failures are over."""
        self.succeed()
        self.begin()

    def succeed(self) -> None:
        """Record that the run succeeded."""
        self._began_ms, self._fault, self._unexpected = None, None, False

    def fail(self, error: BaseException) -> None:
        """Record that the run failed."""
        self._failures += 1
        self._began_ms = None
        self._unexpected = not isinstance(error, self._expected)
        self._fault = f"failed: {described(error)}" if self._unexpected else f"failed: {_first_line(error)}"

    def end(self) -> None:
        """Record that the task has ended on purpose."""
        self._over = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time one run; exceptions are counted and raised again."""
        self.begin()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.succeed()

    @contextmanager
    def guarded(self, tell: Callable[[Exception], None]) -> Iterator[None]:
        """Time one run; exceptions are counted and reported to `tell`, and end only this run."""
        try:
            with self.running():
                yield
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread that runs the task
            tell(error)

    @property
    def failing(self) -> bool:
        """Whether the last run failed."""
        return self._fault is not None

    @property
    def hangs(self) -> bool:
        """Return whether the current run takes longer than its patience."""
        began = self._began_ms
        return began is not None and self._clock.monotonic_ms() - began > self._patience_s * MS_PER_SECOND

    def state(self) -> TaskState:
        began = self._began_ms
        running_s = None if began is None else (self._clock.monotonic_ms() - began) / MS_PER_SECOND
        fault, stopped = self._why(running_s)
        return TaskState(fault, stopped, self._failures, running_s)

    def _why(self, running_s: float | None) -> tuple[str | None, bool]:
        if self._over:
            return None, False
        if self._thread is not None and not self._thread.is_alive():
            return "its thread has ended", True
        if running_s is not None and self.hangs:
            return f"has not ended for {running_s:.0f} s", True
        return self._fault, self._unexpected


Work = Callable[[threading.Event, BackgroundTask], None]
"""A function that runs until the event is set. It calls `begin` and `succeed` around each turn, or `progress` after
each step."""


class BackgroundTasks:
    """All tasks of one process, by name. expected: see BackgroundTask."""

    def __init__(self, clock: Clock, expected: tuple[type[BaseException], ...] = ()) -> None:
        self._clock = clock
        self._expected = expected
        self._tasks: dict[str, BackgroundTask] = {}

    def add(self, name: str, patience_s: float = PATIENCE_S) -> BackgroundTask:
        """Add a task, which has no fault until its first run."""
        task = self._tasks[name] = BackgroundTask(name, self._clock, patience_s, self._expected)
        return task

    def states(self) -> Mapping[str, TaskState]:
        return {name: task.state() for name, task in sorted(dict(self._tasks).items())}

    def faults(self) -> Mapping[str, str]:
        """The fault of each task that has one."""
        return {name: state.fault for name, state in self.states().items() if state.fault is not None}

    def start(
        self,
        name: str,
        work: Work,
        stop: threading.Event,
        tell: Callable[[Exception], None],
        patience_s: float = PATIENCE_S,
    ) -> threading.Thread:
        """Run `work` on a thread of its own until `stop` is set. If it raises or returns earlier, which is a defect,
        the error is reported to `tell` and the work starts again after `RESTART_S`, because a thread that ends would be
        noticed too late."""
        task = self.add(name, patience_s)

        def run() -> None:
            while not stop.is_set():
                task.begin()
                try:
                    work(stop, task)
                except Exception as error:  # noqa: BLE001 - a defect must not end the thread that runs the task
                    task.fail(error)
                    tell(error)
                self._clock.wait(RESTART_S, stop)
            task.end()

        thread = threading.Thread(target=run, name=name, daemon=True)
        task.watch(thread)
        thread.start()
        return thread


def set_on_signals(event: threading.Event, numbers: Collection[signal.Signals] = END) -> Mapping[signal.Signals, Any]:
    """Set `event` when one of these signals arrives; returns the previous handlers.

    The handler only passes the signal to a thread: it interrupts the main thread anywhere, and setting the event
    directly would deadlock if the main thread holds the event's lock. `SimpleQueue.put` is reentrant."""
    arrived: SimpleQueue[int] = SimpleQueue()

    def forward() -> None:
        while True:
            arrived.get()
            event.set()

    threading.Thread(target=forward, name="signals", daemon=True).start()
    return {number: signal.signal(number, lambda at, _: arrived.put(at)) for number in numbers}


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first != type(error).__name__ else first


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip() or type(error).__name__
