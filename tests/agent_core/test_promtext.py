"""The text format, beside what the client library writes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UntypedMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.promtext import TextFormat

KINDS = {"c": CounterMetricFamily, "g": GaugeMetricFamily, "u": UntypedMetricFamily}
series = st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8), st.floats()), max_size=5)
TEXT = TextFormat()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cgu"), st.text(max_size=20), series), max_size=4))
def test_it_is_what_the_library_writes(drawn: list[tuple[str, str, list[tuple[str, str, float]]]]) -> None:
    families: list[Metric] = []
    for number, (kind, text, rows) in enumerate(drawn):
        family = KINDS[kind](f"gputally_{kind}{number}", text, labels=("pod", "gpu"))
        for pod, gpu, value in rows:
            family.add_metric([pod, gpu], value)
        families.append(family)

    class Fixed(Collector):
        def collect(self) -> list[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed())
    expected = generate_latest(registry)
    assert TEXT.render(families) == expected
    assert TEXT.render(families) == expected
