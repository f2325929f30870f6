"""Who pays for shared and idle GPUs under each policy of the price book, in the lines of a statement.

Five H100 for one hour at 2.40. A, B, C and E are in the pool train, D is in the pool serve:

    A   lab holds a quarter and uses 0.85 of the GPU; ops holds a quarter and uses 0.05; half of it is free
    B   vision, busy
    C   free
    D   free
    E   nlp, idle, and starting for half an hour

The queue vision is guaranteed two GPUs and uses one; the queue nlp has no bound. The nodes are gone after the hour."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.wire import UsageInterval
from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_MS, HOUR_US, Site, book, hours_of, site
from tests.seams.small_month import BEGIN_MS, at, running

INVENTORY = """\
schema: 1
cluster: prod
nodes:
  - {name: n1, pool: train, deleted: 2026-10-25T01:00:00Z}
  - {name: n2, pool: serve, deleted: 2026-10-25T01:00:00Z}
namespaces: [{name: lab, team: lab}, {name: ops, team: ops}, {name: vision, team: vision}, {name: nlp, team: nlp}]
"""
POLICY = """\
schema: 1
queues:
  - {name: vision, team: vision, deserved: 2, refs: ["kai:vision"]}
  - {name: nlp, team: nlp, deserved: -1, refs: ["kai:nlp"]}
"""
ROW = "id: h100, model: H100, price: 2.40"
SPAN = {"start": str(at(0)), "end": str(at(2))}


def part(pod: str, share: float, busy: float) -> UsageInterval:
    """Build an hour of A of which a pod holds a share, and uses `busy` of the whole GPU."""
    held = round(HOUR_US * share)
    (row,) = hours_of("A", at(0), 1, pod, busy, capacity_us=held, allocated_us=held if pod else 0)
    return row


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    given: dict[str, Any] = {"prices": book(ROW), "inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path_factory.mktemp("shared"), VirtualClock(BEGIN_MS + 3 * HOUR_MS), **given) as found:
        found.send(
            [
                part("lab/greedy", 0.25, 0.85),
                part("ops/calm", 0.25, 0.05),
                part("", 0.5, 0),
                *hours_of("B", at(0), 1, "vision/train", 1),
                *hours_of("C", at(0), 1),
                *hours_of("E", at(0), 1, "nlp/slow"),
            ],
            [
                running("vision/train", at(0), "Job/train", queue_ref="kai:vision"),
                running("nlp/slow", at(0), "Job/slow", started_ms=at(0.5), queue_ref="kai:nlp"),
            ],
        )
        found.send(hours_of("D", at(0), 1), node="n2")
        yield found


HELD = {
    "lab busy": 0.25, "nlp allocated_idle running_idle": 0.5, "nlp allocated_idle starting": 0.5,
    "ops allocated_idle running_idle": 0.2, "ops busy": 0.05, "vision busy": 1.0,
}  # fmt: skip
"""What each team holds, in GPU-hours."""
BY_USE = HELD | {"lab busy": 0.85, "ops allocated_idle running_idle": 0.1}
"""The same with A by use: of lab's 0.60 beyond its share, 0.50 were free and ops lends 0.10."""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", HELD | {"__idle__ unallocated": 2.5}),
        ("shared_gpus: busy", BY_USE | {"__idle__ unallocated": 2.0}),
        # The pool train has 1.5 free hours and costs of vision 1, nlp 1, lab 0.25 and ops 0.25. Nobody is in serve.
        (
            "idle: {unallocated: spread}",
            HELD
            | {
                "__idle__ unallocated": 1.0, "vision unallocated spread": 0.6, "nlp unallocated spread": 0.6,
                "lab unallocated spread": 0.15, "ops unallocated spread": 0.15,
            },
        ),
        ("pools: {serve: {unallocated: spread}}", HELD | {"__idle__ unallocated": 2.5}),
        # By use, one free hour is left in train: of 2.5 hours' cost lab has 0.85, ops 0.15, vision and nlp 1 each of 3.
        (
            "shared_gpus: busy\n  idle: {unallocated: spread}",
            BY_USE
            | {
                "__idle__ unallocated": 1.0, "vision unallocated spread": 1 / 3, "nlp unallocated spread": 1 / 3,
                "lab unallocated spread": 0.85 / 3, "ops unallocated spread": 0.15 / 3,
            },
        ),
        # vision's guarantee reserves one hour of the 2.5 free ones: of train's 1.5 and of serve's 1.
        ("idle: {guaranteed: owner}", HELD | {"__idle__ unallocated": 1.5, "vision unallocated reserved": 1.0}),
        # What the guarantee leaves of train's 1.5 hours is spread: 0.5, by 1, 1, 0.25 and 0.25.
        (
            "pools: {train: {guaranteed: owner, unallocated: spread}}",
            HELD
            | {
                "__idle__ unallocated": 1.0, "vision unallocated reserved": 1.0, "vision unallocated spread": 0.2,
                "nlp unallocated spread": 0.2, "lab unallocated spread": 0.05, "ops unallocated spread": 0.05,
            },
        ),
        (
            "idle: {starting: cluster}",
            {name: hours for name, hours in HELD.items() if "starting" not in name}
            | {"__idle__ unallocated": 2.5, "__idle__ allocated_idle starting": 0.5},
        ),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)  # fmt: skip
