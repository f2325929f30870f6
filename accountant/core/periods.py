"""Defines calendar months, days and hours of a time zone as UTC spans, and values that change at known instants.

Spans are half-open [start_ms, end_ms). A month is a calendar month of the configured time zone. It is an hour longer or
shorter if the clocks change in it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator

from gputally.base.instants import EARLIEST_MS, LATEST_MS, midnight_ms
from gputally.base.units import BUCKET_MS, MS_PER_DAY, MS_PER_SECOND

_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")


def zone(name: str) -> ZoneInfo:
    """The IANA zone of that name. Raises ValueError for an unknown one."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"unknown time zone: {name!r}") from error


def _known_timezone(name: str) -> str:
    zone(name)
    return name


KnownTimezone = Annotated[str, AfterValidator(_known_timezone)]
"""The name of an IANA time zone."""


def utc(at_ms: int) -> str:
    """The instant as `2026-10-01T00:00:00Z`, the form in files and error messages; outside the calendar, where a
    sender's faulty number may be, as that number."""
    if not EARLIEST_MS <= at_ms <= LATEST_MS:
        return f"{at_ms} ms since 1970"
    return datetime.fromtimestamp(at_ms // MS_PER_SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def local_date(at_ms: int, tz: ZoneInfo) -> date:
    """The local day of an instant."""
    return datetime.fromtimestamp(at_ms // MS_PER_SECOND, tz).date()


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month; its span depends on the time zone."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str) -> Month:
        """From `2026-10`. Raises ValueError."""
        match = _MONTH.fullmatch(text)
        if match is None or not 1970 < int(match[1]) < 9999:
            raise ValueError(f"not a month: {text!r} (write for example 2026-10)")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, at_ms: int, tz: ZoneInfo) -> Month:
        """The month of an instant."""
        day = local_date(at_ms, tz)
        return cls(day.year, day.month)

    @classmethod
    def spanning(cls, start_ms: int, end_ms: int, tz: ZoneInfo) -> Month | None:
        """The month that has exactly this span; None if no month has it."""
        month = cls.of(start_ms, tz)
        return month if month.span(tz) == (start_ms, end_ms) else None

    @property
    def next(self) -> Month:
        return Month(self.year + self.month // 12, self.month % 12 + 1)

    @property
    def previous(self) -> Month:
        return Month(self.year - (self.month == 1), (self.month - 2) % 12 + 1)

    def span(self, tz: ZoneInfo) -> tuple[int, int]:
        """[start_ms, end_ms) in UTC milliseconds."""
        first, following = date(self.year, self.month, 1), date(self.next.year, self.next.month, 1)
        return midnight_ms(first, tz), midnight_ms(following, tz)

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.month:02d}"


def month_with_records(now_ms: int, newest_ms: int | None, tz: ZoneInfo) -> Month:
    """The current month if it has records, otherwise the month of the newest record.

    newest_ms: end of the newest record; 0 or None if there is none."""
    running = Month.of(now_ms - 1, tz)
    if not newest_ms or newest_ms > running.span(tz)[0]:
        return running
    return Month.of(newest_ms - 1, tz)


_HOUR, _SECOND = len("2026-10-01T13"), len("2026-10-01T13:00:00")


def hour_name(at_ms: int, tz: ZoneInfo) -> str:
    """The name of the local hour of an instant: 2026-10-01T13.

    When clocks go back, an hour occurs twice, and its second occurrence has the offset in its name: 2026-10-25T02, then
    2026-10-25T02+01:00. Names therefore sort by time, and no hour is longer than an hour."""
    local = datetime.fromtimestamp(at_ms // MS_PER_SECOND, tz)
    text = local.isoformat()
    return text[:_HOUR] + (text[_SECOND:] if local.fold else "")


def hour_of_day(name: str) -> int:
    """The hour of the day, 0 to 23, of a local hour by its name."""
    return int(name[_HOUR - 2 : _HOUR])


def next_quarter(at_ms: int) -> int:
    """The first quarter-hour boundary after an instant."""
    return at_ms - at_ms % BUCKET_MS + BUCKET_MS


def quarters(start_ms: int, end_ms: int) -> list[tuple[int, int]]:
    """The span, split at quarter-hours."""
    first, last = next_quarter(start_ms), end_ms - end_ms % BUCKET_MS
    if end_ms <= first:
        return [(start_ms, end_ms)] if start_ms < end_ms else []
    whole = [(at, at + BUCKET_MS) for at in range(first, last, BUCKET_MS)]
    return [(start_ms, first), *whole, *([(last, end_ms)] if last < end_ms else [])]


@dataclass(frozen=True, slots=True)
class LocalHour:
    """A part of one local hour with its names, such as `2026-10-01` and `2026-10-01T13` (see `hour_name`)."""

    start_ms: int
    end_ms: int
    day: str
    hour: str


@lru_cache(maxsize=16)
def local_hours(start_ms: int, end_ms: int, zone: ZoneInfo) -> tuple[LocalHour, ...]:
    """The span, split where the local day or hour changes. Time zones differ by multiples of a quarter-hour."""
    starts: list[tuple[int, str]] = []
    for begin, _ in quarters(start_ms, end_ms):
        hour = hour_name(begin, zone)
        if not starts or starts[-1][1] != hour:
            starts.append((begin, hour))
    ends = [begin for begin, _ in starts[1:]] + [end_ms]
    return tuple(
        LocalHour(begin, end, hour[: len("2026-10-01")], hour) for (begin, hour), end in zip(starts, ends, strict=False)
    )


def hours(start_ms: int, end_ms: int, tz: ZoneInfo) -> dict[str, int]:
    """The local hours of a span by their names in the ledger (`hour_name`), with their length in ms."""
    lengths: dict[str, int] = {}
    at = start_ms
    while at < end_ms:
        until = min(end_ms, (at // BUCKET_MS + 1) * BUCKET_MS)
        hour = hour_name(at, tz)
        lengths[hour] = lengths.get(hour, 0) + until - at
        at = until
    return lengths


TimeUnit: TypeAlias = Literal["hour", "day", "month"]


def time_unit(start_ms: int, end_ms: int, tz: ZoneInfo) -> TimeUnit:
    """The unit of time in which a span is shown: hours up to four days, days up to a hundred, then months."""
    first, last = (datetime.fromtimestamp(at_ms // MS_PER_SECOND, tz) for at_ms in (start_ms, end_ms))
    days = (last - first).days
    return "hour" if days < 4 else "day" if days <= 100 else "month"


def day_span(day: date, tz: ZoneInfo) -> tuple[int, int]:
    """[start_ms, end_ms) of a local day."""
    return midnight_ms(day, tz), midnight_ms(day + timedelta(days=1), tz)


def by_month(start_ms: int, end_ms: int, tz: ZoneInfo) -> Iterator[tuple[int, int]]:
    """The parts of [start_ms, end_ms) in calendar months, in order."""
    while start_ms < end_ms:
        until_ms = min(end_ms, Month.of(start_ms, tz).span(tz)[1])
        yield start_ms, until_ms
        start_ms = until_ms


def days(start_ms: int, end_ms: int, tz: ZoneInfo) -> Iterator[tuple[date, int, int]]:
    """The local days that overlap a span, each cut to the span: (day, start_ms, end_ms)."""
    at = start_ms
    while at < end_ms:
        day = local_date(at, tz)
        end = min(day_span(day, tz)[1], end_ms)
        yield day, at, end
        at = end


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeline(Generic[T]):
    """A value that changes at known instants.

    steps: (since_ms, value), at least one, ascending, neighbours with different values. The first value also applies
        before its instant."""

    steps: tuple[tuple[int, T], ...]

    @classmethod
    def always(cls, value: T) -> Timeline[T]:
        return cls(((0, value),))

    @property
    def latest(self) -> T:
        return self.steps[-1][1]

    def at(self, at_ms: int) -> T:
        """The value at an instant."""
        return self.steps[max(0, bisect_right(self.steps, at_ms, key=lambda step: step[0]) - 1)][1]

    def changes(self) -> Iterator[int]:
        """The instants at which the value changes."""
        return (since for since, _ in self.steps[1:])

    def changed(self, value: T, since_ms: int) -> Timeline[T]:
        """A copy with `value` from `since_ms` on; later steps are dropped, earlier ones kept."""
        kept = tuple(step for step in self.steps if step[0] < since_ms)
        if not kept:
            return Timeline(((since_ms, value),))
        if kept[-1][1] == value:
            return Timeline(kept)
        return Timeline((*kept, (since_ms, value)))


def span_before(start_ms: int, end_ms: int, tz: ZoneInfo) -> tuple[int, int]:
    """The span to compare with: for a month the previous one, for the beginning of a month the same part of the
    previous one, otherwise the same length before."""
    month = Month.of(start_ms, tz)
    first, last = month.span(tz)
    if start_ms == first and end_ms <= last:
        begin, stop = month.previous.span(tz)
        return begin, stop if end_ms == last else min(begin + end_ms - start_ms, stop)
    return start_ms - (end_ms - start_ms), start_ms


@dataclass(frozen=True, slots=True)
class Days:
    """The lengths, in days, by which two spans are compared, of which the one before has records only in part."""

    now: Decimal
    before: Decimal

    def rates(self, now: Decimal | int, before: Decimal | int) -> tuple[Decimal, Decimal]:
        """The figures of both spans, a day."""
        return now / self.now, before / self.before


def compared_span(
    start_ms: int, end_ms: int, extent: tuple[int, int], tz: ZoneInfo
) -> tuple[tuple[int, int], Days | None]:
    """The span to compare with, and how: `span_before`, as a whole (None); or, if records begin inside of it, the time
    from the first record to the span, by day, because nothing is known of the rest.

    extent: start of the first record and end of the newest one."""
    first_ms, newest_ms = extent
    before = span_before(start_ms, end_ms, tz)
    if not before[0] < first_ms < start_ms:
        return before, None
    until_ms = min(end_ms, newest_ms)
    days = Days(_days(start_ms, until_ms), _days(first_ms, start_ms)) if until_ms > start_ms else None
    return (first_ms, start_ms), days


def _days(start_ms: int, end_ms: int) -> Decimal:
    return Decimal(end_ms - start_ms) / MS_PER_DAY
