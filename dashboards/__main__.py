"""`gputally dashboards build|check`: the command line of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards import build, lint


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = argparse.ArgumentParser(prog="gputally dashboards", description="Build and check the Grafana dashboards.")
    commands = top.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the dashboards as JSON")
    builder.add_argument("--out", type=Path, metavar="DIR", help="write into DIR instead of the repository's folders")
    commands.add_parser("check", help="say whether the committed JSON is fresh and keeps the rules")
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns 0; 1 for faults found by `check` or a folder that cannot be used."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "build":
            for folder in [arguments.out] if arguments.out else build.folders():
                for path in build.build(folder):
                    print(path)
            return 0
        faults = build.check()
    except OSError as error:
        print(f"gputally dashboards: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if faults:
        print("\n".join(faults), file=sys.stderr)
        print(
            f"gputally dashboards: {len(faults)} faults; `gputally dashboards build` renews the files", file=sys.stderr
        )
        return 1
    print(f"{len(build.DASHBOARDS)} dashboards fresh, {len(lint.RULES)} rules kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
