"""What an importer's token may do: ask how far it came, send imported rows, note a chunk. Nothing else."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from accountant.history_import.import_run import epoch, first_seq
from gputally.base.units import MS_PER_DAY
from gputally.server.tokens_and_grants import sha256
from tests.http.conftest import NOW_MS, batch, encoded

DAY_MS = NOW_MS // MS_PER_DAY * MS_PER_DAY
EPOCH = epoch("prometheus", DAY_MS)
CHUNK = {
    "cluster": "prod", "source": "prometheus", "origin": "https://prometheus:9090", "epoch": EPOCH,
    "start_ms": DAY_MS, "end_ms": NOW_MS, "nodes": 1, "gpus": 8, "sent_us": 3_600_000_000, "held_us": 5,
    "unknown_us": 0, "metered_us": 7, "missing_us": 0,
}  # fmt: skip


def imported(**changes):
    one = batch(first=first_seq(DAY_MS), node="old-1", epoch=EPOCH, oldest_seq=first_seq(DAY_MS))
    rows = tuple(
        structs.replace(row, method="imported", start_ms=DAY_MS, end_ms=DAY_MS + 60_000) for row in one.intervals
    )
    return structs.replace(one, **({"intervals": rows} | changes))


@pytest.fixture
def importer(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    opened.client.headers.update(kit.bearer(kit.tokens["import"]))
    return opened


def test_rows_are_booked_and_the_mark_is_told(importer):
    answer = importer.client.post("/v1/imports/usage", content=encoded(imported()))
    assert answer.status_code == 200, answer.text
    assert answer.json()["durable_seq"] == first_seq(DAY_MS)
    told = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}).json()
    assert told["marks"] == [{"node": "old-1", "epoch": EPOCH, "durable_seq": first_seq(DAY_MS)}]
    assert told["metered"] == [{"node": "node-1", "start_ms": NOW_MS - 1, "end_ms": NOW_MS}]
    other = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "slurm"}).json()
    assert other["marks"] == other["done"] == []


@pytest.mark.parametrize(
    "changes",
    [{"epoch": "0192-epoch"}, {"intervals": batch(first=first_seq(DAY_MS)).intervals}],
    ids=["epoch", "method"],
)
def test_what_is_not_imported_is_refused(importer, changes):
    answer = importer.client.post("/v1/imports/usage", content=encoded(imported(**changes)))
    assert answer.status_code == 422
    assert importer.ledger.rows == {}


def test_a_chunk_is_noted_once_and_is_part_of_the_trail(importer):
    assert importer.client.post("/v1/imports", json=CHUNK).json() == {"new": True}
    assert importer.client.post("/v1/imports", json=CHUNK).json() == {"new": False}
    (act,) = importer.ledger.acts("imported")
    assert (act.subject, act.who) == ("prometheus/prod", "import")
    assert act.reason == "1.0 GPU-hours of 1 nodes from https://prometheus:9090"
    told = importer.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}).json()
    assert told["done"] == [{"epoch": EPOCH, "start_ms": DAY_MS, "end_ms": NOW_MS}]


@pytest.mark.parametrize(
    ("field", "value"), [("epoch", "0192-epoch"), ("epoch", epoch("slurm", 0)), ("end_ms", DAY_MS), ("sent_us", -1)]
)
def test_a_note_that_cannot_be_true_is_refused(importer, field, value):
    assert importer.client.post("/v1/imports", json=CHUNK | {field: value}).status_code == 422
    assert importer.ledger.acts("imported") == []


def test_a_token_of_one_cluster_imports_into_that_alone(door, kit, tmp_path):
    entry = f"  - {{name: lab, token_sha256: {sha256('lab')}, scopes: [import], cluster: lab}}\n"
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml", entry))
    opened.client.headers.update(kit.bearer("lab"))
    for answer in (
        opened.client.post("/v1/imports/usage", content=encoded(imported())),
        opened.client.post("/v1/imports", json=CHUNK),
        opened.client.get("/v1/imports", params={"cluster": "prod", "source": "prometheus"}),
    ):
        assert answer.json()["type"].endswith("wrong-origin")
    assert opened.client.post("/v1/imports/usage", content=encoded(imported(cluster="lab"))).status_code == 200


def test_a_body_that_is_no_batch_is_refused(importer):
    assert importer.client.post("/v1/imports/usage", content=b"{").status_code == 400
    assert importer.client.post("/v1/imports/usage", content=msgspec.json.encode({"schema": 9})).status_code == 415
