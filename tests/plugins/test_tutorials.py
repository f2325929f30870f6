"""The tutorials, word by word: their files, installed as a package of another author, pass the suite of their seam."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code_blocks import PAGES

ROOT = Path(__file__).parents[2]
_UV = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
MOST_LINES = 150
TUTORIALS = sorted(page for page in PAGES if page.startswith("docs/plugins/"))


def lines_of_code(folder: Path) -> int:
    texts = [path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".toml")]
    return sum(1 for text in texts for line in text.splitlines() if line.strip())


def call(folder: Path, site: Path, *arguments: str) -> str:
    """Run Python in the folder, with the installed package, and return its output."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_builds_a_plugin_that_passes_the_suite(page: str, tmp_path: Path) -> None:
    folder, site = tmp_path / "package", tmp_path / "site"
    folder.mkdir()
    for block in PAGES[page]:
        if block.words and "." in block.words[0]:
            (folder / block.words[0]).write_text(block.text)
    assert lines_of_code(folder) <= MOST_LINES
    subprocess.run(
        [_UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(site), str(folder)],
        check=True,
    )
    seam, name = Path(page).stem + "s", "ntfy"
    listed = json.loads(call(folder, site, "-m", "gputally", "plugins", "--output", "json"))
    (found,) = [one for one in listed if one["name"] == name]
    assert (found["seam"], found["fault"]) == (f"gputally.{seam}", "")
    told = call(folder, site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-c", "pyproject.toml")
    assert " passed" in told
    read = "from pathlib import Path; from gputally.server.config_loading import load_yaml; "
    read += "from accountant.notifications.subscriptions import DeliveriesFile; "
    read += "print([d.channel.name for d in load_yaml(Path('deliveries.yaml'), DeliveriesFile).destinations.values()])"
    assert call(folder, site, "-c", read) == f"['{name}']\n"
