"""Parses OpenCost's query parameters: `window=`, `aggregate=`, `filter=`.

The window is split by `step`. With `accumulate` it is also split at the boundaries of that unit: hours, days, weeks
from Sunday, months or quarters, in UTC. Each AllocationSet of the answer covers one or more of these spans.

`resolution` is accepted and not used, because nothing is sampled. Parameters that OpenCost ignores are ignored. A
parameter that changes figures in OpenCost but is not supported here is named in the answer's `warning`. An unknown
filter is refused, because an unfiltered answer would look like the requested one. Source: OpenCost
pkg/costmodel/aggregation.go (the handlers' parameters), core/pkg/opencost/query.go.

A window is a name (`today`, `lastweek`, ...), a duration back from now (`7d`, `24h offset 14h`), or a pair of instants
(`1790812800,1790899200`, also with `-`, or RFC 3339). As in OpenCost, durations end at the next full hour, and those of
whole days or weeks at the next midnight. Weeks begin on Sunday, and everything is UTC. Source: OpenCost
core/pkg/opencost/window.go (parseWindow). For each week of an offset, OpenCost shifts the window by 24 weeks. This
module shifts it by one week.

Grammar of filters:

    filter = element (('+' | '|') element)*      + is and, | is or; both together only with parentheses
    element = '(' filter ')' | key operator value
    key = cluster, node, namespace, ... | label[id] | annotation[id]
    operator = ':' equals, '~:' contains, '<~:' starts with, '~>:' ends with; '!' before it negates
    value = "text" (',' "text")*                 one of them; negated: none of them

Source: OpenCost core/pkg/filter/ast/parser.go and core/pkg/filter/allocation/parser.go. `one_of` implements OpenCost's
older filter parameters, such as `filterNamespaces=a,b*`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from typing import Literal, cast, get_args
from urllib.parse import parse_qsl

from accountant.api.query_parameters import QuerySpan, bounded
from accountant.core.settings import Limits
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

_UNIT_MS = {"m": MS_PER_MINUTE, "h": MS_PER_HOUR, "d": MS_PER_DAY, "w": 7 * MS_PER_DAY}
_DURATION = re.compile(r"(\d{1,6})([mhdw])")
_OFFSET = re.compile(r"(\d{1,6}[mhdw]) offset (\d{1,6}[mhdw])")
_UNIX_PAIR = re.compile(r"(\d{1,11})[,-](\d{1,11})")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class NotAWindow(ValueError):
    """The text is not a valid window."""


def parse_window(text: str, now_ms: int) -> tuple[int, int]:
    """Parses `window=` as the span [start_ms, end_ms). Raises NotAWindow."""
    span = _named(text, now_ms)
    if span is not None:
        return span
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
    """Parses a duration such as `30m`, `24h`, `7d` or `2w` as milliseconds. Raises NotAWindow."""
    match = _DURATION.fullmatch(text)
    if not match or int(match[1]) == 0:
        raise NotAWindow(
            f"{text[:60]!r}: expected today, yesterday, week, lastweek, month, lastmonth, a duration such as 7d, or "
            "two instants separated by a comma"
        )
    return int(match[1]) * _UNIT_MS[match[2]]


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


Properties = Mapping[str, str]
"""The properties of one allocation by their names in filters; labels as label[NAME]."""
Predicate = Callable[[Properties], bool]

MAX_CHARACTERS = 4_096
MAX_DEPTH = 32
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"[^"]*")|(?P<op>!?(?:<~|~)?>?:)|(?P<key>[A-Za-z]+(?:\[[^\]]+\])?)|(?P<sign>[()+|,]))'
)
_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    ":": str.__eq__,
    "~:": str.__contains__,
    "<~:": str.startswith,
    "~>:": str.endswith,
}


class NotAFilter(ValueError):
    """The text is no filter, or names an unknown property. The message has the place and the reason."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def parse_filter(text: str, keys: frozenset[str]) -> Predicate:
    """Parses a filter as a test of an allocation's properties; an empty text accepts every allocation. Raises
    NotAFilter.

    keys: the properties that are allowed; `label` allows label[...]."""
    if len(text) > MAX_CHARACTERS:
        raise NotAFilter(f"the filter has more than {MAX_CHARACTERS} characters")
    if not text.strip():
        return lambda _: True
    parser = _Parser(_tokens(text), keys)
    predicate = parser.filter(0)
    parser.end()
    return predicate


