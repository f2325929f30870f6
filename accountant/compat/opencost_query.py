"""What a client of OpenCost asks: its query parameters as exact spans, keys and a filter.

The window is cut into steps, and at the edges of hours, days, weeks (from Sunday), months or quarters (UTC) where
the answer is accumulated by them; each set of the answer is one or more of these spans. `resolution` is taken and
not used: there is nothing to sample. What OpenCost ignores is ignored; a parameter that would change figures and has
no meaning here is named in the answer's warning. An unknown filter is refused rather than ignored, since an answer for
everything looks like the one that was asked for.

Source: OpenCost pkg/costmodel/aggregation.go (the handlers' parameters), core/pkg/opencost/query.go. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from typing import Literal, cast, get_args
from urllib.parse import parse_qsl

from accountant.compat import opencost_filter, opencost_window
from accountant.compat.opencost_filter import NotAFilter, Predicate
from accountant.compat.opencost_window import NotAWindow
from agent.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND

Span = tuple[int, int]
"""[start_ms, end_ms)."""
Unit = Literal["hour", "day", "week", "month", "quarter", "all"]

MAX_PARAMETERS = 64
MAX_AGGREGATE = 12
MAX_STEPS = 800
"""Of one question: a month of hours fits."""
DEFAULT_AGGREGATE = ("cluster", "node", "namespace", "pod", "container")
CONTROLLER_KINDS = ("deployment", "statefulset", "daemonset", "job")
LABEL_OF: Mapping[str, str] = {"department": "department", "environment": "env", "owner": "owner", "product": "app"}
"""Names for labels, as OpenCost's default label configuration has them; `team` is the ledger's own."""
KEYS = frozenset(
    {*DEFAULT_AGGREGATE, "controllerKind", "controller", *CONTROLLER_KINDS, "service", "team", *LABEL_OF, "all"}
)
NOT_KEPT = frozenset({"services", "annotation", "provider"})
"""Properties that OpenCost has and the ledger does not keep: no allocation has a value of them."""
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
"""What the allocations of a set can be sorted by, beside their name."""

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
"""Parameters of OpenCost and its clients that no figure here depends on."""
_FILTERS: Mapping[str, str] = {
    "filterClusters": "cluster", "filterNodes": "node", "filterNamespaces": "namespace",
    "filterControllerKinds": "controllerKind", "filterControllers": "controllerName", "filterPods": "pod",
    "filterContainers": "container",
}  # fmt: skip
"""Filters of version 1, which `kubectl cost` sends: names separated by commas; a * at the end takes any ending."""
ASSET: Mapping[str, str] = {"type": "Node", "category": "Compute", "service": "Kubernetes"}
"""What all assets here are: nodes."""
_ASSET_KEYS = frozenset({*ASSET, "cluster", "name", "provider", "providerID", "account", "project", "label", "tag"})
_LABEL = re.compile(r"(label|annotation):[A-Za-z0-9_./-]{1,317}")
_SUNDAY_MS = 3 * MS_PER_DAY
"""The first Sunday after 1970-01-01, a Thursday."""


class BadQuestion(ValueError):
    """A parameter that cannot be answered, and why."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(reason)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Question:
    """sets: the spans of each set of the answer, in order; together they are the window."""

    start_ms: int
    end_ms: int
    sets: tuple[tuple[Span, ...], ...]
    step_ms: int
    aggregate: tuple[str, ...]
    keeps: Predicate
    include_idle: bool
    idle_by_node: bool
    split_idle: bool
    share_idle: bool
    format: Literal["json", "csv"] = "json"
    sort: str = ""
    """"": by name; else one of FIGURES."""
    descending: bool = False
    offset: int = 0
    limit: int | None = None
    """Of the allocations of each set, after sorting; None: all."""
    ignored: tuple[str, ...] = ()
    """Parameters that change no figure here, although they may elsewhere."""
    unkept: tuple[str, ...] = ()
    """Properties of NOT_KEPT that the filter asks for."""


def parse(query: str, now_ms: int, longest_ms: int) -> Question:
    """The question in a query string. Raises BadQuestion."""
    given = parameters(query)
    start, end = _window(given, longest_ms, now_ms)
    unit = _unit(given)
    step = _step(given, end - start)
    include_idle = _flag(given, "includeIdle") or _flag(given, "idle")
    idle_by_node = _flag(given, "idleByNode")
    if _flag(given, "includeProportionalAssetResourceCosts"):
        raise BadQuestion("includeProportionalAssetResourceCosts", "shares of single nodes are not answered here")
    for unused in ("sharelb", "includeAggregatedMetadata"):
        _flag(given, unused)
    sort, descending = _order(given)
    return Question(
        start,
        end,
        _sets(start, end, step, unit),
        step or end - start,
        _aggregate(given.get("aggregate", "")),
        _filter(given),
        include_idle,
        idle_by_node,
        idle_by_node or _flag(given, "splitIdle"),
        given.get("shareIdle", "") == "weighted" or _flag(given, "shareIdle"),
        _format(given),
        sort,
        descending,
        _number(given, "offset") or 0,
        _number(given, "limit"),
        tuple(sorted(name[:60] for name in given.keys() - _KNOWN - _WITHOUT_EFFECT - _FILTERS.keys())),
        tuple(sorted(opencost_filter.keys_of(given.get("filter", "")) & NOT_KEPT)),
    )


