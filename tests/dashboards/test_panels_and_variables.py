"""Panels, variables, the formats of table columns, and the shape of the JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dashboards import grafana_schema, panels_and_variables
from dashboards.__main__ import DASHBOARDS
from dashboards.panels_and_variables import (
    Levels,
    PanelSection,
    Query,
    bars,
    dashboard,
    link_to,
    stat,
    table,
    timeseries,
)

QUERY = Query("vector(1)", "one")


def figure(title: str) -> Any:
    return stat(title, "A figure.", QUERY, "short", Levels.bad_above(1))


def board(*sections: PanelSection) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        dashboard("gputally-test", "Test", "A test.", panels_and_variables.scope(), sections)
    )
    return loaded


def test_the_panels_of_a_section_share_the_width_and_rows_follow_each_other() -> None:
    loaded = board(
        PanelSection("First", 4, [figure("a"), figure("b"), figure("c")]), PanelSection("Second", 6, [figure("d")])
    )
    assert [(p["type"], p["title"], *p["gridPos"].values()) for p in loaded["panels"]] == [
        ("row", "First", 1, 24, 0, 0),
        ("stat", "a", 4, 8, 0, 1),
        ("stat", "b", 4, 8, 8, 1),
        ("stat", "c", 4, 8, 16, 1),
        ("row", "Second", 1, 24, 0, 5),
        ("stat", "d", 6, 24, 0, 6),
    ]
    assert [p["id"] for p in loaded["panels"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("count", [0, 5, 7])
def test_panels_that_cannot_be_equally_wide_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"'Odd' has .* panels"):
        board(PanelSection("Odd", 4, [figure(str(i)) for i in range(count)]))


def test_widths_may_be_given_and_have_to_fill_the_page() -> None:
    loaded = board(PanelSection("Uneven", 8, [figure("a"), figure("b")], (14, 10)))
    assert [(p["gridPos"]["x"], p["gridPos"]["w"]) for p in loaded["panels"][1:]] == [(0, 14), (14, 10)]
    for widths in ((14, 9), (24,)):
        with pytest.raises(ValueError, match="do not fill the page"):
            board(PanelSection("Uneven", 8, [figure("a"), figure("b")], widths))


def test_a_cell_leads_to_another_dashboard_with_source_cluster_and_time() -> None:
    columns = {"GPU": link_to("gputally-gpu", "This GPU", "gpu")}
    shown = table(
        "t", "A table.", {"Share": QUERY.expr}, by=("gpu_uuid",), columns=columns, unit="s", descending="Share"
    )
    (panel,) = board(PanelSection("", 8, [shown]))["panels"]
    text, override = panel["fieldConfig"]["overrides"]
    assert text["matcher"] == override["matcher"] == {"id": "byName", "options": "GPU"}
    (link,) = override["properties"][0]["value"]
    assert link["url"].startswith("/d/gputally-gpu?${__url_time_range}&${datasource:queryparam}")
    assert link["url"].endswith("&var-gpu=${__value.raw}")
    assert panel["transformations"][1]["options"]["renameByName"] == {"gpu_uuid": "GPU", "Value #A": "Share"}


def test_a_label_is_text_also_where_it_looks_like_a_number() -> None:
    """Grafana reads a number from a text in a column of seconds: XID 119 would become two minutes."""
    columns = {"Since the last": {"decimals": 0}}
    made: Any = table("t", "d", {"Since the last": "x"}, ("node", "xid"), columns, "s", "XID")
    looks = {
        override["matcher"]["options"]: {one["id"]: one["value"] for one in override["properties"]}
        for override in made.overrides
    }
    assert looks == {"Node": {"unit": "string"}, "XID": {"unit": "string"}, "Since the last": {"decimals": 0}}


def test_thresholds_begin_at_minus_infinity_and_nothing_else_is_null() -> None:
    loaded = board(PanelSection("One", 4, [figure("a")]))
    steps = loaded["panels"][1]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps == [{"color": grafana_schema.GOOD, "value": None}, {"color": grafana_schema.BAD, "value": 1.0}]
    assert json.dumps(loaded).count("null") == 1


def test_data_sources_are_references_with_a_variable() -> None:
    loaded = board(
        PanelSection("One", 7, [timeseries("t", "A line.", [QUERY, QUERY], "s"), bars("b", "Bars.", QUERY, "s")])
    )
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for shown in loaded["panels"][1:]:
        assert shown["datasource"] == wanted
        assert all(target["datasource"] == wanted for target in shown["targets"])
    assert [t["refId"] for t in loaded["panels"][1]["targets"]] == ["A", "B"]
    assert loaded["schemaVersion"] == 42
    assert loaded["editable"] is False


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_the_same_bytes_in_every_process(name: str) -> None:
    code = f"import sys; from dashboards.__main__ import DASHBOARDS; sys.stdout.write(DASHBOARDS[{name!r}]())"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert other.stdout.decode() == DASHBOARDS[name]() == DASHBOARDS[name]()
