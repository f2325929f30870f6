"""Deliveries for Prometheus, read at the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.delivery.attempts import Outcome
from accountant.delivery.dispatch import Dispatcher

OUTCOMES: tuple[Outcome, ...] = ("delivered", "refused", "given-up", "unsure")


class DeliveryCollector(Collector):
    def __init__(self, deliveries: Dispatcher) -> None:
        self._deliveries = deliveries

    def collect(self) -> Iterable[Metric]:
        count = Counter(one.outcome for one in self._deliveries.known())
        family = GaugeMetricFamily(
            "gputally_deliveries",
            "Reports and notices by what became of them: refused ones are tried again, those given up or unsure "
            "wait for a person.",
            labels=["outcome"],
        )
        for outcome in OUTCOMES:
            family.add_metric([outcome], count[outcome])
        yield family
