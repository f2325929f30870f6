"""Owners of GPUs and their moves, retirement, reported pods, waits and the journal: by API, command and page."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec import structs

from accountant.api.bookkeeping_models import PodReport
from accountant.billing.queue_waits import queue_waits
from accountant.ledger.protocols import QueuedPod
from agent.wire import PROBLEM, PodFacts
from gputally.base.units import MS_PER_DAY, US_PER_HOUR
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import AuthorityUnavailable
from tests.http.conftest import (
    INVENTORY,
    NOW_MS,
    bearer,
    client_of,
    encoded,
    pod_minutes,
    refused,
    scoped,
    settings_in,
    token_entry,
    token_list,
)
from tests.usage_records import running_accountant

GPU = "GPU-node-1"


def claim(first=1):
    """Let node-2 report node-1's GPU."""
    return pod_minutes(first=first, rows=1, node="node-2", intervals=claimed(first))


def claimed(first):
    return tuple(pod_minutes(first=first, rows=1, node="node-1").intervals)


def claimed_gpu(service):
    """Book ten minutes of node-1's GPU, and node-2's claim to it."""
    for one in (pod_minutes(rows=10), claim()):
        service.ingest.submit_batch(one).result()
    return service


@pytest.fixture
def service(start_service):
    service, _ = start_service(tokens=token_list(token_entry("lead", "read", ", teams: [vision]")))
    return claimed_gpu(service)


@pytest.fixture
def client(service):
    return client_of(service, follow_redirects=False)


def test_the_register_shows_owners_and_claims(client):
    answer = client.get("/v1/gpus/owners", headers=scoped("read"))
    assert answer.status_code == 200
    (one,) = answer.json()["gpus"]
    assert (one["cluster"], one["gpu_uuid"], answer.json()["next_after"]) == ("prod", GPU, None)
    assert [(owner["node"], owner["until_ms"], owner["confirmed_by"]) for owner in one["owners"]] == [
        ("node-1", None, "")
    ]
    assert [(found["node"], found["records"]) for found in one["claims"]] == [("node-2", 1)]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("node=node-2", [GPU]),
        ("node=node-7", []),
        ("moved=true", [GPU]),
        (f"gpu={GPU}", [GPU]),
        ("gpu=GPU-7", []),
        ("cluster=lab", []),
        (f"after=prod/{GPU}", []),
    ],
)
def test_the_register_is_filtered(client, asked, found):
    answer = client.get(f"/v1/gpus/owners?{asked}", headers=scoped("read"))
    assert [one["gpu_uuid"] for one in answer.json()["gpus"]] == found


def test_the_register_is_read_in_parts(service, client):
    for number in range(3, 6):
        service.ingest.submit_batch(pod_minutes(node=f"node-{number}")).result()
    seen, after = [], ""
    while after is not None:
        query = f"/v1/gpus/owners?limit=3&after={after}"
        answer = client.get(query, headers=scoped("read")).json()
        assert len(answer["gpus"]) <= 3
        seen += [one["gpu_uuid"] for one in answer["gpus"]]
        after = answer["next_after"]
    assert seen == ["GPU-node-1", "GPU-node-3", "GPU-node-4", "GPU-node-5"]


MOVE = {"node": "node-2", "gpus": [GPU], "reason": "card swapped"}


def test_a_lead_sees_neither_register_nor_page(client):
    for path in ("/v1/gpus/owners", "/node/prod/node-1"):
        assert client.get(path, headers=bearer("lead")).status_code == 403


def test_a_confirmed_move_is_an_act_and_the_new_node_reports(service, client):
    (done,) = client.post("/v1/gpus/move", json=MOVE, headers=scoped("admin")).json()
    assert [(one["node"], one["confirmed_by"]) for one in done["owners"]] == [("node-1", ""), ("node-2", "admin")]
    trail = client.get("/v1/audit", headers=scoped("admin")).json()
    act = trail["acts"][-1]
    assert (act["kind"], act["who"], act["subject"], act["reason"]) == ("moved", "admin", "prod/node-2", "card swapped")
    assert trail["broken_at"] is None
    page = client.get(f"/act/{act['number']}", headers=scoped("admin")).text
    assert "GPUs moved to another node" in page
    (row,) = claimed(20)
    later = pod_minutes(first=2, node="node-2", intervals=(structs.replace(row, seq=2),))
    receipt = service.ingest.submit_batch(later).result()
    assert (receipt.stored, receipt.quarantined) == (1, 0)


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"node": "node-7"}, 409, "no node 'node-7'"),
        ({"gpus": ["GPU-7"]}, 409, "no GPU 'GPU-7'"),
        ({"node": "node-1"}, 409, "already belongs to node 'node-1'"),
        ({"since": "yesterday"}, 422, "since: not a date"),
        ({"gpus": []}, 422, "gpus"),
        ({"reason": ""}, 422, "reason"),
    ],
)
def test_a_move_that_cannot_be_says_why(client, changed, status, said):
    answer = client.post("/v1/gpus/move", json=MOVE | changed, headers=scoped("admin"))
    assert answer.status_code == status, answer.text
    assert said in answer.text


