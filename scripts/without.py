"""Runs tests in a copy of the repository that lacks a plug-in: what fails there belongs to the plug-in or is a fault.

    python -m scripts.without exports.xlsx schedulers.kai -- tests/exports tests/reports -q

A plug-in is named by its seam and name, as in `gputally plugins`. The copy lacks the module or folder of each, its
entry points, its example of chart values, and the folders of tests that have its name; what is generated of manifests
is generated again. pytest runs in the copy with what follows `--`, and its exit code is this one's. `--keep FOLDER`
leaves the copy there."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def deleted(copy: Path, plugins: list[str]) -> None:
    """Delete plug-ins from a copy: their folders, entry points and folders of tests."""
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    gone = set()
    for plugin in plugins:
        seam, _, name = plugin.partition(".")
        module = groups[f"gputally.{seam}"][name].partition(":")[0]
        # The folder of a plug-in is below that of its seam, which has the protocol or other plug-ins in it.
        place = copy.joinpath(*module.split("."))
        gone.add(place.parent if (place.parent / "__init__.py").exists() and place.parent.name == _own(name) else place)
    for place in gone:
        print("without", place.relative_to(copy), flush=True)
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
        for folder in [one for one in (copy / "tests").rglob(place.name) if one.is_dir() and "fakes" not in one.parts]:
            print("without", folder.relative_to(copy), flush=True)
            shutil.rmtree(folder)
        (copy / "helm" / "gputally" / "examples" / f"{place.name}.yaml").unlink(missing_ok=True)
    lines, kept = (copy / "pyproject.toml").read_text().splitlines(keepends=True), []
    points = {}
    for group, entries in groups.items():
        points[group] = {
            name: value
            for name, value in entries.items()
            if not any(_within(copy, value.partition(":")[0], place) for place in gone)
        }
    left_out = {
        value for group, entries in groups.items() for name, value in entries.items() if name not in points[group]
    }
    kept = [line for line in lines if not any(line.rstrip().endswith(f'"{value}"') for value in left_out)]
    (copy / "pyproject.toml").write_text("".join(kept))
    # The copy is found before the installed package, and its entry points take the place of the installed ones.
    metadata = copy / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in points.items()
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


def main(argv: list[str]) -> int:
    own, found, tests = argv, False, []
    if "--" in argv:
        at, found = argv.index("--"), True
        own, tests = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m scripts.without", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plugins", nargs="+", metavar="SEAM.NAME")
    parser.add_argument("--keep", type=Path, help="a new folder for the copy")
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        copy = (options.keep or Path(folder) / "copy").resolve()
        copy.mkdir()
        copied(copy)
        deleted(copy, options.plugins)
        environment = {**os.environ, "PYTHONPATH": str(copy)}

        def run(*command: str, **more: str) -> int:
            done = subprocess.run([sys.executable, "-m", *command], cwd=copy, env=environment | more, check=False)  # noqa: S603 - our own code
            return done.returncode

        chart = ("pytest", "-q", "-n", "0", "tests/chart/test_manifests.py", "-k", "golden")
        code = run("scripts.reference_pages") or run(*chart, GPUTALLY_GOLDEN="update")
        return code or (run("pytest", *tests) if found else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
