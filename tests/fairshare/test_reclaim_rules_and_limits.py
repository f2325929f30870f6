"""KAI's rules of reclaim: every vector, and the simulator's victims that they allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.core.queues_and_weights import UNLIMITED, QueueClaim
from fairshare.preemption.reclaim_rules_and_limits import (
    EPSILON,
    Account,
    Amounts,
    Claimant,
    QueueResource,
    TakenBundles,
    above_share,
    may_reclaim,
    path,
    queues_to_compare,
    right_to_take,
    within_quota,
)
from fairshare.simulator.engine_state import ANY_GPU, QueueTree, SimulatedGang
from fairshare.simulator.scheduler_engine import Debtor, collect
from tests.hypothesis_examples import examples
from tests.shared_files import shared


def may_lose(asker: Claimant, victim: str, accounts: Mapping[str, Account]) -> bool:
    """Return whether KAI's filter passes the jobs of a leaf queue."""
    mine, theirs = queues_to_compare(asker.queue, victim, accounts)
    stocks = accounts[theirs].stocks
    if not within_quota(asker, accounts[mine]):
        return any(stock.allocated > stock.allocatable + EPSILON for stock in stocks.values())
    asked = [
        stock for name, stock in stocks.items() if asker.required.get(name, 0.0) > 0 and stock.deserved != UNLIMITED
    ]
    over = any(stock.allocated > stock.deserved + EPSILON for stock in asked)
    return over or not any(stock.allocated < stock.deserved - EPSILON for stock in asked)


def reclaimable(
    asker: Claimant,
    victims: Sequence[tuple[str, Sequence[Amounts]]],
    accounts: Mapping[str, Account],
    saturation: float = 1.0,
) -> bool:
    """Return whether these bundles, in this order, may all be reclaimed for `asker`. victims: by leaf queue."""
    taking = TakenBundles(asker, accounts)
    for queue, bundles in victims:
        for bundle in bundles:
            if taking.right(queue) is None:
                return False
            taking.take(queue, bundle)
    return taking.fair(saturation)


RESOURCES = ("gpu", "cpu", "memory")


def _document() -> dict[str, Any]:
    return json.loads(shared("vectors/kai_reclaim.json").read_text())


def _account(row: dict[str, Any], name: str = "", parent: str = "") -> Account:
    keys = ("deserved", "fairShare", "limit", "allocated", "allocatedNonPreemptible")
    stocks = {r: QueueResource(*(row[r].get(key, 0) for key in keys)) for r in RESOURCES}
    return Account(row.get("uid", name), row.get("parent", parent), stocks)


def _verdict(row: dict[str, Any]) -> bool:
    accounts = {queue["uid"]: _account(queue) for queue in row["queues"]}
    asked = row["reclaimer"]
    asker = Claimant(asked["queue"], asked["required"], asked["preemptible"])
    if row["function"] == "CanReclaimResources":
        return may_reclaim(asker, accounts)
    if row["function"] == "FilterVictim":
        passes = may_lose(asker, row["victimQueue"], accounts)
        assert passes or TakenBundles(asker, accounts).right(row["victimQueue"]) is None
        return passes
    return reclaimable(asker, list(row["victimsByQueue"].items()), accounts, row["saturationMultiplier"])


def test_every_vector() -> None:
    rows = _document()["vectors"]
    assert len(rows) == 28
    assert [row["name"] for row in rows if _verdict(row) != row["expected"]] == []


def test_every_strategy_vector() -> None:
    rows = _document()["strategy_vectors"]
    assert len(rows) == 17
    wrong = []
    for row in rows:
        asker = Claimant("mine", row["required"])
        mine, theirs = _account(row["reclaimerQueue"], "mine"), _account(row["reclaimeeQueue"], "theirs")
        if row["strategy"] == "MaintainFairShare":
            allowed = above_share(theirs, row["reclaimeeRemaining"])
        else:
            allowed = right_to_take(asker, mine, theirs, row["reclaimeeRemaining"]) == "within quota"
        if allowed != row["expected"]:
            wrong.append(row["name"])
    assert wrong == []


@pytest.mark.parametrize("saturation", [1.0, 1.5, 2.0])
def test_a_larger_multiplier_never_allows_more(saturation: float) -> None:
    for row in _document()["vectors"]:
        if row["function"] == "Reclaimable":
            accounts = {queue["uid"]: _account(queue) for queue in row["queues"]}
            asker = Claimant(row["reclaimer"]["queue"], row["reclaimer"]["required"], row["reclaimer"]["preemptible"])
            victims = list(row["victimsByQueue"].items())
            if reclaimable(asker, victims, accounts, row["saturationMultiplier"] * saturation):
                assert reclaimable(asker, victims, accounts, row["saturationMultiplier"])


