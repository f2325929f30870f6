"""Steps of background tasks that do not work, and the tasks that plug-ins of the agent start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from tests.plugin_cases import plugin_cases

Start = Callable[["Step", VirtualClock, BackgroundTasks], Callable[[], None]]
"""Starts a task with a step, and returns the function that ends it."""


class Ended(BaseException):
    """Ends a thread: no handler catches it."""


class Step:
    """Stands in for the kubelet, the API server, an exporter or the accountant of a task."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0
        self.waits, self.released = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Any:
        self.calls += 1
        if self.how == "dies":
            raise Ended
        if self.how == "hangs" or self.calls > 1:
            self.waits.set()
            self.released.wait(60)
        raise ZeroDivisionError("a defect")


class Asked:
    """A kubelet's channel, an API server or an uploader that answers as the step says."""

    def __init__(self, step: Step) -> None:
        self.call = self.page = step

    def close(self) -> None:
        """Hold nothing."""


def task_cases() -> dict[str, Start]:
    """Return how to start each task of readers and of sources of holders, by the task's name."""
    return {
        name: start
        for group in ("agent/gpu_readers", "agent/holders")
        for cases in plugin_cases(group).values()
        for name, start in cases.TASKS.items()
    }