def test_the_page_of_either_node_shows_the_claim_and_the_command(client):
    for node in ("node-1", "node-2"):
        page = client.get(f"/node/prod/{node}", headers=scoped("admin")).text
        assert "claims it: 1 quarantined" in page
        assert f"gputally accountant gpus move --cluster prod --node node-2 --gpu {GPU}" in page
    assert "waits for an admin" in client.get("/node/prod/node-1", headers=scoped("read")).text


@pytest.fixture
def without_tokens(start_service):
    return claimed_gpu(start_service()[0])


def test_the_button_of_the_page_confirms_the_move(without_tokens, clock):
    client = client_of(without_tokens, follow_redirects=False)
    page = client.get("/node/prod/node-1").text
    assert 'action="/node/prod/node-2/gpus"' in page
    assert f'name="gpu" value="{GPU}"' in page
    form = {"form_token": "", "gpu": GPU, "reason": "card swapped"}
    elsewhere = client.post("/node/prod/node-2/gpus", data=form, headers={"Sec-Fetch-Site": "cross-site"})
    assert elsewhere.status_code == 403
    assert client.post("/node/prod/node-2/gpus", data=form | {"reason": ""}).status_code == 422
    done = client.post("/node/prod/node-2/gpus", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert (done.status_code, done.headers["location"]) == (303, "/node/prod/node-2")
    (one,) = client.get("/v1/gpus/owners").json()["gpus"]
    assert [owner["node"] for owner in one["owners"]] == ["node-1", "node-2"]


def test_the_command_lists_and_moves(without_tokens, run_command):
    move = ("gpus", "move", "--gpu", GPU, "--node")
    with serve(without_tokens.app, "127.0.0.1", 0) as url:
        ask = run_command.at(url)
        assert "claims it: 1 quarantined" in ask.shown("gpus")
        code, _, err = ask(*move, "node-2")
        assert (code, "move needs --node, --gpu and --reason" in err) == (2, True)
        out = ask.shown(*move, "node-2", "--reason", "swapped", "--output", "json")
        assert [one["node"] for one in json.loads(out)[0]["owners"]] == ["node-1", "node-2"]
        assert "confirmed by" in ask.shown("gpus", "--moved")
        assert "no node 'node-7'" in ask.refused(*move, "node-7", "--reason", "swapped")


@pytest.fixture
def asked(tmp_path, clock, run_command):
    """Return a function that runs `gputally accountant …` two days after the only GPU's last record."""
    settings = settings_in(tmp_path, timezone="Europe/Berlin")
    with running_accountant(settings, clock, pod_minutes(rows=60)) as (_, url):
        clock.advance(2 * MS_PER_DAY)
        yield run_command.at(url)


def test_a_node_is_retired_and_the_capacity_ends(asked):
    out = asked.shown("retire", "--node", "node-1", "--since", "2026-11-02", "--reason", "sold")
    assert "2026-11-01 23:00:00" in out  # the first instant of the second, in Berlin
    _, out, _ = asked("usage", "--by", "gpu", "--start", "2026-11-01T00:00:00Z", "--output", "json")
    (line,) = json.loads(out)["lines"]
    accounts = line["accounts_gpu_us"]
    assert sum(accounts.values()) == 12 * US_PER_HOUR
    assert accounts["unmetered"] == 11 * US_PER_HOUR


def test_the_answer_is_for_programs_too(asked):
    _, out, _ = asked("retire", "--gpu", GPU, "--reason", "sold", "--output", "json")
    (one,) = json.loads(out)
    assert (one["cluster"], one["node"], one["gpu_uuid"]) == ("prod", "node-1", GPU)
    assert one["end_ms"] - one["last_ms"] == 2 * MS_PER_DAY


def test_gpus_are_retired_before_their_node_was_gone_and_not_from_then_on(start_service, clock):
    gone = INVENTORY + "nodes: [{name: node-1, deleted: 2026-11-01T18:00:00Z}]\n"
    _, client = start_service(inventory=gone)
    assert client.post("/v1/usage", content=encoded(pod_minutes(rows=60))).status_code == 200
    clock.advance(2 * MS_PER_DAY)
    answers = [
        client.post("/v1/gpus/retire", json={"node": "node-1", "reason": "sold", "since": f"2026-11-01T{at}:00Z"})
        for at in ("18:00", "17:59")
    ]
    assert [one.status_code for one in answers] == [409, 200], [one.text for one in answers]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "422 The body does not follow its schema: name at least one of cluster, node and gpus"),
        (("--node", "node-7"), "no GPU whose newest record is from node 'node-7'"),
        (("--node", "node-1", "--since", "yesterday"), "since: not a date: 'yesterday'"),
        (("--node", "node-1", "--since", "2027-01-01"), "is in the future"),
    ],
)
def test_what_is_refused_says_why_in_a_line(asked, words, said):
    assert said in asked.refused("retire", *words, "--reason", "sold")