Queues = list[tuple[float, float, list[int]]]
"""deserved, share, and the gangs that run, oldest first; the first queue asks."""
Rows = dict[str, tuple[str, float, float, list[int]]]
"""parent, deserved, share, and the gangs that run, oldest first, of a leaf; of a queue above leaves no gangs."""


def _victims(rows: Rows, queue: str, gpus: int) -> list[tuple[str, int]]:
    """Return (queue, GPUs) of the jobs that the engine would stop for a gang, in order."""
    tree = QueueTree([QueueClaim(name, 0.0, row[1], parent=row[0] or None) for name, row in rows.items()])
    asking, debtors = tree.index[queue], []
    for q in tree.leaves:
        running = [_run(tree, q, i, gang) for i, gang in enumerate(rows[tree.names[q]][3])]
        if running and q != asking:
            debtors.append(Debtor(tree.levels(asking, q), running))
    shares = [share for _, _, share, _ in rows.values()]
    found = collect(SimulatedGang(99, 0, gpus, 1, asking), gpus, ANY_GPU, debtors, tree, shares, by_ms=10**9)
    return [(tree.names[gang.queue], gang.gpus) for gang in found]


def _run(tree: QueueTree, queue: int, number: int, gpus: int) -> SimulatedGang:
    gang = SimulatedGang(number, 0, gpus, 10**9, queue)
    gang.start_ms = number
    tree.allocate(queue, gpus, number, preemptible=True)
    return gang


def _flat(queues: Queues) -> Rows:
    return {str(q): ("", deserved, share, gangs) for q, (deserved, share, gangs) in enumerate(queues)}


@st.composite
def pools(draw: st.DrawFn) -> tuple[Queues, int]:
    """Generate a full pool, and a gang with which the first queue stays within its share."""
    queues: Queues = []
    for _ in range(draw(st.integers(2, 5))):
        gangs = draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=5))
        deserved = float(draw(st.sampled_from([0, 2, 4, 8, 16])))
        queues.append((deserved, float(draw(st.sampled_from([0, 1, 3, 4, 8, 12]))), gangs))
    gang = draw(st.sampled_from([1, 2, 4, 8]))
    deserved, share, gangs = queues[0]
    queues[0] = (deserved, max(share, sum(gangs) + gang), gangs)
    return queues, gang


@pytest.mark.thorough
@settings(max_examples=examples(40, 400))
@given(pools())
def test_victims_are_lawful(case: tuple[Queues, int]) -> None:
    queues, gang = case
    asker, rows = Claimant("0", {"gpu": float(gang)}), _flat(queues)
    accounts = _tree(rows)
    assert may_reclaim(asker, accounts)
    victims = _victims(rows, "0", gang)
    taken: dict[str, list[dict[str, float]]] = {}
    for queue, gpus in victims:
        taken.setdefault(queue, []).append({"gpu": float(gpus)})
    assert reclaimable(asker, list(taken.items()), accounts)
    assert not victims or sum(gpus for _, gpus in victims) >= gang
    for queue, parts in taken.items():
        left = accounts[queue].stocks["gpu"].allocated - sum(part["gpu"] for part in parts)
        assert left >= accounts[queue].stocks["gpu"].deserved


def test_vectors_of_the_rule_they_share() -> None:
    """KAI's strategy that maintains fair shares, in the rows in which only GPUs decide."""
    rows = json.loads(shared("vectors/kai_reclaim.json").read_text())["strategy_vectors"]
    looked = 0
    for row in rows:
        theirs, left = row["reclaimeeQueue"], row["reclaimeeRemaining"]
        others = any(left.get(r, 0) > _allocatable(theirs[r]) for r in ("cpu", "memory"))
        if row["strategy"] != "MaintainFairShare" or others or not float(left["gpu"]).is_integer():
            continue
        looked += 1
        queues: Queues = [(0.0, 100.0, []), (_quota(theirs["gpu"]), theirs["gpu"]["fairShare"], [1] * int(left["gpu"]))]
        allowed = left["gpu"] > _allocatable(theirs["gpu"])
        assert allowed == row["expected"], row["name"]
        # The simulators never go below a quota either, which KAI's rule alone would.
        keeps = left["gpu"] - 1 >= _quota(theirs["gpu"])
        assert bool(_victims(_flat(queues), "0", 1)) == (row["expected"] and keeps), row["name"]
    assert looked >= 3


