"""What is compared with a span of which the beginning is unknown: every page, list and command compares by day.

Records begin at noon on 31 October, and vision holds one of two GPUs from then on. At the end of 2 November it has held
as much a day as before, and four times as much in all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from accountant.__main__ import main
from accountant.wire.policy_models import Policy, QueuePolicy
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.seams.site import HOUR_MS, Site, book, hours_of, site

NOVEMBER_MS = 1_793_491_200_000
INVENTORY = "schema: 1\ncluster: prod\nnamespaces: [{name: vision, team: vision}]\n"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    given: dict[str, Any] = {
        "prices": book("id: h, model: H100, price: 2"), "inventory": INVENTORY, "controller_pages": "https://queues.example",
    }  # fmt: skip
    with site(tmp_path_factory.mktemp("known"), VirtualClock(NOVEMBER_MS + 48 * HOUR_MS), **given) as found:
        found.send(hours_of("A", NOVEMBER_MS - 12 * HOUR_MS, 60, "vision/train", 1))
        found.send(hours_of("B", NOVEMBER_MS - 12 * HOUR_MS, 60), node="n2")
        found.send(hours_of("C", NOVEMBER_MS + 46 * HOUR_MS, 2, health="lost"), node="n2")
        found.service.ledger.put_policy(Policy(queues=(QueuePolicy(name="vision", team="vision"),)), NOVEMBER_MS)
        yield found


def text(site: Site, path: str) -> str:
    answer = site.client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return unescape(re.sub(r"<[^>]*>", " ", answer.text))


NOVEMBER = "start=2026-11-01&compare=true"


@pytest.mark.parametrize(
    "path",
    [
        "/month/2026-11",
        "/team/vision?month=2026-11",
        f"/explore?{NOVEMBER}&by=team",
        f"/jobs?{NOVEMBER}",
        f"/nodes?{NOVEMBER}&columns=held",
        "/group?by=team&value=vision&month=2026-11",
        "/explore?start=48h&compare=true&by=team",
    ],
)
def test_a_page_compares_by_day(known: Site, path: str) -> None:
    page = text(known, path)
    assert "+0.0 %" in page
    assert "a day" in page
    assert not re.search(r"\+300\.0 %|in the same part of", page)


def test_what_is_no_sum_is_compared_as_it_is(known: Site) -> None:
    page = text(known, f"/explore?{NOVEMBER}&by=team&columns=utilisation,rate,cost")
    assert "+0.0 pts" in page
    assert "+0.0 pts a day" not in page
    assert re.search(r"before 2\.00, \+0\.0 % (?!a day)", page), "a price"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/nodes"])
def test_an_answer_says_which_time_it_compares(known: Site, path: str) -> None:
    before = known.get(path, start="2026-11-01", compare="true")["before"]
    assert (before["start_ms"], before["end_ms"]) == (NOVEMBER_MS - 12 * HOUR_MS, NOVEMBER_MS)
    assert before["compared_ms"] == 48 * HOUR_MS
    whole = known.get(path, start="2026-11-02", compare="true")["before"]
    assert whole["compared_ms"] is None


def test_a_day_of_which_nothing_is_known_has_no_line(known: Site) -> None:
    """The 1st and the 2nd of October are unknown, and no line at 0."""
    page = known.client.get("/group?by=team&value=vision&month=2026-11", headers={"Accept": "text/html"}).text
    assert 'class="capacity"' not in page.partition("Cost by day")[2]


@pytest.mark.parametrize("command", ["jobs", "nodes"])
def test_a_command_compares_by_day(known: Site, command: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with serve(known.service.app, "127.0.0.1", 0) as url:
        code = main([command, "--url", url, "--start", "2026-11-01", "--compare"])
    out, err = capsysbinary.readouterr()
    assert code == 0, err
    assert re.search(r"12\.0 → 48\.0, \+0\.0 % a day", out.decode()), out.decode()


def test_a_lost_gpu_of_a_node_that_was_up_is_among_what_was_down(known: Site) -> None:
    page = text(known, "/nodes?start=2026-11-01").partition("Nodes and GPUs that were down")[2]
    assert re.search(r"n2\s+prod\s+2\.0\s+its GPUs", page), page


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/team/vision?month=2026-11", "/group?by=team&value=vision&month=2026-11"),
        ("/team/vision?month=2026-11", "https://queues.example/shares/queue/vision"),
        ("/group?by=team&value=vision&month=2026-11", "/team/vision?month=2026-11"),
        ("/group?by=team&value=vision&month=2026-11", "https://queues.example/shares/queue/vision"),
        ("/group?by=queue&value=vision&month=2026-11", "https://queues.example/shares/queue/vision"),
    ],
)
def test_the_pages_of_a_team_lead_to_each_other(known: Site, path: str, leads_to: str) -> None:
    page = known.client.get(path, headers={"Accept": "text/html"}).text
    assert f'href="{leads_to}"' in unescape(page)
