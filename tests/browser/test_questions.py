"""The questions asked on the pages with a real Chromium: from the home page, in at most three clicks, as a person who
knows no address would."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

# Brought by the group `real`; this module is collected by `make test` too, where it is deselected.
pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.assistant.question_ledger import Accountant, running
from tests.assistant.questions import QUESTIONS
from tests.browser.demo_pages import chromium
from tests.http.conftest import bearer

pytestmark = pytest.mark.real
MOST_CLICKS = 3
LONGEST_WAIT_MS = 120_000
"""Ends a test of a page that never comes; a busy machine may take long."""


@pytest.fixture(scope="module")
def accountant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accountant]:
    with running(tmp_path_factory.mktemp("questions")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def admin(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(extra_http_headers=bearer("all"), viewport={"width": 1440, "height": 900})
    context.set_default_timeout(LONGEST_WAIT_MS)
    yield context
    context.close()


@pytest.fixture
def page(admin: BrowserContext, accountant: Accountant) -> Iterator[Page]:
    """The home page."""
    opened = admin.new_page()
    opened.goto(accountant.url)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_pages_answer_in_at_most_three_clicks(name: str, page: Page) -> None:
    question = QUESTIONS[name]
    assert sum("=" not in step for step in question.clicks) <= MOST_CLICKS
    for step in question.clicks:
        follow(page, step)
    expect(answers(page, question.shown).first).to_be_visible(timeout=LONGEST_WAIT_MS)


def test_the_page_says_whether_the_invoice_of_the_provider_agrees(page: Page) -> None:
    follow(page, "Reconciliation")
    expect(answers(page, ("gpu-node", "100.00", "90.00", "10.00")).first).to_be_visible(timeout=LONGEST_WAIT_MS)


def test_a_lead_gets_the_invoice_of_the_last_month_as_a_pdf(browser: Browser, accountant: Accountant) -> None:
    context = browser.new_context(extra_http_headers=bearer("lead"), accept_downloads=True)
    context.set_default_timeout(LONGEST_WAIT_MS)
    page = context.new_page()
    page.goto(accountant.url)
    follow(page, "← 2026-10")
    with page.expect_download() as coming:
        page.get_by_role("link", name="PDF", exact=True).first.click()
    assert coming.value.path().read_bytes().startswith(b"%PDF")
    context.close()


def follow(page: Page, step: str) -> None:
    """Open the link, press the button or unfold the details of this name, or choose or enter NAME=VALUE in a form."""
    name, given, value = step.partition("=")
    if given:
        entry = page.locator(f"[name='{name}']:visible").first
        if entry.evaluate("one => one.tagName") == "SELECT":
            entry.select_option(value)
        else:
            entry.fill(value)
        return
    folded = page.locator("summary").filter(has_text=re.compile(f"^{re.escape(step)}$"))
    links, buttons = (page.get_by_role(role, name=step, exact=True) for role in ("link", "button"))
    target = links.or_(buttons).or_(folded).filter(visible=True).first
    if target.evaluate("one => one.tagName") == "SUMMARY":
        target.click()
        return
    with page.expect_navigation():
        target.click()


def answers(page: Page, texts: tuple[str, ...]) -> Locator:
    """The rows of tables that have each of these texts in a cell; a single text may stand anywhere."""
    if len(texts) == 1:
        return page.get_by_text(whole(texts[0])).filter(visible=True)
    rows = page.locator("tr:visible")
    for text in texts:
        rows = rows.filter(has=page.locator("td, th").filter(has_text=whole(text)))
    return rows


def whole(text: str) -> re.Pattern[str]:
    """The text, whose first and last number are not parts of longer ones: 6.00 is not in 16.00."""
    before = r"(?<![\d.,])" if text[0].isdigit() else ""
    after = r"(?![.,]?\d)" if text[-1].isdigit() else ""
    return re.compile(before + r"\s+".join(map(re.escape, text.split())).replace(r"\-", "-") + after)
