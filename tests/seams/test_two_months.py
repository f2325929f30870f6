"""A month in progress beside the closed one before it, each at the prices of its own book.

In September vision uses an H100 for the first four hours of the month, at 2 an hour. September is closed. From October
on an H100 is 3 an hour, and vision uses another one for the first four hours of October."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_MS, Site, book, hours_of, site

SEPTEMBER_MS, OCTOBER_MS = 1_788_220_800_000, 1_790_812_800_000
INVENTORY = """\
schema: 1
cluster: prod
nodes: [{name: n1, deleted: 2026-09-01T04:00:00Z}, {name: n2, deleted: 2026-10-01T04:00:00Z}]
namespaces: [{name: vision, team: vision}]
"""


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """It is 2:00 on 1 October, and two hours of October are reported."""
    given: dict[str, Any] = {"prices": book("id: h, model: H100, price: 2"), "inventory": INVENTORY}
    with site(tmp_path_factory.mktemp("months"), VirtualClock(OCTOBER_MS + 2 * HOUR_MS), **given) as found:
        found.send(hours_of("A", SEPTEMBER_MS, 4, "vision/train", 1))
        kinds = [one["kind"] for one in found.get("/v1/periods/2026-09")["objections"]]
        found.post("/v1/periods/2026-09/close", {"reason": "done", "acknowledge": kinds})
        found.post("/v1/prices", book("id: h, model: H100, price: 3"), month="2026-10", reason="dearer")
        found.send(hours_of("B", OCTOBER_MS, 2, "vision/train", 1), node="n2")
        yield found


def test_a_closed_month_keeps_its_price_and_the_one_in_progress_ends_now(months: Site) -> None:
    closed, open_month = (months.get("/v1/statement", month=month) for month in ("2026-09", "2026-10"))
    assert (closed["status"], closed["due"], closed["gpu_hours"]) == ("closed", {"vision": "8.00"}, "4.000000000")
    assert (open_month["status"], open_month["due"]) == ("open", {"vision": "6.00"})
    assert (open_month["start_ms"], open_month["end_ms"]) == (OCTOBER_MS, OCTOBER_MS + 2 * HOUR_MS)


def test_the_beginning_of_a_month_is_compared_with_the_same_part_of_the_month_before(months: Site) -> None:
    """Two hours at 3 with two hours at 2."""
    found = months.tables(month="2026-10")
    assert (found["summary"]["cost"], found["summary"]["cost_before"]) == ("6.00", "4.00")
    assert [(row["team"], row["cost"], row["cost_change"]) for row in found["teams"]] == [("vision", "6.00", "2.00")]


def test_a_whole_month_is_compared_with_the_closed_statement_of_the_month_before(months: Site) -> None:
    """Four hours at 3 with four at 2. Runs last: it lets October pass."""
    months.clock.advance(31 * 24 * HOUR_MS)
    months.send(hours_of("B", OCTOBER_MS + 2 * HOUR_MS, 2, "vision/train", 1), node="n2")
    found = months.tables(month="2026-10")
    assert (found["summary"]["cost"], found["summary"]["cost_before"]) == ("12.00", "8.00")
    assert [Decimal(row["cost_change"]) for row in found["teams"]] == [4]
