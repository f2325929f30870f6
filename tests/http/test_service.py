"""The service on a real ledger: what it stores and refuses, and the effect of a changed file."""

from __future__ import annotations

import gzip
import http.client
import json
import re
from functools import cached_property
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import pytest

from accountant.cli.serving import EXIT_FAILED, run
from accountant.cli.token_file import with_entry
from accountant.composition import Service
from accountant.core.errors import InventoryError, LedgerFailed, LedgerLocked
from accountant.core.periods import Month
from accountant.core.settings import Settings
from accountant.reports.figure_formatting import records_begin, span_of
from agent.wire import PROBLEM
from gputally.base.errors import CannotStart
from gputally.base.units import MS_PER_DAY
from gputally.base.yaml_file import FileFault
from gputally.server.https_server import listen, serve
from gputally.server.tokens_and_grants import new_token
from tests import empty_ledger
from tests.http.conftest import MINUTE_MS, NOW_MS, client_of, encoded, pod_minutes, settings_in
from tests.http.page_parser import read, tables
from tests.moments import acks, present
from tests.price_books import price_book_text


def content(service):
    """Return everything in the ledger that an answer can show."""
    span = (NOW_MS - 86_400_000, NOW_MS)
    return (
        present(service.ledger).usage(span, ("gpu", "pod", "namespace")).lines(),
        acks(service.ledger, "node-1", "prod"),
        present(service.ledger).quarantined(),
        present(service.ledger).imbalance(*span).total_us,
    )


def test_a_batch_is_booked_priced_and_balanced(start_service):
    _, client = start_service(prices=price_book_text(H100="2.4"))
    ack = client.post("/v1/usage", content=encoded(pod_minutes(rows=30))).json()
    assert (ack["durable_seq"], ack["checkpointed_seq"]) == (30, 0)
    cost = client.get("/v1/cost?by=namespace,job&start=2026-11-01&where.namespace=vision").json()
    assert [line["key"]["namespace"] for line in cost["lines"]] == ["vision"]
    assert float(cost["total"]) == 1.2
    usage = client.get(f"/v1/usage?by=namespace&start={NOW_MS - 60 * MINUTE_MS}&end={NOW_MS - 30 * MINUTE_MS}").json()
    assert usage["coverage"] == 1.0
    assert usage["lines"][0]["accounts_gpu_us"]["busy"] == 30 * MINUTE_MS * 500
    assert client.get("/v1/check").json()["imbalance_gpu_us"] == 0
    assert client.get("/readyz").status_code == 200
    window = client.get("/v1/windows?size=1h").json()
    assert window["coverage"] == pytest.approx(0.5)


def test_limits_and_caches_of_all_threads_are_there_before_the_first_request(tmp_path, clock):
    """Two threads that made one of them at one time would each have their own."""
    with Service(settings_in(tmp_path), clock) as service:
        deps = service.app.state.deps
        made_at_use = {name for name, value in vars(type(deps)).items() if isinstance(value, cached_property)}
        assert made_at_use - vars(deps).keys() <= {"backups"}


def test_what_is_refused_leaves_no_trace_in_the_ledger(start_service):
    service, client = start_service()
    client.post("/v1/usage", content=encoded(pod_minutes(rows=3)))
    before = content(service)
    bodies = {
        "not json": (b"{", 400),
        "not a batch": (b"[]", 422),
        "of a wrong type": (b'{"cluster": 1}', 422),
        "of another schema": (encoded(pod_minutes(first=4, schema=2)), 415),
        "after a gap": (encoded(pod_minutes(first=90)), 409),
        "numbered with holes": (encoded(pod_minutes(first=4, rows=2, first_seq=3)), 422),
    }
    for name, (raw, status) in bodies.items():
        answer = client.post("/v1/usage", content=gzip.compress(raw), headers={"Content-Encoding": "gzip"})
        assert answer.status_code == status, (name, answer.text)
        assert answer.json()["type"].startswith(PROBLEM)
        assert content(service) == before, name
    assert client.post("/v1/usage", content=encoded(pod_minutes(first=4))).json()["durable_seq"] == 4