def asset_filter(given: Mapping[str, str]) -> Predicate:
    """Of the filter and the types that a question for assets has. Raises BadQuestion."""
    try:
        keeps = opencost_filter.parse(given.get("filter", ""), _ASSET_KEYS)
    except NotAFilter as error:
        raise BadQuestion("filter", str(error)) from error
    types = [name.strip().lower() for name in given.get("filterTypes", "").split(",") if name.strip()]
    return lambda properties: keeps(properties) and (not types or properties["type"].lower() in types)


def parameters(query: str) -> Mapping[str, str]:
    """The first value of each parameter, as in OpenCost. Raises BadQuestion."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except ValueError as error:
        raise BadQuestion("query", f"cannot be read: {error}") from error
    for name, value in pairs:
        if name.startswith("filter") and value and name not in {"filter", "filterTypes", *_FILTERS}:
            raise BadQuestion(name[:60], f"this filter is not known here; use filter, or {', '.join(sorted(_FILTERS))}")
    return dict(reversed(pairs))


def _window(given: Mapping[str, str], longest_ms: int, now_ms: int) -> Span:
    try:
        start, end = opencost_window.parse(given.get("window", ""), now_ms)
    except NotAWindow as error:
        raise BadQuestion("window", str(error)) from error
    if end - start > longest_ms:
        raise BadQuestion("window", f"longer than {longest_ms // MS_PER_DAY} days")
    if start < 0:
        raise BadQuestion("window", "begins before 1970")
    return start, end


def _step(given: Mapping[str, str], span_ms: int) -> int | None:
    text = given.get("step", "")
    if not text:
        return None
    try:
        step = opencost_window.duration_ms(text)
    except NotAWindow as error:
        raise BadQuestion("step", f"{text[:60]!r}: expected a duration such as 1h or 1d") from error
    if span_ms > step * MAX_STEPS:
        raise BadQuestion("step", f"the window has more than {MAX_STEPS} steps of {text}")
    return step


def _unit(given: Mapping[str, str]) -> Unit | None:
    text = given.get("accumulateBy", "") or given.get("accumulate", "")
    if text == "weeknow":  # opencost-ui's name for calendar weeks, which all weeks here are
        text = "week"
    if text in get_args(Unit):
        return cast(Unit, text)
    if text in _BOOLEANS:
        return "all" if _BOOLEANS[text] else None
    raise BadQuestion("accumulate", f"{text[:60]!r}: expected true, false, {', '.join(get_args(Unit))}")


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "")
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
        raise BadQuestion("aggregate", f"more than {MAX_AGGREGATE} names")
    return tuple(dict.fromkeys(names))


def _filter(given: Mapping[str, str]) -> Predicate:
    try:
        tests = [opencost_filter.parse(given.get("filter", ""), FILTER_KEYS)]
    except NotAFilter as error:
        raise BadQuestion("filter", str(error)) from error
    tests += [opencost_filter.one_of(key, given[name].split(",")) for name, key in _FILTERS.items() if given.get(name)]
    return lambda properties: all(test(properties) for test in tests)


def _format(given: Mapping[str, str]) -> Literal["json", "csv"]:
    text = given.get("format", "") or "json"
    if text not in ("json", "csv"):
        raise BadQuestion("format", f"{text[:60]!r}: expected json or csv")
    return cast(Literal["json", "csv"], text)


def _order(given: Mapping[str, str]) -> tuple[str, bool]:
    """What the allocations of a set are sorted by, and whether the largest comes first."""
    text = given.get("sortBy", "") or given.get("sort", "")
    direction = (given.get("sortByOrder", "") or given.get("sortOrder", "") or given.get("order", "")).lower()
    if text not in ("", "name", *FIGURES):
        raise BadQuestion("sort", f"{text[:60]!r}: expected name, {', '.join(FIGURES)}")
    if direction not in ("", "asc", "desc"):
        raise BadQuestion("order", f"{direction[:60]!r}: expected asc or desc")
    figure = "" if text == "name" else text
    return figure, direction == "desc" if direction else bool(figure)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "")
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
    """Where a unit begins strictly inside the span."""
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
