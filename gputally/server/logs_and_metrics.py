"""Configures the log of a server (one JSON object per event), and exports its background tasks as Prometheus
metrics."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gputally.base.background_tasks import FAILURES_HELP, STOPPED_HELP, BackgroundTasks

Level = Literal["debug", "info", "warning", "error"]


def configure(level: Level) -> None:
    """Write gputally's events, and the warnings of the libraries, to stderr. Only a process's entry point calls this
    function."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)


def gauge(
    name: str, text: str, samples: Iterable[tuple[Sequence[str], float]], *, labels: Sequence[str] = ()
) -> GaugeMetricFamily:
    """Return a gauge. samples: the values of the labels and the value of each sample."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family


class TaskMetrics(Collector):
    """Exports for each background task whether it has stopped, and how often it failed."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterator[Metric]:
        states = self._tasks.states()
        stopped = (([name], float(state.stopped)) for name, state in states.items())
        yield gauge("gputally_task_stopped", STOPPED_HELP, stopped, labels=["task"])
        failures = CounterMetricFamily("gputally_task_failures", FAILURES_HELP, labels=["task"])
        for name, state in states.items():
            failures.add_metric([name], state.failures)
        yield failures
