"""What the images will hold, read off the lock file; and their bills of materials."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker

ROOT = Path(__file__).parents[2]
MOST_OF_THE_AGENT_MB = 60


def _uv() -> str:
    return shutil.which("uv") or str(Path(sys.executable).parent / "uv")


@functools.cache
def locked(extra: str) -> dict[str, str]:
    """Name -> version of everything an image of this extra holds on this platform."""
    export = [_uv(), "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes", "--no-annotate"]
    done = subprocess.run([*export, "--extra", extra], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; (.+))?", line.strip())
        if match and (match[3] is None or _applies(match[3])):
            found[match[1]] = match[2]
    return found


def _applies(marker: str) -> bool:
    """Images are Linux and CPython 3.11 or newer; the markers of the lock ask for nothing finer."""
    return Marker(marker).evaluate({"python_version": "3.11", "python_full_version": "3.11.2"})


def test_what_the_agent_imports_is_small() -> None:
    size = 0
    for name in locked("agent"):
        for file in metadata.files(name) or ():
            path = Path(str(file.locate()))
            if path.suffix != ".pyc" and path.exists():
                size += path.stat().st_size
    assert size, "nothing of it is installed"
    # Compiled modules come on top in an image: about as much again.
    assert size * 2 <= MOST_OF_THE_AGENT_MB * 1_000_000, f"{size / 1e6:.0f} MB"


def test_only_the_agent_does_without_the_heavy_ones() -> None:
    assert not {"duckdb", "pandas", "numpy", "pyarrow", "fastapi", "pydantic", "kubernetes", "typer"} & set(
        locked("agent")
    )
    assert {"duckdb", "fastapi", "kubernetes"} <= set(locked("accountant"))
    assert "duckdb" not in locked("fairshare")


@pytest.mark.parametrize("image", ["agent", "accountant", "fairshare"])
def test_a_bill_of_materials_lists_what_is_locked(image: str, tmp_path: Path) -> None:
    script = ["sh", str(ROOT / "scripts" / "sbom.sh"), str(tmp_path), image]
    subprocess.run(script, check=True, capture_output=True, env={"PATH": f"{Path(_uv()).parent}:/usr/bin:/bin"})
    bill = json.loads((tmp_path / f"gputally-{image}.cdx.json").read_text("utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert set(locked(image).items()) <= {(part["name"], part["version"]) for part in bill["components"]}
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"])
