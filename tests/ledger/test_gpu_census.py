"""A census that commits update equals a new count of all GPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.ledger.protocols import Down, NodeFacts
from accountant.storage.gpu_lifetimes import Fleet, Gpu, GpuCensus, Life, Tenure
from gputally.base.units import MS_PER_HOUR
from tests.effort import examples

NODES = ("n0", "n1", "n2")
CLUSTERS = ("c", "d")
STEP = st.tuples(
    st.sampled_from(("book", "import", "down", "delete", "retire")),
    st.integers(0, 5),
    st.sampled_from(NODES),
    st.integers(0, 60),
    st.integers(1, 30),
)


def booked(fleet: Fleet, gpu: int, node: str, start: int, end: int, *, imported: bool = False) -> Fleet:
    nodes = fleet.tenures.get(gpu, {})
    old = nodes.get(node, Tenure(start, end))
    tenure = Tenure(min(old.first_ms, start), max(old.last_ms, end))
    own = {gpu: fleet.own.get(gpu, nodes)} if imported or gpu in fleet.own else {}
    if own and not imported:
        own = {gpu: {**own[gpu], node: tenure}}
    return fleet.booked({gpu: (Gpu(CLUSTERS[gpu % 2], f"GPU-{gpu}", "H100"), {**nodes, node: tenure})}, own)


def told(fleet: Fleet, node: str, at: int, hours: int, *, deleted: bool) -> Fleet:
    """The facts of the node of the first cluster. The other cluster has a node of the same name."""
    facts = fleet.nodes.get((CLUSTERS[0], node), NodeFacts(CLUSTERS[0], node))
    if deleted:
        facts = replace(facts, deleted_ms=at)
    else:
        facts = replace(facts, down=(*facts.down, Down(at, at + hours * MS_PER_HOUR, "cordoned")))
    return replace(fleet, nodes={**fleet.nodes, (CLUSTERS[0], node): facts})


def plain_watermark(lives: Collection[Life], end: int, least: float) -> int | None:
    """Computes the result by its definition, one GPU at a time."""
    reached = sorted(
        (
            min(life.last_ms, end)
            for life in lives
            if life.start_ms < end <= life.end_ms and not any(s < end <= e for s, e in life.down)
        ),
        reverse=True,
    )
    return reached[max(1, math.ceil(least * len(reached))) - 1] if reached else None


@settings(max_examples=examples(20, 120), deadline=None)
@given(steps=st.lists(STEP, max_size=25), asked=st.integers(0, 4), end=st.integers(0, 90), least=st.floats(0, 1))
def test_counted_step_by_step_it_is_what_counting_anew_gives(
    steps: list[tuple[str, int, str, int, int]], asked: int, end: int, least: float
) -> None:
    fleet = Fleet()
    for number, (kind, gpu, node, hour, hours) in enumerate(steps):
        at = hour * MS_PER_HOUR
        if kind in ("book", "import"):
            fleet = booked(fleet, gpu, node, at, at + hours * MS_PER_HOUR, imported=kind == "import")
        elif kind == "retire":
            fleet = replace(fleet, retired={**fleet.retired, gpu: at})
        else:
            fleet = told(fleet, node, at, hours, deleted=kind == "delete")
        if number % 5 >= asked:
            _ = fleet.census, fleet.census_of(CLUSTERS[number % 2])
    fresh = replace(fleet, nodes={**fleet.nodes})
    lives = {gpu: fresh.life(gpu) for gpu in fresh.tenures}
    at = end * MS_PER_HOUR
    for cluster in (None, *CLUSTERS, "another"):
        mine = {gpu: life for gpu, life in lives.items() if cluster in (None, fresh.gpus[gpu].cluster)}
        found = fleet.census_of(cluster)
        assert found.lives() == Counter((life.start_ms, life.end_ms) for life in mine.values())
        assert list(found.down()) == [(gpu, span) for gpu in sorted(mine) for span in mine[gpu].down]
        assert found.watermark(at, least) == plain_watermark(mine.values(), at, least)


def test_a_gpu_that_goes_unseen_is_noticed_by_the_records_of_its_neighbour() -> None:
    fleet = Fleet()
    for gpu in (0, 2, 4):
        fleet = booked(fleet, gpu, "n0", 0, MS_PER_HOUR)
    assert fleet.census == GpuCensus({(0, 2**62, MS_PER_HOUR): 3}, {}, 25 * MS_PER_HOUR)
    fleet = booked(fleet, 0, "n0", MS_PER_HOUR, 30 * MS_PER_HOUR)
    assert fleet.census.lives() == {(0, 2**62): 1, (0, 25 * MS_PER_HOUR): 2}
