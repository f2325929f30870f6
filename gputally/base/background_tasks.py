"""Runs background tasks and records their state, so that a program can report which task does not work and why.

A task has a fault if its last run failed, if its current run takes longer than its time limit, or if its thread has
ended. The readiness checks and the metrics of all programs show the faults. A `BackgroundTask` only records: the loop
of its owner runs the work, catches exceptions and continues. `BackgroundTasks.start` is such a loop on a thread of its
own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND

PATIENCE_S: Final = 45.0
"""Default time limit of one run. It is less than a minute, so that an alert notices a run that hangs within a
minute."""

RESTART_S: Final = 5.0
"""Pause before a loop that raised an exception starts again."""

STOPPED_HELP: Final = (
    "1 while a background task of this program hangs, has ended, or failed with an unexpected error; 0 otherwise."
)
FAILURES_HELP: Final = "Failed runs of a background task of this program."


@dataclass(frozen=True, slots=True)
class TaskState:
    """The state of a background task at one moment.

    fault: why the task does not work; None while it works.
    stopped: True if the task hangs, its thread has ended, or its last run raised an error that is not expected.
    failures: the number of failed runs since the start.
    running_s: duration of the current run; None between runs."""

    fault: str | None
    stopped: bool
    failures: int
    running_s: float | None


class BackgroundTask:
    """The record of one task. One thread runs the task and calls the methods, and any thread can read the state."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        expected: tuple[type[BaseException], ...] = (),
        *,
        serves: bool = False,
    ) -> None:
        """Create the record of a task that has not run yet.

        patience_s: the time limit of one run.
        serves: True if the program can take or answer no request while this task does not work.
        expected: exceptions of a run that are not defects, such as an API server that does not answer."""
        self.name = name
        self.serves = serves
        self._expected = expected
        self._clock = clock
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._fault: str | None = None
        self._unexpected = False
        self._began_ms: int | None = None
        self._ended = False

    def watch(self, thread: threading.Thread) -> None:
        """Set the started thread that runs the task, so that the task has a fault once the thread has ended. A thread
        that has not started would look like one that has ended."""
        self._thread = thread

    def begin(self) -> None:
        """Record that a run begins, or that the current run made progress."""
        self._began_ms = self._clock.monotonic_ms()

    def progress(self) -> None:
        """Record that the current run has succeeded and goes on, which ends the fault of an earlier failure."""
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
        self._fault = f"failed: {error_summary(error)}" if self._unexpected else f"failed: {_first_line(error)}"

    def end(self) -> None:
        """Record that the program has ended the task, which is no fault."""
        self._ended = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record one run: its start, its end, and the exception that it raises, which is raised again."""
        self.begin()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.succeed()

    @contextmanager
    def guarded(self, report: Callable[[Exception], None]) -> Iterator[None]:
        """Record one run like `running`, but pass its exception to `report` instead of raising it again."""
        try:
            with self.running():
                yield
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread that runs the task
            report(error)

    @property
    def failing(self) -> bool:
        """True if the last run failed."""
        return self._fault is not None

    @property
    def hangs(self) -> bool:
        """True while the current run takes longer than its time limit."""
        began = self._began_ms
        return began is not None and self._clock.monotonic_ms() - began > self._patience_s * MS_PER_SECOND

    def state(self) -> TaskState:
        """Return the present state."""
        began = self._began_ms
        running_s = None if began is None else (self._clock.monotonic_ms() - began) / MS_PER_SECOND
        fault, stopped = self._current_fault(running_s)
        return TaskState(fault, stopped, self._failures, running_s)

    def _current_fault(self, running_s: float | None) -> tuple[str | None, bool]:
        """Return the values of `fault` and `stopped` in TaskState. running_s: see TaskState."""
        if self._ended:
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
    """The background tasks of one process, by name. expected: exceptions of a run that are not defects."""

    def __init__(self, clock: Clock, expected: tuple[type[BaseException], ...] = ()) -> None:
        self._clock = clock
        self._expected = expected
        self._tasks: dict[str, BackgroundTask] = {}

    def add(self, name: str, patience_s: float = PATIENCE_S, *, serves: bool = False) -> BackgroundTask:
        """Add a task, which has no fault until its first run. serves: see BackgroundTask."""
        task = self._tasks[name] = BackgroundTask(name, self._clock, patience_s, self._expected, serves=serves)
        return task

    def states(self) -> Mapping[str, TaskState]:
        return {name: task.state() for name, task in sorted(dict(self._tasks).items())}

    def faults(self) -> Mapping[str, str]:
        """Return the fault of each task that has one."""
        return {name: state.fault for name, state in self.states().items() if state.fault is not None}

    @property
    def serving(self) -> frozenset[str]:
        """Return the tasks without which the program cannot do its work, such as to take and answer requests."""
        return frozenset(name for name, task in dict(self._tasks).items() if task.serves)

    def start(
        self,
        name: str,
        work: Work,
        stop: threading.Event,
        report: Callable[[Exception], None],
        patience_s: float = PATIENCE_S,
        *,
        serves: bool = False,
    ) -> threading.Thread:
        """Run `work` on a thread of its own until `stop` is set.

        If the work raises an exception or returns earlier, which is a defect, it starts again after `RESTART_S`. The
        exception is passed to `report`. serves: see BackgroundTask."""
        task = self.add(name, patience_s, serves=serves)

        def run() -> None:
            while not stop.is_set():
                task.begin()
                try:
                    work(stop, task)
                except Exception as error:  # noqa: BLE001 - a defect must not end the thread that runs the task
                    task.fail(error)
                    report(error)
                self._clock.wait(RESTART_S, stop)
            task.end()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        task.watch(thread)
        return thread


def set_on_signals(event: threading.Event) -> Callable[[], None]:
    """Set `event` when SIGTERM or SIGINT asks the program to end. Return what restores the state from before the call.

    Python runs handlers in the main thread alone, between two steps of it. A main thread that begins to wait just when
    the signal arrives takes no further step, and one that holds the event's lock would deadlock. The event is therefore
    set by a thread that reads the numbers of signals, which the interpreter itself writes into a pipe."""
    numbers = signal.SIGTERM, signal.SIGINT
    arriving, written = os.pipe()
    os.set_blocking(written, False)

    def forward() -> None:
        with os.fdopen(arriving, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in numbers:
                    event.set()

    threading.Thread(target=forward, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(written)  # ends the thread, which closes the other end

    return restore


def error_summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first != type(error).__name__ else first


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip() or type(error).__name__
