"""Sums of local days equal the rows, for late records, every time zone and every span."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.span_splitting import TaggedSpan, plan_spans
from accountant.storage.write.rollups import MOST_AT_ONCE, DailySums, local_day
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR
from tests.effort import examples
from tests.fresh import fresh
from tests.ledger.conftest import Hand

ZONES = ("UTC", "Europe/Berlin", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Kiritimati")
QUARTER = 15
DAY = 24 * 60 // QUARTER


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


# The clocks of Berlin go back on the 25th, those of Cairo on the 30th (where midnight comes twice): a week with both.
FIRST_MS = at("2026-10-24T00:00")
LAST_MS = FIRST_MS + 8 * MS_PER_DAY
HAND = Hand(start_ms=FIRST_MS, now_ms=LAST_MS)


@contextmanager
def opened(path: Path, zone: str) -> Iterator[DuckLedger]:
    ledger = open_ledger(fresh(path), VirtualClock(LAST_MS), month_zone=zone)
    try:
        yield ledger
    finally:
        ledger.close()


def kept(path: Path) -> dict[tuple[int, int], int]:
    """The days that have sums, and how many rows each has."""
    database = Database(path)
    with database.cursor() as cursor:
        found = cursor.run(
            "SELECT start_ms, end_ms, count(payer) FROM kept_day LEFT JOIN day ON at_ms = start_ms GROUP BY ALL"
        )
    database.close()
    return {(start, end): rows for start, end, rows in found}


def put(ledger: DuckLedger, quarters: list[int], epoch: str = "0192-a", gpu: str = "gpu-1") -> None:
    """A row for each of these quarter-hours."""
    rows = [
        HAND.row(seq, QUARTER * number, QUARTER * (number + 1), gpu, holder=Holder("pod", f"p{number % 3}", "a", "p"))
        for seq, number in enumerate(quarters, 1)
    ]
    (receipt,) = ledger.append([HAND.batch(*rows, epoch=epoch)], LAST_MS)
    assert not isinstance(receipt, Exception)
    assert receipt.quarantined == 0


def test_a_day_that_is_over_has_sums_and_a_late_row_takes_them_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.duckdb"
    with opened(path, "UTC") as ledger:
        put(ledger, [3, 4, DAY + 1, 2 * DAY])
        ledger.checkpoint()
    days = [(FIRST_MS + n * MS_PER_DAY, FIRST_MS + (n + 1) * MS_PER_DAY) for n in range(2)]
    assert kept(path) == {days[0]: 2, days[1]: 1}
    with opened(path, "UTC") as ledger:
        put(ledger, [5], "late", "gpu-2")
        told = ledger.usage(*days[0], ("gpu",))
    assert [line.accounts_gpu_us.allocated // 60_000_000 for line in told] == [2 * QUARTER, QUARTER]
    assert kept(path).keys() == {days[1]}
    with opened(path, "UTC") as ledger:
        put(ledger, [2 * DAY + 1], "later")
        ledger.checkpoint()
        assert ledger.usage(*days[0], ("gpu",)) == told
        assert ledger.imbalance(FIRST_MS, LAST_MS) == 0
    assert kept(path)[days[0]] == 3


def test_days_of_another_zone_are_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.duckdb"
    for zone, number in (("UTC", 1), ("Asia/Kathmandu", 2), ("Europe/Berlin", 3)):
        with opened(path, zone) as ledger:
            put(ledger, [*range(0, 4 * DAY, 5), 4 * DAY + number] if number == 1 else [4 * DAY + number], f"e{number}")
            ledger.checkpoint()
            assert ledger.imbalance(FIRST_MS, LAST_MS) == 0
        tz = ZoneInfo(zone)
        days = [local_day(FIRST_MS + n * MS_PER_DAY + MS_PER_HOUR, tz) for n in range(5)]
        assert sorted(day for day, rows in kept(path).items() if rows) == [
            day for day in days if day[1] <= FIRST_MS + 4 * MS_PER_DAY
        ]
    assert {end - start for (start, end), rows in kept(path).items() if rows} == {MS_PER_DAY, MS_PER_DAY + MS_PER_HOUR}


def test_the_writer_makes_few_days_at_a_time_the_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "ledger.duckdb"
    many = MOST_AT_ONCE + 1
    with opened(path, "UTC") as ledger:
        put(ledger, [*range(0, DAY * many, DAY // 2)][: 2 * many])
        put(ledger, [DAY * many - 1], "end")
        ledger.checkpoint()
    assert min(kept(path)) == (FIRST_MS + MS_PER_DAY, FIRST_MS + 2 * MS_PER_DAY)
    with opened(path, "UTC") as ledger:
        ledger.append([HAND.batch(HAND.fact(1), epoch="x")], LAST_MS)
        ledger.checkpoint()
    assert len(kept(path)) == many


@pytest.mark.parametrize("bits", [(1, 1), (0, 1), (1, 0)])
def test_a_question_takes_the_days_that_lie_inside_it(bits: tuple[int, int]) -> None:
    days = [local_day(FIRST_MS + n * MS_PER_DAY, ZoneInfo("Asia/Kathmandu")) for n in range(3)]
    span = TaggedSpan(0, days[0][0] + bits[0], days[2][1] - bits[1])
    found = plan_spans([span], set(), days)
    assert [start for _, _, start in found.days] == [day[0] for n, day in enumerate(days) if n == 1 or not bits[n // 2]]
    lengths = [(found.hours, MS_PER_HOUR), (found.quarters, BUCKET_MS)]
    of_days = sum(end - start for start, end in days if (0, 0, start) in found.days)
    edges = sum(edge.end_ms - edge.start_ms for edge in found.edges)
    assert of_days + edges + sum(len(some) * width for some, width in lengths) == span.end_ms - span.start_ms


def test_an_hour_that_two_days_share_takes_both_away() -> None:
    days = [local_day(FIRST_MS + n * MS_PER_DAY, ZoneInfo("Asia/Kathmandu")) for n in range(2)]
    hour = days[0][1] - days[0][1] % MS_PER_HOUR
    assert DailySums(tuple(days)).touching([hour]) == days
    assert hour not in DailySums(tuple(days)).without([hour]).loose
    assert DailySums(tuple(days)).without([hour]).kept == ()


BYS: tuple[tuple[Dimension, ...], ...] = ((), ("pod",), ("gpu", "day"), ("namespace", "gpu_model", "day", "hour"))


@pytest.mark.thorough
@given(
    quarters=st.lists(st.integers(0, 7 * DAY - 1), min_size=5, max_size=30, unique=True),
    zones=st.lists(st.sampled_from(ZONES), min_size=1, max_size=2),
    order=st.randoms(use_true_random=False),
    edges=st.tuples(st.integers(0, 7 * DAY * 4), st.integers(0, 7 * DAY * 4)),
    whole=st.booleans(),
)
@settings(max_examples=examples(3, 15), deadline=None)
def test_sums_of_days_are_sums_of_rows(
    quarters: list[int], zones: list[str], order: random.Random, edges: tuple[int, int], whole: bool
) -> None:
    """Compares with a ledger without sums, for records in random order and changes of the time zone."""
    low, high = (FIRST_MS + edge * BUCKET_MS // 4 for edge in sorted(edges))
    with TemporaryDirectory() as folder:
        straight, summed = Path(folder) / "straight.duckdb", Path(folder) / "summed.duckdb"
        parts = [quarters[n::2] for n in range(2)]
        with opened(straight, "UTC") as ledger:
            for number, part in enumerate(parts):
                put(ledger, sorted(part), f"e{number}")
            zone = zones[-1]
            spans = [(low, high), (FIRST_MS, LAST_MS), local_day(low, ZoneInfo(zone))]
            expected = [ledger.usage(*span, by, None, zone) for span in spans for by in BYS]
        for number, part in enumerate(parts):
            with opened(summed, zones[min(number, len(zones) - 1)]) as ledger:
                put(ledger, sorted(part), f"e{number}")
                if whole or order.random() < 0.7:
                    ledger.checkpoint()
        with opened(summed, zone) as ledger:
            for _ in range(2):
                assert [ledger.usage(*span, by, None, zone) for span in spans for by in BYS] == expected
                examined = ledger.examine(FIRST_MS, LAST_MS)
                assert examined.total_us == 0, examined.lines
                ledger.append([HAND.batch(HAND.fact(1, "nobody"), epoch="x")], LAST_MS)
                ledger.checkpoint()
