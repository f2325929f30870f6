"""Runs `gputally dashboards build, check, push`: writes the JSON and YAML files and compares them with the code.

The files live twice: in `dashboards/generated/`, for Grafana's import and provisioning and for a plain
Prometheus, and inside the Helm chart, because a chart can only carry files of its own. Neither is edited by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dashboards import (
    cluster_dashboard,
    fairshare_dashboard,
    gpu_dashboard,
    health_dashboard,
    lint,
    prometheus_rules,
    team_dashboard,
)
from dashboards.grafana_client import Grafana, GrafanaError
from gputally.base.command_output import OUTPUTS, show

DASHBOARDS: Mapping[str, Callable[[], str]] = {
    "cluster": cluster_dashboard.render,
    "team": team_dashboard.render,
    "gpu": gpu_dashboard.render,
    "fairshare": fairshare_dashboard.render,
    "health": health_dashboard.render,
}
"""Name of the file without its ending -> what goes into it."""

RULES = "rules.yaml"
GENERATED = Path(__file__).parent / "generated"
CHART = Path(__file__).parent.parent / "helm" / "gputally"


def files() -> dict[str, str]:
    """Name -> text of everything that is generated."""
    return {f"{name}.json": render() for name, render in DASHBOARDS.items()} | {RULES: prometheus_rules.render_rules()}


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


def stale_files(folder: Path) -> list[str]:
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
        faults += stale_files(folder)
    return faults


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = argparse.ArgumentParser(
        prog="gputally dashboards", description="Build, check and push dashboards and alerts."
    )
    commands = top.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the dashboards as JSON and the rules as YAML")
    builder.add_argument("--out", type=Path, metavar="DIR", help="write into DIR instead of the repository's folders")
    commands.add_parser("check", help="say whether the committed files are fresh and keep the rules")
    pusher = commands.add_parser("push", help="put the dashboards into a Grafana; what is there already is left alone")
    pusher.add_argument("--url", required=True, help="Grafana's address, as https://grafana.example")
    pusher.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="a service account's token")
    pusher.add_argument("--folder", default="gputally", help="title of the folder (default: gputally)")
    pusher.add_argument("--output", choices=OUTPUTS, default="table", help="how to print what became of each")
    pusher.add_argument("--ca-file", type=Path, metavar="FILE", help="authorities trusted for https, PEM")
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns 0; 1 for faults found by `check`, a folder that cannot be used, or a Grafana that
    does not do as it is asked; 2 for a wrong call."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    try:
        if arguments.command == "build":
            return _build(arguments.out)
        if arguments.command == "push":
            return _push(arguments)
        return _check()
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    except GrafanaError as error:
        return _fail(str(error))


def _build(out: Path | None) -> int:
    for folder in [out] if out else folders():
        for path in build(folder):
            print(path)
    return 0


def _check() -> int:
    faults = check()
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return _fail(f"{len(faults)} faults; `gputally dashboards build` renews the files")
    print(f"{len(DASHBOARDS)} dashboards and {len(prometheus_rules.ALERTS)} alerts fresh, {len(lint.RULES)} rules kept")
    return 0


def _push(arguments: argparse.Namespace) -> int:
    token = arguments.token_file.read_text(encoding="utf-8").strip()
    if not token:
        raise GrafanaError(f"{arguments.token_file}: empty, a service account's token is wanted")
    server = Grafana(arguments.url, token, arguments.ca_file)
    pushed = server.push((json.loads(render()) for render in DASHBOARDS.values()), arguments.folder)
    if arguments.output != "table":
        show(arguments.output, lambda: "", [asdict(one) for one in pushed])
        return 0
    width = max(len(one.title) for one in pushed)
    for one in pushed:
        print(f"{one.title:<{width}}  {one.change:<9}  {one.url}")
    return 0


def _fail(reason: str) -> int:
    print(f"gputally dashboards: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
