"""The pages: well-formed, without scripts or external content, escaped, with totals that add up. A cached page states
its instant, and no page reads the engine more often for a larger ledger."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.api.answer_cache import FRESH_MS, STALEST_MS
from accountant.billing.cost_allocation import billed_tables
from accountant.billing.statement_breakdown import DIMENSIONS
from accountant.exports.protocol import exports
from accountant.ledger.protocols import Hole, Quarantined
from accountant.storage.duckdb_engine import Cursor, Parameters, Row
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.web.month_and_decision_pages import prepare_pages
from accountant.web.page_rows import by_node, current_use, month_so_far
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine
from gputally.base.clock import VirtualClock
from gputally.base.docs_address import DOCS
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR
from tests.bench import pages
from tests.deadlines import until
from tests.http.conftest import HOUR_US, NOW_MS, MemoryAccountant, StartAccountant, decision
from tests.http.page_parser import EVIL, read
from tests.moments import present

PAGES = (
    "/", "/month/2026-10", "/month/2026-11", "/team/vision?month=2026-10", "/decisions", "/prices", "/coverage",
    "/month/2026-10/lines", "/month/2026-10/lines?team=vision&by=node", "/month/2026-10/lines?account=busy&by=job",
    "/act/1", "/decisions?kind=hold", "/decisions?subject=x", "/explore?start=7d",
    "/explore?start=7d&by=team,job&across=job",
)  # fmt: skip


@pytest.fixture
def full(accountant, ledger):
    """A ledger in which every name tries to inject markup."""
    key = dict.fromkeys(("team", "gpu_model", "namespace", "job", "node"), EVIL)
    ledger.lines.append(UsageLine(key=key, accounts_gpu_us=Accounts(busy=HOUR_US)))
    evil = dict.fromkeys(("target", "subject", "reason", "policy_version"), EVIL)
    hold = decision(id="x", at_ms=NOW_MS, kind="hold", inputs={EVIL: EVIL}, **evil)
    ledger.decided["x"] = Decision.model_validate(hold)
    ledger.refused = [Quarantined(EVIL, EVIL, EVIL, 9, NOW_MS, EVIL, EVIL, EVIL)]
    ledger.missing = [Hole(EVIL, EVIL, EVIL, 3, 1_204, EVIL)]
    return accountant()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_well_formed_loads_nothing_and_is_not_sent_again_to_who_has_it(full, path):
    answer = full.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    reader = read(answer.text)
    scripts = re.findall(r"<script[^>]*>", answer.text)
    own = ['<script src="/static/zoom.js" defer>'] if path.startswith("/explore") else []
    assert scripts == own, "a name breaks out"
    assert [name for _, name, _ in reader.attributes if name.startswith("on")] == []
    found = [value for _, name, value in reader.attributes if name in ("href", "src", "action")]
    links = [link for link in found if not link.startswith(DOCS)]
    assert len(found) == len(links) + 1, "one link to the documentation"
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in links), links
    assert "main" in reader.tags
    assert reader.tags.count("h1") == 1
    assert ("html", "lang", "en") in reader.attributes
    assert any(name == "aria-current" for _, name, _ in reader.attributes)
    headings = [tag for tag in reader.tags if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1"
    assert reader.tags.count("caption") == reader.tags.count("table")
    scopes = [value for tag, name, value in reader.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == reader.tags.count("th")
    assert full.client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_names_stand_on_the_pages_as_they_are(full):
    for path in ("/", "/decisions", "/coverage"):
        assert EVIL in " ".join(read(full.client.get(path).text).texts)


def test_every_link_of_the_overview_leads_to_a_page(full):
    reader = read(full.client.get("/").text)
    links = {value for tag, name, value in reader.attributes if (tag, name) == ("a", "href") and value.startswith("/")}
    assert {"/", "/month", "/decisions", "/prices", "/coverage", "/month/2026-11"} <= links
    assert any(link.startswith("/team/%3Cscript") for link in links)
    for link in links - {link for link in links if link.startswith("/job/")}:  # those need a real ledger
        assert full.client.get(link).status_code == 200, link


def test_the_overview_shows_now_and_the_month_so_far(ledger, book):
    ledger.span = (NOW_MS - 60_000 - BUCKET_MS, NOW_MS - 60_000)
    shown = current_use(ledger, book, NOW_MS - 60_000 - BUCKET_MS, NOW_MS - 60_000, "UTC")
    assert (shown.start_ms, shown.end_ms) == (NOW_MS - 16 * 60_000, NOW_MS - 60_000)
    assert shown.gpus == pytest.approx(13 * 4)  # 13 GPU-hours in a quarter of an hour
    assert sum(row.gpu_us for row in shown.accounts) == 13 * HOUR_US
    assert sum(row.gpus for row in shown.holders) == pytest.approx(shown.held_gpus)
    month = month_so_far(ledger, book, NOW_MS, "UTC")
    assert [(row.team, row.allocated_us // HOUR_US) for row in month.teams] == [("speech", 4), ("vision", 4)]
    assert month.total == sum(row.cost for row in month.teams) == 17.5
    assert month.unpriced_us == 0
    assert month.utilisation == pytest.approx(6 / 7)  # what is unknown is neither busy nor idle
    unpriced = month_so_far(ledger, None, NOW_MS, "UTC")
    assert unpriced.total is None
    assert {row.cost for row in unpriced.teams} == {None}
    assert unpriced.unpriced_us == unpriced.allocated_us


def test_nodes_stand_worst_first(ledger):
    def line(node, cluster="prod", **accounts):
        return UsageLine(key={"cluster": cluster, "node": node}, accounts_gpu_us=Accounts(**accounts))

    ledger.lines = [
        line("a", busy=9), line("b", busy=6, unmetered=2, down=1), line("c", unmetered=1, busy=3),
        line("b", "edge", busy=5),
    ]  # fmt: skip
    rows = by_node(ledger, 0, NOW_MS)
    assert [(row.cluster, row.node, row.capacity_us, row.unmetered_us, row.down_us) for row in rows] == [
        ("prod", "b", 8, 2, 1), ("prod", "c", 4, 1, 0), ("edge", "b", 5, 0, 0), ("prod", "a", 9, 0, 0),
    ], "nodes of one name in two clusters are two nodes"  # fmt: skip
    assert rows[0].coverage == 0.75


def test_lost_numbers_are_shown_and_counted(full):
    text = " ".join(read(full.client.get("/coverage").text).texts)
    assert "3 to 1204" in " ".join(text.split())
    assert "1,202" in text


def test_empty_pages_say_so(accountant, ledger):
    ledger.lines, ledger.refused = [], []
    running = accountant(prices=None)
    for path, text in {
        "/": "No record has arrived yet",
        "/decisions": "Nothing was decided",
        "/prices": "no price book",
        "/coverage": "No node has reported",
    }.items():
        answer = running.client.get(path)
        read(answer.text)
        assert text in answer.text, path


def test_pages_say_that_prices_are_examples(accountant, ledger, book):
    examples = book.model_copy(update={"rows": (book.rows[0].model_copy(update={"source": "example"}), *book.rows[1:])})
    for path in ("/", "/prices", "/month/2026-11", "/jobs"):
        assert "Example prices" in accountant(prices=examples).client.get(path).text, path
        assert "Example prices" not in accountant().client.get(path).text, path


def test_month_pages_link_to_the_months_beside_them_and_to_their_data(full):
    page = full.client.get("/month/2026-10").text
    assert 'href="/month/2026-09"' in page
    assert 'href="/month/2026-11"' in page
    assert "/month/2026-12" not in full.client.get("/month/2026-11").text
    team = full.client.get("/team/vision?month=2026-10").text
    assert 'href="/team/vision?month=2026-09"' in team
    links = {link.rpartition("=")[2]: link for link in re.findall(r'href="(/v1/report[^"]*)"', team)}
    assert links.keys() == {name for name, export in exports().items() if not export.inline}
    some = min(links, key=lambda name: exports()[name].binary)  # takes the least time
    assert full.client.get(links[some].replace("&amp;", "&")).headers["content-type"] == exports()[some].media_type


@pytest.mark.parametrize("path", ["/month/2026-13", "/month/2027-01", "/team/vision?month=x", "/nowhere"])
def test_a_refusal_is_a_page_for_people_and_a_problem_for_programs(accountant, path):
    client = accountant().client
    page = client.get(path, headers={"Accept": "text/html"})
    assert page.status_code in (404, 422)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    read(page.text)
    assert client.get(path).headers["content-type"] == "application/problem+json"


def test_the_stylesheet_is_for_light_dark_phone_and_paper(accountant):
    answer = accountant().client.get("/static/style.css")
    assert answer.headers["content-type"] == "text/css; charset=utf-8"
    for rule in ("prefers-color-scheme: dark", "max-width: 640px", "@media print", ":focus-visible"):
        assert rule in answer.text
    assert not re.search(r"url\(|@import", answer.text)


CACHED_PAGES = (
    "/",
    "/month/2026-11",
    "/team/vision",
    "/jobs",
    "/nodes",
    "/coverage",
    "/month/2026-11/lines?account=allocated",
    "/explore?start=7d",
)
CHIP = re.compile(r"<span class=\"chip\"><i></i>[^<]*as of (\d+ \w+ \d\d:\d\d)")
MODEL = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def slow(accountant: StartAccountant) -> Iterator[MemoryAccountant]:
    """An accountant in which computing any answer takes a second of CPU time."""
    seconds = count()
    found = accountant(spent=lambda: float(next(seconds)))
    yield found
    found.app.state.deps.answers.close()


def of(slow: MemoryAccountant, path: str) -> tuple[set[str], str]:
    """Return the instants that a page states, and the page without them."""
    answer = slow.client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return set(CHIP.findall(answer.text)), CHIP.sub("", answer.text)


def held(hours: int) -> list[UsageLine]:
    key = {"team": "vision", "gpu_model": MODEL, "node": "n", "job": "Job/train", "namespace": "v", "cluster": "prod"}
    return [UsageLine(key=key, accounts_gpu_us=Accounts(busy=hours * HOUR_US))]


@pytest.mark.parametrize("path", CACHED_PAGES)
def test_a_page_says_of_when_it_is(slow: MemoryAccountant, clock: VirtualClock, path: str) -> None:
    slow.ledger.lines = held(3)
    instants, first = of(slow, path)
    assert instants == set(), "found while the reader waited"

    slow.ledger.lines = held(5)
    clock.advance(FRESH_MS)
    instants, kept = of(slow, path)
    assert instants == {"1 Nov 12:00"}
    assert figures(kept) == figures(first), "the instant and the figures belong together"

    clock.advance(1)
    instants, kept = of(slow, path)
    assert instants == {"1 Nov 12:00"}, "shown while it is refreshed"
    assert figures(kept) == figures(first)
    until(lambda: of(slow, path)[0] == {"1 Nov 12:01"}, "it is not refreshed")
    _, refreshed = of(slow, path)
    assert figures(refreshed) != figures(first)

    clock.advance(STALEST_MS + 1)
    instants, now = of(slow, path)
    assert instants == set(), "too old to be shown: found while the reader waited"
    assert figures(now) != figures(first)


def figures(page: str) -> list[str]:
    """Return every amount and number of hours on the page."""
    return re.findall(
        r"\d[\d,]*\.\d+", re.sub(r"<svg.*?</svg>|<style.*?</style>|<code>.*?</code>", "", page, flags=re.DOTALL)
    )


LINES = "/month/2026-11/lines"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/month/2026-11", "/jobs", "/nodes", "/coverage"),
        *(LINES, f"{LINES}?team=vision", f"{LINES}?account=unallocated"),
    ],
)
def test_what_most_readers_look_at_is_found_before_they_do(
    slow: MemoryAccountant, clock: VirtualClock, path: str
) -> None:
    slow.ledger.lines = held(3)
    prepare_pages(slow.app.state.deps)
    clock.advance(FRESH_MS // 2)
    instants, _ = of(slow, path)
    assert instants == {"1 Nov 12:00"}, "nobody waits for it"


@pytest.mark.parametrize("path", ["/month/2026-10", "/team/vision?month=2026-10", "/month/2026-10/lines?by=pod"])
def test_so_is_the_month_that_bills_are_sent_for(
    slow: MemoryAccountant, clock: VirtualClock, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.ledger.lines = held(3)
    prepare_pages(slow.app.state.deps)
    clock.advance(2 * STALEST_MS)

    def nobody(*asked: object) -> list[UsageLine]:
        raise AssertionError(f"the reader waits for {asked}")

    monkeypatch.setattr(slow.ledger, "usage", nobody)
    instants, _ = of(slow, path)
    assert instants == set(), "nothing has come late for it, so it is of now"


def test_a_figure_of_no_lines_is_a_page_of_nothing(slow: MemoryAccountant) -> None:
    slow.ledger.lines = held(3)
    _, page = of(slow, f"{LINES}?account=unallocated")
    assert "No line of the statement matches" in page
    assert slow.client.get(f"{LINES}.csv?account=unallocated").status_code == 200


SIZES = (pages.Size(nodes=2, minutes=1_500, queues=4), pages.Size(nodes=6, minutes=3 * 1_440 + 100, queues=4))
Site = tuple[TestClient, DuckLedger]
MOST = {"/": 30, "/job/": 36, "/node/": 30}
"""Statements of a page. A question of usage is up to seven: days, hours, quarters, rows and edges each by itself."""


@pytest.fixture(scope="module", params=SIZES, ids=("2 nodes", "6 nodes"))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pages")
    pages.prepare(folder, request.param)
    with pages.site(folder, request.param) as (client, ledger, _):
        yield client, ledger


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The SQL statements sent to the engine since."""
    statements: list[str] = []
    run = Cursor.run

    def counted(self: Cursor, sql: str, parameters: Parameters = None, *tables: Any, **named: Any) -> list[Row]:
        statements.append(sql)
        return run(self, sql, parameters, *tables, **named)

    monkeypatch.setattr(Cursor, "run", counted)
    return statements


