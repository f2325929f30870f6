"""What looks small and costs much is refused before it costs: aliases, depth, digits, long fields; and booleans."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.errors import BadBatch
from accountant.core.settings import Settings
from accountant.runtime.ingest import MOST_REASON, decode
from agent.wire import PROBLEM, Skipped
from gputally.base.yaml_file import MAX_VALUES, FileFault, parse
from gputally.server.tokens_and_grants import sha256
from tests import fresh
from tests.price_books import price_book_text

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


PRICES = price_book_text(H100=2.5)
ROW = PRICES.splitlines(keepends=True)[-1]


@pytest.fixture
def service(tmp_path, clock):
    (tmp_path / "prices.yaml").write_text(PRICES)
    chosen = Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, prices=tmp_path / "prices.yaml")
    with Service(chosen, clock) as running:
        yield running


@pytest.fixture
def client(service):
    return TestClient(service.app, base_url="http://127.0.0.1")


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "-\n" * (MAX_VALUES + 1)], ids=["aliases", "merge keys", "values"])
def test_what_a_file_stands_for_is_counted_before_it_is_made(text):
    with pytest.raises(FileFault, match=r"policy:\d+: more than 250000 values"):
        parse(text, "policy")


@pytest.mark.parametrize("value", ["!!timestamp 2026-99-99", "!!int ''", "!!float x", "!!bool x", "!!binary ä"])
def test_a_value_that_is_not_of_its_tag_is_a_fault_with_its_line(value):
    with pytest.raises(FileFault, match=r"^policy:2: "):
        parse(f"a: 1\nb: {value}\n", "policy")


def test_an_alias_that_repeats_little_is_read():
    assert parse("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n", "policy").data == {
        "a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2},
    }  # fmt: skip


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["aliases", "merge keys"])
def test_a_preview_of_prices_does_not_expand_aliases_without_end(client, text):
    answer = client.post("/v1/prices/preview?month=2026-10", content=text)
    assert (answer.status_code, answer.json()["type"]) == (422, PROBLEM + "invalid-body")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "raw", [DEEP, b'{"cluster":' + DEEP, b'{"schema":2,"x":' + DEEP], ids=["list", "field", "head"]
)
def test_a_deep_batch_is_refused_also_with_a_bound_token(door, kit, tmp_path, raw):
    bound = f"  - {{name: bound, token_sha256: {'0' * 64}, scopes: [ingest], cluster: prod, node: n}}\n"
    tokens = kit.token_file(tmp_path / "tokens.yaml", bound.replace("0" * 64, sha256("bound")))
    answer = door(tokens=tokens).client.post("/v1/usage", content=raw, headers=kit.bearer("bound"))
    assert answer.status_code in (400, 422)
    assert answer.json()["type"] in (PROBLEM + "malformed-batch", PROBLEM + "invalid-batch")


def test_a_long_reason_is_cut_and_the_node_goes_on(kit):
    batch = kit.batch(intervals=(), skipped=(Skipped(1, "x" * 5_000_000), Skipped(2, "short")))
    found = decode(kit.encoded(batch))
    assert [len(one.reason) for one in found.skipped] == [MOST_REASON, 5]


@pytest.mark.parametrize(
    "labels",
    [{"team": "x" * 30_000_000}, {"k" * 513: "v"}, {f"l{i}": "v" for i in range(257)}],
    ids=["value", "key", "number"],
)
def test_labels_larger_than_kubernetes_has_are_refused(kit, labels):
    fact = {"seq": 1, "uid": "u", "namespace": "n", "name": "p", "node": "node-1", "observed_ms": 1, "labels": labels}
    plain = msgspec.to_builtins(kit.batch(intervals=())) | {"facts": [fact]}
    with pytest.raises(BadBatch, match=r"labels"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("amount", ["1e1000000", "-1e1000000", "1e-1000000", "1e400", "NaN", "Infinity", "1e13"])
def test_an_amount_out_of_all_proportion_is_refused(client, amount):
    adjustment = {"month": "2026-10", "team": "vision", "amount": amount, "reason": "r", "approved_by": "ann"}
    answer = client.post("/v1/adjustments", json=adjustment)
    assert answer.status_code in (409, 422), answer.text
    line = {"item": "gpu", "gpu_model": "H100", "amount": amount, "currency": "EUR"}
    answer = client.post("/v1/reconciliation/2026-10", json={"source": "file", "lines": [line]})
    assert answer.status_code == 422, answer.text


def test_a_backup_for_which_there_is_no_room_can_be_asked_for_again(client, service):
    folder = Path(service.settings.backups_to)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rmdir()
    folder.write_text("not a folder")
    answer = client.post("/v1/backups")
    assert (answer.status_code, answer.json()["type"]) == (503, PROBLEM + "ledger-unavailable")


@pytest.mark.parametrize("length", ["9" * 5_000, "1" * 20])
def test_a_length_of_many_digits_is_refused(client, length):
    answer = client.put("/v1/policy", content=b"{}", headers={"Content-Length": length})
    assert answer.status_code in (400, 413)


def test_true_is_no_number(client):
    decision = {"id": "d", "at_ms": True, "kind": "hold", "target": "kai", "subject": "s", "mode": "off",
                "reason": "r", "policy_version": "v"}  # fmt: skip
    answer = client.post("/v1/decisions", json=[decision])
    assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, "0.at_ms")
    wrong = PRICES.replace("2.5", "true")
    answer = client.post("/v1/prices/preview?month=2026-10", content=wrong)
    assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, "body:3")


def test_every_address_says_which_methods_it_takes(client, service):
    described = service.app.openapi()["paths"]
    checked = 0
    for address, path in described.items():
        taken = {method.upper() for method in path}
        concrete = address.replace("{name}", "ledger-1").replace("{month}", "2026-10")
        if "{" in concrete:
            concrete = concrete.replace("{", "").replace("}", "")
        answer = client.request("TRACE", concrete)
        assert answer.status_code == 405, (address, answer.text)
        assert taken <= set(answer.headers["allow"].split(", ")), address
        checked += 1
    assert checked > 30


def test_the_document_says_what_needs_no_token(client, service):
    described = service.app.openapi()
    open_to_all = {
        address
        for address, path in described["paths"].items()
        for operation in path.values()
        if operation.get("security", described["security"]) == []
    }
    assert open_to_all == {"/leading", "/livez", "/readyz"}
    assert described["paths"]["/metrics"]["get"]["security"] == [{}, {"bearer": []}]