def one_of(key: str, names: Sequence[str]) -> Predicate:
    """Returns a test whether a property has one of these values; a value that ends with * is a prefix."""
    accepted = [name.strip() for name in names if name.strip()]

    def matches(properties: Properties) -> bool:
        value = properties.get(key, "")
        return any(value.startswith(name[:-1]) if name.endswith("*") else value == name for name in accepted)

    return matches


def keys_of(text: str) -> frozenset[str]:
    """The properties that a filter uses, without the part in brackets. Raises NotAFilter."""
    return frozenset(token.text.partition("[")[0] for token in _tokens(text) if token.kind == "key")


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if not match or match.lastgroup is None:
            raise NotAFilter(f"character {at + 1}: {text[at : at + 20]!r} is not part of a filter")
        tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1))
        at = match.end()
    return tokens


class _Parser:
    """A recursive descent parser of filters; see the grammar above."""

    def __init__(self, tokens: list[_Token], keys: frozenset[str]) -> None:
        self._tokens = tokens
        self._keys = keys
        self._next = 0

    def filter(self, depth: int) -> Predicate:
        if depth > MAX_DEPTH:
            raise NotAFilter(f"more than {MAX_DEPTH} nested parentheses")
        parts = [self._element(depth)]
        sign = ""
        while (token := self._peek()) is not None and token.text in ("+", "|"):
            if sign and token.text != sign:
                raise NotAFilter(f"character {token.at}: + and | together need parentheses")
            sign = token.text
            self._take()
            parts.append(self._element(depth))
        if sign == "|":
            return lambda properties: any(part(properties) for part in parts)
        return lambda properties: all(part(properties) for part in parts)

    def end(self) -> None:
        token = self._peek()
        if token is not None:
            raise NotAFilter(f"character {token.at}: {token.text!r} follows the end of the filter")

    def _element(self, depth: int) -> Predicate:
        token = self._take()
        if token.text == "(":
            inner = self.filter(depth + 1)
            self._take(")")
            return inner
        if token.kind != "key":
            raise NotAFilter(f"character {token.at}: expected a property or (, not {token.text!r}")
        if token.text.partition("[")[0] not in self._keys:
            known = ", ".join(sorted(self._keys))
            raise NotAFilter(f"character {token.at}: unknown property {token.text!r}; there are {known}")
        operator = self._take()
        negated = operator.text.startswith("!")
        test = _TESTS.get(operator.text.removeprefix("!"))
        if operator.kind != "op" or test is None:
            raise NotAFilter(f"character {operator.at}: expected an operator such as : after {token.text}")
        values = [self._value()]
        while (comma := self._peek()) is not None and comma.text == ",":
            self._take()
            values.append(self._value())
        key = token.text

        def matches(properties: Properties) -> bool:
            property_value = properties.get(key, "")
            return any(test(property_value, expected) for expected in values) != negated

        return matches

    def _value(self) -> str:
        token = self._take()
        if token.kind != "text":
            raise NotAFilter(f"character {token.at}: expected a value in quotes, not {token.text!r}")
        return token.text[1:-1]

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, expected: str | None = None) -> _Token:
        token = self._peek()
        if token is None or (expected is not None and token.text != expected):
            where = "the end" if token is None else f"character {token.at}"
            raise NotAFilter(f"{where}: expected {expected or 'more'}")
        self._next += 1
        return token


Span = tuple[int, int]
"""[start_ms, end_ms)."""
Unit = Literal["hour", "day", "week", "month", "quarter", "all"]

