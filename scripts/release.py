"""Builds and checks everything that a release publishes, without publishing it.

`python -m scripts.release` (`make release-dry-run`) writes wheel, source, chart, bills of materials, the libraries of
each image and the release notes to dist/. Each is checked in the way in which its users use it. `--tag vX.Y.Z` also
compares the tag with the version, as the release workflow does. That workflow publishes and signs
(docs/releasing.md)."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from gputally.base.version import __version__
from scripts import reference_pages

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
IMAGES = ("agent", "accountant", "fairshare")
BIN = Path(sys.executable).parent


class Refused(Exception):
    """This state cannot be released. The message is the reason."""


def run(*words: object, cwd: Path = ROOT, **more: str) -> str:
    """Run a command and return its standard output. Raises Refused with the end of its output if it fails.

    more: further environment variables."""
    command = [str(word) for word in words]
    done = subprocess.run(  # noqa: S603 - our own programs
        command, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise Refused(f"{' '.join(command[:3])}: exit {done.returncode}\n{said}")
    return done.stdout


def version() -> str:
    """Return the version in pyproject.toml."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return found


def notes(changelog: str, of: str) -> str:
    """Return a version's section of the changelog, without its heading. Raises Refused if it is missing or empty."""
    found = re.search(rf"^## \[{re.escape(of)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise Refused(f"CHANGELOG.md: the section `## [{of}]` is missing or empty")
    return found[1].strip() + "\n"


def agreed(tag: str | None) -> str:
    """Return the version. Raises Refused if package, chart, changelog and tag do not have the same one.

    tag: the tag of the release; None checks neither the tag nor the date in the changelog."""
    here = version()
    chart = yaml.safe_load((ROOT / "helm/gputally/Chart.yaml").read_text("utf-8"))
    others = {
        "Chart.yaml: version": chart["version"], "Chart.yaml: appVersion": chart["appVersion"],
        "gputally/base/version.py": __version__,
    }  # fmt: skip
    for name, found in others.items():
        if found != here:
            raise Refused(f"{name} is {found}, but the version in pyproject.toml is {here}")
    if tag is not None:
        if tag != f"v{here}":
            raise Refused(f"the tag is {tag}, but the version in pyproject.toml is {here}: expected v{here}")
        changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
        if re.search(rf"^## \[{re.escape(here)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE) is None:
            raise Refused(f"CHANGELOG.md: `## [{here}]` has no date; write `## [{here}] - YYYY-MM-DD`")
    return here


def write_notes() -> None:
    text = notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version())
    (DIST / "release-notes.md").write_text(text, "utf-8")


def build_package() -> None:
    """Build wheel and source, and check that PyPI can show their descriptions."""
    run(BIN / "uv", "build", "--quiet", "--out-dir", DIST)
    twine = (BIN / "uv", "run", "--quiet", "--isolated", "--frozen", "--only-group", "release", "twine")
    run(*twine, "check", "--strict", *sorted(DIST.glob("*.whl")), *sorted(DIST.glob("*.tar.gz")))


def write_libraries() -> None:
    """Write the list of each image's libraries, with hashes, for machines without a container engine."""
    for image in IMAGES:
        _export_lock(DIST / f"{image}-requirements.txt", "--only-group", image)


def _export_lock(target: Path, *options: str) -> None:
    """Write the locked libraries that the options of `uv export` select as a requirements file."""
    run(BIN / "uv", "export", "--quiet", "--frozen", "--no-emit-project", *options, "--output-file", target)


def run_the_demo() -> None:
    """Install the wheel in an empty environment outside the checkout, and run the demo there."""
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder) / "locked.txt"
        _export_lock(locked, "--no-dev", "--no-hashes")
        run(BIN / "uv", "venv", "--quiet", f"{folder}/venv")
        python = f"{folder}/venv/bin/python"
        run(BIN / "uv", "pip", "install", "--quiet", "--python", python, "--constraints", locked, wheel)
        clean = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV"), "")
        said = run(f"{folder}/venv/bin/gputally", "demo", "--once", "--days", "1", cwd=Path(folder), **clean)
        if "ledger equals truth" not in said:
            raise Refused(f"the demo from the wheel ended without `ledger equals truth`:\n{said[-1000:]}")


