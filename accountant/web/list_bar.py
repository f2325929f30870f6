"""The bar above a list: its span, groups, filters, search, order, columns and page, read from a request and written as
addresses.

`ListParams` are the parameters of a page with the bar, `GroupedListParams` those of one that groups its rows. They have
the names that the API uses (`start`, `end`, `timezone`, `by`, `where.team`, …), so that a page and an answer of the API
with the same parameters have the same figures. A `Bar` makes the addresses of all views that are one click away; the
template `_bar.html` draws it. It is a form that works without a script. A browser sends its empty fields too, and a new
filter as `add` and `value`: `tidy` is the address without them, to which a page redirects, so that every view has one
address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final
from urllib.parse import parse_qsl, urlencode
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from starlette.requests import Request

from accountant.api.query_parameters import (
    By,
    NamedDimension,
    QuerySpan,
    WhereParams,
    invalid,
    refusal,
    split_at_commas,
)
from accountant.core.periods import Month, utc
from accountant.core.settings import Limits
from accountant.ledger.protocols import ReadableLedger
from accountant.wire.dimensions import DIMENSIONS, OF_TIME
from accountant.wire.list_order import ListOrder
from accountant.wire.option_types import JOB_ORDERS, NODE_ORDERS, Order, Orders
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Dimension, is_label, label_dimension, label_of
from gputally.base.instants import is_duration
from gputally.base.near_names import nearest, shown
from gputally.base.units import MS_PER_DAY

DIMENSION_TITLES: Final[Mapping[Dimension, str]] = {one.name: one.title for one in DIMENSIONS}
_LEVELS: Final = 3
"""Groupings that the form offers."""
RECENT: Final = {"24h": "24 h", "7d": "7 days", "30d": "30 days"}
"""The spans up to now that a list offers: where they start, and their names."""


def title(dimension: Dimension) -> str:
    """The heading of a dimension; of an exported label its name in words: `Cost centre` of `cost-centre`, and
    `Cost centre (example.com)` of `example.com/cost-centre`."""
    if not is_label(dimension):
        return DIMENSION_TITLES[dimension]
    prefix, _, name = label_of(dimension).rpartition("/")
    words = re.sub(r"[-_.]+", " ", name)
    return words[:1].upper() + words[1:] + (f" ({prefix})" if prefix else "")


def group_address(dimension: Dimension, value: str, month: str | None = None) -> str:
    """The address of the page of a value (accountant.web.group_page). month: None for the current one."""
    return "/group?" + urlencode({"by": dimension, "value": value, **({"month": month} if month else {})}, safe=":/")


def group_link(dimension: Dimension, value: str) -> str | None:
    """The page of a value; None for one that has none: an instant, or what nobody holds."""
    return None if dimension in OF_TIME or value in ("", IDLE) else group_address(dimension, value)


class ListParams(WhereParams):
    """The parameters of a page with the bar. add, value: a filter that the form adds."""

    search: str = Field(default="", max_length=253)
    compare: bool = False
    columns: Annotated[tuple[str, ...], BeforeValidator(split_at_commas)] = Field(default=(), max_length=40)
    page: int = Field(default=1, ge=1, le=100_000)
    add: NamedDimension | None = None
    value: str | None = Field(default=None, max_length=1_024)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        """Leaves out what the form sends empty, and the second of two equal groupings. An empty value of a filter is
        one: what has no name."""
        if not isinstance(given, Mapping):
            return given
        whole: dict[str, Any] = {}
        for name, value in given.items():
            filled = [one for one in value if one != ""] if isinstance(value, list) else value
            if _is_filter(name):
                whole[name] = value
            elif name == "by" or filled not in ("", []):
                whole[name] = filled
        if "by" in whole:
            parts = split_at_commas(whole["by"])
            whole["by"] = list(dict.fromkeys(parts)) if isinstance(parts, list) else parts
        return cls._in_one_order(whole)

    @classmethod
    def _in_one_order(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Reads the order of a link that an earlier version wrote."""
        return given


