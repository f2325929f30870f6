"""What this process did, for Prometheus, and the registry that all its figures live in.

A second view for people: bills and weights come from the ledger alone. Its figures are read at the
scrape by accountant.metrics.ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accountant.ledger import Receipt

NAMELESS = frozenset(
    {
        "account",
        "capacity_type",
        "code",
        "gpu_model",
        "kind",
        "le",
        "node",
        "outcome",
        "pool",
        "reason",
        "region",
        "result",
        "task",
        "version",
    }
)
"""Labels of which no value names a team, its people, its namespaces, its queues or its jobs."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COMMIT_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The registry of one accountant. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = Counter(
            "gputally_ingest_rows",
            "Rows of the agents' batches by what became of them.",
            ["result"],
            registry=self.registry,
        )
        self._batches = Counter(
            "gputally_ingest_batches", "Batches by HTTP status of the answer.", ["code"], registry=self.registry
        )
        self._commit = Histogram(
            "gputally_ingest_commit_seconds",
            "From the arrival of a batch to its durable commit.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )
        for result in ("stored", "duplicate", "quarantined"):
            self._rows.labels(result)
        self._batches.labels("200")
        self.registry.register(_Build())

    def booked(self, receipt: Receipt, seconds: float) -> None:
        """A batch was committed `seconds` after its arrival."""
        self._rows.labels("stored").inc(receipt.stored)
        self._rows.labels("duplicate").inc(receipt.duplicates)
        self._rows.labels("quarantined").inc(receipt.quarantined)
        self._commit.observe(seconds)

    def rows(self) -> dict[str, int]:
        """Rows of the agents' batches so far, by what became of them."""
        samples = (sample for family in self._rows.collect() for sample in family.samples)
        return {sample.labels["result"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}

    def answered(self, status: int) -> None:
        """A batch was answered with `status`; other than 200, nothing of it was stored."""
        self._batches.labels(str(status)).inc()

    def watch(self, collector: Collector) -> None:
        """Add the figures of a ledger (accountant.metrics.ledger). Once per registry."""
        self.registry.register(collector)

    def exposition(self, *, naming: bool = True) -> bytes:
        """The text format. Reads the ledger: call it in a thread. naming: also what names a team, or somebody or
        something of one."""
        return generate_latest(self.registry if naming else _Nameless(self.registry))


class _Nameless(Collector):
    """What a registry has, without the families that name a team."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if all(NAMELESS.issuperset(sample.labels) for sample in family.samples):
                yield family


class _Build(Collector):
    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("gputally_accountant_build_info", "Version of this accountant.", labels=["version"])
        build.add_metric([version("gputally")], 1)
        yield build