def pod(uid="101", **changes):
    plain = {"namespace": "vision", "name": "train", "node": "n1", "observed_ms": 7}
    return PodFacts(seq=0, uid=uid, **(plain | changes))


def test_reported_holders_are_taken_in_and_recorded(accountant):
    running = accountant(tokens="")
    admin = scoped("admin")
    body = msgspec.json.encode(PodReport("hpc", "slurm (jobs.txt)", (pod(), pod("102"))))
    answer = running.client.post("/v1/pods", content=body, headers=admin)
    assert (answer.status_code, answer.json()) == (200, {"pods": 2})
    running.client.put("/v1/policy", json={"queues": [{"name": "a"}]}, headers=admin)
    trail = running.client.get("/v1/audit", headers=admin).json()
    assert ("admin", "pods", "hpc") in [(act["who"], act["kind"], act["subject"]) for act in trail["acts"]]
    assert trail["broken_at"] is None
    assert trail["next_after"] is None


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        (b"{", 400, "malformed-body"),
        (b"\xff", 400, "malformed-body"),
        (b"{}", 422, "invalid-body"),
        (b'{"cluster": "c", "source": "s", "pods": [], "more": 1}', 422, "invalid-body"),
        (msgspec.json.encode(PodReport("", "s", ())), 422, "invalid-body"),
        (msgspec.json.encode(PodReport("c", "s", (pod(""),))), 422, "invalid-body"),
        (msgspec.json.encode(PodReport("c", "s", (pod(observed_ms=2**60),))), 422, "invalid-body"),
    ],
)
def test_a_report_that_is_none_is_refused(accountant, body, status, slug):
    running = accountant(tokens="")
    answer = running.client.post("/v1/pods", content=body, headers=scoped("admin"))
    assert (answer.status_code, answer.json()["type"]) == (status, PROBLEM + slug)


def test_the_trail_is_read_page_by_page(accountant):
    running = accountant()
    for number in range(5):
        report = PodReport(f"c{number}", "s", ())
        running.client.post("/v1/pods", content=msgspec.json.encode(report))
    seen, after = [], 0
    while after is not None:
        page = running.client.get("/v1/audit", params={"after": after, "limit": 2}).json()
        assert page["broken_at"] is None
        seen += [act["subject"] for act in page["acts"] if act["kind"] == "pods"]
        after = page["next_after"]
    assert seen == ["c0", "c1", "c2", "c3", "c4"]
    running.ledger._acts[2] = running.ledger._acts[1]
    assert running.client.get("/v1/audit").json()["broken_at"] == 3
    assert running.client.get("/v1/audit", params={"after": 2}).json()["broken_at"] == 3


class Silent:
    """A certificate authority that does not answer."""

    async def authenticate(self, token, address=""):
        raise AuthorityUnavailable("the API server cannot be reached: timed out")


def test_where_nobody_can_vouch_the_caller_is_asked_to_come_again(accountant):
    running = accountant()
    object.__setattr__(running.app.state.deps, "authenticator", Silent())
    answer = running.client.post("/v1/usage", content=b"{}", headers=bearer("x"))
    refused(answer, "authority-unavailable")
    assert int(answer.headers["retry-after"]) >= 1


