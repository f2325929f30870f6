"""Defines Grafana panels and colours on top of grafanalib.

grafanalib writes the schema of Grafana 4 to 8. The classes of this module keep its models and override their JSON:
references to data sources are `{type, uid}` with a variable, and options and field configuration follow schema version
42. The dashboards use `panels_and_variables`, which uses these classes. This module contains no PromQL, metric names or
layout. Source of the JSON: the types of npm @grafana/schema 13.2.3.

The colours are the eight of Okabe and Ito, "Color Universal Design" (2008). An account or a GPU model has the same
colour in every panel. The colour of a name that is not known in advance (of a queue, a namespace) depends on its first
or last character. Other series use the Cividis scale, which people with colour blindness can read too (Nuñez, Anderton,
Renslow, PLOS ONE 2018)."""

from __future__ import annotations

from typing import Any

from grafanalib import core

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

PALETTE = (BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILION, PURPLE, GREY)
OPEN_ENDED = "continuous-cividis"
"""Grafana's colour mode for series whose names are not known in advance."""

_LETTERS = ("ahov07", "bipw18", "cjqx29", "dkry3", "elz4", "fms5", "gntu6_")
_NAMED = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
FIRST = {f"^[{letters}{letters.upper()}]": color for letters, color in zip(_LETTERS, _NAMED, strict=True)}
LAST = {f"[{letters}{letters.upper()}]$": color for letters, color in zip(_LETTERS, _NAMED, strict=True)}
"""Colours of series by a regular expression of their names, that is by the first or last character. So a name has the
same colour in every panel, and neighbours in a legend mostly differ. Yellow is left out, because it is faint on white.
Grafana has no named palette that is safe for colour blindness."""

GOOD, WARNING, BAD = GREEN, ORANGE, VERMILION

ACCOUNTS = {
    "busy": GREEN,
    "allocated_idle": ORANGE,
    "allocated_unknown": PURPLE,
    "unallocated": SKY,
    "unmetered": GREY,
    "down": VERMILION,
}
"""The accounts of a GPU-microsecond, in the order of stacking."""

MODELS = {
    "B200": VERMILION,
    "H200": GREEN,
    "H100": BLUE,
    "A100": ORANGE,
    "L40S": SKY,
    "V100": YELLOW,
    "T4": PURPLE,
}
"""Families of GPU models, by a part of the driver's name; others use the open-ended scale."""

# grafanalib ships no types, so its classes are Any to mypy.
# mypy: disable-error-code="misc"


SCHEMA_VERSION = 42
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]
NEWEST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}

SortBy = core.TableSortByField
Templating = core.Templating


class Target(core.Target):
    def to_json_data(self) -> Json:
        return {
            "refId": self.refId,
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "legendFormat": self.legendFormat,
            "format": self.format,
            "instant": self.instant,
            "interval": self.interval,
            "range": not self.instant,
        }


class Threshold(core.Threshold):
    """The first step has the value null, which means minus infinity."""

    def to_json_data(self) -> Json:
        return {"color": self.color, "value": None if self.index == 0 else self.value}


