"""The shipped dashboards keep the rules, and each rule detects a violation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dashboards import lint

Break = Callable[[dict[str, Any]], None]


def panel(dashboard: dict[str, Any], kind: str = "timeseries") -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in dashboard["panels"] if p["type"] == kind)
    return found


def expr(dashboard: dict[str, Any], text: str) -> None:
    panel(dashboard)["targets"][0]["expr"] = text


def defaults(dashboard: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = panel(dashboard)["fieldConfig"]["defaults"]
    return found


def steps(*values: float | None) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"color": "#009E73", "value": value} for value in values]}


SCOPE = 'cluster=~"$cluster",job=~"$job"'
HELD = f"gputally_gpu_allocated_seconds_total{{{SCOPE}}}"

BREAKS: list[tuple[str, str, Break]] = [
    ("templated-datasource", "a fixed source", lambda d: panel(d)["datasource"].update(uid="p1")),
    ("templated-datasource", "a source by name", lambda d: panel(d)["targets"][0].update(datasource="Prometheus")),
    ("templated-datasource", "no variable", lambda d: d["templating"]["list"].pop(0)),
    ("chained-variables", "used too early", lambda d: d["templating"]["list"].reverse()),
    ("chained-variables", "frozen", lambda d: d["templating"]["list"][1].update(refresh=1)),
    ("chained-variables", "job missing", lambda d: d["templating"]["list"].pop(2)),
    ("declared-choices", "not offered", lambda d: expr(d, f'sum(gputally_nvml_up{{{SCOPE},node=~"$elsewhere"}})')),
    ("declared-choices", "of no use", lambda d: d["templating"]["list"].append({"name": "idle", "type": "textbox"})),
    ("linked", "no tag", lambda d: d.update(tags=[])),
    ("linked", "no link", lambda d: d.update(links=[])),
    ("linked", "choices are lost", lambda d: d["links"][0].update(includeVars=False)),
    ("templated-selectors", "no matchers", lambda d: expr(d, "sum(gputally_nvml_up)")),
    ("templated-selectors", "no job", lambda d: expr(d, 'sum(gputally_nvml_up{cluster=~"$cluster"})')),
    ("title-and-description", "no title", lambda d: panel(d).update(title=" ")),
    ("title-and-description", "no description", lambda d: panel(d).update(description="")),
    ("title-and-description", "the same title", lambda d: panel(d).update(title=panel(d, "stat")["title"])),
    ("units", "no unit", lambda d: defaults(d).pop("unit")),
    ("targets", "no query", lambda d: panel(d).update(targets=[])),
    ("rate-interval", "a fixed window", lambda d: expr(d, f"sum(rate(gputally_x_total{{{SCOPE}}}[5m]))")),
    ("rate-interval", "the whole range", lambda d: expr(d, f"sum(rate(gputally_x_total{{{SCOPE}}}[$__range]))")),
    ("least-step", "none", lambda d: panel(d)["targets"][0].update(interval=None)),
    ("counted-by-intervals", "as it moves", lambda d: expr(d, f"sum(rate({HELD}[$__rate_interval]))")),
    ("counters", "read raw", lambda d: expr(d, f"sum(gputally_x_total{{{SCOPE}}})")),
    ("counters", "summed first", lambda d: expr(d, f"rate(sum(gputally_x_total{{{SCOPE}}})[$__rate_interval:])")),
    ("thresholds", "descending", lambda d: defaults(d).update(thresholds=steps(None, 2, 1))),
    ("thresholds", "a base with a value", lambda d: defaults(d).update(thresholds=steps(0, 1))),
    ("colours", "red", lambda d: defaults(d)["color"].update(fixedColor="#FF0000")),
    ("colours", "classic", lambda d: defaults(d)["color"].update(mode="palette-classic")),
    ("layout", "off the page", lambda d: panel(d)["gridPos"].update(x=20)),
    ("layout", "too small", lambda d: panel(d)["gridPos"].update(w=4)),
    ("layout", "on top of another", lambda d: panel(d)["gridPos"].update(y=0)),
    ("modern-and-uneditable", "editable", lambda d: d.update(editable=True)),
    ("modern-and-uneditable", "old schema", lambda d: d.update(schemaVersion=12)),
    ("modern-and-uneditable", "foreign uid", lambda d: d.update(uid="abc")),
    ("modern-and-uneditable", "equal ids", lambda d: panel(d).update(id=panel(d, "stat")["id"])),
    ("modern-and-uneditable", "a null", lambda d: panel(d).update(links=None)),
]  # fmt: skip


def test_what_we_ship_keeps_every_rule(dashboard: dict[str, Any]) -> None:
    assert lint.faults(dashboard) == []


@pytest.mark.parametrize(("rule", "how", "damage"), BREAKS, ids=[f"{rule}: {how}" for rule, how, _ in BREAKS])
def test_each_rule_notices(dashboard: dict[str, Any], rule: str, how: str, damage: Break) -> None:
    damaged = copy.deepcopy(dashboard)
    damage(damaged)
    assert rule in {fault.split(":")[0] for fault in lint.faults(damaged)}


def test_every_rule_has_been_broken_here() -> None:
    assert {rule for rule, _, _ in BREAKS} == {rule.__name__.replace("_", "-") for rule in lint.RULES}