def test_a_page_asks_no_more_however_large_the_ledger_is(site: Site, statements: list[str]) -> None:
    client, _ = site
    job = re.search(r'href="(/job/[^"]+)"', client.get(f"/jobs?start={pages.MONTH}-01").text)
    assert job is not None
    for address in ("/", job[1], "/node/bench/node-1?days=2"):
        client.get(address)
        statements.clear()
        assert client.get(address).status_code == 200
        (most,) = (most for begin, most in MOST.items() if re.fullmatch(f"{begin}.*" if begin != "/" else "/", address))
        assert 0 < len(statements) <= most, (address, statements)


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
def test_a_moment_finds_the_holders_of_a_job_once(site: Site, statements: list[str]) -> None:
    _, ledger = site
    start, end = ledger.status().extent
    with ledger.moment(start, end) as moment:
        (key, *_) = {pod.key for pod in moment.pods(end - MS_PER_HOUR, end)}
        where: dict[Dimension, tuple[str, ...]] = {
            "cluster": (key.cluster,),
            "namespace": (key.namespace,),
            "job": (key.job,),
        }
        statements.clear()
        moment.extents({key})
        first = len(statements)
        for hours in (1, 2, 3):
            moment.usage((end - hours * MS_PER_HOUR, end), ("team", "user"), where).lines()
    named = [sql for sql in statements if "FROM holder" in sql]
    assert first <= 4
    assert len(named) <= 3, "ids, names and users, once"
    assert not any("holder_class" in sql for sql in statements)


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
@pytest.mark.parametrize(
    ("by", "finer", "where"),
    [
        ((), ("team", "job", "gpu_model"), {}),
        (("team",), ("cluster", "team", "namespace", "job", "gpu_model", "pool"), {}),
        (("gpu_model", "node"), ("node", "gpu", "gpu_model", "hour"), {"node": ("node-0", "node-1")}),
        (("day",), ("day", "team", "user"), {"team": ("team-0",)}),
        (("job",), ("job", "gpu"), {"namespace": ("ns-0", "ns-1", "ns-2")}),
    ],
)
def test_what_is_added_up_is_what_the_engine_says(
    site: Site,
    by: tuple[Dimension, ...],
    finer: tuple[Dimension, ...],
    where: dict[Dimension, tuple[str, ...]],
) -> None:
    """Also at an odd second, where rows are split, and for every breakdown."""
    _, ledger = site
    end = ledger.status().extent[1] - 7_001
    for start in (end - 1_800_000, end - MS_PER_DAY - 1):
        alone = present(ledger).usage((start, end), by, where).lines()
        assert present(ledger).usage((start, end), finer, where).grouped(by).lines() == alone
        with ledger.moment(start, end) as moment:
            assert (
                moment.usage((start, end), finer, where).lines()
                == present(ledger).usage((start, end), finer, where).lines()
            )
            assert moment.usage((start, end), by, where).lines() == alone
            assert (
                moment.usage((start, end), tuple(reversed(by)), where).lines()
                == present(ledger).usage((start, end), tuple(reversed(by)), where).lines()
            )


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
@pytest.mark.parametrize("by", [("job", "team", "user"), ("job", "queue", "namespace", "pod"), ("job", "container")])
def test_holders_that_are_looked_up_by_name_are_those_that_the_engine_tells_apart(
    site: Site, by: tuple[Dimension, ...]
) -> None:
    _, ledger = site
    start, end = ledger.status().extent[0] + 1_234, ledger.status().extent[1] - 61_001
    everybody = present(ledger).usage((start, end), by).lines()
    jobs = sorted({line.key["job"] for line in everybody})
    for chosen in (jobs[:1], jobs[-2:], ["Job/nobody"]):
        assert present(ledger).usage((start, end), by, {"job": chosen}).lines() == [
            line for line in everybody if line.key["job"] in chosen
        ]


@pytest.mark.parametrize("site", SIZES[1:], indirect=True, ids=["6 nodes"])
def test_every_cut_that_is_found_at_once_is_the_cut_found_alone(site: Site) -> None:
    """Also for spans that begin and end at odd instants."""
    _, ledger = site
    start, end = ledger.status().extent[0] + 1_234, ledger.status().extent[1] - 61_001
    cuts = tuple(DIMENSIONS.values())
    with ledger.moment(start, end) as moment:
        together = [table.by_line() for table in billed_tables(moment, None, start, end, cuts, "Asia/Kathmandu")]
        for by, found in zip(cuts, together, strict=True):
            (alone,) = [table.by_line() for table in billed_tables(moment, None, start, end, (by,), "Asia/Kathmandu")]
            assert found.charges == alone.charges
            assert list(found.groups.keys) == list(alone.groups.keys)
            assert {line: [c.tolist() for c in columns] for line, columns in found.groups.by_line.items()} == {
                line: [c.tolist() for c in columns] for line, columns in alone.groups.by_line.items()
            }
