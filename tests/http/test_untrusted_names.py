"""Names of pods, teams, jobs, users and queues are only text in every output form; each accepted name is drawn and
exported. (`tests.ledger.test_batch_admission` archives and restores them.)"""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote
from zoneinfo import ZoneInfo

import msgspec
import pytest
import structlog
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from accountant.api.dependencies import Deps
from accountant.channels.protocol import Message
from accountant.composition import Service
from accountant.core.periods import Month
from accountant.exports.protocol import exports
from accountant.ledger.protocols import JobKey
from accountant.notifications.messages import compose
from accountant.notifications.triggers import EndedPeriod, ReportDue
from accountant.reports import report_builder
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from gputally.base.docs_address import DOCS
from gputally.base.untrusted_text import for_page
from gputally.server.logs_and_metrics import configure
from tests.http.conftest import MINUTE_MS, NOW_MS, client_of, encoded, settings_in
from tests.http.page_parser import read, steering
from tests.http.untrusted_names import MARK, NAMES
from tests.hypothesis_examples import examples
from tests.plugin_cases import needs, plugin_cases, registered
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

UTC = ZoneInfo("UTC")
PRICES = price_book_text(H100="2.40")
HELD_MS = NOW_MS - 60 * MINUTE_MS


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A GPU for each name, held by a pod with a job, a user, a namespace, a team and a queue of that name; and a
    decision about it. A further pod of each waits."""
    listed = [{"name": f"ns-{n}", "team": name} for n, name in enumerate(NAMES)]
    queues = [{"name": f"queue {name}", "team": name, "deserved": 1} for name in NAMES]
    budgets = [{"name": f"budget {name}", "team": name, "limit": 1} for name in NAMES]
    settings = settings_in(
        tmp_path_factory.mktemp("names"), prices=PRICES,
        inventory=json.dumps({"schema": 1, "cluster": "prod", "namespaces": listed}),
        policy=json.dumps({"schema": 1, "queues": queues, "budgets": budgets}),
    )  # fmt: skip
    with Service(settings, VirtualClock(NOW_MS)) as running:
        client = client_of(running)
        facts, rows, decisions = [], [], []
        for n, name in enumerate(NAMES):
            common = {"namespace": f"ns-{n}", "node": "node-1", "queue_ref": f"policy:queue {name}",
                      "workload": f"Job/{name}", "labels": {"gputally.dev/user": name}, "observed_ms": HELD_MS,
                      "requests": {"nvidia.com/gpu": "1"}, "created_ms": HELD_MS}  # fmt: skip
            facts += [
                PodFacts(seq=0, uid=f"u{n}", name=name, scheduled_ms=HELD_MS, started_ms=HELD_MS, **common),
                PodFacts(seq=0, uid=f"w{n}", name=f"waits {name}", **common),
            ]
            holder = pod_holder(name, f"ns-{n}", f"u{n}", name)
            rows.append(interval(HELD_MS, f"GPU-{n}", holder, span_ms=30 * MINUTE_MS, busy_us=MINUTE_MS * 1000))
            decisions.append(
                {"id": f"d/{n}", "at_ms": NOW_MS - 1, "kind": "preemption", "target": name,
                 "subject": f"Job/ns-{n}/{name}", "mode": "enforce", "reason": name, "policy_version": name,
                 "inputs": {"claimant": name, "queue": name, "team": name, "pods": [name], "detail": name, name: name}}
            )  # fmt: skip
        found = batch(rows, facts, cluster="prod", node="node-1")
        assert client.post("/v1/usage", content=encoded(found)).status_code == 200
        assert client.post("/v1/decisions", json=decisions).json()["recorded"] == len(NAMES)
        invoice = {"source": NAMES[0], "lines": [{"item": name, "amount": "1", "currency": "EUR"} for name in NAMES]}
        assert client.post("/v1/reconciliation/2026-11?keep=true", json=invoice).status_code == 200
        yield running


@pytest.fixture(scope="module")
def client(service):
    return client_of(service, headers={"Accept": "text/html"})


ODD = {"script", "img", "iframe", "object", "embed", "base"}
LINES = "/month/2026-11/lines"
PAGES = (
    "/", "/month/2026-11", f"/team/{quote(NAMES[0], safe='')}?month=2026-11", "/jobs?start=2026-11-01",
    *(f"/job/{quote(JobKey('prod', f'ns-{n}', f'Job/{NAMES[n]}').id)}" for n in (0, 1, 13)),
    "/node/prod/node-1?days=1", *(f"{LINES}?by={by}" for by in ("team", "job", "pod", "user")),
    f"{LINES}?team={quote(NAMES[1], safe='')}", "/decisions", f"/decisions?subject={quote(f'Job/ns-0/{NAMES[0]}')}",
    *(f"/decisions/{NOW_MS - 1}/d/{n}" for n in (0, 1, 8)), "/invoice/2026-11", "/act/1",
)  # fmt: skip


def assert_no_script_may_run(answer):
    """Check that no script could run, whatever the content."""
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


@pytest.mark.parametrize("path", PAGES)
def test_a_page_shows_names_as_text(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    found = read(answer.text)
    assert steering(answer.text) == set()
    assert not set(found.tags) & ODD
    assert_no_script_may_run(answer)
    for _, name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "action"):
            assert (value or "").startswith(("/", "#", "?", DOCS)), value
            assert not (value or "").startswith("//")
    assert "49" not in " ".join(text for text in found.texts if f"{MARK}5" in text).replace(NAMES[5], "")
    said = " ".join(" ".join(found.texts).split())
    if path != "/act/1":
        assert MARK in said
        assert any(" ".join(for_page(name).split()) in said for name in NAMES)


@needs("exports.html")
def test_a_report_as_a_page_may_run_no_script(client):
    assert_no_script_may_run(client.get("/v1/report?month=2026-11&format=html"))


@pytest.mark.parametrize(
    "path",
    [*(["/v1/report?month=2026-11&format=csv"] if registered("exports.csv") else []),
     *(f"{LINES}.csv?by={by}" for by in ("team", "job", "pod", "user")),
     "/invoice/2026-11/lines.csv"],
)  # fmt: skip
def test_a_spreadsheet_executes_no_cell_of_a_csv(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert steering(answer.text.replace("\r\n", "\n")) == set()
    cells = [cell for row in csv.reader(io.StringIO(answer.text, newline="")) for cell in row]
    named = [cell for cell in cells if MARK in cell]
    assert len(named) >= len(NAMES)
    for cell in cells:
        assert not re.match(r"[=+@\t\r]|-(?![\d.])", cell), cell


@pytest.fixture(scope="module")
def letter(service):
    """The month's report as an e-mail."""
    deps: Deps = service.app.state.deps
    start, end = Month(2026, 11).span(UTC)[0], NOW_MS
    report = report_builder.report(deps.ledger, deps.books, start, end, "UTC")
    due = ReportDue("finance", EndedPeriod("2026-11", start, end, Month(2026, 11)), NAMES[0], ())
    return compose(due, NOW_MS, lambda _: report, "https://pages.example", files=False)


