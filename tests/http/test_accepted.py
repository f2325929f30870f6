"""Whatever is accepted from a node is drawn on every page, exported in every format, archived and restored."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import get_args
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Archive, Settings
from accountant.reports.output_formats import Form
from gputally.base.clock import VirtualClock
from tests.effort import examples
from tests.http.conftest import MINUTE_MS, NOW_MS
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=24)
PRICES = price_book_text(H100="2.40")
HELD_MS = NOW_MS - 60 * MINUTE_MS


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
        "/", "/month/2026-11", "/jobs?month=2026-11", "/nodes", f"/node/prod/{quote(node, safe='')}?days=1", "/metrics",
        "/decisions", "/coverage", "/prices", "/proposals", "/v1/gpus", "/v1/jobs?month=2026-11",
        *(f"/month/2026-11/lines?by={by}" for by in cuts), *(f"/month/2026-11/lines.csv?by={by}" for by in cuts),
        *(f"/v1/report?month=2026-11&format={form}" for form in get_args(Form)),
    ]  # fmt: skip


def client_of(service: Service) -> TestClient:
    return TestClient(service.app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@given(node=TEXT, name=TEXT, label=TEXT)
@settings(max_examples=examples(2, 60), deadline=None, phases=(Phase.explicit, Phase.generate))
def test_whatever_is_accepted_is_drawn_exported_archived_and_restored(node: str, name: str, label: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "prices.yaml").write_text(PRICES)
        given = Settings(
            data=folder / "data", auth="off", linger_ms=0, archive=Archive(to=folder / "archive", every=3600),
            prices=folder / "prices.yaml",
        )  # fmt: skip
        with Service(given, VirtualClock(NOW_MS)) as service:
            client = client_of(service)
            sent = json.dumps(posted(name, label) | {"node": node}).encode()
            answer = client.post("/v1/usage", content=sent)
            if answer.status_code != 200:
                assert answer.status_code == 422
                node = "node-1"
                assert client.post("/v1/usage", content=json.dumps(posted(name, label)).encode()).status_code == 200
            for path in everywhere(node):
                assert client.get(path).status_code < 500, path
            service.ledger.archive(NOW_MS)
            truth = client.get("/v1/usage?by=namespace,pod&start=2026-11-01&end=2026-12-01").json()
        restored = given.model_copy(update={"data": folder / "other"})
        with Service(restored, VirtualClock(NOW_MS)) as service:
            again = client_of(service).get("/v1/usage?by=namespace,pod&start=2026-11-01&end=2026-12-01").json()
        assert again == truth


@pytest.mark.parametrize("field", ["epoch", "node", "cluster", "boot_id"])
def test_a_nul_byte_is_refused_at_the_door_and_says_where(tmp_path: Path, field: str) -> None:
    with Service(Settings(data=tmp_path, auth="off", linger_ms=0), VirtualClock(NOW_MS)) as service:
        sent = posted("a", "b") | {field: "0193\0'; DROP TABLE received; --"}
        answer = client_of(service).post("/v1/usage", content=json.dumps(sent).encode())
        assert answer.status_code == 422
        assert answer.json()["type"].endswith("invalid-batch")
        assert f"$.{field}" in answer.json()["detail"]


def test_a_body_with_a_control_character_is_refused_with_its_place(tmp_path: Path) -> None:
    with Service(Settings(data=tmp_path, auth="off", linger_ms=0), VirtualClock(NOW_MS)) as service:
        client = client_of(service)
        new = {"month": "2026-11", "team": "a\x1b[2J", "amount": "1.00", "reason": "why", "approved_by": "cfo"}
        answer = client.post("/v1/adjustments", content=json.dumps(new).encode())
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["at"] == "team"


def test_a_month_of_which_everything_was_set_aside_has_pages(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    given = Settings(data=tmp_path / "data", auth="off", linger_ms=0, prices=tmp_path / "prices.yaml")
    with Service(given, VirtualClock(NOW_MS)) as service:
        client = client_of(service)
        assert client.post("/v1/usage", content=json.dumps(posted("a\0b", "c")).encode()).status_code == 200
        for path in everywhere("node-1"):
            assert client.get(path).status_code < 500, path
