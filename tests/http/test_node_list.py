"""The list of nodes with its bar: a view, its files and the API have the same nodes, order and figures."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from accountant.__main__ import main
from accountant.composition import Service
from accountant.ledger.protocols import Facts, GpuErrorCount, GpuHealth, NodeFacts
from accountant.reports.node_list import errors_of
from accountant.web.node_list_page import COLUMNS
from accountant.wire.option_types import NodeOrder
from agent.wire import AgentReport, GpuError, GpuReport
from gputally.base.clock import VirtualClock
from gputally.base.units import US_PER_HOUR
from gputally.server.https_server import serve
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import INVENTORY, bearer, client_of, settings_in, token_entry
from tests.http.page_parser import read, rows_after
from tests.http.quarter_hours import HOUR_MS, held
from tests.usage_records import batch, deliver

PAGE = {"Accept": "text/html"}
AT_MS = NOW_MS - HOUR_MS
LOST = GpuReport(
    "GPU-1", (GpuError("xid 79", 2, AT_MS, AT_MS), GpuError("ecc uncorrected", 1)), ("drain_node: xid 79",)
)
OLD = AgentReport(version="0.0.9", gpus=(LOST, GpuReport("GPU-3", unread={"xid": "no permission"})))


@pytest.fixture
def client(tmp_path: Path, clock: VirtualClock) -> Iterator[TestClient]:
    """n1 has two GPUs, of which vision holds one for ten hours; nlp held that of n2, which is silent since five hours,
    for four; n3 is in the inventory alone."""
    lead = token_entry("lead", "read", ", teams: [vision]")
    chosen = settings_in(tmp_path, inventory=INVENTORY, tokens="tokens:\n" + token_entry("all", "admin") + lead)
    with Service(chosen, clock) as running:
        deliver(
            running.ledger, NOW_MS,
            batch([*held(10, 10, "GPU-1", "vision"), *held(10, 10, "GPU-3")], cluster="prod", node="n1", agent=OLD),
            batch(held(9, 4, "GPU-2", "nlp"), cluster="prod", node="n2"),
        )  # fmt: skip
        facts = (NodeFacts("prod", "n3", pool="spare"), NodeFacts("prod", "n1", pool="main"))
        running.ledger.observe(Facts(nodes=facts), NOW_MS)
        client = client_of(running)
        client.headers.update(bearer("all"))
        yield client


def nodes(client: TestClient, query: str) -> list[str]:
    answer = client.get(f"/v1/nodes?{query}")
    assert answer.status_code == 200, answer.text
    return [line["node"] for line in answer.json()["lines"]]


def listed(client: TestClient, query: str) -> list[str]:
    """The nodes of the page, in their order."""
    answer = client.get(f"/nodes?{query}", headers=PAGE)
    assert answer.status_code == 200, answer.text
    return re.findall(r'href="/node/prod/([^"]+)"', answer.text.partition("Nodes and GPUs that were down")[0])


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("start=12h", ["n1", "n2", "n3"]),
        ("start=12h&where.team=vision", ["n1"]),
        ("start=12h&where.gpu=GPU-2", ["n2"]),
        ("start=12h&where.pool=spare", ["n3"]),
        ("start=12h&search=N2", ["n2"]),
        ("start=12h&sort=held:asc", ["n3", "n2", "n1"]),
    ],
)
def test_the_page_the_files_and_the_api_have_the_nodes_of_a_view(
    client: TestClient, query: str, found: list[str]
) -> None:
    assert nodes(client, query) == listed(client, query) == found
    rows = list(csv.DictReader(io.StringIO(client.get(f"/nodes.csv?{query}").text)))
    table = pq.read_table(io.BytesIO(client.get(f"/nodes.parquet?{query}").content))
    assert [row["node"] for row in rows] == table["node"].to_pylist() == found
    lines = client.get(f"/v1/nodes?{query}").json()["lines"]
    account = ("busy", "allocated_idle", "allocated_unknown")
    hours = [Decimal(sum(line["accounts_gpu_us"][name] for name in account)) / US_PER_HOUR for line in lines]
    assert [Decimal(row["allocated_gpu_hours"]) for row in rows] == table["allocated_gpu_hours"].to_pylist() == hours


def test_a_filter_counts_the_time_that_it_selects_alone(client: TestClient) -> None:
    (line,) = client.get("/v1/nodes?start=12h&where.team=vision").json()["lines"]
    assert sum(line["accounts_gpu_us"].values()) == 10 * US_PER_HOUR
    whole = {line["node"]: line for line in client.get("/v1/nodes?start=12h").json()["lines"]}
    assert whole["n1"]["accounts_gpu_us"]["unallocated"] == 10 * US_PER_HOUR
    assert [whole[node]["silent"] for node in ("n1", "n2", "n3")] == [False, True, False]
    assert (whole["n3"]["newest_ms"], whole["n3"]["gpus"], whole["n3"]["pool"]) == (None, 0, "spare")
    total = client.get("/v1/usage?start=12h&by=cluster").json()["lines"][0]["accounts_gpu_us"]
    assert total == {name: sum(line["accounts_gpu_us"][name] for line in whole.values()) for name in total}


def test_each_node_has_the_version_of_its_agent_and_an_older_one_is_named_with_what_to_do(client: TestClient) -> None:
    lines = {line["node"]: line for line in client.get("/v1/nodes?start=12h").json()["lines"]}
    told = {node: (line["agent_version"], line["agent_older"]) for node, line in lines.items()}
    assert told == {"n1": ("0.0.9", True), "n2": (None, False), "n3": (None, False)}
    rows = csv.DictReader(io.StringIO(client.get("/nodes.csv?start=12h&columns=agent").text))
    assert {row["node"]: row["agent_version"] for row in rows} == {"n1": "0.0.9", "n2": "", "n3": ""}
    for view, before in (("start=12h&columns=silent", "agent "), ("start=12h&columns=silent,agent", "")):
        page = read(client.get(f"/nodes?{view}", headers=PAGE).text)
        for node, said in (("n1", "0.0.9"), ("n2", "unknown"), ("n3", "unknown")):
            assert f"{before}{said}" in " ".join(rows_after(page, "Nodes, their GPUs", node))
    for node, said in (("n1", "older than the accountant"), ("n2", "version unknown")):
        assert said in client.get(f"/node/prod/{node}", headers=PAGE).text
    assert "the agent is older than the accountant on n1" in read(client.get("/", headers=PAGE).text).texts


def test_errors_of_gpus_are_shown_with_when_how_many_and_what_to_do(client: TestClient) -> None:
    lines = {line["node"]: line for line in client.get("/v1/nodes?start=12h").json()["lines"]}
    assert lines["n2"]["gpu_errors"] is None
    assert lines["n1"]["gpu_errors"] == [
        {"gpu": "GPU-1", "kind": "xid 79", "count": 2, "since_ms": AT_MS, "last_ms": AT_MS},
        {"gpu": "GPU-1", "kind": "ecc uncorrected", "count": 1, "since_ms": None, "last_ms": None},
    ]
    assert lines["n1"]["gpu_errors_unread"] == ["xid: no permission"]
    assert lines["n1"]["gpu_needs"] == [{"gpu": "GPU-1", "action": "drain_node", "cause": "xid 79"}]
    rows = csv.DictReader(io.StringIO(client.get("/nodes.csv?start=12h").text))
    told = {row["node"]: row["gpu_errors"] for row in rows}
    assert told == {"n1": "GPU-1 xid 79: 2; GPU-1 ecc uncorrected: 1", "n2": "", "n3": ""}
    assert "unknown" in rows_after(
        read(client.get("/nodes?start=12h&columns=errors", headers=PAGE).text), "Nodes, their GPUs", "n2"
    )
    edge = f"start={AT_MS - 7_200_000}&end={AT_MS - 3_600_000}"
    early = {line["node"]: line["gpu_errors"] for line in client.get(f"/v1/nodes?{edge}").json()["lines"]}
    assert [error["kind"] for error in early["n1"]] == ["ecc uncorrected"], (
        "when it was is unknown; the other was later"
    )
    page = client.get("/node/prod/n1", headers=PAGE).text
    assert rows_after(read(page), "Errors of GPUs", "GPU-1")[:2] == ["xid 79", "2"]
    assert "xid: no permission" in page
    life = client.get("/group?by=gpu&value=GPU-1&month=2026-11", headers=PAGE).text
    assert rows_after(read(life), "Errors of GPUs", "GPU-1")[:2] == ["xid 79", "2"]
    assert "no agent reports them" in client.get("/node/prod/n2", headers=PAGE).text
    assert any("a GPU needs a reset" in text for text in read(client.get("/", headers=PAGE).text).texts)
    lead = client.get("/group?by=gpu&value=GPU-1&month=2026-11", headers={**PAGE, **bearer("lead")}).text
    assert "xid 79" not in lead


@pytest.mark.parametrize(
    ("unread", "known", "unknown"),
    [
        ({"slowdowns": "not read"}, {"XID", "uncorrected memory error"}, {"slowdown"}),
        ({"xid": "no permission", "slowdowns": "not read"}, {"uncorrected memory error"}, {"XID", "slowdown"}),
        ({"xid": "a", "slowdowns": "b", "ecc uncorrected": "c"}, set(), {"unknown"}),
    ],
)
def test_the_kinds_of_errors_that_are_read_are_known_where_another_one_is_not(
    tmp_path: Path, clock: VirtualClock, unread: dict[str, str], known: set[str], unknown: set[str]
) -> None:
    with Service(settings_in(tmp_path, inventory=INVENTORY), clock) as running:
        agent = AgentReport(version="0.0.9", gpus=(GpuReport("GPU-1", unread=unread),))
        deliver(running.ledger, NOW_MS, batch(held(10, 10, "GPU-1", "vision"), cluster="prod", node="n1", agent=agent))
        client = client_of(running, headers=PAGE)
        told = rows_after(
            read(client.get("/nodes?start=12h&columns=errors").text), "Nodes, their GPUs", "n1"
        )[:2]  # fmt: skip
        texts = read(client.get("/node/prod/n1").text).texts
    said = next(text for text in told if "known" in text)
    assert {name for name in ("XID", "uncorrected memory error", "slowdown") if f"no {name}" in said} == known
    assert all(name in said.partition(";")[2] or name == said for name in unknown)
    assert any(said in text for text in texts)


def test_an_error_before_the_span_is_on_the_page_of_the_node_and_the_list_says_which_span_has_none(
    tmp_path: Path, clock: VirtualClock
) -> None:
    with Service(settings_in(tmp_path, inventory=INVENTORY), clock) as running:
        error = GpuError("xid 79", 1, AT_MS, AT_MS)
        agent = AgentReport(version="0.0.9", gpus=(GpuReport("GPU-1", errors=(error,)),))
        deliver(running.ledger, NOW_MS, batch(held(10, 10, "GPU-1", "vision"), cluster="prod", node="n1", agent=agent))
        client = client_of(running, headers=PAGE)
        listed = read(client.get(f"/nodes?start={AT_MS + 1}&columns=errors").text)
        assert any("span" in text for text in rows_after(listed, "Nodes, their GPUs", "n1")[:2])
        assert rows_after(read(client.get("/node/prod/n1").text), "Errors of GPUs", "GPU-1")[:2] == ["xid 79", "1"]


def test_the_list_is_sorted_by_every_column_both_ways(client: TestClient) -> None:
    for order in get_args(NodeOrder):
        query = f"start=12h&sort={order}"
        ways = {way: nodes(client, f"{query}:{way}") for way in ("asc", "desc")}
        one = nodes(client, query)
        assert one in ways.values()
        other = next(found for found in (ways["desc"], ways["asc"]) if ways["asc"] == ways["desc"] or found != one)
        assert sorted(one) == sorted(other) == ["n1", "n2", "n3"]
        if order in ("silent", "utilisation"):
            assert one[-1] == other[-1] == "n3", "what is unknown is last either way"
        columns = f"&columns={order}" if order in COLUMNS else ""
        assert listed(client, query + columns) == one
        page = client.get(f"/nodes?{query}{columns}", headers=PAGE).text
        assert page.count("aria-sort=") == 1
        following = re.search(r'aria-sort="[a-z]+"><a href="[^"?]*[?]([^"]+)"', page)
        assert following is not None
        assert listed(client, unescape(following[1])) == other


def test_a_view_has_the_columns_that_are_chosen_on_the_page_and_in_its_files(client: TestClient) -> None:
    query = "start=12h&columns=gpus,silent,capacity"
    page = client.get(f"/nodes?{query}", headers=PAGE).text
    heads = re.findall(r"<th[^>]*><a href=\"/nodes[^\"]*\">([^<]*)", page)
    assert [head.rstrip(" ↓↑") for head in heads] == ["Node", "GPUs", "Newest record", "Capacity"]
    table = pq.read_table(io.BytesIO(client.get(f"/nodes.parquet?{query}").content))
    assert table.column_names == ["cluster", "node", "down_now", "gpus", "newest_record", "total_gpu_hours"]
    every = ",".join(COLUMNS)
    for path in ("/nodes", "/nodes.csv", "/nodes.parquet"):
        assert client.get(f"{path}?columns={every}", headers=PAGE).status_code == 200


def test_the_pages_of_an_answer_are_the_list(client: TestClient) -> None:
    shown, page = [], None
    while not shown or page:
        answer = client.get("/v1/nodes", params={"start": "12h", "limit": 1, **({"page": page} if page else {})}).json()
        assert answer["count"] == 3
        shown += [line["node"] for line in answer["lines"]]
        page = answer["next_page"]
    assert shown == ["n1", "n2", "n3"]


def test_the_form_leads_to_the_address_of_the_view(client: TestClient) -> None:
    sent = client.get(
        "/nodes?start=12h&end=&timezone=&search=&add=team&value=nlp&columns=pool", headers=PAGE, follow_redirects=False
    )
    assert (sent.status_code, sent.headers["location"]) == (303, "/nodes?start=12h&where.team=nlp&columns=pool")


@pytest.mark.parametrize("query", ["columns=x", "sort=x", "days=7", "where.x=1", "start=nonsense", "by=team", "page=0"])
def test_a_view_that_there_is_not_is_refused(client: TestClient, query: str) -> None:
    for path in ("/nodes", "/nodes.csv", "/nodes.parquet"):
        assert client.get(f"{path}?{query}").status_code == 422, path


def test_who_sees_some_teams_alone_does_not_see_nodes(client: TestClient) -> None:
    for path in ("/nodes", "/nodes.csv", "/nodes.parquet", "/v1/nodes"):
        assert client.get(path, headers=bearer("lead")).status_code == 403, path


def test_a_list_is_compared_with_the_span_before(client: TestClient) -> None:
    """Of the last five hours n1 was held for five and n2 unmetered; of the five before n2 was held for four."""
    view = "start=5h&compare=true&columns=held,utilisation"
    answer = client.get(f"/v1/nodes?{view.partition('&columns')[0]}").json()
    account = ("busy", "allocated_idle", "allocated_unknown")
    held_us = {
        line["node"]: [sum(line[of][name] for name in account) for of in ("accounts_gpu_us", "before_gpu_us")]
        for line in answer["lines"]
    }
    assert held_us == {"n1": [5 * US_PER_HOUR] * 2, "n2": [0, 4 * US_PER_HOUR], "n3": [0, 0]}
    assert sum(answer["before"]["total_gpu_us"][name] for name in account) == 9 * US_PER_HOUR
    assert answer["before"]["end_ms"] == answer["start_ms"]
    assert "before" not in client.get("/v1/nodes?start=5h").json()
    rows = {row["node"]: row for row in csv.DictReader(io.StringIO(client.get(f"/nodes.csv?{view}").text))}
    assert [Decimal(rows["n2"][f"allocated_gpu_hours{which}"]) for which in ("", "_before")] == [0, 4]
    table = pq.read_table(io.BytesIO(client.get(f"/nodes.parquet?{view}").content))
    assert table["allocated_gpu_hours_before"].to_pylist() == [5, 4, 0]
    page = client.get(f"/nodes?{view}", headers=PAGE).text
    assert "before 4.0, −100.0 %" in page[page.index('href="/node/prod/n2"') :].partition("</tr>")[0]
    assert "before 9.0, −44.4 %" in page[page.index("<tfoot>") :]


def test_the_command_has_the_nodes_columns_and_file_of_a_view(
    client: TestClient, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(next(iter(bearer("all").values())).removeprefix("Bearer "))

    def run(*options: str, code: int = 0) -> bytes:
        with serve(client.app, "127.0.0.1", 0) as url:
            assert (
                main(
                    [
                        "nodes",
                        "--url",
                        url,
                        "--token-file",
                        str(token),
                        *(() if "--start" in options else ("--start", "12h")),
                        *options,
                    ]
                )
                == code
            )
        out, err = capsysbinary.readouterr()
        return out or err

    query = "start=12h&where.team=vision&where.team=nlp&search=prod&sort=held:asc&columns=gpus,held"
    options = ("--where", "team=vision", "--where", "team=nlp", "--search", "prod", "--sort", "held:asc")
    chosen = ("--columns", "gpus,held")
    rows = list(csv.DictReader(io.StringIO(run(*options, *chosen, "--output", "csv").decode())))
    assert [(row["node"], row["held_gpu_hours"]) for row in rows] == [("n2", "4.000000000"), ("n1", "10.000000000")]
    assert [row["node"] for row in rows] == nodes(client, query.partition("&columns")[0])
    assert set(rows[0]) == {"cluster", "node", "down_now", "silent", "gpus", "held_gpu_hours"}
    assert run(*options, *chosen, "--output", "parquet") == client.get(f"/nodes.parquet?{query}").content
    whole = json.loads(run("--output", "json"))
    assert whole["total_gpu_us"] == {
        name: sum(line["accounts_gpu_us"][name] for line in whole["lines"]) for name in whole["total_gpu_us"]
    }
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--limit", "2").decode()
    assert max(map(len, shown.splitlines())) <= 80
    assert "1 more" in shown
    assert re.search(r"^ *n2 \(silent\) .*\b4\.0\b", shown, re.MULTILINE)
    assert re.search(r"^ *3 nodes .*\b14\.0\b", shown, re.MULTILINE), "the total is that of all nodes"
    compared = run("--compare", "--start", "5h").decode()
    assert max(map(len, compared.splitlines())) <= 80
    assert re.search(r"n2 \(silent\).* 4\.0 → 0\.0, −100\.0 %", compared), compared
    assert b"--sort" in run("--sort", "hold", code=2)
    assert b"--columns" in run("--columns", "hold", code=2)


@pytest.mark.parametrize(
    ("since_ms", "last_ms", "shown"),
    [
        (0, 10, True), (25, 15, True), (25, 30, False), (0, 9, False), (5, 30, True), (None, None, True),
        (25, None, False), (None, 30, True),
    ],
)  # fmt: skip
def test_errors_are_left_out_only_if_none_is_known_to_be_in_the_span(
    since_ms: int | None, last_ms: int | None, shown: bool
) -> None:
    """Errors are counted since an instant, and the newest may be from before it."""
    told = GpuHealth("gpu-0", (GpuErrorCount("xid 79", 1, since_ms, last_ms, 1, since_ms),))
    assert bool(errors_of([told], (10, 20))) is shown
