"""Whom the simulators stop is whom the controller's own rules of reclaim allow, and KAI's vectors of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.preemption.preemption_rules import (
    Account,
    Claimant,
    QueueResource,
    TakenBundles,
    allocatable,
    may_reclaim,
    reclaimable,
)
from fairshare.simulator.scheduler_engine import Debtor, Run, _Scheduler, collect, levels
from fairshare.simulator.simulation_model import WHOLE, Flavour, Job, Pool, Slot, Workload
from tests.effort import examples
from tests.shelf import shared

FLAVOUR = Flavour(WHOLE, "H100", "")
Queues = list[tuple[float, float, list[int]]]
"""deserved, share, and the gangs that run, oldest first; the first queue asks."""


def _engine(queues: Queues, missing: int) -> list[tuple[int, int]]:
    """(queue, GPUs) of the engine's victims."""
    debtors = [
        Debtor(str(q), [_run(q, i, gpus) for i, gpus in reversed(list(enumerate(gangs)))])
        for q, (_, _, gangs) in enumerate(queues)
        if q
    ]
    job = Job("asks", "0", 0, missing, 1)
    return [(int(run.job.queue), run.job.gpus) for run in collect(job, missing, FLAVOUR, debtors, _accounts(queues))]


def _accounts(queues: Queues) -> dict[str, Account]:
    return {
        str(q): Account(str(q), "", {"gpu": QueueResource(deserved, share, -1, float(sum(gangs)))})
        for q, (deserved, share, gangs) in enumerate(queues)
    }


def _run(queue: int | str, number: int, gpus: int) -> Run:
    job = Job(f"{queue}-{number}", str(queue), 0, gpus, 1)
    return Run(job, tuple(Slot("n", "g", i, FLAVOUR) for i in range(gpus)), number, 10**9, 0, 1)


def _replay(queues: Queues, missing: int) -> list[tuple[int, int]]:
    """The same of the replay's."""
    jobs = [(q, gpus) for q, (_, _, gangs) in enumerate(queues) for gpus in gangs]
    workload = Workload(
        queues=tuple(str(q) for q in range(len(queues))), queue=[q for q, _ in jobs], gpus=[gpus for _, gpus in jobs],
        submit_s=[0] * len(jobs), duration_s=[10**6] * len(jobs),
    )  # fmt: skip
    held = sum(sum(gangs) for _, _, gangs in queues)
    pool = Pool(held, weights=[1.0] * len(queues), deserved=[d for d, _, _ in queues], min_runtime_s=0)
    run = _Scheduler(workload, pool, 10**6)
    run.share_out([share for _, share, _ in queues])
    numbers = [0] * len(queues)
    for i, (q, _) in enumerate(jobs):
        run.start(i, numbers[q])
        numbers[q] += 1
    found = run._victims(0, missing, 10**5)
    return [jobs[i] for i in found or ()]


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
def test_victims_of_both_simulators_are_lawful_and_the_same(case: tuple[Queues, int]) -> None:
    queues, gang = case
    asker = Claimant("0", {"gpu": float(gang)})
    accounts = _accounts(queues)
    assert may_reclaim(asker, accounts)
    for victims in (engine := _engine(queues, gang), _replay(queues, gang)):
        taken: dict[str, list[dict[str, float]]] = {}
        for q, gpus in victims:
            taken.setdefault(str(q), []).append({"gpu": float(gpus)})
        assert reclaimable(asker, list(taken.items()), accounts)
        assert not victims or sum(gpus for _, gpus in victims) >= gang
        for queue, parts in taken.items():
            left = accounts[queue].stocks["gpu"].allocated - sum(part["gpu"] for part in parts)
            assert left >= accounts[queue].stocks["gpu"].deserved
        assert sorted(victims) == sorted(engine)


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
        assert bool(_engine(queues, 1)) == bool(_replay(queues, 1)) == (row["expected"] and keeps), row["name"]
    assert looked >= 3


def _quota(row: dict[str, Any]) -> float:
    return float("inf") if row["deserved"] == -1 else float(row["deserved"])


def _allocatable(row: dict[str, Any]) -> float:
    return allocatable(row["deserved"], row["fairShare"], row["limit"])


Rows = dict[str, tuple[str, float, float, list[int]]]
"""parent, deserved, share, and the gangs that run, oldest first, of a leaf; of a queue above leaves no gangs."""


def _tree(rows: Rows) -> dict[str, Account]:
    def holds(name: str) -> float:
        return sum(rows[name][3]) + sum(holds(child) for child, row in rows.items() if row[0] == name)

    return {
        name: Account(name, parent, {"gpu": QueueResource(deserved, share, -1, holds(name))})
        for name, (parent, deserved, share, _) in rows.items()
    }


def _asked(rows: Rows, queue: str, gpus: int) -> list[tuple[str, int]]:
    """(queue, GPUs) of those whom the engine would stop for a gang, in the order in which they are taken."""
    debtors = [
        Debtor(name, [_run(name, i, gang) for i, gang in reversed(list(enumerate(gangs)))])
        for name, (_, _, _, gangs) in rows.items()
        if gangs and name != queue
    ]
    found = collect(Job("asks", queue, 0, gpus, 1), gpus, FLAVOUR, debtors, _tree(rows))
    return [(run.job.queue, run.job.gpus) for run in found]


def test_a_team_above_its_share_gives_to_its_own_department_alone_while_that_is_within_its_share() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 2, [2, 2]), "b": ("one", 0, 2, []),
        "two": ("", 0, 4, []), "c": ("two", 0, 4, [2]),
    }  # fmt: skip
    assert _asked(rows, "c", 2) == []
    assert _asked(rows, "b", 2) == [("a", 2)]


def test_the_department_furthest_above_its_share_gives_first_and_in_it_the_team() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 1, [1, 1, 1]), "b": ("one", 0, 3, [2]),
        "two": ("", 0, 4, []), "c": ("two", 0, 2, [1, 1, 1]), "d": ("two", 0, 2, [1, 1, 1, 1]),
        "late": ("", 0, 4, []),
    }  # fmt: skip
    assert _asked(rows, "late", 2) == [("d", 1), ("c", 1)]


def test_quotas_are_kept_at_every_level() -> None:
    rows: Rows = {"one": ("", 3, 2, []), "a": ("one", 0, 2, [1] * 5), "late": ("", 0, 4, [])}
    assert _asked(rows, "late", 2) == [("a", 1), ("a", 1)]
    assert _asked(rows, "late", 3) == []


def test_a_department_above_its_share_takes_from_itself_and_from_no_emptier_one() -> None:
    rows: Rows = {
        "one": ("", 0, 4, []), "a": ("one", 0, 2, []), "b": ("one", 0, 2, [2, 2, 2]),
        "two": ("", 0, 4, []), "c": ("two", 0, 4, [2, 2, 2]),
    }  # fmt: skip
    assert _asked(rows, "a", 2) == [("b", 2)]
    assert _asked(rows | {"b": ("one", 6, 2, [2, 2, 2])}, "a", 2) == []


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
    victims = _asked(rows, queue, gang)
    for name, gpus in victims:
        assert taking.right(name) is not None
        taking.take(name, {"gpu": float(gpus)})
    assert taking.fair()
    assert not victims or sum(gpus for _, gpus in victims) >= gang
    for name, _ in victims:
        for above in levels(queue, name, accounts):
            assert taking.held(above)["gpu"] >= accounts[above].stocks["gpu"].deserved