MAX_PARAMETERS = 64
MAX_AGGREGATE = 12
MAX_STEPS = 800
"""Maximum number of steps of one query: enough for a month of hours."""
DEFAULT_AGGREGATE = ("cluster", "node", "namespace", "pod", "container")
CONTROLLER_KINDS = ("deployment", "statefulset", "daemonset", "job")
LABEL_OF: Mapping[str, str] = {"department": "department", "environment": "env", "owner": "owner", "product": "app"}
"""Names for labels, as in OpenCost's default label configuration; `team` is the ledger's own."""
KEYS = frozenset(
    {*DEFAULT_AGGREGATE, "controllerKind", "controller", *CONTROLLER_KINDS, "service", "team", *LABEL_OF, "all"}
)
NOT_KEPT = frozenset({"services", "annotation", "provider"})
"""Properties of OpenCost that the ledger does not store; no allocation has a value for them."""
FILTER_KEYS = frozenset(
    {
        *DEFAULT_AGGREGATE,
        "controllerKind",
        "controllerName",
        "controller",
        *CONTROLLER_KINDS,
        "team",
        *LABEL_OF,
        "label",
    }
    | NOT_KEPT
)
FIGURES = ("totalCost", "gpuCost", "gpuHours", "gpuCount", "gpuEfficiency", "totalEfficiency", "minutes")
"""The figures by which the allocations of a set can be sorted, besides their name."""

_BOOLEANS = {"": False} | {
    spelled: word in ("1", "t", "true")
    for word in ("1", "t", "true", "0", "f", "false")
    for spelled in (word, word.upper(), word.capitalize())
}
_KNOWN = frozenset({
    "window", "resolution", "step", "aggregate", "accumulate", "accumulateBy", "includeIdle", "idle", "idleByNode",
    "splitIdle", "shareIdle", "sharelb", "includeAggregatedMetadata", "includeProportionalAssetResourceCosts", "filter",
    "format", "limit", "offset", "sort", "sortBy", "order", "sortOrder", "sortByOrder",
})  # fmt: skip
_WITHOUT_EFFECT = frozenset({
    "metrics", "external", "reconcile", "includeSharedCostBreakdown", "disableAdjustments", "shareTenancyCosts",
    "field", "search", "filterTypes", "_",
})  # fmt: skip
"""Parameters of OpenCost and its clients that do not affect any figure here."""
_FILTERS: Mapping[str, str] = {
    "filterClusters": "cluster", "filterNodes": "node", "filterNamespaces": "namespace",
    "filterControllerKinds": "controllerKind", "filterControllers": "controllerName", "filterPods": "pod",
    "filterContainers": "container",
}  # fmt: skip
"""Filters of version 1, which `kubectl cost` sends: names separated by commas; a * at the end matches any ending."""
ASSET: Mapping[str, str] = {"type": "Node", "category": "Compute", "service": "Kubernetes"}
"""Properties that all assets here share, since all are nodes."""
_ASSET_KEYS = frozenset({*ASSET, "cluster", "name", "provider", "providerID", "account", "project", "label", "tag"})
_LABEL = re.compile(r"(label|annotation):[A-Za-z0-9_./-]{1,317}")
_SUNDAY_MS = 3 * MS_PER_DAY
"""The first Sunday after 1970-01-01, a Thursday."""


