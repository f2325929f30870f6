"""What a page shows that was found a while ago says so, in words, with the instant; what is of now says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest

from accountant.api.answer_cache import FRESH_MS, STALEST_MS
from accountant.web.month_and_decision_pages import prepare_pages
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.base.clock import VirtualClock
from tests.http.conftest import HOUR_US, Door, OpenDoor

PAGES = (
    "/",
    "/month/2026-11",
    "/team/vision",
    "/jobs",
    "/nodes",
    "/coverage",
    "/month/2026-11/lines?account=allocated",
)
CHIP = re.compile(r"<span class=\"chip\"><i></i>[^<]*as of (\d+ \w+ \d\d:\d\d)")
MODEL = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def house(door: OpenDoor) -> Iterator[Door]:
    """Where finding anything takes a second of processor time."""
    seconds = count()
    found = door(spent=lambda: float(next(seconds)))
    yield found
    found.app.state.deps.answers.close()


def of(house: Door, path: str) -> tuple[set[str], str]:
    """The instants that a page says it is of, and the page without them."""
    answer = house.client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return set(CHIP.findall(answer.text)), CHIP.sub("", answer.text)


def held(hours: int) -> list[UsageLine]:
    key = {"team": "vision", "gpu_model": MODEL, "node": "n", "job": "Job/train", "namespace": "v", "cluster": "prod"}
    return [UsageLine(key=key, accounts_gpu_us=Accounts(busy=hours * HOUR_US))]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_says_of_when_it_is(house: Door, clock: VirtualClock, path: str) -> None:
    house.ledger.lines = held(3)
    instants, first = of(house, path)
    assert instants == set(), "found while the reader waited"

    house.ledger.lines = held(5)
    clock.advance(FRESH_MS)
    instants, kept = of(house, path)
    assert instants == {"1 Nov 12:00"}
    assert figures(kept) == figures(first), "the instant and the figures belong together"

    clock.advance(1)
    instants, kept = of(house, path)
    assert instants == {"1 Nov 12:00"}, "shown while it is refreshed"
    assert figures(kept) == figures(first)
    house.app.state.deps.answers.close()  # waits for what is being found
    instants, anew = of(house, path)
    assert instants == {"1 Nov 12:01"}
    assert figures(anew) != figures(first)

    clock.advance(STALEST_MS + 1)
    instants, now = of(house, path)
    assert instants == set(), "too old to be shown: found while the reader waited"
    assert figures(now) != figures(first)


def figures(page: str) -> list[str]:
    """Every amount and number of hours on it."""
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
def test_what_most_readers_look_at_is_found_before_they_do(house: Door, clock: VirtualClock, path: str) -> None:
    house.ledger.lines = held(3)
    prepare_pages(house.app.state.deps)
    clock.advance(FRESH_MS // 2)
    instants, _ = of(house, path)
    assert instants == {"1 Nov 12:00"}, "nobody waits for it"


@pytest.mark.parametrize("path", ["/month/2026-10", "/team/vision?month=2026-10", "/month/2026-10/lines?by=pod"])
def test_so_is_the_month_that_bills_are_sent_for(
    house: Door, clock: VirtualClock, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.ledger.lines = held(3)
    prepare_pages(house.app.state.deps)
    clock.advance(2 * STALEST_MS)

    def nobody(*asked: object) -> list[UsageLine]:
        raise AssertionError(f"the reader waits for {asked}")

    monkeypatch.setattr(house.ledger, "usage", nobody)
    instants, _ = of(house, path)
    assert instants == set(), "nothing has come late for it, so it is of now"


def test_a_figure_of_no_lines_is_a_page_of_nothing(house: Door) -> None:
    house.ledger.lines = held(3)
    _, page = of(house, f"{LINES}?account=unallocated")
    assert "No line of the statement matches" in page
    assert house.client.get(f"{LINES}.csv?account=unallocated").status_code == 200
