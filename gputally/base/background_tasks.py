"""Background tasks and their state: what each program does again and again, and why one of them no longer does it.

A task has a fault while its last run failed, while a run takes longer than its patience, and once its thread has
ended. Readiness and metrics of all programs show the faults. A task decides nothing itself: its owner's loop runs it,
catches what it raises, and goes on; `BackgroundTasks.start` is such a loop on a thread of its own.
"""

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
"""How long one run may take by default: a run that hangs is seen within a minute."""


END: Final = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a program to end."""

RESTART_S: Final = 5.0
"""How long a loop that raised pauses before it begins anew."""

STOPPED_HELP: Final = (
    "1 while a background task of this program hangs, has ended, or failed of an error of an unexpected kind; else 0."
)
FAILURES_HELP: Final = "Runs of a background task of this program that failed."


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task at one instant. fault: why it does not work, None while it does. stopped: the fault is none that the task
    knows of and tries again: it hangs, its thread has ended, or it raised an error of an unexpected kind. failures:
    since the start. running_s: how long the run under way has taken."""

    fault: str | None
    stopped: bool
    failures: int
    running_s: float | None


class BackgroundTask:
    """One task. Thread-safe: one thread runs it, any reads its state."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        expected: tuple[type[BaseException], ...] = (),
    ) -> None:
        """expected: what a run may raise without a defect, such as an API server that does not answer."""
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
        """Have a fault once this thread has ended."""
        self._thread = thread

    def begin(self) -> None:
        """A run begins, or the run under way made progress."""
        self._began_ms = self._clock.monotonic_ms()

    def progress(self) -> None:
        """The run under way did its work once and goes on: what failed before is over."""
        self.succeed()
        self.begin()

    def succeed(self) -> None:
        """The run ended well."""
        self._began_ms, self._fault, self._unexpected = None, None, False

    def fail(self, error: BaseException) -> None:
        """The run failed."""
        self._failures += 1
        self._began_ms = None
        self._unexpected = not isinstance(error, self._expected)
        self._fault = f"failed: {described(error)}" if self._unexpected else f"failed: {_first_line(error)}"

    def end(self) -> None:
        """The task is not wanted any more."""
        self._over = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """One run; what it raises is counted and raised."""
        self.begin()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.succeed()

    @contextmanager
    def guarded(self, tell: Callable[[Exception], None]) -> Iterator[None]:
        """One run; what it raises is counted and told, and ends nothing but the run."""
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
        """Whether the run under way takes longer than its patience."""
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
"""Goes on until the event is set. It calls `begin` and `succeed` around each turn, or `progress` whenever it got on."""


class BackgroundTasks:
    """All tasks of one process, by name. expected: see BackgroundTask."""

    def __init__(self, clock: Clock, expected: tuple[type[BaseException], ...] = ()) -> None:
        self._clock = clock
        self._expected = expected
        self._tasks: dict[str, BackgroundTask] = {}

    def add(self, name: str, patience_s: float = PATIENCE_S) -> BackgroundTask:
        """A new task, without a fault until its first run."""
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
        """A task that does `work` on a thread of its own until `stop` is set. Where it raises or ends before, which is
        a defect, the error is told and the work begins anew after `RESTART_S`: a thread that ends alone would be
        missed too late."""
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
    """Set `event` when one of these signals arrives; the handlers that were in place before.

    The handler only hands over to a thread: it runs inside whatever the main thread does at that moment, and would wait
    for ever where that is inside the event itself. `SimpleQueue.put` is the one hand-over that may interrupt itself."""
    arrived: SimpleQueue[int] = SimpleQueue()

    def forward() -> None:
        while True:
            arrived.get()
            event.set()

    threading.Thread(target=forward, name="signals", daemon=True).start()
    return {number: signal.signal(number, lambda at, _: arrived.put(at)) for number in numbers}


def described(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first != type(error).__name__ else first


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip() or type(error).__name__
