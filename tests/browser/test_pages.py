"""Every page in a real Chromium: complete, without console messages, legible, accessible, and without requests to other
hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import pytest

# Brought by the group `real`; this module is collected by `make test` too, where it is deselected.
pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

from playwright.sync_api import Browser, Page

from tests.browser.axe import violations
from tests.browser.demo_pages import Site, chromium, demo_site

pytestmark = pytest.mark.real

PAGES = (
    "overview", "explore", "explore-pivot", "group",
    "month", "team", "lines", "lines-of-team", "jobs", "job", "nodes", "node", "decisions", "why",
    "prices", "invoices", "invoice-steps", "audit", "invoice", "act", "proposals", "coverage", "report",
    "shares", "queue", "fairshare-decisions", "fairshare-decision", "policy", "preview",
)  # fmt: skip
WIDTHS = {"phone": 390, "desk": 1440}
A4_WIDTH = 794
"""The width of A4 in CSS pixels."""
MOST_TABS = 60
Scheme: TypeAlias = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_VIOLATIONS = {"resultTypes": ["violations"]}
"""Of all other results axe would describe every element, of which a table has thousands."""
AXE = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]},
    **_VIOLATIONS,
}
AXE_ON_COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}, **_VIOLATIONS}
"""The rules whose verdict depends on the scheme."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with demo_site(tmp_path_factory.mktemp("demo"), days=2) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


