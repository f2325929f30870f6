"""The figures of one small month on every seam, computed by hand. `tests/seams/small_month.py` shows the month."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest

from tests.plugin_cases import needs
from tests.seams.site import A100, H100, Site, book
from tests.seams.small_month import ZONE, october

OCTOBER = {"start": "2026-10-01", "end": "2026-11-01"}


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with october(tmp_path_factory.mktemp("month"), opencost={"listen": "127.0.0.1:0"}) as found:
        yield found


def amounts(rows: list[Any], *names: str) -> list[tuple[Any, ...]]:
    """Return some columns of a table."""
    return [tuple(row[name] for name in names) for row in rows]


def test_usage_by_gpu_and_by_team(month: Site) -> None:
    assert month.usage("gpu", **OCTOBER) == {
        "A": {"busy": 2, "allocated_unknown": 1, "unallocated": 1, "unmetered": 2, "down": 2},
        "B": {"busy": 3, "allocated_idle": 2, "unallocated": 2, "down": 1},
        "C": {"allocated_idle": 8},
    }
    assert month.usage("team", **OCTOBER) == {
        "__idle__": {"unallocated": 3, "unmetered": 2, "down": 3},
        "nlp": {"busy": 1, "allocated_idle": 8},
        "vision": {"busy": 4, "allocated_idle": 2, "allocated_unknown": 1},
    }
    found = month.get("/v1/usage", by="gpu", **OCTOBER)
    # 24 hours less 3 down are 21, of which 2 are unmetered. The lost hour of A is down on a node that works.
    assert found["coverage"] == 19 / 21
    assert [line["node_down_us"] for line in found["lines"]] == [3_600_000_000, 3_600_000_000, 0]


def test_usage_by_hour_where_an_hour_occurs_twice(month: Site) -> None:
    assert month.usage("hour", **OCTOBER, **{"where.team": "vision"}) == {
        "2026-10-25T02": {"busy": 1.5, "allocated_idle": 0.5},
        "2026-10-25T02+01:00": {"busy": 1.5, "allocated_idle": 0.5},
        "2026-10-25T03": {"busy": 0.5, "allocated_idle": 0.5, "allocated_unknown": 1},
        "2026-10-25T04": {"busy": 0.5, "allocated_idle": 0.5},
    }


def test_cost_by_team_by_place_and_by_job(month: Site) -> None:
    def of(*by: str) -> list[tuple[Any, ...]]:
        found = month.get("/v1/cost", by=",".join(by), **OCTOBER)
        assert (found["currency"], Decimal(found["total"])) == ("EUR", Decimal("25.216666666664"))
        assert found["unpriced_gpu_us"] == 0
        return [(*line["key"].values(), Decimal(line["cost"])) for line in found["lines"]]

    assert of("team") == [
        ("__idle__", Decimal("6.15")), ("nlp", Decimal("4.716666666664")), ("vision", Decimal("14.35")),
    ]  # fmt: skip
    assert of("node", "pool", "region", "zone", "capacity_type") == [
        ("n1", "train", "eu-1", "eu-1a", "on-demand", Decimal("22.55")),  # 11 billed hours of A and B
        ("n2", "serve", "eu-2", "eu-2b", "spot", Decimal("2.666666666664")),
    ]
    assert of("job", "user") == [
        ("", "", Decimal("6.15")), ("Deployment/serve", "", Decimal("2.666666666664")),
        ("Job/eval", "", Decimal("2.05")), ("Job/train", "ann", Decimal("14.35")),
    ]  # fmt: skip


def test_the_lines_and_the_totals_of_the_statement(month: Site) -> None:
    assert month.lines(month="2026-10") == [
        ("__idle__", "unallocated", "", H100, "3.000000000", "2.05", "6.15000000000"),
        ("__idle__", "unmetered", "", H100, "2.000000000", None, "0"),
        ("__idle__", "down", "", H100, "3.000000000", None, "0"),
        ("nlp", "busy", "", H100, "1.000000000", "2.05", "2.05000000000"),
        ("nlp", "allocated_idle", "running_idle", A100, "8.000000000", "0.333333333333", "2.666666666664000000000"),
        ("vision", "busy", "", H100, "4.000000000", "2.05", "8.20000000000"),
        ("vision", "allocated_idle", "running_idle", H100, "2.000000000", "2.05", "4.10000000000"),
        ("vision", "allocated_unknown", "", H100, "1.000000000", "2.05", "2.05000000000"),
    ]
    stated = month.get("/v1/statement", month="2026-10")
    assert (stated["month"], stated["timezone"], stated["status"]) == ("2026-10", ZONE, "open")
    assert (stated["gpu_hours"], Decimal(stated["cost"])) == ("24.000000000", Decimal("25.216666666664"))
    assert stated["due"] == {"nlp": "4.72", "vision": "14.35"}
    assert stated["payable"] == {"__idle__": "6.15", **stated["due"]}
    assert (stated["payable_total"], stated["due_total"], stated["not_billed"]) == ("25.22", "19.07", "6.15")


def test_the_statement_of_a_team_has_the_lines_of_the_whole_one(month: Site) -> None:
    whole, own = month.get("/v1/statement", month="2026-10"), month.get("/v1/statement", month="2026-10", team="nlp")
    assert own["lines"] == [line for line in whole["lines"] if line["team"] == "nlp"]
    assert (own["payable"], own["payable_total"], own["gpu_hours"]) == ({"nlp": "4.72"}, "4.72", "9.000000000")


def test_the_tables_of_the_report(month: Site) -> None:
    """Costs of lines are rounded so that they add up: 2.666… is 2.67 beside 2.05 of nlp's 4.72."""
    found = month.tables(month="2026-10")
    assert amounts(found["accounts"], "account", "gpu_hours", "cost") == [
        ("busy", "5.000000000", "10.25"), ("allocated_idle", "10.000000000", "6.77"),
        ("allocated_unknown", "1.000000000", "2.05"), ("unallocated", "3.000000000", "6.15"),
        ("unmetered", "2.000000000", "0.00"), ("down", "3.000000000", "0.00"),
    ]  # fmt: skip
    names = ("team", "rank", "share", "allocated_gpu_hours", "utilisation", "idle_cost", "cost")
    assert amounts(found["teams"], *names) == [
        ("nlp", 1, 9 / 16, "9.000000000", 1 / 9, "2.67", "4.72"),
        ("vision", 2, 7 / 16, "7.000000000", 4 / 6, "4.10", "14.35"),
    ]
    names = ("gpu_model", "capacity_type", "allocated_gpu_hours", "unallocated_gpu_hours", "cost")
    assert amounts(found["kinds"], *names) == [
        (A100, "spot", "8.000000000", "0.000000000", "2.67"),
        (H100, "on-demand", "8.000000000", "3.000000000", "22.55"),
    ]
    names = ("team", "cluster", "namespace", "job", "allocated_gpu_hours", "cost")
    assert amounts(found["jobs_by_cost"], *names) == [
        ("vision", "prod", "vision", "Job/train", "7.000000000", "14.35000000000"),
        ("nlp", "prod", "nlp", "Deployment/serve", "8.000000000", "2.666666666664000000000"),
        ("nlp", "prod", "nlp", "Job/eval", "1.000000000", "2.05000000000"),
    ]
    assert amounts(found["jobs_by_idle"], "job", "idle_gpu_hours", "idle_cost") == [
        ("Job/train", "2.000000000", "4.10000000000"), ("Deployment/serve", "8.000000000", "2.666666666664000000000"),
    ]  # fmt: skip
    assert amounts(found["users"], "user", "jobs", "allocated_gpu_hours", "cost") == [
        ("ann", 1, "7.000000000", "14.35000000000"), ("", 2, "9.000000000", "4.716666666664000000000"),
    ]  # fmt: skip
    assert amounts(found["days"], "day", "team", "allocated_gpu_hours") == [
        ("2026-10-25", "nlp", "9.000000000"), ("2026-10-25", "vision", "7.000000000"),
    ]  # fmt: skip
    head = found["summary"]
    # 19.07 is vision and nlp; 5 busy hours of 15 whose use is known.
    assert (head["cost"], head["unallocated_cost"], head["due"]) == ("19.07", "6.15", "19.07")
    assert (head["jobs"], head["utilisation"], head["coverage"]) == (3, 5 / 15, 19 / 21)
    assert (head["capacity_gpu_hours"], head["allocated_gpu_hours"]) == ("24.000000000", "16.000000000")