class Variable(core.Template):
    """A variable of a dashboard: the data source, a text field, or the values that a query returns.

    query_kind: the meaning of the query for Grafana's Prometheus source (1: label values, 3: the series of an
        expression)."""

    def __init__(self, query_kind: int = 1, **fields: Any) -> None:
        super().__init__(**fields)
        self.query_kind = query_kind

    def to_json_data(self) -> Json:
        common = {"name": self.name, "label": self.label, "type": self.type, "hide": self.hide}
        if self.type == "datasource":
            return common | {"query": self.query, "refresh": self.refresh, "includeAll": False, "multi": False}
        if self.type == "textbox":
            return common | {
                "query": self.query,
                "current": {"selected": True, "text": self.query, "value": self.query},
            }
        return common | {
            "datasource": DATASOURCE,
            "query": {"query": self.query, "refId": self.name, "qryType": self.query_kind},
            "regex": self.regex,
            "refresh": self.refresh,
            "includeAll": self.includeAll,
            "allValue": self.allValue,
            "multi": self.multi,
            "sort": self.sort,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


class Link(core.DashboardLink):
    """A link to all dashboards with one of its tags. It keeps the variables and the time range."""

    def to_json_data(self) -> Json:
        return {
            "title": self.title,
            "type": "dashboards",
            "tags": self.tags,
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
            "targetBlank": False,
            "icon": "external link",
            "tooltip": "",
            "url": "",
        }


class RowPanel(core.RowPanel):
    def to_json_data(self) -> Json:
        return {
            "id": self.id,
            "type": "row",
            "title": self.title,
            "collapsed": self.collapsed,
            "gridPos": self.gridPos,
            "panels": [],
        }


class Stat(core.Stat):
    def to_json_data(self) -> Json:
        return _panel(
            self,
            "stat",
            {"unit": self.format, "decimals": self.decimals, "color": {"mode": "thresholds"}, "noValue": "no data"},
            {
                "colorMode": "value",
                "graphMode": self.graphMode,
                "justifyMode": "auto",
                "orientation": "auto",
                "percentChangeColorMode": "standard",
                "reduceOptions": NEWEST,
                "showPercentChange": False,
                "textMode": "auto",
                "wideLayout": True,
            },
        )


class BarGauge(core.BarGauge):
    def to_json_data(self) -> Json:
        return _panel(
            self,
            "bargauge",
            {
                "unit": self.format,
                "decimals": self.decimals,
                "min": 0,
                "color": {"mode": "fixed", "fixedColor": BLUE},
            },
            {
                "displayMode": "basic",
                "orientation": "horizontal",
                "reduceOptions": NEWEST,
                "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
                "maxVizHeight": 32,
                "minVizHeight": 16,
                "minVizWidth": 8,
                "namePlacement": "left",
                "showUnfilled": True,
                "sizing": "manual",
                "valueMode": "text",
            },
        )


class TimeSeries(core.TimeSeries):
    def to_json_data(self) -> Json:
        custom = {
            "axisPlacement": "auto",
            "axisLabel": "",
            "drawStyle": "line",
            "fillOpacity": self.fillOpacity,
            "gradientMode": "none",
            "lineInterpolation": "linear",
            "lineWidth": self.lineWidth,
            "pointSize": 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": self.stacking,
            "thresholdsStyle": {"mode": self.thresholdsStyleMode},
        }
        return _panel(
            self,
            "timeseries",
            {
                "unit": self.unit,
                "min": self.valueMin,
                "max": self.valueMax,
                "color": {"mode": OPEN_ENDED, "seriesBy": "max"},
                "custom": custom,
            },
            {
                "legend": {
                    "calcs": ["lastNotNull", "mean", "max"],
                    "displayMode": "table",
                    "placement": "bottom",
                    "showLegend": True,
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
        )


class TablePanel(core.Table):
    def to_json_data(self) -> Json:
        return _panel(
            self,
            "table",
            {
                "unit": self.unit,
                "color": {"mode": "thresholds"},
                "custom": {
                    "align": "auto",
                    "cellOptions": {"type": "auto"},
                    "filterable": False,
                    "inspect": False,
                },
            },
            {"showHeader": True, "frameIndex": 0, "cellHeight": "sm", "sortBy": self.sortBy},
        )


class Dashboard(core.Dashboard):
    def to_json_data(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": self.tags,
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "fiscalYearStartMonth": 0,
            "refresh": "1m",
            "time": {"from": "now-24h", "to": "now"},
            "timepicker": {},
            "timezone": "browser",
            "annotations": {"list": []},
            "links": self.links,
            "templating": {"list": self.templating.list},
            "panels": self.panels,
        }


def _panel(panel: Any, kind: str, defaults: Json, options: Json) -> Json:
    """Return the JSON of a panel. Of grafanalib's own output it contains only the overrides."""
    old = panel.panel_json({})
    return {
        "id": panel.id,
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": panel.gridPos,
        "targets": panel.targets,
        "transformations": panel.transformations,
        "fieldConfig": {
            "defaults": defaults | {"mappings": [], "thresholds": {"mode": "absolute", "steps": panel.thresholds}},
            "overrides": old["fieldConfig"].get("overrides") or getattr(panel, "overrides", []),
        },
        "options": options,
    }
