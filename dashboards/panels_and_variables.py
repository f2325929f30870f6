"""Lays out panels, sections and variables with common units, and writes the JSON of a dashboard.

The module makes all choices of style (palette, legends, axes, sizes), so that a dashboard's module states only its
panels. The JSON contains no null except that of a threshold's first step.

A dashboard has the variables that its panels use. Each list of values is limited by variables that come before it:

- Clusters are limited by data source, and jobs by data source and cluster.
- All other lists are limited by data source, cluster and job.
- Nodes are also limited by pool and GPU model, and GPUs by node and GPU model.
- Namespaces are also limited by node, and pods by node and namespace.
- Queues are also limited by the team on the dashboard "Team", and by the target on the dashboard "Fairshare".

A node is left out only if the inventory has it in another pool. A cluster without pools in its inventory therefore
still shows its nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dashboards import grafana_schema, promql
from dashboards.grafana_schema import Json

COLUMNS = 24
"""Width of Grafana's grid; at 1440 px a column is about 57 px."""

LEAST_STEP = "1m"
"""Minimum step of every query. Grafana's `$__rate_interval` is then at least four minutes. Agents' counters move only
at the end of an interval, and a shorter window could contain no end of an interval."""

TAG = "gputally"
"""Tag of all dashboards, by which they link to each other."""


_HEADINGS = {"gpu_uuid": "GPU", "mig_uuid": "MIG instance", "gpu_model": "GPU model", "xid": "XID"}


@dataclass(frozen=True)
class Query:
    """One PromQL expression. instant: True for the newest value only, as a table needs it."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Step:
    """The colour of a figure from `value` upwards."""

    value: float
    color: str


@dataclass(frozen=True)
class Levels:
    """The colours of a figure: `base`, then each step's colour from its value upwards."""

    base: str = grafana_schema.BLUE
    steps: Sequence[Step] = ()

    @classmethod
    def good_above(cls, good: float, *, warning: float | None = None) -> Levels:
        """Return the colours of a figure that is good from `good` upwards and bad below `warning`; without `warning`,
        bad below `good`."""
        steps = [Step(good, grafana_schema.GOOD)]
        return cls(grafana_schema.BAD, steps if warning is None else [Step(warning, grafana_schema.WARNING), *steps])

    @classmethod
    def bad_above(cls, bad: float, *, warning: float | None = None) -> Levels:
        """Return the colours of a figure that is bad from `bad` upwards and good below `warning`; without `warning`,
        good below `bad`."""
        steps = [Step(bad, grafana_schema.BAD)]
        return cls(grafana_schema.GOOD, steps if warning is None else [Step(warning, grafana_schema.WARNING), *steps])

    @classmethod
    def warning_above(cls, at: float) -> Levels:
        """Return the colours of a figure that is good below `at`, a warning from there upwards, and never bad."""
        return cls(grafana_schema.GOOD, [Step(at, grafana_schema.WARNING)])


_NEUTRAL = Levels()
_UNMARKED = Levels(grafana_schema.GOOD)


@dataclass(frozen=True)
class PanelSection:
    """Panels side by side under a heading.

    title: the heading; "" for none.
    height: the height of each panel, in grid units.
    widths: the width of each panel, in columns; empty for equal widths, so that the number of panels must divide 24."""

    title: str
    height: int
    panels: Sequence[Any]
    widths: Sequence[int] = ()


def stat(
    title: str,
    description: str,
    query: Query,
    unit: str,
    levels: Levels = _NEUTRAL,
    decimals: int | None = None,
    looks: Mapping[str, Json] = {},
) -> grafana_schema.Stat:
    """Return a panel with one figure and a line of its past values. looks: the properties of series, by a regular
    expression of their names."""
    return grafana_schema.Stat(
        title=title,
        description=description,
        targets=_targets([query]),
        format=unit,
        decimals=decimals,
        thresholds=_steps(levels),
        graphMode="none" if query.instant else "area",
        extraJson={"fieldConfig": {"overrides": _overrides(looks)}},
    )