def test_a_node_whose_clock_runs_ahead_recovers_by_itself(start_service, clock):
    service, client = start_service()

    def rows(first, shift_ms):
        plain = json.loads(encoded(pod_minutes(first=first, rows=2)))
        for row in plain["intervals"]:
            row["start_ms"] += shift_ms
            row["end_ms"] += shift_ms
        return client.post("/v1/usage", json=plain)

    assert rows(1, 0).json()["durable_seq"] == 2
    skewed = rows(3, 86_400_000)
    assert skewed.status_code == 200
    assert skewed.json()["durable_seq"] == 4  # the mark advances: nothing wedges
    assert {row["reason"] for row in client.get("/v1/quarantine").json()} == {"future-dated"}
    assert rows(5, 0).json()["durable_seq"] == 6
    begin = NOW_MS - 60 * MINUTE_MS
    (line,) = present(service.ledger).usage((begin, begin + 6 * MINUTE_MS), ()).lines()
    assert line.accounts_gpu_us.allocated == 4 * MINUTE_MS * 1000
    assert line.accounts_gpu_us.unmetered == 2 * MINUTE_MS * 1000
    metrics = client.get("/metrics").text
    assert 'gputally_ingest_rows_total{result="quarantined"} 2.0' in metrics
    assert "gputally_ledger_imbalance_seconds 0.0" in metrics


def test_every_month_there_is_anything_of_is_listed(start_service, clock):
    _, client = start_service()

    def months():
        return [(one["month"], one["status"]) for one in client.get("/v1/periods").json()]

    assert months() == [("2026-11", "open")]
    client.post("/v1/usage", content=encoded(pod_minutes(rows=2)))
    clock.advance(90 * 86_400_000)
    assert months() == [("2026-11", "due"), ("2026-12", "due"), ("2027-01", "open")]


def test_what_a_node_lost_is_listed(start_service):
    service, client = start_service()
    client.post("/v1/usage", content=encoded(pod_minutes(rows=2)))
    ack = client.post("/v1/usage", content=encoded(pod_minutes(first=6, rows=2, oldest_seq=6))).json()
    assert ack["durable_seq"] == 7
    (hole,) = present(service.ledger).holes()
    assert (hole.cluster, hole.node, hole.first_seq, hole.last_seq) == ("prod", "node-1", 3, 5)
    assert "3 to 5" in client.get("/coverage").text


UTC = ZoneInfo("UTC")


def test_coverage_says_from_when_on_anything_is_known_as_the_month_and_the_invoices_do(start_service, clock):
    service, client = start_service()
    client.post("/v1/usage", content=encoded(pod_minutes(rows=2)))
    first_ms, _ = service.ledger.status().extent
    clock.advance(31 * MS_PER_DAY)
    november, december = Month.parse("2026-11").span(UTC)
    unknown = records_begin(november, december, first_ms, UTC)
    assert unknown
    for page in ("/month/2026-11", "/invoices", "/coverage?month=2026-11"):
        assert unknown in client.get(page).text, page
    shown = " ".join(read(client.get("/coverage?month=2026-11").text).texts)
    assert re.findall(r"% metered, (.*? to 1 Dec 2026 00:00)", shown) == [span_of(first_ms, december, UTC)]
    later = " ".join(read(client.get("/coverage?month=2026-12").text).texts)
    assert "records begin" not in later
    assert re.search(r"% metered, 1 Dec 2026 00:00 to ", later)


def test_coverage_is_that_of_the_month_that_is_asked_for(start_service, clock):
    def metered(address):
        _, ((*_, cell),) = tables(client.get(address).text)["Nodes by unmetered time"]
        return cell

    _, client = start_service()
    for first in (1, 4):
        client.post("/v1/usage", content=encoded(pod_minutes(first=first, rows=2)))
    now = metered("/coverage")
    assert metered("/coverage?month=2026-11") == now
    clock.advance(31 * MS_PER_DAY)
    assert metered("/coverage?month=2026-11") != metered("/coverage?month=2026-12") == "0.0 %"
    assert "/coverage?month=2026-12" in client.get("/coverage?month=2026-11").text
    assert "No node has reported" in client.get("/coverage?month=2026-10").text
    for wrong in ("month=x", "month=2027-12", "span=7d"):
        assert client.get(f"/coverage?{wrong}").status_code in (404, 422), wrong


def test_what_was_acknowledged_is_there_after_a_restart(start_service, tmp_path, clock):
    with Service(settings_in(tmp_path), clock) as service:
        client_of(service).post("/v1/usage", content=encoded(pod_minutes(rows=9)))
        before = content(service)[0]
    service, client = start_service()
    assert content(service)[0] == before
    again = client.post("/v1/usage", content=encoded(pod_minutes(rows=9))).json()
    assert (again["durable_seq"], again["checkpointed_seq"]) == (9, 9)


