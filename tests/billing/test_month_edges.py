"""Where months meet, on the real ledger: clocks that change, leap days, zones ahead of UTC, prices that change then.

One GPU, held by turns without end. What each month says is held against the plain arithmetic of its instants; a price
that changes at 00:00 local changes there and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from accountant.billing.statements import from_canonical
from accountant.billing.usage_pricing import cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.periods import Month, days, midnight_ms, zone
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR, US_PER_MS
from tests.billing.rows import price_book
from tests.usage_records import batch, interval

QUARTER_MS = 900_000
MODEL = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Edge:
    """month: its hours and its longest or shortest local day. changed: of that day, None where all have 24 hours."""

    timezone: str
    month: Month
    hours: float
    changed: str | None = None
    day_hours: float = 24


EDGES = (
    Edge("Europe/Berlin", Month(2026, 3), 743, "2026-03-29", 23),
    Edge("Europe/Berlin", Month(2026, 10), 745, "2026-10-25", 25),
    Edge("America/New_York", Month(2026, 3), 743, "2026-03-08", 23),
    Edge("America/New_York", Month(2026, 11), 721, "2026-11-01", 25),  # on the first day of the month
    Edge("America/Santiago", Month(2026, 9), 719, "2026-09-06", 23),  # its midnight does not exist
    Edge("Australia/Lord_Howe", Month(2026, 4), 720.5, "2026-04-05", 24.5),
    Edge("Asia/Kathmandu", Month(2026, 4), 720),  # UTC+5:45
    Edge("Pacific/Kiritimati", Month(2026, 10), 744),  # UTC+14
    Edge("Pacific/Pago_Pago", Month(2026, 12), 744),  # UTC-11, into another year
    Edge("UTC", Month(2028, 2), 696),
    Edge("UTC", Month(2026, 2), 672),
)


@pytest.fixture(params=EDGES, ids=lambda edge: f"{edge.timezone}-{edge.month}")
def edge(request: pytest.FixtureRequest) -> Edge:
    found = request.param
    assert isinstance(found, Edge)
    return found


@pytest.fixture
def ledger(edge: Edge, tmp_path: Path) -> Iterator[DuckLedger]:
    """The month and two days on either side, in quarters: an odd one is vision's, an even one language's."""
    start, end = edge.month.span(zone(edge.timezone))
    begin, stop = start - 2 * MS_PER_DAY, end + 2 * MS_PER_DAY
    found = open_ledger(tmp_path / "ledger.duckdb", VirtualClock(stop), month_zone=edge.timezone)
    found.observe(Facts(namespaces=tuple(NamespaceFacts("c", team, team) for team in ("vision", "language"))), begin)
    busy_us = QUARTER_MS * US_PER_MS // 3
    rows = [
        interval(at, "GPU-0", _holder(at), gpu_model=MODEL, busy_us=busy_us) for at in range(begin, stop, QUARTER_MS)
    ]
    (receipt,) = found.append([batch(rows)], stop)
    assert not isinstance(receipt, Exception)
    assert (receipt.stored, receipt.quarantined) == (len(rows), 0)
    yield found
    found.close()


def _team(at_ms: int) -> str:
    return "vision" if at_ms // QUARTER_MS % 2 else "language"


def _holder(at_ms: int) -> Holder:
    return Holder("pod", f"uid-{_team(at_ms)}", _team(at_ms), "train-0")


def keeper(ledger: DuckLedger, edge: Edge, *days_of_change: str) -> Bookkeeper:
    """Books in the zone whose price rises by one at the beginning of each of these local days."""
    edges = ["2025-01-01", *days_of_change, None]
    rows = "\n".join(
        f"id: p{number}, model: H100, price: '{number + 1}.07', valid_from: {since}"
        + (f", valid_to: {until}" if until else "")
        for number, (since, until) in enumerate(pairwise(edges))
    )
    found = Bookkeeper(ledger, VirtualClock(edge.month.next.next.span(zone(edge.timezone))[1]), edge.timezone)
    found.prices.take(price_book(rows, timezone=edge.timezone), "file", "prices.yaml", "", 0)
    return found


def test_a_month_has_its_own_hours_its_price_from_its_first_midnight_and_closes_so(
    ledger: DuckLedger, edge: Edge
) -> None:
    tz = zone(edge.timezone)
    start, end = edge.month.span(tz)
    books = keeper(ledger, edge, f"{edge.month}-01", f"{edge.month.next}-01")
    before, stated, after = (books.month(one) for one in (edge.month.previous, edge.month, edge.month.next))
    assert stated.gpu_us == int(edge.hours * US_PER_HOUR) == (end - start) * US_PER_MS
    assert stated.coverage == 1.0
    assert stated.cost == Decimal("2.07") * stated.gpu_hours
    assert stated.gpu_hours == Decimal(str(edge.hours))
    assert (before.end_ms, after.start_ms) == (start, end)
    for beside, price in ((before, "1.07"), (after, "3.07")):
        held = [line for line in beside.lines if line.unit_price is not None]
        assert {line.unit_price for line in held} == {Decimal(price)}
        assert sum(line.gpu_us for line in held) == 2 * MS_PER_DAY * US_PER_MS
    quarters = range(start, end, QUARTER_MS)
    for team in ("vision", "language"):
        expected = sum(_team(at) == team for at in quarters) * QUARTER_MS * US_PER_MS
        assert sum(line.gpu_us for line in stated.lines if line.team == team) == expected

    books.close(edge.month.previous, "ada", "begins in its last days", ("coverage",))
    kept = from_canonical(books.close(edge.month, "ada").content.encode())
    assert kept.lines == stated.lines
    assert (kept.start_ms, kept.end_ms) == (before.end_ms, after.start_ms)
    assert books.month(edge.month) == kept


def test_days_and_hours_have_their_own_length_and_a_price_changes_between_two_days(
    ledger: DuckLedger, edge: Edge
) -> None:
    """The price changes at the midnight that begins the day on which the clocks change (or the 15th), and after it."""
    tz = zone(edge.timezone)
    start, end = edge.month.span(tz)
    day = date.fromisoformat(edge.changed or f"{edge.month}-15")
    books = keeper(ledger, edge, str(day), str(day + timedelta(days=1)))
    found = cost(ledger, books.prices.current, start, end, ("day",), None, edge.timezone)
    by_day = {line.key["day"]: line for line in found.lines}
    assert by_day[str(day)].gpu_us == int(edge.day_hours * US_PER_HOUR)
    assert by_day[str(day)].cost == Decimal("2.07") * Decimal(str(edge.day_hours))
    for each, begin, stop in days(start, end, tz):
        price = Decimal("1.07") if each < day else Decimal("2.07") if each == day else Decimal("3.07")
        assert by_day[str(each)].gpu_us == (stop - begin) * US_PER_MS
        assert by_day[str(each)].cost == price * Decimal(stop - begin) / MS_PER_HOUR
    assert sum(line.gpu_us for line in found.lines) == int(edge.hours * US_PER_HOUR)
    # Hours that come twice or never, as they are.
    begin, stop = midnight_ms(day, tz), midnight_ms(day + timedelta(days=1), tz)
    by_hour = {
        line.key["hour"]: line.accounts_gpu_us.total
        for line in ledger.usage(begin, stop, ("hour",), None, edge.timezone)
    }
    assert sum(by_hour.values()) == (stop - begin) * US_PER_MS
    changed = sorted(gpu_us for gpu_us in by_hour.values() if gpu_us != US_PER_HOUR)
    match edge.day_hours:
        case 25:
            assert (len(by_hour), changed) == (24, [2 * US_PER_HOUR])
        case 24.5:
            assert (len(by_hour), changed) == (24, [3 * US_PER_HOUR // 2])
        case 23:
            assert (len(by_hour), changed) == (23, [])
        case _:
            assert (len(by_hour), changed) == (24, [])
