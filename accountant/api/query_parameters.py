"""Parses query strings into exact values, and refuses queries that add up too many GPU-hours.

`bounded` makes the span of every query: both ends are known and not too far apart before anything is read, and
`check_cost` takes only such a span.

Instants are epoch milliseconds, RFC 3339 with an offset, or a plain date (its first instant in the requested time
zone). An unknown parameter is an error, because a mistyped filter must not match everything.

The size of a query is estimated as the GPU-hours of capacity in its span and clusters, times the number of dimensions
of its groups. No amount of money is involved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from accountant.api.problems import Refusal, with_faults
from accountant.core import periods
from accountant.core.settings import Limits
from accountant.ledger.protocols import ReadableLedger
from accountant.reports.figure_formatting import age_note
from accountant.wire.listed_tables import ListedTable
from accountant.wire.usage_cost_and_job_models import (
    BUILT_IN,
    LABEL_NAME,
    LABEL_PREFIX,
    Dimension,
    is_label,
    known_dimension,
    label_dimension,
)
from gputally.base import instants
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

_EPOCH_MS = re.compile(r"[0-9]{1,20}")
_LOST_PLUS = re.compile(r"(T[^T]*) (\d\d:\d\d)$")
_MOST_DIMENSIONS = 6


def _known_zone(name: str | None) -> str | None:
    if name is not None:
        periods.zone(name)
    return name


def _known_month(text: str) -> str:
    periods.Month.parse(text)
    return text


def split_at_commas(values: object) -> object:
    """Splits values at commas, because `by=team,node` and `by=team&by=node` are equivalent."""
    texts = [values] if isinstance(values, str) else values
    if not isinstance(texts, Iterable):
        return values
    return [part for text in texts for part in str(text).split(",") if part]


def _distinct(by: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    if len(set(by)) < len(by):
        raise ValueError("name each dimension once")
    return by


if TYPE_CHECKING:
    NamedDimension: TypeAlias = Dimension
else:
    NamedDimension = Annotated[
        str,
        AfterValidator(known_dimension),
        WithJsonSchema({"anyOf": [{"enum": list(BUILT_IN)}, {"pattern": f"^{LABEL_PREFIX}{LABEL_NAME}$"}]}),
    ]
    """A dimension in a request: one that is built in, or `label:NAME` of an exported label."""
By = Annotated[
    tuple[NamedDimension, ...],
    BeforeValidator(split_at_commas),
    AfterValidator(_distinct),
    Field(max_length=_MOST_DIMENSIONS, description="Dimensions to group by, separated by commas."),
]
Zone = Annotated[
    str | None, AfterValidator(_known_zone), Field(description="IANA time zone; the accountant's own without it.")
]
MonthText = Annotated[
    str,
    AfterValidator(_known_month),
    Field(description="A calendar month: 2026-10.", json_schema_extra={"pattern": "^[0-9]{4}-(0[1-9]|1[0-2])$"}),
]
Instant = Annotated[
    str | None,
    Field(
        description="Epoch milliseconds, RFC 3339 with an offset and whole seconds, or a date (local midnight).",
        max_length=40,
    ),
]
Edge = Annotated[
    str | None,
    Field(
        description="Epoch milliseconds, RFC 3339 with an offset and whole seconds, a date (local midnight), or a "
        "duration such as 7d: `start` is then that long before `end`, and `end` that long before now.",
        max_length=40,
    ),
]


_OF_LABEL: Final = f"where.{LABEL_PREFIX}"


def _label_value(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not equals or not is_label(known_dimension(LABEL_PREFIX + name)):
        raise ValueError("not a label and its value: write NAME=VALUE")
    return text


class Params(BaseModel):
    """Query parameters: frozen; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _where(dimension: Dimension) -> Any:
    return Field(default=(), alias=f"where.{dimension}", description=f"Only these values of {dimension}.")


class QuerySpan(NamedTuple):
    """The span [start_ms, end_ms) of a query, as `bounded` returns it. timezone: the zone of its days and months."""

    start_ms: int
    end_ms: int
    timezone: str = "UTC"


def bounded(start_ms: int, end_ms: int, limits: Limits, timezone: str = "UTC") -> QuerySpan:
    """The span of a query. Raises ValueError with the reason for one that is empty or too long, or that reaches beyond
    the calendar."""
    instants.in_calendar(start_ms)
    instants.in_calendar(end_ms)
    if end_ms <= start_ms:
        raise ValueError(f"the span ends at or before its start: {periods.utc(start_ms)} to {periods.utc(end_ms)}")
    if end_ms - start_ms > limits.span_days * MS_PER_DAY:
        raise ValueError(f"the span is longer than {limits.span_days} days: give a later start or an earlier end")
    return QuerySpan(start_ms, end_ms, timezone)


def asked(start_ms: int, end_ms: int, limits: Limits, timezone: str = "UTC", *, parameter: str = "end") -> QuerySpan:
    """The span of a request, as `bounded` returns it. Raises Refusal, which names the parameter."""
    try:
        return bounded(start_ms, end_ms, limits, timezone)
    except ValueError as error:
        raise invalid(parameter, str(error)) from error


