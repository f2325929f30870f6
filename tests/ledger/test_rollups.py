"""Sums of hours and local days equal the rows, and unknown memory is unknown in sums of every width."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from accountant.storage.span_splitting import TaggedSpan, plan_spans
from accountant.storage.write.rollups import MOST_AT_ONCE, DailySums, local_day
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, booked
from tests.moments import present

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
def opened_in_zone(path: Path, zone: str) -> Iterator[DuckLedger]:
    with closing(open_ledger(fresh(path), VirtualClock(LAST_MS), month_zone=zone)) as ledger:
        yield ledger


def kept(path: Path) -> dict[tuple[int, int], int]:
    """The days that have sums, each with the number of its rows."""
    with closing(Database(path)) as database, database.cursor() as cursor:
        found = cursor.run(
            "SELECT start_ms, end_ms, count(payer) FROM kept_day LEFT JOIN day ON at_ms = start_ms GROUP BY ALL"
        )
    return {(start, end): rows for start, end, rows in found}


def put(ledger: DuckLedger, quarters: list[int], epoch: str = "0192-a", gpu: str = "gpu-1") -> None:
    """Books a row in each of these quarter-hours."""
    rows = [
        HAND.row(seq, QUARTER * number, QUARTER * (number + 1), gpu, holder=Holder("pod", f"p{number % 3}", "a", "p"))
        for seq, number in enumerate(quarters, 1)
    ]
    assert booked(ledger, LAST_MS, HAND.batch(*rows, epoch=epoch)).quarantined == 0


def test_a_day_that_is_over_has_sums_and_a_late_row_takes_them_away(tmp_path):
    path = tmp_path / "ledger.duckdb"
    with opened_in_zone(path, "UTC") as ledger:
        put(ledger, [3, 4, DAY + 1, 2 * DAY])
        ledger.checkpoint()
    days = [(FIRST_MS + n * MS_PER_DAY, FIRST_MS + (n + 1) * MS_PER_DAY) for n in range(2)]
    assert kept(path) == {days[0]: 2, days[1]: 1}
    with opened_in_zone(path, "UTC") as ledger:
        put(ledger, [5], "late", "gpu-2")
        told = present(ledger).usage(days[0], ("gpu",)).lines()
    assert [line.accounts_gpu_us.allocated // 60_000_000 for line in told] == [2 * QUARTER, QUARTER]
    assert kept(path).keys() == {days[1]}
    with opened_in_zone(path, "UTC") as ledger:
        put(ledger, [2 * DAY + 1], "later")
        ledger.checkpoint()
        assert present(ledger).usage(days[0], ("gpu",)).lines() == told
        assert present(ledger).imbalance(FIRST_MS, LAST_MS).total_us == 0
    assert kept(path)[days[0]] == 3


def test_days_of_another_zone_are_made_anew(tmp_path):
    path = tmp_path / "ledger.duckdb"
    for zone, number in (("UTC", 1), ("Asia/Kathmandu", 2), ("Europe/Berlin", 3)):
        with opened_in_zone(path, zone) as ledger:
            put(ledger, [*range(0, 4 * DAY, 5), 4 * DAY + number] if number == 1 else [4 * DAY + number], f"e{number}")
            ledger.checkpoint()
            assert present(ledger).imbalance(FIRST_MS, LAST_MS).total_us == 0
        tz = ZoneInfo(zone)
        days = [local_day(FIRST_MS + n * MS_PER_DAY + MS_PER_HOUR, tz) for n in range(5)]
        assert sorted(day for day, rows in kept(path).items() if rows) == [
            day for day in days if day[1] <= FIRST_MS + 4 * MS_PER_DAY
        ]
    assert {end - start for (start, end), rows in kept(path).items() if rows} == {MS_PER_DAY, MS_PER_DAY + MS_PER_HOUR}


def test_the_writer_makes_few_days_at_a_time_the_newest_first(tmp_path):
    path = tmp_path / "ledger.duckdb"
    many = MOST_AT_ONCE + 1
    with opened_in_zone(path, "UTC") as ledger:
        put(ledger, [*range(0, DAY * many, DAY // 2)][: 2 * many])
        put(ledger, [DAY * many - 1], "end")
        ledger.checkpoint()
    assert min(kept(path)) == (FIRST_MS + MS_PER_DAY, FIRST_MS + 2 * MS_PER_DAY)
    with opened_in_zone(path, "UTC") as ledger:
        ledger.append([HAND.batch(HAND.fact(1), epoch="x")], LAST_MS)
        ledger.checkpoint()
    assert len(kept(path)) == many


@pytest.mark.parametrize("bits", [(1, 1), (0, 1), (1, 0)])
def test_a_question_takes_the_days_that_lie_inside_it(bits):
    days = [local_day(FIRST_MS + n * MS_PER_DAY, ZoneInfo("Asia/Kathmandu")) for n in range(3)]
    span = TaggedSpan(0, days[0][0] + bits[0], days[2][1] - bits[1])
    found = plan_spans([span], set(), days)
    assert [start for _, _, start in found.days] == [day[0] for n, day in enumerate(days) if n == 1 or not bits[n // 2]]
    lengths = [(found.hours, MS_PER_HOUR), (found.quarters, BUCKET_MS)]
    of_days = sum(end - start for start, end in days if (0, 0, start) in found.days)
    edges = sum(edge.end_ms - edge.start_ms for edge in found.edges)
    assert of_days + edges + sum(len(some) * width for some, width in lengths) == span.end_ms - span.start_ms


def test_an_hour_that_two_days_share_takes_both_away():
    days = [local_day(FIRST_MS + n * MS_PER_DAY, ZoneInfo("Asia/Kathmandu")) for n in range(2)]
    hour = days[0][1] - days[0][1] % MS_PER_HOUR
    assert DailySums(tuple(days)).touching([hour]) == days
    assert hour not in DailySums(tuple(days)).without([hour]).loose
    assert DailySums(tuple(days)).without([hour]).kept == ()


BYS: tuple[tuple[Dimension, ...], ...] = (
    (),
    ("pod",),
    ("month", "pod"),
    ("gpu", "day"),
    ("namespace", "gpu_model", "day", "hour"),
)


@pytest.mark.thorough
@given(
    quarters=st.lists(st.integers(0, 7 * DAY - 1), min_size=5, max_size=30, unique=True),
    zones=st.lists(st.sampled_from(ZONES), min_size=1, max_size=2),
    order=st.randoms(use_true_random=False),
    edges=st.tuples(st.integers(0, 7 * DAY * 4), st.integers(0, 7 * DAY * 4)),
    whole=st.booleans(),
)
@settings(max_examples=examples(3, 15))
def test_sums_of_days_are_sums_of_rows(quarters, zones, order, edges, whole):
    """Compares with a ledger without sums, for records in random order and changes of the time zone."""
    low, high = (FIRST_MS + edge * BUCKET_MS // 4 for edge in sorted(edges))
    with TemporaryDirectory() as folder:
        straight, summed = Path(folder) / "straight.duckdb", Path(folder) / "summed.duckdb"
        parts = [quarters[n::2] for n in range(2)]
        with opened_in_zone(straight, "UTC") as ledger:
            for number, part in enumerate(parts):
                put(ledger, sorted(part), f"e{number}")
            zone = zones[-1]
            spans = [(low, high), (FIRST_MS, LAST_MS), local_day(low, ZoneInfo(zone))]
            expected = [present(ledger).usage(span, by, None, zone).lines() for span in spans for by in BYS]
        for number, part in enumerate(parts):
            with opened_in_zone(summed, zones[min(number, len(zones) - 1)]) as ledger:
                put(ledger, sorted(part), f"e{number}")
                if whole or order.random() < 0.7:
                    ledger.checkpoint()
        with opened_in_zone(summed, zone) as ledger:
            for _ in range(2):
                assert [present(ledger).usage(span, by, None, zone).lines() for span in spans for by in BYS] == expected
                examined = present(ledger).imbalance(FIRST_MS, LAST_MS)
                assert examined.total_us == 0, examined.lines
                ledger.append([HAND.batch(HAND.fact(1, "nobody"), epoch="x")], LAST_MS)
                ledger.checkpoint()


MINUTE_US = 60_000_000


@pytest.mark.parametrize(
    ("recorded", "figure", "unknown"),
    [
        ("memory_mib_s", "memory_mib_s", "memory_unknown_us"),
        ("sm_active_us", "sm_active_us", "sm_unknown_us"),
        ("tensor_active_us", "tensor_active_us", "tensor_unknown_us"),
    ],
)
def test_what_is_unknown_and_its_time_are_told_through_every_width_of_sums(
    opened, tmp_path, hand, recorded, figure, unknown
):
    """Reads rows, hours, days and the archive. The figure of GPU 1 is known, that of GPU 2 is not, and that of GPU 3
    half the time."""
    archive = in_folder(tmp_path / "archive")
    hour, half = 60 * MINUTE_US, 30 * MINUTE_US

    def told(ledger: DuckLedger, end_ms: int, *by: Dimension) -> list[tuple[int | None, int, int]]:
        lines = present(ledger).usage((START_MS, end_ms), by).lines()
        return [(getattr(one, figure), getattr(one, unknown), one.accounts_gpu_us.allocated) for one in lines]

    def check(ledger: DuckLedger) -> None:
        for end_ms in (START_MS + MS_PER_HOUR, START_MS + MS_PER_DAY):
            assert told(ledger, end_ms, "gpu") == [(3600, 0, hour), (None, hour, hour), (0, half, hour)]
            assert told(ledger, end_ms) == [(3600, hour + half, 3 * hour)]
        cut = told(ledger, START_MS + 30 * MINUTE + 30_000, "gpu")
        assert [(known, blind) for known, blind, _ in cut] == [
            (1830, 0), (None, half + MINUTE_US // 2), (0, 15 * MINUTE_US + MINUTE_US // 2)
        ]  # fmt: skip

    ledger, numbers = opened(archive=archive), itertools.count(1)
    rows = [
        hand.row(next(numbers), minute, minute + 1, gpu=gpu, **{recorded: value})
        for minute in range(60)
        for gpu, value in (("gpu-1", 60), ("gpu-2", None), ("gpu-3", 0 if minute % 2 else None))
    ]
    booked(ledger, NOW_MS, hand.batch(*rows))
    check(ledger)
    later = hand.row(next(numbers), 48 * 60, 48 * 60 + 1, gpu="gpu-1", **{recorded: 60})
    now_ms = NOW_MS + 3 * MS_PER_DAY
    booked(ledger, now_ms, hand.batch(later))
    ledger.checkpoint()
    check(ledger)
    ledger.archive(now_ms)
    assert ledger.freeze(START_MS + 2 * MS_PER_HOUR) == 1
    check(ledger)
    check(opened(tmp_path / "rebuilt.duckdb", VirtualClock(now_ms), archive=archive))
