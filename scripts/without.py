"""Runs tests in a copy of the repository that lacks a plug-in: what fails there belongs to the plug-in or is a fault.

    python -m scripts.without exports.xlsx schedulers.kai -- tests/exports tests/reports -q
    python -m scripts.without --each channels exports.xlsx -- tests/docs

A plug-in is named by its seam and name, as in `gputally plugins`. The copy lacks the module or folder of each, its
entry points, its example of chart values, and the folders of tests that have its name; what is generated of manifests
is generated again. pytest runs in the copy with what follows `--`, and its exit code is this one's. `--keep FOLDER`
leaves the copy there.

A seam stands for all its plug-ins, and no name for all plug-ins. `--each` deletes them one at a time, each in a copy
of its own, and prints a line with the figures of each and the tests that failed without it. It exits 1 if any did."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET  # of our own pytest
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


def place_of(copy: Path, name: str, module: str) -> Path:
    """Return the folder or module (without `.py`) of a plug-in. module: that of its entry point."""
    # The folder of a plug-in is below that of its seam, which has the protocol or other plug-ins in it. The tool of an
    # assistant is a module in the package that it asks.
    place = copy.joinpath(*module.split("."))
    own = place.parent.name == _own(name) and place.name != "assistant_tool"
    return place.parent if (place.parent / "__init__.py").exists() and own else place


def tests_of(copy: Path, seam: str, name: str) -> list[Path]:
    """Return the folders of tests with the name of a plug-in's folder, in any folder of a subject.

    Those of what is imported from a history are apart: its name can be that of a source of holders too."""
    tests = copy / "tests"
    imports = tests / "history_import"
    return [
        folder
        for folder in sorted(tests.rglob(name))
        if folder.is_dir() and folder.parent != tests and "fakes" not in folder.parts
        and folder.is_relative_to(imports) == (seam == "histories")
    ]  # fmt: skip


def deleted(copy: Path, plugins: list[str]) -> None:
    """Delete plug-ins from a copy: their folders, entry points and folders of tests."""
    points: dict[str, dict[str, str]] = entry_points(copy)
    gone = {}
    for plugin in plugins:
        seam, _, name = plugin.partition(".")
        gone[place_of(copy, name, points[f"gputally.{seam}"][name].partition(":")[0])] = seam
    for place, seam in gone.items():
        print("without", place.relative_to(copy), flush=True)
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
        for folder in tests_of(copy, seam, place.name):
            if folder.exists():  # not yet deleted with one above it
                print("without", folder.relative_to(copy), flush=True)
                shutil.rmtree(folder)
        example = copy / "helm" / "gputally" / "examples" / f"{place.name}.yaml"
        if example.exists():
            example.unlink()
            _unlink(copy, example)
    left_out = {
        value
        for entries in points.values()
        for value in entries.values()
        if any(_within(copy, value.partition(":")[0], place) for place in gone)
    }
    lines = (copy / "pyproject.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not any(line.rstrip().endswith(f'"{value}"') for value in left_out)]
    (copy / "pyproject.toml").write_text("".join(kept))
    register(copy)


def _unlink(copy: Path, gone: Path) -> None:
    """Make plain words of the links to a file that is deleted."""
    for page in (*(copy / "docs").rglob("*.md"), *(copy / "helm").rglob("*.md"), *copy.glob("*.md")):
        text = page.read_text("utf-8")
        plain = re.sub(rf"\[([^\]]*)\]\([^)]*examples/{re.escape(gone.name)}\)", r"\1", text)
        if plain != text:
            page.write_text(plain, "utf-8")


def entry_points(copy: Path) -> dict[str, dict[str, str]]:
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    return dict(project["entry-points"])


def register(copy: Path) -> None:
    """Give the copy the metadata of an installed package: it is found before the installed one, and its entry points
    take the place of the installed ones."""
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    metadata = copy / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )


def _own(name: str) -> str:
    return name.replace("-", "_")


def _within(copy: Path, module: str, place: Path) -> bool:
    return copy.joinpath(*module.split(".")).is_relative_to(place)


def copied(copy: Path) -> None:
    """Copy what git tracks or does not ignore."""
    git = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(git, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout  # noqa: S603 - a local tool
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")


def named(words: list[str]) -> list[str]:
    """Return the plug-ins (SEAM.NAME) that these words name, one of each folder. No words: all."""
    points = {group.removeprefix("gputally."): found for group, found in entry_points(ROOT).items() if "." in group}
    every = {f"{seam}.{name}": place_of(ROOT, name, point.partition(":")[0])
             for seam, found in points.items() for name, point in found.items()}  # fmt: skip
    if unknown := [word for word in words if word not in every and word not in points]:
        raise SystemExit(f"no plug-in and no seam: {', '.join(unknown)}")
    chosen = [one for one in every if not words or one in words or one.partition(".")[0] in words]
    return list({every[one]: one for one in reversed(chosen)}.values())[::-1]


def tried(copy: Path, plugins: list[str], tests: list[str], log: IO[bytes] | None = None) -> int:
    """Make a copy without plug-ins and run tests there. log: takes what is printed. Returns an exit code."""
    copy.mkdir()
    copied(copy)
    deleted(copy, plugins)
    environment = {**os.environ, "PYTHONPATH": str(copy)}

    def run(*command: str, **more: str) -> int:
        call = [sys.executable, "-m", *command]
        return subprocess.run(call, cwd=copy, env=environment | more, stdout=log, stderr=log, check=False).returncode  # noqa: S603 - our own code

    chart = ("pytest", "-q", "-n", "0", "tests/chart/test_manifests.py", "-k", "golden")
    code = run("scripts.reference_pages") or run(*chart, GPUTALLY_GOLDEN="update")
    return code or (run("pytest", *tests) if tests else 0)


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest found. failed: the names of tests."""

    passed: int
    failed: tuple[str, ...]
    seconds: float