def test_waits_are_shown_of_ones_own_teams(accountant):
    running = accountant(tokens=token_entry("lead", "read", ", teams: [vision]"))
    made = NOW_MS - 60_000
    mine = pod(created_ms=made, scheduled_ms=made + 5_000, started_ms=made + 7_000)
    running.ledger.known_pods += [
        QueuedPod("prod", "vision", "a", mine),
        QueuedPod("staging", "speech", "b", pod("2", created_ms=made)),
    ]
    span = {"start": NOW_MS - 3_600_000, "by": "team"}
    (line,) = running.client.get("/v1/waits", params=span, headers=bearer("lead")).json()
    five, two = ({"pods": 1, "mean": s, "median": s, "p95": s, "longest": s} for s in (5.0, 2.0))
    note = line.pop("note")
    assert "kubernetes.inventory" in note, "nobody reads pods that are on no node"
    assert line == {"key": "vision", "pods": 1, "waiting": None, "queued": five, "starting": two}
    everything = running.client.get("/v1/waits", params=span, headers=scoped("read")).json()
    assert [(one["key"], one["waiting"]) for one in everything] == [("speech", 1), ("vision", None)]
    there = {**span, "cluster": "staging"}
    (alone,) = running.client.get("/v1/waits", params=there, headers=scoped("read")).json()
    assert alone == everything[0]
    assert alone["starting"] == {"pods": 0, "mean": None, "median": None, "p95": None, "longest": None}


def test_how_many_pods_wait_is_unknown_where_no_api_server_says_it(accountant):
    """The API, the list of jobs and its page, of one cluster and of all: zero only where the API server answers."""
    running = accountant(kubernetes={"inventory": True, "cluster": "prod"})
    made = NOW_MS - 60_000
    running.ledger.known_pods += [
        QueuedPod(cluster, "vision", cluster, pod(cluster, created_ms=made, scheduled_ms=made + 5_000))
        for cluster in ("prod", "staging")
    ]
    heard: list[int | None] = [None]
    object.__setattr__(running.app.state.deps, "pods_heard_ms", lambda: heard[0])

    def said() -> dict[str, tuple[object, bool]]:
        span = {"start": NOW_MS - 3_600_000}
        lines = running.client.get("/v1/waits", params=span).json()
        return {line["key"]: (line["waiting"], bool(line["note"])) for line in lines}

    assert said() == {"prod": (None, True), "staging": (None, True)}
    heard[0] = NOW_MS - 1_000
    assert said() == {"prod": (0, False), "staging": (None, True)}
    query = {"start": NOW_MS - 3_600_000, "state": "waiting"}
    of_prod = running.client.get("/v1/jobs", params=query | {"where.cluster": "prod"}).json()
    of_staging = running.client.get("/v1/jobs", params=query | {"where.cluster": "staging"}).json()
    assert (of_prod["count"], of_staging["count"]) == (0, None)
    assert "staging" in of_staging["note"]
    assert "staging" not in of_prod["note"]
    page = running.client.get("/jobs", params=query | {"where.cluster": "staging"}, headers={"accept": "text/html"})
    assert "Which jobs wait is not known: pods of staging" in page.text
    heard[0] = NOW_MS - 24 * 3_600_000
    assert said()["prod"] == (None, True), "a silent API server says nothing"


def test_waits_of_a_past_span_are_as_known_at_its_end_as_in_reports(accountant):
    """Of two pods that were created an hour ago, one was placed before the span and the other after it."""
    running = accountant()
    made, minute = NOW_MS - 3_600_000, 60_000
    running.ledger.known_pods += [
        QueuedPod("prod", "vision", "a", pod("1", created_ms=made, scheduled_ms=made + minute)),
        QueuedPod("prod", "vision", "a", pod("2", created_ms=made, scheduled_ms=made + 50 * minute)),
    ]
    span = {"start": made + 10 * minute, "end": made + 30 * minute}
    (line,) = running.client.get("/v1/waits", params=span).json()
    assert (line["pods"], line["waiting"], line["queued"]["longest"]) == (1, 1, 30 * 60.0)
    (row,) = queue_waits(running.ledger.known_pods, *span.values(), None, watched="")
    assert (row.pods, row.waiting, row.queued.longest_ms) == (1, 1, 30 * minute)
