"""Dragging over the chart of Explore in a real Chromium narrows the span to the columns under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

# Brought by the group `real`; this module is collected by `make test` too, where it is deselected.
pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

from playwright.sync_api import Page

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.browser.demo_pages import chromium
from tests.http.conftest import settings_in
from tests.http.quarter_hours import NOW, held
from tests.usage_records import batch, deliver

pytestmark = pytest.mark.real


@pytest.fixture
def explore(tmp_path: Path) -> Iterator[Page]:
    """The page of Explore about ten hours of a GPU, of which a team held ten."""
    with Service(settings_in(tmp_path), VirtualClock(NOW)) as running:
        deliver(running.ledger, NOW, batch(held(10, 10, "GPU-1", "vision"), cluster="prod", node="n1"))
        with serve(running.app, "127.0.0.1", 0) as url, chromium() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.goto(f"{url}/explore?start=10h&by=namespace&timezone=UTC&page=1", wait_until="networkidle")
            yield page
            assert said == []


def drag(page: Page, first: int, last: int) -> None:
    """Drag from the middle of a column to that of another one; the chart has ten."""
    chart = page.locator("svg[data-left]")
    chart.scroll_into_view_if_needed()
    box, view = chart.bounding_box(), chart.evaluate("svg => svg.viewBox.baseVal.width")
    assert box is not None
    left, right = (float(chart.get_attribute(f"data-{side}") or "nan") for side in ("left", "right"))
    at = [box["x"] + (left + (right - left) * (column + 0.5) / 10) * box["width"] / view for column in (first, last)]
    page.mouse.move(at[0], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(at[1], box["y"] + box["height"] / 2, steps=5)


@pytest.mark.parametrize(("first", "last"), [(2, 4), (4, 2)])
def test_dragging_over_columns_shows_their_span(explore: Page, first: int, last: int) -> None:
    drag(explore, first, last)
    assert explore.locator(".zoomed").count() == 1
    with explore.expect_navigation():
        explore.mouse.up()
    asked = {name: value for name, (value,) in parse_qs(urlsplit(explore.url).query).items()}
    assert asked == {
        "start": "2026-11-01T04:00:00Z", "end": "2026-11-01T07:00:00Z", "by": "namespace", "timezone": "UTC",
    }  # fmt: skip
    assert explore.locator("svg[data-left] g[data-start]").count() == 3
    assert explore.locator("tfoot td").first.inner_text() == "3.0"


def test_dragging_to_the_last_column_leaves_the_end_and_escape_stops(explore: Page) -> None:
    before = explore.url
    drag(explore, 1, 3)
    explore.keyboard.press("Escape")
    explore.mouse.up()
    assert (explore.url, explore.locator(".zoomed").count()) == (before, 0)
    drag(explore, 8, 9)
    with explore.expect_navigation():
        explore.mouse.up()
    assert "end" not in parse_qs(urlsplit(explore.url).query)
    assert explore.locator("tfoot td").first.inner_text() == "2.0"
