"""OpenCost's texts for a span of time.

Named windows (`today`, `lastweek`, ...), durations back from now (`7d`, `24h offset 14h`), and pairs of instants
(`1790812800,1790899200`, with `-` too, or RFC 3339). As OpenCost does, durations end at the coming full hour,
those of whole days or weeks at the coming midnight; weeks begin on Sunday; everything is UTC.

Source: OpenCost core/pkg/opencost/window.go (parseWindow). It counts an offset in weeks as 24 weeks; here a
week is a week.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from agent.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

_UNIT_MS = {"m": MS_PER_MINUTE, "h": MS_PER_HOUR, "d": MS_PER_DAY, "w": 7 * MS_PER_DAY}
_DURATION = re.compile(r"(\d{1,6})([mhdw])")
_OFFSET = re.compile(r"(\d{1,6}[mhdw]) offset (\d{1,6}[mhdw])")
_UNIX_PAIR = re.compile(r"(\d{1,11})[,-](\d{1,11})")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class NotAWindow(ValueError):
    """The text is none of OpenCost's windows."""


def parse(text: str, now_ms: int) -> tuple[int, int]:
    """[start_ms, end_ms) of the window. Raises NotAWindow."""
    named = _named(text, now_ms)
    if named is not None:
        return named
    if pair := _UNIX_PAIR.fullmatch(text):
        return _ordered(int(pair[1]) * MS_PER_SECOND, int(pair[2]) * MS_PER_SECOND, text)
    first, comma, second = text.partition(",")
    if comma:
        return _ordered(_instant(first), _instant(second), text)
    offset_ms = 0
    if shifted := _OFFSET.fullmatch(text):
        text, offset_ms = shifted[1], duration_ms(shifted[2])
    span_ms = duration_ms(text)
    grain_ms = MS_PER_DAY if text[-1] in "dw" else MS_PER_HOUR
    end = -(-(now_ms - offset_ms) // grain_ms) * grain_ms
    return end - span_ms, end


def duration_ms(text: str) -> int:
    """Of `30m`, `24h`, `7d`, `2w`. Raises NotAWindow."""
    found = _DURATION.fullmatch(text)
    if not found or int(found[1]) == 0:
        raise NotAWindow(
            f"{text[:60]!r}: expected today, yesterday, week, lastweek, month, lastmonth, a duration such as 7d, or "
            "two instants separated by a comma"
        )
    return int(found[1]) * _UNIT_MS[found[2]]


def _named(text: str, now_ms: int) -> tuple[int, int] | None:
    midnight = now_ms - now_ms % MS_PER_DAY
    # 1970-01-01 was a Thursday: four days after a Sunday.
    sunday = midnight - (midnight // MS_PER_DAY + 4) % 7 * MS_PER_DAY
    today = datetime.fromtimestamp(now_ms / MS_PER_SECOND, UTC)
    first = today.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month = round(first.timestamp() * MS_PER_SECOND)
    match text:
        case "today":
            return midnight, midnight + MS_PER_DAY
        case "yesterday":
            return midnight - MS_PER_DAY, midnight
        case "week":
            return sunday, now_ms
        case "lastweek":
            return sunday - 7 * MS_PER_DAY, sunday
        case "month":
            return month, now_ms
        case "lastmonth":
            before = (first - timedelta(days=1)).replace(day=1)
            return round(before.timestamp() * MS_PER_SECOND), month
        case _:
            return None


def _instant(text: str) -> int:
    if not _RFC3339.fullmatch(text):
        raise NotAWindow(f"{text[:60]!r}: expected an instant such as 2026-10-01T00:00:00Z")
    try:
        return round(datetime.fromisoformat(text).timestamp() * MS_PER_SECOND)
    except ValueError as error:
        raise NotAWindow(f"{text[:60]!r}: {error}") from error


def _ordered(start_ms: int, end_ms: int, text: str) -> tuple[int, int]:
    if start_ms >= end_ms:
        raise NotAWindow(f"{text[:80]!r}: the end is not after the start")
    return start_ms, end_ms
