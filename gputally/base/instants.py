"""Parses instants, durations, and the edges of spans that people write, and shows instants in tables.

Example: `--start 7d` begins a span 168 hours before its end, and `--start 2026-10-01` at that day's local midnight.
Instants are UTC milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Final
from zoneinfo import ZoneInfo

from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND

EARLIEST_MS: Final = -MS_PER_DAY
"""Before 1970-01-01 in every time zone."""
LATEST_MS: Final = 253_370_764_800_000
"""9999-01-01 in UTC. From EARLIEST_MS to here the months and days around an instant exist in every time zone."""
MOST_DURATION_S: Final = 36_525 * 86_400
"""A century. A longer duration would reach beyond the calendar."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_EPOCH_MS = re.compile(r"[0-9]{1,20}")
_AGO = re.compile(r"(\d+[a-z]+)+")
_DURATION, _PART = re.compile(r"(?:\d+[wdhms])+"), re.compile(r"(\d+)([wdhms])")
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_WHOLE = re.compile("[0-9]{1,12}")


def duration_seconds(text: str) -> int:
    """Return the seconds of a text such as `7d`, `1h30m`, `1w` or `90`. Raises ValueError for any other text."""
    if _WHOLE.fullmatch(text):
        return int(text)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"not a duration: {text!r} (write for example 7d, 12h, 1h30m)")
    return sum(int(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def midnight_ms(day: date, tz: ZoneInfo) -> int:
    """The first instant of a local day, UTC ms.

    If the clocks skip midnight, it is the instant of the change; if midnight occurs twice, the first one (PEP 495,
    fold=0)."""
    return round(datetime(day.year, day.month, day.day, tzinfo=tz).timestamp()) * MS_PER_SECOND


def in_calendar(at_ms: int) -> int:
    """The instant itself. Raises ValueError if it is not from EARLIEST_MS to LATEST_MS, because the edges of the
    calendar have no month or day before or after them."""
    if not EARLIEST_MS <= at_ms <= LATEST_MS:
        raise ValueError("the instant is not between the years 1970 and 9998")
    return at_ms


def parse_instant(text: str, tz: ZoneInfo, also: str = "") -> int:
    """UTC ms of `2026-10-01` (local midnight in `tz`) or of a date-time with its offset.

    Raises ValueError for any other text, and for an instant outside `in_calendar`. A date-time without an offset is
    refused because such a local time can occur twice a year, and one with a fraction of a second because instants are
    whole seconds.

    also: an example of what else the caller takes, for the message."""
    form = f"{also}, 2026-10-01" if also else "2026-10-01"
    if _DATE.fullmatch(text):
        try:
            return in_calendar(midnight_ms(date.fromisoformat(text), tz))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"not a day of the calendar between 1970 and 9998: {text!r} (write {form})") from error
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"not a date: {text!r} (write {form}, or 2026-10-01T09:00:00+02:00)") from error
    if at.tzinfo is None:
        raise ValueError(
            f"{text!r} has no offset from UTC: write 2026-10-01T09:00:00+02:00 or 2026-10-01T07:00:00Z, or only a day: "
            "2026-10-01"
        )
    if at.microsecond:
        raise ValueError(f"{text!r} has a fraction of a second: write whole seconds")
    return in_calendar(round(at.timestamp()) * MS_PER_SECOND)


def is_duration(text: str) -> bool:
    """Whether an edge of a span is written as a duration, such as `7d`."""
    return bool(_AGO.fullmatch(text))


def parse_edge(text: str, tz: ZoneInfo, until_ms: int) -> int:
    """UTC ms of an edge of a span: an instant (`parse_instant`, or milliseconds since 1970), or `7d`, which is that
    long before `until_ms`.

    The edge of a duration is rounded down, to a full hour if the duration has whole hours, otherwise to a quarter of an
    hour, because sums of whole hours are kept longest. Raises ValueError."""
    if _EPOCH_MS.fullmatch(text):
        return in_calendar(int(text))
    if not _AGO.fullmatch(text):
        return parse_instant(text, tz, also="7d")
    length_s = duration_seconds(text)
    if not 0 < length_s <= MOST_DURATION_S:
        raise ValueError(f"{text!r} is not the length of a span (write for example 7d)")
    edge_ms = until_ms - length_s * MS_PER_SECOND
    step_ms = BUCKET_MS if length_s * MS_PER_SECOND % MS_PER_HOUR else MS_PER_HOUR
    return in_calendar(edge_ms - edge_ms % step_ms)


def utc_text(ms: int) -> str:
    """Return an instant as shown in tables, to a second."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
