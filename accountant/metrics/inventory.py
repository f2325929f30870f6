"""How well the accountant keeps up with each kind of the cluster's objects, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.inventory.informers import ClusterInventory
from agent.clock import Clock
from agent.units import MS_PER_SECOND


class InventoryCollector(Collector):
    """Of one inventory, as it is at the scrape."""

    def __init__(self, inventory: ClusterInventory, clock: Clock) -> None:
        self._inventory = inventory
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "gputally_inventory_age_seconds",
            "Since the API server last answered about this kind of object; absent until it has once.",
            labels=["kind"],
        )
        failures = CounterMetricFamily(
            "gputally_inventory_failures", "Times the API server did not answer about this kind.", labels=["kind"]
        )
        for kind in self._inventory.kinds:
            if kind.heard_ms is not None:
                age.add_metric([kind.kind], max(0, self._clock.wall_ms() - kind.heard_ms) / MS_PER_SECOND)
            failures.add_metric([kind.kind], kind.failures)
        yield age
        yield failures
