"""What pages and commands say of ledgers that say little: none, a minute, one that stopped, one without prices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.server.https_server import serve
from tests.http.conftest import MINUTE_MS, NOW_MS, batch, encoded
from tests.http.little_known import POLICY, PRICES, STOPPED_MS, words

PATHS = ("/", "/month", "/jobs", "/jobs?state=waiting", "/nodes", "/decisions", "/prices", "/coverage", "/invoice")
Make = Callable[..., Service]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    (tmp_path / "prices.yaml").write_text(PRICES)
    (tmp_path / "policy.yaml").write_text(POLICY)
    settings = Settings(
        data=tmp_path / "data",
        auth="off",
        linger_ms=0,
        prices=tmp_path / "prices.yaml",
        policy=tmp_path / "policy.yaml",
    )
    with Service(settings, clock) as running:
        yield running


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(service.app, base_url="http://127.0.0.1")


@pytest.fixture
def asked(
    service: Service, run_command: Callable[..., tuple[int, str, str]]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A command put to it: its exit code and what it printed."""
    with serve(service.app, "127.0.0.1", 0) as url:
        yield lambda *words: run_command(*words, "--url", url)


def metered(client: TestClient, rows: int = 30) -> None:
    assert client.post("/v1/usage", content=encoded(batch(rows=rows))).status_code == 200


def standing(requested: float, allocated: float) -> dict[str, float]:
    return {"requested": requested, "allocated": allocated}


def record(at_ms: int) -> dict[str, Any]:
    """A cycle of the controller in which llm asks for more than it holds."""
    window = {"start_ms": 0, "end_ms": at_ms, "usage": {"llm": 1, "vision": 1}, "capacity": 2, "unit": "gpu_us"}
    inputs = {"window": window, "standings": {"llm": standing(664, 16), "vision": standing(8, 8)}, "gpus": 24}
    return {
        "id": "v/1/kai", "at_ms": at_ms, "kind": "weight", "target": "kai", "subject": "*", "mode": "dry-run",
        "reason": "the inputs of this cycle", "policy_version": "v", "inputs": inputs,
    }  # fmt: skip


# --- who waits ------------------------------------------------------------------------------


def test_demand_that_nobody_watches_is_unknown_and_not_zero(client: TestClient) -> None:
    metered(client)
    page = words(client.get("/").text)
    assert "Nobody waits" not in page
    assert "Not known: this accountant reads no pods" in page
    waiting = words(client.get("/jobs?state=waiting").text)
    assert "0 waiting" not in waiting
    assert "Which jobs wait is not known" in waiting


def test_demand_that_the_controller_recorded_is_shown_with_its_time(client: TestClient) -> None:
    metered(client)
    assert client.post("/v1/decisions", json=[record(NOW_MS - MINUTE_MS)]).status_code == 200
    page = words(client.get("/").text)
    assert "Not known" not in page
    assert re.search(r"llm 664 16 648 1 Nov 11:59", page)
    assert re.search(r"vision 8 8 0 1 Nov 11:59", page)


# --- old is not now -------------------------------------------------------------------------


def test_old_records_are_said_to_be_old_on_every_page(client: TestClient, clock: VirtualClock) -> None:
    metered(client)
    fresh = [client.get(path).text for path in PATHS]
    assert not any("Old records" in page for page in fresh)
    clock.advance(STOPPED_MS)
    for path in (*PATHS, "/month/2026-11", "/team/vision?month=2026-11"):
        page = words(client.get(path).text)
        assert "Old records. The newest is 52.0 d old, of 1 Nov 11:30" in page, path
        assert not re.search(r"\bnow\b", page), (path, re.search(r".{40}\bnow\b.{40}", page))


def test_a_cluster_that_stopped_reporting_is_named_while_others_go_on(
    client: TestClient, clock: VirtualClock, asked: Callable[..., tuple[int, str, str]]
) -> None:
    metered(client)
    away = batch(rows=30, cluster="away", node="node-9")
    assert client.post("/v1/usage", content=encoded(away)).status_code == 200
    assert "does not report" not in client.get("/").text
    clock.advance(STOPPED_MS)
    later = batch(first=31, rows=1)
    moved = tuple(
        structs.replace(row, start_ms=row.start_ms + STOPPED_MS, end_ms=row.end_ms + STOPPED_MS)
        for row in later.intervals
    )
    assert client.post("/v1/usage", content=encoded(structs.replace(later, intervals=moved))).status_code == 200
    for path in PATHS:
        page = words(client.get(path).text)
        assert "Cluster away does not report. Its newest record is 52.0 d old, of 1 Nov 11:30" in page, path
        assert "Cluster prod does not report" not in page
    for command in ("usage", "check", "jobs"):
        _, out, _ = asked(command)
        assert "cluster 'away' has not reported for 52.0 d" in " ".join(out.split()), command


def test_nothing_runs_in_a_ledger_that_stopped(
    client: TestClient, clock: VirtualClock, asked: Callable[..., tuple[int, str, str]]
) -> None:
    metered(client)
    clock.advance(STOPPED_MS)
    page = words(client.get("/jobs").text)
    assert "Jobs of 2026-11" in page
    assert "was running" in page
    assert "Held what at" not in words(client.get("/").text)
    code, out, _ = asked("jobs")
    assert code == 0
    assert "2026-12 has no records yet: this is 2026-11, the last month that has any" in " ".join(out.split())
    assert "the newest record is 52.0 d old (2026-11-01T11:30:00Z)" in " ".join(out.split())


