"""The tutorials, word by word: their files, installed as a package of another author, pass the suite of their seam."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.code_blocks import PAGES

ROOT = Path(__file__).parents[2]
_UV = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
MOST_LINES = 150
TUTORIALS = sorted(page for page in PAGES if page.startswith("docs/plugins/"))
DELIVERIES = """
from pathlib import Path
from accountant.notifications.subscriptions import DeliveriesFile
from gputally.server.config_loading import load_yaml
print([one.channel.name for one in load_yaml(Path("deliveries.yaml"), DeliveriesFile).destinations.values()])
"""


class Built(NamedTuple):
    """What a tutorial builds.

    command: words after `python` that use the plug-in as the page says.
    shows: a text that this prints."""

    seam: str
    name: str
    command: tuple[str, ...]
    shows: str


BUILT = {
    "docs/plugins/channel.md": Built("gputally.channels", "ntfy", ("-c", DELIVERIES), "['ntfy']"),
    "docs/plugins/export.md": Built("gputally.exports", "journal", ("-m", "gputally", "report", "--help"), "journal>"),
    "docs/plugins/gpu-reader.md": Built(
        "gputally.gpu_readers",
        "jsonl",
        ("-m", "agent", "run", "--standalone", "--once", "--gpu-readers", "jsonl=gpus.jsonl"),
        "Tensor One",
    ),
    "docs/plugins/scheduler.md": Built(
        "gputally.schedulers", "lanes", ("-m", "gputally", "fairshare", "check", "policy.yaml"), "2 queues"
    ),
    "docs/plugins/history.md": Built(
        "gputally.histories", "csv", ("-m", "gputally", "import", "csv", "--help"), "GPUs of each node"
    ),
}


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
    built = BUILT[page]
    listed = json.loads(call(folder, site, "-m", "gputally", "plugins", "--output", "json"))
    (found,) = [one for one in listed if (one["seam"], one["name"]) == (built.seam, built.name)]
    assert found["fault"] == ""
    told = call(folder, site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-c", "pyproject.toml")
    assert " passed" in told
    assert built.shows in call(folder, site, *built.command)
