"""The cost by project and by cost centre: exported labels of pods by API, command, client, page, file and assistant."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import zipfile
from contextlib import closing
from decimal import Decimal

import pytest
from mcp import Client

import gputally
from accountant.assistant.mcp_server import server
from accountant.web.list_bar import title
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import BUILT_IN
from gputally.server.https_server import serve
from tests.http.conftest import INVENTORY, NOW_MS, bearer, client_of, encoded, refused, token_entry, token_list
from tests.plugin_cases import registered
from tests.price_books import price_book_text
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder

CENTRE = "label:example.com/cost-center"
SPAN = {"start": "3h"}
PAGE = {"Accept": "text/html"}
PODS = (("train", "vision", "vision", "4711"), ("serve", "vision", "shared", ""), ("chat", "nlp", "shared", "12"))
"""Name, namespace (and team), project and cost centre of each pod; each has one GPU for an hour."""


@pytest.fixture(scope="module")
def service(start_for_module):
    tokens = token_list(token_entry("lead", "read", ", teams: [vision]"))
    service, client = start_for_module(
        prices=price_book_text(H100=2), inventory=INVENTORY, tokens=tokens,
        exported_labels=("project", "example.com/cost-center"),
    )  # fmt: skip
    begin = NOW_MS - 4 * QUARTER_MS
    facts = [
        pod_facts(name, begin, namespace=team, node="node-1",
                  labels={"project": project, **({"example.com/cost-center": centre} if centre else {})})
        for name, team, project, centre in PODS
    ]  # fmt: skip
    rows = [
        interval(begin + at * QUARTER_MS, f"GPU-{name}", pod_holder(name, team), busy_us=1)
        for name, team, _, _ in PODS
        for at in range(4)
    ]
    rows.append(interval(begin, "GPU-free"))
    sent = encoded(batch(rows, facts, cluster="prod", node="node-1"))
    assert client.post("/v1/usage", content=sent, headers=bearer("token-of-admin")).status_code == 200
    return service


def costs(client, headers, **query) -> dict[tuple[str, ...], Decimal]:
    answer = client.get("/v1/cost", params=SPAN | query, headers=headers)
    assert answer.status_code == 200, answer.text
    return {tuple(line["key"].values()): Decimal(line["cost"]) for line in answer.json()["lines"] if line["cost"]}


def test_cost_by_project_and_by_cost_centre(service):
    client, reader = client_of(service), bearer("token-of-read")
    assert costs(client, reader, by="label:project") == {("shared",): 4, ("vision",): 2, ("__idle__",): Decimal("0.5")}
    by_centre = costs(client, reader, by=CENTRE)
    assert by_centre == {("4711",): 2, ("",): 2, ("12",): 2, ("__idle__",): Decimal("0.5")}, "unknown has its own line"
    assert sum(by_centre.values()) == sum(costs(client, reader, by="team").values())
    only = {"where.label:project": "shared", "by": "team,label:project"}
    assert costs(client, reader, **only) == {("nlp", "shared"): 2, ("vision", "shared"): 2}
    several = {"where.label:project": ["shared", "vision"], f"where.{CENTRE}": ["4711", "12"], "by": "label:project"}
    assert costs(client, reader, **several) == {("shared",): 2, ("vision",): 2}
    assert costs(client, reader, **{"where.label": "project=shared", "by": "label:project"}) == {("shared",): 4}


@pytest.mark.skipif(not registered("exports.focus"), reason="no export has tags")
def test_a_focus_file_has_the_labels_as_tags(service):
    answer = client_of(service).get("/v1/report?month=2026-11&format=focus", headers=bearer("token-of-read"))
    assert answer.status_code == 200, answer.text
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    files = [archive.read(name).decode("utf-8-sig") for name in archive.namelist() if name.endswith(".csv")]
    rows = [row for text in files for row in csv.DictReader(io.StringIO(text)) if "Tags" in row]
    tags = [json.loads(row["Tags"] or "{}") for row in rows]
    found = {(tag.get("label:project", ""), tag.get(CENTRE, "")) for tag in tags}
    assert found == {("vision", "4711"), ("shared", ""), ("shared", "12"), ("", "")}


def test_a_team_sees_the_labels_of_its_own_time_only(service):
    client = client_of(service)
    assert costs(client, bearer("lead"), by="label:project") == {("shared",): 2, ("vision",): 2}
    page = client.get("/explore?start=3h&by=label:example.com/cost-center", headers=bearer("lead") | PAGE).text
    assert "4711" in page
    assert ">12<" not in page


@pytest.mark.parametrize(
    ("query", "slug", "parameter"),
    [
        ({"by": "label:nobody"}, "unsupported-question", None),
        ({"where.label:nobody": "x"}, "unsupported-question", None),
        ({"by": "label:"}, "invalid-parameter", "by.0"),
        ({"by": "label:a b"}, "invalid-parameter", "by.0"),
        ({"where.label:-": "x"}, "invalid-parameter", "where.label.0"),
        ({"where.labels": "x"}, "invalid-parameter", "where.labels"),
        ({"by": ",".join(f"label:x{number}" for number in range(7))}, "invalid-parameter", "by"),
        ({"by": "label:project,label:project"}, "invalid-parameter", "by"),
    ],
)
def test_other_labels_are_refused_by_name(service, query, slug, parameter):
    problem = refused(client_of(service).get("/v1/usage", params=query, headers=bearer("token-of-read")), slug)
    if parameter is not None:
        assert [error["at"] for error in problem["errors"]] == [parameter]


def test_the_page_and_its_files_have_the_labels(service):
    client = client_of(service)
    client.headers.update(bearer("token-of-read"))
    page = client.get(f"/explore?start=3h&by={CENTRE},team&where.label:project=shared", headers=PAGE)
    assert page.status_code == 200, page.text
    options = set(BUILT_IN) | {"label:project", CENTRE}
    assert all(f'value="{name}"' in page.text for name in options), "the form offers all dimensions"
    rows = list(csv.DictReader(io.StringIO(client.get(f"/explore.csv?start=3h&by={CENTRE}").text)))
    assert {row[CENTRE] for row in rows if row["record"] == "line"} == {"4711", "", "12", "__idle__"}
    assert client.get("/explore.parquet?start=3h&by=label:project").status_code == 200
    chosen = client.get("/explore?start=3h&by=label:project&add=label:project&value=shared", headers=PAGE)
    assert chosen.status_code == 200
    assert "where.label:project=shared" in str(chosen.url)
    assert client.get("/metrics").text.count('gputally_exported_label_values_cut_total{reason="values"} 0.0') == 1


def test_commands_clients_and_assistants_ask_by_label(service, run_command, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("token-of-read")
    monkeypatch.setenv("GPUTALLY_TOKEN_FILE", str(tmp_path / "token"))
    with serve(service.app, "127.0.0.1", 0) as url:
        run = run_command.at(url)
        answer = json.loads(run.shown("cost", "--by", "label:project", "--start", "3h", "--output", "json"))
        assert {line["key"]["label:project"]: line["cost"] for line in answer["lines"]}["shared"] == "4.000000000"
        only = run.shown("usage", "--by", "team", "--where", "label:project=shared", "--start", "3h", "--output", "csv")
        assert only.count("\n") == 3
        frame = gputally.connect(url, "token-of-read").usage(by=["label:project"], where={CENTRE: "12"}, start="3h")
        assert list(frame["label:project"]) == ["shared"]

        async def ask():
            async with Client(server(lambda *_: closing(AccountantClient(url, "token-of-read")))) as assistant:
                asked = {"by": "label:project", "start": "3h", "where": {CENTRE: "4711"}}
                return (await assistant.call_tool("cost", asked)).structured_content

        assert [row["label:project"] for row in asyncio.run(ask())["rows"]] == ["vision"]


def test_a_label_has_a_title_in_words():
    titles = [title(f"label:{name}") for name in ("project", "cost-centre", "example.com/cost-center", "app_name")]
    assert titles == ["Project", "Cost centre", "Cost center (example.com)", "App name"]