T = TypeVar("T")


class ListedParams(Params):
    """The parameters of a list by its table (accountant.wire.listed_tables). sort: in whose order; without it, the
    list's own."""

    search: str = Field(default="", max_length=253, description="Only rows with this text, in any case.")
    sort: str | None = Field(
        default=None, max_length=100, description="A column, as amount, amount:desc or amount:asc."
    )
    limit: int | None = Field(default=None, ge=1, le=1_000_000, description="Rows of the answer; default: all.")

    def chosen(self, rows: Sequence[T], table: ListedTable) -> list[T]:
        """The rows of the answer. Raises Refusal for a column that the list does not have."""
        return self.ordered(rows, table)[: self.limit]

    def ordered(self, rows: Sequence[T], table: ListedTable) -> list[T]:
        """As `chosen`, without the limit."""
        try:
            order = None if self.sort is None else table.orders.read(self.sort)
        except ValueError as error:
            raise invalid("sort", str(error)) from error
        return table.chosen(rows, self.search, order)


class SpanParams(Params):
    """Query parameters of a span. Without start and end: the current month so far, or the last month with records if
    the current one has none. Otherwise start defaults to the beginning of the month of `end`, and end to now."""

    start: Edge = None
    end: Edge = None
    timezone: Zone = None

    def span(self, now_ms: int, default_zone: str, limits: Limits, newest_ms: int | None = None) -> QuerySpan:
        """The span. Raises Refusal for an invalid or too long one.

        newest_ms: end of the newest record, so that the default span has records; None: always the current month."""
        name = self.timezone or default_zone
        zone = periods.zone(name)
        if self.start is None and self.end is None:
            start, end = periods.month_with_records(now_ms, newest_ms, zone).span(zone)
            return QuerySpan(start, min(end, now_ms), name)
        end = now_ms if self.end is None else edge("end", self.end, zone, now_ms)
        start = (
            periods.Month.of(end - 1, zone).span(zone)[0]
            if self.start is None
            else edge("start", self.start, zone, end)
        )
        return asked(start, end, limits, name)

    def note(self, start_ms: int, now_ms: int, zone: str, newest_ms: int, silence: str = "") -> str:
        """A note about a default span that is not the current month, about old records, and about an empty ledger; ""
        if there is nothing to note. silence: a note that names the clusters that stopped reporting."""
        if not newest_ms:
            return "the ledger has no records yet"
        if self.start is not None or self.end is not None:
            return ""
        tz = periods.zone(zone)
        current, month = periods.Month.of(now_ms, tz), periods.Month.of(start_ms, tz)
        notes = [age_note(newest_ms, now_ms), silence]
        if current != month:
            notes.insert(0, f"{current} has no records yet: this is {month}, the last month that has any")
        return "; ".join(filter(None, notes))


if TYPE_CHECKING:

    class _WhereDimensions(SpanParams):
        def __getattr__(self, name: str) -> tuple[str, ...]: ...

else:
    _WhereDimensions = create_model(
        "_WhereDimensions",
        __base__=SpanParams,
        **{f"where_{name}": (tuple[str, ...], _where(name)) for name in BUILT_IN},
    )


class WhereParams(_WhereDimensions):
    """Parameters of a query that is filtered by the values of dimensions."""

    where_label: tuple[Annotated[str, AfterValidator(_label_value)], ...] = Field(
        default=(),
        max_length=1_000,
        alias="where.label",
        description="Only these values of exported labels, each as NAME=VALUE. `where.label:NAME=VALUE` is the same.",
    )

    @model_validator(mode="before")
    @classmethod
    def _labels(cls, given: Any) -> Any:
        """Takes `where.label:NAME=VALUE` as `where.label=NAME=VALUE`."""
        if not isinstance(given, Mapping) or not any(str(name).startswith(_OF_LABEL) for name in given):
            return given
        kept = {name: value for name, value in given.items() if not str(name).startswith(_OF_LABEL)}
        named = {name.removeprefix(_OF_LABEL): value for name, value in given.items() if name not in kept}
        several = [(name, value if isinstance(value, list) else [value]) for name, value in named.items()]
        before = kept.get("where.label", [])
        pairs = [f"{name}={value}" for name, values in several for value in values]
        return {**kept, "where.label": [*(before if isinstance(before, list) else [before]), *pairs]}

    @property
    def where(self) -> Mapping[Dimension, tuple[str, ...]]:
        """The given filters only."""
        given: dict[Dimension, tuple[str, ...]] = {name: getattr(self, f"where_{name}") for name in BUILT_IN}
        for text in self.where_label:
            name, _, value = text.partition("=")
            dimension = label_dimension(name)
            given[dimension] = (*given.get(dimension, ()), value)
        return {name: values for name, values in given.items() if values}


def explored_month(month: periods.Month, query: Mapping[str, str | None], *, is_over: bool) -> str:
    """The address of Explore for a month; for one that is not over, up to now. query: further parameters, None for
    those that are left out."""
    return explored({"start": f"{month}-01", "end": f"{month.next}-01" if is_over else None, **query})


