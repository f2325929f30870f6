"""The census of GPUs, and GPUs that are retired by command."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import CannotRetire
from accountant.ledger.protocols import Down, NodeFacts, Retirement
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.gpu_lifetimes import GpuCensus, GpuLifetimes, Life, MeteredGpu, Tenure
from accountant.wire.policy_models import WindowSpec
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, START_MS, Accounts, Hand, Send
from tests.moments import present

CENSUS_NODES = ("n0", "n1", "n2")
CLUSTERS = ("c", "d")
STEP = st.tuples(
    st.sampled_from(("book", "import", "down", "delete", "renew", "retire")),
    st.integers(0, 5),
    st.sampled_from(CENSUS_NODES),
    st.integers(0, 60),
    st.integers(1, 30),
)


def booked(fleet: GpuLifetimes, gpu: int, node: str, start: int, end: int, *, imported: bool = False) -> GpuLifetimes:
    nodes = fleet.tenures.get(gpu, {})
    old = nodes.get(node, Tenure(start, end))
    tenure = Tenure(min(old.first_ms, start), max(old.last_ms, end))
    own = {gpu: fleet.own.get(gpu, nodes)} if imported or gpu in fleet.own else {}
    if own and not imported:
        own = {gpu: {**own[gpu], node: tenure}}
    return fleet.booked({gpu: (MeteredGpu(CLUSTERS[gpu % 2], f"GPU-{gpu}", "H100"), {**nodes, node: tenure})}, own)


def told(fleet: GpuLifetimes, node: str, at: int, hours: int, kind: str) -> GpuLifetimes:
    """Report the facts of the node of the first cluster. The other cluster has a node of the same name."""
    facts = fleet.nodes.get((CLUSTERS[0], node), NodeFacts(CLUSTERS[0], node))
    if kind == "delete":
        facts = replace(facts, deleted_ms=at)
    elif kind == "renew":
        facts = replace(facts, renewed_ms=tuple(sorted({*facts.renewed_ms, at})), deleted_ms=None)
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


@settings(max_examples=examples(20, 120))
@given(steps=st.lists(STEP, max_size=25), asked=st.integers(0, 4), end=st.integers(0, 90), least=st.floats(0, 1))
def test_counted_step_by_step_it_is_what_counting_anew_gives(steps, asked, end, least):
    fleet = GpuLifetimes()
    for number, (kind, gpu, node, hour, hours) in enumerate(steps):
        at = hour * MS_PER_HOUR
        if kind in ("book", "import"):
            fleet = booked(fleet, gpu, node, at, at + hours * MS_PER_HOUR, imported=kind == "import")
        elif kind == "retire":
            fleet = replace(fleet, retired={**fleet.retired, gpu: at})
        else:
            fleet = told(fleet, node, at, hours, kind)
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


def test_a_gpu_that_did_not_return_with_its_node_ends_at_its_last_record():
    fleet = GpuLifetimes()
    for gpu in (0, 2, 4):
        fleet = booked(fleet, gpu, "n0", 0, 12 * MS_PER_HOUR)
    fleet = told(fleet, "n0", 13 * MS_PER_HOUR, 0, "renew")
    assert fleet.census.lives() == {(0, 2**62): 3}, "nothing is known of the new machine's GPUs"
    fleet = booked(fleet, 0, "n0", 13 * MS_PER_HOUR, 14 * MS_PER_HOUR)
    assert fleet.census.lives() == {(0, 2**62): 1, (0, 12 * MS_PER_HOUR): 2}
    fleet = booked(fleet, 2, "n0", 13 * MS_PER_HOUR, 15 * MS_PER_HOUR)
    assert fleet.census.lives() == {(0, 2**62): 2, (0, 12 * MS_PER_HOUR): 1}, "it is back, a little later"
    fleet = told(fleet, "n0", 20 * MS_PER_HOUR, 0, "renew")
    assert fleet.census.lives() == {(0, 2**62): 2, (0, 12 * MS_PER_HOUR): 1}, "what has ended stays so"


def test_a_gpu_that_goes_unseen_is_noticed_by_the_records_of_its_neighbour():
    fleet = GpuLifetimes()
    for gpu in (0, 2, 4):
        fleet = booked(fleet, gpu, "n0", 0, MS_PER_HOUR)
    assert fleet.census == GpuCensus({(0, 2**62, MS_PER_HOUR): 3}, {}, 25 * MS_PER_HOUR)
    fleet = booked(fleet, 0, "n0", MS_PER_HOUR, 30 * MS_PER_HOUR)
    assert fleet.census.lives() == {(0, 2**62): 1, (0, 25 * MS_PER_HOUR): 2}


DAY = MS_PER_DAY // MINUTE
MINUTE_US = 60_000_000
NOW_MS = START_MS + 3 * MS_PER_DAY
OFF_MS = START_MS + MS_PER_DAY


@pytest.fixture
def gone(ledger: DuckLedger, send: Send, hand: Hand) -> DuckLedger:
    """Three days ago, node n1 reported the GPUs a and b for a minute, and n2 reported c."""
    send(hand.row(1, gpu="a"), hand.row(2, gpu="b"))
    send(hand.row(1, gpu="c"), node="n2")
    return ledger


@pytest.fixture
def total_us(accounts: Accounts) -> Callable[[str], int]:
    """The sum of the accounts of a GPU in the three days since its first record."""
    return lambda gpu: sum(accounts(0, 3 * DAY, gpu=gpu).values())


def retire(ledger: DuckLedger, at_ms: int = OFF_MS, *, now_ms: int = NOW_MS, closed_ms: int = 0, **asked: Any) -> Any:
    return ledger.retire(Retirement(**asked), at_ms, now_ms, "ada", "sold", closed_ms)


def test_a_node_that_went_is_capacity_until_then(gone, total_us):
    retired = [(one.gpu_uuid, one.node, one.end_ms) for one in retire(gone, node="n1")]
    assert retired == [("a", "n1", OFF_MS), ("b", "n1", OFF_MS)]
    assert [total_us(gpu) for gpu in "abc"] == [DAY * MINUTE_US, DAY * MINUTE_US, 3 * DAY * MINUTE_US]
    day = present(gone).window(WindowSpec(size=86_400), NOW_MS, "allocated", 0.98)
    assert day.capacity == DAY * MINUTE_US  # of c alone


def test_it_is_an_act_and_outlives_a_restart(gone, total_us):
    retire(gone, gpus=("b",))
    (act,) = present(gone).acts("retired")
    assert (act.who, act.reason, act.subject) == ("ada", "sold", "prod/n1")
    assert json.loads(act.content) == [{"node": "n1", "gpu": "b", "end_ms": OFF_MS}]
    gone._reread()
    assert (total_us("b"), total_us("a")) == (DAY * MINUTE_US, 3 * DAY * MINUTE_US)


def test_it_is_never_out_before_its_newest_record_ends(gone, send, hand, total_us):
    send(hand.row(3, DAY + 30, DAY + 31, gpu="a"), now_ms=NOW_MS)
    (one,) = retire(gone, gpus=("a",))
    assert one.end_ms == one.last_ms == OFF_MS + 31 * MINUTE
    assert total_us("a") == (DAY + 31) * MINUTE_US


def test_one_that_reports_again_is_capacity_again(gone, send, hand, accounts, total_us):
    retire(gone, node="n1")
    send(hand.row(3, 2 * DAY, 2 * DAY + 1, gpu="a"), now_ms=NOW_MS)
    assert (total_us("a"), accounts(0, 3 * DAY, gpu="a")["unmetered"]) == (
        3 * DAY * MINUTE_US,
        (3 * DAY - 2) * MINUTE_US,
    )
    (again,) = retire(gone, START_MS + 5 * MS_PER_DAY // 2, gpus=("a",))
    assert total_us("a") == (again.end_ms - START_MS) * 1000


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"node": "n9"}, "cluster 'prod' has no GPU whose newest record is from node 'n9'"),
        ({"gpus": ("a", "x")}, "cluster 'prod' has no GPU 'x'"),
        ({"gpus": ("c",), "node": "n1"}, "node 'n1' has no GPU 'c'"),
        ({"cluster": "lab"}, "none of these GPUs counts as capacity at 2026-"),
        ({"cluster": "lab", "gpus": ("a",)}, "cluster 'lab' has no GPU 'a'"),
        ({"node": "n1", "at_ms": NOW_MS + 1}, "is in the future"),
        ({"node": "n1", "closed_ms": OFF_MS + 1}, "are closed: retire the GPUs from then on"),
        ({"node": "n1", "now_ms": START_MS + 10 * MINUTE, "at_ms": START_MS}, "has records until"),
    ],
)
def test_what_cannot_be_is_refused_whole(gone, accounts, asked, why):
    before = [accounts(0, 3 * DAY, gpu=gpu) for gpu in "abc"]
    with pytest.raises(CannotRetire, match=why):
        retire(gone, **asked)
    assert present(gone).acts("retired") == []
    assert [accounts(0, 3 * DAY, gpu=gpu) for gpu in "abc"] == before


def test_twice_is_told_from_once(gone):
    retire(gone, node="n1")
    with pytest.raises(CannotRetire, match="counts as capacity"):
        retire(gone, OFF_MS + MS_PER_HOUR, node="n1")
    with pytest.raises(CannotRetire, match="is already retired, from 2026-"):
        retire(gone, OFF_MS - MS_PER_HOUR, node="n1")


def test_with_several_clusters_one_has_to_be_named(gone, send, hand):
    send(hand.row(1, gpu="a"), cluster="lab")
    with pytest.raises(CannotRetire, match="the ledger has several clusters, 'lab', 'prod': name one"):
        retire(gone, gpus=("a",))
    assert [(one.cluster, one.gpu_uuid) for one in retire(gone, cluster="lab")] == [("lab", "a")]
