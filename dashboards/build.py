"""Writes the dashboards as JSON and the rules as YAML, and says whether what is committed is what the code gives.

The files live twice: in `dashboards/generated/`, for Grafana's import and provisioning and for a plain
Prometheus, and inside the Helm chart, because a chart can only carry files of its own. Nobody edits
either by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from dashboards import cluster, fairshare, gpu, health, lint, rules, team

DASHBOARDS: Mapping[str, Callable[[], str]] = {
    "cluster": cluster.render,
    "team": team.render,
    "gpu": gpu.render,
    "fairshare": fairshare.render,
    "health": health.render,
}
"""Name of the file without its ending -> what goes into it."""

RULES = "rules.yaml"
GENERATED = Path(__file__).parent / "generated"
CHART = Path(__file__).parent.parent / "helm" / "gputally"


def files() -> dict[str, str]:
    """Name -> text of everything that is generated."""
    return {f"{name}.json": render() for name, render in DASHBOARDS.items()} | {RULES: rules.render()}


def folders() -> list[Path]:
    """Where the files belong: this package, and the chart where there is a checkout around it."""
    return [GENERATED] + ([CHART / "dashboards"] if (CHART / "Chart.yaml").is_file() else [])


def build(folder: Path) -> list[Path]:
    """Write everything into `folder`, creating it; returns the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files().items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def stale(folder: Path) -> list[str]:
    """How `folder` differs from what the code gives, one line per file. Raises OSError where a file
    cannot be read for another reason than being absent."""
    faults = []
    wanted = files()
    for name, text in wanted.items():
        try:
            committed = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            faults.append(f"{folder / name}: missing")
            continue
        if committed != text:
            faults.append(f"{folder / name}: not what the code gives")
    found = {path.name for kind in ("*.json", "*.yaml") for path in folder.glob(kind)}
    return faults + [f"{folder / name}: nothing of this name is generated" for name in sorted(found - set(wanted))]


def check() -> list[str]:
    """Everything wrong with the dashboards and with the committed files, one line per fault."""
    faults = [f"{name}: {fault}" for name, render in DASHBOARDS.items() for fault in lint.faults(json.loads(render()))]
    for folder in folders():
        faults += stale(folder)
    return faults
