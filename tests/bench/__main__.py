"""`make bench`: measures each part beside a named baseline in the same run.

Prints figures and ratios, and asserts nothing, because machines differ. A part that fails keeps no other from being
measured. `make bench ARGS=division` runs one part, and
`make bench ARGS="cycle --against REV"` also measures it at another commit, in the same run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import traceback

import pytest
from rich.console import Console
from rich.table import Table

from tests.bench import comparison
from tests.bench.figure import Figure

PARTS = (
    "division", "simulate", "tick", "windows", "ingest", "fleet", "serving", "month", "prometheus", "cycle",
    "preemption", "extender", "idle", "pages", "opencost", "fleet-lake", "paths",
)  # fmt: skip

_FILE_WIDTH = 200
"""Columns of a table that is written to a file or a pipe."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=…", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--against", metavar="REV", help="also measure this commit, in alternation")
    parser.add_argument("--json", action="store_true", help="print name, value and unit of each figure as JSON")
    options = parser.parse_args(argv)
    parts: list[str] = options.parts or list(PARTS)
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; one of {', '.join(PARTS)}")
    failed: list[str] = []
    if options.json:
        measured = [figure for name in parts for figure in _measure(name, failed)]
        print(json.dumps([(figure.name, figure.value, figure.unit) for figure in measured]))
        return 1 if failed else 0
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    if options.against is not None:
        return _compare(options.against, parts, console)
    console.print(f"Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores, medians\n")
    table = Table("part", "figure", title_justify="left", pad_edge=False, box=None)
    for heading in ("measured", "beside it", "ratio", "goal", "memory"):
        table.add_column(heading, justify="right")
    table.add_column("what stands beside it")
    for name in parts:
        with console.status(f"measuring {name}"):
            figures = _measure(name, failed)
        for i, figure in enumerate(figures):
            table.add_row(name if i == 0 else "", figure.name, *figure.cells(), figure.baseline_name)
        if name in failed:
            table.add_row(name, "failed, see above")
        table.add_section()
    console.print(table)
    return 1 if failed else 0


def _measure(part: str, failed: list[str]) -> list[Figure]:
    """Return the figures of a part. If it fails, print why and add its name to `failed`: the others are measured."""
    try:
        figures: list[Figure] = importlib.import_module(f"tests.bench.{part.replace('-', '_')}").measure()
    except (Exception, SystemExit, pytest.fail.Exception):  # noqa: BLE001 - one part must not stop the others
        traceback.print_exc()
        failed.append(part)
        return []
    return figures


def _compare(revision: str, parts: list[str], console: Console) -> int:
    try:
        with console.status(f"measuring {', '.join(parts)} beside {revision}"):
            table, slower = comparison.compare(revision, parts)
    except comparison.NoSuchCommit as error:
        print(error, file=sys.stderr)
        return 2
    console.print(table)
    most = f"by more than {comparison.SLOWER - 1:.0%}"
    console.print(f"\nSlower {most}: {'; '.join(slower)}" if slower else f"\nNothing is slower {most}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
