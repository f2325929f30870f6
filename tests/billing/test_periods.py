"""Months and days of a zone: never 730 hours, and right where the clocks change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.periods import Month, days, zone
from tests.effort import examples

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("month", "tz", "hours"),
    [
        ("2026-10", "UTC", 744),
        ("2026-09", "UTC", 720),
        ("2026-02", "UTC", 672),
        ("2028-02", "UTC", 696),
        ("2026-03", "Europe/Berlin", 743),
        ("2026-10", "Europe/Berlin", 745),
        ("2026-10", "Asia/Kolkata", 744),
        ("2026-04", "Australia/Lord_Howe", 720.5),
        ("2018-11", "America/Sao_Paulo", 719),  # midnight of the 4th did not exist
    ],
)
def test_hours_of_a_month(month, tz, hours):
    start, end = Month.parse(month).span(zone(tz))
    assert (end - start) / HOUR_MS == hours


def test_neighbours():
    assert Month.parse("2026-12").next == Month(2027, 1)
    assert Month.parse("2026-01").previous == Month(2025, 12)
    assert str(Month.parse("2026-02")) == "2026-02"


@pytest.mark.parametrize("text", ["2026-13", "2026-1", "26-10", "2026-10-01", "", "1970-01", "9999-01"])
def test_not_a_month(text):
    with pytest.raises(ValueError, match="not a month"):
        Month.parse(text)


@pytest.mark.parametrize("name", ["Mars/Base", "", "../etc/passwd", "Europe"])
def test_not_a_zone(name):
    with pytest.raises(ValueError, match="unknown time zone"):
        zone(name)


@settings(max_examples=examples(20, 120), deadline=None)
@given(
    st.integers(1_000_000_000, 2_000_000_000),
    st.integers(1, 40 * 24 * 3600),
    st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia", "Asia/Beirut"]),
)
def test_days_partition_a_span(start_s, length_s, name):
    start, end = start_s * 1000, (start_s + length_s) * 1000
    pieces = list(days(start, end, zone(name)))
    assert pieces[0][1] == start
    assert pieces[-1][2] == end
    for (day, _, stop), (next_day, begin, _) in pairwise(pieces):
        assert stop == begin
        assert day < next_day


def test_every_instant_has_one_month():
    tz = zone("Europe/Berlin")
    start, end = Month.parse("2026-03").span(tz)
    assert [str(Month.of(at, tz)) for at in (start - 1, start, end - 1, end)] == [
        "2026-02", "2026-03", "2026-03", "2026-04",
    ]  # fmt: skip
