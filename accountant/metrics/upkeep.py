"""What the accountant does by itself and cannot, and how old the newest backup is, for Prometheus.

A backup, an archive or a refused file is noticed by nobody who does not read the log: until it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant import backups
from accountant.errors import AccountantError
from agent.units import MS_PER_SECOND


class UpkeepCollector(Collector):
    """failing: task -> whether it failed the last time it was tried. folder: of the backups."""

    def __init__(self, failing: Callable[[], Mapping[str, bool]], folder: Path) -> None:
        self._failing = failing
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        tasks = GaugeMetricFamily(
            "gputally_upkeep_failing",
            "1 while what the accountant does by itself failed the last time: making backups and archives, booking "
            "corrections, reading the inventory, taking in a changed file (prices, policy, deliveries, certificate); "
            "else 0.",
            labels=["task"],
        )
        for task, fails in sorted(self._failing().items()):
            tasks.add_metric([task], fails)
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
