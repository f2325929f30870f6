"""The pages: well-formed, without scripts or anything from elsewhere, escaped, with totals that add up."""

from __future__ import annotations

import re

import pytest

from accountant.ledger.protocols import Quarantined
from accountant.storage.read_snapshot import Hole
from accountant.web.page_rows import by_node, current_use, month_so_far
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.base.units import BUCKET_MS
from tests.http.readers import EVIL, read

PAGES = (
    "/", "/month/2026-10", "/month/2026-11", "/team/vision?month=2026-10", "/decisions", "/prices", "/coverage",
    "/month/2026-10/lines", "/month/2026-10/lines?team=vision&by=node", "/month/2026-10/lines?account=busy&by=job",
    "/act/1", "/decisions?kind=hold", "/decisions?subject=x",
)  # fmt: skip


@pytest.fixture
def full(door, ledger, kit):
    """A ledger whose every name tries to break out."""
    ledger.lines.append(
        UsageLine(
            key={"team": EVIL, "gpu_model": EVIL, "namespace": EVIL, "job": EVIL, "node": EVIL},
            accounts_gpu_us=Accounts(busy=kit.hour_us),
        )
    )
    ledger.decided["x"] = Decision(
        id="x", at_ms=kit.now_ms, kind="hold", target=EVIL, subject=EVIL, mode="dry-run", reason=EVIL,
        policy_version=EVIL, inputs={EVIL: EVIL},
    )  # fmt: skip
    ledger.refused = [Quarantined(EVIL, EVIL, EVIL, 9, kit.now_ms, EVIL, EVIL, EVIL)]
    ledger.missing = [Hole(EVIL, EVIL, EVIL, 3, 1_204, EVIL)]
    return door()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_well_formed_and_loads_nothing(full, path):
    answer = full.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    reader = read(answer.text)
    assert "script" not in reader.tags
    assert [name for _, name, _ in reader.attributes if name.startswith("on")] == []
    links = [value for _, name, value in reader.attributes if name in ("href", "src", "action")]
    assert links
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in links), links
    assert "main" in reader.tags
    assert reader.tags.count("h1") == 1
    assert ("html", "lang", "en") in reader.attributes
    assert any(name == "aria-current" for _, name, _ in reader.attributes)
    headings = [tag for tag in reader.tags if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1"


@pytest.mark.parametrize("path", PAGES)
def test_every_table_says_what_its_columns_and_rows_are(full, path):
    reader = read(full.client.get(path).text)
    assert reader.tags.count("caption") == reader.tags.count("table")
    scopes = [value for tag, name, value in reader.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == reader.tags.count("th")


@pytest.mark.parametrize("path", PAGES)
def test_names_cannot_break_out(full, path):
    assert "<script" not in full.client.get(path).text


def test_names_stand_on_the_pages_as_they_are(full):
    for path in ("/", "/decisions", "/coverage"):
        assert EVIL in " ".join(read(full.client.get(path).text).texts)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_not_sent_again_to_who_has_it(full, path):
    tag = full.client.get(path).headers["etag"]
    assert full.client.get(path, headers={"If-None-Match": tag}).status_code == 304


def test_every_link_of_the_overview_leads_to_a_page(full):
    reader = read(full.client.get("/").text)
    links = {value for tag, name, value in reader.attributes if (tag, name) == ("a", "href") and value.startswith("/")}
    assert {"/", "/month", "/decisions", "/prices", "/coverage", "/month/2026-11"} <= links
    assert any(link.startswith("/team/%3Cscript") for link in links)
    for link in links - {link for link in links if link.startswith("/job/")}:  # those need a real ledger
        assert full.client.get(link).status_code == 200, link


def test_the_overview_shows_now_and_the_month_so_far(ledger, book, kit):
    shown = current_use(ledger, book, kit.now_ms - 60_000 - BUCKET_MS, kit.now_ms - 60_000, "UTC")
    assert (shown.start_ms, shown.end_ms) == (kit.now_ms - 16 * 60_000, kit.now_ms - 60_000)
    assert shown.gpus == pytest.approx(13 * 4)  # 13 GPU-hours in a quarter of an hour
    assert sum(row.gpu_us for row in shown.accounts) == 13 * kit.hour_us
    assert sum(row.gpus for row in shown.holders) == pytest.approx(shown.held_gpus)
    month = month_so_far(ledger, book, kit.now_ms, "UTC")
    assert [(row.team, row.allocated_us // kit.hour_us) for row in month.teams] == [("speech", 4), ("vision", 4)]
    assert month.total == sum(row.cost for row in month.teams) == 17.5
    assert month.unpriced_us == 0
    assert month.utilisation == pytest.approx(6 / 7)  # what is unknown is neither busy nor idle
    unpriced = month_so_far(ledger, None, kit.now_ms, "UTC")
    assert unpriced.total is None
    assert {row.cost for row in unpriced.teams} == {None}
    assert unpriced.unpriced_us == unpriced.allocated_us


def test_nodes_stand_worst_first(ledger, kit):
    def line(node, cluster="prod", **accounts):
        return UsageLine(key={"cluster": cluster, "node": node}, accounts_gpu_us=Accounts(**accounts))

    ledger.lines = [
        line("a", busy=9), line("b", busy=6, unmetered=2, down=1), line("c", unmetered=1, busy=3),
        line("b", "edge", busy=5),
    ]  # fmt: skip
    rows = by_node(ledger, 0, kit.now_ms)
    assert [(row.cluster, row.node, row.capacity_us, row.unmetered_us, row.down_us) for row in rows] == [
        ("prod", "b", 8, 2, 1), ("prod", "c", 4, 1, 0), ("edge", "b", 5, 0, 0), ("prod", "a", 9, 0, 0),
    ], "nodes of one name in two clusters are two nodes"  # fmt: skip
    assert rows[0].coverage == 0.75


def test_lost_numbers_are_shown_and_counted(full):
    text = " ".join(read(full.client.get("/coverage").text).texts)
    assert "3 to 1204" in " ".join(text.split())
    assert "1,202" in text


def test_empty_pages_say_so(door, ledger):
    ledger.lines, ledger.refused = [], []
    opened = door(prices=None)
    for path, text in {
        "/": "No record has arrived yet",
        "/decisions": "Nothing was decided",
        "/prices": "no price book",
        "/coverage": "No node has reported",
    }.items():
        answer = opened.client.get(path)
        read(answer.text)
        assert text in answer.text, path


def test_pages_say_that_prices_are_examples(door, ledger, book):
    examples = book.model_copy(update={"rows": (book.rows[0].model_copy(update={"source": "example"}), *book.rows[1:])})
    for path in ("/", "/prices", "/month/2026-11", "/jobs"):
        assert "Example prices" in door(prices=examples).client.get(path).text, path
        assert "Example prices" not in door().client.get(path).text, path


def test_month_pages_link_to_the_months_beside_them_and_to_their_data(full):
    page = full.client.get("/month/2026-10").text
    assert 'href="/month/2026-09"' in page
    assert 'href="/month/2026-11"' in page
    assert "/month/2026-12" not in full.client.get("/month/2026-11").text
    team = full.client.get("/team/vision?month=2026-10").text
    assert 'href="/team/vision?month=2026-09"' in team
    *_, data = re.findall(r'href="(/v1/report[^"]*)"', team)
    assert full.client.get(data.replace("&amp;", "&")).headers["content-type"] == "text/csv; charset=utf-8"


@pytest.mark.parametrize("path", ["/month/2026-13", "/month/2027-01", "/team/vision?month=x", "/nowhere"])
def test_a_refusal_is_a_page_for_people_and_a_problem_for_programs(door, path):
    client = door().client
    page = client.get(path, headers={"Accept": "text/html"})
    assert page.status_code in (404, 422)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    read(page.text)
    assert client.get(path).headers["content-type"] == "application/problem+json"


def test_the_stylesheet_is_for_light_dark_phone_and_paper(door):
    answer = door().client.get("/static/style.css")
    assert answer.headers["content-type"] == "text/css; charset=utf-8"
    for rule in ("prefers-color-scheme: dark", "max-width: 640px", "@media print", ":focus-visible"):
        assert rule in answer.text
    assert not re.search(r"url\(|@import", answer.text)