def test_each_policy_moves_the_time_of_one_hour_between_payers(
    shared: Site, more: str, expected: dict[str, float]
) -> None:
    """Whoever pays, the five hours are 12.00 in all."""
    billing = f"billing:\n  {more}\n" if more else ""
    shared.post("/v1/prices", book(ROW, more=billing), month="2026-10", reason="try")
    stated = shared.get("/v1/statement", **SPAN)
    found = {" ".join(filter(None, (line["team"], line["account"], line["detail"]))): line for line in stated["lines"]}
    assert {name: float(line["gpu_hours"]) for name, line in found.items()} == pytest.approx(expected, abs=1e-9)
    for line in found.values():
        assert Decimal(line["cost"]) == Decimal(line["gpu_hours"]) * Decimal("2.40")
    assert (stated["gpu_hours"], Decimal(stated["cost"])) == ("5.000000000", 12)
    assert stated["payable_total"] == "12.00"


def test_a_queue_without_a_bound_is_within_its_quota_and_has_no_unused_one(shared: Site) -> None:
    """Two hours of two GPUs are guaranteed to vision."""
    figures = ("guaranteed", "within", "unused", "borrowed")
    rows = {
        row["queue"]: tuple(row[f"{name}_gpu_hours"] and float(row[f"{name}_gpu_hours"]) for name in figures)
        for row in shared.tables(**SPAN)["quotas"]
    }
    assert rows == {"vision": (4, 1, 3, 0), "nlp": (None, 1, None, 0)}


def test_each_policy_guarantees_the_time_in_which_it_is_in_force(tmp_path: Path) -> None:
    """Two GPUs in the first hour, one in the second, and three in the third and fourth."""
    with site(tmp_path, VirtualClock(BEGIN_MS), prices=book(ROW), policy=POLICY) as found:
        for deserved in (1, 3):
            found.clock.advance(HOUR_MS)
            changed = yaml.safe_load(POLICY.replace("deserved: 2", f"deserved: {deserved}"))
            assert found.client.put("/v1/policy", json=changed).status_code == 200
        found.clock.advance(2 * HOUR_MS)
        pod = running("vision/train", at(0), "Job/train", queue_ref="kai:vision")
        found.send(hours_of("B", at(0), 4, "vision/train", 1), [pod])
        (row,) = [row for row in found.tables(start=str(at(0)), end=str(at(4)))["quotas"] if row["queue"] == "vision"]
    figures = ("guaranteed", "within", "unused", "borrowed")
    assert [float(row[f"{name}_gpu_hours"]) for name in figures] == [9, 4, 5, 0]


def test_an_hour_before_its_node_is_down_is_billed_by_use_as_any_other(tmp_path: Path) -> None:
    down = INVENTORY.replace("deleted: 2026-10-25T01", "down: [{start: 2026-10-25T01:00:00Z}], deleted: 2026-10-25T02")
    given = {"prices": book(ROW, more="billing: {shared_gpus: busy}\n"), "inventory": down}
    with site(tmp_path, VirtualClock(BEGIN_MS + 3 * HOUR_MS), **given) as found:
        found.send([part("lab/greedy", 0.25, 0.85), part("ops/calm", 0.25, 0.05), part("", 0.5, 0)])
        hours = {" ".join(line[:3]): float(line[4]) for line in found.lines(**SPAN)}
    assert hours == pytest.approx(
        {"lab busy ": 0.85, "ops busy ": 0.05, "ops allocated_idle running_idle": 0.1, "__idle__ down ": 1}, abs=1e-9
    )


def test_a_commitment_covers_its_part_of_everyone_and_its_owner_pays_for_the_rest(shared: Site) -> None:
    """Three GPUs are committed at 2.00 from 0:00 to 2:00. In the first hour they cover 3 of the 5 used hours: 0.6 of
    each. In the second hour nothing is used: vision owes 3 x 2.00 for them."""
    rate = (
        "id: rate, model: H100, price: 2.00, commitment: c, valid_from: '2026-10-25T00:00:00Z',"
        " valid_to: '2026-10-25T02:00:00Z'"
    )
    commitment = "commitments: [{id: c, gpus: 3, owner: vision}]\n"
    shared.post("/v1/prices", book(ROW, rate, more=commitment), month="2026-10", reason="committed")
    stated = shared.get("/v1/statement", **SPAN)
    hours: dict[tuple[str, str], float] = {}
    for line in stated["lines"]:
        place = line["team"], line["price_row"]
        hours[place] = hours.get(place, 0) + float(line["gpu_hours"])
    whole = {"__idle__": 2.5, "lab": 0.25, "nlp": 1, "ops": 0.25, "vision": 1}
    assert hours == pytest.approx(
        {(team, row): share * all_of for team, all_of in whole.items() for row, share in (("rate", 0.6), ("h100", 0.4))}
    )
    assert Decimal(stated["cost"]) == 3 * Decimal("2.00") + 2 * Decimal("2.40")
    (unused,) = stated["commitments"]
    assert (unused["team"], unused["account"], unused["gpu_hours"], Decimal(unused["cost"])) == (
        "vision", "unused_commitment", "3.000000000", 6,
    )  # fmt: skip
    # vision held one hour: 0.6 x 2.00 + 0.4 x 2.40 = 2.16.
    assert (stated["payable"]["vision"], stated["due"]["vision"]) == ("2.16", "8.16")
    shared.post("/v1/prices", book(ROW), month="2026-10", reason="as before")
