"""What budgets in money, in GPU-hours and by GPU model have spent, as the controller and the pages ask for it.

vision and nlp hold an H100 for an hour at .125, and vision an A100 for three hours at 1."""

from __future__ import annotations

from pathlib import Path

import yaml

from gputally.base.clock import VirtualClock
from tests.seams.site import A100, book, hours_of, site
from tests.seams.small_month import at

PRICES = book("id: h, model: H100, price: .125", "id: a, model: A100, price: 1")
INVENTORY = "schema: 1\ncluster: prod\nnamespaces: [{name: vision, team: vision}, {name: nlp, team: nlp}]\n"
BUDGETS = [
    {"name": "money", "team": "vision", "limit": 5, "currency": "EUR", "thresholds": [0.6, 0.7]},
    {"name": "cents", "team": "nlp", "limit": 1, "currency": "EUR"},
    {"name": "hours", "team": "vision", "limit": 8, "gpu_models": {"H100": 1}},
]


def test_a_budget_has_spent_what_was_held_of_its_models_in_its_unit(tmp_path: Path) -> None:
    """The month's 3.25 EUR are shown as cents that add up: those of two teams that each have an eighth are not both
    rounded up."""
    policy = yaml.safe_dump({"schema": 1, "queues": [{"name": "all"}], "budgets": BUDGETS})
    with site(tmp_path, VirtualClock(at(3)), prices=PRICES, inventory=INVENTORY, policy=policy) as found:
        found.send([*hours_of("A", at(0), 1, "vision/train", 0.5), *hours_of("A", at(1), 2)])
        found.send([*hours_of("B", at(0), 1, "nlp/eval", 0.5), *hours_of("B", at(1), 2)], epoch="b")
        found.send(hours_of("C", at(0), 3, "vision/old", None, gpu_model=A100), epoch="c")
        states = found.get("/v1/budgets")
    assert [
        (one["name"], one.get("gpu_model"), one["unit"], float(one["limit"]), float(one["spent"]), one["ratio"],
         one["threshold"])
        for one in states
    ] == [
        ("money", None, "EUR", 5, 3.125, 0.625, 0.6), ("cents", None, "EUR", 1, 0.125, 0.125, None),
        ("hours", None, "GPU-hours", 8, 4, 0.5, 0.5), ("hours: H100", "H100", "GPU-hours", 1, 1, 1, 1),
    ]  # fmt: skip
    shown = {one["name"]: one.get("spent_amount") for one in states}
    assert shown in (
        {"money": "3.13", "cents": "0.12", "hours": None, "hours: H100": None},
        {"money": "3.12", "cents": "0.13", "hours": None, "hours: H100": None},
    )  # fmt: skip
