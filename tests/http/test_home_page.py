"""The first page on a real ledger: its figures equal those of the API, and it says what changed and what to decide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.web import home as home_page
from accountant.wire.usage_cost_and_job_models import Accounts
from gputally.base.clock import VirtualClock
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import INVENTORY, client_of, settings_in
from tests.http.page_parser import read, rows_after
from tests.http.quarter_hours import HOUR_MS, NOW, held
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """vision held GPU-1 for 10 hours the day before and holds it for 4 hours now; nlp holds GPU-2 for 6 hours; nobody
    GPU-3, which is known for more than two days. Node n2 is down."""
    chosen = settings_in(tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY)
    rows = [
        *held(40, 10, "GPU-1", "vision"), *held(4, 4, "GPU-1", "vision"), *held(6, 6, "GPU-2", "nlp"),
        *held(49, 1, "GPU-3"), *held(4, 4, "GPU-3"),
    ]  # fmt: skip
    with Service(chosen, clock) as running:
        deliver(
            running.ledger, NOW_MS, batch(rows, cluster="prod", node="n1"),
            batch(held(30, 1, "GPU-9"), cluster="prod", node="n2"),
        )  # fmt: skip
        down = Down(NOW - 29 * HOUR_MS, None, "kernel panic")
        running.ledger.observe(Facts(nodes=(NodeFacts("prod", "n2", down=(down,)),)), NOW_MS)
        yield running


def home(service: Service) -> Any:
    answer = client_of(service).get("/", headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return read(answer.text)


def test_the_last_day_by_account_is_that_of_the_api(service: Service) -> None:
    found = home(service)
    query = {"start": NOW - 24 * HOUR_MS, "end": NOW}
    (line,) = client_of(service).get("/v1/usage", params=query | {"by": "cluster"}).json()["lines"]
    idle = line["accounts_gpu_us"]["allocated_idle"]
    assert idle == 10 * HOUR_MS * 1000
    assert rows_after(found, "GPUs by account", "Allocated, idle")[2] == "10.0"


def test_what_changed_since_yesterday_is_the_difference_of_two_days(service: Service) -> None:
    found = home(service)
    caption = "GPU-hours held in the 24 hours"
    assert rows_after(found, caption, "vision")[:3] == ["10.0", "4.0", "−6.0"]
    assert rows_after(found, caption, "nlp")[:3] == ["0.0", "6.0", "+6.0"]


def test_a_day_in_which_records_begin_is_not_compared_with_a_whole_one(tmp_path: Path, clock: VirtualClock) -> None:
    with Service(settings_in(tmp_path, inventory=INVENTORY), clock) as running:
        deliver(running.ledger, NOW_MS, batch(held(40, 40, "GPU-1", "vision"), cluster="prod", node="n1"))
        texts = " ".join(home(running).texts)
    assert "There are no records of both days" in texts
    assert "GPU-hours held in the 24 hours" not in texts


def test_every_gpu_is_a_cell_in_the_colour_of_its_team(service: Service) -> None:
    found = home(service)
    cells = [value for tag, name, value in found.attributes if (tag, name) == ("a", "aria-label")]
    assert [cell for cell in cells if cell.startswith("GPU-")] == [
        "GPU-1: vision", "GPU-2: nlp", "GPU-3: unallocated", "GPU-9: down",
    ]  # fmt: skip


def test_a_cell_shows_what_a_gpu_was_for_a_tenth_of_the_time_or_more() -> None:
    css = {"vision": "s0", "nlp": "s1"}

    def colours(*parts: tuple[str, Accounts]) -> tuple[str, ...]:
        return home_page._cell("GPU-1", list(parts), css).colours

    assert colours(("vision", Accounts(busy=1)), ("__idle__", Accounts(unallocated=99))) == ("a-unallocated",)
    assert colours(("vision", Accounts(busy=40)), ("__idle__", Accounts(unallocated=60))) == ("s0", "a-unallocated")
    assert colours(("vision", Accounts(busy=96)), ("__idle__", Accounts(unallocated=4))) == ("s0",)
    assert colours(("nlp", Accounts(busy=50)), ("vision", Accounts(busy=50))) == ("s0", "s1")


def test_what_needs_a_decision_leads_to_its_page(service: Service) -> None:
    links = {value for tag, name, value in home(service).attributes if (tag, name) == ("a", "href")}
    assert "/nodes?sort=down" in links


def test_the_cost_of_each_day_is_that_of_the_api(service: Service) -> None:
    found = home(service)
    query = {"start": NOW - 30 * 24 * HOUR_MS, "end": NOW, "by": "day,team"}
    lines = client_of(service).get("/v1/cost", params=query).json()["lines"]
    of_day: dict[str, float] = {}
    for line in lines:
        if line["key"]["team"] in ("nlp", "vision"):
            of_day[line["key"]["day"]] = of_day.get(line["key"]["day"], 0) + float(line["cost"])
    assert sum(of_day.values()) == 20 * 6
    said = " ".join(found.texts)
    for amount in of_day.values():
        assert f" {amount:.2f}" in said


def test_a_day_that_nobody_metered_is_unknown_and_nothing_changed_against_it(
    tmp_path: Path, clock: VirtualClock
) -> None:
    chosen = settings_in(tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY)
    with Service(chosen, clock) as running:
        rows = [*held(5 * 24 + 4, 4, "GPU-1", "vision"), *held(4, 4, "GPU-1", "vision")]
        deliver(running.ledger, NOW_MS, batch(rows, cluster="prod", node="n1"))
        found = home(running)
    texts = [text.strip() for text in found.texts]
    days = dict(text.split(": ") for text in texts if re.fullmatch(r"\d+ (Oct|Nov): [^;]*", text))
    assert len(days) == 6
    first, *between, last = days.values()
    assert first.startswith("24.00")
    assert last.startswith("24.00")
    assert set(between) == {"unknown"}
    changed = texts.index("What changed since yesterday")
    assert "vision" not in texts[changed : texts.index("What each day cost")]


def test_a_team_has_one_colour_on_every_page(service: Service) -> None:
    """vision held most of the month and as much as nlp now."""
    month = f"{datetime.fromtimestamp(NOW / 1000, UTC):%Y-%m}"
    found = {}
    for path in ("/", f"/month/{month}", "/explore?by=team&start=7d", "/node/prod/n1"):
        answer = client_of(service).get(path, headers={"Accept": "text/html"})
        assert answer.status_code == 200, answer.text
        named = re.findall(r'<span class="key (s[^"]*)"></span>\s*(vision|nlp)\b', answer.text)
        found[path] = {team: css for css, team in named}
    assert len({tuple(sorted(of.items())) for of in found.values()}) == 1, found
    (of,) = {tuple(sorted(of.items())) for of in found.values()}
    assert len({css for _, css in of}) == len(of) == 2
