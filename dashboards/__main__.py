"""`gputally dashboards build|check|push`: the command line of this package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agent.output import OUTPUTS, show
from dashboards import build, lint, rules
from dashboards.grafana import Grafana, GrafanaError


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
    for folder in [out] if out else build.folders():
        for path in build.build(folder):
            print(path)
    return 0


def _check() -> int:
    faults = build.check()
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return _fail(f"{len(faults)} faults; `gputally dashboards build` renews the files")
    print(f"{len(build.DASHBOARDS)} dashboards and {len(rules.ALERTS)} alerts fresh, {len(lint.RULES)} rules kept")
    return 0


def _push(arguments: argparse.Namespace) -> int:
    token = arguments.token_file.read_text(encoding="utf-8").strip()
    if not token:
        raise GrafanaError(f"{arguments.token_file}: empty, a service account's token is wanted")
    server = Grafana(arguments.url, token, arguments.ca_file)
    pushed = server.push((json.loads(render()) for render in build.DASHBOARDS.values()), arguments.folder)
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