def _quota(row: dict[str, Any]) -> float:
    return float("inf") if row["deserved"] == -1 else float(row["deserved"])


def _allocatable(row: dict[str, Any]) -> float:
    return QueueResource(row["deserved"], row["fairShare"], row["limit"], 0.0).allocatable


def _tree(rows: Rows) -> dict[str, Account]:
    def holds(name: str) -> float:
        return sum(rows[name][3]) + sum(holds(child) for child, row in rows.items() if row[0] == name)

    return {
        name: Account(name, parent, {"gpu": QueueResource(deserved, share, -1, holds(name))})
        for name, (parent, deserved, share, _) in rows.items()
    }


def test_a_team_above_its_share_gives_to_its_own_department_alone_while_that_is_within_its_share() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 2, [2, 2]), "b": ("one", 0, 2, []),
        "two": ("", 0, 4, []), "c": ("two", 0, 4, [2]),
    }  # fmt: skip
    assert _victims(rows, "c", 2) == []
    assert _victims(rows, "b", 2) == [("a", 2)]


def test_the_department_furthest_above_its_share_gives_first_and_in_it_the_team() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 1, [1, 1, 1]), "b": ("one", 0, 3, [2]),
        "two": ("", 0, 4, []), "c": ("two", 0, 2, [1, 1, 1]), "d": ("two", 0, 2, [1, 1, 1, 1]),
        "late": ("", 0, 4, []),
    }  # fmt: skip
    assert _victims(rows, "late", 2) == [("d", 1), ("c", 1)]


def test_quotas_are_kept_at_every_level() -> None:
    rows: Rows = {"one": ("", 3, 2, []), "a": ("one", 0, 2, [1] * 5), "late": ("", 0, 4, [])}
    assert _victims(rows, "late", 2) == [("a", 1), ("a", 1)]
    assert _victims(rows, "late", 3) == []


def test_a_department_above_its_share_takes_from_itself_and_from_no_emptier_one() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 2, []), "b": ("one", 0, 2, [2, 2, 2]),
        "two": ("", 0, 4, []), "c": ("two", 0, 4, [2, 2, 2]),
    }  # fmt: skip
    assert _victims(rows, "a", 2) == [("b", 2)]
    assert _victims(rows | {"b": ("one", 6, 2, [2, 2, 2])}, "a", 2) == []


@st.composite
def trees(draw: st.DrawFn) -> tuple[Rows, str, int]:
    """Generate departments of teams, and a gang with which one of the teams stays within its share."""
    rows: Rows = {}
    shares = st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0])
    for department in "xyz"[: draw(st.integers(2, 3))]:
        rows[department] = ("", draw(shares), draw(shares), [])
        for team in range(draw(st.integers(1, 2))):
            gangs = draw(st.lists(st.sampled_from([1, 2, 4]), max_size=4))
            rows[f"{department}{team}"] = (department, draw(shares), draw(shares), gangs)
    gang = draw(st.sampled_from([1, 2, 4]))
    parent, deserved, share, gangs = rows["x0"]
    rows["x0"] = (parent, deserved, max(share, sum(gangs) + gang), gangs)
    return rows, "x0", gang


def test_a_job_that_is_spared_at_the_end_counts_as_running() -> None:
    rows: Rows = {
        "x": ("", 0, 1, []), "x0": ("x", 0, 4, []), "x1": ("x", 0, 0, [1]),
        "y": ("", 0, 1, []), "y0": ("y", 0, 0, [1, 1, 4]), "y1": ("y", 0, 0, [1, 2]),
    }  # fmt: skip
    assert _victims(rows, "x0", 4) == []


@settings(max_examples=examples(33, 200))
@given(trees())
def test_victims_along_a_tree_are_lawful_and_no_quota_is_broken(case: tuple[Rows, str, int]) -> None:
    rows, queue, gang = case
    accounts = _tree(rows)
    taking = TakenBundles(Claimant(queue, {"gpu": float(gang)}), accounts)
    victims = _victims(rows, queue, gang)
    for name, gpus in victims:
        assert taking.right(name) is not None
        taking.take(name, {"gpu": float(gpus)})
    assert taking.fair()
    assert not victims or sum(gpus for _, gpus in victims) >= gang
    for name, _ in victims:
        _, compared = queues_to_compare(queue, name, accounts)
        way = path(name, accounts)
        for above in way[way.index(compared) :]:
            assert taking.held(above)["gpu"] >= accounts[above].stocks["gpu"].deserved
