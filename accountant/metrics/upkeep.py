"""What the accountant does by itself and cannot, and how old the newest backup is, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant import backups
from accountant.errors import AccountantError
from agent.background import BackgroundTasks
from agent.units import MS_PER_SECOND


class UpkeepCollector(Collector):
    """refused: file -> whether its newest version is not in force. folder: of the backups."""

    def __init__(self, tasks: BackgroundTasks, refused: Callable[[], Mapping[str, bool]], folder: Path) -> None:
        self._tasks = tasks
        self._refused = refused
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        tasks = GaugeMetricFamily(
            "gputally_upkeep_failing",
            "1 while what the accountant does by itself failed the last time, or takes too long: making backups and "
            "archives, looking for late facts, reading the inventory, putting a changed file in force (prices, policy, "
            "deliveries, tokens, callers, certificate), watching the cluster; else 0.",
            labels=["task"],
        )
        faults = {name: state.fault is not None for name, state in self._tasks.states().items()}
        refused = self._refused()
        for task in sorted({*faults, *refused}):
            tasks.add_metric([task], faults.get(task, False) or refused.get(task, False))
        yield tasks
        newest = GaugeMetricFamily(
            "gputally_backup_last_timestamp_seconds",
            "When the newest backup in the backups' folder was made (Unix time); absent where there is none.",
        )
        number = GaugeMetricFamily("gputally_backups", "Backups in that folder.")
        try:
            known = backups.known(self._folder)
        except AccountantError:
            known = []  # the task says so, and an unreadable folder has no newest one
        number.add_metric([], len(known))
        if known:
            newest.add_metric([], known[0].at_ms / MS_PER_SECOND)
        yield from (newest, number)
