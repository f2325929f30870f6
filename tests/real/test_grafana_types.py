"""The dashboards conform to Grafana 13's types: TypeScript compiles them against the published definitions.

`Wire` is a type in its JSON form: an enum of texts is one of its texts. Everything is an object literal, so an unknown
field is an error too."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards import lint
from dashboards.__main__ import DASHBOARDS
from tests.real.programs import built

pytestmark = pytest.mark.real

PANELS = {"stat": "Stat", "bargauge": "BarGauge", "timeseries": "TimeSeries", "table": "Table"}
WITH_FIELD_CONFIG = {"timeseries", "table"}
TYPES = "@grafana/schema/dist/esm/raw/composable"
WIRE = """\
type Wire<T> = T extends string ? `${T}` : T extends (infer U)[] ? Wire<U>[]
  : T extends object ? { [K in keyof T]: Wire<T[K]> } : T;
"""
OPTIONS = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]

Dashboard = dict[str, Any]


def source(dashboard: Dashboard) -> str:
    """Return TypeScript that compiles if the dashboard and every panel's options conform to their types."""
    lines = ['import type { Dashboard } from "@grafana/schema";']
    lines += [
        f'import type * as {kind} from "{TYPES}/{kind}/panelcfg/x/{name}PanelCfg_types.gen";'
        for kind, name in PANELS.items()
    ]
    lines += [WIRE, f"export const dashboard: Wire<Dashboard> = {json.dumps(dashboard)};"]
    for panel in lint.panels(dashboard):
        kind, number = panel["type"], panel["id"]
        lines.append(f"export const options{number}: Wire<{kind}.Options> = {json.dumps(panel['options'])};")
        if kind in WITH_FIELD_CONFIG:
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            lines.append(f"export const custom{number}: Wire<{kind}.FieldConfig> = {custom};")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Dashboard]], str]:
    """Return the compiler's messages about dashboards; empty if there are none."""
    modules = built("grafana-types.sh") / "node_modules"
    folder: Path = tmp_path_factory.mktemp("types")
    (folder / "node_modules").symlink_to(modules)

    def run(dashboards: dict[str, Dashboard]) -> str:
        for name, dashboard in dashboards.items():
            (folder / f"{name}.ts").write_text(source(dashboard))
        files = [f"{name}.ts" for name in dashboards]
        command = [str(modules / ".bin" / "tsc"), *OPTIONS, *files]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    return run


def test_every_dashboard_compiles(compiled: Callable[[dict[str, Dashboard]], str]) -> None:
    assert compiled({name: json.loads(render()) for name, render in DASHBOARDS.items()}) == ""


def test_the_compiler_notices(compiled: Callable[[dict[str, Dashboard]], str]) -> None:
    whole: Dashboard = json.loads(DASHBOARDS["fairshare"]())
    damages: dict[str, Callable[[Dashboard, Dashboard], object]] = {
        "unknown": lambda d, p: d.update(titel="x"),
        "source": lambda d, p: p.update(datasource="Prometheus"),
        "legend": lambda d, p: p["options"]["legend"].pop("showLegend"),
        "fill": lambda d, p: p["fieldConfig"]["defaults"]["custom"].update(fillOpacity="much"),
        "tooltip": lambda d, p: p["options"]["tooltip"].update(mode="both"),
    }
    damaged = {}
    for name, damage in damages.items():
        one = copy.deepcopy(whole)
        damage(one, next(panel for panel in one["panels"] if panel["type"] == "timeseries"))
        damaged[name] = one
    said = compiled(damaged)
    assert {line.split(".ts(")[0] for line in said.splitlines() if ": error TS" in line} == set(damages)