def build_images() -> None:
    run("sh", "scripts/images.sh", VENV=os.path.relpath(BIN.parent, ROOT))


def write_bills() -> None:
    """Write a bill of materials for each image."""
    run("sh", "scripts/sbom.sh", DIST, VENV=os.path.relpath(BIN.parent, ROOT))


def package_chart() -> None:
    """Lint the chart, package it, and render the package."""
    helm = Path(run("sh", "scripts/clients.sh").strip()) / "helm"
    chart = ROOT / "helm/gputally"
    values = ("--set", "image.registry=registry.example/gputally")
    run(helm, "lint", "--strict", *values, chart)
    run(helm, "package", "--destination", DIST, chart)
    package = DIST / f"gputally-{version()}.tgz"
    with tarfile.open(package) as opened:
        if "gputally/values.schema.json" not in opened.getnames():
            raise Refused(f"{package.name} has no values.schema.json")
    kinds = {
        document["kind"]
        for document in yaml.safe_load_all(run(helm, "template", "gputally", package, *values))
        if document
    }
    if not {"DaemonSet", "StatefulSet", "Deployment"} <= kinds:
        raise Refused(
            f"{package.name} must render a DaemonSet, a StatefulSet and a Deployment, but renders only "
            + ", ".join(sorted(kinds))
        )
    package.rename(DIST / f"gputally-chart-{version()}.tgz")


def lint_workflows() -> None:
    actionlint = Path(run("sh", "scripts/clients.sh").strip()) / "actionlint"
    run(actionlint, "-no-color", *sorted((ROOT / ".github/workflows").glob("*.yaml")))


STEPS: dict[str, tuple[str, Callable[[], None]]] = {
    "notes": ("release notes from CHANGELOG.md", write_notes),
    "package": ("wheel and source; twine check", build_package),
    "reference": ("reference: HTTP API, commands, metrics, values of the chart", reference_pages.write_reference),
    "libraries": ("libraries of each image, with hashes", write_libraries),
    "demo": ("the demo from the wheel, in an empty environment", run_the_demo),
    "images": ("three images", build_images),
    "bills": ("bills of materials", write_bills),
    "chart": ("chart: lint, package, render the package", package_chart),
    "workflows": ("workflows: actionlint", lint_workflows),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check everything. Return 1, and print the reason, if this state cannot be released."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tag", help="Tag of the release; must be v and the version, and the changelog must have a date."
    )
    parser.add_argument("--without", default="", help=f"Steps to leave out, separated by commas: {', '.join(STEPS)}.")
    asked = parser.parse_args(argv)
    without = {name for name in asked.without.split(",") if name}
    if unknown := without - STEPS.keys():
        parser.error(f"--without: there is no step {', '.join(sorted(unknown))}; the steps are {', '.join(STEPS)}")
    console = Console(highlight=False, soft_wrap=True)
    try:
        console.print(f"gputally {agreed(asked.tag)}", style="bold")
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for name, (what, step) in STEPS.items():
            if name in without:
                console.print(f"  [dim]-  {what}: left out[/dim]")
                continue
            begin = time.monotonic()
            with console.status(what):
                step()
            console.print(f"  ✓  {what} [dim]{time.monotonic() - begin:.0f} s[/dim]")
    except Refused as refused:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"release: {refused}")
        return 1
    table = Table("File in dist/", "Bytes", "SHA-256", box=None, header_style="bold")
    table.columns[1].justify = "right"
    for path in sorted(DIST.rglob("*")):
        if path.name != ".gitignore" and path.is_file():
            table.add_row(
                str(path.relative_to(DIST)),
                f"{path.stat().st_size:,}",
                hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