def test_a_checkpoint_is_made_when_it_is_due(start_service, clock):
    service, client = start_service(checkpoint_seconds=60)
    client.post("/v1/usage", content=encoded(pod_minutes(rows=2)))
    service.maintain()
    assert acks(service.ledger, "node-1", "prod")["0192-epoch"].checkpointed_seq == 0
    clock.advance(60_000)
    service.maintain()
    assert acks(service.ledger, "node-1", "prod")["0192-epoch"].checkpointed_seq == 2


def test_a_changed_price_book_is_taken_and_a_broken_one_is_not(start_service, tmp_path, clock, logs):
    path = tmp_path / "prices.yaml"
    service, _ = start_service(prices=price_book_text(H100="2"))
    first = service.book().version
    path.write_text(price_book_text(H100="-3"))
    clock.advance(30_000)
    service.maintain()
    assert service.book().version == first
    (event,) = [entry for entry in logs if entry["event"] == "file_refused_running_version_stays"]
    assert event["faults"][-1] == f"{path}:4: rows.0.price: the number must not be negative: -3"
    path.write_text(price_book_text(H100="3.50"))
    clock.advance(30_000)
    service.maintain()
    assert service.book().version != first


def test_a_credit_that_is_sent_again_is_booked_once(tmp_path, clock):
    with Service(settings_in(tmp_path, prices=price_book_text(H100="2")), clock) as service:
        client = client_of(service)
        credit = {"month": "2026-11", "team": "__unassigned__", "amount": "-5", "reason": "r", "approved_by": "cfo"}
        others = [credit | {"reason": "another"}, credit | {"amount": "-6"}, credit | {"approved_by": "ceo"}]
        for body in (credit, *others):
            assert client.post("/v1/adjustments", json=body).status_code == 200
            clock.advance(1_000)
        for body in (credit, credit | {"amount": "-5.00"}, *others):
            answer = client.post("/v1/adjustments", json=body)
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "books-refuse")
        assert len(client.get("/v1/adjustments").json()) == 4


def test_a_price_book_in_another_currency_than_what_is_booked_is_refused(tmp_path, clock, logs):
    settings = settings_in(tmp_path, prices=price_book_text(H100="2"))
    path = settings.prices
    with Service(settings, clock) as service:
        client = client_of(service)
        credit = {
            "month": "2026-11",
            "team": "__unassigned__",
            "amount": "-5",
            "reason": "a gift",
            "approved_by": "cfo",
        }
        assert client.post("/v1/adjustments", json=credit).status_code == 200
        path.write_text(price_book_text(H100="2").replace("EUR", "USD"))
        clock.advance(30_000)
        service.maintain()
        assert service.book().currency == "EUR"
        (event,) = [entry for entry in logs if entry["event"] == "file_refused_running_version_stays"]
        assert event["faults"][0].startswith(f"{path}:2: currency: USD is not the currency of this ledger")
        answer = client.post("/v1/prices?month=2026-11&reason=x", content=path.read_bytes())
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "books-refuse")
    with pytest.raises(FileFault, match=r"prices\.yaml:2: currency: USD is not the currency"):
        Service(settings, clock)
    path.write_text(price_book_text(H100="3"))
    with Service(settings, clock) as service:
        assert service.book().rows[0].price == 3


def test_a_changed_inventory_and_policy_are_taken(start_service, tmp_path, clock):
    inventory, policy = tmp_path / "inventory.yaml", tmp_path / "policy.yaml"
    service, client = start_service(
        inventory="schema: 1\ncluster: prod\nnodes: [{name: node-1, pool: spare}]\n", policy="queues: [{name: a}]\n"
    )
    client.post("/v1/usage", content=encoded(pod_minutes(rows=30)))

    def pools():
        return {
            line.key["pool"] for line in present(service.ledger).usage((NOW_MS - 3_600_000, NOW_MS), ("pool",)).lines()
        }

    assert pools() == {"spare"}
    inventory.write_text("schema: 1\ncluster: prod\nnodes: [{name: node-1, pool: training, since: 2026-01-01}]\n")
    policy.write_text("queues: [{name: a}, {name: b}]\n")
    clock.advance(30_000)
    service.maintain()
    assert pools() == {"training"}
    assert [len(one["policy"]["queues"]) for one in client.get("/v1/policy/versions").json()] == [1, 2]
    inventory.write_text("nodes: [")
    clock.advance(30_000)
    service.maintain()
    assert pools() == {"training"}


