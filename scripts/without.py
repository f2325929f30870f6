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


def place_of(copy: Path, name: str, module: str) -> Path:
    """Return the folder or module (without `.py`) of a plug-in. module: that of its entry point."""
    # The folder of a plug-in is below that of its seam, which has the protocol or other plug-ins in it.
    place = copy.joinpath(*module.split("."))
    return place.parent if (place.parent / "__init__.py").exists() and place.parent.name == _own(name) else place


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
        (copy / "helm" / "gputally" / "examples" / f"{place.name}.yaml").unlink(missing_ok=True)
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