class OrderedListParams(ListParams):
    """The parameters of a page with the bar that does not group its rows. ORDERS: of its list."""

    ORDERS: ClassVar[Orders]
    sort: str

    @classmethod
    def _in_one_order(cls, given: dict[str, Any]) -> dict[str, Any]:
        turned = given.get("reverse")
        if turned not in ("true", "false"):
            return given
        text = str(given.get("sort", cls.model_fields["sort"].default))
        kept = {name: value for name, value in given.items() if name != "reverse"}
        return {**kept, "sort": _turned(text, cls.ORDERS)} if turned == "true" else kept

    @property
    def order(self) -> Order:
        return self.ORDERS.read(self.sort)

    @property
    def own_order(self) -> str | None:
        """The order for an address; None for the list's usual one."""
        usual = self.ORDERS.read(type(self).model_fields["sort"].default)
        return None if self.order == usual else str(self.order)


def _turned(text: str, orders: Orders) -> str:
    """The text of the order the other way round; of a column that there is not as it is."""
    order = Order.read(text, orders.ascending.__contains__)
    return str(order.turned) if order.column in orders.columns else text


_PATHS_OF_BEFORE: Final = {"/jobs": JOB_ORDERS, "/nodes": NODE_ORDERS}


def present_address(address: str) -> str:
    """The address of a saved view as this version writes it. Earlier ones wrote an order as `sort=COLUMN` with
    `reverse=true`, and on Explore as `sort=-COLUMN`, or `sort=COLUMN` for the smallest first."""
    path, _, query = address.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    sort, orders = given.get("sort", ""), _PATHS_OF_BEFORE.get(path)
    if orders is not None and given.get("reverse") == "true":
        usual = "cost" if orders is JOB_ORDERS else "name"
        now = _turned(sort or usual, orders)
    elif path == "/explore" and sort and str(_order(sort)) != sort:
        now = f"{sort[1:]}:desc" if sort.startswith("-") else f"{sort}:asc"
    elif "reverse" in given:
        now = sort
    else:
        return address
    kept = [(name, value) for name, value in pairs if name not in ("sort", "reverse")]
    return f"{path}?" + urlencode([*kept, *([("sort", now)] if now else [])], safe=",:")


def _order(text: str) -> Order:
    """The order of a list with groupings."""
    return Order.read(text, _is_dimension)


class GroupedListParams(ListParams):
    """The parameters of a page with the bar that groups its rows.

    sort: an order (accountant.wire.option_types.Order) by a dimension or column; "" for the page's own order."""

    by: By = ("team",)
    sort: Annotated[str, AfterValidator(lambda text: str(_order(text)) if text else "")] = Field(
        default="", max_length=340
    )

    @classmethod
    def _in_one_order(cls, given: dict[str, Any]) -> dict[str, Any]:
        sort = str(given.get("sort", ""))
        return {**given, "sort": f"{sort[1:]}:desc"} if sort.startswith("-") else given


