"""Measures parts at this commit and at another one in the same run, in alternation: only such ratios are firm.

Both run the benchmarks of this commit: those of the other one may ask easier questions. A commit at which modules had
other names cannot load them; it runs its own, and figures of the same name are compared. Of each figure the least of
all rounds counts, which other load on the machine changes least."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

ROOT = Path(__file__).parents[2]
BENCH = Path("tests/bench")
ROUNDS = 3
SLOWER = 1.15
"""The ratio from which a figure is named: what a user waits for may not become slower by more than a tenth, and a
measurement errs by a few hundredths."""

Measured = dict[str, tuple[float, str]]
"""The value and the unit of each figure."""


class NoSuchCommit(Exception):
    """There is no commit of this name."""


def export(revision: str, folder: Path) -> None:
    """Write the tree of a commit into the folder. Raises NoSuchCommit."""
    done = subprocess.run(["git", "-C", ROOT, "archive", revision], capture_output=True, check=False)
    if done.returncode:
        raise NoSuchCommit(f"there is no commit {revision!r}: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def with_present_benchmarks(tree: Path, folder: Path) -> Path:
    """Copy the tree into the folder, with the benchmarks of the present tree. Return the folder."""
    shutil.copytree(tree, folder, ignore=lambda at, _: {BENCH.name} if Path(at) == tree / BENCH.parent else set())
    shutil.copytree(ROOT / BENCH, folder / BENCH, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def loads(tree: Path, part: str) -> bool:
    """Return whether the tree can load its benchmark of a part."""
    code = f"import tests.bench.{part.replace('-', '_')}"
    return not subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=False).returncode


def measured(tree: Path, part: str, cache: Path) -> Measured:
    """Measure a part in a process of its own. Returns no figure if the tree cannot run it; its error is on stderr."""
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "tests.bench", part, "--json"]
    done = subprocess.run(command, cwd=tree, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {}
    return {name: (value, unit) for name, value, unit in json.loads(done.stdout.splitlines()[-1])}


def compare(revision: str, parts: Sequence[str], rounds: int = ROUNDS) -> tuple[Table, list[str]]:
    """Return the figures of both commits side by side, and the names of those that became slower. Raises
    NoSuchCommit."""
    table = Table("part", "figure", title_justify="left", pad_edge=False, box=None)
    for heading in ("now", revision, "ratio"):
        table.add_column(heading, justify="right")
    slower = []
    with tempfile.TemporaryDirectory() as folder:
        own, cache = Path(folder) / "own", Path(folder) / "cache"
        export(revision, own)
        present = with_present_benchmarks(own, Path(folder) / "present")
        for part in parts:
            other = present if loads(present, part) else own
            if other is own:
                print(f"{part}: {revision} runs its own benchmark, as it cannot load the present one", file=sys.stderr)
            runs: dict[Path, list[Measured]] = {ROOT: [], other: []}
            for number in range(rounds):
                for tree in (ROOT, other) if number % 2 else (other, ROOT):
                    runs[tree].append(measured(tree, part, cache))
            now, then = _least(runs[ROOT]), _least(runs[other])
            for name, (value, unit) in now.items():
                before = then.get(name)
                beside = "cannot be measured" if before is None else f"{before[0]:,.3g} {unit}"
                ratio = value / before[0] if before is not None and before[0] else None
                table.add_row(part, name, f"{value:,.3g} {unit}", beside, "" if ratio is None else f"× {ratio:.2f}")
                if ratio is not None and ratio > SLOWER:
                    slower.append(f"{part}: {name}: × {ratio:.2f}")
    return table, slower


def _least(runs: Sequence[Measured]) -> Measured:
    return {
        name: min((run[name] for run in runs if name in run), key=lambda figure: figure[0])
        for name in dict.fromkeys(name for run in runs for name in run)
    }