def test_what_cannot_be_used_is_one_clear_line_and_leaves_nothing_open(tmp_path, clock):
    def faults(kind, **settings):
        with pytest.raises(kind) as caught:
            Service(Settings(**({"data": tmp_path / "data", "auth": "off"} | settings)), clock)
        (first, *_) = str(caught.value).splitlines()
        return first

    broken = tmp_path / "broken.yaml"
    broken.write_text("schema: 1\ncurrency: EUR\nrows: []\n")
    (tmp_path / "file").write_text("")
    assert faults(FileFault, prices=broken).startswith(f"{broken}:3: rows: ")
    assert faults(FileFault, policy=broken).startswith(f"{broken}:")
    assert faults(InventoryError, inventory=broken).startswith(f"{broken}:")
    assert (
        faults(FileFault, auth="tokens", tokens=tmp_path / "none") == f"{tmp_path / 'none'}: No such file or directory"
    )
    assert faults(CannotStart, data=tmp_path / "file") == f"data folder {tmp_path / 'file'}: File exists"
    assert (
        faults(CannotStart, data=tmp_path / "file" / "data")
        == f"data folder {tmp_path / 'file' / 'data'}: Not a directory"
    )
    with Service(Settings(data=empty_ledger.data(tmp_path / "data"), auth="off"), clock):
        assert "only one may" in faults(LedgerLocked)
    Service(Settings(data=empty_ledger.data(tmp_path / "data"), auth="off"), clock).close()


def test_a_port_in_use_is_one_clear_line(start_service):
    service, _ = start_service()
    with serve(service.app, "127.0.0.1", 0) as url:
        port = urlsplit(url).port
        with pytest.raises(CannotStart, match=rf"^cannot listen on 127\.0\.0\.1:{port}: Address already in use$"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()
    with pytest.raises(CannotStart, match=r"^cannot listen on no\.such\.host\.invalid:1: "):
        listen("no.such.host.invalid", 1)


def test_over_a_socket_a_body_that_is_too_large_gets_its_answer_and_the_connection_lives_on(start_service):
    service, _ = start_service(limits={"body_bytes": 64 * 1024})
    with serve(service.app, "127.0.0.1", 0) as url:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=20)
        connection.request("POST", "/v1/usage", b"x" * (8 * 1024 * 1024))
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["type"]) == (413, PROBLEM + "too-large")
        connection.request("POST", "/v1/usage", encoded(pod_minutes()))
        assert connection.getresponse().status == 200
        connection.close()


def test_a_failed_ledger_ends_the_process_with_its_own_code(tmp_path, clock, capsys):
    settings = Settings(data=empty_ledger.data(tmp_path / "data"), auth="off", listen="127.0.0.1:0")
    with Service(settings, clock) as service:
        service.fail(LedgerFailed("the database is no longer usable: disk full"))
        assert run(service) == EXIT_FAILED == 70
    assert capsys.readouterr().err == "gputally accountant: the database is no longer usable: disk full\n"


COMMITTED = (
    price_book_text(H100="2")
    + "  - {id: rate, model: H100, commitment: c1, price: 1, per: gpu-hour, valid_from: 2020-01-01, as_of: 2020-01-01, "
    + "basis: gpu-only, source: x}\n"
    + "commitments: [{id: c1, gpus: 1, owner: OWNER}]\n"
)
OF_VISION = "schema: 1\nqueues: [{name: vision, team: vision}]\n"
OF_BOTH = "schema: 1\nqueues: [{name: vision, team: vision}, {name: speech, team: speech}]\n"


def refused_files(logs):
    """The faults of every file that was refused so far."""
    events = [entry for entry in logs if entry["event"] == "file_refused_running_version_stays"]
    return [fault for event in events for fault in event["faults"]]


