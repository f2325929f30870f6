"""The start of windows of each kind, at and around its boundaries, and across changes of daylight saving time."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from accountant.core.window_decay import bounds
from accountant.wire.policy_models import WindowSpec

BERLIN, NEW_YORK, KIRITIMATI = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Pacific/Kiritimati")
WEEK_S = 604_800


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def begin(at: str, zone: ZoneInfo = BERLIN, **spec: object) -> str:
    start, end = bounds(WindowSpec.model_validate(spec), ms(at), zone)
    assert end == ms(at)
    return datetime.fromtimestamp(start / 1000, zone).isoformat()


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-11-02T00:00:00+01:00", "2026-10-26T00:00:00+01:00"),  # at a firing: the week that has just ended
        ("2026-11-02T00:00:00.001+01:00", "2026-11-02T00:00:00+01:00"),
        ("2026-11-01T23:59:59.999+01:00", "2026-10-26T00:00:00+01:00"),
        ("2026-10-25T12:00:00+01:00", "2026-10-19T00:00:00+02:00"),  # the week with 169 hours
        ("2026-04-01T12:00:00+02:00", "2026-03-30T00:00:00+02:00"),
    ],
)
def test_a_cron_window_begins_at_the_last_firing_before(at: str, expected: str) -> None:
    assert begin(at, kind="cron", cron="0 0 * * 1") == expected


def test_cron_goes_by_the_time_zone_of_the_books() -> None:
    assert begin("2026-11-01T12:00:00Z", KIRITIMATI, kind="cron", cron="0 0 1 * *") == "2026-11-01T00:00:00+14:00"
    assert begin("2026-03-08T12:00:00Z", NEW_YORK, kind="cron", cron="30 3 * * *") == "2026-03-08T03:30:00-04:00"


@pytest.mark.parametrize(
    ("at", "start", "expected"),
    [
        ("2026-11-04T00:00:00Z", "2026-11-02T00:00:00Z", "2026-11-02T00:00:00+00:00"),
        ("2026-11-09T00:00:00Z", "2026-11-02T00:00:00Z", "2026-11-02T00:00:00+00:00"),
        ("2026-11-09T00:00:00.001Z", "2026-11-02T00:00:00Z", "2026-11-09T00:00:00+00:00"),
        ("2026-10-27T00:00:00Z", "2026-11-02T00:00:00Z", "2026-10-26T00:00:00+00:00"),  # before the first one too
        ("2026-11-04T00:00:00Z", "2026-11-02T01:00:00+02:00", "2026-11-01T23:00:00+00:00"),
    ],
)
def test_a_tumbling_window_begins_a_multiple_of_its_size_from_its_start(at: str, start: str, expected: str) -> None:
    assert begin(at, ZoneInfo("UTC"), kind="tumbling", size="7d", start=start) == expected


def test_a_calendar_window_is_the_local_month() -> None:
    assert begin("2026-11-01T00:00:00+01:00", kind="calendar") == "2026-10-01T00:00:00+02:00"
    assert begin("2026-10-31T10:30:00Z", KIRITIMATI, kind="calendar") == "2026-11-01T00:00:00+14:00"


KINDS = [
    {"kind": "sliding", "size": WEEK_S},
    {"kind": "tumbling", "size": 5 * 3600},
    {"kind": "tumbling", "size": WEEK_S, "start": "2026-01-05T00:00:30Z"},
    {"kind": "cron", "cron": "15 2 * * *"},
    {"kind": "cron", "cron": "*/7 * * * *"},
    {"kind": "calendar"},
]


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(ms("2000-01-01T00:00:00Z"), ms("2060-01-01T00:00:00Z")),
    st.sampled_from([BERLIN, NEW_YORK, KIRITIMATI, ZoneInfo("UTC")]),
)
def test_a_window_is_never_empty_and_one_boundary_follows_the_other(spec: dict, at: int, zone: ZoneInfo) -> None:
    window = WindowSpec.model_validate(spec)
    start, end = bounds(window, at, zone)
    assert start < end == at
    if window.kind != "sliding":
        before, boundary = bounds(window, start, zone)
        assert before < boundary == start
        assert bounds(window, start + 1, zone)[0] == start  # seen from just after it, the boundary is the same
        assert all(bounds(window, at - k * (at - start) // 4, zone)[0] == start for k in range(4))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"kind": "cron"}, "belong together"),
        ({"cron": "0 0 * * 1"}, "belong together"),
        ({"kind": "cron", "cron": "0 0 * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "61 0 * * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "0 0 30 2 *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "R 0 * * *"}, "not a cron expression"),
        ({"kind": "cron", "cron": "H 0 * * *"}, "not a cron expression"),
        ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, "only tumbling windows have a start"),
        ({"kind": "tumbling", "start": "2026-01-01T00:00:00"}, "timezone"),
    ],
)
def test_what_is_no_window_is_refused(spec: dict, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        WindowSpec.model_validate(spec)