@dataclass(frozen=True, slots=True)
class Filter:
    """One value of a filter. without: the address of the view without it."""

    dimension: Dimension
    value: str
    without: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Something to choose. address: of the view with it; "" where the form chooses it."""

    name: str
    title: str
    chosen: bool
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The bar of one view.

    path: the path of the page.
    span: the span in force.
    columns: the columns that the page can show, with their titles.
    shown: the columns that it shows.
    own: parameters that only this page has, in their order; None is left out.
    labels: the exported labels, which are dimensions too."""

    path: str
    params: ListParams
    span: QuerySpan
    columns: Mapping[str, str]
    shown: tuple[str, ...]
    own: Mapping[str, str | tuple[str, ...] | None]
    now_ms: int
    labels: tuple[str, ...] = ()
    by: tuple[Dimension, ...] = ()

    @property
    def titles(self) -> Mapping[Dimension, str]:
        """The dimensions to choose from, with their headings."""
        asked = {name: title(name) for name in (*self.by, *self.params.where)}
        return {
            **DIMENSION_TITLES,
            **{label_dimension(name): title(label_dimension(name)) for name in self.labels},
            **asked,
        }

    @property
    def about(self) -> dict[str, str]:
        """What the metadata of a file say about the span, of which nothing is told after now."""
        start_ms, end_ms, timezone = self.span
        return {"start": utc(start_ms), "end": utc(min(end_ms, self.now_ms)), "timezone": timezone}

    @property
    def fixed(self) -> dict[str, str | None]:
        """The edges of the span in force as instants: the address of what is shown now."""
        start_ms, end_ms, _ = self.span
        return {"start": utc(start_ms), "end": utc(min(end_ms, self.now_ms))}

    @property
    def moves(self) -> bool:
        """Whether the address of this view shows another span later."""
        start, end = self.params.start, self.params.end
        return start is None or end is None or is_duration(start) or self.span.end_ms > self.now_ms

    @property
    def span_identity(self) -> tuple[int, int | None]:
        """What distinguishes the span in force from others. An end that is not given is now, at any time."""
        return self.span.start_ms, None if self.params.end is None else self.span.end_ms

    def url(self, path: str | None = None, **changes: Any) -> str:
        """The address of this view with other parameters. A change takes the view to its first page. None and "" leave
        a parameter out. path: None for this page."""
        query = urlencode(self._pairs(changes), safe=",:")
        return (path or self.path) + (f"?{query}" if query else "")

    def _plain(self) -> dict[str, Any]:
        """The parameters of this view, in their order."""
        params = self.params
        return {
            "start": params.start, "end": params.end, "timezone": params.timezone, "where": params.where, **self.own,
            "search": params.search, "columns": params.columns, "compare": params.compare,
        }  # fmt: skip

    def _pairs(self, changes: Mapping[str, Any]) -> list[tuple[str, str]]:
        plain = {**self._plain(), "page": None, **changes}
        pairs: list[tuple[str, str]] = [("by", "")] if plain.get("by") == () else []
        for name, value in plain.items():
            if name == "where":
                pairs += [(f"where.{one}", text) for one, texts in value.items() for text in texts]
            elif value is True:
                pairs.append((name, "true"))
            elif name == "ledger":
                pairs += [(name, one) for one in value or ()]
            elif isinstance(value, tuple):
                pairs += [(name, ",".join(value))] if value else []
            elif value is not None and value is not False and value != "":
                pairs.append((name, str(value)))
        return pairs

    @property
    def page_url(self) -> str:
        """The address of the pages of this view, without the number at its end."""
        return self.url(page="#").removesuffix("%23")

    @property
    def tidy(self) -> str:
        """The address of this page of the view; with the filter that the form adds, of its first page."""
        params, where = self.params, dict(self.params.where)
        if params.add is None or not params.value:
            return self.url(page=params.page if params.page > 1 else None)
        where[params.add] = tuple(dict.fromkeys((*where.get(params.add, ()), params.value)))
        return self.url(where=where)

    def is_tidy(self, request: Request) -> bool:
        """Whether the request is no submitted form, with an empty field or a filter to add, and has its order as this
        version writes it."""
        items = request.query_params.multi_items()
        repeated = [name for name, _ in items if name in ("by", "columns")]
        empty = any(not value for name, value in items if name != "by" and not _is_filter(name))
        earlier = any(name == "reverse" or (name == "sort" and value.startswith("-")) for name, value in items)
        return (
            not empty
            and not earlier
            and len(repeated) == len(set(repeated))
            and self.params.add is None
            and self.params.value is None
        )

    @property
    def presets(self) -> tuple[Choice, ...]:
        """The usual spans: the last hours and days, this month and the last one."""
        zone = ZoneInfo(self.span.timezone)
        month = Month.of(self.now_ms - 1, zone)
        at = (self.params.start, self.params.end)
        edges: list[tuple[str, str, tuple[str | None, str | None]]] = [
            *((text, title, (text, None)) for text, title in RECENT.items()),
            (str(month.previous), "last month", (f"{month.previous}-01", f"{month}-01")),
            (str(month), "this month", (f"{month}-01", None)),
        ]
        if at == (None, None) and self.span.start_ms == month.span(zone)[0]:
            at = edges[-1][2]
        return tuple(Choice(name, title, at == of, self.url(start=of[0], end=of[1])) for name, title, of in edges)

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The filters in force, with the address of the view without each of them."""
        found = []
        for dimension, values in self.params.where.items():
            for value in values:
                rest = tuple(other for other in values if other != value)
                found.append(Filter(dimension, value, self.url(where={**self.params.where, dimension: rest})))
        return tuple(found)

    def only(self, dimension: Dimension, value: str) -> str:
        """The address of the view of this value alone."""
        return self.url(where={**self.params.where, dimension: (value,)})

    @property
    def levels(self) -> tuple[tuple[Choice, ...], ...]:
        """The groupings to choose from, one group of choices for each level; none for a list that groups nothing."""
        return ()

    @property
    def hidden(self) -> tuple[tuple[str, str], ...]:
        """The parameters that the form keeps without a field of their own: the filters and the order."""
        kept = ("sort", "ledger")
        return tuple(pair for pair in self._pairs({}) if pair[0].startswith("where.") or pair[0] in kept)


@dataclass(frozen=True, kw_only=True)
class GroupedBar(Bar):
    """The bar of a view that groups its rows.

    by: the groupings in force.
    usual: its order if the request has none."""

    params: GroupedListParams
    usual: Order

    def _plain(self) -> dict[str, Any]:
        params = self.params
        return {
            "start": params.start, "end": params.end, "timezone": params.timezone, "by": self.by, "where": params.where,
            **self.own, "sort": self.sort and str(self.sort), "search": params.search, "columns": params.columns,
            "compare": params.compare,
        }  # fmt: skip

    @property
    def sort(self) -> Order | None:
        """The order that is asked for: none by a dimension by which the list is no longer grouped."""
        order = _order(self.params.sort) if self.params.sort else None
        return None if order is not None and _is_dimension(order.column) and order.column not in self.by else order

    def nameless(self, dimension: Dimension) -> str:
        """The address of what has no name of this dimension: whose it is, and how much of it nobody held."""
        parts = tuple(part for part in _PARTS if part not in (dimension, *self.params.where))[:2]
        where = {**self.params.where, dimension: ("",)}
        return self.url(where=where, by=parts, columns=("allocated", "unallocated", "cost"), across=None, sort=None)

    @property
    def heads(self) -> ListOrder:
        return ListOrder(self.url, self.sort or self.usual, _is_dimension)

    @property
    def levels(self) -> tuple[tuple[Choice, ...], ...]:
        chosen = (*self.by, *("" for _ in range(max(1, _LEVELS - len(self.by)))))[: max(_LEVELS, len(self.by))]
        return tuple(
            tuple(Choice(name, title, name == level) for name, title in (("", "–"), *self.titles.items()))
            for level in chosen
        )


_PARTS: Final[tuple[Dimension, ...]] = ("namespace", "job", "team", "gpu_model")
"""What lines without a name are divided by, two at a time."""


def _is_filter(name: str) -> bool:
    return name.startswith("where.")


def _is_dimension(name: str) -> bool:
    return is_label(name) or name in DIMENSION_TITLES


def check_columns(bar: Bar) -> None:
    """Raises Refusal for a column that the page does not have."""
    for name in bar.params.columns:
        if name not in bar.columns:
            raise invalid("columns", f"there is no column {shown(name)}{nearest(name, bar.columns)}")


def check_names(bar: GroupedBar) -> None:
    """Raises Refusal for a column or an order that the page does not have."""
    check_columns(bar)
    name = "" if bar.sort is None else bar.sort.column
    known = (*bar.by, *bar.columns)
    if bar.sort is not None and name not in known:
        raise invalid("sort", f"the list cannot be sorted by {shown(name)}{nearest(name, known)}")


def longest(bar: Bar, ledger: ReadableLedger, limits: Limits, width: int) -> str:
    """The address of the view over the longest span: from the first record, or as many days as a query may ask for, to
    now. "" if the view's own span is as long, or such a query is too large.

    width: see `query_parameters.refusal`."""
    first_ms, newest_ms = ledger.status().extent
    # A day less than allowed, because the span ends at the instant at which the address is opened.
    start_ms = max(first_ms, bar.now_ms - max(0, limits.span_days - 1) * MS_PER_DAY)
    covered = bar.span.start_ms <= start_ms and bar.span.end_ms >= min(newest_ms, bar.now_ms)
    if covered or start_ms >= bar.now_ms:
        return ""
    span = QuerySpan(start_ms, bar.now_ms, bar.span.timezone)
    if refusal(ledger, limits.question_gpu_hours, span, width, bar.params.where_cluster):
        return ""
    return bar.url(start=utc(start_ms), end=None, compare=None)
