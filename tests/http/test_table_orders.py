"""The tables of Home, Month, a team, Invoices and Reconciliation are sorted by every column, by links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.reports.figure_formatting import name
from accountant.wire.list_order import PageTables
from gputally.base.clock import VirtualClock
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import INVENTORY, client_of, settings_in
from tests.http.page_parser import figure, plain, tables
from tests.http.quarter_hours import held
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver

PAGE = {"Accept": "text/html"}
MONTH = "2026-11"
UNSORTED_HEADS = {"By team GPUs, mean of 15 min", "Files"}
"""Columns of links and of lists of names."""
WITHOUT_ORDER = {
    "GPU time by account",
    "GPUs by account",
    "By cost",
    "By cost of idle time",
    "The invoice in its parts",
}
"""Tables whose rows have one order: accounts, the parts of an invoice, and the first jobs by what the title says."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """vision held GPU-1 for 7 hours, nlp GPU-2 for 6, speech GPU-3 for 2; nobody GPU-4. The invoice has three lines."""
    folder: Path = tmp_path_factory.mktemp("orders")
    chosen = settings_in(folder, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY)
    rows = [
        *held(40, 3, "GPU-1", "vision"), *held(4, 4, "GPU-1", "vision"), *held(6, 6, "GPU-2", "nlp"),
        *held(2, 2, "GPU-3", "speech"), *held(4, 4, "GPU-4"),
    ]  # fmt: skip
    with Service(chosen, VirtualClock(NOW_MS)) as running:
        deliver(running.ledger, NOW_MS, batch(rows, cluster="prod", node="n1"))
        found = client_of(running, headers=PAGE)
        lines = [{"item": "p5", "gpu_model": "H100", "amount": "95.00", "currency": "USD"}]
        lines += [{"item": item, "amount": amount, "currency": "USD"} for item, amount in (("ip", "3"), ("log", "20"))]
        kept = found.post(f"/v1/reconciliation/{MONTH}?keep=true", json={"source": "november.csv", "lines": lines})
        assert kept.status_code == 200, kept.text
        yield found


PATHS = ("/", f"/month/{MONTH}", f"/team/vision?month={MONTH}", "/invoices", f"/invoice/{MONTH}")


def heads(head: str) -> list[str]:
    return re.findall(r"<th[^>]*>.*?</th>", head, re.DOTALL)


@pytest.mark.parametrize("path", PATHS)
def test_every_column_sorts_its_table_both_ways(client: TestClient, path: str) -> None:
    usual = tables(client.get(path).text)
    assert usual
    seen = 0
    for caption, (head, rows) in usual.items():
        if caption.startswith(tuple(WITHOUT_ORDER)):
            continue
        for at, cell in enumerate(heads(head)):
            links = [unescape(one) for one in re.findall(r'href="([^"]+)"', cell)]
            if not links:
                assert plain(cell) in UNSORTED_HEADS, (caption, cell)
                continue
            seen += 1
            answer = client.get(links[0])
            assert answer.status_code == 200, links
            assert f'id="{links[0].partition("#")[2]}"' in answer.text
            once_head, once = tables(answer.text)[caption]
            assert sorted(map(tuple, once)) == sorted(map(tuple, rows)), links
            assert [bool(re.search("aria-sort", one)) for one in heads(once_head)].index(True) == at
            back = client.get(unescape(re.findall(r'href="([^"]+)"', heads(once_head)[at])[0]))
            turned = tables(back.text)[caption][1]
            figures = [figure(row[at]) for row in once]
            known = [one for one in figures if one is not None]
            if len(known) == len(figures) and "ascending" not in heads(once_head)[at]:
                assert known == sorted(known, reverse=True), links
                assert [figure(row[at]) for row in turned] == sorted(known), links
            else:
                assert sorted(map(tuple, turned)) == sorted(map(tuple, rows)), links
    assert seen >= 3


@pytest.mark.parametrize("path", PATHS)
def test_a_column_that_there_is_not_is_refused_with_the_nearest(client: TestClient, path: str) -> None:
    answer = client.get(f"{path}{'&' if '?' in path else '?'}sort=teams.csot")
    assert answer.status_code == 422
    assert "teams.csot" in unescape(answer.text)


def test_a_team_that_is_sorted_stays_in_its_month(client: TestClient) -> None:
    text = client.get(f"/team/vision?month={MONTH}").text
    links = [unescape(one) for one in re.findall(r'href="(/team/vision\?[^"]*sort=[^"]+)"', text)]
    assert links
    assert all(f"month={MONTH}" in one for one in links)


def test_the_files_of_invoices_and_of_the_reconciliation_have_the_order_and_choice_of_the_page(
    client: TestClient,
) -> None:
    for path in ("/invoices?sort=invoices.team:desc", f"/invoice/{MONTH}?show=foreign&sort=lines.invoice:desc"):
        page = client.get(path).text
        file = unescape(re.findall(r'href="([^"]*\.csv[^"]*)"', page)[0])
        names = [line.split(",")[{"/invoices": 2}.get(path.partition("?")[0], 1)]
                 for line in client.get(file).text.splitlines()[1:]]  # fmt: skip
        shown = next(
            rows for caption, (_, rows) in tables(page).items() if caption.startswith(("Invoices of", "Lines"))
        )
        assert [plain(row[0]) for row in shown] == [name(one) for one in names if one != "total"][: len(shown)]
        assert len(shown) > 1


def test_what_is_unknown_is_last_both_ways() -> None:
    page = PageTables({"one": {"cost": lambda row: row, "name": str}, "other": {"cost": str}}, frozenset({"name"}))
    rows = [2, None, 3]
    for sort, expected in (
        ("one.cost", [3, 2, None]),
        ("one.cost:asc", [2, 3, None]),
        ("other.cost", rows),
        ("", rows),
    ):
        assert list(page.sorting(sort).rows("one", rows)) == expected
    order = page.sorting("one.cost", "/")
    assert order.sorted_by("one.cost") == "/?sort=one.cost:asc#one"
    assert order.sorted_by("one.name") == "/?sort=one.name:asc#one"
    with pytest.raises(ValueError, match=r"one\.cost"):
        page.sorting("one.csot")