def explored(query: Mapping[str, str | Sequence[str] | None]) -> str:
    """The address of Explore with these parameters, None for those that are left out. Of a span, `start` and `end` are
    two of them."""
    given = {name: value for name, value in query.items() if value is not None}
    return "/explore?" + urlencode(given, doseq=True, safe=",:")


Compared = Annotated[
    bool, Field(description="Also the figures of the span before, of the same length, or of the month before.")
]


def with_span_before(span: QuerySpan, extent: tuple[int, int], *, compare: bool) -> tuple[QuerySpan, ...]:
    """The span, and the one to compare it with if it is to be compared. extent: of the ledger's records."""
    if not compare:
        return (span,)
    earlier, _ = periods.compared_span(span.start_ms, span.end_ms, extent, periods.zone(span.timezone))
    return span, QuerySpan(*earlier, span.timezone)


class GroupedParams(WhereParams):
    """Parameters of a query whose lines are grouped, filtered and paged."""

    by: By = ("team",)
    page: str | None = Field(default=None, max_length=4096, description="`next_page` of the previous answer.")
    limit: int = Field(default=1_000, ge=1, description="Lines of one page.")


class CostParams(GroupedParams):
    """Parameters of a query of costs. amounts: also return what pages show for the costs."""

    amounts: bool = Field(
        default=False, description="Also `amount`: the cost as pages round it, so that lines add up to the total."
    )


class UsageParams(GroupedParams):
    """Parameters of a usage query.

    breakdown: also return the kinds of allocated idle time, and the unallocated time that unused guarantees
        reserved."""

    breakdown: bool = Field(default=False, description="Also the kinds of idle time, and unused guaranteed time.")


def instant(parameter: str, text: str, zone: ZoneInfo) -> int:
    """Parses an instant as UTC milliseconds. Raises Refusal, which names the parameter."""
    return _parsed(parameter, text, lambda plain: instants.parse_instant(plain, zone))


def edge(parameter: str, text: str, zone: ZoneInfo, until_ms: int) -> int:
    """Parses an edge of a span as UTC milliseconds. Raises Refusal, which names the parameter.

    until_ms: the instant before which a duration such as 7d lies."""
    return _parsed(parameter, text, lambda plain: instants.parse_edge(plain, zone, until_ms))


def _parsed(parameter: str, text: str, parse: Callable[[str], int]) -> int:
    try:
        if _EPOCH_MS.fullmatch(text):
            return instants.in_calendar(int(text))
        # In a query string an unescaped + is decoded as a space.
        return parse(_LOST_PLUS.sub(r"\1+\2", text))
    except (ValueError, OverflowError) as error:
        raise invalid(parameter, str(error)) from error


def check_cost(
    ledger: ReadableLedger,
    limits: Limits,
    span: QuerySpan,
    width: int = 1,
    clusters: Sequence[str] = (),
    *,
    parameter: str = "end",
) -> None:
    """Raises Refusal if the estimate of a query exceeds `limits.question_gpu_hours`. Nothing is computed.

    parameter: the one that sets the length of the span; the refusal names it."""
    if reason := refusal(ledger, limits.question_gpu_hours, span, width, clusters):
        raise invalid(parameter, f"the query has {reason}")


def invalid(parameter: str, reason: str) -> Refusal:
    """The refusal of one parameter."""
    return with_faults("invalid-parameter", [(parameter, reason)])


REPORT_WIDTH: Final = 6
"""Approximate number of groupings that a statement or a report adds up."""
JOBS_WIDTH: Final = 4
"""Dimensions that identify a job and its payer."""


def estimate(ledger: ReadableLedger, span: QuerySpan, width: int = 1, clusters: Sequence[str] = ()) -> int:
    """Estimates the GPU-hours that a query adds up.

    width: number of dimensions of the groups.
    clusters: the clusters of the query; empty: all."""
    status = ledger.status()
    hours = sum(status.gpu_hours(span.start_ms, span.end_ms, cluster) for cluster in set(clusters) or (None,))
    return hours * max(1, width)


def refusal(ledger: ReadableLedger, most: int, span: QuerySpan, width: int = 1, clusters: Sequence[str] = ()) -> str:
    """Why a query is too large, and how to make it smaller, as the rest of a sentence; "" if it is allowed. most: the
    largest allowed `estimate`."""
    gpu_hours = estimate(ledger, span, width, clusters)
    if gpu_hours <= most:
        return ""
    days, hours = ((span.end_ms - span.start_ms) * most // gpu_hours // unit for unit in (MS_PER_DAY, MS_PER_HOUR))
    less = [f"about {days} days" if days > 1 else f"about {max(1, hours)} hours"]
    less += [f"fewer than {width} dimensions"] * (width > 1) + ["one cluster"] * (not clusters)
    times = f" (times {width} dimensions)" if width > 1 else ""
    return f"{gpu_hours} GPU-hours to add up{times}, and {most} are the most: ask for {', or for '.join(less)}"
