"""The content of the images by the lock file, and their bills of materials."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.images.locked_packages import MOST_OF_THE_AGENT_MB, ROOT, _uv, locked


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
