"""Start-up and gang waiting in the lines of a statement: by day, at each price, and whoever pays.

A gang of two pods holds a GPU each, from 0:00 to 5:00. `a` runs from 1:00 and is idle. The node does not know when `b`
began to run; the API server knows: at 3:00. Then b is busy. At 2:00 the node moves from the pool old (2 an hour) to the
pool new (3 an hour):

    hour         0          1          2          3          4
    price        2          2          3          3          3
    a            starting   waiting    waiting    idle       idle
    b            starting   starting   starting   busy       busy

    starting     old 3: 6   new 1: 3        gang waiting   old 1: 2   new 1: 3
    idle                    new 2: 6        busy                      new 2: 6        26 in all"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_MS, HOUR_US, Site, book, hours_of, site
from tests.seams.site_with_cluster import watched
from tests.seams.small_month import BEGIN_MS, at, running

PRICES = ("id: old, model: H100, pool: old, price: 2", "id: new, model: H100, pool: new, price: 3")
OWNER = ("PyTorchJob", "fit")
SPAN = {"start": str(BEGIN_MS), "end": str(at(5))}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with watched(tmp_path_factory.mktemp("gang"), BEGIN_MS, "old", prices=book(*PRICES)) as found:
        clock = found.site.clock
        clock.advance(2 * HOUR_MS)
        found.show_node("n1", "new")
        found.read()
        clock.advance(3 * HOUR_MS)
        found.site.send(
            [
                *hours_of("A", at(0), 5, "vision/a"),
                *hours_of("B", at(0), 3, "vision/b"),
                *hours_of("B", at(3), 2, "vision/b", 1),
            ],
            [
                running("vision/a", at(0), "PyTorchJob/fit", started_ms=at(1), observed_ms=at(5)),
                running("vision/b", at(0), "PyTorchJob/fit", started_ms=None, observed_ms=at(5)),
            ],
        )
        found.show_pod("b", OWNER, at(0), at(0), at(3))
        found.read()
        yield found.site


def lines(of: Site, **query: Any) -> dict[tuple[str, str, str, str], tuple[float, Decimal]]:
    """Return hours and cost by team, account, detail and price row."""
    found = of.get("/v1/statement", **query)["lines"]
    return {
        (line["team"], line["account"], line["detail"], line["price_row"]): (
            float(line["gpu_hours"]),
            Decimal(line["cost"]),
        )
        for line in found
    }


EXPECTED = {
    ("vision", "busy", "", "new"): (2, Decimal(6)),
    ("vision", "allocated_idle", "starting", "new"): (1, Decimal(3)),
    ("vision", "allocated_idle", "starting", "old"): (3, Decimal(6)),
    ("vision", "allocated_idle", "gang_waiting", "new"): (1, Decimal(3)),
    ("vision", "allocated_idle", "gang_waiting", "old"): (1, Decimal(2)),
    ("vision", "allocated_idle", "running_idle", "new"): (2, Decimal(6)),
}


def test_start_up_has_the_price_of_its_place_and_the_start_that_only_the_api_server_knows(gang: Site) -> None:
    assert lines(gang, **SPAN) == EXPECTED


def test_a_part_of_an_hour_has_its_part_of_each_phase(gang: Site) -> None:
    """From 0:30 to 3:30: half of the first hour, and half an hour after the start of b."""
    assert lines(gang, start=str(at(0.5)), end=str(at(3.5))) == {
        ("vision", "busy", "", "new"): (0.5, Decimal("1.5")),
        ("vision", "allocated_idle", "starting", "new"): (1, Decimal(3)),
        ("vision", "allocated_idle", "starting", "old"): (2, Decimal(4)),  # a 0.5, b 1.5
        ("vision", "allocated_idle", "gang_waiting", "new"): (1, Decimal(3)),
        ("vision", "allocated_idle", "gang_waiting", "old"): (1, Decimal(2)),
        ("vision", "allocated_idle", "running_idle", "new"): (0.5, Decimal("1.5")),
    }


def test_the_breakdown_of_usage_is_that_of_the_statement(gang: Site) -> None:
    found = gang.get("/v1/usage", by="pod", breakdown="true", **SPAN)["lines"]
    names = ("starting_us", "gang_waiting_us", "running_idle_us")
    assert {line["key"]["pod"]: tuple(line[name] / 3_600_000_000 for name in names) for line in found} == {
        "a": (1, 2, 2), "b": (3, 0, 0),
    }  # fmt: skip


def test_the_cluster_pays_for_start_up_where_the_price_book_says_so(gang: Site) -> None:
    policy = "billing:\n  idle: {starting: cluster}\n  pools: {old: {starting: cluster, gang_waiting: cluster}}\n"
    gang.post("/v1/prices", book(*PRICES, more=policy), month="2026-10", reason="start-up is on the house")
    moved = {
        ("allocated_idle", "starting", "new"), ("allocated_idle", "starting", "old"),
        ("allocated_idle", "gang_waiting", "old"),
    }  # fmt: skip
    assert lines(gang, **SPAN) == {
        ("__idle__" if line[1:] in moved else "vision", *line[1:]): figures for line, figures in EXPECTED.items()
    }
    gang.post("/v1/prices", book(*PRICES), month="2026-10", reason="as before")
    assert lines(gang, **SPAN) == EXPECTED


def test_sums_and_records_give_the_same_phases(gang: Site) -> None:
    """A late record of another GPU in the second hour: the hour is read from its records until the next checkpoint."""

    def of_vision() -> list[Any]:
        return [line for line in gang.get("/v1/statement", **SPAN)["lines"] if line["team"] == "vision"]

    before = of_vision()
    assert len(before) == len(EXPECTED)
    gang.send(hours_of("Z", at(1), 1), node="n9")
    assert of_vision() == before
    gang.clock.advance(24 * HOUR_MS)
    gang.service.maintain()
    assert of_vision() == before


def test_a_pod_that_was_not_seen_to_start_starts_until_it_was_last_looked_at(tmp_path: Path) -> None:
    """It was placed at 0:00 and looked at for the last time at 1:00; a pod that was never placed starts never."""
    with site(tmp_path, VirtualClock(at(3)), prices=book("id: h100, model: H100, price: 2")) as found:
        found.send(
            [*hours_of("A", at(0), 2, "vision/placed"), *hours_of("B", at(0), 2, "nlp/unknown")],
            [
                running("vision/placed", at(0), "Job/placed", started_ms=None, observed_ms=at(1)),
                running("nlp/unknown", at(0), "Job/odd", scheduled_ms=None, started_ms=None, observed_ms=at(1)),
            ],
        )
        lines = found.get("/v1/usage", by="pod", breakdown="true", start=str(at(0)), end=str(at(2)))["lines"]
    hours = {line["key"]["pod"]: (line["starting_us"] / HOUR_US, line["running_idle_us"] / HOUR_US) for line in lines}
    assert (hours["placed"], hours["unknown"]) == ((1, 1), (0, 2))