@pytest.mark.parametrize("command", [("jobs",), ("usage",), ("cost",), ("check",)])
def test_at_the_first_instant_of_a_month_commands_show_the_last_one(
    client: TestClient, clock: VirtualClock, asked: Callable[..., tuple[int, str, str]], command: tuple[str, ...]
) -> None:
    metered(client)
    clock.advance_to(NOW_MS - 12 * 60 * MINUTE_MS + 30 * MS_PER_DAY)  # 2026-12-01T00:00Z
    code, out, err = asked(*command)
    assert (code, err) == (0, "")
    assert "2026-12 has no records yet: this is 2026-11" in " ".join(out.split())


def test_an_end_alone_begins_with_its_own_month(client: TestClient) -> None:
    metered(client)
    answer = client.get("/v1/usage?end=2026-10-15").json()
    assert answer["start_ms"] == NOW_MS - 12 * 60 * MINUTE_MS - 31 * MS_PER_DAY


# --- unknown names --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/team/visoin", "/jobs?team=visoin", "/v1/report?month=2026-11&team=visoin",
        "/v1/statement?month=2026-11&team=visoin", "/v1/jobs?team=visoin", "/v1/usage?where.team=visoin",
        "/v1/cost?where.team=visoin",
    ],
)  # fmt: skip
def test_an_unknown_team_is_refused_with_the_nearest_names(client: TestClient, path: str) -> None:
    metered(client)
    answer = client.get(path)
    assert answer.status_code == 404
    assert "no team 'visoin' is known; did you mean 'vision'?" in answer.json()["detail"]
    assert client.get(path.replace("visoin", "llm")).status_code == 200, "known by the policy alone"


def test_an_unknown_job_is_refused_with_the_nearest_names(client: TestClient) -> None:
    metered(client)
    for path in ("/job/prod~vision~Pod~train-1", "/v1/jobs/prod~vision~Pod~train-1"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "did you mean 'Pod/train-0'?" in answer.json()["detail"]


@pytest.mark.parametrize(
    "command", [("report", "2026-11", "--team", "visoin"), ("jobs", "--team", "visoin"), ("jobs", "train-1"),
                ("usage", "--where", "team=visoin"), ("cost", "--where", "team=visoin")]
)  # fmt: skip
def test_commands_end_with_an_error_for_unknown_names(
    client: TestClient, asked: Callable[..., tuple[int, str, str]], command: tuple[str, ...]
) -> None:
    metered(client)
    code, out, err = asked(*command)
    assert (code, out) == (1, "")
    assert "did you mean" in err


# --- nothing is not zero --------------------------------------------------------------------


def test_an_empty_ledger_has_no_figures(client: TestClient, asked: Callable[..., tuple[int, str, str]]) -> None:
    for path in (*PATHS, "/month/2026-10"):
        page = words(client.get(path).text)
        assert not re.search(r"\b0\.00\b|100\.\d+ % (of|metered)|EUR 0", page), (path, page)
    assert "No record has arrived yet" in words(client.get("/").text)
    for command in (("usage",), ("cost",), ("check",), ("jobs",)):
        code, out, _ = asked(*command)
        assert code == 0
        assert "the ledger has no records yet" in " ".join(out.split())
        assert "100.0 %" not in out


def test_a_month_without_records_has_dashes_and_the_reason(client: TestClient) -> None:
    metered(client)
    page = words(client.get("/month/2026-09").text)
    assert "No records of this time" in page
    assert "EUR 0.00" not in page
    assert "EUR 0.00" not in words(client.get("/team/llm?month=2026-09").text)
    recorded = words(client.get("/team/llm?month=2026-11").text)
    assert "No records of this time" not in recorded
    assert "EUR 0.00" in recorded, "it held nothing in a month that is metered: that is known"


def test_a_month_without_prices_has_no_money(client: TestClient, clock: VirtualClock) -> None:
    clock.advance_to(NOW_MS + 40 * MS_PER_DAY)
    one = batch(rows=1)
    [row] = one.intervals
    begin = NOW_MS + 40 * MS_PER_DAY - 30 * MINUTE_MS
    later = type(row)(**{name: getattr(row, name) for name in row.__struct_fields__} | {
        "start_ms": begin, "end_ms": begin + MINUTE_MS,
    })  # fmt: skip
    assert client.post("/v1/usage", content=encoded(batch(intervals=(later,)))).status_code == 200
    for path in ("/", "/month", "/jobs"):
        page = words(client.get(path).text)
        assert "npriced" in page or "no price" in page, path
        assert not re.search(r"EUR 0\.00", page), path


def test_a_ledger_of_one_minute_is_drawn(client: TestClient, asked: Callable[..., tuple[int, str, str]]) -> None:
    metered(client, rows=1)
    for path in PATHS:
        assert client.get(path).status_code == 200, path
    for format in ("html", "json", "csv", "xlsx", "parquet", "focus", "pdf"):
        answer = client.get(f"/v1/report?month=2026-11&format={format}")
        assert answer.status_code == 200, (format, answer.text[:300])
    assert asked("check")[0] == 0
