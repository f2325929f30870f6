"""Checks every finished dashboard against common rules.

A rule is a function that yields the faults of a dashboard, each with the panel and the reason. The rules follow
grafana/dashboard-linter, with the variable `node` instead of `instance`, because people know nodes and not scrape
addresses. The rules check expressions as text. The tests parse the expressions and compare their metrics with the
programs'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dashboards import grafana_schema
from dashboards.grafana_schema import DATASOURCE, SCHEMA_VERSION, Json
from dashboards.panels_and_variables import LEAST_STEP, TAG
from dashboards.promql import PEAK_WINDOW

Rule = Callable[[Json], Iterator[str]]

WINDOWS = {"$__rate_interval", "$__range", PEAK_WINDOW}
SMALLEST = {"stat": (4, 3), "bargauge": (6, 6), "table": (8, 6), "timeseries": (8, 7)}
"""Smallest width and height, in grid units, at which a panel is legible on a page 1440 px wide."""

_SELECTOR = re.compile(r"\bgputally_(\w+)(\{[^}]*\})?(\[[^\]]*\])?")
_WINDOW = re.compile(r"\[([^\]]*)\]")
_CHOICE = re.compile(r"\$(\w+)")
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")


def faults(dashboard: Json) -> list[str]:
    """Return all faults of a dashboard, one line each; empty if there are none."""
    return [f"{rule.__name__.replace('_', '-')}: {fault}" for rule in RULES for fault in rule(dashboard)]


def panels(dashboard: Json) -> list[Json]:
    """Return the panels that show data, without the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: Json) -> Iterator[tuple[str, str]]:
    """Yield the title of the panel and the PromQL of every query."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def templated_datasource(dashboard: Json) -> Iterator[str]:
    variables = dashboard["templating"]["list"]
    if [v["query"] for v in variables if v["type"] == "datasource"] != ["prometheus"]:
        yield "the dashboard needs exactly one data source variable, of type prometheus"
    for variable in variables:
        if variable["type"] == "query" and variable["datasource"] != DATASOURCE:
            yield f"variable {variable['name']!r} does not use the data source variable"
    for panel in panels(dashboard):
        if any(owner["datasource"] != DATASOURCE for owner in (panel, *panel["targets"])):
            yield f"panel {panel['title']!r} does not use the data source variable"


def chained_variables(dashboard: Json) -> Iterator[str]:
    known: set[str] = set()
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] == "query":
            used = set(re.findall(r"\$(\w+)", variable["query"]["query"]))
            if used - known:
                yield f"variable {name!r} uses {sorted(used - known)} before they are chosen"
            if (variable["refresh"], variable["multi"], variable["includeAll"]) != (2, True, True):
                yield f"variable {name!r} must allow several and all, and refresh when the time range changes"
        known.add(name)
    for name in ("cluster", "job"):
        if name not in known:
            yield f"variable {name!r} is missing"


def declared_choices(dashboard: Json) -> Iterator[str]:
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    used: set[str] = set()
    for title, expr in expressions(dashboard):
        names = {name for name in _CHOICE.findall(expr) if not name.startswith("__")}
        used |= names
        if names - known:
            yield f"panel {title!r} uses {sorted(names - known)}, which cannot be chosen"
    used |= {name for v in dashboard["templating"]["list"] for name in _CHOICE.findall(str(v.get("query", "")))}
    if known - used - {"datasource"}:
        yield f"{sorted(known - used - {'datasource'})} can be chosen and change nothing"


def linked(dashboard: Json) -> Iterator[str]:
    """Check that the dashboard links to all others and keeps the variables and the time range."""
    if TAG not in dashboard["tags"]:
        yield f"the tag {TAG!r}, by which dashboards link to each other, is missing"
    for link in dashboard["links"]:
        if link["type"] == "dashboards" and link["tags"] == [TAG] and link["includeVars"] and link["keepTime"]:
            return
    yield "there is no link to the other dashboards that keeps choices and time"


def templated_selectors(dashboard: Json) -> Iterator[str]:
    for title, expr in expressions(dashboard):
        for metric, labels, _ in _SELECTOR.findall(expr):
            for name in ("cluster", "job"):
                if f'{name}=~"${name}"' not in labels:
                    yield f"panel {title!r}: {metric} is not limited to ${name}"


def title_and_description(dashboard: Json) -> Iterator[str]:
    titles = [panel["title"] for panel in panels(dashboard)]
    for title in sorted({t for t in titles if titles.count(t) > 1}):
        yield f"{titles.count(title)} panels are called {title!r}"
    for panel in panels(dashboard):
        if not panel["title"].strip():
            yield f"panel {panel['id']} has no title"
        if not panel["description"].endswith("."):
            yield f"panel {panel['title']!r} has no description, or one that is no sentence"


def units(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        if panel["fieldConfig"]["defaults"].get("unit", "none") in {"", "none"}:
            yield f"panel {panel['title']!r} has no unit"


def targets(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        ids = [target["refId"] for target in panel["targets"]]
        if not ids or len(set(ids)) != len(ids):
            yield f"panel {panel['title']!r} needs queries with different refIds, has {ids}"


def rate_interval(dashboard: Json) -> Iterator[str]:
    for title, expr in expressions(dashboard):
        for window in _WINDOW.findall(expr):
            if window not in WINDOWS:
                yield f"panel {title!r}: the window [{window}] does not follow the zoom; use $__rate_interval"
        if re.search(r"\brate\([^()]*\$__range\]", expr):
            yield f"panel {title!r}: a rate over the whole range hides every change; use $__rate_interval"


def least_step(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        if any(target["interval"] != LEAST_STEP for target in panel["targets"]):
            yield f"panel {panel['title']!r}: the minimum step is not {LEAST_STEP}, so a rate can miss an interval"


def counted_by_intervals(dashboard: Json) -> Iterator[str]:
    """Check that the rate of a counter that agents raise only when an interval closes is divided by the rate of the
    metered time, as `promql.metered` does."""
    for title, expr in expressions(dashboard):
        read = re.findall(r"\brate\(gputally_(?:pod_)?gpu_\w+_(?:seconds|joules)_total", expr)
        if read and "gputally_gpu_unallocated_seconds_total" not in expr:
            yield f"panel {title!r}: {read[0]}) jumps with the number of scrapes in its window; use promql.metered"


def counters(dashboard: Json) -> Iterator[str]:
    for title, expr in expressions(dashboard):
        for metric, _, window in _SELECTOR.findall(expr):
            if metric.endswith("_total") and not window:
                yield f"panel {title!r}: counter {metric} is read without rate or increase"
        if re.search(r"(rate|increase)\(\s*(sum|max|min|avg)\b", expr):
            yield f"panel {title!r}: aggregate after the rate, not before"


def thresholds(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        first, *rest = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        values = [step["value"] for step in rest]
        if first["value"] is not None or None in values or values != sorted(set(values)):
            yield f"panel {panel['title']!r}: thresholds must ascend from a base of null (minus infinity)"


def colours(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        strange = sorted(set(_COLOR.findall(str(panel["fieldConfig"]))) - set(grafana_schema.PALETTE))
        if strange:
            yield f"panel {panel['title']!r}: {strange} are not in the colour-blind safe palette"
        if "palette-classic" in str(panel["fieldConfig"]):
            yield f"panel {panel['title']!r}: Grafana's classic palette is not colour-blind safe"


def layout(dashboard: Json) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        at, title = panel["gridPos"], panel["title"]
        if at["x"] < 0 or at["x"] + at["w"] > 24:
            yield f"panel {title!r} leaves the page"
        width, height = SMALLEST.get(panel["type"], (1, 1))
        if at["w"] < width or at["h"] < height:
            yield f"panel {title!r} is too small to read: {at['w']} x {at['h']}, at least {width} x {height}"
        cells = [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        covered = sorted({taken[cell] for cell in cells if cell in taken})
        if covered:
            yield f"panel {title!r} covers {covered}"
        taken.update(dict.fromkeys(cells, title))


def modern_and_uneditable(dashboard: Json) -> Iterator[str]:
    if dashboard["schemaVersion"] != SCHEMA_VERSION:
        yield f"schemaVersion is {dashboard['schemaVersion']}, not {SCHEMA_VERSION}"
    if dashboard["editable"]:
        yield "the dashboard must not be editable: change the code in dashboards/ instead"
    if not dashboard["uid"].startswith("gputally-") or len(dashboard["uid"]) > 40:
        yield f"uid {dashboard['uid']!r} is not a stable name of at most 40 characters"
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        yield "two panels have the same id"
    yield from (f"null at {path}" for path in _nulls(dashboard, "dashboard"))


def _nulls(value: object, path: str) -> Iterator[str]:
    if value is None:
        yield path
    elif isinstance(value, dict) and value.keys() != {"color", "value"}:
        for key, inner in value.items():
            yield from _nulls(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _nulls(inner, f"{path}[{i}]")


RULES: tuple[Rule, ...] = (
    templated_datasource,
    chained_variables,
    declared_choices,
    linked,
    templated_selectors,
    title_and_description,
    units,
    targets,
    rate_interval,
    least_step,
    counters,
    counted_by_intervals,
    thresholds,
    colours,
    layout,
    modern_and_uneditable,
)