def _about(letter, name):
    facts = (*letter.facts, (name, name))
    return Message(letter.key, 1, f"Team {name} held 3", f"about {name}", facts, letter.link)


@pytest.mark.parametrize("chat", plugin_cases("channels").values(), ids=plugin_cases("channels"))
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_reads_none_of_its_signs_in_a_name(letter, name, chat):
    chat.assert_reads_no_sign_in_a_name(chat.body(_about(letter, name)), MARK)


def test_names_in_metrics_are_label_values_and_nothing_else(client):
    text = client.get("/metrics").text
    assert "\r" not in text
    found = {
        value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in sample.labels.values()
        if MARK in value
    }
    assert {name for name in NAMES if any(name in value for value in found)} == set(NAMES)


@pytest.mark.parametrize(
    "path", ["/v1/usage?by=team,pod,user", "/v1/cost?by=job", "/v1/jobs", "/v1/statement?month=2026-11"]
)
def test_names_in_json_come_back_as_they_were(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    said = json.dumps(answer.json(), ensure_ascii=False)
    assert all(json.dumps(name, ensure_ascii=False)[1:-1] in said for name in NAMES)


@pytest.mark.parametrize("field", ["name", "namespace", "uid", "node", "workload", "queue_ref"])
def test_a_field_of_great_length_is_refused(client, field):
    common = {"uid": "long", "namespace": "ns", "name": "p", "node": "node-1", "observed_ms": HELD_MS}
    told = {"cluster": "prod", "source": "sacct", "pods": [{"seq": 1, **common, field: "x" * 100_000}]}
    assert client.post("/v1/pods", json=told).status_code == 422


@pytest.mark.parametrize("name", NAMES)
def test_a_log_line_is_one_line_of_json(capsys, name):
    configure("info")
    said = f"{name}\n{name}\x1b[2J\u202e\r"
    try:
        structlog.get_logger("accountant.test").warning("refused", name=said)
    finally:
        structlog.reset_defaults()
    written = capsys.readouterr()
    (line,) = (written.out + written.err).splitlines()
    assert json.loads(line)["name"] == said
    assert steering(line) == set()


Start = Callable[..., tuple[Service, TestClient]]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=24)


