"""The task of dcgm-exporter's reader in the tests of all tasks of the agent."""

from __future__ import annotations

from collections.abc import Callable

from agent.gpu_readers.chosen import ChosenReader
from agent.gpu_readers.dcgm import DcgmReader, Exporter
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock

TASK = "dcgm"


def started(read: Callable[[], str], clock: Clock, tasks: BackgroundTasks) -> tuple[ChosenReader, Callable[[], None]]:
    """Start the reader's task; return the reader beside another one, and the function that ends the task."""
    exporter = Exporter(read, clock)
    exporter.start(tasks)
    return ChosenReader(TASK, DcgmReader(exporter), fills=True), exporter.close


def started_alone(step: Callable[[], str], clock: Clock, tasks: BackgroundTasks) -> Callable[[], None]:
    return started(step, clock, tasks)[1]


TASKS = {TASK: started_alone}