class RequestContext:
    """An open page, with its console messages and requests."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("requestfailed", lambda request: self.said.append(f"failed: {request.url}"))
        page.on("request", lambda request: self.asked.append(request.url))
        answer = page.goto(url, wait_until="networkidle")
        self.status = answer.status if answer is not None else 0


AT_A_DESK = [(name, "desk") for name in PAGES]
ON_A_PHONE = [(name, "phone") for name in PAGES]


@pytest.fixture(scope="module", params=[*AT_A_DESK, *ON_A_PHONE], ids="-".join)
def visit(request: pytest.FixtureRequest, site: Site, browser: Browser) -> Iterator[RequestContext]:
    """Every page, opened once at each width. Its colours are those of style sheets, which follow the scheme at once."""
    name, width = request.param
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 900}, color_scheme="light")
    try:
        yield RequestContext(context.new_page(), site.pages[name])
    finally:
        context.close()


def test_the_page_is_whole_quiet_and_asks_nobody_else(visit: RequestContext, site: Site) -> None:
    assert visit.status == 200 or visit.page.url.startswith("file:")
    assert visit.said == []
    assert [url for url in visit.asked if not url.startswith((site.url, site.controller.url, "file:", "data:"))] == []
    assert visit.page.title()
    assert visit.page.locator("h1").count() == 1
    names = visit.page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(names) == len({*names})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_runs_out_of_the_page(visit: RequestContext, scheme: Scheme) -> None:
    """Charts scroll within their own box on a phone; tables and the page itself do not scroll sideways."""
    visit.page.emulate_media(color_scheme=scheme)
    wide, shown = visit.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= shown
    assert visit.page.evaluate(_SIDEWAYS) == []
    assert visit.page.evaluate(_BROKEN) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing(visit: RequestContext, scheme: Scheme) -> None:
    """WCAG 2 A and AA: names, roles, contrast, order, landmarks."""
    visit.page.emulate_media(color_scheme=scheme)
    found = violations(visit.page, AXE if scheme == "light" else AXE_ON_COLOURS)
    assert [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"][:3]] == []


@pytest.mark.parametrize("name", ["overview", "jobs", "shares"])
def test_on_a_phone_the_menu_is_one_row_that_opens_and_closes_with_the_keyboard(
    site: Site, browser: Browser, name: str
) -> None:
    context = browser.new_context(viewport={"width": WIDTHS["phone"], "height": 900})
    try:
        page = context.new_page()
        page.goto(site.pages[name], wait_until="networkidle")
        entries, button = page.locator("nav.site ul li a"), page.locator("nav.site .menu summary")
        assert page.evaluate("document.querySelector('nav.site').offsetHeight") < 50
        assert not entries.first.is_visible()
        button.press("Enter")
        assert entries.first.is_visible()
        page.keyboard.press("Tab")
        assert entries.first.evaluate("link => link === document.activeElement")
        assert violations(page, AXE) == []
        button.press("Enter")
        assert not entries.first.is_visible()
        page.set_viewport_size({"width": WIDTHS["desk"], "height": 900})
        assert entries.first.is_visible()
        assert not button.is_visible()
    finally:
        context.close()


@pytest.mark.parametrize("visit", AT_A_DESK, indirect=True, ids="-".join)
def test_the_keyboard_reaches_everything_in_its_order_and_shows_where_it_is(visit: RequestContext) -> None:
    """Tab after tab: each stop comes later in the document, has a name, and is marked by an outline."""
    opened = visit.page
    opened.emulate_media(color_scheme="light")
    before = -1
    for _ in range(MOST_TABS):
        opened.keyboard.press("Tab")
        at = opened.evaluate(_FOCUSED)
        if at is None:
            break
        # Day, month, year and calendar are stops of one field.
        is_part = at["place"] == before and 'type="datetime-local"' in at["tag"]
        assert at["place"] > before or is_part, at
        assert at["name"], at
        assert at["outlined"], at
        before = at["place"]
    assert before > 0 or opened.url.startswith("file:")


@pytest.mark.parametrize("visit", AT_A_DESK, indirect=True, ids="-".join)
def test_on_paper_there_is_the_content_and_nothing_else(visit: RequestContext) -> None:
    opened = visit.page
    opened.set_viewport_size({"width": A4_WIDTH, "height": 1123})
    opened.emulate_media(media="print", color_scheme="light")
    assert opened.locator("nav.site:visible").count() == 0
    assert opened.locator("main").is_visible()
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.pdf().startswith(b"%PDF-")


_BROKEN = """() => [...document.querySelectorAll(".scroll td:not(.t)")].flatMap((cell) => {
  const text = cell.firstChild;
  if (!text || text.nodeType !== Node.TEXT_NODE) return [];
  return [...text.data.matchAll(/\\d[\\d.,]*/g)].filter((figure) => {
    const range = document.createRange();
    range.setStart(text, figure.index);
    range.setEnd(text, figure.index + figure[0].length);
    return range.getClientRects().length > 1;
  }).map((figure) => figure[0]);
})"""
"""The figures in tables that go over two lines."""
_SIDEWAYS = """() => [...document.querySelectorAll(".scroll:has(table)")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1)
  .map((box) => [box.querySelector("caption, th").textContent, box.scrollWidth - box.clientWidth])"""
_FOCUSED = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  const style = getComputedStyle(at);
  return {
    place: [...document.querySelectorAll("*")].indexOf(at),
    name: (at.getAttribute("aria-label") || at.labels?.[0]?.innerText || at.innerText || "").trim(),
    outlined: style.outlineStyle !== "none" && style.outlineWidth !== "0px",
    tag: at.outerHTML.slice(0, 120),
  };
}"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_form_is_checked_while_it_is_typed_and_leads_to_file_and_preview(
    site: Site, browser: Browser, width: str
) -> None:
    """With the keyboard alone, from a field to the reviewed change; the console stays empty."""
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 900}, accept_downloads=True)
    visit = RequestContext(context.new_page(), site.controller.pages["policy"])
    page = visit.page
    before = site.controller.policy.read_text()
    try:
        weight = page.locator('[name="queues.0.weight"]')
        weight.focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("-3")
        page.wait_for_selector('[name="queues.0.weight"][aria-invalid=true]')
        assert page.locator('[id="b-queues.0.weight"]').inner_text() == "must be at least 0"
        assert page.locator("#verdict-head").inner_text() == "1 fault"
        assert violations(page, AXE) == []
        page.keyboard.press("Control+A")
        page.keyboard.type("7")
        page.wait_for_selector("#verdict-head:has-text('can be used')")
        budgets = page.locator('textarea[name="budgets"]')
        budgets.fill("- {name: all, team: vision, limit: -5}")
        page.wait_for_selector('textarea[name="budgets"][aria-invalid=true]')
        assert "budgets.0.limit: must be above 0" in page.locator("#b-budgets").inner_text()
        budgets.fill("- {name: all, team: vision, limit: 5000}")
        page.wait_for_selector("#verdict-head:has-text('can be used')")
        page.locator("summary", has_text="Preemption").press("Enter")
        with page.expect_response("**/policy/check"):  # the verdict is that of before: leaving now would break it off
            page.locator('[name="preemption.wait"]').fill("2m")
        page.wait_for_selector("#verdict-head:has-text('can be used')")
        review = page.get_by_role("button", name="Review the change")
        for _ in range(300):
            if review.evaluate("button => button === document.activeElement"):
                break
            page.keyboard.press("Tab")
        with page.expect_navigation(wait_until="networkidle"):
            page.keyboard.press("Enter")
        assert page.locator("h1").inner_text() == "The change"
        for said in ("weight: 7", "name: all", "limit: 5000", "wait: 2m"):
            assert said in page.locator("pre.diff").inner_text()
        assert violations(page, AXE) == []
        wide, shown = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= shown
        assert visit.said == []  # before the download: to the browser that is a navigation that failed
        with page.expect_download() as download:
            page.get_by_role("button", name="Download policy.yaml").click()
        assert "weight: 7" in download.value.path().read_text()
        assert [url for url in visit.asked if not url.startswith(site.controller.url)] == []
        assert site.controller.policy.read_text() == before
    finally:
        context.close()


def test_the_form_works_without_scripts(site: Site, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(site.controller.pages["policy"])
        page.fill('[name="queues.0.weight"]', "-3")
        page.get_by_role("button", name="Review the change").click()
        assert "must be at least 0" in page.locator('[id="b-queues.0.weight"]').inner_text()
        assert page.input_value('[name="queues.0.weight"]') == "-3"
        with page.expect_navigation():
            page.get_by_role("button", name="Add a queue").click()
        page.locator("table.edit tbody tr").first.wait_for()
        rows = page.locator("table.edit tbody tr").count()
        page.fill(f'[name="queues.{rows - 1}.name"]', "guests")
        page.fill('[name="queues.0.weight"]', "3")
        page.get_by_role("button", name="Review the change").click()
        assert "name: guests" in page.locator("pre.diff").inner_text()
    finally:
        context.close()
