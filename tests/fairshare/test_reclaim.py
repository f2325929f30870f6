"""KAI's rules of reclaim: every vector, and what holds for any of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairshare.preemption.reclaim_rules_and_limits import (
    Account,
    Claimant,
    QueueResource,
    TakenBundles,
    above_share,
    may_reclaim,
    right_to_take,
)
from tests.fairshare.reclaim import may_lose, reclaimable
from tests.shelf import shared

RESOURCES = ("gpu", "cpu", "memory")


def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shared("vectors/kai_reclaim.json").read_text())
    return found


def _account(row: dict[str, Any], name: str = "", parent: str = "") -> Account:
    stocks = {
        r: QueueResource(
            row[r]["deserved"],
            row[r]["fairShare"],
            row[r]["limit"],
            row[r]["allocated"],
            row[r].get("allocatedNonPreemptible", 0),
        )
        for r in RESOURCES
    }
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