def test_each_hour_of_the_day_has_its_capacity_its_holders_and_its_busy_time(month: Site) -> None:
    """Down and lost GPUs are no capacity, unmetered ones are. Hour 2 is two hours."""
    rows = month.tables(month="2026-10")["hours"]
    assert [row["hour"] for row in rows] == list(range(24))
    names = ("capacity_gpu_hours", "allocated_gpu_hours", "busy_gpu_hours", "held", "utilisation")
    shown = {row["hour"]: tuple(float(row[name]) for name in names) for row in rows if float(row["capacity_gpu_hours"])}
    assert shown == {
        2: (6, 6, 3, 1, 3 / 6), 3: (3, 3, 0.5, 1, 0.5 / 2), 4: (3, 2, 0.5, 2 / 3, 0.5 / 2), 5: (2, 2, 1, 1, 1 / 2),
        6: (3, 1, 0, 1 / 3, 0), 7: (1, 1, 0, 1, 0), 8: (3, 1, 0, 1 / 3, 0),
    }  # fmt: skip
    own = month.tables(month="2026-10", team="vision")["hours"]
    assert [float(row["allocated_gpu_hours"]) for row in own if row["capacity_gpu_hours"] != "0.000000000"] == [
        4, 2, 1, 0, 0, 0, 0,
    ]  # fmt: skip


