"""GPUs that are retired by command: the end of their capacity, and refused retirements."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accountant.core.errors import CannotRetire
from accountant.ledger.protocols import Retirement
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import WindowSpec
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.ledger.conftest import MINUTE, START_MS, Hand

DAY = MS_PER_DAY // MINUTE
MINUTE_US = 60_000_000
NOW_MS = START_MS + 3 * MS_PER_DAY
OFF_MS = START_MS + MS_PER_DAY


@pytest.fixture
def gone(ledger: DuckLedger, hand: Hand) -> DuckLedger:
    """Three days ago, node n1 reported the GPUs a and b for a minute, and n2 reported c."""
    ledger.append([hand.batch(hand.row(1, 0, 1, gpu="a"), hand.row(2, 0, 1, gpu="b"))], hand.now_ms)
    ledger.append([hand.batch(hand.row(1, 0, 1, gpu="c"), node="n2")], hand.now_ms)
    return ledger


def retire(ledger: DuckLedger, at_ms: int = OFF_MS, *, now_ms: int = NOW_MS, closed_ms: int = 0, **asked: Any) -> Any:
    return ledger.retire(Retirement(**asked), at_ms, now_ms, "ada", "sold", closed_ms)


def test_a_node_that_went_is_capacity_until_then(gone: DuckLedger, accounts: Any) -> None:
    assert [(one.gpu_uuid, one.node, one.end_ms) for one in retire(gone, node="n1")] == [
        ("a", "n1", OFF_MS),
        ("b", "n1", OFF_MS),
    ]
    for gpu, minutes in (("a", DAY), ("b", DAY), ("c", 3 * DAY)):
        assert sum(accounts(0, 3 * DAY, gpu=gpu).values()) == minutes * MINUTE_US
    day = gone.window(WindowSpec(size=86_400), NOW_MS, "allocated", 0.98)
    assert day.capacity == DAY * MINUTE_US  # of c alone


def test_it_is_an_act_and_outlives_a_restart(gone: DuckLedger, accounts: Any) -> None:
    retire(gone, gpus=("b",))
    (act,) = gone.acts("retired")
    assert (act.who, act.reason, act.subject) == ("ada", "sold", "prod/n1")
    assert json.loads(act.content) == [{"node": "n1", "gpu": "b", "end_ms": OFF_MS}]
    gone._reread()
    assert sum(accounts(0, 3 * DAY, gpu="b").values()) == DAY * MINUTE_US
    assert sum(accounts(0, 3 * DAY, gpu="a").values()) == 3 * DAY * MINUTE_US


def test_it_is_never_out_before_its_newest_record_ends(gone: DuckLedger, hand: Hand, accounts: Any) -> None:
    gone.append([hand.batch(hand.row(3, DAY + 30, DAY + 31, gpu="a"))], NOW_MS)
    (one,) = retire(gone, gpus=("a",))
    assert one.end_ms == one.last_ms == OFF_MS + 31 * MINUTE
    assert sum(accounts(0, 3 * DAY, gpu="a").values()) == (DAY + 31) * MINUTE_US


def test_one_that_reports_again_is_capacity_again(gone: DuckLedger, hand: Hand, accounts: Any) -> None:
    retire(gone, node="n1")
    gone.append([hand.batch(hand.row(3, 2 * DAY, 2 * DAY + 1, gpu="a"))], NOW_MS)
    told = accounts(0, 3 * DAY, gpu="a")
    assert (sum(told.values()), told["unmetered"]) == (3 * DAY * MINUTE_US, (3 * DAY - 2) * MINUTE_US)
    (again,) = retire(gone, START_MS + 5 * MS_PER_DAY // 2, gpus=("a",))
    assert sum(accounts(0, 3 * DAY, gpu="a").values()) == again.end_ms // MINUTE * MINUTE_US - START_MS * 1000


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"node": "n9"}, "cluster 'prod' has no GPU that was seen on node 'n9' last"),
        ({"gpus": ("a", "x")}, "cluster 'prod' has no GPU 'x'"),
        ({"gpus": ("c",), "node": "n1"}, "node 'n1' has no GPU 'c'"),
        ({"cluster": "lab"}, "none of these GPUs counts as capacity at 2026-"),
        ({"cluster": "lab", "gpus": ("a",)}, "cluster 'lab' has no GPU 'a'"),
        ({"node": "n1", "at_ms": NOW_MS + 1}, "is in the future"),
        ({"node": "n1", "closed_ms": OFF_MS + 1}, "are closed: retire from then on, or later"),
        ({"node": "n1", "now_ms": OFF_MS, "at_ms": START_MS}, ""),
    ],
)
def test_what_cannot_be_is_refused_whole(gone: DuckLedger, accounts: Any, asked: Any, why: str) -> None:
    before = [accounts(0, 3 * DAY, gpu=gpu) for gpu in "abc"]
    if not why:
        why = "has records until"
        asked = {**asked, "now_ms": START_MS + 10 * MINUTE}
    with pytest.raises(CannotRetire, match=why):
        retire(gone, **asked)
    assert gone.acts("retired") == []
    assert [accounts(0, 3 * DAY, gpu=gpu) for gpu in "abc"] == before


def test_twice_is_told_from_once(gone: DuckLedger) -> None:
    retire(gone, node="n1")
    with pytest.raises(CannotRetire, match="counts as capacity"):
        retire(gone, OFF_MS + MS_PER_HOUR, node="n1")
    with pytest.raises(CannotRetire, match="is already retired, from 2026-"):
        retire(gone, OFF_MS - MS_PER_HOUR, node="n1")


def test_with_several_clusters_one_has_to_be_named(gone: DuckLedger, hand: Hand) -> None:
    gone.append([hand.batch(hand.row(1, 0, 1, gpu="a"), cluster="lab")], hand.now_ms)
    with pytest.raises(CannotRetire, match="name the cluster; the ledger knows 'lab', 'prod'"):
        retire(gone, gpus=("a",))
    assert [(one.cluster, one.gpu_uuid) for one in retire(gone, cluster="lab")] == [("lab", "a")]
