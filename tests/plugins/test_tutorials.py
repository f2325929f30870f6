"""The tutorials, word by word, and the examples: installed as packages of other authors, they pass the suites of their
seams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.code_blocks import PAGES
from tests.plugins.tutorial_packages import TUTORIALS, UV, write

ROOT = Path(__file__).parents[2]
MOST_LINES = 150
EXAMPLES = ("datev",)
DELIVERIES = """
from pathlib import Path
from accountant.notifications.subscriptions import DeliveriesFile
from gputally.server.config_loading import load_yaml
print([one.channel.name for one in load_yaml(Path("deliveries.yaml"), DeliveriesFile).destinations.values()])
"""


HOLDERS = """
from agent.core.readings import Gpu
from agent.core.settings import AgentSettings
from agent.holders.chosen import open_holders
from agent.holders.protocol import NodeSurroundings
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock
clock = SystemClock()
node = NodeSurroundings("n", clock, BackgroundTasks(clock), AgentSettings(gpu_sharing="vgpu"))
_, source = open_holders("vms=vms.json", node)
print([one.holder.name for one in source.read(0, [Gpu("GPU-2f6c", 0, "H100", 81_920)]).allocations])
"""


class Built(NamedTuple):
    """What a tutorial builds.

    command: words after `python` that use the plug-in as the page says.
    shows: a text that this prints.
    needs: the seam and name of another plug-in without which the command cannot be tried."""

    seam: str
    name: str
    command: tuple[str, ...]
    shows: str
    needs: tuple[str, str] | None = None


BUILT = {
    "docs/plugins/channel.md": Built("gputally.channels", "ntfy", ("-c", DELIVERIES), "['ntfy']"),
    "docs/plugins/engine.md": Built(
        "gputally.engines", "apart", ("-m", "gputally", "fleet", "clusters", "--help"), "|apart"
    ),
    "docs/plugins/export.md": Built("gputally.exports", "journal", ("-m", "gputally", "report", "--help"), "journal>"),
    "docs/plugins/gpu-reader.md": Built(
        "gputally.gpu_readers",
        "jsonl",
        ("-m", "agent", "run", "--holders=processes", "--once", "--gpu-readers", "jsonl=gpus.jsonl"),
        "Tensor One",
        needs=("gputally.holders", "processes"),
    ),
    "docs/plugins/holder.md": Built("gputally.holders", "vms", ("-c", HOLDERS), "vm-7"),
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


def install_and_prove(folder: Path, site: Path, seam: str, name: str) -> set[tuple[str, str]]:
    """Install the package of the folder, which has a plug-in of this name, and run its tests. Returns seam and name of
    all plug-ins that are there."""
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(site), str(folder)],
        check=True,
    )
    listed = json.loads(call(folder, site, "-m", "gputally", "plugins", "--output", "json"))
    (found,) = [one for one in listed if (one["seam"], one["name"]) == (seam, name)]
    assert found["fault"] == ""
    # Without a folder of its own, pytest deletes what earlier runs on this machine left: minutes after a large one.
    own = ("-p", "no:cacheprovider", "-n", "0", "-c", "pyproject.toml", f"--basetemp={site.parent / 'pytest'}")
    assert " passed" in call(folder, site, "-m", "pytest", "-q", *own)
    return {(one["seam"], one["name"]) for one in listed}


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_builds_a_plugin_that_passes_the_suite(page: str, tmp_path: Path) -> None:
    folder, site = tmp_path / "package", tmp_path / "site"
    write(page, folder)
    assert lines_of_code(folder) <= MOST_LINES
    (tried,) = [block.text for block in PAGES[page] if block.words == ("tutorial",)]
    assert "gputally[testing]" in tried.partition("-m pytest")[0], "gputally alone does not install pytest"
    built = BUILT[page]
    there = install_and_prove(folder, site, built.seam, built.name)
    if built.needs is not None and built.needs not in there:
        return
    for file in folder.iterdir():
        file.touch()  # readings are old after a minute, which the suite may take
    assert built.shows in call(folder, site, *built.command)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_package_of_its_own_that_passes_the_suite(example: str, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(ROOT / "examples/plugins" / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    ((seam, points),) = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"].items()
    (name,) = points
    install_and_prove(folder, tmp_path / "site", seam, name)