def test_a_mistyped_team_of_a_budget_a_token_or_a_caller_is_warned_of_and_stays_in_force(tmp_path, clock, logs):
    """A namespace may name the team later, so nothing is refused."""
    budgets = "budgets: [{name: b, team: TEAM, limit: 9}, {name: c, team: vision, limit: 9}]\n"
    callers = tmp_path / "callers.yaml"
    _, limited = new_token("ada", ("read",), teams=("visio", "vision"))
    token, unlimited = new_token("ops", ("policy",))
    tokens = with_entry(with_entry("tokens: []\n", limited), unlimited)
    callers.write_text("schema: 1\ngrants: [{users: [ann], scopes: [read], teams: [visiom]}]\n")
    settings = settings_in(
        tmp_path, policy=OF_VISION + budgets.replace("TEAM", "visoin"), tokens=tokens, callers=callers
    )

    def warned():
        return [
            (entry["what"], entry["teams"], ["did you mean 'vision'?" in reason for reason in entry["reasons"]])
            for entry in logs
            if entry["event"] == "unknown_teams_named"
        ]

    with Service(settings, clock) as service:
        assert warned() == [
            ("budgets of the policy", ["visoin"], [True]),
            ("tokens and callers", ["visio", "visiom"], [True, True]),
        ]
        assert refused_files(logs) == []
        settings.policy.write_text(OF_VISION + budgets.replace("TEAM", "vison"))
        for _ in range(2):
            clock.advance(30_000)
            service.maintain()
        assert warned()[2:] == [("budgets of the policy", ["vison"], [True])]
        logs.clear()
        queues, of_budget = [{"name": "vision", "team": "vision"}], {"name": "b", "team": "vlsion", "limit": 9}
        changed = {"schema": 1, "queues": queues, "budgets": [of_budget]}
        ops = client_of(service, headers={"Authorization": f"Bearer {token}"})
        assert ops.put("/v1/policy", json=changed).status_code == 200
        assert warned() == [("budgets of the policy", ["vlsion"], [True])]


@pytest.mark.parametrize("restart", [False, True])
def test_a_commitment_of_a_team_that_nothing_names_waits_until_something_does(tmp_path, clock, logs, restart):
    settings = settings_in(tmp_path, prices=price_book_text(H100="2"), policy=OF_VISION)
    with Service(settings, clock) as service:
        first = service.book().version
        settings.prices.write_text(COMMITTED.replace("OWNER", "speech"))
        if not restart:
            clock.advance(30_000)
            service.maintain()
            assert service.book().version == first
    with Service(settings, clock) as service:
        assert service.book().version == first
        assert all(fault.startswith(f"{settings.prices}:") for fault in refused_files(logs))
        assert "commitments.0.owner: no team 'speech' is known; known are 'vision'" in refused_files(logs)[-1]
        settings.policy.write_text(OF_BOTH)
        for _ in range(2):
            clock.advance(30_000)
            service.maintain()
        assert [one.owner for one in service.book().commitments] == ["speech"]


@pytest.mark.parametrize("restart", [False, True])
def test_deliveries_about_a_team_that_nothing_names_wait_and_the_others_go_on(tmp_path, clock, logs, channels, restart):
    order = "{team: TEAM, to: [x], when: ended}"
    start = f"schema: 1\ndestinations: {{x: {{shelf: {{path: {tmp_path}}}}}}}\n"
    before = f"{start}reports: [{order.replace('TEAM', 'vision')}]\n"
    after = (
        f"{start}reports: [{order.replace('TEAM', 'vision')}, {order.replace('TEAM', 'speech')}]\n"
        "notices: [{about: [budgets], teams: [vision, speech], to: [x]}]\n"
    )
    settings = settings_in(tmp_path, policy=OF_VISION, deliveries=before)

    def due(service):
        return {message.key for message in service.deliveries.due()}

    with Service(settings, clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=9)).result()
        assert refused_files(logs) == []
        settings.deliveries.write_text(after)
        if not restart:
            clock.advance(30_000)
            service.maintain()
            assert len(refused_files(logs)) == 2
            logs.clear()
        clock.advance(45 * MS_PER_DAY)
        of_vision = due(service)
    with Service(settings, clock) as service:
        found = refused_files(logs)
        assert due(service) == of_vision != set(), "about vision only"
        settings.policy.write_text(OF_BOTH)
        for _ in range(2):
            clock.advance(30_000)
            service.maintain()
        assert due(service) > of_vision
    assert [fault.rpartition(": no team ")[0] for fault in found] == [
        f"{settings.deliveries}:3: reports.1.team", f"{settings.deliveries}:4: notices.0.teams.1",
    ]  # fmt: skip
    assert "; known are 'vision'" in found[0]