def bars(
    title: str, description: str, query: Query, unit: str, decimals: int | None = None, looks: Mapping[str, Json] = {}
) -> grafana_schema.BarGauge:
    """Return a panel with one horizontal bar per series, of present values only. looks: see `stat`."""
    return grafana_schema.BarGauge(
        title=title,
        description=description,
        targets=_targets([replace(query, instant=True)]),
        format=unit,
        decimals=decimals,
        thresholds=_steps(_NEUTRAL),
        extraJson={"fieldConfig": {"overrides": _overrides(looks)}},
    )


def timeseries(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    stacked: bool = False,
    share: bool = False,
    floor: float | None = 0,
    levels: Levels = _UNMARKED,
    looks: Mapping[str, Json] = {},
    names: Mapping[str, str] = grafana_schema.FIRST,
) -> grafana_schema.TimeSeries:
    """Return a panel with lines over time, or with stacked areas.

    share: True for an axis from 0 to 100 %.
    floor: the start of the axis; None for the smallest value.
    levels: thresholds, drawn as dashed lines.
    looks: see `stat`.
    names: the colours of series, by a regular expression of their names, unless `looks` sets them."""
    return grafana_schema.TimeSeries(
        title=title,
        description=description,
        targets=_targets(queries),
        unit=unit,
        fillOpacity=70 if stacked else 8,
        lineWidth=1 if stacked else 2,
        stacking={"mode": "normal" if stacked else "none", "group": "A"},
        valueMin=floor,
        valueMax=1 if share else None,
        thresholds=_steps(levels),
        thresholdsStyleMode="dashed" if levels.steps else "off",
        overrides=_overrides({name: fixed_colour(color) for name, color in names.items()}) + _overrides(looks),
    )


def table(
    title: str,
    description: str,
    figures: Mapping[str, str],
    by: Sequence[str],
    columns: Mapping[str, Json],
    unit: str,
    descending: str,
    decimals: int | None = None,
) -> grafana_schema.TablePanel:
    """Return a table with one row per value of the labels `by`.

    figures: the PromQL of each column of figures, by heading.
    columns: the properties of columns, by heading.
    descending: the heading of the column by which the rows are sorted.
    decimals: the decimals of columns that set none of their own."""
    targets = _targets([Query(expression, instant=True) for expression in figures.values()])
    for target in targets:
        target.format = "table"
    if decimals is not None:
        others = {name: properties for name, properties in columns.items() if name not in figures}
        columns = {name: {"decimals": decimals, **columns.get(name, {})} for name in figures} | others
    headings = {f"Value #{t.refId}": name for t, name in zip(targets, figures, strict=True)}
    return grafana_schema.TablePanel(
        title=title,
        description=description,
        targets=targets,
        unit=unit,
        thresholds=_steps(_NEUTRAL),
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "indexByName": {name: i for i, name in enumerate([*by, *headings])},
                    "renameByName": {label: heading_of(label) for label in by} | headings,
                },
            },
        ],
        sortBy=[grafana_schema.SortBy(displayName=descending, desc=True)],
        overrides=[
            # A label is text even if it looks like a number: an XID of 119 is not two minutes.
            *(_override("byName", heading_of(label), {"unit": "string"}) for label in by),
            *(_override("byName", name, properties) for name, properties in columns.items()),
        ],
    )


def heading_of(label: str) -> str:
    """Return the table heading of a label: "GPU" for `gpu_uuid`, "MIG instance" for `mig_uuid`."""
    return _HEADINGS.get(label, label.replace("_", " ").capitalize())


def link_to(uid: str, title: str, choice: str) -> Json:
    """Return the properties of a column whose cells link to another dashboard. choice: the variable that the link sets
    to the cell's value."""
    parameters = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}"
    url = f"/d/{uid}?{parameters}&var-{choice}=${{__value.raw}}"
    return {"links": [{"title": title, "url": url, "targetBlank": False}]}


