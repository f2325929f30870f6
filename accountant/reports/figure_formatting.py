"""Formats a report's figures as text, and describes the age of the newest record.

Rounding here is for display only; files for programs (CSV, canonical JSON) do not use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias
from zoneinfo import ZoneInfo

from accountant.billing.charge import Account, Detail
from accountant.core.periods import Days, Month, local_date
from accountant.core.periods import utc as utc
from accountant.core.record_age import is_old
from accountant.reports.report_breakdowns import SpanChange, change
from accountant.reports.savings_hints import HARDLY_USED as HARDLY_USED
from accountant.reports.savings_hints import Hint
from accountant.reports.week_parts import LEAST_METERED, WeekPart, is_weekend
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.instants import midnight_ms
from gputally.base.money import HOUR_PLACES, exact_sum, minor_places
from gputally.base.number_format import NOTHING as NOTHING
from gputally.base.number_format import gpus as gpus
from gputally.base.number_format import hours as hours
from gputally.base.number_format import number, signed
from gputally.base.number_format import percent as percent
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report

# Names that are imported `as` themselves are used by templates.

ACCOUNT_NAMES: dict[Account, str] = {
    "busy": "Busy",
    "allocated_idle": "Allocated, idle",
    "allocated_unknown": "Allocated, use unknown",
    "unallocated": "Unallocated",
    "unmetered": "Unmetered",
    "down": "Down",
}
DETAIL_NAMES: dict[Detail, str] = {
    "": "",
    "starting": "starting",
    "gang_waiting": "waiting for its gang",
    "running_idle": "running",
    "spread": "share of idle capacity",
    "reserved": "guaranteed, left unused",
}
_SPECIAL_NAMES = {IDLE: "Not held (unallocated)", UNASSIGNED: "Not assigned to a team", "": NOTHING}


def money(amount: Decimal | None, currency: str | None) -> str:
    """An amount with the decimals of its currency and without the currency, which is in the heading: `1,234.56`."""
    if amount is None or currency is None:
        return NOTHING
    return number(amount, minor_places(currency))


def priced(amount: Decimal, unpriced_us: int, currency: str | None) -> str:
    """A cost of time that is partly unpriced: `unpriced`, or `12.00 + unpriced`."""
    if currency is None or not unpriced_us:
        return money(amount, currency)
    return f"{money(amount, currency)} + unpriced" if amount else "unpriced"


def large_money(amount: Decimal, currency: str | None) -> str:
    """Formats an amount like `money`, but without decimals from 10,000 upwards."""
    return number(amount, 0) if abs(amount) >= 10_000 else money(amount, currency)


def price(amount: Decimal) -> str:
    """A unit price with all its decimals, at least two."""
    exponent = amount.normalize().as_tuple().exponent
    return number(amount, max(2, -exponent if isinstance(exponent, int) else 2))


def points(now: float | None, before: float | None) -> str:
    """Difference of two ratios in percentage points: `+1.2 pts`."""
    if now is None or before is None:
        return NOTHING
    return f"{signed(f'{(now - before) * 100:+.1f}')} pts"


def relative(difference: SpanChange | None) -> str:
    """The change from the span before: `+12.3 %`."""
    if difference is None or difference.relative is None:
        return NOTHING
    return f"{signed(f'{difference.relative * 100:+,.1f}')} %"


def relative_of(now: Decimal | int | None, before: Decimal | int | None, by_day: Days | None = None) -> str:
    """The change between two totals: `+12.3 %`. by_day: how they are compared, if not as wholes: `+12.3 % a day`."""
    if now is None or before is None:
        return NOTHING
    rates = (Decimal(now), Decimal(before)) if by_day is None else by_day.rates(now, before)
    text = relative(change(*rates))
    return text if by_day is None or text == NOTHING else f"{text} a day"


Relative: TypeAlias = Callable[[Decimal | int | None, Decimal | int | None], str]
"""Writes the change between two totals, as `relative_of` does."""


def by_days(by_day: Days | None) -> Relative:
    """`relative_of` for spans that are compared so."""
    return partial(relative_of, by_day=by_day)


def unknown_change(_now: Decimal | int | None, _before: Decimal | int | None) -> str:
    """The change of totals whose spans are not comparable."""
    return NOTHING


def signed_money(amount: Decimal, currency: str | None) -> str:
    """A difference: `+12.00`."""
    text = money(amount, currency)
    return f"+{text}" if amount > 0 else text


def name(value: str) -> str:
    """A team's name; the ledger's special names as words."""
    return _SPECIAL_NAMES.get(value, value)


def queue(value: str) -> str:
    """A queue's name; the ledger's special names as words."""
    return "No queue" if value == UNASSIGNED else name(value)


def advice(hint: Hint) -> str:
    """One sentence: what was observed, and what would have been enough."""
    held = f"{hours(hint.job.figures.accounts.allocated)} GPU-hours held"
    used = f"{percent(hint.job.figures.utilisation)} busy"
    if hint.kind == "idle":
        return f"{held}, {used}. To hold them only while they are used would have been enough."
    if hint.kind == "fewer":
        return (
            f"Held {gpus(hint.held)} GPUs; its busiest hour used {gpus(hint.peak_busy)} ({held}, {used}). "
            f"{gpus(hint.needed)} would have been enough."
        )
    return (
        f"Held a whole GPU; its busiest hour used {percent(hint.peak_busy, 0)} of it ({held}, {used}). "
        f"A slice of {hint.needed}/{hint.needed_of} would have been enough."
    )


def duration(ms: int) -> str:
    """`45 s`, `3.2 min`, `5.4 h`, `2.1 d`: in the largest unit of which it has at least one."""
    for length, unit, places in ((MS_PER_DAY, "d", 1), (MS_PER_HOUR, "h", 1), (60 * MS_PER_SECOND, "min", 1)):
        if ms >= length:
            return f"{number(Decimal(ms) / length, places)} {unit}"
    return f"{number(Decimal(ms) / MS_PER_SECOND, 0)} s"


def budgeted(amount: Decimal | float | None, unit: str) -> str:
    """An amount of a budget: money with the decimals of its currency, GPU-hours with one decimal."""
    if amount is None:
        return NOTHING
    value = Decimal(repr(amount)) if isinstance(amount, float) else amount
    return hours_of(value) if unit == "GPU-hours" else money(value, unit)


def spent(state: BudgetState) -> str:
    """What is spent of a budget, in the format of `budgeted`."""
    return budgeted(state.shown, state.unit)


def one_decimal(value: float) -> str:
    """A number with one decimal: `12,345.6`."""
    return number(Decimal(repr(value)), 1)


def hours_of(value: Decimal) -> str:
    """GPU-hours: `12,345.6`."""
    return number(value, 1)


def exact_hours(value: Decimal) -> tuple[str, str]:
    """GPU-hours with all nine decimals, divided into the readable part and the rest: `12,345.6`, `78901234`; `0` has no
    rest."""
    hours, point, rest = number(value, HOUR_PLACES).partition(".")
    return hours + point + rest[:1], rest[1:]


def used_up(state: BudgetState, tz: ZoneInfo) -> str:
    """The local day on which a budget is used up, with the forecast's interval: `23 October (21 October – 26 October)`;
    `on 23 October` if it is used up already."""
    if state.exhausted_ms is None:
        early = state.exhausted_earliest_ms
        return NOTHING if early is None else f"perhaps from {_day(early, tz)}"
    if state.ratio is not None and state.ratio >= 1:
        return f"on {_day(state.exhausted_ms, tz)}"
    until = "later than the month" if state.exhausted_latest_ms is None else _day(state.exhausted_latest_ms, tz)
    return f"{_day(state.exhausted_ms, tz)} ({_day(state.exhausted_earliest_ms or 0, tz)} – {until})"


def budget_of(state: BudgetState) -> str:
    """The owner of a budget: `team vision` or `queue research`."""
    return f"team {name(state.team)}" if state.team is not None else f"queue {state.queue}"


def local_hour(text: str) -> str:
    """`2026-10-05T14` as `5 October, 14:00`, and `2026-10-25T02+01:00` as `25 October, 02:00 (+01:00)`."""
    hour, offset = text[:13], text[13:]
    return f"{datetime.fromisoformat(hour + ':00'):%-d %B, %H:%M}" + (f" ({offset})" if offset else "")


def clock(hour: int) -> str:
    """An hour of the day: `14:00 to 15:00`."""
    return f"{hour:02d}:00 to {(hour + 1) % 24:02d}:00"


def span(report: Report) -> str:
    """The span as `October 2026`, `1–3 October 2026`, or two instants."""
    return span_of(report.start_ms, report.end_ms, report.tz)


def before(report: Report) -> str:
    """The span of comparison, in the format of `span`."""
    return span_of(*report.before_ms, report.tz)


def before_short(report: Report) -> str:
    return compared_short(*report.before_ms, report.by_day, report.tz)


def compared_text(start_ms: int, end_ms: int, by_day: Days | None, tz: ZoneInfo) -> str:
    """The span of comparison, and how it is compared: `16–31 October 2026, by day`."""
    return span_of(start_ms, end_ms, tz) + (", by day" if by_day is not None else "")


def compared_short(start_ms: int, end_ms: int, by_day: Days | None, tz: ZoneInfo) -> str:
    """The span of comparison in short: `September 2026`, `same part of September 2026`, `September 2026 from 16 Sep`,
    `the span before`."""
    begin, month = datetime.fromtimestamp(start_ms // MS_PER_SECOND, tz), Month.of(start_ms, tz)
    if by_day is not None:
        of_month = month.span(tz)[1] == end_ms
        return f"{begin:%B %Y} from {begin:%-d %b}" if of_month else f"the span before from {begin:%-d %b %Y}"
    if Month.spanning(start_ms, end_ms, tz):
        return span_of(start_ms, end_ms, tz)
    return f"same part of {begin:%B %Y}" if month.span(tz)[0] == start_ms else "the span before"


def a_day(report: Report, now: Decimal, before: Decimal) -> str:
    """Two amounts of a report that is compared by day: `EUR 3,210.00 a day against 3,050.00 a day in October 2026 from
    16 Oct`."""
    rates = (now, before) if report.by_day is None else report.by_day.rates(now, before)
    texts = [money(rate, report.currency) for rate in rates]
    return f"{report.currency} {texts[0]} a day against {texts[1]} a day in {before_short(report)}"


def against(report: Report, now: Decimal | int | None, before: Decimal | int | None) -> str:
    """The change of a figure from the span before, by day if the report is compared so: `+12.3 %`."""
    if report.by_day is None or now is None or before is None:
        return relative_of(now, before)
    return relative_of(*report.by_day.rates(now, before))


def length(start_ms: int, end_ms: int) -> str:
    """Length of a span in hours: `744 h`."""
    return f"{number(Decimal(end_ms - start_ms) / MS_PER_HOUR, 1).removesuffix('.0')} h"


def span_of(start_ms: int, end_ms: int, tz: ZoneInfo) -> str:
    """A span as `October 2026`, `1–3 October 2026`, or two instants."""
    start, end = (datetime.fromtimestamp(at // MS_PER_SECOND, tz) for at in (start_ms, end_ms))
    if Month.spanning(start_ms, end_ms, tz):
        return f"{start:%B %Y}"
    whole_days = all(at == midnight_ms(local_date(at, tz), tz) for at in (start_ms, end_ms))
    if not whole_days:
        return f"{start:%-d %b %Y %H:%M} to {end:%-d %b %Y %H:%M}"
    last = local_date(end_ms, tz) - timedelta(days=1)
    if last == start.date():
        return f"{start:%-d %B %Y}"
    if (last.year, last.month) == (start.year, start.month):
        return f"{start:%-d}–{last:%-d} {start:%B %Y}"
    return f"{start:%-d %B} to {last:%-d %B %Y}"


_WITHOUT_SIGN_IN: Final = "without sign-in"
"""The beginning of `Principal.actor` of a caller without a name of its own."""


def actor(who: str) -> str:
    """Who did an act: a person, a program, or `from file NAME`; where nobody needed to sign in, that nobody did, and
    from where it came, as far as known. Acts of earlier versions name files by their paths."""
    if who.startswith(("/", "file ")):
        return f"from file {who.removeprefix('file ').rpartition('/')[2]}"
    if who == "anonymous" or who.startswith(_WITHOUT_SIGN_IN):
        return f"nobody signed in (sign-in was off){who.removeprefix('anonymous').removeprefix(_WITHOUT_SIGN_IN)}"
    return who or "not recorded"


def reason(given: str) -> str:
    """Why an act was done."""
    return given or "no reason given"


def paid_time(unheld: bool) -> str:
    """The time of which a mean cost is. unheld: whether time that nobody held may be in it."""
    return "for time held or not" if unheld else "for held time"


def week_text(parts: Sequence[WeekPart], currency: str | None, *, unheld: bool = False) -> str:
    """The means in words; "" without days of both kinds, which would compare nothing. unheld: as in `paid_time`."""
    said = []
    for part in parts:
        figures = [f"{hours(part.held_us)} GPU-h held"]
        if currency and part.cost is not None:
            figures.append(f"{currency} {money(part.cost, currency)} {paid_time(unheld)}")
        if part.utilisation is not None:
            figures.append(f"{percent(part.utilisation)} used")
        said.append((part.weekend, part.days, ", ".join(figures)))
    return _weekday_means(said)


def weekday_mean_text(days: Iterable[tuple[date, Decimal | int]], shown: Callable[[Decimal], str]) -> str:
    """The means of one figure in words, as `week_text`. shown: how its mean is written, with the unit."""
    known = [(day, Decimal(value)) for day, value in days]
    said = []
    for weekend in (False, True):
        of_kind = [value for day, value in known if is_weekend(day) == weekend]
        if of_kind:
            said.append((weekend, len(of_kind), shown(exact_sum(of_kind) / len(of_kind))))
    return _weekday_means(said)


def _weekday_means(said: Sequence[tuple[bool, int, str]]) -> str:
    if len(said) < 2:
        return ""
    means = [
        f"{'a day of a weekend' if weekend else 'A weekday'}, mean of {days}: {figures}"
        for weekend, days, figures in said
    ]
    return f"{'; '.join(means)}. Whole days that are metered to {percent(LEAST_METERED, 0)} or more."


def records_begin(start_ms: int, end_ms: int, since_ms: int, tz: ZoneInfo) -> str:
    """Says of which part of a span nothing is known, because the ledger's first record is inside it; otherwise "".

    since_ms: start of the first record."""
    if not start_ms < since_ms < end_ms:
        return ""
    begin = datetime.fromtimestamp(since_ms // MS_PER_SECOND, tz)
    return f"records begin {begin:%-d %b %Y %H:%M}: nothing is known of {span_of(start_ms, since_ms, tz)}"


def date_of(day: date) -> str:
    """A date: `5 November 2026`."""
    return f"{day:%-d %B %Y}"


def _day(at_ms: int, tz: ZoneInfo) -> str:
    return f"{local_date(at_ms, tz):%-d %B}"


def silent_clusters(newest_by_cluster: Mapping[str, int], now_ms: int) -> dict[str, int]:
    """The clusters that stopped reporting while others continue, with the end of their newest record."""
    silent = {name: newest_ms for name, newest_ms in sorted(newest_by_cluster.items()) if is_old(newest_ms, now_ms)}
    return silent if len(silent) < len(newest_by_cluster) else {}


def silence_note(newest_by_cluster: Mapping[str, int], now_ms: int) -> str:
    """Names the clusters that stopped reporting while others continue; "" if there are none."""
    return "; ".join(
        f"cluster {name!r} has not reported for {duration(now_ms - newest_ms)} (since {utc(newest_ms)})"
        for name, newest_ms in silent_clusters(newest_by_cluster, now_ms).items()
    )


def age_note(newest_ms: int, now_ms: int) -> str:
    """The age of the newest record if it is old; otherwise ""."""
    if not is_old(newest_ms, now_ms):
        return ""
    return f"the newest record is {duration(now_ms - newest_ms)} old ({utc(newest_ms)})"


_GPU_ERRORS: Final = {"xid": "XID", "ecc uncorrected": "uncorrected memory error", "slowdowns": "slowdown"}
"""The kinds of errors of which an agent may not know, in words."""


def no_gpu_errors(unread: Iterable[Iterable[str]]) -> str:
    """What is known of GPUs that report no error. unread: `KIND: REASON` of the kinds that are not read, of each.

    Example: `no XID, no uncorrected memory error; not known: slowdown`."""
    kinds = {one.partition(":")[0] for of_gpu in unread for one in of_gpu}
    read = [f"no {name}" for kind, name in _GPU_ERRORS.items() if kind not in kinds]
    if not read:
        return "unknown"
    missing = [_GPU_ERRORS.get(kind, kind) for kind in sorted(kinds)]
    return ", ".join(read) + (f"; not known: {', '.join(missing)}" if missing else "")