@needs("exports.html")
def test_the_busiest_hour_and_the_peak_of_a_job_are_those_of_one_hour(month: Site) -> None:
    """Three GPUs are held in each of the hours 02, not six in one, and serve never held more than one."""
    (hint,) = month.tables(month="2026-10")["hints"]
    assert (hint["job"], hint["kind"], hint["held_gpus"], hint["peak_busy_gpus"]) == ("Deployment/serve", "idle", 1, 0)
    assert Decimal(hint["saving_at_most"]) == Decimal("2.666666666664")
    page = month.client.get("/v1/report", params={"month": "2026-10", "format": "html"}).text
    assert re.search(r"25 October, 02:00\D+3\.0 GPU-hours\D+100\.0 %", page)


@needs("exports.html")
def test_the_capacity_of_each_day_is_a_line_as_wide_as_the_day_and_at_the_height_of_its_hours(month: Site) -> None:
    page = month.client.get("/v1/report", params={"month": "2026-10", "format": "html"}).text
    (path,) = re.findall(r'<path class="capacity" d="([^"]+)"', page)
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) (\S+?)(?=[ML]|$)", path)]
    steps = list(zip(points[::2], points[1::2], strict=True))
    assert len(steps) == 31
    assert all(end[0] - begin[0] == pytest.approx(974 / 31, abs=0.02) for begin, end in steps)
    assert all(end == after for (_, end), (after, _) in pairwise(steps) if end[1] == after[1])
    grid = re.findall(r'<line class="grid"[^>]* y1="(\S+)" [^>]*><text[^>]*>(\d+)</text>', page.partition(path)[0])
    bottom, *_, top = [(float(y), int(hours)) for y, hours in grid[-5:]]
    assert (bottom[1], top[1]) == (0, 24)
    hours = [top[1] * (bottom[0] - begin[1]) / (bottom[0] - top[0]) for begin, _ in steps]
    assert hours == pytest.approx([21 if day == 25 else 0 for day in range(1, 32)]), "without the three that were down"


def test_every_charge_of_the_focus_file(month: Site) -> None:
    """Each pod is a charge of the day on which it ran. nlp's rounding makes 4.72 of 4.716666666664."""
    charges = month.focus("2026-10")
    names = ("SubAccountId", "x_Account", "ResourceId", "PricingQuantity", "ContractedUnitPrice", "ChargeCategory")
    assert [(*(row[name] for name in names), Decimal(row["BilledCost"])) for row in charges] == [
        ("__idle__", "unallocated", "", "3.000000000", "2.05", "Usage", Decimal("6.15")),
        ("nlp", "busy", "prod/nlp/eval", "1.000000000", "2.05", "Usage", Decimal("2.05")),
        *(
            ("nlp", "allocated_idle", f"prod/nlp/serve{n}", "4.000000000", "0.333333333333", "Usage",
             Decimal("1.333333333332"))
            for n in range(2)
        ),
        ("vision", "busy", "prod/vision/train0", "2.000000000", "2.05", "Usage", Decimal("4.10")),
        ("vision", "busy", "prod/vision/train1", "2.000000000", "2.05", "Usage", Decimal("4.10")),
        ("vision", "allocated_idle", "prod/vision/train1", "2.000000000", "2.05", "Usage", Decimal("4.10")),
        ("vision", "allocated_unknown", "prod/vision/train0", "1.000000000", "2.05", "Usage", Decimal("2.05")),
        ("nlp", "", "", "", "", "Adjustment", Decimal("0.003333333336")),
    ]  # fmt: skip
    used = [row for row in charges if row["x_Account"]]
    assert {(row["ChargePeriodStart"], row["ChargePeriodEnd"]) for row in used} == {
        ("2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z")  # a day of 25 hours
    }
    assert {(row["BillingPeriodStart"], row["BillingPeriodEnd"]) for row in charges} == {
        ("2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z")
    }
    assert {(row["RegionId"], row["AvailabilityZone"], row["PricingCategory"]) for row in used} == {
        ("eu-1", "eu-1a", "Standard"), ("eu-2", "eu-2b", "Dynamic"),
    }  # fmt: skip
    assert {row["x_AboutMonth"] for row in charges} == {""}
    assert len({row["x_ChargeKey"] for row in charges}) == len(charges)


