"""What dashboards are written with: panels, variables, layout, and the JSON text of the whole.

Every choice of style is made here once (palette, legends, axes, sizes), so that a dashboard states
only what it shows. No PromQL and no metric name belongs here; no null leaves but the one that thresholds begin with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards import palette, panels
from dashboards.panels import Json

COLUMNS = 24
"""Width of Grafana's grid; at 1440 px a column is about 57 px."""

REFRESH_ON_TIME_RANGE_CHANGE = 2


@dataclass(frozen=True)
class Query:
    """One PromQL expression. instant: only the newest value, as a table needs it."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Step:
    """From `value` upwards things look `color`."""

    value: float
    color: str


def variable(name: str, label: str, query: str) -> panels.Variable:
    """A chained choice of label values: several or all of them, read again when the time range moves."""
    return panels.Variable(
        name=name,
        label=label,
        query=query,
        refresh=REFRESH_ON_TIME_RANGE_CHANGE,
        includeAll=True,
        allValue=".*",
        multi=True,
    )


def datasource_variable() -> panels.Variable:
    """Which Prometheus is asked; every other variable and every panel refers to it."""
    return panels.Variable(name="datasource", label="Data source", type="datasource", query="prometheus")


def stat(
    title: str, description: str, query: Query, unit: str, steps: Sequence[Step], base: str, decimals: int | None = None
) -> panels.Stat:
    """One figure, with the line of its past behind it."""
    return panels.Stat(
        title=title,
        description=description,
        targets=_targets([query]),
        format=unit,
        decimals=decimals,
        reduceCalc="lastNotNull",
        noValue="no data",
        thresholds=_steps(base, steps),
        graphMode="none" if query.instant else "area",
    )


def bars(
    title: str, description: str, query: Query, unit: str, decimals: int | None = None, looks: Mapping[str, Json] = {}
) -> panels.BarGauge:
    """One horizontal bar per series, as of now. looks: regular expression of names -> properties."""
    return panels.BarGauge(
        title=title,
        description=description,
        targets=_targets([query]),
        format=unit,
        decimals=decimals,
        calc="lastNotNull",
        displayMode="basic",
        max=None,
        thresholds=_steps(palette.BLUE, ()),
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
    steps: Sequence[Step] = (),
    base: str = palette.GOOD,
    looks: Mapping[str, Json] = {},
) -> panels.TimeSeries:
    """Lines over time, or areas on top of each other. share: the axis is 0 to 100 %. `steps` are drawn
    as dashed lines. looks: regular expression of series names -> properties."""
    return panels.TimeSeries(
        title=title,
        description=description,
        targets=_targets(queries),
        unit=unit,
        colorMode=palette.OPEN_ENDED,
        fillOpacity=70 if stacked else 8,
        lineWidth=1 if stacked else 2,
        showPoints="never",
        stacking={"mode": "normal" if stacked else "none", "group": "A"},
        legendDisplayMode="table",
        legendPlacement="bottom",
        legendCalcs=["lastNotNull", "mean", "max"],
        tooltipMode="multi",
        tooltipSort="desc",
        valueMin=0,
        valueMax=1 if share else None,
        thresholds=_steps(base, steps),
        thresholdsStyleMode="dashed" if steps else "off",
        overrides=_overrides(looks),
    )


def table(
    title: str,
    description: str,
    queries: Sequence[tuple[str, Query]],
    by: Sequence[str],
    columns: Mapping[str, Json],
    unit: str,
    descending: str,
) -> panels.Table:
    """One row per value of the labels `by`, one column per (heading, query). columns: heading -> properties."""
    targets = _targets([query for _, query in queries])
    for target in targets:
        target.format = "table"
    headings = {f"Value #{t.refId}": name for t, (name, _) in zip(targets, queries, strict=True)}
    return panels.Table(
        title=title,
        description=description,
        targets=targets,
        unit=unit,
        thresholds=_steps(palette.BLUE, ()),
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "indexByName": {name: i for i, name in enumerate([*by, *headings])},
                    "renameByName": {label: label.capitalize() for label in by} | headings,
                },
            },
        ],
        sortBy=[panels.SortBy(displayName=descending, desc=True)],
        overrides=[_override("byName", name, properties) for name, properties in columns.items()],
    )


def fixed(color: str) -> Json:
    """Properties of a series that is always drawn in one colour."""
    return {"color": {"mode": "fixed", "fixedColor": color}}


def dashboard(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[panels.Variable],
    sections: Sequence[tuple[str, int, Sequence[Any]]],
) -> str:
    """The JSON text of a dashboard; equal input gives equal bytes.

    sections: (title, height of a panel in grid units, panels). The panels of a section stand side by
    side with equal width, so their number has to divide 24. Raises ValueError where it does not."""
    placed: list[Any] = []
    y = 0
    for heading, height, members in sections:
        if not members or COLUMNS % len(members):
            raise ValueError(f"section {heading!r} has {len(members)} panels, which cannot be equally wide")
        if heading:
            placed.append(panels.Row(title=heading, gridPos={"h": 1, "w": COLUMNS, "x": 0, "y": y}))
            y += 1
        width = COLUMNS // len(members)
        for i, member in enumerate(members):
            member.gridPos = {"h": height, "w": width, "x": i * width, "y": y}
            placed.append(member)
        y += height
    board = panels.Dashboard(
        uid=uid,
        title=title,
        description=description,
        tags=["gputally"],
        schemaVersion=panels.SCHEMA_VERSION,
        version=1,
        editable=False,
        graphTooltip=1,
        refresh="1m",
        time=panels.Time("now-24h", "now"),
        timezone="browser",
        templating=panels.Templating(list(variables)),
        panels=placed,
    ).auto_panel_ids()
    plain = json.loads(json.dumps(board, default=lambda model: model.to_json_data()))
    return json.dumps(_without_nulls(plain), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _targets(queries: Sequence[Query]) -> list[panels.Target]:
    return [
        panels.Target(expr=q.expr, legendFormat=q.legend or "__auto", instant=q.instant, refId=chr(ord("A") + i))
        for i, q in enumerate(queries)
    ]


def _steps(base: str, steps: Sequence[Step]) -> list[panels.Threshold]:
    return [
        panels.Threshold(base, 0, 0.0),
        *(panels.Threshold(s.color, i, float(s.value)) for i, s in enumerate(steps, 1)),
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
        if value.keys() == {"color", "value"}:  # a threshold: its null means minus infinity
            return value
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
