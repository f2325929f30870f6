"""What waits for a decision in the books, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.books.proposals import Proposal


class BooksCollector(Collector):
    """waiting: the proposals that were found when closed months were looked at last."""

    def __init__(self, waiting: Callable[[], Sequence[Proposal]]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "gputally_proposals_waiting",
            "Closed months for which something arrived late that waits for an admin to take it up or to refuse it.",
        )
        family.add_metric([], len(self._waiting()))
        yield family