def fixed_colour(color: str) -> Json:
    """Return the properties of a series with a fixed colour."""
    return {"color": {"mode": "fixed", "fixedColor": color}}


def dashboard(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[grafana_schema.Variable],
    sections: Sequence[PanelSection],
) -> str:
    """Return a dashboard as JSON text. Equal arguments give equal bytes.

    Raises ValueError if the panels of a section do not fill the width."""
    placed: list[Any] = []
    y = 0
    for section in sections:
        widths = _widths(section)
        if section.title:
            placed.append(grafana_schema.RowPanel(title=section.title, gridPos={"h": 1, "w": COLUMNS, "x": 0, "y": y}))
            y += 1
        for i, (member, width) in enumerate(zip(section.panels, widths, strict=True)):
            member.gridPos = {"h": section.height, "w": width, "x": sum(widths[:i]), "y": y}
            placed.append(member)
        y += section.height
    board = grafana_schema.Dashboard(
        uid=uid,
        title=title,
        description=description,
        tags=[TAG],
        links=[grafana_schema.Link(title="gputally", tags=[TAG])],
        templating=grafana_schema.Templating(list(variables)),
        panels=placed,
    ).auto_panel_ids()
    plain = json.loads(json.dumps(board, default=lambda model: model.to_json_data()))
    return json.dumps(_without_nulls(plain), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _widths(section: PanelSection) -> Sequence[int]:
    count = len(section.panels)
    if not section.widths:
        if not count or COLUMNS % count:
            raise ValueError(f"section {section.title!r} has {count} panels, which cannot be equally wide")
        return [COLUMNS // count] * count
    if len(section.widths) != count or sum(section.widths) != COLUMNS:
        raise ValueError(
            f"section {section.title!r}: {count} panels of widths {list(section.widths)} do not fill the page"
        )
    return section.widths


def _targets(queries: Sequence[Query]) -> list[grafana_schema.Target]:
    return [
        grafana_schema.Target(
            expr=q.expr,
            interval=LEAST_STEP,
            legendFormat=q.legend or "__auto",
            instant=q.instant,
            refId=chr(ord("A") + i),
        )
        for i, q in enumerate(queries)
    ]


def _steps(levels: Levels) -> list[grafana_schema.Threshold]:
    return [
        grafana_schema.Threshold(levels.base, 0, 0.0),
        *(grafana_schema.Threshold(s.color, i, float(s.value)) for i, s in enumerate(levels.steps, 1)),
    ]


def _overrides(looks: Mapping[str, Json]) -> list[Json]:
    return [_override("byRegexp", f"/{name}/", properties) for name, properties in looks.items()]


def _override(matcher: str, name: str, properties: Json) -> Json:
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"color", "value"}:  # a threshold: null means minus infinity
            return value
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


REFRESH_ON_TIME_RANGE_CHANGE = 2
LABEL_VALUES, QUERY_RESULT = 1, 3
"""Grafana's two ways of reading a variable from Prometheus."""

PROGRAMS = '{__name__=~"gputally_.+_build_info"}'


def datasource() -> grafana_schema.Variable:
    """Return the variable of the Prometheus data source, to which all variables and panels refer."""
    return grafana_schema.Variable(name="datasource", label="Data source", type="datasource", query="prometheus")


def scope() -> list[grafana_schema.Variable]:
    """Return the variables with which every dashboard begins."""
    return [
        datasource(),
        _chained("cluster", "Cluster", promql.values("cluster", PROGRAMS)),
        _chained("job", "Job", promql.values("job", PROGRAMS.replace("}", ',cluster=~"$cluster"}'))),
    ]


def devices() -> list[grafana_schema.Variable]:
    """Return the variables for pool, model and node of the GPUs."""
    return [
        _chained("pool", "Pool", promql.values("pool", promql.series("node_info"))),
        _chained("gpu_model", "GPU model", promql.values("gpu_model", promql.series("gpu_info"))),
        node(),
    ]


def node() -> grafana_schema.Variable:
    """Return the variable of nodes with GPUs of the chosen model, without those that are known to be in other pools."""
    ours = promql.grouped(promql.series("gpu_info", gpu_model="=~$gpu_model"), "cluster", "node")
    return _chained("node", "Node", f"query_result({promql.not_elsewhere(ours)})", QUERY_RESULT, '/node="([^"]+)"/')


def gpu() -> grafana_schema.Variable:
    """Return the variable of GPUs of the chosen nodes."""
    chosen = promql.series("gpu_info", node="=~$node", gpu_model="=~$gpu_model")
    return _chained("gpu", "GPU", promql.values("gpu_uuid", chosen))


def namespace() -> grafana_schema.Variable:
    """Return the variable of namespaces whose pods hold GPUs of the chosen nodes."""
    return _chained("namespace", "Namespace", promql.values("namespace", promql.series("pod_info", node="=~$node")))


def pod() -> grafana_schema.Variable:
    """Return the variable of pods of the chosen namespaces on the chosen nodes."""
    chosen = promql.series("pod_info", node="=~$node", namespace="=~$namespace")
    return _chained("pod", "Pod", promql.values("pod", chosen))


def team() -> grafana_schema.Variable:
    """Return the variable of teams with usage this month."""
    return _chained("team", "Team", promql.values("team", promql.series("month_team_gpu_seconds")))


def queue_of_team() -> grafana_schema.Variable:
    """Return the variable of queues for which the chosen teams pay."""
    return _chained("queue", "Queue", promql.values("queue", promql.series("queue_info", team="=~$team")))


def target() -> grafana_schema.Variable:
    """Return the variable of schedulers to which the controller writes."""
    return _chained("target", "Scheduler", promql.values("target", promql.series("queue_weight")))


def queue_of_target() -> grafana_schema.Variable:
    """Return the variable of queues of the chosen schedulers."""
    return _chained("queue", "Queue", promql.values("queue", promql.series("queue_weight", target="=~$target")))


def hour(name: str, label: str, value: int) -> grafana_schema.Variable:
    """Return a variable for an hour of the day (UTC), which is an editable text field."""
    return grafana_schema.Variable(name=name, label=label, type="textbox", query=str(value))


def _chained(name: str, label: str, query: str, kind: int = LABEL_VALUES, regex: str = "") -> grafana_schema.Variable:
    """Return a variable with multiple selection, whose values Grafana reads again when the time range changes."""
    return grafana_schema.Variable(
        name=name,
        label=label,
        query=query,
        type="query",
        refresh=REFRESH_ON_TIME_RANGE_CHANGE,
        includeAll=True,
        allValue=".*",
        multi=True,
        regex=regex or None,
        sort=1,
        query_kind=kind,
    )


GPUS = "suffix: GPUs"
GPU_HOURS = "suffix: GPU-h"
SHARE: Json = {"unit": "percentunit", "decimals": 0}
"""Properties of a table's column with shares."""
DASHED: Json = {"custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}
"""Properties of a series with a dashed line."""
CURRENCIES = ("USD", "EUR", "GBP", "CHF", "JPY")

MODELS: dict[str, Json] = {name: fixed_colour(color) for name, color in grafana_schema.MODELS.items()}
ACCOUNTS: dict[str, Json] = {f"^{name}$": fixed_colour(color) for name, color in grafana_schema.ACCOUNTS.items()}
MONEY: dict[str, Json] = {f"{code}$": {"unit": f"currency{code}"} for code in CURRENCIES}
"""Units of series whose names end in a currency."""
CAPACITY: dict[str, Json] = {
    "^capacity$": fixed_colour(grafana_schema.GREY),
    "^allocated$": fixed_colour(grafana_schema.ORANGE),
    "^busy$": fixed_colour(grafana_schema.GREEN),
}