def outcome_of(report: Path) -> Outcome:
    """Read pytest's report in JUnit's format."""
    (suite,) = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 - of our own pytest
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
    skipped = int(suite.get("skipped", 0))
    return Outcome(int(suite.get("tests", 0)) - len(failed) - skipped, failed, float(suite.get("time", 0)))


def each(plugins: list[str], tests: list[str]) -> int:
    """Try every plug-in by itself, and print a table."""
    print(f"{'without':<28}{'passed':>8}{'failed':>8}{'s':>8}", flush=True)
    worst = 0
    for plugin in plugins:
        with tempfile.TemporaryDirectory() as folder:
            report, log = Path(folder) / "report.xml", Path(folder) / "log"
            with log.open("wb") as printed, contextlib.redirect_stdout(io.StringIO()):
                code = tried(Path(folder) / "copy", [plugin], [*tests, f"--junit-xml={report}"], printed)
            worst = max(worst, int(code != 0))
            if report.exists():
                found = outcome_of(report)
                print(f"{plugin:<28}{found.passed:>8}{len(found.failed):>8}{found.seconds:>8.0f}", flush=True)
                print("".join(f"    {name}\n" for name in found.failed), end="", flush=True)
            else:
                print(f"{plugin:<28}no tests ran\n{log.read_text(errors='replace')[-3_000:]}", flush=True)
    return worst


def main(argv: list[str]) -> int:
    own, tests = argv, []
    if "--" in argv:
        at = argv.index("--")
        own, tests = argv[:at], argv[at + 1 :] or ["tests"]
    parser = argparse.ArgumentParser(prog="python -m scripts.without", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plugins", nargs="*", metavar="SEAM[.NAME]")
    parser.add_argument("--each", action="store_true", help="one at a time")
    parser.add_argument("--keep", type=Path, help="a new folder for the copy")
    options = parser.parse_args(own)
    if options.each and not tests:
        parser.error("--each needs the tests to run, after --")
    if options.each:
        return each(named(options.plugins), tests)
    with tempfile.TemporaryDirectory() as folder:
        return tried((options.keep or Path(folder) / "copy").resolve(), named(options.plugins), tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
