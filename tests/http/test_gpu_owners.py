"""Which node each GPU belonged to, and an admin's confirmation of a move: over HTTP, by command and on the page."""

from __future__ import annotations

import json

import pytest
from msgspec import structs
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import sha256
from tests import fresh

GPU = "GPU-node-1"


def claim(kit, first=1):
    """node-2 reports node-1's GPU."""
    return kit.batch(first=first, rows=1, node="node-2", intervals=claimed(kit, first))


def claimed(kit, first):
    return tuple(kit.batch(first=first, rows=1, node="node-1").intervals)


@pytest.fixture
def service(tmp_path, clock, kit):
    tokens = kit.token_file(
        tmp_path / "tokens.yaml",
        f"  - {{name: lead, token_sha256: {sha256('lead')}, scopes: [read], teams: [vision]}}\n",
    )
    settings = Settings(data=fresh.data(tmp_path / "data"), tokens=tokens, linger_ms=0)
    with Service(settings, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=10)).result()
        service.ingest.submit_batch(claim(kit)).result()
        yield service


@pytest.fixture
def client(service):
    return TestClient(service.app, base_url="http://127.0.0.1", follow_redirects=False)


def test_the_register_shows_owners_and_claims(client, kit):
    answer = client.get("/v1/gpus/owners", headers=kit.bearer(kit.tokens["read"]))
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
def test_the_register_is_filtered(client, kit, asked, found):
    answer = client.get(f"/v1/gpus/owners?{asked}", headers=kit.bearer(kit.tokens["read"]))
    assert [one["gpu_uuid"] for one in answer.json()["gpus"]] == found


def test_the_register_is_read_in_parts(service, client, kit):
    for number in range(3, 6):
        service.ingest.submit_batch(kit.batch(node=f"node-{number}")).result()
    seen, after = [], ""
    while after is not None:
        query = f"/v1/gpus/owners?limit=3&after={after}"
        answer = client.get(query, headers=kit.bearer(kit.tokens["read"])).json()
        assert len(answer["gpus"]) <= 3
        seen += [one["gpu_uuid"] for one in answer["gpus"]]
        after = answer["next_after"]
    assert seen == ["GPU-node-1", "GPU-node-3", "GPU-node-4", "GPU-node-5"]


MOVE = {"node": "node-2", "gpus": [GPU], "reason": "card swapped"}


@pytest.mark.parametrize("role", ["ingest", "import", "read", "progress", "policy"])
def test_only_an_admin_confirms_a_move(client, kit, role):
    assert client.post("/v1/gpus/move", json=MOVE, headers=kit.bearer(kit.tokens[role])).status_code == 403
    form = {"gpu": GPU, "reason": "card swapped"}
    assert client.post("/node/prod/node-2/gpus", data=form, headers=kit.bearer(kit.tokens[role])).status_code == 403
    owners = client.get("/v1/gpus/owners", headers=kit.bearer(kit.tokens["admin"])).json()["gpus"][0]["owners"]
    assert [one["node"] for one in owners] == ["node-1"]


def test_a_lead_sees_neither_register_nor_page(client, kit):
    for path in ("/v1/gpus/owners", "/node/prod/node-1"):
        assert client.get(path, headers=kit.bearer("lead")).status_code == 403


def test_a_confirmed_move_is_an_act_and_the_new_node_reports(service, client, kit):
    (done,) = client.post("/v1/gpus/move", json=MOVE, headers=kit.bearer(kit.tokens["admin"])).json()
    assert [(one["node"], one["confirmed_by"]) for one in done["owners"]] == [("node-1", ""), ("node-2", "admin")]
    trail = client.get("/v1/audit", headers=kit.bearer(kit.tokens["admin"])).json()
    act = trail["acts"][-1]
    assert (act["kind"], act["who"], act["subject"], act["reason"]) == ("moved", "admin", "prod/node-2", "card swapped")
    assert trail["broken_at"] is None
    page = client.get(f"/act/{act['number']}", headers=kit.bearer(kit.tokens["admin"])).text
    assert "GPUs were given to another node" in page
    (row,) = claimed(kit, 20)
    later = kit.batch(first=2, node="node-2", intervals=(structs.replace(row, seq=2),))
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
def test_a_move_that_cannot_be_says_why(client, kit, changed, status, said):
    answer = client.post("/v1/gpus/move", json=MOVE | changed, headers=kit.bearer(kit.tokens["admin"]))
    assert answer.status_code == status, answer.text
    assert said in answer.text


def test_the_page_of_either_node_shows_the_claim_and_the_command(client, kit):
    for node in ("node-1", "node-2"):
        page = client.get(f"/node/prod/{node}", headers=kit.bearer(kit.tokens["admin"])).text
        assert "claims it: 1 quarantined" in page
        assert f"gputally accountant gpus move --cluster prod --node node-2 --gpu {GPU}" in page
    assert "waits for an admin" in client.get("/node/prod/node-1", headers=kit.bearer(kit.tokens["read"])).text


@pytest.fixture
def open_house(tmp_path, clock, kit):
    """An accountant that lets everybody on this machine in."""
    settings = Settings(data=fresh.data(tmp_path / "open"), auth="off", linger_ms=0)
    with Service(settings, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=10)).result()
        service.ingest.submit_batch(claim(kit)).result()
        yield service


def test_the_button_of_the_page_confirms_the_move(open_house, clock):
    client = TestClient(open_house.app, base_url="http://127.0.0.1", follow_redirects=False)
    page = client.get("/node/prod/node-1").text
    assert 'action="/node/prod/node-2/gpus"' in page
    assert f'name="gpu" value="{GPU}"' in page
    form = {"form_token": "", "gpu": GPU, "reason": "card swapped"}
    refused = client.post("/node/prod/node-2/gpus", data=form, headers={"Sec-Fetch-Site": "cross-site"})
    assert refused.status_code == 403
    assert client.post("/node/prod/node-2/gpus", data=form | {"reason": ""}).status_code == 422
    done = client.post("/node/prod/node-2/gpus", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert (done.status_code, done.headers["location"]) == (303, "/node/prod/node-2")
    (one,) = client.get("/v1/gpus/owners").json()["gpus"]
    assert [owner["node"] for owner in one["owners"]] == ["node-1", "node-2"]


def test_the_command_lists_and_moves(open_house, run_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    with serve(open_house.app, "127.0.0.1", 0) as url:

        def ask(*arguments):
            return run_command("gpus", *arguments, "--url", url)

        code, out, err = ask()
        assert (code, err) == (0, "")
        assert "claims it: 1 quarantined" in out
        code, _, err = ask("move", "--node", "node-2", "--gpu", GPU)
        assert code == 2
        assert "move needs --node, --gpu and --reason" in err
        code, out, err = ask("move", "--node", "node-2", "--gpu", GPU, "--reason", "swapped", "--output", "json")
        assert (code, err) == (0, "")
        assert [one["node"] for one in json.loads(out)[0]["owners"]] == ["node-1", "node-2"]
        code, out, err = ask("--moved")
        assert "confirmed by" in out
        code, _, err = ask("move", "--node", "node-7", "--gpu", GPU, "--reason", "swapped")
        assert (code, err.count("\n")) == (1, 1)
        assert "no node 'node-7'" in err