class BadQuestion(ValueError):
    """A query with a parameter that cannot be answered. The message is the reason."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(reason)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class OpenCostQuestion:
    """A parsed query. sets: the consecutive spans of each set of the answer; all of them together are the window."""

    start_ms: int
    end_ms: int
    sets: tuple[tuple[Span, ...], ...]
    step_ms: int
    aggregate: tuple[str, ...]
    matches: Predicate
    include_idle: bool
    idle_by_node: bool
    split_idle: bool
    share_idle: bool
    format: Literal["json", "csv"] = "json"
    sort: str = ""
    """"": by name; otherwise one of FIGURES."""
    descending: bool = False
    offset: int = 0
    limit: int | None = None
    """Maximum number of allocations of each set, after sorting; None: all."""
    ignored: tuple[str, ...] = ()
    """Parameters that change no figure here, although they may in OpenCost."""
    unkept: tuple[str, ...] = ()
    """Properties of NOT_KEPT that the filter uses."""

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.start_ms, self.end_ms)


def parse_query(query: str, now_ms: int, limits: Limits) -> OpenCostQuestion:
    """Parses a query string. Raises BadQuestion."""
    values = parameters(query)
    start, end, _ = _window(values, limits, now_ms)
    unit = _unit(values)
    step = _step(values, end - start)
    include_idle = _flag(values, "includeIdle") or _flag(values, "idle")
    idle_by_node = _flag(values, "idleByNode")
    if _flag(values, "includeProportionalAssetResourceCosts"):
        raise BadQuestion(
            "includeProportionalAssetResourceCosts", "these costs are not supported: leave the parameter out"
        )
    for unused in ("sharelb", "includeAggregatedMetadata"):
        _flag(values, unused)
    sort, descending = _order(values)
    return OpenCostQuestion(
        start,
        end,
        _sets(start, end, step, unit),
        step or end - start,
        _aggregate(values.get("aggregate", "")),
        _filter(values),
        include_idle,
        idle_by_node,
        idle_by_node or _flag(values, "splitIdle"),
        values.get("shareIdle", "") == "weighted" or _flag(values, "shareIdle"),
        _format(values),
        sort,
        descending,
        _number(values, "offset") or 0,
        _number(values, "limit"),
        tuple(sorted(name[:60] for name in values.keys() - _KNOWN - _WITHOUT_EFFECT - _FILTERS.keys())),
        tuple(sorted(keys_of(values.get("filter", "")) & NOT_KEPT)),
    )


def asset_filter(values: Mapping[str, str]) -> Predicate:
    """Parses the filter and the types of a query for assets as a test of their properties. Raises BadQuestion."""
    try:
        matches = parse_filter(values.get("filter", ""), _ASSET_KEYS)
    except NotAFilter as error:
        raise BadQuestion("filter", str(error)) from error
    types = [name.strip().lower() for name in values.get("filterTypes", "").split(",") if name.strip()]
    return lambda properties: matches(properties) and (not types or properties["type"].lower() in types)


def parameters(query: str) -> Mapping[str, str]:
    """The first value of each parameter, as in OpenCost. Raises BadQuestion."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except ValueError as error:
        raise BadQuestion("query", f"the query string cannot be read: {error}") from error
    for name, value in pairs:
        if name.startswith("filter") and value and name not in {"filter", "filterTypes", *_FILTERS}:
            raise BadQuestion(name[:60], f"unknown filter: use filter, or {', '.join(sorted(_FILTERS))}")
    return dict(reversed(pairs))


def _window(values: Mapping[str, str], limits: Limits, now_ms: int) -> QuerySpan:
    try:
        return bounded(*parse_window(values.get("window", ""), now_ms), limits)
    except ValueError as error:  # NotAWindow too
        raise BadQuestion("window", str(error)) from error


def _step(values: Mapping[str, str], span_ms: int) -> int | None:
    text = values.get("step", "")
    if not text:
        return None
    try:
        step = duration_ms(text)
    except NotAWindow as error:
        raise BadQuestion("step", f"{text[:60]!r}: expected a duration such as 1h or 1d") from error
    if span_ms > step * MAX_STEPS:
        raise BadQuestion("step", f"the window has more than {MAX_STEPS} steps of {text}")
    return step


def _unit(values: Mapping[str, str]) -> Unit | None:
    text = values.get("accumulateBy", "") or values.get("accumulate", "")
    if text == "weeknow":  # opencost-ui's name for calendar weeks, which all weeks here are
        text = "week"
    if text in get_args(Unit):
        return cast(Unit, text)
    if text in _BOOLEANS:
        return "all" if _BOOLEANS[text] else None
    raise BadQuestion("accumulate", f"{text[:60]!r}: expected true, false, {', '.join(get_args(Unit))}")


