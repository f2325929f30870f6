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

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
IMAGES = ("agent", "accountant", "fairshare")
BIN = Path(sys.executable).parent


class Refused(Exception):
    """The reason why this state cannot be released."""


def run(*words: object, cwd: Path = ROOT, **more: str) -> str:
    """Return a command's standard output. Raises Refused with the end of its output."""
    command = [str(word) for word in words]
    done = subprocess.run(  # noqa: S603 - our own programs
        command, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise Refused(f"{' '.join(command[:3])}: exit {done.returncode}\n{said}")
    return done.stdout


def version() -> str:
    """The version in pyproject.toml."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return found


def notes(changelog: str, of: str) -> str:
    """The section of one version, without its heading. Raises Refused where there is none, or an empty one."""
    found = re.search(rf"^## \[{re.escape(of)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise Refused(f"CHANGELOG.md: no section `## [{of}]` with anything in it")
    return found[1].strip() + "\n"


def agreed(tag: str | None) -> str:
    """The one version of package, chart, changelog and tag. Raises Refused."""
    here = version()
    chart = yaml.safe_load((ROOT / "helm/gputally/Chart.yaml").read_text("utf-8"))
    for name, found in (("Chart.yaml: version", chart["version"]), ("Chart.yaml: appVersion", chart["appVersion"])):
        if found != here:
            raise Refused(f"{name} is {found}, pyproject.toml says {here}")
    if tag is not None:
        if tag != f"v{here}":
            raise Refused(f"the tag is {tag}, pyproject.toml says {here}: expected v{here}")
        changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
        if re.search(rf"^## \[{re.escape(here)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE) is None:
            raise Refused(f"CHANGELOG.md: `## [{here}]` has no date")
    return here


def write_notes() -> None:
    text = notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version())
    (DIST / "release-notes.md").write_text(text, "utf-8")


def build_package() -> None:
    """Wheel and source, with descriptions that PyPI can show."""
    run(BIN / "uv", "build", "--quiet", "--out-dir", DIST)
    twine = (BIN / "uv", "run", "--quiet", "--isolated", "--frozen", "--only-group", "release", "twine")
    run(*twine, "check", "--strict", *sorted(DIST.glob("*.whl")), *sorted(DIST.glob("*.tar.gz")))


def write_libraries() -> None:
    """For machines without a container engine: the libraries of each image, with hashes."""
    for image in IMAGES:
        target = DIST / f"{image}-requirements.txt"
        run(
            BIN / "uv",
            "export",
            "--quiet",
            "--frozen",
            "--no-emit-project",
            "--only-group",
            image,
            "--output-file",
            target,
        )


def run_the_demo() -> None:
    """The wheel alone in an empty environment, away from the checkout."""
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder) / "locked.txt"
        run(
            BIN / "uv",
            "export",
            "--quiet",
            "--frozen",
            "--no-dev",
            "--no-emit-project",
            "--no-hashes",
            "--output-file",
            locked,
        )
        run(BIN / "uv", "venv", "--quiet", f"{folder}/venv")
        python = f"{folder}/venv/bin/python"
        run(BIN / "uv", "pip", "install", "--quiet", "--python", python, "--constraints", locked, wheel)
        clean = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV"), "")
        said = run(f"{folder}/venv/bin/gputally", "demo", "--once", "--days", "1", cwd=Path(folder), **clean)
        if "ledger equals truth" not in said:
            raise Refused(f"the demo of the wheel ended without its checks:\n{said[-1000:]}")


def build_images() -> None:
    run("sh", "scripts/images.sh", VENV=os.path.relpath(BIN.parent, ROOT))


def write_bills() -> None:
    """Bills of materials of the images."""
    run("sh", "scripts/sbom.sh", DIST, VENV=os.path.relpath(BIN.parent, ROOT))


def package_chart() -> None:
    """Lint the chart, package it, and render the package as it is."""
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
        raise Refused(f"{package.name} renders {', '.join(sorted(kinds))}")
    package.rename(DIST / f"gputally-chart-{version()}.tgz")


def lint_workflows() -> None:
    actionlint = Path(run("sh", "scripts/clients.sh").strip()) / "actionlint"
    run(actionlint, "-no-color", *sorted((ROOT / ".github/workflows").glob("*.yaml")))


STEPS: dict[str, tuple[str, Callable[[], None]]] = {
    "notes": ("release notes from CHANGELOG.md", write_notes),
    "package": ("wheel and source; twine check", build_package),
    "libraries": ("libraries of each image, with hashes", write_libraries),
    "demo": ("the demo from the wheel, in an empty environment", run_the_demo),
    "images": ("three images", build_images),
    "bills": ("bills of materials", write_bills),
    "chart": ("chart: lint, package, render the package", package_chart),
    "workflows": ("workflows: actionlint", lint_workflows),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 names what keeps this state from being released."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tag", help="the tag that is released: it has to be v and the version, and the changelog dated"
    )
    parser.add_argument("--without", default="", help=f"steps to leave out, separated by commas: {', '.join(STEPS)}")
    asked = parser.parse_args(argv)
    without = {name for name in asked.without.split(",") if name}
    if unknown := without - STEPS.keys():
        parser.error(f"--without: no step {', '.join(sorted(unknown))}; one of {', '.join(STEPS)}")
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
    for path in sorted(DIST.iterdir()):
        if path.name != ".gitignore":
            table.add_row(path.name, f"{path.stat().st_size:,}", hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