def posted(name: str, label: str) -> dict[str, object]:
    span = 30 * MINUTE_MS
    fact = pod_facts(
        name, HELD_MS, namespace=name, node="node-1", uid="u", queue_ref=f"policy:{name}", workload=f"Job/{name}",
        labels={"gputally.dev/user": label}, created_ms=HELD_MS,
    )  # fmt: skip
    row = interval(HELD_MS, name, pod_holder(name, name, "u", name), span_ms=span, gpu_model=name, busy_us=span * 500)
    plain: dict[str, object] = msgspec.to_builtins(batch([row], [fact], cluster="prod", node="node-1"))
    return plain


def everywhere(node: str) -> list[str]:
    cuts = ("team", "queue", "job", "pod", "user", "node", "gpu", "day")
    return [
        "/", "/month/2026-11", "/jobs?start=2026-11-01", "/nodes", f"/node/prod/{quote(node, safe='')}?days=1",
        "/metrics",
        "/decisions", "/coverage", "/prices", "/proposals", "/explore?by=team,job,pod",
        "/explore.csv?by=queue,user,node", "/explore.parquet?by=gpu_model,gpu,namespace&across=namespace",
        "/v1/gpus", "/v1/jobs?start=2026-11-01",
        *(f"/month/2026-11/lines?by={by}" for by in cuts), *(f"/month/2026-11/lines.csv?by={by}" for by in cuts),
        *(f"/v1/report?month=2026-11&format={form}" for form in exports()),
    ]  # fmt: skip


@given(node=TEXT, name=TEXT, label=TEXT)
@settings(max_examples=examples(2, 12), phases=(Phase.explicit, Phase.generate))
def test_whatever_is_accepted_is_drawn_and_exported(node: str, name: str, label: str) -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        Service(settings_in(Path(place), prices=PRICES), VirtualClock(NOW_MS)) as service,
    ):
        client = client_of(service, raise_server_exceptions=False)
        sent = json.dumps(posted(name, label) | {"node": node}).encode()
        answer = client.post("/v1/usage", content=sent)
        if answer.status_code != 200:
            assert answer.status_code == 422
            node = "node-1"
            assert client.post("/v1/usage", content=json.dumps(posted(name, label)).encode()).status_code == 200
        for path in everywhere(node):
            assert client.get(path).status_code < 500, path


@pytest.mark.parametrize("field", ["epoch", "node", "cluster", "boot_id"])
def test_a_nul_byte_is_refused_and_says_where(start_service: Start, field: str) -> None:
    _, client = start_service()
    sent = posted("a", "b") | {field: "0193\0'; DROP TABLE received; --"}
    answer = client.post("/v1/usage", content=json.dumps(sent).encode())
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("invalid-batch")
    assert f"$.{field}" in answer.json()["detail"]


@pytest.mark.parametrize("address", ["/v1/usage?by=team&where.team=a%00b", "/v1/jobs/a%00", "/team/%00", "/?%00"])
def test_an_address_with_a_nul_byte_is_refused(start_service: Start, address: str) -> None:
    _, client = start_service()
    answer = client.get(address)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (422, "invalid-parameter")


def test_a_body_with_a_control_character_is_refused_with_its_place(start_service: Start) -> None:
    _, client = start_service()
    new = {"month": "2026-11", "team": "a\x1b[2J", "amount": "1.00", "reason": "why", "approved_by": "cfo"}
    answer = client.post("/v1/adjustments", content=json.dumps(new).encode())
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == "team"


def test_a_month_of_which_everything_was_set_aside_has_pages(start_service: Start) -> None:
    _, client = start_service(prices=PRICES)
    assert client.post("/v1/usage", content=json.dumps(posted("a\0b", "c")).encode()).status_code == 200
    for path in everywhere("node-1"):
        assert client.get(path).status_code < 500, path
