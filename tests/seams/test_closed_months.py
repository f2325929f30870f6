"""What is booked beside a closed month, in statements, in FOCUS files and in the lake. `tests/seams/small_month.py`
shows the month.

n2 reports only after the lake was published for the first time. Then October is closed and published: vision 14.35,
nlp 4.72, idle 6.15. Afterwards nlp gets a credit of 1.50, and a late record shows that vision's train0 used A in 06,
which was unmetered. Both are booked in November: -1.50 and 1 x 2.05."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from gputally.base.clock import VirtualClock
from tests.seams.site import H100, HOUR_MS, Cells, Site, hours_of, site
from tests.seams.small_month import (
    INVENTORY,
    NOVEMBER_MS,
    PRICES,
    ZONE,
    at,
    report_serve,
    report_train,
)

ABOUT = ("SubAccountId", "x_AboutMonth", "ChargeCategory", "ChargeClass", "x_Account", "BilledCost", "x_Reason")


def close(of: Site, month: str) -> None:
    """Close a month with all its objections."""
    kinds = [one["kind"] for one in of.get(f"/v1/periods/{month}")["objections"]]
    assert of.post(f"/v1/periods/{month}/close", {"reason": "done", "acknowledge": kinds})["status"] == "closed"


def shown(rows: list[Cells], *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, warehouse: Path) -> Iterator[Site]:
    given: dict[str, Any] = {"timezone": ZONE, "prices": PRICES, "inventory": INVENTORY}
    lake = {"warehouse": str(warehouse), "ledger": "prod", "every": 3600}
    with site(tmp_path_factory.mktemp("closed"), VirtualClock(NOVEMBER_MS), lake=lake, **given) as found:
        report_train(found)
        found.service.publish()
        report_serve(found)
        close(found, "2026-10")
        found.clock.advance(HOUR_MS)
        found.service.publish()
        credit = {"month": "2026-10", "team": "nlp", "amount": "-1.50", "reason": "slow", "approved_by": "bob"}
        found.post("/v1/adjustments", credit)
        found.send(hours_of("A", at(5), 1, "vision/train0", 1))
        found.post("/v1/corrections")
        found.clock.advance(HOUR_MS)
        found.service.publish()
        yield found


def test_a_closed_month_keeps_its_bytes_and_the_next_one_states_what_was_booked(closed: Site) -> None:
    kept = closed.client.get("/v1/statement", params={"month": "2026-10"})
    assert (kept.json()["status"], kept.json()["due"]) == (
        "closed", {"nlp": "4.72", "vision": "14.35"},
    )  # fmt: skip
    assert kept.headers["etag"] == f'"{closed.get("/v1/periods/2026-10")["hash"]}"'
    after = closed.get("/v1/statement", month="2026-11")
    assert after["due"] == {"nlp": "-1.50", "vision": "2.05"}
    booked = [
        (one["month"], one["line"]["team"], one["line"]["account"], one["amount"]) for one in after["corrections"]
    ]
    assert booked == [("2026-10", "__idle__", "unmetered", "0.00"), ("2026-10", "vision", "busy", "2.05")]
    assert [line["gpu_us"] for line in after["lines"]] == []
    # The usage is that of the records, which now know one hour more.
    assert closed.usage("team", start="2026-10-01", end="2026-11-01")["vision"]["busy"] == 5


def test_focus_charges_of_a_correction_and_of_a_credit(closed: Site) -> None:
    charges = closed.focus("2026-11")
    assert shown(charges, *ABOUT) == [
        ("vision", "2026-10", "Usage", "Correction", "busy", "2.05", "late facts"),
        ("nlp", "2026-10", "Credit", "", "", "-1.50", "slow"),
    ]
    assert shown(charges, "ChargePeriodStart", "ChargePeriodEnd", "x_GpuHoursUsed", "SkuPriceId") == [
        ("2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z", "1.000000000", ""),
        ("2026-10-31T23:00:00Z", "2026-11-30T23:00:00Z", "", ""),
    ]
    assert shown(charges, "InvoiceDetailId") == [
        ("INV-2026-11-vision-correction",), ("INV-2026-11-nlp-credit",),
    ]  # fmt: skip


def corrected(folder: Path, *days: str) -> dict[str, str]:
    """Close September and October, in each of which vision used Z for an hour, and report one more hour for each of
    these days. Returns the keys of the corrections by the month that they are about."""
    folder.mkdir()
    nodes = "nodes: [{name: n1, deleted: 2026-10-10T02:00:00Z}]\nnamespaces: [{name: vision, team: vision}]\n"
    inventory = f"schema: 1\ncluster: prod\n{nodes}"
    with site(folder, VirtualClock(NOVEMBER_MS), prices=PRICES, inventory=inventory) as found:
        begin = {"2026-09-10": 1_788_998_400_000, "2026-10-10": 1_791_590_400_000}
        for day in begin:
            found.send(hours_of("Z", begin[day], 1, "vision/train0", 1))
        for month in ("2026-09", "2026-10"):
            close(found, month)
        for day in days:
            found.send(hours_of("Z", begin[day] + HOUR_MS, 1, "vision/train0", 1))
        found.post("/v1/corrections")
        charges = found.focus("2026-11")
        assert shown(charges, "BilledCost") == [("2.05",)] * len(days)
        return {row["x_AboutMonth"]: row["x_ChargeKey"] for row in charges}


def test_the_key_of_a_correction_does_not_depend_on_other_corrections(tmp_path: Path) -> None:
    """An export of one correction, and one of it and of the same change of an earlier month."""
    one, two = corrected(tmp_path / "one", "2026-10-10"), corrected(tmp_path / "two", "2026-09-10", "2026-10-10")
    assert (len(one), len(two), len(set(two.values()))) == (1, 2, 2)
    assert two["2026-10"] == one["2026-10"]


@pytest.fixture
def tables(closed: Site, warehouse: Path) -> Iterator[dict[str, Table]]:
    """Open the lake as its readers do."""
    del closed
    opened = load_catalog("gputally", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=str(warehouse))
    names = ("focus", "statement_lines", "statements", "usage_hourly")
    yield {name: opened.load_table(("gputally_prod", name)) for name in names}
    opened.close()


def rows(table: Table, tag: str = "") -> list[dict[str, Any]]:
    """Return the rows of October in the newest version, or in the one that has the tag."""
    refs = {name: ref.snapshot_id for name, ref in table.refs().items()}
    found: list[dict[str, Any]] = table.scan(snapshot_id=refs[tag] if tag else None).to_arrow().to_pylist()
    return [row for row in found if row.get("month", "2026-10") == "2026-10"]


def due(charges: list[dict[str, Any]]) -> dict[str, Decimal]:
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for row in charges:
        sums[row["SubAccountId"]] += row["BilledCost"]
    return dict(sums)


def test_the_tag_of_a_closed_month_shows_the_month_as_it_was_closed(closed: Site, tables: dict[str, Table]) -> None:
    """24 hours, of which 5 are busy; the late hour is only in the newest version."""
    tag = f"prod-2026-10-{closed.get('/v1/periods/2026-10')['hash'][:12]}"
    hours = rows(tables["usage_hourly"], tag)
    accounts = (
        "busy_us", "allocated_idle_us", "allocated_unknown_us", "unallocated_us", "unmetered_us", "down_us",
    )  # fmt: skip
    sums = [sum(row[name] for row in hours) / 3_600_000_000 for name in accounts]
    assert sums == [5, 10, 1, 3, 2, 3]
    assert sum(row["cost"] for row in hours) == pytest.approx(Decimal("25.216666666664"), abs=Decimal("1e-9"))
    lines = rows(tables["statement_lines"], tag)
    assert [(row["team"], row["account"], row["gpu_hours"]) for row in lines] == [
        ("__idle__", "unallocated", 3), ("__idle__", "unmetered", 2), ("__idle__", "down", 3), ("nlp", "busy", 1),
        ("nlp", "allocated_idle", 8), ("vision", "busy", 4), ("vision", "allocated_idle", 2),
        ("vision", "allocated_unknown", 1),
    ]  # fmt: skip
    assert {row["gpu_model"] for row in lines if row["team"] == "vision"} == {H100}
    newest = rows(tables["usage_hourly"])
    assert [sum(row[name] for row in newest) / 3_600_000_000 for name in accounts] == [6, 10, 1, 3, 1, 3]


def test_the_charges_of_the_lake_add_up_to_the_amount_due_although_each_is_rounded(
    closed: Site, tables: dict[str, Table]
) -> None:
    """The lake has nine decimals: nlp's charges of twice 1.333333333332 and a rounding of 0.003333333336 beside 2.05
    would be 4.719999999 if each were rounded alone."""
    tag = f"prod-2026-10-{closed.get('/v1/periods/2026-10')['hash'][:12]}"
    for found in (rows(tables["focus"], tag), rows(tables["focus"])):
        assert due(found) == {"__idle__": Decimal("6.15"), "nlp": Decimal("4.72"), "vision": Decimal("14.35")}
        assert {row["SkuId"] for row in found if row["SkuId"]} == {
            "gpu-nvidia-a100-sxm4-80gb-spot", "gpu-nvidia-h100-80gb-hbm3-on-demand",
        }  # fmt: skip
    (stated,) = rows(tables["statements"])
    assert (stated["status"], stated["due"]) == ("closed", Decimal("19.07"))
