"""Windows of one cluster of several that share a ledger: what a ledger of its own would say, to the last bit.

The clusters have nodes, GPUs, pods and queues of the same names."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Measure, UsageWindow, WindowSpec
from agent.wire import Batch
from fairshare.usage.usage_windows import sum_of_windows
from gputally.base.units import BUCKET_MS
from tests.effort import examples
from tests.properties.streams import POLICY, SPAN_MS, START_MS, Stream, batches, book, streams

CLUSTERS = ("prod", "staging")
FEW = settings(
    max_examples=examples(2, 25),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a few hundred rows helps nobody
    suppress_health_check=list(HealthCheck),
)
WEIGHTS = {"H100": Decimal(3)}


def nodes(cluster: str) -> Facts:
    """The first node is down for a while in one cluster, and the shards of the nodes are swapped in the other
    cluster."""
    down = (Down(START_MS + 400_123, START_MS + 1_500_777, "cordoned"),) if cluster == "prod" else ()
    one, other = ("a", "b") if cluster == "prod" else ("b", "a")
    return Facts(nodes=(NodeFacts(cluster, "n1", shard=one, down=down), NodeFacts(cluster, "n2", shard=other)))


def of_cluster(cluster: str, found: list[Stream], size: int) -> list[list[Batch]]:
    return [[structs.replace(batch, cluster=cluster) for batch in batches(stream, size)] for stream in found]


def plain(window: UsageWindow) -> UsageWindow:
    """The window without the fields that only a query for one cluster has."""
    return window.model_copy(update={"cluster": None, "policy_counting": None})


@pytest.mark.thorough
@FEW
@given(
    found=st.tuples(streams(), streams()),
    half_life=st.sampled_from([None, 60, 3600, 604_800]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    size=st.integers(1, 2 * SPAN_MS // 1000),
    order=st.randoms(use_true_random=False),
)
def test_a_cluster_is_as_if_it_were_alone_and_all_of_them_add_up(
    ledgers: Callable[..., DuckLedger],
    found: tuple[list[Stream], list[Stream]],
    half_life: int | None,
    at: int,
    size: int,
    order: random.Random,
) -> None:
    spec, at_ms = WindowSpec(size=size, half_life=half_life), START_MS + at
    shared, alone = ledgers(*map(nodes, CLUSTERS)), {cluster: ledgers(nodes(cluster)) for cluster in CLUSTERS}
    queues = []
    for cluster, mine in zip(CLUSTERS, found, strict=True):
        book(alone[cluster], [batch for stream in of_cluster(cluster, mine, 4) for batch in stream])
        queues += of_cluster(cluster, mine, 2)
    # The shared one hears both interleaved and piecemeal, and is asked in between.
    while any(queues):
        chosen = order.sample([queue for queue in queues if queue], k=min(2, sum(map(bool, queues))))
        book(shared, [queue.pop(0) for queue in chosen])
        if order.random() < 0.4:
            for cluster in (*CLUSTERS, None, "nobody"):
                shared.window(spec, at_ms, "allocated", 0.98, cluster=cluster)
        if order.random() < 0.1:
            shared.checkpoint()
    measures: tuple[Measure, ...] = ("allocated", "busy", "energy")
    for measure in measures:
        parts = [shared.window(spec, at_ms, measure, 0.98, cluster=cluster) for cluster in CLUSTERS]
        for cluster, part in zip(CLUSTERS, parts, strict=True):
            assert (part.cluster, part.policy_counting) == (cluster, POLICY.counting())
            assert plain(part) == alone[cluster].window(spec, at_ms, measure, 0.98)
        whole = shared.window(spec, at_ms, measure, 0.98)
        # Decayed sums are rounded to a whole unit each, once.
        most = 0 if half_life is None else len(CLUSTERS)
        for name, value in whole.usage.items():
            assert abs(value - sum(part.usage[name] for part in parts)) <= most * (3 if name == "top" else 1)
        assert abs(whole.unassigned - sum(part.unassigned for part in parts)) <= most
        assert abs(whole.capacity - sum(part.capacity for part in parts)) <= most
    for shard, weights, decay in (("a", {}, "exact"), (None, WEIGHTS, "exact"), ("b", WEIGHTS, "slurm")):
        if decay == "slurm" and half_life is None:
            continue
        other = spec.model_copy(update={"gpu_weights": weights, "decay": decay})
        for cluster in CLUSTERS:
            part = shared.window(other, at_ms, "allocated", 0.98, shard=shard, cluster=cluster)
            assert plain(part) == alone[cluster].window(other, at_ms, "allocated", 0.98, shard=shard)
            mark = shared.watermark(at_ms, 0.98, shard, cluster)
            assert mark == part.watermark_ms == alone[cluster].watermark(at_ms, 0.98, shard)


@pytest.mark.thorough
@FEW
@given(
    found=st.tuples(streams(), streams(), streams()),
    half_life=st.sampled_from([None, 60, 3600, 604_800]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    size=st.integers(1, 2 * SPAN_MS // 1000),
)
def test_windows_of_several_ledgers_add_up_to_that_of_one_ledger_with_all_rows(
    ledgers: Callable[..., DuckLedger],
    found: tuple[list[Stream], list[Stream], list[Stream]],
    half_life: int | None,
    at: int,
    size: int,
) -> None:
    names = (*CLUSTERS, "west")
    spec, at_ms = WindowSpec(size=size, half_life=half_life), START_MS + at
    together, apart = ledgers(*map(nodes, names)), {name: ledgers(nodes(name)) for name in names}
    for name, mine in zip(names, found, strict=True):
        rows = [batch for stream in of_cluster(name, mine, 4) for batch in stream]
        book(apart[name], rows)
        book(together, rows)
    measures: tuple[Measure, ...] = ("allocated", "busy", "energy")
    for measure in measures:
        first, *others = (apart[name].window(spec, at_ms, measure, 0.98, cluster=name) for name in names)
        added = sum_of_windows(names[0], first, dict(zip(names[1:], others, strict=True)))
        whole = together.window(spec, at_ms, measure, 0.98)
        same = ("start_ms", "end_ms", "half_life_s", "measure", "unit", "by", "lost_ms", "since_ms")
        assert [getattr(added, what) for what in same] == [getattr(whole, what) for what in same]
        assert added.coverage <= whole.coverage + 1e-12, "the lowest of any"
        if half_life is None:
            assert (added.usage, added.unassigned, added.capacity) == (whole.usage, whole.unassigned, whole.capacity)
        most = (len(names) + 1) / 2  # each sum is rounded to a whole unit, once
        for queue, value in whole.usage.items():
            assert abs(value - added.usage[queue]) <= most * (3 if queue == "top" else 1)
        assert abs(whole.unassigned - added.unassigned) <= most
        assert abs(whole.capacity - added.capacity) <= most


def test_of_a_cluster_that_never_reported_there_is_neither_usage_nor_capacity(
    ledgers: Callable[..., DuckLedger],
) -> None:
    ledger = ledgers(nodes("prod"))
    for number in range(40):
        window = ledger.window(WindowSpec(size=3600), START_MS, "allocated", 0.98, cluster=f"other-{number}")
        assert (window.capacity, window.watermark_ms, set(window.usage.values())) == (0, None, {0})
    assert not ledger._windows.sums._sums, "names are free to invent: nothing is cached of them"
