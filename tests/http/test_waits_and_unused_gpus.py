"""GPU time that was unused while pods waited: the same figures by API, page, command and assistant."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from accountant.assistant import tools
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.server.https_server import serve
from tests.http.conftest import CommandLine, StartAccountant, bearer, token_entry
from tests.http.page_parser import plain, tables
from tests.seams.site import HOUR_MS, HOUR_US, Site, hours_of
from tests.seams.site_with_cluster import watched
from tests.seams.small_month import BEGIN_MS, at
from tests.usage_records import pod_facts

HOURS = 4
FIGURES = ("asked_gpu_us", "free_gpu_us", "idle_gpu_us")
SPAN = {"start": str(at(0)), "end": str(at(HOURS)), "timezone": "UTC"}
PAGE = {"Accept": "text/html"}
CAPTION = "GPUs unused while pods waited"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Of three GPUs A is busy, B is free, and C is held idle for two hours and then free. A pod that asks for four
    GPUs waits from 0:30 to 2:00. The records end at 3:00."""
    folder = tmp_path_factory.mktemp("unused")
    with watched(folder, BEGIN_MS, "train", kubernetes={"inventory": True, "cluster": "prod"}) as found:
        found.site.clock.advance(at(HOURS) - BEGIN_MS)
        wide = pod_facts(
            "wide", at(2), namespace="vision", node="n1", workload="Job/wide", created_ms=at(0.5), scheduled_ms=at(2),
            requests={"nvidia.com/gpu": "4"},
        )  # fmt: skip
        rows = [*hours_of("A", at(0), 3, "vision/a", 1), *hours_of("B", at(0), 3), *hours_of("C", at(0), 2, "vision/c"),
                *hours_of("C", at(2), 1)]  # fmt: skip
        found.site.send(sorted(rows, key=lambda row: row.start_ms), [wide])
        found.read()
        yield found.site


@pytest.fixture(scope="module")
def url(site: Site) -> Iterator[str]:
    with serve(site.service.app, "127.0.0.1", 0) as address:
        yield address


def test_the_figures_are_those_of_each_hour(site: Site) -> None:
    """Asked, free and held idle: 2, 1 and 1 GPU-hours in the first hour, 4, 1 and 1 in the second, and then none."""
    found = site.get("/v1/waits/unused", **SPAN)
    lines = [tuple(line[name] / HOUR_US for name in FIGURES) for line in found["lines"]]
    assert (found["unit"], found["unknown"], lines) == ("hour", "", [(2, 1, 1), (4, 1, 1), (0, 0, 0)])
    assert [found["total"][name] / HOUR_US for name in FIGURES] == [6, 2, 2]
    assert (found["total"]["known_ms"], found["total"]["end_ms"]) == (3 * HOUR_MS, at(3)), "there are no later records"


def test_days_have_the_sums_of_their_hours_and_are_unknown_before_the_first_record(site: Site) -> None:
    found = site.get("/v1/waits/unused", start="7d", end=str(at(HOURS)), timezone="UTC")
    assert found["unit"] == "day"
    assert [line["free_gpu_us"] for line in found["lines"]] == [None] * 7 + [2 * HOUR_US]
    assert [found["total"][name] / HOUR_US for name in FIGURES] == [6, 2, 2]
    assert found["total"]["known_ms"] == 3 * HOUR_MS


def test_page_command_and_assistant_show_the_same(site: Site, url: str, run_command: CommandLine) -> None:
    text = site.client.get("/waits", params=SPAN, headers=PAGE).text
    (table,) = [rows for name, (_, rows) in tables(text).items() if name.startswith(CAPTION)]
    cells = [[plain(cell) for cell in row[1:4]] for row in table]
    assert cells == [["2.0", "1.0", "1.0"], ["4.0", "1.0", "1.0"], ["0.0", "0.0", "0.0"]]
    assert re.findall(r"<strong>([0-9.]+)", text.partition(CAPTION)[2]) == ["6.0", "2.0", "2.0"]
    asked = ("waits", "--unused", "--url", url, *(f"--{name}={value}" for name, value in SPAN.items()))
    (total,) = [line for line in run_command.shown(*asked).splitlines() if "total" in line]
    assert [word for word in total.split() if word[0].isdigit()] == ["6.0", "2.0", "2.0", "0.0"]
    answer = site.get("/v1/waits/unused", **SPAN)
    assert json.loads(run_command.shown(*asked, "--output", "json")) == answer
    (first, *_) = csv.DictReader(io.StringIO(run_command.shown(*asked, "--output", "csv")))
    assert [int(first[name]) for name in FIGURES] == [2 * HOUR_US, HOUR_US, HOUR_US]
    with closing(AccountantClient(url, "")) as client:
        told = tools.waits(client, start=SPAN["start"], end=SPAN["end"])["unused_gpu_hours"]
    assert [float(told[name]) for name in ("asked", "free", "idle")] == [6, 2, 2]
    assert (told["known_part"], told["unknown"]) == (1.0, "")


@pytest.mark.parametrize("hours", [24, 48, 90])
def test_the_hours_of_a_chart_have_so_few_labels_that_they_can_be_read(site: Site, hours: int) -> None:
    span = {"start": str(at(HOURS - hours)), "end": str(at(HOURS)), "timezone": "UTC"}
    chart = site.client.get("/waits", params=span, headers=PAGE).text.partition(CAPTION)[2]
    labels = re.findall(r">(\d+ \w+ \d\d:00)</text>", chart)
    assert 2 <= len(labels) <= 13
    assert any(label.endswith("00:00") for label in labels)


def test_where_nobody_reads_which_pods_wait_nothing_is_said(accountant: StartAccountant) -> None:
    running = accountant()
    found = running.client.get("/v1/waits/unused").json()
    assert (found["total"], found["lines"], "kubernetes.inventory" in found["unknown"]) == (None, [], True)
    page = running.client.get("/waits", headers=PAGE).text
    assert found["unknown"] in page
    assert CAPTION not in tables(page)


def test_who_may_see_some_teams_learns_nothing_of_free_gpus(accountant: StartAccountant) -> None:
    settings = {"kubernetes": {"inventory": True, "cluster": "prod"}}
    running = accountant(tokens=token_entry("lead", "read", ", teams: [vision]"), **settings)
    found = running.client.get("/v1/waits/unused", headers=bearer("lead")).json()
    assert (found["total"], found["lines"], bool(found["unknown"])) == (None, [], True)
    assert CAPTION not in running.client.get("/waits", headers={**PAGE, **bearer("lead")}).text
