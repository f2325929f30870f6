"""`make bench`: measures each part beside a named baseline in the same run.

Prints figures and ratios, and asserts nothing, because machines differ. `make bench ARGS=division` runs one part."""

from __future__ import annotations

import importlib
import os
import platform
import sys

from rich.console import Console
from rich.table import Table

from tests.bench.figure import Figure

PARTS = (
    "division", "simulate", "tick", "windows", "ingest", "fleet", "serving", "month", "prometheus", "cycle",
    "preemption", "idle", "pages", "opencost", "fleet-lake",
)  # fmt: skip


def main(argv: list[str]) -> int:
    unknown = [name for name in argv if name not in PARTS]
    if unknown:
        print(f"no part {unknown[0]!r}; one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    console = Console()
    console.print(f"Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores, medians\n")
    table = Table("part", "figure", title_justify="left", pad_edge=False, box=None)
    for heading in ("measured", "beside it", "ratio", "goal", "memory"):
        table.add_column(heading, justify="right")
    table.add_column("what stands beside it")
    for name in argv or PARTS:
        with console.status(f"measuring {name}"):
            figures: list[Figure] = importlib.import_module(f"tests.bench.{name.replace('-', '_')}").measure()
        for i, figure in enumerate(figures):
            table.add_row(name if i == 0 else "", figure.name, *figure.cells(), figure.baseline_name)
        table.add_section()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
