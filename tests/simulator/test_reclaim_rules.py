"""The simulator stops the jobs that the controller's own rules of reclaim allow, and KAI's vectors of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.core.queues_and_weights import Claim
from fairshare.preemption.reclaim_rules_and_limits import (
    Account,
    Claimant,
    QueueResource,
    TakenBundles,
    allocatable,
    may_reclaim,
    path,
    queues_to_compare,
)
from fairshare.simulator.engine_state import ANY_GPU, Gang, QueueTree
from fairshare.simulator.scheduler_engine import Debtor, collect
from tests.effort import examples
from tests.fairshare.reclaim import reclaimable
from tests.shelf import shared

Queues = list[tuple[float, float, list[int]]]
"""deserved, share, and the gangs that run, oldest first; the first queue asks."""
Rows = dict[str, tuple[str, float, float, list[int]]]
"""parent, deserved, share, and the gangs that run, oldest first, of a leaf; of a queue above leaves no gangs."""


def _victims(rows: Rows, queue: str, gpus: int) -> list[tuple[str, int]]:
    """(queue, GPUs) of those that the engine would stop for a gang, in the order in which they are taken."""
    tree = QueueTree([Claim(name, 0.0, row[1], parent=row[0] or None) for name, row in rows.items()])
    asking, debtors = tree.index[queue], []
    for q in tree.leaves:
        running = [_run(tree, q, i, gang) for i, gang in enumerate(rows[tree.names[q]][3])]
        if running and q != asking:
            debtors.append(Debtor(tree.levels(asking, q), running))
    shares = [share for _, _, share, _ in rows.values()]
    found = collect(Gang(99, 0, gpus, 1, asking), gpus, ANY_GPU, debtors, tree, shares, by_ms=10**9)
    return [(tree.names[gang.queue], gang.gpus) for gang in found]


def _run(tree: QueueTree, queue: int, number: int, gpus: int) -> Gang:
    gang = Gang(number, 0, gpus, 10**9, queue)
    gang.start_ms = number
    tree.allocate(queue, gpus, number, preemptible=True)
    return gang


def _flat(queues: Queues) -> Rows:
    return {str(q): ("", deserved, share, gangs) for q, (deserved, share, gangs) in enumerate(queues)}


@st.composite
def pools(draw: st.DrawFn) -> tuple[Queues, int]:
    """A full pool, and a gang with which the first queue stays within its share."""
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
@settings(max_examples=examples(40, 400), deadline=None)
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
    """KAI's strategy that keeps fair shares, of the rows in which GPUs alone decide."""
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
    return allocatable(row["deserved"], row["fairShare"], row["limit"])


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
    """Departments of teams, and a gang with which one of the teams stays within its share."""
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


@settings(max_examples=examples(33, 200), deadline=None)
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