def test_the_assets_of_opencost_have_their_region_their_zone_and_their_cost(month: Site) -> None:
    span = {"window": "2026-10-25T00:00:00Z,2026-10-25T08:00:00Z"}
    answer = month.listener("opencost").get("/model/assets", params=span)
    assets = {one["properties"]["name"]: one for one in answer.json()["data"].values()}
    region, zone = "topology_kubernetes_io_region", "topology_kubernetes_io_zone"
    assert {name: one["labels"] for name, one in assets.items()} == {
        "n1": {region: "eu-1", zone: "eu-1a"}, "n2": {region: "eu-2", zone: "eu-2b"},
    }  # fmt: skip
    figures = {name: (one["GPUHours"], one["gpuCost"], one["gpuCount"]) for name, one in assets.items()}
    assert figures == {"n1": (11, 22.55, 11 / 8), "n2": (8, 2.666666666664, 1)}
    assert (assets["n1"]["nodeType"], assets["n1"]["preemptible"], assets["n2"]["preemptible"]) == ("big", 0, 1)


def test_a_preview_names_the_currency_of_each_side(month: Site) -> None:
    """With 1.00 and 0.50 dollars: vision 7 x 1, nlp 1 + 8 x 0.5, idle 3."""
    rows = ("id: h, model: H100, price: 1", "id: a, model: A100, price: 0.5")
    found = month.post("/v1/prices/preview", book(*rows, currency="USD", timezone=ZONE), month="2026-10")
    assert (found["currency_before"], found["currency_after"]) == ("EUR", "USD")
    assert (Decimal(found["total_before"]), Decimal(found["total_after"])) == (Decimal("25.216666666664"), 15)
    changes = {(one["team"], one["gpu_model"]): Decimal(one["after"]) for one in found["changes"]}
    assert changes == {("__idle__", H100): 3, ("nlp", A100): 4, ("nlp", H100): 1, ("vision", H100): 7}


def test_the_price_of_a_purchase_has_the_power_of_the_site(month: Site) -> None:
    """A GPU of 8760 euro lasts for the 8760 hours of a year: 1 an hour. It takes 0.5 kW, of which the site makes 0.6 at
    0.50: 0.30 an hour. vision's seven hours are 9.10."""
    bought = (
        "id: own, model: H100, amortised: {in_service: '2026-01-01', lifetime_months: 12, gpus: 1, gpu_price: 8760,"
        " kw: 0.5, pue: 1.2, kwh_price: 0.5}"
    )
    found = month.post("/v1/prices/preview", book(bought, timezone=ZONE), month="2026-10")
    after = {(one["team"], one["gpu_model"]): one["after"] for one in found["changes"]}
    assert Decimal(after["vision", H100]) == Decimal("9.10")
    assert (after["nlp", A100], found["unpriced_after_us"]) == (None, 8 * 3_600_000_000)


def test_the_invoice_line_that_names_more_takes_the_charges(month: Site) -> None:
    """One line names the model at length, the other one the model and the region. The second is more specific: all
    eleven hours of the H100 are its own, of which teams pay eight: 16.40 of 22.00. The first line matches nothing."""
    lines = [
        {"item": "long", "gpu_model": H100, "amount": "5", "currency": "EUR"},
        {"item": "placed", "gpu_model": "H100", "region": "eu-1", "amount": "22", "currency": "EUR"},
    ]
    found = month.post("/v1/reconciliation/2026-10", {"source": "invoice 7", "lines": lines})["before"]
    shown = {
        line["items"][0]: [Decimal(line[name]) for name in ("invoice", "teams", "idle", "unmatched")]
        for line in found["lines"]
    }
    assert shown == {"long": [5, 0, 0, 5], "placed": [22, Decimal("16.40"), Decimal("6.15"), Decimal("-0.55")]}
    assert Decimal(found["not_invoiced"]) == Decimal("2.666666666664")
