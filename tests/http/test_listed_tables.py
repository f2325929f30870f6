"""Lists of price books, corrections, credits and owners of GPUs are searched, sorted and cut by API and commands, as
lists of jobs are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from accountant.wire.listed_tables import ADJUSTMENTS, CORRECTIONS, GPUS, PRICES, ListedTable
from gputally.server.https_server import serve
from tests.http.conftest import pod_minutes
from tests.price_books import price_book_text

PATHS: Mapping[str, ListedTable] = {
    "/v1/corrections": CORRECTIONS, "/v1/adjustments": ADJUSTMENTS, "/v1/prices/versions": PRICES,
    "/v1/gpus/owners": GPUS,
}  # fmt: skip


@pytest.fixture
def client(start_service):
    """Three GPUs of three nodes, and a second price book of ada's."""
    service, client = start_service(prices=price_book_text(H100="2.00"))
    for number in (1, 2, 3):
        service.ingest.submit_batch(pod_minutes(rows=10, node=f"node-{number}")).result()
    assert client.post("/v1/prices?month=2026-11&reason=dearer", content=price_book_text(H100="3")).is_success
    return client


@pytest.mark.parametrize("path", PATHS)
def test_every_column_sorts_and_another_one_is_refused(client, path: str) -> None:
    for name in PATHS[path].columns:
        for way in ("", ":asc", ":desc"):
            assert client.get(path, params={"sort": name + way}).status_code == 200, (name, way)
    refused = client.get(path, params={"sort": "colour"})
    assert refused.status_code == 422
    assert "colour" in refused.json()["detail"]


def test_price_books_are_searched_sorted_and_cut(client) -> None:
    def reasons(**params: str) -> list[str]:
        return [one["reason"] for one in client.get("/v1/prices/versions", params=params).json()]

    assert reasons() == ["", "dearer"]
    assert reasons(sort="reason:desc") == ["dearer", ""]
    assert reasons(search="DEAR") == ["dearer"]
    assert reasons(limit="1") == [""]


def test_owners_are_sorted_over_all_pages(client) -> None:
    whole = [one["gpu_uuid"] for one in client.get("/v1/gpus/owners?sort=node:desc").json()["gpus"]]
    assert len(whole) == 3
    assert whole != sorted(whole)
    found, after = [], ""
    while after is not None:
        page = client.get("/v1/gpus/owners", params={"sort": "node:desc", "limit": 1, "after": after}).json()
        found += [one["gpu_uuid"] for one in page["gpus"]]
        after = page["next_after"]
    assert found == whole
    for order in ("sort=node&", ""):
        assert client.get(f"/v1/gpus/owners?{order}after=prod~gone").status_code == 422
    (one,) = client.get("/v1/gpus/owners?search=node-2").json()["gpus"]
    assert one["owners"][-1]["node"] == "node-2"


def test_what_is_unknown_is_last_in_both_orders() -> None:
    rows = [SimpleNamespace(cost=cost) for cost in (1, None, 3)]
    for text, costs in (("cost:asc", [1, 3, None]), ("cost:desc", [3, 1, None])):
        assert [row.cost for row in CORRECTIONS.chosen(rows, "", CORRECTIONS.orders.read(text))] == costs


@pytest.mark.parametrize("command", ["corrections", "adjustments", "prices", "gpus"])
def test_a_command_refuses_a_column_that_its_list_does_not_have(run_command, command: str) -> None:
    code, _, err = run_command(command, "--sort", "colour", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "colour" in err


def test_commands_search_sort_and_cut(client, run_command) -> None:
    with serve(client.app, "127.0.0.1", 0) as url:
        ask = run_command.at(url)
        out = ask.shown("prices", "--sort", "reason:desc", "--limit", "1", "--output", "json")
        assert [one["reason"] for one in json.loads(out)] == ["dearer"]
        out = ask.shown("gpus", "--sort", "node:desc", "--search", "node-", "--limit", "2", "--output", "json")
        assert [one["gpu_uuid"] for one in json.loads(out)] == ["GPU-node-3", "GPU-node-2"]
