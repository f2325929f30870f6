"""Running jobs whose GPUs do nothing now: the same on the page, in its files, over HTTP and with the command."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from accountant.__main__ import main
from accountant.composition import Service
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.http.conftest import INVENTORY, MINUTE_MS, NOW_MS, client_of, settings_in
from tests.http.page_parser import read, rows_after
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

PAGE = {"Accept": "text/html"}
QUERY = "start=30m&idle=true"


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """Jobs of vision: `idle` and `hardly` (0.5% busy) since two hours, `half` idle until ten minutes ago, `busy`, `new`
    for ten minutes, `blind` of which the use is unknown, and `over`, which ended an hour ago."""
    whole = MINUTE_MS * 1000
    jobs: dict[str, tuple[int, int, Any]] = {
        "idle": (120, 0, lambda _: 0), "hardly": (120, 0, lambda _: whole // 200), "new": (10, 0, lambda _: 0),
        "half": (120, 0, lambda ago: whole * (ago <= 10)), "busy": (120, 0, lambda _: whole // 2),
        "blind": (120, 0, lambda _: None), "over": (180, 60, lambda _: 0),
    }  # fmt: skip
    rows, facts = [], []
    for name, (since, until, busy) in jobs.items():
        begin = NOW_MS - since * MINUTE_MS
        ended = {"ended_ms": NOW_MS - until * MINUTE_MS} if until else {}
        facts.append(
            pod_facts(
                f"{name}-0", begin, namespace="vision", node="n1", uid=name, workload=f"Job/{name}", created_ms=begin,
                labels={"gputally.dev/user": "ada"}, scheduled_ms=begin, started_ms=begin, **ended,
            )
        )  # fmt: skip
        rows += [
            interval(NOW_MS - ago * MINUTE_MS, f"GPU-{name}", pod_holder(f"{name}-0", "vision", name),
                     span_ms=MINUTE_MS, busy_us=busy(ago))
            for ago in range(since, until, -1)
        ]  # fmt: skip
    chosen = settings_in(tmp_path, prices=price_book_text(H100=2, currency="USD"), inventory=INVENTORY)
    with Service(chosen, clock) as running:
        rows.sort(key=lambda row: row.start_ms)
        deliver(running.ledger, NOW_MS, batch(rows, facts, cluster="prod", node="n1"))
        yield running


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


def names(client: TestClient, query: str) -> list[str]:
    return sorted(job["job"].removeprefix("Job/") for job in client.get(f"/v1/jobs?{query}").json()["jobs"])


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (QUERY, ["hardly", "idle"]),
        ("start=10m&idle=true", ["hardly", "idle", "new"]),
        ("start=1d&idle=true", []),
        (f"{QUERY}&state=ended", []),
        (f"{QUERY}&search=hard", ["hardly"]),
    ],
)
def test_idle_are_those_that_hold_their_gpus_through_the_span_and_hardly_use_them(
    client: TestClient, query: str, found: list[str]
) -> None:
    assert names(client, query) == found


def test_the_page_its_file_and_the_command_have_the_same_jobs_with_what_they_cost(
    service: Service, client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    home = client.get("/", headers=PAGE).text
    (link,) = set(re.findall(r'href="(/jobs\?[^"]*idle=true[^"]*)"', home))
    jobs = client.get(link.replace("&amp;", "&"), headers=PAGE).text
    assert re.findall(r'href="/job/prod~vision~Job~([a-z]+)"', jobs) == ["hardly", "idle"]
    assert {"ada", "vision", "1", "2.00"} <= {text.strip() for text in read(jobs).texts}
    (preset,) = re.findall(r'href="([^"]*)"[^>]*>idle<', client.get("/jobs?state=ended", headers=PAGE).text)
    shown = client.get(preset.replace("&amp;", "&"), headers=PAGE)
    assert (shown.history, "idle running jobs" in shown.text) == ([], True), "the preset is the address of the view"
    table = client.get(f"/jobs.csv?{QUERY}&columns=gpus,user,team,burn").text
    rows = [[row[name] for name in ("job", "gpus_now", "users")] for row in csv.DictReader(io.StringIO(table))]
    assert sorted(rows) == [["Job/hardly", "1.0", "ada"], ["Job/idle", "1.0", "ada"]]
    with serve(service.app, "127.0.0.1", 0) as url:
        assert main(["jobs", "--idle", "--output", "json", "--url", url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(job["job"] for job in found["jobs"]) == ["Job/hardly", "Job/idle"]


def test_home_leads_to_the_jobs_of_all_the_idle_time_that_it_shows(service: Service) -> None:
    client = client_of(service)
    page = read(client.get("/", headers=PAGE).text)
    shown = float(rows_after(page, "GPUs by account", "Allocated, idle")[0])
    (link,) = {value for tag, name, value in page.attributes
               if (tag, name) == ("a", "href") and value.startswith("/explore?start=")}  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(client.get(link.replace("/explore", "/explore.csv", 1)).text)))
    assert {row["job"] for row in rows} >= {"Job/idle", "Job/new"}
    assert float(rows[-1]["allocated_idle_gpu_hours"]) * 4 == pytest.approx(shown, abs=0.05)