def _flag(values: Mapping[str, str], name: str) -> bool:
    text = values.get(name, "")
    if text not in _BOOLEANS:
        raise BadQuestion(name, f"{text[:60]!r}: expected true or false")
    return _BOOLEANS[text]


def _aggregate(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip()) or DEFAULT_AGGREGATE
    for name in names:
        if name not in KEYS and not _LABEL.fullmatch(name):
            known = ", ".join(sorted(KEYS))
            raise BadQuestion("aggregate", f"{name[:60]!r}: expected {known}, label:NAME or annotation:NAME")
    if len(names) > MAX_AGGREGATE:
        raise BadQuestion("aggregate", f"more than {MAX_AGGREGATE} names: leave some out")
    return tuple(dict.fromkeys(names))


def _filter(values: Mapping[str, str]) -> Predicate:
    try:
        tests = [parse_filter(values.get("filter", ""), FILTER_KEYS)]
    except NotAFilter as error:
        raise BadQuestion("filter", str(error)) from error
    tests += [one_of(key, values[name].split(",")) for name, key in _FILTERS.items() if values.get(name)]
    return lambda properties: all(test(properties) for test in tests)


def _format(values: Mapping[str, str]) -> Literal["json", "csv"]:
    text = values.get("format", "") or "json"
    if text not in ("json", "csv"):
        raise BadQuestion("format", f"{text[:60]!r}: expected json or csv")
    return cast(Literal["json", "csv"], text)


def _order(values: Mapping[str, str]) -> tuple[str, bool]:
    """The figure by which the allocations of a set are sorted, and whether the largest comes first."""
    text = values.get("sortBy", "") or values.get("sort", "")
    direction = (values.get("sortByOrder", "") or values.get("sortOrder", "") or values.get("order", "")).lower()
    if text not in ("", "name", *FIGURES):
        raise BadQuestion("sort", f"{text[:60]!r}: expected name, {', '.join(FIGURES)}")
    if direction not in ("", "asc", "desc"):
        raise BadQuestion("order", f"{direction[:60]!r}: expected asc or desc")
    figure = "" if text == "name" else text
    return figure, direction == "desc" if direction else bool(figure)


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadQuestion(name, f"{text[:60]!r}: expected a whole number of at least 0")
    return int(text)


def _sets(start: int, end: int, step: int | None, unit: Unit | None) -> tuple[tuple[Span, ...], ...]:
    steps = range(start + step, end, step) if step else range(0)
    edges = _edges(start, end, unit) if unit not in (None, "all") else []
    if len(edges) > MAX_STEPS:
        raise BadQuestion("accumulate", f"the window has more than {MAX_STEPS} sets")
    spans = list(pairwise(sorted({start, *steps, *edges, end})))
    if unit is None:
        return tuple((span,) for span in spans)
    return tuple(tuple(found) for _, found in groupby(spans, lambda span: bisect_right(edges, span[0])))


def _edges(start: int, end: int, unit: Unit | None) -> list[int]:
    """The boundaries of a unit strictly inside the span."""
    if unit in ("month", "quarter"):
        first = datetime.fromtimestamp(start / MS_PER_SECOND, UTC)
        months = range(first.year * 12, (first.year + 1 + (end - start) // (365 * MS_PER_DAY) + 1) * 12)
        begins = [
            round(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp() * MS_PER_SECOND)
            for month in months
            if unit == "month" or month % 3 == 0
        ]
        return [at for at in begins if start < at < end]
    size, offset = {"hour": (MS_PER_HOUR, 0), "day": (MS_PER_DAY, 0)}.get(unit or "", (7 * MS_PER_DAY, _SUNDAY_MS))
    return list(range(start - (start - offset) % size + size, end, size))
