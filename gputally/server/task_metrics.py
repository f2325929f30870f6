"""Shows the background tasks of a program as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gputally.base.background_tasks import FAILURES_HELP, STOPPED_HELP, BackgroundTasks


class TaskMetrics(Collector):
    """Whether each task has stopped, and how often it failed."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterator[Metric]:
        stopped = GaugeMetricFamily("gputally_task_stopped", STOPPED_HELP, labels=["task"])
        failures = CounterMetricFamily("gputally_task_failures", FAILURES_HELP, labels=["task"])
        for name, state in self._tasks.states().items():
            stopped.add_metric([name], state.stopped)
            failures.add_metric([name], state.failures)
        yield from (stopped, failures)
